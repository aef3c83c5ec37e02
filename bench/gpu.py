"""What the parts of ``.ci/gpu`` share (plans, arrays on the device), compilation ahead, and the part that tests.

    python bench/gpu.py compile                  # every variant of this GPU, in parallel, into CuPy's disk cache
    python bench/gpu.py tests --json FILE        # the test-suite with a GPU required; counts into the record
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

import record

from cuflash import _api, _compile, _launch, _plan, _problem, bounds
from cuflash.__main__ import gpu as find_gpu
from cuflash._dtypes import ELEMENTS

DEFAULTS = {each.__name__: _launch.parameters(each)[1] for each in (_api.forward, _api.backward, _api.decode)}


def limits():
    """What device 0 can do."""
    return _launch.limits(0)


def plan_of(function, *arrays, engine=None, **keywords):
    """The plan of a call by a GPU engine; its arrays may lie on the host, since only their layout matters."""
    problem = getattr(_problem, function)(*arrays, **(DEFAULTS[function] | keywords))
    return _plan.plan(replace(problem, library="cupy", engine=engine), limits())


def steps_of(function, *arrays, **keywords):
    """Its launches."""
    return plan_of(function, *arrays, **keywords).steps


def variant_of(function, *arrays, **keywords):
    """Name of the kernel that does most of a call's work; None on the CPU."""
    variant = None if keywords.get("engine") == "numpy" else plan_of(function, *arrays, **keywords).variant
    return variant and variant.name


def fewest_keys(variant):
    """Keys from which on a plan takes a variant."""
    tiles = _plan.HOPPER_LONG_TILES.get((variant.head_dim, variant.value_dim), ())
    long = variant.kernel == "forward_sm90" and tiles[:2] == (variant.tile_q, variant.tile_k)
    return _plan.LONG if long else 0


def backward_unordered(dout, q, k, v, out, lse, **keywords):
    """A prepared call of backward whose sums of dq take no turns: what turns cost is the difference."""
    problem = _problem.backward(dout, q, k, v, out, lse, **(DEFAULTS["backward"] | keywords))
    plan = _launch.make_plan(problem)
    steps = [
        replace(step, variant=replace(step.variant, ordered=0) if step.cooperative else step.variant,
                args=step.args | {"clear": 1})
        for step in plan.steps
    ]  # fmt: skip
    call = _launch._GpuBackward(problem, replace(plan, steps=tuple(steps)))
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    return lambda: call(arrays, ())


def path_of(dtype, engine, precision=None):
    """The arithmetic path whose roundings ``cuflash.bounds`` is to allow for."""
    return f"{engine} {precision or dtype}"


def bounded(q, k, v, *, engine, scale=None, causal=False, window=None, precision=None, rows=None):
    """The float64 answer for host arrays and the bound of an engine's error."""
    path = path_of(q.dtype.name, engine, precision)
    return bounds.forward(q, k, v, scale=scale, causal=causal, window=window, path=path, rows=rows)


def bounded_gradients(dout, q, k, v, *, engine, **keywords):
    """The float64 gradients for host arrays and the bounds of an engine's errors."""
    return bounds.backward(dout, q, k, v, path=path_of(q.dtype.name, engine), **keywords)


def over_bound(actual, wanted, bound):
    """Worst error over bound: 0 where the two are equal, -inf and -inf too; NaN where the error is."""
    with np.errstate(invalid="ignore", divide="ignore"):
        actual = actual.astype(np.float64)
        error = np.where(actual == wanted, 0, np.abs(actual - wanted))
        return float(np.max(np.where(error == 0, 0, error / bound), initial=0))


def array_library(program, numpy):
    """NumPy where a program of ``bench/`` is asked for it; else CuPy, or the program's end, in a sentence."""
    if numpy:
        return np
    cupy, reason = find_gpu()
    if reason:
        sys.exit(f"bench/{program}.py: {reason}; --numpy needs no GPU")
    return cupy


def to_device(array):
    """A contiguous NumPy array on the GPU; bfloat16 moves as integers."""
    import cupy

    if array.dtype == ELEMENTS["bfloat16"].dtype:
        return cupy.asarray(array.view(np.uint16)).view(array.dtype)
    return cupy.asarray(array)


# Compilation ahead ----------------------------------------------------------------------------------------------


def _compile_one(variant):
    begin = time.perf_counter()
    try:
        _compile.load(variant, 0)
    except Exception as error:  # reported by name; the others go on
        return variant.name, time.perf_counter() - begin, f"{type(error).__name__}: {error}"
    return variant.name, time.perf_counter() - begin, None


def compile_all(workers=None):
    """Compile every variant for device 0 into CuPy's disk cache, in parallel; the names of those that failed."""
    begin, chosen, failed, slowest = time.perf_counter(), _plan.variants(limits()), [], ("", 0.0)
    with ProcessPoolExecutor(workers or min(os.cpu_count(), 16), mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_compile_one, variant) for variant in chosen]):
            name, seconds, error = done.result()
            slowest = max(slowest, (name, seconds), key=lambda pair: pair[1])
            if error:
                failed.append(name)
                print(f"compile: {name} FAILED: {error}", flush=True)
    seconds = time.perf_counter() - begin
    print(f"compile: {len(chosen)} variants in {seconds:.0f} s, {len(failed)} failed, slowest {slowest}")
    return failed


# Tests ----------------------------------------------------------------------------------------------------------


def count_tests(xml):
    """Counts {passed, failed, skipped} of a JUnit file; an error counts as a failure."""
    total = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.parse(xml).getroot().iter("testsuite"):
        for name in total:
            total[name] += int(suite.get(name, 0))
    failed = total["failures"] + total["errors"]
    return {"passed": total["tests"] - failed - total["skipped"], "failed": failed, "skipped": total["skipped"]}


# Files whose tests are shared among processes. NumPy gets a thread in each, for they are as many as there are cores.
SHARES = {"test_forward": 4, "test_backward": 4, "test_gpu": 8, "test_cases": 2, "test_decode": 2, "test_host": 3}
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def _run_file(file, share, folder, deadline):
    """Run a share of one file of tests in a process of its own: its output and its counts."""
    xml = Path(folder) / f"{file.stem}{share.replace('/', '_')}.xml"
    environment = os.environ | ONE_THREAD | {"CUFLASH_REQUIRE_GPU": "1", "CUFLASH_SHARE": share}
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "--durations=3", f"--junitxml={xml}", str(file)]
    child = subprocess.Popen(
        command, cwd=record.ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output, _ = child.communicate(timeout=max(deadline - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGINT)  # pytest writes its file when interrupted
        try:
            output, _ = child.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            child.kill()
            output, _ = child.communicate()
    counts = count_tests(xml) if xml.is_file() else {"passed": 0, "failed": 0, "skipped": 0}
    if child.returncode not in (0, 5) and not counts["failed"]:  # 5: the file skips itself
        counts["failed"] = 1  # a collection error, a crash or the time limit
    return output, counts


def run_tests(json, seconds, at_once=16):
    """Run the test-suite, some files at once; counts go into the record whatever happened. 0 where all is well."""
    begin, total = time.monotonic(), dict.fromkeys(("passed", "failed", "skipped"), 0)
    jobs = []
    for file in sorted((record.ROOT / "tests").glob("test_*.py"), key=lambda file: -SHARES.get(file.stem, 1)):
        shares = SHARES.get(file.stem, 1)
        jobs += [(file, f"{n}/{shares}") for n in range(shares)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as pool:
        for output, counts in pool.map(lambda job: _run_file(*job, folder, begin + seconds), jobs):
            print(output, flush=True)
            total = {name: total[name] + counts[name] for name in total}
    print(f"tests: {total} in {time.monotonic() - begin:.0f} s")
    if json:
        record.add(json, "tests", record.stamped(total))
    return int(bool(total["failed"]))


def main(argv=None):
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("compile", "tests", "engines"))
    parser.add_argument("--json", metavar="FILE", help="record to write to")
    parser.add_argument("--seconds", type=float, default=480)
    options = parser.parse_args(argv)
    if options.part == "engines":  # that run here, for loops of a shell
        print(*dict.fromkeys(variant.engine for variant in _plan.variants(limits())))
        return 0
    if options.part == "compile":
        return int(bool(compile_all()))
    return run_tests(options.json, options.seconds)


if __name__ == "__main__":
    sys.exit(main())
