"""Serve many requests at once on a Llama-shaped stack of layers, with random weights: prefill by ``cuflash.forward``,
decode through ``cuflash.PagedCache``.

    python bench/serving.py                     # 32 layers, 32 heads on 8, head_dim 128, hidden 4,096, float16
    python bench/serving.py --share-weights     # every layer has the weights of the first: 1 GB of them, not 14
    python bench/serving.py --numpy             # a small stack in float32 on the CPU

Batching is continuous: requests of log-uniform prompt and output lengths wait in a queue; before each step as many are
admitted as the pages can hold to their end, and prefilled together, token after token without padding; then all that
run take a step of decode, each fed the likeliest token of the step before. Pages of a request that ends are the next
one's. The last request of the queue is checked: its last hidden state against that of a forward over all its tokens.

Times are those between CUDA events, so they contain what a GPU waits for Python: CuPy refuses to capture cuBLAS into a
graph, and a step of few sequences takes the host longer than the GPU.
"""

import argparse
import collections
import contextlib
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

import gpu

import cuflash
from cuflash._dtypes import ELEMENTS

LLAMA = {
    "layers": 32, "heads": 32, "key_heads": 8, "head_dim": 128, "hidden": 4096, "mlp": 14336, "vocabulary": 32000,
    "pages": 8192, "page_size": 16, "requests": 128, "batch": 64, "prompt": (128, 4096), "output": (32, 512),
    "prefill": 16384, "dtype": "float16",
}  # fmt: skip
SMALL = {
    "layers": 3, "heads": 4, "key_heads": 2, "head_dim": 16, "hidden": 64, "mlp": 128, "vocabulary": 256,
    "pages": 32, "page_size": 4, "requests": 16, "batch": 6, "prompt": (4, 40), "output": (2, 16),
    "prefill": 64, "dtype": "float32",
}  # fmt: skip

EPSILON = 1e-5
ROTARY_BASE = 10000.0
LOOKED_AT = 8  # attention is timed in every eighth step of decode, since 64 events a step are not free


# The model ----------------------------------------------------------------------------------------------------------


class Stack:
    """Layers of attention and of a gated MLP around a residual stream, from tokens to hidden states.

    It works on packed rows, one a token, of whatever sequences; only attention must know which rows belong together,
    and is handed in.
    """

    def __init__(self, sizes, xp, dtype, share_weights=False):
        self.sizes, self.xp, self.dtype = sizes, xp, dtype
        self.operations = operations(xp)
        self.random = xp.random.default_rng(0)
        wide = sizes.heads * sizes.head_dim
        rows = wide + 2 * sizes.key_heads * sizes.head_dim
        self.embedding = self._normal(sizes.vocabulary, sizes.hidden, deviation=1)
        self.head = self._normal(sizes.hidden, sizes.vocabulary)
        self.norm = xp.ones(sizes.hidden, dtype)
        self.layers = []
        for n in range(sizes.layers):
            if n and share_weights:
                self.layers.append(self.layers[0])
                continue
            self.layers.append(
                SimpleNamespace(
                    norms=xp.ones((2, sizes.hidden), dtype),
                    qkv=self._normal(sizes.hidden, rows),
                    joined=self._normal(wide, sizes.hidden),
                    gate_up=self._normal(sizes.hidden, 2 * sizes.mlp),
                    down=self._normal(sizes.mlp, sizes.hidden),
                )
            )
        angles = np.outer(
            np.arange(sizes.prompt[1] + sizes.output[1]),
            ROTARY_BASE ** -(np.arange(0, sizes.head_dim, 2) / sizes.head_dim),
        )
        self.cos, self.sin = (xp.asarray(f(angles)[:, None], np.float32) for f in (np.cos, np.sin))

    def _normal(self, rows, columns, deviation=None):
        """Random numbers; by default a matrix that keeps the size of the rows it is multiplied with."""
        numbers = self.random.standard_normal((rows, columns), dtype=np.float32)
        numbers *= rows**-0.5 if deviation is None else deviation
        return numbers.astype(self.dtype)

    def _product(self, x, matrix):
        return (x @ matrix).astype(self.dtype, copy=False)  # NumPy's of bfloat16 are float32

    @property
    def weight_bytes(self):
        """What a step reads of weights, shared or not: those of one layer alone are several times an L2 cache."""
        return self.head.nbytes + sum(w.nbytes for layer in self.layers for w in vars(layer).values())

    def __call__(self, tokens, positions, attend):
        """Hidden states (rows, hidden) of tokens; ``attend(layer, q, k, v)`` of (rows, heads, head_dim) arrays."""
        sizes, run = self.sizes, self.operations
        x = self.embedding[tokens]
        cos, sin = self.cos[positions], self.sin[positions]
        for n, layer in enumerate(self.layers):
            qkv = self._product(run.normed(x, layer.norms[0]), layer.qkv)
            qkv = qkv.reshape(len(x), sizes.heads + 2 * sizes.key_heads, sizes.head_dim)
            run.rotate(qkv[:, : -sizes.key_heads], cos, sin)
            q, k, v = qkv[:, : sizes.heads], qkv[:, sizes.heads : -sizes.key_heads], qkv[:, -sizes.key_heads :]
            x += self._product(attend(n, q, k, v).reshape(len(x), -1), layer.joined)
            inner = self._product(run.normed(x, layer.norms[1]), layer.gate_up)
            x += self._product(run.gated(inner), layer.down)
        return run.normed(x, self.norm)

    def likeliest(self, hidden):
        """The token that each row of hidden states calls for."""
        return self._product(hidden, self.head).argmax(axis=-1)


def operations(xp):
    """RMSNorm, rotary embedding and the gate of the MLP, in float32 and rounded once; for CuPy a launch or two each."""
    if xp is np:

        def normed(x, weight):
            wide = x.astype(np.float32)
            return (wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + EPSILON) * weight).astype(x.dtype)

        def rotate(x, cos, sin):
            a, b = (half.astype(np.float32) for half in np.split(x, 2, axis=-1))
            x[...] = np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

        def gated(x):
            gate, up = (half.astype(np.float32) for half in np.split(x, 2, axis=-1))
            return (gate / (1 + np.exp(-gate)) * up).astype(x.dtype)

        return SimpleNamespace(normed=normed, rotate=rotate, gated=gated)

    factor = xp.ReductionKernel(
        "T x, float32 share, float32 epsilon", "float32 y", "(float)x * (float)x", "a + b",
        "y = rsqrtf(a * share + epsilon)", "0", "factor", reduce_type="float",
    )  # fmt: skip
    scaled = xp.ElementwiseKernel(
        "T x, float32 factor, T weight", "T y", "y = (T)((float)x * factor * (float)weight)", "scaled"
    )
    turned = xp.ElementwiseKernel(
        "float32 cos, float32 sin", "T a, T b",
        "float x = (float)a, y = (float)b; a = (T)(x * cos - y * sin); b = (T)(x * sin + y * cos)", "turned",
    )  # fmt: skip
    silu = xp.ElementwiseKernel(
        "T gate, T up", "T y", "float g = (float)gate; y = (T)(g / (1 + expf(-g)) * (float)up)", "silu"
    )

    def normed(x, weight):
        return scaled(x, factor(x, 1 / x.shape[-1], EPSILON, axis=-1, keepdims=True), weight)

    def rotate(x, cos, sin):
        half = x.shape[-1] // 2
        turned(cos, sin, x[..., :half], x[..., half:])

    def gated(x):
        half = x.shape[-1] // 2
        return silu(x[:, :half], x[:, half:])

    return SimpleNamespace(normed=normed, rotate=rotate, gated=gated)


# Serving ------------------------------------------------------------------------------------------------------------


@dataclass
class Request:
    """A prompt, and how many tokens are wanted: the first by prefill, each other by a step of decode."""

    prompt: np.ndarray
    output: int
    steps: int = 0  # of decode, so far
    id: int = -1  # its sequence in the cache
    fed: list = field(default_factory=list)  # of the request that is checked: the tokens that decode was fed
    hidden: object = None  # and its last hidden state

    @property
    def length(self):
        """Keys in the cache, once its prompt is."""
        return len(self.prompt) + self.steps

    @property
    def rows(self):
        """Keys in the cache at its end: the last token is fed to nobody."""
        return len(self.prompt) + self.output - 1


def draw_requests(sizes):
    """Requests of log-uniform lengths."""
    random = np.random.default_rng(1)

    def lengths(low, high):
        return np.exp(random.uniform(np.log(low), np.log(high + 1), sizes.requests)).astype(int)

    pairs = zip(lengths(*sizes.prompt), lengths(*sizes.output), strict=True)
    return [Request(random.integers(sizes.vocabulary, size=prompt), int(output)) for prompt, output in pairs]


class Clock:
    """Seconds of named spans of work: between CUDA events, or on the CPU by the wall."""

    def __init__(self, xp):
        self.xp, self.spans = xp, collections.defaultdict(list)

    def _mark(self):
        if self.xp is np:
            return time.perf_counter()
        event = self.xp.cuda.Event()
        event.record()
        return event

    @contextlib.contextmanager
    def span(self, name):
        """Count what runs inside under a name."""
        begin = self._mark()
        yield
        self.spans[name].append((begin, self._mark()))

    def seconds(self, name):
        """Of each span, in order."""
        if self.xp is np:
            return [end - begin for begin, end in self.spans[name]]
        self.xp.cuda.get_current_stream().synchronize()
        return [self.xp.cuda.get_elapsed_time(*span) / 1e3 for span in self.spans[name]]


class Server:
    """Requests that wait, requests that run, and the cache that these share."""

    def __init__(self, stack, requests, checked=None):
        self.stack, self.sizes, self.xp = stack, stack.sizes, stack.xp
        self.waiting, self.running, self.checked = collections.deque(requests), [], checked
        self.tokens = self.xp.empty(0, int)  # what each running request is fed next
        self.clock = Clock(self.xp)
        self.prefilled = self.decoded = 0  # tokens
        self.keys_read = []  # of each step of decode, all its sequences together
        sizes = self.sizes
        self.cache = cuflash.PagedCache(
            sizes.pages, sizes.key_heads, sizes.page_size, sizes.head_dim, layers=sizes.layers, dtype=stack.dtype,
            xp=self.xp,
        )  # fmt: skip

    def run(self):
        """Serve until nobody waits."""
        while self.waiting or self.running:
            if new := self.admit():
                with self.clock.span("prefill"):
                    self.prefill(new)
                self.retire()
            if self.running:
                with self.clock.span("decode"):
                    self.decode(watched=len(self.keys_read) % LOOKED_AT == 0)
                self.retire()
        return self

    def admit(self):
        """Requests from the head of the queue, each with pages for all its rows, so that none runs out on its way."""
        new, rows = [], 0
        while self.waiting and len(self.running) + len(new) < self.sizes.batch:
            request = self.waiting[0]
            rows += len(request.prompt)
            if new and rows > self.sizes.prefill:
                break
            request.id = self.cache.add()
            try:
                self.cache.reserve(request.id, request.rows)
            except MemoryError:
                self.cache.free(request.id)
                break
            new.append(self.waiting.popleft())
        return new

    def prefill(self, new):
        """Run prompts, packed, and fill the cache with their keys and values."""
        lengths = [len(request.prompt) for request in new]
        self.cache.advance([request.id for request in new], lengths)
        spans = spans_of(lengths)

        def attend(layer, q, k, v):
            for request, span in zip(new, spans, strict=True):
                rows = (x[None, span].swapaxes(1, 2) for x in (k, v))
                self.cache.write(request.id, *rows, layer=layer)
            return attend_packed(spans, q, k, v)

        hidden = self.stack(
            self.xp.asarray(np.concatenate([request.prompt for request in new])),
            self.xp.asarray(np.concatenate([np.arange(length) for length in lengths])),
            attend,
        )
        last = self.xp.asarray([span.stop - 1 for span in spans])
        self.running += new
        self.tokens = self.xp.concatenate([self.tokens, self.stack.likeliest(hidden[last])])
        self.prefilled += sum(lengths)

    def decode(self, watched):
        """Run the next token of every running request."""
        ids = [request.id for request in self.running]
        tables = self.cache.tables(ids)  # before the step, with pages for its rows

        def attend(layer, q, k, v):
            with self.clock.span("attention") if watched else contextlib.nullcontext():
                new = {"k_new": k[:, :, None], "v_new": v[:, :, None]}
                return cuflash.decode(q[:, :, None], self.cache.k[layer], self.cache.v[layer], **tables, **new)

        with self.clock.span("watched") if watched else contextlib.nullcontext():
            hidden = self.stack(self.tokens, tables["lengths"], attend)
            fed, self.tokens = self.tokens, self.stack.likeliest(hidden)
        self.cache.advance(ids, 1)
        for row, request in enumerate(self.running):
            request.steps += 1
            if request is self.checked:
                request.fed.append(fed[row : row + 1])
                request.hidden = hidden[row]
        self.decoded += len(ids)
        self.keys_read.append(sum(request.length for request in self.running))

    def retire(self):
        """Let go of requests that have all their tokens."""
        kept = [row for row, request in enumerate(self.running) if request.length < request.rows]
        if len(kept) < len(self.running):
            self.cache.free([request.id for request in self.running if request.length == request.rows])
            self.running = [self.running[row] for row in kept]
            self.tokens = self.tokens[self.xp.asarray(kept, int)]


def spans_of(lengths):
    """Where sequences lie that follow one another: a slice each."""
    ends = np.cumsum(lengths).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def attend_packed(spans, q, k, v):
    """Causal attention of packed sequences, each by itself; arrays (rows, heads, head_dim), of which it takes views."""
    joined = q.copy()  # an array of q's shape, in C order
    for span in spans:
        one = (x[span].swapaxes(0, 1) for x in (q, k, v))
        cuflash.forward(*one, causal=True, out=joined[span].swapaxes(0, 1))
    return joined


# What is measured and checked ---------------------------------------------------------------------------------------


def distance_from_forward(stack, request):
    """How far a request's last hidden state is from that of a forward over all its tokens, relative to its size."""
    xp = stack.xp
    tokens = xp.concatenate([xp.asarray(request.prompt), *request.fed])
    attend = lambda layer, q, k, v: attend_packed([slice(0, len(tokens))], q, k, v)  # noqa: E731
    wanted, found = (
        np.float64(x.get() if hasattr(x, "get") else x)
        for x in (stack(tokens, xp.arange(len(tokens)), attend)[-1], request.hidden)
    )
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def largest_distance(stack):
    """How far these may be apart: both are rounded some ten times a layer, each time in a direction of its own."""
    unit = float(ml_dtypes.finfo(stack.dtype).eps) / 2
    return 4 * (10 * stack.sizes.layers) ** 0.5 * unit


def copy_bandwidth(xp):
    """Bytes a second that a copy reads and writes."""
    source = xp.ones(2**30 if xp is not np else 2**27, np.uint8)
    target, clock = xp.empty_like(source), Clock(xp)
    for _ in range(6):
        with clock.span("copy"):
            xp.copyto(target, source)
    return 2 * source.nbytes / statistics.median(clock.seconds("copy")[1:])


def report(server, requests, bandwidth, measured):
    """Lines that say what a server did, and how fast."""
    prefill, decode, attention, watched = (
        sum(server.clock.seconds(name)) for name in ("prefill", "decode", "attention", "watched")
    )
    steps, sizes = len(server.keys_read), server.sizes
    prompts, outputs = ([f(request) for request in requests] for f in (lambda r: len(r.prompt), lambda r: r.output))
    row = 2 * sizes.layers * sizes.key_heads * sizes.head_dim * server.stack.dtype.itemsize
    weights, keys = steps * server.stack.weight_bytes, row * sum(server.keys_read)
    yield (
        f"{len(requests)} requests, prompts of {min(prompts)} to {max(prompts)}, outputs of {min(outputs)} to "
        f"{max(outputs)} tokens; {sizes.pages} pages of {sizes.page_size} keys, at most {sizes.batch} requests at once"
    )
    yield (
        f"prefill  {server.prefilled / prefill:10,.0f} tokens/s: {server.prefilled} in "
        f"{len(server.clock.spans['prefill'])} batches, {prefill:.3f} s"
    )
    yield (
        f"decode   {server.decoded / decode:10,.0f} tokens/s: {server.decoded} in {steps} steps of "
        f"{server.decoded / steps:.1f} sequences, {decode / steps * 1e3:.2f} ms each"
    )
    yield f"attention {attention / watched:9.1%} of a step of decode, with its rows' way into the cache"
    yield (
        f"roofline {(weights + keys) / decode / bandwidth:10.1%} of the memory's rate in steps of decode: "
        f"{(weights + keys) / steps / 1e9:.3g} GB of weights and cache ({keys / (weights + keys):.1%} cache) each, "
        f"{bandwidth / 1e9:,.0f} GB/s {'measured by a copy' if measured else 'as given'}"
    )


def parse(arguments):
    """Options, with the sizes of Llama or, on the CPU, small ones where none are given."""
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n\n")[0].split()))
    parser.add_argument("--numpy", action="store_true", help="a small stack in float32 on the CPU")
    sizes = SMALL if "--numpy" in (sys.argv if arguments is None else arguments) else LLAMA
    for name, default in sizes.items():
        kind = type(default) if not isinstance(default, tuple) else lambda text: tuple(map(int, text.split("-")))
        shown = "-".join(map(str, default)) if isinstance(default, tuple) else default
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=f"default: {shown}")
    parser.add_argument("--share-weights", action="store_true", help="the weights of the first layer for all layers")
    parser.add_argument("--bandwidth", type=float, help="GB/s of the memory; default: those of a copy")
    options = parser.parse_args(arguments)
    longest = options.prompt[1] + options.output[1] - 1
    if longest > options.pages * options.page_size:
        parser.error(f"--pages hold {options.pages * options.page_size} keys, the longest request may have {longest}")
    if options.output[0] < 2:
        parser.error("--output begins below 2: the first token is prefill's, and decode is to have one")
    return options


def main(arguments=None):
    """Serve, print, check; 1 where the checked request is too far from what it should be."""
    options = parse(arguments)
    xp = gpu.array_library("serving", options.numpy)
    stack = Stack(options, xp, ELEMENTS[options.dtype].dtype, options.share_weights)
    print(
        f"{options.layers} layers{', all with the weights of the first' if options.share_weights else ''}, "
        f"{options.heads}/{options.key_heads} heads of {options.head_dim}, hidden {options.hidden}, MLP {options.mlp}, "
        f"vocabulary {options.vocabulary}, random weights, {options.dtype}, {xp.__name__}"
    )
    requests = draw_requests(options)
    Server(stack, [Request(request.prompt[:64], 3) for request in requests[:2]]).run()  # compiles
    server = Server(stack, requests, checked=requests[-1]).run()
    bandwidth = copy_bandwidth(xp) if options.bandwidth is None else options.bandwidth * 1e9
    for line in report(server, requests, bandwidth, options.bandwidth is None):
        print(line)
    apart, limit = distance_from_forward(stack, requests[-1]), largest_distance(stack)
    print(
        f"last hidden state of the last request, at token {requests[-1].length}, {apart:.1e} from a forward over all "
        f"its tokens; {limit:.1e} is allowed"
    )
    return int(not apart <= limit)


if __name__ == "__main__":
    sys.exit(main())
