"""The CPU engine alone: its memory, its tile edges, and what must not leak from one row to another.

The dense formula below is written for these tests, in float64, by its own reading of the rule of visibility.
"""

import itertools
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import _numpy

UNIT = {np.float16: 2.0**-11, ml_dtypes.bfloat16: 2.0**-8, np.float32: 2.0**-24, np.float64: 2.0**-53}


def draw(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def sees(queries, keys, causal=False, window=None):
    offset = 0 if causal == "top-left" else keys - queries
    left, right = window or (None, None)
    distance = np.arange(keys) - np.arange(queries)[:, None] - offset
    seen = np.ones((queries, keys), bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    if causal:
        seen &= distance <= 0
    return seen


def dense(q, k, v, dout=None, dlse=0.0, *, scale=None, **mask):
    """out, lse and, for a given dout, dq, dk, dv of arrays (..., heads, length, dim)."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[-3] // k.shape[-3]
    k, v = np.repeat(k, group, -3), np.repeat(v, group, -3)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = np.where(sees(q.shape[-2], k.shape[-2], **mask), scale * q @ k.swapaxes(-1, -2), -np.inf)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(top == -np.inf, 0, top))
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    p /= np.where(total == 0, 1, total)
    out = p @ v
    if dout is None:
        return out, lse
    dout = dout.astype(np.float64)
    ds = dout @ v.swapaxes(-1, -2) - (dout * out).sum(-1, keepdims=True) + np.asarray(dlse)[..., None]
    ds *= p * scale
    dk, dv = ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout
    dk, dv = (sum(x[..., g::group, :, :] for g in range(group)) for x in (dk, dv))
    return out, lse, ds @ k, dk, dv


def assert_close(actual, wanted, dtype, factor=64):
    actual = np.asarray(actual, np.float64)
    infinite = np.isinf(wanted)
    np.testing.assert_array_equal(actual[infinite], wanted[infinite])
    actual, wanted = actual[~infinite], wanted[~infinite]
    allowed = factor * UNIT[dtype] * (1 + np.abs(wanted).max(initial=0))
    assert np.all(np.abs(actual - wanted) <= allowed)  # False for NaN


MASKS = [{}, {"causal": True}, {"causal": "top-left"}, {"window": (70, 3)}, {"causal": True, "window": (5, None)}]
SIZES = [(1, 1), (63, 64), (64, 65), (65, 64), (130, 200), (200, 130), (3, 0), (0, 3)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_tile_edges(mask, dtype):
    for (queries, keys), (dim, value_dim) in itertools.product(SIZES, [(64, 64), (5, 130), (300, 1), (8, 0)]):
        q, k = draw(4, queries, dim, dtype=dtype), draw(2, keys, dim, dtype=dtype)
        v = draw(2, keys, value_dim, dtype=dtype, seed=2)
        dout = draw(4, queries, value_dim, dtype=dtype, seed=1)
        dlse = draw(4, queries, dtype=np.float64 if dtype == np.float64 else np.float32)
        out, lse = cuflash.forward(q, k, v, return_lse=True, **mask)
        grads = cuflash.backward(dout, q, k, v, out, lse, dlse=dlse, **mask)
        wanted = dense(q, k, v, dout, dlse, **mask)
        assert_close(lse, wanted[1], np.float64 if dtype == np.float64 else np.float32)
        for actual, value in zip((out, *grads), (wanted[0], *wanted[2:]), strict=True):
            assert actual.dtype == dtype
            assert_close(actual, value, dtype)


@pytest.mark.parametrize("scale", [0, -0.5, 3.0])
def test_scale_and_several_chunks(scale):
    q, k, v, dout = draw(1, 70, 16), draw(1, 9000, 16), draw(1, 9000, 16, seed=2), draw(1, 70, 16, seed=1)
    out, lse = cuflash.forward(q, k, v, scale=scale, return_lse=True)
    grads = cuflash.backward(dout, q, k, v, out, lse, scale=scale)
    wanted = dense(q, k, v, dout, scale=scale)
    for actual, value in zip((out, lse, *grads), wanted, strict=True):
        assert_close(actual, value, np.float32, 512)


def test_memory_grows_with_the_length_alone():
    q, k, v = (draw(1, 8192, 64, seed=seed) for seed in range(3))
    tracemalloc.start()
    out, lse = cuflash.forward(q, k, v, return_lse=True)
    forward_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    cuflash.backward(out, q, k, v, out, lse, window=(256, 0))
    backward_peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    chunks = 6 * _numpy.CHUNK * _numpy._cores()
    assert forward_peak < 2 * q.nbytes + chunks  # the scores alone are 256 MB
    assert backward_peak < 10 * q.nbytes + chunks


def test_same_bits_for_strides_batch_and_threads(monkeypatch):
    q, k, v, dout = (draw(2, 2, 200, 64, seed=seed) for seed in range(4))
    k, v = (np.concatenate([x] * 8, axis=-2) for x in (k, v))

    def run(q, k, v, dout):
        out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
        return (out, lse, *cuflash.backward(dout, q, k, v, out, lse, causal=True))

    whole = run(q, k, v, dout)
    monkeypatch.setattr(_numpy, "_cores", lambda: 1)
    for other in (
        run(q, k, v, dout),
        run(*(x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in (q, k, v, dout))),
        run(*(np.repeat(x, 3, axis=-1)[..., ::3] for x in (q, k, v, dout))),
        [np.stack(x) for x in zip(*(run(q[b], k[b], v[b], dout[b]) for b in range(2)), strict=True)],
    ):
        for x, y in zip(whole, other, strict=True):
            np.testing.assert_array_equal(x, y)


def test_hidden_values_do_not_leak():
    q, k, v, dout = draw(2, 150, 16), draw(1, 180, 16), draw(1, 180, 16, seed=1), draw(2, 150, 16, seed=2)
    mask = {"causal": True, "window": (40, None)}
    clean = cuflash.forward(q, k, v, return_lse=True, **mask)
    clean += cuflash.backward(dout, q, k, v, *clean, **mask)
    seen = sees(150, 180, **mask)
    for bad in (np.nan, np.inf):
        for j in (0, 70, 120, 179):
            dirty = [x.copy() for x in (q, k, v)]
            dirty[1][0, j] = dirty[2][0, j] = bad
            out, lse = cuflash.forward(*dirty, return_lse=True, **mask)
            dq = cuflash.backward(dout, *dirty, out, lse, **mask)[0]
            blind = ~seen[:, j]
            assert_close(out[:, blind], clean[0][:, blind], np.float32)
            np.testing.assert_array_equal(lse[:, blind], clean[1][:, blind])
            assert_close(dq[:, blind], clean[2][:, blind], np.float32)
            assert not np.isfinite(out[:, ~blind]).any()
        i = 75  # a bad row reaches the keys it sees and no other
        dirty = [x.copy() for x in (dout, q)]
        dirty[0][0, i] = dirty[1][0, i] = bad
        _, dk, dv = cuflash.backward(*dirty, k, v, *clean[:2], **mask)
        for actual, value in ((dk, clean[3]), (dv, clean[4])):
            assert_close(actual[0, ~seen[i]], value[0, ~seen[i]], np.float32)
            assert not np.isfinite(actual[0, seen[i]]).any()


def test_visible_nan_shows():
    q, k, v = (draw(1, 70, 8, seed=seed) for seed in range(3))
    v[0, 20, 3] = np.nan
    out = cuflash.forward(q, k, v, causal=True)[0]
    bad = np.zeros((70, 8), bool)
    bad[20:, 3] = True
    np.testing.assert_array_equal(np.isnan(out), bad)
    q[0, 30] = np.nan
    k[0, 60] = np.nan
    out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(lse[0])), [30, *range(60, 70)])
    assert np.isnan(out[0, [30, 60, 69]]).all()


@pytest.mark.filterwarnings("error")
def test_rows_without_weight():
    q, k, v, dout = draw(1, 80, 8), draw(1, 20, 8), draw(1, 20, 8, seed=2), draw(1, 80, 8, seed=1)
    q[0, :60] = dout[0, :60] = np.nan  # rows that see no key
    out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
    assert np.all(out[0, :60] == 0) and np.all(lse[0, :60] == -np.inf)
    grads = cuflash.backward(dout, q, k, v, out, lse, causal=True, dlse=np.where(lse == -np.inf, np.nan, 1).astype("f"))
    tail = cuflash.backward(
        dout[:, 60:], q[:, 60:], k, v, out[:, 60:], lse[:, 60:], causal=True, dlse=np.ones((1, 20), "f")
    )
    assert np.all(grads[0][0, :60] == 0)
    for actual, value in zip((grads[0][:, 60:], *grads[1:]), tail, strict=True):
        assert_close(actual, value.astype(np.float64), np.float32)
    k = np.full((1, 5, 8), -np.inf, np.float32)
    out, lse = cuflash.forward(np.ones((1, 3, 8), np.float32), k, draw(1, 5, 8), return_lse=True)
    assert np.all(out == 0) and np.all(lse == -np.inf)
    k[0, 2] = 1
    out = cuflash.forward(np.ones((1, 3, 8), np.float32), k, v[:, :5])
    np.testing.assert_allclose(out[0], np.broadcast_to(v[0, 2], (3, 8)), rtol=1e-6)


def test_finite_differences():
    arrays = [draw(4, 9, 5, dtype=np.float64), draw(2, 11, 5, dtype=np.float64), draw(2, 11, 3, dtype=np.float64)]
    dout, dlse = draw(4, 9, 3, dtype=np.float64, seed=1), draw(4, 9, dtype=np.float64)

    def loss(q, k, v):
        out, lse = cuflash.forward(q, k, v, causal=True, window=(4, None), return_lse=True)
        return (dout * out).sum() + (dlse * lse).sum()

    saved = cuflash.forward(*arrays, causal=True, window=(4, None), return_lse=True)
    grads = cuflash.backward(dout, *arrays, *saved, causal=True, window=(4, None), dlse=dlse)
    for n, grad in enumerate(grads):
        step = draw(*grad.shape, dtype=np.float64, seed=2)
        ends = [loss(*(x + h * step if m == n else x for m, x in enumerate(arrays))) for h in (1e-5, -1e-5)]
        np.testing.assert_allclose((ends[0] - ends[1]) / 2e-5, (grad * step).sum(), rtol=1e-7)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_gradients_of_broadcast_axes(dtype):
    q, k, v, dout = draw(3, 1, 2, 70, 8), draw(4, 1, 65, 8), draw(1, 1, 65, 8), draw(3, 4, 2, 70, 8)
    q, k, v, dout = (x.astype(dtype) for x in (q, k, v, dout))
    out, lse = cuflash.forward(q, k, v, return_lse=True)
    grads = cuflash.backward(dout, q, k, v, out, lse)
    q, k, v = (np.broadcast_to(x, (3, 4, *x.shape[-3:])) for x in (q, k, v))
    dq, dk, dv = dense(q, k, v, dout)[2:]
    wanted = dq.sum(1, keepdims=True), dk.sum(0), dv.sum((0, 1))[None]
    for actual, value in zip(grads, wanted, strict=True):
        assert actual.shape == value.shape
        assert_close(actual, value, dtype, 1024)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("window", [None, (20, None)])
def test_decode_paged(queries, window):
    size, pages = 16, 40
    lengths = np.array([0, 1, 16, 50, 128, 2])
    q = draw(6, 4, queries, 8)
    k_cache, v_cache = draw(pages, 2, size, 8), draw(pages, 2, size, 8, seed=1)
    table = np.random.default_rng(0).permutation(pages)[: 6 * 6].reshape(6, 6)
    table = np.concatenate([table, table[:, :2]], axis=1).astype(np.int32)
    k, v = (x[table].swapaxes(1, 2).reshape(6, 2, -1, 8) for x in (k_cache, v_cache))
    for b, length in enumerate(lengths):
        table[b, -(-length // size) :] = -1
        used = table[b, : -(-length // size)]
        if length % size and np.count_nonzero(table == used[-1]) == 1:
            k_cache[used[-1], :, length % size :] = v_cache[used[-1], :, length % size :] = np.nan
    out, lse = cuflash.decode(q, k_cache, v_cache, lengths=lengths, page_table=table, window=window, return_lse=True)
    flat = cuflash.decode(q, k, v, lengths=lengths, window=window, return_lse=True)
    np.testing.assert_array_equal(out, flat[0])
    np.testing.assert_array_equal(lse, flat[1])
    for b, length in enumerate(lengths):
        wanted = dense(q[b], k[b, :, :length], v[b, :, :length], causal=True, window=window)
        assert_close(out[b], wanted[0], np.float32)
        assert_close(lse[b], wanted[1], np.float32)
