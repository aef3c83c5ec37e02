"""The bound holds, is not slack, and rejects faults, shown by an emulation of the kernels' arithmetic in NumPy."""

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import bounds, reference, testing

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
SIZES = [(64, 16), (128, 32), (256, 64)]
FAULTS = [
    "key dropped", "mask off by one", "scale 1 % off", "heads swapped", "tf32", "lse in base 2", "rescale left out",
]  # fmt: skip


def draw(length, dim, dtype, heads=2, seed=0, spread=1.0):
    rng = np.random.default_rng([seed, length, dim])
    return [(rng.standard_normal((heads, length, dim)) * s).astype(DTYPES[dtype]) for s in (spread, 1, 1)]


def as_tf32(x):
    """Mantissa cut to 10 bits."""
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def multiply(a, b, parts=None):
    """a @ b; where numbers have so many parts of bfloat16, by the largest products of these."""
    if parts is None:
        return a @ b
    a_parts, b_parts = [], []
    for rest, found in ((a, a_parts), (b, b_parts)):
        for _ in range(parts):
            found.append(rest.astype(ml_dtypes.bfloat16).astype(np.float32))
            rest = rest - found[-1]
    return sum(a_parts[i] @ b_parts[total - i] for total in reversed(range(parts)) for i in range(total + 1))


def kernel(q, k, v, *, causal=True, tile=32, lag=8, fault=None, parts=None):
    """out and lse as the portable kernels compute them: base 2, a reference that lags, weights of 16 bits."""
    dtype, real = q.dtype, np.float64 if q.dtype == np.float64 else np.float32
    seen = reference.visible(q.shape[-2], k.shape[-2], causal=causal)
    if fault == "mask off by one":
        seen = seen | np.roll(seen, 1, axis=1)
    if fault == "key dropped":
        seen[:, 5] = False
    if fault == "heads swapped":
        k = k[::-1]
    q, k, v = (x.astype(real) for x in (q, k, v))
    if fault == "tf32":
        q, k, v = (as_tf32(x) for x in (q, k, v))
    c = real(q.shape[-1] ** -0.5 * np.log2(np.e) * (1.01 if fault == "scale 1 % off" else 1))
    reference_point = np.full(q.shape[:-1], -np.inf, real)
    total, out = np.zeros(q.shape[:-1], real), np.zeros((*q.shape[:-1], v.shape[-1]), real)
    with np.errstate(invalid="ignore", divide="ignore"):
        for j in range(0, k.shape[-2], tile):
            products = multiply(q, k[:, j : j + tile].swapaxes(-1, -2), parts)
            s = np.where(seen[:, j : j + tile], products, -np.inf)
            top = s.max(-1) * c
            rises = top > reference_point + real(lag)
            factor = np.exp2(np.where(rises, reference_point - top, 0)).astype(real)
            reference_point = np.where(rises, top, reference_point)
            total = total * factor
            out = out * (1 if fault == "rescale left out" and j == tile else factor[..., None])
            shift = np.where(reference_point == -np.inf, 0, reference_point)
            weights = np.exp2((s.astype(np.longdouble) * c - shift[..., None]).astype(real))  # one rounding: an fma
            total = total + weights.sum(-1)
            out = out + multiply(weights.astype(dtype).astype(real), v[:, j : j + tile], parts)
        out = np.where(total == 0, 0, 1 / total)[..., None] * out
        lse = (reference_point + np.log2(total)) * (real(1) if fault == "lse in base 2" else real(np.log(2)))
    return out.astype(dtype), np.where(total == 0, -np.inf, lse)


def judged(results, arrays, path, **keywords):
    return bounds.worst(results, bounds.forward(*arrays, path=path, **keywords))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_the_bound_holds_and_is_not_slack(dtype, causal):
    found = {}
    for size in SIZES:
        arrays = draw(*size, dtype)
        results = {
            "portable": kernel(*arrays, causal=causal),
            "numpy": cuflash.forward(*arrays, causal=causal, return_lse=True),
        }
        for engine, (out, lse) in results.items():
            wanted = bounds.forward(*arrays, causal=causal, path=f"{engine} {dtype}")
            assert bounds.worst((out, lse), wanted) <= 1
            found[engine] = max(found.get(engine, 0), bounds.worst(out, wanted))
    assert not causal or min(found.values()) > 0.05  # its short rows are where little averages out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [1e-3, 30.0, 1000.0])
def test_the_bound_holds_for_weak_and_strong_scores(dtype, spread):
    arrays = draw(128, 32, dtype, spread=spread)
    for lag in (0, 8):
        assert judged(kernel(*arrays, tile=16, lag=lag), arrays, f"portable {dtype}", causal=True) <= 1
    engine = cuflash.forward(*arrays, causal=True, return_lse=True)
    assert judged(engine, arrays, f"numpy {dtype}", causal=True) <= 1


FAULTY = [(fault, dtype) for fault in FAULTS for dtype in DTYPES if fault != "tf32" or dtype == "float32"]


@pytest.mark.parametrize(("fault", "dtype"), FAULTY)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_faults_are_rejected(fault, dtype, size):
    lag, arrays, path = 0 if fault == "rescale left out" else 8, draw(*size, dtype), f"portable {dtype}"
    assert judged(kernel(*arrays, lag=lag), arrays, path, causal=True) <= 1
    assert judged(kernel(*arrays, lag=lag, fault=fault), arrays, path, causal=True) > 1


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_faults_are_rejected_where_tf32_will_do(fault, size):
    lag, arrays, path = 0 if fault == "rescale left out" else 8, draw(*size, "float32"), "sm90 tf32"
    assert judged(kernel(*arrays, lag=lag, parts=2), arrays, path, causal=True) <= 1
    assert judged(kernel(*arrays, lag=lag, parts=2, fault=fault), arrays, path, causal=True) > 1


@pytest.mark.parametrize("path, parts", [("portable float32", 3), ("sm90 float32", 3), ("sm90 tf32", 2)])
def test_each_part_of_float32_is_wanted(path, parts):
    """Products of so many parts are inside the bound, and not far; of one less, bfloat16's where that is one, not."""
    worst = 0
    for size in SIZES:
        arrays = draw(*size, "float32")
        wanted = bounds.forward(*arrays, causal=True, path=path)
        out, lse = kernel(*arrays, parts=parts)
        assert bounds.worst((out, lse), wanted) <= 1
        assert bounds.worst(kernel(*arrays, parts=parts - 1), wanted) > 1
        worst = max(worst, bounds.worst(out, wanted))
    assert worst > 0.05


def test_tf32_of_three_parts_has_the_bound_of_float32():
    for engine in ("numpy", "portable"):
        assert bounds.PATHS[f"{engine} tf32"] == bounds.PATHS[f"{engine} float32"]
    assert bounds.PATHS["sm90 float32"] == bounds.PATHS["portable float32"], "tests on a GPU name the latter for both"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rescale_left_out_where_the_reference_lags(dtype):
    arrays = draw(128, 32, dtype, spread=20.0)
    path = f"portable {dtype}"
    assert judged(kernel(*arrays, tile=16), arrays, path, causal=True) <= 1
    assert judged(kernel(*arrays, tile=16, fault="rescale left out"), arrays, path, causal=True) > 1


def gradients(q, k, v, dout, dlse, fault=None):
    out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
    if fault == "delta of another row":
        out = np.roll(out, 1, axis=-2)
    if fault == "dlse ignored":
        dlse = None
    dq, dk, dv = cuflash.backward(dout, q, k, v, out, lse, causal=True, dlse=dlse)
    if fault == "dq not scaled":
        dq = (dq * q.dtype.type(1.02)).astype(q.dtype)
    return dq, dk, dv


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", [None, "delta of another row", "dlse ignored", "dq not scaled"])
def test_gradients(dtype, fault):
    q, k, v = draw(64, 16, dtype)
    dout = draw(64, 16, dtype, seed=1)[0]
    dlse = np.random.default_rng(2).standard_normal((2, 64)).astype(np.float64 if dtype == "float64" else np.float32)
    wanted = bounds.backward(dout, q, k, v, causal=True, dlse=dlse, path=f"numpy {dtype}")
    worst = bounds.worst(gradients(q, k, v, dout, dlse, fault), wanted)
    assert worst > 1 if fault else 0.01 < worst <= 1


def test_gradients_of_stretched_axes_and_groups():
    q, k, v = np.ones((3, 1, 4, 9, 8)), np.ones((2, 1, 7, 8)), np.ones((2, 7, 5))
    q, k, v = (x * np.random.default_rng(x.ndim).standard_normal(x.shape) for x in (q, k, v))
    k = k[:, [0, 0]] + np.arange(2)[:, None, None]
    dout = np.random.default_rng(0).standard_normal((3, 2, 4, 9, 5))
    results = cuflash.forward(q, k, v, return_lse=True)
    wanted = bounds.backward(dout, q, k, v, path="numpy float64")
    grads = cuflash.backward(dout, q, k, v, *results)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    assert bounds.worst(grads, wanted) <= 1
    for (values, _), x in zip(wanted, reference.backward(dout, q, k, v), strict=True):
        np.testing.assert_allclose(values, x, rtol=1e-12)


def test_decode():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in [(3, 4, 2, 8), (3, 2, 20, 8), (3, 2, 20, 5)])
    lengths = np.array([0, 1, 20])
    wanted = bounds.decode(q, k, v, lengths=lengths, path="numpy float32")
    assert bounds.worst(cuflash.decode(q, k, v, lengths=lengths, return_lse=True), wanted) <= 1
    assert bounds.worst(cuflash.decode(q, k, v, lengths=lengths - [0, 0, 1]), wanted) > 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_decode_on_a_gpu_has_teeth(dtype):
    """Faults of a kernel that adds parts are outside the bound of one."""
    rng = np.random.default_rng(0)
    shapes = (2, 4, 1, 64), (2, 2, 40, 64), (2, 2, 40, 64)
    q, k, v = (rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes)
    wanted = bounds.decode(q, k, v, path=f"portable {dtype}")

    def worst(*arrays, **keywords):
        out, lse = reference.decode(*arrays, **keywords)
        return bounds.worst((out.astype(q.dtype), lse.astype(np.float32)), wanted)

    assert 0.05 < worst(q, k, v) <= 1
    lengths = np.array([40, 39])
    for arrays, keywords in (
        ((q, k, v), {"lengths": lengths}),  # a key lost
        ((q, k, v), {"scale": 1.01 / 8}),
        ((q[:, [1, 0, 2, 3]], k, v), {}),  # two heads swapped
        ((q, k, np.roll(v, 1, axis=2)), {}),
    ):
        assert worst(*arrays, **keywords) > 1
    out, lse = reference.decode(q, k, v)
    assert bounds.worst((out.astype(q.dtype), (lse / np.log(2)).astype(np.float32)), wanted) > 1
    parts = [reference.decode(q, k[:, :, half], v[:, :, half]) for half in (slice(20), slice(20, None))]
    assert bounds.worst((sum(out for out, _ in parts) / 2).astype(q.dtype), wanted) > 1  # parts weighed alike


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_appends_and_rotation_have_teeth(dtype):
    """What a kernel rounds is inside the bound; rows at other positions, or turned otherwise, are not."""
    rng = np.random.default_rng(0)
    shapes = (2, 4, 3, 64), (2, 2, 40, 64), (2, 2, 40, 64), (2, 2, 3, 64), (2, 2, 3, 64)
    q, k, v, k_new, v_new = (rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes)
    angles = np.arange(60)[:, None] * 1e4 ** -(np.arange(32) / 32)
    cos, sin = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
    lengths = np.array([30, 17])
    append = {"lengths": lengths, "k_new": k_new, "v_new": v_new, "rotary": (cos, sin)}
    wanted = bounds.decode(q, k, v, path=f"portable {dtype}", **append)

    def worst(rounded=True, **changes):
        """Of a call in which q and the new keys are rounded once."""
        given = append | changes
        sequences = []
        for q1, k1, v1 in reference.sequences(q, k, v, **given):
            k1 = k1.copy()
            if rounded:
                q1, k1 = q1.astype(q.dtype), k1.astype(q.dtype)
            sequences.append(reference.forward(q1, k1, v1, causal=True))
        out, lse = (np.array(x) for x in zip(*sequences, strict=True))
        return bounds.worst((out.astype(q.dtype), lse.astype(np.float32)), wanted)

    assert worst(rounded=False) < worst() <= 1 and worst() > 0.05
    for changes in (
        {"rotary": (cos[1:], sin[1:] * np.float32(1.1))},
        {"rotary": (cos, -sin), "k_new": k_new[:, ::-1]},
        {"rotary_interleaved": True},
        {"k_new": np.roll(k_new, 1, axis=2)},
        {"v_new": np.roll(v_new, 1, axis=2)},
        {"lengths": lengths - 1},
        {"rotary": None},
    ):
        assert worst(**changes) > 1


def test_without_room():
    """Exactly NaN, and nothing else is."""
    q, k, new = (np.ones(shape) for shape in ((3, 1, 2, 4), (3, 1, 5, 4), (3, 1, 2, 4)))
    wanted = bounds.decode(q, k, k, path="numpy float64", lengths=np.array([4, 3, -1]), k_new=new, v_new=new)
    assert np.isnan(wanted.out[[0, 2]]).all() and np.isnan(wanted.lse[[0, 2]]).all()
    assert (wanted.out[1] == 1).all() and (wanted.lse[1] == 2 + np.log([[4, 5]])).all()
    results = wanted.out.copy(), wanted.lse.copy()
    assert bounds.worst(results, wanted) == 0
    results[0][0] = 0
    assert bounds.worst(results, wanted) == np.inf


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kv_format", ["int8", "e4m3"])
@pytest.mark.parametrize("axis", [-1, (0, 2, 3)], ids=["slots", "heads"])
def test_decode_from_8_bits_has_teeth(dtype, kv_format, axis):
    rng = np.random.default_rng(0)
    shapes = (2, 4, 1, 64), (2, 2, 40, 64), (2, 2, 40, 64)
    q, *others = (rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes)
    (k, k_scale), (v, v_scale) = (cuflash.quantize(x, kv_format, axis=axis) for x in others)
    given = {"k_scale": k_scale, "v_scale": v_scale, "kv_format": kv_format}
    wanted = bounds.decode(q, k, v, path=f"portable {dtype}", **given)

    def worst(**changes):
        keywords = given | changes
        out, lse = reference.decode(q, keywords.pop("k", k), keywords.pop("v", v), **keywords)
        return bounds.worst((out.astype(q.dtype), lse.astype(np.float32)), wanted)

    assert 0.05 < worst() <= 1
    one_off = v.copy()
    one_off[..., 0] += 4  # of 256: the codes of an element in each row
    for changes in (
        {"lengths": np.array([40, 39])},
        {"k_scale": k_scale * np.float32(1.01)},
        {"v_scale": v_scale * np.float32(1.03)},
        {"k_scale": np.roll(k_scale, 1, axis=-1)},
        {"v_scale": np.roll(v_scale, 1, axis=-1)},
        {"v": one_off},
        {"k": -1 - k if kv_format == "int8" else k ^ np.uint8(0x80)},
    ):
        assert worst(**changes) > 1, changes.keys()


@pytest.mark.filterwarnings("error")
def test_comparison():
    exact, bound = np.array([1.0, -np.inf, np.inf, np.nan, 2.0]), np.array([0.5, 0, 0, 0, np.inf])
    assert bounds.worst(np.array([1.25, -np.inf, np.inf, np.nan, np.nan]), [(exact, bound)]) == 0.5
    for n, wrong in enumerate([np.nan, 0.0, -np.inf, 3.0]):
        actual = exact.copy()
        actual[n] = wrong
        assert bounds.worst(actual, [(exact, bound)]) == np.inf
    assert bounds.worst(exact[:4], [(exact, bound)]) == np.inf
    assert bounds.worst(np.zeros((0, 3)), [(np.zeros((0, 3)), np.zeros((0, 3)))]) == 0


@pytest.mark.filterwarnings("error")
def test_what_is_not_finite():
    q, k, v = (np.ones((1, n, 4), np.float32) for n in (4, 6, 6))
    k[0, 0], v[0, 1, 2], k[0, 5], v[0, 5] = -np.inf, np.nan, np.nan, np.nan
    wanted = bounds.forward(q, k, v, causal=True, path="numpy float32")
    assert np.isnan(wanted.out[0, 3]).all() and np.isnan(wanted.lse[0, 3])
    assert np.isnan(wanted.out[0, :3, 2]).all() and np.isfinite(np.delete(wanted.out[0, :3], 2, axis=1)).all()
    assert np.isfinite(wanted.lse_bound).all() and np.isfinite(wanted.out_bound).all()
    assert judged(cuflash.forward(q, k, v, causal=True, return_lse=True), (q, k, v), "numpy float32", causal=True) <= 1
    empty = bounds.forward(q * np.nan, k[:, :2], v[:, :2], causal=True, path="portable float32")
    assert (empty.out[0, :2] == 0).all() and (empty.lse[0, :2] == -np.inf).all()
    assert (empty.out_bound[0, :2] == 0).all() and (empty.lse_bound[0, :2] == 0).all()
    v[0, 1, 2] = np.inf
    wanted = bounds.forward(q, k, v, causal=True, path="numpy float32")
    assert (wanted.out[0, :3, 2] == np.inf).all() and np.isfinite(wanted.out_bound).all()


def test_infinite_where_a_format_is_left():
    x, path = np.full((1, 3, 4), 1e19, np.float32), "numpy float32"
    assert np.isfinite(bounds.forward(x / 1e19, x, x, path=path).out_bound).all()
    assert np.isinf(bounds.forward(x, x, x, path=path).out_bound).all()
    assert np.isfinite(bounds.forward(x, x / 1e19, x, path=path).out_bound).all()
    v = np.full((1, 3, 4), 60000, np.float16)
    assert np.isfinite(bounds.forward(v * 0, v * 0, v, path="portable float16").out_bound).all()
    v[...] = 65504
    assert np.isinf(bounds.forward(v * 0, v * 0, v, path="portable float16").out_bound).all()
    assert np.isinf(bounds.forward(x * 0, x * 0, x * 1e19, path="portable float32").out_bound).all()


def test_rows_are_those_of_the_whole():
    arrays = draw(64, 16, "float32")
    whole = bounds.forward(*arrays, causal=True, path="portable float32")
    some = bounds.forward(*arrays, causal=True, path="portable float32", rows=[3, 63, 0])
    for name in ("out", "lse", "out_bound", "lse_bound"):
        np.testing.assert_allclose(getattr(some, name), getattr(whole, name)[:, [3, 63, 0]], rtol=1e-5)


def test_formats_of_the_kernels():
    """What is special about the GPU: small inputs are flushed to 0, and weights may be 2^8 before they are divided."""
    q, k = np.full((1, 1, 1), 1e-39, np.float32), np.array([[[1e38], [0]]], np.float32)
    v = np.array([[[0], [1]]], np.float32)
    wanted = bounds.forward(q, k, v, scale=10, path="portable float32")
    assert bounds.worst(np.full((1, 1, 1), 0.5, np.float32), wanted) <= 1
    k = np.repeat([0, 7.5 * np.log(2)], [16, 48]).astype(np.float32)[None, :, None]
    wanted = bounds.forward(np.ones((1, 1, 1)), k, np.full((1, 64, 1), 1e37), path="portable float32")
    assert np.isinf(wanted.out_bound).all() and np.isfinite(wanted.lse_bound).all()


def test_scores_too_strong_for_their_errors():
    q, v = np.full((1, 1, 8), 1e4, np.float32), np.ones((1, 64, 2), np.float32)
    wanted = bounds.forward(q, draw(64, 8, "float32", heads=1)[1] * 1e4, v, path="portable float32")
    assert np.isfinite(wanted.out_bound).all()
    assert bounds.worst(np.full((1, 1, 2), np.nan, np.float32), wanted) == np.inf


@pytest.mark.parametrize("dtype", DTYPES)
def test_engines_come_near(engine, dtype):
    worst = 0
    for size in (*SIZES, (300, 128)):
        arrays = [engine.xp.asarray(x) for x in draw(*size, dtype)]
        out, lse = cuflash.forward(*arrays, causal=True, return_lse=True)
        wanted = bounds.forward(*arrays, causal=True, path=f"{'numpy' if engine == 'numpy' else 'portable'} {dtype}")
        assert bounds.worst((out, lse), wanted) <= 1
        worst = max(worst, bounds.worst(out, wanted))
    assert worst > 0.05


# The checks find faults -----------------------------------------------------------------------------------------


def broken(kind):
    """An attention that is wrong in one way."""

    def attention(q, k, v, **keywords):
        out, lse = cuflash.forward(q, k, v, **keywords)
        if kind == "one row":
            out = out * (1 + (np.arange(out.shape[-2]) == 16)[:, None]).astype(out.dtype)
        elif kind == "leaks NaN":
            out = out + (np.zeros_like(out) if np.isfinite(k).all() else k[..., :1, :1].astype(out.dtype) * 0 + np.nan)
        elif kind == "layout":
            out = out * np.asarray(1 if q.flags.c_contiguous else 2, out.dtype)
        elif kind == "batch":
            out = out * np.asarray(1 if q.ndim == 3 or len(q) < 2 else 2, out.dtype)
        elif kind == "order of keys":
            out = out + v[..., :1, :].mean(-3, keepdims=True) if v.shape[-2] else out
        elif kind == "future":
            out = out + v[..., -1:, :].mean(-3, keepdims=True) if v.shape[-2] else out
        elif kind == "biased":
            out = out + np.asarray(1, out.dtype)
        elif kind == "lse":
            lse = lse + np.asarray(1, lse.dtype)
        elif kind == "bounces":
            attention.calls = getattr(attention, "calls", 0) + 1
            out = out + np.asarray(attention.calls % 2, out.dtype)
        return out, lse

    return attention


@pytest.mark.parametrize("check, kind", [
    (testing.check_bound, "one row"),
    (testing.check_bound, "lse"),
    (testing.check_hidden_keys_may_hold_anything, "leaks NaN"),
    (testing.check_view_equals_copy, "layout"),
    (testing.check_batch_equals_one_by_one, "batch"),
    (testing.check_rerun, "bounces"),
    (testing.check_causal_prefix, "future"),
    (testing.check_window_is_slice, "order of keys"),
    (testing.check_split_and_merge, "lse"),
    (testing.check_linear_in_v, "biased"),
    (testing.check_permuted_keys, "order of keys"),
    (testing.check_zero_queries_average_v, "biased"),
])  # fmt: skip
def test_checks_find_faults(check, kind):
    with pytest.raises(AssertionError):
        testing.fuzz(check, broken(kind), dtypes=["float32"], max_length=40, max_head_dim=16, examples=200)
