"""bench/science.py: regression is the plain formula, Sinkhorn converges, gradients are quotients of differences."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import science

SMALL = "--points 150 --naive 90 --rounds 1".split()


def clouds(rows=30, columns=40):
    """Two clouds of points around different places, and their weights."""
    rng = np.random.default_rng(0)
    a, b = (weights / weights.sum() for weights in (rng.random(rows) + 0.5, rng.random(columns) + 0.5))
    return rng.random((rows, 3)), rng.random((columns, 3)) ** 2, a, b


def quotients(function, array, step=1e-5):
    """The gradient of a function of an array by central differences."""
    found = np.zeros_like(array)
    for place in np.ndindex(array.shape):
        moved = []
        for sign in (1, -1):
            other = array.copy()
            other[place] += sign * step
            moved.append(function(other))
        found[place] = (moved[0] - moved[1]) / (2 * step)
    return found


@pytest.mark.parametrize("dtype, far", [("float32", 1e-5), ("float64", 1e-13)])
def test_regression_is_the_plain_formula(dtype, far):
    x, points, _, _ = clouds()
    targets = np.stack([points.sum(1), points[:, 0] - 2], axis=1)
    kernel = np.exp(-((x[:, None] - points) ** 2).sum(-1) / (2 * 0.2**2))
    wanted = (kernel[:, :, None] * targets).sum(1) / kernel.sum(1)[:, None]
    given = [array.astype(dtype) for array in (x, points, targets)]
    for regression in (science.regression, science.naive_regression):
        found = regression(*given, 0.2)
        assert found.dtype == dtype
        assert abs(found - wanted).max() < far


def test_points_far_from_the_origin_are_as_good():
    x, points, _, _ = clouds()
    moved = [(array + 1000.0).astype(np.float32) for array in (x, points)]
    targets = points[:, :1].astype(np.float32)
    wanted = science.exact_regression(*science.doubles([*moved, targets]), 0.1)
    assert abs(science.regression(*moved, targets, 0.1) - wanted).max() < 1e-5


def test_a_step_is_the_plain_formula():
    x, y, _, b = clouds()
    g = np.linspace(-1, 1, len(b))
    cost = ((x[:, None] - y) ** 2).sum(-1) / 2
    wanted = -0.05 * np.log((b * np.exp((g - cost) / 0.05)).sum(1))
    for step in (science.step, science.naive_step):
        assert abs(step(x, y, g, b, 0.05) - wanted).max() < 1e-12


def test_sinkhorn_brings_all_weights_where_they_belong():
    x, y, a, b = clouds()
    f, g = science.sinkhorn(x, y, a, b, 0.05, 200)
    cost = ((x[:, None] - y) ** 2).sum(-1) / 2
    plan = a[:, None] * b * np.exp((f[:, None] + g - cost) / 0.05)
    assert abs(plan.sum(0) - b).max() < 1e-12
    assert abs(plan.sum(1) - a).max() < 1e-9
    assert abs(science.transport(x, y, g, a, b, 0.05)[3]).max() < 1e-9


@pytest.mark.parametrize("transport", [science.transport, science.naive_transport])
def test_gradients_are_quotients_of_differences(transport):
    x, y, a, b = clouds(7, 9)
    g = np.random.default_rng(1).normal(size=len(b)) / 10
    value, dx, dy, dg = transport(x, y, g, a, b, 0.1)
    assert value == pytest.approx(a @ science.step(x, y, g, b, 0.1) + b @ g)
    assert abs(dx - quotients(lambda x: transport(x, y, g, a, b, 0.1)[0], x)).max() < 1e-8
    assert abs(dy - quotients(lambda y: transport(x, y, g, a, b, 0.1)[0], y)).max() < 1e-8
    assert abs(dg - quotients(lambda g: transport(x, y, g, a, b, 0.1)[0], g)).max() < 1e-8


def test_after_convergence_they_are_those_of_the_cost():
    x, y, a, b = clouds(5, 6)

    def cost(x):
        """The dual at potentials of its own."""
        f, g = science.sinkhorn(x, y, a, b, 0.2, 60)
        return a @ f + b @ g

    _, g = science.sinkhorn(x, y, a, b, 0.2, 60)
    assert abs(science.transport(x, y, g, a, b, 0.2)[1] - quotients(cost, x)).max() < 1e-8


def test_the_table(capsys):
    assert science.main(["--numpy", *SMALL]) == 0
    said = capsys.readouterr().out.splitlines()
    names = ["use", *(use.name for use in science.USES for _ in range(4))]
    assert [line[:14].strip() for line in said[1:14]] == names
    assert len({len(line) for line in said[1:14]}) == 1
    assert said[2].split()[-1] != "-" and said[3].split()[-1] == "-"  # naive beside 90 points, not beside 150
    assert "by differences" in said[14] and "every error" in said[15]


def test_cancellation_shows_far_from_the_origin():
    options = science.parse(["--numpy"])
    by_differences, about_mean, far_away = science.cancellation(300, np, options)
    assert by_differences < 1e-6 and about_mean < 5e-6 < far_away


@pytest.mark.parametrize("use", science.USES)
def test_a_mistake_is_noticed(use, monkeypatch, capsys):
    forward = science.cuflash.forward
    monkeypatch.setattr(
        science.cuflash, "forward", lambda q, k, v, scale, **given: forward(q, k, v, scale=1.01 * scale, **given)
    )
    monkeypatch.setattr(science.cuflash._api, "forward", science.cuflash.forward)
    monkeypatch.setattr(science, "USES", (use,))
    assert science.main(["--numpy", *SMALL]) == 1
    assert f"WRONG: {use.name} in float32 of 90 points" in capsys.readouterr().out


def test_what_does_not_fit_is_shown(monkeypatch, capsys):
    def full(*arguments):
        raise MemoryError

    monkeypatch.setitem(science.Regression.functions, "naive", full)
    monkeypatch.setattr(science, "USES", (science.Regression,))
    assert science.main(["--numpy", *SMALL]) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[4] == "-"


def test_rows_go_into_the_record(tmp_path, monkeypatch):
    monkeypatch.setattr(science, "USES", (science.Regression,))
    assert science.main(["--numpy", *SMALL, "--json", str(tmp_path / "record.json")]) == 0
    rows = science.record.read(tmp_path / "record.json")["science"]
    assert {(row["use"], row["library"]) for row in rows} == {("regression", "numpy")}
    assert all(row[field]["cuflash"] > 0 for row in rows for field in ("ms", "extra_bytes", "error"))


def test_nan_is_no_small_error():
    ones = np.ones(3)
    assert science.worst([ones, ones / 2], [ones, ones]) == 0.5
    assert not science.worst([np.array([1, np.nan, 1]), ones], [ones, ones]) <= 1


def test_the_plot(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[plot]'")
    path = tmp_path / "science.png"
    assert science.main(["--numpy", *SMALL, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_on_a_gpu(gpu, capsys):
    assert science.main("--points 3000 --naive 1000 --rounds 1".split()) == 0
    assert "cupy" in capsys.readouterr().out
