"""Points in space, in float32 and float64: kernel regression and optimal transport are attention.

    python bench/science.py                         # 100,000 points in 3 dimensions, and smaller sizes beside CuPy
    python bench/science.py --plot science.png      # time and memory against the number of points too
    python bench/science.py --json FILE             # rows into the record
    python bench/science.py --numpy                 # few points on the CPU

**Regression** (Nadaraya and Watson): y(x) = sum_i K(x - x_i) y_i / sum_i K(x - x_i), K(r) = exp(-|r|^2 / 2 width^2).
Since ``-|x - x_i|^2 / 2 = x . x_i - |x_i|^2 / 2 - |x|^2 / 2``, and what all weights of a query share cancels, these are
the weights of attention, scale = 1 / width^2, if queries get one more coordinate of 1 and keys one of -|x_i|^2 / 2.

**Transport** (Sinkhorn, in logarithms): with the cost ``C = |x - y|^2 / 2`` a step is ``f = -epsilon log sum_j b_j
exp((g_j - C_ij) / epsilon)``. What belongs to y_j goes into the same coordinate, and f is that sum's lse. The gradient
of the dual ``sum a f + sum b g`` with respect to all points and to g comes back through lse: `cuflash.backward` with
dout = 0 and dlse = -epsilon a.

**Cancellation** is the price of the product. Scores are as large as (R / width)^2, R the distance of the farthest point
from the origin, and weights err by some roundoffs of that; differences x - x_i, which are no matrix product, err by
roundoffs of the exponent alone. So points are moved to have their mean at 0, which changes no difference. What is left
is printed for float32: the error of differences, of products about the mean, and about an origin far away.

Naive is the same in CuPy's (or NumPy's) matrices: all pairs by one product, changed in place, exponential, product.
Errors are those of some rows, relative to the largest number of the exact result, which is made of differences in
float64 NumPy. Memory is the peak beyond arrays given and returned. What does not fit is shown as "-".
"""

import argparse
import statistics
import sys
from pathlib import Path

import numpy as np

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

import gpu
import record
import timing

import cuflash

DIMENSIONS = 3
CHECKED_ROWS = 64
FAR = 10  # sides of the cube that holds the points


# Points as queries and keys -----------------------------------------------------------------------------------------
#
# NumPy's functions hand CuPy's arrays on to CuPy, so the same lines serve both.


def half_squares(x):
    """|x|^2 / 2 of each point."""
    return (x * x).sum(axis=1) / 2


def lifted(x, y, extra=0.0):
    """Queries and keys with products ``extra_j - |x_i - y_j|^2 / 2 + |x_i|^2 / 2``."""
    return (
        np.concatenate([x, np.ones_like(x[:, :1])], axis=1),
        np.concatenate([y, (extra - half_squares(y))[:, None]], axis=1),
    )


def centred(x, y):
    """Both, moved to where the mean of y is 0."""
    centre = y.mean(axis=0)
    return x - centre, y - centre


def regression(x, points, targets, width):
    """Means of targets (points, columns), weighted by a Gaussian of some width around each x."""
    q, k = lifted(*centred(x, points))
    return cuflash.forward(q, k, targets, scale=width**-2)


def step(x, y, g, b, epsilon):
    """One step of Sinkhorn's: the potential f of x, given the potential g and the weights b of y."""
    x, y = centred(x, y)
    q, k = lifted(x, y, g + epsilon * np.log(b))
    _, lse = cuflash.forward(q, k, np.zeros_like(k[:, :1]), scale=1 / epsilon, return_lse=True)
    return half_squares(x) - epsilon * lse


def sinkhorn(x, y, a, b, epsilon, iterations):
    """Potentials f, g of two clouds with weights a, b after some steps either way."""
    g = np.zeros_like(b)
    for _ in range(iterations):
        f = step(x, y, g, b, epsilon)
        g = step(y, x, f, a, epsilon)
    return f, g


def transport(x, y, g, a, b, epsilon):
    """The dual ``sum a f + sum b g``, f = `step` of g, and its gradients with respect to x, y and g.

    Once g has converged these are the gradients of the cost of transport. That of g is b less the weights that the plan
    brings to y: 0 then.
    """
    x, y = centred(x, y)
    q, k = lifted(x, y, g + epsilon * np.log(b))
    (out, lse), pullback = cuflash.vjp(q, k, np.zeros_like(k[:, :1]), scale=1 / epsilon, return_lse=True)
    dq, dk, _ = pullback(np.zeros_like(out), dlse=-epsilon * a)
    value = a @ (half_squares(x) - epsilon * lse) + b @ g
    dextra = dk[:, -1]
    return value, a[:, None] * x + dq[:, :-1], dk[:, :-1] - dextra[:, None] * y, b + dextra


# The same with all pairs in memory ----------------------------------------------------------------------------------


def pairs(x, y, scale, extra=0.0):
    """scale (extra_j - |x_i - y_j|^2 / 2)."""
    products = scale * x @ y.T
    products -= scale * half_squares(x)[:, None]
    products += scale * (extra - half_squares(y))
    return products


def naive_regression(x, points, targets, width):
    """`regression`."""
    weights = pairs(*centred(x, points), width**-2)
    np.exp(weights, out=weights)
    return weights @ targets / weights.sum(axis=1, keepdims=True)


def naive_plan(x, y, g, b, epsilon):
    """Weights of y for each x, their sums, and f."""
    weights = pairs(x, y, 1 / epsilon, g + epsilon * np.log(b))
    largest = weights.max(axis=1)
    weights -= largest[:, None]
    np.exp(weights, out=weights)
    total = weights.sum(axis=1)
    return weights, total, -epsilon * (largest + np.log(total))


def naive_step(x, y, g, b, epsilon):
    """`step`."""
    return naive_plan(*centred(x, y), g, b, epsilon)[2]


def naive_transport(x, y, g, a, b, epsilon):
    """`transport`."""
    x, y = centred(x, y)
    weights, total, f = naive_plan(x, y, g, b, epsilon)
    weights *= (a / total)[:, None]
    return a @ f + b @ g, *gradients(x, y, a, b, weights)


def gradients(x, y, a, b, plan):
    """Of the dual with respect to x, y and g, from what the plan brings from each x to each y."""
    arriving = plan.sum(axis=0)
    return a[:, None] * x - plan @ y, arriving[:, None] * y - plan.T @ x, b - arriving


# The same by differences, on few rows -------------------------------------------------------------------------------


def differences(x, y):
    """-|x_i - y_j|^2 / 2 without cancellation."""
    return sum((x[:, None, d] - y[:, d]) ** 2 for d in range(x.shape[1])) / -2


def exact_regression(x, points, targets, width):
    """`regression`, in the arrays' dtype."""
    weights = np.exp(differences(x, points) * width**-2)
    return weights @ targets / weights.sum(axis=1, keepdims=True)


def exact_plan(x, y, g, b, epsilon):
    """Weights of y for each x, whose sum is 1, and f."""
    scores = (differences(x, y) + g) / epsilon + np.log(b)
    largest = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=1, keepdims=True)
    return weights / total, -epsilon * (largest + np.log(total))[:, 0]


def exact_transport(x, y, g, a, b, epsilon):
    """`transport`."""
    weights, f = exact_plan(x, y, g, b, epsilon)
    return a @ f + b @ g, *gradients(x, y, a, b, a[:, None] * weights)


# What is measured ---------------------------------------------------------------------------------------------------


def draw(size, dtype, xp, columns):
    """Arrays of two clouds: x and points (size, 3) in a cube, targets that wave, y that x is to be brought to."""
    rng = np.random.default_rng(0)
    x, points, noise = rng.random((size, DIMENSIONS)), rng.random((size, DIMENSIONS)), rng.normal(size=(size, columns))
    targets = np.sin(points.sum(axis=1)[:, None] * np.arange(1, columns + 1)) + 0.1 * noise
    return [xp.asarray(array.astype(dtype)) for array in (x, points, targets, points**2)]


class Regression:
    """Targets at new points."""

    name = "regression"
    functions = {"cuflash": regression, "naive": naive_regression}

    def __init__(self, size, dtype, xp, options):
        x, points, targets, _ = draw(size, dtype, xp, options.columns)
        self.length = options.width or 12**-0.5 * size ** (-1 / (DIMENSIONS + 4))  # Scott's rule
        self.arguments = x, points, targets, self.length

    def error(self, function):
        """Largest error of a function's results on some rows."""
        rows = some(self.arguments[0])
        x, points, targets, width = doubles(self.arguments)
        return worst([function(*self.arguments)[rows]], [exact_regression(x[rows], points, targets, width)])


class Step:
    """A step of Sinkhorn's."""

    name = "sinkhorn step"
    functions = {"cuflash": step, "naive": naive_step}

    def __init__(self, size, dtype, xp, options):
        x, _, _, y = draw(size, dtype, xp, 1)
        self.a = self.b = xp.full(size, 1 / size, dtype)
        _, g = sinkhorn(x, y, self.a, self.b, options.epsilon, 2)
        self.length = options.epsilon**0.5
        self.arguments = x, y, g, self.b, options.epsilon

    def error(self, function):
        """Largest error of a function's results on some rows."""
        rows = some(self.arguments[0])
        x, y, g, b, epsilon = doubles(self.arguments)
        return worst([function(*self.arguments)[rows]], [exact_plan(x[rows], y, g, b, epsilon)[1]])


class Gradient(Step):
    """A step, and the gradients of the dual."""

    name = "step, gradient"
    functions = {"cuflash": transport, "naive": naive_transport}

    def __init__(self, size, dtype, xp, options):
        super().__init__(size, dtype, xp, options)
        *arrays, b, epsilon = self.arguments
        self.arguments = *arrays, self.a, b, epsilon

    def error(self, function):
        """Largest error on some rows; to gradients of y and g all rows add, so there the others weigh nothing."""
        rows = some(self.a)
        x, y, g, a, b, epsilon = doubles(self.arguments)
        exact = exact_transport(x[rows], y, g, a[rows], b, epsilon)
        given = list(self.arguments)
        given[3] = np.zeros_like(self.a)
        given[3][rows] = self.a[rows]
        value, dx, dy, dg = function(*given)
        moved = function(*self.arguments)[1]
        return worst([value, dx[rows], dy, dg, moved[rows]], [*exact, exact[1]])


USES = Regression, Step, Gradient


def some(x):
    """Which rows are checked: every n-th."""
    return slice(0, None, max(1, len(x) // CHECKED_ROWS))


def doubles(arguments):
    """Arrays and numbers in float64, on the host."""
    return [np.float64(x.get() if hasattr(x, "get") else x) for x in arguments]


def worst(found, exact):
    """Largest error, relative to the largest number of each result; NaN where one is."""
    results = zip(doubles(found), exact, strict=True)
    return float(np.max([np.abs(ours - wanted).max() / np.abs(wanted).max() for ours, wanted in results]))


def largest_error(use, dtype):
    """What is allowed: some roundoffs of the largest scores, see Cancellation."""
    x, y = centred(*doubles(use.arguments[:2]))
    reach = max(half_squares(x).max(), half_squares(y).max())
    return 16 * np.finfo(dtype).eps * (1 + reach / use.length**2)


def measure(use, names, xp, rounds):
    """Milliseconds, bytes beyond what is given and returned, and errors, each by the name of what fits the memory."""
    timer = timing.WallTimer() if xp is np else timing.EventTimer()
    calls, extra, errors = {}, {}, {}
    for name in names:
        function = use.functions[name]
        try:
            errors[name] = use.error(function)
            extra[name], _ = timing.extra_bytes(lambda function=function: function(*use.arguments), xp.__name__)
            calls[name] = lambda function=function: function(*use.arguments)
        except MemoryError:  # CuPy's OutOfMemoryError too
            if name == "cuflash":
                raise
    taken = timing.interleave(timer, calls, rounds=rounds, launches=1, warmup=0 if xp is np else 2)
    return {name: statistics.median(each) for name, each in taken.items()}, extra, errors


def cancellation(size, xp, options):
    """Errors of regression in float32: by differences, by products about the mean, about an origin far away."""
    use = Regression(size, np.float32, xp, options)
    x, points, targets, width = use.arguments
    rows = some(x)
    given = doubles([x[rows], points, targets])
    exact = exact_regression(*given, width)
    host = [array.astype(np.float32) for array in given]
    about_mean = use.error(regression)
    use.arguments = x + FAR, points + FAR, targets, width
    far_away = use.error(lambda x, y, targets, width: cuflash.forward(*lifted(x, y), targets, scale=width**-2))
    return worst([exact_regression(*host, width)], [exact]), about_mean, far_away


# What is shown ------------------------------------------------------------------------------------------------------

COLUMNS = {
    "use": "<14", "dtype": "<7", "points": ">9", "cuflash ms": ">11", "naive ms": ">11", "naive/cuflash": ">13",
    "cuflash MB": ">11", "naive MB": ">11", "error": ">8", "naive error": ">11",
}  # fmt: skip


def line(cells):
    """Cells, aligned."""
    return "  ".join(format(cell, form) for cell, form in zip(cells, COLUMNS.values(), strict=True))


def shown(row):
    """A row as one line."""

    def both(field, form, unit=1):
        return [format(row[field][name] / unit, form) if name in row[field] else "-" for name in ("cuflash", "naive")]

    ratio = f"{row['ms']['naive'] / row['ms']['cuflash']:.2f}" if "naive" in row["ms"] else "-"
    figures = *both("ms", ",.2f"), ratio, *both("extra_bytes", ",.1f", 1e6), *both("error", ".1e")
    return line([row["use"], row["dtype"], f"{row['points']:,}", *figures])


def plot(rows, path):
    """Draw time and memory of each use against the number of points; colours are told apart in grey and by all eyes."""
    from matplotlib.figure import Figure

    colours = {"cuflash": "#0072B2", "naive": "#E69F00"}
    sizes = sorted({row["points"] for row in rows})
    styles = {"float32": ("-", "o"), "float64": ("--", "s")}
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    grid = figure.subplots(2, len(USES), sharex=True, sharey="row")
    for column, use in zip(grid.T, USES, strict=True):
        column[0].set_title(use.name)
        for axes, (figures, unit) in zip(column, (("ms", 1), ("extra_bytes", 1e6)), strict=True):
            for name, colour in colours.items():
                for dtype, (stroke, mark) in styles.items():
                    points = [(row["points"], max(row[figures][name] / unit, 1e-6)) for row in rows  # 0: no logarithm
                              if (row["use"], row["dtype"]) == (use.name, dtype) and name in row[figures]]  # fmt: skip
                    if points:
                        label = f"{name}, {dtype}"
                        axes.plot(*zip(*points, strict=True), stroke, marker=mark, color=colour, label=label)
            axes.set(xscale="log", yscale="log")
            axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
            axes.minorticks_off()
            axes.grid(True, which="major", color="0.9")
        column[1].set_xlabel("points")
    grid[0, 0].set_ylabel("milliseconds")
    grid[1, 0].set_ylabel("MB beyond what is given and returned")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)


def parse(arguments):
    """Options of the command line, lists split."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, help="default: 100,000, on the CPU 4,096")
    parser.add_argument("--naive", help="sizes with naive beside; default: 8192,16384,32768, on the CPU 1024,2048")
    parser.add_argument("--dtype", default="float32,float64")
    parser.add_argument("--columns", type=int, default=1, help="of targets in regression")
    parser.add_argument("--width", type=float, help="of the Gaussian; default: Scott's rule")
    parser.add_argument("--epsilon", type=float, default=0.01, help="of transport in a cube of side 1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plot", metavar="FILE", help="picture to draw; needs matplotlib")
    parser.add_argument("--json", metavar="FILE", help="record to merge the rows into")
    parser.add_argument("--numpy", action="store_true", help="on the CPU")
    options = parser.parse_args(arguments)
    if options.points is None:
        options.points = 4096 if options.numpy else 100_000
    if options.naive is None:
        options.naive = "1024,2048" if options.numpy else "8192,16384,32768"
    options.naive = [int(size) for size in options.naive.split(",") if size]
    options.dtype = options.dtype.split(",")
    if not {*options.dtype} <= {"float32", "float64"}:
        parser.error(f"--dtype is {','.join(options.dtype)}; wanted float32, float64 or both, by commas")
    return options


def main(arguments=None):
    """Print the table; 1 where an error of ours is larger than cancellation explains."""
    options = parse(arguments)
    xp = gpu.array_library("science", options.numpy)
    print(f"{DIMENSIONS} dimensions, columns of targets: {options.columns}, epsilon {options.epsilon}, {xp.__name__}")
    print(line(COLUMNS))
    rows, wrong = [], []
    for kind in USES:
        for dtype in options.dtype:
            for size in sorted({*options.naive, options.points}):
                use = kind(size, dtype, xp, options)
                names = ("cuflash", "naive") if size in options.naive else ("cuflash",)
                ms, extra, errors = measure(use, names, xp, options.rounds)
                what = {"use": use.name, "dtype": dtype, "points": size, "library": xp.__name__}
                rows.append(record.stamped(what | {"ms": ms, "extra_bytes": extra, "error": errors}))
                print(shown(rows[-1]), flush=True)
                if not errors["cuflash"] <= largest_error(use, dtype):
                    wrong.append(f"{use.name} in {dtype} of {size:,} points")
    if "float32" in options.dtype:
        by_differences, about_mean, far_away = cancellation(options.points, xp, options)
        print(
            f"regression of {options.points:,} points in float32: error {by_differences:.1e} by differences, "
            f"{about_mean:.1e} by products about the mean, {far_away:.1e} about an origin {FAR} sides of the cube away"
        )
    if options.json:
        record.add(options.json, "science", rows)
    if options.plot:
        plot(rows, options.plot)
    print(f"WRONG: {', '.join(wrong)}" if wrong else "every error of cuflash is within what cancellation explains")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
