"""Contenders of the benchmarks, without a GPU: what they are told, how they fail, and the process of JAX's."""

import io
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "bench"))

import contenders
import decode
import pictures
import progress_bar
import record
import run

import cuflash
from cuflash import roofline

SMALL = "--engine numpy --head-dim 16 --length 48 --tokens 96 --width 32 --quick".split()


def case(mask="full", window=None, queries=6, keys=6, what="forward", key_heads=2, **more):
    facts = {"dtype": "float32", "head_dim": 4, "value_dim": 4, "batch": 3, "heads": 2, "key_heads": key_heads}
    return record.Case(what, "numpy", mask=mask, window=window, queries=queries, length=keys, **facts | more)


def drawn(case):
    """q, k and v of a case as the benchmarks lay them: (batch, rows, heads, head_dim), swapped."""
    rng = np.random.default_rng(0)
    shapes = [(case.queries, case.heads), *[(case.length, case.key_heads)] * 2]
    shapes = [(case.batch, *shape, case.head_dim) for shape in shapes]
    return [rng.standard_normal(shape, dtype=np.float32).swapaxes(1, 2) for shape in shapes]


def attention(q, k, v, causal=False, window=None):
    """The answer for arrays (batch, rows, heads, head_dim)."""
    return cuflash.forward(*(x.swapaxes(1, 2) for x in (q, k, v)), causal=causal, window=window).swapaxes(1, 2)


MASKS = [("full", None), ("causal", None), ("window", (2, 0)), ("window", (1, 3)), ("window", (None, 1))]


# How they fail --------------------------------------------------------------------------------------------------


class Faulty(contenders.Contender):
    """One that fails where it is told to."""

    def __init__(self, name, where):
        self.name, self.where = name, where

    def missing(self):
        return "needs a thing\nof two lines" if self.where == "missing" else None

    def prepare(self, case, q, k, v):
        if self.where == "prepare":
            raise contenders.Unfit("not this case")

        def call():
            if self.where == "call":
                raise RuntimeError("raised:\n  no C compiler\nand a long story")
            return cuflash.forward(q, k, v, **case.keywords) * (1.1 if self.where == "answer" else 1)

        return call


@pytest.fixture
def known(monkeypatch):
    """Let these contenders be all that are known."""
    return lambda *some: monkeypatch.setattr(contenders, "found", lambda: {each.name: each for each in some})


def test_a_run_goes_on_without_those_that_fail_and_says_so_once(known, capsys, tmp_path):
    faulty = [Faulty(where, where) for where in ("missing", "prepare", "call", "answer", "nowhere")]
    known(*faulty, Faulty("another", "missing"))
    path = tmp_path / "rows.json"
    words = [*SMALL, "--dtype", "float32", "--mask", "full,causal", "--contenders", "all", "--json", str(path)]
    for _ in range(2):  # each run says it anew
        assert run.main(words) == 0
        printed = capsys.readouterr().out
        assert printed.count("contenders: missing, another left out: needs a thing\n") == 1
        assert printed.count("  prepare left out: not this case\n") == 1
        assert printed.count("  call left out: RuntimeError: raised: no C compiler\n") == 1
        assert printed.count("  answer left out: its answer is 0.1 from ours\n") == 1
    for row in json.loads(path.read_text())["cases"]:
        assert row["contenders"]["nowhere"] > 0 and row["rival"] == "nowhere"
        assert [row["contenders"][name] for name in ("prepare", "call", "answer")] == [None] * 3


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_naive_attention_computes_bfloat16_too(what, capsys, tmp_path):
    path = tmp_path / "rows.json"
    words = [what, *SMALL, "--dtype", "bfloat16", "--mask", "causal", "--contenders", "naive", "--json", str(path)]
    assert run.main(words) == 0
    (row,) = json.loads(path.read_text())["cases"]
    assert row["ratios"]["naive"] > 0, capsys.readouterr().out


# What they are told ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mask", "window"), MASKS)
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (3, 8), (8, 3)])
def test_a_block_mask_shows_what_the_case_shows(mask, window, queries, keys):
    one = case(mask, window, queries, keys)
    seen = contenders.Flex.seen(one)
    shown = np.ones((queries, keys), bool)
    if seen:
        shown = seen(0, 0, np.arange(queries)[:, None], np.arange(keys))
    causal = mask == "causal"
    assert (seen is None) == (mask == "full")
    assert shown.sum() == roofline.Problem("forward", keys, queries, causal=causal, window=window).pairs


@pytest.mark.parametrize(("mask", "window"), MASKS)
@pytest.mark.parametrize("name", ["fa3", "fa4"])
def test_flash_attention_is_called_by_its_own_rules(monkeypatch, name, mask, window):
    def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1) if name == "fa3" else (None, None)):
        unlimited = -1 if name == "fa3" else None
        assert (-1 if unlimited is None else None) not in window_size
        out = attention(q, k, v, causal, tuple(None if end == unlimited else end for end in window_size))
        return out if name == "fa3" else (out, None)

    monkeypatch.setitem(sys.modules, "fake_flash", types.SimpleNamespace(flash_attn_func=flash_attn_func))
    one = case(mask, window, key_heads=1)
    q, k, v = drawn(one)
    found = contenders.FlashAttention(name, "fake_flash").function(one, q)(q, k, v)
    np.testing.assert_array_equal(found, cuflash.forward(q, k, v, **one.keywords))


@pytest.mark.parametrize(("mask", "window"), MASKS[:3])
def test_flashinfer_computes_a_batch_one_behind_the_other(monkeypatch, mask, window):
    torch = pytest.importorskip("torch", reason="its tensors are torch's")

    class Wrapper:
        def __init__(self, workspace, layout):
            assert workspace.dtype == torch.uint8 and layout == "NHD"

        def plan(self, *places, causal, window_left, q_data_type, kv_data_type):
            self.starts, self.sizes = places[:2], places[2:]
            self.keywords = {"causal": causal, "window": (None if window_left < 0 else window_left, None)}

        def run(self, q, k, v):
            assert self.sizes == (2, 1, 4)
            spans = [list(zip(x, x[1:], strict=False)) for x in (self.starts[0].tolist(), self.starts[1].tolist())]
            parts = [
                attention(*(x[None] for x in (q[a:b].numpy(), k[c:d].numpy(), v[c:d].numpy())), **self.keywords)[0]
                for (a, b), (c, d) in zip(*spans, strict=True)
            ]
            return torch.from_numpy(np.concatenate(parts))

    monkeypatch.setitem(sys.modules, "flashinfer", types.SimpleNamespace(BatchPrefillWithRaggedKVCacheWrapper=Wrapper))
    monkeypatch.setattr(contenders.FlashInfer, "workspace_bytes", 16)
    one = case(mask, window, 4, 6, key_heads=1)
    q, k, v = drawn(one)
    found = contenders.FlashInfer().prepare(one, q, k, v)()
    np.testing.assert_allclose(found, cuflash.forward(q, k, v, **one.keywords), atol=1e-6)
    with pytest.raises(contenders.Unfit, match="windows to the left only"):
        contenders.FlashInfer().prepare(case("window", (1, 3)), q, k, v)
    with pytest.raises(contenders.Unfit, match="no gradients"):
        contenders.FlashInfer().prepare_backward(one, q, q, k, v)


@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_back_ends_of_torch_compute_both_passes(mask, key_heads):
    torch = pytest.importorskip("torch", reason="it is what is tested")
    one = case(mask, key_heads=key_heads)
    q, k, v = drawn(one)
    contender = contenders.Torch("math", "MATH")
    with contender.scope():
        out, grads = contender.prepare(one, q, k, v)(), contender.prepare_backward(one, q, q, k, v)()
    ours, lse = cuflash.forward(q, k, v, **one.keywords, return_lse=True)
    np.testing.assert_allclose(contenders.to_host(out), ours, atol=1e-5)
    for theirs, own in zip(grads, cuflash.backward(q, q, k, v, ours, lse, **one.keywords), strict=True):
        np.testing.assert_allclose(contenders.to_host(theirs), own, atol=1e-5)
    assert isinstance(out, torch.Tensor) and not out.requires_grad
    with pytest.raises(contenders.Unfit, match="no windows"):
        contender.prepare(case("window", (1, 0)), q, k, v)


@pytest.mark.parametrize("page_size", [None, 4])
def test_decode_by_flash_attention_3_gets_caches_as_they_lie(monkeypatch, page_size):
    torch = pytest.importorskip("torch", reason="its tensors are torch's")

    def flash_attn_with_kvcache(q, k, v, cache_seqlens, causal, page_table=None):
        assert causal and q.shape == (3, 1, 2, 4)
        more = {} if page_table is None else {"page_table": page_table.numpy()}
        q, k, v = (x.numpy().swapaxes(1, 2) for x in (q, k, v))
        return torch.from_numpy(cuflash.decode(q, k, v, lengths=cache_seqlens.numpy(), **more).swapaxes(1, 2))

    fake = types.SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    monkeypatch.setitem(sys.modules, "fake_flash", fake)
    one = case("causal", None, 1, 8, what="decode", key_heads=1, page_size=page_size)
    q, k, v = drawn(one)
    tables = {"lengths": np.full(3, 8, np.int32)}
    if page_size:
        k, v = (np.ascontiguousarray(x.reshape(6, 1, 4, 4)) for x in (np.ascontiguousarray(k), np.ascontiguousarray(v)))
        tables["page_table"] = np.arange(6, dtype=np.int32).reshape(3, 2)
    call = contenders.FlashAttention("fa3", "fake_flash").prepare_decode(one, q, tables)
    found = call(*contenders.on_torch((k, v)))
    np.testing.assert_array_equal(found.numpy(), cuflash.decode(q, k, v, **tables))


def test_drawn_lengths_are_counted_as_they_are():
    facts = {"queries": 1, "keys": 5000, "what": "decode", "batch": 64, "dtype": "bfloat16"}
    alike, ragged = case("causal", None, **facts), case("causal", None, **facts, shortest=100)
    lengths = decode.lengths_of(ragged)
    assert (decode.lengths_of(alike) == 5000).all() and (lengths == decode.lengths_of(ragged)).all()
    assert 100 <= lengths.min() < 300 and 3000 < lengths.max() <= 5000 and len(lengths) == 64
    assert decode.cache_bytes(ragged) == lengths.sum() * 2 * 8 * 2 and decode.flops(alike) == alike.flops
    assert decode.flops(ragged) == lengths.sum() * 2 * 2 * 8


def test_what_decode_cannot_do_is_said():
    facts = {"page_size": 4}, {"kv_format": "int8"}, {"queries": 2}, {"shortest": 3}
    given = ({"queries": 1} | x for x in ({}, *facts))
    plain, paged, narrow, several, ragged = (case("causal", None, **x, what="decode") for x in given)
    fa3, cudnn = contenders.FlashAttention("fa3", "nowhere"), contenders.Torch("cudnn", "CUDNN_ATTENTION")
    for contender, one, reason in (
        (contenders.Naive(), plain, "does not compute decode"),
        (contenders.FlashAttention("fa4", "nowhere"), plain, "no decode from caches"),
        *((each, narrow, "16-bit caches only") for each in (fa3, cudnn, contenders.FlashInfer())),
        (cudnn, paged, "caches in one piece only"),
        (cudnn, several, "one query a sequence only"),
        (cudnn, ragged, "sequences of one length only"),
        (contenders.FlashInfer(), plain, "caches in pages and one query a sequence only"),
    ):
        with pytest.raises(contenders.Unfit, match=reason):
            contender.prepare_decode(one, None, {})


# The process of JAX's -------------------------------------------------------------------------------------------


@pytest.fixture
def process(monkeypatch, tmp_path):
    """Let the process run another program: context manager of what asks it."""

    def start(program):
        (tmp_path / "program.py").write_text(program)
        monkeypatch.setattr(contenders, "__file__", str(tmp_path / "program.py"))
        return contenders.Jax().child(case("window", (2, 0)))

    return start


def test_the_process_is_asked_for_calls_and_ends_with_its_input(process):
    program = """
import json, os, sys
facts = json.loads(sys.argv[1])
assert facts["window"] == [2, 0] and os.environ["JAX_PLATFORMS"] == "cpu"
assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
print("{}", flush=True)
for line in sys.stdin:
    print(json.dumps({"ms": 2.5 * int(line)}), flush=True)
"""
    with process(program) as ask:
        assert [ask(4), ask(2)] == [10.0, 5.0]


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ('print(\'{"reason": "jax sees no GPU"}\')', "^jax sees no GPU$"),
        ("raise SystemExit(3)", "^its process ended, with 3$"),
    ],
)
def test_what_stands_in_the_way_of_the_process_is_said(process, program, reason):
    with pytest.raises(contenders.Unfit, match=reason), process(program):
        pass


def test_the_process_answers_each_line_and_a_failure(monkeypatch):
    made, told = [], []

    def jax_call(case):
        return (lambda: made.append(case) or 7), (lambda last: told.append(last))

    monkeypatch.setattr(contenders, "jax_call", jax_call)
    answers = []
    contenders.serve("a case", ["5\n", "2\n", "x\n"], lambda **facts: answers.append(facts))
    assert made == ["a case"] * 10 and told == [7] * 5, "three calls to warm up, each waited for"
    assert answers[0] == {} and all(facts["ms"] >= 0 for facts in answers[1:3])
    assert answers[3]["reason"].startswith("ValueError: invalid literal")


def test_masks_of_jax_are_for_squares():
    with pytest.raises(contenders.Unfit, match="as many queries as keys"):
        contenders.Jax().child(case("causal", None, 3, 8))


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_jax_is_timed_beside_the_cpu_engine(what, tmp_path, capsys):
    pytest.importorskip("jax", reason="it is what is tested")
    path = tmp_path / "rows.json"
    words = [what, *SMALL, "--dtype", "float32", "--mask", "window", "--window", "9", "--contenders", "jax"]
    assert run.main([*words, "--group", "2", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["cases"]
    assert row["ratios"]["jax"] > 0 and len(row["wall_rounds"]["jax"]) == 2, capsys.readouterr().out


# What a run shows -----------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_gives_way_to_lines(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    now, screen = iter([0.0, 1.0, 11.0]), Terminal()
    with progress_bar.Bar(3, screen, clock=lambda: next(now)) as bar:
        bar.step("first")
        bar.step("second" + 99 * "!")
        before = len(screen.getvalue())
        progress_bar.say("a line")
        assert screen.getvalue()[before:].startswith(progress_bar.ERASE * 2 + "[########....")
    assert "] 0/3: first" in screen.getvalue() and "] 1/3, 22 s left: second" in screen.getvalue()
    assert screen.getvalue().endswith(progress_bar.ERASE) and capsys.readouterr().out == "a line\n"
    progress_bar.say("behind it")
    assert screen.getvalue().count("second") == 2
    assert max(map(len, screen.getvalue().split(progress_bar.ERASE))) == 59, "it stays on one line"


def test_a_bar_is_for_terminals(capsys):
    screen = io.StringIO()
    with progress_bar.Bar(1, screen) as bar:
        bar.step("first")
        progress_bar.say("a line")
    assert screen.getvalue() == "" and capsys.readouterr().out == "a line\n"


def test_lines_are_aligned_and_say_correctness_first():
    measured = {"ms": 1.5, "spread": 0.01, "tflops": 512.25, "error_over_bound": 0.25, "extra_bytes": 2e6}
    measured |= {"host_us": {"ours": 14.06}, "contenders": {"a": 3.0, "b": None}, "ratios": {"a": 2.0, "b": None}}
    lines = [
        run.line(record.case_row(case(dtype=dtype), variant=None, **measured | {"extra_bytes": extra}))
        for dtype, extra in (("float32", 2e6), ("float64", 3e8))
    ]
    assert len({len(line) for line in lines}) == 1
    words = ["error/bound 0.250", "1.500 ms", "± 1.0%", "512.2 TFLOP/s", "host  14.1 us", "extra    2.0 MB"]
    words += ["best  2.000x", "a     3.000 ms  2.000x", "b     "]
    places = [lines[0].index(word) for word in words]
    assert places == sorted(places)
    row = record.case_row(case(what="decode"), variant="x", gbps=4000.0, most_splits=3, **measured)
    assert "error/bound 0.250    1500.0 us ± 1.0%   4000 GB/s  host  14.1 us  best" in decode.line(row)


def test_a_run_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="it is what draws")
    path = tmp_path / "run.png"
    words = [*SMALL, "--dtype", "float32,bfloat16", "--length", "16,48", "--contenders", "naive", "--plot", str(path)]
    assert run.main(words) == 0
    assert path.read_bytes().startswith(b"\x89PNG") and f"drawn in {path}" in capsys.readouterr().out


def test_a_picture_needs_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="2"):
        run.parse(["--plot", "x.png"])
    assert "--plot needs matplotlib, which is not installed; wanted pip install" in capsys.readouterr().err


def test_pictures_of_rows_tell_dtypes_and_pages_apart():
    measured = {"ratios": {"a": 2.0, "b": None}, "tflops": 8.0, "gbps": 6.0}
    rows = [record.case_row(case(dtype=dtype), **measured) for dtype in ("float32", "float64")]
    title, upright, panels = pictures.of_rows(rows, "TOY")
    assert (title, upright) == ("forward, float32 and float64, TOY", "TFLOP/s")
    assert panels == {f"head_dim 4, full {t}": {"cuflash": [(6, 8.0)], "a": [(6, 4.0)]} for t in ("float32", "float64")}
    rows = [record.case_row(case(what="decode", page_size=size), **measured) for size in (None, 16, 64)]
    (lines,) = pictures.of_rows(rows, "TOY")[2].values()
    assert list(lines) == ["cuflash", "a", "pages", "cuflash, pages of 64"] and lines["a"] == [(6, 3.0)]


def test_lines_of_a_picture_differ_in_colour_and_in_grey():
    names = ["cuflash", *contenders.found()]
    assert set(names) <= set(pictures.LOOKS)
    for part in (slice(1, 2), slice(2, 4)):
        looks = [str(pictures.LOOKS[name][part]) for name in names if name != "efficient"]  # of float32, fa2 of others
        assert len(set(looks)) == len(looks)
