"""Fuzz the GPU engine: every variant of its kernels on random problems, each result held against the float64 bound.

    python bench/fuzz.py --examples 20000 --seconds 420 --json FILE
    python bench/fuzz.py --what backward --engine sm90                            # gradients
    python bench/fuzz.py --replay forward_bf16_causal_d64_q128_k64_w4_b2 1234     # one example again

Processes, one a core, each draw problems aimed at a variant, run them on the GPU and compute the bound on the CPU.
A problem is a function of (variant, seed). Sizes lean to tile edges; operands are views of many kinds; keys that no row
sees hold NaN, and a key that only some rows see may hold infinity, which must not reach the others. So for gradients,
where dout is a view too, and rows that see no key hold NaN.
"""

import argparse
import collections
import dataclasses
import importlib
import os
import queue
import sys
import time
import zlib
from multiprocessing import get_context

import contenders
import gpu
import numpy as np
import record

import cuflash
from cuflash import _masks, _plan, testing
from cuflash._dtypes import ELEMENTS, FORMATS, KINDS

LEAST = 50  # examples of each variant
CHUNK = 16  # examples of a task
LAYOUTS = ("plain", "heads_inside", "wide", "odd", "reversed", "skipping", "broadcast")
DOUT_LAYOUTS = (*LAYOUTS[:-1], "stretched")  # as a sum's gradient: rows of stride 0


# One example ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Example:
    """A problem: base arrays on the host, the layouts that make operands of them, what the call is given."""

    bases: list
    layouts: list
    shapes: list
    keywords: dict
    mask: object
    rows_hit: np.ndarray  # rows that see a key which holds infinity, so are not judged
    keys_hit: np.ndarray  # keys that such rows see: their gradients are not judged

    def operands(self, move=lambda base: base):
        """q, k, v and, for gradients, dout as views of the moved bases."""
        return [
            view(move(base), layout, shape)
            for base, layout, shape in zip(self.bases, self.layouts, self.shapes, strict=True)
        ]


def base_shape(shape, layout):
    """Shape of a contiguous array that has a view of ``shape``, all of (batch, heads, length, dim)."""
    batch, heads, length, dim = shape
    return {
        "heads_inside": (batch, length, heads, dim),
        "wide": (batch, heads, length, dim + 8),
        "odd": (batch, heads, length, dim + 1),
        "skipping": (batch, heads, 2 * length, dim),
        "broadcast": (1, heads, length, dim),
        "stretched": (batch, heads, 1, dim),
    }.get(layout, shape)


def view(base, layout, shape):
    """The operand a layout sees in its base, on the host and on the device alike; for some a shape of their own."""
    if layout == "stretched":
        return (np if isinstance(base, np.ndarray) else sys.modules["cupy"]).broadcast_to(base, shape)
    if layout == "heads_inside":
        return base.swapaxes(1, 2)
    if layout == "wide":
        return base[..., 8:]
    if layout == "odd":
        return base[..., 1:]
    if layout == "reversed":
        return base[:, :, ::-1]
    if layout == "skipping":
        return base[:, :, ::2]
    return base


def draw(variant, seed):
    """The problem of a variant and a seed."""
    rng = np.random.default_rng([zlib.crc32(variant.name.encode()), seed])
    queries, keys = _near(rng, variant.tile_q, 2), _near(rng, variant.tile_k, 4)
    head_dim, value_dim = _dims(rng, variant)
    key_heads, group = int(rng.integers(1, 3)), int(rng.choice([1, 1, 2, 3]))
    batch = int(rng.choice([1, 1, 2, 3]))
    if fewest := gpu.fewest_keys(variant):  # and few rows, since the bound takes its time
        queries = queries if rng.random() < 0.1 else int(rng.integers(1, 40))
        keys, key_heads, group, batch = fewest + keys, 1, min(group, 2), 1
    mixed = not variant.hopper and variant.head_dim != variant.value_dim
    every = variant.backward or mixed or variant.element in ("float32", "float64")  # one kernel for all masks
    mask = str(rng.choice(["full", "causal", "window"])) if every else variant.mask
    keywords = _mask_keywords(rng, mask, queries, keys)
    if rng.random() < 0.3:
        keywords["scale"] = float(rng.choice([0.0, -0.2, 1.0, 0.01]))
    if variant.parts == 2:
        keywords["precision"] = "tf32"
    layouts = [str(rng.choice(LAYOUTS)) if rng.random() < 0.5 else "plain" for _ in range(3)]
    shapes = [(batch, key_heads * group, queries, head_dim), (batch, key_heads, keys, head_dim)]
    shapes.append((*shapes[1][:-1], value_dim))
    if variant.backward:
        layouts.append(str(rng.choice(DOUT_LAYOUTS)) if rng.random() < 0.5 else "plain")
        together = 1 if layouts[:3] == ["broadcast"] * 3 else batch
        shapes.append((together, *shapes[0][1:-1], value_dim))
    dtype = ELEMENTS[variant.element].dtype
    bases = [rng.standard_normal(base_shape(*given)).astype(dtype) for given in zip(shapes, layouts, strict=True)]
    mask = _masks.make(queries, keys, keywords.get("causal", False), keywords.get("window"))
    example = Example(bases, layouts, shapes, keywords, mask, np.zeros(queries, bool), np.zeros(keys, bool))
    if keys and rng.random() < 0.3:  # a key that outweighs the others
        example.operands()[1][:, :, int(rng.integers(keys))] *= dtype.type(6)
    return example, rng


def spoil(example, rng):
    """Plant NaN in keys no row sees and rows that see none and, at times, infinity where some rows look."""
    q, k, v, *dout = example.operands()
    i, keys = np.arange(q.shape[-2]), k.shape[-2]
    first, end = (np.broadcast_to(at(i, keys), i.shape) for at in (example.mask.first_key, example.mask.end_key))
    seen = np.zeros(keys, int)
    for a, b in zip(first, end, strict=True):
        seen[a:b] += 1
    for x, rows in ((k, seen == 0), (v, seen == 0), *((x, first >= end) for x in (q, *dout))):
        if x.flags.writeable:  # not stretched
            x[:, :, rows] = np.nan
    some = np.flatnonzero((seen > 0) & (seen < len(i)))
    if len(some) and rng.random() < 0.3:
        j = int(rng.choice(some))
        (v if rng.random() < 0.7 else k)[:, :, j] = np.inf
        example.rows_hit = (first <= j) & (j < end)
        for a, b in zip(first[example.rows_hit], end[example.rows_hit], strict=True):
            example.keys_hit[a:b] = True


def _near(rng, tile, most):
    """A length: often one beside a multiple of the tile, at times 0."""
    if rng.random() < 0.02:
        return 0
    if rng.random() < 0.5:
        return max(1, int(rng.integers(0, most + 1)) * tile + int(rng.integers(-1, 2)))
    return int(rng.integers(1, most * tile // 2 + 2))


def _dims(rng, variant):
    """head_dim and value_dim that are padded to the variant's, each at times the largest or a multiple of 8."""
    sizes = (variant.head_dim, variant.value_dim)
    padded = {
        "forward_sm90": _plan.hopper_dims,
        "forward_f32_sm90": lambda *dims: (
            max(dims) >= _plan.FEWEST_FLOAT32_COLUMNS and _plan.hopper_float32_dims(*dims)
        ),
        "backward_sm90": _plan.hopper_backward_dims,
        "forward_f32": _plan.float32_dims,
        "forward_f64": _plan.float64_dims,
        "backward_f32": _plan.float32_backward_dims,
        "backward_f64": _plan.float64_backward_dims,
        "decode": _plan.decode_dims,
        "decode_8bit": _plan.decode_8bit_dims,
        "decode_real": _plan.decode_real_dims,
        "decode_latent": lambda *dims: dims[1] <= dims[0] > max(_plan.DECODE_TILES) and _plan.LATENT_DIMS,
    }.get(variant.kernel, _plan._padded)
    padded = _plan.cache_dims if variant.paged else padded
    while True:
        drawn = [int(rng.integers(1, size + 1)) for size in sizes]
        dims = [int(rng.choice([n, -(-n // 8) * 8, size])) for n, size in zip(drawn, sizes, strict=True)]
        if sizes[0] == sizes[1] and rng.random() < 0.5:
            dims[1] = dims[0]
        if padded(*dims) == sizes:
            return dims


def _mask_keywords(rng, mask, queries, keys):
    if mask == "full":
        return {"window": (None, None)} if rng.random() < 0.1 else {}
    align = [True, "bottom-right", "top-left"][int(rng.integers(3))]
    if mask == "causal":
        return {"causal": align} if rng.random() < 0.8 else {"window": (None, int(rng.integers(0, keys // 2 + 1)))}
    left = int(rng.integers(0, keys // 2 + 1))
    right = None if rng.random() < 0.2 else int(rng.integers(0, keys // 2 + 1))
    return {"window": (left, right)} | ({"causal": align} if rng.random() < 0.5 else {})


def judge(example, clean, out, lse, engine):
    """Worst error over bound of out and lse, NaN where one is; rows that saw infinity are left aside."""
    wanted, judged = gpu.bounded(*clean, engine=engine, **example.keywords), ~example.rows_hit
    results = (out, wanted.out, wanted.out_bound), (lse, wanted.lse, wanted.lse_bound)
    return float(np.max([gpu.over_bound(*(x[:, :, judged] for x in arrays)) for arrays in results]))  # NaN wins


def judge_gradients(example, clean, dlse, grads, engine):
    """The same of dq, dk and dv; what rows that saw infinity have a part in is left aside."""
    q, k, v, dout = clean
    wanted = gpu.bounded_gradients(dout, q, k, v, dlse=dlse, engine=engine, **example.keywords)
    judged, found = [~example.rows_hit, ~example.keys_hit, ~example.keys_hit], []
    for grad, (exact, bound), rows in zip(grads, wanted, judged, strict=True):
        found.append(gpu.over_bound(*(x[:, :, rows] for x in (contenders.to_host(grad), exact, bound))))
    return float(np.max(found))


def gradients(example, clean, rng, engine):
    """Run an example's gradients twice: their worst error over bound, NaN where a bit differs."""
    q, k, v, dout = example.operands(gpu.to_device)
    out, lse = cuflash.forward(q, k, v, return_lse=True, **engine)
    host = contenders.to_host(lse)
    dlse = rng.standard_normal(lse.shape, np.float32).astype(host.dtype) if rng.random() < 0.3 else None
    if rng.random() < 0.2:  # rows that do not lie side by side
        lse = gpu.to_device(np.repeat(host, 2, axis=-1))[..., ::2]
    keywords = engine | {"dlse": None if dlse is None else gpu.to_device(dlse)}
    grads, again = (cuflash.backward(dout, q, k, v, out, lse, **keywords) for _ in range(2))
    for one, other in zip(grads, again, strict=True):
        if (contenders.to_host(one).view(np.uint16) != contenders.to_host(other).view(np.uint16)).any():
            return np.nan, host
    return judge_gradients(example, clean, dlse, grads, engine["engine"] or "sm90"), host


def draw_cache(variant, seed):
    """The problem on a cache of a variant and a seed, from the choices that the tests draw from."""
    rng = np.random.default_rng([zlib.crc32(variant.name.encode()), seed])
    longest = int(rng.choice([130, 600, 3000], p=[0.5, 0.4, 0.1]))
    kinds = {"dtypes": [variant.element], "formats": [None]}
    if variant.element in FORMATS:
        kinds = {"dtypes": ["float16", "bfloat16"], "formats": [variant.element]}
    if variant.paged:
        kinds |= {"appends": False, "queries": testing.MANY_ROWS}
    latent = variant.kernel == "decode_latent"
    if latent:
        kinds["latent"] = True
    recipe = testing.cache_recipe(
        lambda among: among[int(rng.integers(len(among)))], max_length=longest, **kinds
    )
    head_dim, value_dim = _dims(rng, variant)
    if variant.kernel == "decode" and variant.tile_q > 16 and recipe.queries * recipe.heads // recipe.key_heads <= 16:
        recipe = dataclasses.replace(recipe, queries=int(rng.integers(17, 40)))
    if latent:
        least, most = {16: (1, 16), 32: (17, 32)}.get(variant.tile_q, (33, 150))
        rows = int(rng.integers(least, most + 1))
        queries = recipe.queries if recipe.queries <= rows else 1
        recipe = dataclasses.replace(recipe, queries=queries, heads=rows // max(queries, 1), key_heads=1)
    recipe = dataclasses.replace(recipe, head_dim=head_dim, value_dim=value_dim)
    return recipe, rng


def cache_one(variant, seed, engine):
    """The same as `try_one` of a variant for caches: NaN too where a bit differs in a second run."""
    function = variant.function
    recipe, rng = draw_cache(variant, seed)
    values, rows = recipe.values(), [np.arange(recipe.queries)] * len(recipe.lengths)
    spoilt = values
    garbage = [None, np.nan, np.inf][int(rng.choice(3, p=[0.7, 0.15, 0.15]))]
    if garbage is not None:
        spoilt, rows = recipe.spoilt(values, (garbage, -garbage))
    keywords = recipe.keywords | (recipe.splitting if function == "decode" else {})
    *arrays, tables = recipe.arrays(np, spoilt)  # where they lie decides the plan
    steps = gpu.steps_of(function, *arrays, engine="portable", **tables, **keywords)
    *arrays, tables = recipe.arrays(np if engine == "numpy" else importlib.import_module("cupy"), spoilt)
    keywords |= tables | {"engine": engine, "return_lse": True}
    results, again = (getattr(cuflash, function)(*arrays, **keywords) for _ in range(2))
    results, again = ([contenders.to_host(x) for x in each] for each in (results, again))
    path = gpu.path_of(recipe.dtype, engine)
    wanted = getattr(cuflash.bounds, function)(*values[:3], path=path, **recipe.meant(values))
    found = [0.0]
    for b, judged in enumerate(rows):
        for actual, exact, bound in (
            (results[0], wanted.out, wanted.out_bound),
            (results[1], wanted.lse, wanted.lse_bound),
        ):
            found.append(gpu.over_bound(*(x[b][:, judged] for x in (actual, exact, bound))))
    for one, other in zip(results, again, strict=True):
        if one.tobytes() != other.tobytes():
            found.append(np.nan)
    notable = {
        "several_splits": bool(steps) and steps[-1].args.get("splits", 1) > 1,
        "splits_by_lengths": bool(steps) and steps[-1].args.get("sequences", 0) > 0,
        "several_key_tiles": max(recipe.totals, default=0) > variant.tile_k,
        "appends": recipe.append,
        "rotary": recipe.rotary > 0,
        "pages": recipe.page_size is not None,
        "empty_rows": bool(np.any(np.isneginf(results[1]))),
        "views": {recipe.q, recipe.k, recipe.v} != {"contiguous"},
        "gqa": recipe.heads != recipe.key_heads,
        "value_dim_differs": recipe.head_dim != recipe.value_dim,
        "hidden_infinity": garbage is not None,
        "scales_of_slots": "slot" in (recipe.k_scale, recipe.v_scale),
    }
    return steps[-1].variant.name if steps else None, float(np.max(found)), notable


def try_one(variant, seed, engine):
    """Run an example: the variant it ran as, its worst error over bound, and what is notable about it."""
    if variant.caches:
        return cache_one(variant, seed, engine)
    example, rng = draw(variant, seed)
    clean = [operand.copy() for operand in example.operands()]
    spoil(example, rng)
    q, k, v, *dout = example.operands()

    def chosen(name):  # not all problems are for sm90
        return example.keywords | {"engine": None if name == "sm90" else name}

    if variant.backward:
        row = np.zeros(dout[0].shape[:-1], ELEMENTS[variant.element].lse)
        ran = gpu.plan_of("backward", dout[0], q, k, v, dout[0], row, **chosen(variant.engine)).variant
        worst, lse = gradients(example, clean, rng, chosen(engine))
    else:
        ran = gpu.plan_of("forward", q, k, v, **chosen(variant.engine)).variant
        out, lse = cuflash.forward(*example.operands(gpu.to_device), return_lse=True, **chosen(engine))
        out, lse = contenders.to_host(out), contenders.to_host(lse)
        worst = judge(example, clean, out, lse, engine) if out.size else 0.0
    tile_k = (ran or variant).tile_k
    notable = {
        "several_key_tiles": k.shape[-2] > tile_k,
        "empty_rows": bool(np.any(np.isneginf(lse))),
        "views": example.layouts != ["plain"] * len(example.layouts),
        "gqa": q.shape[1] != k.shape[1],
        "value_dim_differs": q.shape[-1] != v.shape[-1],
        "hidden_infinity": bool(example.rows_hit.any()),
    }
    return ran and ran.name, float(worst), notable


# Many -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Tally:
    """What some examples of one dtype came to."""

    dtype: str
    examples: int = 0
    failures: int = 0
    worst: float = 0.0
    variants: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    notable: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    messages: list = dataclasses.field(default_factory=list)

    def add(self, other):
        """Take in another tally."""
        self.examples += other.examples
        self.failures += other.failures
        self.worst = max(self.worst, other.worst)
        self.variants.update(other.variants)
        self.notable.update(other.notable)
        self.messages += other.messages

    def row(self, what, engine):
        """Row of the record."""
        share = {name: round(count / max(self.examples, 1), 3) for name, count in sorted(self.notable.items())}
        return {
            "what": what, "engine": engine, "dtype": self.dtype, "examples": self.examples,
            "failures": self.failures, "worst_error_over_bound": self.worst, "shares": share,
            "variants": dict(sorted(self.variants.items())),
        }  # fmt: skip


def task(variant, first_seed, count, engine):
    """Try some examples of a variant: the tally, and whether the CUDA context is still of use."""
    tally = Tally(variant.element)
    for seed in range(first_seed, first_seed + count):
        try:
            name, worst, notable = try_one(variant, seed, engine)
            message = None if worst <= 1 else f"error over bound {worst:.4g}"
        except Exception as error:  # whatever it is, it is a failure of this example
            name, worst, notable, message = variant.name, 0.0, {}, f"{type(error).__name__}: {error}"
        tally.examples += 1
        tally.variants[name or "no launch"] += 1
        tally.notable.update({key: int(value) for key, value in notable.items()})
        if np.isfinite(worst):
            tally.worst = max(tally.worst, worst)
        if message is None:
            continue
        tally.failures += 1
        tally.messages.append(f"--replay {variant.name} {seed}: {message[:300]}")
        if message.startswith("CUDA"):
            return tally, False
    return tally, True


def worker(jobs, results, engine):
    """A process: tasks until there are no more, or until a CUDA error has spoilt its context."""
    well = True
    while well and (job := jobs.get()) is not None:
        tally, well = task(*job, engine)
        results.put(tally)


def tasks(variants, examples):
    """(variant, first seed, count) that share the examples out evenly, all variants in each round."""
    rounds = -(-examples // (len(variants) * CHUNK))
    return [(variant, turn * CHUNK, CHUNK) for turn in range(rounds) for variant in variants]


def run(options, variants, deadline):
    """All tasks, as far as the time goes; tallies by dtype."""
    context, tallies = get_context("spawn"), {}
    jobs, results = context.Queue(), context.Queue()

    def start():
        process = context.Process(target=worker, args=(jobs, results, options.engine), daemon=True)
        process.start()
        return process

    def gather(wanted):
        for job in wanted:
            jobs.put(job)
        waiting, said = len(wanted), time.monotonic()
        while waiting and time.monotonic() < deadline:
            try:
                tally = results.get(timeout=1)
            except queue.Empty:
                pass
            else:
                waiting -= 1
                tallies.setdefault(tally.dtype, Tally(tally.dtype)).add(tally)
            processes[:] = [process if process.is_alive() else start() for process in processes]
            if time.monotonic() - said > 20:
                said = time.monotonic()
                print(f"fuzz: {sum(t.examples for t in tallies.values())} examples", flush=True)
        if waiting:
            print(f"fuzz: out of time, {waiting} tasks did not come back", flush=True)

    processes = [start() for _ in range(options.workers)]
    try:
        gather(tasks(variants, options.examples))
        for turn in range(4):  # an aimed problem may turn out to be another variant's: some may want more
            few = [variant for variant in variants if _count(tallies, variant) < LEAST]
            if few and time.monotonic() < deadline:
                gather([(variant, 10**6 + turn * CHUNK * 4, CHUNK * 4) for variant in few])
    finally:
        for process in processes:
            process.terminate()
    return tallies


def _count(tallies, variant):
    return tallies[variant.element].variants[variant.name] if variant.element in tallies else 0


def main(argv=None):
    """Run the command line: 0 where enough examples ran and all were inside the bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=20000)
    parser.add_argument("--seconds", type=float, default=420)
    parser.add_argument("--what", default="forward", choices=("forward", "backward", "decode"))
    parser.add_argument("--engine", default="portable")
    parser.add_argument("--dtype", default=",".join(KINDS))
    parser.add_argument("--workers", type=int, default=min(os.cpu_count(), 16))
    parser.add_argument("--json", metavar="FILE", help="record to merge the rows into")
    parser.add_argument("--replay", nargs=2, metavar=("VARIANT", "SEED"))
    options = parser.parse_args(argv)
    begin = time.monotonic()
    variants = [variant for variant in _plan.variants(gpu.limits()) if variant.engine == options.engine]
    variants = [variant for variant in variants if variant.element in options.dtype.split(",")]
    mains = {
        "forward": ("forward", "forward_f32", "forward_f64", "forward_sm90", "forward_f32_sm90"),
        "backward": ("backward", "backward_f32", "backward_f64", "backward_sm90"),
        "decode": ("decode", "decode_8bit", "decode_real", "decode_latent"),
    }
    variants = [variant for variant in variants if variant.kernel in mains[options.what]]
    if options.replay:
        (variant,) = (variant for variant in variants if variant.name == options.replay[0])
        if variant.caches:
            print(draw_cache(variant, int(options.replay[1]))[0])
        else:
            example, _ = draw(variant, int(options.replay[1]))
            print([x.shape for x in example.operands()], example.layouts, example.keywords)
        print(*try_one(variant, int(options.replay[1]), options.engine))
        return 0
    os.environ.update(gpu.ONE_THREAD)
    tallies = run(options, variants, begin + options.seconds)
    rows = [record.stamped(tally.row(options.what, options.engine)) for tally in tallies.values()]
    for row, tally in zip(rows, tallies.values(), strict=True):
        print(*tally.messages[:10], sep="\n")
        print(f"fuzz: {tally.dtype}: {tally.examples} examples, {tally.failures} failures, worst {tally.worst:.3f}")
        print(f"      shares {row['shares']}")
    few = [f"{variant.name} {_count(tallies, variant)}" for variant in variants if _count(tallies, variant) < LEAST]
    total, failures = sum(row["examples"] for row in rows), sum(row["failures"] for row in rows)
    seconds = time.monotonic() - begin
    print(f"fuzz: {total} examples of {len(variants)} variants in {seconds:.0f} s, {failures} failures")
    print(f"fuzz: variants with fewer than {LEAST} examples: {len(few)} {', '.join(few[:8])}")
    if options.json:
        record.add(options.json, "fuzz", rows)
    return int(bool(failures or few or total < options.examples))


if __name__ == "__main__":
    sys.exit(main())
