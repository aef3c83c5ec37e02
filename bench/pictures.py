"""Pictures of figures: curves by length, memory by length and rooflines in a grid of panels, a look for each line.

A picture is ``(title, label of the upright axis, panels)``, panels are ``{"column, row": {name of a line: points}}``.
A fourth part says what is not as in curves by length from zero: ``{"log": True}`` for upright axes that are
logarithmic, ``{"across": label}`` for others along which not lengths lie.
"""

import hashlib
import io
import json

# Label, colour, stroke and marker of a line. Colours are Okabe and Ito's and Tol's, which differ for colour-blind
# readers too; in grey strokes and markers differ. Only lines of one picture have to.
LOOKS = {
    "cuflash": ("cuflash", "#0072B2", "-", "o"),
    "portable": ("cuflash, portable engine", "#56B4E9", (0, (8, 2)), "P"),
    "tf32": ("cuflash, precision tf32", "#332288", (0, (8, 2, 1, 2, 1, 2)), "*"),
    "cudnn": ("cuDNN", "#E69F00", "--", "s"),
    "fa2": ("FlashAttention-2", "#CC79A7", (0, (3, 1, 1, 1, 1, 1)), "v"),
    "fa3": ("FlashAttention-3", "#009E73", "-.", "^"),
    "fa4": ("FlashAttention-4", "#D55E00", ":", "D"),
    "efficient": ("torch, memory-efficient", "#CC79A7", (0, (5, 1, 1, 1)), "<"),
    "math": ("torch, math", "#AA4499", (0, (1, 1)), "1"),
    "flex": ("FlexAttention", "#882255", (0, (6, 2)), "h"),
    "flashinfer": ("FlashInfer", "#44AA99", (0, (4, 2, 1, 2)), "p"),
    "jax": ("JAX", "#999933", (0, (2, 1)), ">"),
    "naive": ("naive", "#000000", (0, (1, 3)), "x"),
    "append": ("cuflash, appending", "#332288", (0, (1, 2)), "*"),
    "pages": ("cuflash, pages of 16", "#56B4E9", "-.", "P"),
    "int8": ("cuflash, int8 caches", "#009E73", ":", "^"),
    "e4m3": ("cuflash, E4M3 caches", "#D55E00", (0, (5, 1, 1, 1)), "D"),
    "counted": ("cuflash, counted", "#0072B2", "-", ""),
    "naive counted": ("naive, counted", "#000000", "--", ""),
    "measured": ("cuflash, measured", "#0072B2", "none", "o"),
    "naive measured": ("naive, measured", "#000000", "none", "x"),
    "roof": ("what the device can do", "#000000", "-", ""),
    "forward": ("forward, measured", "#0072B2", "none", "o"),
    "backward": ("backward, measured", "#D55E00", "none", "s"),
    "decode": ("decode, measured", "#009E73", "none", "^"),
    "naive at most": ("naive at most, forward and backward", "#999999", "none", "+"),
}
OTHER = ("0.4", (0, (2, 2)), "+")


# What is drawn --------------------------------------------------------------------------------------------------


def curves(rows, figure, title, name):
    """Panels of rows, points by length, ``title`` a format of a row; a contender's figure is ours by its ratio."""
    panels = {}
    for row in rows:
        shown = {name(row): row[figure]} | {other: row[figure] / x for other, x in row["ratios"].items() if x}
        for line, value in shown.items():
            panels.setdefault(title.format(**row), {}).setdefault(line, {}).setdefault(row["length"], value)
    return {panel: {line: sorted(x.items()) for line, x in lines.items()} for panel, lines in panels.items()}


def kind_of(row):
    """The line that a row's own figure belongs to."""
    if row["what"] == "decode":
        size = row["page_size"]
        return row["kv_format"] or (("pages" if size == 16 else f"cuflash, pages of {size}") if size else "cuflash")
    return row["precision"] or ("portable" if row["engine"] == "portable" else "cuflash")


def of_rows(rows, device):
    """A picture of the rows of one run, which are of one function and one engine."""
    what = rows[0]["what"]
    if what == "decode":
        title, figure, upright = "{key_heads} key heads, batch {batch}", "gbps", "GB/s of keys and values"
    else:
        title, figure, upright = "head_dim {head_dim}, {mask}", "tflops", "TFLOP/s"
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    title += " {dtype}" if len(dtypes) > 1 else ""
    return f"{what}, {' and '.join(dtypes)}, {device}", upright, curves(rows, figure, title, kind_of)


# Drawing --------------------------------------------------------------------------------------------------------


def mark(picture):
    """Hash of what a picture shows, of six digits of each number: versions of Python add up differently."""
    rounded = json.loads(json.dumps(picture), parse_float=lambda number: f"{float(number):.6g}")
    return hashlib.sha256(json.dumps(rounded).encode()).hexdigest()


def draw(picture, path):
    """Draw a picture as a PNG file of few colours, which keeps it small."""
    from matplotlib.figure import Figure
    from PIL import Image, PngImagePlugin

    title, upright, panels, *more = picture
    facts = more[0] if more else {}
    columns, rows = (list(dict.fromkeys(name.split(", ")[side] for name in panels)) for side in (0, 1))
    figure = Figure(figsize=(max(3.2 * len(columns), 6.8) + 0.4, 2.6 * max(len(rows), 1.4) + 0.9), layout="constrained")
    figure.suptitle(title, fontsize=11)
    grid = figure.subplots(len(rows), len(columns), sharex=True, sharey=True, squeeze=False)
    entries = {}
    for name, lines in panels.items():
        column, row = name.split(", ")
        axes = grid[rows.index(row), columns.index(column)]
        for contender, points in lines.items():
            label, colour, stroke, marker = LOOKS.get(contender, (contender, *OTHER))
            width, front = (2, 3) if contender == "cuflash" else (1.3, 2)
            (entries[label],) = axes.plot(
                *zip(*points, strict=True), color=colour, ls=stroke, marker=marker, ms=5, lw=width, zorder=front
            )
        axes.set_title(name, fontsize=9)
        axes.set_xlabel(facts.get("across", "length, k = 1,024"), fontsize=8)
        axes.set_ylabel(upright, fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
        axes.label_outer()
    for axes in grid.flat:
        axes.set_visible(bool(axes.lines))
    scale(grid[0, 0], panels, facts)
    place = {"loc": "outside lower center", "ncols": max(len(columns), 2) + 1}
    figure.legend(entries.values(), entries, frameon=False, fontsize=9, **place)
    drawn, source = io.BytesIO(), PngImagePlugin.PngInfo()
    figure.savefig(drawn, dpi=120)
    source.add_text("Source", mark(picture))
    few = Image.open(drawn).convert("RGB").quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(path, optimize=True, pnginfo=source)


def scale(axes, panels, facts):
    """Scales of axes that all panels share: powers of two along lengths, from zero up unless it is logarithmic."""
    if "across" in facts:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,g}")
    else:
        lengths = sorted({x for lines in panels.values() for points in lines.values() for x, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{x:,}" if x % 1024 else f"{x // 1024}k" for x in lengths])
        axes.minorticks_off()
    if facts.get("log"):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,g}")
