"""README's figures and the pictures are what the record gives; a changed digit is noticed."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "bench"))

import record
import report

from cuflash import roofline

README = """Mean 1.00<!--forward sm90 best mean--> of 9<!--forward sm90 best cells--> cells, CuPy 1<!--cupy-->.

<!-- table forward -->
<!-- end -->

int8 is 9.99<!--int8 1x2048 times--> times as fast, of 0<!--fuzz examples--> problems 7<!--fuzz failures--> fail.

<!-- table decode -->

| old |

<!-- end -->
"""


def square(what, head_dim, mask, length, tflops, ratios, dtype="bfloat16", engine="sm90", **changes):
    """A row of the grid of heads x head_dim = 2,048 and 16,384 tokens."""
    heads = 2048 // head_dim
    facts = [what, engine, dtype, head_dim, head_dim, mask, length, length, 16384 // length, heads, heads]
    measured = {"tflops": tflops, "ms": 1.0, "rounds": {"ours": [1.0] * 5}, "ratios": ratios, "contenders": ratios}
    return record.case_row(record.Case(*facts), **measured) | changes


def single(length, key_heads, us, gbps, ratios, **changes):
    """A row of decode."""
    case = record.Case("decode", "portable", "bfloat16", 128, 128, "causal", 1, length, 1, 32, key_heads, graph=True)
    measured = {"ms": us / 1e3, "gbps": gbps, "ratios": ratios, "contenders": ratios, "batch_invariant": False}
    return record.case_row(case, **measured) | changes


@pytest.fixture
def taken():
    """A small record."""
    cases = [
        square("forward", 64, "causal", 1024, 99.96, {"cudnn": 4.0, "fa3": 2.0}),
        square("forward", 64, "full", 2048, 512.4, {"cudnn": 0.5, "fa3": None}),
        square("forward", 64, "full", 1024, 500, {"cudnn": 1.257}),
        square("forward", 64, "full", 4096, 999, {}),  # timed alone
        square("forward", 64, "full", 8192, 999, {"cudnn": 9.0}, key_heads=4),
        square("forward", 64, "causal", 1024, 200, {"fa2": 1.5}, engine="portable"),
        single(1024, 8, 8.55, 490.5, {"cudnn": 0.887}),
        single(1024, 8, 9.5, 450, {"cudnn": None}, page_size=16),
        single(2048, 8, 1234, 3977.4, {"cudnn": 0.981}),
        single(2048, 8, 617, 3000, {}, kv_format="int8"),
        single(2048, 8, 5, 9000, {}, batch_invariant=True),
        single(2048, 32, 50, 4000, {}),
        single(2048, 8, 66.6, 3700, {"read": 0.874, "fa3": 1.5}, shortest=100),
        single(2048, 8, 70, 3600, {"read": 0.836}, shortest=100, page_size=16),
    ]
    fuzz = [{"examples": 40_000, "failures": 0}, {"examples": 2_224, "failures": 0}]
    sanitizer = [{"tool": "racecheck", "kernel": name, "errors": n} for name, n in (("forward", 1), ("backward", 46))]
    host = [{"what": "forward", "engine": "sm90", "us": 28.8, "contenders": {"fa2": 19.96}}]
    versions = {"cupy-cuda13x": "14.2.0", "nvrtc": "13.0", "cores": 16}
    parts = {"cases": cases, "fuzz": fuzz, "sanitizer": sanitizer, "host": host, "claims": [], "science": []}
    return {"device": "TOY", "versions": versions, **parts}


@pytest.fixture
def files(taken, tmp_path):
    """Arguments that name a record and a README in a folder of their own, both written."""
    record.write(tmp_path / "toy.json", taken)
    (tmp_path / "README.md").write_text(README)
    return ["--record", str(tmp_path / "toy.json"), "--readme", str(tmp_path / "README.md")]


@pytest.fixture
def undrawn(monkeypatch):
    """A picture is its mark alone, so that none needs matplotlib."""
    monkeypatch.setattr(report, "draw", lambda picture, path: path.write_text(report.mark(picture)))


def test_readme_shows_the_record(capsys):
    assert report.main(["--check"]) == 0, "python -m bench.report: " + capsys.readouterr().out


def test_tables(taken):
    found = report.tables(taken)
    assert found["forward"].splitlines() == [
        "| head_dim | mask | 1,024 | 2,048 |",
        "|---|---|---|---|",
        "| 64 | full | 500 (1.26) | 512 (0.50) |",
        "| 64 | causal | 100.0 (2.00) | - |",
    ]
    assert found["decode"].splitlines() == [
        "| sequences x keys | 8 key heads | pages of 16 | 32 key heads | pages of 16 |",
        "|---|---|---|---|---|",
        "| 1 x 1,024 | 8.6 us, 490 GB/s (0.89) | 450 | - | - |",
        "| 1 x 2,048 | 1,234 us, 3,977 GB/s (0.98) | - | 50.0 us, 4,000 GB/s | - |",
    ]
    assert set(found) == {"forward", "decode"}


def test_claims_of_the_gpu_are_a_table(taken):
    taken["claims"] = [
        {"library": library, "says": "It is fast", "measured": f"{library} 2.00x", "verdict": "holds"}
        for library in ("numpy", "cupy")
    ]
    assert report.tables(taken)["claims"].splitlines() == [
        "| claim | measured | verdict |",
        "|---|---|---|",
        "| It is fast | cupy 2.00x | holds |",
    ]


def test_points_in_space_on_the_gpu_are_a_table(taken):
    row = {"use": "regression", "dtype": "float32", "points": 8192, "library": "cupy"}
    both = {"ms": {"cuflash": 0.29, "naive": 1.27}, "extra_bytes": {"cuflash": 5e5, "naive": 2.687e8}}
    alone = {"points": 100_000, "ms": {"cuflash": 21.76}, "extra_bytes": {"cuflash": 5.6e6}}
    taken["science"] = [row | both, row | alone, row | both | {"library": "numpy"}]
    assert report.tables(taken)["science"].splitlines()[2:] == [
        "| regression | float32 | 8,192 | 0.29 (1.27) | 0.5 (268.7) |",
        "| regression | float32 | 100,000 | 21.76 (-) | 5.6 (-) |",
    ]


def test_both_passes_of_a_precise_dtype_share_a_line(taken):
    taken["cases"] = [
        square("backward", 128, "full", 8192, 42.46, {}, "float64", "portable"),
        square("forward", 128, "full", 8192, 124, {"efficient": 2.9, "naive": 7.9}, "float32"),
        square("forward", 128, "full", 8192, 255, {}, "float32", precision="tf32"),
        square("forward", 128, "full", 4096, 110, {}, "float32"),
        square("backward", 128, "full", 8192, 60, {}, "float32"),
    ]
    assert report.tables(taken)["precise"].splitlines()[2:] == [
        "| float32 | sm90 | 128 | full | 4,096 | 110 | - |",
        "| float32 | sm90 | 128 | full | 8,192 | 124 (2.90) | 60.0 |",
        "| float32, precision tf32 | sm90 | 128 | full | 8,192 | 255 | - |",
        "| float64 | portable | 128 | full | 8,192 | - | 42.5 |",
    ]
    drawn = report.pictures(taken)
    assert list(drawn) == ["forward-float32"], "a single length is not drawn"
    panels = drawn["forward-float32"][-1]["head_dim 128, full"]
    assert panels["cuflash"] == [(4096, 110), (8192, 124)] and panels["tf32"] == [(8192, 255)] and "naive" in panels


def test_numbers(taken):
    found = report.numbers(taken)
    wanted = {"forward sm90 best mean": "1.08", "forward sm90 cudnn worst": "0.50", "forward sm90 rounds": "5"}
    wanted |= {"forward portable fa2 mean": "1.50", "int8 1x2048 us": "617", "int8 1x2048 times": "2.00"}
    wanted |= {"host sm90": "29", "host sm90 fa2": "20", "racecheck": "47", "racecheck backward": "46"}
    wanted |= {"cupy": "14.2", "nvrtc": "13.0", "cores": "16", "fuzz examples": "42,224", "fuzz failures": "0"}
    wanted |= {"ragged 1x2048 us": "67", "ragged 1x2048 rate": "3,700", "ragged 1x2048 share": "87"}
    wanted |= {"ragged 1x2048 paged 16 share": "84"}
    assert wanted.items() <= found.items()


def test_a_changed_digit_is_noticed(files, undrawn, capsys):
    assert report.main([*files, "--check"]) == 1
    assert report.main(files) == 0 and report.main([*files, "--check"]) == 0
    readme = Path(files[-1])
    text = readme.read_text()
    assert text.startswith("Mean 1.08<!--forward sm90 best mean--> of 3<!--")
    assert "times as fast, of 42,224<!--fuzz examples--> problems 0<!--" in text and "old" not in text
    for right, wrong in (("1.08<!--", "1.09<!--"), ("512 (0.50)", "513 (0.50)"), ("3,977", "3,978")):
        readme.write_text(text.replace(right, wrong))
        assert report.main([*files, "--check"]) == 1 and right in capsys.readouterr().out
    report.main(files)
    assert readme.read_text() == text


def test_a_picture_of_other_points_is_noticed(files, taken, tmp_path, undrawn, capsys):
    assert report.main(files) == 0
    taken["cases"][1]["ratios"]["cudnn"] = 0.501  # what is written is the same
    record.write(tmp_path / "toy.json", taken)
    capsys.readouterr()
    assert report.main([*files, "--check"]) == 1
    assert capsys.readouterr().out == "toy-forward.png is not there, or shows other figures\n"


def test_a_picture_that_readme_shows_has_to_be_there(files, tmp_path, undrawn, capsys):
    assert report.main(files) == 0
    (tmp_path / "toy-decode.png").unlink()
    assert report.main([*files, "--check"]) == 0
    (tmp_path / "README.md").write_text((tmp_path / "README.md").read_text() + "![decode](toy-decode.png)\n")
    capsys.readouterr()
    assert report.main([*files, "--check"]) == 1
    assert capsys.readouterr().out == "toy-decode.png is not there, or shows other figures\n"


def test_memory_is_counted_by_the_roofline_and_measured(taken):
    measured = {"extra_bytes": 16_000_000, "contender_bytes": {"naive": 32_000_000}}
    taken["cases"] = [
        square("forward", 128, "full", 1024, 500, {"naive": 9.0}, **measured),
        square("forward", 128, "causal", 2048, 500, {"naive": 9.0}, **measured),  # the same memory, drawn once
        square("backward", 128, "full", 1024, 500, {"naive": 9.0}, **measured),
    ]
    title, upright, panels, facts = report.pictures(taken)["memory"]
    assert (title, upright, facts) == ("memory a sequence, bfloat16, 16 heads of 128, TOY", "GB", {"log": True})
    one = roofline.Problem("forward", 1024, heads=16, dtype="bfloat16")
    whole = sum(one.nbytes.values()) / 1e9
    lines = panels["forward, head_dim 128"]
    assert dict(lines["counted"])[1024] == roofline.flash(one).memory / 1e9 == pytest.approx(whole)
    assert dict(lines["naive counted"])[1024] == roofline.naive(one).memory / 1e9
    assert [x for x, _ in lines["counted"]] == [512, 1024, 2048, 4096, 8192, 16384, 32768]
    assert lines["measured"] == [(1024, pytest.approx(whole + 0.001))]
    assert lines["naive measured"] == [(1024, pytest.approx(whole + 0.002))]
    lines = panels["backward, head_dim 128"]
    given = 2 * whole - one.nbytes["lse"] / 1e9
    assert lines["measured"] == [(1024, pytest.approx(given + 0.001))] and "naive measured" not in lines


def test_measured_rates_stand_under_the_roof_of_a_known_device(taken):
    assert "roofline" not in report.pictures(taken)
    taken["device"] = "NVIDIA H200"
    title, upright, panels, facts = report.pictures(taken)["roofline"]
    assert title == "roofline, NVIDIA H200" and facts["log"] and "memory traffic" in facts["across"]
    (lines,) = panels.values()
    assert list(lines) == ["roof", "naive at most", "forward", "decode"]
    assert [len(lines[name]) for name in ("forward", "decode", "naive at most")] == [3, 3, 3]
    problem = roofline.Problem("decode", 2048, heads=32, key_heads=8, dtype="bfloat16", causal=True)
    rate = roofline.flash(problem).flops / 1234e-6 / 1e12  # the row of 1,234 us
    assert (pytest.approx(roofline.flash(problem).intensity), pytest.approx(rate)) in lines["decode"]
    (low, start), (ridge, peak), (_, end) = lines["roof"]
    assert peak == end == pytest.approx(989.4) and ridge == pytest.approx(989.4 / 4.8)
    assert start == pytest.approx(low * 4.8) and low < min(x for x, _ in lines["decode"])
    for x, y in lines["naive at most"]:
        assert y <= min(x * 4.8, 989.4) * (1 + 1e-9)


def test_pictures_alone_leave_readme_as_it_is(files, tmp_path, undrawn, capsys):
    assert report.main([*files, "--pictures"]) == 0
    assert (tmp_path / "README.md").read_text() == README and (tmp_path / "toy-decode.png").is_file()


@pytest.mark.parametrize("command", [["bench/report.py"], ["-m", "bench.report"]], ids=" ".join)
def test_both_ways_to_call_it_work(command):
    done = subprocess.run([sys.executable, *command, "--help"], cwd=report.ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "README's figures" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "text",
    ["9<!--forward sm90 fa9 mean-->", "nine<!--cupy-->", "<!-- table forward -->\n", "<!-- table x -->\n<!-- end -->"],
)
def test_a_place_that_cannot_be_filled_is_an_error(text, taken):
    with pytest.raises(ValueError, match="^README.md: '"):
        report.filled(text, taken)


def test_pictures_are_small_and_carry_their_mark(files, taken, tmp_path):
    pytest.importorskip("matplotlib")
    taken["device"] = "NVIDIA H200"
    taken["cases"].append(square("forward", 128, "full", 1024, 500, {"naive": 9.0}, extra_bytes=0))
    record.write(tmp_path / "toy.json", taken)
    assert report.main(files) == 0
    for name, picture in report.pictures(taken).items():
        drawn = (tmp_path / f"toy-{name}.png").read_bytes()
        assert drawn.startswith(b"\x89PNG") and len(drawn) < 100_000 and report.mark(picture).encode() in drawn
    names = sorted(path.stem for path in tmp_path.glob("*.png"))
    assert names == ["toy-decode", "toy-forward", "toy-memory", "toy-roofline"]
    assert report.main([*files, "--check"]) == 0
