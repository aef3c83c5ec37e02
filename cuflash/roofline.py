"""What attention costs, naive and flash, and how fast a device can be at it: a roofline in plain arithmetic.

A launch takes no less than its products need at the device's rate of products, and no less than its bytes need at its
memory's rate: the larger of the two is the roof that binds (Williams, Waterman and Patterson, *Roofline*, 2009).
Launches run one after the other, so that their times add up. Exponentials, masks and launching count as nothing: the
prediction is the least time, not one to expect. Float32 is multiplied as our kernels do it, and naive attention too.

**Products.** A pair of a row and a key takes ``2 D`` FLOPs in ``q k^T`` and ``2 Dv`` in ``p v``. Naive attention makes
them for all pairs, flash attention for those that the mask lets be seen (tiles on its edge are more work, not counted).
Gradients are four products for naive attention, which keeps the weights P from the forward pass: ``2 (2 D + 2 Dv)``
a pair. Flash attention makes the scores again, a fifth product: ``2 (3 D + 2 Dv)``.

**Bytes of naive attention** (Dao et al., *FlashAttention*, 2022, section 3): matrices of the scores' size go through
memory, each of ``batch heads queries keys`` elements, 4 times in forward and decode and 7 times in backward:

    forward, decode   S = q k^T: writes S            backward   dP = dout v^T: writes dP
                      P = softmax S: reads S,                   dv = P^T dout: reads P
                        writes P                                dS = P (dP - rows of P dP): reads P, dP, writes dS
                      out = P v: reads P                        dq = dS k, dk = dS^T q: reads dS, twice

They have the inputs' dtype. With ``float32_softmax`` products of 16 bits go with a softmax in float32, as models often
ask for: P is made in float32 and converted, dP converted before its softmax, which is 16 bytes instead of 8 a score in
forward, 24 instead of 14 in backward. Memory holds S and P, in backward P, dP and dS, and the converted ones beside.

**Bytes of flash attention** are counted twice. *Compulsory*: each array once, of k and v what any row sees. *Streamed*:
k and v once a tile of query rows (of a head; in decode of the heads that share them); in backward q, dout and the sum
of dq once a tile of keys. The L2 cache serves most of the difference, so the prediction takes compulsory bytes. Memory
holds inputs and results and, in backward, that sum and two numbers a row: it grows with the length, not its square.
(Partial results of decode's splits of keys, a few MB at most, are left out.)
"""

import math
import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property

from . import _masks
from ._dtypes import ELEMENTS
from ._problem import _causal, _window, whole

FUNCTIONS = ("forward", "backward", "decode")
TILE = 128  # rows of a tile of queries, of keys in backward
DECODE_TILE = 16  # rows of all heads of a group


@dataclass(frozen=True)
class Device:
    """Ceilings of a device.

    Attributes
    ----------
    name : str
    flops : dict
        FLOP/s of matrix products by the name of a dtype.
    bandwidth : float
        Bytes a second from and to memory.
    memory : float
        Bytes of it.
    source : str
        Where the figures are from.
    """

    name: str
    flops: dict
    bandwidth: float
    memory: float = math.inf
    source: str = "ceilings as given"

    def peak(self, dtype):
        """FLOP/s of products in a dtype."""
        if dtype not in self.flops:
            raise ValueError(f"roofline: device {self.name} has FLOP/s of {', '.join(self.flops)}; wanted {dtype} too")
        return self.flops[dtype]


def _nvidia(name, half, double, bandwidth, memory, source):
    """Dense rates, no sparsity, in TFLOP/s, TB/s and GB. A float32 product is six of bfloat16, as in our kernels."""
    flops = {"float16": half, "bfloat16": half, "float32": half / 6, "float64": double}
    flops = {dtype: rate * 1e12 for dtype, rate in flops.items()}
    return Device(name, flops, bandwidth * 1e12, memory * 1e9, f"NVIDIA's {source}, dense")


DEVICES = {
    "h100": _nvidia("H100 SXM", 989.4, 66.9, 3.35, 80, "H100 data sheet and Hopper white paper"),
    "h200": _nvidia("H200 SXM", 989.4, 66.9, 4.8, 141, "H200 data sheet"),
    "a100": _nvidia("A100 SXM 80 GB", 312, 19.5, 2.039, 80, "A100 data sheet"),
    "b200": _nvidia("B200 SXM", 2250, 37, 8, 180, "HGX B200 data sheet, for one of its eight GPUs"),
    "rtx4090": _nvidia("RTX 4090", 165.2, 1.29, 1.008, 24, "Ada white paper, sums in float32, float64 by its FMAs"),
}


def named(gpu):
    """The device of `DEVICES` that the driver's name of a GPU means, or None: a variant may have other ceilings."""
    words = re.split(r"[^a-z0-9]+", gpu.lower().replace("rtx ", "rtx"))
    if {"pcie", "nvl", "laptop", "d"} & set(words) or "a100" in words and "40gb" in words:
        return None
    return next((device for name, device in DEVICES.items() if name in words), None)


@dataclass(frozen=True)
class Problem:
    """Sizes of a call. All are 1 or more; what is None takes the value it has by default in such a call.

    Attributes
    ----------
    function : {"forward", "backward", "decode"}
    keys : int
        Keys of a sequence.
    queries : int, optional
        Rows of a head: 1 in decode, else as many as keys.
    batch, heads : int
    key_heads : int, optional
        Heads of k and v, of which heads is a multiple: as many as heads.
    head_dim, value_dim : int
        Columns of q and k, and of v: as many.
    dtype : str
        Name of the elements' type.
    causal, window
        As in `cuflash.forward`.
    """

    function: str
    keys: int
    queries: int | None = None
    batch: int = 1
    heads: int = 1
    key_heads: int | None = None
    head_dim: int = 128
    value_dim: int | None = None
    dtype: str = "float16"
    causal: bool | str = False
    window: tuple | None = None

    def __post_init__(self):
        for name, known in (("function", FUNCTIONS), ("dtype", tuple(ELEMENTS))):
            if getattr(self, name) not in known:
                wanted = ", ".join(map(repr, known))
                raise ValueError(f"roofline: {name} is {getattr(self, name)!r}; wanted one of {wanted}")
        queries = 1 if self.function == "decode" else self.keys
        for name, default in (("queries", queries), ("key_heads", self.heads), ("value_dim", self.head_dim)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        for name in ("keys", "queries", "batch", "heads", "key_heads", "head_dim", "value_dim"):
            whole("roofline", name, getattr(self, name), 1)
        if self.heads % self.key_heads:
            raise ValueError(f"roofline: heads is {self.heads}; wanted a multiple of key_heads, {self.key_heads}")
        object.__setattr__(self, "causal", _causal("roofline", self.causal))
        object.__setattr__(self, "window", _window("roofline", self.window))

    @cached_property
    def mask(self):
        """Which keys a row sees."""
        return _masks.make(self.queries, self.keys, self.causal, self.window)

    @property
    def group(self):
        """Heads that share a head of k and v."""
        return self.heads // self.key_heads

    @property
    def scores(self):
        """Pairs of a row and a key, of all heads, seen or not."""
        return self.batch * self.heads * self.queries * self.keys

    @property
    def pairs(self):
        """Those that are seen: of a square causal mask ``L (L + 1) / 2``, which others count as half of L^2."""
        mask, rows, keys = self.mask, self.queries, self.keys
        seen = rows * keys if mask.name == "full" else _ramp(mask.end_shift, rows, keys)
        seen -= _ramp(mask.first_shift, rows, keys) if mask.name == "window" else 0
        return self.batch * self.heads * seen

    def run(self, begin, end):
        """Keys that any of the rows from begin to end sees."""
        return max(self.mask.end_key(end - 1, self.keys) - self.mask.first_key(begin, self.keys), 0)

    def rows(self, begin, end):
        """Rows that see any of the keys from begin to end."""
        rows, mask = range(self.queries), self.mask
        first = bisect_right(rows, begin, key=lambda i: mask.end_key(i, self.keys))
        return max(bisect_left(rows, end, key=lambda i: mask.first_key(i, self.keys)) - first, 0)

    @property
    def nbytes(self):
        """Bytes of each array, by name."""
        element = ELEMENTS[self.dtype]
        q_rows, k_rows = self.batch * self.heads * self.queries, self.batch * self.key_heads * self.keys
        columns = {"q": q_rows * self.head_dim, "k": k_rows * self.head_dim}
        columns |= {"v": k_rows * self.value_dim, "out": q_rows * self.value_dim}
        return {name: n * element.itemsize for name, n in columns.items()} | {"lse": q_rows * element.lse.itemsize}


def _ramp(shift, rows, keys):
    """Sum over rows i of ``i + shift``, each clamped to [0, keys]."""

    def positive(shift):  # of the same, clamped to 0 and more
        first, last = max(shift, 0), max(rows - 1 + shift, -1)
        return (first + last) * (last - first + 1) // 2

    return positive(shift) - positive(shift - keys)


@dataclass(frozen=True)
class Launch:
    """One launch: its FLOPs, its bytes, and the dtypes of matrices of the scores' size that are among these."""

    what: str
    flops: int
    nbytes: int
    read: tuple = ()
    written: tuple = ()


@dataclass(frozen=True)
class Cost:
    """What one way to compute a problem takes.

    Attributes
    ----------
    kind : {"naive", "flash"}
    dtype : str
    launches : tuple of Launch
    streamed : int
        Bytes that reach the multiprocessors, from memory or from the L2 cache.
    memory : int
        Bytes held at the worst moment, inputs and results among them.
    """

    kind: str
    dtype: str
    launches: tuple
    streamed: int
    memory: int

    @property
    def flops(self):
        """FLOPs of all launches."""
        return sum(launch.flops for launch in self.launches)

    @property
    def nbytes(self):
        """Bytes from and to memory of all launches."""
        return sum(launch.nbytes for launch in self.launches)

    @property
    def intensity(self):
        """FLOPs a byte of memory traffic."""
        return self.flops / self.nbytes

    def times(self, device):
        """Seconds at least in launches that products bind, and in those that memory binds."""
        compute = [launch.flops / device.peak(self.dtype) for launch in self.launches]
        memory = [launch.nbytes / device.bandwidth for launch in self.launches]
        both = list(zip(compute, memory, strict=True))
        return sum(c for c, m in both if c > m), sum(m for c, m in both if c <= m)

    def seconds(self, device):
        """The predicted time."""
        return sum(self.times(device))

    def roof(self, device):
        """What binds for most of it: "compute" or "memory"."""
        compute, memory = self.times(device)
        return "compute" if compute > memory else "memory"


def naive(problem, float32_softmax=False):
    """Cost of attention that writes its scores to memory.

    Parameters
    ----------
    problem : Problem
    float32_softmax : bool
        Whether softmax takes float32 where elements have 16 bits.

    Returns
    -------
    Cost
        Its launches say which matrices of scores they read and write.
    """
    narrow, of, pairs = problem.dtype, problem.nbytes, problem.scores
    wide = "float32" if float32_softmax and ELEMENTS[narrow].itemsize == 2 else narrow

    def launch(what, columns=0, arrays="", read=(), written=()):
        scores = pairs * sum(ELEMENTS[dtype].itemsize for dtype in (*read, *written))
        return Launch(what, 2 * columns * pairs, scores + sum(of[name] for name in arrays.split()), read, written)

    qk, pv = problem.head_dim, problem.value_dim
    arrays = of["q"] + of["k"] + of["v"] + of["out"]
    if problem.function == "backward":  # dout is as large as out, each gradient as its input
        arrays += of["q"] + of["k"] + of["v"]
        launches = [
            launch("dP = dout v^T", pv, "out v", written=(narrow,)),
            launch("dv = P^T dout", pv, "out v", read=(narrow,)),
            launch("dP in float32", read=(narrow,), written=(wide,)),
            launch("dS of softmax", read=(wide, wide), written=(narrow,)),
            launch("dq = dS k", qk, "k q", read=(narrow,)),
            launch("dk = dS^T q", qk, "q k", read=(narrow,)),
        ]
        held = [narrow, narrow, narrow] + (wide != narrow) * [wide, wide]
    else:
        launches = [
            launch("S = q k^T", qk, "q k", written=(narrow,)),
            launch("P = softmax S", read=(narrow,), written=(wide,)),
            launch("P in 16 bits", read=(wide,), written=(narrow,)),
            launch("out = P v", pv, "v out", read=(narrow,)),
        ]
        held = [narrow, narrow] + (wide != narrow) * [wide]
    if wide == narrow:
        del launches[2]  # the conversion
    moved = sum(launch.nbytes for launch in launches)
    return Cost("naive", narrow, tuple(launches), moved, arrays + pairs * sum(ELEMENTS[x].itemsize for x in held))


def flash(problem):
    """Cost of attention that keeps its scores on the chip: a `Cost` of one launch, for they all stream."""
    element, of, heads = ELEMENTS[problem.dtype], problem.nbytes, problem.batch * problem.heads
    qk, pv, real = problem.head_dim, problem.value_dim, element.lse.itemsize
    row = (qk + pv) * element.itemsize  # of k and v, or of q and dout
    read = problem.batch * problem.key_heads * problem.run(0, problem.queries) * row
    results = of["out"] + of["lse"]
    memory = of["q"] + of["k"] + of["v"] + results
    if problem.function == "backward":
        moved = 2 * of["q"] + read + of["k"] + of["v"] + of["out"] + results
        visits = sum(problem.rows(j, min(j + TILE, problem.keys)) for j in range(0, problem.keys, TILE))
        streamed = moved - of["q"] - of["out"] + heads * visits * (row + 2 * qk * real)  # sums are read and written
        memory += of["q"] + of["k"] + of["v"] + of["out"] + heads * problem.queries * (qk + 2) * real
        flops = 2 * (3 * qk + 2 * pv) * problem.pairs
    else:
        group, tile = (problem.group, DECODE_TILE) if problem.function == "decode" else (1, TILE)
        rows = problem.queries * group
        tiles = ((i // group, (min(i + tile, rows) - 1) // group + 1) for i in range(0, rows, tile))
        moved = of["q"] + read + results
        streamed = moved - read + heads // group * sum(problem.run(*rows) for rows in tiles) * row
        flops = 2 * (qk + pv) * problem.pairs
    return Cost("flash", problem.dtype, (Launch("all", flops, moved),), streamed, memory)
