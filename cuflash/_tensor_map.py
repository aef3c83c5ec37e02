"""Tensor maps: a tensor in device memory and the box of it that one copy moves, as the driver encodes them for Hopper.

The driver's function touches no device.
"""

import ctypes

from ._compile import driver_function

_TYPES = {1: 0, 2: 1, 4: 2, 8: 4}  # unsigned integers of so many bytes: bits are copied as they are
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_PROMOTE_256, _ZEROS = 3, 0
_ARGUMENTS = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, *(ctypes.c_void_p,) * 5, *(ctypes.c_int,) * 4


def tensor_map(pointer, itemsize, dims, strides, box, swizzle=128):
    """The 128 bytes of a map.

    Parameters
    ----------
    pointer : int
        Address of the tensor, a multiple of 16.
    itemsize : int
        Bytes of an element.
    dims, box : tuple of int
        Elements along each axis, innermost first.
    strides : tuple of int
        Bytes between neighbours along each axis but the first, multiples of 16.
    swizzle : int
        Span in bytes that the boxes' swizzle permutes: 128, 64, 32 or, for none, 0.
    """
    rank = len(dims)
    storage = ctypes.create_string_buffer(256)
    address = -(-ctypes.addressof(storage) // 128) * 128
    wide, word = ctypes.c_uint64, ctypes.c_uint32
    result = driver_function("cuTensorMapEncodeTiled", *_ARGUMENTS)(
        address, _TYPES[itemsize], rank, pointer, (wide * rank)(*dims), (wide * (rank - 1))(*strides),
        (word * rank)(*box), (word * rank)(*(1,) * rank), 0, _SWIZZLES[swizzle], _PROMOTE_256, _ZEROS,
    )  # fmt: skip
    if result:
        raise RuntimeError(f"cuTensorMapEncodeTiled: error {result} for {dims} by {strides} bytes, box {box}")
    return ctypes.string_at(address, 128)
