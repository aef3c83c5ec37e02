"""The record and the arithmetic of the benchmarks: nothing here needs a GPU."""

import collections
import contextlib
import hashlib
import json
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import cuflash

sys.path.append(str(Path(__file__).resolve().parent.parent / "bench"))

import contenders
import fuzz
import gpu
import record
import run
import sanitize
import timing

from cuflash import _plan
from cuflash._dtypes import ELEMENTS

H200 = _plan.KNOWN[9, 0]
VARIANTS = [variant for variant in _plan.variants(H200) if variant.head_dim in (32, 128) and variant.value_dim < 256]
VARIANTS = [variant for variant in VARIANTS if not variant.hopper and variant.kernel not in sanitize.AROUND]
VARIANTS += [_plan.latent_variant("bfloat16", H200, rows) for rows in (16, 32)]


@pytest.fixture
def h200(monkeypatch):
    """Plans are made as on an H200."""
    monkeypatch.setattr(gpu, "limits", lambda: H200)


def case(**changes):
    facts = {"what": "forward", "engine": "portable", "dtype": "bfloat16", "head_dim": 64, "value_dim": 64}
    facts |= {"mask": "full", "queries": 8, "length": 8, "batch": 2, "heads": 3, "key_heads": 3}
    return record.Case(**facts | changes)


# The record -----------------------------------------------------------------------------------------------------


def test_a_run_replaces_the_rows_it_measured_and_leaves_the_rest():
    old = [record.case_row(case(length=n), ms=1.0) for n in (8, 16, 32)]
    new = [record.case_row(case(length=n), ms=2.0, variant="another") for n in (16, 64)]
    merged = record.merge("cases", old, new)
    assert [(row["length"], row["ms"]) for row in merged] == [(8, 1.0), (16, 2.0), (32, 1.0), (64, 2.0)]


def test_a_row_read_back_is_the_same_measurement(tmp_path):
    row = record.case_row(case(mask="window", window=(4, None)))
    record.add(tmp_path / "x.json", "cases", [row])
    record.add(tmp_path / "x.json", "cases", [row | {"ms": 3.0}])
    (kept,) = json.loads((tmp_path / "x.json").read_text())["cases"]
    assert kept["ms"] == 3.0 and kept["window"] == [4, None]


@pytest.mark.parametrize(
    "changes",
    [{"mask": "causal"}, {"dtype": "float16"}, {"engine": "numpy"}, {"splits": 2}, {"precision": "tf32"}],
)
def test_another_case_is_another_row(changes):
    assert len(record.merge("cases", [record.case_row(case())], [record.case_row(case(**changes))])) == 2


def test_a_case_row_has_the_form_of_the_record():
    fields = """what engine variant dtype kv_format precision head_dim value_dim mask window queries length batch heads
        key_heads page_size splits reproducible graph shortest ms spread tflops gbps extra_bytes error_over_bound
        contenders rival sources time""".split()
    assert set(record.stamped(record.case_row(case()))) == set(fields)


def test_parts_are_added_one_by_one(tmp_path):
    path = tmp_path / "x.json"
    record.add(path, "fuzz", [{"what": "forward", "engine": "portable", "dtype": "float16", "examples": 5}])
    record.add(path, "tests", {"passed": 3, "failed": 0, "skipped": 0})
    record.add(path, "tests", {"passed": 4, "failed": 0, "skipped": 0})
    found = record.read(path)
    assert found["tests"]["passed"] == 4 and found["fuzz"][0]["examples"] == 5
    assert found["device"] == record.device() and found["versions"]["numpy"] == np.__version__
    assert not list(tmp_path.glob("*.part"))


def test_a_new_file_begins_as_the_record_in_the_tree(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path / "tree")
    record.write(tmp_path / "tree" / "h200.json", {"host": [{"what": "forward", "us": 9.0}]})
    assert record.read(tmp_path / "elsewhere" / "h200.json")["host"][0]["us"] == 9.0
    assert record.read(tmp_path / "elsewhere" / "other.json")["host"] == []


@pytest.mark.parametrize(
    ("name", "file"),
    [("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"), ("AMD EPYC 9654", "amd-epyc-9654")],
)
def test_the_file_is_named_after_the_device(name, file):
    assert record.slug(name) == file


@pytest.mark.parametrize("tracked", [True, False])
def test_sources_hash_is_of_sorted_paths_and_contents(tmp_path, tracked):
    files = {"kernels/b.cu": b"1", "kernels/a.cuh": b"2", "cuflash/z.py": b"3", "cuflash/sub/y.py": b"4"}
    others = {"cuflash/notes.md": b"5", "tests/t.py": b"6", "cuflash/__pycache__/z.py": b"7"}
    for name, contents in (files | others).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(contents)
    if tracked:
        subprocess.run(["git", "init", "-q", tmp_path], check=True)
        subprocess.run(["git", "-C", tmp_path, "add", *files], check=True)
        (tmp_path / "cuflash" / "draft.py").write_bytes(b"8")
    expected = hashlib.sha256(b"".join(name.encode() + b"\0" + files[name] for name in sorted(files))).hexdigest()
    assert record.sources(tmp_path) == expected


def test_flops_count_visible_pairs():
    assert case().flops == 2 * (64 + 64) * 2 * 3 * 64
    assert case(mask="causal").flops == case().flops / 2
    assert case(what="backward").flops == 2 * (3 * 64 + 2 * 64) * 2 * 3 * 64
    assert case(mask="causal", queries=2, length=4).pairs == 6 * (3 + 4)
    assert case(mask="window", window=(1, 0)).pairs == 6 * (1 + 7 * 2)


# The timer ------------------------------------------------------------------------------------------------------


def test_rounds_take_turns_and_the_ratio_is_the_median_over_them():
    now, log = [0.0], []
    seconds = {"ours": 1e-3, "theirs": 3e-3}
    slowdown = iter([1, 1, 1, 1, 10, 10])  # a drift of the clock that hits the last round: the ratio is blind to it

    def clock():
        return now[0]

    def runner(name):
        def call():
            log.append(name)
            now[0] += seconds[name] * pace[0]

        return call

    pace = [1]
    timer = timing.WallTimer(clock)

    def paced(call, launches):
        pace[0] = next(slowdown)
        return timer(call, launches)

    rounds = timing.interleave(paced, {name: runner(name) for name in seconds}, rounds=3, launches=2, warmup=1)
    orders = ("ours", "theirs"), ("theirs", "ours"), ("theirs", "ours")
    assert log == ["ours", "theirs"] + [name for order in orders for name in order for _ in range(2)]
    assert rounds["ours"] == pytest.approx([1, 1, 10]) and rounds["theirs"] == pytest.approx([3, 3, 30])
    assert timing.ratio(rounds["ours"], rounds["theirs"]) == pytest.approx(3)
    assert timing.spread(rounds["ours"]) == pytest.approx(9)


def test_figures_say_whom_ours_is_judged_against():
    rounds = {"ours": [2.0, 2.0, 4.0], "slow": [6.0, 4.0, 4.0], "fast": [1.0, 1.0, 3.0], "far": [4.0, 4.0, 4.0]}
    found = timing.figures(rounds, ["slow", "fast", "absent", "far"], "best", {"far": [1.0, 2.0, 4.0]})
    assert (found["ms"], found["spread"], found["rival"], found["rounds"]) == (2.0, 1.0, "fast", rounds)
    assert found["contenders"] == {"slow": 4.0, "fast": 1.0, "absent": None, "far": 4.0}
    assert found["ratios"] == {"slow": 2.0, "fast": 0.5, "absent": None, "far": 2.0}
    assert timing.figures(rounds, ["absent"], "best")["rival"] is None
    assert timing.figures(rounds, ["slow"], "slow")["rival"] == "slow"
    shown = contenders.beside(found, lambda ms: f"{ms:.1f} ms")
    slow, absent, far = "slow 4.0 ms  2.000x", "absent              -", "far 4.0 ms  2.000x"
    assert shown == f"  best  0.500x  {slow}  fast 1.0 ms  0.500x  {absent}  {far}"
    assert contenders.beside({"contenders": {"absent": None}, "ratios": {"absent": None}}, str) == "  absent         -"


def test_scopes_are_entered_around_their_own_runs():
    entered = []

    class Scope:
        def __enter__(self):
            entered.append(True)

        def __exit__(self, *error):
            entered.pop()

    def call():
        assert entered

    timing.interleave(timing.WallTimer(), {"x": call}, rounds=2, launches=2, scopes={"x": Scope})
    assert not entered


def test_host_time_is_the_mean_of_the_median_chunk():
    now = [0.0]

    def call():
        now[0] += 2e-6

    assert timing.host_us(call, count=100, chunks=5, clock=lambda: now[0]) == pytest.approx(2)


class FakeCuda:
    """The calls of CuPy that the event timer makes, each launch taking the milliseconds of ``ms`` in turn."""

    def __init__(self, ms):
        self.log, self.now, self.ms = [], 0.0, iter(ms)
        self.runtime = self
        self.ptr = 0

    def alloc(self, size):
        return self

    def memsetAsync(self, pointer, value, size, stream):
        self.log.append("sweep")
        self.now += 100

    def get_current_stream(self):
        return self

    def synchronize(self):
        self.log.append("wait")

    def launch(self):
        self.log.append("launch")
        self.now += next(self.ms)

    def Event(self):
        cuda = self

        class Event:
            def record(self, stream):
                self.at = cuda.now

        return Event()

    def get_elapsed_time(self, begin, end):
        return end.at - begin.at


@pytest.mark.parametrize("cold", [True, False])
def test_events_enclose_the_launch_alone(monkeypatch, cold):
    cuda = FakeCuda([1, 2, 3])
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    assert timing.EventTimer(cold)(cuda.launch, 3) == [1, 2, 3]
    assert cuda.log == (["sweep"] * 4 + ["sweep", "launch"] * 3 if cold else ["launch"] * 3) + ["wait"]


def test_the_pool_peak_is_counted_by_a_hook():
    cupy = pytest.importorskip("cupy")
    assert timing.extra_bytes(lambda: np.zeros(3), "cupy")[0] == 0
    hook = cupy.cuda.MemoryHook
    assert {"malloc_postprocess", "free_postprocess"} <= set(dir(hook))


def test_extra_bytes_counts_what_is_neither_input_nor_result():
    def call():
        passing = np.zeros(1 << 20, np.uint8)
        return passing[:1000].copy()

    extra, result = timing.extra_bytes(call, "numpy")
    assert result.nbytes == 1000 and 1 << 20 <= extra < (1 << 20) + 4096


# The benchmark --------------------------------------------------------------------------------------------------


def test_the_standard_cells_are_twelve():
    cells = list(run.cells(run.parse([])))
    assert len(cells) == 12 and all(c.batch * c.length == 16384 and c.heads * c.head_dim == 2048 for c in cells)


def test_a_run_on_the_cpu_fills_the_record(tmp_path, capsys):
    arguments = "--engine numpy --dtype float32 --head-dim 16 --length 48 --tokens 96 --width 32"
    files = ["--contenders", "naive,none", "--json", str(tmp_path / "x.json"), "--csv", str(tmp_path / "x.csv")]
    assert run.main([*arguments.split(), "--mask", "full,causal", *files]) == 0
    rows = record.read(tmp_path / "x.json")["cases"]
    assert [row["mask"] for row in rows] == ["full", "causal"] and rows[0]["variant"] is None
    for row in rows:
        assert row["rival"] == "naive" and row["contenders"]["naive"] > 0 and row["batch"] == row["heads"] == 2
        assert 0 < row["error_over_bound"] <= 1 and len(row["rounds"]["ours"]) == 5
        assert row["sources"] == record.sources()
    printed = capsys.readouterr().out
    assert "naive / ours: geometric mean" in printed and "none left out: not known" in printed
    assert (tmp_path / "x.csv").read_text().startswith("what,engine,dtype")


def test_cases_of_other_sources_are_measured_again_as_they_were(tmp_path, capsys):
    path = tmp_path / "x.json"
    arguments = f"--engine numpy --dtype float32 --head-dim 16 --tokens 96 --width 32 --json {path}".split()
    for length, rounds in (("48", "2"), ("32", "3")):
        asked = ["--mask", "full,causal", "--length", length, "--rounds", rounds, "--contenders", "naive"]
        assert run.main([*arguments, *asked]) == 0
    *older, absent, now = record.read(path)["cases"]
    absent["contenders"] = {"nowhere": 1.0}
    others = [row | {"sources": "others", "ms": -1.0} for row in (*older, absent)]
    record.write(path, record.read(path) | {"cases": [*others, now]})
    assert run.main([*arguments, "--again", "--seconds", "0"]) == 0
    assert [row["ms"] for row in record.read(path)["cases"]] == [-1, -1, -1, now["ms"]]
    capsys.readouterr()
    assert run.main([*arguments, "--again"]) == 0
    assert "1 cases stay as they are" in capsys.readouterr().out
    *again, stays, untouched = record.read(path)["cases"]
    assert stays == others[-1] and untouched == now
    for row, before in zip(again, older, strict=True):
        assert row["sources"] == record.sources() and row["ms"] > 0 and row["contenders"]["naive"] > 0
        fields = (*record.IDENTITY["cases"], "rival", "launches")
        assert [row[name] for name in fields] == [before[name] for name in fields]
        assert len(row["rounds"]["ours"]) == 2


def test_the_rival_of_a_case_measured_again_is_the_best_one_where_it_was():
    row = {"rival": "b", "contenders": {"read": 0.5, "a": 2.0, "b": 1.0, "c": None}, "rounds": {"ours": [1, 1, 1]}}
    row |= {"splits": 4, "scales": "slot", "batch_invariant": True}
    options = run.parse(["decode", "--again", "--json", "x", "--append"])
    found = run.as_it_was(row, options)
    assert (found.rival, found.rounds, found.splits, found.scales) == ("best", 3, 4, "slot")
    assert found.batch_invariant and not found.append
    assert run.as_it_was(row | {"rival": "a"}, options).rival == "a"
    assert list(run.rivals_of(row)) == ["a", "b"]


def test_a_wrong_answer_is_not_timed(tmp_path, monkeypatch, capsys):
    forward = cuflash.forward
    monkeypatch.setattr(cuflash, "forward", lambda *arrays, **keywords: forward(*arrays, **keywords) * 1.01)
    arguments = "--engine numpy --dtype float32 --head-dim 16 --length 48 --tokens 48 --width 16 --contenders="
    assert run.main([*arguments.split(), "--mask", "full", "--json", str(tmp_path / "x.json")]) == 1
    assert "FAILED" in capsys.readouterr().out and not (tmp_path / "x.json").exists()


def test_the_path_of_a_gpu_run(tmp_path, monkeypatch, h200):
    """All that `run` does for a GPU, with arrays that stay on the host."""
    pytest.importorskip("cupy")
    forward = cuflash.forward
    monkeypatch.setattr(run, "find_gpu", lambda: (None, ""))
    monkeypatch.setattr(cuflash, "forward", lambda *arrays, engine, **keywords: forward(*arrays, **keywords))
    monkeypatch.setattr(gpu, "to_device", lambda array: array)
    monkeypatch.setattr(timing, "EventTimer", lambda cold: timing.WallTimer())
    monkeypatch.setattr(run.Inputs, "synchronize", lambda inputs: None)
    monkeypatch.setattr(run.Inputs, "trim", lambda inputs: None)
    arguments = "--head-dim 64 --length 32 --tokens 32 --width 64 --contenders fa2 --quick --mask causal"
    assert run.main([*arguments.split(), "--json", str(tmp_path / "x.json")]) == 0
    (row,) = record.read(tmp_path / "x.json")["cases"]
    assert row["variant"].startswith("forward_bf16_causal_d64_") and row["cold"] and row["rival"] == "fa2"
    assert len(row["rounds"]["ours"]) == 2 and row["launches"] == 5 and row["host_us"]["ours"] > 0


def test_private_contenders_come_from_a_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text("class Mine:\n    name = 'mine'\ndef contenders():\n    return [Mine()]\n")
    (tmp_path / "bad.py").write_text("import nowhere_to_be_found\n")
    monkeypatch.setenv("CUFLASH_CONTENDERS", str(tmp_path))
    assert {"mine", "fa2", "cudnn", "naive"} <= set(contenders.found())
    assert "bad.py left out: ModuleNotFoundError" in capsys.readouterr().out


# The parts of .ci/gpu -------------------------------------------------------------------------------------------


def test_junit_counts(tmp_path):
    path = tmp_path / "tests.xml"
    path.write_text('<testsuites><testsuite errors="1" failures="2" skipped="3" tests="10" /></testsuites>')
    assert gpu.count_tests(path) == {"passed": 4, "failed": 3, "skipped": 3}


def test_sanitizer_summaries_are_read():
    memcheck = "========= Invalid __global__ write\n========= ERROR SUMMARY: 2 errors\n"
    racecheck = "========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)\n"
    done = sanitize.DONE + '{"launches": 4, "variants": 2, "of": 2}\n'
    assert sanitize.errors_in(memcheck) == 2 and sanitize.errors_in(racecheck) == 1
    assert sanitize.errors_in("cannot run") is None
    row, well = sanitize.row_of("synccheck", "forward", done + "========= ERROR SUMMARY: 0 errors\n")
    assert well and row["errors"] == 0 and row["launches"] == 4
    for log in ("========= ERROR SUMMARY: 0 errors\n", done, "", racecheck + done):
        row, well = sanitize.row_of("racecheck", "forward", log)
        assert not well and row["errors"] == 1


def test_sanitizer_problems_reach_their_variants(h200):
    for variant in _plan.variants(H200):
        if variant.kernel in sanitize.AROUND:
            continue
        for *shapes, keywords in sanitize.problems_of(variant):
            q, k, v = arrays = sanitize.operands(variant, shapes, np.random.default_rng(0))
            if variant.backward:
                out = np.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
                arrays = out, q, k, v, out, np.empty(q.shape[:-1], ELEMENTS[variant.element].lse)
            if variant.function == "decode":  # each call has lengths of its own
                keywords["lengths"] = np.array([k.shape[2], 7], np.int32)
            assert gpu.variant_of(variant.function, *arrays, engine=variant.engine, **keywords) == variant.name


def test_a_sanitized_call_names_its_kernels(monkeypatch, h200):
    monkeypatch.setattr(gpu, "to_device", lambda array: array)
    monkeypatch.setattr(cuflash, "forward", lambda *arrays, **keywords: (arrays[0], arrays[0][..., 0]))
    monkeypatch.setattr(cuflash, "backward", lambda *arrays, **keywords: None)
    arrays = [np.zeros((1, 2, 40, 64), np.float16)] * 3
    names = [name.split("_f16")[0] for name in sanitize.run_once("backward", arrays, {"engine": "sm90"})]
    assert names == ["backward_rows", "backward_sm90", "backward_finish"]
    assert len(sanitize.run_once("forward", arrays, {"engine": "portable"})) == 1
    arrays = [x.astype(np.float32) for x in arrays]
    for keywords, parts in (({}, "3"), ({"precision": "tf32"}, "2")):
        names = sanitize.run_once("forward", arrays, {"engine": "sm90"} | keywords)
        assert [name.split("_f32_window")[0] for name in names] == ["forward_parts", "forward_f32_sm90"]
        assert all(name.endswith(f"_p{parts}") for name in names)


def fuzz_on_the_host(monkeypatch, variants):
    monkeypatch.setattr(gpu, "to_device", lambda array: array)
    total = fuzz.Tally("")
    for variant in variants:
        tally, well = fuzz.task(variant, 0, 4, "numpy")
        assert well and tally.dtype == variant.element
        total.add(tally)
    return total


def test_fuzz_aims_at_tiles_for_many_keys(h200):
    for variant in filter(gpu.fewest_keys, _plan.variants(H200)):
        for seed in range(4):
            q, k, v = fuzz.draw(variant, seed)[0].operands()
            assert q.shape[-2] < 1000 and k.shape[-2] >= gpu.fewest_keys(variant)


def test_fuzz_aims_at_the_parts_of_float32(h200):
    for variant in (each for each in _plan.variants(H200) if each.kernel == "forward_f32_sm90"):
        for seed in range(8):
            example, _ = fuzz.draw(variant, seed)
            arrays = example.operands()
            assert example.keywords.get("precision") == (None if variant.parts == 3 else "tf32")
            if 0 not in arrays[0].shape + arrays[1].shape:
                assert gpu.variant_of("forward", *arrays, engine="sm90", **example.keywords) == variant.name


def test_a_case_of_a_precision_is_asked_for_and_judged_by_it():
    words = "--dtype float32 --precision tf32 --head-dim 128 --mask causal".split()
    for each in run.cells(run.parse(words)):
        assert each.keywords == {"causal": True, "precision": "tf32"}
        assert record.case_row(each)["precision"] == "tf32"
    q = np.ones((1, 1, 4, 8), np.float32)
    bound = [gpu.bounded(q, q, q, engine="sm90", precision=each).lse_bound.max() for each in (None, "tf32")]
    assert 5 * bound[0] < bound[1], "two parts are less true"


def test_fuzz_draws_what_it_aims_at(monkeypatch, h200):
    total = fuzz_on_the_host(monkeypatch, VARIANTS)
    assert total.messages == [] and total.failures == 0 and 0 < total.worst <= 1
    assert total.examples == sum(total.variants.values()) == 4 * len(VARIANTS)
    aimed = sum(min(4, total.variants[variant.name]) for variant in VARIANTS)
    assert aimed > 0.6 * total.examples
    for name in ("several_key_tiles", "empty_rows", "views", "gqa", "value_dim_differs", "hidden_infinity"):
        assert total.notable[name] > 0, name


def test_fuzz_finds_a_wrong_answer(monkeypatch, h200):
    forward = cuflash.forward

    def wrong(q, k, v, **keywords):
        return forward(q, k * k.dtype.type(1.01), v, **keywords)

    monkeypatch.setattr(cuflash, "forward", wrong)
    judged = [each for each in VARIANTS if each.element == "float64" and each.kernel != "decode_real"]
    total = fuzz_on_the_host(monkeypatch, judged)
    assert total.failures > 0.8 * total.examples and "--replay forward_f64_f64" in total.messages[0]


def test_a_broken_context_ends_a_task(monkeypatch, h200):
    class CUDARuntimeError(Exception):
        pass

    def broken(*arrays, **keywords):
        raise CUDARuntimeError("illegal address")

    monkeypatch.setattr(cuflash, "forward", broken)
    monkeypatch.setattr(gpu, "to_device", lambda array: array)
    tally, well = fuzz.task(VARIANTS[0], 0, 4, "portable")
    assert not well and tally.examples == tally.failures == 1


def test_error_over_bound_notices_nan_and_forgives_equal_infinities():
    wanted, bound = np.array([1.0, -np.inf, 0.0]), np.array([0.5, 0.1, 0.0])
    assert gpu.over_bound(np.array([1.25, -np.inf, 0.0], np.float32), wanted, bound) == 0.5
    assert gpu.over_bound(np.array([1.0, -np.inf, 1e-9]), wanted, bound) == np.inf
    assert gpu.over_bound(np.array([1.0, 3.0, 0.0]), wanted, bound) == np.inf
    assert np.isnan(gpu.over_bound(np.array([np.nan, -np.inf, 0.0]), wanted, bound))
    assert gpu.over_bound(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros((0, 3))) == 0


def test_fuzz_shares_examples_out_evenly():
    counts = collections.Counter()
    for variant, _, count in fuzz.tasks(list(_plan.variants(H200)), 20000):
        counts[variant] += count
    assert sum(counts.values()) >= 20000 and len(set(counts.values())) == 1 and min(counts.values()) >= fuzz.LEAST


def test_seeds_are_problems_of_their_own():
    drawn = [fuzz.draw(VARIANTS[0], seed)[0] for seed in (1, 1, 2)]
    shapes = [[(base.shape, base.tobytes()) for base in example.bases] for example in drawn]
    assert shapes[0] == shapes[1] != shapes[2]


def test_a_contender_in_another_process_is_timed_by_the_clock(tmp_path, monkeypatch, capsys):
    class Away(contenders.Contender):
        name = "away"

        @contextlib.contextmanager
        def child(self, case):
            yield lambda calls: 1e3 * calls

    monkeypatch.setattr(contenders, "found", lambda: {"away": Away()})
    small = ["--engine", "numpy", "--dtype", "float32", "--head-dim", "8", "--length", "32", "--tokens", "32"]
    for what in ("forward", "backward"):
        path = tmp_path / f"{what}.json"
        words = [what, *small, "--width", "16", "--mask", "causal", "--contenders", "away", "--json", str(path)]
        assert run.main(words) == 0
        (row,) = json.loads(path.read_text())["cases"]
        assert row["what"] == what and row["error_over_bound"] <= 1
        assert row["contenders"] == {"away": 2e4} and len(row["wall_rounds"]["away"]) == 5
        assert row["ratios"]["away"] > 1 and row["reproducible"] == (True if what == "backward" else None)
