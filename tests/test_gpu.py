"""What only a GPU can show: streams, graphs, threads, devices, sizes, and every head dim."""

import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import cuflash
from cuflash import _compile, _launch, bounds, reference, testing

try:
    import cupy
except ImportError:  # the fixture skips
    cupy = None

pytestmark = pytest.mark.usefixtures("gpu")

CYCLES = 200_000_000  # 100 ms at 2 GHz
SIXTEEN_BIT = ("float16", "bfloat16")
# Contiguous rows of 16 bytes; copies of operands; float32, on Hopper with buffers for its parts, and elsewhere.
KINDS = (
    ("float16", 64, "contiguous"), ("bfloat16", 33, "strided"), ("float32", 64, "contiguous"),
    ("float32", 33, "strided"), ("float32", 192, "contiguous"), ("float64", 40, "contiguous"),
)  # fmt: skip


@pytest.fixture(scope="module")
def spin(gpu):
    """Keeps the current stream busy for 100 ms."""
    kernel = cupy.RawKernel(
        'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n) {} }', "spin"
    )
    kernel((1,), (1,), (np.int64(1),))
    return lambda: kernel((1,), (1,), (np.int64(CYCLES),))


def recipe(dtype="float16", head_dim=64, layout="contiguous", **changes):
    sizes = {"batch": (2,), "heads": 4, "key_heads": 2, "queries": 200, "keys": 300, "causal": True}
    layouts = {"q": layout, "k": layout, "v": layout}
    return testing.Recipe(dtype=dtype, head_dim=head_dim, value_dim=head_dim, **(sizes | layouts | changes))


def run(problem, arrays, **keywords):
    """out, lse and gradients, for which out is dout."""
    results = cuflash.forward(*arrays, return_lse=True, **problem.keywords, **keywords)
    return results + cuflash.backward(results[0], *arrays, *results, **problem.keywords, **keywords)


def assert_same(one, other):
    for x, y in zip(one, other, strict=True):
        np.testing.assert_array_equal(reference.host(x), reference.host(y))


def captured(stream, call):
    """What a call gives, and the graph of it, on the stream that is current. The call goes before as well: it compiles,
    and its memory goes back to the pool, from which the capture takes it."""
    call()
    stream.begin_capture()
    results = call()
    return results, stream.end_capture()


def in_threads(work, count):
    """Run ``work(n)`` in so many threads, all at once."""
    threads = [threading.Thread(target=work, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# Streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_returns_before_the_gpu_is_done(spin, kind):
    problem = recipe(*kind)
    arrays = problem.arrays(cupy)
    stream, event = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event()
    cupy.cuda.Device().synchronize()
    with stream:
        expected = run(problem, arrays)  # compiles, and fills the pool of this stream
        again = run(problem, arrays)
        stream.synchronize()
        del again
        spin()
        event.record()
        results = run(problem, arrays)
        finished = event.done
    stream.synchronize()
    assert not finished
    assert_same(results, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_runs_on_the_current_stream(spin, kind):
    """Inputs that the stream makes late are read when they are there."""
    problem = recipe(*kind)
    arrays = problem.arrays(cupy)
    expected = run(problem, arrays)
    late = problem.arrays(cupy)
    for x in late:
        x[...] = cupy.zeros_like(x)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        spin()
        for x, y in zip(late, arrays, strict=True):
            x[...] = y
        results = run(problem, late)
    stream.synchronize()
    assert_same(results, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_graph_replays_with_other_inputs(kind):
    problem = recipe(*kind)
    arrays, others = problem.arrays(cupy), recipe(*kind, seed=1).arrays(cupy)
    expected = run(problem, others)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        results, graph = captured(stream, lambda: run(problem, arrays))
        for x, y in zip(arrays, others, strict=True):
            x[...] = y
        for x in results:
            x[...] = cupy.zeros_like(x)
        graph.launch(stream)
    stream.synchronize()
    assert_same(results, expected)


def test_graphs_and_streams_draw_tickets_of_their_own(spin):
    """Several launches of more tiles than multiprocessors at once, one of them in two graphs."""
    problem = recipe(batch=(8,), heads=16, key_heads=16, queries=1000, keys=1000)
    arrays = problem.arrays(cupy)
    expected = run(problem, arrays)
    cupy.cuda.Device().synchronize()
    streams, graphs, results = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)], [], []
    for stream in streams[:2]:
        with stream:
            result, graph = captured(stream, partial(run, problem, arrays))
            results.append(result)
            graphs.append(graph)
    for _ in range(5):
        for graph, stream in zip(graphs, streams, strict=False):
            graph.launch(stream)
        for stream in streams[2:]:
            with stream:
                results.append(run(problem, arrays))
    cupy.cuda.Device().synchronize()
    for result in results:
        assert_same(result, expected)


def test_same_bits_while_the_gpu_is_busy(spin):
    problem = recipe(queries=700, keys=900)
    arrays = problem.arrays(cupy)
    expected = run(problem, arrays)
    busy = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    x = cupy.ones((2048, 2048), np.float32)
    cupy.cuda.Device().synchronize()
    for _ in range(20):
        for stream in busy:
            with stream:
                x @ x
        assert_same(run(problem, arrays), expected)


# Threads and devices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_first_calls_of_several_threads(dtype):
    problem = recipe(dtype, 96, window=(40, 3))
    arrays = problem.arrays(cupy)
    expected = run(problem, arrays)
    cupy.cuda.Device().synchronize()
    _launch._calls.clear()
    _compile._kernels.clear()
    barrier, results = threading.Barrier(4), [None] * 4

    def work(n):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            barrier.wait()
            for _ in range(20):
                results[n] = run(problem, arrays)
            stream.synchronize()

    in_threads(work, 4)
    for result in results:
        assert_same(result, expected)


def test_current_device_stays():
    """Arrays on the last device, the first one current; with one GPU these are the same."""
    problem, last = recipe(), cupy.cuda.runtime.getDeviceCount() - 1
    with cupy.cuda.Device(0):
        expected = run(problem, problem.arrays(cupy))
    with cupy.cuda.Device(last):
        arrays = problem.arrays(cupy)
    cupy.cuda.Device(last).synchronize()
    with cupy.cuda.Device(0):
        results = run(problem, arrays)
        assert cupy.cuda.runtime.getDevice() == 0
    assert all(x.device.id == last for x in results)
    cupy.cuda.Device(last).synchronize()
    assert_same(results, expected)


def test_mixed_arrays_are_refused():
    q, k, v = recipe().arrays(cupy)
    with pytest.raises(TypeError, match="q is a cupy array, k a numpy one"):
        cuflash.forward(q, cupy.asnumpy(k), v)
    if cupy.cuda.runtime.getDeviceCount() > 1:
        with cupy.cuda.Device(1):
            other = cupy.asarray(cupy.asnumpy(k))
        with pytest.raises(ValueError, match="q is on device 0, k on device 1"):
            cuflash.forward(q, other, v)


# Sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("shape", [(70_000, 1), (1, 70_000), (33_000, 2)])
def test_more_than_65536_heads(shape, dtype):
    rng = np.random.default_rng(0)
    q, k, v = (cupy.asarray(rng.standard_normal((*shape, 4, 16)).astype(dtype)) for _ in range(3))
    out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
    q, k, v, out, lse = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v, out, lse))
    for part in (slice(0, 50), slice(65_510, 65_560), slice(-50, None)):
        one = q[part], k[part], v[part]
        testing.assert_attention_close((out[part], lse[part]), *one, causal=True)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("axis", ["batch", "heads", "rows"])
def test_offsets_beyond_32_bits(axis, dtype):
    """Operands that lie far apart in one buffer of more than 2^31 elements."""
    free = cupy.cuda.runtime.memGetInfo()[0] + cupy.get_default_memory_pool().free_bytes()
    if free < 20 * 2**30:
        pytest.skip(f"{free >> 30} GB free; wanted 20")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 2, 40, 64)).astype(dtype) for _ in range(3))
    expected = cuflash.forward(*map(cupy.asarray, (q, k, v)), causal=True, return_lse=True)
    far = {"batch": 0, "heads": 1, "rows": 2}[axis]
    lengths = [2, 2, 40]
    total = 2**31 + 2**22
    pitch = total // lengths[far] // 64 * 64  # elements from one to the next along the far axis
    buffer = cupy.empty(pitch * lengths[far], dtype)
    size = q.size // lengths[far]
    rest = [n for axis, n in enumerate((2, 2, 40, 64)) if axis != far]
    views = []
    for n, x in enumerate((q, k, v, np.zeros_like(q))):  # at the end of each stretch, one beside the other
        start = pitch - (4 - n) * size
        view = cupy.moveaxis(buffer.reshape(lengths[far], pitch)[:, start : start + size].reshape(-1, *rest), 0, far)
        assert 0 <= view.data.ptr - buffer.data.ptr < buffer.nbytes
        view[...] = cupy.asarray(x)
        views.append(view)
    out, lse = cuflash.forward(*views[:3], causal=True, return_lse=True, out=views[3])
    assert_same((out, lse), expected)
    assert_same(cuflash.forward(*views[:3], causal=True, return_lse=True), expected)
    del view, views, out, buffer
    cupy.get_default_memory_pool().free_all_blocks()


def test_prepared_calls_are_few(monkeypatch):
    monkeypatch.setattr(_launch, "MOST_CALLS", 8)
    _launch._calls.clear()
    for n in range(1, 30):
        x = cupy.ones((1, n, 16), np.float16)
        assert (cuflash.forward(x, x, x) == 1).all()
        assert len(_launch._calls) <= 8
    x = cupy.ones((1, 5, 16), np.float16)
    cuflash.forward(x, x, x)
    before = len(_launch._calls)
    for _ in range(10):
        cuflash.forward(x, x, x)
        cuflash.forward(x + 1, x, x)
    assert len(_launch._calls) == before


def test_arrays_are_not_kept():
    """A prepared call holds on to no array of the caller's, and to no result."""
    pool = cupy.get_default_memory_pool()
    used = []
    for _ in range(2):
        x = cupy.ones((1, 64, 16), np.float16)
        results = cuflash.forward(x, x, x, return_lse=True)  # the first makes tickets, which stay
        grads = cuflash.backward(x, x, x, x, *results)
        held = pool.used_bytes()
        del x, results, grads
        used.append(pool.used_bytes())
        assert held > used[-1]
    assert used[0] == used[1]


def test_backward_of_more_tiles_than_blocks():
    """Chunks of tiles that go round, one after the other, and tickets that last."""
    for changes in ({"causal": False}, {"causal": True}, {"causal": False, "window": (3000, 50)}):
        problem = recipe(batch=(), heads=2, key_heads=1, queries=300, keys=40_000, **changes)
        arrays = problem.arrays(cupy)
        expected = run(problem, arrays)
        exact = bounds.backward(expected[0], *arrays, path="portable float16", **problem.keywords)
        assert bounds.worst(expected[2:], exact) <= 1
        for engine in ("portable", None):
            assert_same(run(problem, arrays, engine=engine), run(problem, arrays, engine=engine))


def test_memory_of_backward():
    """Beyond inputs and results: dq in float32, and two numbers and some counters a row."""
    q, k, v = recipe(batch=(2,), heads=8, key_heads=8, queries=4096, keys=4096).arrays(cupy)
    out, lse = cuflash.forward(q, k, v, return_lse=True)
    peak = held = 0

    class Peak(cupy.cuda.MemoryHook):
        name = "peak"

        def malloc_postprocess(self, **facts):
            nonlocal peak, held
            held += facts["mem_size"]
            peak = max(peak, held)

        def free_postprocess(self, **facts):
            nonlocal held
            held -= facts["mem_size"]

    with Peak():
        grads = cuflash.backward(out, q, k, v, out, lse)
    assert peak - sum(grad.nbytes for grad in grads) <= 1.2 * 2 * q.nbytes


# Decode -----------------------------------------------------------------------------------------------------------


def cache(lengths=(3000, 17, 0, 1500), **changes):
    sizes = {"page_size": 16, "heads": 8, "key_heads": 2, "head_dim": 64, "value_dim": 64}
    return testing.CacheRecipe(lengths=lengths, spare=100, **(sizes | changes))


def decoded(problem, arrays, **keywords):
    q, k, v, tables = arrays
    return cuflash.decode(q, k, v, return_lse=True, **(tables | problem.keywords | problem.splitting | keywords))


def assert_decoded(problem, results, lengths=None):
    values = problem.values()
    meant = problem.meant(values) | ({} if lengths is None else {"lengths": np.array(lengths)})
    assert bounds.worst(results, bounds.decode(*values[:3], path=f"portable {problem.dtype}", **meant)) <= 1


SLOTS = {"kv_format": "int8", "k_scale": "slot", "v_scale": "slot"}
HEADS = {"kv_format": "e4m3", "k_scale": "head", "v_scale": "head"}


@pytest.mark.parametrize(
    "changes", [{}, {"page_size": None}, {"queries": 3, "splits": 7}, {"batch_invariant": True}, SLOTS, HEADS]
)
def test_decode_in_a_graph_follows_lengths_and_pages(changes):
    """Both are read anew at each replay, and counters are as the launch before has left them."""
    problem = cache(lengths=(3000, 3000, 3000, 3000), dtype="bfloat16", **changes)
    arrays = problem.arrays(cupy)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        results, graph = captured(stream, lambda: decoded(problem, arrays))
        for lengths in ((3000, 1, 0, 2999), (5, 700, 3000, 16), (0, 0, 0, 0)):
            arrays[3]["lengths"][...] = cupy.asarray(np.array(lengths, np.int32))
            if "page_table" in arrays[3] and lengths[0] == 5:  # all pages elsewhere
                order = cupy.asarray(np.random.default_rng(1).permutation(len(arrays[1])))
                slots = (x for name, x in arrays[3].items() if name.endswith("scale") and x.ndim > 1)
                for x in (*arrays[1:3], *slots):
                    x[...] = x[order]
                arrays[3]["page_table"][...] = cupy.argsort(order)[arrays[3]["page_table"]]
            for x in results:
                x[...] = cupy.full_like(x, np.nan)
            for _ in range(3):
                graph.launch(stream)
            stream.synchronize()
            assert_decoded(problem, results, lengths)


@pytest.mark.parametrize(
    "changes", [{}, {"page_size": None}, {"rotary": 32, "queries": 3}, {"rotary": 16, "splits": 7, "k": "strided"}]
)
def test_a_graph_appends_at_lengths_that_its_caller_increases(changes):
    """Rows are other ones at each replay, until one sequence after the other has no room."""
    problem = cache(lengths=(300, 0, 297), dtype="bfloat16", append=True, **changes)
    problem = replace(problem, spare=4 * problem.queries)
    q, k, v, given = arrays = problem.arrays(cupy)
    if "page_table" in given:  # pages for what is to come
        pages = np.random.default_rng(problem.seed).permutation(len(k)).astype(np.int32)
        given["page_table"][...] = cupy.asarray(pages[: given["page_table"].size].reshape(3, -1))
    overflow = cupy.full(3, 7, np.int32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        results, graph = captured(stream, lambda: decoded(problem, arrays, overflow=overflow))
        told = []
        for seed in range(30):
            other = replace(problem, seed=seed)
            q[...] = cupy.asarray(other.values()[0])
            for name, x in other.new(other.values(), cupy).items():
                if name in ("k_new", "v_new"):
                    given[name][...] = x
            before = [reference.host(x).copy() for x in (q, k, v)]
            held = {name: x for name, x in given.items() if not name.startswith("rotary")}
            held = {name: reference.host(x).copy() for name, x in held.items()}
            held |= {name: x for name, x in given.items() if name.startswith("rotary")}
            graph.launch(stream)
            stream.synchronize()
            exact = bounds.decode(*before, path="portable bfloat16", **held, **problem.keywords)
            assert bounds.worst(results, exact) <= 1
            no_room = held["lengths"] + problem.queries > problem.capacity
            assert reference.host(overflow).tolist() == no_room.astype(int).tolist()
            told.append(no_room.sum())
            lengths = np.where(no_room, held["lengths"], held["lengths"] + problem.queries)
            after = reference.sequences(*(reference.host(x) for x in (q, k, v)), lengths, held.get("page_table"))
            for b, (_, _, values) in enumerate(after):
                if not no_room[b]:
                    assert np.array_equal(values[:, -problem.queries :], held["v_new"][b])
            given["lengths"] += problem.queries
        assert told[0] == 0 and told[-1] >= 2


def test_appends_beyond_32_bits():
    """Sequences that lie 2^30 elements apart."""
    free = cupy.cuda.runtime.memGetInfo()[0] + cupy.get_default_memory_pool().free_bytes()
    if free < 16 * 2**30:
        pytest.skip(f"{free >> 30} GB free; wanted 16")
    far = cupy.zeros((5, 2**30), np.float16)
    k, v = (far[:, first : first + 2 * 16 * 8].reshape(5, 2, 16, 8) for first in (0, 4096))
    q, new = (cupy.asarray(np.random.default_rng(n).standard_normal((5, 2, 3, 8)).astype(np.float16)) for n in (0, 1))
    overflow = cupy.zeros(5, np.int32)
    lengths = (14, 0, 5, 2, 13)
    cuflash.decode(q, k, v, lengths=cupy.asarray(lengths), k_new=new, v_new=new, overflow=overflow)
    assert reference.host(overflow).tolist() == [1, 0, 0, 0, 0]
    for cache in (k, v):
        assert not cache[0].any()
        for b, length in enumerate(lengths[1:], 1):
            rows = slice(length, length + 3)
            assert np.array_equal(reference.host(cache[b, :, rows]), reference.host(new[b]))
    assert int(cupy.count_nonzero(far)) <= 2 * 4 * 2 * 3 * 8
    del far, k, v
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize("changes", [{}, SLOTS])
def test_decode_on_several_streams_and_threads(spin, changes):
    problem = cache(splits=20, **changes)
    arrays = problem.arrays(cupy)
    expected = decoded(problem, arrays)
    cupy.cuda.Device().synchronize()
    results = [[] for _ in range(4)]

    def work(n):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            if n % 2:
                spin()
            for _ in range(30):
                results[n].append(decoded(problem, arrays))
            stream.synchronize()

    in_threads(work, 4)
    for each in results:
        for result in each:
            assert_same(result, expected)
    assert_decoded(problem, expected)


@pytest.mark.parametrize("changes", [{}, {"append": True, "rotary": 20}])
def test_decode_returns_before_the_gpu_is_done(spin, changes):
    problem = cache(integers="int64", k="strided", q="offset", **changes)  # with copies of all kinds
    arrays = problem.arrays(cupy)
    stream, event = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event()
    cupy.cuda.Device().synchronize()
    with stream:
        expected = decoded(problem, arrays)
        stream.synchronize()
        spin()
        event.record()
        results = decoded(problem, arrays)
        finished = event.done
    stream.synchronize()
    assert not finished
    assert_same(results, expected)
    assert_decoded(problem, results)


def test_decode_of_more_than_65536_sequences():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((70_000, 1, n, 16)).astype(np.float16) for n in (1, 40, 40))
    lengths = rng.integers(0, 41, 70_000)
    for keywords in ({}, {"splits": 3}):
        given = (cupy.asarray(x) for x in (q, k, v))
        out, lse = cuflash.decode(*given, lengths=cupy.asarray(lengths), return_lse=True, **keywords)
        for part in (slice(0, 50), slice(65_510, 65_560), slice(-50, None)):
            exact = bounds.decode(q[part], k[part], v[part], path="portable float16", lengths=lengths[part])
            assert bounds.worst((out[part], lse[part]), exact) <= 1


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"dtype": "float32"}, {"queries": 3, "window": (1500, None)}, SLOTS, HEADS,
        {"page_size": None, "heads": 32, "key_heads": 8, "head_dim": 128, "value_dim": 128},
        {"heads": 4, "key_heads": 1, "head_dim": 576, "value_dim": 512, "latent": True},
    ],
    ids=str,
)  # fmt: skip
def test_decode_of_sequences_of_different_lengths(changes):
    """Splits follow all lengths, anew at each replay of a graph: alike, one long, drawn. Each twice, bit for bit."""
    sequences, longest = 40, 2500
    problem = cache(lengths=(longest,) * sequences, **{"dtype": "bfloat16"} | changes)
    arrays, stream, rng = problem.arrays(cupy), cupy.cuda.Stream(non_blocking=True), np.random.default_rng(2)
    drawn = [np.exp(rng.uniform(np.log(100), np.log(longest), sequences)).astype(int) for _ in range(2)]
    cupy.cuda.Device().synchronize()
    with stream:
        results, graph = captured(stream, lambda: decoded(problem, arrays))
        full, one = np.full(sequences, longest), longest * (np.arange(sequences) == 5)
        for lengths in (full, one, *drawn, rng.integers(0, 2, sequences)):
            arrays[3]["lengths"][...] = cupy.asarray(np.array(lengths, np.int32))
            graph.launch(stream)
            first = [x.copy() for x in results]
            graph.launch(stream)
            stream.synchronize()
            assert_same(results, first)
            assert_decoded(problem, results, lengths)


@pytest.mark.parametrize("kv_format", ["int8", "e4m3"])
@pytest.mark.parametrize("scales", [None, "head", "slot"])
def test_8_bit_caches_of_all_kinds(kv_format, scales):
    """Drawn problems of every padded size, many splits and one, pages and none."""
    for n in range(30):
        dims = ((64, 64), (128, 128), (256, 256), (40, 33), (100, 120), (200, 130))[n % 6]
        problem = cache(
            lengths=(1 + 37 * n, 1500, 0, 700), dtype=("float16", "bfloat16")[n // 6 % 2], kv_format=kv_format,
            k_scale=scales, v_scale=scales, page_size=(None, 16, 7, 1, 64)[n % 5], queries=(1, 1, 2, 5)[n % 4],
            head_dim=dims[0], value_dim=dims[1], splits=(None, 1, 9)[n % 3], seed=n, planted=n % 2 == 1,
        )  # fmt: skip
        arrays = problem.arrays(cupy)
        results = decoded(problem, arrays)
        assert_decoded(problem, results)
        assert_same(results, decoded(problem, arrays))


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_caches_of_float32_and_float64_of_all_kinds(dtype, append):
    """Drawn problems of every padded size, many splits and one, pages and none, few rows, a tile of them and more."""
    for n in range(30):
        dims = ((64, 64), (128, 128), (256, 256), (40, 33), (100, 126), (200, 130))[n % 6]
        problem = cache(
            lengths=(1 + 37 * n, 1500, 0, 700), dtype=dtype, page_size=(None, 16, 7, 1, 64)[n % 5],
            queries=(1, 1, 2, 5)[n % 4], head_dim=dims[0], value_dim=dims[1], splits=(None, 1, 9)[n % 3], seed=n,
            planted=n % 2 == 1, append=append, rotary=16 * append, angles=(dtype, "float32")[n // 2 % 2],
        )  # fmt: skip
        arrays = problem.arrays(cupy)
        results = decoded(problem, arrays)
        assert_decoded(problem, results)
        if not append:
            assert_same(results, decoded(problem, arrays))


LATENT = {"key_heads": 1, "head_dim": 576, "value_dim": 512, "latent": True, "dtype": "bfloat16"}


@pytest.mark.parametrize("heads, page_size", [(16, None), (16, 64), (20, 1), (128, None), (128, 16)])
def test_decode_from_columns_of_keys(heads, page_size):
    """Drawn lengths, splits as the plan has them and others; each problem twice."""
    for n in range(8 if heads < 100 else 4):
        problem = cache(
            lengths=(1 + 370 * n, 2500, 0, 700), heads=heads, page_size=page_size, queries=(1, 1, 2, 5)[n % 4],
            splits=(None, 1, 9)[n % 3], seed=n, planted=n % 2 == 1, **LATENT | {"dtype": SIXTEEN_BIT[n // 2 % 2]},
        )  # fmt: skip
        arrays = problem.arrays(cupy)
        results = decoded(problem, arrays)
        assert_decoded(problem, results)
        assert_same(results, decoded(problem, arrays))


def test_columns_of_keys_in_a_graph_follow_lengths():
    problem = cache(lengths=(3000,) * 4, heads=16, **LATENT)
    arrays, stream = problem.arrays(cupy), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        results, graph = captured(stream, lambda: decoded(problem, arrays))
        for lengths in ((3000, 1, 0, 2999), (5, 700, 3000, 16)):
            arrays[3]["lengths"][...] = cupy.asarray(np.array(lengths, np.int32))
            for _ in range(3):
                graph.launch(stream)
            stream.synchronize()
            assert_decoded(problem, results, lengths)


def test_pages_beyond_32_bits():
    """Pages whose offset passes 2^31 elements, and bytes."""
    free = cupy.cuda.runtime.memGetInfo()[0] + cupy.get_default_memory_pool().free_bytes()
    if free < 20 * 2**30:
        pytest.skip(f"{free >> 30} GB free; wanted 20")
    problem = cache(lengths=(300, 40), queries=3)
    near = problem.arrays(cupy)
    expected = *decoded(problem, near), *prefilled(problem, near)
    size = near[1][0].size
    pages = (2**31 + 2**24) // size
    places = cupy.asarray(np.linspace(pages // 8, pages - 1, len(near[1])).astype(np.int64))
    far = []
    for x in near[1:3]:
        far.append(cupy.empty((pages, *x.shape[1:]), x.dtype))
        far[-1][places] = x
    table = near[3]["page_table"].copy()
    count = len(places)
    for b, length in enumerate(problem.lengths):
        used = -(-length // problem.page_size)
        assert int(table[b, :used].max()) < count
        table[b, :used] = places[table[b, :used]].astype(np.int32)
    arrays = near[0], *far, near[3] | {"page_table": table}
    assert_same((*decoded(problem, arrays), *prefilled(problem, arrays)), expected)
    del far, arrays
    cupy.get_default_memory_pool().free_all_blocks()


def prefilled(problem, arrays):
    q, k, v, tables = arrays
    return cuflash.forward(q, k, v, return_lse=True, **tables, **problem.keywords)


def assert_prefilled(problem, results, lengths=None):
    lengths = np.array(problem.lengths if lengths is None else lengths)
    exact = bounds.forward(*problem.values(), path=f"portable {problem.dtype}", lengths=lengths, **problem.keywords)
    assert bounds.worst(results, exact) <= 1


@pytest.mark.parametrize("head_dim, value_dim", [(33, 64), (64, 64), (100, 128), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("page_size", [None, 1, 16, 100])
def test_prefill_on_caches(head_dim, value_dim, page_size):
    for n, changes in enumerate(({}, {"window": (300, 20), "causal": False}, {"causal": "top-left"}, {"k": "offset"})):
        problem = cache(
            queries=(200, 1, 129, 64)[n], head_dim=head_dim, value_dim=value_dim, page_size=page_size,
            dtype=("float16", "bfloat16")[n % 2], planted=True, **changes,
        )  # fmt: skip
        arrays = problem.arrays(cupy)
        results = prefilled(problem, arrays)
        assert_prefilled(problem, results)
        assert_same(results, prefilled(problem, arrays))
        testing.check_prefill_hidden_keys(cuflash.forward, problem, cupy)


@pytest.mark.parametrize("changes", [{}, {"page_size": None}, {"integers": "int64", "k": "strided", "q": "offset"}])
def test_prefill_in_a_graph_follows_lengths_and_pages(changes):
    problem = cache(lengths=(3000, 3000, 3000, 3000), queries=150, dtype="bfloat16", **changes)
    arrays = problem.arrays(cupy)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        results, graph = captured(stream, lambda: prefilled(problem, arrays))
        for lengths in ((3000, 1, 0, 2999), (5, 700, 3000, 16), (0, 0, 0, 0)):
            arrays[3]["lengths"][...] = cupy.asarray(np.array(lengths))
            for x in results:
                x[...] = cupy.full_like(x, np.nan)
            for _ in range(3):
                graph.launch(stream)
            stream.synchronize()
            assert_prefilled(problem, results, lengths)


def test_prefill_returns_before_the_gpu_is_done(spin):
    problem = cache(queries=100, integers="int64", k="strided", q="offset")  # with copies of all kinds
    arrays = problem.arrays(cupy)
    stream, event = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event()
    cupy.cuda.Device().synchronize()
    with stream:
        expected = prefilled(problem, arrays)
        stream.synchronize()
        spin()
        event.record()
        results = prefilled(problem, arrays)
        finished = event.done
    stream.synchronize()
    assert not finished
    assert_same(results, expected)
    assert_prefilled(problem, results)


def test_prefill_chunk_by_chunk_through_a_paged_cache():
    """A prompt whose rows come in chunks, beside a fork that shares its beginning."""
    rng = np.random.default_rng(0)
    q, k, v = (cupy.asarray(rng.standard_normal((8, 700, 64)).astype(np.float16)) for _ in range(3))
    k, v = k[:2], v[:2]
    pages = cuflash.PagedCache(200, key_heads=2, page_size=16, head_dim=64, xp=cupy)
    first = pages.add(k[:, :300], v[:, :300])
    for id, end in ((first, 500), (first, 700), (pages.fork(first, 300), 700)):
        begin = int(pages.lengths([id])[0])
        rows = slice(begin, end)
        pages.append([id], k[None, :, rows], v[None, :, rows])
        out, lse = cuflash.forward(
            q[None, :, rows], pages.k, pages.v, **pages.tables([id]), causal=True, return_lse=True
        )
        given = {"causal": True, "rows": np.arange(begin, end)}
        testing.assert_attention_close((out[0], lse[0]), q, k, v, path="portable float16", **given)


@pytest.mark.parametrize("changes", [{}, SLOTS, HEADS], ids=["16 bits", "int8", "e4m3"])
@pytest.mark.parametrize("batch, key_heads, length", [(1, 8, 40_000), (64, 8, 1000), (3, 32, 5000)])
def test_decode_of_long_caches(batch, key_heads, length, changes):
    """Splits as the plan has them; lengths that differ."""
    lengths = tuple(int(n) for n in np.random.default_rng(0).integers(1, length, batch - 1)) + (length,)
    sizes = {"heads": 32, "key_heads": key_heads, "head_dim": 128, "value_dim": 128}
    problem = cache(lengths=lengths, dtype="bfloat16", **sizes, **changes)
    arrays = problem.arrays(cupy)
    results = decoded(problem, arrays)
    assert_same(results, decoded(problem, arrays))
    q, k, v, *scales = problem.values()
    for b in {0, batch - 1}:
        one = q[b : b + 1], k[b : b + 1], v[b : b + 1]
        own = {name: x[b : b + 1] if x.ndim > 1 else x for each in scales for name, x in each.items()}
        given = {"lengths": np.array(lengths[b : b + 1]), "kv_format": problem.kv_format} | own
        exact = bounds.decode(*one, path="portable bfloat16", **given)
        assert bounds.worst([x[b : b + 1] for x in results], exact) <= 1


@pytest.mark.parametrize("kind", ["contiguous", "pages"])
def test_prepared_decode_takes_other_arrays(kind):
    problem = cache(page_size=16 if kind == "pages" else None)
    for seed in range(3):
        other = replace(problem, seed=seed)
        before = len(_launch._calls)
        assert_decoded(other, decoded(other, other.arrays(cupy)))
        assert seed == 0 or len(_launch._calls) == before


# Head dims and what is not finite ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*SIXTEEN_BIT, "float32", "float64"])
@pytest.mark.parametrize("head_dim", [1, 3, 8, 33, 40, 64, 80, 96, 100, 128, 160, 192, 250, 256])
def test_head_dims(head_dim, dtype):
    for changes in ({}, {"causal": False}, {"window": (70, 20)}, {"value_dim": 72}, {"layout": "offset"}):
        layout = changes.get("layout", "contiguous")
        rest = {name: value for name, value in changes.items() if name != "layout"}
        problem = recipe(dtype, head_dim, layout, batch=(), heads=2, key_heads=1, queries=150, keys=280)
        problem = replace(problem, **rest)
        testing.check_bound(cuflash.forward, problem, cupy)


@pytest.mark.parametrize("dtype", [*SIXTEEN_BIT, "float32", "float64"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seed", [64, 100, 199])  # also the row whose hidden keys are spoilt
def test_careful_path(head_dim, dtype, seed):
    for mask in ({}, {"causal": "top-left"}, {"causal": False, "window": (30, 30)}, {"window": (0, None)}):
        sizes = {"batch": (), "heads": 2, "key_heads": 1, "keys": 200}
        problem = recipe(dtype, head_dim, seed=seed, planted=True, **sizes, **mask)
        testing.check_hidden_keys_may_hold_anything(cuflash.forward, problem, cupy)


@pytest.mark.parametrize("head_dim", [33, 64, 100, 128])
def test_tf32(head_dim):
    """Bounds of two parts on Hopper, of three elsewhere, and what hidden keys hold."""
    forward = partial(cuflash.forward, precision="tf32")
    for mask in ({}, {"causal": "top-left"}, {"causal": False, "window": (30, 30)}, {"layout": "offset"}):
        layout = mask.get("layout", "contiguous")
        rest = {name: value for name, value in mask.items() if name != "layout"}
        problem = recipe("float32", head_dim, layout, batch=(), heads=2, key_heads=1, seed=100, planted=True, **rest)
        engine = cuflash.explain("forward", *problem.arrays(cupy), precision="tf32").engine
        for check in (testing.check_bound, testing.check_hidden_keys_may_hold_anything):
            check(forward, problem, cupy, f"{engine} tf32")


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_one_visible_nan_among_many_rows(head_dim, dtype):
    problem = recipe(dtype, head_dim, batch=())
    q, k, v = problem.arrays()
    v[1, 150, 5], v[0, 290, 7] = np.nan, np.inf
    k[0, 299, 0] = np.nan
    arrays = [cupy.asarray(x) for x in (q, k, v)]
    testing.assert_attention_close(run(problem, arrays)[:2], *arrays, **problem.keywords)
