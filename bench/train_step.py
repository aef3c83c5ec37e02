"""A training step of one attention layer, forward and backward: cuflash against attention that stores its scores.

    python bench/train_step.py                              # GPT-2 small's shape: 64 sequences of 1,024, 12 heads of 64
    python bench/train_step.py --length 16384               # as many tokens in long sequences
    python bench/train_step.py --numpy --batch 1 --length 256

Both compute the same out and gradients from the same arrays, causal, in one process; naive keeps the weights from its
forward to its backward, as frameworks do. Its gradients have to agree with ours. A step that does not fit the memory is
shown as such.
"""

import argparse
import statistics
import sys
from pathlib import Path

import numpy as np

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

import contenders
import gpu
import timing

import cuflash

TOKENS = 64 * 1024


def flash(q, k, v, dout):
    """out and the gradients of q, k and v by cuflash."""
    out, pullback = cuflash.vjp(q, k, v, causal=True)
    return out, *pullback(dout)


def naive(q, k, v, dout):
    """The same, with all scores of all heads in memory twice."""
    weights = contenders.naive_weights(q, k, contenders.causal_bias(q))
    out = weights @ v
    dv = weights.swapaxes(-2, -1) @ dout
    dscores = dout @ v.swapaxes(-2, -1)
    dscores -= (dout * out).sum(-1, keepdims=True)
    dscores *= weights
    dscores *= q.dtype.type(q.shape[-1] ** -0.5)
    return out, dscores @ k, dscores.swapaxes(-2, -1) @ q, dv


def distance(ours, theirs):
    """Largest relative distance of two tuples of arrays."""
    wide = [[np.float64(x.get() if hasattr(x, "get") else x) for x in results] for results in (ours, theirs)]
    return max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(*wide, strict=True))


def measure(batch, heads, length, head_dim, xp, rounds=5):
    """Rows (name, milliseconds, bytes beyond inputs and results) of both, None where memory ran out; their distance."""
    dtype = np.dtype(np.float32 if xp is np else np.float16)
    rng = np.random.default_rng(0)
    shape = (batch, heads, length, head_dim)
    arrays = [xp.asarray(rng.standard_normal(shape, np.float32).astype(dtype)) for _ in range(4)]
    timer = timing.WallTimer() if xp is np else timing.EventTimer()
    rows, results = [], []
    for step in (flash, naive):
        try:
            extra, result = timing.extra_bytes(lambda step=step: step(*arrays), xp.__name__)
            taken = timing.interleave(timer, {"step": lambda step=step: step(*arrays)}, rounds=rounds, launches=1)
        except MemoryError:  # CuPy's OutOfMemoryError too
            rows.append((step.__name__, None, None))
        else:
            results.append(result)
            rows.append((step.__name__, statistics.median(taken["step"]), extra))
    return rows, distance(*results) if len(results) == 2 else None


def main(arguments=None):
    """Print the two steps; 1 where their results disagree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, help="sequences; default: 65,536 tokens")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--numpy", action="store_true", help="float32 on the CPU instead of float16 on the GPU")
    options = parser.parse_args(arguments)
    batch = options.batch or max(TOKENS // options.length, 1)
    xp = gpu.array_library("train_step", options.numpy)
    rows, apart = measure(batch, options.heads, options.length, options.head_dim, xp, options.rounds)
    sizes = f"{batch} x {options.heads} heads, length {options.length}, head_dim {options.head_dim}"
    print(f"{sizes}, causal, {xp.__name__}")
    for name, taken, extra in rows:
        figures = "out of memory" if taken is None else f"{taken:10.2f} ms  {extra / 2**20:10.1f} MB extra"
        print(f"{name:6}  {figures}")
    if apart is None:
        return 0
    (_, ours, _), (_, theirs, _) = rows
    print(f"naive / ours {theirs / ours:.2f}; results {apart:.1e} apart")
    return int(not apart < (1e-4 if xp is np else 2e-2))


if __name__ == "__main__":
    sys.exit(main())
