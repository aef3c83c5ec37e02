"""Check any attention: inputs drawn by Hypothesis, properties that hold, and errors measured against the bound.

A `Recipe` is a problem in a few words: sizes, mask, how the operands lie in memory, a seed. `problems` draws recipes,
and each check asks one thing of an attention for a recipe, and raises AssertionError where it does not hold::

    from hypothesis import given
    from cuflash import testing

    @given(testing.problems(dtypes=["float32"]))
    def test_mine(recipe):
        testing.check_bound(my_attention, recipe)

``my_attention(q, k, v, *, scale, causal, window, return_lse)`` behaves as `cuflash.forward` does. Checks take, after
it and the recipe, ``xp`` (numpy or cupy: whose arrays to pass) and ``path`` (whose constants the bound uses, by
default "numpy <dtype>" or "portable <dtype>"). `forward_checks`, `gradient_checks` and, for `CacheRecipe`s,
`decode_checks` and `prefill_checks` (those of forward on such caches) hold them all. There is no tolerance here:
everything is judged by `cuflash.bounds`, or by bits.
"""

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from . import bounds, reference
from ._api import backward, merge, quantize
from ._dtypes import ELEMENTS

DTYPES = tuple(ELEMENTS)
LAYOUTS = ("contiguous", "swapped", "broadcast", "missing", "offset", "reversed", "stepped", "strided")
LENGTHS = (1, 0, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
HEAD_DIMS = (1, 8, 16, 32, 33, 64, 96, 128)
HEADS = ((1, 1), (2, 2), (2, 1), (3, 1), (4, 2), (5, 1))  # of q, of k and v
BATCHES = ((), (1,), (2,), (3,), (2, 1), (0,))
SCALES = (None, 1.0, 0.0, -0.25, 0.01)
PLANTED = 6.0  # size of a planted key, along the row's query


# Recipes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """A problem from which its arrays can be made again.

    Attributes
    ----------
    batch : tuple of int
        Leading axes.
    heads, key_heads, queries, keys, head_dim, value_dim : int
        Sizes.
    dtype : str
        Of q, k and v.
    causal, window, scale
        Keywords of `cuflash.forward`.
    q, k, v : str
        How each lies in memory, one of ``LAYOUTS``: in C order; "swapped", a (..., length, heads, dim) buffer with
        axes swapped; "broadcast", leading axes of stride 0; "missing", no leading axes; "offset", base one element
        off 16 bytes; rows "reversed" (negative stride) or "stepped" (every second); "strided", every second element of
        the last axis. Gaps hold NaN.
    seed : int
        Of the numbers, which are standard normal.
    planted : bool
        Whether the last key that a certain row sees, and the first that it does not, are large where it looks.

    Examples
    --------
    >>> recipe = Recipe(queries=2, keys=3, causal=True)
    >>> q, k, v = recipe.arrays()
    >>> q.shape, recipe.mask.tolist()
    ((1, 2, 8), [[True, True, False], [True, True, True]])
    """

    batch: tuple = ()
    heads: int = 1
    key_heads: int = 1
    queries: int = 1
    keys: int = 1
    head_dim: int = 8
    value_dim: int = 8
    dtype: str = "float32"
    causal: bool | str = False
    window: tuple | None = None
    scale: float | None = None
    q: str = "contiguous"
    k: str = "contiguous"
    v: str = "contiguous"
    seed: int = 0
    planted: bool = False

    @property
    def keywords(self):
        """Keywords of the call."""
        return {"scale": self.scale, "causal": self.causal, "window": self.window}

    @property
    def mask(self):
        """Which keys each row sees, (queries, keys) of bool."""
        return reference.visible(self.queries, self.keys, causal=self.causal, window=self.window)

    @property
    def row(self):
        """A row to look at, chosen by the seed; 0 where there is none."""
        return self.seed % max(self.queries, 1)

    def arrays(self, xp=np):
        """q, k and v, arrays of ``xp``."""
        q, k, v = self.values()
        return tuple(lay_out(x, layout, xp, self.batch) for x, layout in ((q, self.q), (k, self.k), (v, self.v)))

    def dout(self, xp=np):
        """A gradient of out, in C order."""
        batch = np.broadcast_shapes(*(x.shape[:-3] for x in self.arrays()))
        return xp.asarray(self.normal(3, (*batch, self.heads, self.queries, self.value_dim)))

    def normal(self, stream, shape):
        """Standard normal numbers, a NumPy array."""
        return np.random.default_rng([self.seed, stream]).standard_normal(shape).astype(ELEMENTS[self.dtype].dtype)

    def values(self):
        """q, k and v as NumPy arrays in C order, those broadcast or missing without leading axes."""
        shapes = (
            (self.heads, self.queries, self.head_dim),
            (self.key_heads, self.keys, self.head_dim),
            (self.key_heads, self.keys, self.value_dim),
        )
        q, k, v = (
            self.normal(stream, shape if layout in ("broadcast", "missing") else (*self.batch, *shape))
            for stream, (shape, layout) in enumerate(zip(shapes, (self.q, self.k, self.v), strict=True))
        )
        if self.planted and q.size and k.size:
            j = np.flatnonzero(self.mask[self.row])
            places = [] if not j.size else [(j[-1], 1), (j[-1] + 1 if j[-1] + 1 < self.keys else j[0] - 1, 2)]
            for place, factor in places:
                if place >= 0:
                    k[..., place, :] = factor * PLANTED * np.sign(q.reshape(-1, *q.shape[-2:])[0, self.row])
                    v[..., place, :] *= 16
        return q, k, v


def lay_out(values, layout, xp=np, batch=()):
    """A copy of a NumPy array (..., heads, length, dim) as an array of ``xp`` that lies in memory as told."""
    if layout == "broadcast":
        return xp.broadcast_to(xp.asarray(values), (*batch, *values.shape[-3:]))
    if layout == "swapped":
        return xp.asarray(np.ascontiguousarray(values.swapaxes(-3, -2))).swapaxes(-3, -2)
    if layout == "offset":
        buffer = xp.empty(values.size + 16, values.dtype)
        pointer = buffer.ctypes.data if xp is np else buffer.data.ptr
        start = -pointer % 16 // values.itemsize + 1
        view = buffer[start : start + values.size].reshape(values.shape)
        view[...] = xp.asarray(values)
        return view
    steps = {"reversed": (-1, 1), "stepped": (2, 1), "strided": (1, 2)}.get(layout, (1, 1))
    index = (..., *(slice(None, None, step) for step in steps))
    lengths = (n * abs(step) for n, step in zip(values.shape[-2:], steps, strict=True))
    buffer = np.full((*values.shape[:-2], *lengths), _garbage((np.nan,), values.dtype)[0], values.dtype)
    buffer[index] = values
    return xp.asarray(buffer)[index]


def _masks(max_length):
    side = st.none() | st.sampled_from((0, 1, 2, 15, 16, 17, 63, 64, 65)) | st.integers(0, max_length)
    return st.sampled_from((False, True, "top-left", "bottom-right")), st.none() | st.tuples(side, side)


@st.composite
def problems(draw, *, dtypes=DTYPES, max_length=160, max_head_dim=256, layouts=LAYOUTS):
    """A Hypothesis strategy of recipes.

    Parameters
    ----------
    dtypes : sequence of str
        Any of "float16", "bfloat16", "float32", "float64".
    max_length : int, default 160
        Most queries and keys. Drawn lengths lean to 0, 1 and the edges of tiles.
    max_head_dim : int, default 256
        Largest head_dim and value_dim.
    layouts : sequence of str
        Of the operands in memory, see `Recipe`.

    Returns
    -------
    strategy of Recipe
        A failing recipe shrinks to short sequences, one head, no mask, arrays in C order.
    """
    length = st.sampled_from([n for n in LENGTHS if n <= max_length]) | st.integers(0, max_length)
    few = st.sampled_from([n for n in HEAD_DIMS if n <= max_head_dim])
    head_dim = few | few | st.integers(1, max_head_dim)
    layout = st.sampled_from(layouts)
    causal, window = _masks(max_length)
    queries, (heads, key_heads), width = draw(length), draw(st.sampled_from(HEADS)), draw(head_dim)
    return Recipe(
        batch=draw(st.sampled_from(BATCHES)),
        heads=heads,
        key_heads=key_heads,
        queries=queries,
        keys=draw(st.just(queries) | length),
        head_dim=width,
        value_dim=draw(st.just(width) | head_dim),
        dtype=draw(st.sampled_from(dtypes)),
        causal=draw(causal),
        window=draw(window),
        scale=draw(st.sampled_from(SCALES)),
        q=draw(layout),
        k=draw(layout),
        v=draw(layout),
        seed=draw(st.integers(0, 2**16)),
        planted=draw(st.booleans()),
    )


# Recipes of decode ------------------------------------------------------------------------------------------------

PAGE_SIZES = (None, None, None, 1, 2, 16, 7, 48, 64, 300)
CACHE_FORMATS = (None, "int8", "e4m3")
CACHE_SCALES = ("slot", "head", None)
FEW_ROWS = (1, 1, 1, 1, 1, 2, 2, 3, 5, 16, 17, 40, 0)  # of decode
MANY_ROWS = (1, 2, 7, 16, 33, 64, 65, 127, 128, 130, 0)  # of forward
CACHE_LAYOUTS = ("contiguous", "swapped", "offset", "strided", "reversed", "stepped")


@dataclass(frozen=True)
class CacheRecipe:
    """A problem of `cuflash.decode` from which its arrays can be made again.

    Attributes
    ----------
    lengths : tuple of int
        Keys of each sequence, before an append.
    append : bool
        Whether the call appends ``queries`` keys to each sequence.
    spare : int
        Keys that a cache has room for beyond the longest.
    page_size : int or None
        None: in one piece.
    heads, key_heads, queries, head_dim, value_dim : int
        Sizes.
    dtype : str
        Of q and the caches.
    rotary : int
        Pairs of columns that are rotated, or all that ``head_dim`` has if these are fewer.
    rotary_interleaved, causal, window, scale, splits, batch_invariant
        Keywords of `cuflash.decode`.
    kv_format : {None, "int8", "e4m3"}
        Of the caches; None: they are of q's dtype.
    latent : bool
        Whether the values are the first columns of the keys: ``v_cache`` is ``k_cache[..., :value_dim]``. Nothing is
        appended to such a cache.
    k_scale, v_scale : {None, "head", "slot"}
        What scales 8-bit caches have.
    q, k, v, rows : str
        How each lies in memory, as in `Recipe`; scales lie as their cache does, ``rows`` is both k_new and v_new. What
        no sequence owns holds NaN, or what comes nearest: keys beyond a length, a page that is nobody's. Entries of
        the page table that nothing needs are numbers of no page.
    integers, angles : str
        dtype of lengths and page table; of cos and sin.
    seed : int
        Of the numbers and of the order of pages.
    planted : bool
        Whether the last key of a sequence is large where its last query looks.

    Examples
    --------
    >>> recipe = CacheRecipe(lengths=(3, 0), page_size=2)
    >>> q, k, v, tables = recipe.arrays()
    >>> k.shape, tables["page_table"].shape
    ((5, 1, 2, 8), (2, 2))
    """

    lengths: tuple = (1,)
    append: bool = False
    spare: int = 0
    page_size: int | None = None
    heads: int = 1
    key_heads: int = 1
    queries: int = 1
    head_dim: int = 8
    value_dim: int = 8
    dtype: str = "float16"
    rotary: int = 0
    rotary_interleaved: bool = False
    causal: bool | str = True
    window: tuple | None = None
    scale: float | None = None
    splits: int | None = None
    batch_invariant: bool = False
    kv_format: str | None = None
    latent: bool = False
    k_scale: str | None = None
    v_scale: str | None = None
    q: str = "contiguous"
    k: str = "contiguous"
    v: str = "contiguous"
    rows: str = "contiguous"
    integers: str = "int32"
    angles: str = "float32"
    seed: int = 0
    planted: bool = False

    @property
    def keywords(self):
        """Keywords of the call that say what is to be computed."""
        more = {"kv_format": self.kv_format} if self.kv_format else {}
        return {"scale": self.scale, "causal": self.causal, "window": self.window, **more}

    @property
    def splitting(self):
        """Keywords of the call that say how."""
        return {"splits": self.splits, "batch_invariant": self.batch_invariant}

    @property
    def totals(self):
        """Keys of each sequence when the call has appended to it."""
        return tuple(length + self.append * self.queries for length in self.lengths)

    @property
    def pairs(self):
        """Pairs of columns that are rotated."""
        return min(self.rotary, self.head_dim // 2)

    @property
    def capacity(self):
        """Keys that a sequence has room for."""
        most, size = max(self.totals, default=0) + self.spare, self.page_size or 1
        return -(-most // size) * size

    @property
    def written(self):
        """The same caches, where the new keys have been written before the call."""
        totals = self.totals
        return replace(self, lengths=totals, append=False, spare=self.capacity - max(totals, default=0))

    def mask(self, b):
        """Which keys each row of a sequence sees."""
        return reference.visible(self.queries, self.totals[b], causal=self.causal, window=self.window)

    def values(self):
        """q, the caches in one piece, new keys in their places, and, of 8-bit ones, a dict of their scales.

        NumPy arrays in C order; beyond a length caches of 16 bits or more hold 0.
        """
        sequences, rng = len(self.lengths), np.random.default_rng(self.seed)
        shapes = (
            (sequences, self.heads, self.queries, self.head_dim),
            (sequences, self.key_heads, self.capacity, self.head_dim),
            (sequences, self.key_heads, self.capacity, self.value_dim),
        )
        q, k, v = (rng.standard_normal(shape).astype(ELEMENTS[self.dtype].dtype) for shape in shapes)
        for b, total in enumerate(self.totals):
            if self.planted and total and q.size:
                k[b, :, total - 1] = PLANTED * np.sign(q[b, 0, -1])
                v[b, :, total - 1] *= 16
            k[b, :, total:] = v[b, :, total:] = 0
        if self.latent:
            v = k[..., : self.value_dim]
        if self.kv_format is None:
            return q, k, v
        k, k_scale = _quantised(k, self.kv_format, self.k_scale)
        v, v_scale = _quantised(v, self.kv_format, self.v_scale)
        return q, k, v, {name: x for name, x in (("k_scale", k_scale), ("v_scale", v_scale)) if x is not None}

    def spoilt(self, values, garbage):
        """Values in which keys that a certain row of each sequence does not see hold ``garbage``, in turn, and so do
        their scales; and the rows of each sequence that see none of these."""
        q, k, v, *scales = (x.copy() for x in values)
        scales = [{name: x.copy() for name, x in each.items()} for each in scales]
        slots = [x[..., None] for each in scales for x in each.values() if x.ndim > 1]
        row, rows = self.seed % max(self.queries, 1), []
        for b in range(len(self.lengths)):
            mask = self.mask(b)
            hidden = np.flatnonzero(~mask[row]) if self.queries else np.arange(0)
            rows.append(np.flatnonzero(~mask[:, hidden].any(axis=1)))
            for x in (k, v, *slots):
                x[b][:, hidden] = np.resize(_garbage(garbage, x.dtype), (len(hidden), x.shape[-1]))
        return (q, k, v, *scales), rows

    def new(self, values, xp=np):
        """Keywords of the call that append and rotate, arrays of ``xp``."""
        keywords, (_, *caches) = {}, values[:3]
        if self.append:
            for name, cache in zip(("k_new", "v_new"), caches, strict=True):
                parts = [x[:, n : n + self.queries] for x, n in zip(cache, self.lengths, strict=True)]
                parts = np.array(parts, cache.dtype).reshape(len(parts), cache.shape[1], self.queries, cache.shape[3])
                keywords[name] = lay_out(parts, self.rows, xp)
        if self.rotary:
            angles = np.arange(self.capacity)[:, None] * 1e4 ** -(np.arange(self.pairs) / max(self.pairs, 1))
            tables = (f(angles).astype(ELEMENTS[self.angles].dtype) for f in (np.cos, np.sin))
            keywords |= {"rotary": tuple(map(xp.asarray, tables)), "rotary_interleaved": self.rotary_interleaved}
        return keywords

    def meant(self, values):
        """Keywords by which `cuflash.bounds.decode` of such values is what the call computes."""
        return {"lengths": np.array(self.lengths, int)} | _scales_of(values) | self.new(values) | self.keywords

    def arrays(self, xp=np, values=None):
        """q, k_cache, v_cache and a dict of what else the call takes from memory, arrays of ``xp``."""
        values = values or self.values()
        q, *caches = values[:3]
        scales = _scales_of(values)
        slots = {name: x[..., None] for name, x in scales.items() if x.ndim > 1}
        owned = [x.copy() for x in (*caches, *slots.values())]
        for b, length in enumerate(self.lengths):
            for x in owned:
                x[b, :, length:] = _garbage((np.nan,), x.dtype)
        tables = {"lengths": np.array(self.lengths, self.integers)}
        if self.page_size:
            owned, tables["page_table"] = self._paged(owned)
        tables |= {name: xp.asarray(x) for name, x in scales.items() if x.ndim == 1}
        layouts = self.q, self.k, self.v, *({"k_scale": self.k, "v_scale": self.v}[name] for name in slots)
        q, k, v, *slotted = (lay_out(x, layout, xp) for x, layout in zip((q, *owned), layouts, strict=True))
        tables |= {name: x[..., 0] for name, x in zip(slots, slotted, strict=True)}
        v = k[..., : self.value_dim] if self.latent else v
        return q, k, v, {name: xp.asarray(x) for name, x in tables.items()} | self.new(values, xp)

    def _paged(self, caches):
        size, sequences = self.page_size, len(self.lengths)
        count = self.capacity // size
        table = np.random.default_rng(self.seed).permutation(sequences * count + 1)[: sequences * count]
        pages = []
        for cache in caches:
            shape = sequences * count + 1, cache.shape[1], size, cache.shape[3]
            into = np.full(shape, _garbage((np.nan,), cache.dtype)[0], cache.dtype)
            parts = cache.reshape(sequences, cache.shape[1], count, size, cache.shape[3])
            into[table] = parts.swapaxes(1, 2).reshape(sequences * count, *into.shape[1:])
            pages.append(into)
        table = table.reshape(sequences, count).astype(self.integers)
        nowhere = (np.iinfo(self.integers).max, np.iinfo(self.integers).min, sequences * count + 1)
        for b, total in enumerate(self.totals):
            table[b, -(-total // size) :] = nowhere[b % 2] if self.seed % 2 else min(nowhere[2], nowhere[0])
        return pages, table


def _quantised(x, kv_format, scales):
    """A cache's values in a format and their scales: one a slot, one a head, or None, with which they are others.

    Scales are negative at times, those of slots now and then 0."""
    elements, factors = quantize(x, kv_format, axis=(0, 2, 3) if scales == "head" else 3)
    if scales is None:
        return elements, None
    order = np.arange(factors.size).reshape(factors.shape)
    factors = np.where(order % 5 == 1, -factors, factors)
    if scales == "slot":
        factors[order % 31 == 30] = 0
    return elements, factors


def _garbage(garbage, dtype):
    """Values of a dtype that spoil what they meet as far as it can."""
    if dtype == np.uint8:  # E4M3 has no infinities
        return np.array([0x7F if x > 0 or x != x else 0xFF for x in garbage], dtype)
    if dtype == np.int8:
        return np.array([127 if x > 0 or x != x else -128 for x in garbage], dtype)
    return np.array(garbage).astype(dtype)


def _scales_of(values):
    """Scales by name, of values as a `CacheRecipe` has them."""
    return values[3] if len(values) > 3 else {}


def cache_recipe(
    choose, *, dtypes=("float16", "bfloat16"), formats=CACHE_FORMATS, max_length=160, max_head_dim=256, appends=True,
    queries=FEW_ROWS, latent=False,
):  # fmt: skip
    """A `CacheRecipe` of choices, each by ``choose(options)`` from a sequence, of which the first is the simplest.

    With ``latent`` values are columns of keys, which are wider than those of others.
    ``formats`` are those of caches beside queries of 16 bits; ``(None,)`` for an attention that knows no others.
    Without ``appends`` none appends or rotates. ``queries`` are numbers of rows.
    """

    def length():
        return choose(choose(([n for n in LENGTHS if n <= max_length], range(max_length + 1))))

    def width():
        return choose(choose(([n for n in HEAD_DIMS if n <= max_head_dim], range(1, max_head_dim + 1))))

    def value_width():
        return min(choose((512, 512, 256, 1, choose(range(513)))), head_dim) if latent else choose((head_dim, width()))

    causal = choose((True, True, False, "top-left", "bottom-right"))
    side = (None, 0, 1, 15, 16, 17, 40, 64, 65)
    window = (choose(side), choose(side)) if choose((False, False, True)) else None
    lengths = tuple(length() for _ in range(choose((1, 1, 2, 2, 3, 3, 4, 4, 6, 0))))
    page_size, integers = choose(PAGE_SIZES), choose(("int32", "int32", "int64", "uint16", "uint32", "int16"))
    head_dim = choose((576, 576, 320, 257, choose(range(257, 577)))) if latent else width()
    splits, batch_invariant = choose(((None, False), (choose((1, 2, 5, 64)), False), (None, False), (None, True)))
    heads, key_heads = choose((*HEADS, (8, 1), (20, 2), *(((16, 1), (32, 1), (70, 1), (128, 1)) if latent else ())))
    dtype = choose(dtypes)
    kv_format = choose(formats) if dtype in ("float16", "bfloat16") else None
    k_scale, v_scale = (choose(CACHE_SCALES) if kv_format else None for _ in range(2))
    append = choose((False, True)) if appends and kv_format is None and not latent else False
    rotary = choose((0, choose((head_dim // 2, 1, head_dim // 4)))) if appends else 0
    return CacheRecipe(
        lengths=lengths,
        append=append,
        spare=choose((0, 1, 16, 33)),
        page_size=page_size,
        heads=heads,
        key_heads=key_heads,
        queries=choose(queries),
        head_dim=head_dim,
        value_dim=value_width(),
        dtype=dtype,
        rotary=rotary,
        rotary_interleaved=choose((False, True)),
        causal=causal,
        window=window,
        scale=choose(SCALES),
        splits=splits,
        batch_invariant=batch_invariant,
        kv_format=kv_format,
        latent=latent,
        k_scale=k_scale,
        v_scale=v_scale,
        q=choose(CACHE_LAYOUTS),
        k=choose(CACHE_LAYOUTS),
        v=choose(CACHE_LAYOUTS),
        rows=choose(CACHE_LAYOUTS),
        integers=integers,
        angles=choose(("float32", dtype)),
        seed=choose(range(2**16)),
        planted=choose((False, True)),
    )


@st.composite
def caches(draw, **options):
    """A Hypothesis strategy of `CacheRecipe`, with the keywords of `cache_recipe`."""
    return cache_recipe(lambda among: draw(st.sampled_from(among)), **options)


def prefills(**options):
    """The same of recipes for `cuflash.forward`, which neither appends nor knows caches of 8 bits."""
    return caches(**({"formats": (None,), "appends": False, "queries": MANY_ROWS} | options))


def strategy_of(check):
    """The strategy of the recipes that a check takes."""
    return prefills if check in prefill_checks else caches if check in decode_checks else problems


def fuzz(check, attention, *, examples=100, xp=np, path=None, **strategy):
    """Run a check on that many recipes, the same ones each time.

    Parameters
    ----------
    check : function
        One of `forward_checks`, `gradient_checks`, `prefill_checks` or `decode_checks`.
    attention : function
        Behaves as `cuflash.forward`, for the last of them as `cuflash.decode`.
    examples : int
        Recipes to draw.
    xp, path
        As checks take them.
    **strategy
        Keywords of `problems`, or of `caches` or `prefills`.

    Raises
    ------
    AssertionError
        Where the check does not hold, for the smallest recipe found; Hypothesis prints it.
    """

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy_of(check)(**strategy))
    def holds(recipe):
        check(attention, recipe, xp, path)

    holds()


# Comparisons ------------------------------------------------------------------------------------------------------


def assert_attention_close(actual, q, k, v, *, path=None, rows=None, **keywords):
    """Raise unless a result of attention lies within its bound.

    Parameters
    ----------
    actual : array or (out, lse)
        What was computed.
    q, k, v : arrays
        From what.
    path : str or `cuflash.bounds.Path`, optional
        Whose constants the bound uses; by default "portable <dtype>" for CuPy arrays, "numpy <dtype>" else.
    rows : array of int, optional
        The query rows that ``actual`` has, where it does not have all.
    **keywords
        ``scale``, ``causal``, ``window`` of the call.

    Raises
    ------
    AssertionError
        Says which of out and lse, where, what it is, what it should be, and the bound.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x = np.eye(3, dtype=np.float32)
    >>> assert_attention_close(cuflash.forward(x, x, x, causal=True), x, x, x, causal=True)
    >>> assert_attention_close(cuflash.forward(x, x, x), x, x, x, causal=True)
    Traceback (most recent call last):
    ...
    AssertionError: out[0, 1] is 0.26...; exactly 0.0, error 0.26..., bound ...
    """
    bounded = bounds.forward(q, k, v, path=_path(path, q), rows=rows, **keywords)
    out, lse = actual if isinstance(actual, tuple) else (actual, None)
    _assert_within("out", out, bounded.out, bounded.out_bound)
    if lse is not None:
        _assert_within("lse", lse, bounded.lse, bounded.lse_bound)


def _path(path, array):
    if path is not None:
        return path
    return f"{'numpy' if isinstance(array, np.ndarray) else 'portable'} {array.dtype.name}"


def _assert_within(name, actual, exact, bound):
    ratios = bounds.ratio(actual, exact, bound)
    if ratios is None:
        raise AssertionError(f"{name} has shape {actual.shape}; wanted {exact.shape}")
    if not ratios.max(initial=0.0) <= 1:
        place = np.unravel_index(ratios.argmax(), ratios.shape)
        got = float(reference.double(actual)[place])
        raise AssertionError(
            f"{name}[{', '.join(map(str, place))}] is {got:.9g}; exactly {exact[place]:.9}, "
            f"error {abs(got - exact[place]):.3g}, bound {bound[place]:.3g}"
        )


def _assert_alike(name, results, others, zeros_differ=True):
    """Bit for bit; with ``zeros_differ=False``, -0 is 0 and a NaN is a NaN."""
    for part, one, other in zip(("out", "lse"), results, others, strict=True):
        one, other = reference.host(one), reference.host(other)
        if one.shape != other.shape:
            raise AssertionError(f"{name}: {part} has shape {one.shape}; wanted {other.shape}")
        if zeros_differ:
            differ = _bits(one) != _bits(other)
        else:
            differ = (one != other) & ~(np.isnan(one) & np.isnan(other))
        if differ.any():
            place = tuple(map(int, np.argwhere(differ)[0]))
            raise AssertionError(
                f"{name}: {part}{list(place)} is {one[place]!r}; wanted the same bits as {other[place]!r} "
                f"({differ.sum()} of {differ.size} elements differ)"
            )


def _bits(array):
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def _run(attention, recipe, arrays, **changes):
    return attention(*arrays, return_lse=True, **(recipe.keywords | changes))


def _bounded(recipe, arrays, path, **changes):
    return bounds.forward(*arrays, path=_path(path, arrays[0]), **(recipe.keywords | changes))


def _rows(results, rows):
    out, lse = results
    return out[..., rows, :], lse[..., rows]


def _assert_agree(name, results, others, bounded, rows=slice(None)):
    """Two results that have one exact value each within the bound differ by twice the bound at most."""
    limits = bounded.out_bound[..., rows, :], bounded.lse_bound[..., rows]
    for part, one, other, bound in zip(("out", "lse"), results, others, limits, strict=True):
        _assert_within(f"{name}: {part}", one, reference.double(other), 2 * bound)


# Checks of forward ------------------------------------------------------------------------------------------------


def check_bound(attention, recipe, xp=np, path=None):
    """Out and lse lie within the bound, whatever the sizes, mask and layout."""
    arrays = recipe.arrays(xp)
    assert_attention_close(_run(attention, recipe, arrays), *arrays, path=path, **recipe.keywords)


def check_hidden_keys_may_hold_anything(attention, recipe, xp=np, path=None):
    """What a row does not see changes no bit of it if finite, and else leaves it within the bound."""
    q, k, v = recipe.arrays(xp)
    if not recipe.queries:
        return
    mask = recipe.mask
    changed = np.flatnonzero(~mask[recipe.row])
    rows = np.flatnonzero(~mask[:, changed].any(axis=1))  # those that see none of them
    before = _rows(_run(attention, recipe, (q, k, v)), rows)
    largest = float(np.finfo(np.float32).max if recipe.dtype == "bfloat16" else np.finfo(recipe.dtype).max) / 1.01
    for what, garbage in (
        ("finite hidden keys", (largest, -largest)),
        ("NaN in hidden keys", (np.nan, np.nan)),
        ("infinite hidden keys", (np.inf, -np.inf)),
    ):
        k2, v2 = (_refilled(x, changed, garbage, recipe, xp) for x in (k, v))
        after = _rows(_run(attention, recipe, (q, k2, v2)), rows)
        if what.startswith("finite"):
            _assert_alike(what, after, before, zeros_differ=False)
        else:
            try:
                assert_attention_close(after, q, k, v, path=path, rows=rows, **recipe.keywords)
            except AssertionError as error:
                raise AssertionError(f"{what}: {error}") from None


def _refilled(array, places, values, recipe, xp):
    """A C-ordered copy in which the rows ``places`` hold values in turn."""
    copy = reference.host(array).copy()
    copy[..., places, :] = np.resize(values, (len(places), copy.shape[-1])).astype(copy.dtype)
    return xp.asarray(copy)


def check_view_equals_copy(attention, recipe, xp=np, path=None):
    """Strides, broadcasting and alignment change no bit."""
    q, k, v = recipe.arrays(xp)
    batch = np.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    copies = [
        xp.asarray(np.ascontiguousarray(np.broadcast_to(reference.host(x), (*batch, *x.shape[-3:])))) for x in (q, k, v)
    ]
    _assert_alike("view = copy", _run(attention, recipe, (q, k, v)), _run(attention, recipe, copies))


def check_batch_equals_one_by_one(attention, recipe, xp=np, path=None):
    """What else is in the batch changes no bit."""
    q, k, v = recipe.arrays(xp)
    out, lse = _run(attention, recipe, (q, k, v))
    q, k, v = (xp.broadcast_to(x, (*lse.shape[:-2], *x.shape[-3:])) for x in (q, k, v))
    for b in np.ndindex(lse.shape[:-2]):
        _assert_alike(f"batch{list(b)}", (out[b], lse[b]), _run(attention, recipe, (q[b], k[b], v[b])))


def check_rerun(attention, recipe, xp=np, path=None):
    """The same call gives the same bits."""
    arrays = recipe.arrays(xp)
    _assert_alike("rerun", _run(attention, recipe, arrays), _run(attention, recipe, arrays))


def check_causal_prefix(attention, recipe, xp=np, path=None):
    """Under a causal mask, the first rows do not need what comes after them."""
    recipe = replace(recipe, causal="top-left", window=None)
    q, k, v = recipe.arrays(xp)
    n = (min(recipe.queries, recipe.keys) + 1) // 2
    whole = _rows(_run(attention, recipe, (q, k, v)), slice(0, n))
    prefix = _run(attention, recipe, (q[..., :n, :], k[..., :n, :], v[..., :n, :]))
    _assert_agree("causal prefix", prefix, whole, _bounded(recipe, (q, k, v), path), slice(0, n))


def check_window_is_slice(attention, recipe, xp=np, path=None):
    """A row is what attention without a mask makes of the keys it sees."""
    q, k, v = recipe.arrays(xp)
    whole, bounded = _run(attention, recipe, (q, k, v)), _bounded(recipe, (q, k, v), path)
    for i in {0, recipe.row, recipe.queries - 1} if recipe.queries else ():
        sees = np.flatnonzero(recipe.mask[i])
        keys = slice(sees[0], sees[-1] + 1) if sees.size else slice(0, 0)
        alone = _run(
            attention, recipe, (q[..., i : i + 1, :], k[..., keys, :], v[..., keys, :]), causal=False, window=None
        )
        _assert_agree(f"row {i} alone", alone, _rows(whole, slice(i, i + 1)), bounded, slice(i, i + 1))


def check_split_and_merge(attention, recipe, xp=np, path=None):
    """Attention over parts of the keys, merged, is attention over all. A part with lse -inf may hold anything."""
    recipe = replace(recipe, causal=False, window=None)
    q, k, v = recipe.arrays(xp)
    cuts = sorted((recipe.seed % (recipe.keys + 1), recipe.keys // 2))
    operands = [(q, k[..., a:b, :], v[..., a:b, :]) for a, b in zip((0, *cuts), (*cuts, recipe.keys), strict=True)]
    parts = [_run(attention, recipe, part) for part in operands]
    out, lse = parts[0]
    nothing = xp.asarray(np.full(out.shape, np.nan, out.dtype)), xp.asarray(np.full(lse.shape, -np.inf, lse.dtype))
    joined = merge(*zip(*parts, nothing, strict=True))
    exact = _bounded(recipe, (q, k, v), path)
    limits = _merged_bounds(exact, [_bounded(recipe, part, path) for part in operands], _path(path, q))
    for name, array, value, bound in zip(("out", "lse"), joined, (exact.out, exact.lse), limits, strict=True):
        _assert_within(f"merged {name}", array, value, bound)


def _merged_bounds(whole, parts, path):
    """Errors of merged results, from those of the parts.

    A part's weight ``w = exp(lse - total)`` errs by the factor ``1 + t``, ``|t| <= T = expm1(error of its lse and of
    the exponential)``; so, as for one row, out errs by ``sum w ((1 + T) bound + T |part - out|) / (1 - sum w T)``.
    """
    path = bounds.path_of(path)
    out_error, lse_error, spread = np.zeros_like(whole.out), np.zeros_like(whole.lse), np.zeros_like(whole.lse)
    with np.errstate(all="ignore"):
        for part in parts:
            distance = np.where(np.isfinite(part.lse), np.abs(part.lse - whole.lse) + np.abs(part.lse), 0)
            factor = np.expm1(part.lse_bound + 4 * path.u * (1 + distance))
            weight = np.where(np.isfinite(part.lse), np.exp(part.lse - whole.lse), 0)
            moved = (1 + factor)[..., None] * part.out_bound + factor[..., None] * np.abs(part.out - whole.out)
            out_error += weight[..., None] * moved
            spread += weight * factor
        out_error = out_error / (1 - spread)[..., None]
        out_error += (len(parts) + 4) * path.u * sum(np.abs(part.out) + out_error for part in parts)
        lse_error = spread / (1 - spread) + (len(parts) + 4) * path.u * (1 + np.abs(whole.lse)) + path.logarithm
        some = np.isfinite(whole.lse)
        out_error = out_error * (1 + path.u_out) + path.u_out * np.abs(whole.out) + path.least_out
    return np.where(some[..., None], out_error, 0), np.where(some, lse_error, 0)


def check_linear_in_v(attention, recipe, xp=np, path=None):
    """Out of a sum of values is the sum of the outs; lse does not depend on v."""
    q, k, v = recipe.arrays(xp)
    rng = np.random.default_rng(recipe.seed)
    first, second = (rng.integers(-8, 9, v.shape).astype(v.dtype) for _ in range(2))  # whose sums are exact
    values = [xp.asarray(x) for x in (first, second, first + second)]
    results = [_run(attention, recipe, (q, k, x)) for x in values]
    limits = [_bounded(recipe, (q, k, x), path).out_bound for x in values]
    one, other, both = (reference.double(out) for out, _ in results)
    _assert_within("out of a sum of values", both, one + other, sum(limits))
    lses = [lse for _, lse in results]
    _assert_alike("lse of other values", [lses[0]] * 2, lses[1:])


def check_permuted_keys(attention, recipe, xp=np, path=None):
    """Without a mask, the order of keys does not matter."""
    recipe = replace(recipe, causal=False, window=None)
    q, k, v = recipe.arrays(xp)
    order = np.random.default_rng(recipe.seed).permutation(recipe.keys)
    shuffled = [xp.asarray(np.ascontiguousarray(reference.host(x)[..., order, :])) for x in (k, v)]
    results = _run(attention, recipe, (q, k, v)), _run(attention, recipe, (q, *shuffled))
    _assert_agree("permuted keys", *results, _bounded(recipe, (q, k, v), path))


def check_zero_queries_average_v(attention, recipe, xp=np, path=None):
    """Where q is 0, out is the mean of the values a row sees, and lse the logarithm of their number."""
    q, k, v = recipe.arrays(xp)
    q = xp.zeros_like(q)
    out, lse = _run(attention, recipe, (q, k, v))
    bounded = _bounded(recipe, (q, k, v), path)
    count = recipe.mask.sum(axis=1)
    values = np.repeat(reference.double(v), recipe.heads // recipe.key_heads, axis=-3)
    means = (recipe.mask / np.maximum(count, 1)[:, None]) @ values
    with np.errstate(divide="ignore"):
        _assert_within("lse of zero queries", lse, np.broadcast_to(np.log(count), lse.shape), bounded.lse_bound)
    # the two exact means differ by their own roundings in float64
    slack = 2.0**-52 * (recipe.keys + 4) * np.abs(values).max(initial=0)
    _assert_within("out of zero queries", out, np.broadcast_to(means, out.shape), bounded.out_bound + slack)


forward_checks = (
    check_bound,
    check_hidden_keys_may_hold_anything,
    check_view_equals_copy,
    check_batch_equals_one_by_one,
    check_rerun,
    check_causal_prefix,
    check_window_is_slice,
    check_split_and_merge,
    check_linear_in_v,
    check_permuted_keys,
    check_zero_queries_average_v,
)


# Checks of decode -------------------------------------------------------------------------------------------------


def _decoded(decode, recipe, arrays, **changes):
    q, k, v, tables = arrays
    return decode(q, k, v, return_lse=True, **(tables | recipe.keywords | recipe.splitting | changes))


def _assert_decoded(results, recipe, values, path, rows=None):
    """Inside the bound; of sequence b only the rows ``rows[b]``, where given."""
    path = _path(path, results[0])
    exact = bounds.decode(*values[:3], path=path, **recipe.meant(values))
    for part, actual, wanted, limit in zip(
        ("out", "lse"), results, (exact.out, exact.lse), (exact.out_bound, exact.lse_bound), strict=True
    ):
        if rows is None:
            _assert_within(part, actual, wanted, limit)
            continue
        for b, chosen in enumerate(rows):
            one = (reference.host(x)[b, :, chosen] for x in (actual, wanted, limit))
            _assert_within(f"{part}[{b}]", *one)


def check_decode_bound(decode, recipe, xp=np, path=None, values=None):
    """Out and lse lie within the bound, wherever keys lie and whatever lies beside them."""
    values = values or recipe.values()
    _assert_decoded(_decoded(decode, recipe, recipe.arrays(xp, values)), recipe, values, path)


def check_decode_placement(decode, recipe, xp=np, path=None):
    """Pages, strides and alignment change no bit, where splits are not the plan's to choose."""
    values = recipe.values()
    changes = {} if recipe.splits else {"batch_invariant": True}
    plain = replace(recipe, page_size=None, integers="int32", q="contiguous", k="contiguous", v="contiguous")
    plain = replace(plain, rows="contiguous", spare=recipe.capacity - max(recipe.totals, default=0))
    results = _decoded(decode, recipe, recipe.arrays(xp, values), **changes)
    _assert_alike("placement", results, _decoded(decode, plain, plain.arrays(xp, values), **changes))


def check_decode_one_by_one(decode, recipe, xp=np, path=None):
    """What else is in the batch, and how much a cache has room for, changes no bit, where splits do not follow it."""
    values, changes = recipe.values(), {} if recipe.splits else {"batch_invariant": True}
    results = _decoded(decode, recipe, recipe.arrays(xp, values), **changes)
    for b, (length, total) in enumerate(zip(recipe.lengths, recipe.totals, strict=True)):
        own = lambda x, b=b, total=total: x if x.ndim == 1 else x[b : b + 1, :, :total]  # noqa: E731
        scales = [{name: own(x) for name, x in each.items()} for each in values[3:]]
        one = replace(recipe, lengths=(length,), spare=0, page_size=None)
        alone = one.arrays(xp, (values[0][b : b + 1], own(values[1]), own(values[2]), *scales))
        _assert_alike(f"sequence {b} alone", [x[b : b + 1] for x in results], _decoded(decode, one, alone, **changes))


def check_decode_rerun(decode, recipe, xp=np, path=None):
    """The same bits on each run, whatever the default of splits."""
    arrays = recipe.arrays(xp)
    first = _decoded(decode, recipe, arrays)
    for _ in range(2):
        _assert_alike("run = rerun", _decoded(decode, recipe, arrays), first)


def check_decode_splits(decode, recipe, xp=np, path=None):
    """Any number of splits gives an answer within the bound."""
    values = recipe.values()
    arrays = recipe.arrays(xp, values)
    for splits in (1, 2, 3, 7, 1000):
        results = _decoded(decode, recipe, arrays, splits=splits, batch_invariant=False)
        _assert_decoded(results, recipe, values, path)


def check_decode_hidden_keys(decode, recipe, xp=np, path=None):
    """What a row does not see may be NaN or infinite, also where other rows of its sequence see it."""
    values = recipe.values()
    for garbage in ((np.nan, np.nan), (np.inf, -np.inf)):
        spoilt, rows = recipe.spoilt(values, garbage)
        _assert_decoded(_decoded(decode, recipe, recipe.arrays(xp, spoilt)), recipe, values, path, rows)


def _appending(recipe):
    """A recipe of a call that appends, to caches that can be appended to."""
    dims = {name: min(getattr(recipe, name), 256) for name in ("head_dim", "value_dim")} if recipe.latent else {}
    return replace(recipe, append=True, latent=False, kv_format=None, k_scale=None, v_scale=None, **dims)


def check_decode_append(decode, recipe, xp=np, path=None):
    """An append is a write and then a call without one, bit for bit, and writes nothing else.

    With rotation, the keys that are written are within their own bound.
    """
    recipe = _appending(recipe)
    values, written = recipe.values(), recipe.written
    q, *caches, tables = recipe.arrays(xp, values)
    results = _decoded(decode, recipe, (q, *caches, tables))
    if recipe.rotary:
        values = _with_rotated(recipe, values, caches, tables, path)
    else:
        _assert_alike("append = write first", results, _decoded(decode, written, written.arrays(xp, values)))
    _, *wanted, _ = written.arrays(xp, values)
    for name, cache, want, layout in zip(
        ("k_cache", "v_cache"), caches, wanted, (recipe.k, recipe.v), strict=True
    ):
        _assert_same_bits(name, _whole(cache, layout), _whole(want, layout))


def _with_rotated(recipe, values, caches, tables, path):
    """Values with the keys as an append has rotated them, which are found to be near enough."""
    q, k, v = (x.copy() for x in values)
    path, totals = _path(path, caches[0]), np.array(recipe.totals, int)
    angles = recipe.new(values)["rotary"]
    stored = reference.sequences(q, *caches, totals, tables.get("page_table"))
    for b, (length, (_, found, _)) in enumerate(zip(recipe.lengths, stored, strict=True)):
        rows = slice(length, recipe.totals[b])
        turned = k[b, :, rows], *(x[rows] for x in angles)
        exact = reference.rotate(*turned, interleaved=recipe.rotary_interleaved)
        limit = bounds.rotation_error(*turned, path=path, interleaved=recipe.rotary_interleaved)
        _assert_within(f"new keys of sequence {b}", found[:, rows], exact, limit)
        k[b, :, rows] = found[:, rows]
    return q, k, v


def _whole(array, layout):
    """An array of `lay_out` with what lies between its elements, where that is known."""
    return array if layout == "offset" or array.base is None else array.base


def _assert_same_bits(name, one, other):
    one, other = reference.host(one), reference.host(other)
    differ = _bits(one) != _bits(other)
    if differ.any():
        place = tuple(map(int, np.argwhere(differ)[0]))
        raise AssertionError(
            f"{name}{list(place)} is {one[place]!r}; wanted {other[place]!r} ({differ.sum()} of {differ.size} differ)"
        )


def check_decode_overflow(decode, recipe, xp=np, path=None):
    """Where new keys do not fit, ``overflow`` says so, out and lse are NaN, and neither cache nor others change."""
    recipe = _appending(recipe)
    if not (recipe.queries and recipe.lengths):
        return
    values, written = recipe.values(), recipe.written
    changes = {} if recipe.splits else {"batch_invariant": True}  # a refusal changes the length of its sequence
    *expected, done = _with_caches(decode, recipe, recipe.arrays(xp, values), **changes)
    arrays, fits = _without_room(recipe, values, xp)
    _, *before, _ = recipe.arrays(xp, values)
    overflow = xp.asarray(np.full((len(fits), 2), -1, np.int32))[:, 0]
    *results, caches = _with_caches(decode, recipe, arrays, overflow=overflow, **changes)
    if reference.host(overflow).tolist() != [int(not fit) for fit in fits]:
        raise AssertionError(f"overflow is {reference.host(overflow).tolist()}; wanted it where not {fits}")
    for name, one, other in zip(("out", "lse"), results, expected, strict=True):
        one, other = reference.host(one), reference.host(other)
        if not np.isnan(one[~fits]).all():
            raise AssertionError(f"{name} of a sequence without room is not NaN")
        _assert_same_bits(f"{name} of the others", one[fits], other[fits])
    marks = [np.zeros_like(x) for x in values]  # where rows without room would have gone
    for b in np.flatnonzero(~fits):
        marks[1][b, :, recipe.lengths[b] :] = marks[2][b, :, recipe.lengths[b] :] = 1
    _, *marks, _ = written.arrays(xp, marks)
    for name, cache, layout, *others in zip(
        ("k_cache", "v_cache"), caches, (recipe.k, recipe.v), marks, before, done, strict=True
    ):
        mark, old, new = (reference.host(_whole(x, layout)) for x in others)
        _assert_same_bits(name, _whole(cache, layout), np.where(mark == 1, old, new))


def _with_caches(decode, recipe, arrays, **changes):
    """Out, lse and both caches after the call."""
    return *_decoded(decode, recipe, arrays, **changes), arrays[1:3]


def _without_room(recipe, values, xp):
    """Arrays of a call in which a sequence has no room for its new keys, and which sequences have."""
    q, k, v, tables = recipe.arrays(xp, values)
    b = recipe.seed % len(recipe.lengths)
    length, total, size = recipe.lengths[b], recipe.totals[b], recipe.page_size
    fits = np.arange(len(recipe.lengths)) != b
    kind = recipe.seed // 7 % 3
    if kind == 0 and recipe.rotary:
        tables["rotary"] = tuple(x[: total - 1] for x in tables["rotary"])
        fits = np.array(recipe.totals) < total
    elif kind == 1 and size and (total - 1) // size * size >= length:  # a page that holds new keys alone
        table = reference.host(tables["page_table"]).copy()
        table[b, (total - 1) // size] = len(k) if recipe.seed % 2 else np.iinfo(table.dtype).max
        tables["page_table"] = xp.asarray(table)
    else:
        lengths = reference.host(tables["lengths"]).copy()
        past = recipe.capacity - recipe.queries + 1
        lengths[b] = past if recipe.seed % 2 or lengths.dtype.kind == "u" else -1
        tables["lengths"] = xp.asarray(lengths)
    return (q, k, v, tables), fits


decode_checks = (
    check_decode_bound,
    check_decode_placement,
    check_decode_one_by_one,
    check_decode_rerun,
    check_decode_splits,
    check_decode_hidden_keys,
    check_decode_append,
    check_decode_overflow,
)

# Those that hold for values that are columns of keys too, where nothing is appended.
latent_checks = tuple(check for check in decode_checks if check not in (check_decode_append, check_decode_overflow))


# Checks of forward on caches --------------------------------------------------------------------------------------


def as_decode(forward):
    """A forward of caches as a decode that neither splits keys nor appends."""

    def decode(q, k, v, *, splits=None, batch_invariant=False, **keywords):
        return forward(q, k, v, **keywords)

    return decode


def _of_forward(check):
    """A check of decode as one of forward."""

    def checked(attention, recipe, xp=np, path=None):
        check(as_decode(attention), recipe, xp, path)

    checked.__name__, checked.__doc__ = check.__name__.replace("decode", "prefill"), check.__doc__
    return checked


def check_prefill_is_forward(attention, recipe, xp=np, path=None):
    """Each sequence by itself, its keys side by side, gives the same within twice the bound."""
    values = recipe.values()
    q, k, v, tables = recipe.arrays(xp, values)
    out, lse = attention(q, k, v, return_lse=True, **tables, **recipe.keywords)
    for b, length in enumerate(recipe.lengths):
        one = [xp.asarray(x) for x in (values[0][b], values[1][b, :, :length], values[2][b, :, :length])]
        bounded = _bounded(recipe, one, path)
        _assert_agree(f"sequence {b}", (out[b], lse[b]), _run(attention, recipe, one), bounded)


check_prefill_bound = _of_forward(check_decode_bound)
check_prefill_placement = _of_forward(check_decode_placement)
check_prefill_one_by_one = _of_forward(check_decode_one_by_one)
check_prefill_rerun = _of_forward(check_decode_rerun)
check_prefill_hidden_keys = _of_forward(check_decode_hidden_keys)

prefill_checks = (
    check_prefill_bound,
    check_prefill_placement,
    check_prefill_one_by_one,
    check_prefill_rerun,
    check_prefill_hidden_keys,
    check_prefill_is_forward,
)


# Checks of backward -----------------------------------------------------------------------------------------------


class _Gradients:
    """A call of backward: operands, results of forward, gradients, and what these must be."""

    def __init__(self, attention, gradients, recipe, xp, path, arrays=None, dout=None):
        self.arrays = recipe.arrays(xp) if arrays is None else arrays
        self.dout = recipe.dout(xp) if dout is None else dout
        self.out, self.lse = _run(attention, recipe, self.arrays)
        self.grads = gradients(self.dout, *self.arrays, self.out, self.lse, **recipe.keywords)
        self.bounded = bounds.backward(self.dout, *self.arrays, path=_path(path, self.arrays[0]), **recipe.keywords)

    def check(self):
        for name, grad, (exact, bound) in zip(("dq", "dk", "dv"), self.grads, self.bounded, strict=True):
            _assert_within(name, grad, exact, bound)

    @property
    def limits(self):
        return [bound for _, bound in self.bounded]


def check_gradient_bound(attention, recipe, xp=np, path=None, gradients=backward):
    """dq, dk and dv lie within the bound."""
    _Gradients(attention, gradients, recipe, xp, path).check()


def check_directional_derivative(attention, recipe, xp=np, path=None, gradients=backward):
    """Along any direction the gradients give the derivative of ``sum(dout * out)``.

    The derivative is taken by the complex step, ``imag(f(x + i h d)) / h``: nothing cancels, so h may be so small
    that only roundings remain [1]_.

    .. [1] W. Squire and G. Trapp, "Using complex variables to estimate derivatives of real functions", 1998.
    """
    call = _Gradients(attention, gradients, recipe, xp, path)
    operands = [reference.double(x) for x in call.arrays]
    rng = np.random.default_rng(recipe.seed)
    directions = [rng.standard_normal(x.shape) for x in operands]
    step = 1e-30
    out = _complex_forward(*(x + 1j * step * d for x, d in zip(operands, directions, strict=True)), recipe)
    numeric = np.sum(reference.double(call.dout) * out.imag) / step
    analytic = sum(np.sum(reference.double(g) * d) for g, d in zip(call.grads, directions, strict=True))
    double = bounds.backward(reference.double(call.dout), *operands, path="numpy float64", **recipe.keywords)
    with np.errstate(invalid="ignore"):  # infinite bound, direction 0
        limit = sum(
            np.sum(np.abs(d) * (bound + roundings))
            for d, bound, (_, roundings) in zip(directions, call.limits, double, strict=True)
        )
    _assert_within("derivative along a direction", np.array(analytic), np.array(numeric), np.array(limit))


def _complex_forward(q, k, v, recipe):
    group = recipe.heads // recipe.key_heads
    k, v = (np.repeat(x, group, axis=-3) for x in (k, v))
    scale = recipe.head_dim**-0.5 if recipe.scale is None else recipe.scale
    s = np.where(recipe.mask, scale * q @ k.swapaxes(-1, -2), -np.inf)
    top = s.real.max(axis=-1, keepdims=True, initial=-np.inf)
    p = np.where(recipe.mask, np.exp(s - np.where(top == -np.inf, 0, top)), 0)
    total = p.sum(axis=-1, keepdims=True)
    return p @ v / np.where(total == 0, 1, total)


def check_adjoint(attention, recipe, xp=np, path=None, gradients=backward):
    """Out is linear in v, and dv its transpose: ``sum(dout * out) = sum(dv * v)``."""
    call = _Gradients(attention, gradients, recipe, xp, path)
    dout, v = reference.double(call.dout), reference.double(call.arrays[2])
    bounded = _bounded(recipe, call.arrays, path)
    there, back = np.sum(dout * reference.double(call.out)), np.sum(reference.double(call.grads[2]) * v)
    with np.errstate(invalid="ignore"):
        limit = np.sum(np.abs(dout) * bounded.out_bound) + np.sum(np.abs(v) * call.limits[2])
    _assert_within("sum(dv * v)", np.array(back), np.array(there), np.array(limit))


def check_linear_in_dout(attention, recipe, xp=np, path=None, gradients=backward):
    """Gradients of a sum are sums of gradients."""
    rng = np.random.default_rng(recipe.seed)
    shape, dtype = recipe.dout().shape, ELEMENTS[recipe.dtype].dtype
    first, second = (rng.integers(-8, 9, shape).astype(dtype) for _ in range(2))  # whose sums are exact
    arrays = recipe.arrays(xp)
    one, other, both = (
        _Gradients(attention, gradients, recipe, xp, path, arrays, xp.asarray(dout))
        for dout in (first, second, first + second)
    )
    for n, name in enumerate(("dq", "dk", "dv")):
        total = reference.double(one.grads[n]) + reference.double(other.grads[n])
        limit = one.limits[n] + other.limits[n] + both.limits[n]
        _assert_within(f"{name} of a sum", both.grads[n], total, limit)


def check_row_sums_of_ds(attention, recipe, xp=np, path=None, gradients=backward):
    """Rows of dS sum to 0: dq is 0 in a column where k is 1 and q is 0."""
    q, k, v = recipe.arrays()
    q, k = q.copy(), k.copy()
    q[..., 0], k[..., 0] = 0, 1
    arrays = [xp.asarray(x) for x in (q, k, v)]
    call = _Gradients(attention, gradients, recipe, xp, path, arrays)
    dq, bound = reference.double(call.grads[0])[..., 0], call.limits[0][..., 0]
    _assert_within("dq where k is 1 and q is 0", dq, np.zeros_like(dq), bound)


def check_unseen_have_zero_gradient(attention, recipe, xp=np, path=None, gradients=backward):
    """Rows that see no key, and keys that no row sees, have gradient 0 and spoil none, even if they hold NaN."""
    q, k, v = (x.copy() for x in recipe.arrays())
    dout = recipe.dout()
    empty, unseen = ~recipe.mask.any(axis=1), ~recipe.mask.any(axis=0)
    q[..., empty, :] = dout[..., empty, :] = np.nan
    k[..., unseen, :] = v[..., unseen, :] = np.nan
    arrays = [xp.asarray(x) for x in (q, k, v)]
    call = _Gradients(attention, gradients, recipe, xp, path, arrays, xp.asarray(dout))
    call.check()
    for name, grad, rows in zip(("dq", "dk", "dv"), call.grads, (empty, unseen, unseen), strict=True):
        if np.any(reference.double(grad)[..., rows, :] != 0):
            raise AssertionError(f"{name} is not 0 in all of the unseen rows {np.flatnonzero(rows).tolist()}")


gradient_checks = (
    check_gradient_bound,
    check_directional_derivative,
    check_adjoint,
    check_linear_in_dout,
    check_row_sums_of_ds,
    check_unseen_have_zero_gradient,
)
