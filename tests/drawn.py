"""Arrays that tests draw, on whatever engine they run."""

import ml_dtypes
import numpy as np

from cuflash import reference

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
