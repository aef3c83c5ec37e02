"""Attention by its formulas, in float64: slow, obvious, and independent of every engine.

For query row i and key j of one head::

    s_ij = scale * q_i . k_j           for the keys row i sees
    lse_i = log sum_j exp(s_ij)        p_ij = exp(s_ij - lse_i)
    out_i = sum_j p_ij v_j

and for gradients dout of out and dlse of lse::

    ds_ij = p_ij * (dout_i . v_j - dout_i . out_i + dlse_i)
    dq_i = scale * sum_j ds_ij k_j     dk_j = scale * sum_i ds_ij q_i     dv_j = sum_i p_ij dout_i

Sums run over the keys a row sees, so what it does not see cannot matter. A row without keys, or whose scores are all
-inf, has out 0, lse -inf and no gradient. Inputs may be NumPy or CuPy arrays; results are NumPy arrays.
"""

import math

import ml_dtypes
import numpy as np


def visible(queries, keys, *, causal=False, window=None, rows=None):
    """Which keys each row sees.

    Parameters
    ----------
    queries, keys : int
        Lengths.
    causal : bool or {"bottom-right", "top-left"}
        With ``offset = keys - queries`` (0 for "top-left"), row i sees no key beyond ``i + offset``.
    window : (left, right), optional
        Row i sees no key outside ``[i + offset - left, i + offset + right]``; None is unlimited.
    rows : array of int, optional
        The query rows wanted; the mask then has these only.

    Returns
    -------
    mask : array of bool, shape (queries, keys)

    Examples
    --------
    >>> visible(2, 4, causal=True).astype(int)
    array([[1, 1, 1, 0],
           [1, 1, 1, 1]])
    """
    offset = 0 if causal == "top-left" else keys - queries
    i = np.arange(queries)[slice(None) if rows is None else rows]
    distance = np.arange(keys)[None, :] - i[:, None] - offset
    mask = np.ones(distance.shape, bool)
    left, right = window or (None, None)
    if left is not None:
        mask &= distance >= -left
    if right is not None:
        mask &= distance <= right
    if causal:
        mask &= distance <= 0
    return mask


def forward(q, k, v, *, lengths=None, page_table=None, scale=None, causal=False, window=None, rows=None):
    """Out and lse of attention in float64.

    Parameters
    ----------
    q, k, v : arrays, shapes (..., heads, queries, head_dim), (..., key_heads, keys, head_dim or value_dim)
        As in `cuflash.forward`.
    lengths, page_table, scale, causal, window
        As in `cuflash.forward`.
    rows : array of int, optional
        The query rows wanted; results then have these only.

    Returns
    -------
    out : array, shape (..., heads, queries, value_dim), float64
    lse : array, shape (..., heads, queries), float64

    Examples
    --------
    >>> x = np.eye(2)
    >>> forward(x, x, x, scale=0)[1]
    array([0.69314718, 0.69314718])
    """
    if lengths is not None:
        cache = {"lengths": lengths, "page_table": page_table}
        whole = decode(q, k, v, **cache, scale=scale, causal=causal, window=window)
        return tuple(x if rows is None else x[:, :, rows] for x in whole)
    heads = Heads(q, k, v)
    mask = visible(heads.queries, heads.keys, causal=causal, window=window, rows=rows)
    chosen = slice(None) if rows is None else rows
    out = np.zeros((*heads.shape, len(mask), heads.value_dim))
    lse = np.full((*heads.shape, len(mask)), -np.inf)
    for place, (q1, k1, v1) in heads:
        s = scores(q1[chosen], k1, mask, heads.scale(scale))
        p, lse[place] = softmax(s)
        out[place] = weighted(p, v1, s != -np.inf)
    return heads.seen(out), heads.seen(lse)


def backward(dout, q, k, v, *, scale=None, causal=False, window=None, dlse=None):
    """Gradients of q, k and v in float64.

    Parameters
    ----------
    dout : array, shape (..., heads, queries, value_dim)
        Gradient of out.
    q, k, v, scale, causal, window
        As in `forward`.
    dlse : array, shape (..., heads, queries), optional
        Gradient of lse.

    Returns
    -------
    dq, dk, dv : arrays of the shapes of q, k, v, float64
        Summed over the axes that broadcasting stretched and over the query heads of a group.
    """
    heads = Heads(q, k, v)
    mask = visible(heads.queries, heads.keys, causal=causal, window=window)
    dout = heads.full(double(dout))
    dlse = np.zeros(dout.shape[:-1]) if dlse is None else heads.full(double(dlse))
    grads = [np.zeros(x.shape) for x in (heads.q, heads.k, heads.v)]
    factor = heads.scale(scale)
    for place, (q1, k1, v1) in heads:
        s = scores(q1, k1, mask, factor)
        seen = s != -np.inf
        p, _ = softmax(s)
        alive = seen.any(axis=1)
        dout1 = np.where(alive[:, None], dout[place], 0)
        dp = np.where(seen, product(dout1, v1.T), 0)
        out1 = weighted(p, v1, seen)
        delta = np.sum(dout1 * out1, axis=1) - np.where(alive, dlse[place], 0)
        ds = np.where(seen, p * (dp - delta[:, None]), 0)
        dq, dk, dv = (grad[index] for grad, index in zip(grads, heads.places(place), strict=True))
        dq += factor * weighted(ds, k1, seen)
        dk += factor * weighted(ds.T, q1, seen.T)
        dv += weighted(p.T, dout1, seen.T)
    return tuple(heads.unstretched(grad, x) for grad, x in zip(grads, (q, k, v), strict=True))


def decode(
    q, k_cache, v_cache, *, lengths=None, page_table=None, k_scale=None, v_scale=None, kv_format=None, k_new=None,
    v_new=None, rotary=None, rotary_interleaved=False, scale=None, causal=True, window=None,
):  # fmt: skip
    """Out and lse of `cuflash.decode` in float64: `forward` on each sequence's own keys. No cache is written.

    Parameters
    ----------
    q, k_cache, v_cache, lengths, page_table, k_scale, v_scale, kv_format, k_new, v_new, rotary, rotary_interleaved
    scale, causal, window
        As in `cuflash.decode`.

    Returns
    -------
    out : array, shape (sequences, heads, queries, value_dim), float64
    lse : array, shape (sequences, heads, queries), float64
        Both NaN for a sequence whose new keys do not fit.
    """
    if is_8bit(k_cache):
        k_cache, v_cache = (dequantised(*x, kv_format) for x in ((k_cache, k_scale), (v_cache, v_scale)))
    appended = {"k_new": k_new, "v_new": v_new, "rotary": rotary, "rotary_interleaved": rotary_interleaved}
    out, lse = np.full((*q.shape[:-1], v_cache.shape[-1]), np.nan), np.full(q.shape[:-1], np.nan)
    for b, operands in enumerate(sequences(q, k_cache, v_cache, lengths, page_table, **appended)):
        if operands is not None:
            out[b], lse[b] = forward(*operands, scale=scale, causal=causal, window=window)
    return out, lse


def rotate(x, cos, sin, *, interleaved=False):
    """Rotary embedding: pairs (x, y) of columns become (x cos - y sin, y cos + x sin); other columns stay.

    Parameters
    ----------
    x : array, shape (..., rows, dim)
    cos, sin : arrays, shape (rows, pairs)
    interleaved : bool
        Whether column 2d and the next are a pair; else d and ``d + pairs`` are.

    Returns
    -------
    array of x's shape, float64

    Examples
    --------
    >>> rotate(np.array([[1.0, 2, 3, 4]]), np.zeros((1, 2)), np.ones((1, 2)))
    array([[-3., -4.,  1.,  2.]])
    >>> rotate(np.array([[1.0, 2, 3, 4]]), np.zeros((1, 2)), np.ones((1, 2)), interleaved=True)
    array([[-2.,  1., -4.,  3.]])
    """
    x, cos, sin = double(x), double(cos), double(sin)
    turned, first, second = x.copy(), *pair_columns(cos.shape[-1], interleaved)
    with np.errstate(all="ignore"):
        turned[..., first] = x[..., first] * cos - x[..., second] * sin
        turned[..., second] = x[..., second] * cos + x[..., first] * sin
    return turned


# What the formulas are written with -------------------------------------------------------------------------------


def host(x):
    """A NumPy array of the values of a NumPy or CuPy array."""
    return x.get() if hasattr(x, "get") else np.asarray(x)


def double(x):
    """The same in float64."""
    return host(x).astype(np.float64)


def pair_columns(pairs, interleaved):
    """The first and the second columns of the pairs of `rotate`."""
    if interleaved:
        return slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    return slice(0, pairs), slice(pairs, 2 * pairs)


def sequences(
    q, k_cache, v_cache, lengths=None, page_table=None, *, k_new=None, v_new=None, rotary=None,
    rotary_interleaved=False, rotate=rotate,
):  # fmt: skip
    """The (q, k, v) of each sequence of a batch whose keys lie in a cache, pages joined, new keys at the end.

    None for a sequence whose new keys do not fit. ``rotate`` is applied to q and the new keys.
    """
    q, k_cache, v_cache = (host(x) for x in (q, k_cache, v_cache))
    appended = 0 if k_new is None else q.shape[-2]
    size = k_cache.shape[-2]
    capacity = size if page_table is None else page_table.shape[1] * size
    for b in range(len(q)):
        length = capacity if lengths is None else int(host(lengths)[b])
        total = length + appended
        pages = None if page_table is None else host(page_table)[b, : -(-total // max(size, 1))]
        there = [0] if page_table is None else pages[length // max(size, 1) :]
        fits = not appended or (0 <= length and total <= capacity and all(0 <= n < len(k_cache) for n in there))
        if not fits or (rotary is not None and total > len(rotary[0])):
            yield None
            continue
        if page_table is None:
            q1, k1, v1 = (x[b] for x in (q, k_cache, v_cache))
        else:
            known = pages[: -(-length // max(size, 1))]
            q1, k1, v1 = q[b], *(
                cache[known].swapaxes(0, 1).reshape(cache.shape[1], -1, cache.shape[-1]) for cache in (k_cache, v_cache)
            )
        k1, v1 = k1[:, :length], v1[:, :length]
        new = [] if k_new is None else [host(k_new)[b]]
        if rotary is not None and total > 0:
            positions = np.maximum(np.arange(total - q.shape[-2], total), 0)
            angles = [host(x)[positions] for x in rotary]
            q1, *new = (rotate(x, *angles, interleaved=rotary_interleaved) for x in (q1, *new))
        if new:
            k1 = np.concatenate([k1.astype(new[0].dtype), *new], axis=1)
            v1 = np.concatenate([v1, host(v_new)[b]], axis=1)
        yield q1, k1, v1


def is_8bit(cache):
    """Whether a cache holds int8 or E4M3."""
    return cache.dtype in (np.int8, np.uint8)


def dequantised(x, scales=None, kv_format=None):
    """What a cache stands for, in float64: its elements or, for "e4m3", numbers of E4M3; times its scales."""
    x = host(x)
    wide = double(x.view(ml_dtypes.float8_e4m3fn) if kv_format == "e4m3" else x)
    with np.errstate(all="ignore"):
        return wide if scales is None else wide * slots(scales, x.shape)


def slots(scales, cache_shape):
    """Scales one a head or one a slot as one a slot, in float64, with a last axis of 1."""
    scales = double(scales)
    scales = scales[:, None, None] if scales.ndim == 1 else scales[..., None]
    return np.broadcast_to(scales, (*cache_shape[:-1], 1))


def scores(q, k, mask, scale):
    """``scale * q @ k.T`` where the mask is True, -inf elsewhere."""
    with np.errstate(all="ignore"):
        return np.where(mask, scale * product(q, k.T), -np.inf)


def softmax(s):
    """Weights along the last axis and the logarithm of their sum; rows of -inf have weights 0 and lse -inf."""
    with np.errstate(all="ignore"):
        top = np.max(s, axis=-1, initial=-np.inf)
        shift = np.where(top == -np.inf, 0, top)
        weights = np.exp(s - shift[..., None])
        total = weights.sum(axis=-1)
        p = weights / np.where(total == 0, 1, total)[..., None]
        return np.where(s == -np.inf, 0, p), np.log(total) + shift  # 0 in a row that is NaN, too


def product(a, b):
    """``a @ b``, quiet about what is not finite."""
    with np.errstate(all="ignore"):
        return a @ b


def weighted(p, x, seen):
    """``p @ x`` over the pairs that are seen: 0 times a NaN that is not seen is 0."""
    strange = ~np.isfinite(x)
    total = product(p, np.where(strange, 0, x))
    for j in np.flatnonzero(strange.any(axis=1)):
        with np.errstate(all="ignore"):
            total += np.where(seen[:, j, None] & strange[j], p[:, j, None] * np.where(strange[j], x[j], 0), 0)
    return total


class Heads:
    """Iterates over the heads of a problem: (place in the results, (q, k, v) of the head in float64)."""

    def __init__(self, q, k, v):
        arrays = [double(x) for x in (q, k, v)]
        self.head_axis = any(x.ndim > 2 for x in arrays)
        arrays = [x[None] if x.ndim == 2 else x for x in arrays]
        batch = np.broadcast_shapes(*(x.shape[:-3] for x in arrays))
        self.q, self.k, self.v = (np.broadcast_to(x, (*batch, *x.shape[-3:])) for x in arrays)
        self.group = self.q.shape[-3] // self.k.shape[-3]
        self.shape = self.q.shape[:-2]
        self.queries, self.keys, self.value_dim = self.q.shape[-2], self.k.shape[-2], self.v.shape[-1]

    def scale(self, scale):
        """The factor of the products."""
        return 1 / math.sqrt(self.q.shape[-1]) if scale is None else float(scale)

    def places(self, place):
        """Index of a query head's q, and of the k and v it reads."""
        key_place = (*place[:-1], place[-1] // self.group)
        return place, key_place, key_place

    def __iter__(self):
        for place in np.ndindex(*self.shape):
            yield place, tuple(x[i] for x, i in zip((self.q, self.k, self.v), self.places(place), strict=True))

    def seen(self, result):
        """A result as the caller sees it: without a head axis where no input had one."""
        return result if self.head_axis else result[0]

    def full(self, array):
        """An array of the results' shape, with a head axis."""
        return array if self.head_axis else array[None]

    def unstretched(self, grad, like):
        """A gradient summed over the axes that broadcasting stretched, in the shape of its input."""
        shape = (1,) * (grad.ndim - like.ndim) + like.shape
        axes = tuple(axis for axis, length in enumerate(shape[:-3]) if length == 1 and grad.shape[axis] != 1)
        return grad.sum(axis=axes, keepdims=True).reshape(like.shape)
