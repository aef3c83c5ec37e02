"""Checks of `cuflash.testing` on drawn problems and drawn seeds."""

from dataclasses import replace
from functools import partial

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuflash import _plan, testing
from cuflash._dtypes import FORMATS

from . import Emulator


def hold(check, dtype, dims=None, engine="portable", *, examples, capability=(9, 0), derandomize=True, **strategy):
    """Run a check on the emulated kernels.

    Parameters
    ----------
    check : str
        Name of one of `cuflash.testing.forward_checks`, `gradient_checks`, `prefill_checks` or `decode_checks`.
    dtype : str
        Of the problems; or "tf32", which is float32 with that precision; or the format of 8-bit caches, whose queries
        are of either 16-bit dtype.
    dims : (head_dim, value_dim) or "latent", optional
        "latent": caches whose values are columns of their keys. By default dims are drawn; for float32 on sm90, which
        leaves few columns to the portable engine, from more.
    engine : str
        "portable" or "sm90".
    examples : int
        How many problems, each with a seed that decides in which order warps run.
    capability : tuple
        Of the emulated device, which has as much shared memory as one of that capability.
    derandomize : bool
        Whether every run draws the same.
    **strategy
        Keywords of `cuflash.testing.problems`, `caches` or `prefills`.

    Raises
    ------
    AssertionError, EmulatorError
        For the smallest problem found on which the check does not hold or a kernel breaks a rule.
    """
    check = getattr(testing, check)
    kinds = {"dtypes": ["float32" if dtype == "tf32" else dtype]}
    if check in testing.decode_checks:
        kinds = {"dtypes": ["float16", "bfloat16"], "formats": [dtype]} if dtype in FORMATS else kinds
        kinds = {"formats": [None]} | kinds
    kinds |= {"latent": True} if dims == "latent" else {}
    recipes = testing.strategy_of(check)(**kinds, **strategy)
    if isinstance(dims, tuple):
        recipes = recipes.map(lambda recipe: replace(recipe, head_dim=dims[0], value_dim=dims[1]))
    elif engine == "sm90" and dtype in ("float32", "tf32"):
        more = _plan.FEWEST_FLOAT32_COLUMNS - 1
        recipes = recipes.map(lambda recipe: replace(recipe, head_dim=recipe.head_dim + more))

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=derandomize, print_blob=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(recipes, st.integers(0, 2**32))
    def holds(recipe, seed):
        emulator = Emulator(seed, engine=engine)
        shared_bytes = _plan.KNOWN[capability].shared_bytes
        emulator.limits = replace(emulator.limits, capability=capability, shared_bytes=shared_bytes)
        more = {"gradients": emulator.backward} if check in testing.gradient_checks else {}
        function = emulator.decode if check in testing.decode_checks else emulator.forward
        function = partial(function, precision=dtype) if dtype == "tf32" else function
        check(function, recipe, np, f"{engine} {dtype if dtype == 'tf32' else recipe.dtype}", **more)

    holds()
