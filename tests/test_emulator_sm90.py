"""The emulated Hopper: each instruction against a model in NumPy, each rule with a kernel that breaks it, and small
kernels whose results on a GPU are kept in ``emulator/expected``."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from drawn import rotating

from cuflash import _plan

SEEDS = range(6)
SHARED_BYTES = 48 * 1024 + 64
# Of the problem, and of its products: a float32 is several bfloat16.
ELEMENTS = {"Float16": np.float16, "BFloat16": ml_dtypes.bfloat16, "float": ml_dtypes.bfloat16}


@pytest.fixture(scope="module")
def probes(emulator):
    """For each element type, a function that runs a probe of ``probes_sm90.cu`` by name."""
    from emulator.tensor_map import encode

    text = (emulator.HERE / "probes_sm90.cu").read_text(encoding="utf-8")
    numbers = {name: number for number, name in enumerate(re.findall(r"^PROBE\((\w+)\)", text, re.MULTILINE))}

    def of(element):
        declared = "" if element == "float" else f"struct {element};"
        preamble = f"namespace cuflash {{ {declared} using Element = {element}; }}\n"
        emulate = emulator.build(f'{preamble}#line 1 "probes_sm90.cu"\n{text}', "cuflash::cuflash_probe")

        def run(
            name, given=(), dtype=np.int32, size=0, *,
            tensor=None, layout=None, threads=32, grid=1, cluster=1, seed=0,
        ):  # fmt: skip
            """``tensor``: an array that the kernel may read and write; ``layout``: the rest of its map."""
            inputs, outputs = aligned(emulator, given, 1 << 16), aligned(emulator, (), 1 << 16)
            tensor = aligned(emulator, (), 8192) if tensor is None else tensor
            layout = (2, (64, 64), (128,), (64, 64), 128) if layout is None else layout
            address = np.array([inputs.ctypes.data, outputs.ctypes.data, numbers[name]], np.uint64)
            args = encode(tensor, *layout) + address.tobytes()
            memory = [(inputs, False), (outputs, True), (tensor, True)]
            args += bytes(-len(args) % 128)
            launched = (grid, threads, args, SHARED_BYTES, memory)
            emulator.launch(emulate, *launched, cluster=cluster, resident=cluster == 1, seed=seed)
            return outputs.view(dtype)[:size]

        return run

    return of


@pytest.fixture(scope="module")
def probe(probes):
    """Run a probe with bfloat16 elements."""
    return probes("BFloat16")


def aligned(emulator, given, room):
    """Bytes that begin at a multiple of 256: those given, then zeros."""
    raw = np.asarray(given).reshape(-1).view(np.uint8)
    buffer = emulator.aligned(max(raw.size, room), 256)
    buffer[:] = 0
    buffer[: raw.size] = raw
    return buffer


# Barriers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_phases(probe, seed):
    got = probe("phases", size=6 * 32, threads=64, seed=seed).reshape(6, 32)
    assert (got == np.arange(6)[:, None] * 100 + 31 - np.arange(32)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_named_barriers(probe, seed):
    got = probe("named_barrier", size=96, threads=96, seed=seed)
    assert (got[32:] == 95 - np.arange(64)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_arrivals_at_named_barriers(probe, seed):
    got = probe("barrier_arrived_at", size=6 * 2 * 32, threads=96, seed=seed).reshape(6, 2, 32)
    assert (got == np.arange(6)[:, None, None] * 100 + (np.arange(32) ^ 1)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_resident_blocks_wait_for_one_another(probe, seed):
    turn, *blocks = probe("turns_of_blocks", size=14, grid=13, seed=seed)
    assert turn == 13 and blocks == list(range(12, -1, -1))


def test_registers_move(probe):
    assert (probe("registers_that_move", size=384, threads=384) == 1).all()


# Clusters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("seed", SEEDS)
def test_clusters_exchange_numbers(probe, blocks, seed):
    grid = 16 // blocks * blocks
    turn, thread, rank = np.ogrid[:3, :64, :blocks]
    got = probe("cluster_exchange", size=9 * 64 * grid, threads=64, grid=grid, cluster=blocks, seed=seed)
    first = turn * 10000 + rank * 1000
    wanted = (first + 4 * (63 - thread), first + 4 * (thread ^ 32) + 2, first + 4 * (thread ^ 32) + 3)
    for n, result in enumerate(np.moveaxis(got.reshape(3, grid, 64, 3), -1, 0)):
        assert (result == (wanted[n] @ (rank.reshape(-1) + 1))[:, None]).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_clusters_of_other_kinds(probe, seed):
    places = probe("cluster_places", size=24, grid=12, cluster=4, seed=seed).reshape(12, 2)
    assert (places == [(4, block % 4) for block in range(12)]).all()
    assert (probe("cluster_places", size=6, grid=3, seed=seed).reshape(3, 2) == [1, 0]).all()
    got = probe("cluster_waited_for_by_one_warp", size=6 * 64, threads=64, grid=6, cluster=3, seed=seed)
    assert (got.reshape(6, 64) == 2000 + 4 * np.arange(64)).all()
    got = probe("cluster_without_a_block", size=5 * 32, threads=64, grid=6, cluster=6, seed=seed)
    assert (got.reshape(5, 32) == 10000 + 5 * 4 * (63 - np.arange(32))).all()


@pytest.mark.parametrize(
    "grid, cluster, threads, message",
    [
        (3, 2, 64, "a grid of 3 blocks, not a multiple of the 2 of a cluster"),
        (9, 9, 32, "a cluster of 9 blocks; wanted 1 to 8"),
        (8, 8, 192, "a cluster of 8 blocks of 192 threads: 160 warps and units, whose time is kept; at most 144"),
    ],
)
def test_clusters_that_cannot_be(emulator, probe, grid, cluster, threads, message):
    with pytest.raises(emulator.EmulatorError, match=f"^{message}$"):
        probe("cluster_places", grid=grid, cluster=cluster, threads=threads)


def test_plans_ask_for_clusters(emulator):
    asked = {}
    stub = SimpleNamespace(build=lambda variant: variant, launch=lambda *given, **keywords: asked.update(keywords))
    emulator.Host(stub).launcher(_plan.Step("a variant", 4, 64, 0, {}, cluster=2), None)(b"")
    assert asked == {"cluster": 2, "resident": False}


# Tensor maps and copies -----------------------------------------------------------------------------------------


def swizzle(byte, span):
    """Where the swizzle puts a byte of shared memory: bits 4 and up changed by bits 7 and up."""
    return byte ^ ((byte >> 7) & {128: 7, 64: 3, 32: 1, 0: 0}[span]) << 4


def boxes():
    """Shapes, boxes and corners in and around tensors: itemsize, dims, box, swizzle, corner."""
    yield 2, (64, 40), (64, 16), 128, (0, 8)
    yield 2, (64, 40), (64, 16), 128, (0, 33)  # the last rows lie outside
    yield 2, (104, 40), (64, 16), 128, (64, -3)  # the first rows and the last columns do
    yield 2, (104, 40), (64, 16), 128, (-8, 50)  # all do
    yield 2, (40, 24), (32, 24), 64, (24, 0)
    yield 2, (40, 24), (16, 24), 32, (32, 4)
    yield 2, (40, 24), (8, 24), 0, (0, 4)
    yield 2, (40, 24), (40, 8), 0, (0, 20)
    yield 4, (40, 24), (32, 8), 128, (16, 20)
    yield 1, (160, 8), (128, 8), 128, (48, 1)
    yield 2, (64, 6, 20, 2, 2), (64, 4, 8, 1, 1), 128, (0, 3, 15, 1, 1)  # heads between rows
    yield 2, (72, 2, 3, 2, 3), (64, 2, 3, 2, 3), 128, (16, 1, 1, 0, 1)


def box_of(tensor, box, corner):
    """The box, innermost axis last, zeros outside the tensor."""
    indices = [np.arange(extent) + at for extent, at in zip(box, corner, strict=True)]
    indices = np.meshgrid(*indices, indexing="ij", sparse=True)
    inside = [(index >= 0) & (index < length) for index, length in zip(indices, tensor.shape, strict=True)]
    clipped = [np.clip(index, 0, length - 1) for index, length in zip(indices, tensor.shape, strict=True)]
    return np.where(reduce(np.logical_and, inside), tensor[tuple(clipped)], 0)


def tensor_and_layout(emulator, itemsize, dims, box, span):
    storage = aligned(emulator, np.random.default_rng(0).integers(1, 256, np.prod(dims) * itemsize, np.uint8), 0)
    tensor = storage.view(f"u{itemsize}").reshape(dims[::-1])
    return tensor, (itemsize, dims, tensor.strides[-2::-1], box, span)


@pytest.mark.parametrize("itemsize, dims, box, span, corner", list(boxes()))
@pytest.mark.parametrize("seed", range(2))
def test_tensor_loads(emulator, probe, itemsize, dims, box, span, corner, seed):
    tensor, layout = tensor_and_layout(emulator, itemsize, dims, box, span)
    size = np.prod(box) * itemsize
    given = np.array([*corner, *[0] * (5 - len(corner)), size], np.int32)
    got = probe("load_box", given, np.uint8, size, tensor=tensor, layout=layout, seed=seed)
    wanted = np.ascontiguousarray(box_of(tensor, box[::-1], corner[::-1])).view(np.uint8).reshape(-1)
    assert (got[swizzle(np.arange(size), span)] == wanted).all()


@pytest.mark.parametrize("itemsize, dims, box, span, corner", list(boxes()))
def test_tensor_stores(emulator, probe, itemsize, dims, box, span, corner):
    tensor, layout = tensor_and_layout(emulator, itemsize, dims, box, span)
    size = np.prod(box) * itemsize
    new = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    wanted = tensor.copy()
    values = new[swizzle(np.arange(size), span)].view(tensor.dtype).reshape(box[::-1])
    for place in np.ndindex(*values.shape):
        at = tuple(np.add(place, corner[::-1]))
        if all(0 <= index < length for index, length in zip(at, tensor.shape, strict=True)):
            wanted[at] = values[place]
    header = np.array([*corner, *[0] * (5 - len(corner)), size, 0, 0], np.int32)
    probe("store_box", np.concatenate([header.view(np.uint8), new]), tensor=tensor, layout=layout)
    assert (tensor == wanted).all()


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"base": 8}, "base 0x8"),
        ({"swizzle": 48}, "swizzle 48"),
        ({"dims": (64, 0)}, "0 elements along axis 1"),
        ({"dims": (2**31 + 1, 64)}, "elements along axis 0"),
        ({"strides": (136,)}, "stride 136 of axis 1"),
        ({"strides": (-128,)}, "stride -128 of axis 1"),
        ({"strides": (2**40,)}, "stride 1099511627776 of axis 1"),
        ({"strides": ()}, "0 strides"),
        ({"dims": (64,) * 6, "box": (64,) * 6, "strides": (128,) * 5}, "6 dims"),
        ({"box": (64, 257)}, "box of 257 along axis 1"),
        ({"box": (64, 0)}, "box of 0 along axis 1"),
        ({"box": (72, 64)}, "rows of 144 bytes"),
        ({"box": (60, 64)}, "rows of 120 bytes"),
    ],
)
def test_tensor_maps_that_the_driver_refuses(change, sentence):
    from emulator.tensor_map import encode

    given = {"base": 4096, "itemsize": 2, "dims": (64, 64), "strides": (128,), "box": (64, 64), "swizzle": 128}
    assert len(encode(**given)) == 128
    with pytest.raises(ValueError, match=sentence):
        encode(**given | change)


@pytest.mark.parametrize("seed", SEEDS)
def test_stmatrix(probe, seed):
    registers = np.random.default_rng(seed).integers(0, 2**16, (32, 4, 2)).astype(np.uint16)  # lane, matrix, element
    rows = probe("store_matrices", registers, np.uint16, 512, seed=seed).reshape(2, 32, 8)
    # lane l holds elements (l / 4; 2 (l % 4), and the next) of each matrix
    matrices = registers.reshape(8, 4, 4, 2).transpose(2, 0, 1, 3).reshape(4, 8, 8)
    for transposed, wanted in enumerate((matrices, matrices.swapaxes(1, 2))):
        assert (rows[transposed, np.arange(32) * 5 % 32].reshape(4, 8, 8) == wanted).all()


# Copies of bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start, to, size", [(16, 0, 16), (32, 48, 4000), (4096, 16, 40000)])
@pytest.mark.parametrize("seed", range(2))
def test_bulk_loads(probe, start, to, size, seed):
    data = np.random.default_rng(0).integers(0, 256, 1 << 16).astype(np.uint8)
    data[:12].view(np.int32)[:] = start, to, size
    assert (probe("load_bytes", data, np.uint8, size, seed=seed) == data[start : start + size]).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_bulk_stores_and_sums(probe, seed):
    data = np.random.default_rng(seed).standard_normal(1024).astype(np.float32)
    got = probe("store_and_add_bytes", data, np.float32, 1026, seed=seed)
    wanted = np.concatenate([data[:512], data[512:] + data[512:]])
    assert (got[:1024] == wanted).all() and (got[1024:] == wanted[[511, 1023]]).all()


def test_bulk_stores_come_late(probe):
    """A thread that has waited for the reads alone may find what was there before, one that waited for all may not."""
    early, late = np.transpose([probe("bytes_seen_too_early", size=130, seed=seed)[128:] for seed in SEEDS])
    assert (early == 0).any() and (late == 1).all()


# Products -------------------------------------------------------------------------------------------------------


def place(row, k, span, transposed, leading, stride):
    """Byte, before the swizzle, of an element of an operand: ``row`` along M or N, ``k`` of 16 along K."""
    if span:
        if transposed:
            width = span // 2
            return row // width * leading + row % width * 2 + k // 8 * stride + k % 8 * span
        return row // 8 * stride + row % 8 * span + k * 2
    if transposed:
        return row // 8 * stride + row % 8 * 2 + k // 8 * leading + k % 8 * 16
    return row // 8 * stride + row % 8 * 16 + k // 8 * leading + k % 8 * 2


def operand(tile, rows, span, transposed, leading, stride, start):
    """The operand (rows x 16) that a descriptor finds in shared memory, and the descriptor, as from address 0."""
    row, k = np.ogrid[:rows, :16]
    byte = start + place(row, k, span, transposed, leading, stride)
    code = {0: 0, 128: 1, 64: 2, 32: 3}[span]
    word = start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | code << 62
    return tile[swizzle(byte, span) // 2], word


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("transposed", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=lambda t: f"{t[0]}{t[1]}")
@pytest.mark.parametrize("span", [128, 64, 32, 0])
def test_products(probes, element, transposed, span):
    """Descriptors of all kinds: K along rows and across them, steps along the tile, panels next to one another."""
    tile = np.random.default_rng(span).integers(-4, 5, 16384).astype(ELEMENTS[element])
    pattern = 8 * (span or 16)
    for seed, step in enumerate((0, 16, 1024)):
        leading, stride = 2048 << seed, pattern << seed % 2
        if step == 16 and (span in (0, 32) or any(transposed)):
            step = 0  # no whole chunk of K left in the row
        a, word_a = operand(tile, 64, span, transposed[0], leading, stride, 2 * step)
        b, word_b = operand(tile, 24, span, transposed[1], leading, stride, step)
        given = np.concatenate([tile.view(np.uint8), np.array([word_a, word_b], np.uint64).view(np.uint8)])
        name = f"product_{transposed[0]}{transposed[1]}"
        got = probes(element)(name, given, np.float32, 64 * 24, threads=128, seed=seed)
        thread, i = np.ogrid[:128, :12]
        row = thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8
        column = i // 4 * 8 + thread % 4 * 2 + i % 2
        wanted = (a.astype(np.float32) @ b.astype(np.float32).T)[row, column] + thread * 12 + i
        assert (got.reshape(128, 12) == wanted).all()


def test_accumulators_in_flight_are_nan(probe):
    tile = np.ones(4096, ml_dtypes.bfloat16)
    before, after = probe("accumulators_in_flight", tile, np.float32, 256, threads=128).reshape(128, 2).T
    assert np.isnan(before).all() and (after == 16).all()


def test_registers_of_two_products(probe):
    tile = np.ones(4096, ml_dtypes.bfloat16)
    got = probe("registers_of_two_products", tile, np.float32, 512, threads=128).reshape(128, 4)
    assert (got[:, [0, 2]] == 16).all()
    assert (got[:, 1].view(np.uint32) == 0x7F817F81).all() and (got[:, 3].view(np.uint32) == 0x3F803F80).all()


# Rules ----------------------------------------------------------------------------------------------------------

RULES = {
    # Barriers
    "barrier_that_is_none": (32, "uses a barrier at offset 49152, where none is initialised"),
    "barrier_misaligned": (32, "writes 8 bytes of shared memory at 50180, not a multiple of 8"),
    "barrier_of_nobody": (32, "initialises a barrier for 0 arrivals"),
    "barrier_not_synchronised": (64, "uses the barrier in .* initialised by thread 0 .*; nothing orders the two"),
    "barrier_not_fenced": (32, "initialised by thread 0 at .* without fence_mbarrier_init"),
    "barrier_overwritten": (32, "uses the barrier in .* overwritten by thread 0"),
    "barrier_with_too_many": (32, "all 1 have arrived and 128 bytes are still to come"),
    "barrier_that_nobody_completes": (
        64,
        "deadlock: no thread can go on\n  block 0, warp 0, lanes 0-31: mbarrier_wait, parity 0, offset 49152: "
        "phase 0 lacks 1 of 2 arrivals, 256 bytes at .*\n  block 0, warp 1, lanes 0-31: mbarrier_wait",
    ),
    "phases_without_the_way_back": (64, "(writes|reads) shared memory at .*; nothing orders the two|deadlock"),
    "named_barrier_of_different_numbers": (96, "bar_sync 3 of \\d+ threads, while others at .* expect \\d+"),
    "named_barrier_of_half_a_warp": (96, "bar_sync of 48 threads; wanted whole warps"),
    "barrier_arrived_at_by_too_few": (96, "deadlock.*warp 1, lanes 0-31: bar_sync at"),
    "barrier_arrived_at_twice": (96, "bar_arrive 3 by a warp that has come to it already.*: 32 of 96 are there"),
    "barrier_arrived_at_that_expects_others": (96, "of (64|96) threads, while others at .* expect (64|96)"),
    "barrier_arrived_at_by_half_a_warp": (32, "bar_arrive of 16 threads; wanted whole warps"),
    "barrier_arrived_at_by_some_lanes": (32, "deadlock.*bar_arrive"),
    "barrier_arrived_at_does_not_wait": (64, "shared memory at .*(nothing orders|nothing has written)"),
    # Tensor copies
    "load_not_waited_for": (32, "reads shared memory at offset 128, written by an asynchronous copy .*not been waited"),
    "load_waited_for_by_another": (32, "reads shared memory at offset 128, written by an asynchronous copy"),
    "load_over_what_is_read": (64, "(writes|reads) shared memory .*, (read by thread|written by an asynchronous copy)"),
    "load_of_more_than_announced": (32, "brings 4096 bytes more to the barrier at offset 49152 than were announced"),
    "load_of_less_than_announced": (32, "deadlock.* lacks 0 of 1 arrivals, 64 bytes"),
    "load_of_half_that_is_announced": (32, "written by an asynchronous copy .*has not been waited for"),
    "load_misaligned": (32, "copies a box to or from shared memory at 1536, not a multiple of 1024"),
    "load_beyond": (32, "writes 8192 bytes of shared memory at offset 48128; the block has 49216 bytes"),
    "load_of_no_map": (32, "copies a tensor whose map is none"),
    "load_in_flight_at_the_end": (32, "the block ends with 1 loads in flight"),
    "store_without_fence": (32, "written by thread .* without fence_proxy_async before the barrier"),
    "store_fenced_by_the_reader": (32, "written by thread .* without fence_proxy_async before the barrier"),
    "store_fenced_after_the_barrier": (32, "written by thread .* without fence_proxy_async before the barrier"),
    "store_overwritten": (32, "reads shared memory at offset \\d+, written by thread .*; nothing orders the two"),
    "store_not_waited_for": (32, "left the kernel while this store reads shared memory"),
    "store_not_committed": (32, "a store that no group was committed for"),
    # Copies of bytes
    "load_of_some_bytes": (32, "copies 24 bytes, not a multiple of 16"),
    "load_of_no_bytes": (32, "copies 0 bytes, not a multiple of 16"),
    "load_from_a_misaligned_place": (32, "reads 32 bytes of global memory at an address that is no multiple of 16"),
    "load_to_a_misaligned_place": (32, "writes 32 bytes of shared memory at 1032, not a multiple of 16"),
    "load_beyond_the_array": (32, "reads 32 bytes of global memory, 16 bytes past the end of the nearest array below"),
    "load_beyond_shared_memory": (32, "writes 32 bytes of shared memory at offset 49200; the block has 49216 bytes"),
    "load_bytes_not_announced": (32, "deadlock.* lacks 0 of 1 arrivals, 16 bytes"),
    "load_bytes_not_waited_for": (32, "reads shared memory at offset 0, written by an asynchronous copy .*not been"),
    "load_bytes_in_flight_at_the_end": (32, "the block ends with 1 loads in flight"),
    "store_of_some_bytes": (32, "copies 40 bytes, not a multiple of 16"),
    "store_to_a_misaligned_place": (32, "writes 32 bytes of global memory at an address that is no multiple of 16"),
    "add_from_a_misaligned_place": (32, "reads 32 bytes of shared memory at 1028, not a multiple of 16"),
    "add_beyond_the_array": (32, "writes 32 bytes of global memory, 16 bytes past the end of the nearest array below"),
    "add_to_an_input": (32, "writes 32 bytes into an array that is an input"),
    "add_without_fence": (32, "written by thread .* without fence_proxy_async before the barrier"),
    "add_fenced_by_one": (32, "written by thread .* without fence_proxy_async before the barrier"),
    "add_of_what_is_overwritten": (32, "reads shared memory at offset \\d+, written by thread .*; nothing orders"),
    "add_not_waited_for": (32, "left the kernel while this store reads shared memory"),
    "add_not_committed": (32, "a store that no group was committed for"),
    "store_matrices_misaligned": (32, "writes 16 bytes of shared memory at 1032, not a multiple of 16"),
    "store_matrices_by_some_lanes": (32, "deadlock.*stmatrix_x4_trans"),
    # Products
    "product_without_fence": (128, "an accumulator .* without a wgmma_fence since the last wait, or at all"),
    "second_product_without_fence": (128, "an accumulator .* without a wgmma_fence since it came back from the last"),
    "accumulator_written_after_the_fence": (128, "an accumulator was written between the wgmma_fence and the product"),
    "accumulator_written_in_flight": (128, "an accumulator of lane \\d+, given .* was written before this wait"),
    "operand_written_in_flight": (128, "an A operand of lane \\d+, given .* was written before this wait"),
    "product_not_waited_for": (128, "left the kernel without a wait for this product"),
    "product_not_committed": (128, "left the kernel without a wait for this product"),
    "product_of_three_warps": (128, "not all warps of the warpgroup have executed this product: 1, 1, 0 and 1"),
    "product_of_half_a_warpgroup": (160, "a product in a warp that belongs to no whole warpgroup"),
    "lanes_that_disagree": (128, "other lanes of the warpgroup have"),
    "warps_that_disagree": (128, "accumulate [01]; other warps of the warpgroup have"),
    "warps_at_different_products": (128, "other warps of the warpgroup are at the product of probes_sm90.cu"),
    "lanes_that_commit_different_groups": (128, "lanes of a warp commit groups of different products"),
    "descriptor_with_base_offset": (128, "of which bits are set that mean nothing, or a base offset"),
    "product_beyond": (128, "reads 16 bytes of shared memory at offset \\d+; the block has"),
    "product_without_proxy_fence": (128, "written by thread .* without fence_proxy_async before the barrier"),
    "product_of_what_is_overwritten": (128, "reads shared memory at .*, written by thread .*|writes .*, read by"),
    "product_of_a_stage_released_early": (160, "asynchronous copy|read by a wgmma"),
    # Registers
    "registers_that_nobody_gives": (384, "deadlock.*setmaxnreg, 40 registers more, \\d+ are free"),
    "registers_taken_away_twice": (128, "setmaxnreg from 40 to 48 registers"),
    "registers_too_few": (128, "setmaxnreg 20; wanted a multiple of 8 from 24 to 256"),
}


def reports(emulator, probe, name, message, **launched):
    """What is said of a broken rule by each seed, once it has been found to be what is wanted."""
    for seed in SEEDS:
        with pytest.raises(emulator.EmulatorError) as error:
            probe(name, **launched, seed=seed)
        assert re.search(message, str(error.value), re.DOTALL), str(error.value)
        yield str(error.value)


@pytest.mark.parametrize("name", RULES)
def test_rules(emulator, probe, name):
    """Each rule, broken, is reported whatever the seed."""
    threads, message = RULES[name]
    for said in reports(emulator, probe, name, message, threads=threads):
        assert "probes_sm90.cu" in said or "deadlock" in said


CLUSTER_RULES = {  # of two blocks of 64 threads
    "cluster_exchange_without_the_way_back": "(writes .*, read|reads .*, written) by thread \\d+ of rank [01] ",
    "cluster_exchange_without_barriers": "reads shared memory of a block that may not have begun, that of rank [01]",
    "cluster_written_after_the_arrival": "written by thread .*; nothing orders the two|, which nothing has written|"
    "writes shared .* read by thread \\d+ of rank [01] .*; nothing orders the two",
    "cluster_read_before_the_wait": "written by thread .* of rank [01] .*; nothing orders the two|nothing has written|"
    "writes shared .* read by thread \\d+ of rank [01] .*; nothing orders the two",
    "cluster_arrived_at_twice": "cluster_arrive by a thread that has arrived already and not waited since",
    "cluster_waited_for_without_arrival": "cluster_wait by a thread that has not arrived since it last waited",
    "cluster_waited_for_twice": "cluster_wait by a thread that has not arrived since it last waited",
    "cluster_arrived_at_in_two_places": "cluster_arrive, while other lanes of the warp are at cluster_arrive",
    "cluster_arrived_at_by_half_a_warp": "deadlock.*lanes 0-15: cluster_arrive at probes_sm90.*lanes 16-31: left",
    "cluster_arrived_at_by_too_few": "deadlock.*block 0, warp 1, lanes 0-31: bar_sync at .*"
    "block 1, warp 1, lanes 0-31: cluster_wait at probes_sm90",
    "cluster_block_has_left": "reads shared memory of a block that has ended, that of rank 1",
    "cluster_block_leaves_too_early": "reads shared memory of a block that has ended, that of rank [01]|"
    "its block ends, whose shared memory thread \\d+ of rank [01] reads here; nothing orders the two",
    "cluster_block_leaves_having_arrived": "reads shared memory of a block that has ended, that of rank [01]|"
    "its block ends, whose shared memory thread \\d+ of rank [01] reads here; nothing orders the two",
    "cluster_rank_beyond": "reads shared memory of rank 2; the cluster has 2 blocks",
    "cluster_rank_below": "reads shared memory of rank -1; the cluster has 2 blocks",
    "cluster_beyond": "reads 16 bytes of shared memory at offset 49216; the block has 49216 bytes",
    "cluster_below": "reads 8 bytes of shared memory at offset -8; the block has 49216 bytes",
    "cluster_misaligned": "reads 16 bytes of shared memory at \\d+, not a multiple of 16",
    "cluster_misaligned_half": "reads 8 bytes of shared memory at \\d+, not a multiple of 8",
    "cluster_unwritten": "reads shared memory at offset \\d+, which nothing has written",
}


@pytest.mark.parametrize("name", CLUSTER_RULES)
def test_rules_of_clusters(emulator, probe, name):
    for said in reports(emulator, probe, name, CLUSTER_RULES[name], threads=64, grid=4, cluster=2):
        assert "probes_sm90.cu" in said


# Small kernels --------------------------------------------------------------------------------------------------


def chosen():
    """One case of each kind: every form of a product, and the kernels that pass tiles on."""
    from emulator.kernels import run

    names = {
        "product-bfloat16-K-K-n16-k128-span128", "product-bfloat16-K-MN-n96-k128-span128",
        "product-bfloat16-registers-K-n128-k128-span128", "product-bfloat16-registers-MN-n256-k64-span128",
        "product-bfloat16-MN-MN-n128-k128-span128", "product-bfloat16-K-K-n64-k96-span32",
        "product-bfloat16-MN-MN-n96-k64-span64", "product-float16-registers-MN-n128-k64-span128",
    }  # fmt: skip
    cases = [case for case in run.cases() if case.name in names or case.kernel != "products"]
    assert names <= {case.name for case in cases}
    return [*cases, run.repeated()]


def compiled(function, items):
    """What the function, which compiles, returns for each item; two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, items))


@pytest.fixture(scope="module")
def built(emulator):
    """The chosen cases, compiled beforehand."""
    compiled(lambda case: emulator.build(case.text(str(emulator.HERE)), f"cuflash::{case.kernel}"), chosen())


@pytest.mark.parametrize("case", chosen(), ids=lambda case: case.name)
def test_small_kernels(emulator, built, case):
    """The emulator, NumPy and, where a GPU has run it, the GPU agree."""
    from emulator.kernels import run

    for seed in range(4):
        for name, result in run.emulate(case, seed).items():
            assert np.array_equal(result, case.results[name])
    kept = np.load(run.EXPECTED)
    for name, wanted in case.results.items():
        if f"{case.name}/{name}" not in kept:
            pytest.skip(f"{run.EXPECTED.name} has no {name} of this case: kernels/run.py writes it on a GPU")
        assert np.array_equal(wanted, kept[f"{case.name}/{name}"])


def test_small_kernels_compile_for_a_gpu(nvrtc):
    from emulator.kernels import run

    for case in (*run.cases(), run.repeated()):
        log = run.compile_log(case)
        assert not re.search("C7[56]|warning|[1-9]\\d* bytes spill", log), log


# Mutations ------------------------------------------------------------------------------------------------------


def mutations():
    """The mutations to be tried: where CI is set, every third."""
    from emulator.mutations_sm90 import MUTATIONS

    return rotating(MUTATIONS) if os.environ.get("CI") else MUTATIONS


@pytest.fixture(scope="module")
def mutated(emulator):
    """The texts of all mutations by name, compiled beforehand, and what is said of the cases as they are."""
    from emulator.mutations_sm90 import caught

    def text(mutation):
        wrong = mutation.text()
        emulator.build(wrong, f"cuflash::{mutation.case.kernel}")
        return wrong

    texts = compiled(text, mutations())
    cases = {id(mutation.case): mutation.case for mutation in mutations()}
    unmutated = {key: caught(case) for key, case in cases.items()}
    return dict(zip((mutation.name for mutation in mutations()), texts, strict=True)), unmutated


@pytest.mark.parametrize("mutation", mutations(), ids=lambda mutation: mutation.name)
def test_mutation_is_caught(mutated, mutation, record_property):
    from emulator.mutations_sm90 import caught

    texts, unmutated = mutated
    said = caught(mutation.case, texts[mutation.name])
    record_property("caught by", said)
    assert said, "nothing noticed"
    assert unmutated[id(mutation.case)] is None
