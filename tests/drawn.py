"""What tests draw: arrays, on whatever engine they run, and a share of what takes long."""

import zlib

import ml_dtypes
import numpy as np

from cuflash import _variant, reference

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


def draw(engine, *shapes, dtype="float32", seed=0):
    """Random normal arrays of the engine's library."""
    rng = np.random.default_rng(seed)
    return [engine.xp.asarray(rng.standard_normal(shape).astype(DTYPES[dtype])) for shape in shapes]


def changed(engine, array, place, value):
    """A copy with another value at a place."""
    array = reference.host(array).copy()
    array[place] = value
    return engine.xp.asarray(array)


def draw_far_below(engine, dtype, length, below):
    """q, k, v of ``(1, 2, ., 64)`` and a scale: the keys of ``below`` have scores so far below those of all others, 0,
    that their weights against a reference of their own come out as anything, infinity as well."""
    q, k, v = (np.abs(reference.host(x)) for x in draw(engine, (1, 2, 3, 64), *[(1, 2, length, 64)] * 2, dtype=dtype))
    signs = np.zeros((length, 1), k.dtype)
    signs[below] = -1
    return *(engine.xp.asarray(x) for x in (q, k * signs, v)), 1e18 if dtype == "float64" else 1e9


def rotating(items, share=3):
    """Each ``share``-th item, from a place that the text of the kernels decides: all get their turn as it changes."""
    texts = b"".join(path.read_bytes() for path in sorted(_variant.folder().iterdir()) if path.is_file())
    return items[zlib.crc32(texts) % share :: share]
