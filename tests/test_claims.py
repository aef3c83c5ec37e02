"""bench/claims.py: what is found is what is said, and verdicts are right."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import claims
import contenders
import gpt2
import record

from cuflash import reference

FEW = {
    "heads": 4, "head_dim": 16, "lengths": (32, 64, 128), "same": 40, "most": 64, "cached": (32,), "split": (64,),
    "tuned": {"heads": 2, "head_dim": 16, "length": 128, "budget": 6e5},
    "gpt2": gpt2.TINY | {"length": 16}, "gpt2_steps": 3, "gpt2_lengths": (16, 32),
}  # fmt: skip


@pytest.fixture
def few(monkeypatch):
    """Sizes of all claims on the CPU are small, and so is the model."""
    monkeypatch.setattr(claims, "ON_CPU", claims.ON_CPU | FEW)


@pytest.fixture
def machine(few):
    return claims.Machine(np)


# Verdicts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ((2, 3, 4), "holds"),
        ((0.5, 3, 4), "does not hold; it does from 2,048 on"),
        ((2, 0.5, 4), "does not hold; it does from 4,096 on"),
        ((2, 3, 0.5), "does not hold"),
        ((2, 3, float("nan")), "does not hold"),
    ],
)
def test_a_verdict_is_about_all_lengths(ratios, verdict):
    figures = dict(zip((1024, 2048, 4096), ratios, strict=True))
    found = claims.by_length("x", "it is so", figures, lambda ratio: ratio > 1, lambda ratio: f"{ratio:.1f}x")
    assert found.verdict == verdict
    assert found.measured.startswith(f"1,024: {ratios[0]:.1f}x, 2,048: ")


def test_naive_attention_that_runs_out_of_memory(machine):
    def figures(length, naive):
        return {"ms": {"cuflash": 2.0, "naive": naive and 3.0}, "held": {"cuflash": 1000 * length, "naive": naive}}

    machine.__dict__["forwards"] = {1: figures(1, 10**9), 2: figures(2, 4 * 10**9), 4: figures(4, None)}
    (found,) = claims.memory(machine)
    assert found.holds and found.measured.endswith(
        "takes 2.00 and 4.00 times as much; naive attention runs out of memory at 4"
    )
    assert "at 2 0.002 MB against 4 GB" in found.measured
    (found,) = claims.time(machine)
    assert found.holds and found.measured == "1: 1.50x, 2: 1.50x"
    machine.forwards[2]["held"]["cuflash"] = 3000
    assert not next(claims.memory(machine)).holds


# What is measured ---------------------------------------------------------------------------------------------------


def test_naive_attention_in_float32_is_attention():
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 1, 2, 30, 8), dtype=np.float32).astype(np.float16)
    out, pullback = claims.naive_float32(q, k, v, contenders.causal_bias(q))
    grads = [np.empty_like(q) for _ in range(3)]
    pullback(dout, grads)
    assert abs(out - reference.forward(q, k, v, causal=True)[0]).max() < 5e-3
    for grad, wanted in zip(grads, reference.backward(dout, q, k, v, causal=True), strict=True):
        assert abs(grad - wanted).max() < 1e-2


def test_how_much_naive_attention_holds(machine):
    tuned = SimpleNamespace(heads=2, head_dim=8, length=2048)
    assert claims.matrices_held(machine, tuned, claims.naive_float32) == pytest.approx(7, rel=0.15)
    assert claims.matrices_held(machine, tuned, gpt2.naive) == pytest.approx(2, rel=0.15)


@pytest.mark.parametrize(
    ("limits", "verdicts"),
    [
        ({"flash": 8, "naive_float32": 0, "naive": 1.5}, ["holds", "does not hold; it does from 512 on"]),
        ({"flash": 2, "naive_float32": 0, "naive": 0}, ["does not hold", "does not hold"]),
        ({"flash": 4, "naive_float32": 1, "naive": 9}, ["does not hold", "does not hold"]),
    ],
)
def test_what_fits(machine, monkeypatch, limits, verdicts):
    """A step fits if it is of so many sequences of 256; one twice as long counts as two, or with all scores as four."""

    def fits(machine, tuned, length, batch, attention):
        size = length / 256
        return batch * (size if attention is claims.flash else size**2) <= limits[attention.__name__]

    machine.sizes.tuned = FEW["tuned"] | {"length": 256}
    monkeypatch.setattr(claims, "fits", fits)
    monkeypatch.setattr(claims, "matrices_held", lambda *arguments: 7.0)
    assert [found.verdict for found in claims.tuning(machine)] == verdicts


def test_the_pool_has_the_budget_and_gets_its_limit_back(monkeypatch):
    limits, freed = [123], []
    pool = SimpleNamespace(
        get_limit=lambda: limits[-1],
        set_limit=lambda size: limits.append(size),
        free_all_blocks=lambda: freed.append(1),
    )
    machine = claims.Machine(np)
    machine.xp = SimpleNamespace(get_default_memory_pool=lambda: pool)
    tuned = SimpleNamespace(budget=8e9)
    monkeypatch.setattr(claims, "train_arrays", lambda *arguments: [limits[-1]])

    def train(attention, limit):
        assert limit == 8_000_000_000 and freed
        if attention:
            raise MemoryError

    monkeypatch.setattr(claims, "train", train)
    assert claims.fits(machine, tuned, 1, 1, 0) and limits == [123, 8e9, 123]
    assert not claims.fits(machine, tuned, 1, 1, 1) and limits[-1] == 123


# The command line ---------------------------------------------------------------------------------------------------


def test_all_claims_on_the_cpu(few, tmp_path, capsys):
    path = tmp_path / "x.json"
    assert claims.main(["--numpy", "--json", str(path)]) == 0
    said = capsys.readouterr().out
    rows = json.loads(path.read_text())["claims"]
    names = ["same", "time", "memory", "causal", "recompute", "phases", "tuning float32", "tuning float16"]
    assert [row["claim"] for row in rows] == [*names, "gpt2 loss", "gpt2 speed"]
    for row in rows:
        assert f"{row['claim']}: {row['verdict']}\n    {row['says']}\n    {row['measured']}\n" in said
        assert row["library"] == "numpy" and row["sources"] == record.sources()
    assert rows[0]["holds"] and rows[-2]["holds"] and "split: needs a GPU" in said
    assert "products 0.5078" in said and "takes 1.25 of the FLOPs" in said


def test_another_run_replaces_a_row(few, tmp_path):
    path = tmp_path / "x.json"
    record.add(path, "claims", [{"claim": "same", "library": library, "holds": None} for library in ("numpy", "cupy")])
    assert claims.main(["same", "--numpy", "--json", str(path)]) == 0
    assert [row["holds"] for row in record.read(path)["claims"]] == [True, None]


def test_a_wrong_answer_is_noticed(few, monkeypatch, capsys):
    vjp = claims.cuflash.vjp
    monkeypatch.setattr(claims.cuflash, "vjp", lambda *arrays, **given: vjp(*arrays, **given, scale=0.251))
    assert claims.main(["same", "--numpy"]) == 1
    assert "same: does not hold\n" in capsys.readouterr().out


def test_a_claim_that_cannot_be_tried_stops_no_other(few, monkeypatch, capsys):
    def broken(machine):
        raise ArithmeticError("no figures")
        yield

    monkeypatch.setitem(claims.CLAIMS, "time", broken)
    assert claims.main(["time", "phases", "--numpy"]) == 1
    said = capsys.readouterr().out
    assert "time: FAILED: ArithmeticError: no figures" in said and "phases: " in said


def test_an_unknown_claim_is_refused(capsys):
    with pytest.raises(SystemExit):
        claims.main(["speed"])
    assert "NAME is speed; wanted one of same, time" in capsys.readouterr().err


def test_on_a_gpu(gpu, monkeypatch, capsys):
    small = FEW | {"tuned": FEW["tuned"] | {"budget": 4e9}, "gpt2": FEW["gpt2"] | {"dtype": "float16", "width": 128}}
    monkeypatch.setattr(claims, "ON_GPU", claims.ON_GPU | small)
    assert claims.main([]) == 0
    said = capsys.readouterr().out
    assert "cupy" in said and "split: " in said and "gpt2 speed: " in said
