"""Costs and predictions against figures computed by hand, and the command that shows them."""

import math
import sys
from dataclasses import replace

import numpy as np
import pytest

import cuflash
from cuflash import __main__ as job
from cuflash import _roofline_main as command
from cuflash.roofline import DEVICES, FUNCTIONS, Device, Problem, flash, naive, named

# 30 scores. Bytes: q 48, k 40, v 20, out 24, lse 24.
TINY = Problem("forward", 5, queries=3, heads=2, key_heads=1, head_dim=4, value_dim=2)
TINY_BACKWARD = replace(TINY, function="backward")
LONG = Problem("forward", 8192, heads=32)  # q, k, v and out have 67,108,864 bytes each, a head's scores 134,217,728
GIB = 2**30


def facts(cost):
    return cost.flops, cost.nbytes, cost.streamed, cost.memory


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(job, "gpu", lambda: (None, "CuPy finds no GPU"))


@pytest.fixture
def numpy_for_gpu(monkeypatch):
    monkeypatch.setattr(job, "gpu", lambda: (np, ""))
    monkeypatch.setattr(job, "device", lambda library: "NVIDIA H200")
    monkeypatch.setattr(job, "REPEATS", 1)


# Counting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "wide", "expected"),
    [
        (TINY, False, (360, 240 + 132, 372, 132 + 120)),
        (TINY, True, (360, 480 + 132, 612, 132 + 240)),
        (TINY_BACKWARD, False, (720, 420 + 264, 684, 240 + 180)),
        (TINY_BACKWARD, True, (720, 720 + 264, 984, 240 + 420)),
        (replace(TINY, dtype="float32"), True, (360, 480 + 264, 744, 264 + 240)),
        (replace(TINY, function="decode", queries=1), False, (120, 80 + 84, 164, 84 + 40)),
        (replace(TINY, causal=True), False, (360, 240 + 132, 372, 132 + 120)),
        (replace(TINY, batch=3), False, (1080, 1116, 1116, 756)),
    ],
)
def test_naive_counts_what_one_counts_by_hand(problem, wide, expected):
    assert facts(naive(problem, float32_softmax=wide)) == expected


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (TINY, (360, 156, 216, 156)),  # both heads stream k and v
        (replace(TINY, causal=True), (288, 156, 216, 156)),  # 3 + 4 + 5 keys a head
        (replace(TINY, causal="top-left"), (144, 132, 168, 156)),  # 1 + 2 + 3 of them, two are never seen
        (replace(TINY, window=(1, 0)), (144, 144, 192, 156)),  # 2 each, the first key is never seen
        (replace(TINY, function="decode", queries=1), (120, 92, 92, 92)),  # heads that share keys stream them once
        (TINY_BACKWARD, (960, 288, 480, 288 + 144)),
        (Problem("forward", 256, head_dim=64), (16_777_216, 132_096, 197_632, 132_096)),  # two tiles
        (Problem("forward", 256, head_dim=64, causal=True), (8_421_376, 132_096, 164_864, 132_096)),
        (Problem("backward", 256, head_dim=64, causal=True), (21_053_440, 263_168, 492_544, 330_752)),
    ],
)
def test_flash_counts_what_one_counts_by_hand(problem, expected):
    assert facts(flash(problem)) == expected


def test_a_matrix_of_scores_has_the_size_that_is_told():
    def softmax(**changes):
        (launch,) = [x for x in naive(replace(LONG, **changes)).launches if "softmax" in x.what]
        assert launch.read == launch.written == ("float16",)
        return launch.nbytes / 2  # a read and a write

    assert softmax(heads=1, key_heads=1) == 134_217_728
    assert softmax() == 4_294_967_296
    assert softmax(heads=1, key_heads=1, keys=16384, queries=16384) == 512 * 2**20
    assert softmax(keys=16384, queries=16384) == 16 * GIB


def test_float32_softmax_of_gradients_holds_112_gib_of_scores():
    cost = naive(Problem("backward", 16384, heads=32), float32_softmax=True)
    assert cost.memory == 112 * GIB + 7 * GIB // 8  # q, k, v, dout and three gradients of 128 MiB


@pytest.mark.parametrize("function", FUNCTIONS[:2])
def test_naive_grows_with_the_square_and_flash_with_the_length(function):
    short, long = (Problem(function, keys, heads=32) for keys in (8192, 16384))
    assert flash(long).nbytes == 2 * flash(short).nbytes
    assert flash(long).memory == 2 * flash(short).memory
    assert 3.9 < naive(long).nbytes / naive(short).nbytes < 4
    assert 3.8 < naive(long).memory / naive(short).memory < 4
    assert 3.9 < flash(long).streamed / flash(short).streamed < 4


@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize("window", [None, (3, 2), (0, None), (9, 0)])
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (3, 11), (11, 3), (1, 5)])
def test_pairs_runs_and_rows_are_those_of_the_mask(queries, keys, causal, window):
    problem = Problem("forward", keys, queries=queries, batch=2, heads=3, causal=causal, window=window)
    offset = 0 if causal == "top-left" else keys - queries
    left, right = window or (None, None)
    left, right = 99 if left is None else left, 99 if right is None else right
    right = min(right, 0) if causal else right
    i, j = np.arange(queries)[:, None] + offset, np.arange(keys)
    seen = (i - left <= j) & (j <= i + right)
    assert problem.pairs == 6 * seen.sum()
    assert problem.run(0, queries) == seen.any(0).sum()
    for begin, end in ((0, keys), (0, 1), (keys // 2, keys)):
        assert problem.rows(begin, end) == seen[:, begin:end].any(1).sum()


# Predicting -----------------------------------------------------------------------------------------------------


def test_ceilings_are_those_of_the_data_sheets():
    h100 = DEVICES["h100"]
    assert (h100.memory, h100.bandwidth) == (80e9, 3.35e12)
    assert h100.peak("bfloat16") == h100.peak("float16") == pytest.approx(989.4e12)
    assert h100.peak("float32") == pytest.approx(164.9e12)
    assert h100.peak("float64") == pytest.approx(66.9e12)
    assert set(DEVICES) == {"h100", "h200", "a100", "b200", "rtx4090"}
    assert all("NVIDIA's" in device.source and "dense" in device.source for device in DEVICES.values())


@pytest.mark.parametrize(
    ("cost", "ms", "roof"),
    [
        (naive(LONG), 5.2085, "memory"),  # 17,448,304,640 bytes at 3.35 TB/s
        (flash(LONG), 1.1113, "compute"),  # 1,099,511,627,776 FLOPs at 989.4 TFLOP/s
        (flash(Problem("decode", 8192, heads=32)), 0.040070, "memory"),  # 134,234,240 bytes
        (flash(replace(LONG, dtype="float32")), 6.6678, "compute"),
        (flash(replace(LONG, dtype="float64")), 16.435, "compute"),
    ],
)
def test_times_on_an_h100(cost, ms, roof):
    assert 1e3 * cost.seconds(DEVICES["h100"]) == pytest.approx(ms, rel=1e-4)
    assert cost.roof(DEVICES["h100"]) == roof


def test_launches_of_naive_attention_wait_for_each_other():
    """FLOPs 240, 0 and 120, bytes 148, 120 and 104, at 2 a second: 120 s, 60 s, 60 s."""
    cost, toy = naive(TINY), Device("toy", {"float16": 2}, bandwidth=2)
    assert cost.times(toy) == (180, 60)
    assert (cost.seconds(toy), cost.roof(toy)) == (240, "compute")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_more_work_takes_longer_and_a_faster_device_less(function):
    base = Problem(function, 2048, heads=8, causal=True)
    more = [{"keys": 4096}, {"batch": 2}, {"heads": 16, "key_heads": 16}, {"head_dim": 256}, {"dtype": "float32"}]
    for cost in (naive, flash):
        time = cost(base).seconds(DEVICES["h100"])
        assert all(cost(replace(base, **change)).seconds(DEVICES["h100"]) > time for change in more)
        assert cost(base).seconds(DEVICES["rtx4090"]) > time >= cost(base).seconds(DEVICES["h200"])
    full, window = flash(replace(base, causal=False)), flash(replace(base, window=(99, 0), queries=9))
    assert window.flops < flash(base).flops <= full.flops
    assert all(cost.nbytes <= cost.streamed for cost in (full, window))


# Refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"function": "sideways"}, "function is 'sideways'; wanted one of 'forward', 'backward', 'decode'"),
        ({"dtype": "int8"}, "dtype is 'int8'; wanted one of 'float16', 'bfloat16', 'float32', 'float64'"),
        ({"keys": 0}, "keys is 0; wanted 1 or more"),
        ({"heads": 1.5}, "heads is 1.5; wanted an integer"),
        ({"heads": 3, "key_heads": 2}, "heads is 3; wanted a multiple of key_heads, 2"),
        ({"causal": "left"}, "causal is 'left'; wanted False, True, 'bottom-right' or 'top-left'"),
        ({"window": (-1, 0)}, "window left is -1, negative; wanted 0 or more, or None for unlimited"),
    ],
)
def test_sizes_are_refused_in_one_sentence(changes, sentence):
    with pytest.raises((ValueError, TypeError)) as refused:
        Problem(**{"function": "forward", "keys": 64} | changes)
    assert str(refused.value) == f"roofline: {sentence}"


def test_a_device_without_a_ceiling_is_refused():
    mine = Device("mine", {"float16": 1e12}, 1e12)
    with pytest.raises(ValueError, match="^roofline: device mine has FLOP/s of float16; wanted float32 too$"):
        flash(replace(LONG, dtype="float32")).seconds(mine)


# The command ----------------------------------------------------------------------------------------------------


def test_prints_an_aligned_table(capsys):
    assert job.main(["roofline"]) == 0
    first, _, head, *rows = capsys.readouterr().out.splitlines()[:9]
    assert first.startswith("H100 SXM: 989 TFLOP/s in float16, 3.35 TB/s, 80.0 GB; they meet at 295 FLOP/byte (")
    assert [row.split()[:2] for row in rows] == [[x, kind] for x in FUNCTIONS for kind in ("naive", "flash")]
    assert len({len(line) for line in (head, *rows)}) == 1
    assert rows[0].split() == "forward naive 1,100 17.4 17.4 63.0 memory 5.21 211 8.86".split()
    assert rows[1].split() == "forward flash 1,100 0.269 8.73 4,080 compute 1.11 989 0.269".split()


def test_says_which_scores_move_and_what_does_not_fit(capsys):
    assert command.main("backward --keys 16384 --float32-softmax".split()) == 0
    printed = capsys.readouterr().out
    assert "backward naive: a matrix of scores in float16 is 537 MB a head, 17.2 GB in all" in printed
    assert "it writes 2 in float16 and 1 in float32, reads 4 in float16 and 2 in float32" in printed
    assert "backward naive: 121 GB do not fit into 80.0 GB" in printed


def test_ceilings_can_be_given(capsys):
    assert command.main("forward --tflops 500 --bandwidth 4 --device h200".split()) == 0
    assert capsys.readouterr().out.startswith("H200 SXM: 500 TFLOP/s in float16, 4.00 TB/s, 141 GB; they meet at 125 ")


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ],
)
def test_the_gpu_here_is_found_by_its_name(name, known):
    assert command.device_of(command.parse([]), name) == DEVICES[known]


@pytest.mark.parametrize("name", ["H100 PCIe", "H200 NVL", "GH200 480GB", "A100-SXM4-40GB", "GeForce RTX 4090 D"])
def test_a_variant_with_other_ceilings_is_not_taken_for_it(name):
    assert named(f"NVIDIA {name}") is None


def test_ceilings_of_an_unknown_gpu_must_be_given():
    with pytest.raises(ValueError, match="^roofline: the ceilings of NVIDIA T4 are not known; wanted --tflops and "):
        command.device_of(command.parse(["--tflops", "60"]), "NVIDIA T4")
    given = command.device_of(command.parse("--tflops 60 --bandwidth 0.3".split()), "NVIDIA T4")
    assert given == Device("NVIDIA T4", {"float16": 60e12}, 0.3e12, math.inf, "flops and bandwidth as given")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--measure", "roofline: --measure needs a GPU: CuPy finds no GPU\n"),
        ("--keys 0", "roofline: keys is 0; wanted 1 or more\n"),
        ("forwards", "roofline: function is 'forwards'; wanted one of 'forward', 'backward', 'decode'\n"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(no_gpu, capsys, arguments, sentence):
    assert command.main(arguments.split()) == 2
    assert capsys.readouterr() == ("", sentence)


@pytest.mark.parametrize("option", ["--tflops 0", "--bandwidth nan", "--device tpu"])
def test_bad_options_are_refused(option):
    with pytest.raises(SystemExit, match="2"):
        command.parse(option.split())


def test_a_picture_needs_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command.main(["--plot", "roofline.png"]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


def test_draws_what_is_predicted_and_measured(numpy_for_gpu, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "roofline.png"
    assert command.main(["--keys", "64", "--heads", "2", "--measure", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size < 100_000


# Measuring, on NumPy here ---------------------------------------------------------------------------------------


def test_measured_points_stand_beside_the_prediction(numpy_for_gpu, capsys):
    assert command.main("--keys 64 --heads 4 --key-heads 2 --causal --measure".split()) == 0
    first, _, head, *rows = capsys.readouterr().out.splitlines()[:9]
    assert first.startswith("H200 SXM")
    assert "measured ms" in head
    assert all(float(row.split()[-4].replace(",", "")) > 0 for row in rows)


def test_what_could_not_be_measured_is_said(numpy_for_gpu, monkeypatch, capsys):
    def missing(*arguments, **keywords):
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(cuflash, "decode", missing)
    assert command.main("decode --keys 64 --measure".split()) == 0
    printed = capsys.readouterr().out
    assert "decode flash was not measured: NotImplementedError: no kernel" in printed
    assert [line.split()[-4:] for line in printed.splitlines() if line.startswith("decode    flash")] == [["-"] * 4]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (5, 3)}])
@pytest.mark.parametrize("wide", [False, True])
def test_the_plain_expression_is_attention(function, mask, wide):
    problem = Problem(function, 40, 24, 2, 4, 2, 16, 8, "float64", **mask)  # which no softmax narrows
    arrays = command.inputs(problem)
    plain, ours = command.plain(problem, np, *arrays, wide)(), command.ours(problem, np, *arrays)()
    if function != "backward":
        plain, ours = (plain,), ours[:1]
    for x, y in zip(plain, ours, strict=True):
        np.testing.assert_allclose(x.reshape(y.shape), y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "facts",
    [{}, {"dtype": "bfloat16", "causal": True}, {"dtype": "float32", "window": (99, 0)}],
    ids=["float16", "bfloat16 causal", "float32 window"],
)
def test_measures_on_the_gpu(gpu, function, facts):
    taken = command.measure(Problem(function, 512, heads=4, key_heads=2, **facts), gpu, float32_softmax=True)
    assert all(isinstance(ms, float) and 0 < ms < 100 for ms in taken.values()), taken
    assert set(taken) == {"naive", "flash"}


def test_the_plain_expression_is_attention_on_the_gpu(gpu):
    problem = Problem("forward", 300, 200, 1, 4, 2, 64, dtype="float32", causal=True)
    arrays = [gpu.asarray(x) for x in command.inputs(problem)]
    plain, (ours, _) = command.plain(problem, gpu, *arrays, False)(), command.ours(problem, gpu, *arrays)()
    np.testing.assert_allclose(plain.reshape(ours.shape).get(), ours.get(), rtol=0, atol=5e-3)  # products may be TF32


def test_the_command_measures_on_the_gpu(gpu, capsys):
    assert command.main("--keys 512 --heads 4 --dtype bfloat16 --tflops 500 --bandwidth 4 --measure".split()) == 0
    printed = capsys.readouterr().out
    assert "was not measured" not in printed and "measured on " in printed
