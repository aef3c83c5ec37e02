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


def rotating_third(items):
    """Every third item, from a place on that the text of the kernels decides: all have their turn as it changes."""
    texts = b"".join(path.read_bytes() for path in sorted(_variant.folder().iterdir()) if path.is_file())
    return items[zlib.crc32(texts) % 3 :: 3]
