"""Speed of the emulator, its seeded mistakes, and long runs.

    python -m tests.emulator speed                    # tile products a second, by dtype
    python -m tests.emulator mutations                # what catches each seeded mistake in the portable kernels
    python -m tests.emulator fuzz --seconds 600       # new problems and seeds until the time is over
"""

import argparse
import os
import sys
import tempfile
import time

import numpy as np

from cuflash import _problem, testing
from cuflash._dtypes import ELEMENTS

from . import HERE, Emulator
from .fuzz import hold, pool
from .mutations import MUTATIONS

LENGTHS = {"float16": 1024, "bfloat16": 1024, "float32": 256, "float64": 256}


def speed(options):
    """Products of a tile of queries with a tile of keys, softmax and the product with values included, of one core."""
    for dtype, length in LENGTHS.items():
        rng = np.random.default_rng(0)
        q, k, v = (rng.standard_normal((1, length, 64)).astype(ELEMENTS[dtype].dtype) for _ in range(3))
        emulator = Emulator()
        emulator.prepare(q, k, v)
        keywords = {"scale": None, "causal": False, "window": None, "return_lse": False, "out": None, "engine": None}
        (step,) = emulator.plan(_problem.forward(q, k, v, **keywords)).steps
        begin = time.perf_counter()
        emulator.forward(q, k, v)
        rate = step.grid * -(-length // step.variant.tile_k) / (time.perf_counter() - begin)
        print(f"{step.variant.name:48} {rate:6.0f} products of {step.variant.tile_q} x {step.variant.tile_k} a second")
    return 0


def mutations(options):
    """One line for each mistake. 0 where all are caught."""
    missed = 0
    for mutation in MUTATIONS:
        with tempfile.TemporaryDirectory() as folder:
            said = mutation.caught(mutation.overlay(folder))
        missed += said is None or mutation.caught(HERE) is not None
        print(f"{mutation.name:40} {said or 'MISSED'}", flush=True)
    return int(missed > 0)


def fuzz(options):
    """Rounds of all checks and dtypes. 0 where all hold."""
    begin, failures, rounds = time.monotonic(), 0, 0
    with pool(options.processes) as processes:
        while time.monotonic() - begin < options.seconds and not failures:
            jobs = {
                (check.__name__, dtype): processes.submit(
                    hold, check.__name__, dtype, examples=8, derandomize=False, max_length=300, max_head_dim=256
                )
                for check in testing.forward_checks
                for dtype in ELEMENTS
            }
            for job, future in jobs.items():
                if future.exception() is not None:
                    failures += 1
                    print(f"{' '.join(job)}: {future.exception()}\n{future.exception().__cause__}", flush=True)
            rounds += 1
            seconds = time.monotonic() - begin
            print(f"fuzz: {rounds * 8 * len(jobs)} examples, {seconds:.0f} s, {failures} failures", flush=True)
    return int(failures > 0)


def main(argv=None):
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("speed", "mutations", "fuzz"))
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args(argv)
    return {"speed": speed, "mutations": mutations, "fuzz": fuzz}[options.what](options)


if __name__ == "__main__":
    sys.exit(main())
