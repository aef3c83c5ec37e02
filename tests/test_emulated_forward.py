"""The kernels of forward, run on the CPU: every check on drawn problems, and the order in which warps run drawn too.

Examples run in processes of their own, as many as there are processors.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuflash import testing

SEEDS = st.integers(0, 2**32)
DIMS = {  # head_dim and value_dim, where not drawn: one stage, and two sizes that differ
    "float16": (192, 192),
    "bfloat16": (40, 100),
    "float32": (100, 40),
    "float64": (150, 192),
}
FAMILIES = {"forward": ("float16", "bfloat16"), "forward_fma": ("float32", "float64")}
MOST = {check: 16 for check in testing.forward_checks}  # examples a check and dtype; 352 a kernel file
CASES = [
    *((check.__name__, dtype, None, MOST[check]) for check in testing.forward_checks for dtype in DIMS),
    *(("check_bound", dtype, dims, 6) for dtype, dims in DIMS.items()),
]
"""(name of the check, dtype, dims, examples)"""


def hold(name, dtype, dims, examples):
    """Run a check on so many drawn recipes and seeds; in a process of its own."""
    import emulator

    check = getattr(testing, name)
    recipes = testing.problems(dtypes=[dtype], max_length=130, max_head_dim=64)
    if dims is not None:
        recipes = recipes.map(lambda recipe: testing.replace(recipe, head_dim=dims[0], value_dim=dims[1]))

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=bool(os.environ.get("CI")), print_blob=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(recipes, SEEDS)
    def holds(recipe, seed):
        check(emulator.Emulator(seed).forward, recipe, np, f"portable {dtype}")

    holds()


@pytest.fixture(scope="module")
def results(request, emulator):
    """A future of every case that was asked for."""
    wanted = [item.callspec.params["case"] for item in request.session.items if item.module is request.module]
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        yield {case: pool.submit(hold, *case) for case in wanted}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_check_holds(results, case):
    results[case].result()
