"""Exact attention for CuPy and NumPy arrays, its kernels compiled on first use."""

from . import bounds, reference
from ._api import backward, decode, explain, forward, merge, quantize, vjp
from ._cache import PagedCache
from ._compile import CompileError

__version__ = "0.1.0"
__all__ = [
    "CompileError", "PagedCache", "backward", "bounds", "decode", "explain", "forward", "merge", "quantize",
    "reference", "roofline", "testing", "vjp",
]  # fmt: skip


def __getattr__(name):
    if name in ("roofline", "testing"):  # few ask for them, and testing needs hypothesis
        from importlib import import_module

        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
