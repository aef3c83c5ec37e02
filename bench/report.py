"""README's figures and the pictures, made from the record and from nothing else.

    python -m bench.report              # tables and numbers in README.md, pictures beside the record (matplotlib)
    python -m bench.report --check      # 1 where one of them is not what the record gives; needs no matplotlib
    python -m bench.report --pictures --record FILE     # pictures of another machine's record, beside it, and no more

README.md says where figures stand. A table lies between two lines, ``<!-- table NAME -->`` and ``<!-- end -->``; a
number in a sentence stands right before ``<!--NAME-->``. ``tables`` and ``numbers`` say what each name gives. A picture
carries the hash of the points in it, so that one drawn from other figures is noticed; those that README.md shows have
to be there. ``python bench/report.py`` is the same.
"""

import argparse
import difflib
import re
import sys
from pathlib import Path
from statistics import geometric_mean

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # for `python bench/report.py`
sys.path.insert(1, str(Path(__file__).resolve().parent))  # for `python -m bench.report`

from pictures import curves, draw, kind_of, mark
from record import RESULTS, ROOT, read

from cuflash import roofline

ENGINES = ("sm90", "portable")
PASSES = ("forward", "backward")
MASKS = ("full", "causal")
PRECISE = ("float32", "float64")
TOKENS, WIDTH = 16384, 2048  # batch x length and heads x head_dim of the tables' cells, as bench/run.py has them

TABLE = re.compile(r"(?<=<!-- table )(\w+) -->\n(?:(?!<!-- ).)*(?=<!-- end -->)", re.DOTALL)
NUMBER = re.compile(r"\d(?:[\d.,]*\d)?(?=<!--(\w[^>]*)-->)")
PLACE = re.compile(r"<!--(?: table )?(\w[^>]*?) ?-->")


# Rows of the record ---------------------------------------------------------------------------------------------


def chosen(record, **facts):
    """The cases that have these facts."""
    return [row for row in record["cases"] if all(row.get(name) == value for name, value in facts.items())]


def like(row, *names):
    """These facts of a row."""
    return {name: row[name] for name in names}


def squares(record, what, engine, dtype="bfloat16"):
    """Cases WIDTH wide with as many queries as keys, by head_dim, mask and length; 16-bit ones beside contenders."""
    precise = dtype in PRECISE
    rows = [
        row
        for row in chosen(record, what=what, engine=engine, dtype=dtype)
        if row["mask"] in MASKS and row["queries"] == row["length"] and row["key_heads"] == row["heads"]
        and row["heads"] * row["head_dim"] == WIDTH
        and (precise or row["contenders"] and row["batch"] * row["length"] == TOKENS)
    ]  # fmt: skip
    return sorted(rows, key=lambda row: (row["head_dim"], MASKS.index(row["mask"]), row["length"]))


def single_rows(record, **facts):
    """Decode of one row a sequence, 32 heads of 128 in bfloat16, split as the plan has it."""
    usual = {"dtype": "bfloat16", "head_dim": 128, "heads": 32, "queries": 1, "splits": None, "batch_invariant": False}
    return chosen(record, what="decode", **usual | {"shortest": None} | facts)


def best(row):
    """The best contender's time over ours, None without one."""
    return min(filter(None, row["ratios"].values()), default=None)


# Tables ---------------------------------------------------------------------------------------------------------


def markdown(head, rows):
    """Lines of a table."""
    lines = [f"| {' | '.join(map(str, line))} |\n" for line in (head, *rows)]
    return "".join([lines[0], "|---" * len(head) + "|\n", *lines[1:]])


def beside(text, row):
    """The text and, in brackets, how the row stands to the best contender."""
    return f"{text} ({best(row):.2f})" if best(row) else text


def rate(row):
    """A cell: TFLOP/s."""
    return beside(f"{row['tflops']:{'.0f' if row['tflops'] >= 100 else '.1f'}}", row) if row else "-"


def time(row):
    """A cell: microseconds and GB/s."""
    us = row["ms"] * 1e3 if row else 0
    return beside(f"{us:{',.1f' if us < 100 else ',.0f'}} us, {row['gbps']:,.0f} GB/s", row) if row else "-"


def square_table(rows):
    """Rates by length, a line a head_dim and mask."""
    lengths = sorted({row["length"] for row in rows})
    cells = {(row["head_dim"], row["mask"], row["length"]): row for row in rows}
    kinds = dict.fromkeys(kind[:2] for kind in cells)
    body = [[*kind, *(rate(cells.get((*kind, length))) for length in lengths)] for kind in kinds]
    return markdown(["head_dim", "mask", *(f"{length:,}" for length in lengths)], body)


def decode_table(rows):
    """For each number of key heads, time and rate by batch and length, then the rate from pages."""
    cells = {(row["batch"], row["length"], row["key_heads"], row["page_size"]): row for row in rows}
    key_heads = sorted({row["key_heads"] for row in rows})
    head, body = ["sequences x keys"], []
    for heads in key_heads:
        head += [f"{heads} key heads", "pages of 16"]
    for batch, length in dict.fromkeys(kind[:2] for kind in cells):
        body.append([f"{batch} x {length:,}"])
        for heads in key_heads:
            paged = cells.get((batch, length, heads, 16))
            body[-1] += [time(cells.get((batch, length, heads, None))), f"{paged['gbps']:,.0f}" if paged else "-"]
    return markdown(head, body)


def precise_table(record):
    """float32 and float64 on the GPU: rates of both passes side by side."""
    cells = {}
    for dtype, engine, what in ((a, b, c) for a in PRECISE for b in ENGINES for c in PASSES):
        for row in squares(record, what, engine, dtype):
            name = dtype + (f", precision {row['precision']}" if row["precision"] else "")
            kind = name, engine, row["head_dim"], row["mask"], f"{row['length']:,}"
            cells.setdefault(kind, {})[what] = row
    order = sorted(cells, key=lambda kind: (kind[0], kind[2], MASKS.index(kind[3]), kind[1]))
    body = [[*kind, *(rate(cells[kind].get(what)) for what in PASSES)] for kind in order]
    return body and markdown(["dtype", "engine", "head_dim", "mask", "length", *PASSES], body)


def on_gpu(rows):
    """Those of CuPy's arrays."""
    return [row for row in rows if row["library"] == "cupy"]


def claims_table(record):
    """What became of each claim on the GPU."""
    body = [[row["says"], row["measured"], row["verdict"]] for row in on_gpu(record["claims"])]
    return body and markdown(["claim", "measured", "verdict"], body)


def science_table(record):
    """Points in space on the GPU: time and memory, of naive in brackets."""

    def both(figures, form, unit=1):
        ours, naive = (format(figures[name] / unit, form) if name in figures else "-" for name in ("cuflash", "naive"))
        return f"{ours} ({naive})"

    body = [
        [row["use"], row["dtype"], f"{row['points']:,}", both(row["ms"], ",.2f"), both(row["extra_bytes"], ",.1f", 1e6)]
        for row in on_gpu(record["science"])
    ]
    return body and markdown(["use", "dtype", "points", "ms", "MB beyond arrays"], body)


def tables(record):
    """README's tables by name, those the record has rows for."""
    found = {what: (rows := squares(record, what, "sm90")) and square_table(rows) for what in PASSES}
    found["decode"] = (rows := single_rows(record, kv_format=None)) and decode_table(rows)
    found["precise"] = precise_table(record)
    found["claims"] = claims_table(record)
    found["science"] = science_table(record)
    return {name: table for name, table in found.items() if table}


# Numbers in sentences -------------------------------------------------------------------------------------------


def numbers(record):
    """README's single numbers by name, as text."""
    parts = versions, ratios, windows, caches, ragged, on_cpu, host, safety
    return {name: str(text) for part in parts for name, text in part(record)}


def versions(record):
    """``cupy``, ``nvrtc``, and ``cores`` of the host."""
    for name, version in record["versions"].items():
        yield name.partition("-")[0], version.rpartition(".")[0] if name.startswith("cupy-") else version


def ratios(record):
    """``forward sm90 best mean``, ``worst``, ``cells``: ratios to a contender or the best; ``forward sm90 rounds``."""
    for what, engine in ((what, engine) for what in PASSES for engine in ENGINES):
        rows = squares(record, what, engine)
        names = dict.fromkeys(name for row in rows for name in row["ratios"])
        for name in (*names, *["best"] * bool(names)):
            values = [x for row in rows if (x := best(row) if name == "best" else row["ratios"].get(name))]
            if values:
                stem = f"{what} {engine} {name}"
                yield f"{stem} mean", f"{geometric_mean(values):.2f}"
                yield f"{stem} worst", f"{min(values):.2f}"
                yield f"{stem} cells", len(values)
        if rows:
            yield f"{what} {engine} rounds", min(len(row["rounds"]["ours"]) for row in rows)


def windows(record):
    """``window least``, ``window most``: percent of the causal rate that a window's is, of all head dims."""
    shares = []
    for row in chosen(record, what="forward", engine="sm90", mask="window"):
        same = like(row, "what", "engine", "dtype", "head_dim", "length", "batch", "heads", "key_heads")
        shares += [100 * row["tflops"] / causal["tflops"] for causal in chosen(record, mask="causal", **same)]
    if shares:
        yield from (("window least", f"{min(shares):.0f}"), ("window most", f"{max(shares):.0f}"))


def caches(record):
    """``int8 8x65536 us``, ``times``: microseconds from 8-bit caches of 8 key heads, the 16-bit time over that."""
    for row in single_rows(record, key_heads=8, page_size=None):
        for whole in single_rows(record, kv_format=None, **like(row, "batch", "length", "key_heads", "page_size")):
            stem = f"{row['kv_format']} {row['batch']}x{row['length']}"
            yield f"{stem} us", f"{row['ms'] * 1e3:,.0f}"
            yield f"{stem} times", f"{whole['ms'] / row['ms']:.2f}"


def ragged(record):
    """``ragged 64x65536 us``, ``rate``, ``share``: of drawn lengths, GB/s and percent of a plain read's.

    ``ragged 64x65536 paged 16 us`` from pages.
    """
    for row in record["cases"]:
        if row["what"] == "decode" and row.get("shortest") and row["ratios"].get("read"):
            stem = f"ragged {row['batch']}x{row['length']}" + (f" paged {row['page_size']}" if row["page_size"] else "")
            yield f"{stem} us", f"{row['ms'] * 1e3:,.0f}"
            yield f"{stem} rate", f"{row['gbps']:,.0f}"
            yield f"{stem} share", f"{100 * row['ratios']['read']:.0f}"


def on_cpu(record):
    """``numpy 4096 times``, ``MB``, ``naive GB``: naive time over ours, what each holds beyond its results."""
    for row in chosen(record, what="forward", engine="numpy", dtype="float32", head_dim=64, mask="full"):
        yield f"numpy {row['length']} times", f"{row['ratios']['naive']:.2f}"
        yield f"numpy {row['length']} MB", f"{row['extra_bytes'] / 1e6:.0f}"
        yield f"numpy {row['length']} naive GB", f"{row['contender_bytes']['naive'] / 1e9:.1f}"


def host(record):
    """``host sm90`` and, of a contender beside it, ``host sm90 fa2``: us of a cached call; ``host decode``."""
    for row in record["host"]:
        stem = "host decode" if row["what"] == "decode" else f"host {row['engine']}"
        for name, us in ({"": row["us"]} | row["contenders"]).items():
            yield f"{stem} {name}".strip(), f"{us:.0f}"


def safety(record):
    """``fuzz examples``, ``fuzz failures``; ``memcheck``, ``memcheck forward``: errors, of all kernels or of one."""
    for name in ("examples", "failures"):
        yield f"fuzz {name}", f"{sum(row[name] for row in record['fuzz']):,}"
    for row in record["sanitizer"]:
        yield f"{row['tool']} {row['kernel']}", row["errors"]
        yield row["tool"], sum(other["errors"] for other in record["sanitizer"] if other["tool"] == row["tool"])


def filled(text, record):
    """The text with its tables and numbers as the record gives them."""
    found = tables(record) | numbers(record)
    placed = TABLE.findall(text) + NUMBER.findall(text)
    for name in PLACE.findall(text):
        if name not in placed:
            raise ValueError(f"README.md: {name!r} stands behind no number, or its table has no end")
        if name not in found:
            raise ValueError(f"README.md: {name!r} has a place, and the record has nothing of that name")
    text = TABLE.sub(lambda place: f"{place[1]} -->\n\n{found[place[1]]}\n", text)
    return NUMBER.sub(lambda place: found[place[1]], text)


# Pictures -------------------------------------------------------------------------------------------------------


def pictures(record):
    """What is drawn, by name: title, label of the upright axis, panels (``column, row``: lines)."""
    found = {}
    for what, dtype in ((what, dtype) for dtype in ("bfloat16", *PRECISE) for what in PASSES):
        rows = squares(record, what, "sm90", dtype)
        rows += squares(record, what, "portable", dtype) if dtype in PRECISE or not rows else []
        rows = rows if len({row["length"] for row in rows}) > 1 else []  # a point is no curve
        title = "head_dim {head_dim}, {mask}"
        panels = curves(rows, "tflops", title, kind_of)
        found[what if dtype == "bfloat16" else f"{what}-{dtype}"] = f"{what}, {dtype}", "TFLOP/s", panels
    rows = sorted(single_rows(record), key=lambda row: (row["batch"], row["key_heads"]))
    rows = [row for row in rows if row["page_size"] in ((None,) if row["kv_format"] else (None, 16))]
    rows = [row for row in rows if len({x["length"] for x in rows if x["batch"] == row["batch"]}) > 1]
    title = "{key_heads} key heads, batch {batch}"
    panels = curves(rows, "gbps", title, kind_of)
    found["decode"] = "decode, one row a sequence, bfloat16, 32 heads of 128", "GB/s of keys and values", panels
    found["memory"] = "memory a sequence, bfloat16, 16 heads of 128", "GB", memory_panels(record), {"log": True}
    facts = {"across": "FLOP per byte of memory traffic, each array once", "log": True}
    found["roofline"] = "roofline", "TFLOP/s", roofline_panels(record), facts
    return {name: (f"{x[0]}, {record['device']}", *x[1:]) for name, x in found.items() if x[2]}


def problem_of(row, **changes):
    """A case as what ``cuflash.roofline`` counts."""
    row = row | changes
    sizes = like(row, "queries", "batch", "heads", "key_heads", "head_dim", "value_dim", "dtype")
    window = row["window"] and tuple(row["window"])
    return roofline.Problem(row["what"], row["length"], causal=row["mask"] == "causal", window=window, **sizes)


def memory_panels(record):
    """Bytes held at the worst moment, inputs and results among them, by length: counted and, as dots, measured."""
    panels = {}
    for what in PASSES:
        rows = [row for row in squares(record, what, "sm90") if row["head_dim"] == 128 and row["mask"] == "full"]
        if not rows:
            continue
        lines = {name: [] for name in ("counted", "naive counted", "measured", "naive measured")}
        for length in (2**n for n in range(9, 16)):
            problem = problem_of(rows[0], queries=length, length=length, batch=1)
            for name, cost in (("counted", roofline.flash(problem)), ("naive counted", roofline.naive(problem))):
                lines[name].append((length, cost.memory / 1e9))
        for row in rows:
            problem, size = problem_of(row), row["batch"] * 1e9
            given = sum(problem.nbytes.values())  # q, k, v, out, lse; gradients are as large as these without lse
            given += given - problem.nbytes["lse"] if what == "backward" else 0
            if row["extra_bytes"] is not None:
                lines["measured"].append((row["length"], (given + row["extra_bytes"]) / size))
            held = (row.get("contender_bytes") or {}).get("naive")
            if held is not None and what == "forward":  # in backward the weights are there before
                lines["naive measured"].append((row["length"], (given + held) / size))
        panels[f"{what}, head_dim 128"] = {name: points for name, points in lines.items() if points}
    return panels


def roofline_panels(record):
    """The device's roof; what was measured, by bytes that are counted; and where naive attention would be at best."""
    device = roofline.named(record["device"] or "")
    if device is None:
        return {}
    rows = [row for what in PASSES for row in squares(record, what, "sm90") or squares(record, what, "portable")]
    lines = {"roof": [], "naive at most": []}
    for row in rows + single_rows(record, kv_format=None, page_size=None):
        problem = problem_of(row)
        cost, naive = roofline.flash(problem), roofline.naive(problem)
        lines.setdefault(row["what"], []).append((cost.intensity, cost.flops / row["ms"] / 1e9))
        if row["what"] != "decode":
            lines["naive at most"].append((naive.intensity, naive.flops / naive.seconds(device) / 1e12))
    points = [x for found in lines.values() for x, _ in found]
    if points:
        peak, ridge = device.peak("bfloat16") / 1e12, device.peak("bfloat16") / device.bandwidth
        ends = min(points) / 2, ridge, max(max(points), ridge) * 2
        lines["roof"] = [(x, min(x / ridge, 1) * peak) for x in ends]
    return {f"{device.name}, bfloat16": lines} if points else {}



def main(argv=None):
    """Write README's figures and the pictures; with ``--check``, 1 where they are not what the record gives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where something differs")
    parser.add_argument("--record", type=Path, default=RESULTS / "h200.json", help="pictures go beside it")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--pictures", action="store_true", help="draw them, and leave README.md alone")
    options = parser.parse_args(argv)
    record, text = read(options.record), "" if options.pictures else options.readme.read_text()
    wanted = filled(text, record)
    changes = [*difflib.unified_diff(text.splitlines(), wanted.splitlines(), "README.md", "record", n=0, lineterm="")]
    shown = {options.record.with_name(f"{options.record.stem}-{name}.png"): x for name, x in pictures(record).items()}
    needed = {path: x for path, x in shown.items() if path.is_file() or path.name in text}
    stale = [path for path, x in needed.items() if not path.is_file() or mark(x).encode() not in path.read_bytes()]
    print(*changes, *(f"{path.name} is not there, or shows other figures" for path in stale), sep="\n")
    if options.check:
        return int(bool(changes or stale))
    if not options.pictures:
        options.readme.write_text(wanted)
    for path, picture in shown.items():
        draw(picture, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
