"""bench/gpt2.py: gradients are quotients of differences, the loss falls, attention of either kind gives the same one.

No test here needs a GPU: the text of the kernels for it is compiled for the CPU, elements and sums one after the other.
"""

import ctypes
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import gpt2

SIZES = gpt2.TINY | {"length": 20, "dtype": "float64"}


def sizes(**changes):
    return SimpleNamespace(**SIZES | changes)


def tokens(some, steps=None):
    """Sequences for a step, or for several."""
    drawn = gpt2.batches(np.arange(1000, dtype=np.uint8) ** 2 % 251, some, steps or 1)
    return drawn if steps else drawn[0]


def model(some, name="cuflash", moved=True):
    """A model, by default with weights that make every part matter: biases and offsets are 0 at the start."""
    made = gpt2.Model(some, np, gpt2.ATTENTION[name]())
    if moved:
        for name, weight in made.master.items():
            noise = np.random.default_rng(len(name)).standard_normal(weight.shape)
            weight += (0.3 if weight.ndim == 1 else 0.1) * noise.astype(weight.dtype)
    return made


@pytest.mark.parametrize("name", gpt2.ATTENTION)
def test_gradients_are_quotients_of_differences(name):
    some = sizes()
    made, ids = model(some, name), tokens(some)
    made.loss(ids)
    slopes = {name: slope.copy() / gpt2.LOSS_SCALE for name, slope in made.slopes.items()}
    for name, weight in made.master.items():
        step = 1e-4 * np.random.default_rng(1).standard_normal(weight.shape)
        losses = []
        for sign in (1, -2):
            weight += sign * step
            losses.append(made.loss(ids))
        weight += step
        assert (slopes[name] * step).sum() == pytest.approx((losses[0] - losses[1]) / 2, rel=1e-5), name


def test_both_kinds_of_attention_give_the_same_loss_and_gradients():
    some = sizes()
    ours, theirs = model(some), model(some, "naive")
    assert ours.loss(tokens(some)) == pytest.approx(theirs.loss(tokens(some)), rel=1e-13)
    assert ours.flat.slopes == pytest.approx(theirs.flat.slopes, rel=1e-9, abs=1e-9)


def test_the_loss_is_that_of_guesses_in_the_beginning():
    some = sizes(vocabulary=300)
    assert model(some, moved=False).loss(tokens(some)) == pytest.approx(np.log(300), abs=0.1)


def test_no_token_sees_what_it_is_to_guess():
    """Else the last token would change other guesses than its own, and the odds of all tokens were not 1 in sum."""
    some = sizes(batch=1, layers=1)
    made, ids = model(some), tokens(some)[:, :6]
    others, odds = made.loss(ids[:, :-1]) * 4, []
    for token in range(some.vocabulary):
        ids[0, -1] = token
        odds.append(np.exp(others - made.loss(ids) * 5))
    assert sum(odds) == pytest.approx(1, rel=1e-12)


def test_adamw():
    """Two steps of one weight that decays and of one that does not, by the published formulas."""
    wanted, m, v = np.array([2.0, -3.0]), np.zeros(2), np.zeros(2)
    flat = SimpleNamespace(weights=wanted.copy(), first=m.copy(), second=v.copy(), narrow=np.zeros(2))
    for step, slopes in enumerate(([0.3, 0.4], [3.0, -4.0]), 1):
        flat.slopes = gpt2.LOSS_SCALE * np.array(slopes)
        gpt2.on_cpu()["adamw"](flat, (flat.slopes**2).sum(), 1, 0.01, step)
        g = np.array(slopes) / max(1, np.hypot(*slopes))
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        wanted *= [1 - 0.01 * gpt2.DECAY, 1]
        wanted -= 0.01 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)
        assert flat.weights == pytest.approx(wanted, rel=1e-12) and (flat.narrow == flat.weights).all()


def test_a_step_whose_gradients_are_not_finite_changes_nothing():
    some = sizes()
    made = model(some)
    made.slopes["positions"][-1] = np.inf  # beyond the length: no step writes there
    before = made.flat.weights.copy()
    training = SimpleNamespace(model=made, losses=[made.step(tokens(some)[:, :10])])
    assert (made.flat.weights == before).all() and gpt2.Training.results(training)[1] == 1


def test_training(capsys):
    assert gpt2.main("--numpy --steps 21 --length 32".split()) == 0
    said = capsys.readouterr().out.splitlines()
    assert "float32, numpy" in said[0] and said[1].split() == ["step", "naive", "cuflash"]
    losses = np.array([line.split()[1:] for line in said[2:23]], float)
    assert losses[-5:].mean() < losses[:5].mean() - 0.2 and abs(losses[:, 0] - losses[:, 1]).max() < 1e-4
    assert "naive" in said[23] and "cuflash" in said[24] and "in time; losses at most" in said[25]


def test_attention_alone(capsys):
    assert gpt2.main("--numpy --steps 21 --length 16 --attention cuflash".split()) == 0
    assert "naive" not in capsys.readouterr().out


def test_a_mistake_is_noticed(monkeypatch, capsys):
    forward = gpt2.cuflash.forward
    monkeypatch.setattr(gpt2.cuflash, "forward", lambda *arrays, **given: forward(*arrays, **given, scale=0.5))
    assert gpt2.main("--numpy --steps 21 --length 16".split()) == 1
    assert "is allowed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", ["--steps 1", "--width 33", "--vocabulary 255", "--dtype float16"], ids=lambda text: text[2:]
)
def test_what_cannot_be_is_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        gpt2.parse(["--numpy", *arguments.split()])
    assert f"error: {arguments.split()[0]} is" in capsys.readouterr().err


def test_the_text_is_the_same_on_every_run(tmp_path, monkeypatch):
    assert b"import" in gpt2.corpus(10_000).tobytes()
    for name in ("b.py", "a.py", "a/c.py", "test/d.py", "site-packages/e.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(gpt2.sysconfig, "get_path", lambda name: tmp_path)
    assert gpt2.corpus(11).tobytes() == b"a/c.pya.pyb"
    with pytest.raises(FileNotFoundError, match="corpus: .* has 14 bytes of Python's sources; wanted 15"):
        gpt2.corpus(15)


def test_gpt2_small_has_its_124_million_weights():
    size = sum(np.prod(shape) for shape in gpt2.shapes(SimpleNamespace(**gpt2.SMALL)).values())
    assert size == 124_475_904  # 50,304 - 50,257 rows of 768 more than GPT-2's 124,439,808


def test_on_a_gpu(gpu, capsys):
    assert gpt2.main("--layers 2 --heads 2 --width 128 --length 128 --vocabulary 256 --batch 4".split()) == 0
    said = capsys.readouterr().out
    assert "float16, cupy" in said and said.count(" 0 steps skipped") == 2


# The text of kernels ------------------------------------------------------------------------------------------------

C_TYPES = {"T": "float", "W": "float", "float32": "float", "int32": "int32_t", "int64": "int64_t"}


class Kernel:
    """What a kernel of CuPy's computes on float32 arrays, by a loop of C++."""

    folder = compiler = None

    def __init__(self, ins, outs, text, name):
        self.name, self.text = name, text
        self.ins, self.outs = ([part.split() for part in params.split(",")] for params in (ins, outs))

    @classmethod
    def reduction(cls, ins, outs, text, joined, result, identity, name):
        """A ReductionKernel; its sum is ``joined`` of a and b, and outs' result is made of a."""
        made = cls(ins, outs, text, name)
        made.joined, made.result, made.identity = joined, result, identity
        return made

    def __call__(self, *given, axis=None, keepdims=False):
        ins = given[: len(self.ins)]
        shape = np.broadcast_shapes(*map(np.shape, ins), *map(np.shape, given[len(self.ins) :]))
        summed = hasattr(self, "result")
        rows = 1 if not summed or axis is None else int(np.prod(shape[:-1]))
        out_shape = shape if not summed else () if axis is None else (*shape[:-1], 1)
        outs = given[len(self.ins) :] or (np.empty(out_shape, np.float32),)
        types = [C_TYPES[kind] for kind, _ in self.ins]
        numpy_types = [{"float": np.float32, "int32_t": np.int32, "int64_t": np.int64}[kind] for kind in types]
        arrays = [np.ascontiguousarray(np.broadcast_to(x, shape), t) for x, t in zip(ins, numpy_types, strict=True)]
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (*arrays, *outs)]
        function = self.compiled(summed)
        size = int(np.prod(shape))
        function(ctypes.c_int64(rows), ctypes.c_int64(size // rows), *pointers)
        return outs[0]

    def compiled(self, summed):
        """The loop, compiled."""
        params = [f"{C_TYPES[kind]} *{name}_" for kind, name in (*self.ins, *self.outs)]
        reads = [f"const {C_TYPES[kind]} {name} = {name}_[i];" for kind, name in self.ins]
        writes = [f"{C_TYPES[kind]} &{name} = {name}_[{'row' if summed else 'i'}];" for kind, name in self.outs]
        if summed:
            scalars = "".join(read for read in reads if re.search(r"(share|epsilon) =", read)).replace("[i]", "[0]")
            body = f"""float sum = {self.identity};
                for (int64_t i = row * columns; i < (row + 1) * columns; i++) {{
                    {"".join(reads)} float a = sum, b = {self.text}; sum = {self.joined}; }}
                {scalars} float a = sum; {"".join(writes)} {self.result};"""
        else:
            body = f"for (int64_t i = 0; i < columns; i++) {{ {''.join((*reads, *writes))} {self.text}; }}"
        source = f"""using int32_t = int; using int64_t = long long; using T = float; using W = float;
            extern "C" {{ float expf(float); float tanhf(float); float sqrtf(float); float fminf(float, float); }}
            static bool isfinite(float x) {{ return x - x == 0; }}
            static float rsqrtf(float x) {{ return 1 / sqrtf(x); }}
            extern "C" void run(int64_t rows, int64_t columns, {", ".join(params)}) {{
                for (int64_t row = 0; row < rows; row++) {{ {body} }} }}"""
        library = self.folder / f"{self.name}.so"
        if not library.exists():
            library.with_suffix(".cpp").write_text(source)
            subprocess.run([*self.compiler, "-shared", "-fPIC", "-o", library, library.with_suffix(".cpp")], check=True)
        return ctypes.CDLL(library).run


def test_kernels_compute_what_numpy_does(emulator, tmp_path, monkeypatch):
    monkeypatch.setattr(Kernel, "folder", tmp_path)
    monkeypatch.setattr(Kernel, "compiler", [emulator.compiler()])
    some, steps = sizes(dtype="float32"), []
    compiled = SimpleNamespace(ElementwiseKernel=Kernel, ReductionKernel=Kernel.reduction, empty_like=np.empty_like)
    for run in (gpt2.on_cpu(), gpt2.on_gpu(compiled)):
        made = model(some)
        made.run = SimpleNamespace(**run)
        losses = [made.step(ids) for ids in tokens(some, 3)]
        steps.append((losses, made.flat))
    (losses, flat), (found, moved) = steps
    assert found == pytest.approx(losses, rel=1e-6)
    for name in ("slopes", "weights", "first", "second", "narrow"):
        wanted = getattr(flat, name)
        assert abs(getattr(moved, name) - wanted).max() < 1e-4 * abs(wanted).max(), name
