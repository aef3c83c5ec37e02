"""Plan: a problem and what a device can do in, a ``Plan`` out. Tile tables and heuristics live here, with reasons.

Nothing here imports CuPy or touches an array, so plans are made and tested where no GPU is.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from . import _layout
from ._dtypes import ELEMENTS, FORMATS
from ._layout import Use, contiguous
from ._problem import LONGEST, Operand
from ._variant import Variant

LOG2_E = 1.4426950408889634
HALVES = ("float16", "bfloat16")
LARGEST_GRID = 2**31 - 1
MOST_TILES = 2**30  # that a ticket counts
LARGEST_SUM = 2**30  # of tiles of keys, and room for what rounds up
MOST_PARTS = 10**9  # of backward, some rows or a tile of keys each: blocks, tickets and counters fit 31 bits
FIRST_COUNTER = 32  # of backward's turns; the ticket and a flag come before, in a line of the cache of their own
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
class Buffer:
    """An array to allocate, along the canonical axes, contiguous in the given order of axes."""

    name: str
    shape: tuple
    dtype: str
    order: tuple
    zeroed: bool = False  # holds zeros when a launch begins, and again when it ends
    cleared: bool = False  # filled with zeros before the first launch


@dataclass(frozen=True)
class Step:
    """One launch."""

    variant: Variant
    grid: int
    threads: int
    shared_bytes: int
    args: dict = field(hash=False)  # fields of the kernel's struct but the pointers
    tensor_maps: dict = field(default_factory=dict, hash=False)  # by field of the struct
    cooperative: bool = False  # all blocks are on the device at once: they wait for one another
    cluster: int = 1  # blocks of a cluster, which read one another's shared memory


@dataclass(frozen=True)
class Plan:
    """What is going to run, and why."""

    engine: str
    reason: str
    copies: tuple = ()
    buffers: tuple = ()
    steps: tuple = ()

    @property
    def variant(self):
        """The kernel that does most of the work, that of the step in the middle; None where nothing is launched."""
        return self.steps[len(self.steps) // 2].variant if self.steps else None

    def __str__(self):
        steps = ", ".join(f"{step.variant.name} x {step.grid}" for step in self.steps) or "no launch"
        copies = f"; copies {', '.join(copy.name for copy in self.copies)}" if self.copies else ""
        return f"{self.engine} ({self.reason}): {steps}{copies}"


# Tiles ----------------------------------------------------------------------------------------------------------

EQUAL_DIMS = (32, 64, 96, 128, 192, 256)
RARE_DIMS = (32, 96, 192)  # of which the portable engine has one kernel for all masks on Hopper
MIXED_DIMS = (64, 128, 256)  # where head_dim and value_dim fall into different sizes: fewer, to keep variants few


def _padded(head_dim, value_dim):
    """Head dims as compiled: the smallest size that holds each."""
    for sizes in (EQUAL_DIMS, MIXED_DIMS):
        fitting = tuple(next(size for size in sizes if dim <= size) for dim in (head_dim, value_dim))
        if fitting[0] == fitting[1]:
            break
    return fitting


# Tiles of forward in float32 and in float64: tile_q, tile_k, blocks a multiprocessor and, of float32, stages. The first
# that fit shared memory are taken.
#
# Float32, by the padded head dim, of v too, for little is multiplied of what is padded: at 64 several blocks work while
# one splits keys; from 96 on one block reads keys for as many rows as there is room for, 2 blocks of 64 rows 0.97 of
# it, at 192 0.78; at 256 32 keys have no stage beside, 0.8 of the speed. Head dims below 16 take 32 too: of the 2,450
# operations a cycle that mma.sync does on a multiprocessor of an H200, a pair takes 768, 0.31 cycles, while
# multiply-adds outside the tensor cores would read shared memory some 30 times for it at head_dim 3, and 32 of these
# are a cycle.
FLOAT32_TILES = {
    32: ((64, 48, 3, 2),),  # 64 keys spill; 2 blocks of 128 rows, 32 keys: 0.93
    64: ((64, 32, 3, 2), (64, 32, 2, 2)),
    96: ((128, 32, 1, 2), (64, 32, 1, 2)),
    128: ((128, 32, 1, 2), (64, 32, 1, 2)),
    192: ((128, 32, 1, 2), (64, 16, 1, 2), (32, 16, 1, 1)),
    256: ((64, 16, 1, 2), (64, 32, 1, 1), (64, 16, 1, 1), (32, 16, 1, 1)),  # the first: registers spill but on sm_90
}
# Float64, by padded head_dim and value_dim. Instructions take 4, 8 or 16 columns of q and k and 8 of v: points in space
# with a number at each are (4, 8). Wider dims are few, to keep variants few; (8, 64) and (64, 8) are points with many
# numbers and features with one.
FLOAT64_TILES = {
    (4, 8): ((64, 48, 3),),  # with 64 keys registers spill
    (8, 8): ((64, 48, 3),),
    (16, 16): ((64, 32, 4),),
    (32, 32): ((64, 32, 3), (64, 16, 3)),
    (8, 64): ((64, 32, 2),),
    (64, 8): ((64, 32, 2), (64, 16, 2)),
    (64, 64): ((64, 32, 2), (32, 16, 2)),
    (96, 96): ((128, 32, 1), (64, 32, 1)),
    (128, 128): ((128, 32, 1), (128, 16, 1), (64, 16, 1)),  # 48 keys: neither registers nor shared memory are enough
    (192, 192): ((64, 32, 1), (64, 16, 1), (32, 16, 1)),
    (256, 256): ((64, 16, 1), (32, 16, 1), (16, 16, 1)),
}


def _alike(tiles, head_dim, value_dim):
    """Both head dims as the narrowest of a table that is as wide as either."""
    dim = next(dim for dim in tiles if max(head_dim, value_dim) <= dim)
    return dim, dim


def float32_dims(head_dim, value_dim):
    """Head dims as forward compiles them for float32: alike."""
    return _alike(FLOAT32_TILES, head_dim, value_dim)


def float64_dims(head_dim, value_dim):
    """Head dims as forward compiles them for float64: the narrowest pair that holds both."""
    return min((dims for dims in FLOAT64_TILES if head_dim <= dims[0] and value_dim <= dims[1]), key=sum)


def _float32_variant(head_dim, value_dim, tile_q, tile_k, blocks, stages):
    warps = tile_q // 16
    shared = 6 * (tile_q * head_dim + tile_k * (head_dim + value_dim)) + 48 * warps  # three parts each; facts
    return Variant(
        "forward_f32", "float32", "window", head_dim, value_dim, tile_q, tile_k, warps, blocks, stages, shared, parts=3
    )


def _float64_variant(head_dim, value_dim, tile_q, tile_k, blocks, tall):
    warps = tile_q // 16 * (2 if value_dim > 128 else 1)  # two share rows where half of the columns fill the registers
    pitch = 8 * head_dim + 64 * (head_dim % 16 == 0)  # of a row of k; see the kernel
    shared = 8 * tile_q * head_dim + tile_k * (pitch + 8 * value_dim + 16) + 32  # the last: facts
    return Variant(
        "forward_f64", "float64", "window", head_dim, value_dim, tile_q, tile_k, warps, blocks, 1, shared,
        tall_products=tall,
    )  # fmt: skip


def _precise_variant(dtype, head_dim, value_dim, limits):
    """The portable engine's forward kernel of float32 or float64, for head dims as given: one for all masks."""
    if dtype == "float32":
        dims = float32_dims(head_dim, value_dim)
        tiles = FLOAT32_TILES[dims[0]]
        tiles = tiles[1:] if dims[0] == 256 and limits.capability != (9, 0) else tiles
        choices = [_float32_variant(*dims, *tile) for tile in tiles]
    else:
        dims = float64_dims(head_dim, value_dim)
        tall = int(limits.capability >= (9, 0))
        choices = [_float64_variant(*dims, *tile, tall) for tile in FLOAT64_TILES[dims]]
    return _first_that_fits(choices, limits)


def _first_that_fits(choices, limits):
    """The first variant whose blocks a multiprocessor has shared memory for, else the last."""
    room = limits.shared_bytes + 1024  # the system keeps 1 KB a block
    return next((each for each in choices if each.blocks_per_sm * (each.shared_bytes + 1024) <= room), choices[-1])


def forward_variant(dtype, mask, head_dim, value_dim, limits, paged=0):
    """The portable engine's forward kernel for head dims as given; ``paged`` that of a cache."""
    if dtype in ("float32", "float64"):
        return _precise_variant(dtype, head_dim, value_dim, limits)
    head_dim, value_dim = _padded(head_dim, value_dim)
    # The most general mask serves all, to keep variants few: of rare head dims too where Hopper's own kernels take most
    # problems and tiles are the same.
    own = head_dim == value_dim and not (limits.capability == (9, 0) and head_dim in RARE_DIMS)
    mask = mask if own else "window"
    widest, stages = max(head_dim, value_dim), 2
    if widest <= 32:
        tile_q, tile_k, warps, blocks = 128, 64, 4, 2  # tile_k 128: 0.97 of it, causal
    elif widest <= 64:
        tile_q, tile_k, warps, blocks = 128, 128, 4, 2  # tile_k 64: 0.92 of it
    elif widest <= 128:
        tile_q, tile_k, warps, blocks = 128, 64, 4, 2  # tile_k 32: 0.95; 16 rows a warp: 0.80
    else:  # registers hold out of 16 rows a warp; two stages of tile_k 32: 0.97 of it; 8 warps, one block: 0.96
        tile_q, tile_k, warps, blocks, stages = 64, 64, 4, 2, 1
    if limits.capability >= (10, 0) and stages == 2:  # registers spill there with larger tiles
        tile_k //= 4 if paged and widest > 64 else 2
    elif limits.capability < (9, 0) and mask == "window":
        tile_k = min(tile_k, 32)
    # q or out, then the stages of k and v; 48 bytes of facts a warp
    shared = 2 * (tile_q * widest + stages * tile_k * (head_dim + value_dim)) + 48 * warps
    shared += paged * (2 * 16 * tile_k + 16)  # where the rows of two tiles lie, and flags
    return Variant(
        "forward", dtype, mask, head_dim, value_dim, tile_q, tile_k, warps, blocks, stages, shared, paged=paged
    )


# Head dims of the kernel of caches, both alike, and one mask: few, and what is padded is not read.
CACHE_DIMS = (64, 128, 256)


def cache_dims(head_dim, value_dim):
    """Head dims as forward on caches compiles them."""
    return _alike(CACHE_DIMS, head_dim, value_dim)


def cache_variant(dtype, head_dim, value_dim, limits):
    """The portable engine's forward kernel of a cache for head dims as given."""
    return forward_variant(dtype, "window", *cache_dims(head_dim, value_dim), limits, paged=1)


def variants(limits):
    """Every variant a plan for such a device can ask for."""
    pairs = [(d, d) for d in EQUAL_DIMS] + [(d, v) for d in MIXED_DIMS for v in MIXED_DIMS if d != v]
    masks = ("full", "causal", "window")
    found = {}
    for dtype in ("float16", "bfloat16"):
        found |= {forward_variant(dtype, mask, *pair, limits): None for mask in masks for pair in pairs}
        found |= {decode_variant(dtype, dim, limits, rows): None for dim in DECODE_TILES for rows in (1, 17)}
        found |= {latent_variant(dtype, limits, rows): None for rows in LATENT_TILES}
        found |= {append_variant(dtype): None}
        found |= {cache_variant(dtype, dim, dim, limits): None for dim in CACHE_DIMS}
        found |= {backward_variant(dtype, *pair, limits): None for pair in pairs}
        found |= {rows_variant(dtype): None, finish_variant(dtype): None}
        if not_hopper(limits) is None:
            found |= {
                hopper_variant(dtype, mask, *dims, keys): None
                for mask in masks for keys in (0, LONG) for dims in HOPPER_TILES
            }  # fmt: skip
            found |= {hopper_backward_variant(dtype, dim): None for dim in HOPPER_BACKWARD_TILES}
            found |= {hopper_dq_variant(dtype, dim): None for dim in HOPPER_DQ_TILES}
    found |= {forward_variant("float32", "full", dim, dim, limits): None for dim in FLOAT32_TILES}
    found |= {forward_variant("float64", "full", *dims, limits): None for dims in FLOAT64_TILES}
    if not_hopper(limits) is None:
        for parts, tiles in HOPPER_FLOAT32_TILES.items():
            found |= {make(dim, parts): None for dim in tiles for make in (parts_variant, hopper_float32_variant)}
    found |= {float32_backward_variant(dim, dim, limits): None for dim in FLOAT32_BACKWARD_TILES}
    found |= {float64_backward_variant(dim, dim, limits): None for dim in FLOAT64_BACKWARD_DIMS}
    for dtype in ("float32", "float64"):
        found |= {rows_variant(dtype): None, finish_variant(dtype): None}
        found |= {decode_real_variant(dtype, dim, limits): None for dim in DECODE_REAL_TILES}
        found |= {append_variant(dtype): None}
    found |= {
        decode_8bit_variant(kind, dim, limits, page_size): None
        for page_size in (0, 1) for kind in FORMATS for dim in DECODE_8BIT_TILES
    }  # fmt: skip
    return tuple(found)


# Tiles of the sm90 engine, by padded head_dim and value_dim: tile_q (64 rows a consumer), tile_k, steps of 16 columns
# of q that stay in registers, panels of 64 columns by which out leaves through shared memory of its own, steps of
# exponentials that run beside a product.
HOPPER_TILES = {
    (64, 64): (256, 64, 0, 1, 0),  # 2 steps beside: 0.95
    (96, 96): (192, 96, 0, 1, 0),  # 128 rows and keys, q held: 0.86, and 0.75 at head_dim 72, 1.01 causal at 1k
    (128, 128): (128, 128, 8, 2, 2),  # no step beside: 0.93; 3: 0.97; tile_k 112: 0.93; 144: 0.95
    (192, 128): (128, 96, 0, 2, 0),
    (192, 192): (128, 96, 0, 1, 0),  # 112 keys and out from registers: 0.99 causal, 1.00
    (256, 256): (128, 64, 6, 2, 2),  # tile_k 80: 0.97 causal; no step beside: 0.99; none of q held: 0.99
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
    tile_q, tile_k, query_steps, out_staged, early = tiles[dims]
    consumers, (query_panels, value_panels) = tile_q // 64, (-(-dim // 64) for dim in dims)
    shared = 128 * tile_q * (query_panels + out_staged)  # rows of 128 bytes
    shared += 2 * 128 * tile_k * (query_panels + value_panels)
    shared += 32 + consumers * (3 * 48 + 16) + 64  # work and barriers
    return Variant(
        "forward_sm90", dtype, mask, *dims, tile_q, tile_k, 4 * (1 + consumers), 1, 2, shared,
        query_steps, out_staged, early,
    )  # fmt: skip


# The same in float32, by the bfloat16 parts of a number and head dims padded alike: tile_q, tile_k, stages. Three parts
# of more columns have no room; two make the products of "tf32".
HOPPER_FLOAT32_TILES = {
    3: {64: (128, 96, 1), 128: (128, 64, 1)},  # 64 keys, 2 or 3 stages, at 64: 0.9
    2: {64: (128, 128, 2), 128: (128, 128, 1)},  # 96 keys: 0.97 at 64, 0.98 at 128; 64 keys in 2 stages: 0.9, 0.95
}
FEWEST_FLOAT32_COLUMNS = 33  # below, the portable engine pads to 32, half as much


def hopper_float32_dims(head_dim, value_dim):
    """Head dims as the sm90 engine compiles them for float32: alike."""
    return _alike(HOPPER_FLOAT32_TILES[3], head_dim, value_dim)


def hopper_float32_variant(dim, parts):
    """The sm90 engine's forward kernel of float32 for a padded head dim, of v too: one for all masks."""
    tile_q, tile_k, stages = HOPPER_FLOAT32_TILES[parts][dim]
    consumers, panels = tile_q // 64, dim // 64 if parts > 2 else 1
    shared = 2 * parts * dim * (tile_q + 2 * stages * tile_k)  # q, keys and values
    shared += 8 * (consumers + 2 * stages * (parts + panels))  # barriers
    warps = 4 * (1 + consumers)
    return Variant(
        "forward_f32_sm90", "float32", "window", dim, dim, tile_q, tile_k, warps, 1, stages, shared, parts=parts
    )


def parts_variant(dim, parts):
    """The step before it, which splits q, k and v: 64 rows a block."""
    return Variant("forward_parts", "float32", "window", dim, dim, 64, 64, 8, 4, 1, 0, parts=parts)


# Tiles of decode, by the padded head dim: tile_k, warps, stages; the first that fit shared memory are taken. Two blocks
# a multiprocessor fill it, so that one begins or ends while the other has much on its way.
DECODE_TILES = {
    64: ((32, 4, 3), (32, 4, 2)),
    96: ((16, 4, 4), (16, 4, 3)),
    128: ((16, 4, 3), (16, 4, 2)),
    192: ((16, 4, 2), (16, 2, 3)),
    256: ((16, 2, 3), (16, 2, 2)),
}
DECODE_BLOCKS = 2  # a multiprocessor
DECODE_MANY_ROWS = (64, 128)  # head dims with tiles of 32 rows too, by which keys are read half as often


def decode_dims(head_dim, value_dim):
    """Head dims as decode compiles them: alike, for what is padded costs no memory's time."""
    return _alike(DECODE_TILES, head_dim, value_dim)


def decode_variant(dtype, dim, limits, rows=1):
    """The kernel of decode for a padded head dim, of v too, and so many packed rows."""
    tile_q = 32 if rows > 16 and dim in DECODE_MANY_ROWS else 16
    for tile_k, warps, stages in DECODE_TILES[dim]:
        ring = 4 * stages * tile_k * dim
        shared = 2 * tile_q * dim + warps * (ring + 8 * tile_q) + 16
        if shared <= limits.shared_bytes and 4 * tile_q * (dim + 8) <= ring:  # which is to hold a warp's rows of out
            break
    else:
        return decode_variant(dtype, dim, limits)
    return Variant(
        "decode", dtype, "window", dim, dim, tile_q, tile_k, warps, DECODE_BLOCKS, stages, shared,
        clusters=_clusters(limits),
    )  # fmt: skip


def _clusters(limits):
    """Blocks of a cluster, at most: 8 on every device that has any."""
    return 8 if limits.capability >= (9, 0) else 0


# Tiles of decode from 8-bit caches, likewise. Three sizes, for what is padded is not read, one tile of rows, and q's
# dtype at run time: six variants. From 128 on there are four more for pages that are not whole runs of 16 keys: with
# both ways of looking them up the text is too long for the caches of instructions. From E4M3, 128, 8 key heads, 1 x 8k
# 14.9 us with both, 12.0 with one; 8 x 1k 12.3, 10.7. Of 16 bits it is 1 %, and not worth variants. A tile has twice
# the keys, half as long, so that as many bytes are on their way.
DECODE_8BIT_TILES = {
    64: ((64, 4, 3), (64, 4, 2)),
    128: ((32, 4, 3), (32, 4, 2)),
    256: ((32, 2, 3), (32, 2, 2)),
}


def decode_8bit_dims(head_dim, value_dim):
    """The same of decode from 8-bit caches."""
    return _alike(DECODE_8BIT_TILES, head_dim, value_dim)


def decode_8bit_variant(kv_format, dim, limits, page_size=0):
    """The kernel of decode from 8-bit caches for a padded head dim, of v too; for q and out of either 16-bit dtype."""
    tile_q, run = 16, 0 if dim < 128 else 1 if page_size % 16 else 16
    for tile_k, warps, stages in DECODE_8BIT_TILES[dim]:
        ring = stages * tile_k * (2 * dim + 8)  # keys, values, and a scale each
        shared = 2 * tile_q * dim + warps * (ring + 8 * tile_q) + 16 + 4 * tile_q
        if shared <= limits.shared_bytes:
            break
    return Variant(
        "decode_8bit", kv_format, "window", dim, dim, tile_q, tile_k, warps, DECODE_BLOCKS, stages, shared,
        converts=int(kv_format == "e4m3" and limits.capability >= (8, 9)), clusters=_clusters(limits),
        run=run,
    )  # fmt: skip


# Tiles of decode from caches of float32, likewise, and blocks a multiprocessor: three sizes, one tile of rows. Of
# float64 a tile has half as many keys, which are as many bytes, and at 256 half as many rows: more spill.
DECODE_REAL_TILES = {
    64: ((32, 3, 2, 2), (32, 2, 2, 2)),
    128: ((16, 3, 2, 2), (16, 2, 2, 2)),
    256: ((16, 3, 2, 1), (16, 2, 2, 1), (16, 1, 2, 1)),  # a ring is 64 KB
}


def decode_real_dims(head_dim, value_dim):
    """The same of decode from caches of float32 and float64."""
    return _alike(DECODE_REAL_TILES, head_dim, value_dim)


def decode_real_variant(dtype, dim, limits):
    """The kernel of decode from caches of float32 or float64 for a padded head dim, of v too."""
    itemsize, tile_q = ELEMENTS[dtype].itemsize, 4 if (dtype, dim) == ("float64", 256) else 8
    for keys, warps, stages, blocks in DECODE_REAL_TILES[dim]:
        tile_k = 4 * keys // itemsize
        ring, weights = 2 * itemsize * stages * tile_k * dim, tile_k * (itemsize * tile_q + 16)
        shared = itemsize * tile_q * dim + warps * (ring + 2 * itemsize * tile_q + weights) + 16
        found = Variant(
            "decode_real", dtype, "window", dim, dim, tile_q, tile_k, warps, blocks, stages, shared,
            clusters=_clusters(limits),
        )  # fmt: skip
        if shared <= limits.shared_bytes:
            break
    return found


# Tiles of decode where values are columns of keys, wider than those above: by the packed rows of a tile, tile_k, warps,
# stages, and steps of 16 columns of q, of 36, that stay in registers, as many as do not spill; the first that fit
# shared memory are taken, or else those of fewer rows. One size, that of the models that have such caches; what is
# padded is not read. By arithmetic, for an H200: 64 keys come from memory in 3,800 cycles of a multiprocessor. Its
# shared memory moves 128 bytes a cycle and 230 KB for them where there are 16 rows, 370 KB with 32, so that both wait
# for memory; 64 rows take 5,000 cycles of shared memory and 3,700 of the tensor cores, and neighbours read the same
# keys from the cache.
LATENT_DIMS = 576, 512
LATENT_TILES = {
    16: ((64, 8, 2, 36), (32, 4, 3, 24), (32, 4, 2, 24)),
    32: ((64, 8, 2, 24), (32, 8, 3, 24), (16, 4, 2, 0)),
    64: ((64, 8, 2, 0), (32, 8, 2, 0)),
}


def latent_variant(dtype, limits, rows=1):
    """The kernel of decode of values that are columns of keys, for so many packed rows."""
    wanted = next((tile_q for tile_q in LATENT_TILES if rows <= tile_q), max(LATENT_TILES))
    return next(
        made
        for tile_q in sorted(LATENT_TILES, reverse=True)
        for tile in LATENT_TILES[tile_q]
        if tile_q <= wanted and (made := _latent_variant(dtype, tile_q, *tile)).shared_bytes <= limits.shared_bytes
    )


def _latent_variant(dtype, tile_q, tile_k, warps, stages, query_steps):
    head_dim, value_dim = LATENT_DIMS
    shared = 2 * (tile_q * head_dim + stages * tile_k * head_dim + tile_q * tile_k)  # q, keys, weights
    shared += tile_q * (12 * (16 * warps // tile_q) + 4) + 4 * warps  # sums and maxima of warps, a factor; flags
    shared = -(-shared // 16) * 16 + 16
    return Variant(
        "decode_latent", dtype, "window", head_dim, value_dim, tile_q, tile_k, warps, 1, stages, shared,
        query_steps=query_steps,
    )  # fmt: skip


def decode_variant_of(kind, head_dim, value_dim, limits, rows=1, page_size=0):
    """The kernel of decode for caches of a dtype or format, head dims as given, so many packed rows, and pages."""
    if max(head_dim, value_dim) > max(DECODE_TILES):
        return latent_variant(kind, limits, rows)
    if kind in ("float32", "float64"):
        return decode_real_variant(kind, decode_real_dims(head_dim, value_dim)[0], limits)
    if kind in FORMATS:
        return decode_8bit_variant(kind, decode_8bit_dims(head_dim, value_dim)[0], limits, page_size)
    return decode_variant(kind, decode_dims(head_dim, value_dim)[0], limits, rows)


def append_variant(dtype):
    """The step before decode that appends and rotates: a warp a row."""
    return Variant("append", dtype, "window", 256, 256, 1, 1, 8, 4, 1, 0)


# Engines --------------------------------------------------------------------------------------------------------


def plan(problem, limits):
    """Choose engine, variant, copies and launches for a problem. ``limits`` is None where there is no GPU."""
    if problem.library == "numpy":
        return Plan("numpy", "the arrays are NumPy's")
    if problem.cached and problem.dtype not in HALVES:
        raise NotImplementedError(
            f"{problem.function}: has no GPU kernel for {problem.dtype} with lengths yet; "
            f"wanted {' or '.join(HALVES)}, or NumPy arrays"
        )
    portable, hopper = {
        "forward": (_portable_forward, _hopper_float32 if problem.dtype == "float32" else _hopper_forward),
        "backward": (_portable_backward, _hopper_backward),
        "decode": (_portable_decode, None),
    }[problem.function]
    obstacle = not_hopper(limits) or _not_for_hopper(problem)
    if problem.engine == "sm90" and obstacle:
        raise ValueError(f"{problem.function}: engine is 'sm90', but {obstacle}; wanted 'portable' or None")
    if problem.engine == "portable":
        return portable(problem, limits, "asked for")
    if obstacle:
        return portable(problem, limits, f"the engine of every GPU since sm_80, here {limits}; {obstacle}")
    return hopper(problem, limits, "asked for" if problem.engine else f"Hopper's own, here {limits}")


def not_hopper(limits):
    """Why the sm90 engine does not run on a device, or None."""
    if limits.capability != (9, 0):
        return "wgmma is sm_90's alone"
    if limits.nvrtc < (12, 9):
        return f"NVRTC {limits.nvrtc[0]}.{limits.nvrtc[1]} is older than 12.9"
    return None


def _not_for_hopper(problem):
    """Why the sm90 engine does not take a problem, or None."""
    if problem.function == "decode":
        return "decode waits for memory, which wgmma makes no faster"
    if problem.cached:
        return "rows of a cache lie where each is found, not as tensor maps have it"
    widest = max(problem.head_dim, problem.value_dim)
    if problem.dtype == "float64":
        return "wgmma has no float64"
    if problem.dtype == "float32" and problem.function == "backward":
        return "it has no kernel for gradients of float32"
    if problem.dtype == "float32" and widest > max(HOPPER_FLOAT32_TILES[3]):
        return "three parts of more than 128 columns do not fit its shared memory"
    if problem.dtype == "float32" and widest < FEWEST_FLOAT32_COLUMNS:
        return "it pads to 64 columns, the portable engine to 32"
    if 0 in (problem.keys, problem.value_dim):
        return "a tensor map has no empty axis"
    tiles = problem.queries * problem.heads * math.prod(problem.batch)
    if problem.function == "forward" and tiles > MOST_TILES:
        return "a ticket counts no more than 2^30 tiles"
    return None


# Tiles of backward's main kernel, by the larger of the padded head dims: tile_q, tile_k, warps, blocks a
# multiprocessor, stages. The first that fit its shared memory are taken.
BACKWARD_TILES = {
    64: ((64, 128, 4, 2, 2), (64, 128, 4, 1, 2)),
    128: ((64, 128, 8, 1, 2), (64, 64, 4, 1, 1)),
    256: ((64, 64, 8, 1, 2), (64, 64, 8, 1, 1), (64, 16, 4, 1, 1)),
}
# The same of the sm90 engine: tile_q, tile_k, warps.
HOPPER_BACKWARD_TILES = {64: (128, 128, 12), 128: (64, 128, 12), 256: (64, 64, 12)}
# And of its kernel of dq alone, for head dims at which the main kernel leaves dq out.
HOPPER_DQ_TILES = {256: (128, 64, 12)}


def backward_variant(dtype, head_dim, value_dim, limits):
    """The portable engine's main kernel of backward for head dims as given."""
    if dtype == "float32":
        return float32_backward_variant(head_dim, value_dim, limits)
    if dtype == "float64":
        return float64_backward_variant(head_dim, value_dim, limits)
    head_dim, value_dim = _padded(head_dim, value_dim)
    widest = max(head_dim, value_dim)
    for tile_q, tile_k, warps, blocks, stages in next(BACKWARD_TILES[dim] for dim in BACKWARD_TILES if widest <= dim):
        if limits.capability >= (10, 0) and widest > 128 and stages == 2:  # registers spill there
            continue
        mates = warps // max(tile_k // 32, 1)  # warps that own the same keys
        shared = 2 * (tile_k + stages * tile_q) * (head_dim + value_dim)  # k and v, q and dout
        shared += 2 * tile_k * tile_q  # ds
        shared += 2 * tile_k * tile_q if mates > 1 else 16  # p, which has no array else; none is empty
        shared += 8 * stages * tile_q + 64 * 16 + 48  # numbers of rows, visits, what a block works on
        if blocks * (shared + 1024) <= limits.shared_bytes + 1024:
            break
    return Variant(
        "backward", dtype, "window", head_dim, value_dim, tile_q, tile_k, warps, blocks, stages, shared,
        vector_adds=int(limits.capability >= (9, 0)),
    )  # fmt: skip


# Tiles of backward's main kernel in float32, by the padded head dim, of v too: tile_q, tile_k, warps, blocks a
# multiprocessor. The first that fit shared memory are taken. Nothing of it is measured.
FLOAT32_BACKWARD_TILES = {
    32: ((64, 64, 4, 2), (64, 64, 4, 1)),
    64: ((64, 128, 8, 1), (64, 64, 8, 1), (32, 64, 4, 1)),
    96: ((64, 64, 8, 1), (32, 64, 4, 1), (32, 32, 4, 1)),
    128: ((64, 64, 8, 1), (32, 64, 4, 1), (16, 32, 4, 1)),
    256: ((32, 32, 8, 1), (16, 32, 4, 1), (16, 16, 4, 1)),
}


def float32_backward_dims(head_dim, value_dim):
    """Head dims as backward compiles them for float32: alike."""
    return _alike(FLOAT32_BACKWARD_TILES, head_dim, value_dim)


def float32_backward_variant(head_dim, value_dim, limits):
    """The portable engine's main kernel of backward in float32, for head dims as given."""
    dim, _ = float32_backward_dims(head_dim, value_dim)
    vectors = int(limits.capability >= (9, 0))
    choices = [_float32_backward_variant(dim, *tile, vectors) for tile in FLOAT32_BACKWARD_TILES[dim]]
    return _first_that_fits(choices, limits)


def _float32_backward_variant(dim, tile_q, tile_k, warps, blocks, vectors):
    shared = 12 * dim * (tile_q + tile_k)  # three parts each of q, dout, k and v
    shared += 6 * tile_q * tile_k  # and of ds
    shared += 8 * tile_q + 64 * 16 + 80  # numbers of rows, visits, what a block works on
    return Variant(
        "backward_f32", "float32", "window", dim, dim, tile_q, tile_k, warps, blocks, 2, shared, vector_adds=vectors,
        parts=3,
    )  # fmt: skip


# Tiles of backward's main kernel in float64: tile_q, tile_k, warps, whether k and v lie in shared memory. The first
# that fit it are taken, so the largest, by which rows are read least often; registers have room for all of them. At
# head_dim 256 keys and values do not fit 99 KB beside rows. Head dims are padded alike. On an H200, at 64: 32 rows
# 0.86; at 128 16 rows 0.89, 32 keys 0.73; 16 warps the same.
FLOAT64_BACKWARD_TILES = (
    (64, 64, 8, 1),
    (32, 64, 8, 1),
    (32, 32, 8, 1),
    (16, 32, 8, 1),
    (16, 16, 4, 1),
    (16, 16, 4, 0),
)
FLOAT64_BACKWARD_DIMS = (32, 64, 96, 128, 192, 256)


def float64_backward_dims(head_dim, value_dim):
    """Head dims as backward compiles them for float64: alike."""
    return _alike(FLOAT64_BACKWARD_DIMS, head_dim, value_dim)


def float64_backward_variant(head_dim, value_dim, limits):
    """The portable engine's main kernel of backward in float64, for head dims as given."""
    dim, _ = float64_backward_dims(head_dim, value_dim)
    tall = int(limits.capability >= (9, 0))
    whole = [tile for tile in FLOAT64_BACKWARD_TILES if dim // 8 * tile[0] % (16 * tile[2]) == 0]  # parts of dq
    choices = [_float64_backward_variant(dim, *tile, tall) for tile in whole]
    return _first_that_fits(choices, limits)


def _float64_backward_variant(dim, tile_q, tile_k, warps, keys_shared, tall):
    shared = 16 * dim * tile_k if keys_shared else 256  # k and v, whose arrays are never empty
    shared += 16 * dim * tile_q  # q and dout
    shared += 16 * tile_k * tile_q  # p and ds
    shared += 16 * tile_q + 1072 + 16  # numbers of rows, agenda, where keys lie
    return Variant(
        "backward_f64", "float64", "window", dim, dim, tile_q, tile_k, warps, 1, 1, shared,
        tall_products=tall, keys_shared=keys_shared,
    )  # fmt: skip


def hopper_backward_dims(head_dim, value_dim):
    """Head dims as the sm90 engine's backward compiles them: alike."""
    return _alike(HOPPER_BACKWARD_TILES, head_dim, value_dim)


def hopper_backward_variant(dtype, dim):
    """The sm90 engine's main kernel of backward for a padded head dim, of v too."""
    tile_q, tile_k, warps = HOPPER_BACKWARD_TILES[dim]
    roles = dim in HOPPER_DQ_TILES  # of the two consumers, who leave dk and dv where k and v were
    dscores, part, grad, weights = (16, 16, 16, 4 * tile_q * tile_k) if roles else (
        2 * tile_q * tile_k, 4 * 64 * 64, 2 * 64 * dim, 16,
    )  # fmt: skip
    shared = 2 * dim * (4 * tile_q + 2 * tile_k) + weights  # q and dout, twice each; k and v
    shared += 2 * (dscores + part + grad)  # ds, twice; of each consumer: a part of dq, dk or dv on the way out
    shared += 16 * tile_q + 8 * 20 + 2 * 56 + 8 * 42  # numbers of rows, visits, items, barriers
    return Variant("backward_sm90", dtype, "window", dim, dim, tile_q, tile_k, warps, 1, 2, shared)


def hopper_dq_variant(dtype, dim):
    """The sm90 engine's kernel of dq alone for a padded head dim, of v too."""
    tile_q, tile_k, warps = HOPPER_DQ_TILES[dim]
    shared = 2 * dim * (2 * tile_q + 3 * tile_k) + 8 * 10  # q and dout; keys twice, values; barriers
    return Variant("backward_dq_sm90", dtype, "window", dim, dim, tile_q, tile_k, warps, 1, 2, shared)


def rows_variant(dtype):
    """The kernel of backward that goes before: eight threads a row, and rows a block that fill tiles of queries."""
    rows, blocks = (16, 8) if dtype in ("float32", "float64") else (64, 6)
    return Variant("backward_rows", dtype, "window", 256, 256, rows, 64, 4, blocks, 1, 0)


def finish_variant(dtype):
    """The kernel of backward that goes behind: as many rows of dq a block as the main kernel keeps together."""
    rows, blocks = (16, 12) if dtype in ("float32", "float64") else (64, 5)
    return Variant("backward_finish", dtype, "window", 256, 256, rows, 64, rows // 16, blocks, 1, 0)


# Forward --------------------------------------------------------------------------------------------------------


def _portable_forward(problem, limits, reason):
    if problem.cached:
        variant = cache_variant(problem.dtype, problem.head_dim, problem.value_dim, limits)
    else:
        variant = forward_variant(problem.dtype, problem.mask.name, problem.head_dim, problem.value_dim, limits)
    pack = _pack(problem, lambda pack: variant.tile_q)
    args, operands, _, copies, buffers = _forward(problem, pack, variant.tile_q)
    blocks = args["schedule"][0] * args["schedule"][2]
    args["out_vectors"] = int(_layout.in_chunks(operands["out"], ELEMENTS[problem.dtype].itemsize))
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
    args, _, maps, copies, buffers = _forward(problem, pack, consumers * _whole_rows(pack), key_box=variant.tile_k)
    blocks = args["schedule"][0] * args["schedule"][2]
    if blocks == 0:
        return Plan("sm90", reason, (), buffers)
    args |= {"blocks": blocks, "rows": _whole_rows(pack), "out_boxes": int("out_map" in maps)}
    step = Step(variant, min(blocks, limits.processors), 32 * variant.warps, variant.shared_bytes, args, maps)
    return Plan("sm90", reason, copies, (*buffers, Buffer("ticket", (1,), "int32", (), zeroed=True)), (step,))


def _hopper_float32(problem, limits, reason):
    """Launches: parts of q, k and v; out and lse."""
    dim, _ = hopper_float32_dims(problem.head_dim, problem.value_dim)
    parts = 2 if problem.precision == "tf32" else 3
    variant, splitter = hopper_float32_variant(dim, parts), parts_variant(dim, parts)
    pack = _pack(problem, lambda pack: variant.tile_q)
    args, operands, _, copies, buffers = _forward(problem, pack, variant.tile_q)
    tiles, _, heads = args["schedule"]
    if tiles * heads == 0:
        return Plan("sm90", reason, (), buffers)
    args["out_vectors"] = int(_layout.in_chunks(operands["out"], ELEMENTS[problem.dtype].itemsize))
    rows = {"q": (heads, problem.queries * pack)}
    rows |= dict.fromkeys("kv", (math.prod(problem.batch) * problem.key_heads, problem.keys))
    split, maps, blocks = [], {}, {}
    for name, (heads_here, rows_here) in rows.items():
        pitch = 2 * dim
        strides = pitch, pitch * rows_here, pitch * rows_here * heads_here
        split.append(Buffer(f"{name}_parts", (parts, heads_here, rows_here, dim), "bfloat16", (0, 1, 2)))
        dims, box = (dim, rows_here, heads_here, parts, 1), (64, 64 if name == "q" else variant.tile_k, 1, 1, 1)
        maps[f"{name}_map"] = _layout.TensorMap(f"{name}_parts", dims, (*strides, 16), box, itemsize=2)
        blocks[name] = heads_here * -(-rows_here // splitter.tile_q)
    before = {name: value for name, value in args.items() if name != "out_vectors"}
    before |= {"query_blocks": blocks["q"], "key_blocks": blocks["k"]}
    steps = [Step(splitter, sum(blocks.values()), 32 * splitter.warps, 0, before)]
    steps += (
        Step(
            variant,
            grid=min(tiles * heads - first, LARGEST_GRID),
            threads=32 * variant.warps,
            shared_bytes=variant.shared_bytes,
            args=args | {"first_block": first},
            tensor_maps=maps,
        )
        for first in range(0, tiles * heads, LARGEST_GRID)
    )
    return Plan("sm90", reason, copies, (*buffers, *split), tuple(steps))


def _forward(problem, pack, tile_q, key_box=None):
    """Arguments of a forward kernel, operands, tensor maps if ``key_box`` keys go into a box, copies, buffers."""
    element = ELEMENTS[problem.dtype]
    scale, factor = _positive(problem.scale, element)
    out_shape = (*problem.batch, problem.heads, problem.queries, problem.value_dim)
    order = problem.q.order
    out = problem.out or Operand(out_shape, contiguous(out_shape, order, element.itemsize), True)
    tensors = key_box is not None
    uses = {
        "q": Use(problem.q, problem.dtype, 16, tensor=tensors, factor=factor),
        "k": Use(problem.k, problem.dtype, 16, tensor=tensors),
        "v": Use(problem.v, problem.dtype, 16, tensor=tensors),
        "out": Use(out, problem.dtype, 16 if tensors else 1, written=True),  # in chunks, or element by element
    }
    caches = {name: uses.pop(name) for name in ("k", "v")} if problem.cached else {}
    operands, copies, lengths, where = _layout.lay_out(problem.batch, uses)
    which = _shifts(problem)
    if caches:  # pages are an axis of their own
        _, more, _, there = _layout.lay_out(problem.k.shape[:1], caches)
        paging, tables = _paging(problem)
        where, copies, which = where | there, copies | more | tables, paging | _sides(problem)
    tiles = -(-problem.queries * pack // tile_q)
    head_blocks = problem.heads // pack
    heads = head_blocks * math.prod(problem.batch)
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
        **which,
        "scale_log2": scale * LOG2_E,
    }
    buffers = (
        Buffer("out", out_shape, problem.dtype, order),
        Buffer("lse", out_shape[:-1], element.lse.name, tuple(range(len(out_shape) - 2))),
    )
    boxes = {"q": (pack, 64 // pack), "k": (1, key_box), "v": (1, key_box), "out": (pack, 16 // pack)}
    if 16 % pack or not _layout.is_tensor(operands["out"]):
        del boxes["out"]
    maps = key_box and {
        f"{name}_map": _layout.tensor_map(name, operands[name], lengths, where[name], box)
        for name, box in boxes.items()
    }
    return args, operands, maps, tuple(copies.values()), buffers


def _shifts(problem):
    """The shifts of the mask as the most general one, `_masks.Window`, has them; others ignore what they lack."""
    full = {"full": (-problem.queries, problem.keys), "causal": (-problem.queries, problem.mask.end_shift)}
    shifts = full.get(problem.mask.name, (problem.mask.first_shift, problem.mask.end_shift))
    return dict(zip(("first_shift", "end_shift"), shifts, strict=True))


def _sides(problem):
    """What kernels of caches make the same of, where they know a sequence's length."""
    left, right = problem.window or (None, None)
    right = min(LONGEST if right is None else right, 0 if problem.causal else LONGEST)
    left = LONGEST if left is None else min(left, LONGEST)
    return {"left": left, "right": right, "top_left": int(problem.causal == "top-left")}


def _whole_rows(pack):
    """Packed rows, of a consumer's 64, that whole queries fill."""
    return 64 // pack * pack


def _positive(scale, element):
    """A positive scale that kernels can fold into the exponent, and the factor that is left for a copy of q."""
    limits = np.finfo(element.lse)
    if abs(scale) * LOG2_E < float(limits.tiny):  # flushed to 0 there, and 0 times a hidden score's -inf is NaN
        return 1.0, 0.0
    return min(abs(scale), float(limits.max) / 2), math.copysign(1.0, scale)


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


# Decode ---------------------------------------------------------------------------------------------------------

INVARIANT_KEYS = 1024  # of a split whose ends are to be the same in every batch
SHORT_KEYS = 512  # of a split that is for a second block beside the first
LONG_KEYS = 4096  # likewise, where one reads as fast as two
FEWEST_BESIDE_OTHERS = 1024  # keys of a split, where there are blocks enough without
# Keys of a split where caches are full, at most, so that one long sequence among short ones, or the last of more than
# there is room for at once, does not take long: with 4096, 1.03 of the time where all are long.
MOST_KEYS = 16384
# Where sequences differ in length, the device shares out their keys; see ``kernels/shares.cuh``. A block that ends
# leaves its multiprocessor to the one beside it, and the last ones to end leave the rest of the device to nobody: many
# short splits are best for that, but each costs as much as some 300 keys. A model of both, of 64 sequences with 8 key
# heads and lengths from 100 to 64k, log-uniform, says that 4 waves of blocks, the longest splits first, reach 0.87 of
# what is ideal, 2 waves 0.86, 4 in the order of sequences 0.83, and splits that are alike 0.71.
RAGGED_WAVES = 4  # at most
# Keys of a split where there is more than one wave. Where that would be less than one, splits are shorter: down to
# SHORT_KEYS while two blocks share a multiprocessor, and below that, a block on each, down to a tile for each warp.
RAGGED_KEYS = 4096
MOST_RAGGED = 1024  # sequences, whose lengths each warp of each block reads
# Of values that are columns of keys, parts are long: 2 KB a row, which the block that comes last adds by itself. With
# splits as many as the root of this share of the keys, that takes about as long as what a split has to do.
LATENT_SPLIT = 32
# Splits that are the blocks of a cluster add their parts from one another's shared memory, which takes 1 us, and 2.5 by
# way of global memory. But clusters of more than two leave some multiprocessors of an H200 with two blocks and others
# with none, so these are for short splits: with 32 items and 4 splits, 1 x 1k 10.4 us (without 11.7), 1 x 2k 14.9
# (15.5), 1 x 4k 23.9 (23.0), 1 x 8k 41.3 (37.8).
CLUSTER_KEYS = 512  # of a split, at most, where more than two are a cluster
# Keys of a split, at most, for it to be one of a cluster's rather than of twice as many that are not: with 8 items,
# 1 x 1k 7.5 us with 8 splits, 8.4 with 16; 1 x 2k 9.6, 9.5; 1 x 8k 19.9, 15.7.
FEWER_KEYS = 128
# Where sequences may differ, and at two splits items have blocks for this share of the multiprocessors, a pair is a
# cluster: 8 x 8k, 64 items, 65.8 us, 68.7 with 4 splits; 7 x 8k 61, 81; 8 x 64k 470, 478. Where a block reads slower
# it is no gain: from pages of 16 72.6 and 71.2, from float64 316 and 272.
PAIRED = 0.7
LATE_WAVES = 1.5  # of blocks, from which on half of the first begin late: 64 x 1k, 67.5 -> 66.8 us, 32 heads 247 -> 241
MOST_WAVES = 16  # so long as the blocks are no more, for those of short sequences have nothing to do but end


def _portable_decode(problem, limits, reason):
    """One launch, or several where blocks are too many, after those of `_append`; see ``kernels/decode.cu``."""
    rows, element = problem.queries * problem.group, ELEMENTS[problem.dtype]
    kind = problem.kv_format or problem.dtype  # of the caches
    page_size = 0 if problem.page_table is None else problem.k.shape[2]
    variant = decode_variant_of(kind, problem.head_dim, problem.value_dim, limits, rows, page_size)
    scale, factor = _positive(problem.scale, element)
    (sequences,), order = problem.batch, problem.q.order
    out_shape = (sequences, problem.heads, problem.queries, problem.value_dim)
    out = problem.out or Operand(out_shape, contiguous(out_shape, order, element.itemsize), True)
    buffers = (
        Buffer("out", out_shape, problem.dtype, order),
        Buffer("lse", out_shape[:-1], element.lse.name, (0, 1)),
    )
    tiles = -(-rows // variant.tile_q)
    items = sequences * problem.key_heads * tiles
    splits, fewest = _splits(problem, variant, limits, items)
    blocks = problem.key_heads * tiles * splits  # of a sequence
    shared_out, shares = _shares(problem, variant, limits, items, splits)
    if max(rows, blocks) > LARGEST_GRID:
        raise ValueError(f"decode: a sequence has {rows} rows, {blocks} blocks; wanted at most {LARGEST_GRID} of each")
    before = problem.appended or problem.overflow or problem.cos and rows
    if sequences == 0 or not (rows or before):
        return Plan("portable", reason, (), buffers)

    uses = {
        "q": Use(problem.q, problem.dtype, 1 if problem.cos else 16, factor=factor),
        "out": Use(out, problem.dtype, 1, written=True),
    }
    operands, copies, _, where = _layout.lay_out(problem.batch, uses)
    pages = problem.k.shape[:1]
    caches = {"k": Use(problem.k, kind, 16), "v": Use(problem.v, kind, 16)}
    if variant.kernel == "decode_latent":
        del caches["v"]
        reason += "; v is k's first columns, which are read once"
    _, more, _, there = _layout.lay_out(pages, caches)
    where, copies = where | there, copies | more
    paging, tables = _paging(problem)
    copies |= tables
    args = {
        **{f"{name}_strides": places for name, places in where.items()},
        "queries": problem.queries,
        "capacity": problem.keys,
        "appended": int(bool(before)),
        "heads": problem.heads,
        "group": problem.group,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        "key_heads": problem.key_heads,
        "tiles": tiles,
        "splits": splits,
        "fewest": fewest,
        **shares,
        **_late(variant, limits, items * splits),
        **paging,
        **_sides(problem),
        "out_vectors": int(_layout.in_chunks(operands["out"], element.itemsize)),
        "bfloat16": int(problem.dtype == "bfloat16"),
        "scale_log2": scale * LOG2_E,
    }
    for name, scales in (("k", problem.k_scale), ("v", problem.v_scale)):
        if scales is not None:
            slots = len(scales.shape) == 3
            page, head, slot = scales.strides if slots else (0, *scales.strides, 0)
            args |= {f"{name}_slots": int(slots), f"{name}_scale_strides": (0, page, head, slot)}
    steps = ()
    if before:
        steps, made = _append(problem, operands["q"], paging)
        buffers += made
        args["length_stride"] = 4  # of the totals
        if problem.cos:
            args["q_strides"] = (0, *_rotated(problem).strides[:3])
    together = min(LARGEST_GRID // max(blocks, 1), sequences)  # sequences of a launch
    largest = shared_out or together * blocks  # blocks of one, of which each has room for a part
    cluster = _cluster(problem, variant, tiles, args["splits"])
    if shared_out > items or splits > 1 and cluster == 1:
        record = min(rows, variant.tile_q) * (variant.value_dim + 4)  # a row's quads, then its reference and sum
        buffers += (
            Buffer("parts", (largest, record), element.lse.name, (0,)),
            Buffer("arrived", (items,), "int32", (), zeroed=True),
        )
    steps += tuple(
        Step(
            variant,
            grid=shared_out or min(sequences - first, together) * blocks,
            threads=32 * variant.warps,
            shared_bytes=variant.shared_bytes,
            args={**args, "first_sequence": first},
            cluster=cluster,
        )
        for first in range(0, sequences if rows else 0, together)
    )
    return Plan("portable", reason, tuple(copies.values()), buffers, steps)


def _paging(problem):
    """Arguments that say where lengths, page table and pages lie; and the tables to be converted, by name."""
    pages, _, page_size, _ = problem.k.shape
    page_size = max(page_size, 1)
    shift = (page_size - 1).bit_length()
    args, copies = {
        "pages": pages,
        "page_size": page_size,
        "page_multiplier": 2**32 * (2**shift - page_size) // page_size + 1,
        "page_shift": shift,
    }, {}
    for table, strides in (
        (problem.lengths, ("length_stride",)),
        (problem.page_table, ("table_stride", "table_step")),
    ):
        if table is None:
            continue
        if table.dtype != "int32":
            kind = np.iinfo(table.dtype)
            highest = {"lengths": problem.keys, "page_table": pages}[table.name]
            limits_of = max(-1, kind.min), min(highest, kind.max)
            copies[table.name] = _layout.Integers(table.name, table.shape, *limits_of)
        steps = table.strides if table.dtype == "int32" else contiguous((*table.shape, 1), range(len(table.shape)), 4)
        args |= dict(zip(strides, steps, strict=False))
    return args, copies


def _rotated(problem):
    """Where q lies once it is rotated: in C order, rows at multiples of 16 bytes."""
    shape, itemsize = problem.q.shape, ELEMENTS[problem.dtype].itemsize
    return Operand(shape, contiguous(shape, (0, 1, 2), itemsize, -(-shape[-1] * itemsize // 16) * 16), True)


def _append(problem, q, paging):
    """The launches before decode's, and their buffers; see the head of ``kernels/append.cu``."""
    (sequences,), itemsize = problem.batch, ELEMENTS[problem.dtype].itemsize
    variant, rotated = append_variant(problem.dtype), _rotated(problem)
    steps_of = {"q": q, "k_new": problem.k_new, "v_new": problem.v_new, "k": problem.k, "v": problem.v}
    rotated_heads = problem.heads if problem.cos else 0
    rows = problem.queries * (rotated_heads + (2 * problem.key_heads if problem.appended else 0))
    if rows > LARGEST_GRID:
        raise ValueError(f"decode: a sequence has {rows} rows to append and rotate; wanted at most {LARGEST_GRID}")
    rows = max(rows, 1)
    args = {
        **{f"{name}_steps": operand.strides for name, operand in steps_of.items() if operand},
        "rotated_steps": rotated.strides,
        **paging,
        "rows": rows,
        "queries": problem.queries,
        "appended": problem.appended,
        "capacity": problem.keys,
        "rotated_heads": rotated_heads,
        "key_heads": problem.key_heads,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        "interleaved": int(problem.rotary_interleaved),
    }
    buffers = (Buffer("totals", (sequences, 1), "int32", (0,)),)
    if problem.cos:
        positions, half = problem.cos.shape
        args |= {"half": half if positions else 0, "positions": min(positions, LONGEST)}
        args["single"] = int(problem.cos.dtype == "float32")
        for table in (problem.cos, problem.sin):
            args |= dict(zip((f"{table.name}_step", f"{table.name}_column"), table.strides, strict=True))
        buffers += (Buffer("rotated", (*rotated.shape[:3], rotated.strides[2] // itemsize), problem.dtype, (0, 1, 2)),)
    if problem.overflow:
        (args["overflow_stride"],) = problem.overflow.strides
    if problem.appended:
        args |= {
            f"{name}_vectors": int(all(_layout.in_chunks(x, itemsize) for x in operands))
            for name, operands in (("k", (problem.k_new, problem.k)), ("v", (problem.v_new, problem.v)))
        }
    together = LARGEST_GRID // rows  # sequences of a launch
    steps = []
    for first in range(0, sequences, together):
        items = min(sequences - first, together) * rows
        blocks = -(-items // variant.warps)
        step_args = {**args, "items": items, "first_sequence": first}
        steps.append(Step(variant, blocks, 32 * variant.warps, variant.shared_bytes, step_args))
    return tuple(steps), buffers


def _splits(problem, variant, limits, items):
    """Splits of a tile of rows' keys, at most, and tiles of keys that one has, at least.

    Lengths are not known here. A split has more tiles than the least where there would be more splits, see ``work_of``
    in ``kernels/split.cuh``.
    """
    tile = variant.tile_k
    most = _most_tiles(problem, tile, min(problem.queries, variant.tile_q // max(problem.group, 1) + 2))
    if problem.splits is not None:
        return max(min(problem.splits, most), 1), 1
    if problem.batch_invariant:
        return max(-(-most * tile // INVARIANT_KEYS), 1), INVARIANT_KEYS // tile
    items = max(items, 1)
    # A block a multiprocessor reads as fast as two, and parts are half as many to add. On an H200, with 8 items: 1 x 8k
    # 16.2 us with 16 splits, 18.6 with 33; 1 x 64k 66.3, 66.9 and, with 66, 82.3; 1 x 128k 125.0, 124.3. With 32:
    # 1 x 64k 239.2 with 4, 236.7 with 8; 1 x 128k 471, 466. With 64: 8 x 8k 67.1 with 2, 67.9 with 4; 8 x 64k 468, 466.
    filling, both = (_filling(blocks, limits, items) for blocks in (1, variant.blocks_per_sm))
    resident = limits.processors * variant.blocks_per_sm
    latent = variant.kernel == "decode_latent"  # blocks fill a multiprocessor, and all warps take each tile
    if latent:
        filling = min(filling, math.isqrt(most * tile // LATENT_SPLIT) + 1)
    elif _reads_slower(problem):
        # Pages of 16, with 32 items: 1 x 64k 264 us with 4 splits, 247 with 8. float64, with 8: 1 x 64k 325 with 16,
        # 276 with 32. Short splits are no gain: pages, with 8, 1 x 8k 16.7 us with 16, 18.1 with 33.
        filling = max(filling, min(both, most * tile // SHORT_KEYS))
    elif most * tile >= both * LONG_KEYS and items * both <= resident:
        filling = both
    one_tile = problem.queries * problem.group <= variant.tile_q
    if one_tile and most * tile <= variant.clusters * FEWER_KEYS:
        filling = min(filling, variant.clusters)
    fewest = tile * _fewest(variant) if filling > 1 else FEWEST_BESIDE_OTHERS
    if problem.lengths is not None and problem.batch[0] > 1 or items > resident:
        filling = max(filling, min(-(-most * tile // MOST_KEYS), MOST_WAVES * resident // items))
    return max(min(filling, -(-most * tile // fewest)), 1), fewest // tile


def _reads_slower(problem):
    """Whether one block does not read as fast as its multiprocessor can: pages are looked up, bytes converted."""
    return problem.page_table is not None or problem.kv_format is not None or problem.dtype == "float64"


def _most_tiles(problem, tile, queries):
    """Tiles of keys that so many neighbouring rows see, at most."""
    most = -(-problem.keys // tile)
    left, right = problem.window or (None, None)
    right = 0 if problem.causal and (right is None or right > 0) else right
    if None in (left, right):
        return most
    return min(most, (left + right + queries + tile - 2) // tile + 1)  # one more where their run begins inside one


def _shares(problem, variant, limits, items, splits):
    """Blocks of a launch that shares out the keys of all sequences, and its arguments; see ``kernels/shares.cuh``.

    0 and none where splits do not follow lengths, there is nothing to share out, or numbers leave 31 bits.
    """
    (sequences,), tile = problem.batch, variant.tile_k
    if problem.lengths is None or problem.splits or problem.batch_invariant or not 1 < sequences <= MOST_RAGGED:
        return 0, {}
    most = _most_tiles(problem, tile, problem.queries)
    together = limits.processors * variant.blocks_per_sm
    args = {
        "sequences": sequences,
        "lone": max(limits.processors - items, 1),
        "wave": max(together - items, 1),
        "waves": RAGGED_WAVES * together,
        "short_share": (short := max(SHORT_KEYS // tile, 1)),
        "least_share": min(_fewest(variant), short),
        "usual_share": max(RAGGED_KEYS // tile, short),
    }
    # An item has one split more than whole shares at most, and no more than it would have if shares were the shortest.
    least, short, usual = (items * max(-(-most // args[f"{which}_share"]), 1) for which in ("least", "short", "usual"))
    shared = min(args["waves"] + items, max(usual, together), max(short, limits.processors), least)
    tiles = items // sequences // problem.key_heads
    pairs = variant.clusters and tiles == 1 and not _reads_slower(problem)
    if pairs and PAIRED <= 2 * items / limits.processors <= 1:
        splits = 2
    elif shared > limits.processors:
        # Some multiprocessors get two blocks of such a grid before others get one, so that with a block for each there
        # some are done late: where lengths are alike, 8 x 8k, 64 items, 86 us with 2 splits. With 4 all get two.
        splits = max(splits, min(_filling(variant.blocks_per_sm, limits, items), most * tile // SHORT_KEYS))
    args["splits"] = splits
    cluster = _cluster(problem, variant, tiles, splits)
    grid = -(-max(items * splits, shared) // cluster) * cluster
    if grid > LARGEST_GRID or most * max(items, 8 * sequences) > LARGEST_SUM:
        return 0, {}
    return grid, args


def _late(variant, limits, blocks):
    """Which of so many blocks begin late; see ``begin_late`` in ``kernels/split.cuh``."""
    first, room = limits.processors, 2 * (variant.shared_bytes + 1024)  # of two blocks, with what the system takes
    late = room <= limits.shared_bytes + 1024 and blocks >= LATE_WAVES * 2 * first
    return {"late_first": first, "late_end": 2 * first} if late else {}


def _cluster(problem, variant, tiles, splits):
    """Blocks of a cluster: all splits of a tile of rows, or 1."""
    if tiles > 1 or not 1 < splits <= variant.clusters:
        return 1
    keys = _most_tiles(problem, variant.tile_k, problem.queries) * variant.tile_k
    return splits if splits == 2 or keys <= splits * CLUSTER_KEYS else 1


def _fewest(variant):
    """Tiles of keys of a split, at least: one for each warp."""
    return variant.stages if variant.kernel == "decode_latent" else variant.warps  # all warps of which take each tile


def _filling(blocks, limits, items):
    """Splits with which so many blocks a multiprocessor, or a few less, have all items."""
    return -(-95 * blocks * limits.processors // (100 * items))


# Backward -------------------------------------------------------------------------------------------------------


def _portable_backward(problem, limits, reason):
    variant = backward_variant(problem.dtype, problem.head_dim, problem.value_dim, limits)
    return _backward(problem, limits, "portable", reason, variant, parts=1)


def _hopper_backward(problem, limits, reason):
    dim, _ = hopper_backward_dims(problem.head_dim, problem.value_dim)
    variant = hopper_backward_variant(problem.dtype, dim)
    return _backward(problem, limits, "sm90", reason, variant, parts=2)


def _backward(problem, limits, engine, reason, variant, parts):
    """Three launches: row sums; dk, dv and the sum of dq; dq. See ``kernels/visits.cuh`` for the order of sums.

    Or four, where registers hold dk and dv alone: row sums; dq; dk and dv; what has to be made again.
    """
    grads = {"dq": problem.q, "dk": problem.k, "dv": problem.v}
    results = tuple(_gradient_buffer(problem, name, like) for name, like in grads.items())
    batches = math.prod(problem.batch)
    if 0 in (batches, problem.heads, problem.queries, problem.keys):
        return Plan(engine, reason, (), results)

    real = ELEMENTS[problem.dtype].lse  # dtype of sums
    operands, copies, lengths, where = _layout.lay_out(problem.batch, _backward_uses(problem, grads, engine))
    copies |= {
        name: _layout.Copy(name, x.shape, real.itemsize * x.shape[-1], real.name)
        for name, x in (("lse", problem.lse), ("dlse", problem.dlse))
        if x and not _layout.is_contiguous(x, real.itemsize)
    }
    query_tiles, key_tiles = -(-problem.queries // variant.tile_q), -(-problem.keys // variant.tile_k)
    heads, items = batches * problem.heads, batches * problem.key_heads * key_tiles
    padded = query_tiles * variant.tile_q
    before, behind = rows_variant(problem.dtype), finish_variant(problem.dtype)
    row_blocks = heads * padded // before.tile_q
    if max(items, row_blocks) > MOST_PARTS:
        has = f"{items} tiles of keys and {row_blocks} of {before.tile_q} rows, counted over all heads"
        raise ValueError(f"backward: has {has}; wanted at most {MOST_PARTS} of each")
    blocks = limits.processors * variant.blocks_per_sm
    passes = _passes(problem, variant, key_tiles, blocks)
    largest = float(np.finfo(real).max) / 2
    scale = min(max(problem.scale, -largest), largest)
    wide = {name: int(bool(like.stretched)) for name, like in grads.items()}
    alone = engine == "sm90" and variant.head_dim in HOPPER_DQ_TILES
    boxes = {"q": variant.tile_q, "dout": variant.tile_q, "k": variant.tile_k, "v": variant.tile_k}
    boxes |= {name: 64 for name in grads if not wide[name] and _layout.is_tensor(operands[name])}
    args = {
        **{f"{name}_strides": places for name, places in where.items()},
        "queries": problem.queries,
        "keys": problem.keys,
        "heads": problem.heads,
        "group": problem.group,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        "batches1": lengths[1],
        **_shifts(problem),
        "query_tiles": query_tiles,
        "key_tiles": key_tiles,
        "cyclic": int(problem.mask.name == "full"),
        "passes_log2": passes.bit_length() - 1,
        "section": _section_of_heads(problem.mask, passes, key_tiles, blocks),
        "items": items,
        "tile_q": variant.tile_q,
        "tile_k": variant.tile_k,
        "columns": 0 if alone else variant.head_dim,
        "parts": parts,
        "clear": int(not variant.ordered),
        **{f"{name}_wide": flag for name, flag in wide.items()},
        "boxes": int(engine == "sm90" and "dk" in boxes and "dv" in boxes),
        "scale": scale,
        "scale_log2": scale * LOG2_E,
    }
    sums = () if alone else (Buffer("dq_sum", (heads, padded, variant.head_dim), real.name, (0, 1)),)
    buffers = (
        Buffer("row_lse", (heads, padded), real.name, (0,)),
        Buffer("row_delta", (heads, padded), real.name, (0,)),
        *sums,
        Buffer("turns", (FIRST_COUNTER + len(sums) * heads * query_tiles * parts,), "int32", (), cleared=True),
        Buffer("suspects", (items,), "int32", (), cleared=True),
    )

    def maps(*names):
        if engine != "sm90":
            return {}
        return {
            f"{name}_map": _layout.tensor_map(name, operands[name], lengths, where[name], (1, boxes[name]))
            for name in ("q", "dout", "k", "v", *names)
            if name in boxes
        }

    def step(variant, grid, more=None, **facts):
        return Step(variant, grid, 32 * variant.warps, variant.shared_bytes, args | (more or {}), **facts)

    finished = items
    steps = [step(before, row_blocks)]
    if alone:
        dq = hopper_dq_variant(problem.dtype, variant.head_dim)
        tiles = -(-problem.queries // dq.tile_q)
        schedule = tiles, _section(problem, 1, heads, tiles), heads
        more = {"schedule": schedule, "boxes": int("dq" in boxes)}
        steps.append(step(dq, heads * tiles, more, tensor_maps=maps("dq")))
    else:
        finished = max(items, heads * -(-problem.queries // behind.tile_q))  # of both, one each a block
    steps.append(step(variant, min(items, blocks), tensor_maps=maps("dk", "dv"), cooperative=True))
    steps.append(step(behind, finished))
    return Plan(engine, reason, tuple(copies.values()), results + buffers, tuple(steps))


def _passes(problem, variant, key_tiles, blocks):
    """Passes over the tiles of keys of a head, a power of two: what keeps neighbours apart for as many visits as
    handing a turn on takes, so long as the heads of two batches fill the device all the same; and no more tiles in one
    than blocks.

    It decides the order of sums, so how many batches there are has no say in it. On an H200 causal lengths of 1,024
    gain 2 to 7 % from two batches on, at head_dim 128 and 64, and one alone loses 8 and 5.
    """
    # Under a mask blocks that begin a pass one after another get close: with 2 visits 0.96 of the speed on the portable
    # engine, 0.91 to 0.98 on sm90 with a causal mask. Without one hardly any two meet, and 4 take the caches of four
    # heads: 0.86 at head_dim 256.
    distance = 2 if problem.mask.name == "full" else 4
    if variant.engine == "sm90" and variant.head_dim in HOPPER_DQ_TILES:  # nobody waits for a turn
        distance = 0
    passes = _power_of_two(-(-distance * variant.tile_q // variant.tile_k))
    while passes > 1 and problem.key_heads * -(-key_tiles // passes) < 0.45 * blocks:
        passes //= 2
    return max(passes, _power_of_two(-(-key_tiles // blocks)))


def _section_of_heads(mask, passes, key_tiles, blocks):
    """Heads whose passes are one: as many as there are blocks for. Where tiles are alike and passes single, 1."""
    return 1 if mask.name == "full" and passes == 1 else max(blocks // -(-key_tiles // passes), 1)


def _power_of_two(least):
    return 1 << max(least - 1, 0).bit_length()


def _gradient_buffer(problem, name, like):
    """A gradient along the canonical axes, those that broadcasting stretched of length 1, in the order of its input."""
    shape = tuple(1 if axis in like.stretched else length for axis, length in enumerate(like.shape))
    return Buffer(name, shape, problem.dtype, like.order)


def _backward_uses(problem, grads, engine):
    """What the kernels of backward do with their operands."""
    tensors = engine == "sm90"
    given = {"q": problem.q, "k": problem.k, "v": problem.v, "dout": problem.dout}
    uses = {name: Use(operand, problem.dtype, 16, tensor=tensors) for name, operand in given.items()}
    uses["out"] = Use(problem.out, problem.dtype, 16)
    for name, like in grads.items():
        if like.stretched:  # each part in the dtype of sums, to be summed
            part = Operand(like.shape, (0,) * len(like.shape), True)
            uses[name] = Use(part, ELEMENTS[problem.dtype].lse.name, 16, written=True, summed=like.stretched)
        else:
            steps = contiguous(like.shape, like.order, ELEMENTS[problem.dtype].itemsize)
            grad = getattr(problem, name) or Operand(like.shape, steps, True)
            uses[name] = Use(grad, problem.dtype, 16, written=True)
    return uses
