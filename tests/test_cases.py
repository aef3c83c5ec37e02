"""What others got wrong: one test for each of the bug reports of attention libraries and of CuPy collected here.

``CASES`` lists them by name. A case is a test of that name, or waits in ``PENDING`` for a feature, or stands in
``UNTESTABLE`` with the reason. Results are held against `cuflash.bounds`; where bits must be alike, bits are compared.
"""

import gc
import itertools
import math
import mmap
import os
import subprocess
import sys
import threading
import tracemalloc
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import _compile, _launch, _numpy, _plan, _problem, _variant, bounds
from cuflash.reference import host

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
HOPPER = _plan.KNOWN[9, 0]

CASES = """
empty-row-bool-mask empty-row-padding-rows empty-row-varlen-causal-bwd finfo-min-mask-bwd-nan composed-mask-nan
first-block-all-masked finite-sentinel-clamp max-init-inf-minus f16-raw-score-overflow f16-row-sum-overflow
negative-or-zero-scale bwd-pad-key-exp-overflow single-query-negative-lse-bwd nan-in-masked-key
nan-query-must-propagate uninitialised-smem-k-tail nan-beyond-cache-length trash-page-aliasing
causal-topleft-vs-bottomright causal-more-queries causal-backend-disagreement causal-chunked-prefill
causal-dropped-in-fallback window-inclusive-left window-full-equals-causal window-right-ignored
window-negative-values i32-kv-offset-bwd i32-silent-wraparound i32-batch-stride-cache i32-dq-accum-offset
i32-token-count-indptr view-index32-flag grid-limit-batch grid-limit-silent batch-tokens-65536 smem-optin
noncontig-v mask-expanded-view raw-kernel-ignores-view negative-strides view-stride-flag-conflict
grad-layout-mismatch saved-layout-double-transpose import-no-context kv-lengths-ignored mask-broadcast-api
mask-fill-minus-10000 misaligned-base wrong-alignment-hint bias-row-misaligned headdim-not-multiple-8
v-headdim-differs gqa-grad-sum batch-zero lk-zero zero-len-q-nonzero-k zero-size-pointer varlen-decode-pack-zero
varlen-max-too-small varlen-wasted-tiles varlen-order-invariance split-count-discrepancy lse-base lse-empty-sign
merge-both-empty lse-always-for-split det-flag-ignored det-quadratic-workspace module-reload-leak
bwd-race-optlevel smem-race bias-grad-broadcast bias-only-grad bias-f32-odd-shape pair-bias-atomics
softcap-formula sink-gradient alibi-distance alibi-slopes-non-pow2 dropout-replay dropout-state-not-advanced
dropout-graph-capture graph-max-seqlen-baked paged-stale-tail paged-minus-one append-past-capacity
last-page-len-invalid paged-placement-invariance kvcache-multi-query second-gpu-launch module-per-device
stream-use-with pool-cross-stream-reuse threads-multi-gpu dlpack-stream-order dlpack-bf16 python-float-arg
array-dtype-unchecked nvrtc-fp16-header nvrtc-header-mix nvrtc-ptx-version name-expr-no-cache cache-race
cache-readonly-home f32-supported f32-tf32-silent f64-gradcheck f64-mask-value-cast
""".split()

PENDING = {
    "empty-row-bool-mask": "boolean masks",
    "empty-row-padding-rows": "boolean masks",
    "composed-mask-nan": "boolean masks",
    "mask-broadcast-api": "boolean masks",
    "mask-fill-minus-10000": "boolean masks",
    "mask-expanded-view": "bias and boolean masks",
    "finfo-min-mask-bwd-nan": "bias",
    "f64-mask-value-cast": "bias",
    "bias-row-misaligned": "bias",
    "bias-grad-broadcast": "bias",
    "bias-only-grad": "bias",
    "bias-f32-odd-shape": "bias",
    "pair-bias-atomics": "bias",
    "softcap-formula": "softcap",
    "sink-gradient": "sinks",
    "alibi-distance": "ALiBi",
    "alibi-slopes-non-pow2": "ALiBi",
    "dropout-replay": "dropout",
    "dropout-state-not-advanced": "dropout",
    "dropout-graph-capture": "dropout",
    "i32-token-count-indptr": "ragged batches",
    "varlen-decode-pack-zero": "ragged batches",
    "varlen-max-too-small": "ragged batches",
    "varlen-wasted-tiles": "ragged batches",
}

UNTESTABLE = {
    "second-gpu-launch": "needs a second GPU",
    "module-per-device": "needs a second GPU",
    "smem-race": "compute-sanitizer runs outside pytest: `.ci/gpu sanitizers`",
}


def test_every_case_is_named_once():
    """Each case is a test, waits for a feature, or cannot be tested, and only one of these."""
    tested = [case for case in CASES if f"test_{case.replace('-', '_')}" in globals()]
    assert sorted([*tested, *PENDING, *UNTESTABLE]) == sorted(CASES)


# Helpers --------------------------------------------------------------------------------------------------------


def put(xp, x):
    """A NumPy array in the library under test; bfloat16 moves as integers."""
    if xp is np:
        return x
    return xp.asarray(x.view(np.uint16)).view(x.dtype) if x.dtype == DTYPES["bfloat16"] else xp.asarray(x)


def draw(xp, *shape, dtype="float32", seed=0):
    return put(xp, np.random.default_rng([seed, *shape]).standard_normal(shape).astype(DTYPES[dtype]))


def triple(xp, *shape, dtype="float32", keys=None, key_heads=None):
    """Random q of a shape (..., heads, queries, dim), and k and v that differ in the lengths given."""
    *batch, heads, queries, dim = shape
    other = (*batch, key_heads or heads, queries if keys is None else keys, dim)
    return draw(xp, *shape, dtype=dtype), *(draw(xp, *other, dtype=dtype, seed=seed) for seed in (1, 2))


def path(engine, array):
    return f"{'numpy' if engine == 'numpy' else 'portable'} {array.dtype.name}"


def check(engine, actual, q, k, v, **keywords):
    """What ``forward`` returned lies inside the bound."""
    assert bounds.worst(actual, bounds.forward(q, k, v, path=path(engine, q), **keywords)) <= 1


def attend(engine, q, k, v, rows=None, **keywords):
    """out and lse of ``forward``, checked, at chosen rows alone where the whole would take long."""
    out, lse = cuflash.forward(q, k, v, return_lse=True, engine=engine, **keywords)
    chosen = slice(None) if rows is None else rows
    check(engine, (host(out)[..., chosen, :], host(lse)[..., chosen]), q, k, v, rows=rows, **keywords)
    return out, lse


def has_gradients(engine, dtype):
    """Whether an engine has a backward pass for a dtype."""
    return engine == "numpy" or dtype in ("float16", "bfloat16")


def gradients(q, k, v, dout, engine="numpy", **keywords):
    """dq, dk, dv of ``backward``, unchecked."""
    saved = cuflash.forward(q, k, v, return_lse=True, engine=engine, **keywords)
    return cuflash.backward(dout, q, k, v, *saved, engine=engine, **keywords)


def differentiate(q, k, v, dout, engine="numpy", **keywords):
    """dq, dk, dv of ``backward``, checked."""
    grads = gradients(q, k, v, dout, engine, **keywords)
    assert bounds.worst(grads, bounds.backward(dout, q, k, v, path=path(engine, q), **keywords)) <= 1
    return grads


def are_finite(arrays):
    """Whether all numbers are."""
    return all(np.isfinite(host(x).astype(np.float32)).all() for x in arrays)


def decode(q, k_cache, v_cache, **keywords):
    """out and lse of ``decode``, checked."""
    actual = cuflash.decode(q, k_cache, v_cache, return_lse=True, **keywords)
    assert bounds.worst(actual, bounds.decode(q, k_cache, v_cache, path=path("numpy", q), **keywords)) <= 1
    return actual


def same(actual, wanted):
    """Equal bits, where -0 is 0 and any NaN is NaN."""
    actual, wanted = ([host(x) for x in (xs if isinstance(xs, (tuple, list)) else [xs])] for xs in (actual, wanted))
    for x, y in zip(actual, wanted, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x.astype(np.float64), y.astype(np.float64))


def near(lse, exact, ulps=4):
    """lse up to a few roundings of its own format: for scores too large for the bound, whose products are exact."""
    lse = host(lse)
    exact = np.broadcast_to(np.asarray(exact, np.float64), lse.shape)
    assert np.all(np.abs(lse - exact) <= ulps * np.spacing(np.abs(exact).astype(lse.dtype)))


def shifted(xp, q, k, shift):
    """q and k whose every score is ``shift`` larger, up to the rounding of k."""
    q, k = q.copy(), k.copy()
    q[..., 0], k[..., 0] = 1, shift * math.sqrt(q.shape[-1])
    return q, k


def paged(k, v, size, seed=0):
    """Caches (sequences, heads, length, dim) cut into shuffled pages, and their table. The last page ends in NaN."""
    sequences, heads, length, _ = k.shape
    columns = -(-length // size)
    table = np.random.default_rng(seed).permutation(sequences * columns).reshape(sequences, columns).astype(np.int32)
    caches = []
    for x in (k, v):
        padded = np.full((sequences, heads, columns * size, x.shape[-1]), np.nan, x.dtype)
        padded[:, :, :length] = x
        cache = np.empty((sequences * columns, heads, size, x.shape[-1]), x.dtype)
        cache[table] = padded.reshape(sequences, heads, columns, size, -1).swapaxes(1, 2)
        caches.append(cache)
    return *caches, table


def room(gpu, gigabytes):
    """Skip where so much memory of the GPU is not free."""
    gpu.get_default_memory_pool().free_all_blocks()
    free = gpu.cuda.Device().mem_info[0]
    if free < gigabytes * 1e9:
        pytest.skip(f"wants {gigabytes} GB of GPU memory, {free / 1e9:.0f} GB are free")


def plan_of(q, k, v, **keywords):
    """The plan of a Hopper GPU for arrays laid out as these NumPy arrays are."""
    given = {"scale": None, "causal": False, "window": None, "return_lse": True, "out": None, "engine": None}
    return _plan.plan(replace(_problem.forward(q, k, v, **(given | keywords)), library="cupy", device=0), HOPPER)


SPIN = r"""extern "C" __global__ void spin(long long cycles) {
    for (long long start = clock64(); clock64() - start < cycles;) {}
}"""


def keep_busy(gpu, milliseconds=20):
    """Occupy the current stream for a while."""
    gpu.RawKernel(SPIN, "spin")((1,), (1,), (np.int64(milliseconds * 1_500_000),))


def python(code, **environment):
    """Start an interpreter that finds ``cuflash`` here."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **{name: str(x) for name, x in environment.items()}}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(*processes):
    """Wait for interpreters; each must succeed."""
    for process in processes:
        printed = process.communicate(timeout=300)[0]
        assert process.returncode == 0, printed


class Foreign:
    """An array of another library: nothing but the DLPack protocol."""

    def __init__(self, array, stream=None):
        self.array, self.stream, self.asked = array, stream, []

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **keywords):
        self.asked.append(keywords.get("stream"))
        if self.stream is None:
            return self.array.__dlpack__(**keywords)
        with self.stream:
            return self.array.__dlpack__(**keywords)


# Rows that see no key --------------------------------------------------------------------------------------------


def test_empty_row_varlen_causal_bwd(engine, xp):
    """Of many queries on one key, the last copies its value, the others are 0, and no score has a gradient.

    The report packed its sequences into one batch; here each is a call.
    """
    for queries in (76, 34, 146):
        q, k, v = (3 * x for x in triple(np, 1, queries, 32, dtype="float16", keys=1))
        out, lse = attend(engine, *(put(xp, x) for x in (q, k, v)), causal=True)
        assert not host(out)[:, :-1].any() and np.all(host(lse)[:, :-1] == -np.inf)
        same(host(out)[:, -1:], v)
        dq, dk, dv = differentiate(*(put(xp, x) for x in (q, k, v, np.ones_like(q))), engine, causal=True)
        assert not host(dq)[:, :-1].any() and np.all(host(dv) == 1)
        assert engine != "numpy" or not (dq.any() or dk.any())  # on a GPU the sums for delta differ in their order


def test_first_block_all_masked(engine, xp):
    """Strongly negative scores behind hidden keys keep their weights: 0 never stands in as the row's maximum."""
    q, k, v = triple(np, 14, 88, 64, keys=448, key_heads=2)
    q, k = shifted(np, q, k, -350)
    for dtype in ("float16", "bfloat16", "float32"):
        arrays = [put(xp, x.astype(DTYPES[dtype])) for x in (q, k, v)]
        for keywords in ({"causal": True}, {"window": (0, 300)}):
            out, lse = attend(engine, *arrays, rows=np.arange(0, 88, 29), **keywords)
            assert host(out).any(axis=-1).all() and np.all(np.abs(host(lse) + 350) < 60)


@pytest.mark.parametrize(
    "dtype, score",
    [
        *(("bfloat16", score) for score in (-1e5, -1e30)),
        ("float16", -8e3),
        *(("float32", score) for score in (-1e5, -1e6, -1e30)),
        ("float64", -1e30),
    ],
)
def test_finite_sentinel_clamp(engine, xp, dtype, score):
    """However negative a row's scores are, equal ones share the weight and the largest takes it from smaller ones."""
    q, k, v = triple(np, 2, 3, 64, keys=64, dtype=dtype)
    q[...], k[...] = np.arange(64) == 0, 0  # one column counts, so that products are exact
    near_zero = k.copy()
    k[..., 0] = 8 * score
    for heaviest in (None, 5):
        if heaviest is not None:
            k[:, heaviest, 0] *= DTYPES[dtype](0.9)
            near_zero[:, :, 0] = -8000
            near_zero[:, heaviest, 0] = 0
        out, lse = cuflash.forward(*(put(xp, x) for x in (q, k, v)), return_lse=True, engine=engine)
        check(engine, out, q, near_zero, v)  # the same weights, by scores that do not strain the format
        near(lse, float(k[0, heaviest or 0, 0]) / 8 + (math.log(64) if heaviest is None else 0))


def test_max_init_inf_minus(engine, xp):
    """Rows whose first tiles are hidden, and rows whose last ones are, match attention to the keys they see."""
    for dtype in DTYPES:
        arrays = triple(xp, 2, 256, 32, dtype=dtype)
        for keywords in ({"window": (0, 0)}, {"window": (3, 0)}, {"causal": True, "window": (0, None)}):
            attend(engine, *arrays, **keywords)
        q, k, v = arrays
        check(engine, attend(engine, q[:, :1], k, v, window=(127, None)), q[:, :1], k[:, 128:], v[:, 128:])
        out, lse = attend(engine, q[:, :128], k, v, causal="top-left")
        check(engine, (out[:, -1:], lse[:, -1:]), q[:, 127:128], k[:, :128], v[:, :128])


# Extreme scores --------------------------------------------------------------------------------------------------


def test_f16_raw_score_overflow(engine, xp):
    """Products beyond float16 are no trouble: scores live in float32."""
    # The scale is 1 / 8, a power of two, so that sums of products are exact: BLAS has no one order for all keys.
    v = draw(np, 1, 16, 64, dtype="float16")
    q = k = np.full_like(v, 256)
    out, lse = cuflash.forward(*(put(xp, x) for x in (q, k, v)), return_lse=True, engine=engine)
    check(engine, out, 0 * q, 0 * k, v)
    near(lse, 64 * 256**2 / math.sqrt(64) + math.log(16), ulps=128)  # a rounding for each product


@pytest.mark.parametrize("keys", [65_536, 70_000])
def test_f16_row_sum_overflow(engine, xp, keys):
    """The sum of weights of a long float16 row passes 65,504 and is counted in float32."""
    q, k, v = (
        np.zeros((1, 2, 16), np.float16),
        draw(np, 1, keys, 16, dtype="float16"),
        np.ones((1, keys, 16), np.float16),
    )
    out, lse = attend(engine, *(put(xp, x) for x in (q, k, v)))
    same(out, np.ones_like(q))
    near(lse, math.log(keys))
    dout = np.full((1, 2, 16), 512, np.float16)
    _, _, dv = differentiate(*(put(xp, x) for x in (q, k, v, dout)), engine)
    if engine == "numpy":
        np.testing.assert_array_equal(dv, np.full_like(dv, 1024 / keys))


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_or_zero_scale(engine, xp, dtype):
    """Scale 0 weighs the visible keys alike, a negative one is the positive one for -q; masks come after the scale."""
    q, k, v = triple(np, 2, 5, 8, dtype=dtype)
    dout = draw(np, 2, 5, 8, dtype=dtype, seed=3)
    for causal in (False, True):
        _, lse = attend(engine, *(put(xp, x) for x in (q, k, v)), scale=0.0, causal=causal)
        near(lse, np.log(np.arange(1, 6) if causal else np.full(5, 5)))
        arrays = [put(xp, x) for x in (-q, q, k, v)]
        same(
            attend(engine, *arrays[1:], scale=-0.5, causal=causal),
            attend(engine, arrays[0], *arrays[2:], scale=0.5, causal=causal),
        )
        if not has_gradients(engine, dtype):
            continue
        opposite, *arrays = (put(xp, x) for x in (-q, q, k, v, dout))
        dq, dk, _ = differentiate(*arrays, engine, scale=0.0, causal=causal)
        assert not host(dq).any() and not host(dk).any()
        dq, dk, dv = differentiate(*arrays, engine, scale=-0.5, causal=causal)
        flipped = differentiate(opposite, *arrays[1:], engine, scale=0.5, causal=causal)
        same((-host(dq), dk, dv), flipped)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_bwd_pad_key_exp_overflow(engine, xp, dtype):
    """Rows whose lse is far below 0 have finite, right gradients for every tail of keys."""
    if not has_gradients(engine, dtype):
        return
    for length in (64, 65, 127, 192, 320) + (704,) * (dtype == "float32"):
        q, k, v = (0.1 * x for x in triple(np, 1, length, 64))
        q, k = shifted(np, q, k, -120)
        arrays = [put(xp, x.astype(DTYPES[dtype])) for x in (q, k, v, draw(np, 1, length, 64, seed=3))]
        for causal in (False, True):
            assert are_finite(differentiate(*arrays, engine, causal=causal))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_single_query_negative_lse_bwd(engine, xp, dtype):
    """One query with scores near -128 has finite, right gradients."""
    if not has_gradients(engine, dtype):
        return
    for keys in (128, 97):
        q, k, v = triple(np, 1, 1, 64, keys=keys)
        q, k = shifted(np, q, k, -128)
        arrays = [put(xp, x.astype(DTYPES[dtype])) for x in (q, k, v, draw(np, 1, 1, 64, seed=3))]
        assert are_finite(differentiate(*arrays, engine))


# What is not finite ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", [1, 2])
def test_nan_in_masked_key(engine, xp, which, bad):
    """A key or value that a row does not see may be NaN or infinite: the row stays right, the key has no gradient."""
    for dtype in DTYPES:
        arrays = list(triple(np, 2, 33, 4, keys=40, dtype=dtype))
        arrays[which][:, [20, 36]] = bad
        for keywords, clean in (
            ({"causal": "top-left"}, range(20)),
            ({"window": (3, 2)}, [*range(11), *range(17, 27)]),
        ):
            out, lse = cuflash.forward(*(put(xp, x) for x in arrays), return_lse=True, engine=engine, **keywords)
            rows = np.array(clean)
            check(engine, (host(out)[:, rows], host(lse)[:, rows]), *arrays, rows=rows, **keywords)
        q, k, v = (x[:, :32] for x in arrays)
        keywords = {"lengths": np.array([20]), "causal": False}
        out, _ = decode(*(x[None] for x in (q, k, v)), **keywords)
        same(out, decode(q[None], *(np.nan_to_num(x, posinf=0, neginf=0)[None] for x in (k, v)), **keywords)[0])
        caches = paged(k[None], v[None], 4)
        same(out, decode(q[None], *caches[:2], page_table=caches[2], **keywords)[0])
        dout = draw(np, 2, 8, 4, dtype=dtype, seed=3)
        grads = differentiate(q[:, :8], k, v, dout, causal="top-left")
        assert not any(grad[:, 8:].any() for grad in grads[1:])
        assert all(np.isfinite(grad.astype(np.float32)).all() for grad in grads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_query_must_propagate(engine, xp, dtype):
    """A NaN that is seen shows in exactly the rows and columns that see it, and changes no bit of other rows."""
    clean = triple(np, 2, 4, 16, 8, dtype=dtype)
    wanted = [host(x) for x in attend(engine, *(put(xp, x) for x in clean), causal=True)]

    def spoil(which, place):
        arrays = [x.copy() for x in clean]
        arrays[which][place] = np.nan
        return [host(x) for x in attend(engine, *(put(xp, x) for x in arrays), causal=True)]

    out, lse = spoil(0, (1, 2, 5))
    bad = np.zeros((2, 4, 16), bool)
    bad[1, 2, 5] = True
    np.testing.assert_array_equal(np.isnan(lse), bad)
    np.testing.assert_array_equal(np.isnan(out), np.repeat(bad[..., None], 8, axis=-1))
    same((out[~bad], lse[~bad]), (wanted[0][~bad], wanted[1][~bad]))

    out, lse = spoil(1, (0, 3, 10))
    bad = np.zeros((2, 4, 16), bool)
    bad[0, 3, 10:] = True
    np.testing.assert_array_equal(np.isnan(lse), bad)
    np.testing.assert_array_equal(np.isnan(out), np.repeat(bad[..., None], 8, axis=-1))

    out, lse = spoil(2, (0, 3, 10, 6))
    np.testing.assert_array_equal(np.isnan(out), bad[..., None] & (np.arange(8) == 6))
    others = np.ones((2, 4), bool)
    others[0, 3] = False  # rows of this head may be computed again, and rounded otherwise
    same((out[others], lse[others]), (wanted[0][others], wanted[1][others]))
    np.testing.assert_allclose(lse, wanted[1], rtol=0, atol=16 * np.finfo(lse.dtype).eps)


FILL = r"""extern "C" __global__ void fill(int words, unsigned value) {
    extern __shared__ volatile unsigned shared[];
    for (int n = threadIdx.x; n < words; n += blockDim.x) shared[n] = value;
}"""


def test_uninitialised_smem_k_tail(gpu):
    """What earlier kernels left in shared memory changes no bit, behind the last key and the last column."""
    fill = gpu.RawKernel(FILL, "fill")
    fill.max_dynamic_shared_size_bytes = shared_bytes = 99 * 1024
    grid = (8 * gpu.cuda.Device().attributes["MultiProcessorCount"],)
    for dtype, dim in itertools.product(DTYPES, (64, 20)):
        arrays = triple(gpu, 2, 65, dim, dtype=dtype)
        results = []
        for value in (0, 0xFFFFFFFF):  # NaN in every format
            fill(grid, (256,), (shared_bytes // 4, np.uint32(value)), shared_mem=shared_bytes)
            results.append(cuflash.forward(*arrays, return_lse=True))
        same(*results)
        check("portable", results[0], *arrays)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_beyond_cache_length(bad):
    """Slots of a cache beyond a sequence's length may hold anything."""
    for capacity in (3, 128):
        cache = np.full((2, 1, capacity, 64), bad, np.float16)
        cache[0, :, :1] = cache[1, :, :3] = 0.5
        q = np.full((2, 1, 1, 64), 0.5, np.float16)
        lengths = np.array([1, 3])
        out, lse = decode(q, cache, cache, lengths=lengths)
        np.testing.assert_array_equal(out, np.full_like(q, 0.5))
        clean = np.nan_to_num(cache, posinf=0)
        same((out, lse), decode(q, clean, clean, lengths=lengths))


def test_trash_page_aliasing():
    """A page of NaN that padding sequences of length 0 point at reaches no other sequence."""
    k, v = draw(np, 16, 2, 4, 8), draw(np, 16, 2, 4, 8, seed=1)
    k[0] = v[0] = np.nan
    q, lengths = draw(np, 4, 4, 1, 8), np.array([5, 0, 12, 0])
    table = np.array([[3, 7, 0], [0, 0, 0], [1, 9, 4], [0, 0, 0]], np.int32)
    out, lse = decode(q, k, v, lengths=lengths, page_table=table)
    assert not out[[1, 3]].any() and np.all(lse[[1, 3]] == -np.inf)
    assert np.isfinite(out).all() and np.isfinite(lse[[0, 2]]).all()


# Causal masks and windows ----------------------------------------------------------------------------------------


def weights(engine, xp, queries, keys, **keywords):
    """The weights themselves: v holds a one for each key."""
    v = np.eye(keys, dtype=np.float32)
    out, _ = attend(engine, draw(xp, queries, keys), draw(xp, keys, keys, seed=1), put(xp, v), **keywords)
    return host(out)


def test_causal_topleft_vs_bottomright(engine, xp):
    """Both alignments are to be had by name; True is bottom-right."""
    for queries, keys in ((2, 5), (5, 2), (1, 8)):
        row, key = np.arange(queries)[:, None], np.arange(keys)
        for causal, shift in ((True, keys - queries), ("bottom-right", keys - queries), ("top-left", 0)):
            np.testing.assert_array_equal(weights(engine, xp, queries, keys, causal=causal) > 0, key <= row + shift)


def test_causal_more_queries(engine, xp):
    """With more queries than keys the first rows are written too: 0, lse -inf, no gradient."""
    for queries, keys in ((5, 2), (2048, 1024)):
        q, k, v = triple(np, 1, queries, 16, keys=keys)
        out = put(xp, np.full_like(q, np.nan))
        result, lse = cuflash.forward(
            *(put(xp, x) for x in (q, k, v)), causal=True, return_lse=True, out=out, engine=engine
        )
        assert result is out
        hidden = queries - keys
        assert not host(out)[:, :hidden].any() and np.all(host(lse)[:, :hidden] == -np.inf)
        check(engine, (out[:, hidden:], lse[:, hidden:]), q[:, hidden:], k, v, causal=True)
        arrays = [put(xp, x.astype(np.float16)) for x in (q, k, v, np.ones_like(q))]
        assert not host(gradients(*arrays, engine, causal=True)[0])[:, :hidden].any()


def test_causal_backend_disagreement(engine, xp):
    """One query on five keys sees all of them, or the first alone, by every function and engine alike."""
    q, k, v = triple(np, 1, 2, 1, 8, keys=5)
    k_pages, v_pages, table = paged(k, v, 2)
    for causal, seen in ((True, 5), ("bottom-right", 5), ("top-left", 1)):
        results = [
            cuflash.forward(*(put(xp, x) for x in (q, k, v)), causal=causal, return_lse=True, engine=engine),
            cuflash.decode(q, k, v, causal=causal, return_lse=True),
            cuflash.decode(
                q, k_pages, v_pages, lengths=np.array([5]), page_table=table, causal=causal, return_lse=True
            ),
        ]
        for result, used in zip(results, (engine, "numpy", "numpy"), strict=True):
            check(used, result, q, k[:, :, :seen], v[:, :, :seen])


def test_causal_chunked_prefill(engine, xp):
    """Queries in chunks against the keys so far give what one call gives."""
    q, k, v = triple(xp, 2, 96, 32)
    for end in (32, 64, 96):
        chunk = attend(engine, q[:, end - 32 : end], k[:, :end], v[:, :end], causal=True)
        check(engine, chunk, q, k, v, causal=True, rows=np.arange(end - 32, end))


def test_causal_dropped_in_fallback(engine, xp):
    """No shape or dtype loses the mask: later keys change no bit of earlier rows."""
    shapes = [((2, 40, 33), "float32"), ((2, 40, 64), "float64"), ((2, 40, 33), "float16"), ((1, 1, 8), "float32")]
    shapes += [((300, 1, 9, 16), "bfloat16"), ((1, 20, 256), "float16")]
    if engine == "numpy":  # a GPU has head_dim 256 at most and says so
        shapes.append(((1, 20, 512), "float32"))
    for shape, dtype in shapes:
        q, k, v = triple(np, *shape, dtype=dtype)
        changed = [x.copy() for x in (k, v)]
        for x in changed:
            x[..., shape[-2] // 2 + 1 :, :] *= 3
        for reverse in (False, True):
            arrays = [put(xp, x) for x in (q, k, v, *changed)]
            if reverse:
                arrays = [put(xp, x[..., ::-1].copy())[..., ::-1] for x in (q, k, v, *changed)]
            before = attend(engine, *arrays[:3], causal=True)[0]
            after = attend(engine, arrays[0], *arrays[3:], causal=True)[0]
            rows = slice(0, shape[-2] // 2 + 1)
            same(before[..., rows, :], after[..., rows, :])
    if engine != "numpy":
        with pytest.raises(ValueError, match="head_dim 512"):
            cuflash.forward(*triple(xp, 1, 20, 512))


def test_window_inclusive_left(engine, xp):
    """Both ends of a window are included: (3, 0) is four keys with the row's own, (0, 0) the row's own alone."""
    seen = weights(engine, xp, 16, 16, causal=True, window=(3, 0)) > 0
    np.testing.assert_array_equal(seen.sum(axis=1), np.minimum(np.arange(1, 17), 4))
    np.testing.assert_array_equal(weights(engine, xp, 16, 16, window=(0, 0)), np.eye(16))


def test_window_full_equals_causal(engine, xp):
    """A window as wide as the keys is no window, bit for bit."""
    arrays = triple(xp, 2, 300, 64, dtype="float16")
    wanted = attend(engine, *arrays, causal=True)
    for window in ((None, 0), (300, 0), (299, 0), (None, None), (10**12, 5)):
        same(cuflash.forward(*arrays, causal=True, window=window, return_lse=True, engine=engine), wanted)
    same(cuflash.forward(*arrays, window=(299, 0), return_lse=True, engine=engine), wanted)


def test_window_right_ignored(engine, xp):
    """The right end of a window holds: a key changes the rows within reach and no bit of the others."""
    q, k, v = triple(np, 8, 256, 64, key_heads=2)
    before = host(attend(engine, *(put(xp, x) for x in (q, k, v)), window=(16, 16))[0])
    k, v = k.copy(), v.copy()
    k[:, 100], v[:, 100] = 3, -3
    after = host(attend(engine, *(put(xp, x) for x in (q, k, v)), window=(16, 16))[0])
    within = np.abs(np.arange(256) - 100) <= 16
    same(before[:, ~within], after[:, ~within])
    assert np.all(before[:, within] != after[:, within])


@pytest.mark.parametrize("window", [(-1, -3), (5, -1), (-7, 0), (3, -2)])
def test_window_negative_values(engine, xp, window):
    """A negative end of a window is an error that says so, neither infinity nor a shift."""
    with pytest.raises(ValueError, match="negative"):
        cuflash.forward(*(draw(xp, 32, 8),) * 3, window=window, engine=engine)


# Sizes -----------------------------------------------------------------------------------------------------------


def test_i32_kv_offset_bwd(gpu):
    """Strides that carry past 2^31 elements reach the right keys: a view of 700 sequences is its contiguous parts."""
    room(gpu, 36)
    keys, sequences = 24_000, 700
    base = [draw(gpu, keys + sequences, 128, dtype="bfloat16", seed=seed) for seed in (1, 2)]
    k, v = (gpu.empty((keys, sequences, 128), x.dtype) for x in base)
    for x, source in zip((k, v), base, strict=True):
        for b in range(sequences):
            x[:, b] = source[b : b + keys]
    q = draw(gpu, 1, 256, 128, dtype="bfloat16")
    k, v = (x.swapaxes(0, 1)[:, None] for x in (k, v))
    out, lse = cuflash.forward(q, k, v, return_lse=True)
    q = draw(gpu, sequences, 1, 256, 128, dtype="bfloat16")  # of each sequence, so that its gradient is not a sum
    results = cuflash.forward(q, k, v, return_lse=True)
    grads = cuflash.backward(q, q, k, v, *results)
    for b in (0, 350, sequences - 2, sequences - 1):
        alone = [x[None, b : b + keys] for x in base]
        same(gradients(q[b], *alone, q[b], None), [x[b] for x in grads])
        same((results[0][b], results[1][b]), cuflash.forward(q[b], *alone, return_lse=True))
    q = draw(gpu, 1, 256, 128, dtype="bfloat16")
    for b in (0, 350, sequences - 2, sequences - 1):
        same((out[b], lse[b]), cuflash.forward(q, *(x[None, b : b + keys] for x in base), return_lse=True))


def test_i32_dq_accum_offset(gpu):
    """The float32 sums of dq pass 2^31 elements before an input does."""
    room(gpu, 40)
    for batch in (15_000, 17_000):
        q = gpu.empty((batch, 16, 128, 64), np.float16)
        q[...] = draw(gpu, 1, 16, 128, 64, dtype="float16")
        q[-1] = draw(gpu, 16, 128, 64, dtype="float16", seed=1)
        k, v = (draw(gpu, batch, 1, 128, 64, dtype="float16", seed=seed) for seed in (2, 3))
        for engine in ("portable", None):
            dq, dk, dv = gradients(q, k, v, q, engine)
            for b in (0, -1):
                same((dq[b], dk[b], dv[b]), gradients(q[b], k[b], v[b], q[b], engine))
            del dq, dk, dv


@pytest.mark.parametrize("length", [2**18, 2**18 + 64])
def test_i32_silent_wraparound(gpu, length):
    """The last rows of arrays of 2^31 elements, and of more, are right."""
    room(gpu, 12)
    base = draw(gpu, length + 64, 128, dtype="bfloat16")
    x = gpu.empty((64, length, 128), base.dtype)
    for h in range(64):
        x[h] = base[h : h + length]
    out, lse = cuflash.forward(x, x, x, causal=True, window=(128, 0), return_lse=True)
    for h in (0, 63):
        tail = x[h, -320:]
        rows = np.arange(128, 320)
        check("portable", (out[h, -192:], lse[h, -192:]), tail, tail, tail, causal=True, window=(128, 0), rows=rows)


def test_view_index32_flag(gpu):
    """The real part of complex numbers, a view that spans more than 2^31 bytes, is copied right to its end."""
    room(gpu, 8)
    z = gpu.zeros(2**28 + 64, np.complex64)
    q = z.real.reshape(-1, 64)
    assert q.base is not None and q.strides[-1] == 8
    z[-64 * 64 :] = draw(gpu, 64 * 64)
    k, v = draw(gpu, 16, 64, seed=1), draw(gpu, 16, 64, seed=2)
    out = cuflash.forward(q, k, v)
    check("portable", out[-64:], draw(gpu, 64 * 64).reshape(64, 64), k, v)
    check("portable", out[:2], q[:2].copy(), k, v)


def test_grid_limit_batch(engine, xp):
    """Batches and heads beyond 65,535 are one call; the CPU engine, which has no grid, gets fewer."""
    if engine == "numpy":
        shapes = [(300, 2, 4, 8), (1, 300, 4, 8)]
    else:
        shapes = [(65_535, 2, 4, 64), (65_536, 2, 4, 64), (70_000, 1, 1, 16), (1, 65_536, 3, 16)]
    for shape in shapes:
        q, k, v = triple(xp, *shape, dtype="float16")
        out, lse = cuflash.forward(q, k, v, return_lse=True, engine=engine)
        axis = 0 if shape[0] > 1 else 1
        for part in (slice(0, 3), slice(-3, None)):
            place = (slice(None),) * axis + (part,)
            check(engine, (out[place], lse[place]), *(x[place] for x in (q, k, v)))
        half = (slice(None),) * axis + (slice(shape[axis] // 2, None),)
        same(out[half], cuflash.forward(*(x[half] for x in (q, k, v)), engine=engine))
        if engine == "numpy" or shape[-1] == 16:  # the sums of dq are of whole tiles: gigabytes for the others
            grads = gradients(q, k, v, out, engine)
            same([x[half] for x in grads], gradients(*(x[half] for x in (q, k, v, out)), engine))


def test_grid_limit_silent(gpu):
    """A launch the driver refuses raises; no result comes back. The words are the driver's: no plan asks for such."""
    q, k, v = triple(gpu, 1, 16, 64, dtype="float16")
    keywords = {"scale": None, "causal": False, "window": None, "return_lse": False, "out": None, "engine": None}
    problem = _problem.forward(q, k, v, **keywords)
    plan = _launch.make_plan(problem)
    too_many = replace(plan, steps=tuple(replace(step, threads=4096) for step in plan.steps))
    with pytest.raises(gpu.cuda.driver.CUDADriverError, match="INVALID"):
        _launch._GpuForward(problem, too_many)({"q": q, "k": k, "v": v}, None)
    check("portable", cuflash.forward(q, k, v), q, k, v)


@pytest.mark.parametrize("batch, length", [(31, 2048), (32, 2048), (1, 65_536), (8, 8192), (65_536, 1)])
def test_batch_tokens_65536(engine, xp, batch, length):
    """65,536 tokens, however they are cut into sequences, are like the sequences alone."""
    if engine == "numpy" and batch > 32:
        batch //= 32
    heads, dim, window = (1, 8, (15, 16)) if engine == "numpy" else (4, 64, None)
    arrays = triple(xp, batch, heads, length, dim, dtype="bfloat16")
    out = cuflash.forward(*arrays, window=window, engine=engine)
    assert np.isfinite(host(out).astype(np.float32)).all()
    same(out[-1:], cuflash.forward(*(x[-1:] for x in arrays), window=window, engine=engine))
    rows = np.arange(max(length - 12, 0), length)
    tail = slice(0 if window is None else max(length - 200, 0), None)  # all the keys that the last rows see
    q, k, v = (x[-1, :1, tail] for x in arrays)
    check(engine, host(out)[-1, :1, rows[0] :], q, k, v, rows=rows - (length - q.shape[1]), window=window)


def test_smem_optin():
    """Every variant fits the shared memory a block may have, on each known GPU, also where it is more than 48 KB."""
    for limits in _plan.KNOWN.values():
        sizes = [variant.shared_bytes for variant in _plan.variants(limits)]
        assert max(sizes) <= limits.shared_bytes and max(sizes) > 48 * 1024


# Strides ---------------------------------------------------------------------------------------------------------


def swapped(x):
    """The same values, as a view of an array with the middle axes swapped."""
    return x.swapaxes(1, 2).copy().swapaxes(1, 2)


def test_noncontig_v(engine, xp):
    """Each array may be a transposed view by itself, forward and backward, without a changed bit."""
    dtype = "float32" if engine == "numpy" else "float16"
    arrays = [put(xp, x) for x in triple(np, 2, 4, 62, 32, dtype=dtype)]
    wanted = attend(engine, *arrays)
    dout = put(xp, draw(np, 2, 4, 62, 32, dtype=dtype, seed=3))
    grads = gradients(*arrays, dout, engine)
    for choice in itertools.product((False, True), repeat=3):
        views = [swapped(x) if swap else x for x, swap in zip(arrays, choice, strict=True)]
        same(cuflash.forward(*views, return_lse=True, engine=engine), wanted)
        same(gradients(*views, dout, engine), grads)
        same(gradients(*views, swapped(dout), engine), grads)


def test_raw_kernel_ignores_view(engine, xp):
    """Sliced, transposed, flipped, strided and broadcast arrays are read as such, the small integer ones too."""
    wide = draw(xp, 9, 2, 40, 36)
    views = [
        wide[2, :, :, :12],
        wide[2, :, 4:16].swapaxes(-1, -2),
        wide[1, ::-1, ::-1, 5:17],
        wide[1, :, ::2, ::3],
        xp.broadcast_to(wide[3, 0, :, :12], (2, 40, 12)),
        xp.broadcast_to(wide[3, :, :1, :12], (2, 40, 12)),
    ]
    for x in views:
        k = wide[4, :, :20, :12]
        wanted = attend(engine, x.copy(), k.copy(), k.copy())
        same(cuflash.forward(x, k, k, return_lse=True, engine=engine), wanted)
        same(cuflash.forward(k, x, x, engine=engine), attend(engine, *(y.copy() for y in (k, x, x)))[0])
        target = xp.full((4, *x.shape[:-1], 2 * x.shape[-1]), np.nan, x.dtype)[2, ..., ::-2]
        cuflash.forward(x, k, k, out=target, engine=engine)
        same(target, wanted[0])
    q, k, v = triple(np, 4, 2, 1, 8, keys=12)
    k_pages, v_pages, table = paged(k, v, 4)
    lengths = np.array([12, 5, 1, 9])
    wanted = decode(q, k, v, lengths=lengths)
    spread = np.repeat(lengths, 3)[1::3], np.asfortranarray(np.repeat(table, 2, axis=1))[:, ::2]
    same(decode(q, k_pages, v_pages, lengths=spread[0], page_table=spread[1]), wanted)
    same(decode(q, k_pages, v_pages, lengths=lengths[::-1].copy()[::-1], page_table=table.T.copy().T), wanted)


def test_negative_strides(engine, xp):
    """Flipped views give what their copies give; flipping keys with their values changes nothing but rounding."""
    q, k, v = triple(xp, 2, 3, 40, 16)
    for arrays in (
        (q[:, :, ::-1], k, v),
        (q[..., ::-1], k[..., ::-1], v),
        (q[::-1], k[::-1], v[::-1]),
        (q, k[:, :, ::-1], v[:, :, ::-1]),
        (q, k, v[..., ::-1]),
    ):
        wanted = attend(engine, *(x.copy() for x in arrays))
        same(cuflash.forward(*arrays, return_lse=True, engine=engine), wanted)
        same(cuflash.forward(*(Foreign(x) for x in arrays), return_lse=True, engine=engine), wanted)
    check(engine, cuflash.forward(q, k[:, :, ::-1], v[:, :, ::-1], engine=engine), q, k, v)


def test_view_stride_flag_conflict(engine, xp):
    """An axis of length 1 may have any stride; integers seen through such a view are read as NumPy reads them."""
    buffer = draw(xp, 2, 8)
    q = buffer[1:0:-1].view(np.float16)
    assert q.shape == (1, 16)
    same(cuflash.forward(q, q, q, return_lse=True, engine=engine), attend(engine, *(q.copy(),) * 3))
    pages = np.array([512, 3], np.uint16)[1:0:-1].view(np.uint8)  # 3, 0
    k, v = draw(np, 4, 1, 2, 8), draw(np, 4, 1, 2, 8, seed=1)
    arguments = draw(np, 1, 1, 1, 8), k, v
    actual = decode(*arguments, lengths=pages[:1], page_table=pages[None])
    same(actual, decode(*arguments, lengths=np.array([3]), page_table=np.array([[3, 0]])))


def test_grad_layout_mismatch(engine, xp):
    """Gradients depend on dout's values, not its strides; out lies in memory as q does."""
    q, k, v = (x.swapaxes(1, 2) for x in triple(xp, 2, 20, 3, 8, dtype="float16"))
    out, lse = attend(engine, q, k, v)
    assert out.swapaxes(1, 2).flags.c_contiguous
    dout = draw(xp, *out.shape, dtype="float16", seed=3)
    alike = swapped(dout)
    assert alike.strides != dout.strides
    wanted = cuflash.backward(dout, q, k, v, out, lse, engine=engine)
    same(cuflash.backward(alike, q, k, v, out, lse, engine=engine), wanted)
    same(cuflash.backward(alike, q, k, v, out.copy(), lse, engine=engine), wanted)


def test_saved_layout_double_transpose():
    """With as many heads as rows, both layouts have the same right gradients, in the layout of their inputs."""
    arrays = [*triple(np, 1, 16, 16, 8, dtype="float64"), draw(np, 1, 16, 16, 8, dtype="float64", seed=3)]
    wanted = differentiate(*arrays)
    grads = differentiate(*(swapped(x) for x in arrays))
    same(grads, wanted)
    assert all(grad.swapaxes(1, 2).flags.c_contiguous for grad in grads)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_misaligned_base(engine, xp, dtype):
    """An array may begin at any element."""
    for dim in (64, 72, 33):
        arrays = [draw(xp, 2 * 17 * dim + 1, dtype=dtype, seed=seed) for seed in range(3)]
        odd = [x[1:].reshape(2, 17, dim) for x in arrays]
        wanted = attend(engine, *(x.copy() for x in odd))
        for n in range(3):
            one_odd = [x if m == n else x.copy() for m, x in enumerate(odd)]
            same(cuflash.forward(*one_odd, return_lse=True, engine=engine), wanted)
        out = xp.empty(2 * 17 * dim + 1, arrays[0].dtype)[1:].reshape(2, 17, dim)
        same(cuflash.forward(*odd, return_lse=True, out=out, engine=engine), wanted)
        if has_gradients(engine, dtype):
            dout = draw(xp, 2 * 17 * dim + 1, dtype=dtype, seed=3)[1:].reshape(2, 17, dim)
            same(gradients(*odd, dout, engine), gradients(*(x.copy() for x in odd), dout.copy(), engine))


def test_wrong_alignment_hint(engine, xp):
    """Sequences that begin at any row of a packed array are read where they lie, here each by its own call."""
    packed = [draw(xp, 24, 3, 20, dtype="float16", seed=seed) for seed in range(3)]
    for start, end in ((0, 1), (1, 4), (4, 11), (11, 24)):
        arrays = [x[start:end].swapaxes(0, 1) for x in packed]
        actual = attend(engine, *arrays, causal=True)
        same(actual, cuflash.forward(*(x.copy() for x in arrays), causal=True, return_lse=True, engine=engine))


# Head dims and groups --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_headdim_not_multiple_8(engine, xp, dtype):
    """Every head_dim works, and the default scale knows the true one."""
    for dim in (1, 2, 3, 5, 7, 8, 9, 12, 20, 33, 40, 65, 72, 80, 100, 120, 127, 129, 192, 256):
        arrays = triple(np, 2, 9, dim, keys=11, dtype=dtype)
        out, _ = attend(engine, *(put(xp, x) for x in arrays), causal=True)
        assert out.shape == (2, 9, dim)
        if has_gradients(engine, dtype):
            dout = draw(np, 2, 9, dim, dtype=dtype, seed=3)
            differentiate(*(put(xp, x) for x in (*arrays, dout)), engine, causal=True)


@pytest.mark.parametrize("dims", [(32, 64), (192, 128)])
@pytest.mark.parametrize("key_heads", [3, 4])
def test_v_headdim_differs(engine, xp, dims, key_heads):
    """Values may be wider or narrower than keys, with any group; backward fills every gradient."""
    dim, value_dim = dims
    for dtype in ("float16", "float32"):
        q, k, _ = triple(np, 12, 33, dim, key_heads=key_heads, dtype=dtype)
        v, dout = draw(np, key_heads, 33, value_dim, dtype=dtype), draw(np, 12, 33, value_dim, dtype=dtype, seed=3)
        q, k, v, dout = (put(xp, x) for x in (q, k, v, dout))
        out, lse = attend(engine, q, k, v, causal=True)
        if has_gradients(engine, dtype):
            grads = tuple(xp.full_like(x, np.nan) for x in (q, k, v))
            cuflash.backward(dout, q, k, v, out, lse, causal=True, grads=grads, engine=engine)
            same(grads, differentiate(q, k, v, dout, engine, causal=True))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("key_heads", [1, 2, 4, 8])
def test_gqa_grad_sum(engine, xp, key_heads, dtype):
    """Gradients of a shared key head are the sums over its query heads, added in more than 16 bits."""
    if not has_gradients(engine, dtype):
        return
    q, k, v = triple(np, 8, 33, 16, key_heads=key_heads, dtype=dtype)
    dout = draw(np, 8, 33, 16, dtype=dtype, seed=3)
    grads = differentiate(*(put(xp, x) for x in (q, k, v, dout)), engine)
    wide = [x.astype(np.float64) for x in (q, *(np.repeat(x, 8 // key_heads, axis=0) for x in (k, v)), dout)]
    dq, *repeated = gradients(*wide)
    summed = [dq, *(x.reshape(key_heads, -1, 33, 16).sum(axis=1) for x in repeated)]
    allowed = [bound for _, bound in bounds.backward(dout, q, k, v, path=path(engine, q))]
    assert bounds.worst(grads, list(zip(summed, allowed, strict=True))) <= 1


# Nothing at all --------------------------------------------------------------------------------------------------


def test_batch_zero(engine, xp):
    """No sequences, heads or queries give empty results. head_dim 0, whose scale would be 1/0, is a ValueError."""
    for shape, keys, key_heads in (((0, 10, 39, 64), 16, 10), ((2, 0, 5, 8), 7, 1), ((2, 4, 0, 8), 7, 2)):
        q, k, v = triple(xp, *shape, keys=keys, key_heads=key_heads, dtype="float16")
        out, lse = attend(engine, q, k, v, causal=True)
        assert (out.shape, lse.shape, out.dtype, lse.dtype) == (shape, shape[:-1], np.float16, np.float32)
        grads = gradients(q, k, v, out, engine, causal=True)
        assert [x.shape for x in grads] == [x.shape for x in (q, k, v)] and not any(x.any() for x in grads)
    with pytest.raises(ValueError, match="head_dim 0"):
        cuflash.forward(xp.zeros((2, 0)), xp.zeros((3, 0)), xp.zeros((3, 4)), engine=engine)


def test_lk_zero(engine, xp):
    """No keys: out 0, lse -inf, for whole problems and for sequences of length 0 among others."""
    for causal in (False, True, "top-left"):
        q, k, v = triple(xp, 2, 5, 8, keys=0)
        out, lse = attend(engine, q, k, v, causal=causal)
        assert out.shape == (2, 5, 8) and not host(out).any() and np.all(host(lse) == -np.inf)
    out, lse = decode(*triple(np, 3, 2, 1, 8, keys=5), lengths=np.array([0, 5, 0]))
    assert not out[[0, 2]].any() and np.all(lse[[0, 2]] == -np.inf) and np.isfinite(lse[1]).all() and out[1].any()


def test_zero_len_q_nonzero_k(engine, xp):
    """Keys that no query sees have gradients of 0, written over whatever was there."""
    for queries, causal in ((0, False), (3, "top-left")):
        q, k, v = triple(xp, 2, queries, 8, keys=100, dtype="float16")
        out, lse = cuflash.forward(q, k, v, return_lse=True, causal=causal, engine=engine)
        grads = tuple(xp.full_like(x, np.nan) for x in (q, k, v))
        cuflash.backward(xp.ones_like(out), q, k, v, out, lse, causal=causal, grads=grads, engine=engine)
        assert not any(x[:, queries:].any() for x in grads[1:])


def test_zero_size_pointer(engine, xp):
    """Arrays of size 0, whose pointer may be null, in any place."""
    empty = [xp.empty(shape, np.float16) for shape in ((0, 8), (0, 8), (0, 5))]
    assert cuflash.forward(*empty, return_lse=True, engine=engine)[0].shape == (0, 5)
    q, k, v = [draw(xp, 4, 8, dtype="float16")] * 3
    out, lse = attend(engine, q, k, v[:, :0])
    assert out.shape == (4, 0)
    near(lse, host(attend(engine, q, k, v)[1]))
    out, lse = attend(engine, q, empty[1], empty[2])
    assert not host(out).any() and np.all(host(lse) == -np.inf)
    cache = np.empty((0, 2, 16, 8), np.float32)
    out, lse = decode(
        draw(np, 3, 2, 1, 8), cache, cache, lengths=np.zeros(3, int), page_table=np.empty((3, 0), np.int32)
    )
    assert not out.any() and np.all(lse == -np.inf)


# The batch does not matter ----------------------------------------------------------------------------------------


def test_varlen_order_invariance(engine, xp):
    """A sequence's bits are the same in any order of the batch and alone, forward, backward and by lengths."""
    order = [3, 0, 4, 1, 2]
    q, k, v = triple(xp, 5, 4, 77, 64, dtype="float16")
    wanted = attend(engine, q, k, v)
    shuffled = cuflash.forward(*(x[order] for x in (q, k, v)), return_lse=True, engine=engine)
    same(shuffled, [x[order] for x in wanted])
    for b in range(5):
        same(cuflash.forward(q[b], k[b], v[b], return_lse=True, engine=engine), [x[b] for x in wanted])
    dout = draw(xp, *q.shape, dtype="float16", seed=3)
    grads = gradients(q, k, v, dout, engine)
    same(gradients(*(x[order] for x in (q, k, v, dout)), engine), [x[order] for x in grads])
    if engine != "numpy":
        return
    lengths = np.array([5, 128, 1, 77, 300])
    arrays = triple(np, 5, 4, 1, 64, keys=300, dtype="float16")
    wanted = decode(*arrays, lengths=lengths)
    same(decode(*(x[order] for x in arrays), lengths=lengths[order]), [x[order] for x in wanted])
    for b in range(5):
        same(decode(*(x[b : b + 1] for x in arrays), lengths=lengths[b : b + 1]), [x[b : b + 1] for x in wanted])


def test_split_count_discrepancy():
    """How much a cache could hold changes no bit."""
    q, k, v = triple(np, 1, 4, 1, 32, keys=20_000, dtype="float16")
    results = [
        cuflash.decode(q, k[:, :, :n], v[:, :, :n], lengths=np.array([4096]), return_lse=True)
        for n in (4096, 4097, 8192, 20_000)
    ]
    for result in results:
        same(result, results[0])


# lse and merging -------------------------------------------------------------------------------------------------


def test_lse_base(engine, xp):
    """lse is a natural logarithm: log(256) for 256 equal scores, logaddexp for any."""
    for dtype in DTYPES:
        k = draw(np, 256, 16, dtype=dtype)
        near(attend(engine, put(xp, 0 * k[:3]), *(put(xp, k),) * 2)[1], math.log(256))
        _, lse = attend(engine, put(xp, k[:3]), *(put(xp, k),) * 2)
        q64, k64 = (x.astype(np.float64) for x in (k[:3], k))
        exact = np.logaddexp.reduce(q64 @ k64.T / 4, axis=1)
        allowed = bounds.forward(k[:3], k, k, path=path(engine, k)).lse_bound
        assert np.all(np.abs(host(lse) - exact) <= allowed * (1 + 1e-9))


def test_lse_empty_sign(engine, xp):
    """lse of no keys is -inf, and a part with it changes no bit of a merge, whatever its out holds."""
    for dtype in DTYPES:
        q, k, v = triple(xp, 2, 5, 8, dtype=dtype)
        out, lse = attend(engine, q, k, v)
        _, empty = attend(engine, q, k[:, :0], v[:, :0])
        assert np.all(host(empty) == -np.inf)
        for bad in (0, np.nan, np.inf):
            nothing = put(xp, np.full(out.shape, bad, out.dtype))
            same(cuflash.merge([nothing, out], [empty, lse]), (out, lse))
            same(cuflash.merge([out, nothing], [lse, empty]), (out, lse))
    for causal in (False, True):
        assert np.all(decode(*triple(np, 1, 1, 2, 8), lengths=np.array([0]), causal=causal)[1] == -np.inf)


def test_merge_both_empty(engine, xp):
    """Nothing merged with nothing is nothing; scores near the format's end merge like any others."""
    out, lse = xp.full((2, 3, 4), np.nan, np.float32), xp.full((2, 3), -np.inf, np.float32)
    for parts in (1, 2, 7):
        merged = cuflash.merge([out] * parts, [lse] * parts)
        assert not host(merged[0]).any() and np.all(host(merged[1]) == -np.inf)
    merged = cuflash.merge([xp.ones_like(out), 3 * xp.ones_like(out), out],
                           [xp.full_like(lse, -1e30), xp.full_like(lse, -1e30), lse])  # fmt: skip
    assert np.all(host(merged[0]) == 2) and np.all(host(merged[1]) == np.float32(-1e30))


def test_lse_always_for_split(engine, xp):
    """Asking for lse changes no bit of out."""
    q, k, v = triple(xp, 4, 33, 32, keys=2000, dtype="float16")
    out, _ = attend(engine, q, k, v)
    same(cuflash.forward(q, k, v, engine=engine), out)
    arrays = triple(np, 2, 4, 1, 32, keys=2000)
    same(cuflash.decode(*arrays), decode(*arrays)[0])


# Repetition and memory -------------------------------------------------------------------------------------------


def test_det_flag_ignored(engine, xp):
    """The same call gives the same bits, whatever else the machine is doing."""
    if engine == "numpy":
        arrays = [*triple(np, 2, 4, 300, 32, key_heads=2), draw(np, 2, 4, 300, 32, seed=3)]
        wanted = gradients(*arrays)
        for _ in range(5):
            same(gradients(*arrays), wanted)
        return
    other = xp.cuda.Stream(non_blocking=True)
    for dtype in ("bfloat16", "float32"):
        arrays = triple(xp, 2, 8, 2048 if dtype == "bfloat16" else 256, 128, dtype=dtype)
        noise = draw(xp, 2048, 2048, seed=3)
        wanted = cuflash.forward(*arrays, causal=True, return_lse=True)
        differentiable = has_gradients(engine, dtype)
        grads = differentiable and cuflash.backward(arrays[0], *arrays, *wanted, causal=True)
        for _ in range(30):
            with other:
                noise * noise
            same(cuflash.forward(*arrays, causal=True, return_lse=True), wanted)
            if differentiable:
                same(cuflash.backward(arrays[0], *arrays, *wanted, causal=True), grads)


@pytest.mark.parametrize("chosen", ["portable", None])
def test_bwd_race_optlevel(gpu, chosen):
    """Many short tiles of keys under long rows: each of 50 runs gives the same bits, inside the bound.

    The report compiled one kernel at several levels of optimisation. Here levels are fixed; racecheck, the emulator
    and these runs look for what such a level would uncover.
    """
    q, dout = (draw(gpu, 300, 1, 2048, 128, dtype="float16", seed=seed) for seed in (0, 3))
    k, v = (draw(gpu, 300, 1, 128, 128, dtype="float16", seed=seed) for seed in (1, 2))
    q, k, v, dout = 3 * q, 3 * k, 3 * v, gpu.ones_like(dout)
    saved = cuflash.forward(q, k, v, return_lse=True, engine=chosen)
    wanted = cuflash.backward(dout, q, k, v, *saved, engine=chosen)
    for _ in range(50):
        again = cuflash.backward(dout, q, k, v, *saved, engine=chosen)
        assert all(bool((one == other).all()) for one, other in zip(again, wanted, strict=True))
    for b in (0, 299):
        exact = bounds.backward(*(x[b] for x in (dout, q, k, v)), path=path("portable", q))
        assert bounds.worst([x[b] for x in wanted], exact) <= 1


def test_det_quadratic_workspace_of_plans():
    """What backward allocates on a GPU: as much as dq in float32, two numbers a row, some counters."""
    for length in (4096, 65_536):
        x, row = np.empty((1, 8, length, 64), np.float16), np.empty((1, 8, length), np.float32)
        given = {"scale": None, "causal": True, "window": None, "dlse": None, "grads": None, "engine": None}
        problem = replace(_problem.backward(x, x, x, x, x, row, **given), library="cupy")
        for limits in (HOPPER, _plan.KNOWN[8, 0]):
            plan = _plan.plan(problem, limits)
            held = sum(4 * math.prod(buffer.shape) for buffer in plan.buffers[3:])
            assert not plan.copies and held <= 1.2 * 4 * x.size


def test_det_quadratic_workspace():
    """Memory of backward, always reproducible, grows with the length and not with its square."""
    peaks = []
    for length in (8192, 32_768):
        q, k, v = triple(np, 1, length, 16)
        out, lse = cuflash.forward(q, k, v, window=(32, 32), return_lse=True)
        gc.collect()
        tracemalloc.start()
        cuflash.backward(out, q, k, v, out, lse, window=(32, 32))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 6 * peaks[0] and peaks[1] < 20 * q.nbytes + 6 * _numpy.CHUNK * os.cpu_count()


def test_module_reload_leak():
    """Lengths, scale, strides and batch are arguments at run time: calls that differ in these share a kernel."""
    draws = np.random.default_rng(0)
    used = set()
    for _ in range(500):
        batch, heads, queries, keys = (int(n) for n in draws.integers(1, [4, 8, 500, 500]))
        q, k, v = (np.empty((batch, n, 64, heads), np.float16).transpose(0, 3, 1, 2) for n in (queries, keys, keys))
        plan = plan_of(q, k, v, scale=float(draws.random()), causal=bool(draws.random() < 0.5))
        used |= {step.variant for step in plan.steps}
    assert len(used) == 2 and used <= set(_plan.variants(HOPPER))


# Caches in pages -------------------------------------------------------------------------------------------------


def test_paged_stale_tail():
    """Entries of a page table behind a sequence's last page are not looked at."""
    lengths = np.array([1, 16, 17, 40])
    q, k, v = triple(np, 4, 2, 1, 8, keys=48)
    k_pages, v_pages, table = paged(k, v, 16)
    k_pages, v_pages = (np.concatenate([x, np.full_like(x[:1], np.nan)]) for x in (k_pages, v_pages))
    wanted = decode(q, k, v, lengths=lengths)
    for stale in (-1, 2**31 - 1, len(k_pages), len(k_pages) - 1):
        dirty = table.copy()
        for b, length in enumerate(lengths):
            dirty[b, -(-length // 16) :] = stale
        same(decode(q, k_pages, v_pages, lengths=lengths, page_table=dirty), wanted)


def test_paged_minus_one():
    """A page that a length asks for and that does not exist is named by row and column."""
    q, cache = draw(np, 1, 2, 1, 8), np.zeros((8, 2, 16, 8), np.float32)
    for page in (-1, 8):
        with pytest.raises(ValueError, match=rf"page_table\[0, 1\] is {page}"):
            cuflash.decode(q, cache, cache, lengths=np.array([48]), page_table=np.array([[5, page, 7]]))


def test_last_page_len_invalid():
    """One length a sequence, with no second number to disagree; a length the cache cannot hold is an error."""
    q, k, v = triple(np, 1, 2, 1, 8, keys=48)
    cache, table = np.zeros((8, 2, 16, 8), np.float32), np.array([[5, 6, 7]])
    for length in (-1, 49):
        for arguments in ((k, v, None), (cache, cache, table)):
            with pytest.raises(ValueError, match=rf"lengths\[0\] is {length}"):
                cuflash.decode(q, *arguments[:2], lengths=np.array([length]), page_table=arguments[2])


@pytest.mark.parametrize("size", [1, 16, 64, 256])
def test_paged_placement_invariance(size):
    """Where pages lie changes no bit."""
    q, k, v = triple(np, 2, 2, 3, 16, keys=300)
    lengths = np.array([300, 211])
    wanted = decode(q, k, v, lengths=lengths)
    for seed in range(3):
        k_pages, v_pages, table = paged(k, v, size, seed)
        same(decode(q, k_pages, v_pages, lengths=lengths, page_table=table), wanted)


@pytest.mark.parametrize("queries", [1, 2, 5, 64])
def test_kvcache_multi_query(queries):
    """Any number of new queries on any number of cached keys is the last rows of dense causal attention."""
    cached = np.array([0, 1, 63, 64, 65])
    k, v = draw(np, 5, 2, 130, 16), draw(np, 5, 2, 130, 16, seed=1)
    full = draw(np, 5, 4, 130, 16, seed=2)
    for b, before in enumerate(cached):
        end = before + queries
        q = full[b : b + 1, :, before:end]
        actual = decode(q, k[b : b + 1], v[b : b + 1], lengths=cached[b : b + 1] + queries)
        dense = [x[b, :, :end] for x in (full, k, v)]
        check("numpy", [x[0] for x in actual], *dense, causal=True, rows=np.arange(before, end))
        caches = [np.zeros_like(x[b : b + 1]) for x in (k, v)]
        for cache, x in zip(caches, (k, v), strict=True):
            cache[0, :, :before] = x[b, :, :before]
        new = {name: x[b : b + 1, :, before:end] for name, x in (("k_new", k), ("v_new", v))}
        same(cuflash.decode(q, *caches, lengths=cached[b : b + 1], return_lse=True, **new), actual)
        same([x[0, :, :end] for x in caches], [x[b, :, :end] for x in (k, v)])
    q = full[:, :, :queries]
    decode(q, k, v, lengths=cached + queries)


def test_append_past_capacity():
    """What a cache has no room for is not written, neither there nor beside it, and told; the call still answers."""
    around = [np.full((3, 2, 2, 128, 8), n, np.float32) for n in (1, 2)]
    k, v = (x[1] for x in around)
    q, new = draw(np, 2, 4, 4, 8), np.full((2, 2, 4, 8), 9, np.float32)
    overflow = np.full(2, 5, np.int32)
    append = {"k_new": new, "v_new": new, "overflow": overflow}
    out, lse = cuflash.decode(q, k, v, lengths=np.array([128, 124]), return_lse=True, **append)
    assert overflow.tolist() == [1, 0]
    assert np.isnan(out[0]).all() and np.isnan(lse[0]).all() and np.isfinite(out[1]).all()
    for n, x in zip((1, 2), around, strict=True):
        assert (x[1, 1, :, 124:] == 9).all()
        x[1, 1, :, 124:] = n
        assert (x == n).all()


@pytest.mark.parametrize("engine", ["numpy", "emulated"])
def test_i32_batch_stride_cache(engine, request):
    """Sequences that lie 2^30 elements apart are each appended to, and no other."""
    function = cuflash.decode
    if engine == "emulated":
        function = request.getfixturevalue("emulator").Emulator().decode
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, 5 * 2**31, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    k, v = (np.ndarray((5, 2, 16, 8), np.float16, memory, offset, (2**31, 256, 16, 2)) for offset in (0, 4096))
    q, new = draw(np, 5, 2, 3, 8, dtype="float16"), draw(np, 5, 2, 3, 8, dtype="float16", seed=1)
    overflow = np.zeros(5, np.int32)
    function(q, k, v, lengths=np.array([14, 0, 5, 2, 13]), k_new=new, v_new=new, overflow=overflow)
    assert overflow.tolist() == [1, 0, 0, 0, 0] and not k[0].any() and not v[0].any()
    for b, length in enumerate((0, 5, 2, 13), 1):
        for x in (k, v):
            same(x[b, :, length : length + 3], new[b])
            assert not x[b, :, :length].any() and not x[b, :, length + 3 :].any()


def test_kv_lengths_ignored():
    """What a cache holds beyond a length changes nothing, with groups, causal and not."""
    lengths = np.array([24, 125, 53, 28, 77, 96, 13, 114])
    q, k, v = triple(np, 8, 4, 3, 16, keys=128, key_heads=2, dtype="bfloat16")
    for causal in (False, True):
        wanted = decode(q, k, v, lengths=lengths, causal=causal)
        changed = [x.copy() for x in (k, v)]
        for b, length in enumerate(lengths):
            for x in changed:
                x[b, :, length:] = 77
        same(decode(q, *changed, lengths=lengths, causal=causal), wanted)


def test_graph_max_seqlen_baked(gpu):
    """A graph captured with short sequences follows longer ones, to what the cache has room for."""
    q, k, v = triple(gpu, 2, 2, 1, 64, keys=1000, dtype="float16")
    lengths = gpu.asarray(np.array([64, 10], np.int32))
    stream = gpu.cuda.Stream(non_blocking=True)
    gpu.cuda.runtime.deviceSynchronize()
    with stream:
        cuflash.decode(q, k, v, lengths=lengths)
        stream.begin_capture()
        out = cuflash.decode(q, k, v, lengths=lengths)
        graph = stream.end_capture()
        lengths[...] = gpu.asarray(np.array([1000, 700], np.int32))
        graph.launch(stream)
    stream.synchronize()
    wanted = bounds.decode(*(host(x) for x in (q, k, v)), lengths=np.array([1000, 700]), path="portable float16")
    assert bounds.worst(out, wanted) <= 1


# Streams and threads ---------------------------------------------------------------------------------------------


def test_stream_use_with(gpu):
    """A call leaves the current stream as it was, inside and after a block with another stream."""
    arrays = triple(gpu, 2, 33, 24, dtype="float16")
    wanted = cuflash.forward(*arrays)
    first, second = gpu.cuda.Stream(non_blocking=True), gpu.cuda.Stream(non_blocking=True)
    gpu.cuda.runtime.deviceSynchronize()
    before = gpu.cuda.get_current_stream()
    first.use()
    try:
        with second:
            results = [cuflash.forward(*arrays)]
            assert gpu.cuda.get_current_stream() == second
        first.use()  # CuPy itself may have forgotten it
        results.append(cuflash.forward(*(x[..., ::-1] for x in arrays))[..., ::-1])
        assert gpu.cuda.get_current_stream() == first
    finally:
        before.use()
    gpu.cuda.runtime.deviceSynchronize()
    same(results[0], wanted)
    check("portable", results[1], *arrays)


def test_pool_cross_stream_reuse(gpu):
    """Copies made by a call belong to its stream: memory taken by others meanwhile does not reach into it."""
    wide = [draw(gpu, 2, 512, 128, dtype="float16", seed=seed) for seed in range(3)]
    wanted = cuflash.forward(*(x[..., ::2] for x in wide))
    stream = gpu.cuda.Stream(non_blocking=True)
    gpu.cuda.runtime.deviceSynchronize()
    results = []
    for n in range(200):
        with stream:
            if n % 50 == 0:
                keep_busy(gpu, 5)
            results.append(cuflash.forward(*(x[..., ::2] for x in wide)))
        for _ in range(3):
            gpu.full((2, 512, 64), np.nan, np.float16)
    gpu.cuda.runtime.deviceSynchronize()
    for result in results[::7]:
        same(result, wanted)


def test_threads_multi_gpu(engine, xp, monkeypatch):
    """Threads that make the first call together load each kernel once and all get the right answer. One device."""
    monkeypatch.setattr(_compile, "_kernels", {})
    monkeypatch.setattr(_launch, "_calls", {})
    arrays = triple(xp, 2, 40, 16, dtype="float16")
    start, failures = threading.Barrier(4), []

    def work():
        start.wait()
        try:
            for _ in range(20 if engine == "numpy" else 500):
                result = cuflash.forward(*arrays, return_lse=True, engine=engine)
            check(engine, result, *arrays)
        except Exception as error:  # a thread's failure is not the test's by itself
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(_compile._kernels) == (0 if engine == "numpy" else 1)


# Other libraries' arrays, and arguments ----------------------------------------------------------------------------


def test_import_no_context(engine):
    """Importing touches no CUDA, so that a process forked afterwards can use the GPU."""
    code = f"""
import os, sys, numpy as np, cuflash
assert "cupy" not in sys.modules
if os.fork() == 0:
    if {engine != "numpy"}:
        import cupy as np
    x = np.ones((4, 8), "f")
    os._exit(0 if float(abs(cuflash.forward(x, x, x) - 1).max()) < 1e-6 else 1)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""
    finish(python(code))


def test_dlpack_stream_order(engine, xp):
    """An array taken over by DLPack is read after the work that writes it, on whatever stream that runs."""
    q, k, v = triple(xp, 2, 64, 32, dtype="float16")
    wanted = attend(engine, q, k, v)
    if engine == "numpy":
        same(cuflash.forward(Foreign(q), k, Foreign(v), return_lse=True), wanted)
        return
    late = xp.full_like(q, np.nan)
    producer, consumer = xp.cuda.Stream(non_blocking=True), xp.cuda.Stream(non_blocking=True)
    xp.cuda.runtime.deviceSynchronize()
    with producer:
        keep_busy(xp, 100)
        late[...] = q
    foreign = Foreign(late, producer)
    with consumer:
        result = cuflash.forward(foreign, k, v, return_lse=True)
    xp.cuda.runtime.deviceSynchronize()
    same(result, wanted)
    assert foreign.asked[-1] == consumer.ptr


def test_dlpack_bf16(engine, xp):
    """bfloat16 comes as ml_dtypes knows it, or by DLPack where that carries it; its bits as uint16 are a TypeError."""
    arrays = triple(xp, 2, 9, 8, dtype="bfloat16")
    wanted = attend(engine, *arrays)
    assert host(wanted[0]).dtype == DTYPES["bfloat16"]
    with pytest.raises(TypeError, match="uint16"):
        cuflash.forward(*(x.view(np.uint16) for x in arrays), engine=engine)
    try:
        result = cuflash.forward(*(Foreign(x) for x in arrays), return_lse=True, engine=engine)
    except (TypeError, BufferError):  # the producer's word, or ours
        return
    same(result, wanted)


def test_python_float_arg(engine, xp):
    """A scale is the same number however it is spelled."""
    for dtype in ("float16", "float64"):
        arrays = triple(xp, 2, 9, 8, dtype=dtype)
        for value in (2, 0.5, 0.125):
            wanted = attend(engine, *arrays, scale=value)
            kinds = (float, np.float64, np.float32, np.float16, np.array, Fraction) + (int,) * (value == 2)
            for kind in kinds:
                same(cuflash.forward(*arrays, scale=kind(value), return_lse=True, engine=engine), wanted)


def test_array_dtype_unchecked(engine, xp):
    """Arrays of other dtypes, or of several, are a TypeError that names them; nothing is written."""
    x = {name: xp.ones((4, 8), DTYPES[name]) for name in ("float16", "float32", "float64")}
    other = [xp.ones((4, 8), dtype) for dtype in (np.int32, np.complex64, np.bool_, np.uint8)]
    if xp is np:
        other.append(np.ones((4, 8), ">f4"))
    wrong = [(x["float32"], x["float64"], x["float32"]), (x["float16"], x["float16"], x["float32"])]
    wrong += [(y, y, y) for y in other] + [(x["float32"], x["float32"], y) for y in other]
    for arrays in wrong:
        out = xp.full((4, 8), 7, arrays[0].dtype)
        with pytest.raises(TypeError, match="has dtype"):
            cuflash.forward(*arrays, out=out, engine=engine)
        assert np.all(host(out) == np.full((4, 8), 7, arrays[0].dtype))


# Compilation -----------------------------------------------------------------------------------------------------


def variant(dtype, dim=64):
    return _plan.forward_variant(dtype, "causal", dim, dim, HOPPER)


def test_nvrtc_fp16_header(nvrtc):
    """float16 kernels compile by the compiler alone, without a header of any toolkit."""
    _compile.check(variant("float16"), 80)


def test_nvrtc_header_mix():
    """No kernel's text includes anything, so that headers of several versions cannot meet."""
    for each in _plan.variants(HOPPER):
        assert "#include" not in each.text()
    for file in Path(_variant.folder()).iterdir():
        assert "#include <" not in file.read_text()


def test_nvrtc_ptx_version(nvrtc):
    """Kernels are compiled to machine code of the GPU, which an older driver takes, and not to PTX."""
    assert not any("arch" in option or "ptx" in option for option in _compile._OPTIONS)  # CuPy asks for sm_..
    assert "for 'sm_90'" in _compile.check(variant("bfloat16"), 90)


CALL = """
import cupy, cuflash, numpy as np
x = cupy.asarray(np.random.default_rng(0).standard_normal((64, 64)).astype(np.float16))
out = cuflash.forward(x, x, x, causal="top-left")
assert (out.get()[0] == x.get()[0]).all()
"""
SEALED = """
import cupy.cuda.compiler as compiler
def refuse(*arguments, **keywords):
    raise RuntimeError("compiled again")
compiler._compile_using_nvrtc_no_warning = compiler.compile_using_nvrtc = refuse
"""


def test_name_expr_no_cache(engine, tmp_path):
    """A kernel is compiled once for all processes: plain entries and no template names, which CuPy did not keep."""
    for each in _plan.variants(HOPPER):
        assert f"{each.entry}(" in each.text() and 'extern "C" __global__' in each.text()
    if engine == "numpy":
        return
    finish(python(CALL, CUPY_CACHE_DIR=tmp_path))
    kept = sorted(tmp_path.iterdir())
    assert len(kept) == 1 and all(file.read_bytes()[40:44] == b"\x7fELF" for file in kept)  # behind CuPy's checksum
    finish(python(SEALED + CALL, CUPY_CACHE_DIR=tmp_path))


def test_cache_race(gpu, tmp_path):
    """Processes that start together on one empty cache folder all succeed, and a broken file in it is replaced."""
    finish(*[python(CALL, CUPY_CACHE_DIR=tmp_path) for _ in range(4)])
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:1000])
    finish(python(CALL, CUPY_CACHE_DIR=tmp_path))
    finish(python(SEALED + CALL, CUPY_CACHE_DIR=tmp_path))


def test_cache_readonly_home(gpu, tmp_path):
    """Where the home folder cannot be written, CUPY_CACHE_DIR names another. Without it CuPy itself does not import."""
    finish(python(CALL, HOME="/dev/null", CUPY_CACHE_DIR=tmp_path))
    assert list(tmp_path.iterdir())


# Precision -------------------------------------------------------------------------------------------------------


def test_f32_supported(engine, xp):
    """float32 and float64 have the accuracy of their own format, not of a narrower one."""
    attend(engine, *triple(xp, 1, 2, 512, 64))
    for size in (1, 3):
        arrays = triple(xp, 1, 2, 65 * size, 16, dtype="float64")
        out, lse = attend(engine, *arrays)
        assert (out.dtype, lse.dtype) == (np.float64, np.float64)


def test_f32_tf32_silent(engine, xp):
    """float32 products are float32's: a value that TF32 would round comes back as it is."""
    for keys in (64, 1024, 4096):
        v = xp.full((keys, 8), 1 + 2.0**-12, np.float32)
        same(attend(engine, 0 * v[:2], v, v)[0], v[:2])
        attend(engine, 0 * v[:2], draw(xp, keys, 8), draw(xp, keys, 8, seed=1))


def test_f64_gradcheck():
    """float64 gradients are the finite differences of forward, and theirs those of backward."""
    arrays = list(triple(np, 2, 7, 5, key_heads=1, dtype="float64"))
    dout, dlse = draw(np, 2, 7, 5, dtype="float64", seed=3), draw(np, 2, 7, dtype="float64", seed=4)
    steps = [draw(np, *x.shape, dtype="float64", seed=5) for x in arrays]

    def at(distance):
        moved = [x + distance * step for x, step in zip(arrays, steps, strict=True)]
        out, lse = cuflash.forward(*moved, causal=True, return_lse=True)
        grads = cuflash.backward(dout, *moved, out, lse, causal=True, dlse=dlse)
        slope = sum((grad * step).sum() for grad, step in zip(grads, steps, strict=True))
        return (dout * out).sum() + (dlse * lse).sum(), slope

    distance = 1e-5
    (behind, slope_behind), (_, slope), (ahead, slope_ahead) = (at(n * distance) for n in (-1, 0, 1))
    assert abs((ahead - behind) / (2 * distance) - slope) <= 1e-8 * abs(slope)
    curvature = (ahead - 2 * at(0)[0] + behind) / distance**2
    assert abs((slope_ahead - slope_behind) / (2 * distance) - curvature) <= 1e-4 * abs(curvature)
