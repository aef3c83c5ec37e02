"""The main job, ``python -m cuflash``."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cuflash
from bench import record
from cuflash import __main__ as job

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--engine", "numpy", "--length", "80", "--heads", "2", "--head-dim", "16"]


@pytest.fixture
def damage(monkeypatch):
    """Let what a function returns, or one part of it, be multiplied by a factor."""

    def install(name, part, factor):
        whole = getattr(cuflash, name)

        def damaged(*arguments, **keywords):
            results = list(whole(*arguments, **keywords))
            results[part] = results[part] * np.float32(factor)
            return tuple(results)

        monkeypatch.setattr(cuflash, name, damaged)

    return install


def test_runs_as_a_command():
    command = [sys.executable, "-m", "cuflash", *SMALL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every result is inside its error bound" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("more", ["", "--causal", "--dtype float64", "--dtype bfloat16 --causal"])
def test_prints_one_aligned_table_and_passes(capsys, more):
    assert job.main(SMALL + more.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("problem"))
    head, *rows = lines[start : start + 4]
    assert [row.split()[0] for row in rows] == ["forward", "backward", "decode"]
    end = head.index("error/bound") + len("error/bound")
    for row in rows:
        assert row[end] == " " and 0 < float(row[:end].split()[-1]) <= 1


def test_says_what_it_found(capsys):
    job.main(SMALL)
    found = capsys.readouterr().out.split("\n\n")[0]
    for name in ("cuflash", "python", "numpy", "kernels", "device"):
        assert f"\n{name} " in f"\n{found}"


def test_rows_have_the_form_of_the_record(tmp_path):
    job.main([*SMALL, "--json", str(tmp_path / "rows.json")])
    written = json.loads((tmp_path / "rows.json").read_text())
    assert {"device", "versions", "cases"} <= set(written)
    form = [*record.Case.__dataclass_fields__, *record.MEASURED, "sources", "time"]
    for row in written["cases"]:
        assert set(form) <= set(row)
        assert row["ms"] > 0 and row["contenders"]["naive"] > 0


def test_flops_are_those_of_the_record():
    for function in job.FUNCTIONS[:2]:
        for causal in (False, True):
            ours = job.Case(function, np, "float32", 3, 64, 16, causal)
            mask = "causal" if causal else "full"
            theirs = record.Case(function, "numpy", "float32", 16, 16, mask, 64, 64, 1, 3, 3)
            assert ours.flops == theirs.flops


def test_sources_are_those_of_the_record(tmp_path):
    for folder in ("cuflash", "kernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    assert job.sources() == record.sources(tmp_path)


@pytest.mark.parametrize("checked_pairs", [job.CHECKED_PAIRS, 0], ids=["all rows", "some rows"])
@pytest.mark.parametrize("factor", [1.01, np.nan])
@pytest.mark.parametrize(
    ("name", "part"), [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1), ("backward", 2), ("decode", 0)]
)
def test_an_error_outside_the_bound_fails(monkeypatch, capsys, damage, name, part, factor, checked_pairs):
    monkeypatch.setattr(job, "CHECKED_PAIRS", checked_pairs)
    damage(name, part, factor)
    assert job.main([*SMALL, "--causal"]) == 1
    assert f"outside the error bound: {name}" in capsys.readouterr().out


def test_some_rows_pass_too(monkeypatch):
    monkeypatch.setattr(job, "CHECKED_PAIRS", 0)
    assert len(job.checked_rows(job.case_of("forward", np, job.parse(SMALL)))) == job.CHECKED_ROWS
    assert job.main(SMALL) == job.main([*SMALL, "--causal"]) == 0


def test_naive_attention_stays_out_where_its_scores_are_too_large(monkeypatch, capsys):
    monkeypatch.setattr(job, "LARGEST_NAIVE", 2 * 80 * 80)
    assert job.main(SMALL) == 0
    printed = capsys.readouterr().out
    assert "forward: naive attention did not run: its scores take" in printed
    assert "decode: naive" not in printed


def test_a_function_without_a_kernel_runs_on_the_cpu_and_says_so(monkeypatch, capsys):
    whole = job.measure

    def measure(case, engine=None):
        if case.xp is not np:
            raise NotImplementedError
        return whole(case, engine)

    monkeypatch.setattr(job, "gpu", lambda: (object(), ""))
    monkeypatch.setattr(job, "describe", lambda cupy, reason: [])
    monkeypatch.setattr(job, "measure", measure)
    assert job.main(["--length", "80", "--heads", "2"]) == 0
    assert "no GPU kernel for backward in float32 yet: on the CPU, smaller" in capsys.readouterr().out


def test_an_engine_that_is_not_here_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(job, "gpu", lambda: (None, "CuPy is not installed"))
    assert job.main(["--engine", "portable"]) == 1
    assert capsys.readouterr().err == "--engine portable: CuPy is not installed\n"


@pytest.mark.parametrize("arguments", [["--length", "0"], ["--heads", "-1"], ["--dtype", "int8"], ["--engine", "tpu"]])
def test_bad_options_are_refused(arguments):
    with pytest.raises(SystemExit, match="2"):
        job.parse(arguments)
