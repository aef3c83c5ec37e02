r"""How large an error may be: an a-priori, componentwise bound, and the only place with tolerances.

The bound is derived here from the unit roundoffs of the path that computed a result. It says nothing about typical
errors, which are smaller; it is never exceeded, and a fault that shows in the numbers breaks it.

Model
-----
Write ``s_j`` for the scores of one row, ``p_j = exp(s_j - lse)`` for its weights, T for the largest score, u for the
unit roundoff of the arithmetic, n for the keys the row sees, and ``gamma(x) = x / (1 - x)`` for the relative error of x
worth of roundoff (Higham, *Accuracy and Stability of Numerical Algorithms*, section 3.1).

**Scores.** A dot product of D terms errs by at most ``gamma((D + x) u) sum |q_d k_jd|`` in any order, x the roundings
of a product before it is summed. A tensor core aligns 8 or 16 exact products and the accumulator to the largest of
them and cuts what is aligned away (Fasi et al., *Numerical behavior of NVIDIA tensor cores*, 2021): less than 2^-24 of
the largest for each, and 2^-23 of the sum, so D terms cost less than D roundings of u = 2^-23. Times scale: ``a_j``.

**Split numbers.** On a GPU a float32 x is the sum of three bfloat16, each the rounding of what is left: ``|x_1| <= 2^-8
|x|``, ``|x_2| <= 2^-17 |x|``, and nothing is left but what is below 2^-126, where bfloat16 ends. Of the nine products
of parts the six largest are made, exactly, and ``x_1 y_2 + x_2 y_1 + x_2 y_2``, below 2^-24 |x y|, are left out. ``x_0
y_0`` have a sum of their own: eight at a time cost eight cuts of 2^-24, one of the sum so far, and 2^-23, so D of them
0.7 D roundings of u = 2^-23. The other five, together below 2^-6.9 |x y|, have another: 5 D roundings, of so much less,
0.05 D. What is left out costs half of a u, adding the two sums another half: x is 2, which covers what is more than D
for few terms. Each of the six products may be flushed. Where "tf32" will do, on sm90, a number has two parts and a
product the three largest of four: ``x_1 y_1`` and what is left of either number are below 2^-15 |x y|, 2^8 u (one
product of TF32 would be within 2^-10). They have one sum, small ones first, so that little is cut beside large ones.

**Weights.** A weight is ``2^(c x_j - r)``, x_j the dot product, ``c = scale log2 e``, r the row's reference. Any r
serves, since out and lse share it; it lags the largest score so far by at most ``lag`` (8 in units of log2). When it
rises, what was summed before is rescaled. Rounding c costs ``2 u (T - s_j)``, for what all scores share cancels. The
arguments of the exponential and of the rescales after it add up to at most ``T - s_j + 2 lag``, and cost u of that.
Each exponential errs by e. How often is key j rescaled? Less than once a tile; and where there is a lag at most ``1 +
(T - s_j) / lag`` times, since each rise exceeds it. With R_j rescales the weight is ``p_j (1 + t_j)``, up to a factor
of all, where

    |t_j| <= expm1(a_j + u (3 (T - s_j) + 2 lag) + (1 + R_j) e)

and ``T_j`` is p_j times that, plus the least normal number, below which a weight may be flushed to 0. For exact sums

    out' - out = sum p_j t_j (v_j - out) / sum p_j (1 + t_j),    |out' - out| <= sum T_j |v_j - out| / (1 - sum T_j)

of which Cauchy and Schwarz make matrix products: ``sum T |v - out| <= sqrt(sum T * sum T (v - out)^2)``.

Where keys are shared among parts that are added at the end, as `decode` does, each addition is a rescale more, and its
argument another lag at most beyond the distance.

**8-bit caches.** On a GPU both products are in float16, which holds every element of int8 and E4M3. A row of bfloat16
queries is brought to float16 by a power of two, so that an element errs by 2^-39 of the row's largest if it underflows;
the factors of a head and a slot cost a rounding each, as if of every product. A scale g_j of value j multiplies the
weight before it is rounded. Then the reference follows ``s_j + log G_j``, G_j being ``|g_j|`` kept within 2^-32 and
2^32, and so do rises and rescales: in R_j and in the sum of their arguments ``max(s + log G) - s_j - log G_j`` is the
distance, and the argument of the exponential is off by ``|log G_j|``. A weight that underflows errs by 2^-25 of the
largest ``p G``, over ``|g_j|``; and so much larger than 1 as that is are the numbers that may be flushed.

**Rotation.** What `decode` rotates, ``x c - y s``, takes a rounding of each product, one of their difference, and one
of ``u_f`` to the format it is kept in, where it may underflow: it errs by ``gamma(2 u) (|x c| + |y s|)``, and then by
u_f of itself, together e. A product of a rotated q and a key, rotated or not, moves by ``e_q |k| + |q| e_k + e_q e_k``,
which adds to the error of its score. The bound is infinite where a rotated number leaves the format.

**Sums.** Where weights meet v in 16 bits, each errs by ``u_p`` of itself, and in float16 by 2^-25 of the row's
reference if it underflows. Summing n products errs by ``gamma(n u + R_j u)``, summing the weights themselves by the
like with the depth of their sum instead of n. Where the terms of a tile are summed before they join the others, n is no
more than the longest tile has, and each tile costs a rounding more: tensor cores cut, and what a long sum cuts off adds
up. Products of split weights and values err by ``u_p = 2^-24``. These meet ``p_j |v_j|`` and ``p_j |out|``: nothing
cancels. Whatever the weights, out lies in the hull of the v_j, which bounds the error where T_j is no use. Division and
its factor cost ``2 u``, the format of the output its roundoff; numbers below the smallest normal one may be flushed to
0.

**lse** is ``(r + log2 sum) log 2``. It takes ``sum T_j``, the error of c, now in full: ``2 u |s_j|``, that of the sum
of weights, of the logarithm, and four roundings of itself.

**Gradients.** P is made again from lse, so its relative error is ``expm1`` of the errors of s and lse and of the
exponential and its argument ``c x_j - lse log2 e``: rounding c, log2 e and the product with lse costs ``2 u (|s_j| +
|lse|)``, the difference ``u |s_j - lse|``. A weight that came out above 1 may be set to 1, which is no farther away.
With B, C the errors of ``dout . v`` (a product on tensor cores) and of ``delta = dout . out`` (summed in float32, as
all that follows is, or in float64; out being known to its own bound), ``ds = p (dout . v - delta + dlse)`` errs by ``p
(B + C + 4 u |...|) + (error of p) |...|``, where p is not rounded yet. P and dS are rounded, each once, where they meet
the next product in 16 bits, and in float16 may underflow; a dS beyond the format makes the bound infinite. Errors pass
through the last products linearly. Their sums take n terms and cost n roundings in any order: over the keys for dq, of
which each tile makes a part and parts are added; over the rows of all heads of a group for dk and dv. Of split numbers
tiles make parts of dk and dv too, so that n is no more than the longest has, and each costs a rounding more. The scale
is rounded and multiplied at the end, and what broadcasting stretched is added before the last rounding.

In float64 every u is twice that of the format, since the reference rounds too. Tensor cores round each sum of a product
in float64 to nearest, in an order that is not written down, so that D terms cost D roundings there too, as they do in
`decode`, by multiply-adds; the exponential is a polynomial that errs by one unit in the last place, the reference's by
another.

The bound is infinite where a score leaves the format of the accumulator, or a result that of the output.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from .reference import (
    Heads,
    dequantised,
    double,
    is_8bit,
    pair_columns,
    product,
    rotate,
    scores,
    sequences,
    slots,
    softmax,
    visible,
    weighted,
)

LAG = 8 * math.log(2)  # of the kernels' softmax
LARGEST_8BIT = 512  # more than any element
LEAD = 2.0**-32, 2.0**32  # scales of values that the reference follows
MOST = 600.0  # of an exponent's error: it is hopeless, but must not overflow


@dataclass(frozen=True)
class Path:
    """The constants of one way to compute attention.

    Attributes
    ----------
    u : float
        Unit roundoff of float additions and multiplications.
    u_sum : float
        Roundoff of each term of a product's sum; larger on tensor cores, which may cut.
    product : int
        Roundings of each product before it is summed.
    u_weight : float
        Relative roundoff of the weights where they meet v, beyond ``u``.
    least_weight : float
        Absolute error of a weight that underflows, relative to the row's largest.
    exponential, logarithm : float
        Relative error of the exponential, error of the logarithm.
    lag : float
        How far the reference may lag the largest score, natural units.
    merges : int
        How often the parts that hold a key are added to others.
    tile : int
        Fewest keys between two rises of the reference.
    depth : int
        Weights that share one chain of additions are every ``depth``-th.
    block : float
        Most keys whose terms are summed by themselves, a tile; infinite where there is one sum for all.
    gradient_block : float
        The same of pairs whose terms of a gradient are.
    u_out, least_out, largest_out : float
        Roundoff, absolute error of underflow, and largest number of the output.
    tiny, largest : float
        Smallest normal and largest number of sums.
    least_query : float
        Absolute error of an element of q that underflows, relative to the row's largest.
    """

    u: float
    u_sum: float
    product: int
    u_weight: float
    least_weight: float
    exponential: float
    logarithm: float
    lag: float
    tile: int
    depth: int
    u_out: float
    least_out: float
    largest_out: float
    tiny: float
    largest: float
    merges: int = 0
    block: float = math.inf
    gradient_block: float = math.inf
    least_query: float = 0.0

    def gamma(self, terms):
        """Relative error of a product's sum of so many terms."""
        return gamma(terms * self.u_sum)

    def tiles(self, keys):
        """Additions of a tile's sum to that of the others, for rows that see so many keys."""
        return 0 * keys if self.block == math.inf else (keys + self.tile - 2) // self.tile + 2

    def gradient_roundoff(self, heads, terms):
        """Roundoff of a gradient's sum over so many pairs of each of some heads."""
        if self.gradient_block == math.inf:
            return (heads * terms + 4) * self.u_sum
        tiles = heads * self.tiles(terms)  # each head's are by themselves
        return min(heads * terms, self.gradient_block) * self.u_sum + (tiles + 4) * self.u

    def sum_roundoff(self, keys):
        """Roundoff of a sum over so many keys of weights times values."""
        return np.minimum(keys, self.block) * self.u_sum + self.tiles(keys) * self.u


_F32 = {"u": 2.0**-24, "tiny": 2.0**-126, "largest": 2.0**127}
_F64 = {"u": 2.0**-52, "tiny": 2.0**-1022, "largest": 2.0**1023}
_OUT = {
    "float16": {"u_out": 2.0**-11, "least_out": 2.0**-25, "largest_out": 65504.0},
    "bfloat16": {"u_out": 2.0**-8, "least_out": 2.0**-126, "largest_out": 2.0**127},
    "float32": {"u_out": 0.0, "least_out": 2.0**-126, "largest_out": 2.0**127},
    "float64": {"u_out": 0.0, "least_out": 2.0**-1022, "largest_out": 2.0**1023},
}


def _paths():
    paths = {}
    for dtype, out in _OUT.items():
        base = _F64 if dtype == "float64" else _F32
        u = base["u"]
        ulps = 2 if dtype == "float64" else 8  # one unit in the last place, here and in the reference; four, says NumPy
        plain = {
            **base, **out, "u_sum": u, "product": 2, "u_weight": 0.0, "least_weight": 0.0, "lag": 0.0, "tile": 64,
            "depth": 1, "exponential": ulps * u, "logarithm": ulps * u,
        }  # fmt: skip
        paths[f"numpy {dtype}"] = Path(**plain)
        gpu = {**plain, "product": 0, "lag": LAG, "tile": 16, "depth": 8}
        if dtype != "float64":  # ex2.approx and lg2.approx
            gpu |= {"exponential": 2.0**-22, "logarithm": 2.0**-22}
        if out["u_out"]:  # weights meet v in 16 bits, on tensor cores
            gpu |= {"u_sum": 2.0**-23, "u_weight": out["u_out"], "least_weight": min(out["least_out"], 2.0**-25)}
            paths[f"sm90 {dtype}"] = Path(**gpu)
        if dtype == "float32":  # split; the parts of a product may be flushed, each by itself
            gpu |= {"u_sum": 2.0**-23, "u_weight": 2.0**-24, "product": 2, "tiny": 8 * base["tiny"]}
            gpu |= {"block": 96, "gradient_block": 128}
            paths["sm90 float32"] = Path(**gpu)
            paths["sm90 tf32"] = Path(**gpu | {"block": 128, "u_weight": 2.0**-15, "product": 2 + 2**8})
        paths[f"portable {dtype}"] = Path(**gpu)
    for engine in ("numpy", "portable"):  # of three parts, "tf32" or not
        paths[f"{engine} tf32"] = paths[f"{engine} float32"]
    return paths


PATHS = _paths()
# Decode in float32 is not split, and summed tile by tile all the same; in float64 tiles have 8 keys. That each of them
# is summed by itself is not counted on there, for the reference sums as it comes.
_MULTIPLY_ADDS = {
    path: replace(path, **changes)
    for path, changes in (
        (PATHS["portable float32"], {"u_sum": 2.0**-24, "u_weight": 0.0, "product": 0, "tiny": 2.0**-126}),
        (PATHS["portable float64"], {"tile": 8}),
    )
}


def path_of(path):
    """The `Path` of a name such as "portable bfloat16" (engine and dtype), or the Path itself."""
    return path if isinstance(path, Path) else PATHS[path]


@dataclass(frozen=True)
class Bounded:
    """Exact results in float64 and how far a computed one may be from them."""

    out: np.ndarray
    lse: np.ndarray
    out_bound: np.ndarray
    lse_bound: np.ndarray

    def take(self, b, part):
        """Make a part what the results of sequence b are."""
        for name in ("out", "lse", "out_bound", "lse_bound"):
            getattr(self, name)[b] = getattr(part, name)


def _unknown(shape):
    """Results of a shape of which nothing is known: NaN."""
    shapes = shape, shape[:-1]
    return Bounded(*(np.full(shape, np.nan) for shape in shapes), *(np.zeros(shape) for shape in shapes))


def worst(actual, bounded):
    """Worst error over bound of a result; infinity where shape, NaN or infinity differ from what is exact.

    Parameters
    ----------
    actual : array or tuple of arrays
        What was computed, NumPy or CuPy: out, (out, lse), or gradients.
    bounded : Bounded, or list of (exact, bound)
        As `forward`, `decode` and `backward` return them.

    Returns
    -------
    worst : float
        The result is right if this is at most 1; 0 for empty arrays.

    Examples
    --------
    >>> worst(np.array([1.0, np.nan]), [(np.array([1.25, np.nan]), np.array([0.5, 0.0]))])
    0.5
    """
    actual = actual if isinstance(actual, (tuple, list)) else (actual,)
    if isinstance(bounded, Bounded):
        bounded = [(bounded.out, bounded.out_bound), (bounded.lse, bounded.lse_bound)][: len(actual)]
    return max(_worst_of(ratio(array, *pair)) for array, pair in zip(actual, bounded, strict=True))


def _worst_of(ratios):
    return math.inf if ratios is None else float(ratios.max(initial=0.0))


def ratio(actual, exact, bound):
    """Error over bound of each element, infinite where it cannot be compared; None where shapes differ."""
    actual = double(actual)
    if actual.shape != exact.shape:
        return None
    with np.errstate(all="ignore"):
        alike = (actual == exact) | (np.isnan(actual) & np.isnan(exact)) | ((bound == np.inf) & ~np.isnan(exact))
        within = np.abs(actual - exact) / bound
    return np.where(alike, 0.0, np.where(np.isnan(within), np.inf, within))


def forward(q, k, v, *, path, lengths=None, page_table=None, scale=None, causal=False, window=None, rows=None):
    """Exact out and lse, and the error that `cuflash.forward` may make on a path.

    Parameters
    ----------
    q, k, v, lengths, page_table, scale, causal, window, rows
        As in `cuflash.reference.forward`.
    path : str or Path
        Engine and dtype, such as "portable bfloat16", or constants of your own. Of float32 with ``precision="tf32"``
        engine and "tf32": "sm90 tf32".

    Returns
    -------
    Bounded

    Examples
    --------
    >>> x = np.eye(2, dtype=np.float32)
    >>> bool(forward(x, x, x, path="numpy float32").out_bound.max() < 1e-5)
    True
    """
    given = {"path": path_of(path), "scale": scale, "causal": causal, "window": window, "rows": rows}
    if lengths is None:
        return _forward(q, k, v, None, **given)
    results = _unknown((*q.shape[:2], q.shape[2] if rows is None else len(rows), v.shape[-1]))
    for b, operands in enumerate(sequences(q, k, v, lengths, page_table)):
        results.take(b, _forward(*operands, None, **given))
    return results


def _forward(q, k, v, errors, *, path, scale, causal, window, rows=None, value_scales=None):
    """`forward` of q and k that differ from their exact values by ``errors``, a pair of arrays or None.

    ``value_scales`` (key_heads, keys) multiply the weights before these are rounded.
    """
    heads = Heads(q, k, v)
    mask = visible(heads.queries, heads.keys, causal=causal, window=window, rows=rows)
    chosen = slice(None) if rows is None else rows
    shape = (*heads.shape, len(mask))
    out, lse = np.zeros((*shape, heads.value_dim)), np.full(shape, -np.inf)
    out_bound, lse_bound = np.zeros_like(out), np.zeros_like(lse)
    factor = heads.scale(scale)
    for place, (q1, k1, v1) in heads:
        inherited = errors and [x[i] for x, i in zip(errors, heads.places(place), strict=False)]
        scales1 = None if value_scales is None else value_scales[heads.places(place)[1]]
        row = _Rows(path, q1[chosen], k1, v1, mask, factor, inherited, scales1)
        out[place], lse[place] = row.out, row.lse
        out_bound[place], lse_bound[place] = row.out_bound(), row.lse_bound()
    return Bounded(*(heads.seen(x) for x in (out, lse, out_bound, lse_bound)))


LARGEST_K_SCALE = 2.0**90  # beyond it, products of scaled queries may leave float32


def decode(
    q, k_cache, v_cache, *, path, lengths=None, page_table=None, k_scale=None, v_scale=None, kv_format=None, k_new=None,
    v_new=None, rotary=None, rotary_interleaved=False, scale=None, causal=True, window=None,
):  # fmt: skip
    """Exact out and lse of `cuflash.decode`, and the error it may make on a path.

    Parameters
    ----------
    q, k_cache, v_cache, lengths, page_table, k_scale, v_scale, kv_format, k_new, v_new, rotary, rotary_interleaved
    scale, causal, window
        As in `cuflash.reference.decode`.
    path : str or Path
        As in `forward`, by q's dtype. On a GPU keys are shared among warps and blocks.

    Returns
    -------
    Bounded
    """
    path = path_of(path)
    path = _MULTIPLY_ADDS.get(path, path)
    if path.lag:
        path = replace(path, merges=2)
    scaled = None
    if is_8bit(k_cache):
        path, given = _from_8bit(path), ((k_cache, k_scale), (v_cache, v_scale))
        ones = (slots(np.ones(1) if x is None else x, cache.shape) for cache, x in given)
        scaled = sequences(q, *ones, lengths, page_table)
        k_cache, v_cache = (dequantised(cache, x, kv_format) for cache, x in given)
    followed = path.lag > 0 and v_scale is not None and v_scale.ndim > 1  # by the reference
    operands = q, k_cache, v_cache, lengths, page_table
    appended = {"k_new": k_new, "v_new": v_new, "rotary": rotary, "rotary_interleaved": rotary_interleaved}
    results = _unknown((*q.shape[:-1], v_cache.shape[-1]))
    rounded = sequences(*operands, **appended, rotate=partial(rotation_error, path=path))
    for b, (exact, error) in enumerate(zip(sequences(*operands, **appended), rounded, strict=True)):
        one, value_scales = path, None
        if scaled is not None:
            _, k_scales, v_scales = next(scaled)
            value_scales = v_scales[..., 0] if followed else None
            if np.abs(k_scales).max(initial=0) > LARGEST_K_SCALE:
                one = replace(path, largest=0.0)
        if exact is None:
            continue
        errors = None
        if rotary is not None and exact[1].shape[1] > 0:
            errors = [error[0], error[1].copy()]
            errors[1][:, : exact[1].shape[1] - (0 if k_new is None else q.shape[-2])] = 0  # those of the cache
        part = _forward(
            *exact, errors, path=one, scale=scale, causal=causal, window=window, value_scales=value_scales
        )
        results.take(b, part)
    return results


def rotation_error(x, cos, sin, *, path, interleaved=False):
    """How far a path's rotation of x may be from `cuflash.reference.rotate`; infinite where it leaves the format."""
    path = path_of(path)
    sizes = np.abs(rotate(x, cos, sin, interleaved=interleaved))
    errors, half = np.zeros_like(sizes), cos.shape[-1]
    x, cos, sin = (np.abs(double(each)) for each in (x, cos, sin))
    with np.errstate(all="ignore"):
        columns = pair_columns(half, interleaved)
        for one, other in (columns, columns[::-1]):
            errors[..., one] = gamma(2 * path.u) * (x[..., one] * cos + x[..., other] * sin)
            errors[..., one] += path.tiny * (4 + x[..., one] + x[..., other] + cos + sin)
        pairs = slice(0, 2 * half)
        errors[..., pairs] = _rounded(path, sizes[..., pairs], errors[..., pairs])
    return np.where(np.isnan(errors), 0, errors)


def _from_8bit(path):
    """The constants of decode from 8-bit caches, on the engine and for the dtype of q that a path names."""
    if not path.lag:  # keys and values are rounded
        return replace(path, product=path.product + 1, u_weight=path.u)
    half = PATHS["portable float16"]
    return replace(
        path, product=3, u_weight=half.u_weight + 2 * path.u, least_weight=half.least_weight,
        least_query=2.0**-39 if path.u_out > half.u_out else 0.0,
    )  # fmt: skip


def backward(dout, q, k, v, *, path, scale=None, causal=False, window=None, dlse=None):
    """Exact gradients, and the error that `cuflash.backward` may make on a path, given that path's out and lse.

    Parameters
    ----------
    dout, q, k, v, scale, causal, window, dlse
        As in `cuflash.reference.backward`.
    path : str or Path
        As in `forward`.

    Returns
    -------
    gradients : list of (exact, bound)
        For dq, dk and dv; arrays of the shapes of q, k and v.
    """
    path, heads = path_of(path), Heads(q, k, v)
    mask = visible(heads.queries, heads.keys, causal=causal, window=window)
    dout = heads.full(double(dout))
    dlse = np.zeros(dout.shape[:-1]) if dlse is None else heads.full(double(dlse))
    factor = heads.scale(scale)
    arrays = heads.q, heads.k, heads.v
    exact, bound, total = ([np.zeros(x.shape) for x in arrays] for _ in range(3))
    for place, (q1, k1, v1) in heads:
        row = _Rows(path, q1, k1, v1, mask, factor)
        parts_of = row.gradients(dout[place], dlse[place], heads.group)
        for sums, parts in zip((exact, bound, total), parts_of, strict=True):
            for grad, index, part in zip(sums, heads.places(place), parts, strict=True):
                grad[index] += part
    results = []
    added = heads.group * math.prod(heads.shape[:-1])  # float additions of whole gradients, at most
    with np.errstate(all="ignore"):
        for values, errors, sizes, x in zip(exact, bound, total, (q, k, v), strict=True):
            values, errors, sizes = (heads.unstretched(y, x) for y in (values, errors, sizes))
            errors = errors + path.u * (added + 2) * (sizes + errors)
            results.append((values, _rounded(path, values, errors)))
    return results


def _rounded(path, values, errors):
    """Errors after rounding to the output's format; infinite where that overflows."""
    errors = errors * (1 + path.u_out) + path.u_out * np.abs(values) + path.least_out
    return np.where(np.abs(values) + errors > path.largest_out, np.inf, errors)


class _Rows:
    """Rows of one head: exact values, and the errors of what leads to them. All planes are (rows, keys)."""

    def __init__(self, path, q, k, v, mask, scale, inherited=None, value_scales=None):
        self.path, self.q, self.k, self.v, self.scale = path, q, k, v, scale
        self.s = scores(q, k, mask, scale)
        self.seen = self.s != -np.inf
        self.p, self.lse = softmax(self.s)
        self.out = weighted(self.p, v, self.seen)
        self.alive = self.seen.any(axis=1)
        self.keys = mask.sum(axis=1)  # of each row
        with np.errstate(all="ignore"):
            q_size, k_size = (np.where(np.isfinite(x), np.abs(x), 0) for x in (q, k))
            moved, lost = 0, np.zeros(self.seen.shape, bool)
            if inherited is not None:
                q_error, k_error = (np.where(np.isfinite(x), x, 0) for x in inherited)
                moved = product(q_error, (k_size + k_error).T) + product(q_size, k_error.T)
                q_size, k_size = q_size + q_error, k_size + k_error
                q_lost, k_lost = (np.isinf(x).any(axis=1) for x in inherited)
                lost = self.seen & (q_lost[:, None] | k_lost)
            sizes = np.where(self.seen, product(q_size, k_size.T), 0)
            flushed = q_size.sum(axis=1)[:, None] + k_size.sum(axis=1) + sizes + q.shape[1]
            self.score_error = abs(scale) * (path.gamma(q.shape[1] + path.product) * sizes + moved)
            self.score_error += max(1, abs(scale)) * path.tiny * flushed
            if path.least_query:
                least = path.least_query * q_size.max(axis=1, initial=0)[:, None] + 2.0**-100
                self.score_error += abs(scale) * least * k_size.sum(axis=1)
            most = max(1, 2 * abs(scale))
            largest = np.maximum(sizes.max(axis=1, initial=0), q_size.max(axis=1, initial=0))
            self.overflows = self.alive & ((most * largest > path.largest) | lost.any(axis=1))
            # A row that is NaN is NaN; what its errors are is of no matter, so long as they are numbers.
            valid = ~np.isnan(self.lse)[:, None]
            live = self.seen & valid
            self.weights = np.where(live, self.p, 0)
            top = np.where(self.alive & valid[:, 0], self.s.max(axis=1, initial=-np.inf), 0)
            distance = np.where(live, top[:, None] - self.s, 0)
            sizes, reach, shifted = np.ones(k.shape[0]), distance, 0.0
            if value_scales is not None:
                sizes = np.abs(double(value_scales))
                lead = np.log(np.clip(np.where(np.isnan(sizes), 0, sizes), *LEAD))
                ahead = np.where(live, self.s + lead, -np.inf).max(axis=1, initial=-np.inf)
                top = np.where(np.isfinite(ahead), ahead, 0)
                reach, shifted = np.where(live, top[:, None] - self.s - lead, 0), np.abs(lead)
            # The largest weight against the reference, and by how much more each weight counts that underflows.
            self.first = np.where(self.alive & valid[:, 0], np.exp(top - self.lse), 0)
            self.fainter = np.where(sizes > 0, 1 / np.where(sizes > 0, sizes, 1), 1)
            self.tiny = path.tiny * np.maximum(1, self.first[:, None]) * (1 if value_scales is None else LARGEST_8BIT)
            rises = np.maximum(self.keys + path.tile - 2, 0)[:, None] // path.tile
            self.rises = np.minimum(rises, 1 + reach / path.lag) if path.lag else rises + 0 * distance
            self.rises = self.rises + path.merges
            self.relative = self.score_error + path.u * (2 * distance + reach + shifted + (2 + path.merges) * path.lag)
            self.relative += (1 + self.rises) * path.exponential
            self.weight_error = np.expm1(np.minimum(self.relative, MOST)) * self.weights + self.tiny * live  # p T
            self.mean_error = self.weight_error.sum(axis=1)
            self.heavier = self.weights + self.weight_error
            depth = np.ceil(np.minimum(self.keys, path.block) / path.depth) + 4 + path.tiles(self.keys)
            depth = np.clip(depth, 0, np.maximum(self.keys - 1, 0))
            self.sum_error = gamma((depth[:, None] + self.rises) * path.u)

    def out_bound(self):
        """Error of out."""
        path = self.path
        with np.errstate(all="ignore"):
            v = np.where(np.isfinite(self.v), self.v, 0)
            size, out = np.abs(v), np.where(np.isfinite(self.out), self.out, 0)
            hull = size.max(axis=0, initial=0) + np.abs(out)  # at least any |v_j - out|
            largest = size.max(axis=0, initial=0)
            unit = np.where(largest > 0, largest, 1)  # squares must not overflow
            v1, out1, error1 = v / unit, out / unit, self.mean_error[:, None]
            squares = product(self.weight_error, v1**2) + error1 * out1**2
            square = np.maximum(squares - 2 * out1 * product(self.weight_error, v1), 0) + 2.0**-50 * squares
            moved = unit * np.sqrt(error1 * square)  # at least sum p T |v_j - out|

            faint = np.minimum(self.heavier, path.least_weight * self.first[:, None] * self.fainter)
            coarse = np.maximum(path.u_weight * self.heavier, faint)
            coarse += gamma(path.sum_roundoff(self.keys)[:, None] + self.rises * path.u) * self.heavier
            sums = product(coarse, size) + np.abs(out) * (self.sum_error * self.heavier).sum(axis=1)[:, None]
            sums += self.tiny * (4 * self.keys[:, None] + product(self.seen.astype(float), size))
            rest = (1 - self.mean_error)[:, None] * (1 - self.sum_error.max(axis=1, initial=0))[:, None]
            errors = np.where(rest > 0.5, (moved + sums) / rest, np.inf)
            worst_sums = path.u_weight + path.least_weight + gamma(2 * path.sum_roundoff(self.keys + 4)[:, None])
            errors = np.minimum(errors, hull * (1 + 2 * worst_sums))
            errors += 3 * path.u * (np.abs(out) + errors)  # a reciprocal within two roundings, and a product
            errors = _rounded(path, out, errors)
            overflows = np.exp(path.lag) * product(self.seen.astype(float), size) > path.largest
            # An infinite v_j shows unless its weight may have become 0.
            lost = self.seen & ~(self.weights > 2 * (path.least_weight + path.tiny))
            overflows |= (product(lost.astype(float), np.isinf(self.v).astype(float)) > 0) & np.isinf(self.out)
            errors = np.where(overflows | self.overflows[:, None], np.inf, errors)
        return np.where(self.alive[:, None], errors, 0)

    def lse_bound(self):
        """Error of lse."""
        path = self.path
        with np.errstate(all="ignore"):
            lse = np.where(np.isfinite(self.lse), self.lse, 0)
            s = np.where(self.weights > 0, self.s, 0)
            shift = (self.heavier * (2 * path.u * np.abs(s) + self.sum_error)).sum(axis=1)
            rest = 1 - self.mean_error
            errors = np.where(rest > 0.5, (self.mean_error + shift) / rest, np.inf)
            # lse moves by no more than the score that moves most.
            live = self.weight_error > 0
            most = self.relative + 2 * path.u * np.abs(self.s) + self.sum_error
            most = np.where(live, most, 0).max(axis=1, initial=0)
            errors = np.minimum(errors, most)
            sums = np.abs(np.log(np.where(self.first > 0, self.first, 1)))
            errors += path.logarithm * np.maximum(1, path.lag + sums)
            errors += 4 * path.u * (np.abs(lse) + errors) + path.tiny
            errors = np.where(self.overflows, np.inf, errors)
        return np.where(self.alive, errors, 0)

    def gradients(self, dout, dlse, group):
        """Exact gradients (dq, dk, dv), their errors, and sums of absolute terms; heads of a group share dk and dv."""
        path, seen, p = self.path, self.seen, self.weights
        with np.errstate(all="ignore"):
            exact = self._exact_gradients(dout, dlse)
            q, k, v, dout, dlse, s, lse, out = (
                np.where(np.isfinite(x), x, 0) for x in (self.q, self.k, self.v, dout, dlse, self.s, self.lse, self.out)
            )
            size, width = np.abs(dout), dout.shape[1]
            delta = (dout * out).sum(axis=1)
            dp_error = path.gamma(width + path.product) * product(size, np.abs(v.T))
            dp_error += path.tiny * (width + size.sum(axis=1)[:, None] + np.abs(v).sum(axis=1))
            out_error = self.out_bound()
            delta_error = gamma((width + 1) * path.u) * (size * (np.abs(out) + out_error)).sum(axis=1)
            delta_error += (size * out_error).sum(axis=1, where=size > 0) + 2 * path.u * (np.abs(delta) + np.abs(dlse))
            slope = np.where(seen, product(dout, v.T) - (delta - dlse)[:, None], 0)
            slope_error = dp_error + delta_error[:, None] + 3 * path.u * np.abs(slope)

            exponent_error = 2 * path.u * (np.abs(s) + np.abs(lse)[:, None]) + path.u * np.abs(s - lse[:, None])
            relative = self.score_error + self.lse_bound()[:, None] + path.exponential + exponent_error
            p_error = np.where(seen, p * np.expm1(np.minimum(relative, MOST)) + path.tiny, 0)
            ds = p * slope
            ds_error = np.where(seen, (p + p_error) * slope_error + p_error * np.abs(slope), 0)
            ds_error += path.u * (np.abs(ds) + ds_error)
            if path.u_weight and (np.abs(ds) + ds_error).max(initial=0) > path.largest_out:
                ds_error = np.where(seen, np.inf, 0)
            p_error, ds_error = (
                e + np.maximum(path.u_weight * (np.abs(x) + e), np.minimum(path.least_weight, np.abs(x) + e))
                for x, e in ((p, p_error), (ds, ds_error))
            )
            queries, keys = seen.shape
            by_rows, by_keys = (gamma(path.gradient_roundoff(*n)) for n in ((group, queries), (1, keys)))
            scale, errors, totals = abs(self.scale), [], []
            for left, left_error, right, share, factor in (
                (ds, ds_error, k, by_keys, scale),
                (ds.T, ds_error.T, q, by_rows, scale),
                (p.T, p_error.T, dout, by_rows, 1.0),
            ):
                # Where both q and scale are small their product may be flushed; so may any term.
                tiny = path.tiny * max(1, factor) * (2 * left.shape[1] + np.abs(left).sum(axis=1)[:, None])
                total = factor * product(np.abs(left) + left_error, np.abs(right))
                errors.append(factor * product(left_error, np.abs(right)) + share * total + tiny)
                totals.append(total)
            errors = [np.where(np.isnan(e), np.inf, e) for e in errors]
        return exact, errors, totals

    def _exact_gradients(self, dout, dlse):
        seen = self.seen
        dout, dlse = np.where(self.alive[:, None], dout, 0), np.where(self.alive, dlse, 0)
        delta = (dout * self.out).sum(axis=1) - dlse
        ds = np.where(seen, self.p * (product(dout, self.v.T) - delta[:, None]), 0)
        dq, dk = weighted(ds, self.k, seen), weighted(ds.T, self.q, seen.T)
        return self.scale * dq, self.scale * dk, weighted(self.p.T, dout, seen.T)


def gamma(nu):
    """Relative error of so much roundoff, Higham's ``n u / (1 - n u)``; infinite from 1 on."""
    with np.errstate(all="ignore"):
        return np.where(np.asarray(nu) < 1, nu / (1 - np.asarray(nu)), np.inf)
