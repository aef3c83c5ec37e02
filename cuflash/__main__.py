"""The main job, ``python -m cuflash``: attention on this machine, checked and timed, in one table.

It runs forward, backward and decode on the best engine here and on naive attention (two matrix products and a softmax
in between, NumPy's or CuPy's), holds each result against the float64 formulas of ``cuflash.reference`` inside the
error bound of ``cuflash.bounds``, and exits with 1 if one lies outside. A function that has no kernel for this GPU yet
runs on the CPU, smaller, and its row says so. ``python -m cuflash roofline`` is another job, see ``_roofline_main.py``.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import platform
import statistics
import sys
import time
import tracemalloc
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

import cuflash

from . import _variant, bounds
from ._dtypes import ELEMENTS

FUNCTIONS = ("forward", "backward", "decode")
CHECKED_PAIRS = 2**21  # (row, key) pairs of all heads up to which every row is checked, else CHECKED_ROWS a head
CHECKED_ROWS = 64
LARGEST_NAIVE = 4 << 30  # bytes of scores up to which naive attention runs along
SWEPT_BYTES = 256 << 20  # written before each launch on a GPU, so that it finds a cold L2 cache
REPEATS = 7
LONGEST_STAND_IN = 2048  # of what runs on the CPU in a GPU's place


# What is here ---------------------------------------------------------------------------------------------------


def gpu():
    """CuPy and "" where it has a device, else None and the reason."""
    try:
        import cupy
    except ImportError as error:
        return None, "CuPy is not installed" if error.name == "cupy" else f"CuPy does not import: {error}"
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return None, f"CuPy finds no GPU ({error})"
    return cupy, ""


def processor():
    """Name of the CPU, as far as the system tells."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def device(cupy):
    """Name of the GPU; of the CPU where there is none."""
    if cupy is None:
        return processor()
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"]
    return name.decode() if isinstance(name, bytes) else name


def versions(cupy):
    """Versions of what takes part."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    found = {
        "cuflash": cuflash.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": f"{blas.get('name')} {blas.get('version')}",
    }
    installed = sys.modules.get("cupy")
    if installed is not None:
        found["cupy"] = installed.__version__
        with contextlib.suppress(Exception):  # without NVRTC each release of CuPy raises something else
            found["nvrtc"] = ".".join(map(str, installed.cuda.nvrtc.getVersion()))
    if cupy is not None:
        driver = cupy.cuda.runtime.driverGetVersion()
        found["driver"] = f"CUDA {driver // 1000}.{driver % 1000 // 10}"
    return found


def describe(cupy, reason):
    """Lines on what was found on this machine."""
    cache = os.environ.get("CUPY_CACHE_DIR") or Path("~/.cupy/kernel_cache").expanduser()
    found = [(name, text) for name, text in versions(cupy).items()]
    found.append(("kernels", f"text in {_variant.folder()}, compiled ones in {cache}"))
    if cupy is None:
        found.append(("device", f"{device(cupy)}, {os.cpu_count()} cores; {reason}"))
    else:
        found.append(("device", f"{device(cupy)}, {cupy.cuda.runtime.memGetInfo()[1] >> 30} GiB"))
    return [f"{name:<8} {text}" for name, text in found]


def sources():
    """Sha256 over the package's files under their names in the repository, as in the record of ``bench/``."""
    here = Path(__file__).resolve().parent
    files = {f"cuflash/{path.relative_to(here).as_posix()}": path for path in here.rglob("*.py")}
    files |= {f"kernels/{path.name}": path for path in _variant.folder().iterdir() if path.suffix in (".cu", ".cuh")}
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + files[name].read_bytes())
    return digest.hexdigest()


# One case -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One row of the table: a function, its sizes and the library of its arrays."""

    function: str
    xp: object  # numpy or cupy
    dtype: str
    heads: int
    length: int  # of the keys; of the queries too, but in decode
    head_dim: int
    causal: bool

    def __str__(self):
        sizes = f"{self.heads} heads, length {self.length}, D {self.head_dim}"
        if self.function == "decode":
            return f"decode {self.dtype}, {len(self.lengths)} x {sizes}"
        return f"{self.function} {self.dtype}, {sizes}{', causal' if self.causal else ''}"

    @property
    def lengths(self):
        """Keys of each of decode's sequences: unequal."""
        return [max(self.length * n // 4 - n % 2, 1) for n in (4, 3, 2, 1)]

    @property
    def queries(self):
        """Query rows of a head."""
        return 1 if self.function == "decode" else self.length

    @property
    def pairs(self):
        """Visible (row, key) pairs of all heads; half the square for causal, which is how attention is counted."""
        if self.function == "decode":
            return self.heads * sum(self.lengths)
        return self.heads * self.length**2 / (2 if self.causal else 1)

    @property
    def flops(self):
        """Of the two products of forward and decode, the five of backward."""
        return 2 * self.head_dim * self.pairs * (5 if self.function == "backward" else 2)

    @property
    def score_bytes(self):
        """What the scores of all heads take, which naive attention keeps."""
        return self.heads * self.queries * self.length * ELEMENTS[self.dtype].itemsize

    def inputs(self):
        """Random normal q, k, v and dout on the host, the same on every machine."""
        rng = np.random.default_rng(0)
        lead = (len(self.lengths),) if self.function == "decode" else ()
        shapes = [(*lead, self.heads, rows, self.head_dim) for rows in (self.queries, self.length, self.length)]
        shapes.append(shapes[0])
        return [rng.standard_normal(shape, dtype=np.float32).astype(ELEMENTS[self.dtype].dtype) for shape in shapes]


def prepare(case, host):
    """Arguments and keywords of cuflash's function."""
    q, k, v, dout = (to_device(x, case.xp) for x in host)
    if case.function == "forward":
        return (q, k, v), {"causal": case.causal, "return_lse": True}
    if case.function == "backward":
        out, lse = cuflash.forward(q, k, v, causal=case.causal, return_lse=True)
        return (dout, q, k, v, out, lse), {"causal": case.causal}
    return (q, k, v), {"lengths": case.xp.asarray(case.lengths), "return_lse": True}


def to_device(array, xp):
    """A NumPy array as one of xp's; bfloat16 travels as integers, for which any CuPy has all it takes."""
    if xp is np:
        return array
    return xp.asarray(array.view(f"u{array.itemsize}")).view(array.dtype)


def to_host(array):
    """An array of either library as NumPy's."""
    return array if isinstance(array, np.ndarray) else array.view(f"u{array.itemsize}").get().view(array.dtype)


# Naive attention ------------------------------------------------------------------------------------------------


def naive_forward(case, q, k, v):
    """Attention with all scores in memory, in the arrays' own library and dtype."""
    bias = _bias(case)

    def forward():
        wide = [_wide(x, case.xp) for x in (q, k, v)]
        return _narrow(_softmax(_scores(*wide[:2], bias), case.xp) @ wide[2], q.dtype)

    return forward


def naive_backward(case, dout, q, k, v, out, lse):
    """Its gradients, from the weights, all in memory too."""
    xp, bias = case.xp, _bias(case)

    def backward():
        wide = [_wide(x, xp) for x in (dout, q, k, v)]
        weights = _scores(*wide[1:3], bias)
        weights -= _wide(lse, xp)[..., None]
        xp.exp(weights, out=weights)
        dscores = wide[0] @ wide[3].swapaxes(-2, -1)
        dscores -= (wide[0] * _wide(out, xp)).sum(-1, keepdims=True)
        dscores *= weights
        dscores *= _scale(q)
        grads = dscores @ wide[2], dscores.swapaxes(-2, -1) @ wide[1], weights.swapaxes(-2, -1) @ wide[0]
        return tuple(_narrow(x, q.dtype) for x in grads)

    return backward


def naive_decode(case, q, k, v):
    """Attention of one sequence after the other, each with its own length."""

    def decode():
        out = case.xp.empty_like(q)
        for n, length in enumerate(case.lengths):
            wide = [_wide(x[n, :, :length], case.xp) for x in (q, k, v)]
            out[n] = _softmax(_scores(*wide[:2], None), case.xp) @ wide[2]
        return out

    return decode


NAIVE = {"forward": naive_forward, "backward": naive_backward, "decode": naive_decode}


def _wide(x, xp):
    """NumPy has no fast products of 16-bit arrays, CuPy no softmax of bfloat16: there naive goes through float32."""
    through = x.dtype.itemsize == 2 if xp is np else x.dtype == ELEMENTS["bfloat16"].dtype
    return x.astype(np.float32) if through else x


def _narrow(x, dtype):
    return x.astype(dtype, copy=False)


def _scale(q):
    return 1 / math.sqrt(q.shape[-1])  # a Python float, which leaves the arrays' dtype as it is


def _bias(case):
    if not case.causal:
        return None
    seen = case.xp.tri(case.length, dtype=bool)
    return _wide(case.xp.where(seen, np.float32(0), np.float32(-np.inf)).astype(ELEMENTS[case.dtype].dtype), case.xp)


def _scores(q, k, bias):
    scores = q @ k.swapaxes(-2, -1)
    scores *= _scale(q)
    if bias is not None:
        scores += bias
    return scores


def _softmax(scores, xp):
    scores -= scores.max(-1, keepdims=True)
    xp.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    return scores


# Measuring ------------------------------------------------------------------------------------------------------


def milliseconds(call, xp):
    """Time of one call: by the clock for NumPy, by events and with a cold L2 cache for CuPy."""
    if xp is np:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    cuda = xp.cuda
    stream, begin, end = cuda.get_current_stream(), cuda.Event(), cuda.Event()
    swept = cuda.alloc(SWEPT_BYTES)
    for _ in range(4):  # more than once: a head start for the host, so that the launch does not wait for Python
        swept.memset_async(1, SWEPT_BYTES, stream)
    begin.record(stream)
    call()
    end.record(stream)
    end.synchronize()
    return cuda.get_elapsed_time(begin, end)


def extra_bytes(call, xp):
    """Peak bytes that a call holds beyond its inputs and results, and the results."""
    if xp is np:
        tracemalloc.start()
        try:
            results = call()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    else:
        with _pool_hook(xp) as hook:
            results = call()
        peak = hook.peak
    return max(peak - sum(x.nbytes for x in (results if isinstance(results, tuple) else (results,))), 0), results


def _pool_hook(cupy):
    class Peak(cupy.cuda.MemoryHook):
        name = "cuflash peak"
        held = peak = 0

        def malloc_postprocess(self, **facts):
            self.held += facts["mem_size"]
            self.peak = max(self.peak, self.held)

        def free_postprocess(self, **facts):
            self.held -= facts["mem_size"]

    return Peak()


def checked_rows(case):
    """The rows of each head that are checked: all, or some over the whole length; backward's in one piece."""
    if case.pairs <= CHECKED_PAIRS or case.queries <= CHECKED_ROWS:
        return np.arange(case.queries)
    if case.function == "backward":
        return np.arange(case.queries - CHECKED_ROWS, case.queries)  # the last: they see every key, causal or not
    return np.linspace(0, case.queries - 1, CHECKED_ROWS).astype(int)


def error_over_bound(case, path, host, results, again):
    """Worst error over bound of what the function returned; for backward, ``again(dout)`` runs it on another dout."""
    q, k, v, dout = host
    rows = checked_rows(case)
    if case.function == "decode":
        return bounds.worst(results, bounds.decode(q, k, v, path=path, lengths=np.array(case.lengths)))
    if case.function == "forward":
        exact = bounds.forward(q, k, v, path=path, causal=case.causal, rows=rows)
        return bounds.worst([x[:, rows] for x in results], exact)
    # dq of some rows is theirs alone. To dk and dv all rows add: there the others are silenced, in a run of its own.
    exact = bounds.backward(dout[:, rows], q[:, rows], k, v, path=path, causal=case.causal)
    silenced = np.zeros_like(dout)
    silenced[:, rows] = dout[:, rows]
    dq, dk, dv = again(silenced)
    return max(bounds.worst([results[0][:, rows]], exact[:1]), bounds.worst([dq[:, rows], dk, dv], exact))


def measure(case, engine=None):
    """Run, check and time one case.

    Returns
    -------
    dict
        A row of the record, with further fields: what the table prints.

    Raises
    ------
    NotImplementedError
        Where the function has no kernel for the case's library.
    """
    host = case.inputs()
    arguments, keywords = prepare(case, host)
    keywords["engine"] = engine
    plan = cuflash.explain(case.function, *arguments, **keywords)

    function = getattr(cuflash, case.function)

    def ours():
        return function(*arguments, **keywords)

    def again(dout):
        return [to_host(x) for x in function(to_device(dout, case.xp), *arguments[1:], **keywords)]

    begin = time.perf_counter()
    ours()
    if case.xp is not np:
        case.xp.cuda.get_current_stream().synchronize()
    first_ms = (time.perf_counter() - begin) * 1e3
    extra, results = extra_bytes(ours, case.xp)
    error = error_over_bound(case, f"{plan.engine} {case.dtype}", host, [to_host(x) for x in results], again)
    del results
    calls, naive_extra, missing = {"ours": ours}, None, None
    if case.score_bytes > LARGEST_NAIVE:
        missing = f"its scores take {case.score_bytes / 2**30:.0f} GiB"
    else:
        try:
            naive = NAIVE[case.function](case, *arguments)
            naive_extra, _ = extra_bytes(naive, case.xp)
            calls["naive"] = naive
        except Exception as reason:  # CuPy may lack a product of this dtype, or the device the memory
            missing = f"{type(reason).__name__}: {reason}"
    rounds = {name: [] for name in calls}
    for _ in range(REPEATS):
        for name, call in calls.items():
            rounds[name].append(milliseconds(call, case.xp))
    ms = {name: statistics.median(taken) for name, taken in rounds.items()}
    return {
        "what": case.function,
        "engine": plan.engine,
        "variant": plan.variant.name if plan.variant else None,
        "dtype": case.dtype,
        "kv_format": None,
        "precision": None,
        "head_dim": case.head_dim,
        "value_dim": case.head_dim,
        "mask": "causal" if case.causal and case.function != "decode" else "full",
        "window": None,
        "queries": case.queries,
        "length": case.length,
        "batch": len(case.lengths) if case.function == "decode" else 1,
        "heads": case.heads,
        "key_heads": case.heads,
        "page_size": None,
        "splits": None,
        "reproducible": None,
        "graph": None,
        "shortest": None,
        "ms": ms["ours"],
        "spread": (max(rounds["ours"]) - min(rounds["ours"])) / ms["ours"],
        "tflops": case.flops / ms["ours"] / 1e9,
        "gbps": None,
        "extra_bytes": extra,
        "error_over_bound": error,
        "contenders": {"naive": ms.get("naive")},
        "rival": "naive",
        "sources": sources(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "problem": str(case),
        "why": plan.reason,
        "first_ms": first_ms,
        "naive_extra_bytes": naive_extra,
        "naive_missing": missing,
    }


# The table ------------------------------------------------------------------------------------------------------

COLUMNS = {  # heading: text of a row's cell
    "problem": lambda row: row["problem"],
    "engine": lambda row: row["engine"],
    "error/bound": lambda row: f"{row['error_over_bound']:.3f}",
    "ms": lambda row: f"{row['ms']:.2f}",
    "TFLOP/s": lambda row: f"{row['tflops']:.3g}",
    "extra MB": lambda row: f"{row['extra_bytes'] / 1e6:.1f}",
    "naive ms": lambda row: _optional(row["contenders"]["naive"], ".2f"),
    "naive MB": lambda row: _optional(row["naive_extra_bytes"] and row["naive_extra_bytes"] / 1e6, ".1f"),
    "naive/ours": lambda row: _optional(row["contenders"]["naive"] and row["contenders"]["naive"] / row["ms"], ".2f"),
    "why this engine": lambda row: row["why"],
}


def _optional(value, form):
    return "-" if value is None else format(value, form)


LEFT = {"problem", "engine", "why this engine"}  # headings of texts


def table(rows, columns=COLUMNS, left=LEFT):
    """Rows as aligned lines under a line of headings; texts to the left, numbers to the right."""
    cells = [list(columns), *([text(row) for text in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(columns, line, widths, strict=True)
        ).rstrip()
        for line in cells
    ]


def parse(arguments=None):
    """Options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m cuflash", description="attention here, checked and timed")
    parser.epilog = "python -m cuflash roofline --help: what attention costs, and how fast a device can be at it"
    parser.add_argument("--engine", choices=("numpy", "portable"), help="default: the best one here")
    parser.add_argument("--dtype", choices=tuple(ELEMENTS), help="default: float32 on the CPU, bfloat16 on a GPU")
    parser.add_argument("--head-dim", type=_positive, help="default: 64 on the CPU, 128 on a GPU")
    parser.add_argument("--length", type=_positive, help="default: 2048 on the CPU, 8192 on a GPU")
    parser.add_argument("--heads", type=_positive, help="default: 8 on the CPU, 16 on a GPU")
    parser.add_argument("--causal", action="store_true", help="forward and backward under a causal mask")
    parser.add_argument("--json", metavar="FILE", help="write the rows there, in the form of bench/results/")
    return parser.parse_args(arguments)


def _positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"is {value}; wanted 1 or more")
    return value


def case_of(function, xp, options):
    """The case that the options ask for on the CPU or a GPU."""
    dtype, heads, length, head_dim = ("float32", 8, 2048, 64) if xp is np else ("bfloat16", 16, 8192, 128)
    return Case(
        function,
        xp,
        options.dtype or dtype,
        options.heads or heads,
        options.length or length,
        options.head_dim or head_dim,
        options.causal,
    )


def main(arguments=None):
    """Run the command line: 0 where every result lies inside its bound, else 1."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["roofline"]:
        from . import _roofline_main  # which measures with what is here

        return _roofline_main.main(arguments[1:])
    options = parse(arguments)
    cupy, reason = gpu()
    if options.engine == "numpy":
        cupy, reason = None, "the engine asked for is numpy"
    print(*describe(cupy, reason), "", sep="\n", flush=True)
    if options.engine == "portable" and cupy is None:
        print(f"--engine portable: {reason}", file=sys.stderr)
        return 1
    rows = []
    for function in FUNCTIONS:
        try:
            row = measure(case_of(function, cupy or np, options), options.engine)
            if cupy is None and options.engine is None:
                row["why"] = f"no GPU here: {row['why']}"
        except NotImplementedError:
            case = case_of(function, np, options)
            row = measure(replace(case, length=min(case.length, LONGEST_STAND_IN)))
            row["why"] = f"no GPU kernel for {function} in {case.dtype} yet: on the CPU, smaller"
        rows.append(row)
    print(*table(rows), sep="\n")
    for row in rows:
        if row["naive_missing"]:
            print(f"{row['what']}: naive attention did not run: {row['naive_missing']}")
    if options.json:
        record = {"device": device(cupy), "versions": versions(cupy), "cases": rows}
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    outside = [row["what"] for row in rows if not row["error_over_bound"] <= 1]
    print(f"outside the error bound: {', '.join(outside)}" if outside else "every result is inside its error bound")
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
