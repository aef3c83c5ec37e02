"""Seeded mistakes: each is put into a copy of the kernels, and the emulator has to notice.

A mutation replaces a text that occurs once in a file of ``kernels/`` and names a problem on which the mistake shows.
The kernels without it pass the same problem and seeds. Every kernel that lands brings five of its own: add them to
`MUTATIONS`, and tests/test_mutations.py finds them.
"""

import inspect
import mmap
import shutil
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np

from cuflash import _variant, bounds, reference, testing

from . import HERE, LIMITS, Emulator, EmulatorError

SEEDS = range(3)
MOST_EVENTS = 10**6  # the problems are small: blocks that wait longer wait for ever


def check_far_rows(attention, recipe, xp=np, path=None):
    """`testing.check_bound` with keys and values whose rows lie 2^24 bytes apart: offsets leave 32 bits."""
    q, *others = recipe.arrays()
    k, v = (_far_apart(x, 2**24) for x in others)
    testing.assert_attention_close(
        attention(q, k, v, return_lse=True, **recipe.keywords), q, k, v, path=path, **recipe.keywords
    )


def check_faint_values(decode, recipe, xp=np, path=None):
    """`testing.check_decode_bound` with scales of values so small that float16 does not hold a weight times one."""
    q, k, v, scales = recipe.values()
    values = q, k, v, scales | {"v_scale": scales["v_scale"] * np.float32(1e-7)}
    testing.check_decode_bound(decode, recipe, path=path, values=values)


def _check_missing_pages(attention, exactly, recipe, xp, path):
    """A sequence of which a page in the middle does not exist is NaN where rows see its keys; others are not."""
    q, k, v, tables = recipe.arrays(xp)
    table, size, b = reference.host(tables["page_table"]).copy(), recipe.page_size, np.argmax(recipe.lengths)
    gone = recipe.lengths[b] // size // 2
    table[b, gone] = len(k)
    results = attention(q, k, v, return_lse=True, **(tables | {"page_table": xp.asarray(table)}), **recipe.keywords)
    out, lse = (reference.host(x) for x in results)
    exact = exactly(q, k, v, path=path, **tables, **recipe.keywords)
    others = np.arange(len(q)) != b
    worst = bounds.worst(
        (out[others], lse[others]),
        bounds.Bounded(*(getattr(exact, name)[others] for name in ("out", "lse", "out_bound", "lse_bound"))),
    )
    assert worst <= 1, f"error over bound {worst}"
    rows = recipe.mask(b)[:, gone * size : (gone + 1) * size].any(axis=1)
    assert np.isnan(out[b][:, rows]).all() and np.isnan(lse[b][:, rows]).all(), "a key is missing and nobody says so"


def check_missing_pages(attention, recipe, xp=np, path=None):
    """`_check_missing_pages` of `cuflash.forward`."""
    _check_missing_pages(attention, bounds.forward, recipe, xp, path)


def check_decode_missing_pages(decode, recipe, xp=np, path=None):
    """`_check_missing_pages` of `cuflash.decode`."""
    _check_missing_pages(decode, bounds.decode, recipe, xp, path)


def check_decode_often(decode, recipe, xp=np, path=None):
    """`testing.check_decode_bound` again and again, for what depends on which of two blocks is faster."""
    for _ in range(40):
        testing.check_decode_bound(decode, recipe, path=path)


def check_decode_reads(decode, recipe, xp=np, path=None):
    """What no row sees is not read, be it for nothing: keys and values, their scales, entries of the page table."""
    q, k, v, tables = recipe.arrays()
    table = tables.get("page_table")
    caches = {"k": k, "v": v} | {name: x for name, x in tables.items() if name.endswith("_scale") and x.ndim == 3}
    rows = {x.ctypes.data: [] for x in caches.values()}  # by the address of the array that they are of
    if table is not None:
        rows[table.ctypes.data] = []
    for b in range(len(recipe.lengths)):
        seen = np.flatnonzero(recipe.mask(b).any(axis=0))
        for j in range(seen[0], seen[-1] + 1) if seen.size else ():
            entry, slot = divmod(j, recipe.page_size or recipe.capacity)
            page = b if table is None else table[b, entry]
            for x in caches.values():
                rows[x.ctypes.data] += [x[page, head, slot : slot + 1] for head in range(recipe.key_heads)]
            if table is not None:
                rows[table.ctypes.data].append(table[b, entry : entry + 1])
    emulator, met = decode.__self__, set()

    def launch(emulate, grid, threads, args, shared_bytes, memory, **keywords):
        pieces = []
        for array, may in memory:
            met.add(array.ctypes.data)
            pieces += [(row, may) for row in rows.get(array.ctypes.data, [array])]
        return plain(emulate, grid, threads, args, shared_bytes, pieces, **keywords)

    plain = emulator.launch
    with mock.patch.object(emulator, "launch", launch):
        decode(q, k, v, return_lse=True, **(tables | recipe.keywords | recipe.splitting))
    assert met >= set(rows), "the kernels were given copies"


def check_gradient_of_lse(attention, recipe, xp=np, path=None, gradients=None):
    """`testing.check_gradient_bound` with a gradient of lse."""
    arrays, dout = recipe.arrays(), recipe.dout()
    out, lse = attention(*arrays, return_lse=True, **recipe.keywords)
    dlse = recipe.normal(4, lse.shape).astype(lse.dtype)
    grads = gradients(dout, *arrays, out, lse, dlse=dlse, **recipe.keywords)
    worst = bounds.worst(grads, bounds.backward(dout, *arrays, path=path, dlse=dlse, **recipe.keywords))
    assert worst <= 1, f"error over bound {worst}"


def check_split_products(attention, recipe, xp=np, path=None):
    """Numbers whose three parts are as large as can be, and of one sign: each of the six products shows."""
    number = np.float32(1 + 2**-8 - 2**-16 + 0.9 * 2**-17)
    shape, values = (1, recipe.keys, recipe.head_dim), (1, recipe.keys, recipe.value_dim)
    alike, ones = (partial(np.full, fill_value=each) for each in (number, np.float32(1)))
    lower = np.zeros(shape, np.float32)
    lower[:, 1:, 0] = np.log(np.float64(number) / 2)  # all weights but the first are half that number
    both = (alike(shape), alike(shape), ones(values), 12.0), (ones(shape), lower, alike(values), 1.0)
    for q, k, v, scale in both:
        q, k, v = (xp.asarray(x) for x in (q, k, v))
        result = attention(q, k, v, scale=scale, return_lse=True)
        testing.assert_attention_close(result, q, k, v, path=path, scale=scale)


def check_split_gradients(attention, recipe, xp=np, path=None, gradients=None):
    """The same of gradients: scores, then weights and what they meet."""
    number = np.float32(1 + 2**-8 - 2**-16 + 0.9 * 2**-17)
    shape = (1, recipe.keys, recipe.head_dim)
    alike, ones = np.full(shape, number), np.ones(shape, np.float32)
    weights = np.full(recipe.keys, number / 2 ** np.ceil(np.log2(recipe.keys)))  # all but the first
    weights[0] = 1 - weights[1:].sum()
    logs = np.zeros(shape, np.float32)
    logs[..., 0] = np.log(weights)
    for q, k, v, scale in ((alike, alike, ones, 12.0), (ones, logs, alike, 1.0)):
        out, lse = attention(q, k, v, scale=scale, return_lse=True)
        grads = gradients(v, q, k, v, out, lse, scale=scale)
        worst = bounds.worst(grads, bounds.backward(v, q, k, v, path=path, scale=scale))
        assert worst <= 1, f"error over bound {worst}"


def check_hidden_largest(attention, recipe, xp=np, path=None):
    """The largest number changes no bit of rows to which it is hidden."""
    q, k, v = recipe.arrays(xp)
    hidden = np.flatnonzero(~recipe.mask[0])
    before = attention(q, k, v, **recipe.keywords)[..., 0, :]
    k, v = k.copy(), v.copy()
    k[..., hidden, :] = v[..., hidden, :] = np.finfo(recipe.dtype).max
    assert (attention(q, k, v, **recipe.keywords)[..., 0, :] == before).all(), "hidden: the largest number shows"


def _far_apart(values, pitch):
    """A copy of a matrix in memory of which only its pages are ever there."""
    length, dim = values.shape[-2:]
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    buffer = mmap.mmap(-1, length * pitch, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    far = np.ndarray((1, length, dim), values.dtype, buffer, strides=(length * pitch, pitch, values.itemsize))
    far[...] = values
    return far


def replace_once(text, old, new, name):
    """The text with ``new`` where ``old`` stands, which it must in one place."""
    if text.count(old) != 1:
        raise ValueError(f"{name}: {text.count(old)} places have: {old}")
    return text.replace(old, new)


@dataclass(frozen=True)
class Mutation:
    """A mistake in a file of ``kernels/``, and where it shows.

    Attributes
    ----------
    name : str
        What is wrong.
    file, old, new : str
        The text ``old``, which occurs once in the file, becomes ``new``.
    recipe : cuflash.testing.Recipe or CacheRecipe
        The problem.
    check : function
        Of `cuflash.testing`, or of its kind.
    engine : str
        "portable" or "sm90".
    blocks : int
        Multiprocessors of the emulated device. With 1, blocks that stay have all tiles to work on; mistakes in the
        order between blocks need more.
    precision : str, optional
        Of `cuflash.forward`.
    """

    name: str
    file: str
    old: str
    new: str
    recipe: testing.Recipe | testing.CacheRecipe
    check: object = testing.check_bound
    engine: str = "portable"
    blocks: int = 1
    precision: str | None = None

    @property
    def backward(self):
        """Whether it is about gradients."""
        return "gradients" in inspect.signature(self.check).parameters

    @property
    def cache(self):
        """Whether it is about caches: of decode or of forward."""
        return isinstance(self.recipe, testing.CacheRecipe)

    @property
    def decode(self):
        """Whether it is about decode."""
        return "decode" in inspect.signature(self.check).parameters

    def overlay(self, folder):
        """Write the kernels' files that the emulator and the mistake replace to a folder; return it."""
        text = replace_once((_variant.folder() / self.file).read_text(encoding="utf-8"), self.old, self.new, self.name)
        folder = Path(folder)
        for path in HERE.glob("*.cuh"):
            shutil.copy(path, folder)
        (folder / self.file).write_text(text, encoding="utf-8")
        return folder

    def emulator(self, overlay, seed=0):
        """One of a device with so many multiprocessors, which runs the kernels of an overlay."""
        emulator = Emulator(seed, replace(LIMITS, processors=self.blocks), overlay, self.engine)
        emulator.launch = partial(emulator.launch, most_events=MOST_EVENTS)
        return emulator

    def compile(self, overlay):
        """Compile the kernels that the problem takes."""
        emulator = self.emulator(overlay)
        if self.cache:
            q, k, v, _ = self.recipe.arrays()
            if self.decode:
                emulator.prepare_decode(q, k, v, self.recipe.kv_format, self.recipe.page_size)
            else:
                emulator.prepare_cache(q, k, v)
        elif self.backward:
            emulator.prepare(*self.recipe.arrays(), backward=True, **self.recipe.keywords)
        else:
            emulator.prepare(*self.recipe.arrays(), precision=self.precision, **self.recipe.keywords)

    def run(self, overlay, seed):
        """What the check says about the kernels of an overlay: None where all is well."""
        emulator = self.emulator(overlay, seed)
        more = {"gradients": emulator.backward} if self.backward else {}
        try:
            attention = emulator.decode if self.decode else emulator.forward
            attention = partial(attention, precision=self.precision) if self.precision else attention
            self.check(attention, self.recipe, np, f"{self.engine} {self.precision or self.recipe.dtype}", **more)
        except (AssertionError, EmulatorError) as error:
            return f"{'bound' if isinstance(error, AssertionError) else 'emulator'}: {str(error).splitlines()[0]}"
        return None

    def caught(self, overlay):
        """What the first seed that notices anything says; None where none does."""
        return next(filter(None, (self.run(overlay, seed) for seed in SEEDS)), None)

    @property
    def clean(self):
        """The same problem without a mistake: equal for all mutations that share it."""
        return replace(self, name="", file="", old="", new="")


def named(name):
    """The mutation of a name, by which processes ask for it: its check may be no function that passes between them."""
    return next(mutation for mutation in MUTATIONS if mutation.name == name)


def said(name):
    """What is said of a mutation, its kernels compiled in a folder of their own."""
    mutation = named(name)
    with tempfile.TemporaryDirectory() as folder:
        overlay = mutation.overlay(folder)
        mutation.compile(overlay)
        return mutation.caught(overlay)


def said_without(name):
    """What is said of the kernels as they are where a mutation is tried."""
    return named(name).clean.caught(HERE)


def in_float32(name, old, new, recipe, file="forward_f32.cu", **more):
    """A mistake in forward of float32."""
    return Mutation(f"float32_{name}", file, old, new, recipe, **more)


def in_float32_sm90(name, old, new, recipe, file="forward_f32_sm90.cu", **more):
    """A mistake in the same on Hopper."""
    return Mutation(f"float32_sm90_{name}", file, old, new, recipe, engine="sm90", **more)


def in_parts(name, old, new, recipe, **more):
    """A mistake in the step before it, which splits q, k and v."""
    return in_float32_sm90(f"parts_{name}", old, new, recipe, file="forward_parts.cu", **more)


def in_float64(name, old, new, recipe, file="forward_f64.cu", **more):
    """A mistake in forward of float64."""
    return Mutation(f"float64_{name}", file, old, new, recipe, **more)


def in_backward(name, old, new, recipe, check=testing.check_gradient_bound, file="backward.cu", **more):
    """A mistake in gradients, by default in those of the portable engine's main kernel."""
    return Mutation(name, file, old, new, recipe, check, **more)


def in_gradients64(name, old, new, recipe, check=testing.check_gradient_bound, **more):
    """A mistake in the main kernel of gradients in float64."""
    return in_backward(f"float64_{name}", old, new, recipe, check, file="backward_f64.cu", **more)


def in_float32_gradients(name, old, new, recipe, file="backward_f32.cu", **more):
    """A mistake in those of float32."""
    return in_backward(f"float32_{name}", old, new, recipe, file=file, **more)


SMALL_PRODUCTS = ((0, 2), (2, 0), (1, 1), (0, 1), (1, 0))  # of parts of float32


def without_product(left_out, first):
    """The small products of float32 but one, a statement each; `first` says whether sums begin."""
    pairs = [pair for pair in SMALL_PRODUCTS if pair != left_out]
    operands = [f"(BFloat16{{}}, small[n + m], a[{i}], b[{j}][2 * m], b[{j}][2 * m + 1]);" for i, j in pairs]
    begin = f"if ({first}) mma_m16n8k16_first{operands[0]} else mma_m16n8k16{operands[0]}"
    return " ".join([begin, *(f"mma_m16n8k16{rest}" for rest in operands[1:])])


def in_backward_dq(name, old, new, recipe, file="backward_dq_sm90.cu", **more):
    """A mistake in Hopper's kernel of dq alone."""
    return in_backward(name, old, new, recipe, file=file, engine="sm90", **more)


def in_backward_sm90(name, old, new, recipe, file="backward_sm90.cu", **more):
    """A mistake in the main kernel of gradients on Hopper."""
    return in_backward(name, old, new, recipe, file=file, engine="sm90", **more)


# Three tiles of keys, the last of them part of one, and rows that see some; heads that share keys.
CAUSAL = testing.Recipe(
    heads=2, key_heads=1, queries=140, keys=150, head_dim=32, value_dim=32, dtype="float16", causal=True
)
STEEP = replace(CAUSAL, scale=4.0)  # so that a later tile outweighs an earlier one
WINDOW = replace(CAUSAL, dtype="bfloat16", causal=False, window=(20, 3))
ONE_STAGE = replace(CAUSAL, heads=1, queries=70, head_dim=192, value_dim=192)
FAR = replace(CAUSAL, heads=1)

# float32, and parts that count; float64, and two warps for the same rows.
FLOAT32 = replace(CAUSAL, dtype="float32", head_dim=24, value_dim=44)
STEEP32 = replace(FLOAT32, scale=4.0)
THREE_KEYS = testing.Recipe(heads=1, queries=3, keys=3, head_dim=2, value_dim=2, dtype="float32")
ALIKE = testing.Recipe(heads=1, queries=8, keys=8, head_dim=8, value_dim=8, dtype="float32")
# The same on Hopper: packed rows, four tiles of keys, of which each consumer sees others; two panels; all six products.
SPLIT = replace(CAUSAL, heads=4, key_heads=2, keys=300, dtype="float32", head_dim=44, value_dim=40)
STEEP_SPLIT = replace(SPLIT, scale=4.0)
TWO_PANELS = replace(SPLIT, heads=1, key_heads=1, head_dim=36, value_dim=128)
SPLIT_WINDOW = replace(SPLIT, causal=False, window=(40, 3))
SPLIT_ALIKE = replace(ALIKE, value_dim=40)
FLOAT64 = replace(CAUSAL, dtype="float64", head_dim=24, value_dim=24)
STEEP64 = replace(FLOAT64, scale=4.0)
SHARED_ROWS = replace(FLOAT64, heads=1, queries=70, head_dim=128, value_dim=136)

HOPPER = replace(CAUSAL, heads=3, keys=200)  # four tiles of keys, two of rows
BOXED = replace(HOPPER, key_heads=3)  # heads are not packed, so that out leaves as boxes

# Gradients. Rows that see no key are in a tile with others, as are keys that no row sees; heads share keys.
GRADIENT = replace(CAUSAL, value_dim=44, keys=130)
UNSEEN_KEYS = replace(GRADIENT, causal="top-left", queries=100)
SLIDING = replace(GRADIENT, queries=300, keys=300, heads=1, causal=False, window=(0, 0))
# Several tiles of keys and of queries; all pairs seen; warps that share keys; many visits of one item; a section of
# heads that is no whole one.
LONG = replace(GRADIENT, queries=300, keys=300)
ROUND = replace(LONG, queries=200, keys=400, causal=False)
SHARED_KEYS = replace(GRADIENT, head_dim=72, value_dim=100, keys=150)
VISITED = replace(GRADIENT, heads=18, queries=70, keys=70)
THREE_HEADS = replace(GRADIENT, heads=3, key_heads=3)

# float64: three tiles of keys and of queries, five of each, one key a row.
GRADIENT64 = replace(GRADIENT, dtype="float64")
LONG64 = replace(LONG, dtype="float64")
SLIDING64 = replace(SLIDING, dtype="float64")

# On Hopper: three tiles of keys and of queries; the same seen whole, and in part; columns of dq in two panels; roles.
GRADIENT32 = replace(GRADIENT, dtype="float32", head_dim=24)
SUMS_OF_TWO = replace(GRADIENT32, head_dim=72, value_dim=80)  # a warp and its mate, which has other queries
TWO_HALVES = replace(GRADIENT32, head_dim=136, value_dim=130)  # and two that have other columns

HOPPER_GRADIENT = replace(GRADIENT, queries=300, keys=300, head_dim=64, value_dim=64)
HOPPER_ROUND = replace(HOPPER_GRADIENT, causal=False)
HOPPER_WINDOW = replace(HOPPER_GRADIENT, causal=False, window=(100, 3))
PANELS = replace(HOPPER_GRADIENT, queries=200, head_dim=128, value_dim=128)
ROLES = replace(HOPPER_GRADIENT, queries=150, keys=150, head_dim=256, value_dim=256)

BARRIER = "sync_threads();  // what was copied is here for all warps, and all have left what is filled next\n"
PINS = "            pin(out);\n            pin(weights);\n"
KEYS = "facts.k = args.k + args.k_strides.offset(place.batch0, batch1, place.head"

# Decode. Sequences of several splits, of one and of none, in pages that are no whole tiles; rows that see unlike keys.
CACHE = testing.CacheRecipe(
    lengths=(290, 0, 70), page_size=24, heads=6, key_heads=2, queries=2, head_dim=40, value_dim=24, splits=3, seed=1
)
STEEP_CACHE = replace(CACHE, scale=4.0)
WINDOWED = replace(CACHE, queries=20, causal=False, window=(40, 9))
FIRST_ROWS = replace(CACHE, queries=20, causal="top-left")
BUSY = replace(CACHE, lengths=(290, 250, 70), heads=12, key_heads=4, queries=5)
MANY_SPLITS = replace(CACHE, splits=9)  # too many for a cluster
LONG_CACHE = replace(CACHE, lengths=(2000,), splits=1)  # rings that go round

RAGGED = replace(CACHE, lengths=(290, 0, 70, 500, *[9] * 30, 130), page_size=None, splits=None)

# Of values that are columns of keys: tiles of few rows and of many.
LATENT = replace(CACHE, heads=3, key_heads=1, head_dim=576, value_dim=512, splits=2, latent=True)
LATENT_MANY = replace(LATENT, heads=20, lengths=(290, 70), dtype="bfloat16")
LATENT_STEEP = replace(LATENT, scale=4.0)

# Forward on such caches: some tiles of rows and of keys, pages of no whole tiles and of a key each, none.
PREFILL = testing.CacheRecipe(
    lengths=(290, 0, 70), page_size=24, heads=4, key_heads=2, queries=100, head_dim=40, value_dim=24, seed=1
)
PREFILL_WINDOW = replace(PREFILL, dtype="bfloat16", causal=False, window=(40, 9))
PREFILL_ONE_STAGE = replace(PREFILL, heads=1, key_heads=1, queries=40, head_dim=192, value_dim=192, page_size=1)

READ_WINDOWED = replace(WINDOWED, page_size=16, lengths=(310, 0, 100))

# The same in float32: rows of 16-byte quads, a lane a key and two; rows of two tiles.
SINGLE = replace(CACHE, dtype="float32", heads=12, page_size=16)
WIDE_SINGLE = replace(SINGLE, head_dim=100, value_dim=72)
DOUBLE = replace(SINGLE, dtype="float64", value_dim=30)  # rows of 16-byte pairs, and no whole quads

# The same from 8 bits: pages of no whole runs, of whole ones, and none; scales of slots and of heads.
INT8 = replace(CACHE, dtype="bfloat16", kv_format="int8", k_scale="slot", v_scale="slot")
HEAD_SCALES = replace(INT8, k_scale="head", v_scale="head", page_size=None)
INT8_WINDOWED = replace(INT8, queries=20, causal=False, window=(40, 9))
E4M3_WINDOWED = replace(INT8_WINDOWED, kv_format="e4m3")
IN_RUNS = replace(INT8, page_size=16)
IN_ONE_PIECE = replace(INT8, page_size=None, lengths=(283, 290))

# Appends, over the edges of pages and in one piece. Seeds say what has no room: angles, a page, or lengths.
APPEND = replace(CACHE, lengths=(29, 0, 22), queries=5, append=True)
ROTARY = replace(APPEND, rotary=7, splits=1)
WHOLE = replace(APPEND, page_size=None, head_dim=48, value_dim=32, spare=3)
NO_ANGLES, NO_PAGE, NO_ROOM = replace(ROTARY, seed=3), replace(APPEND, seed=11, page_size=3), replace(APPEND, seed=17)

MUTATIONS = (
    *(
        Mutation(name, "append.cu", old, new, recipe, check)
        for name, old, new, recipe, check in (
            (
                "room_not_asked_for", "&& length <= args.capacity - args.appended;", ";",
                NO_ROOM, testing.check_decode_overflow,
            ),
            (
                "room_for_one_row_less", "args.capacity - args.appended;", "args.capacity - args.appended + 1;",
                NO_ROOM, testing.check_decode_overflow,
            ),
            (
                "pages_not_looked_at", "missing |= !pages.exists(pages.number(static_cast<int>(n)));", "",
                NO_PAGE, testing.check_decode_overflow,
            ),
            (
                "lanes_do_not_agree_on_pages", "span.fits = !any(missing);", "span.fits = !missing;",
                NO_PAGE, testing.check_decode_overflow,
            ),
            (
                "angles_not_counted", "span.fits && span.total <= args.positions;", "span.fits;",
                NO_ANGLES, testing.check_decode_overflow,
            ),
            (
                "overflow_upside_down", "static_cast<int>(!span.fits)", "static_cast<int>(span.fits)",
                NO_ROOM, testing.check_decode_overflow,
            ),
            (
                "total_without_the_new_rows", "span.fits ? length + args.appended : -1;", "span.fits ? length : -1;",
                APPEND, testing.check_decode_append,
            ),
            (
                "row_of_another_page", "position - page * pages.size.value;", "position % 8;",
                APPEND, testing.check_decode_append,
            ),
            (
                "heads_of_values_not_counted_anew", "        head -= args.key_heads;\n", "",
                APPEND, testing.check_decode_append,
            ),
            (
                "row_one_vector_too_long", "columns * sizeof(Element) / sizeof(Vector16));",
                "columns * sizeof(Element) / sizeof(Vector16) + 1);", WHOLE, testing.check_decode_append,
            ),
            (
                "rotated_the_other_way", "fused_multiply_add(x, c, -multiply(y, s))",
                "fused_multiply_add(x, c, multiply(y, s))", ROTARY, testing.check_decode_bound,
            ),
            (
                "position_one_too_far", "position * args.cos_step;", "(position + 1) * args.cos_step;",
                replace(ROTARY, spare=20), testing.check_decode_bound,
            ),
            (
                "pairs_of_neighbours_apart", "2 * n + 1 : n + args.half;", "2 * n + 1 : n + args.half + 1;",
                ROTARY, testing.check_decode_append,
            ),
            (
                "a_column_left_behind_the_pairs", "2 * args.half, args.head_dim);",
                "2 * args.half + 1, args.head_dim);", ROTARY, testing.check_decode_append,
            ),
        )
    ),
    Mutation(
        "sequence_without_room_answered", "rings.cuh", "bool missing = refused(args, place);", "bool missing = false;",
        NO_ROOM, testing.check_decode_overflow,
    ),
    *(
        Mutation(name, "shares.cuh", old, new, RAGGED, testing.check_decode_bound, blocks=3)
        for name, old, new in (
            ("length_beyond_the_last_read", "    if (sequence >= args.sequences) return 0;\n", ""),
            ("shorter_splits_than_blocks", "args.waves), usual_one);", "args.waves), usual_one) / 4;"),
            ("short_splits_left_out", "rank >= 0; --rank", "rank > 0; --rank"),
            ("blocks_of_longer_splits_not_taken_off", "                block -= all;\n", ""),
            ("blocks_of_sequences_before_not_taken_off", "block -= shuffle_from(end - blocks, found);", ""),
            ("sum_of_some_lanes_before", "distance = 1; distance < WARP;", "distance = 1; distance < WARP / 2;"),
        )
    ),
    Mutation(
        "blocks_that_share_out_keys_taken_for_a_cluster", "shares.cuh", "turn.fixed && cluster_size", "cluster_size",
        replace(CACHE, page_size=None, splits=None), testing.check_decode_bound, blocks=16,
    ),
    *(
        Mutation(f"cluster_{name}", "rings.cuh", old, new, CACHE, testing.check_decode_bound)
        for name, old, new in (
            ("sums_written_over_parts", "        sync_warp();  // all lanes have read what is written over\n", ""),
            ("read_before_it_is_there", "    cluster_wait();\n    for (", "    for ("),
            ("left_while_others_read", "    cluster_arrive();\n    cluster_wait();  // until", "    // until"),
            ("without_the_last_split", "            work.splits, [&]", "            work.splits - 1, [&]"),
            ("row_of_the_first_block_twice", "r = place.split + warp_index() * work", "r = warp_index() * work"),
        )
    ),
    *(
        Mutation(name, "split.cuh", old, new, recipe, check)
        for name, old, new, recipe, check in (
            (
                "parts_from_its_own_on", "part_row(args, r) - place.split * pitch;", "part_row(args, r);",
                MANY_SPLITS, testing.check_decode_bound,
            ),
            (
                "parts_of_other_rows", "args.tiles * part_pitch(args);", "part_pitch(args);",
                replace(BUSY, queries=20), testing.check_decode_bound,
            ),
            (
                "tile_dropped_at_the_end_of_a_split",
                "clamp((place.split + 1) * share, 0, tiles)", "clamp((place.split + 1) * share - 1, 0, tiles)",
                CACHE, testing.check_decode_bound,
            ),
            (
                "sum_of_parts_not_rescaled", "values[e] *= factor;", "values[e] *= factor > 0.0f;",
                replace(STEEP_CACHE, lengths=(2000,), splits=63), testing.check_decode_bound,
            ),
            (
                "splits_beyond_those_held_left_out", "first < splits; first += ROWS_HELD",
                "first < 1; first += ROWS_HELD", replace(CACHE, lengths=(2000,), splits=63), testing.check_decode_bound,
            ),
            (
                "last_split_weighed_again", "if (lane_index() >= count) other = SoftmaxRow<Real>{};", "",
                MANY_SPLITS, testing.check_decode_bound,
            ),
            (
                "reference_of_a_split_alone", "part.raise(maximum_of_row<WARP>(other.reference));",
                "part.raise(other.reference);", replace(STEEP_CACHE, scale=40.0, splits=9), testing.check_decode_bound,
            ),
            (
                "reference_of_the_last_part", "top = maximum(top, others[n].reference);", "top = others[n].reference;",
                replace(STEEP_CACHE, scale=40.0), testing.check_decode_bound,
            ),
            (
                "parts_weighed_alike", "exp2_of(other.shift() - row.shift())", "Real(1)",
                STEEP_CACHE, testing.check_decode_bound,
            ),
            (
                "part_without_keys_weighed", "other.sum == 0 ? Real(0) : exp2", "exp2", replace(FIRST_ROWS, scale=40.0),
                testing.check_decode_bound,
            ),
            (
                "arrived_before_all_warps_have_stored", "    sync_threads();\n    if (fresh_thread_index() == 0) {",
                "    if (fresh_thread_index() == 0) {", replace(BUSY, splits=9), check_decode_often,
            ),
            (
                "counter_left_as_it_is", "if (mine) store_global(arrived, 0);", "",
                MANY_SPLITS, testing.check_decode_bound,
            ),
            (
                "counter_of_another_tile", "args.arrived + tile_index(args, place) * sizeof(int);",
                "args.arrived + place.tile * sizeof(int);", BUSY, testing.check_decode_splits,
            ),
            (
                "hidden_values_of_decode_not_noticed", "any((finite != 0 && is_finite(inverse)) ||", "any(",
                WINDOWED, testing.check_decode_hidden_keys,
            ),
        )
    ),
    *(
        Mutation(name, "rings.cuh", old, new, recipe, check)
        for name, old, new, recipe, check in (
            (
                "place_in_a_page_off", "divide(key) * pages.size.value;", "divide(key) * (pages.size.value - 1);",
                CACHE, testing.check_decode_bound,
            ),
            (
                "page_looked_up_off_by_one", "seen ? pages.number(page) : -1;",
                "seen ? pages.number(page + 1) : -1;", CACHE, testing.check_decode_bound,
            ),
            (
                "pages_of_the_tile_before", "        from = next;\n", "", LONG_CACHE, testing.check_decode_bound,
            ),
            (
                "values_to_the_stage_in_use", "WARPS, before, from);", "WARPS, stage, from);",
                LONG_CACHE, testing.check_decode_bound,
            ),
            (
                "lanes_not_waited_for_before_keys", "sync_warp();  // the keys are here for all lanes, and", "//",
                LONG_CACHE, testing.check_decode_bound,
            ),
            (
                "lanes_not_waited_for_before_values", "sync_warp();  // the values are here, and", "//",
                LONG_CACHE, testing.check_decode_bound,
            ),
            (
                "wait_for_values_one_group_short", "2 * STAGES - 2>();\n        sync_warp();  // the values",
                "2 * STAGES - 1>();\n        sync_warp();  // the values", LONG_CACHE, testing.check_decode_bound,
            ),
            (
                "out_written_over_values_in_use", "    sync_warp();\n    leave(", "    leave(",
                replace(LONG_CACHE, heads=32), testing.check_decode_bound,
            ),
            (
                "mask_of_decode_one_key_too_far", "j >= first && j < end ?", "j >= first && j <= end ?",
                WINDOWED, testing.check_decode_bound,
            ),
        )
    ),
    *(
        Mutation(f"{name}_of_columns_of_keys", "decode_latent.cu", old, new, recipe, check)
        for name, old, new, recipe, check in (
            (
                "queries_not_waited_for", "sync_threads();  // the rows of q are here", "",
                LATENT, testing.check_decode_bound,
            ),
            (
                "wait_for_a_tile_one_group_short", "2>();\n        sync_threads();  // the tile",
                "1>();\n        sync_threads();  // the tile", LATENT, testing.check_decode_bound,
            ),
            (
                "warps_not_waited_for_at_a_tile", "sync_threads();  // the tile is here for all, and", "//",
                LATENT, testing.check_decode_bound,
            ),
            (
                "maxima_not_waited_for", "sync_threads();  // all maxima are here", "",
                LATENT, testing.check_decode_bound,
            ),
            (
                "weights_not_waited_for", "sync_threads();  // all weights are here", "",
                LATENT, testing.check_decode_bound,
            ),
            (
                "out_written_over_keys_in_use", "sync_threads();  // all have left queries and stages", "",
                LATENT, testing.check_decode_bound,
            ),
            (
                "pages_of_the_tile_before", "        next = look_up(pages, work, tile + STAGES);\n", "",
                replace(LATENT, splits=1), testing.check_decode_bound,
            ),
            (
                "products_of_odd_steps_left_out", "scores[0][0][e] += odd[e];", "{}",
                LATENT, testing.check_decode_bound,
            ),
            (
                "maximum_of_one_warp", "for (int n = 0; n < KEY_WARPS; ++n) {\n            top = maximum(top, load",
                "for (int n = 0; n < 1; ++n) {\n            top = maximum(top, load",
                replace(LATENT_STEEP, scale=40.0), testing.check_decode_bound,
            ),
            (
                "out_not_rescaled", "if (any(moved)) rescale(out, factor);", "",
                LATENT_STEEP, testing.check_decode_bound,
            ),
            (
                "weights_of_other_rows", "WeightTile::step(lane_w, 16 * block, 2 * step)",
                "WeightTile::step(lane_w, 0, 2 * step)", LATENT_MANY, testing.check_decode_bound,
            ),
            (
                "values_of_other_columns", "lane_of_a<HEAD_DIM>(warp_index() * (COLUMNS / CHUNK_ELEMENTS))",
                "lane_of_a<HEAD_DIM>()", LATENT_MANY, testing.check_decode_bound,
            ),
            (
                "sum_of_one_warp", "for (int n = 1; n < KEY_WARPS; ++n) {", "for (int n = 1; n < 1; ++n) {",
                LATENT_MANY, testing.check_decode_bound,
            ),
            (
                "mask_one_key_too_far", "j >= first && j < end ?", "j >= first && j <= end ?",
                replace(LATENT, queries=5, causal=False, window=(40, 9)), testing.check_decode_bound,
            ),
        )
    ),
    *(
        Mutation(name, "decode_real.cu", old, new, recipe, check)
        for name, old, new, recipe, check in (
            (
                "queries_of_float32_not_waited_for", "sync_threads();  // the rows of q are here", "",
                SINGLE, testing.check_decode_bound,
            ),
            (
                "parts_of_a_key_apart", "lanes = TILE_K; lanes < WARP; lanes *= 2) scores",
                "lanes = WARP; lanes < WARP;) scores", WIDE_SINGLE, testing.check_decode_bound,
            ),
            (
                "weights_of_a_key_summed_twice", "if (mine) row.sum +=", "row.sum +=", WIDE_SINGLE,
                testing.check_decode_bound,
            ),
            (
                "row_raised_alone", "const Real factor = row.raise(", "const Real factor = 1.0f + 0 * row.raise(",
                replace(SINGLE, scale=4.0), testing.check_decode_bound,
            ),
            (
                "maximum_of_some_lanes", "maximum_of_row<WARP>(top)", "maximum_of_row<8>(top)",
                replace(SINGLE, scale=4.0), testing.check_decode_bound,
            ),
            (
                "values_of_every_second_key", "lanes = VALUE_LANES; lanes < WARP; lanes *= 2)",
                "lanes = WARP; lanes < WARP;)", SINGLE, testing.check_decode_bound,
            ),
            (
                "hidden_scores_of_float32_kept", "j < mask.end_key(i) ? scores[r]", "j <= mask.end_key(i) ? scores[r]",
                replace(SINGLE, queries=3), testing.check_decode_bound,
            ),
            (
                "code_for_too_few_rows", "work.rows <= 4) {", "work.rows <= 8) {",
                SINGLE, testing.check_decode_bound,
            ),
            (
                "chunk_beyond_a_row_written", "if (column + c < args.value_dim) store_global",
                "if (column + c <= args.value_dim) store_global", SINGLE, testing.check_decode_bound,
            ),
            (
                "pair_beyond_a_row_of_float64_written", "if (column + c < args.value_dim) store_global",
                "if (column < args.value_dim) store_global", DOUBLE, testing.check_decode_bound,
            ),
            (
                "weights_of_float64_in_float32",
                "exp2_of(fused_multiply_add(scores[r + e], score.factor(), -row.shift()))",
                "exp2_of(float(fused_multiply_add(scores[r + e], score.factor(), -row.shift())))",
                DOUBLE, testing.check_decode_bound,
            ),
        )
    ),
    Mutation(
        "parts_of_float64_in_float32", "split.cuh", "exp2_of(other.shift() - row.shift())",
        "exp2_of(static_cast<float>(other.shift() - row.shift()))", DOUBLE, testing.check_decode_bound,
    ),
    Mutation(
        "angles_of_float64_in_float32", "append.cu", "const Real c = angle_part", "const float c = angle_part",
        replace(ROTARY, dtype="float64", angles="float64"), testing.check_decode_bound,
    ),
    Mutation(
        "queries_not_waited_for", "decode.cu", "sync_threads();  // the rows of q are here", "", CACHE,
        testing.check_decode_bound,
    ),
    *(
        Mutation(name, "decode_8bit.cu", old, new, recipe, check)
        for name, old, new, recipe, check in (
            (
                "queries_of_8_bits_not_waited_for", "sync_threads();  // the rows of q are here", "",
                INT8, testing.check_decode_bound,
            ),
            (
                "queries_read_before_they_are_converted", "sync_threads();  // as they are to be", "",
                INT8, testing.check_decode_bound,
            ),
            (
                "power_of_a_thread_not_of_the_row",
                "lanes < THREADS_OF_ROW; lanes *= 2) largest", "lanes < 1;) largest",
                HEAD_SCALES, testing.check_decode_bound,
            ),
            (
                "sign_of_a_scale_lost", "k_scale < 0.0f ? -1.0f", "k_scale < 0.0f ? 1.0f",
                HEAD_SCALES, testing.check_decode_bound,
            ),
            (
                "scale_of_values_left_out", "values[e] *= v_scale;", "values[e] *= 1.0f;",
                HEAD_SCALES, testing.check_decode_bound,
            ),
            (
                "scale_of_another_slot", "slot = key - pages.size.divide(key) * pages.size.value;", "slot = key % 7;",
                INT8, testing.check_decode_bound,
            ),
            (
                "scales_of_keys_for_those_of_values", "scales_of(scales + SCALE_BYTES, n)", "scales_of(scales, n)",
                INT8, testing.check_decode_bound,
            ),
            (
                "scales_read_of_pages_that_are_none", "pages.exists(rows.page[n]));", "true);",
                INT8, testing.check_decode_bound,
            ),
            (
                "scores_hidden_before_they_are_scaled", "if (args.k_slots) scale_scores(",
                "if (key >= work.all_first && args.k_slots) scale_scores(", INT8_WINDOWED, testing.check_decode_bound,
            ),
            (
                "reference_does_not_follow_the_scales", "log2_of_scale(pair.low), log2_of_scale(pair.high)", "0, 0",
                INT8, check_faint_values,
            ),
            (
                "columns_of_out_in_the_order_of_tiles", "even[2 * half], odd[2 * half], even[2 * half + 1], odd",
                "even[2 * half], even[2 * half + 1], odd[2 * half], odd", INT8, testing.check_decode_bound,
            ),
            (
                "column_of_q_out_of_place", "2 * half + 1 : half + 2", "2 * half + 1 : 3 - half",
                INT8, testing.check_decode_bound,
            ),
            (
                "columns_of_q_as_integers_have_them", "NEIGHBOURS = KEY_PAIRS == Pairs::NEIGHBOURS",
                "NEIGHBOURS = false", E4M3_WINDOWED, testing.check_decode_bound,
            ),
            (
                "weights_of_the_other_keys", "[n % 2 * 2 + half] = cvt_pair", "[half * 2 + n % 2] = cvt_pair",
                INT8, testing.check_decode_bound,
            ),
            (
                "careful_path_without_scales", "load_global<Element>(row + d)) * scale;",
                "load_global<Element>(row + d));", E4M3_WINDOWED, testing.check_decode_hidden_keys,
            ),
        )
    ),
    *(
        Mutation(name, file, old, new, recipe, testing.check_decode_bound)
        for name, file, old, new, recipe in (
            ("negative_integers_off", "eight_bit.cuh", "FROM = 0x64806480", "FROM = 0x64006400", INT8),
            ("odd_bytes_are_the_even_ones", "eight_bit.cuh", "word >> 8 & BYTES", "word & BYTES", INT8),
            ("bytes_of_e4m3_not_sorted", "eight_bit.cuh", "0x3120", "0x3210", E4M3_WINDOWED),
            (
                "keys_read_beyond_a_length", "rings.cuh", "(key >= work.first_key && key < work.end_key)",
                "key >= work.first_key", IN_ONE_PIECE,
            ),
            (
                "tile_beyond_a_length_read_whole", "rings.cuh", " && (tile + 1) * TILE_K <= work.end_key;", ";",
                replace(CACHE, page_size=None, lengths=(283, 310)),
            ),
            ("rows_of_a_run_all_the_first", "rings.cuh", "address += ROW_STEP * strides.row;", "", IN_RUNS),
            (
                "rows_swizzled_as_the_first", "rings.cuh", "first[n % PERIOD]", "first[0]",
                replace(CACHE, page_size=None),
            ),
            (
                "pages_of_a_run_looked_up_at_its_neighbour", "rings.cuh", "tile * TILE_K + n * KEYS;",
                "tile * TILE_K + (n ^ 1) * KEYS;", IN_RUNS,
            ),
        )
    ),
    *(
        Mutation(f"{name}_before_a_window_{done}", "rings.cuh", old, new, READ_WINDOWED, check_decode_reads)
        for name, done, old, new in (
            ("tile", "read_whole", "rows.whole = tile * TILE_K >= work.first_key && (", "rows.whole = ("),
            ("pages", "looked_up", "return key + KEYS > work.first_key && key", "return key"),
        )
    ),
    Mutation(
        "run_of_a_missing_page_read", "rings.cuh", "        rows.whole = false;\n", "", replace(CACHE, page_size=16),
        check_decode_missing_pages,
    ),
    *(
        Mutation("mask_against_the_capacity" + kind, "cache.cuh", "uniform(length_of(args, sequence, capacity))",
                 "capacity", recipe, check)
        for kind, recipe, check in (
            ("", CACHE, testing.check_decode_bound), ("_of_forward", PREFILL, testing.check_prefill_bound),
        )
    ),
    *(
        Mutation(name, "forward.cu", old, new, recipe, check)
        for name, old, new, recipe, check in (
            (
                "rows_copied_before_they_are_written_down", "sync_threads();  // the rows are written down", "",
                PREFILL, testing.check_prefill_bound,
            ),
            (
                "rows_written_down_over_those_in_use", "(t & 1) * TILE_K * sizeof(CacheRow)", "0",
                PREFILL_ONE_STAGE, testing.check_prefill_bound,
            ),
            (
                "pages_of_the_tile_before_of_forward", "        send_for(tile - 2);\n", "",
                PREFILL, testing.check_prefill_bound,
            ),
            (
                "rows_of_a_tile_too_early", "        write_down(tile - 1);\n", "        write_down(tile);\n",
                PREFILL, testing.check_prefill_bound,
            ),
            (
                "rows_beyond_a_length_looked_up", "key >= facts.first_key && key < facts.end_key;",
                "key >= facts.first_key;", PREFILL, testing.check_prefill_bound,
            ),
            (
                "pages_read_that_do_not_exist", "if (pages.exists(page)) {", "if (true) {",
                PREFILL, check_missing_pages,
            ),
            (
                "missing_pages_told_to_nobody", "missing = true;", "missing = false;", PREFILL, check_missing_pages,
            ),
            (
                "warps_do_not_tell_each_other_of_pages",
                "return any(lane_index() < WARPS &&", "return mine && any(lane_index() < WARPS &&", PREFILL,
                check_missing_pages,
            ),
            (
                "careful_path_of_another_page", "pages.number(pages.size.divide(j)), key_head, j);",
                "pages.number(0), key_head, j);", PREFILL_WINDOW, testing.check_prefill_hidden_keys,
            ),
            (
                "hidden_values_of_a_cache_not_noticed", "ballot(inside && !missing && (",
                "ballot(false && (", PREFILL_WINDOW, testing.check_prefill_hidden_keys,
            ),
        )
    ),
    Mutation(
        "place_in_a_page_off_of_forward", "place.cuh", "const int place = j - size.divide(j) * size.value;",
        "const int place = j - size.divide(j) * (size.value - 1);", PREFILL, testing.check_prefill_bound,
    ),
    Mutation(
        "gathered_rows_not_zeroed", "tile.cuh", "const bool read = address != nullptr;", "const bool read = true;",
        PREFILL, testing.check_prefill_bound,
    ),
    Mutation("page_of_a_key_off", "place.cuh", "+ n) >> shift;", ") >> shift;", CACHE, testing.check_decode_bound),
    # Barriers and waits
    Mutation("barrier_before_a_tile_removed", "forward.cu", BARRIER, "", CAUSAL),
    Mutation(
        "barrier_before_values_removed", "forward.cu",
        "sync_threads();  // the values are here, and all have left the keys", "", ONE_STAGE,
    ),
    Mutation(
        "wait_one_group_short", "forward.cu",
        f"cp_async_wait_group<0>();\n        {BARRIER}", f"cp_async_wait_group<1>();\n        {BARRIER}", CAUSAL,
    ),
    Mutation(
        "queries_not_waited_for_without_a_tile", "forward.cu",
        "cp_async_wait_group<0>();  // q, where", "// q, where", replace(CAUSAL, keys=0),
    ),
    Mutation(
        "facts_read_without_sync_warp", "forward.cu",
        "        sync_warp();\n        load_queries", "        load_queries", CAUSAL,
    ),
    Mutation(
        "out_written_over_q_without_sync_warp", "forward.cu",
        "    sync_warp();\n\n    bool missing", "\n    bool missing", CAUSAL,
    ),
    # Lanes, rows and columns
    Mutation(
        "maximum_of_half_the_quad", "forward.cu", "maximum_of_row(top)", "maximum_of_row<2>(top)", STEEP,
    ),
    Mutation("sum_of_half_the_quad", "forward.cu", "row.finish<4>();", "row.finish<2>();", CAUSAL),
    Mutation(
        "vote_of_some_lanes", "forward.cu",
        "if (any(moved)) rescale", "if (moved && any(moved)) rescale", STEEP,
    ),
    Mutation("rows_of_the_quads_swapped", "forward.cu", "8 * half + lane / 4;", "8 * (1 - half) + lane / 4;", CAUSAL),
    Mutation(
        "columns_of_the_quad_apart", "forward.cu",
        "8 * n + lane % 4 * 2 + e % 2;", "8 * n + lane % 4 + e % 2 * 4;", CAUSAL,
    ),
    Mutation(
        "sum_of_odd_steps_left_out", "tile.cuh", "scores[block][n][e] += odd[block][n][e];", ";",
        replace(CACHE, head_dim=96), testing.check_decode_bound,
    ),
    Mutation(
        "operands_swapped", "tile.cuh",
        "mma_m16n8k16(Element{}, out[block][n], a[block], b[0], b[1]);",
        "mma_m16n8k16(Element{}, out[block][n], a[block], b[1], b[0]);", CAUSAL,
    ),
    # Addresses
    Mutation("swizzle_carries", "tile.cuh", "(lane ^ (right % SPAN))", "(lane + right % SPAN)", CAUSAL),
    Mutation(
        "stage_of_the_next_tile", "forward.cu",
        "KEY_START + tile % STAGES * KEY_BYTES", "KEY_START + (tile + 1) % STAGES * KEY_BYTES", CAUSAL,
    ),
    Mutation(
        "offset_in_32_bits", "forward.cu",
        "facts.k + static_cast<int64>(t) * TILE_K * args.k_strides.row",
        "facts.k + static_cast<int>(static_cast<uint32>(t) * TILE_K * static_cast<uint32>(args.k_strides.row))",
        FAR, check_far_rows,
    ),
    Mutation(
        "key_head_of_the_query_head", "forward.cu", f"{KEYS} / args.group);", f"{KEYS});", replace(CAUSAL, queries=200),
    ),
    Mutation(
        "rows_beyond_the_last_written", "forward.cu",
        "if (warp_row + r < place.rows() && chunk * CHUNK_ELEMENTS < args.value_dim) {",
        "if (chunk * CHUNK_ELEMENTS < args.value_dim) {", CAUSAL,
    ),
    Mutation(
        "tail_keys_not_zeroed", "tile.cuh",
        "int bytes = r >= first && r < end ? clamp", "int bytes = r >= first ? clamp", CAUSAL,
    ),
    # Masks
    Mutation("mask_one_key_too_far", "forward.cu", "j >= first && j < end", "j >= first && j <= end", CAUSAL),
    Mutation("mask_one_key_too_near", "forward.cu", "j >= first && j < end", "j > first && j < end", WINDOW),
    Mutation(
        "tile_taken_for_seen_by_all", "forward.cu",
        "key + TILE_K > facts.all_end) {", "key + TILE_K > facts.all_end + 1) {",
        replace(CAUSAL, queries=1, keys=127),
    ),
    Mutation(
        "hidden_values_not_noticed", "forward.cu",
        "ballot(inside && !missing && (", "ballot(false && (", CAUSAL, testing.check_hidden_keys_may_hold_anything,
    ),
    # Softmax
    Mutation("rescale_left_out", "forward.cu", "    if (any(moved)) rescale(out, factor);\n", "", STEEP),
    Mutation("rescale_of_the_other_row", "softmax.cuh", "factor[block][e / 2];", "factor[block][1 - e / 2];", STEEP),
    Mutation("sum_not_rescaled", "softmax.cuh", "sum = finite_sum() * factor;", "", STEEP),
    Mutation(
        "guard_of_minus_infinity_removed", "softmax.cuh",
        "reference == -INFINITE ? Real(0) : reference", "reference", WINDOW,
    ),
    Mutation("lse_in_base_2", "softmax.cuh", "(reference + log2_of(sum)) * LN_2", "(reference + log2_of(sum))", CAUSAL),
    # float32: parts and their products
    *(
        in_float32(
            f"product_{i}_{j}_left_out", "if (first && i == 0 && total == PARTS - 1) {",
            f"if (i == {i} && total == {i + j}) continue;\n            if (first && i == 0 && total == PARTS - 1) {{",
            ALIKE, check=check_split_products, file="float32.cuh",
        )
        for i, j in ((2, 0), (1, 1), (0, 1), (1, 0))
    ),
    in_float32(  # in the place of the first product, one that is too small to show
        "product_0_2_left_out", "first(BFloat16{}, sum, a[i], b[total - i][at], b[total - i][at + 1]);",
        "first(BFloat16{}, sum, a[2], b[2][at], b[2][at + 1]);", ALIKE, check=check_split_products, file="float32.cuh",
    ),
    in_float32(
        "largest_product_of_other_parts", "mma_m16n8k16(BFloat16{}, sum, a[0], b[0][at], b[0][at + 1]);",
        "mma_m16n8k16(BFloat16{}, sum, a[0], b[1][at], b[1][at + 1]);", FLOAT32, file="float32.cuh",
    ),
    in_float32(
        "small_products_forgotten", "scores[n][e] += small[n][e];", "scores[n][e] += 0 * small[n][e];", ALIKE,
        check=check_split_products, file="float32.cuh",
    ),
    in_float32(
        "small_products_with_values_forgotten", "large[m][e] + small[m][e];", "large[m][e];", FLOAT32,
    ),
    in_float32(
        "second_part_not_taken_off", "low -= to_float(BFloat16{static_cast<unsigned short>(parts[p - 1])});",
        "low -= to_float(BFloat16{static_cast<unsigned short>(parts[0])});", ALIKE, check=check_split_products,
        file="float32.cuh",
    ),
    in_float32(
        "largest_number_rounded_to_infinity", "cvt_pair(BFloat16{}, limited(low), limited(high)) :",
        "cvt_pair(BFloat16{}, low, high) :", FLOAT32, check=check_hidden_largest, file="float32.cuh",
    ),
    in_float32("halves_of_a_chunk_swapped", "quad % 2 * 8;", "(quad + 1) % 2 * 8;", FLOAT32, file="float32.cuh"),
    in_float32(
        "end_of_a_row_overrun", "inside && e < left ? load", "inside ? load", replace(FLOAT32, value_dim=23),
        file="float32.cuh",
    ),
    in_float32("tail_keys_not_zeroed", "r >= first && r < end);", "r >= first);", FLOAT32, file="float32.cuh"),
    # float32: barriers, lanes, rows
    in_float32(
        "barrier_before_keys_removed",
        "sync_threads();  // the keys are here, and all have left the values of the tile before", "", FLOAT32,
    ),
    in_float32(
        "barrier_before_values_removed", "sync_threads();  // the values are here, and all have left the keys", "",
        FLOAT32,
    ),
    in_float32(
        "maximum_of_half_the_quad", "maximum_of_row(top)", "maximum_of_row<2>(top)", STEEP32, file="float32_rows.cuh",
    ),
    in_float32(
        "sum_of_half_the_quad", "row.finish<4>();", "row.finish<2>();", FLOAT32, file="float32_rows.cuh",
    ),
    in_float32(
        "rescale_left_out", "if (!any(moved)) return;", "return;", STEEP32, file="float32_rows.cuh",
    ),
    in_float32(
        "mask_one_key_too_far", "j >= first && j < end", "j >= first && j <= end", FLOAT32, file="float32_rows.cuh",
    ),
    in_float32(
        "hidden_values_not_noticed", "ballot(inside && (", "ballot(false && (", FLOAT32,
        check=testing.check_hidden_keys_may_hold_anything, file="float32_rows.cuh",
    ),
    in_float32(
        "offset_in_32_bits", "facts.k + static_cast<int64>(t) * TILE_K * args.k_strides.row",
        "facts.k + static_cast<int>(static_cast<uint32>(t) * TILE_K * static_cast<uint32>(args.k_strides.row))",
        replace(FLOAT32, heads=1), check=check_far_rows,
    ),
    in_float32(
        "rows_beyond_the_last_written", "if (!inside || d >= args.value_dim) continue;",
        "if (d >= args.value_dim) continue;", FLOAT32, file="float32_rows.cuh",
    ),
    # float32 on Hopper: barriers and what they guard
    in_float32_sm90(
        "keys_not_waited_for_to_be_free", "mbarrier_wait(barrier(shared, KEYS_EMPTY, n), turn.parity ^ 1);", "", SPLIT,
    ),
    in_float32_sm90(
        "parity_of_free_values_of_the_other_round",
        "mbarrier_wait(barrier(shared, VALUES_EMPTY, n), turn.parity ^ 1);",
        "mbarrier_wait(barrier(shared, VALUES_EMPTY, n), turn.parity);", SPLIT,
    ),
    in_float32_sm90("parity_not_flipped", "            parity ^= 1;\n", "", SPLIT),
    in_float32_sm90(
        "keys_of_the_third_part_released_in_their_product", "wgmma_wait_group<2>();", "wgmma_wait_group<3>();", SPLIT,
    ),
    in_float32_sm90(
        "keys_of_the_second_part_released_in_their_product", "wgmma_wait_group<1>();", "wgmma_wait_group<2>();", SPLIT,
    ),
    in_float32_sm90(
        "keys_of_the_first_part_released_in_their_product",
        "        wgmma_wait_group<0>();\n        pin(small);\n        pin(large);\n"
        "        release(KEYS_EMPTY, turn.stage * PARTS);",
        "        release(KEYS_EMPTY, turn.stage * PARTS);\n"
        "        wgmma_wait_group<0>();\n        pin(small);\n        pin(large);", SPLIT,
    ),
    in_float32_sm90(
        "values_released_in_their_product",
        "            wgmma_wait_group<0>();\n            pin(small_out);\n            pin(large_out);\n"
        "            release(VALUES_EMPTY, turn.stage * PANELS + panel);",
        "            release(VALUES_EMPTY, turn.stage * PANELS + panel);\n"
        "            wgmma_wait_group<0>();\n            pin(small_out);\n            pin(large_out);", SPLIT,
    ),
    in_float32_sm90(
        "keys_of_the_other_consumer_not_released",
        "                release(KEYS_EMPTY, turn.stage * PARTS + part);\n", "", SPLIT,
    ),
    in_float32_sm90(
        "values_of_the_other_consumer_not_released",
        "wait_values(panel);\n                release(VALUES_EMPTY, turn.stage * PANELS + panel);\n",
        "wait_values(panel);\n", SPLIT_WINDOW,
    ),
    in_float32_sm90(
        "keys_released_by_one_consumer_alone", "mbarrier_init(barrier(shared, KEYS_EMPTY, n), 4 * CONSUMERS);",
        "mbarrier_init(barrier(shared, KEYS_EMPTY, n), 4);", SPLIT,
    ),
    in_float32_sm90(
        "one_part_of_q_waited_for", "mbarrier_init(barrier(shared, QUERIES_FULL, n), PARTS);",
        "mbarrier_init(barrier(shared, QUERIES_FULL, n), 1);", SPLIT,
    ),
    in_float32_sm90(
        "one_part_of_values_waited_for", "mbarrier_init(barrier(shared, VALUES_FULL, n), PARTS);",
        "mbarrier_init(barrier(shared, VALUES_FULL, n), 1);", SPLIT,
    ),
    in_float32_sm90(
        "queries_not_waited_for",
        "if (span.first < span.end) mbarrier_wait(barrier(shared, QUERIES_FULL, consumer), 0);", "", SPLIT,
    ),
    in_float32_sm90("barriers_not_shown_to_copies", "        fence_mbarrier_init();\n", "", SPLIT),
    in_float32_sm90(
        "fence_before_scores_left_out",
        "wgmma_fence();\n#pragma unroll\n            for (int i = PARTS - 1 - j; i > 0; --i) multiply_keys",
        "#pragma unroll\n            for (int i = PARTS - 1 - j; i > 0; --i) multiply_keys", SPLIT,
    ),
    # float32 on Hopper: which parts, which rows, which keys
    in_float32_sm90(
        "products_of_second_parts_of_q_left_out",
        "for (int i = PARTS - 1 - j; i > 0; --i) multiply_keys",
        "for (int i = PARTS - 1 - j; i > 1; --i) multiply_keys", SPLIT_ALIKE, check=check_split_products,
    ),
    in_float32_sm90(
        "products_of_second_parts_of_weights_left_out",
        "for (int i = PARTS - 1 - j; i > 0; --i) multiply_values",
        "for (int i = PARTS - 1 - j; i > 1; --i) multiply_values", SPLIT_ALIKE, check=check_split_products,
    ),
    in_float32_sm90(
        "small_products_forgotten", "ONE_SUM ? large[i] : large[i] + small[i];", "large[i];", SPLIT_ALIKE,
        check=check_split_products,
    ),
    in_float32_sm90(
        "small_products_with_values_forgotten", "ONE_SUM ? large_out[i] : large_out[i] + small_out[i];",
        "large_out[i];", SPLIT_ALIKE, check=check_split_products,
    ),
    in_float32_sm90(
        "first_part_of_q_alone", "(consumer * PARTS + i) * QueryTile::BYTES) / 16",
        "(consumer * PARTS) * QueryTile::BYTES) / 16", SPLIT,
    ),
    in_float32_sm90(
        "values_of_another_part", "* PANELS + panel) * PARTS + j;", "* PANELS + panel) * PARTS + PARTS - 1 - j;", SPLIT,
    ),
    in_float32_sm90("panel_of_other_columns", "{PANEL * panel, tile * TILE_K,", "{0, tile * TILE_K,", TWO_PANELS),
    in_float32_sm90("panel_to_other_columns", "out[PANEL / 8 * panel + i / 4]", "out[i / 4]", TWO_PANELS),
    in_float32_sm90(
        "rows_of_the_other_consumer", "place.tile * TILE_Q + consumer * ROWS, query_head",
        "place.tile * TILE_Q, query_head", SPLIT,
    ),
    in_float32_sm90("head_of_packed_rows", "place.head / args.pack;\n", "place.head;\n", SPLIT),
    in_float32_sm90("key_head_of_another_group", "place.head / args.group;\n    Turn", "place.head;\n    Turn", SPLIT),
    in_float32_sm90(
        "last_tile_left_out", "(end - 1) / TILE_K + 1} : Span", "(end - 1) / TILE_K} : Span", SPLIT,
    ),
    in_float32_sm90("first_tile_left_out", "Span{first / TILE_K,", "Span{(first + TILE_K - 1) / TILE_K,", SPLIT_WINDOW),
    in_float32_sm90(
        "tile_taken_for_seen_by_all", "key + TILE_K > all_end)", "key + TILE_K > all_end + 1)",
        replace(SPLIT, heads=1, key_heads=1, queries=1, keys=191),
    ),
    in_float32_sm90("keys_before_a_window_seen", "if (key < all_first || key", "if (key", SPLIT_WINDOW),
    in_float32_sm90(
        "mask_one_key_too_far", "j >= first && j < end", "j >= first && j <= end", SPLIT, file="float32_rows.cuh",
    ),
    in_float32_sm90("rescale_left_out", "if (!any(moved)) return;", "return;", STEEP_SPLIT, file="float32_rows.cuh"),
    in_float32_sm90(
        "hidden_values_not_noticed", "ballot(inside && (", "ballot(false && (", SPLIT,
        check=testing.check_hidden_keys_may_hold_anything, file="float32_rows.cuh",
    ),
    # two parts, one sum
    in_float32_sm90(
        "one_sum_begun_anew", "multiply_keys(j > 0 ? small : large, 0, j, j == PARTS - 1 || (j == 0 && !ONE_SUM));",
        "multiply_keys(j > 0 ? small : large, 0, j, j == PARTS - 1 || j == 0);", SPLIT_ALIKE,
        check=check_split_products, precision="tf32",
    ),
    in_float32_sm90(
        "second_parts_left_out", "for (int i = PARTS - 1 - j; i > 0; --i) multiply_keys",
        "for (int i = PARTS - 1 - j; i > 1; --i) multiply_keys", SPLIT_ALIKE, check=check_split_products,
        precision="tf32",
    ),
    in_float32_sm90(
        "stage_beyond_the_last", "if (++stage == STAGES) {", "if (++stage > STAGES) {", SPLIT, precision="tf32",
    ),
    # the step before
    in_parts("stride_between_parts", "to + p * part_bytes,", "to + p * part_bytes / 2,", SPLIT),
    in_parts("columns_beyond_the_last_read", "columns - column - 4 * n;", "columns - column;", SPLIT),
    in_parts(
        "heads_of_q_for_all", "args.schedule.heads / args.head_blocks * heads;", "args.schedule.heads;",
        replace(SPLIT, heads=3, key_heads=1, queries=128),
    ),
    in_parts("packed_rows_of_one_head", "(args.pack == 1 ? 0 : r % args.pack)", "0", SPLIT),
    in_parts("packed_rows_of_other_queries", "query_of(r, args.pack) * strides.row", "r * strides.row", SPLIT),
    in_parts("blocks_of_heads_not_apart", "* (of_q ? args.pack : 1);", "* 1;", SPLIT),
    in_parts("rows_beyond_the_last_split", "clamp(rows, 0, first + TILE_Q)", "first + TILE_Q", SPLIT),
    in_parts("last_rows_not_split", "(rows - 1) / TILE_Q + 1;", "rows / TILE_Q;", SPLIT),
    in_parts("values_from_keys", "(of_k ? args.k : args.v)", "(of_k ? args.k : args.k)", SPLIT),
    in_parts(
        "largest_number_rounded_to_infinity", "split<true>(pairs", "split<false>(pairs", SPLIT,
        check=check_hidden_largest,
    ),
    in_parts(
        "offset_in_32_bits", "base + r * strides.row", "base + static_cast<int>(r * strides.row)",
        replace(SPLIT, heads=1, key_heads=1), check=check_far_rows,
    ),
    # float32 and float64: rows again
    in_float32(
        "weights_of_all_lanes_summed", "if (!WIDE || j % WARP == lane) row.sum", "row.sum", FLOAT32,
        check=testing.check_hidden_keys_may_hold_anything, file="careful.cuh",
    ),
    in_float64(
        "keys_of_short_sums_left_out", "start += ADDED)", "start += ADDED + 1)", replace(FLOAT64, seed=120),
        check=testing.check_hidden_keys_may_hold_anything, file="careful.cuh",
    ),
    # float64
    in_float64(
        "barrier_before_keys_removed",
        "sync_threads();  // q and the keys are here for all warps, and all have left the values", "", FLOAT64,
    ),
    in_float64(
        "barrier_before_values_removed",
        "sync_threads();  // the values are here for all warps, and all have left the keys", "", FLOAT64,
    ),
    in_float64("values_of_other_keys", "n / 2 * 8 + n % 2)", "n % 2 * 8 + n / 2)", FLOAT64),
    in_float64("rows_of_q_swapped", "r / 8 % 2 * 8, x", "(1 - r / 8 % 2) * 8, x", FLOAT64),
    in_float64("terms_of_q_apart", "d / 8 * 2 + d % 2;", "d % 2 * 2 + d / 8;", FLOAT64),
    in_float64("mask_one_key_too_far", "j >= first && j < end", "j >= first && j <= end", FLOAT64),
    in_float64(
        "tile_taken_for_seen_by_all", "key + TILE_K > mask.end_key(top)) {", "key + TILE_K > mask.end_key(top) + 1) {",
        replace(FLOAT64, queries=1, keys=127),
    ),
    in_float64("row_past_the_end_is_read", "r >= first && row + r < end ?", "r >= first && row + r <= end ?", FLOAT64),
    in_float64("rescale_left_out", "if (!any(", "if (any(", STEEP64),
    in_float64("rescale_of_the_other_row", "out[n][e] *= factor[e / 2];", "out[n][e] *= factor[1 - e / 2];", STEEP64),
    in_float64("columns_of_the_other_warp", "(first_column() + lane", "(COLUMNS - first_column() + lane", SHARED_ROWS),
    in_float64("lse_of_no_warp", "if (first_column == 0 &&", "if (first_column < 0 &&", FLOAT64),
    in_float64(
        "hidden_values_not_noticed", "ballot(inside && (", "ballot(false && (", FLOAT64,
        check=testing.check_hidden_keys_may_hold_anything,
    ),
    in_float64("exponential_short_of_a_term", "n < 12;", "n < 11;", FLOAT64, file="softmax.cuh"),
    in_float64(
        "exponential_halved", "low_word(rounded) + 1023", "low_word(rounded) + 1022", FLOAT64, file="softmax.cuh",
    ),
    # Hopper
    Mutation(
        "keys_released_before_their_product_ends", "forward_sm90.cu",
        "wgmma_wait_group<1>();\n            pin(scores);\n            release(KEYS_EMPTY, KEYS);",
        "release(KEYS_EMPTY, KEYS);\n            wgmma_wait_group<1>();\n            pin(scores);", HOPPER,
        engine="sm90",
    ),
    Mutation(
        "queries_released_before_their_last_product", "forward_sm90.cu",
        "tile == first_tile) release(QUERIES_EMPTY, consumer);\n            hide();",
        "tile == first_tile + 1) release(QUERIES_EMPTY, consumer);\n            hide();", HOPPER, engine="sm90",
    ),
    Mutation(
        "parity_of_values_not_flipped", "forward_sm90.cu", "if (VALUES == 1) value.parity ^= 1;", "", HOPPER,
        engine="sm90",
    ),
    Mutation(
        "weights_rewritten_under_their_product", "forward_sm90.cu",
        f"wgmma_wait_group<0>();\n{PINS}            release(VALUES_EMPTY, VALUES);",
        "release(VALUES_EMPTY, VALUES);", HOPPER, engine="sm90",
    ),
    Mutation(
        "proxy_fence_removed", "forward_sm90.cu", "            fence_proxy_async();\n", "", BOXED, engine="sm90",
    ),
    Mutation(
        "staging_filled_before_it_has_left", "forward_sm90.cu",
        "if (lane == 0) cp_async_bulk_wait_group_read<0>();  // the panels that were here have left", "",
        BOXED, engine="sm90",
    ),
    Mutation(
        "rows_of_the_first_consumer_for_all", "forward_sm90.cu",
        "place.row + consumer * args.rows, args.pack), place.batch0", "place.row, args.pack), place.batch0", HOPPER,
        engine="sm90",
    ),
    Mutation(
        "tiles_of_other_consumers_not_skipped", "forward_sm90.cu", "        skip(uniform(done.before));\n", "",
        replace(HOPPER, causal=False, window=(20, 3)), engine="sm90",
    ),
    Mutation(
        "hopper_tile_taken_for_plain", "forward_sm90.cu", "if (tile >= plain_end) hide", "if (tile > plain_end) hide",
        HOPPER, engine="sm90",
    ),
    Mutation(
        "hopper_rescale_left_out", "forward_sm90.cu", "                raise<false>(rows, out, scores, score);\n", "",
        replace(HOPPER, scale=4.0), engine="sm90",
    ),
    Mutation(
        "hopper_hidden_values_not_noticed", "forward_sm90.cu", "ballot(inside && (", "ballot(false && (", HOPPER,
        testing.check_hidden_keys_may_hold_anything, engine="sm90",
    ),
    # Gradients: before and behind the products
    in_backward(
        "delta_of_half_the_threads", "lanes < ROW_THREADS; lanes *= 2) sums", "lanes < 4; lanes *= 2) sums", GRADIENT,
        file="backward_rows.cu",
    ),
    in_backward(
        "delta_without_the_end_of_a_row", "wanted[r] && n < columns; ++n", "wanted[r] && n < columns - 4; ++n",
        GRADIENT, file="backward_rows.cu",
    ),
    in_backward(
        "delta_of_the_last_round", "if (column == r) delta", "if (column <= r) delta", GRADIENT,
        file="backward_rows.cu",
    ),
    in_backward(
        "gradient_of_lse_added", "delta - dlse", "delta + dlse", GRADIENT, check_gradient_of_lse,
        file="backward_rows.cu",
    ),
    in_backward(
        "dq_of_other_rows",
        "sums[m].x[2 * half] * args.scale, sums[m].x[2 * half + 1] * args.scale",
        "sums[m].x[2 - 2 * half] * args.scale, sums[m].x[3 - 2 * half] * args.scale", GRADIENT,
        file="backward_finish.cu",
    ),
    in_backward(
        "dq_scaled_in_every_second_column", "sums[m].x[2 * half + 1] * args.scale}",
        "sums[m].x[2 * half + 1]}", GRADIENT, file="backward_finish.cu",
    ),
    in_backward(
        "chunks_of_dq_swapped_in_a_quad", "shuffle_xor(high ? low_pair[n] : high_pair[n], 2);",
        "shuffle_xor(high ? high_pair[n] : low_pair[n], 2);", GRADIENT, file="backward_finish.cu",
    ),
    in_backward(
        "dq_of_spoilt_rows_kept", "ballot((half ? zeros[1]", "ballot(false && (half ? zeros[1]", UNSEEN_KEYS,
        testing.check_unseen_have_zero_gradient, file="backward_finish.cu",
    ),
    in_backward(
        "dq_of_one_spoilt_row_of_a_warp", "spoilt &= ~(0xfu << (4 * quad));", "spoilt = 0;", UNSEEN_KEYS,
        testing.check_unseen_have_zero_gradient, file="backward_finish.cu",
    ),
    in_backward(
        "spoilt_dv_kept", "if (dv) careful_dk_dv", "if (false) careful_dk_dv", GRADIENT,
        testing.check_unseen_have_zero_gradient, file="backward_finish.cu",
    ),
    in_backward(
        "spoilt_dv_of_one_head", "head < (key_head + 1) * args.group", "head < key_head * args.group + 1", GRADIENT,
        testing.check_unseen_have_zero_gradient, file="careful_gradients.cuh",
    ),
    in_backward(
        "careful_ds_without_delta", "ds = p * (dp - row_delta);", "ds = p * dp;", UNSEEN_KEYS,
        testing.check_unseen_have_zero_gradient, file="careful_gradients.cuh",
    ),
    # Gradients in float32
    *(
        in_float32_gradients(
            f"scores_without_product_{i}_{j}", "multiply_small(small[n + m], a, b, 2 * m, false);",
            without_product((i, j), "false"), ALIKE, check=check_split_gradients, file="float32.cuh",
        )
        for i, j in ((0, 2), (1, 1))
    ),
    *(
        in_float32_gradients(
            f"gradients_without_product_{i}_{j}", "multiply_small(small[n + m], a, b, 2 * m, step == 0);",
            without_product((i, j), "step == 0"), THREE_KEYS, check=check_split_gradients, file="float32.cuh",
        )
        for i, j in SMALL_PRODUCTS
    ),
    in_float32_gradients(
        "small_products_of_gradients_forgotten", "ONE_STEP ? small[n][e] : sum[n][e] + small[n][e];",
        "ONE_STEP ? small[n][e] : sum[n][e];", GRADIENT32, file="float32.cuh",
    ),
    in_float32_gradients(
        "barrier_before_a_visit_removed",
        "sync_threads();  // the tiles are here for all warps, and all have left ds^T", "",
        replace(GRADIENT32, queries=300),
    ),
    in_float32_gradients(
        "barrier_before_next_dout_removed", "sync_threads();  // all have left dout, and ds^T is here", "",
        replace(SUMS_OF_TWO, queries=150),
    ),
    in_float32_gradients(
        "barrier_before_next_q_removed", "sync_threads();  // all have left q", "", replace(GRADIENT32, queries=150),
    ),
    in_float32_gradients(
        "own_ds_read_unsynchronised", "                    sync_warp();\n", "", GRADIENT32,
    ),
    in_float32_gradients(
        "dout_of_the_visit_before", "of_douts(visit(0) + 1", "of_douts(visit(0)", replace(GRADIENT32, queries=150),
    ),
    in_float32_gradients(
        "sums_of_a_mate_forgotten", "if constexpr (QUERY_PARTS == 2) take_sums(dv, shared + VALUE_START);", "",
        SUMS_OF_TWO,
    ),
    in_float32_gradients("sums_of_a_mate_too_early", "sync_threads();  // the sums are here", "", SUMS_OF_TWO),
    in_float32_gradients(
        "columns_of_the_first_of_two", "16 * (n / 2 * COLUMN_PARTS + part)", "16 * (n / 2 * COLUMN_PARTS)", TWO_HALVES,
    ),
    in_float32_gradients(
        "hidden_weights_kept", "is_seen(e / 2, 8 * n + e % 2) ? at_most : -INFINITE;", "at_most;", GRADIENT32,
    ),
    in_float32_gradients(
        "first_sums_added", "agenda.listed(visit(1)).turn == 0", "agenda.listed(visit(1)).turn == 1",
        replace(GRADIENT32, keys=300),
    ),
    in_float32_gradients(
        "last_careful_sums_forgotten", "    sum.join();\n    sum.store(", "    sum.store(",
        replace(UNSEEN_KEYS, dtype="float32"), check=testing.check_unseen_have_zero_gradient,
        file="careful_gradients.cuh",
    ),
    # Gradients: the order of visits and of sums
    in_backward(
        "last_rows_that_see_a_tile_left_out", "mask.end_query(last_key, args.queries)",
        "mask.end_query(item.key_tile * TILE_K, args.queries)", SLIDING, file="visits.cuh",
    ),
    in_backward(
        "dk_of_the_first_head_alone", "item.key_head = head % key_heads;", "item.key_head = 0;", THREE_HEADS,
        file="visits.cuh",
    ),
    in_backward(
        "heads_of_the_last_wave_not_cut",
        "all_heads - wave.first_head < args.section ? all_heads - wave.first_head : args.section", "args.section",
        THREE_HEADS, file="visits.cuh",
    ),
    in_backward(
        "tiles_of_passes_before_one_too_many", "whole * pass + (rest < pass ? rest : pass)",
        "whole * pass + (rest < pass ? pass : rest)", ROUND, file="visits.cuh",
    ),
    in_backward(
        "turns_of_every_pass_from_0", "return tiles_before(args, args.key_tiles, item.pass) + (", "return (", ROUND,
        file="visits.cuh",
    ),
    in_backward(
        "turn_after_those_that_go_round", "later < 0 ? later + item.tiles : later",
        "later <= 0 ? later + item.tiles : later", ROUND, file="visits.cuh",
    ),
    # Gradients: the products
    in_backward(
        "barrier_before_a_visit_removed",
        "sync_threads();  // the tiles are here for all warps, and all have left what is filled next", "", LONG,
    ),
    in_backward("ds_read_without_barrier", "sync_threads();  // p^T and ds^T are here", "", SHARED_KEYS),
    in_backward(
        "visit_waits_one_group_short", "cp_async_wait_group<0>();\n            sync_threads();  // the tiles are",
        "cp_async_wait_group<1>();\n            sync_threads();  // the tiles are", LONG,
    ),
    in_backward(
        "gradients_read_without_barrier", "sync_threads();  // the tiles are full",
        "", LONG,
    ),
    in_backward("first_sums_added", "listed(visit(1)).turn == 0", "listed(visit(1)).turn == 1", LONG),
    in_backward(
        "turn_not_awaited", "while (ORDERED && turns < agenda.listed(visit(1)).turn) turns = turns_had();", "", LONG,
    ),
    in_backward(
        "visits_listed_half_a_list_early", "agenda.work().index), n + WARP / 2);", "agenda.work().index), n);",
        VISITED,
    ),
    in_backward(
        "mates_take_each_others_part_alike", "(mate() + other) % MATES * QUERIES", "other % MATES * QUERIES",
        SHARED_KEYS,
    ),
    in_backward(
        "dq_columns_of_the_mate", "+ 2 * dq_mate * 4 +", "+ 2 * (DQ_MATES - 1 - dq_mate) * 4 +", SHARED_KEYS,
    ),
    in_backward(
        "gradients_one_query_too_far", "column < end[block][half]", "column <= end[block][half]", SLIDING,
    ),
    in_backward(
        "gradients_of_keys_beyond_the_last", "if (r < keys && chunk * CHUNK_ELEMENTS < dim) {",
        "if (chunk * CHUNK_ELEMENTS < dim) {", replace(LONG, value_dim=32),
    ),
    in_backward(
        "spoilt_keys_not_flagged", "if (finite != 0.0f) store_global(suspect, 1);", "", GRADIENT,
        testing.check_unseen_have_zero_gradient,
    ),
    # Gradients in float64
    in_gradients64(
        "first_rows_not_awaited", "cp_async_wait_group<0>();\n            sync_threads();", "sync_threads();", LONG64,
    ),
    in_gradients64(
        "rows_shown_before_they_are_there",
        "cp_async_wait_group<0>();\n                    if (!is_last(n)) bar_arrive(there, THREADS);",
        "if (!is_last(n)) bar_arrive(there, THREADS);\n                    cp_async_wait_group<0>();", LONG64,
    ),
    in_gradients64("rows_filled_while_they_are_read", "bar_sync(among, THREADS / 2);", "", LONG64),
    *(
        in_gradients64(
            f"{name}_not_awaited", f"bar_sync({barrier}, THREADS);", f"bar_arrive({barrier}, THREADS);", LONG64,
        )
        for name, barrier in (
            ("queries", "QUERIES_THERE"), ("douts", "DOUTS_THERE"), ("weights", "WEIGHTS_THERE"),
            ("readers_of_douts", "DOUTS_READ"), ("slopes", "SLOPES_THERE"),
        )
    ),
    in_gradients64("weights_of_the_mate_not_awaited", "bar_sync(AMONG_WEIGHTS, THREADS / 2);", "", LONG64),
    in_gradients64(
        "slopes_of_the_mate_not_awaited", "bar_sync(AMONG_SLOPES, THREADS / 2);\n                if (n > 0)",
        "if (n > 0)", LONG64,
    ),
    in_gradients64("turn_handed_on_too_early", "release(n - 1);", "release(n);", LONG64, blocks=4),
    in_gradients64("first_sums_added", "agenda.listed(n).turn == 0", "agenda.listed(n).turn == 1", LONG64),
    in_gradients64(
        "turn_not_awaited", "while (ORDERED && turns < agenda.listed(n).turn) turns = turns_had();", "", LONG64,
        blocks=4,
    ),
    in_gradients64("keys_of_dq_mixed_up", "key = t / 2 + t % 2 * 8;", "key = t / 2 * 8 + t % 2;", GRADIENT64),
    in_gradients64("columns_of_the_mate", "column = mate() * 8 +", "column = (1 - mate()) * 8 +", GRADIENT64),
    in_gradients64("one_query_too_far", "query < end[key])", "query <= end[key])", SLIDING64),
    in_gradients64("keys_beyond_the_last", "if (r >= keys) continue;", "", GRADIENT64),
    in_gradients64(
        "spoilt_keys_not_flagged", "if (finite != 0) store_global(suspect, 1);", "", GRADIENT64,
        testing.check_unseen_have_zero_gradient,
    ),
    in_gradients64(
        "hidden_weights_seen", "x = is_seen(block, octet, e, half) ? at_most : -INFINITE;", "x = at_most;", LONG64,
    ),
    # Gradients on Hopper: fences
    in_backward_sm90(
        "ds_not_fenced", "show(DSCORES_FULL, stage); }", "sync_warp(), release(DSCORES_FULL, stage); }",
        HOPPER_GRADIENT,
    ),
    in_backward_sm90(
        "part_not_fenced", "show(PARTS_FULL, index); }", "sync_warp(), release(PARTS_FULL, index); }", HOPPER_GRADIENT,
    ),
    in_backward_sm90(
        "grads_not_fenced", "fence_proxy_async();", "if (AWAITED) fence_proxy_async();", HOPPER_GRADIENT,
        file="gradients_sm90.cuh",
    ),
    # Waits, parities, releases
    in_backward_sm90(
        "stages_released_under_dv_and_dk", "wgmma_wait_group<0>();  // for dv and dk of the visit before", "",
        HOPPER_GRADIENT,
    ),
    in_backward_sm90(
        "parity_of_ds_not_flipped", "parity_of(visit - 1));\n            await_token();",
        "parity_of(visit + 1));\n            await_token();", HOPPER_GRADIENT,
    ),
    in_backward_sm90(
        "parity_of_parts_not_flipped", "wait(PARTS_EMPTY, index, visit % 2 ^ 1)",
        "wait(PARTS_EMPTY, index, 1)", HOPPER_GRADIENT,
    ),
    in_backward_sm90(
        "ds_written_before_it_is_read", "self.wait(DSCORES_EMPTY, stage, parity_of(visit));  // here", "// here",
        HOPPER_GRADIENT,
    ),
    in_backward_sm90(
        "part_overwritten_before_it_has_left", "cp_async_bulk_wait_group_read<0>();\n            mbarrier_arrive",
        "mbarrier_arrive", HOPPER_GRADIENT,
    ),
    in_backward_sm90(
        "gradient_overwritten_before_it_has_left",
        "if (first_thread()) cp_async_bulk_wait_group_read<0>();  // what lay there has left", "", HOPPER_GRADIENT,
        file="gradients_sm90.cuh",
    ),
    in_backward_sm90(
        "late_dq_left_out", "self.store_part(visit - 1, dq);\n        self.show_part();\n", "", HOPPER_GRADIENT,
    ),
    in_backward_sm90("first_token_not_given", "if (index == 1) give_token();", "", HOPPER_GRADIENT),
    # Turns
    in_backward_sm90(
        "hopper_turn_not_awaited", "while (load_acquire(counter) != step.turn) {\n                }", "",
        HOPPER_GRADIENT, blocks=2,
    ),
    in_backward_sm90(
        "turn_handed_on_before_the_sum_is_there",
        "cp_async_bulk_wait_group<0>();\n                fence_proxy_async_global();\n                add_release",
        "add_release", replace(HOPPER_ROUND, heads=4, key_heads=4), blocks=3,
    ),
    in_backward_sm90("turn_not_handed_on", "add_release(counter, 1);", "", HOPPER_ROUND, blocks=3),
    # Masks and places
    in_backward_sm90("hopper_gradients_one_query_too_far", "column < end[half]", "column <= end[half]", HOPPER_WINDOW),
    in_backward_sm90(
        "hopper_gradients_one_odd_query_too_far", "column + 1 < end[half]", "column + 1 <= end[half]", HOPPER_WINDOW,
    ),
    in_backward_sm90("hidden_weights_kept", "hide(weights, shown);", "", HOPPER_GRADIENT),
    in_backward_sm90("hidden_gradients_of_scores_kept", "hide(dscores, shown);", "", HOPPER_GRADIENT),
    in_backward_sm90(
        "hidden_weights_kept_by_a_role", "if (tested) hide(weights, self.shown(number, visit));", "", ROLES,
    ),
    in_backward_sm90(
        "kept_keys_of_the_first_consumer", "row = first_key_of(index) + warp_index() % 4 * 16 + lane % 16;",
        "row = warp_index() % 4 * 16 + lane % 16;", PANELS,
    ),
    in_backward_sm90("keys_not_kept", "        self.keep(kept);\n", "", PANELS),
    in_backward_sm90("tile_taken_for_seen_whole", "key + ROWS > end_key", "key + ROWS > end_key + 64", HOPPER_GRADIENT),
    in_backward_sm90(
        "parts_of_dq_swapped", "rows = PARTS_ARE_ROWS ? index * ROWS", "rows = PARTS_ARE_ROWS ? (1 - index) * ROWS",
        HOPPER_GRADIENT,
    ),
    in_backward_sm90(
        "panels_of_dq_swapped", "PARTS_ARE_ROWS ? 0 : index;", "PARTS_ARE_ROWS ? 0 : 1 - index;",
        PANELS,
    ),
    in_backward_sm90(
        "head_of_the_group_left_out", "const int head = item().key_head * args.group + place.head,",
        "const int head = item().key_head * args.group,", HOPPER_ROUND,
    ),
    # Roles
    in_backward_sm90(
        "weights_written_before_they_are_read", "self.wait(WEIGHTS_EMPTY, 0, visit % 2 ^ 1);", "", ROLES,
    ),
    in_backward_sm90("weights_not_waited_for", "self.wait(WEIGHTS_FULL, 0, visit % 2);", "", ROLES),
    in_backward_sm90(
        "keys_overwritten_under_the_other_product", "bar_sync(TOKEN, CONSUMERS * WARPGROUP);  // the other",
        "bar_sync(TOKEN + 5, WARPGROUP);  // the other", ROLES,
    ),
    in_backward_sm90(
        "keys_brought_over_gradients", "        self.flush();\n        self.release(KEYS_EMPTY);",
        "        self.release(KEYS_EMPTY);", ROLES,
    ),
    in_backward_sm90(
        "values_overwritten_under_the_other_product", "bar_sync(TOKEN + 1, CONSUMERS * WARPGROUP);\n",
        "bar_sync(TOKEN + 5, WARPGROUP);\n", ROLES,
    ),
    in_backward_sm90(
        "step_given_away_before_it_is_read",
        "mbarrier_wait(barrier(shared, PARTS_FULL, consumer), visit % 2);\n"
        "            mbarrier_arrive(barrier(shared, STEPS_EMPTY, stage_of<STEPS>(visit)));",
        "mbarrier_arrive(barrier(shared, STEPS_EMPTY, stage_of<STEPS>(visit)));\n"
        "            mbarrier_wait(barrier(shared, PARTS_FULL, consumer), visit % 2);", HOPPER_GRADIENT,
    ),
    # dq alone
    in_backward_dq("keys_of_the_wrong_stage", "n > 0 ? 1 - stage : stage, n > 1", "stage, n > 1", ROLES),
    in_backward_dq(
        "keys_released_under_dq", "wgmma_wait_group<0>();\n        pin(dq);\n        if (n > 0)",
        "pin(dq);\n        if (n > 0)", ROLES,
    ),
    in_backward_dq(
        "values_overwritten_under_dp", "mbarrier_wait(barrier(shared, VALUES_EMPTY), n % 2 ^ 1);", "", ROLES,
    ),
    in_backward_dq(
        "dq_not_fenced", "fence_proxy_async();", "if (!AWAITED) fence_proxy_async();", ROLES,
        file="gradients_sm90.cuh",
    ),
    in_backward_dq("last_keys_left_out_of_dq", "(end_key - 1) / TILE_K + 1", "end_key / TILE_K", ROLES),
    in_backward_dq("rows_of_a_warp_mixed_up", "+ 8 * half + lane_index() / 4;", "+ lane_index() / 4;", ROLES),
)  # fmt: skip
