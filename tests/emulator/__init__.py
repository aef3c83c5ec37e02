"""Run the kernels where no GPU is: their text, compiled by the system's C++ compiler against an emulation of CUDA.

    from emulator import Emulator
    out = Emulator(seed=1).forward(q, k, v, causal=True)      # NumPy arrays, the GPU's plan, kernels/*.cu

README.md beside this file says what is modelled and what is not. Errors of the kernels are `EmulatorError`: place in
``kernels/``, block and thread, and what went wrong.
"""

import ctypes
import dataclasses
import fcntl
import hashlib
import math
import os
import random
import shutil
import subprocess
import tempfile
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

from cuflash import _launch, _plan, _problem
from cuflash._dtypes import ELEMENTS

from . import tensor_map

HERE = Path(__file__).resolve().parent
RACES, UNWRITTEN = 1, 2  # checks of shared memory
LIMITS = _plan.KNOWN[9, 0]
_MESSAGE_BYTES = 1 << 14

# Products are not fused with sums: what the compiler of a GPU may or may not do, none of them relies on. -O1: the
# problems are small, so that compilation takes far longer than what more optimisation could save.
_FLAGS = (
    "-std=c++17", "-O1", "-g1", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared",
    "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas",
    *os.environ.get("CUFLASH_EMULATOR_FLAGS", "").split(),  # to debug: -O0 -g, -fsanitize=undefined
)  # fmt: skip


class EmulatorError(RuntimeError):
    """A kernel broke a rule of CUDA's execution model."""


# Compiling ------------------------------------------------------------------------------------------------------


@cache
def compiler():
    """Path of the C++ compiler, or None."""
    names = (os.environ.get("CXX"), "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _output(command, **keywords):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **keywords)
    if done.returncode:
        raise RuntimeError(f"the emulator did not compile:\n{done.stderr}")
    return done.stdout


@cache
def _environment():
    """All that shapes the binary but the text: the compiler, its idea of this processor, flags, headers."""
    if compiler() is None:
        raise RuntimeError("the emulator needs a C++ compiler: g++ or clang++, or CXX naming one; none is here")
    macros = _output([compiler(), *_FLAGS, "-dM", "-E", "-x", "c++", os.devnull])
    headers = "".join(path.read_text(encoding="utf-8") for path in sorted(HERE.glob("*.h")))
    return " ".join(_FLAGS) + macros + headers


def cache_folder():
    """Folder of the compiled kernels."""
    chosen = os.environ.get("CUFLASH_EMULATOR_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(chosen) if chosen else Path(home) / "cuflash-emulator"


def _compile(source, text, library):
    """Make a library, in one process: others that want the same wait for it."""
    with open(source, "a", encoding="utf-8") as held, tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        fcntl.flock(held, fcntl.LOCK_EX)
        if library.is_file():
            return
        held.truncate(0)
        held.write(text)
        held.flush()
        made = Path(scratch) / library.name
        _output([compiler(), *_FLAGS, f"-I{HERE}", "-o", str(made), str(source)], cwd=HERE.parent.parent)
        made.replace(library)


@cache
def build(text, entry):
    """The function that emulates launches of the kernel ``entry`` (such as "cuflash::cuflash_forward") of a text."""
    text = f"{text}\nEMULATE({entry})\n"
    name = hashlib.sha256((_environment() + text).encode()).hexdigest()[:32]
    library = cache_folder() / f"{name}.so"
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        _compile(library.with_suffix(".cpp"), text, library)
    emulate = ctypes.PyDLL(str(library)).emulate  # PyDLL: one launch at a time, for threads share the library's state
    emulate.restype = ctypes.c_bool
    return emulate


# Launching ------------------------------------------------------------------------------------------------------


class _Range(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("begin", "end", "writable")]


class _Launch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in "grid threads shared_bytes cluster seed fewest_alive most_alive".split()),
        *((name, ctypes.c_uint64) for name in "checks most_events".split()),
        ("ranges", ctypes.POINTER(_Range)),
        ("range_count", ctypes.c_uint64),
        ("args", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("message_bytes", ctypes.c_uint64),
        ("events", ctypes.c_uint64),
    ]


def launch(
    emulate, grid, threads, args, shared_bytes, memory, *,
    cluster=1, resident=False, seed=0, checks=RACES | UNWRITTEN, most_events=10**8,
):  # fmt: skip
    """Run a launch.

    Parameters
    ----------
    emulate : function
        From `build`.
    grid, threads : int
        Blocks, and threads of each: whole warps.
    args : bytes
        The kernel's struct of arguments.
    shared_bytes : int
        Dynamic shared memory of a block.
    memory : sequence of (array, bool)
        The arrays that the kernel may read and, where the second is true, write.
    cluster : int
        Blocks of a cluster, of which the grid is a multiple.
    resident : bool
        Whether all blocks live at once, as a cooperative launch has it: they may wait for one another. Else up to 4
        clusters do.
    seed : int
        Decides the order in which warps and lanes run, and how many clusters live at once.
    checks : int
        ``RACES`` and ``UNWRITTEN``, one or both or 0.
    most_events : int
        A launch of more is taken for endless.

    Returns
    -------
    int
        How many events there were: stores, collectives, barriers.

    Raises
    ------
    EmulatorError
        Where the kernel breaks a rule.
    """
    ranges = _ranges(memory)
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    packed = aligned(len(args), 128)  # as tensor maps want it
    packed[:] = np.frombuffer(args, np.uint8)
    described = _Launch(
        grid=grid, threads=threads, shared_bytes=shared_bytes, cluster=cluster, seed=seed % 2**64,
        fewest_alive=grid // cluster if resident else 1, most_alive=grid // cluster if resident else 4,
        checks=checks, most_events=most_events, ranges=ranges, range_count=len(ranges), args=packed.ctypes.data,
        message=ctypes.cast(message, ctypes.c_char_p), message_bytes=_MESSAGE_BYTES,
    )  # fmt: skip
    if not emulate(ctypes.byref(described)):
        raise EmulatorError(message.value.decode(errors="replace"))
    return described.events


def aligned(size, alignment):
    """Bytes that begin at a multiple, filled with 0xFF: NaN in every format."""
    buffer = np.full(size + alignment, 0xFF, np.uint8)
    start = -buffer.ctypes.data % alignment
    return buffer[start : start + size]


def _ranges(memory):
    """The arrays' bytes as ranges in order, those that overlap joined."""
    joined = []
    bounds = (np.lib.array_utils.byte_bounds(array) for array, _ in memory if array.size)
    writable = (may for array, may in memory if array.size)
    for (begin, end), may in sorted(zip(bounds, writable, strict=True)):
        if joined and begin < joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1]), may or joined[-1][2]
        else:
            joined.append((begin, end, may))
    return (_Range * len(joined))(*joined)


# The functions of cuflash ---------------------------------------------------------------------------------------


class DeviceArray(np.ndarray):
    """An array of the host that looks to a prepared call as one of CuPy."""

    @property
    def data(self):
        """Holder of the address."""
        return SimpleNamespace(ptr=self.ctypes.data)


class Host:
    """What a prepared call takes from CuPy (``_launch._CuPy``), on the host."""

    with_device = nullcontext

    def __init__(self, emulator):
        self.emulator, self.memory, self.counted = emulator, [], []

    def current_device(self):
        return None

    def counters(self, device, count):
        """Address of int32 that are 0."""
        array = self.empty((count,), np.dtype(np.int32))
        array[...] = 0
        self.counted.append(array)
        return array.data.ptr

    def integers(self, array, lowest, highest):
        """A copy as int32, what lies outside two numbers brought to the nearer."""
        made = self.empty(array.shape, np.dtype(np.int32))
        made[...] = np.clip(array, lowest, highest)
        return made

    tensor_map = staticmethod(tensor_map.encode)

    def multiply(self, array, factor, out, dtype):
        np.multiply(array, dtype.type(factor), out=out)

    def is_capturing(self):
        return False

    def empty(self, shape, dtype):
        """As CuPy's: aligned to 256 bytes. Filled with NaN."""
        array = aligned(math.prod(shape) * dtype.itemsize, 256).view(dtype).reshape(shape).view(DeviceArray)
        self.memory.append((array, True))
        return array

    def clear(self, array):
        """Fill an array with zero bytes."""
        array[...] = 0

    argument = bytes

    def launcher(self, step, device):
        """What launches the emulated kernel of a step."""
        emulate = self.emulator.build(step.variant)

        def launch(argument):
            launched = (step.grid, step.threads, argument, step.shared_bytes, self.memory)
            self.emulator.launch(emulate, *launched, cluster=step.cluster, resident=step.cooperative)

        return launch


class _Forward(_launch._GpuForward):
    """A prepared call of `forward` on the emulator."""

    def __call__(self, inputs, out):
        self.backend.memory += [(x, False) for x in inputs.values()] + ([] if out is None else [(out, True)])
        seen = {name: x.view(DeviceArray) for name, x in inputs.items()}
        result = self._run(seen, None if out is None else out.view(DeviceArray))
        made, *lse = (x.view(np.ndarray) for x in (result if self.return_lse else (result,)))
        out = made if out is None else out
        return (out, *lse) if lse else out


class _Backward(_launch._GpuBackward):
    """A prepared call of `backward` on the emulator."""

    def __call__(self, arrays, grads):
        self.backend.memory += [(x, False) for x in arrays.values()] + [(x, True) for x in grads]
        seen = {name: x.view(DeviceArray) for name, x in arrays.items()}
        made = self._run(seen, tuple(x.view(DeviceArray) for x in grads))
        return grads or tuple(x.view(np.ndarray) for x in made)


class _Decode(_launch._GpuDecode):
    """A prepared call of `decode` on the emulator."""

    def __call__(self, given, out):
        written = () if given["k_new"] is None else ("k", "v", "overflow")
        self.backend.memory += [(x, name in written) for name, x in given.items() if x is not None]
        self.backend.memory += [] if out is None else [(out, True)]
        seen = {name: None if x is None else x.view(DeviceArray) for name, x in given.items()}
        result = self._run(seen, None if out is None else out.view(DeviceArray))
        if any(x.any() for x in self.backend.counted):
            raise EmulatorError("decode: counters are not 0 after the launch")
        made, *lse = (x.view(np.ndarray) for x in (result if self.return_lse else (result,)))
        out = made if out is None else out
        return (out, *lse) if lse else out


class Emulator:
    """cuflash on the emulator.

    Parameters
    ----------
    seed : int
        Decides, launch after launch, what `launch` says.
    limits : cuflash._plan.Limits
        Of the device to plan for.
    overlay : path
        Folder whose files take the place of those of ``kernels/``; by default this one.
    engine : str
        Whose kernels run where none is asked for: "portable", or "sm90" for the problems that engine takes.
    """

    def __init__(self, seed=0, limits=None, overlay=HERE, engine="portable"):
        self.random, self.overlay, self.engine = random.Random(seed), overlay, engine
        # Few multiprocessors: a block that stays has several tiles of rows to work on.
        self.limits = limits or dataclasses.replace(LIMITS, processors=1 + self.random.randrange(3))

    def build(self, variant):
        """The function that emulates a variant."""
        return build(variant.text(overlay=str(self.overlay)), f"cuflash::{variant.entry}")

    def launch(self, *arguments, **keywords):
        """A launch with the next seed."""
        return launch(*arguments, seed=self.random.getrandbits(63), **keywords)

    def plan(self, problem):
        """The plan of a problem: that of arrays on a device with these limits."""
        engine = problem.engine or (None if self.engine == "sm90" else self.engine)
        with mock.patch.multiple(_plan, SHORT_KEYS=16, RAGGED_KEYS=64):  # for lengths that take no time are short
            return _plan.plan(dataclasses.replace(problem, library="cupy", engine=engine), self.limits)

    def prepare(self, q, k, v, *, backward=False, **keywords):
        """Compile the kernels that a call of `forward` takes and, if asked, those of `backward`."""
        given = {"scale": None, "causal": False, "window": None, "engine": None} | keywords
        problems = [_problem.forward(q, k, v, return_lse=False, out=None, **given)]
        if backward:
            out = np.empty(problems[0].out_shape, q.dtype)
            lse = np.empty(problems[0].lse_shape, ELEMENTS[problems[0].dtype].lse)
            problems.append(_problem.backward(out, q, k, v, out, lse, dlse=None, grads=None, **given))
        for problem in problems:
            for step in self.plan(problem).steps:
                self.build(step.variant)

    def prepare_decode(self, q, k_cache, v_cache, kv_format=None, page_size=None):
        """Compile the kernels of a call of `decode`, which are the same for all keywords but format and pages."""
        self.build(_plan.append_variant(q.dtype.name))
        rows = q.shape[1] // k_cache.shape[1] * q.shape[2]
        dims = q.shape[-1], v_cache.shape[-1]
        self.build(_plan.decode_variant_of(kv_format or q.dtype.name, *dims, self.limits, rows, page_size or 0))

    def prepare_cache(self, q, k, v):
        """Compile the kernel of a call of `forward` on a cache."""
        self.build(_plan.cache_variant(q.dtype.name, q.shape[-1], v.shape[-1], self.limits))

    def forward(
        self, q, k, v, *, lengths=None, page_table=None, scale=None, causal=False, window=None, precision=None,
        return_lse=False, out=None, engine=None,
    ):  # fmt: skip
        """`cuflash.forward` of NumPy arrays, by the kernels. ``engine`` is None or "emulated"."""
        engine = None if engine == "emulated" else engine
        inputs = {"q": q, "k": k, "v": v, "lengths": lengths, "page_table": page_table}
        inputs = {name: _problem.adopt("forward", name, x) for name, x in inputs.items() if x is not None}
        out = out if out is None else _problem.adopt("forward", "out", out)
        with mock.patch.object(_problem, "_check_tables"):  # what a GPU holds the host does not look at
            problem = _problem.forward(
                **inputs, scale=scale, causal=causal, window=window, precision=precision, return_lse=return_lse,
                out=out, engine=engine,
            )  # fmt: skip
        return _Forward(problem, self.plan(problem), Host(self))(inputs, out)

    def backward(
        self, dout, q, k, v, out, lse, *, scale=None, causal=False, window=None, dlse=None, grads=None, engine=None
    ):  # fmt: skip
        """`cuflash.backward` of NumPy arrays, by the kernels. ``engine`` is None or "emulated"."""
        engine = None if engine == "emulated" else engine
        arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
        arrays = {name: _problem.adopt("backward", name, x) for name, x in arrays.items()}
        arrays |= {} if dlse is None else {"dlse": _problem.adopt("backward", "dlse", dlse)}
        problem = _problem.backward(
            **({"dlse": None} | arrays), scale=scale, causal=causal, window=window, grads=grads, engine=engine
        )
        return _Backward(problem, self.plan(problem), Host(self))(arrays, tuple(grads or ()))

    def decode(
        self, q, k_cache, v_cache, *, lengths=None, page_table=None, k_scale=None, v_scale=None, kv_format=None,
        k_new=None, v_new=None, rotary=None, rotary_interleaved=False, overflow=None, scale=None, causal=True,
        window=None, splits=None, batch_invariant=False, return_lse=False, out=None, engine=None,
    ):  # fmt: skip
        """`cuflash.decode` of NumPy arrays, by the kernels. ``engine`` is None or "emulated"."""
        engine = None if engine == "emulated" else engine
        given = {
            "q": q, "k_cache": k_cache, "v_cache": v_cache, "lengths": lengths, "page_table": page_table,
            "k_scale": k_scale, "v_scale": v_scale, "k_new": k_new, "v_new": v_new, "overflow": overflow,
        }  # fmt: skip
        given = {name: None if x is None else _problem.adopt("decode", name, x) for name, x in given.items()}
        with mock.patch.object(_problem, "_check_tables"):  # what a GPU holds the host does not look at
            problem = _problem.decode(
                **given, rotary=rotary, rotary_interleaved=rotary_interleaved, kv_format=kv_format, scale=scale,
                causal=causal, window=window, splits=splits, batch_invariant=batch_invariant, return_lse=return_lse,
                out=out, engine=engine,
            )  # fmt: skip
        given |= {"k": given.pop("k_cache"), "v": given.pop("v_cache")}
        given |= dict(zip(("cos", "sin"), rotary or (None, None), strict=True))
        return _Decode(problem, self.plan(problem), Host(self))(given, out)
