"""The emulator: each instruction against a model in NumPy, and each rule with a kernel that breaks it."""

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from cuflash import _plan, _variant, testing

SEEDS = range(8)


@pytest.fixture(scope="module")
def probe(emulator):
    """Run a probe of ``probes.cu`` by name: the ints, floats or whatever that it wrote."""
    text = (emulator.HERE / "probes.cu").read_text(encoding="utf-8")
    emulate = emulator.build(f'#line 1 "probes.cu"\n{text}', "cuflash::cuflash_probe")
    numbers = {name: number for number, name in enumerate(re.findall(r"^PROBE\((\w+)\)", text, re.MULTILINE))}

    def run(name, given=(), dtype=np.int32, size=0, *, threads=32, grid=1, seed=0, checks=3):
        raw = np.asarray(given).reshape(-1).view(np.uint8)
        inputs = emulator.aligned(max(raw.size, 4096), 256)
        inputs[: raw.size] = raw
        outputs = emulator.aligned(max(size * np.dtype(dtype).itemsize, 4096), 256)
        outputs[:] = 0
        args = np.array([inputs.ctypes.data, outputs.ctypes.data, numbers[name]], np.uint64).tobytes()
        memory = [(inputs, False), (outputs, True)]
        emulator.launch(emulate, grid, threads, args, 4096, memory, seed=seed, checks=checks, most_events=10**6)
        return outputs.view(dtype)[:size]

    return run


def line_of(emulator, name):
    """Number of the line where a probe begins."""
    lines = (emulator.HERE / "probes.cu").read_text(encoding="utf-8").splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.startswith(f"PROBE({name})"))


# Instructions ---------------------------------------------------------------------------------------------------


def test_places(probe):
    for seed in SEEDS:
        thread, lane, warp, block = probe("places", size=5 * 64 * 4, threads=64, grid=5, seed=seed).reshape(-1, 4).T
        n = np.arange(5 * 64)
        assert (thread == n % 64).all() and (lane == n % 32).all() and (warp == n % 64 // 32).all()
        assert (block == n // 64).all()


def test_shuffles(probe):
    wanted = [(np.arange(32) ^ (1 << n)) * 1.5 for n in range(5)]
    assert (probe("xor_shuffles", dtype=np.float64, size=160).reshape(5, 32) == wanted).all()


def test_other_shuffles(emulator, probe):
    lanes = np.arange(32)
    wanted = [3 * np.where(lanes < 1 << n, lanes, lanes - (1 << n)) for n in range(5)]
    assert (probe("other_shuffles", size=192).reshape(6, 32) == [*wanted, np.full(32, 21)]).all()
    with pytest.raises(emulator.EmulatorError, match="uniform: 1 here, 0 in lane 0"):
        probe("shuffle_from_several", size=32)


def test_reductions(probe):
    for seed in SEEDS:
        values = np.random.default_rng(seed).integers(-1000, 1000, 32).astype(np.int32)
        assert (probe("reductions", values, size=64).reshape(32, 2) == [values.sum(), values.max()]).all()


@pytest.mark.parametrize("bits", [0, 1, 0x80000000, 0xF0F00010, 0xFFFFFFFF])
def test_votes(probe, bits):
    votes, some, first = probe("votes", np.uint32(bits), np.int32, 96).reshape(32, 3).T
    assert (votes.view(np.uint32) == bits).all() and (some == (bits != 0)).all()
    assert (first == (bits & -bits).bit_length() - 1).all()


def test_uniform(emulator, probe):
    assert (probe("uniform_value", size=32) == 7).all()
    with pytest.raises(emulator.EmulatorError, match="uniform: 1 here, 0 in lane 0"):
        probe("uniform_that_differs", size=32)


@pytest.mark.parametrize("seed", SEEDS)
def test_ldmatrix(probe, seed):
    rows = np.random.default_rng(seed).integers(0, 2**16, (32, 8)).astype(np.uint16)
    results = probe("load_matrices", rows, np.uint16, 32 * 16, seed=seed).reshape(32, 2, 4, 2)
    matrices = rows[np.arange(32) * 5 % 32].reshape(4, 8, 8)
    for transposed, wanted in enumerate((matrices, matrices.swapaxes(1, 2))):
        # lane l holds elements (l / 4; 2 (l % 4), and the next) of each matrix
        assert (results[:, transposed].transpose(1, 0, 2).reshape(4, 8, 8) == wanted).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("seed", SEEDS)
def test_mma(probe, dtype, seed):
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal(shape).astype(dtype) for shape in ((16, 16), (16, 8)))
    c = rng.standard_normal((16, 8)).astype(np.float32)
    if dtype is not np.float16:
        a[3, 4], b[4, 5] = 1e-39, 2.0**100  # a subnormal number counts
    lane = np.arange(32)
    g, t = lane // 4, lane % 4 * 2
    pair = lambda x, y: np.stack([x, y], -1)  # noqa: E731
    operands = [
        *(pair(a[g + r, t + k], a[g + r, t + k + 1]) for k in (0, 8) for r in (0, 8)),
        *(pair(b[t + k, g], b[t + k + 1, g]) for k in (0, 8)),
    ]
    words = np.stack([np.ascontiguousarray(x).view(np.uint32)[:, 0] for x in operands], 1)
    sums = np.stack([c[g + r, t + e] for r in (0, 8) for e in (0, 1)], 1)
    given = np.concatenate([words, sums.view(np.uint32)], 1)
    results = probe(f"mma_{np.dtype(dtype).name}", given, np.float32, 256, seed=seed).reshape(32, 2, 4)
    for first, result in enumerate(results.transpose(1, 0, 2)):
        wanted = np.zeros((16, 8), np.float32) if first else c.copy()
        for k in range(16):  # exact products, one by one
            wanted += a[:, k, None].astype(np.float32) * b[None, k].astype(np.float32)
        got = np.empty((16, 8), np.float32)
        for n, (r, e) in enumerate([(0, 0), (0, 1), (8, 0), (8, 1)]):
            got[g + r, t + e] = result[:, n]
        assert (got == wanted).all()


@pytest.mark.parametrize("rows, terms", [(8, 4), (16, 4), (16, 8), (16, 16)])
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_mma_of_float64(probe, rows, terms, seed):
    rng = np.random.default_rng(seed)
    a, b, d = rng.standard_normal((rows, terms)), rng.standard_normal((terms, 8)), rng.standard_normal((rows, 8))
    a[3, 1], b[1, 5] = 1e-310, 2.0**1000  # a subnormal number counts
    lane = np.arange(32)
    g, t = lane // 4, lane % 4
    operands = [a[g + r, t + k] for k in range(0, terms, 4) for r in range(0, rows, 8)]
    operands += [b[t + k, g] for k in range(0, terms, 4)]
    places = [(g + r, 2 * t + e) for r in range(0, rows, 8) for e in (0, 1)]
    given = np.stack([*operands, *(d[place] for place in places)], 1)
    results = probe(f"mma_float64_{rows}_{terms}", given, np.float64, 8 * rows, seed=seed).reshape(32, -1)
    got = np.empty((rows, 8))
    for place, result in zip(places, results.T, strict=True):
        got[place] = result
    error = np.abs(got - (d + a @ b)) / (np.abs(d) + np.abs(a) @ np.abs(b))
    assert error.max() < terms * 2.0**-52


def test_words_of_float64(probe):
    x = np.random.default_rng(0).standard_normal(32)
    got = probe("words_of_float64", x, np.float64, 64)
    assert (got[:32] == x).all() and (got[32:] == x).all()


EXPONENTIAL = """
namespace cuflash {
struct Args {
    const char* in;
    char* out;
};
extern "C" __global__ void cuflash_probe(const __grid_constant__ Args args) {
    for (int64 n = thread_index(); n < 4096; n += WARP) {
        store_global(args.out + 8 * n, exp2_of(load_global<double>(args.in + 8 * n)));
    }
}
}
"""


def test_exponential_of_float64(emulator):
    """It is within a unit in the last place, and knows the ends of the format, infinity and NaN of any kind."""
    text = _variant._assemble("softmax.cuh", str(emulator.HERE)) + EXPONENTIAL
    x, results = (emulator.aligned(8 * 4096, 256) for _ in range(2))
    values, got = x.view(np.float64), results.view(np.float64)
    rng = np.random.default_rng(0)
    values[:2048], values[2048:4000] = rng.uniform(-1022, 8, 2048), rng.uniform(-1, 1, 1952)
    ends = [-np.inf, -1e300, -1023.0, -1022.0, 0.0, -0.0, 8.0, 1023.0, np.nan, -np.nan]
    values[4000:] = np.resize(ends, 96)
    values[4095:].view(np.uint64)[:] = 0xFFF80000DEADBEEF  # a NaN that says something
    args = np.array([x.ctypes.data, results.ctypes.data], np.uint64).tobytes()
    emulate = emulator.build(text, "cuflash::cuflash_probe")
    emulator.launch(emulate, 1, 32, args, 4096, [(x, False), (results, True)], seed=0)
    wanted = np.exp2(values.astype(np.longdouble))
    wanted[values <= -1022] = 0
    assert np.isnan(got[np.isnan(values)]).all() and (got[wanted == 0] == 0).all()
    some = wanted > 0
    assert (np.abs(got - wanted)[some] < 2.0**-52 * wanted[some]).all()


def test_16_bits_to_floats(probe):
    got = probe("floats_of_16_bits", dtype=np.float32, size=2 << 16).reshape(-1, 2)
    bits = np.arange(1 << 16, dtype=np.uint16)
    for result, dtype in zip(got.T, (np.float16, ml_dtypes.bfloat16), strict=True):
        wanted = bits.view(dtype).astype(np.float32)
        assert (np.isnan(result) == np.isnan(wanted)).all()
        assert (result.copy().view(np.uint32) == wanted.view(np.uint32))[~np.isnan(wanted)].all()


def test_floats_to_16_bits(probe):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(8192) * 2.0 ** rng.integers(-30, 30, 8192)).astype(np.float32)
    x[:10] = [0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519, 65520, 3.4e38, -3.4e38]
    x[10:14] = [1 + 2**-11, 1 + 3 * 2**-11, 2e-8, 1]
    got = probe("pairs_of_floats", x, np.uint16, 4 * 4096).reshape(4096, 2, 2)
    with np.errstate(over="ignore"):
        for n, dtype in enumerate((np.float16, ml_dtypes.bfloat16)):
            result, wanted = got[:, n].reshape(-1), x.astype(dtype).view(np.uint16)
            nan = np.isnan(x)
            assert (result == wanted)[~nan].all() and (result[nan] == 0x7FFF).all()


def test_e4m3_becomes_float16(probe):
    got, again = probe("floats_of_e4m3", np.zeros(1, np.uint8), np.float16, 1024).reshape(2, 256, 2)
    assert np.array_equal(got.view(np.uint16), again.view(np.uint16))
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float16)
    for result, wanted in zip(got.T, (codes[::-1], codes), strict=True):
        assert np.array_equal(result, wanted, equal_nan=True)
        assert (np.signbit(result) == np.signbit(wanted))[~np.isnan(wanted)].all()


def test_pairs_of_halves_are_added_and_multiplied(probe):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((4096, 2, 2)) * 2.0 ** rng.integers(-20, 12, (4096, 2, 2))).astype(np.float16)
    got = probe("pairs_of_halves", x, np.float16, 4 * 4096).reshape(4096, 2, 2)
    with np.errstate(over="ignore"):
        assert np.array_equal(got[:, 0], x[:, 0] + x[:, 1]) and np.array_equal(got[:, 1], x[:, 0] * x[:, 1])


def test_bytes_are_permuted(probe):
    assert probe("permuted_bytes", np.uint32([0x33221100, 0x77665544]), np.uint32, 1)[0] == 0x77225500


def test_exponential_and_logarithm(probe):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(4096) * 2.0 ** rng.integers(-10, 8, 4096)).astype(np.float32)
    x[:8] = [0, -0.0, np.inf, -np.inf, np.nan, -126.5, 127.9, 1]
    exp2, log2 = probe("exponentials", x, np.float32, 8192).reshape(-1, 2).T.astype(np.float64)
    with np.errstate(all="ignore"):
        wanted = np.exp2(x.astype(np.float64))
        wanted = np.where(wanted < 2.0**-126, 0, np.where(wanted >= 2.0**128, np.inf, wanted))
        assert (np.isnan(exp2) == np.isnan(x)).all()
        finite = np.isfinite(wanted)
        assert (exp2[~finite & ~np.isnan(x)] == np.inf).all()
        assert (np.abs(exp2 - wanted)[finite] <= 2.0**-22 * wanted[finite]).all()
        wanted = np.log2(x.astype(np.float64))
        assert (np.isnan(log2) == np.isnan(wanted)).all()
        finite = np.isfinite(wanted)
        assert (log2[~finite & ~np.isnan(wanted)] == wanted[~finite & ~np.isnan(wanted)]).all()
        assert (np.abs(log2 - wanted)[finite] <= 2.0**-22 * np.maximum(np.abs(wanted[finite]), 1)).all()


def test_arithmetic(probe):
    a, b, c = np.float32([1 + 2**-12, -1 - 2**-12, 1])
    fused, apart, inverse, most, least, size = probe("arithmetic", np.array([a, b, c]), np.float32, 6)
    assert fused == np.float32(float(a) * float(b) + float(c)) and apart == a * b + c and fused != apart
    assert (inverse, most, least, size) == (np.float32(1) / a, a, b, -b)


def test_float32_subnormal_numbers_are_flushed(probe):
    for a, b in ((1e-39, 1e10), (1e-20, 1e-20)):
        assert probe("subnormal_numbers", np.float32([a, b]), np.float32, 1)[0] == 0
    assert np.float32(1e-39) * np.float32(1e10) != 0, "the caller's arithmetic is as it was"


# Copies ---------------------------------------------------------------------------------------------------------


def test_copies_fill_with_zeros(probe):
    data = np.random.default_rng(0).integers(1, 255, (32, 16)).astype(np.uint8)
    got = probe("copies", data, np.uint8, 2048).reshape(4, 32, 16)
    lane, byte = np.arange(32)[:, None], np.arange(16)
    assert (got[0] == np.where(byte < lane % 17, data, 0)).all()
    assert (got[1] == np.where(lane % 2 == 0, data, 0)).all()
    assert (got[2] == np.where(byte // 4 % 2 == 0, data, 0)).all()
    assert (got[3] == np.where(lane % 3 == 0, data, 0)).all()


def test_older_group_is_here(probe):
    data = np.arange(32, dtype=np.uint8)
    assert (probe("copy_of_the_older_group", data, np.uint8, 512).reshape(32, 16) == data[:16]).all()


# Rules ----------------------------------------------------------------------------------------------------------

BROKEN = {
    "divergence": r"while other lanes of the warp are at (ballot|sync_warp), probes.cu:\d+",
    "lane_that_left": r"deadlock.*lanes 3-3: left the kernel",
    "copy_not_waited_for": r"reads shared memory at offset \d+, written by thread \d+ at .*has not been waited for",
    "copy_not_committed": "has not been waited for",
    "copy_of_another_thread": "has not been waited for|nothing orders|has written",
    "copy_in_flight_at_the_end": "left the kernel with this copy in flight",
    "copy_of_too_much": "lane 31.: cp.async: 17 bytes|left the kernel",
    "copy_from_beyond": r"reads 16 bytes of global memory, \d+ bytes past the end",
    "exchange_without_the_second_barrier": r"(writes .*, read|reads .*, written) by thread \d+ at .*nothing orders",
    "exchange_without_barriers": r"(writes .*, read|reads .*, written) by thread \d+ at .*nothing orders|has written",
    "exchange_without_sync_warp": r"written by thread \d+ at .*nothing orders",
    "two_writers": r"writes shared memory at offset 0, written by thread \d+ at .*nothing orders",
    "nothing_written": r"reads shared memory at offset \d+, which nothing has written",
    "shared_beyond": r"thread \d+ .*writes 4 bytes of shared memory at offset 4\d{3}; the block has 4096",
    "shared_below": "reads 4 bytes of shared memory at offset -4",
    "shared_misaligned": "not a multiple of 4",
    "barrier_of_half_a_warp": r"deadlock.*lanes 0-15: sync_threads at probes.cu:\d+.*lanes 16-31: left the kernel",
    "barrier_that_some_never_reach": r"deadlock.*warp 1, lanes 0-31: sync_threads at .*warp 2, lanes 0-31: a flag at",
    "global_beyond": r"reads 4 bytes of global memory, \d+ bytes past the end",
    "global_below": "reads 4 bytes of global memory",
    "global_nowhere": "below all arrays",
    "global_misaligned": "no multiple of 4",
    "global_input_written": "into an array that is an input",
    "endless": "endless",
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rule(emulator, probe, name):
    first = line_of(emulator, name)
    for seed in SEEDS[: 1 if name == "endless" else None]:
        with pytest.raises(emulator.EmulatorError) as caught:
            probe(name, threads=128 if "exchange" in name or "barrier" in name else 96, seed=seed)
        message = str(caught.value)
        assert re.search(BROKEN[name], message, re.DOTALL), message
        lines = [int(line) for line in re.findall(r"probes\.cu:(\d+)", message)]
        assert name == "endless" or lines and all(first <= line < first + 10 for line in lines), message


def test_unwritten_shared_memory_is_nan_where_it_may_be_read(probe):
    assert np.isnan(probe("unwritten_is_nan", dtype=np.float32, size=32, checks=0)).all()


def test_barriers_pass_without_a_thread_that_left(probe):
    probe("barrier_without_a_warp", threads=128)


@pytest.mark.parametrize("seed", SEEDS)
def test_barriers_order_memory(probe, seed):
    values = np.arange(128, dtype=np.int32) ** 2
    wanted = values
    for _ in range(3):
        wanted = wanted + np.roll(wanted, -33)
    assert (probe("exchange", values, np.int32, 128, threads=128, seed=seed) == wanted).all()
    assert (probe("exchange_within_a_warp", size=64, threads=64, seed=seed) == np.arange(64) ^ 5).all()


def test_blocks_run_in_many_orders(probe):
    orders = {tuple(probe("tickets", size=9, grid=8, seed=seed)) for seed in range(20)}
    assert all(sorted(order) == [*range(8), 8] for order in orders) and len(orders) > 10


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_wait_for_each_other(probe, seed):
    wanted = 0
    for block in range(8):
        wanted = wanted * 3 + block
    assert tuple(probe("turns", size=2, grid=8, seed=seed)) == (8, wanted)


def test_a_seed_decides_everything(probe):
    assert len({tuple(probe("tickets", size=9, grid=8, seed=5)) for _ in range(5)}) == 1


# Of kernels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [None, 16, 24])
@pytest.mark.parametrize("kind", ["bfloat16", "float32", "float64", "int8", "latent"])
def test_decode_reads_what_rows_see_alone(emulator, kind, page_size):
    from emulator.mutations import check_decode_reads

    recipe = testing.CacheRecipe(
        lengths=(310, 0, 100), page_size=page_size, heads=6, key_heads=2, head_dim=48, value_dim=32, splits=3
    )
    changes = {
        "int8": {"kv_format": kind, "k_scale": "slot", "v_scale": "slot"},
        "latent": {"latent": True, "key_heads": 1, "head_dim": 576, "value_dim": 512},
    }
    recipe = replace(recipe, **changes.get(kind, {"dtype": kind}))
    device = emulator.Emulator()
    for queries, window in ((1, None), (20, (40, 9)), (2, (None, 0))):
        check_decode_reads(device.decode, replace(recipe, queries=queries, causal=window is None, window=window))


# Of other devices -----------------------------------------------------------------------------------------------


def test_e4m3_is_read_by_bits_where_no_instruction_reads_it(emulator):
    for limits in (_plan.KNOWN[8, 0], _plan.KNOWN[8, 9]):
        device = emulator.Emulator(limits=limits)
        for seed in range(3):
            recipe = testing.CacheRecipe(
                lengths=(70, 256), heads=2, head_dim=40, value_dim=50, kv_format="e4m3", v_scale="slot", seed=seed
            )
            testing.check_decode_bound(device.decode, recipe, path="portable float16")
        codes = np.arange(256, dtype=np.uint8)
        q, k = np.zeros((2, 1, 1, 1), np.float16), np.zeros((2, 1, 1, 1), np.uint8)
        out = device.decode(q, k, np.stack([codes, codes[::-1]])[:, None, None], kv_format="e4m3")[:, 0, 0]
        wanted = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float16)
        assert np.array_equal(out, [wanted, wanted[::-1]], equal_nan=True)
