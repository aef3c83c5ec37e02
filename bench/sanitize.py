"""Run the kernels under compute-sanitizer: memcheck, racecheck, synccheck. Errors go into the record.

    python bench/sanitize.py --json FILE         # a planted fault first, then every kernel by every tool
    python bench/sanitize.py --kernels decode,decode_8bit    # these alone
    python bench/sanitize.py plant               # what runs inside: a kernel that writes past an allocation
    python bench/sanitize.py forward             # and every variant of a kernel on small problems

CuPy's memory pool is off inside, for the tools cannot see allocations in it. Each kernel has a process of its own, so
the errors a tool counts there are that kernel's. The kernels are compiled beforehand (``gpu.py compile``).
"""

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import gpu
import numpy as np
import record

import cuflash
from cuflash import _plan, _problem
from cuflash._dtypes import ELEMENTS, FORMATS

TOOLS = ("memcheck", "racecheck", "synccheck")
# These run with the kernels that they surround.
AROUND = ("append", "forward_parts", "backward_rows", "backward_dq_sm90", "backward_finish")
DONE = "sanitized: "  # begins the line that says what ran


# Inside ---------------------------------------------------------------------------------------------------------


def plant():
    """A kernel that writes one float past its array of 64."""
    import cupy

    cupy.cuda.set_allocator(None)
    fault = cupy.RawKernel('extern "C" __global__ void fault(float* x, int at) { x[at] = 1.0f; }', "fault")
    room = cupy.empty(64, np.float32)
    fault((1,), (1,), (room, np.int32(64)))
    cupy.cuda.get_current_stream().synchronize()


def dims_of(variant, exact):
    """head_dim and value_dim that are padded to the variant's; a little less than them where not ``exact``."""
    less = 0 if exact else 1
    return tuple(dim - less * min(dim // 8 or 1, most) for dim, most in ((variant.head_dim, 8), (variant.value_dim, 7)))


def appended(q, k, v):
    """Arrays that make a call of decode an append with rotation; for the second of two sequences there is no room."""
    queries, capacity = q.shape[2], k.shape[2]
    angles = np.arange(capacity)[:, None] / np.arange(1, q.shape[3] // 4 + 1)
    return {
        "lengths": np.array([capacity - queries, capacity - queries + 1], np.int32),
        "k_new": k[:, :, :queries].copy(),
        "v_new": v[:, :, :queries].copy(),
        "rotary": tuple(f(angles).astype(np.float32) for f in (np.cos, np.sin)),
        "overflow": np.zeros(2, np.int32),
    }


def run_once(function, arrays, keywords):
    """Run a function on q, k and v: the names of the variants that were launched for it."""
    host, arrays = arrays, [gpu.to_device(x) for x in arrays]
    latent = _problem.in_keys(*host[1:])
    if latent:
        arrays[2] = arrays[1][..., : host[2].shape[-1]]
    if function == "decode":
        names = []
        layouts = keywords
        keywords = {name: gpu.to_device(x) if isinstance(x, np.ndarray) else x for name, x in keywords.items()}
        steps = ({"lengths": np.array([host[1].shape[2], 7], np.int32)}, appended(*host))
        for more in steps[: 1 if "kv_format" in keywords or latent else 2]:  # nothing is appended to such caches
            rotary = {name: tuple(map(gpu.to_device, x)) for name, x in more.items() if name == "rotary"}
            given = {name: gpu.to_device(x) for name, x in more.items() if name != "rotary"}
            cuflash.decode(*arrays, **given, **rotary, **keywords)
            names += [step.variant.name for step in gpu.steps_of("decode", *host, **more, **layouts)]
        return names
    tables = {name: gpu.to_device(x) for name, x in keywords.items() if isinstance(x, np.ndarray)}
    out, lse = cuflash.forward(*arrays, return_lse=True, **(keywords | tables))
    steps = gpu.steps_of("forward", *host, **keywords)
    if function == "backward":
        cuflash.backward(out, *arrays, out, lse, **keywords)
        row = np.zeros(lse.shape, ELEMENTS[host[0].dtype.name].lse)
        out = np.zeros(out.shape, host[0].dtype)
        steps = gpu.steps_of("backward", out, *host, out, row, **keywords)
    return [step.variant.name for step in steps]


def problems_of(variant):
    """Two small problems that run a variant, the second with rows that see no key: (shapes of q, k, v, keywords)."""
    fewest = gpu.fewest_keys(variant)  # where these are many, every row sees one
    long, short = 3 * variant.tile_k + 9, variant.tile_k // 2 + 1
    if variant.function == "decode":  # splits by lengths and two, rows of several tiles that see unlike keys, and few
        few, many = (2, 5) if variant.tile_q <= 16 else (9, 30)
        if variant.kernel == "decode_latent" and variant.tile_q > 16:
            few, many = (9, 16) if variant.tile_q == 32 else (30, 40)
        for exact, queries, keys, splits in ((True, few, 40 * variant.tile_k, None), (False, many, long, 2)):
            head_dim, value_dim = dims_of(variant, exact)
            keywords = {"splits": splits}
            if variant.run == 1:  # a page a sequence, of no whole runs
                keys += 1 - keys % 2
                keywords["page_table"] = np.array([[1], [0]], np.int32)
            if variant.element in FORMATS:
                slots = np.full((2, 2, keys), 2.0**-6, np.float32)
                scales = {"k_scale": slots, "v_scale": slots if exact else slots[0, :, 0]}
                keywords |= {"kv_format": variant.element, **scales}
            yield (2, 4, queries, head_dim), (2, 2, keys, head_dim), (2, 2, keys, value_dim), keywords
        return
    if variant.paged:  # pages of no whole tiles, one of them a sequence's last; and a cache in one piece
        size = variant.tile_k // 2 - 3
        table = {"page_table": np.arange(14, dtype=np.int32).reshape(2, 7)[:, ::-1].copy()}
        for exact, queries, shape, more in ((True, variant.tile_q + 5, (14, size), table), (False, 70, (2, long), {})):
            head_dim, value_dim = dims_of(variant, exact)
            pages, keys = shape
            lengths = np.array([5 * size + 2, keys // 2], np.int32)
            keywords = {"lengths": lengths, "causal": True, "window": (keys, None), **more}
            yield (2, 4, queries, head_dim), (pages, 2, keys, head_dim), (pages, 2, keys, value_dim), keywords
        return
    for exact, heads, queries, keys in ((True, 2, variant.tile_q + 5, fewest + long), (False, 4, long, fewest + short)):
        head_dim, value_dim = dims_of(variant, exact)
        keywords = {"full": {}, "causal": {"causal": True}, "window": {"window": (keys // 3, 5)}}[variant.mask]
        if variant.backward and exact:  # whose kernels serve every mask
            keywords = {}
        if variant.parts == 2:
            keywords["precision"] = "tf32"
        yield (1, heads, queries, head_dim), (1, 2, keys, head_dim), (1, 2, keys, value_dim), keywords


def operands(variant, shapes, rng):
    """q, k and v on the host, with a value that most rows do not see, for the careful path."""
    if variant.element not in FORMATS:
        arrays = [rng.standard_normal(shape).astype(ELEMENTS[variant.element].dtype) for shape in shapes]
        if variant.kernel == "decode_latent":
            arrays[2] = arrays[1][..., : shapes[2][-1]]
        arrays[2][..., -1, :] = np.inf
        return arrays
    held = FORMATS[variant.element].dtype
    q = rng.standard_normal(shapes[0]).astype(np.float16)
    k, v = (rng.integers(0, 100, shape).astype(held) for shape in shapes[1:])
    if variant.element == "e4m3":
        v[..., -1, :] = 0x7F  # NaN
    return [q, k, v]


def sweep(kernel, seconds):
    """Run every variant of a kernel in random order until the time is over; print what ran."""
    import cupy

    cupy.cuda.set_allocator(None)
    begin, launches, names = time.monotonic(), 0, set()
    chosen = [variant for variant in _plan.variants(gpu.limits()) if variant.kernel == kernel]
    own = {variant.name for variant in chosen}  # what runs before and behind them is not counted
    random.Random(0).shuffle(chosen)
    rng = np.random.default_rng(0)
    for variant in chosen:
        if time.monotonic() - begin > seconds:
            break
        for *shapes, keywords in problems_of(variant):
            host = operands(variant, shapes, rng)
            keywords["engine"] = variant.engine
            ran = run_once(variant.function, host, keywords)
            cupy.cuda.get_current_stream().synchronize()
            launches += len(ran)
            names |= own.intersection(ran)
    print(DONE + json.dumps({"launches": launches, "variants": len(names), "of": len(chosen)}), flush=True)


# Outside --------------------------------------------------------------------------------------------------------


def errors_in(log):
    """Errors a tool counted, summed over the processes it watched; None where no summary is there."""
    found = re.findall(r"ERROR SUMMARY: (\d+) error", log) + re.findall(r"RACECHECK SUMMARY:.*\((\d+) error", log)
    return sum(map(int, found)) if found else None


def warnings_in(log):
    """Warnings racecheck counted."""
    return sum(map(int, re.findall(r"RACECHECK SUMMARY:.*, (\d+) warning", log)))


def watched(tool, inside, seconds):
    """Run this file under a tool: its whole output."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [program, "--tool", tool, "--target-processes", "all"]
    command += ["--report-api-errors", "no"] if tool == "memcheck" else []  # CuPy asks for symbols that may be missing
    command += [sys.executable, __file__, inside, "--seconds", str(seconds)]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
            timeout=seconds + 90,
        )  # fmt: skip
        log = done.stdout + f"\nexit {done.returncode}\n"
    except subprocess.TimeoutExpired as error:
        said = error.stdout or ""  # bytes, in spite of text=True
        log = (said if isinstance(said, str) else said.decode(errors="replace")) + "\nexit by time limit\n"
    except OSError as error:
        log = f"{error}\n"
    return log


def row_of(tool, kernel, log):
    """Row of the record for one run, and whether all is well. A run that broke off counts as an error."""
    errors = errors_in(log)
    said = re.search(re.escape(DONE) + r"(\{.*\})", log)
    facts = json.loads(said[1]) if said else {"launches": 0, "variants": 0, "of": None}
    broke = errors is None or not said or facts["launches"] == 0
    row = {"tool": tool, "kernel": kernel, "launches": facts["launches"], "errors": max(errors or 0, int(broke))}
    return row | {"warnings": warnings_in(log), "variants": facts["variants"], "of": facts["of"]}, not row["errors"]


def drive(path, tools, seconds, only=()):
    """A planted fault, then every kernel, or some, by every tool, side by side. 0 where all is well."""
    kernels = dict.fromkeys(variant.kernel for variant in _plan.variants(gpu.limits()))
    kernels = [kernel for kernel in kernels if kernel not in AROUND]
    if not set(only) <= set(kernels):
        print(f"sanitizers: kernels are {', '.join(only)}; wanted some of {', '.join(kernels)}")
        return 1
    planted = watched("memcheck", "plant", 60)
    if not errors_in(planted):
        print(f"sanitizers: memcheck did not find the planted fault:\n{planted[-3000:]}")
        return 1
    print(f"sanitizers: memcheck found the planted fault ({errors_in(planted)} errors)", flush=True)
    jobs = [(tool, kernel) for tool in tools for kernel in only or kernels]

    def run(job):
        log = watched(*job, seconds)
        row, well = row_of(*job, log)
        return record.stamped(row), well, log

    with ThreadPoolExecutor(len(jobs)) as pool:
        done = list(pool.map(run, jobs))
    for row, well, log in done:
        facts = "{tool} {kernel}: {launches} launches, {variants}/{of} variants, {errors} errors".format(**row)
        print(f"sanitizers: {facts}, {row['warnings']} warnings")
        if not well:
            print(log[-3000:])
    if path:
        record.add(path, "sanitizer", [row for row, _, _ in done])
    return int(not all(well for _, well, _ in done))


def main(argv=None):
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("inside", nargs="?", help="plant, or the name of a kernel")
    parser.add_argument("--json", metavar="FILE", help="record to merge the rows into")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--kernels", help="by commas; default: all")
    parser.add_argument("--seconds", type=float, default=240, help="a run")
    options = parser.parse_args(argv)
    if options.inside is None:
        only = options.kernels.split(",") if options.kernels else ()
        return drive(options.json, options.tools.split(","), options.seconds, only)
    plant() if options.inside == "plant" else sweep(options.inside, options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
