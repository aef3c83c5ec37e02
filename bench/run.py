"""Time cuflash beside its contenders: one aligned line a case, the answer checked first on the very arrays timed.

    python bench/run.py                                     # forward, bfloat16, the twelve standard cells
    python bench/run.py --head-dim 128 --length 8192 --mask causal --contenders fa2,cudnn --quick
    python bench/run.py --engine numpy --dtype float32 --head-dim 64 --length 4096 --tokens 4096 --width 512 \\
        --mask full --contenders naive
    python bench/run.py backward --engine sm90              # gradients: all launches of a call
    python bench/run.py decode                              # a row a sequence against caches, see decode.py
    python bench/run.py host                                # host time of a cached forward call, and where it goes

    python bench/run.py --contenders all --rival best --plot forward.png     # whatever contender is here, as a picture
    python bench/run.py decode --json FILE --again --seconds 500    # what the record has of decode, of older sources

A cell has ``tokens`` rows in all (batch x length) and heads x head_dim = ``width``; arrays lie as (batch, length,
heads, head_dim), seen with swapped axes. A line says: error over bound, median time of a launch with a cold L2 cache,
how far the rounds lie apart, rate, host time of a call, memory beyond results, and each contender's time and its ratio
to ours, the best one's first: above 1 where ours is faster. ``contenders.py`` lists the contenders; one that cannot run
says why, once. ``--json FILE`` merges the rows into a record (``record.py``), ``--csv`` and ``--plot`` write theirs.
``--again`` takes its cells from that record instead: those of this pass and engine that were measured with other
sources, each as it was, beside the same contenders.
"""

import argparse
import contextlib
import csv
import importlib.util
import math
import statistics
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

import contenders
import decode
import gpu
import pictures
import record
import timing
from progress_bar import Bar, say

import cuflash
from cuflash.__main__ import gpu as find_gpu

CHECKED_ROWS = 64  # a head


def parse(argv=None):
    """Options of the command line, lists split."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", default="forward", choices=("forward", "backward", "decode", "host"))
    parser.add_argument("--engine", default="portable", choices=("portable", "sm90", "numpy"))
    parser.add_argument("--dtype", default="bfloat16", help="one or more, by commas; so are the next three")
    parser.add_argument("--head-dim", default="64,128,256")
    parser.add_argument("--length", default="2048,8192")
    parser.add_argument("--mask", default="full,causal")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--group", type=int, default=1, help="query heads a key head")
    parser.add_argument("--window", type=int, default=1023, help="keys on the left that a row sees, for mask window")
    parser.add_argument("--width", type=int, default=2048, help="heads x head_dim")
    parser.add_argument("--precision", choices=("tf32",), help="of forward in float32")
    parser.add_argument("--contenders", default="fa2,cudnn", help="names by commas, or all; '' for none")
    parser.add_argument("--rival", help="the contender the cases are judged against, or best; default the first")
    parser.add_argument("--cells", default=decode.CELLS, help="of decode: BATCHxLENGTH, by commas")
    parser.add_argument("--heads", type=int, default=32, help="of decode: query heads")
    parser.add_argument("--key-heads", default="8,32", help="of decode, by commas")
    parser.add_argument("--decode-dim", type=int, default=128, help="of decode: head_dim")
    parser.add_argument("--latent", action="store_true", help="of decode: values that are columns of keys, a key head")
    parser.add_argument("--queries", type=int, default=1, help="of decode: rows a sequence")
    parser.add_argument("--page-size", default="0,16", help="of decode, by commas; 0 for caches in one piece")
    parser.add_argument("--kv-format", default="none", help="of decode, by commas: none (of q's dtype), int8, e4m3")
    parser.add_argument("--scales", default="head", choices=("head", "slot"), help="of 8-bit caches")
    parser.add_argument("--splits", type=int, help="of decode; default: the plan's")
    parser.add_argument("--batch-invariant", action="store_true", help="of decode")
    parser.add_argument("--shortest", type=int, help="of decode: lengths are drawn, from so many keys to the cell's")
    parser.add_argument("--append", action="store_true", help="of decode: time calls that append and rotate beside")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--launches", type=int, help="a round; default 20, on the CPU 1")
    parser.add_argument("--quick", action="store_true", help="2 rounds of 5 launches")
    parser.add_argument("--warm", action="store_true", help="leave the L2 cache as it is, for all alike")
    parser.add_argument("--json", metavar="FILE", help="record to merge the rows into")
    parser.add_argument("--again", action="store_true", help="measure the record's cases of other sources instead")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no case begins")
    parser.add_argument("--csv", metavar="FILE", help="table to write")
    parser.add_argument("--plot", metavar="FILE.png", help="picture to draw; needs matplotlib")
    options = parser.parse_args(argv)
    if options.plot and not importlib.util.find_spec("matplotlib"):
        parser.error('--plot needs matplotlib, which is not installed; wanted pip install -e ".[plot]"')
    if options.again and not options.json:
        parser.error("--again needs --json, the record whose cases are meant")
    for name in ("dtype", "mask", "contenders", "kv_format"):
        setattr(options, name, [part for part in getattr(options, name).split(",") if part])
    options.cells = [tuple(map(int, part.split("x"))) for part in options.cells.split(",")]
    for name in ("head_dim", "length", "key_heads", "page_size"):
        setattr(options, name, [int(part) for part in getattr(options, name).split(",")])
    options.key_heads = [1] if options.latent else options.key_heads
    options.rival = options.rival or next(iter(options.contenders), None)
    options.rival = "best" if options.rival == "all" else options.rival
    options.launches = options.launches or (1 if options.engine == "numpy" else 20)
    if options.quick:
        options.rounds, options.launches = 2, min(5, options.launches)
    return options


def cells(options):
    """The cases the options ask for."""
    for dtype in options.dtype:
        for head_dim in options.head_dim:
            for mask in options.mask:
                for length in options.length:
                    heads = options.width // head_dim
                    window = (options.window, 0) if mask == "window" else None
                    yield record.Case(
                        what=options.what, engine=options.engine, dtype=dtype, head_dim=head_dim, value_dim=head_dim,
                        mask=mask, queries=length, length=length, batch=max(1, options.tokens // length),
                        heads=heads, key_heads=heads // options.group, window=window, precision=options.precision,
                        reproducible=True if options.what == "backward" else None,
                    )  # fmt: skip


def asked(options):
    """The cases that the options ask for, each with the options and the contenders that it is measured with."""
    if not options.again:
        rivals = contenders.ready(options.contenders)
        chosen = decode.cells(options) if options.what == "decode" else cells(options)
        return [(case, options, rivals) for case in chosen]
    rows = [row for row in record.read(options.json)["cases"] if is_older(row, options)]
    rivals = contenders.ready(dict.fromkeys(name for row in rows for name in rivals_of(row)))
    able = [row for row in rows if rivals.keys() >= rivals_of(row).keys()]
    if len(able) < len(rows):
        say(f"{len(rows) - len(able)} cases stay as they are: not all their contenders are here")
    return [
        (record.Case.of(row), as_it_was(row, options), {name: rivals[name] for name in rivals_of(row)}) for row in able
    ]


def is_older(row, options):
    """Whether a row of the record is of this pass and engine, and of other sources."""
    warm = options.engine != "numpy" and not row.get("cold", True)
    meant = (row["what"], row["engine"], warm) == (options.what, options.engine, options.warm)
    return meant and row["sources"] != record.sources()


def rivals_of(row):
    """Milliseconds of the contenders that a row was measured beside."""
    return {name: ms for name, ms in row["contenders"].items() if ms and name not in decode.OWN}


def as_it_was(row, options):
    """The options that a row was measured with."""
    theirs = rivals_of(row)
    best = len(theirs) > 1 and row["rival"] == min(theirs, key=theirs.get)
    measured = {
        "rival": "best" if best else row["rival"],
        "rounds": len(row["rounds"]["ours"]),
        "launches": row.get("launches", options.launches),
        "splits": row["splits"],
        "scales": row.get("scales") or options.scales,
        "batch_invariant": row.get("batch_invariant"),
        "append": "append" in row["contenders"],
    }
    return argparse.Namespace(**vars(options) | measured)


class Inputs:
    """q, k, v of a case and, for gradients, dout: random normal numbers on the host and where the engine wants them."""

    def __init__(self, on_gpu):
        self.on_gpu, self.drawn = on_gpu, {}

    def __call__(self, case):
        """Host arrays and engine arrays, each three or four of (batch, heads, length, dim)."""
        heads = [case.heads, case.key_heads, case.key_heads, *[case.heads] * (case.what == "backward")]
        shapes = [(case.batch, case.length, n, case.head_dim) for n in heads]
        key = case.dtype, math.prod(shapes[0]), len(shapes)
        if key not in self.drawn:
            self.drawn = {key: self._draw(*key)}
        return tuple(
            [x[: math.prod(shape)].reshape(shape).swapaxes(1, 2) for x, shape in zip(arrays, shapes, strict=True)]
            for arrays in self.drawn[key]
        )

    def synchronize(self):
        """Wait for what the engine has been given."""
        if self.on_gpu:
            import cupy

            cupy.cuda.get_current_stream().synchronize()

    def trim(self):
        """Give back what the libraries keep of freed memory, which one of them cannot have of another's."""
        if self.on_gpu:
            import cupy

            with contextlib.suppress(Exception):  # what a kernel has broken has been said
                cupy.get_default_memory_pool().free_all_blocks()
                if "torch" in sys.modules:
                    sys.modules["torch"].cuda.empty_cache()

    def _draw(self, dtype, size, count):
        rng = np.random.default_rng(2205)
        host = [rng.standard_normal(size, dtype=np.float32) for _ in range(count)]
        host = [x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype) for x in host]
        return host, [gpu.to_device(x) for x in host] if self.on_gpu else host


def some_heads(case):
    """A few (batch, head) pairs: the first, the last, one between."""
    return sorted({(0, 0), (case.batch - 1, case.heads - 1), (case.batch // 2, case.heads // 3)})


def error_over_bound(case, host, out):
    """Worst error over bound of out on random rows of some heads; NaN where out has one."""
    q, k, v = host
    rows = np.sort(np.random.default_rng(7).choice(case.queries, min(CHECKED_ROWS, case.queries), replace=False))
    found = []
    for b, h in some_heads(case):
        key_head = h * case.key_heads // case.heads
        wanted = gpu.bounded(q[b, h], k[b, key_head], v[b, key_head], engine=case.engine, rows=rows, **case.keywords)
        found.append(gpu.over_bound(contenders.to_host(out[b, h])[rows], wanted.out, wanted.out_bound))
    return float(np.max(found))


def gradient_error_over_bound(case, host, arrays, grads, backward):
    """The same of dq, dk and dv, on the last rows of some heads; these see every key.

    dq of a row is its own. To dk and dv all rows add, so there the others are silenced, in a run of its own by
    ``backward(dout)``.
    """
    q, k, v, dout = host
    rows = slice(max(case.queries - CHECKED_ROWS, 0), None)
    found = []
    for b, h in some_heads(case):
        key_head = h * case.key_heads // case.heads
        part = dout[b, h, rows], q[b, h, rows], k[b, key_head], v[b, key_head]
        (dq, dq_bound), *shared = gpu.bounded_gradients(*part, engine=case.engine, **case.keywords)
        found.append(gpu.over_bound(contenders.to_host(grads[0][b, h])[rows], dq, dq_bound))
        silenced = arrays[3].copy()
        silenced[...] = 0
        silenced[b, h, rows] = arrays[3][b, h, rows]
        for grad, (wanted, bound) in zip(backward(silenced)[1:], shared, strict=True):
            found.append(gpu.over_bound(contenders.to_host(grad[b, key_head]), wanted, bound))
    return float(np.max(found))


def distance(case, ours, theirs):
    """Relative distance of two answers on some heads, the largest of all results."""
    if not isinstance(ours, tuple):
        ours, theirs = (ours,), (theirs,)
    found = []
    for b, h in some_heads(case):
        for our, their in zip(ours, theirs, strict=True):
            head = h * our.shape[1] // case.heads
            our, their = (contenders.to_host(x[b, head]).astype(np.float64) for x in (our, their))
            found.append(np.linalg.norm(their - our) / np.linalg.norm(our))
    return float(np.max(found))


def measure(case, options, inputs, rivals, timer):
    """Check and time a case: its row. Raises ArithmeticError where our answer is outside the bound."""
    host, arrays = inputs(case)
    library = "cupy" if inputs.on_gpu else "numpy"
    keywords = case.keywords | {"engine": case.engine}
    given = arrays[:3]
    if case.what == "backward":
        given = arrays[3], *arrays[:3], *cuflash.forward(*arrays[:3], return_lse=True, **keywords)
    function = getattr(cuflash, case.what)

    def ours():
        return function(*given, **keywords)

    if library == "numpy":
        ours()  # imports and thread pools are not the call's memory; on a GPU a kept workspace would be
    extra, out = timing.extra_bytes(ours, library)
    if case.what == "backward":
        again = lambda dout: function(dout, *given[1:], **keywords)  # noqa: E731
        error = gradient_error_over_bound(case, host, arrays, out, again)
    else:
        error = error_over_bound(case, host, out)
    if not error <= 1:
        raise ArithmeticError(f"error over bound is {error}")
    calls, scopes, extras, children = {"ours": ours}, {}, {}, {}
    for name, contender in rivals.items():
        try:
            children[name] = contender.child(case)
            if children[name] is not None:
                continue
            prepare = contender.prepare_backward if case.what == "backward" else contender.prepare
            call = prepare(case, *given[: len(arrays)])
            with contender.scope():
                extras[name], theirs = timing.extra_bytes(call, library) if name == "naive" else (None, call())
            far = distance(case, out, theirs)
            if not far <= contenders.LOOSE[case.dtype]:
                raise contenders.Unfit(f"its answer is {far:.3g} from ours")
        except Exception as error_theirs:
            contenders.left_out(name, error_theirs)
            continue
        calls[name], scopes[name] = call, contender.scope
        del theirs
    del out
    rounds = timing.interleave(
        timer, calls, rounds=options.rounds, launches=options.launches, warmup=3 if inputs.on_gpu else 0, scopes=scopes
    )
    hosts = {}
    for name, call in calls.items() if inputs.on_gpu else ():
        with scopes.get(name, contextlib.nullcontext)():
            hosts[name] = timing.case_host_us(call, inputs.synchronize)
    walls = {}  # ours, beside contenders in processes of their own
    for name, child in children.items():
        if child is None:
            continue
        try:
            with child as run_there:
                walls[name], rounds[name] = timing.by_wall_clock(
                    ours, run_there, rounds=options.rounds, synchronize=inputs.synchronize
                )
        except Exception as error_theirs:
            contenders.left_out(name, error_theirs)
    figures = timing.figures(rounds, rivals, options.rival, walls)
    return record.case_row(
        case,
        **figures,
        variant=gpu.variant_of(case.what, *given, **keywords),
        tflops=case.flops / figures["ms"] / 1e9,
        extra_bytes=extra,
        error_over_bound=error,
        host_us=hosts or None,
        wall_rounds=walls,
        launches=options.launches,
        contender_bytes={name: held for name, held in extras.items() if held is not None},
        cold=inputs.on_gpu and not options.warm,
    )


def line(row):
    """A row as one aligned line."""
    name = row["variant"] or f"{row['what']} {row['engine']} {row['dtype']} d{row['head_dim']} {row['mask']}"
    text = f"{name:<48} B{row['batch']:<3} H{row['heads']:<3} L{row['length']:<6}"
    text += f" error/bound {row['error_over_bound']:.3f} {row['ms']:9.3f} ms ±{row['spread']:5.1%}"
    text += f" {row['tflops']:8.4g} TFLOP/s{timing.host_text(row)}  extra {row['extra_bytes'] / 1e6:6.1f} MB"
    return text + contenders.beside(row, lambda ms: f"{ms:9.3f} ms")


def summary(rows):
    """Geometric mean and worst cell of the ratio to each contender, one line each."""
    lines = []
    names = [*dict.fromkeys(name for row in rows for name in row["ratios"])]
    for name in (*names, *["best"] * (len(names) > 1)):
        chosen = names if name == "best" else [name]
        ratios = [(min(filter(None, map(row["ratios"].get, chosen)), default=None), row) for row in rows]
        ratios = [(value, row) for value, row in ratios if value]
        if ratios:
            worst, row = min(ratios, key=lambda pair: pair[0])
            mean = statistics.geometric_mean([value for value, _ in ratios])
            where = f"d{row['head_dim']} L{row['length']} {row['mask']} {row['dtype']}"
            lines.append(f"{name} / ours: geometric mean {mean:.3f} of {len(ratios)}, worst {worst:.3f} at {where}")
    return lines


def host_rows(options, rivals, count=10_000):
    """Host time of a cached forward call on a tiny problem, of its parts, and of the contenders' calls; and of decode,
    with lengths and splits, beside forward of the engine that both have.
    """
    import cupy

    case = record.Case("forward", options.engine, "bfloat16", 64, 64, "full", 128, 128, 1, 8, 8)
    _, (q, k, v) = Inputs(True)(case)
    out = cuflash.forward(q, k, v, engine=options.engine)
    empty = cupy.RawKernel('struct Args { char bytes[256]; };\nextern "C" __global__ void empty(Args args) {}', "empty")
    packed = (np.zeros(1, np.dtype([("bytes", np.uint8, 256)]))[0],)

    def time(call):
        return timing.host_us(call, count=count, synchronize=cupy.cuda.get_current_stream().synchronize)

    us = time(lambda: cuflash.forward(q, k, v, engine=options.engine))
    with_out = time(lambda: cuflash.forward(q, k, v, out=out, engine=options.engine))
    launch = time(lambda: empty((1,), (32,), packed))
    one_array = time(lambda: cupy.empty(out.shape, out.dtype))
    parts = {"launch": launch, "cupy_empty": one_array, "rest": us - launch - one_array, "with_out": with_out}
    theirs = {}
    for name, contender in rivals.items():
        try:
            call = contender.prepare(case, q, k, v)
            with contender.scope():
                theirs[name] = time(call)
        except Exception as error:  # as in measure()
            contenders.left_out(name, error)
    yield {"what": "forward", "engine": options.engine, "us": us, "parts": parts, "contenders": theirs}
    if options.engine == "portable":
        row, lengths = q[:, :, -1:].copy(), cupy.full(1, 4096, np.int32)
        k, v = (cupy.zeros((1, 8, 4096, 64), q.dtype) for _ in range(2))
        us = time(lambda: cuflash.decode(row, k, v, lengths=lengths))
        yield {"what": "decode", "engine": options.engine, "us": us, "parts": {}, "contenders": {}}


def main(argv=None):
    """Run the command line; 0 where every answer was inside its bound."""
    options = parse(argv)
    if options.engine != "numpy" and (reason := find_gpu()[1]):
        print(f"bench/run.py: {reason}; --engine numpy needs no GPU")
        return 2
    if options.what == "host":
        for row in map(record.stamped, host_rows(options, contenders.ready(options.contenders))):
            parts = [f"{name} {us:.1f}" for name, us in (row["parts"] | row["contenders"]).items()]
            print(f"host time of {row['what']} on {record.device()}: {row['us']:.1f} us a call", *parts, sep=", ")
            if options.json:
                record.add(options.json, "host", [row])
        return 0
    on_gpu = options.engine != "numpy"
    decoding = options.what == "decode"
    inputs, timer = Inputs(on_gpu), timing.EventTimer(cold=not options.warm) if on_gpu else timing.WallTimer()
    how = "as they were measured" if options.again else f"{options.rounds} rounds of {options.launches} launches"
    todo, rows, failed = asked(options), [], 0
    print(f"{record.device()}: {len(todo)} cases, {how}")
    end = time.monotonic() + options.seconds
    with Bar(len(todo)) as bar:
        for done, (case, chosen, rivals) in enumerate(todo):
            if time.monotonic() > end:
                say(f"{len(todo) - done} cases are left, for want of time")
                break
            bar.step(f"{case.what} {case.dtype} d{case.head_dim} L{case.length} {case.mask}")
            try:
                if decoding:
                    row = record.stamped(decode.measure(case, chosen, rivals))
                else:
                    row = record.stamped(measure(case, chosen, inputs, rivals, timer))
            except Exception as error:  # one bad case must not cost the figures of the others
                failed += 1
                say(f"FAILED {case}: {type(error).__name__}: {error}")
                continue
            finally:
                inputs.trim()
            rows.append(row)
            say(decode.line(row) if decoding else line(row))
            if options.json:
                record.add(options.json, "cases", [row])
    print(*summary(rows), sep="\n")
    if options.csv and rows:
        with open(options.csv, "w", newline="") as file:
            table = csv.DictWriter(file, rows[0])
            table.writeheader()
            table.writerows(rows)
    if options.plot and rows:
        pictures.draw(pictures.of_rows(rows, record.device()), options.plot)
        print(f"drawn in {options.plot}")
    return 1 if failed or not (rows or options.again) else 0


if __name__ == "__main__":
    sys.exit(main())
