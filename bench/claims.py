"""What is said of flash attention, measured on this machine: the claim, the figures, and whether it holds here.

    python bench/claims.py                          # all claims that this machine can try
    python bench/claims.py time memory              # some of them
    python bench/claims.py --numpy                  # small sizes on the CPU, where a GPU is too
    python bench/claims.py --json FILE              # into the record as well, see record.py

On a GPU that has compiled none of the kernels before, most of the time goes there; ``python bench/gpu.py compile`` does
it in parallel.

A claim about speed is judged at several lengths. One that fails at some of them does not hold, and the verdict says
from which length on it does. Everything is timed by the loop of ``timing.py``. On a GPU arrays are float16 with 32
heads of 128, on the CPU float32 with two of 32.

**Naive attention** is here what one would write in CuPy or NumPy: scores in memory, in the arrays' dtype, changed in
place until they are weights. That is kind to it: one matrix of scores in forward, two in a step of training. Models
often take their softmax in float32 between products in float16, and a framework keeps what its backward pass needs:
`naive_float32` does that, and holds five matrices, two of them in float32, seven times the bytes of a float16 one.
"""

import argparse
import contextlib
import gc
import statistics
import sys
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

import contenders
import gpt2
import gpu
import record
import timing
import train_step

import cuflash
from cuflash import roofline
from cuflash.__main__ import gpu as find_gpu

ON_GPU = {
    "dtype": "float16", "exact": ("float16", "float32"), "heads": 32, "head_dim": 128, "launches": 5,
    "lengths": (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536), "same": 1024, "most": 16384,
    "cached": (1024, 8192, 16384), "split": (1024, 4096, 16384, 65536, 131072),
    "tuned": {"heads": 32, "head_dim": 128, "length": 16384, "budget": 80e9},
    "gpt2": gpt2.SMALL, "gpt2_steps": 21, "gpt2_lengths": (1024, 2048, 4096, 8192),
}  # fmt: skip
ON_CPU = {
    "dtype": "float32", "exact": ("float32", "float64"), "heads": 2, "head_dim": 32, "launches": 1,
    "lengths": (128, 256, 512, 1024), "same": 100, "most": 512, "cached": (256, 512), "split": (),
    "tuned": {"heads": 2, "head_dim": 16, "length": 512, "budget": 80e9 * (2 / 32) * (512 / 16384) ** 2},
    "gpt2": gpt2.TINY, "gpt2_steps": 9, "gpt2_lengths": (64,),
}  # fmt: skip

ROUNDS = 3
LONG = 20  # milliseconds of a call, of which one a round will do
CHECKED_ROWS = 64
ROUNDOFFS = 16  # that two answers may be apart, as a whole
HALF = 0.55  # of the time is called half of it
PAPER = 3  # times as fast as the code of its day, says "FlashAttention" (2022) of training GPT-2
BATCHES = (1, 2, 3, 4)
NEEDED = ("same", "gpt2 loss")  # are about right answers: where these do not hold, something is broken


@dataclass
class Finding:
    """A claim and what became of it."""

    claim: str
    says: str
    measured: str
    holds: bool
    since: int | None = None  # length from which on it does, where it does not hold at all of them
    figures: dict = field(default_factory=dict)

    @property
    def verdict(self):
        """In words."""
        if self.holds:
            return "holds"
        return "does not hold" + (f"; it does from {self.since:,} on" if self.since else "")


def by_length(claim, says, figures, good, shown):
    """A finding from ``{length: figure}``, of each of which ``good`` says whether the claim holds there."""
    since = None
    for length, figure in reversed(figures.items()):
        if not good(figure):
            break
        since = length
    measured = ", ".join(f"{length:,}: {shown(figure)}" for length, figure in figures.items())
    return Finding(claim, says, measured, since == min(figures), since, {"by_length": figures})


def amount(nbytes):
    """Bytes in words."""
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.3g} MB"


class Machine:
    """Where claims are tried: a library of arrays, its timer, and sizes that suit it."""

    def __init__(self, xp):
        self.xp, self.name = xp, xp.__name__
        self.sizes = SimpleNamespace(**(ON_CPU if xp is np else ON_GPU))
        self.timer = timing.WallTimer() if xp is np else timing.EventTimer()

    def draw(self, *shapes, dtype=None):
        """Random normal arrays."""
        rng = self.xp.random.default_rng(0)
        dtype = np.dtype(dtype or self.sizes.dtype)
        return [rng.standard_normal(shape, dtype=np.float32).astype(dtype, copy=False) for shape in shapes]

    def heads(self, length, count):
        """So many arrays (1, heads, length, head_dim)."""
        return self.draw(*[(1, self.sizes.heads, length, self.sizes.head_dim)] * count)

    def times(self, calls):
        """Milliseconds of calls by name, in turns."""
        for call in calls.values():
            call()
        slowest = max(self.timer(call, 1)[0] for call in calls.values())
        launches = self.sizes.launches if slowest < LONG else 1
        rounds = timing.interleave(self.timer, calls, rounds=ROUNDS, launches=launches, warmup=0)
        return {name: statistics.median(taken) for name, taken in rounds.items()}

    def ratio(self, ours, theirs):
        """How many times as long as ours theirs takes."""
        found = self.times({"ours": ours, "theirs": theirs})
        return found["theirs"] / found["ours"]

    def lengths(self):
        """Those at which a backward pass is tried too."""
        return [length for length in self.sizes.lengths if length <= self.sizes.most]

    def extra(self, call):
        """Bytes beyond what a call is given and returns."""
        return timing.extra_bytes(call, self.name)[0]

    def free(self):
        """Give memory back, so that the next claim finds all of it."""
        gc.collect()
        if self.xp is not np:
            self.xp.get_default_memory_pool().free_all_blocks()

    def over(self, lengths, figure):
        """``{length: figure(self, length)}``, each with all of the memory."""
        found = {}
        for length in lengths:
            found[length] = figure(self, length)
            self.free()
        return found

    @cached_property
    def forwards(self):
        """By length: milliseconds, and bytes held with inputs and result, of both; naive's None where it ran out."""
        return self.over(self.sizes.lengths, forward_figures)


# Naive attention ----------------------------------------------------------------------------------------------------


def plain(q, k, v):
    """Attention with one matrix of scores a head."""
    return contenders.naive_weights(q, k) @ v


def naive_float32(q, k, v, bias):
    """`gpt2.naive` with a softmax in float32: the weights in both dtypes are kept for the backward pass."""
    scale = float(q.shape[-1] ** -0.5)
    wide = (q @ k.swapaxes(-2, -1)).astype(np.float32)
    wide *= scale
    wide += bias
    wide -= wide.max(-1, keepdims=True)
    np.exp(wide, out=wide)  # which hands CuPy's arrays on to CuPy
    wide /= wide.sum(-1, keepdims=True)
    weights = wide.astype(q.dtype)
    out = weights @ v

    def pullback(dout, grads):
        dq, dk, dv = grads
        dweights = dout @ v.swapaxes(-2, -1)
        dwide = dweights.astype(np.float32)
        dwide -= (dout.astype(np.float32) * out).sum(-1, keepdims=True)
        dwide *= wide
        dwide *= scale
        dscores = dwide.astype(q.dtype)
        dq[...] = dscores @ k
        dk[...] = (q.swapaxes(-2, -1) @ dscores).swapaxes(-2, -1)
        dv[...] = (dout.swapaxes(-2, -1) @ weights).swapaxes(-2, -1)

    return out, pullback


# The claims: what each function of a machine finds ------------------------------------------------------------------


def same(machine):
    """Right answers: forward and gradients."""
    sizes, shown, holds, figures = machine.sizes, [], True, {}
    shape = 1, sizes.heads, sizes.same, sizes.head_dim
    for dtype in sizes.exact:
        q, k, v, dout = machine.draw(*[shape] * 4, dtype=dtype)
        out, pullback = cuflash.vjp(q, k, v, causal=True)
        theirs, naive_pullback = gpt2.naive(q, k, v, contenders.causal_bias(q))
        grads = [machine.xp.empty_like(x) for x in (q, k, v)]
        naive_pullback(dout, grads)
        far = train_step.distance((out, *pullback(dout)), (theirs, *grads))
        engine = "numpy" if machine.xp is np else gpu.plan_of("forward", q, k, v, causal=True).engine
        rows = np.linspace(0, sizes.same - 1, CHECKED_ROWS).astype(int)
        first = [contenders.to_host(x[0, 0]) for x in (q, k, v)]
        exact = gpu.bounded(*first, engine=engine, causal=True, rows=rows)
        error = gpu.over_bound(contenders.to_host(out[0, 0])[rows], exact.out, exact.out_bound)
        holds = bool(holds and error <= 1 and far <= ROUNDOFFS / 2 * np.finfo(dtype).eps)
        shown.append(f"{dtype}: {far:.1e} apart, error over bound {error:.2f}")
        figures[dtype] = {"apart": far, "error_over_bound": error}
    says = f"The output and gradients of naive attention, to {ROUNDOFFS} roundoffs, and inside the error bound"
    yield Finding("same", says, "; ".join(shown), holds, figures=figures)


def forward_figures(machine, length):
    """What `Machine.forwards` says of a length."""
    arrays = machine.heads(length, 3)
    calls = {"cuflash": lambda: cuflash.forward(*arrays), "naive": lambda: plain(*arrays)}
    ms, held = dict.fromkeys(calls), dict.fromkeys(calls)
    for name, call in calls.items():
        with contextlib.suppress(MemoryError):  # CuPy's OutOfMemoryError too
            call()
            held[name] = machine.extra(call) + 4 * arrays[0].nbytes
        machine.free()
    return {"ms": ms | machine.times({name: call for name, call in calls.items() if held[name]}), "held": held}


def time(machine):
    """Speed of forward."""
    taken = {length: each["ms"] for length, each in machine.forwards.items()}
    ratios = {length: ms["naive"] / ms["cuflash"] for length, ms in taken.items() if ms["naive"]}
    says = "Forward is faster than naive attention at every length"
    yield by_length("time", says, ratios, lambda ratio: ratio > 1, lambda ratio: f"{ratio:.2f}x")


def memory(machine):
    """Bytes held in forward, with inputs and result."""
    held = {length: each["held"] for length, each in machine.forwards.items()}
    *_, half, longest = (length for length, each in held.items() if each["naive"])
    growth = {name: held[longest][name] / held[half][name] for name in held[longest]}
    full = next((length for length, each in held.items() if not each["naive"]), None)
    yield Finding(
        "memory",
        "Memory grows with the length, that of naive attention with its square",
        f"at {longest:,} {amount(held[longest]['cuflash'])} against {amount(held[longest]['naive'])}; twice the length "
        f"takes {growth['cuflash']:.2f} and {growth['naive']:.2f} times as much"
        + (f"; naive attention runs out of memory at {full:,}" if full else ""),
        growth["cuflash"] < 3 < growth["naive"],  # nearer 2, nearer 4
        figures={"held": held, "naive_runs_out_at": full},
    )


def causal(machine):
    """What hidden tiles save."""

    def share(machine, length):
        arrays = machine.heads(length, 3)
        return 1 / machine.ratio(lambda: cuflash.forward(*arrays, causal=True), lambda: cuflash.forward(*arrays))

    shares = machine.over(machine.lengths(), share)
    pairs = [roofline.Problem("forward", max(shares), causal=mask).pairs for mask in (True, False)]
    says = f"A causal mask halves the work (products {pairs[0] / pairs[1]:.4f}) and the time (at most {HALF})"
    yield by_length("causal", says, shares, lambda share: share <= HALF, lambda share: f"{share:.2f}")


def recompute(machine):
    """The backward pass alone, both with what they keep of forward at hand."""

    def ratio(machine, length):
        q, k, v, dout = machine.heads(length, 4)
        grads = [machine.xp.empty_like(x) for x in (q, k, v)]
        (_, ours), (_, theirs) = cuflash.vjp(q, k, v), gpt2.naive(q, k, v)
        return machine.ratio(lambda: ours(dout), lambda: theirs(dout, grads))

    ratios = machine.over(machine.lengths(), ratio)
    problem = roofline.Problem("backward", max(ratios), head_dim=machine.sizes.head_dim)
    more = roofline.flash(problem).flops / roofline.naive(problem).flops
    says = f"To make the scores again in backward takes {more:.2f} of the FLOPs, and less time"
    yield by_length("recompute", says, ratios, lambda ratio: ratio > 1, lambda ratio: f"{ratio:.2f}x as fast")


def phases(machine):
    """Many rows against one row a head."""

    def ratios(machine, length):
        q, k, v = machine.heads(length, 3)
        row = q[:, :, -1:]
        return {
            "prefill": machine.ratio(lambda: cuflash.forward(q, k, v), lambda: plain(q, k, v)),
            "decode": machine.ratio(lambda: cuflash.decode(row, k, v), lambda: plain(row, k, v)),
        }

    yield by_length(
        "phases",
        "Prefill gains more over naive attention than decode of one row does",
        machine.over(machine.sizes.cached, ratios),
        lambda each: each["prefill"] > each["decode"],
        lambda each: f"{each['prefill']:.2f}x against {each['decode']:.2f}x",
    )


def split(machine):
    """Decode of one sequence, 4 query heads a key head."""

    def ratio(machine, length):
        heads, head_dim = machine.sizes.heads, machine.sizes.head_dim
        q, k, v = machine.draw((1, heads, 1, head_dim), *[(1, heads // 4, length, head_dim)] * 2)
        return machine.ratio(lambda: cuflash.decode(q, k, v), lambda: cuflash.decode(q, k, v, splits=1))

    says = "Decode of one sequence is faster with its keys split among blocks than with a block a key head"
    ratios = machine.over(machine.sizes.split, ratio)
    yield by_length("split", says, ratios, lambda ratio: ratio > 1, lambda ratio: f"{ratio:.2f}x")


def tuning(machine):
    """Forward and backward of one attention layer within a budget of memory."""
    tuned = SimpleNamespace(**machine.sizes.tuned)
    length, most = tuned.length, BATCHES[-1]
    for name, attention in (("float32", naive_float32), ("float16", gpt2.naive)):
        matrices = matrices_held(machine, tuned, attention)
        ours, theirs = (largest_batch(machine, tuned, length, each) for each in (flash, attention))
        since = None
        if theirs:
            longer = next((n for n in (2 * length, 4 * length) if not fits(machine, tuned, n, 1, attention)), None)
            since = longer if longer and fits(machine, tuned, longer, most, flash) else None
        yield Finding(
            f"tuning {name}",
            f"{length:,} tokens, {tuned.heads} heads of {tuned.head_dim}, causal, out and gradients in float16 within "
            f"{amount(tuned.budget)}: naive attention, softmax in {name}, does not fit; cuflash fits at batch {most}",
            f"largest batch {theirs} against {ours}; naive attention holds {matrices:.1f} times the bytes of a float16 "
            f"matrix of scores, {amount(2 * tuned.heads * length**2 * matrices)} a sequence",
            ours == most and not theirs,
            since,
            {"largest_batch": {"cuflash": ours, "naive": theirs}, "matrices": matrices},
        )


def matrices_held(machine, tuned, attention):
    """Bytes beyond inputs and results over those of a float16 matrix of scores, at a quarter of the length."""
    length = tuned.length // 4
    arrays = train_arrays(machine, tuned, length, 1, attention)
    return machine.extra(lambda: train(attention, *arrays)) / (2 * tuned.heads * length**2)


def flash(q, k, v, bias):
    """`gpt2.flash`; a mask needs no bias."""
    return gpt2.flash(q, k, v)


def train_arrays(machine, tuned, length, batch, attention):
    """q, k, v, dout, and the bias of naive attention."""
    arrays = machine.draw(*[(batch, tuned.heads, length, tuned.head_dim)] * 4, dtype="float16")
    return *arrays, None if attention is flash else contenders.causal_bias(arrays[0])


def train(attention, q, k, v, dout, bias):
    """out and gradients."""
    out, pullback = attention(q, k, v, bias)
    grads = [like.copy() for like in (q, k, v)]
    pullback(dout, grads)
    return (out, *grads)


def fits(machine, tuned, length, batch, attention):
    """Whether such a step stays within the budget: CuPy's pool is given no more; on the CPU its peak is measured."""

    def call():
        return train(attention, *train_arrays(machine, tuned, length, batch, attention))

    machine.free()
    if machine.xp is np:
        extra, results = timing.extra_bytes(call, machine.name)
        return extra + sum(result.nbytes for result in results) <= tuned.budget
    pool = machine.xp.get_default_memory_pool()
    before = pool.get_limit()
    pool.set_limit(size=int(tuned.budget))
    try:
        call()
    except MemoryError:  # CuPy's OutOfMemoryError too
        return False
    finally:
        pool.set_limit(size=before)
    return True


def largest_batch(machine, tuned, length, attention):
    """The largest of BATCHES that fits, 0 where none does."""
    found = 0
    for batch in BATCHES:
        if not fits(machine, tuned, length, batch, attention):
            break
        found = batch
    return found


def training(machine):
    """GPT-2 small, see gpt2.py."""
    found, sizes = {}, machine.sizes
    model = "GPT-2 small" if sizes.gpt2 is gpt2.SMALL else "A tiny GPT-2"
    tokens = sizes.gpt2["batch"] * sizes.gpt2["length"]
    for length in sizes.gpt2_lengths:
        usual = length == sizes.gpt2["length"]
        shape = SimpleNamespace(**sizes.gpt2 | {"length": length, "batch": tokens // length})
        both = gpt2.compare(shape, machine.xp, steps=sizes.gpt2_steps if usual else 5)
        rates = {name: tokens / statistics.median(each["rounds"]) * 1e3 for name, each in both.items()}
        found[length] = rates | {"ratio": timing.ratio(both["cuflash"]["rounds"], both["naive"]["rounds"])}
        machine.free()
        if usual:
            apart, losses = gpt2.apart(both), {name: each["losses"] for name, each in both.items()}
            first, *_, last = losses["cuflash"]
            measured = f"at most {apart:.1e} apart in {len(losses['naive'])} steps, from {first:.2f} to {last:.2f}"
            yield Finding(
                "gpt2 loss", f"{model} has the same loss with either attention, to rounding", measured,
                apart <= gpt2.APART[shape.dtype], figures={"apart": apart, "losses": losses},
            )  # fmt: skip
    yield by_length(
        "gpt2 speed", f"{model} trains {PAPER} times as fast with cuflash", found, lambda each: each["ratio"] >= PAPER,
        lambda each: f"{each['cuflash']:,.0f} against {each['naive']:,.0f} tokens/s, {each['ratio']:.2f}x",
    )  # fmt: skip


CLAIMS = {
    "same": same, "time": time, "memory": memory, "causal": causal, "recompute": recompute, "phases": phases,
    "split": split, "tuning": tuning, "gpt2": training,
}  # fmt: skip
GPU_ONLY = ("split",)


def row(machine, finding):
    """A finding as a row of the record."""
    return record.stamped(asdict(finding) | {"library": machine.name, "verdict": finding.verdict})


def main(arguments=None):
    """Try claims, print what became of them; 1 where an answer is wrong or a claim could not be tried."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLAIMS)}; default: all")
    parser.add_argument("--numpy", action="store_true", help="small sizes on the CPU")
    parser.add_argument("--json", metavar="FILE", help="record to merge the rows into")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in CLAIMS]:
        parser.error(f"NAME is {unknown[0]}; wanted one of {', '.join(CLAIMS)}")
    cupy, reason = (None, "") if options.numpy else find_gpu()
    machine = Machine(cupy or np)
    print(f"{record.device() if cupy else 'the CPU'}, {machine.name}{f': {reason}' if reason else ''}", flush=True)
    failed = 0
    for name in options.names or CLAIMS:
        if cupy is None and name in GPU_ONLY:
            print(f"{name}: needs a GPU")
            continue
        try:
            for finding in CLAIMS[name](machine):
                print(f"{finding.claim}: {finding.verdict}\n    {finding.says}\n    {finding.measured}", flush=True)
                failed += finding.claim in NEEDED and not finding.holds
                if options.json:
                    record.add(options.json, "claims", [row(machine, finding)])
        except Exception as error:  # one claim must not cost the others
            failed += 1
            print(f"{name}: FAILED: {type(error).__name__}: {error}", flush=True)
        machine.free()
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
