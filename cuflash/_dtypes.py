"""Element types: their names in the API, in variants and in kernel text."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Element:
    """One element type a kernel can read."""

    name: str  # as NumPy spells it; of a format of caches, its own
    short: str  # in variant names
    struct: str  # in kernel text
    itemsize: int
    dtype: np.dtype
    lse: np.dtype  # dtype of lse and of the sums


ELEMENTS = {
    name: Element(name, short, struct, np.dtype(scalar).itemsize, np.dtype(scalar), np.dtype(lse))
    for name, short, struct, scalar, lse in (
        ("float16", "f16", "Float16", np.float16, np.float32),
        ("bfloat16", "bf16", "BFloat16", ml_dtypes.bfloat16, np.float32),
        ("float32", "f32", "float", np.float32, np.float32),
        ("float64", "f64", "double", np.float64, np.float64),
    )
}

# Formats of 8-bit caches, and the dtype of the arrays that hold them: E4M3 has none in CuPy.
FORMATS = {
    "int8": Element("int8", "i8", "Int8", 1, np.dtype(np.int8), np.dtype(np.float32)),
    "e4m3": Element("e4m3", "e4m3", "E4M3", 1, np.dtype(np.uint8), np.dtype(np.float32)),
}

# Numbers of E4M3 that are not negative, in the order of their codes, which begin at 0.
E4M3 = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)

KINDS = ELEMENTS | FORMATS  # all that kernels read
