r"""How large an error may be: an a-priori, componentwise bound, and the only place with tolerances.

The bound is derived here from the unit roundoffs of the path that computed a result. It says nothing about typical
errors, which are smaller; it is never exceeded, and a fault that shows in the numbers breaks it.

Model
-----
Write ``s_j`` for the scores of one row, ``p_j = exp(s_j - lse)`` for its weights, u for the roundoff of sums.

**Scores.** A dot product of D terms errs by at most ``gamma(D + n) sum |q_d k_jd|`` with ``gamma(n) = n u / (1 - n u)``
(Higham, *Accuracy and Stability of Numerical Algorithms*, section 3.1), n the roundings of each product: none where
16-bit inputs meet in float32. A tensor core sums 16 products and the accumulator after aligning them to the largest;
it may cut what is aligned away, so it counts as 16 roundings of u = 2^-23. Call the error, times scale, ``a_j``.

**Weights.** A weight is ``2^(s_j c - r)`` with ``c = scale log2 e`` rounded and r the row's reference, which lags the
largest score by at most 8; r enters out and lse alike and cancels. Rounding c and the argument costs
``2 u g_j``, with the gap ``g_j = max_i s_i - s_j + lag`` in natural units; the exponential costs ``e``. What was summed
before the reference rose is rescaled: each time costs ``e + 2 u``, and since the reference rises by 8 or more at a
time, key j sees at most ``1 + g_j / (8 log 2)`` of it that matter. (The CPU engine raises at each of its chunks.)
So the computed weight is ``w_j (1 + t_j)``, ``|t_j| <= T_j = expm1(a_j + 2 u g_j + e + rescales)``, and for exact sums

    out' - out = sum p_j t_j (v_j - out) / sum p_j (1 + t_j)

hence an error of at most ``sum p_j T_j |v_j - out| / (1 - sum p_j T_j)``.

**Sums.** Weights are rounded to the format in which they meet v (relative ``u_p``; in float16 also ``2^-25`` where they
underflow, against a largest weight of 1 or more), and n products are summed: together at most
``(u_p + gamma(n)) sum p_j |v_j|``. The sum of weights errs by ``gamma`` of its depth. Division and rounding to the
output's format end it; results below the smallest normal number may be flushed to 0.

**lse** is ``(r + log2 sum) log 2``: it takes ``sum p_j (T_j + u |s_j|)``, the error of the sum, of the logarithm, and
three roundings of itself.

**Gradients.** P is made again from lse, so its relative error is ``expm1`` of the errors of s and lse and of the
exponential. With B, C the errors of ``dout . v`` and of ``delta = dout . out`` (out being known to its own bound),
``ds = p (dout . v - delta + dlse)`` errs by ``p (B + C + 3 u (...)) + T |ds|``, and errors pass through the last
products linearly.

The bound is infinite where a score leaves the format of the accumulator, or a result that of the output.
"""

import math
from dataclasses import dataclass

import numpy as np

from .reference import Heads, double, product, scores, sequences, softmax, visible, weighted

LAG = 8 * math.log(2)


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
        How far the reference may lag the largest score.
    chunk : int
        Keys after which the reference may rise; 0 where it rises by steps of ``lag``.
    depth : int
        Weights that share one chain of additions are every ``depth``-th.
    u_out, least_out, largest_out : float
        Roundoff, absolute error of underflow, and largest number of the output.
    tiny, largest : float
        Smallest normal and largest number of sums.
    """

    u: float
    u_sum: float
    product: int
    u_weight: float
    least_weight: float
    exponential: float
    logarithm: float
    lag: float
    chunk: int
    depth: int
    u_out: float
    least_out: float
    largest_out: float
    tiny: float
    largest: float

    def gamma(self, terms):
        """Relative error of a product's sum of so many terms."""
        return _gamma(terms * self.u_sum)


def _gamma(nu):
    return nu / (1 - nu) if nu < 1 else math.inf


_F32 = {"u": 2.0**-24, "tiny": 2.0**-126, "largest": 2.0**127}
_F64 = {"u": 2.0**-53, "tiny": 2.0**-1022, "largest": 2.0**1023}
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
        plain = {
            **base, **out, "u_sum": u, "product": 2, "u_weight": 0.0, "least_weight": 0.0, "lag": 0.0, "chunk": 1024,
            "depth": 1, "exponential": 6 * u, "logarithm": 4 * u,
        }  # fmt: skip
        paths[f"numpy {dtype}"] = Path(**plain)
        gpu = {**plain, "product": 0, "lag": LAG, "chunk": 0, "depth": 8}
        if dtype != "float64":  # ex2.approx and lg2.approx
            gpu |= {"exponential": 2.0**-22, "logarithm": 2.0**-22}
        if out["u_out"]:  # weights meet v in 16 bits, on tensor cores
            gpu |= {"u_sum": 2.0**-23, "u_weight": out["u_out"], "least_weight": min(out["least_out"], 2.0**-25)}
        paths[f"portable {dtype}"] = Path(**gpu)
    return paths


PATHS = _paths()


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


def forward(q, k, v, *, path, scale=None, causal=False, window=None, rows=None):
    """Exact out and lse, and the error that `cuflash.forward` may make on a path.

    Parameters
    ----------
    q, k, v, scale, causal, window, rows
        As in `cuflash.reference.forward`.
    path : str or Path
        Engine and dtype, such as "portable bfloat16", or constants of your own.

    Returns
    -------
    Bounded

    Examples
    --------
    >>> x = np.eye(2, dtype=np.float32)
    >>> bool(forward(x, x, x, path="numpy float32").out_bound.max() < 1e-5)
    True
    """
    path, heads = path_of(path), Heads(q, k, v)
    mask = visible(heads.queries, heads.keys, causal=causal, window=window)
    chosen = np.arange(heads.queries) if rows is None else np.asarray(rows)
    shape = (*heads.shape, len(chosen))
    out, lse = np.zeros((*shape, heads.value_dim)), np.full(shape, -np.inf)
    out_bound, lse_bound = np.zeros_like(out), np.zeros_like(lse)
    factor = heads.scale(scale)
    for place, (q1, k1, v1) in heads:
        row = _Rows(path, q1[chosen], k1, v1, mask[chosen], factor)
        out[place], lse[place] = row.out, row.lse
        out_bound[place], lse_bound[place] = row.out_bound(), row.lse_bound()
    return Bounded(*(heads.seen(x) for x in (out, lse, out_bound, lse_bound)))


def decode(q, k_cache, v_cache, *, path, lengths=None, page_table=None, scale=None, causal=True, window=None):
    """Exact out and lse of `cuflash.decode`, and the error it may make on a path.

    Parameters
    ----------
    q, k_cache, v_cache, lengths, page_table, scale, causal, window
        As in `cuflash.reference.decode`.
    path : str or Path
        As in `forward`.

    Returns
    -------
    Bounded
    """
    parts = [
        forward(*operands, path=path, scale=scale, causal=causal, window=window)
        for operands in sequences(q, k_cache, v_cache, lengths, page_table)
    ]
    shapes = [(*q.shape[:-1], v_cache.shape[-1]), q.shape[:-1]] * 2
    names = ("out", "lse", "out_bound", "lse_bound")
    return Bounded(
        *(
            np.array([getattr(part, name) for part in parts]).reshape(shape)
            for name, shape in zip(names, shapes, strict=True)
        )
    )


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
        for sums, parts in zip((exact, bound, total), row.gradients(dout[place], dlse[place]), strict=True):
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

    def __init__(self, path, q, k, v, mask, scale):
        self.path, self.q, self.k, self.v, self.scale = path, q, k, v, scale
        self.s = scores(q, k, mask, scale)
        self.seen = self.s != -np.inf
        self.p, self.lse = softmax(self.s)
        self.out = weighted(self.p, v, self.seen)
        self.alive = self.seen.any(axis=1)
        self.keys = self.seen.sum(axis=1)  # of each row
        with np.errstate(all="ignore"):
            sizes = np.where(self.seen, product(np.abs(q), np.abs(k.T)), 0)
            terms = q.shape[1] + path.product
            self.score_error = abs(scale) * (path.gamma(terms) * sizes + terms * path.tiny)
            overflows = np.maximum(sizes, 2 * abs(scale) * sizes).max(axis=1, initial=0) > path.largest
            self.score_error[overflows] = np.inf
            top = self.s.max(axis=1, initial=-np.inf)
            self.top = np.where(self.alive, top, 0)
            self.gap = np.where(self.seen, self.top[:, None] - self.s, 0) + path.lag
            if path.chunk:
                rises = np.ceil(mask.shape[1] / path.chunk)
            else:
                rises = 1 + self.gap / LAG
            rescales = rises * (path.exponential + 2 * path.u) + path.u * self.gap
            relative = self.score_error + 2 * path.u * self.gap + path.exponential + rescales
            self.weight_error = np.where(self.seen, np.expm1(relative), 0)  # T
            self.mean_error = (self.p * self.weight_error).sum(axis=1)  # sum p T
            self.rest = 1 - self.mean_error
            depth = np.ceil(self.keys / path.depth) + 4
            self.sum_error = _gamma_of(depth * path.u) + path.tiny * self.keys

    def out_bound(self):
        """Error of out."""
        path, p = self.path, self.p
        with np.errstate(all="ignore"):
            heavier = p * (1 + self.weight_error)
            moved = np.stack(
                [(p * self.weight_error * np.abs(self.v[:, d] - self.out[:, d, None])).sum(axis=1, where=self.seen)
                 for d in range(self.v.shape[1])], axis=1,
            ).reshape(self.out.shape)  # fmt: skip
            sizes = weighted(heavier, np.abs(self.v), self.seen)
            faint = np.exp(self.top - self.lse)[:, None] * (path.least_weight + path.tiny) * product(
                self.seen.astype(float), np.abs(np.where(np.isfinite(self.v), self.v, 0))
            )
            gamma = _gamma_of(self.keys * path.u_sum)[:, None] + path.u_weight
            errors = (moved + gamma * sizes + faint) / self.rest[:, None]
            errors += (np.abs(self.out) + errors) * (self.sum_error + 2 * path.u)[:, None]
            errors = _rounded(path, self.out, errors)
            errors = np.where((self.rest > 0)[:, None] & ~np.isnan(errors), errors, np.inf)
        return np.where(self.alive[:, None], errors, 0)

    def lse_bound(self):
        """Error of lse."""
        path = self.path
        with np.errstate(all="ignore"):
            spread = (self.p * np.abs(np.where(self.seen, self.s, 0))).sum(axis=1)
            logarithm = path.logarithm * np.maximum(1, np.abs(self.lse - self.top) + path.lag)
            errors = self.mean_error / self.rest + path.u * spread + self.sum_error + logarithm
            errors += 3 * path.u * (np.abs(self.lse) + errors) + path.tiny
            errors = np.where((self.rest > 0) & ~np.isnan(errors), errors, np.inf)
        return np.where(self.alive, errors, 0)

    def gradients(self, dout, dlse):
        """Exact gradients (dq, dk, dv), their errors, and sums of absolute terms."""
        path, seen = self.path, self.seen
        with np.errstate(all="ignore"):
            dout = np.where(self.alive[:, None], dout, 0)
            dlse = np.where(self.alive, dlse, 0)
            width = dout.shape[1]
            sizes = np.abs(dout)
            dp = np.where(seen, product(dout, self.v.T), 0)
            dp_size = np.where(seen, product(sizes, np.abs(self.v.T)), 0)
            delta, delta_size = (dout * self.out).sum(axis=1), (sizes * np.abs(self.out)).sum(axis=1)
            dp_error = path.gamma(width) * dp_size
            delta_error = path.gamma(width) * delta_size + (sizes * self.out_bound()).sum(axis=1) * (1 + path.u)
            slope = dp - (delta - dlse)[:, None]
            slope_size = np.abs(dp) + (np.abs(delta) + np.abs(dlse))[:, None]
            relative = self.score_error + self.lse_bound()[:, None] + path.exponential
            relative += 2 * path.u * (np.abs(self.s) + np.abs(self.lse)[:, None])
            p_error = np.where(seen, self.p * np.expm1(relative), 0) + path.tiny
            slope_error = dp_error + delta_error[:, None] + 3 * path.u * (slope_size + dp_error + delta_error[:, None])
            ds = np.where(seen, self.p * slope, 0)
            ds_error = (self.p + p_error) * slope_error + p_error * np.abs(slope)
            ds_error += (path.u + path.u_weight) * (np.abs(ds) + ds_error)
            ds_error = np.where(seen, ds_error, 0)
            p_error = np.where(seen, p_error + path.u_weight * (self.p + p_error), 0)
            by_rows, by_keys = path.gamma(len(dout) + 2), path.gamma(len(self.k) + 2)
            scale = abs(self.scale)
            exact, errors, totals = [], [], []
            for left, left_error, right, sees, gamma, factor in (
                (ds, ds_error, self.k, seen, by_keys, self.scale),
                (ds.T, ds_error.T, self.q, seen.T, by_rows, self.scale),
                (self.p.T, p_error.T, dout, seen.T, by_rows, 1.0),
            ):
                total = weighted(np.abs(left) + left_error, np.abs(right), sees)
                exact.append(factor * weighted(left, right, sees))
                errors.append(abs(factor) * (weighted(left_error, np.abs(right), sees) + gamma * total))
                totals.append(abs(factor) * total)
            errors = [np.where(np.isnan(e), np.inf, e) for e in errors]
        return exact, errors, totals


def _gamma_of(nu):
    with np.errstate(all="ignore"):
        return np.where(nu < 1, nu / (1 - nu), np.inf)
