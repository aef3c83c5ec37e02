"""Element types: their names in the API, in variants and in kernel text."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Element:
    """One element type a kernel can read."""

    name: str  # as NumPy spells it
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
