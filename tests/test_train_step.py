"""bench/train_step.py: both steps agree, and what does not fit is said; so is that there is no GPU, by others too."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import gpu
import train_step

from cuflash import reference


def test_steps_agree(capsys):
    assert train_step.main("--numpy --batch 2 --heads 2 --length 70 --head-dim 16 --rounds 1".split()) == 0
    said = capsys.readouterr().out
    assert "flash" in said and "naive" in said and "apart" in said


def test_a_wrong_gradient_is_noticed(monkeypatch):
    monkeypatch.setattr(train_step, "flash", lambda *arrays: train_step.naive(arrays[0] * 2, *arrays[1:]))
    assert train_step.main("--numpy --batch 1 --heads 1 --length 40 --head-dim 8 --rounds 1".split()) == 1


def test_what_does_not_fit_is_shown(monkeypatch, capsys):
    def full(*arrays):
        raise MemoryError

    full.__name__ = "naive"
    monkeypatch.setattr(train_step, "naive", full)
    assert train_step.main("--numpy --batch 1 --heads 1 --length 40 --head-dim 8 --rounds 1".split()) == 0
    assert "out of memory" in capsys.readouterr().out


def test_naive_is_attention():
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, 2, 30, 8)) for _ in range(4)]
    out, *grads = train_step.naive(*arrays)
    dout = arrays.pop()
    assert np.allclose(out, reference.forward(*arrays, causal=True)[0])
    for grad, wanted in zip(grads, reference.backward(dout, *arrays, causal=True), strict=True):
        assert grad == pytest.approx(wanted)


@pytest.mark.parametrize("name", ["train_step", "serving", "science", "gpt2"])
def test_without_a_gpu_it_says_so(name, monkeypatch):
    program = importlib.import_module(name)
    monkeypatch.setattr(gpu, "find_gpu", lambda: (None, "CuPy finds no GPU"))
    with pytest.raises(SystemExit, match=f"bench/{name}.py: CuPy finds no GPU; --numpy needs no GPU"):
        program.main([])
