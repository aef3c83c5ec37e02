"""backward on every engine: the checks of `cuflash.testing` on drawn problems, and the edges written out."""

from functools import partial

import drawn
import numpy as np
import pytest
from drawn import DTYPES, changed

import cuflash
from cuflash import bounds, reference, testing

ENGINES = ["numpy", "emulated portable", "emulated sm90", "portable", "sm90"]
draw = partial(drawn.draw, dtype="float16")
SIXTEEN_BIT = ("float16", "bfloat16")
KERNELS = {"numpy": DTYPES, "emulated sm90": SIXTEEN_BIT}  # dtypes of engines that have not those of `portable`

each_engine = pytest.mark.parametrize("engine", ENGINES, indirect=True, scope="module")
each_dtype = pytest.mark.parametrize(
    "engine, dtype",
    [(engine, dtype) for engine in ENGINES for dtype in KERNELS.get(engine, DTYPES)],
    indirect=["engine"],
    scope="module",
)


def same(ones, others):
    """Bit for bit, but for the sign of 0 and the kind of NaN."""
    pairs = [[reference.double(x) for x in pair] for pair in zip(ones, others, strict=True)]
    return all(np.array_equal(*pair, equal_nan=True) for pair in pairs)


def gradients(dout, q, k, v, *, dlse=None, grads=None, **keywords):
    out, lse = cuflash.forward(q, k, v, return_lse=True, **keywords)
    return cuflash.backward(dout, q, k, v, out, lse, dlse=dlse, grads=grads, **keywords)


def close(dout, q, k, v, *, dlse=None, **keywords):
    """Gradients, after they have been found inside the bound."""
    grads = gradients(dout, q, k, v, dlse=dlse, **keywords)
    exact = bounds.backward(dout, q, k, v, dlse=dlse, path=testing._path(None, q), **keywords)
    assert bounds.worst(grads, exact) <= 1
    assert [(g.shape, g.dtype) for g in grads] == [(x.shape, x.dtype) for x in (q, k, v)]
    return grads


@each_dtype
@pytest.mark.parametrize("check", testing.gradient_checks, ids=lambda check: check.__name__)
def test_property(engine, dtype, check):
    size = {
        "numpy": {"examples": 25, "max_length": 130, "max_head_dim": 130},
        "emulated": {"examples": 4, "max_length": 130, "max_head_dim": 64},  # test_emulated.py draws more
    }.get(engine.name, {"examples": 60})
    check = partial(check, gradients=cuflash.backward)
    testing.fuzz(check, cuflash.forward, dtypes=[dtype], xp=engine.xp, **size)


@each_engine
def test_the_bound_has_teeth(engine):
    """It is near what is measured, and faults do not pass it."""
    dout, q, k, v = draw(engine, *[(2, 130, 64)] * 4)
    exact = bounds.backward(dout, q, k, v, causal=True, path=testing._path(None, q))

    def worst(*arrays, **keywords):
        return [bounds.worst([x], [each]) for x, each in zip(gradients(*arrays, **keywords), exact, strict=True)]

    assert all(0.05 < each <= 1 for each in worst(dout, q, k, v, causal=True))
    swapped = engine.xp.asarray(reference.host(k)[::-1].copy())
    faults = [
        worst(dout, q, k, v, causal=True, scale=1.01 / 8),
        worst(dout, q, k, v, window=(None, 1)),
        worst(dout, q, k, v, causal=True, window=(100, None)),
        worst(dout, q, swapped, v, causal=True),
        worst(dout, q, k, changed(engine, v, (slice(None), 5), 0), causal=True),
    ]
    assert all(max(each) > 1 for each in faults)


# Sizes ----------------------------------------------------------------------------------------------------------


@each_dtype
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
def test_nothing(engine, dtype, q_shape, k_shape, value_dim):
    q, k, v, dout = draw(engine, q_shape, k_shape, (*k_shape[:-1], value_dim), (*q_shape[:-1], value_dim), dtype=dtype)
    assert not any(grad.any() for grad in close(dout, q, k, v, causal=True))


@each_engine
def test_no_value_columns(engine):
    """What is left is the gradient of lse."""
    q, k, v, dout = draw(engine, (2, 70, 16), (2, 50, 16), (2, 50, 0), (2, 70, 0))
    (dlse,) = draw(engine, (2, 70), dtype="float32", seed=1)
    dq, dk, dv = close(dout, q, k, v, dlse=dlse)
    assert dq.any() and dk.any() and dv.shape == (2, 50, 0)


@each_dtype
@pytest.mark.parametrize("key_heads", [1, 2, 6])
def test_query_heads_of_a_group_are_summed(engine, dtype, key_heads):
    shapes = (2, 6, 40, 16), (2, key_heads, 50, 16), (2, key_heads, 50, 24), (2, 6, 40, 24)
    q, k, v, dout = draw(engine, *shapes, dtype=dtype)
    close(dout, q, k, v, causal=True)


@each_engine
def test_the_order_of_heads_in_a_group_is_of_no_matter(engine):
    q, k, v, dout = draw(engine, (6, 140, 16), (2, 150, 16), (2, 150, 16), (6, 140, 16))
    order = np.array([2, 0, 1, 4, 5, 3])
    dq, dk, dv = gradients(dout, q, k, v, causal=True)
    others = gradients(dout[order], q[order], k, v, causal=True)
    exact = bounds.backward(dout, q, k, v, causal=True, path=testing._path(None, q))
    assert same([dq[order]], others[:1]), "what one head's queries get depends on no other's"
    for one, other, (_, bound) in zip((dk, dv), others[1:], exact[1:], strict=True):
        assert (abs(reference.double(one) - reference.double(other)) <= 2 * bound).all()


@each_dtype
def test_stretched_axes_are_summed(engine, dtype):
    shapes = (4, 1, 2, 20, 8), (1, 3, 2, 30, 8), (2, 30, 8), (4, 3, 2, 20, 8)
    q, k, v, dout = draw(engine, *shapes, dtype=dtype)
    close(dout, q, k, v)
    dq, dk, dv = close(dout[0, 0], q[0, 0], k[0, 0], v)
    assert dv.shape == v.shape


@each_engine
def test_more_leading_axes_than_kernels_see(engine):
    q, k, v, dout = draw(engine, (2, 2, 3, 2, 20, 8), (2, 1, 3, 2, 30, 8), (1, 2, 1, 2, 30, 8), (2, 2, 3, 2, 20, 8))
    close(dout, q, k, v, causal=True)


@each_engine
def test_matrices_have_no_head_axis(engine):
    dq, dk, dv = close(*draw(engine, (5, 3), (5, 8), (7, 8), (7, 3)), causal=True)
    assert dq.shape == (5, 8) and dk.shape == (7, 8) and dv.shape == (7, 3)


@each_engine
@pytest.mark.parametrize("window", [(200, 0), (3, 70), (0, 0), (None, 100), (64, None)])
def test_windows_over_several_tiles(engine, window):
    q, k, v, dout = draw(engine, (2, 300, 16), (1, 280, 16), (1, 280, 16), (2, 300, 16))
    for causal in (False, "top-left"):
        close(dout, q, k, v, causal=causal, window=window)


@each_engine
def test_tiles_that_no_row_sees(engine):
    """Rows from the tenth on see no key, and most keys no row."""
    q, k, v, dout = draw(engine, (1, 290, 16), (1, 10, 16), (1, 10, 16), (1, 290, 16))
    dq, dk, dv = close(dout, q, k, v, causal="top-left", window=(5, None))
    assert not dq[0, 15:].any() and dk.any()
    q, k, v, dout = draw(engine, (1, 10, 16), (1, 290, 16), (1, 290, 16), (1, 10, 16))
    dq, dk, dv = close(dout, q, k, v, causal="top-left")
    assert not dk[0, 10:].any() and not dv[0, 10:].any() and dv[0, :10].any()


# Where arrays lie -----------------------------------------------------------------------------------------------


@each_engine
@pytest.mark.parametrize("layout", ["swapped", "offset", "reversed", "stepped", "strided"])
def test_operands_lie_where_they_like(engine, layout):
    """Each of the six may be a view, and no bit changes."""
    arrays = draw(engine, (2, 3, 70, 20), (2, 3, 70, 20), (2, 3, 90, 20), (2, 3, 90, 20))
    out, lse = cuflash.forward(*arrays[1:], causal=True, return_lse=True)
    (dlse,) = draw(engine, (2, 3, 70), dtype="float32", seed=1)
    wanted = cuflash.backward(*arrays, out, lse, causal=True, dlse=dlse)

    def view(x):
        return testing.lay_out(reference.host(x), layout, engine.xp)

    rows = [view(x[..., None])[..., 0] for x in (lse, dlse)]
    views = [view(x) for x in (*arrays, out)]
    assert same(cuflash.backward(*views, rows[0], causal=True, dlse=rows[1]), wanted)
    assert same(cuflash.backward(views[0], *arrays[1:], out, lse, causal=True, dlse=dlse), wanted)


@each_engine
def test_a_dout_of_stride_zero(engine):
    """As a sum of out has it."""
    _, q, k, v = draw(engine, *[(2, 3, 70, 16)] * 4)
    (row,) = draw(engine, (1, 1, 1, 16), seed=1)
    for dout in (engine.xp.broadcast_to(row, q.shape), engine.xp.broadcast_to(row[..., :1], q.shape)):
        copy = engine.xp.asarray(reference.host(dout).copy())
        assert same(gradients(dout, q, k, v, causal=True), gradients(copy, q, k, v, causal=True))


@each_engine
def test_gradients_have_the_order_of_inputs(engine):
    arrays = [x.swapaxes(1, 2) for x in draw(engine, *[(2, 33, 4, 16)] * 4)]
    for grad in close(*arrays):
        assert grad.swapaxes(1, 2).flags.c_contiguous


@each_engine
def test_grads_are_written_where_told(engine):
    dout, q, k, v = draw(engine, *[(2, 3, 33, 16)] * 4)
    out, lse = cuflash.forward(q, k, v, return_lse=True)
    packed = engine.xp.asarray(np.full((2, 33, 3, 3, 16), np.nan, np.float16))
    slots = tuple(packed[:, :, n].swapaxes(1, 2) for n in range(3))
    grads = cuflash.backward(dout, q, k, v, out, lse, grads=slots)
    assert all(grad is slot for grad, slot in zip(grads, slots, strict=True))
    wanted = cuflash.backward(dout, q, k, v, out, lse)
    assert same(slots, wanted)
    odd = engine.xp.asarray(np.full((3, 2, 3, 33, 17), np.nan, np.float16))  # rows that no chunk of 16 bytes fits
    cuflash.backward(dout, q, k, v, out, lse, grads=tuple(odd[..., 1:]))
    assert same(odd[..., 1:], wanted) and np.isnan(reference.host(odd[..., 0])).all()
    for wrong, words in (
        ((q, slots[1], slots[2]), "dq shares memory with q"),
        ((slots[0], slots[0], slots[2]), "dk shares memory with dq"),
        (slots[:2], "wanted None or the three arrays"),
    ):
        with pytest.raises(ValueError, match=words):
            cuflash.backward(dout, q, k, v, out, lse, grads=wrong)


@each_engine
def test_stretched_grads_are_written_where_told(engine):
    q, k, v, dout = draw(engine, (3, 2, 33, 16), (2, 33, 16), (1, 2, 33, 16), (3, 2, 33, 16))
    grads = tuple(engine.xp.asarray(np.full((*x.shape[:-1], 20), np.nan, np.float16))[..., 3:19] for x in (q, k, v))
    assert same(gradients(dout, q, k, v, grads=grads), gradients(dout, q, k, v))


# Which bits -----------------------------------------------------------------------------------------------------


@each_dtype
def test_gradients_again_are_the_same(engine, dtype):
    dout, q, k, v = draw(engine, (4, 300, 16), (4, 300, 16), (2, 300, 16), (2, 300, 16), dtype=dtype)
    for causal in (False, True):
        one, other = close(dout, q, k, v, causal=causal), close(dout, q, k, v, causal=causal)
        assert all((reference.host(a) == reference.host(b)).all() for a, b in zip(one, other, strict=True))


@each_engine
@pytest.mark.parametrize("causal", [False, True])
def test_batch_is_one_by_one(engine, causal):
    dout, q, k, v = draw(engine, (3, 2, 200, 16), (3, 2, 200, 16), (3, 1, 150, 16), (3, 1, 150, 16))
    together = gradients(dout, q, k, v, causal=causal)
    for b in range(3):
        alone = gradients(dout[b], q[b], k[b], v[b], causal=causal)
        assert same([grad[b] for grad in together], alone)


# What is in the arrays ------------------------------------------------------------------------------------------


@each_engine
@pytest.mark.parametrize("causal", [False, True])
def test_gradient_of_lse(engine, causal):
    q, k, v, dout = draw(engine, (2, 50, 8), (2, 20, 8), (2, 20, 8), (2, 50, 8))
    (dlse,) = draw(engine, (2, 50), dtype="float32", seed=1)
    close(dout, q, k, v, dlse=dlse, causal=causal)
    dq, dk, dv = close(engine.xp.zeros_like(dout), q, k, v, dlse=dlse, causal=causal)
    assert not dv.any() and dq.any() and dk.any()


@each_engine
@pytest.mark.parametrize("scale", [0, -1.5, 10.0, 1e-40, -1e-40])
def test_scale(engine, scale):
    arrays = draw(engine, (2, 33, 16), (2, 33, 16), (2, 65, 16), (2, 65, 16))
    dq, dk, dv = close(*arrays, scale=scale)
    assert abs(scale) > 1e-38 or not (dq.any() or dk.any())
    close(*arrays, scale=scale, causal=True)


@each_engine
def test_weights_of_rows_with_a_small_lse(engine):
    """The keys that fill the last tile have score 0: ``exp(0 - lse)`` overflows for lse below -88."""
    q, k, v, dout = draw(engine, (2, 70, 16), (2, 33, 16), (2, 33, 16), (2, 70, 16))
    q, k = abs(q) + 1, -abs(k) - 1
    out, lse = cuflash.forward(q, k, v, scale=4.0, return_lse=True)
    assert float(lse.max()) < -88
    assert all(np.isfinite(reference.double(grad)).all() for grad in close(dout, q, k, v, scale=4.0))


@each_engine
@pytest.mark.parametrize("scale", [1e3, 1e5, 1e7, 1e9, -1e9, 1e30])
def test_huge_scores(engine, scale):
    """A weight is 1 at most, however coarse the rounded lse; gradients stay finite."""
    arrays = draw(engine, (2, 70, 16), (2, 70, 16), (2, 90, 16), (2, 90, 16))
    small = [x * 2.0**-10 for x in arrays[:1]]
    for causal in (False, True):
        for grad in close(*small, *arrays[1:], scale=scale, causal=causal)[2:]:
            assert np.isfinite(reference.double(grad)).all()


@each_dtype
def test_hidden_nan_does_not_leak(engine, dtype):
    """A NaN in a key reaches the rows that see it, and the gradients these rows have a share in."""
    dout, q, k, v = draw(engine, *[(1, 60, 16)] * 4, dtype=dtype)
    k, v = (changed(engine, x, (0, 33), np.nan) for x in (k, v))
    grads = [reference.double(grad)[0] for grad in close(dout, q, k, v, window=(0, 0))]
    others = np.arange(60) != 33
    assert all(np.isfinite(grad[others]).all() for grad in grads) and np.isnan(grads[0][33]).all()


@each_engine
@pytest.mark.parametrize("n", range(4), ids=["dout", "q", "k", "v"])
def test_nan_shows_where_it_is_seen_alone(engine, n):
    """Also where most of several tiles do not see it."""
    arrays = draw(engine, (2, 200, 16), (2, 200, 16), (1, 190, 16), (1, 190, 16))
    arrays[n] = changed(engine, arrays[n], ((0, 70), (1, 130, 5), (0, 100), (0, 64, 3))[n], np.nan)
    close(*arrays, causal=True)


@each_engine
def test_visible_nan_in_dout_shows(engine):
    dout, q, k, v = draw(engine, *[(1, 60, 16)] * 4)
    dout = changed(engine, dout, (0, 20, 3), np.nan)
    dq, dk, dv = (reference.double(grad)[0] for grad in close(dout, q, k, v, causal=True))
    rows = np.arange(60)
    assert (np.isnan(dq).all(axis=1) == (rows == 20)).all()
    assert (np.isnan(dk).all(axis=1) == (rows <= 20)).all() and np.isnan(dv[:21, 3]).all()
    assert np.isfinite(dv[21:]).all() and np.isfinite(dv[:, 4]).all()


@each_engine
def test_scores_of_minus_infinity_have_no_gradient(engine):
    dout, q, k, v = draw(engine, *[(1, 40, 16)] * 4)
    q = changed(engine, q, (..., 0), 1)
    k = changed(engine, k, (0, slice(None, None, 2), 0), -np.inf)
    dq, dk, dv = close(dout, q, k, v)
    assert not dk[0, ::2].any() and not dv[0, ::2].any()
    assert all(np.isfinite(reference.double(grad)).all() for grad in (dq, dk, dv))


# vjp, and what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["numpy", "portable", "sm90"], indirect=True, scope="module")
def test_vjp_joins_the_two_halves(engine):
    dout, q, k, v = draw(engine, (2, 40, 16), (2, 40, 16), (1, 50, 16), (1, 50, 16))
    (dlse,) = draw(engine, (2, 40), dtype="float32", seed=1)
    keywords = {"causal": True, "scale": 0.5, "window": (20, None), "engine": engine.name}
    out, pullback = cuflash.vjp(q, k, v, **keywords)
    wanted, lse = cuflash.forward(q, k, v, return_lse=True, **keywords)
    for given in ({}, {"dlse": dlse}):
        assert same(pullback(dout, **given), cuflash.backward(dout, q, k, v, wanted, lse, **given, **keywords))
    assert same([out], [wanted])
    (out, also), pullback = cuflash.vjp(q, k, v, return_lse=True, **keywords)
    assert same([out, also], [wanted, lse])
    assert same(pullback(dout, dlse), cuflash.backward(dout, q, k, v, out, lse, dlse=dlse, **keywords))


@each_engine
def test_wrong_arguments(engine):
    dout, q, k, v = draw(engine, *[(2, 8, 4)] * 4)
    out, lse = cuflash.forward(q, k, v, return_lse=True)
    for arguments, error, words in (
        ((dout[:, 1:], q, k, v, out, lse), ValueError, "dout has shape"),
        ((dout, q, k, v, out, lse[:1]), ValueError, "lse has shape"),
        ((dout, q, k, v, out, lse.astype(np.float64)), TypeError, "lse has dtype"),
        ((dout.astype(np.float64), q, k, v, out, lse), TypeError, "dout has dtype"),
    ):
        with pytest.raises(error, match=words):
            cuflash.backward(*arguments)
