"""The CPU engine: attention for NumPy arrays by tiles, in memory that grows with the lengths, not their product.

Forward is the online softmax. A tile of query rows meets its keys in chunks, of scores s = scale * q @ k.T::

    m' = max(m, rowmax(s))                  the largest score so far
    p  = exp(s - m')                        weights relative to it
    l  = l * exp(m - m') + rowsum(p)        their sum
    o  = o * exp(m - m') + p @ v            the values, weighted
    and at the end: out = o / l, lse = m + log(l)

Backward computes the weights again; lse makes them final at once::

    p   = exp(s - lse)                      delta = rowsum(dout * out)
    dv += p.T @ dout                        ds    = p * (dout @ v.T - delta + dlse)
    dk += scale * ds.T @ q                  dq   += scale * ds @ k

Who owns what. A *tile* is up to ``ROWS`` rows of the query heads that read one key head, a *task* as many tiles as
make ``TASK`` rows. Tasks run on a few threads: NumPy's loops and BLAS let go of the interpreter. A forward task owns
its rows of out and lse; a backward task returns its rows of dq and its share of dk and dv, and shares are added in
the order of the tasks. No size below looks at leading axes, strides or threads, and operands are C-contiguous before
BLAS sees them, so these change no bit of a result.

What limits speed. Some 60 % of the time is BLAS, the rest the exponential and the passes around it, on a chunk that
stays in the level 2 or 3 cache. The textbook formula makes more passes, all through memory and on one thread. Scores
lie as (keys, rows): then every product but one has its operands as BLAS likes them, and row sums run along memory.
Below some 512 keys the interpreter costs more than the arithmetic.

Hidden scores are selected to -inf and hidden ds to 0. A weight of 0 is no shield against a NaN on the other side of
a product: `_shielded` is.

References: M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018; T. Dao et al.,
"FlashAttention", 2022; T. Dao, "FlashAttention-2", 2023.
"""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from . import _masks

ROWS = 64  # most rows of a tile
TASK = 1024  # rows of a task: enough to repay the conversion of the keys they see
CHUNK = 2**20  # bytes of a chunk's scores; with fewer, threads wait for the interpreter, with more, for memory
PRODUCT = 2**18  # multiplications in a call of BLAS; OpenBLAS spreads more over threads of its own, which fight ours
THREADED = 2**16  # scores of a tile from which threads pay: NumPy's calls must outlast the wait for the interpreter


def forward(problem, q, k, v, out, lse):
    """Write ``out`` and, unless it is None, ``lse``; all arrays along the canonical axes."""

    def run(task):
        b, head, tiles = task
        keys, values = _dense(k[b][head]), _dense(v[b][head])
        _forward_task(problem, tiles, q[b], keys, values, out[b], None if lse is None else lse[b], head)

    tasks = _tasks(problem, problem.mask, problem.keys)
    for _ in _each(problem, run, [(b, *task) for b in np.ndindex(*problem.batch) for task in tasks]):
        pass


def append(problem, q, k, v, lengths, page_table, k_new, v_new, cos, sin, overflow):
    """Write new keys and values into the caches and ``overflow``; return q, rotated, and the lengths after.

    A sequence whose rows do not fit keeps its cache, and its length is -1.
    """
    if k_new is None and cos is None:
        return q, lengths
    size, queries = max(k.shape[2], 1), problem.queries
    totals = np.full(len(q), problem.keys) if lengths is None else lengths.astype(np.int64) + problem.appended
    q = q if cos is None else q.copy()
    for b, total in enumerate(totals.tolist()):
        first = total - queries
        fits = problem.appended <= total <= problem.keys and (cos is None or total <= len(cos))
        pages, places = b, slice(first, total)
        if fits and problem.appended and page_table is not None:
            pages, places = np.divmod(np.arange(first, total), size)
            pages = page_table[b, pages]
            fits = bool(((pages >= 0) & (pages < len(k))).all())
        if overflow is not None:
            overflow[b] = not fits
        if not fits:
            totals[b] = -1
            continue
        turn = None
        if cos is not None and total > 0:
            positions = np.maximum(np.arange(first, total), 0)
            turn = cos[positions], sin[positions], problem.rotary_interleaved
            q[b] = _rotate(q[b], *turn, _work(problem))
        if problem.appended:
            new = k_new[b] if turn is None else _rotate(k_new[b], *turn, _work(problem))
            for cache, rows in ((k, new), (v, v_new[b])):
                cache[pages, :, places] = rows if page_table is None else rows.swapaxes(0, 1)
    return q, totals


def _rotate(x, cos, sin, interleaved, work):
    """Rows of x (heads, rows, dim) whose first pairs of columns are turned, rounded once."""
    turned, half = x.copy(), cos.shape[-1]
    columns = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    first, second = (x[..., part].astype(work) for part in columns)
    cos, sin = cos.astype(work), sin.astype(work)
    with np.errstate(all="ignore"):
        turned[..., columns[0]] = first * cos - second * sin
        turned[..., columns[1]] = second * cos + first * sin
    return turned


def decode(problem, q, k, v, lengths, page_table, out, lse, k_scale=None, v_scale=None):
    """Write ``out`` and, unless it is None, ``lse``; of sequence b the caches k and v hold ``lengths[b]`` keys.

    Rows of a sequence whose length is negative are NaN.
    """

    def reader(cache, b, head):
        return _dense(cache[b, head]) if page_table is None else _paged(cache[:, head], page_table[b])

    def rows(cache, scales, b, head):
        read = reader(cache, b, head)
        if problem.kv_format is None:
            return read
        if scales is None or scales.ndim == 1:
            factor = np.float32(1) if scales is None else scales[head]
            return lambda low, high: _dequantised(read(low, high), problem.kv_format) * factor
        factors = reader(scales[..., None], b, head)
        return lambda low, high: _dequantised(read(low, high), problem.kv_format) * factors(low, high)

    def run(task):
        b, head, tiles = task
        keys, values = rows(k, k_scale, b, head), rows(v, v_scale, b, head)
        _forward_task(problem, tiles, q[b], keys, values, out[b], None if lse is None else lse[b], head)

    tasks = []
    for b in range(len(q)):
        length = problem.keys if lengths is None else int(lengths[b])
        if length < 0:
            out[b] = np.nan
            if lse is not None:
                lse[b] = np.nan
            continue
        mask = _masks.make(problem.queries, length, problem.causal, problem.window)
        tasks += [(b, *task) for task in _tasks(problem, mask, length)]
    for _ in _each(problem, run, tasks):
        pass


def backward(problem, dout, q, k, v, out, lse, dlse, dq, dk, dv):
    """Write ``dq``, ``dk``, ``dv``; their leading axes of length 1 are summed over the batch."""

    def run(task):
        b, head, tiles = task
        rows = (x[b] for x in (dout, q, out, lse))
        return _backward_task(problem, tiles, *rows, None if dlse is None else dlse[b], k[b][head], v[b][head], head)

    work = _work(problem)
    grads = dq, dk, dv
    sums = [grad if grad.dtype == work else np.empty(grad.shape, work) for grad in grads]
    for total in sums:
        total[...] = 0
    tasks = _tasks(problem, problem.mask, problem.keys)
    tasks = [(b, *task) for b in np.ndindex(*problem.batch) for task in tasks]
    with np.errstate(all="ignore"):
        for (b, head, tiles), (dq_tiles, span, dk_part, dv_part) in zip(tasks, _each(problem, run, tasks), strict=True):
            dq_sum, dk_sum, dv_sum = (x[tuple(i % n for i, n in zip(b, x.shape, strict=False))] for x in sums)
            for tile, part in zip(tiles, dq_tiles, strict=True):
                dq_sum[tile.place(head)] += part.reshape(*tile.shape, -1)
            dk_sum[head, span] += dk_part
            dv_sum[head, span] += dv_part
        for grad, total in zip(grads, sums, strict=True):
            if grad is not total:
                grad[...] = total


def _scale(problem, work):
    """The scale in the format of the work; one beyond it is as good as its largest number."""
    limit = float(np.finfo(work).max) / 2
    return work.type(min(max(problem.scale, -limit), limit))


# Tiles and tasks ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """Rows ``rows`` of the heads ``heads`` of a group; row r of the tile sees the keys ``first[r] <= j < end[r]``."""

    group: int
    heads: range
    rows: range
    first: np.ndarray
    end: np.ndarray

    @property
    def shape(self):
        """Shape of the tile's place along the axes (heads, queries)."""
        return len(self.heads), len(self.rows)

    def place(self, head):
        """Index of the tile's rows along the axes (heads, queries) for a key head."""
        start = head * self.group + self.heads.start
        return slice(start, start + len(self.heads)), slice(self.rows.start, self.rows.stop)

    def read(self, x, head, work):
        """A copy of the tile's rows of x ``(heads, queries, ...)``, as a matrix."""
        part = np.array(x[self.place(head)], work, order="C")
        return part.reshape(len(self.first), *x.shape[2:])


def _tasks(problem, mask, keys):
    """(key head, tiles) of one problem, tiles that cover heads x queries; several heads share one if rows are few."""
    most = min(ROWS, max(16, PRODUCT // 32 // _widest(problem)))  # 32 keys or more in a product, so long as 16 rows
    step = max(1, most // max(1, problem.queries))
    tiles = []
    for h in range(0, problem.group, step):
        heads = range(h, min(h + step, problem.group))
        for i in range(0, problem.queries, most):
            rows = range(i, min(i + most, problem.queries))
            ends = mask.first_key(np.array(rows), keys), mask.end_key(np.array(rows), keys)
            tiles.append(Tile(problem.group, heads, rows, *(np.tile(x, len(heads)) for x in ends)))
    parts = [tiles[n : n + TASK // most] for n in range(0, len(tiles), TASK // most)]
    return [(head, part) for head in range(problem.key_heads) for part in parts]


def _each(problem, run, tasks):
    """Results of ``run`` in the order of the tasks, on as many threads as pay."""

    def quiet(task):
        with np.errstate(all="ignore"):  # the state is each thread's own
            return run(task)

    scores = min(ROWS, problem.group * problem.queries) * problem.keys
    threads = min(_cores(), len(tasks)) if scores >= THREADED else 1
    if threads <= 1:
        yield from map(quiet, tasks)
    else:
        with ThreadPoolExecutor(threads) as pool:
            yield from pool.map(quiet, tasks)


def _cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _work(problem):
    """The dtype of the arithmetic."""
    return np.dtype(np.float64 if problem.dtype == "float64" else np.float32)


def _widest(problem):
    return max(problem.head_dim, problem.value_dim)


# Keys and values ------------------------------------------------------------------------------------------------


def _dense(x):
    """A reader of keys ``[low, high)`` from an array (keys, dim)."""
    return lambda low, high: x[low:high]


def _paged(cache, pages):
    """The same from a cache (pages, page_size, dim); only the pages of keys asked for are looked up."""

    def read(low, high):
        size = cache.shape[1]
        start = low // max(size, 1)
        found = cache[pages[start : -(-high // max(size, 1))]].reshape(-1, cache.shape[2])
        return found[low - start * size : high - start * size]

    return read


def _dequantised(x, kv_format):
    """Elements of an 8-bit cache as float32."""
    return (x.view(ml_dtypes.float8_e4m3fn) if kv_format == "e4m3" else x).astype(np.float32)


def _span(first, end):
    """The least run of keys ``[low, high)`` that holds the runs of all rows."""
    some = first < end
    return (int(first[some].min()), int(end[some].max())) if some.any() else (0, 0)


def _reach(tiles):
    """The same for the rows of several tiles."""
    return _span(*np.array([_span(tile.first, tile.end) for tile in tiles]).T)


def _chunks(first, end, q, v):
    """Chunks of the keys that some row sees: (run of keys, seen, edges).

    ``seen`` says which key of the run is seen by which row, None if each by all; only ``edges`` hold hidden pairs.
    """
    low, high = _span(first, end)
    step = CHUNK // q.itemsize // len(q) // max(1, max(q.shape[1], v.shape[1]) // 64) // 64 * 64 or 64
    for start in range(low, high, step):
        stop = min(start + step, high)
        left, right = max(start, min(first.max(), stop)), max(start, min(end.min(), stop))
        edges = [(start, left), (right, stop)] if left < right else [(start, stop)]
        edges = [slice(a - start, b - start) for a, b in edges if a < b]
        seen = None
        if edges:
            j = np.arange(start, stop)[:, None]
            seen = np.ones((stop - start, len(first)), bool)
            for edge in edges:
                seen[edge] = (first <= j[edge]) & (j[edge] < end)
        yield slice(start, stop), seen, edges


def _hide(x, value, seen, edges):
    """Set hidden pairs of x (keys, rows) to ``value``."""
    for edge in edges:
        np.copyto(x[edge], value, where=~seen[edge])


# Products -------------------------------------------------------------------------------------------------------


def _product(a, b):
    """``a @ b``, cut along an outer axis of a or along the summed one, so that no call of BLAS exceeds ``PRODUCT``."""
    (m, k), n = a.shape, b.shape[1]
    longer = max(m, k)
    block = min(128, PRODUCT * longer // max(1, m * k * n)) // 16 * 16 or 16
    blocks = longer // block
    whole = blocks * block
    if m >= k:
        out = np.empty((m, n), a.dtype)
        np.matmul(a[:whole].reshape(blocks, block, k), b, out=out[:whole].reshape(blocks, block, n))
        if whole < m:
            np.matmul(a[whole:], b, out=out[whole:])
    else:
        parts = a[:, :whole].reshape(m, blocks, block).swapaxes(0, 1)
        out = np.matmul(parts, b[:whole].reshape(blocks, block, n)).sum(0)
        if whole < k:
            out += a[:, whole:] @ b[whole:]
    return out


def _shielded(weights, x, seen):
    """``weights @ x`` in which a non-finite row of x reaches only the rows that see it."""
    if seen is None or np.isfinite(x.sum()):
        return _product(weights, x)
    finite = np.isfinite(x).all(1, keepdims=True)
    out = _product(weights, np.where(finite, x, 0))
    for j in np.flatnonzero(~finite):
        out[seen[:, j]] += weights[seen[:, j], j, None] * x[j]
    return out


def _down(ufunc, s):
    """``ufunc.reduce(s)`` over the keys, folded so that NumPy runs along rows as long as it likes."""
    fold = math.gcd(len(s), 64)
    return ufunc.reduce(ufunc.reduce(s.reshape(fold, -1)).reshape(-1, s.shape[1]))


# Forward --------------------------------------------------------------------------------------------------------


def _forward_task(problem, tiles, q, keys, values, out, lse, head):
    """Rows ``tiles`` of one key head; ``keys`` and ``values`` read runs of that head."""
    work = _work(problem)
    low, high = _reach(tiles)
    k, v = (np.asarray(read(low, high), work, order="C") for read in (keys, values))
    for tile in tiles:
        scaled = tile.read(q, head, work) * _scale(problem, work)
        o, log_sum = _forward_tile(scaled, k, v, tile.first - low, tile.end - low)
        out[tile.place(head)] = o.reshape(*tile.shape, o.shape[1])
        if lse is not None:
            lse[tile.place(head)] = log_sum.reshape(tile.shape)


def _forward_tile(q, k, v, first, end):
    """out (rows, value_dim) and lse (rows,) of a tile by the online softmax; q comes scaled."""
    columns = np.ascontiguousarray(q.T)
    largest = np.full(len(q), -np.inf, q.dtype)
    total = np.zeros(len(q), q.dtype)
    o = np.zeros((len(q), v.shape[1]), q.dtype)
    for run, seen, edges in _chunks(first, end, q, v):
        s = _product(k[run], columns)
        _hide(s, -np.inf, seen, edges)
        if not np.isfinite(k[run].sum()):  # a score of -inf has no weight, whatever its value holds
            seen = s != -np.inf
        larger = np.maximum(largest, _down(np.maximum, s))
        base = np.where(larger == -np.inf, 0, larger)  # -inf - -inf is not a number
        s -= base
        p = np.exp(s, out=s)
        shrink = np.exp(largest - base)
        total = total * shrink + _down(np.add, p)
        o = o * shrink[:, None] + _shielded(p.T, v[run], None if seen is None else seen.T)
        largest = larger
    total = total[:, None]
    return np.where(total == 0, 0, o / total), largest + np.log(total[:, 0])


# Backward -------------------------------------------------------------------------------------------------------


def _backward_task(problem, tiles, dout, q, out, lse, dlse, k, v, head):
    """dq of each tile, the run of keys that they see, and the tiles' share of dk and dv there."""
    work = _work(problem)
    scale = _scale(problem, work)
    low, high = _reach(tiles)
    k, v = (np.asarray(x[low:high], work, order="C") for x in (k, v))
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    dq = []
    for tile in tiles:
        dout_rows, out_rows, lse_rows = (tile.read(x, head, work) for x in (dout, out, lse))
        offset = (dout_rows * out_rows).sum(1)
        if dlse is not None:
            offset -= tile.read(dlse, head, work)
        empty = lse_rows == -np.inf  # no weight anywhere: as if the row saw no key
        first, end = (np.where(empty, 0, x - low) for x in (tile.first, tile.end))
        scaled = tile.read(q, head, work) * scale
        lse_rows = np.where(empty, 0, lse_rows)
        dq.append(_backward_tile(dout_rows, scaled, lse_rows, offset, k, v, first, end, dk, dv) * scale)
    return dq, slice(low, high), dk, dv


def _backward_tile(dout, q, lse, offset, k, v, first, end, dk, dv):
    """Add a tile's share to dk and dv, return its dq but for the scale; q comes scaled, offset is delta - dlse."""
    q_columns, dout_columns = np.ascontiguousarray(q.T), np.ascontiguousarray(dout.T)
    dq = np.zeros_like(q)
    for run, seen, edges in _chunks(first, end, q, v):
        s = _product(k[run], q_columns)
        ds = _product(v[run], dout_columns)
        _hide(s, -np.inf, seen, edges)
        if not np.isfinite(k[run].sum()):  # a score of -inf has no weight, and its key no part in a gradient
            seen, edges = s != -np.inf, [slice(None)]
        s -= lse
        p = np.exp(s, out=s)
        _hide(p, 0, seen, edges)  # where lse is NaN, so is exp(-inf - lse)
        ds -= offset
        ds *= p
        _hide(ds, 0, seen, edges)
        dv[run] += _shielded(p, dout, seen)
        dk[run] += _shielded(ds, q, seen)
        dq += _shielded(ds.T, k[run], None if seen is None else seen.T)
    return dq
