"""The job ``python -m cuflash roofline``: the figures of ``cuflash.roofline`` as a table, a picture, and measured."""

import argparse
import importlib.util
import math
import statistics
import sys
from collections import Counter
from dataclasses import replace

import numpy as np

import cuflash

from . import __main__ as job
from ._dtypes import ELEMENTS
from .roofline import DEVICES, FUNCTIONS, Device, Problem, flash, naive, named

COLOURS = {"forward": "#0072B2", "backward": "#D55E00", "decode": "#009E73"}  # Okabe and Ito's
MARKERS = {"naive": dict(zip(FUNCTIONS, "sD^", strict=True)), "flash": dict(zip(FUNCTIONS, "oPv", strict=True))}


# Measuring ------------------------------------------------------------------------------------------------------


def measure(problem, xp, float32_softmax=False):
    """Milliseconds of cuflash and of a plain expression, by kind, or a text on what stood in the way.

    Medians by CUDA events and with a cold L2 cache; by the clock where xp is NumPy. The plain expression makes more
    launches than are counted, and goes through float32 in bfloat16, of which CuPy has no sums.
    """

    drawn = inputs(problem)

    def median(make, *options):
        try:
            call = make(problem, xp, *(job.to_device(x, xp) for x in drawn), *options)
            call()
            return statistics.median(job.milliseconds(call, xp) for _ in range(job.REPEATS))
        except Exception as reason:  # no kernel, no product of this dtype, no memory: each library has its own
            return f"{type(reason).__name__}: {next(iter(str(reason).splitlines()), '')}"

    return {"naive": median(plain, float32_softmax), "flash": median(ours)}


def inputs(problem):
    """Random normal q, k, v and dout on the host."""
    rng = np.random.default_rng(0)
    rows, keys = (problem.batch, problem.heads, problem.queries), (problem.batch, problem.key_heads, problem.keys)
    qk, pv = problem.head_dim, problem.value_dim
    shapes = (*rows, qk), (*keys, qk), (*keys, pv), (*rows, pv)
    dtype = ELEMENTS[problem.dtype].dtype
    return [rng.standard_normal(shape, dtype=np.float32).astype(dtype) for shape in shapes]


def ours(problem, xp, q, k, v, dout):
    """A call of cuflash's function."""
    keywords = {"causal": problem.causal, "window": problem.window}
    if problem.function != "backward":
        return lambda: getattr(cuflash, problem.function)(q, k, v, return_lse=True, **keywords)
    out, lse = cuflash.forward(q, k, v, return_lse=True, **keywords)
    return lambda: cuflash.backward(dout, q, k, v, out, lse, **keywords)


def plain(problem, xp, q, k, v, dout, float32_softmax):
    """A call of naive attention, as one writes it; in backward the weights are there before."""
    lead = (problem.batch, problem.key_heads, problem.group * problem.queries)  # heads that share keys, row after row
    q, k, v, dout = (job._wide(x, xp) for x in (q.reshape(*lead, -1), k, v, dout.reshape(*lead, -1)))
    wide = np.promote_types(q.dtype, np.float32) if float32_softmax else q.dtype
    seen, scale = None, 1 / math.sqrt(problem.head_dim)
    if problem.mask.name != "full":
        rows = np.tile(np.arange(problem.queries), problem.group)[:, None]
        first, end = (xp.asarray(f(rows, problem.keys)) for f in (problem.mask.first_key, problem.mask.end_key))
        seen = (first <= xp.arange(problem.keys)) & (xp.arange(problem.keys) < end)

    def weights():
        scores = (q @ k.swapaxes(-2, -1) * scale).astype(wide, copy=False)
        scores = scores if seen is None else xp.where(seen, scores, scores.dtype.type(-np.inf))
        return job._softmax(scores, xp)

    if problem.function != "backward":
        return lambda: weights().astype(q.dtype, copy=False) @ v
    p = weights()
    narrow = p.astype(q.dtype, copy=False)

    def backward():
        dp = (dout @ v.swapaxes(-2, -1)).astype(wide, copy=False)
        ds = (p * (dp - (p * dp).sum(-1, keepdims=True)) * scale).astype(q.dtype, copy=False)
        return ds @ k, ds.swapaxes(-2, -1) @ q, narrow.swapaxes(-2, -1) @ dout

    return backward


# Table and picture ----------------------------------------------------------------------------------------------

COLUMNS = {  # heading: text of a row's cell
    "function": lambda row: row["problem"].function,
    "kind": lambda row: row["cost"].kind,
    "GFLOP": lambda row: digits(row["cost"].flops / 1e9),
    "memory GB": lambda row: digits(row["cost"].nbytes / 1e9),
    "streamed GB": lambda row: digits(row["cost"].streamed / 1e9),
    "FLOP/byte": lambda row: digits(row["cost"].intensity),
    "roof": lambda row: row["cost"].roof(row["device"]),
    "ms": lambda row: digits(row["seconds"] * 1e3),
    "TFLOP/s": lambda row: digits(row["cost"].flops / row["seconds"] / 1e12),
    "peak GB": lambda row: digits(row["cost"].memory / 1e9),
}
MEASURED = {  # beside them
    "measured ms": lambda row: digits(row["measured"] * 1e3),
    "measured TFLOP/s": lambda row: digits(row["cost"].flops / row["measured"] / 1e12),
    "measured GB/s": lambda row: digits(row["cost"].nbytes / row["measured"] / 1e9),
    "predicted/measured": lambda row: digits(row["seconds"] / row["measured"]),
}


def digits(x):
    """A positive number with three digits, and all those before the point; a dash for NaN."""
    if math.isnan(x):
        return "-"
    return f"{x:,.{max(2 - math.floor(math.log10(x)), 0)}f}" if x else "0"


def says(device, dtype):
    """The device's ceilings in a line."""
    peak, memory = device.peak(dtype), "" if math.isinf(device.memory) else f", {digits(device.memory / 1e9)} GB"
    rates = f"{digits(peak / 1e12)} TFLOP/s in {dtype}, {digits(device.bandwidth / 1e12)} TB/s{memory}"
    return f"{device.name}: {rates}; they meet at {digits(peak / device.bandwidth)} FLOP/byte ({device.source})"


def score_lines(rows, device):
    """How many matrices of scores naive attention moves, and what does not fit, in words."""
    for row in rows:
        problem, cost = row["problem"], row["cost"]
        name = f"{problem.function} {cost.kind}"
        if cost.kind == "naive":
            size = problem.scores * ELEMENTS[problem.dtype].itemsize
            sizes = f"{megabytes(size / problem.batch / problem.heads)} a head, {megabytes(size)} in all"
            yield f"{name}: a matrix of scores in {problem.dtype} is {sizes}"
            yield f"  it writes {_counted(cost, 'written')}, reads {_counted(cost, 'read')}"
        if cost.memory > device.memory:
            yield f"{name}: {digits(cost.memory / 1e9)} GB do not fit into {digits(device.memory / 1e9)} GB"


def _counted(cost, side):
    found = Counter(dtype for launch in cost.launches for dtype in getattr(launch, side))
    return " and ".join(f"{number} in {dtype}" for dtype, number in found.items())


def megabytes(size):
    """Bytes in units that suit them."""
    return f"{digits(size / 1e6)} MB" if size < 1e9 else f"{digits(size / 1e9)} GB"


def draw(rows, device, dtype, path):
    """The roofline of a device, log-log, and the rows as points: predicted filled, measured hollow."""
    from matplotlib.figure import Figure

    peak, bandwidth = device.peak(dtype), device.bandwidth
    intensities = [row["cost"].intensity for row in rows] + [peak / bandwidth]
    low, high = min(intensities) / 3, max(intensities) * 3
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    roof = [low, peak / bandwidth, high]
    axes.loglog(roof, [min(x * bandwidth, peak) / 1e12 for x in roof], color="black", label=device.name)
    for row in rows:
        cost, function = row["cost"], row["problem"].function
        marker = MARKERS[cost.kind][function]
        style = {"color": COLOURS[function], "marker": marker, "linestyle": "none", "markersize": 8}
        name = f"{cost.kind} {'prefill' if function == 'forward' else function}"
        axes.plot(cost.intensity, cost.flops / row["seconds"] / 1e12, label=name, **style)
        if not math.isnan(row["measured"]):
            rate = cost.flops / row["measured"] / 1e12
            axes.plot(cost.intensity, rate, label=f"{name}, measured", fillstyle="none", **style)
    axes.set(xlabel="FLOP per byte of memory traffic", ylabel=f"TFLOP/s in {dtype}", xlim=(low, high))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


# The command line -----------------------------------------------------------------------------------------------


def parse(arguments):
    """Options of the command line."""
    about = "what attention costs, naive and flash, and how fast a device can be at it"
    parser = argparse.ArgumentParser(prog="python -m cuflash roofline", description=about)
    parser.add_argument("functions", nargs="*", default=FUNCTIONS, metavar="function", help="forward, backward, decode")
    for name, default in (("batch", 1), ("heads", 32), ("keys", 8192), ("head-dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--key-heads", type=int, help="default: as many as heads")
    parser.add_argument("--queries", type=int, help="default: 1 in decode, else as many as keys")
    parser.add_argument("--value-dim", type=int, help="default: as head-dim")
    parser.add_argument("--dtype", default="float16", help="default: float16")
    parser.add_argument("--causal", action="store_true", help="a causal mask, bottom-right")
    parser.add_argument("--window", type=int, nargs=2, metavar=("LEFT", "RIGHT"), help="keys a row sees beside its own")
    parser.add_argument("--float32-softmax", action="store_true", help="naive attention in 16 bits takes it in float32")
    parser.add_argument("--device", choices=tuple(DEVICES), help="default: where measured, this GPU, else h100")
    parser.add_argument("--tflops", type=_positive, help="a ceiling, measured maybe, in place of the device's")
    parser.add_argument("--bandwidth", type=_positive, metavar="TB/S", help="the same of memory")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the roofline there; needs matplotlib")
    parser.add_argument("--measure", action="store_true", help="also time cuflash and plain CuPy on this GPU")
    return parser.parse_args(arguments)


def _positive(text):
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"is {text}; wanted a positive number")
    return value


def device_of(options, gpu_name):
    """The device that options name, or the GPU here, with the ceilings that they give."""
    name = options.device or ("h100" if gpu_name is None else None)
    known = DEVICES[name] if name else named(gpu_name)
    device = known or Device(gpu_name, {}, 0)
    given = {}
    if options.tflops:
        given["flops"] = {options.dtype: options.tflops * 1e12}
    if options.bandwidth:
        given["bandwidth"] = options.bandwidth * 1e12
    if not known and len(given) < 2:
        wanted = f"--tflops and --bandwidth, or --device with one of {', '.join(DEVICES)}"
        raise ValueError(f"roofline: the ceilings of {gpu_name} are not known; wanted {wanted}")
    if given:
        told = f"{' and '.join(given)} as given"
        device = replace(device, **given, source=told if len(given) == 2 else f"{device.source}; {told}")
    return device


def main(arguments):
    """Run the command line: 0, or 2 where what is asked for cannot be done, which a sentence then says."""
    options = parse(arguments)
    try:
        return show(options)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


def show(options):
    """Print what the options ask for."""
    if options.plot and not importlib.util.find_spec("matplotlib"):
        raise ValueError("roofline: --plot needs matplotlib, which is not installed; wanted pip install matplotlib")
    cupy, reason = job.gpu() if options.measure else (None, "")
    if options.measure and cupy is None:
        raise ValueError(f"roofline: --measure needs a GPU: {reason}")
    sizes = {name: getattr(options, name) for name in Problem.__dataclass_fields__ if name != "function"}
    problems = [Problem(function, **sizes) for function in options.functions]
    device = device_of(options, job.device(cupy) if cupy else None)
    rows, missing = [], []
    print(says(device, options.dtype), "", sep="\n")
    for problem in problems:
        taken = measure(problem, cupy, options.float32_softmax) if cupy else {}
        for cost in (naive(problem, options.float32_softmax), flash(problem)):
            ms = taken.get(cost.kind, math.nan)
            if isinstance(ms, str):
                missing.append(f"{problem.function} {cost.kind} was not measured: {ms}")
                ms = math.nan
            row = {"problem": problem, "cost": cost, "device": device, "measured": ms / 1e3}
            rows.append(row | {"seconds": cost.seconds(device)})
    columns = COLUMNS | (MEASURED if cupy else {})
    print(*job.table(rows, columns, {"function", "kind", "roof"}), "", *score_lines(rows, device), *missing, sep="\n")
    if cupy:
        plainly = f"naive as plain CuPy{' through float32' if options.dtype == 'bfloat16' else ''}"
        print(f"measured on {job.device(cupy)}, {plainly}; rates are counted FLOPs and bytes over its time")
    if options.plot:
        draw(rows, device, options.dtype, options.plot)
        print(f"drawn in {options.plot}")
    return 0
