"""The kernels of backward, run on the CPU: every check on drawn problems, the order in which warps run drawn too.

Examples run in processes of their own, as many as there are processors.
"""

import os

import pytest

from cuflash import testing

fuzz = pytest.importorskip("emulator.fuzz")

DTYPES = ("float16", "bfloat16")
WIDE = ((40, 100), (128, 128), (192, 130), (256, 256))  # head_dim and value_dim of kernels with other tiles
CASES = [  # check, dtype, dims, engine, examples: more than 300 for each kernel file
    *(
        (check.__name__, dtype, None, engine, 26)
        for check in testing.gradient_checks
        for dtype in DTYPES
        for engine in ("portable", "sm90")
    ),
    *(
        ("check_gradient_bound", dtype, dims, engine, 3)
        for engine in ("portable", "sm90")
        for dtype, dims in zip(DTYPES * 2, WIDE, strict=True)
    ),
]


@pytest.fixture(scope="module")
def results(request, emulator):
    """A future for every case that was asked for."""
    wanted = [item.callspec.params["case"] for item in request.session.items if item.module is request.module]
    with fuzz.pool(os.cpu_count()) as processes:
        yield {
            case: processes.submit(
                fuzz.hold, *case[:4], examples=case[4], derandomize=bool(os.environ.get("CI")), max_length=130,
                max_head_dim=64,
            )
            for case in wanted
        }  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_check_holds(results, case):
    results[case].result()
