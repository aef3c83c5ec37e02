"""The kernels, run on the CPU: every check on drawn problems, the order in which warps run drawn too.

Cases run in processes of their own, beside the tests of other files.
"""

import os
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from cuflash import _plan, testing
from cuflash._dtypes import FORMATS

fuzz = pytest.importorskip("emulator.fuzz")

DTYPES = ("float16", "bfloat16", "float32", "float64")  # the first two share a kernel file
AMPERE = (8, 0)  # whose products in float64 have 8 rows, and which has no clusters
SMALL = (8, 6)  # whose shared memory is
WIDE = {  # head_dim and value_dim: kernels with one stage, and with two sizes that differ
    "float16": (192, 192),
    "bfloat16": (40, 100),
    "float32": (100, 180),
    "float64": (150, 192),
}
FLOAT64 = ((3, 1), (5, 8), (256, 256), (40, 100), (200, 40), (8, 60))  # of all kinds of its tile table
SPLIT = ((64, 64), (3, 40), (128, 100), (72, 128))  # of both kernels of float32 on sm90, one panel of values and two
GRADIENTS = ((40, 100), (128, 128), (192, 130), (256, 256))  # the same of backward's kernels with other tiles
FLOAT32_GRADIENTS = ((40, 60), (90, 96), (100, 128), (150, 192), (256, 200))
FLOAT64_GRADIENTS = ((33, 40), (70, 96), (100, 128), (192, 150), (256, 131))  # likewise
DECODE = ((128, 128), (96, 96), (192, 180), (256, 256), (64, 256), (40, 100))
CASES = [  # check, dtype, dims, engine, examples, perhaps capability: hundreds for each kernel file
    *((check.__name__, dtype, None, "portable", 16) for check in testing.forward_checks for dtype in DTYPES[:2]),
    *((check.__name__, dtype, None, "portable", 28) for check in testing.forward_checks for dtype in DTYPES[2:]),
    *((check.__name__, "float64", None, "portable", 10, AMPERE) for check in testing.forward_checks),
    *(("check_bound", "float64", dims, "portable", 4, *more) for dims in FLOAT64 for more in ((), (AMPERE,))),
    *(("check_bound", dtype, dims, "portable", 6) for dtype, dims in WIDE.items()),
    *((check.__name__, dtype, None, "sm90", 15) for check in testing.forward_checks for dtype in DTYPES[:2]),
    *((check.__name__, dtype, None, "sm90", 15) for check in testing.forward_checks for dtype in ("float32", "tf32")),
    *(("check_bound", dtype, dims, "sm90", 4) for dtype in ("float32", "tf32") for dims in SPLIT),
    *((check.__name__, dtype, None, "portable", 20) for check in testing.decode_checks for dtype in DTYPES[:2]),
    *((check.__name__, "bfloat16", None, "portable", 10, AMPERE) for check in testing.decode_checks),
    *((check.__name__, "float32", None, "portable", 40) for check in testing.decode_checks),
    *((check.__name__, "float64", None, "portable", 20) for check in testing.decode_checks),
    *((check.__name__, kind, None, "portable", 25) for check in testing.decode_checks for kind in FORMATS),
    *(("check_decode_bound", DTYPES[n % 2], dims, "portable", 4) for n, dims in enumerate(DECODE)),
    *((check.__name__, dtype, None, "portable", 30) for check in testing.prefill_checks for dtype in DTYPES[:2]),
    *(("check_prefill_bound", DTYPES[n % 2], dims, "portable", 4) for n, dims in enumerate(DECODE)),
    *(("check_decode_bound", kind, dims, "portable", 4) for kind in (*FORMATS, *DTYPES[2:]) for dims in DECODE[::3]),
    *(("check_decode_bound", "float64", dims, "portable", 4, SMALL) for dims in DECODE[::3]),
    *((check.__name__, dtype, "latent", "portable", 12) for check in testing.latent_checks for dtype in DTYPES[:2]),
    *(
        ("check_decode_bound", dtype, "latent", "portable", 12, device)
        for dtype in DTYPES[:2]
        for device in (AMPERE, SMALL)
    ),
    *(("check_bound", "bfloat16", dims, "sm90", 3) for dims in ((100, 40), (128, 128), (180, 128), (256, 256))),
    *((check.__name__, dtype, (200, 256), "sm90", 16) for check in testing.gradient_checks for dtype in DTYPES[:2]),
    *((check.__name__, "float32", None, "portable", 40) for check in testing.gradient_checks),
    *((check.__name__, "float32", None, "portable", 10, SMALL) for check in testing.gradient_checks),
    *(
        ("check_gradient_bound", "float32", dims, "portable", 4, *more)
        for dims in FLOAT32_GRADIENTS
        for more in ((), (AMPERE,), (SMALL,))
    ),
    *((check.__name__, "float64", None, "portable", 40) for check in testing.gradient_checks),
    *((check.__name__, "float64", None, "portable", 5, AMPERE) for check in testing.gradient_checks),
    *(("check_gradient_bound", "float64", dims, "portable", 4) for dims in FLOAT64_GRADIENTS),
    *(("check_gradient_bound", "float64", dims, "portable", 4, AMPERE) for dims in FLOAT64_GRADIENTS),
    *(
        case
        for engine in ("portable", "sm90")
        for case in (
            *((check.__name__, dtype, None, engine, 26) for check in testing.gradient_checks for dtype in DTYPES[:2]),
            *(("check_gradient_bound", DTYPES[n % 2], dims, engine, 3) for n, dims in enumerate(GRADIENTS)),
        )
    ),
]


def begin(request, processes, params):
    """A future for every case that was asked for."""
    request.getfixturevalue("emulator")
    return {
        case: processes.submit(
            fuzz.hold, *case[:4], examples=case[4], capability=(*case, (9, 0))[5],
            derandomize=bool(os.environ.get("CI")), max_length=130, max_head_dim=64,
        )
        for case in (each["case"] for each in params)
    }  # fmt: skip


def test_keys_of_wide_float64_stay_in_global_memory_where_shared_memory_is_small(emulator):
    recipe = testing.Recipe(heads=2, key_heads=1, queries=70, keys=50, head_dim=201, value_dim=256, dtype="float64")
    for seed, changes in enumerate(({}, {"causal": True}, {"window": (7, 3), "head_dim": 256, "value_dim": 3})):
        engine = emulator.Emulator(seed, replace(_plan.KNOWN[8, 6], processors=2))
        check = partial(testing.check_gradient_bound, gradients=engine.backward)
        check(engine.forward, replace(recipe, **changes), np, "portable float64")


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_check_holds(emulator, ahead, request, case):
    ahead[request.module][case].result()
