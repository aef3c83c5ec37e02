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
MOST_TILES = 2**30  # that a ticket counts
CACHED_BYTES = 2**25  # of keys and values that blocks running together may share: the L2 cache has 40 MB and more


@dataclass(frozen=True)
class Limits:
    """What a device can do."""

    capability: tuple  # (9, 0)
    shared_bytes: int  # of one block, opted in
    processors: int
    nvrtc: tuple = (13, 0)  # version of the compiler

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
    zeroed: bool = False  # holds zeros when a launch begins, and again when it ends


@dataclass(frozen=True)
class TensorMap:
    """A field of a step's arguments: how tensor copies see an operand. Axes innermost first, strides in bytes."""

    operand: str
    dims: tuple
    strides: tuple  # of all axes but the first
    box: tuple


@dataclass(frozen=True)
class Step:
    """One launch."""

    variant: Variant
    grid: int
    threads: int
    shared_bytes: int
    args: dict = field(hash=False)  # fields of the kernel's struct but the pointers
    tensor_maps: dict = field(default_factory=dict, hash=False)  # by field of the struct


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
    masks = ("full", "causal", "window")
    found = {
        forward_variant(dtype, mask, *pair, limits): None for dtype in ELEMENTS for mask in masks for pair in pairs
    }
    if not_hopper(limits) is None:
        found |= {
            hopper_variant(dtype, mask, *dims, keys): None
            for dtype in ("float16", "bfloat16")
            for mask in masks
            for keys in (0, LONG)
            for dims in HOPPER_TILES
        }
    return tuple(found)


# Tiles of the sm90 engine, by padded head_dim and value_dim: tile_q (64 rows a consumer), tile_k, whether q stays in
# registers, panels of 64 columns by which out leaves through shared memory of its own (0: from registers), steps of
# exponentials that run beside a product.
HOPPER_TILES = {
    (64, 64): (256, 64, 0, 1, 0),  # 2 steps beside: 0.95
    (96, 96): (128, 128, 1, 2, 2),
    (128, 128): (128, 128, 1, 2, 2),  # no step beside: 0.93; 3: 0.97; tile_k 112: 0.93; 144: 0.95
    (192, 128): (128, 96, 0, 2, 0),
    (192, 192): (128, 112, 0, 0, 0),
    (256, 256): (128, 64, 0, 2, 2),  # tile_k 80: 0.97 causal, the same without a mask; no step beside: 0.99
}

LONG = 12288  # keys from which the tiles of this table are taken
HOPPER_LONG_TILES = {(64, 64): (192, 112, 0, 1, 0)}  # 1.02 of the others at 16k, 0.99 at 8k, 0.95 at 4k


def hopper_dims(head_dim, value_dim):
    """Head dims as the sm90 engine compiles them."""
    return next(dims for dims in HOPPER_TILES if head_dim <= dims[0] and value_dim <= dims[1])


def hopper_variant(dtype, mask, head_dim, value_dim, keys=0):
    """The sm90 engine's forward kernel for head dims as given and so many keys."""
    dims = hopper_dims(head_dim, value_dim)
    tiles = HOPPER_TILES | HOPPER_LONG_TILES if keys >= LONG else HOPPER_TILES
    tile_q, tile_k, query_registers, out_staged, early = tiles[dims]
    consumers, (query_panels, value_panels) = tile_q // 64, (-(-dim // 64) for dim in dims)
    shared = 128 * tile_q * (query_panels + out_staged)  # rows of 128 bytes
    shared += 2 * 128 * tile_k * (query_panels + value_panels)
    shared += 32 + consumers * (3 * 48 + 16) + 64 + 16 * (not out_staged)  # work and barriers; an array is never empty
    return Variant(
        "forward_sm90", dtype, mask, *dims, tile_q, tile_k, 4 * (1 + consumers), 1, 2, shared,
        query_registers, out_staged, early,
    )  # fmt: skip


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


def _in_chunks(operand, itemsize):
    """Whether rows can be written 16 bytes at a time."""
    return operand.shape[-1] * itemsize % 16 == 0 and _addressable(operand, itemsize, 16)


def _is_tensor(operand):
    """Whether a tensor map can hold an operand: strides that are not negative, and rows of their own."""
    *axes, row, _ = zip(operand.shape, operand.strides, strict=True)
    largest = 2**40
    return all(n <= 1 or 0 <= s < largest for n, s in axes) and (row[0] <= 1 or 0 < row[1] < largest)


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
    obstacle = not_hopper(limits) or _not_for_hopper(problem)
    if problem.engine == "sm90" and obstacle:
        raise ValueError(f"forward: engine is 'sm90', but {obstacle}; wanted 'portable' or None")
    if problem.engine == "portable":
        return _portable_forward(problem, limits, "asked for")
    if obstacle:
        return _portable_forward(problem, limits, f"the engine of every GPU since sm_80, here {limits}; {obstacle}")
    return _hopper_forward(problem, limits, "asked for" if problem.engine else f"Hopper's own, here {limits}")


def not_hopper(limits):
    """Why the sm90 engine does not run on a device, or None."""
    if limits.capability != (9, 0):
        return "wgmma is sm_90's alone"
    if limits.nvrtc < (12, 9):
        return f"NVRTC {limits.nvrtc[0]}.{limits.nvrtc[1]} is older than 12.9"
    return None


def _not_for_hopper(problem):
    """Why the sm90 engine does not take a problem, or None."""
    if problem.dtype not in ("float16", "bfloat16"):
        return f"wgmma has no {problem.dtype}"
    if 0 in (problem.keys, problem.value_dim):
        return "a tensor map has no empty axis"
    if problem.queries * problem.heads * math.prod(problem.batch) > MOST_TILES:
        return "a ticket counts no more than 2^30 tiles"
    return None


def _portable_forward(problem, limits, reason):
    variant = forward_variant(problem.dtype, problem.mask.name, *_padded(problem.head_dim, problem.value_dim), limits)
    pack = _pack(problem, lambda pack: variant.tile_q)
    chunk = 16 if variant.kernel == "forward" else 1
    args, operands, _, copies, buffers = _forward(problem, pack, variant.tile_q, chunk)
    blocks = args["schedule"][0] * args["schedule"][2]
    args["out_vectors"] = int(_in_chunks(operands["out"], ELEMENTS[problem.dtype].itemsize))
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
    return Plan("portable", reason, copies if steps else (), buffers, steps)


def _hopper_forward(problem, limits, reason):
    variant = hopper_variant(problem.dtype, problem.mask.name, problem.head_dim, problem.value_dim, problem.keys)
    consumers = variant.tile_q // 64
    pack = _pack(problem, lambda pack: consumers * _whole_rows(pack), most=64)
    args, _, maps, copies, buffers = _forward(problem, pack, consumers * _whole_rows(pack), 16, key_box=variant.tile_k)
    blocks = args["schedule"][0] * args["schedule"][2]
    if blocks == 0:
        return Plan("sm90", reason, (), buffers)
    args |= {"blocks": blocks, "rows": _whole_rows(pack), "out_boxes": int("out_map" in maps)}
    step = Step(variant, min(blocks, limits.processors), 32 * variant.warps, variant.shared_bytes, args, maps)
    return Plan("sm90", reason, copies, (*buffers, Buffer("ticket", (1,), "int32", (), zeroed=True)), (step,))


def _forward(problem, pack, tile_q, chunk, key_box=None):
    """Arguments of a forward kernel, operands, tensor maps if ``key_box`` keys go into a box, copies, buffers."""
    element = ELEMENTS[problem.dtype]
    scale, factor = _positive(problem.scale, element)
    out_shape = (*problem.batch, problem.heads, problem.queries, problem.value_dim)
    order = problem.q.order
    out = problem.out or Operand(out_shape, contiguous(out_shape, order, element.itemsize), True)
    operands, copies, lengths, strides = _layout(problem, out, factor, chunk, tensors=key_box is not None)
    tiles = -(-problem.queries * pack // tile_q)
    head_blocks = problem.heads // pack
    heads = head_blocks * math.prod(problem.batch)
    where = {
        name: (*(axis[n] for axis in strides), *operand.strides[-3:-1])
        for n, (name, operand) in enumerate(operands.items())
    }
    args = {
        **{f"{name}_strides": places for name, places in where.items()},
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
        "scale_log2": scale * LOG2_E,
    }
    buffers = (
        Buffer("out", out_shape, problem.dtype, order),
        Buffer("lse", out_shape[:-1], element.lse.name, tuple(range(len(out_shape) - 2))),
    )
    boxes = {"q": (pack, 64 // pack), "k": (1, key_box), "v": (1, key_box), "out": (pack, 16 // pack)}
    if 16 % pack or not _is_tensor(operands["out"]):
        del boxes["out"]
    maps = key_box and {
        f"{name}_map": _tensor_map(name, operands[name], lengths, where[name], box) for name, box in boxes.items()
    }
    return args, operands, maps, copies, buffers


def _tensor_map(name, operand, lengths, strides, box):
    """How copies see an operand: columns, heads, rows, and the two merged axes."""
    *_, heads, rows, dim = operand.shape
    batch0, batch1, head, row = strides
    dims = (dim, heads, rows, *lengths)
    live = zip(dims[1:], (head, row, batch0, batch1), strict=True)
    return TensorMap(name, dims, tuple(stride if length > 1 else 16 for length, stride in live), (64, *box, 1, 1))


def _whole_rows(pack):
    """Packed rows, of a consumer's 64, that whole queries fill."""
    return 64 // pack * pack


def _positive(scale, element):
    """A positive scale that kernels can fold into the exponent, and the factor that is left for a copy of q."""
    limits = np.finfo(element.lse)
    if abs(scale) * LOG2_E < float(limits.tiny):  # flushed to 0 there, and 0 times a hidden score's -inf is NaN
        return 1.0, 0.0
    return min(abs(scale), float(limits.max) / 2), math.copysign(1.0, scale)


def _layout(problem, out, factor, chunk, tensors):
    """Operands as the kernel sees them, the copies this takes, lengths and strides of the two merged leading axes.

    Inputs seen as ``tensors`` have rows in rising order, no two of them the same.
    """
    itemsize = ELEMENTS[problem.dtype].itemsize
    given = {"q": problem.q, "k": problem.k, "v": problem.v, "out": out}
    factors = {"q": factor}
    operands, copies = {}, {}

    def copy(name, shape):
        operands[name], pitch = _dense(given[name], shape, itemsize)
        copies[name] = Copy(name, shape, pitch, factors.get(name, 1.0))

    for name, operand in given.items():
        if name == "out":  # written in chunks, or element by element
            here = _in_chunks(operand, itemsize) if tensors else _addressable(operand, itemsize, itemsize)
        else:
            here = _addressable(operand, itemsize, chunk) and (not tensors or _is_tensor(operand))
        if factors.get(name, 1.0) == 1.0 and here:
            operands[name] = operand
        else:
            axes = list(zip(operand.shape[:-1], operand.strides[:-1], strict=True))
            keep = len(axes) - 1 if tensors else len(axes)  # axes that may stay of stride 0
            still = (1 if name != "out" and s == 0 and n < keep else length for n, (length, s) in enumerate(axes))
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


def _pack(problem, tile_q, most=None):
    """Query heads that share a block: the whole group, or as much of it as ``most`` allows, where short rows would
    leave tiles emptier than that. ``tile_q(pack)`` rows make a tile."""
    largest = min(problem.group, most or problem.group)
    pack = next((n for n in range(largest, 1, -1) if problem.group % n == 0), 1)
    together = problem.queries * pack
    if pack == 1 or not 0 < together <= LONGEST:
        return 1
    return pack if _filled(problem.queries, tile_q(1)) < 0.9 * _filled(together, tile_q(pack)) else 1


def _filled(rows, tile):
    """Share of the tiles' rows that is used."""
    return rows / (-(-rows // tile) * tile)
