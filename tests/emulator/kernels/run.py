"""Run the small Hopper kernels of this folder, on the emulator or on a GPU, and compare with NumPy.

    python tests/emulator/kernels/run.py                      on the emulator
    python tests/emulator/kernels/run.py --compile            NVRTC's log for sm_90a; needs no GPU
    python tests/emulator/kernels/run.py --device --write tests/emulator/expected/sm90.npz
                                                              on an sm_90 GPU, and keep what it computed

Numbers are small integers, so that every order of adding them gives the same float32, unless the kernel promises one.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[2])]  # for `emulator` and `cuflash`

from emulator.tensor_map import encode, encode_by_driver  # noqa: E402

from cuflash import _compile, _variant, _wgmma  # noqa: E402

EXPECTED = HERE.parent / "expected" / "sm90.npz"
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
STRUCTS = {"float16": "Float16", "bfloat16": "BFloat16"}


@dataclasses.dataclass
class Map:
    """A tensor map of one of a case's arrays, all lengths innermost first; strides are in bytes."""

    array: str
    dims: tuple
    strides: tuple
    box: tuple
    swizzle: int = 128


@dataclasses.dataclass
class Case:
    """One launch of one kernel."""

    name: str
    kernel: str  # file and entry
    element: str
    constants: dict  # what the kernel's text sees
    sizes: tuple  # N of the products it takes
    threads: int
    args: dict  # field -> Map, name of an array, or number; the fields of the kernel's struct in order
    arrays: dict  # name -> array; a result holds what the kernel finds there
    results: dict  # name -> what the kernel leaves there
    grid: int = 1  # blocks, all there at once where they form no clusters
    cluster: int = 1  # blocks of a cluster

    @property
    def resident(self):
        """Whether all blocks are there at once."""
        return self.grid > 1 and self.cluster == 1

    def preamble(self):
        """The constants and types of this case, and the products for NVRTC."""
        struct = STRUCTS[self.element]
        constants = "".join(f"constexpr int {name} = {int(value)};\n" for name, value in self.constants.items())
        start = f"namespace cuflash {{\nstruct {struct};\nusing Element = {struct};\n{constants}}}\n"
        return start + _wgmma.wgmma(self.element, self.sizes)

    def text(self, overlay=None):
        """The text to compile: for NVRTC, or with files of the folder ``overlay`` in place of those of kernels/."""
        kernel = (HERE / f"{self.kernel}.cu").read_text(encoding="utf-8")
        included = {name for name in ("ptx_sm90.cuh", "tile_sm90.cuh") if f'#include "{name}"' in kernel}
        (root,) = included
        body = kernel.replace(f'#include "{root}"', "")
        # As long as the kernel's own text, so that its lines keep their numbers.
        return f'{self.preamble()}{_variant._assemble(root, overlay)}#line 1 "{self.kernel}.cu"\n{body}'

    def packed(self, address, make_map):
        """The kernel's arguments; ``address(name)`` tells where an array lies."""
        fields, values = [], []
        for name, value in self.args.items():
            if isinstance(value, Map):
                base, itemsize = address(value.array), self.arrays[value.array].dtype.itemsize
                fields.append((name, "V128"))
                values.append(np.void(make_map(base, itemsize, value.dims, value.strides, value.box, value.swizzle)))
            else:
                fields.append((name, np.uint64))
                values.append(address(value) if isinstance(value, str) else value)
        size = np.dtype(fields).itemsize
        fields.append(("pad", f"V{-size % 128 or 128}"))  # the struct is aligned as maps are
        packed = np.zeros((), fields)
        for (name, _), value in zip(fields, values, strict=False):
            packed[name] = value
        return packed.tobytes()[: -(-size // 128) * 128]


# The cases --------------------------------------------------------------------------------------------------------


def _integers(rng, shape, element, most=4):
    return rng.integers(-most, most + 1, shape).astype(DTYPES[element])


def _matrix(name, array, width, rows, swizzle=128):
    """A map of a matrix: boxes of some rows and a panel's columns."""
    return Map(name, array.shape[::-1], array.strides[-2::-1], (width, rows), swizzle)


def product(n, k, *, registers=False, transpose_a=False, transpose_b=False, element="bfloat16", span=128, seed=0):
    """One product; operands are stored along K, or transposed across it."""
    rng = np.random.default_rng(seed)
    a, b = _integers(rng, (64, k), element), _integers(rng, (k, n), element)
    stored_a = np.ascontiguousarray(a.T if transpose_a else a)
    stored_b = np.ascontiguousarray(b if transpose_b else b.T)
    width, swizzle = span // 2, span if span > 16 else 0

    def size(stored):
        return -(-(-(-stored.shape[1] // width) * stored.shape[0] * span) // 1024) * 1024

    form = ("registers" if registers else "MN" if transpose_a else "K") + "-" + ("MN" if transpose_b else "K")
    return Case(
        f"product-{element}-{form}-n{n}-k{k}-span{span}", "products", element,
        {"N": n, "K": k, "A_IN_REGISTERS": registers, "TRANSPOSE_A": transpose_a, "TRANSPOSE_B": transpose_b,
         "SPAN": span, "SHARED_BYTES": size(stored_a) + size(stored_b) + 8},
        (n,), 128,
        {"a": _matrix("a", stored_a, width, len(stored_a), swizzle),
         "b": _matrix("b", stored_b, width, len(stored_b), swizzle), "out": "out"},
        {"a": stored_a, "b": stored_b, "out": np.full((64, n), np.nan, np.float32)},
        {"out": a.astype(np.float32) @ b.astype(np.float32)},
    )  # fmt: skip


def ring(tiles, n=64, *, consumers=2, stages=2, element="bfloat16", registers=(24, 240), seed=0):
    """Tiles that pass through a ring: a producer and one or two consumers."""
    rng = np.random.default_rng(seed)
    rows = 64 * consumers
    a, b = _integers(rng, (tiles * rows, 64), element), _integers(rng, (tiles * 64, n), element)
    tile_bytes = rows * 128 + -(-n // 64) * 64 * 128
    blocks = a.astype(np.float32).reshape(tiles, rows, 64) @ b.astype(np.float32).reshape(tiles, 64, n)
    return Case(
        f"ring-{element}-n{n}-tiles{tiles}-consumers{consumers}-stages{stages}", "ring", element,
        {"N": n, "CONSUMERS": consumers, "STAGES": stages, "PRODUCER_REGISTERS": registers[0],
         "CONSUMER_REGISTERS": registers[1], "SHARED_BYTES": stages * (tile_bytes + 16)},
        (n,), 128 * (1 + consumers),
        {"a": _matrix("a", a, 64, rows), "b": _matrix("b", b, 64, 64), "out": "out", "tiles": tiles},
        {"a": a, "b": b, "out": np.full((rows, n), np.nan, np.float32)},
        {"out": blocks.sum(0)},
    )  # fmt: skip


def chain(tiles, tile_k=64, head_dim=64, value_dim=64, *, in_shared=False, element="bfloat16", seed=0):
    """Two products, the first one's result an operand of the second."""
    rng = np.random.default_rng(seed)
    q = _integers(rng, (64, head_dim), element, 2)
    k = _integers(rng, (tiles * tile_k, head_dim), element, 2)
    v = _integers(rng, (tiles * tile_k, value_dim), element)
    panels = {name: -(-width // 64) for name, width in (("d", head_dim), ("v", value_dim), ("k", tile_k))}
    size = panels["d"] * 64 * 128 + 2 * (panels["d"] + panels["v"]) * tile_k * 128
    size += panels["k"] * 64 * 128 * in_shared + 9 * 8
    scores = (q.astype(np.float32) @ k.astype(np.float32).T / 2).astype(DTYPES[element]).astype(np.float32)
    return Case(
        f"chain-{element}-tiles{tiles}-k{tile_k}-d{head_dim}-v{value_dim}-{'shared' if in_shared else 'registers'}",
        "chain", element,
        {"TILE_K": tile_k, "HEAD_DIM": head_dim, "VALUE_DIM": value_dim, "IN_SHARED": in_shared, "SHARED_BYTES": size},
        (tile_k, value_dim), 160,
        {"q": _matrix("q", q, 64, 64), "k": _matrix("k", k, 64, tile_k), "v": _matrix("v", v, 64, tile_k), "out": "out",
         "tiles": tiles},
        {"q": q, "k": k, "v": v, "out": np.full((64, value_dim), np.nan, np.float32)},
        {"out": scores @ v.astype(np.float32)},
    )  # fmt: skip


def swizzled(tile, span=128):
    """A tile of rows of ``span`` bytes as it lies in shared memory: chunks of 16 bytes permuted."""
    chunks = np.ascontiguousarray(tile).view(np.uint8).reshape(len(tile), span // 16, 16)
    byte = np.arange(len(tile))[:, None] * span + np.arange(span // 16) * 16
    place = (byte ^ ((byte >> 7) % (span // 16) * 16)) // 16
    image = np.empty((chunks.shape[0] * chunks.shape[1], 16), np.uint8)
    image[place.ravel()] = chunks.reshape(-1, 16)
    return image.ravel()


def tiles(rows=70, heads=4, columns=64, batches=2, *, pack=2, rows_out=None, repeat=False, element="bfloat16", seed=0):
    """Boxes with heads between rows, some partly outside; ``repeat``: the batches are one, by a stride of 0."""
    rng = np.random.default_rng(seed)
    size, step = DTYPES[element].itemsize, 64 // pack
    source = rng.integers(1, 2**15 - 1024, (1 if repeat else batches, rows, heads, columns)).astype(np.uint16)
    rows_out = rows_out or rows
    out = np.full((batches, rows, heads, columns), 0x7FFF, np.uint16)
    blocks, groups = -(-rows // step), heads // pack
    count = blocks * batches * groups
    strides = (columns * size, heads * columns * size, rows * heads * columns * size)
    there = np.zeros((batches, blocks * step, heads, 64), np.uint16)
    there[:, :rows, :, :columns] = source
    expected = out.copy()
    expected[:, :rows_out] = there[:, :rows_out, :, :columns]
    image = []
    for t in range(count):
        block, batch, group = t // groups // batches, t // groups % batches, t % groups
        tile = there[batch, block * step : (block + 1) * step, group * pack : (group + 1) * pack]
        image.append(swizzled(tile.reshape(64, 64)))
    box = (64, pack, step, 1, 1)
    return Case(
        f"tiles-rows{rows}-heads{heads}-columns{columns}-pack{pack}-out{rows_out}{'-repeat' * repeat}",
        "tiles", element,
        {"PACK": pack, "BATCHES": batches, "SHARED_BYTES": 3 * 8192 + 8},
        (), 128,
        {"in": Map("in", (columns, heads, rows, batches, 1), (*strides[:2], 0 if repeat else strides[2], 16), box),
         "out": Map("out", (columns, heads, rows_out, batches, 1), (*strides, 16), box),
         "image": "image", "tiles": count, "heads": heads},
        {"in": source, "out": out, "image": np.zeros((count, 8192), np.uint8)},
        {"out": expected, "image": np.stack(image)},
    )  # fmt: skip


def reduce(blocks, columns=32, *, integers=True, element="bfloat16", seed=0):
    """Tiles that blocks add to in turn. Not ``integers``: each order of adding them gives other sums."""
    rng = np.random.default_rng(seed)
    shape = (blocks, blocks, 64, columns)  # block, tile
    values = rng.integers(-64, 65, shape) if integers else rng.standard_normal(shape)
    made = 2 * values.astype(np.float32)
    sums = np.stack([sum(made[(tile - step) % blocks, tile] for step in range(blocks)) for tile in range(blocks)])
    image = made.swapaxes(-1, -2).astype(DTYPES[element]).view(np.uint16)
    size = 64 * columns
    return Case(
        f"reduce-{element}-blocks{blocks}-columns{columns}{'' if integers else '-rounded'}", "reduce", element,
        {"BLOCKS": blocks, "COLUMNS": columns, "SHARED_BYTES": 4 * size * 2 + 2 * size + 8},
        (), 160,
        {"in": "in", "sum": "sum", "image": "image", "turns": "turns"},
        {"in": accumulators(made / 2), "sum": np.full((blocks, size), np.nan, np.float32),
         "image": np.zeros_like(image), "turns": np.zeros(blocks, np.int32)},
        {"sum": accumulators(sums), "image": image, "turns": np.full(blocks, blocks, np.int32)},
        grid=blocks,
    )  # fmt: skip


def cluster(blocks, threads=64, *, clusters=2, turns=3, leaver=None, arrives=False, integers=True, seed=0):
    """Blocks that add one another's numbers, by rank. ``leaver`` leaves at once or, ``arrives``, before its wait."""
    rng = np.random.default_rng(seed)
    shape = (turns, clusters, blocks, threads, 4)
    values = (rng.integers(-64, 65, shape) if integers else rng.standard_normal(shape)).astype(np.float32)
    there = [rank for rank in range(blocks) if rank != leaver]
    thread = np.arange(threads)
    quads, pairs = np.full(shape, -1, np.float32), np.full((*shape[:-1], 2), -1, np.float32)
    for reader in there:
        sums = np.zeros((2, turns, clusters, threads, 4), np.float32)
        for rank in there:
            sums[0] += values[:, :, rank, (thread + reader + 1) % threads]
            sums[1] += values[:, :, rank, threads - 1 - thread]
        quads[:, :, reader], pairs[:, :, reader] = sums[0], sums[1][..., 2:]
    left = "" if leaver is None else f"-{'arrives' if arrives else 'without'}{leaver}"
    return Case(
        f"cluster-blocks{blocks}-threads{threads}{left}{'' if integers else '-rounded'}", "cluster", "bfloat16",
        {"SHARED_BYTES": 128 * 16}, (), threads,
        {"in": "in", "quads": "quads", "pairs": "pairs", "turns": turns, "threads": threads,
         "leaver": blocks if leaver is None else leaver, "arrives": int(arrives)},
        {"in": values, "quads": np.full_like(quads, -1), "pairs": np.full_like(pairs, -1)},
        {"quads": quads, "pairs": pairs},
        grid=clusters * blocks, cluster=blocks,
    )  # fmt: skip


def accumulators(tiles):
    """Tiles of 64 rows as the threads of a warpgroup hold them: blocks of 16 x 8, four floats a lane."""
    *leading, rows, columns = tiles.shape
    parts = tiles.reshape(*leading, rows // 16, 2, 8, columns // 8, 4, 2)  # warp, half, g; column block, t, column
    n = len(leading)
    order = (n + 3, n, n + 2, n + 4, n + 1, n + 5)
    return np.ascontiguousarray(parts.transpose(*range(n), *order)).reshape(*leading, rows * columns)


def cases():
    """All cases: every form of a product, and the rest small."""
    for n in (16, 64, 96, 128, 256):
        for form in ({}, {"transpose_b": True}, {"registers": True}, {"registers": True, "transpose_b": True}):
            yield product(n, 128 if n <= 128 else 64, **form)
    yield product(64, 80, transpose_a=True)
    yield product(128, 128, transpose_a=True, transpose_b=True)
    for span in (64, 32, 16):
        yield product(64, 96, span=span)
        yield product(96, 64, span=span, transpose_a=True, transpose_b=True)
    yield product(128, 64, element="float16")
    yield product(128, 64, element="float16", registers=True, transpose_b=True)
    yield ring(9)
    yield ring(5, 128, consumers=1, stages=3, element="float16", registers=(56, 256))
    yield chain(5)
    yield chain(4, 96, 128, 96, element="float16")
    yield chain(3, 128, 64, 128)
    yield chain(4, 64, 64, 64, in_shared=True)
    yield tiles()
    yield tiles(rows=50, columns=40, pack=4, rows_out=45)
    yield tiles(rows=130, heads=1, pack=1, batches=1, rows_out=127)
    yield reduce(7)
    yield reduce(3, 64, element="float16")
    yield reduce(5, 16, integers=False)
    yield cluster(2, 128, clusters=3)
    yield cluster(4, 64)
    yield cluster(8, 128, clusters=1)
    yield cluster(8, 64, integers=False)
    yield cluster(4, 128, leaver=1)
    yield cluster(4, 64, leaver=2, arrives=True)


def repeated():
    """A map with a stride of 0 along an axis of length 2: whether drivers take it is not written anywhere."""
    return tiles(repeat=True)


# Running ----------------------------------------------------------------------------------------------------------


def _aligned_copy(array):
    """A copy that begins at a multiple of 256, as CuPy's arrays do."""
    storage = np.empty(array.nbytes + 256, np.uint8)
    copy = storage[-storage.ctypes.data % 256 :][: array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def emulate(case, seed=0, text=None):
    """The results of a case on the emulator. ``text``: what to compile in place of the case's own."""
    import emulator

    text = case.text(str(emulator.HERE)) if text is None else text
    function = emulator.build(text, f"cuflash::{case.kernel}")
    memory = {name: _aligned_copy(array) for name, array in case.arrays.items()}
    args = case.packed(lambda name: memory[name].ctypes.data, encode)
    ranges = [(array, name in case.results) for name, array in memory.items()]
    shared = case.constants["SHARED_BYTES"]
    launched = (function, case.grid, case.threads, args, shared, ranges)
    emulator.launch(*launched, cluster=case.cluster, resident=case.resident, seed=seed)
    return {name: memory[name] for name in case.results}


def compile_log(case):
    """NVRTC's log for sm_90a."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(case.text(), f"{case.name}.cu", (), ())
    options = ("-std=c++17", "-ftz=true", "-arch=sm_90a", "--ptxas-options=-v")
    try:
        nvrtc.compileProgram(program, options + (("--no-cache",) if nvrtc.getVersion() >= (13, 0) else ()))
    except nvrtc.NVRTCError:
        raise RuntimeError(f"{case.name} did not compile:\n{nvrtc.getProgramLog(program)}") from None
    else:
        return nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def on_device(case):
    """The results of a case on the current GPU."""
    import cupy

    options = ("-std=c++17", "-arch=sm_90a")
    kernel = cupy.RawModule(code=case.text(), options=options).get_function(case.kernel)
    kernel.max_dynamic_shared_size_bytes = shared = case.constants["SHARED_BYTES"]
    memory = {name: cupy.asarray(np.frombuffer(array.tobytes(), np.uint8)) for name, array in case.arrays.items()}
    args = case.packed(lambda name: memory[name].data.ptr, encode_by_driver)
    device = cupy.cuda.Device()
    launched = (kernel, device.id, case.grid, case.threads, shared, case.resident)
    _compile.launcher(*launched, case.cluster)(cupy.cuda.get_current_stream().ptr, _compile.Argument(args))
    device.synchronize()
    return {name: memory[name].get().view(x.dtype).reshape(x.shape) for name, x in case.results.items()}


def small(array):
    """The same numbers in 16 bits where they are integers that fit."""
    short = array.astype(np.int16)
    return short if array.dtype == np.float32 and np.array_equal(short, array) else array


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", action="store_true", help="on the GPU")
    parser.add_argument("--compile", action="store_true", help="compile only")
    parser.add_argument("--write", metavar="NPZ", help="keep the results")
    parser.add_argument("only", nargs="*", help="parts of names")
    options = parser.parse_args()
    kept, bad = {}, 0
    words = options.only or [""]
    chosen = [case for case in (*cases(), repeated()) if any(word in case.name for word in words)]
    for case in chosen:
        start = time.perf_counter()
        try:
            if options.compile:
                log = compile_log(case)
                spills = "spill" in log and any(not line.strip().endswith("0 bytes spill stores, 0 bytes spill loads")
                                                for line in log.splitlines() if "spill" in line)  # fmt: skip
                wrong = [log] if "C75" in log or "C76" in log or "arning" in log or spills else []
            else:
                results = on_device(case) if options.device else emulate(case)
                wrong = [
                    f"{name}: {np.count_nonzero(results[name] != wanted)} of {wanted.size} wrong"
                    for name, wanted in case.results.items()
                    if not np.array_equal(results[name], wanted)
                ]
                if not wrong:
                    kept.update((f"{case.name}/{name}", small(array)) for name, array in results.items())
        except (RuntimeError, ValueError) as error:
            wrong = [f"{type(error).__name__}: {error}"]
        bad += bool(wrong)
        seconds = time.perf_counter() - start
        print(f"{'FAIL' if wrong else 'ok  '} {seconds:6.2f} s  {case.name} {' '.join(wrong)}", flush=True)
    if options.write:
        Path(options.write).parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(options.write, **kept)
    print(f"{bad} of {len(chosen)} failed" if bad else f"all {len(chosen)} ok")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
