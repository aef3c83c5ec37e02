"""Pictures of the record: curves by length in a grid of panels, a look for each library.

A picture is ``(title, label of the upright axis, panels)``, panels are ``{"column, row": {name of a line: points}}``.
"""

import hashlib
import io
import json

# Label, colour, stroke and marker of a line. Colours differ for colour-blind readers too, strokes and markers in grey.
LOOKS = {
    "cuflash": ("cuflash", "#0072B2", "-", "o"),
    "portable": ("cuflash, portable engine", "#56B4E9", (0, (8, 2)), "P"),
    "tf32": ("cuflash, precision tf32", "#332288", (0, (8, 2, 1, 2, 1, 2)), "*"),
    "cudnn": ("cuDNN", "#E69F00", "--", "s"),
    "fa2": ("FlashAttention-2", "#CC79A7", (0, (3, 1, 1, 1, 1, 1)), "v"),
    "fa3": ("FlashAttention-3", "#009E73", "-.", "^"),
    "fa4": ("FlashAttention-4", "#D55E00", ":", "D"),
    "efficient": ("torch, memory-efficient", "#CC79A7", (0, (5, 1, 1, 1)), "<"),
    "naive": ("naive", "#000000", (0, (1, 3)), "x"),
    "pages": ("cuflash, pages of 16", "#56B4E9", "-.", "P"),
    "int8": ("cuflash, int8 caches", "#009E73", ":", "^"),
    "e4m3": ("cuflash, E4M3 caches", "#D55E00", (0, (5, 1, 1, 1)), "D"),
}
OTHER = ("0.4", (0, (2, 2)), "+")


def curves(rows, figure, title, name):
    """Panels of rows, points by length, ``title`` a format of a row; a contender's figure is ours by its ratio."""
    panels = {}
    for row in rows:
        shown = {name(row): row[figure]} | {other: row[figure] / x for other, x in row["ratios"].items() if x}
        for line, value in shown.items():
            panels.setdefault(title.format(**row), {}).setdefault(line, {}).setdefault(row["length"], value)
    return {panel: {line: sorted(x.items()) for line, x in lines.items()} for panel, lines in panels.items()}


def mark(picture):
    """Hash of what a picture shows."""
    return hashlib.sha256(json.dumps(picture).encode()).hexdigest()


def draw(picture, path):
    """Draw a picture as a PNG file of few colours, which keeps it small."""
    from matplotlib.figure import Figure
    from PIL import Image, PngImagePlugin

    title, upright, panels = picture
    columns, rows = (list(dict.fromkeys(name.split(", ")[side] for name in panels)) for side in (0, 1))
    figure = Figure(figsize=(max(3.2 * len(columns), 6.8) + 0.4, 2.6 * len(rows) + 0.9), layout="constrained")
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
        axes.set_xlabel("length, k = 1,024", fontsize=8)
        axes.set_ylabel(upright, fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
        axes.label_outer()
    for axes in grid.flat:
        axes.set_visible(bool(axes.lines))
    lengths = sorted({x for lines in panels.values() for points in lines.values() for x, _ in points})
    grid[0, 0].set_xscale("log", base=2)
    grid[0, 0].set_xticks(lengths, [f"{x:,}" if x % 1024 else f"{x // 1024}k" for x in lengths])
    grid[0, 0].minorticks_off()
    grid[0, 0].yaxis.set_major_formatter("{x:,.0f}")
    grid[0, 0].set_ylim(bottom=0)
    place = {"loc": "outside lower center", "ncols": max(len(columns), 2) + 1}
    figure.legend(entries.values(), entries, frameon=False, fontsize=9, **place)
    drawn, source = io.BytesIO(), PngImagePlugin.PngInfo()
    figure.savefig(drawn, dpi=120)
    source.add_text("Source", mark(picture))
    few = Image.open(drawn).convert("RGB").quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(path, optimize=True, pnginfo=source)
