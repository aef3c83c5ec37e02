"""Time decode beside its contenders, by the bytes of keys and values that are read a second.

    python bench/run.py decode                                   # bfloat16, 32 heads, head_dim 128
    python bench/run.py decode --cells 1x8192,64x1024 --key-heads 8 --page-size 16 --splits 4
    python bench/run.py decode --cells 1x65536,8x65536 --kv-format none,int8,e4m3 --scales slot     # 8-bit caches
    python bench/run.py decode --append --contenders ''          # beside it, calls that append and rotate too
    python bench/run.py decode --latent --heads 16 --cells 32x8192 --contenders ''    # values that are columns of keys
    python bench/run.py decode --cells 64x65536 --key-heads 8 --shortest 100 --contenders fa3,flashinfer    # ragged

A figure is one CUDA graph of several calls, one behind the other, over caches that take turns: at least 8 calls, and as
many as read 256 MB, so that none finds its cache in L2. Their time is divided by their number. Contenders are captured
and timed in the same way. Caches that are full and in one piece go without lengths, which torch's functions do not take
either. Beside sequences that differ in length, ``read`` is a kernel that reads as many bytes and does nothing with
them: its ratio is the share of the memory's rate that is reached.
"""

import dataclasses
import functools
import math

import contenders
import gpu
import numpy as np
import record
import timing

import cuflash
from cuflash._dtypes import ELEMENTS, FORMATS, KINDS

FEWEST_CALLS = 8
LATENT_DIMS = 576, 512  # of DeepSeek's models
CELLS = "1x1024,1x8192,8x1024,8x8192,64x1024,64x8192,1x65536,1x131072,8x65536"
CHECKED = 3  # (sequence, head) pairs
OWN = "read", "append"  # what is timed beside a case that is no contender


def cells(options):
    """The cases the options ask for."""
    for dtype in options.dtype:
        for key_heads in options.key_heads:
            for batch, length in options.cells:
                for page_size in options.page_size:
                    for kv_format in options.kv_format:
                        head_dim, value_dim = LATENT_DIMS if options.latent else (options.decode_dim,) * 2
                        yield record.Case(
                            what="decode", engine="portable", dtype=dtype, head_dim=head_dim,
                            value_dim=value_dim, mask="causal", queries=options.queries, length=length,
                            batch=batch, heads=options.heads, key_heads=key_heads, page_size=page_size or None,
                            splits=options.splits, graph=True, kv_format=None if kv_format == "none" else kv_format,
                            shortest=options.shortest,
                        )  # fmt: skip


def is_latent(case):
    """Whether its values are the first columns of its keys."""
    return (case.head_dim, case.value_dim) == LATENT_DIMS


def lengths_of(case):
    """Keys of each sequence."""
    if case.shortest is None:
        return np.full(case.batch, case.length, np.int32)
    drawn = np.random.default_rng(64).uniform(math.log(case.shortest), math.log(case.length), case.batch)
    return np.exp(drawn).astype(np.int32)


def flops(case):
    """Floating-point operations of all sequences, each as long as it is."""
    return sum(dataclasses.replace(case, batch=1, length=int(length)).flops for length in lengths_of(case))


def cache_bytes(case, scales=None):
    """Bytes of keys and values, and of their scales, that a call reads."""
    size = KINDS[case.kv_format or case.dtype].itemsize
    columns = case.head_dim + (0 if is_latent(case) else case.value_dim)
    slot = columns * size + (8 if case.kv_format and scales == "slot" else 0)
    return int(lengths_of(case).sum()) * case.key_heads * slot


class Caches:
    """Queries and caches that take turns, random normal numbers, on the GPU.

    ``tables`` say where keys lie, ``told`` is what a call of ours is given of them, and ``append`` what makes it write
    its last keys first and rotate them and q, so that it reads as many.
    """

    def __init__(self, case, scales=None):
        import cupy

        self.case, self.dtype, self.scales = case, ELEMENTS[case.dtype].dtype, scales
        read = cache_bytes(case, scales)
        self.calls = max(FEWEST_CALLS, math.ceil(timing.SWEPT_BYTES / read))
        count = min(self.calls, math.ceil(2 * timing.SWEPT_BYTES / read))
        random = cupy.random.default_rng(2205)
        size = case.page_size or case.length
        pages = case.batch * -(-case.length // size)
        shape = pages, case.key_heads, size, case.head_dim
        self.q = self._normal(random, (case.batch, case.heads, case.queries, case.head_dim))
        self.pairs = [self._pair(random, shape) for _ in range(count)]
        self.tables = {"lengths": cupy.asarray(lengths_of(case))}
        rows = case.batch, case.key_heads, case.queries
        angles = cupy.arange(case.length)[:, None] * 1e4 ** -(cupy.arange(case.head_dim // 2) / (case.head_dim // 2))
        self.append = {
            "lengths": self.tables["lengths"] - case.queries,
            "k_new": self._normal(random, (*rows, case.head_dim)),
            "v_new": self._normal(random, (*rows, case.value_dim)),
            "rotary": tuple(f(angles).astype(np.float32) for f in (cupy.cos, cupy.sin)),
        }
        if case.page_size:
            order = np.random.default_rng(7).permutation(pages).reshape(case.batch, -1)
            self.tables["page_table"] = cupy.asarray(order.astype(np.int32))
        self.told = self.tables if case.page_size or case.shortest else {}

    def _normal(self, random, shape):
        import cupy

        array = cupy.empty(shape, self.dtype)
        flat = array.reshape(-1)
        for start in range(0, flat.size, 2**26):
            part = flat[start : start + 2**26]
            part[...] = random.standard_normal(part.size, dtype=np.float32).astype(self.dtype)
        return array

    def _pair(self, random, shape):
        """Keys and values, each with their scales."""
        keys = self._cache(random, shape)
        if is_latent(self.case):
            return keys, (keys[0][..., : self.case.value_dim], None)
        return keys, self._cache(random, shape)

    def _cache(self, random, shape):
        """A cache and its scales."""
        import cupy

        kv_format = self.case.kv_format
        if kv_format is None:
            return self._normal(random, shape), None
        slots = self.scales == "slot"
        elements = cupy.empty(shape, FORMATS[kv_format].dtype)
        scales = cupy.empty(shape[:3] if slots else shape[1:2], np.float32)
        step = max(1, 2**26 // math.prod(shape[1:]))
        for start in range(0, shape[0], step):  # of a head the last part's scale serves all, which are alike
            part = random.standard_normal((min(step, shape[0] - start), *shape[1:]), dtype=np.float32)
            elements[start : start + step], found = cuflash.quantize(part, kv_format, axis=-1 if slots else (0, 2, 3))
            if slots:
                scales[start : start + step] = found
            else:
                scales = found
        return elements, scales

    def scales_of(self, pair):
        """Keywords that go with a pair of 8-bit caches."""
        if self.case.kv_format is None:
            return {}
        (_, k_scale), (_, v_scale) = pair
        return {"kv_format": self.case.kv_format, "k_scale": k_scale, "v_scale": v_scale}

    def turns(self):
        """The pair of each call."""
        return [self.pairs[n % len(self.pairs)] for n in range(self.calls)]

    def dense(self, b, head):
        """Keys and values of a sequence and a query head in the first pair, on the host, and their scales."""
        key_head, found, meant = head * self.case.key_heads // self.case.heads, [], {}

        def own(x):
            rows = x[self.tables["page_table"][b]] if self.case.page_size else x[b : b + 1]
            return contenders.to_host(rows[:, key_head].reshape(-1, *x.shape[3:])[: lengths_of(self.case)[b]])

        for name, (cache, scales) in zip(("k_scale", "v_scale"), self.pairs[0], strict=True):
            found.append(own(cache))
            if scales is not None:
                heads = slice(key_head, key_head + 1)
                meant[name] = own(scales)[None, None] if scales.ndim > 1 else contenders.to_host(scales)[heads]
        return found, meant | ({"kv_format": self.case.kv_format} if meant else {})


def error_over_bound(case, caches, out, append=False):
    """Worst error over bound of some heads of some sequences; NaN where out has one."""
    found = []
    for n in range(CHECKED):
        b, head = (case.batch - 1) * n // (CHECKED - 1), (case.heads - 1) * n // (CHECKED - 1)
        q = contenders.to_host(caches.q[b, head])
        dense, more = caches.dense(b, head)
        one = (x[None, None] for x in (q, *dense))
        if append:
            key_head, new = head * case.key_heads // case.heads, caches.append
            more |= {name: contenders.to_host(new[name][b, key_head])[None, None] for name in ("k_new", "v_new")}
            more["rotary"] = tuple(map(contenders.to_host, new["rotary"]))
            more["lengths"] = contenders.to_host(new["lengths"][b : b + 1])
        wanted = cuflash.bounds.decode(*one, path=gpu.path_of(case.dtype, case.engine), **more)
        found.append(gpu.over_bound(contenders.to_host(out[b, head]), wanted.out[0, 0], wanted.out_bound[0, 0]))
    return float(np.max(found))


READ = """
extern "C" __global__ void read(const uint4* from, size_t count, unsigned* to) {
    const size_t step = size_t(gridDim.x) * blockDim.x;
    size_t n = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    unsigned all = 0;
    for (; n + 7 * step < count; n += 8 * step) {
        uint4 x[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = __ldcs(from + n + i * step);
#pragma unroll
        for (int i = 0; i < 8; ++i) all |= x[i].x ^ x[i].y ^ x[i].z ^ x[i].w;
    }
    for (; n < count; n += step) all |= from[n].x ^ from[n].y ^ from[n].z ^ from[n].w;
    if (all == 0x5a5a5a5a) *to = all;  // for the compiler not to leave the loads out
}
"""


def plain_reads(caches):
    """A graph of as many launches as we have calls, each of which reads as many bytes, from where the caches lie."""
    import cupy

    read, stream = cupy.RawKernel(READ, "read"), cupy.cuda.Stream(non_blocking=True)
    threads, blocks = 256, 8 * cupy.cuda.Device().attributes["MultiProcessorCount"]
    to, wanted = cupy.zeros(1, np.uint32), cache_bytes(caches.case, caches.scales)

    def call(pair):
        left = wanted
        for cache, _ in pair:
            count = min(left, cache.nbytes) // 16
            read((blocks,), (threads,), (cache, np.uint64(count), to))
            left -= 16 * count

    cupy.cuda.get_current_stream().synchronize()
    with stream:
        call(caches.pairs[0])
        stream.begin_capture()
        for pair in caches.turns():
            call(pair)
        graph = stream.end_capture()
    stream.synchronize()
    return lambda: (graph, to) and graph.launch(cupy.cuda.get_current_stream())


def captured(caches, keywords):
    """A graph of our calls, as a function that launches it."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    out = cupy.empty((*caches.q.shape[:-1], caches.case.value_dim), caches.dtype)

    def call(pair):
        cuflash.decode(caches.q, *(cache for cache, _ in pair), out=out, **keywords, **caches.scales_of(pair))

    first = caches.pairs[0]
    plan = cuflash.explain("decode", caches.q, *(cache for cache, _ in first), **keywords, **caches.scales_of(first))
    sizes = [
        math.prod(buffer.shape) * (ELEMENTS[buffer.dtype].itemsize if buffer.dtype in ELEMENTS else 4)
        for buffer in plan.buffers
        if buffer.name in ("totals", "rotated", "parts")
    ]
    with stream:
        call(caches.pairs[0])
        held = [cupy.empty(size, np.uint8) for size in sizes * caches.calls]  # the pool has them for the graph
        del held
        stream.begin_capture()
        for pair in caches.turns():
            call(pair)
        graph = stream.end_capture()
    stream.synchronize()
    return lambda: (graph, out) and graph.launch(cupy.cuda.get_current_stream())


def captured_torch(caches, contender):
    """The same of a contender by torch, and its answer for the first pair."""
    if is_latent(caches.case):
        raise contenders.Unfit("values of their own only")
    call = contender.prepare_decode(caches.case, caches.q, caches.tables)  # or says why not
    pairs = [[contenders.to_torch(x) for x, _ in pair] for pair in caches.turns()]
    import torch

    torch.cuda.synchronize()
    with contender.scope():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for pair in pairs[:2]:
                call(*pair)
            answer = call(*pairs[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for pair in pairs:
                call(*pair)
    return graph.replay, answer


def measure(case, options, rivals):
    """Check and time a case: its row. Raises ArithmeticError where our answer is outside the bound."""
    import cupy

    caches = Caches(case, options.scales)
    keywords = {"engine": case.engine, "splits": options.splits, "batch_invariant": options.batch_invariant}
    keywords |= caches.told
    first = [caches.q, *(cache for cache, _ in caches.pairs[0])], caches.scales_of(caches.pairs[0])
    out = cuflash.decode(*first[0], **keywords, **first[1])
    error = error_over_bound(case, caches, out)
    if not error <= 1:
        raise ArithmeticError(f"error over bound is {error}")
    plan = cuflash.explain("decode", *first[0], **keywords, **first[1])
    calls = {"ours": captured(caches, keywords)}
    for name, contender in rivals.items():
        try:
            calls[name], theirs = captured_torch(caches, contender)
            ours, theirs = (contenders.to_host(x).astype(np.float64) for x in (out, theirs))
            far = np.linalg.norm(theirs - ours) / np.linalg.norm(ours)
            if not far <= contenders.LOOSE[case.dtype]:
                del calls[name]
                raise contenders.Unfit(f"its answer is {far:.3g} from ours")
        except Exception as error_theirs:
            contenders.left_out(name, error_theirs)
    if case.shortest is not None:
        calls["read"] = plain_reads(caches)
    append = options.append and case.kv_format is None and not is_latent(case)
    if append:  # last, since it writes to the caches
        appended = cuflash.decode(*first[0], **keywords | caches.append)
        error = float(np.max([error, error_over_bound(case, caches, appended, append=True)]))  # NaN wins
        if not error <= 1:
            raise ArithmeticError(f"error over bound is {error} where it appends")
        calls["append"] = captured(caches, keywords | caches.append)
    rounds = timing.interleave(
        timing.EventTimer(cold=False), calls, rounds=options.rounds, launches=max(options.launches // 4, 2)
    )
    eager = functools.partial(cuflash.decode, *first[0], **keywords, **first[1])
    host = timing.case_host_us(eager, cupy.cuda.get_current_stream().synchronize)
    count = caches.calls
    rounds = {name: [ms / count for ms in each] for name, each in rounds.items()}
    figures = timing.figures(rounds, rivals, options.rival)
    own = timing.figures(rounds, [name for name in OWN if name in calls], None)
    figures |= {what: own[what] | figures[what] for what in ("contenders", "ratios")}
    del calls, caches, first, eager
    cupy.get_default_memory_pool().free_all_blocks()
    return record.case_row(
        case,
        **figures,
        variant=plan.variant.name,
        gbps=cache_bytes(case, options.scales) / figures["ms"] / 1e6,
        tflops=flops(case) / figures["ms"] / 1e9,
        error_over_bound=error,
        host_us={"ours": host},
        calls=count,
        most_splits=plan.steps[-1].args["splits"],
        batch_invariant=options.batch_invariant,
        scales=options.scales if case.kv_format else None,
    )


def line(row):
    """A row as one aligned line."""
    show = lambda ms: f"{ms * 1e3:9.1f} us"  # noqa: E731
    text = f"{row['variant']:<34} B{row['batch']:<3} H{row['heads']}/{row['key_heads']:<3} L{row['length']:<7}"
    text += f" page {row['page_size'] or '-':<5} splits {row['most_splits']:<4}"
    text += f" error/bound {row['error_over_bound']:.3f} {show(row['ms'])} ±{row['spread']:5.1%}"
    return text + f" {row['gbps']:6.0f} GB/s" + timing.host_text(row) + contenders.beside(row, show)
