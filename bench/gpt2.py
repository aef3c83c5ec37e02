"""Train GPT-2 small in pure CuPy, twice side by side: with naive attention and with cuflash.

    python bench/gpt2.py                            # 12 layers, 12 heads, width 768, batches of 8 x 1,024 tokens
    python bench/gpt2.py --length 4096 --batch 2    # as many tokens in longer sequences
    python bench/gpt2.py --numpy                    # a small model in float32 on the CPU

Both models start from the same weights and see the same tokens, so their loss is the same but for rounding. They take
turns, some steps each, and a step is timed between CUDA events; the first one, which compiles, is not.

**The model** is GPT-2's: embeddings of tokens and positions; blocks of layer norm, causal attention, layer norm and an
MLP four times as wide with the tanh form of GELU; a last layer norm; and a product with the token embeddings, which
gives the logits. Each part returns its result and a pullback, which takes gradients back through it.

**The text** is what every machine has that runs this: the sources of Python's standard library. Tokens are its bytes;
embeddings have 50,304 rows all the same, for the last product is to cost what it costs in GPT-2 (whose 50,257 tokens
are usually padded to that).

**Mixed precision**: operands of products are float16 and their sums float32; weights, moments, the residual stream and
its gradient, means, norms and the loss are float32. A gradient of 1e-8 would be 0 in float16, so the loss is multiplied
by ``LOSS_SCALE``, a constant, and gradients are divided by it again in AdamW, in float32. A step whose gradients leave
float16 changes nothing, which is found out on the device, by their norm.

**Naive attention** stores weights of all heads in the dtype of products, changed in place from scores to weights, and
keeps them for the backward pass, where it stores one matrix more. No matrix of that size is transposed in memory.
"""

import argparse
import math
import statistics
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

import contenders
import gpu
import timing

import cuflash

SMALL = {"layers": 12, "heads": 12, "width": 768, "length": 1024, "vocabulary": 50304, "batch": 8, "warmup": 100,
         "dtype": "float16"}  # fmt: skip
TINY = {"layers": 2, "heads": 2, "width": 32, "length": 64, "vocabulary": 256, "batch": 2, "warmup": 10,
        "dtype": "float32"}  # fmt: skip

BYTES = 256  # tokens that occur
ROUNDS = 4
EPSILON = 1e-5
LOSS_SCALE = 2.0**12  # the largest elements of gradients are about 1, and float16 ends at 2^16
RATE = 6e-4  # of learning, after so many steps as `warmup` says; one that is too high makes losses jump, and part
DECAY, BETAS, ADAM_EPSILON, CLIP = 0.1, (0.9, 0.95), 1e-8, 1.0
APART = {"float16": 2e-2, "float32": 1e-5, "float64": 1e-10}  # what losses may differ by, after some tens of steps


# Attention ----------------------------------------------------------------------------------------------------------


def flash(q, k, v):
    """out, and a function that writes the gradients of q, k and v, given that of out."""
    out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
    return out, lambda dout, grads: cuflash.backward(dout, q, k, v, out, lse, causal=True, grads=grads)


def naive(q, k, v, bias=None):
    """The same, with weights of all heads in memory, and their gradients too in the backward pass."""
    weights = contenders.naive_weights(q, k, bias)
    out = weights @ v

    def pullback(dout, grads):
        dq, dk, dv = grads
        dscores = dout @ v.swapaxes(-2, -1)
        dscores -= (dout * out).sum(-1, keepdims=True)
        dscores *= weights
        dscores *= q.dtype.type(q.shape[-1] ** -0.5)
        dq[...] = dscores @ k
        # (A^T B)^T instead of B^T A: CuPy would copy a transposed B, which is the large one
        dk[...] = (q.swapaxes(-2, -1) @ dscores).swapaxes(-2, -1)
        dv[...] = (dout.swapaxes(-2, -1) @ weights).swapaxes(-2, -1)

    return out, pullback


class Naive:
    """`naive`, with a causal bias that is made once."""

    bias = None

    def __call__(self, q, k, v):
        if self.bias is None:
            self.bias = contenders.causal_bias(q)
        return naive(q, k, v, self.bias)


ATTENTION = {"naive": Naive, "cuflash": lambda: flash}


# The model ----------------------------------------------------------------------------------------------------------


def shapes(sizes):
    """Shapes of all weights by name; matrices, which AdamW lets decay, come first."""
    width, found = sizes.width, {"tokens": (sizes.vocabulary, sizes.width), "positions": (sizes.length, sizes.width)}
    dense = {"qkv": (width, 3 * width), "joined": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    found |= {f"{n}.{name}": shape for n in range(sizes.layers) for name, shape in dense.items()}
    found |= {f"{n}.{name} bias": shape[1:] for n in range(sizes.layers) for name, shape in dense.items()}
    norms = [f"{n}.{before}" for n in range(sizes.layers) for before in ("qkv", "up")]
    return found | {f"{norm} {part}": (width,) for norm in (*norms, "last") for part in ("gain", "offset")}


def views(flat, sizes):
    """A flat array cut into weights by name."""
    ends = np.cumsum([math.prod(shape) for shape in shapes(sizes).values()]).tolist()
    return {
        name: flat[end - math.prod(shape) : end].reshape(shape)
        for (name, shape), end in zip(shapes(sizes).items(), ends, strict=True)
    }


class Model:
    """GPT-2: weights, their gradients, and AdamW's moments, each in one flat array, so that a step is one kernel.

    ``master`` and ``weights`` are the same weights in float32 and in the dtype of products, ``slopes`` the gradients of
    `LOSS_SCALE` times the loss.
    """

    def __init__(self, sizes, xp, attention):
        self.sizes, self.xp, self.attention = sizes, xp, attention
        self.dtype = np.dtype(sizes.dtype)
        self.wide = np.promote_types(self.dtype, np.float32)
        self.run = operations(xp)
        size = sum(map(math.prod, shapes(sizes).values()))
        self.decaying = sum(math.prod(shape) for shape in shapes(sizes).values() if len(shape) == 2)
        flat = xp.random.default_rng(0).standard_normal(size, dtype=np.float32).astype(self.wide, copy=False)
        flat[: self.decaying] *= 0.02
        flat[self.decaying :] = 0
        self.master = views(flat, sizes)
        for name, weight in self.master.items():
            if name.endswith("gain"):
                weight[...] = 1
            if name.endswith((".joined", ".down")):  # the residual stream adds up that many
                weight *= (2 * sizes.layers) ** -0.5
        narrow = flat.astype(self.dtype, copy=False)
        self.weights = views(narrow, sizes)
        self.flat = SimpleNamespace(
            slopes=xp.zeros_like(narrow), weights=flat, first=xp.zeros_like(flat), second=xp.zeros_like(flat),
            narrow=narrow,
        )  # fmt: skip
        self.slopes = views(self.flat.slopes, sizes)
        self.ones = xp.ones((1, sizes.batch * sizes.length), self.dtype)
        self.columns = xp.arange(sizes.vocabulary, dtype=np.int32)
        self.steps, self.squares = 0, []

    def step(self, tokens):
        """The loss on sequences of tokens (batch, length + 1), before the weights are moved."""
        loss = self.loss(tokens)
        self.steps += 1
        # of scaled gradients; kept, for a sum that is not finite tells of a step that did nothing
        self.squares.append(self.run.squares(self.flat.slopes.reshape(-1, self.sizes.width)))
        rate = RATE * min(1, self.steps / self.sizes.warmup)
        self.run.adamw(self.flat, self.squares[-1], self.decaying, rate, self.steps)
        return loss

    def loss(self, tokens):
        """The loss; its gradients are in ``slopes`` afterwards."""
        ids, targets = tokens[:, :-1].ravel(), tokens[:, 1:].ravel()
        batch, length, pullbacks = len(tokens), tokens.shape[1] - 1, []
        x = self.master["tokens"][ids].reshape(batch, length, -1) + self.master["positions"][:length]
        x = x.reshape(len(ids), -1)
        for n in range(self.sizes.layers):
            for part in (self._attend, self._mlp):
                x, pullback = part(x, n, batch)
                pullbacks.append(pullback)
        loss, dx, narrow = self._head(x, targets)
        while pullbacks:
            pullbacks.pop()(dx, narrow)
        # each token's rows of dx are added up by a product, and so in the same order on every run
        self.slopes["tokens"][:BYTES] += (self.columns[:BYTES, None] == ids).astype(self.dtype) @ narrow
        self.slopes["positions"][:length] = dx.reshape(batch, length, -1).sum(0)
        return loss

    # Parts: a result and its pullback. That gets the gradient dx of the part's result and makes it that of its input x;
    # ``narrow`` is the same in the dtype of products.

    def _attend(self, x, n, batch):
        """x and what attention adds to it."""
        heads = (batch, -1, self.sizes.heads, self.sizes.width // self.sizes.heads)
        normed, norm_back = self._normed(x, f"{n}.qkv")
        qkv = normed @ self.weights[f"{n}.qkv"]
        qkv += self.weights[f"{n}.qkv bias"]
        out, attention_back = self.attention(*self._split(qkv, heads))
        joined = out.swapaxes(1, 2).reshape(x.shape)

        def pullback(dx, narrow):
            dout = self._dense_back(f"{n}.joined", joined, narrow).reshape(heads).swapaxes(1, 2)
            dqkv = self.xp.empty_like(qkv)
            attention_back(dout, self._split(dqkv, heads))
            norm_back(self._dense_back(f"{n}.qkv", normed, dqkv), dx, narrow)

        return self._added(x, joined, f"{n}.joined"), pullback

    def _mlp(self, x, n, batch):
        """x and what the MLP adds to it."""
        bias = self.weights[f"{n}.up bias"]
        normed, norm_back = self._normed(x, f"{n}.up")
        up = normed @ self.weights[f"{n}.up"]
        inner = self.run.gelu(up, bias)

        def pullback(dx, narrow):
            dup = self.run.gelu_back(up, bias, self._dense_back(f"{n}.down", inner, narrow))
            norm_back(self._dense_back(f"{n}.up", normed, dup), dx, narrow)

        return self._added(x, inner, f"{n}.down"), pullback

    def _head(self, x, targets):
        """The mean cross-entropy of x as guesses at targets, and the gradient of x, wide and narrow."""
        normed, norm_back = self._normed(x, "last")
        logits = normed @ self.weights["tokens"].T
        chosen = logits[self.xp.arange(len(targets)), targets].astype(self.wide)
        largest = logits.max(-1, keepdims=True)
        lse = self.xp.log(self.run.exponentials(logits, largest)) + largest  # in float32 by its first term
        loss = (lse[:, 0] - chosen).mean()
        self.run.entropy_back(lse, self.columns, targets[:, None], LOSS_SCALE / len(targets), logits)
        self.xp.matmul(logits.T, normed, out=self.slopes["tokens"])
        dx, narrow = self.xp.zeros_like(x), self.xp.empty_like(normed)
        norm_back(logits @ self.weights["tokens"], dx, narrow)
        return loss, dx, narrow

    def _normed(self, x, name):
        """Layer norm, in the dtype of products; its pullback adds to dx."""
        gain, offset = self.weights[f"{name} gain"], self.weights[f"{name} offset"]
        mean, factor = self.run.moments(x)

        def pullback(dy, dx, narrow):
            scaled = self.run.norm_back(x, mean, factor, gain, dy, dx, narrow)
            self._column_sums(scaled, f"{name} gain")
            self._column_sums(dy, f"{name} offset")

        return self.run.normed(x, mean, factor, gain, offset), pullback

    def _added(self, x, y, name):
        return self.run.added(x, y @ self.weights[name], self.weights[f"{name} bias"])

    def _dense_back(self, name, x, dy):
        """The gradient of x in ``x @ weight + bias``, and those of both on the way."""
        self.xp.matmul(x.T, dy, out=self.slopes[name])
        self._column_sums(dy, f"{name} bias")
        return dy @ self.weights[name].T

    def _column_sums(self, x, name):
        """Sums over all rows, as a product with ones: sums in float32, by tensor cores."""
        self.xp.matmul(self.ones[:, : len(x)], x, out=self.slopes[name][None])

    def _split(self, qkv, heads):
        """q, k and v (batch, heads, length, head_dim): views of packed rows."""
        packed = qkv.reshape(*heads[:2], 3, *heads[2:])
        return [packed[:, :, n].swapaxes(1, 2) for n in range(3)]


# Elementwise work: formulas in NumPy, a kernel each for CuPy --------------------------------------------------------


def operations(xp):
    """Functions of NumPy or CuPy arrays, by name: formulas in float32 or wider, results rounded once."""
    return SimpleNamespace(**(on_cpu() if xp is np else on_gpu(xp)))


GELU = math.sqrt(2 / math.pi), 0.044715  # x (1 + tanh(a (x + b x^3))) / 2


def on_cpu():
    """`operations` in NumPy; they also say what each kernel of `on_gpu` computes."""

    def moments(x):
        mean = x.mean(-1, keepdims=True)
        return mean, 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + EPSILON)

    def normed(x, mean, factor, gain, offset):
        return ((x - mean) * factor * gain + offset).astype(gain.dtype, copy=False)

    def norm_back(x, mean, factor, gain, dy, dx, narrow):
        """Adds to dx, whose rounded sum is ``narrow`` then; what the gradient of gain is the sum of."""
        hat, slope = (x - mean) * factor, dy * gain
        dx += factor * (slope - slope.mean(-1, keepdims=True) - hat * (slope * hat).mean(-1, keepdims=True))
        narrow[...] = dx
        return (dy * hat).astype(dy.dtype, copy=False)

    def added(x, y, bias):
        return x + y + bias

    def gelu(x, bias):
        x = x + bias
        return x * (1 + np.tanh(GELU[0] * (x + GELU[1] * x**3))) / 2

    def gelu_back(x, bias, dy):
        x = x + bias
        t = np.tanh(GELU[0] * (x + GELU[1] * x**3))
        return dy * ((1 + t) / 2 + x * (1 - t * t) / 2 * GELU[0] * (1 + 3 * GELU[1] * x * x))

    def exponentials(x, largest):
        return np.exp(x - largest).sum(-1, keepdims=True)

    def entropy_back(lse, columns, targets, factor, x):
        """In place."""
        x[...] = (np.exp(x - lse) - (columns == targets)) * factor

    def squares(x):
        return (x * x).sum()

    def adamw(flat, squares, decaying, rate, steps):
        norm = np.sqrt(squares) / LOSS_SCALE
        if not np.isfinite(norm):
            return
        slopes = flat.slopes * (min(1, CLIP / norm) / LOSS_SCALE)
        for moment, beta, term in ((flat.first, BETAS[0], slopes), (flat.second, BETAS[1], slopes**2)):
            moment += (1 - beta) * (term - moment)
        first, second = (moment / (1 - b**steps) for moment, b in zip((flat.first, flat.second), BETAS, strict=True))
        flat.weights[:decaying] *= 1 - rate * DECAY
        flat.weights -= rate * first / (np.sqrt(second) + ADAM_EPSILON)
        flat.narrow[...] = flat.weights

    return locals()


def on_gpu(cp):
    """`operations` in CuPy, for products in float16 (T); W is float32."""
    one_mean = cp.ReductionKernel("W x, float32 share", "float32 y", "x", "a + b", "y = a * share", "0", "one_mean")
    one_factor = cp.ReductionKernel(
        "W x, float32 mean, float32 share, float32 epsilon", "float32 y", "(x - mean) * (x - mean)", "a + b",
        "y = rsqrtf(a * share + epsilon)", "0", "one_factor",
    )  # fmt: skip
    normed = cp.ElementwiseKernel(
        "W x, float32 mean, float32 factor, T gain, T offset", "T y",
        "y = (T)((x - mean) * factor * (float)gain + (float)offset)", "normed",
    )  # fmt: skip
    slope_mean = cp.ReductionKernel(
        "T dy, T gain, float32 share", "float32 y", "(float)dy * (float)gain", "a + b", "y = a * share", "0",
        "slope_mean",
    )  # fmt: skip
    slope_along = cp.ReductionKernel(
        "T dy, T gain, W x, float32 mean, float32 factor, float32 share", "float32 y",
        "(float)dy * (float)gain * (x - mean) * factor", "a + b", "y = a * share", "0", "slope_along",
    )  # fmt: skip
    slopes = cp.ElementwiseKernel(
        "W x, float32 mean, float32 factor, T gain, T dy, float32 level, float32 along",
        "W dx, T narrow, T scaled",
        """
        float hat = (x - mean) * factor;
        dx += factor * ((float)dy * (float)gain - level - hat * along);
        narrow = (T)dx;
        scaled = (T)((float)dy * hat);
        """,
        "slopes",
    )
    added = cp.ElementwiseKernel("W x, T y, T bias", "W z", "z = x + (float)y + (float)bias", "added")
    steep, cubic = (f"{number!r}f" for number in GELU)
    tanh = f"float z = (float)x + (float)bias, t = tanhf({steep} * (z + {cubic} * z * z * z));"
    gelu = cp.ElementwiseKernel("T x, T bias", "T y", f"{tanh} y = (T)(z * (1 + t) / 2)", "gelu")
    gelu_back = cp.ElementwiseKernel(
        "T x, T bias, T dy", "T dx",
        f"{tanh} float bend = z * (1 - t * t) * {steep} * (1 + 3 * {cubic} * z * z);"
        "dx = (T)((float)dy * (1 + t + bend) / 2)",
        "gelu_back",
    )  # fmt: skip
    exponentials = cp.ReductionKernel(
        "T x, T largest", "float32 y", "expf((float)x - (float)largest)", "a + b", "y = a", "0", "exponentials"
    )
    entropy_back = cp.ElementwiseKernel(
        "float32 lse, int32 column, int32 target, float32 factor", "T x",
        "x = (T)((expf((float)x - lse) - (column == target)) * factor)", "entropy_back",
    )  # fmt: skip
    row_squares = cp.ReductionKernel("T x", "float32 y", "(float)x * (float)x", "a + b", "y = a", "0", "row_squares")
    first_beta, second_beta = (f"{1 - beta!r}f" for beta in BETAS)
    adam = cp.ElementwiseKernel(
        "T slope, float32 squares, int64 decaying, float32 rate, float32 growth, float32 spread, float32 scale",
        "W weight, W first, W second, T narrow",
        f"""
        float norm = sqrtf(squares) / scale;
        if (isfinite(norm)) {{
            float g = (float)slope / scale * fminf(1, {CLIP!r}f / norm);
            first += {first_beta} * (g - first);
            second += {second_beta} * (g * g - second);
            weight *= i < decaying ? 1 - rate * {DECAY!r}f : 1;
            weight -= rate * (first / growth) / (sqrtf(second / spread) + {ADAM_EPSILON!r}f);
            narrow = (T)weight;
        }}
        """,
        "adam",
    )

    def moments(x):
        mean = one_mean(x, 1 / x.shape[-1], axis=-1, keepdims=True)
        return mean, one_factor(x, mean, 1 / x.shape[-1], EPSILON, axis=-1, keepdims=True)

    def norm_back(x, mean, factor, gain, dy, dx, narrow):
        share, rows = 1 / x.shape[-1], {"axis": -1, "keepdims": True}
        level = slope_mean(dy, gain, share, **rows)
        along = slope_along(dy, gain, x, mean, factor, share, **rows)
        scaled = cp.empty_like(dy)
        slopes(x, mean, factor, gain, dy, level, along, dx, narrow, scaled)
        return scaled

    def squares(x):
        return row_squares(x, axis=-1, keepdims=True).sum()  # one sum of all would be the work of a single block

    def adamw(flat, squares, decaying, rate, steps):
        corrections = (1 - beta**steps for beta in BETAS)
        moved = flat.weights, flat.first, flat.second, flat.narrow
        adam(flat.slopes, squares, decaying, rate, *corrections, LOSS_SCALE, *moved)

    return {
        "moments": moments, "normed": normed, "norm_back": norm_back, "added": added, "gelu": gelu,
        "gelu_back": gelu_back, "exponentials": lambda x, largest: exponentials(x, largest, axis=-1, keepdims=True),
        "entropy_back": entropy_back, "squares": squares, "adamw": adamw,
    }  # fmt: skip


# Training -----------------------------------------------------------------------------------------------------------


@cache
def corpus(size):
    """So many bytes of the standard library's sources, file after file by name, its tests left out."""
    folder, text = Path(sysconfig.get_path("stdlib")), bytearray()
    for path in sorted(folder.rglob("*.py")):
        if not {"site-packages", "dist-packages", "test", "tests"} & {*path.relative_to(folder).parts}:
            text += path.read_bytes()
        if len(text) >= size:
            return np.frombuffer(bytes(text[:size]), np.uint8)
    raise FileNotFoundError(f"corpus: {folder} has {len(text):,} bytes of Python's sources; wanted {size:,}")


def batches(text, sizes, steps):
    """Sequences (steps, batch, length + 1) from anywhere in a text."""
    starts = np.random.default_rng(0).integers(len(text) - sizes.length, size=(steps, sizes.batch, 1))
    return text[starts + np.arange(sizes.length + 1)].astype(np.int32)


class Training:
    """A model on its way through batches."""

    def __init__(self, sizes, xp, name, tokens):
        self.model = Model(sizes, xp, ATTENTION[name]())
        self.tokens, self.losses = iter(tokens), []

    def step(self):
        """The loss on the next batch: an array, for which nobody waits."""
        self.losses.append(self.model.step(next(self.tokens)))
        return self.losses[-1]

    def results(self):
        """Loss of each step, and how many steps were left out since their gradients were not finite."""
        return [float(loss) for loss in self.losses], sum(not math.isfinite(x) for x in self.model.squares)


def compare(sizes, xp, names=tuple(ATTENTION), steps=20):
    """Train a model with each attention.

    Returns
    -------
    dict
        By name: ``losses``, one a step; ``skipped`` steps; ``rounds``, milliseconds of a step in each;
        ``extra_bytes``, the most that a step holds beside weights, gradients and moments.
    """
    text = corpus(max(1 << 20, 2 * sizes.length) if xp is np else 4 << 20)
    rounds = min(ROUNDS, steps - 1)
    launches = -(-(steps - 1) // rounds)
    tokens = xp.asarray(batches(text, sizes, 1 + rounds * launches))
    timer = timing.WallTimer() if xp is np else timing.EventTimer(cold=False)
    trainings, extra = {name: Training(sizes, xp, name, tokens) for name in names}, {}
    for name, training in trainings.items():
        extra[name], _ = timing.extra_bytes(training.step, xp.__name__)
    steps = {name: training.step for name, training in trainings.items()}
    taken = timing.interleave(timer, steps, rounds=rounds, launches=launches, warmup=0)
    found = {}
    for name, training in trainings.items():
        losses, skipped = training.results()
        found[name] = {"losses": losses, "skipped": skipped, "rounds": taken[name], "extra_bytes": extra[name]}
    return found


def apart(found):
    """Largest difference of the losses of two models at the same step; NaN where one is."""
    return float(np.max(np.abs(np.subtract(*(each["losses"] for each in found.values())))))


def parse(arguments):
    """Options, with the sizes of GPT-2 small or, on the CPU, tiny ones where none are given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numpy", action="store_true", help="a tiny model in float32 on the CPU")
    parser.add_argument("--attention", default="both", choices=(*ATTENTION, "both"))
    parser.add_argument("--steps", type=int, default=21, help="the first is not timed; rounded up to fill all rounds")
    for name, default in (TINY if "--numpy" in (sys.argv if arguments is None else arguments) else SMALL).items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error(f"--steps is {options.steps}; wanted 2 or more, for the first is not timed")
    if options.width % options.heads:
        parser.error(f"--width is {options.width}; wanted a multiple of --heads, {options.heads}")
    if options.vocabulary < BYTES:
        parser.error(f"--vocabulary is {options.vocabulary}; wanted {BYTES} or more, for tokens are bytes")
    allowed = ("float32", "float64") if options.numpy else ("float16",)
    if options.dtype not in allowed:
        parser.error(f"--dtype is {options.dtype}; wanted {' or '.join(allowed)}")
    return options


def main(arguments=None):
    """Train, print; 1 where the losses of the two are further apart than rounding explains, or one does not fall."""
    options = parse(arguments)
    xp = gpu.array_library("gpt2", options.numpy)
    size = sum(map(math.prod, shapes(options).values()))
    print(
        f"{size / 1e6:,.1f} million weights: {options.layers} layers, {options.heads} heads, width {options.width}, "
        f"vocabulary {options.vocabulary:,}; batches of {options.batch} x {options.length:,} tokens, "
        f"products in {options.dtype}, {xp.__name__}",
        flush=True,
    )
    names = tuple(ATTENTION) if options.attention == "both" else (options.attention,)
    found = compare(options, xp, names, options.steps)
    print("step", *(f"{name:>10}" for name in names))
    for step, losses in enumerate(zip(*(found[name]["losses"] for name in names), strict=True)):
        print(f"{step + 1:4}", *(f"{loss:10.5f}" for loss in losses))
    for name in names:
        ms = statistics.median(found[name]["rounds"])
        print(
            f"{name:8} {options.batch * options.length / ms * 1e3:12,.0f} tokens/s, {ms:9.2f} ms a step, "
            f"{found[name]['extra_bytes'] / 1e6:10,.1f} MB beside weights and moments, "
            f"{found[name]['skipped']} steps skipped"
        )
    good = all(each["losses"][-1] < each["losses"][0] for each in found.values())
    if len(found) == 2:
        far, limit = apart(found), APART[options.dtype]
        print(
            f"naive / cuflash {timing.ratio(found['cuflash']['rounds'], found['naive']['rounds']):.2f} in time; losses "
            f"at most {far:.1e} apart, {limit:.0e} is allowed"
        )
        good = good and far <= limit
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
