"""Tensor maps: what describes a tensor in global memory, and the box of it that one copy moves, to Hopper's TMA.

``encode`` fills the map that the emulated instructions read, ``encode_by_driver`` the one a GPU reads. Both take the
same arguments, check the same limits and return 128 bytes.
"""

from itertools import zip_longest

import numpy as np

from cuflash._tensor_map import tensor_map as driver_tensor_map

AXES = 5
SWIZZLES = (0, 32, 64, 128)  # spans in bytes

# The layout of the emulated map, 128 bytes; `struct EmulatedMap` of ptx_sm90.cuh is its twin.
EMULATED = np.dtype(
    [
        ("base", np.uint64),
        ("dims", np.uint64, AXES),  # elements; innermost first, axes that are not there of length 1
        ("strides", np.uint64, AXES),  # bytes; the first is the element size
        ("box", np.uint32, AXES),  # elements
        ("swizzle", np.uint32),  # bytes: 0, 32, 64 or 128
        ("magic", np.uint32),
        ("pad", np.uint32, 3),
    ]
)
MAGIC = 0x70A3D3A9
assert EMULATED.itemsize == 128


def encode(base, itemsize, dims, strides, box, swizzle=128):
    """The emulated map, as 128 bytes.

    Parameters
    ----------
    base : array or int
        The tensor, or its address.
    itemsize : int
        Bytes of an element.
    dims, box : sequence of int
        Elements along each of one to five axes, innermost first.
    strides : sequence of int
        Bytes between elements along each axis but the first, whose elements lie next to one another.
    swizzle : int
        Span in bytes of the swizzle: 128, 64, 32 or, for none, 0.
    """
    base, dims, strides, box = _checked(base, itemsize, dims, strides, box, swizzle)
    packed = np.zeros((), EMULATED)
    packed["base"], packed["dims"], packed["strides"] = base, dims, (itemsize, *strides)
    packed["box"], packed["swizzle"], packed["magic"] = box, swizzle, MAGIC
    return packed.tobytes()


def encode_by_driver(base, itemsize, dims, strides, box, swizzle=128):
    """The map of ``cuTensorMapEncodeTiled``, as 128 bytes; arguments as for ``encode``."""
    base, dims, strides, box = _checked(base, itemsize, dims, strides, box, swizzle)
    return driver_tensor_map(base, itemsize, dims, strides, box, swizzle)


def _checked(base, itemsize, dims, strides, box, swizzle):
    """The arguments with five axes, the limits of the driver checked."""
    if not isinstance(base, int):
        base = base.__array_interface__["data"][0] if isinstance(base, np.ndarray) else base.data.ptr
    if not 1 <= len(dims) == len(box) == len(strides) + 1 <= AXES:
        raise ValueError(f"tensor map: got {len(dims)} dims, {len(strides)} strides, {len(box)} box lengths")
    if swizzle not in SWIZZLES:
        raise ValueError(f"tensor map: swizzle {swizzle}; wanted one of {', '.join(map(str, SWIZZLES))}")
    if base % 16:
        raise ValueError(f"tensor map: base {base:#x}; wanted a multiple of 16")
    for axis, (length, stride, extent) in enumerate(zip_longest(dims, (itemsize, *strides), box)):
        if not 1 <= length <= 2**31:
            raise ValueError(f"tensor map: {length} elements along axis {axis}; wanted 1 to 2^31")
        if axis and (stride % 16 or not 0 <= stride < 2**40):
            raise ValueError(f"tensor map: stride {stride} of axis {axis}; wanted a multiple of 16 in [0, 2^40)")
        if not 1 <= extent <= 256:
            raise ValueError(f"tensor map: box of {extent} along axis {axis}; wanted 1 to 256")
    inner = box[0] * itemsize
    if inner % 16 or (swizzle and inner > swizzle):
        raise ValueError(f"tensor map: rows of {inner} bytes; wanted a multiple of 16, at most the swizzle's {swizzle}")
    missing = AXES - len(dims)
    return base, (*dims, *[1] * missing), (*strides, *[16] * missing), (*box, *[1] * missing)
