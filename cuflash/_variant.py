"""Variants: every fact the compiler knows about a kernel, and the text it compiles.

A variant writes a typed preamble (constants, the element type, the mask) and puts it in front of the kernel file, with
all includes written in place. The kernel sees nothing else, so the text is a complete key for any cache.
"""

import re
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from pathlib import Path

import numpy as np

from ._dtypes import KINDS
from ._masks import MASKS
from ._wgmma import wgmma

_STRIDES = np.dtype([(name, np.int64) for name in ("batch0", "batch1", "head", "row")])
_STEPS = np.dtype([(name, np.int64) for name in ("batch", "head", "row", "column")])
_SCHEDULE = np.dtype([("tiles", np.int32), ("section", np.int32), ("heads", np.int64)])
_TENSOR_MAP = np.dtype("V128")

FORWARD_POINTERS = {  # by kernel; of others the first five
    "forward": "q k v out lse lengths page_table",
    "forward_f32_sm90": "q k v out lse q_parts k_parts v_parts",
    "forward_sm90": "q k v out lse ticket",
}
DECODE_POINTERS = "q k v out lse lengths page_table k_scale v_scale parts arrived"
APPEND_POINTERS = "q k_new v_new k v rotated cos sin lengths page_table totals overflow"


def _struct(fields):
    """A structured dtype laid out as a C compiler would, tensor maps at multiples of 128 bytes."""
    offset, most, offsets = 0, 1, []
    for _, kind in fields:
        kind = np.dtype(kind)
        alignment = 128 if kind == _TENSOR_MAP else kind.alignment
        offset = -(-offset // alignment) * alignment
        offsets.append(offset)
        offset, most = offset + kind.itemsize, max(most, alignment)
    names, kinds = zip(*fields, strict=True)
    size = -(-offset // most) * most
    return np.dtype({"names": names, "formats": kinds, "offsets": offsets, "itemsize": size})


def _args(scale_log2, pointers="q k v out lse", maps="", wide="", sizes=""):
    sizes = f"queries keys heads group pack head_dim value_dim head_blocks batches1 first_shift end_shift {sizes}"
    return _struct(
        [
            *((name, np.uint64) for name in pointers.split()),
            *((name, _TENSOR_MAP) for name in maps.split()),
            *((f"{name}_strides", _STRIDES) for name in ("q", "k", "v", "out")),
            ("schedule", _SCHEDULE),
            *((name, np.int64) for name in wide.split()),
            *((name, np.uint32 if name == "page_multiplier" else np.int32) for name in sizes.split()),
            ("scale_log2", scale_log2),
        ]
    )


def _backward_args(maps="", more=(), scale=np.float32):
    pointers = "q k v dout out lse dlse dq dk dv row_lse row_delta dq_sum turns suspects"
    sizes = (
        "queries keys heads group head_dim value_dim batches1 first_shift end_shift query_tiles key_tiles "
        "cyclic passes_log2 section items tile_q tile_k columns parts clear dq_wide dk_wide dv_wide boxes"
    )
    return _struct(
        [
            *((name, np.uint64) for name in pointers.split()),
            *((name, _TENSOR_MAP) for name in maps.split()),
            *((f"{name}_strides", _STRIDES) for name in "q k v dout out dq dk dv".split()),
            *((name, np.int32) for name in sizes.split()),
            ("scale", scale),
            ("scale_log2", scale),
            *more,
        ]
    )


def _decode_args(scale_log2=np.float32):
    sizes = (
        "queries capacity appended heads group head_dim value_dim key_heads tiles splits fewest first_sequence "
        "sequences lone wave waves least_share short_share usual_share late_first late_end "
        "pages page_size page_multiplier page_shift left right top_left out_vectors bfloat16 k_slots v_slots"
    )
    return _struct(
        [
            *((name, np.uint64) for name in DECODE_POINTERS.split()),
            *((f"{name}_strides", _STRIDES) for name in "q k v out k_scale v_scale".split()),
            *((name, np.int64) for name in "length_stride table_stride table_step".split()),
            *((name, np.uint32 if name == "page_multiplier" else np.int32) for name in sizes.split()),
            ("scale_log2", scale_log2),
        ]
    )


def _append_args():
    wide = "cos_step cos_column sin_step sin_column length_stride table_stride table_step overflow_stride"
    sizes = (
        "items first_sequence rows queries appended capacity rotated_heads key_heads head_dim value_dim half positions "
        "interleaved single pages page_size page_multiplier page_shift k_vectors v_vectors"
    )
    return _struct(
        [
            *((name, np.uint64) for name in APPEND_POINTERS.split()),
            *((f"{name}_steps", _STEPS) for name in "q k_new v_new k v rotated".split()),
            *((name, np.int64) for name in wide.split()),
            *((name, np.uint32 if name in ("items", "page_multiplier") else np.int32) for name in sizes.split()),
        ]
    )


# NVRTC has no offsetof before 13.1, but its front end's own operator.
_OFFSET_OF = """\
#ifdef __CUDACC_RTC__
#define OFFSET_OF(type, field) __INTADDR__(&static_cast<type*>(nullptr)->field)
#else
#define OFFSET_OF(type, field) __builtin_offsetof(type, field)
#endif
"""

# Kernel file and the twin of its struct Args, by kernel; of kernels for several dtypes of sums, the twins by these.
_BACKWARD_ARGS = {name: _backward_args(scale=name) for name in ("float32", "float64")}
KERNELS = {
    "forward": (
        "forward.cu",
        _args(
            np.float32, FORWARD_POINTERS["forward"], wide="first_block length_stride table_stride table_step",
            sizes="out_vectors pages page_size page_multiplier page_shift left right top_left",
        ),
    ),
    "forward_f32": ("forward_f32.cu", _args(np.float32, wide="first_block", sizes="out_vectors")),
    "forward_parts": (
        "forward_parts.cu",
        _args(np.float32, FORWARD_POINTERS["forward_f32_sm90"], wide="query_blocks key_blocks"),
    ),
    "forward_f32_sm90": (
        "forward_f32_sm90.cu",
        _args(
            np.float32, FORWARD_POINTERS["forward_f32_sm90"], "q_map k_map v_map", wide="first_block",
            sizes="out_vectors",
        ),
    ),
    "forward_f64": ("forward_f64.cu", _args(np.float64, wide="first_block", sizes="out_vectors")),
    "forward_sm90": (
        "forward_sm90.cu",
        _args(np.float32, FORWARD_POINTERS["forward_sm90"], "q_map k_map v_map out_map", sizes="out_boxes blocks rows"),
    ),
    "append": ("append.cu", _append_args()),
    "decode": ("decode.cu", _decode_args()),
    "decode_8bit": ("decode_8bit.cu", _decode_args()),
    "decode_latent": ("decode_latent.cu", _decode_args()),
    "decode_real": ("decode_real.cu", {name: _decode_args(name) for name in ("float32", "float64")}),
    "backward_rows": ("backward_rows.cu", _BACKWARD_ARGS),
    "backward": ("backward.cu", _backward_args()),
    "backward_f32": ("backward_f32.cu", _BACKWARD_ARGS["float32"]),
    "backward_f64": ("backward_f64.cu", _BACKWARD_ARGS["float64"]),
    "backward_finish": ("backward_finish.cu", _BACKWARD_ARGS),
    "backward_sm90": ("backward_sm90.cu", _backward_args("q_map dout_map k_map v_map dk_map dv_map")),
    "backward_dq_sm90": (
        "backward_dq_sm90.cu",
        _backward_args("q_map dout_map k_map v_map dq_map", more=[("schedule", _SCHEDULE)]),
    ),
}


# Constants that kernels leave aside.
_UNUSED = {
    "append": ("head_dim", "value_dim", "tile_q", "tile_k", "stages", "shared_bytes"),
    "backward_rows": ("head_dim", "value_dim", "tile_k"),
    "forward_parts": ("last_first",),
    "backward_finish": ("tile_k",),
}


@dataclass(frozen=True)
class Variant:
    """One compiled kernel."""

    kernel: str
    element: str
    mask: str
    head_dim: int  # padded
    value_dim: int
    tile_q: int
    tile_k: int
    warps: int
    blocks_per_sm: int  # that the registers must leave room for
    stages: int  # 2: the next tile is copied beside this one; 1: its keys beside these values, and so on in turn
    shared_bytes: int
    query_steps: int = 0  # of 16 columns of q that stay in registers; if all, its shared memory is free for next rows
    out_staged: int = 0  # panels of a warp's rows of out in shared memory of its own, to leave by tensor copies
    early: int = 0  # steps of 16 keys whose exponentials run beside the product with v before
    ordered: int = 1  # backward: whether sums of dq take turns; 0 in tests of what that costs
    tall_products: int = 0  # float64: whether the device multiplies 16 rows in one instruction
    keys_shared: int = 1  # backward in float64: whether k and v lie in shared memory
    vector_adds: int = 0  # backward: whether the device adds four floats at once
    parts: int = 0  # float32: bfloat16 that a number is split into
    converts: int = 0  # decode: whether the device converts E4M3
    paged: int = 0  # forward: whether keys and values lie in a cache
    clusters: int = 0  # decode: splits that may be the blocks of a cluster, at most
    run: int = 0  # decode: keys for which a page is looked up once; 0: as the page size turns out

    @property
    def name(self):
        """The facts spelled out: a label for benchmarks, tests and errors."""
        dims = f"d{self.head_dim}" if self.head_dim == self.value_dim else f"d{self.head_dim}v{self.value_dim}"
        tiles = f"q{self.tile_q}_k{self.tile_k}_w{self.warps}_b{self.blocks_per_sm}"
        more = f"_r{self.query_steps}" * (self.query_steps > 0) + f"_o{self.out_staged}" * (self.out_staged > 0)
        more += f"_e{self.early}" * (self.early > 0) + f"_p{self.parts}" * (self.parts > 0)
        mask = f"_{self.mask}" if self.forward else ""  # always the most general elsewhere
        more += "" if self.ordered else "_unordered"
        more += "_paged" * self.paged + "_each" * (self.run == 1)
        return f"{self.kernel}_{KINDS[self.element].short}{mask}_{dims}_{tiles}_s{self.stages}{more}"

    @property
    def entry(self):
        """Name of the kernel's function."""
        return f"cuflash_{self.kernel}"

    @property
    def file(self):
        """Name of the kernel's file."""
        return KERNELS[self.kernel][0]

    @property
    def args(self):
        """NumPy twin of the kernel's struct Args."""
        args = KERNELS[self.kernel][1]
        return args[KINDS[self.element].lse.name] if isinstance(args, dict) else args

    def preamble(self):
        """The constants and types of this variant, and the checks of its struct of arguments."""
        element, mask = KINDS[self.element], MASKS[self.mask]
        declared = "" if element.struct in ("float", "double") else f"struct {element.struct};\n"
        numbers = "".join(
            f"constexpr int {field.name.upper()} = {getattr(self, field.name)};\n"
            for field in fields(self)
            if field.type is int and self._has(field)
        )
        ordered = self.forward and "last_first" not in _UNUSED.get(self.kernel, ())
        last_first = "" if not ordered else "constexpr bool LAST_FIRST = {};  // long rows of tiles first\n"
        last_first = last_first.format("false" if self.mask == "full" else "true")
        offsets = "".join(
            f'    static_assert(OFFSET_OF(A, {name}) == {offset}, "Args.{name}: not where Python puts it");\n'
            for name, (_, offset) in ((name, self.args.fields[name][:2]) for name in self.args.names)
        )
        return (
            f"// {self.name}\nnamespace cuflash {{\n{declared}using Element = {element.struct};\n"
            f"struct {mask.__name__};\nusing Mask = {mask.__name__};\n{numbers}{last_first}"
            f"{_OFFSET_OF}template <typename A>\nstruct ArgsLayout {{\n"
            f'    static_assert(sizeof(A) == {self.args.itemsize}, "Args: not the size Python packs");\n{offsets}}};\n'
            f"}}\n"
        )

    def _has(self, field):
        """Whether the kernel's text speaks of a field: compilers warn of constants that are not used."""
        if field.default is MISSING:
            return field.name not in _UNUSED.get(self.kernel, ())
        owners = {
            "ordered": ("backward", "backward_f32", "backward_f64", "backward_sm90"),
            "tall_products": ("forward_f64", "backward_f64"),
            "keys_shared": ("backward_f64",),
            "parts": ("forward_f32", "forward_f32_sm90", "forward_parts", "backward_f32"),
            "vector_adds": ("backward", "backward_f32"),
            "converts": ("decode_8bit",),
            "query_steps": ("forward_sm90", "decode_latent"),
            "paged": ("forward",),
            "clusters": ("decode", "decode_8bit", "decode_latent", "decode_real"),
            "run": ("decode", "decode_8bit", "decode_real"),
        }
        return self.kernel in owners.get(field.name, ("forward_sm90",))

    @property
    def function(self):
        """The function that it is for."""
        return "decode" if self.kernel == "append" else self.kernel.split("_")[0]

    @property
    def caches(self):
        """Whether its keys lie in caches."""
        return bool(self.paged) or self.function == "decode"

    @property
    def forward(self):
        """Whether it is one of forward's."""
        return self.function == "forward"

    @property
    def backward(self):
        """Whether it is one of backward's."""
        return self.function == "backward"

    @property
    def hopper(self):
        """Whether it takes instructions that sm_90a alone has."""
        return self.kernel.endswith("_sm90")

    @property
    def engine(self):
        """The engine that launches it."""
        return "sm90" if self.hopper else "portable"

    def products(self):
        """The products of a warpgroup of the sizes in use."""
        sizes = {
            "forward_sm90": (self.tile_k, self.value_dim),
            "forward_f32_sm90": (self.tile_k, 64 if self.parts > 2 else self.value_dim),  # the last: of a panel
            "backward_sm90": (self.tile_q, self.head_dim, 64),  # the last: columns of a consumer's part of dq
            "backward_dq_sm90": (self.tile_k, self.head_dim),
        }
        element = "bfloat16" if self.element == "float32" else self.element  # of which a float32 has three
        return wgmma(element, sizes[self.kernel]) if self.hopper else ""

    def text(self, overlay=None):
        """The whole text to compile. Files in the folder ``overlay`` take the place of those of the same name."""
        return self.products() + self.preamble() + _assemble(self.file, overlay)


@lru_cache(maxsize=1)
def folder():
    """Where the kernel text lies: inside an installed package, beside it in a checkout."""
    here = Path(__file__).resolve().parent
    for place in (here / "kernels", here.parent / "kernels"):
        if (place / "forward.cu").is_file():
            return place
    raise FileNotFoundError(f"cuflash: no kernel text inside or beside {here}")


@lru_cache(maxsize=64)
def _assemble(file, overlay=None):
    """The file with its includes written in place, once each, marked so that errors point into ``kernels/``."""
    seen = set()

    def lines(name):
        seen.add(name)
        place = Path(overlay) / name if overlay and (Path(overlay) / name).is_file() else folder() / name
        yield f'#line 1 "kernels/{name}"'
        for number, line in enumerate(place.read_text(encoding="utf-8").splitlines(), 1):
            include = re.fullmatch(r'#include "(.+)"', line)
            if line == "#pragma once":
                yield ""
            elif not include:
                yield line
            elif include[1] not in seen:
                yield from lines(include[1])
                yield f'#line {number + 1} "kernels/{name}"'
            else:
                yield ""

    return "\n".join(lines(file)) + "\n"
