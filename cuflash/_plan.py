"""Plan: a problem and what a device can do in, a ``Plan`` out. Tile tables and heuristics live here, with reasons.

Nothing here imports CuPy or touches an array, so plans are made and tested where no GPU is.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from ._dtypes import ELEMENTS
from ._problem import LARGEST_AXIS, LONGEST, Operand
from ._variant import Variant

LOG2_E = 1.4426950408889634
LARGEST_GRID = 2**31 - 1
CACHED_BYTES = 2**25  # of keys and values that blocks running together may share: the L2 cache has 40 MB and more


@dataclass(frozen=True)
class Limits:
    """What a device can do."""

    capability: tuple  # (9, 0)
    shared_bytes: int  # of one block, opted in
    processors: int

    def __str__(self):
        capability = "".join(map(str, self.capability))
        return f"sm_{capability}, {self.shared_bytes // 1024} KB shared, {self.processors} SMs"


# By capability, for planning where no such device is: shared memory a block may have, multiprocessors.
KNOWN = {
    (8, 0): Limits((8, 0), 163 * 1024, 108),
    (8, 6): Limits((8, 6), 99 * 1024, 84),
    (8, 9): Limits((8, 9), 99 * 1024, 128),
    (9, 0): Limits((9, 0), 227 * 1024, 132),
    (10, 0): Limits((10, 0), 227 * 1024, 148),
    (12, 0): Limits((12, 0), 99 * 1024, 170),
}


@dataclass(frozen=True)
class Copy:
    """An input to be made addressable: a fresh array of this shape whose rows begin every ``pitch`` bytes, holding
    ``factor`` times the input. For ``out``: where the kernel writes, to be copied to the caller's array after it."""

    name: str
    shape: tuple
    pitch: int
    factor: float = 1.0


@dataclass(frozen=True)
class Buffer:
    """An array to allocate, along the canonical axes, contiguous in the given order of axes."""

    name: str
    shape: tuple
    dtype: str
    order: tuple


@dataclass(frozen=True)
class Step:
    """One launch."""

    variant: Variant
    grid: int
    threads: int
    shared_bytes: int
    args: dict = field(hash=False)  # fields of the kernel's struct but the pointers
    tensor_maps: tuple = ()


@dataclass(frozen=True)
class Plan:
    """What is going to run, and why."""

    engine: str
    reason: str
    copies: tuple = ()
    buffers: tuple = ()
    steps: tuple = ()

    def __str__(self):
        steps = ", ".join(f"{step.variant.name} x {step.grid}" for step in self.steps) or "no launch"
        copies = f"; copies {', '.join(copy.name for copy in self.copies)}" if self.copies else ""
        return f"{self.engine} ({self.reason}): {steps}{copies}"


# Tiles ----------------------------------------------------------------------------------------------------------

EQUAL_DIMS = (32, 64, 96, 128, 192, 256)
MIXED_DIMS = (64, 128, 256)  # where head_dim and value_dim fall into different sizes: fewer, to keep variants few


def _padded(head_dim, value_dim):
    """Head dims as compiled: the smallest size that holds each."""
    for sizes in (EQUAL_DIMS, MIXED_DIMS):
        fitting = tuple(next(size for size in sizes if dim <= size) for dim in (head_dim, value_dim))
        if fitting[0] == fitting[1]:
            break
    return fitting


def _shared_bytes(kernel, element, head_dim, value_dim, tile_q, tile_k, warps, stages):
    if kernel == "forward":  # q or out, then the stages of k and v; 48 bytes of facts a warp
        return 2 * (tile_q * max(head_dim, value_dim) + stages * tile_k * (head_dim + value_dim)) + 48 * warps
    size = ELEMENTS[element].itemsize  # q, then k or v, rows padded by an element; the weights
    return size * (tile_q * (head_dim + 1) + tile_k * (max(head_dim, value_dim) + 1) + tile_q * tile_k)


def forward_variant(dtype, mask, head_dim, value_dim, limits):
    """The portable engine's forward kernel for padded head dims."""
    if dtype in ("float16", "bfloat16"):
        kernel, widest, stages = "forward", max(head_dim, value_dim), 2
        if widest <= 32:
            tile_q, tile_k, warps, blocks = 128, 64, 4, 2  # tile_k 128: 0.97 of it, causal
        elif widest <= 64:
            tile_q, tile_k, warps, blocks = 128, 128, 4, 2  # tile_k 64: 0.92 of it
        elif widest <= 128:
            tile_q, tile_k, warps, blocks = 128, 64, 4, 2  # tile_k 32: 0.95; 16 rows a warp: 0.80
        else:  # registers hold out of 16 rows a warp; two stages of tile_k 32: 0.97 of it; 8 warps, one block: 0.96
            tile_q, tile_k, warps, blocks, stages = 64, 64, 4, 2, 1
        if limits.capability >= (10, 0) and stages == 2:  # registers spill there with larger tiles
            tile_k //= 2
        elif limits.capability < (9, 0) and mask == "window":
            tile_k = min(tile_k, 32)
    else:
        kernel, tile_q, tile_k, warps, blocks, stages = "forward_fma", 16, 16, 4, 1, 1
    shared = _shared_bytes(kernel, dtype, head_dim, value_dim, tile_q, tile_k, warps, stages)
    return Variant(kernel, dtype, mask, head_dim, value_dim, tile_q, tile_k, warps, blocks, stages, shared)


def variants(limits):
    """Every variant a plan for such a device can ask for."""
    pairs = [(d, d) for d in EQUAL_DIMS] + [(d, v) for d in MIXED_DIMS for v in MIXED_DIMS if d != v]
    found = {
        forward_variant(dtype, mask, *pair, limits): None
        for dtype in ELEMENTS
        for mask in ("full", "causal", "window")
        for pair in pairs
    }
    return tuple(found)


# Layout ---------------------------------------------------------------------------------------------------------


def contiguous(shape, order, itemsize, pitch=None):
    """Strides in bytes of an array contiguous in ``order``, its rows ``pitch`` bytes apart."""
    strides = [itemsize] * len(shape)
    step = pitch or shape[-1] * itemsize
    for axis in reversed(order):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def _dense(operand, shape, itemsize):
    """The operand as a C-ordered copy of ``shape`` whose rows are whole 16-byte chunks."""
    pitch = -(-operand.shape[-1] * itemsize // 16) * 16
    strides = contiguous(shape, range(len(shape) - 1), itemsize, pitch)
    still = (length != full for length, full in zip(shape, operand.shape, strict=True))
    strides = tuple(0 if s else stride for s, stride in zip(still, strides, strict=True))
    return Operand(operand.shape, strides, True), pitch


def _addressable(operand, itemsize, chunk):
    """Whether a kernel can read the operand where it lies: contiguous rows that begin at multiples of ``chunk``."""
    if 0 in operand.shape:  # nothing will be read
        return True
    *lengths, dim = operand.shape
    *strides, last = operand.strides
    chunk = max(chunk, itemsize)
    rows = all(length <= 1 or stride % chunk == 0 for length, stride in zip(lengths, strides, strict=True))
    return rows and (dim <= 1 or last == itemsize) and (operand.aligned or chunk <= itemsize)


def _merged(batch, operands):
    """Leading axes merged where every operand allows it: lengths, and strides by operand, outermost first."""
    lengths, strides = [], []
    for axis in reversed(range(len(batch))):
        if batch[axis] == 1:
            continue
        here = [operand.strides[axis] for operand in operands]
        fits = lengths and lengths[0] * batch[axis] <= LARGEST_AXIS
        if fits and all(s == inner * lengths[0] for s, inner in zip(here, strides[0], strict=True)):
            lengths[0] *= batch[axis]
        else:
            lengths.insert(0, batch[axis])
            strides.insert(0, here)
    return lengths, strides


# Forward --------------------------------------------------------------------------------------------------------


def plan(problem, limits):
    """Choose engine, variant, copies and launches for a problem. ``limits`` is None where there is no GPU."""
    if problem.library == "numpy":
        return Plan("numpy", "the arrays are NumPy's")
    return _portable_forward(problem, limits)


def _portable_forward(problem, limits):
    element = ELEMENTS[problem.dtype]
    variant = forward_variant(problem.dtype, problem.mask.name, *_padded(problem.head_dim, problem.value_dim), limits)
    scale, factor = _positive(problem.scale, element)
    out_shape = (*problem.batch, problem.heads, problem.queries, problem.value_dim)
    order = problem.q.order
    out = problem.out or Operand(out_shape, contiguous(out_shape, order, element.itemsize), True)
    operands, copies, lengths, strides = _layout(problem, out, factor, 16 if variant.kernel == "forward" else 1)

    pack = _pack(problem, variant.tile_q)
    tiles = -(-problem.queries * pack // variant.tile_q)
    head_blocks = problem.heads // pack
    heads = head_blocks * math.prod(problem.batch)
    rows_in_chunks = problem.value_dim * element.itemsize % 16 == 0
    args = {
        **{
            f"{name}_strides": (*(axis[n] for axis in strides), *operand.strides[-3:-1])
            for n, (name, operand) in enumerate(operands.items())
        },
        "schedule": (tiles, _section(problem, pack, heads, tiles), heads),
        "queries": problem.queries,
        "keys": problem.keys,
        "heads": problem.heads,
        "group": problem.group,
        "pack": pack,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        "head_blocks": head_blocks,
        "batches1": lengths[1],
        "first_shift": problem.mask.first_shift,
        "end_shift": problem.mask.end_shift,
        "out_vectors": int(rows_in_chunks and _addressable(operands["out"], element.itemsize, 16)),
        "scale_log2": scale * LOG2_E,
    }
    blocks = tiles * heads
    steps = tuple(
        Step(
            variant,
            grid=min(blocks - first, LARGEST_GRID),
            threads=32 * variant.warps,
            shared_bytes=variant.shared_bytes,
            args={**args, "first_block": first},
        )
        for first in range(0, blocks, LARGEST_GRID)
    )
    buffers = (
        Buffer("out", out_shape, problem.dtype, order),
        Buffer("lse", out_shape[:-1], element.lse.name, tuple(range(len(out_shape) - 2))),
    )
    reason = "asked for" if problem.engine else f"the engine of every GPU since sm_80, here {limits}"
    return Plan("portable", reason, copies if steps else (), buffers, steps)


def _positive(scale, element):
    """A positive scale that kernels can fold into the exponent, and the factor that is left for a copy of q."""
    limits = np.finfo(element.lse)
    if abs(scale) * LOG2_E < float(limits.tiny):  # flushed to 0 there, and 0 times a hidden score's -inf is NaN
        return 1.0, 0.0
    return min(abs(scale), float(limits.max) / 2), math.copysign(1.0, scale)


def _layout(problem, out, factor, chunk):
    """Operands as the kernel sees them, the copies this takes, lengths and strides of the two merged leading axes."""
    itemsize = ELEMENTS[problem.dtype].itemsize
    given = {"q": problem.q, "k": problem.k, "v": problem.v, "out": out}
    factors = {"q": factor}
    operands, copies = {}, {}

    def copy(name, shape):
        operands[name], pitch = _dense(given[name], shape, itemsize)
        copies[name] = Copy(name, shape, pitch, factors.get(name, 1.0))

    for name, operand in given.items():
        if factors.get(name, 1.0) == 1.0 and _addressable(operand, itemsize, itemsize if name == "out" else chunk):
            operands[name] = operand
        else:
            axes = zip(operand.shape[:-1], operand.strides[:-1], strict=True)
            still = (1 if name != "out" and stride == 0 else length for length, stride in axes)
            copy(name, operand.shape if 0 in operand.shape else (*still, operand.shape[-1]))
    lengths, strides = _merged(problem.batch, tuple(operands.values()))
    if len(lengths) > 2:  # more leading axes than the kernel sees: lay all operands out alike
        for name, operand in given.items():
            copy(name, operand.shape)
        lengths, strides = _merged(problem.batch, tuple(operands.values()))
    missing = 2 - len(lengths)
    return operands, tuple(copies.values()), [1] * missing + lengths, [[0] * len(given)] * missing + strides


def _section(problem, pack, heads, tiles):
    """Head blocks whose tiles are scheduled together, longest first: as many as share the cache.

    Without a mask all tiles are alike, and heads come one by one.
    """
    if problem.mask.name == "full":
        return 1
    head_bytes = problem.keys * (problem.head_dim + problem.value_dim) * ELEMENTS[problem.dtype].itemsize
    together = max(CACHED_BYTES // max(head_bytes, 1), 1) * (problem.group // pack)
    return max(min(together, heads, LARGEST_GRID // max(tiles, 1)), 1)


def _pack(problem, tile_q):
    """Query heads that share a block: the whole group where short rows would leave tiles emptier than that."""
    together = problem.queries * problem.group
    if problem.group <= 1 or not 0 < together <= LONGEST:
        return 1
    return problem.group if _filled(problem.queries, tile_q) < 0.9 * _filled(together, tile_q) else 1


def _filled(rows, tile):
    """Share of the tiles' rows that is used."""
    return rows / (-(-rows // tile) * tile)
