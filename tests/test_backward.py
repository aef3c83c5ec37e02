"""backward on the CPU engine: the checks of `cuflash.testing` on drawn problems, and the edges written out."""

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import bounds, reference, testing

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


def draw(*shapes, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes]


def close(dout, q, k, v, *, dlse=None, **keywords):
    """Gradients, after they have been found inside the bound."""
    out, lse = cuflash.forward(q, k, v, return_lse=True, **keywords)
    grads = cuflash.backward(dout, q, k, v, out, lse, dlse=dlse, **keywords)
    exact = bounds.backward(dout, q, k, v, dlse=dlse, path=f"numpy {q.dtype.name}", **keywords)
    assert bounds.worst(grads, exact) <= 1
    assert [(g.shape, g.dtype) for g in grads] == [(x.shape, x.dtype) for x in (q, k, v)]
    return grads


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", testing.gradient_checks, ids=lambda check: check.__name__)
def test_property(check, dtype):
    testing.fuzz(check, cuflash.forward, dtypes=[dtype], examples=25, max_length=130, max_head_dim=130)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "q_shape, k_shape, value_dim",
    [
        ((2, 3, 0, 8), (2, 3, 5, 8), 8),
        ((2, 3, 5, 8), (2, 3, 0, 8), 8),
        ((0, 3, 5, 8), (0, 3, 5, 8), 8),
        ((2, 0, 5, 8), (2, 3, 5, 8), 8),
    ],
    ids=["queries", "keys", "batch", "heads"],
)
def test_nothing(dtype, q_shape, k_shape, value_dim):
    q, k, v, dout = draw(q_shape, k_shape, (*k_shape[:-1], value_dim), (*q_shape[:-1], value_dim), dtype=dtype)
    assert not any(grad.any() for grad in close(dout, q, k, v, causal=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key_heads", [1, 2, 6])
def test_query_heads_of_a_group_are_summed(key_heads, dtype):
    q, k, v, dout = draw((2, 6, 40, 16), (2, key_heads, 50, 16), (2, key_heads, 50, 24), (2, 6, 40, 24), dtype=dtype)
    close(dout, q, k, v, causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stretched_axes_are_summed(dtype):
    q, k, v, dout = draw((4, 1, 2, 20, 8), (1, 3, 2, 30, 8), (2, 30, 8), (4, 3, 2, 20, 8), dtype=dtype)
    close(dout, q, k, v)
    dq, dk, dv = close(dout[0, 0], q[0, 0], k[0, 0], v)
    assert dv.shape == v.shape


def test_matrices_have_no_head_axis():
    dq, dk, dv = close(*draw((5, 3), (5, 8), (7, 8), (7, 3)), causal=True)
    assert dq.shape == (5, 8) and dk.shape == (7, 8) and dv.shape == (7, 3)


@pytest.mark.parametrize("causal", [False, True])
def test_gradient_of_lse(causal):
    q, k, v, dout, dlse = draw((2, 50, 8), (2, 20, 8), (2, 20, 8), (2, 50, 8), (2, 50))
    close(dout, q, k, v, dlse=dlse, causal=causal)
    dq, dk, dv = close(np.zeros_like(dout), q, k, v, dlse=dlse, causal=causal)
    assert not dv.any() and dq.any() and dk.any()


@pytest.mark.parametrize("scale", [0, -1.5, 10.0])
def test_scale(scale):
    dq, dk, dv = close(*draw((2, 33, 16), (2, 33, 16), (2, 65, 16), (2, 65, 16)), scale=scale)
    assert scale or not (dq.any() or dk.any())


def test_gradients_have_the_order_of_inputs():
    arrays = [x.swapaxes(1, 2) for x in draw(*[(2, 33, 4, 16)] * 4)]
    for grad in close(*arrays):
        assert grad.swapaxes(1, 2).flags.c_contiguous


def test_grads_are_written_where_told():
    dout, q, k, v = draw(*[(2, 3, 33, 16)] * 4)
    out, lse = cuflash.forward(q, k, v, return_lse=True)
    packed = np.full((2, 33, 3, 3, 16), np.nan, np.float32)
    slots = tuple(packed[:, :, n].swapaxes(1, 2) for n in range(3))
    grads = cuflash.backward(dout, q, k, v, out, lse, grads=slots)
    for grad, slot, expected in zip(grads, slots, cuflash.backward(dout, q, k, v, out, lse), strict=True):
        assert grad is slot and np.array_equal(slot, expected)
    for wrong, words in (
        ((q, slots[1], slots[2]), "dq shares memory with q"),
        ((slots[0], slots[0], slots[2]), "dk shares memory with dq"),
        (slots[:2], "wanted None or the three arrays"),
    ):
        with pytest.raises(ValueError, match=words):
            cuflash.backward(dout, q, k, v, out, lse, grads=wrong)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_again_are_the_same(dtype):
    dout, q, k, v = draw((4, 300, 16), (4, 300, 16), (2, 300, 16), (2, 300, 16), dtype=dtype)
    one, other = close(dout, q, k, v, causal=True), close(dout, q, k, v, causal=True)
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_nan_does_not_leak(dtype):
    """A NaN in a key reaches the rows that see it, and the gradients these rows have a share in."""
    dout, q, k, v = draw(*[(1, 60, 16)] * 4, dtype=dtype)
    window = (0, 0)
    clean = close(dout, q, k, v, window=window)
    k[0, 33] = v[0, 33] = np.nan
    out, lse = cuflash.forward(q, k, v, return_lse=True, window=window)
    grads = cuflash.backward(dout, q, k, v, out, lse, window=window)
    for grad, before in zip(grads, clean, strict=True):
        others = np.arange(60) != 33
        assert np.array_equal(grad[0, others], before[0, others])
    assert np.isnan(grads[0][0, 33]).all()


def test_visible_nan_in_dout_shows():
    dout, q, k, v = draw(*[(1, 60, 16)] * 4)
    dout[0, 20, 3] = np.nan
    out, lse = cuflash.forward(q, k, v, return_lse=True, causal=True)
    dq, dk, dv = cuflash.backward(dout, q, k, v, out, lse, causal=True)
    rows = np.arange(60)
    assert (np.isnan(dq[0]).all(axis=1) == (rows == 20)).all()
    assert (np.isnan(dk[0]).all(axis=1) == (rows <= 20)).all() and np.isnan(dv[0, :21, 3]).all()
    assert np.isfinite(dv[0, 21:]).all() and np.isfinite(dv[0, :, 4]).all()


def test_scores_of_minus_infinity_have_no_gradient():
    dout, q, k, v = draw(*[(1, 40, 16)] * 4)
    q[..., 0] = 1
    k[0, ::2, 0] = -np.inf
    out, lse = cuflash.forward(q, k, v, return_lse=True)
    dq, dk, dv = cuflash.backward(dout, q, k, v, out, lse)
    expected = reference.backward(dout, q, k, v)
    assert not dk[0, ::2].any() and not dv[0, ::2].any()
    assert bounds.worst((dq, dk, dv), bounds.backward(dout, q, k, v, path="numpy float32")) <= 1
    assert all(np.isfinite(grad).all() for grad in expected)


def test_wrong_arguments():
    dout, q, k, v = draw(*[(2, 8, 4)] * 4)
    out, lse = cuflash.forward(q, k, v, return_lse=True)
    for arguments, error, words in (
        ((dout[:, 1:], q, k, v, out, lse), ValueError, "dout has shape"),
        ((dout, q, k, v, out, lse[:1]), ValueError, "lse has shape"),
        ((dout, q, k, v, out, lse.astype(np.float64)), TypeError, "lse has dtype"),
        ((dout.astype(np.float64), q, k, v, out, lse), TypeError, "dout has dtype"),
    ):
        with pytest.raises(error, match=words):
            cuflash.backward(*arguments)


def test_cupy_arrays_are_refused(engine):
    if engine.name == "numpy":
        pytest.skip("runs on NumPy arrays")
    dout, q, k, v = (engine.xp.asarray(x) for x in draw(*[(2, 8, 4)] * 4))
    out, lse = cuflash.forward(q, k, v, return_lse=True)
    with pytest.raises(NotImplementedError, match="backward: has no GPU kernel yet"):
        cuflash.backward(dout, q, k, v, out, lse)
