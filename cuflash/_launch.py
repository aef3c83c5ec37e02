"""Launch: allocate, pack arguments, set the device, launch. Decides nothing.

An engine is a class here: made from a problem and its plan it is a prepared call, which takes the caller's arrays and
returns results. For CuPy arrays prepared calls are kept in a bounded dict, so that the second call of its kind packs
pointers and launches, and nothing more.
"""

import inspect
import math
import struct
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import numpy as np

from . import _compile, _numpy, _plan, _problem
from ._dtypes import E4M3, ELEMENTS, KINDS
from ._layout import Integers
from ._tensor_map import tensor_map
from ._variant import APPEND_POINTERS, DECODE_POINTERS, FORWARD_POINTERS

MOST_CALLS = 1024  # prepared calls that are kept

ZEROS, LINE = 2**20, 128  # bytes of counters made at once, and of a line of the cache, which no two calls share
MOST_ARGUMENTS = 64  # sets of pointers for which a prepared call keeps its kernels' arguments

_calls = {}
_counters = {}  # address and bytes, by device, stream and thread
_spare_zeros = {}  # address and bytes, by device
_kept = []  # what graphs read and write, whose replays do not end where a call does; and all counters
_lock = threading.Lock()


def forward(q, k, v, lengths, page_table, scale, causal, window, precision, return_lse, out, engine):
    """Run ``forward``: by a prepared call where one of its kind has been made before."""
    inputs = {"q": q, "k": k, "v": v}
    if lengths is not None:
        inputs["lengths"] = lengths
    if page_table is not None:
        inputs["page_table"] = page_table
    given = inputs.values() if out is None else (*inputs.values(), out)
    kind = "forward", return_lse, precision, lengths is None, page_table is None
    key, call = _prepared(given, kind, scale, causal, window, engine)
    if call is not None:
        if out is not None:
            _problem.check_overlap("forward", "out", out, inputs)
        return call(inputs, out)
    inputs = {name: _problem.adopt("forward", name, x) for name, x in inputs.items()}
    out = out if out is None else _problem.adopt("forward", "out", out)
    problem = _problem.forward(
        **inputs, scale=scale, causal=causal, window=window, precision=precision, return_lse=return_lse, out=out,
        engine=engine,
    )  # fmt: skip
    plan = make_plan(problem)
    call = (_NumpyForward if plan.engine == "numpy" else _GpuForward)(problem, plan)
    result = call(inputs, out)
    _keep(key, call)
    return result


def backward(dout, q, k, v, out, lse, scale, causal, window, dlse, grads, engine):
    """Run ``backward``: by a prepared call where one of its kind has been made before."""
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    arrays |= {} if dlse is None else {"dlse": dlse}
    results = {}
    if isinstance(grads, (tuple, list)) and len(grads) == 3:
        results = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    given = (*arrays.values(), *results.values())
    key, call = _prepared(given, ("backward",), scale, causal, window, engine)
    if call is not None and (grads is None or results):
        others = dict(arrays)
        for name, grad in results.items():
            _problem.check_overlap("backward", name, grad, others)
            others[name] = grad
        return call(arrays, tuple(results.values()))
    arrays, results = (
        {name: _problem.adopt("backward", name, x) for name, x in each.items()} for each in (arrays, results)
    )
    problem = _problem.backward(
        **({"dlse": None} | arrays), scale=scale, causal=causal, window=window, engine=engine,
        grads=tuple(results.values()) or grads,
    )  # fmt: skip
    plan = make_plan(problem)
    call = (_NumpyBackward if plan.engine == "numpy" else _GpuBackward)(problem, plan)
    grads = call(arrays, tuple(results.values()))
    _keep(key, call)
    return grads


def _prepared(arrays, kind, scale, causal, window, engine):
    """The key of a call that may be prepared, None of another; and the prepared call, where there is one."""
    cupys = getattr(sys.modules.get("cupy"), "ndarray", ())  # who holds a CuPy array has imported CuPy
    for x in arrays:
        if not isinstance(x, cupys):
            return None, None
    try:
        key = (
            *map(_key, arrays), *kind, scale, type(scale), causal, type(causal), engine,
            (*window, *map(type, window)) if isinstance(window, tuple) else window,
        )  # fmt: skip
        return key, _calls.get(key)
    except TypeError:  # a keyword that cannot be hashed: validation says what is wrong, or makes it a number
        return None, None


def _keep(key, call):
    """Keep a prepared call for the next of its kind; where there are many, in the place of the oldest."""
    if key is None:
        return
    with _lock:
        if len(_calls) >= MOST_CALLS:
            del _calls[next(iter(_calls))]
        _calls[key] = call


def make_plan(problem):
    """The plan of a problem on the device its arrays are on."""
    return _plan.plan(problem, None if problem.library == "numpy" else limits(problem.device))


def parameters(function):
    """Names of the arrays that a function takes, and its keywords with their defaults."""
    found = inspect.signature(function).parameters.values()
    arrays = [each.name for each in found if each.default is each.empty]
    return arrays, {each.name: each.default for each in found if each.default is not each.empty}


def explain(function, arrays, keywords, functions):
    """The plan of a call of one of the public functions, of which the last argument has all by name."""
    if function not in functions:
        raise ValueError(f"explain: function is {function!r}; wanted one of {', '.join(map(repr, functions))}")
    wanted, defaults = parameters(functions[function])
    if len(arrays) != len(wanted):
        raise ValueError(f"explain: {function} takes the arrays {', '.join(wanted)}; got {len(arrays)}")
    arrays = [_problem.adopt(function, name, x) for name, x in zip(wanted, arrays, strict=True)]
    problem = getattr(_problem, function)(*arrays, **(defaults | keywords))
    return make_plan(problem)


@cache
def limits(device):
    """What a device can do."""
    import cupy

    runtime = cupy.cuda.runtime
    digits = cupy.cuda.Device(device).compute_capability  # "90"
    capability = (int(digits[:-1]), int(digits[-1]))
    shared_bytes = runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, device)
    processors = runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device)
    if capability < (8, 0):
        raise RuntimeError(
            f"cuflash: device {device} has compute capability {capability[0]}.{capability[1]}; "
            f"wanted 8.0 (Ampere) or newer"
        )
    return _plan.Limits(capability, shared_bytes, processors, _compile.nvrtc_version())


def _key(array):
    """What a prepared call depends on of a CuPy array."""
    data = array.data
    return array.shape, array.strides, array.dtype, data.ptr & 15, data.device_id


class _Allocation:
    """How to make an array along the canonical axes, contiguous in a buffer's order of axes."""

    def __init__(self, buffer):
        order = (*buffer.order, len(buffer.shape) - 1)
        self.dtype = ELEMENTS[buffer.dtype].dtype if buffer.dtype in ELEMENTS else np.dtype(buffer.dtype)
        several = [axis for axis in order if buffer.shape[axis] != 1]  # others may stand anywhere
        if several == sorted(several):
            self.shape, self.axes = tuple(buffer.shape), None
        else:
            self.shape, self.axes = tuple(buffer.shape[axis] for axis in order), tuple(np.argsort(order).tolist())

    def __call__(self, empty):
        array = empty(self.shape, self.dtype)
        return array if self.axes is None else array.transpose(self.axes)


def _visible(array, problem):
    """A canonical result as the caller sees it: without a head axis where no input had one."""
    return array if problem.head_axis else array[0]


class _NumpyForward:
    """A call of the CPU engine."""

    def __init__(self, problem, plan):
        self.problem = problem
        shape = (*problem.batch, problem.heads, problem.queries)
        self.out = _Allocation(_plan.Buffer("out", (*shape, problem.value_dim), problem.dtype, problem.q.order))
        self.lse = shape, ELEMENTS[problem.dtype].lse

    def __call__(self, inputs, out):
        problem = self.problem
        result = self.out(np.empty) if out is None else _problem.canonical(out, problem.batch)
        lse = np.empty(*self.lse) if problem.return_lse else None
        if problem.cached:
            _numpy.decode(problem, **({"page_table": None} | inputs), out=result, lse=lse)
        else:
            q, k, v = (_problem.canonical(x, problem.batch) for x in inputs.values())
            _numpy.forward(problem, q, k, v, result, lse)
        out = _visible(result, problem) if out is None else out
        return (out, _visible(lse, problem)) if problem.return_lse else out


class _NumpyBackward:
    """A call of the CPU engine."""

    def __init__(self, problem, plan):
        self.problem = problem

    def __call__(self, arrays, grads):
        problem = self.problem
        wide = {name: x if problem.head_axis else x[None] for name, x in arrays.items()}
        inputs = [arrays[name] for name in ("q", "k", "v")]
        grads = grads or tuple(_like(x) for x in inputs)
        axes = len(problem.batch) + 3
        _numpy.backward(
            problem,
            wide["dout"],
            *(_problem.canonical(x, problem.batch) for x in inputs),
            *(wide.get(name) for name in ("out", "lse", "dlse")),
            *(grad[(None,) * (axes - grad.ndim)] for grad in grads),
        )
        return grads


def _like(array):
    """A new array of the shape, dtype and order of axes of another."""
    shape = array.shape
    order = _problem.Operand(shape, array.strides, True).order
    return _Allocation(_plan.Buffer("", shape, array.dtype.name, order))(np.empty)


class _CuPy:
    """What a prepared call takes from CuPy. The emulator of the kernels has the like for arrays on the host."""

    def __init__(self):
        import cupy

        self.empty, self.multiply = cupy.empty, cupy.multiply
        self.current_device, self.with_device = cupy.cuda.runtime.getDevice, cupy.cuda.Device
        self.current_stream = cupy.cuda.get_current_stream

    argument = _compile.Argument

    def launcher(self, step, device):
        """What launches a step on the current stream: ``launch(argument)``."""
        kernel, current_stream = _compile.load(step.variant, device), self.current_stream
        facts = step.grid, step.threads, step.shared_bytes, step.cooperative, step.cluster
        launch = _compile.launcher(kernel, device, *facts)
        return lambda argument: launch(current_stream().ptr, argument)

    def integers(self, array, lowest, highest):
        """A copy as int32 in C order, what lies outside two numbers brought to the nearer."""
        clipped = array.clip(lowest, highest)
        if self.is_capturing():  # the graph writes it
            _kept.append(clipped)
        return clipped.astype(np.int32, order="C")

    def clear(self, array):
        """Fill a contiguous array with zero bytes."""
        array.data.memset_async(0, array.nbytes, self.current_stream())

    def is_capturing(self):
        """Whether launches go into a graph, to run again later."""
        return self.current_stream().is_capturing()

    def counters(self, device, count):
        """Address of so many int32 that are 0 whenever a launch in the current stream begins, as each leaves them.

        A launch in a graph has its own: where it is replayed is not known here. So has a thread, since the streams
        that are each thread's own share a handle.
        """
        size = -(-4 * count // LINE) * LINE
        stream = self.current_stream()
        if stream.is_capturing():
            return self._zeros(device, size)
        key = device, stream.ptr, threading.get_ident()
        address, held = _counters.get(key, (0, 0))
        if held < size:
            address, _ = _counters[key] = self._zeros(device, size), size
        return address

    def _zeros(self, device, size):
        """Address of so many bytes of zeros that nobody else has."""
        with _lock:
            address, left = _spare_zeros.get(device, (0, 0))
            if left < size:
                capturing = self.is_capturing()
                made = size if capturing else max(ZEROS, 8 * size)
                with self.with_device(device):
                    zeros = self.empty((made // 4,), np.dtype(np.int32))
                    self.clear(zeros)
                    if capturing:  # the graph clears them, each time: only where others have taken all that there was
                        _kept.append(zeros)
                        return zeros.data.ptr
                    self.current_stream().synchronize()  # once for many calls, whose streams may be others
                _kept.append(zeros)
                address, left = zeros.data.ptr, made
            _spare_zeros[device] = address + size, left - size
            return address

    tensor_map = staticmethod(tensor_map)


class _Gpu:
    """A prepared call on a GPU: kernels loaded, arguments packed but for the pointers; all of them, for some pointers.

    Parameters
    ----------
    problem, plan : Problem, Plan
        What to compute and how.
    pointers : str
        Names of the pointers, as a kernel's struct of arguments begins; those that tensor maps see come first.
    backend : optional
        What takes CuPy's place.
    """

    def __init__(self, problem, plan, pointers, backend=None):
        self.backend = backend or _CuPy()
        self.problem, self.device = problem, problem.device
        self.current_device, self.with_device = self.backend.current_device, self.backend.with_device
        self.empty = self.backend.empty
        self.itemsize = ELEMENTS[problem.dtype].itemsize
        self.copies = {copy.name: copy for copy in plan.copies}
        self.names = pointers.split()
        self.pointers = struct.Struct(f"{len(self.names)}Q")
        self.steps = [(self.backend.launcher(step, self.device), step, self._rest(step)) for step in plan.steps]
        self.arguments = {}  # by pointers

    def _rest(self, step):
        """A step's arguments as bytes but for the pointers, which come first, and for the tensor maps."""
        args = np.zeros(1, step.variant.args)
        for name, value in step.args.items():
            args[name] = value
        return args.tobytes()[self.pointers.size :]

    def _launch(self, *pointers):
        """Run the steps in order."""
        for launch, argument in self.arguments.get(pointers) or self._pack(pointers):
            launch(argument)

    def _pack(self, pointers):
        """What launches each step, and its argument with these pointers; kept for the next time that they come."""
        packed, named = self.pointers.pack(*pointers), dict(zip(self.names, pointers, strict=True))
        steps = []
        for launch, step, rest in self.steps:
            argument = bytearray(packed + rest)
            for field, tensor in step.tensor_maps.items():
                start, itemsize = step.variant.args.fields[field][1], tensor.itemsize or self.itemsize
                address = named[tensor.operand]
                encoded = self.backend.tensor_map(address, itemsize, tensor.dims, tensor.strides, tensor.box)
                argument[start : start + len(encoded)] = encoded
            steps.append((launch, self.backend.argument(bytes(argument))))
        if len(self.arguments) >= MOST_ARGUMENTS:
            self.arguments.clear()
        self.arguments[pointers] = steps
        return steps

    def __call__(self, *arrays):
        if self.current_device() == self.device:
            return self._run(*arrays)
        with self.with_device(self.device):
            return self._run(*arrays)

    def _rows(self, copy):
        dtype = KINDS[copy.dtype].dtype
        return self.empty((*copy.shape[:-1], copy.pitch // dtype.itemsize), dtype)

    def _copied(self, copy, view):
        """A fresh addressable array with the contents of an input, seen along the canonical axes."""
        rows = self._rows(copy)
        view = view[tuple(slice(0, length) for length in copy.shape)]
        if copy.factor == 1.0:
            rows[..., : copy.shape[-1]] = view
        else:
            self.backend.multiply(view, copy.factor, out=rows[..., : copy.shape[-1]], dtype=rows.dtype)
        return rows


class _GpuForward(_Gpu):
    """A prepared call of ``forward`` on a GPU."""

    def __init__(self, problem, plan, backend=None):
        self.ticket = any(buffer.zeroed for buffer in plan.buffers)
        kernel = plan.variant.kernel if plan.steps else "forward"
        super().__init__(problem, plan, FORWARD_POINTERS.get(kernel, "q k v out lse"), backend)
        self.return_lse, self.tables = problem.return_lse, ("lengths", "page_table") if problem.cached else ()
        self.absent = (0,) * (len(self.names) - 5)
        self.out, self.lse, *self.parts = (_Allocation(buffer) for buffer in plan.buffers if not buffer.zeroed)
        if self.ticket:
            self.backend.counters(self.device, 1)  # so that there are some

    def _run(self, inputs, out):
        copies = self.copies
        if copies:
            inputs = {name: self._laid_out(copies[name], x) if name in copies else x for name, x in inputs.items()}
        result = self.out(self.empty) if out is None else out
        lse = self.lse(self.empty) if self.return_lse else None
        written = self._rows(copies["out"]) if "out" in copies else result
        parts, more = [allocation(self.empty) for allocation in self.parts], self.absent
        if self.ticket:
            more = (self.backend.counters(self.device, 1),)
        elif self.tables or parts:
            more = (0 if x is None else x.data.ptr for x in parts or map(inputs.get, self.tables))
        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        self._launch(q.data.ptr, k.data.ptr, v.data.ptr, written.data.ptr, 0 if lse is None else lse.data.ptr, *more)
        if written is not result:
            target = result if out is None else _problem.canonical(out, self.problem.batch)
            target[...] = written[..., : target.shape[-1]]
        if (copies or parts) and self.backend.is_capturing():
            _kept.append((inputs, written, parts))
        out = _visible(result, self.problem) if out is None else out
        return (out, _visible(lse, self.problem)) if self.return_lse else out

    def _laid_out(self, copy, array):
        """What stands for an input that a kernel cannot address."""
        if isinstance(copy, Integers):
            return self.backend.integers(array, copy.lowest, copy.highest)
        return self._copied(copy, array if self.tables else _problem.canonical(array, self.problem.batch))


class _GpuBackward(_Gpu):
    """A prepared call of ``backward`` on a GPU."""

    def __init__(self, problem, plan, backend=None):
        pointers = "q k v dout out lse dlse dq dk dv row_lse row_delta dq_sum turns suspects"
        super().__init__(problem, plan, pointers, backend)
        self.grads = [_Allocation(buffer) for buffer in plan.buffers[:3]]
        self.buffers = {buffer.name: (_Allocation(buffer), buffer.cleared) for buffer in plan.buffers[3:]}

    def _run(self, arrays, grads):
        canonical = {"q": arrays["q"], "k": arrays["k"], "v": arrays["v"]}
        if not grads:
            made = [allocation(self.empty) for allocation in self.grads]
            grads = tuple(x[(0,) * (x.ndim - arrays[like].ndim)] for x, like in zip(made, canonical, strict=True))
        results = dict(zip(("dq", "dk", "dv"), grads, strict=True))
        if not self.steps:
            for grad in grads:
                grad[...] = 0
            return grads
        held = arrays | results
        for name, copy in self.copies.items():
            held[name] = self._rows(copy) if name in results else self._copied(copy, self._view(name, arrays[name]))
        for name, (allocation, cleared) in self.buffers.items():
            held[name] = allocation(self.empty)
            if cleared:
                self.backend.clear(held[name])
        self._launch(*(held[name].data.ptr if name in held else 0 for name in self.names))
        for name, grad in results.items():
            if name in self.copies:
                copy = self.copies[name]
                leading = grad[(None,) * (len(copy.shape) - grad.ndim)]
                leading[...] = _summed(held[name][..., : copy.shape[-1]], copy.summed)
        if self.backend.is_capturing():
            _kept.append([x for name, x in held.items() if name in self.copies or name in self.buffers])
        return grads

    def _view(self, name, array):
        """An input along the canonical axes."""
        if name in ("lse", "dlse"):
            return array if self.problem.head_axis else array[None]
        return _problem.canonical(array, self.problem.batch)


def _summed(array, axes):
    """An array summed along some axes, which keep length 1, in an order of lengths alone; the array is used up."""
    for axis in axes:
        before = (slice(None),) * axis
        while (length := array.shape[axis]) > 1:  # halves are added until one is left
            half = length // 2
            array[(*before, slice(0, half))] += array[(*before, slice(length - half, length))]
            array = array[(*before, slice(0, length - half))]
    return array


# Decode: what its callers call the arrays that kernels know by shorter names.
_DECODE_NAMES = {"k": "k_cache", "v": "v_cache", "cos": "rotary cos", "sin": "rotary sin"}


class _NumpyDecode:
    """A call of the CPU engine."""

    def __init__(self, problem, plan):
        self.problem = problem
        self.out = _Allocation(_plan.Buffer("out", problem.out_shape, problem.dtype, problem.q.order))

    def __call__(self, given, out):
        problem = self.problem
        out = self.out(np.empty) if out is None else out
        lse = np.empty(problem.lse_shape, ELEMENTS[problem.dtype].lse) if problem.return_lse else None
        scales = {name: given[name] for name in ("k_scale", "v_scale")}
        rest = {name: x for name, x in given.items() if name not in scales}
        q, lengths = _numpy.append(problem, **rest)
        _numpy.decode(problem, q, given["k"], given["v"], lengths, given["page_table"], **scales, out=out, lse=lse)
        return (out, lse) if problem.return_lse else out


class _GpuAppend(_Gpu):
    """What a prepared call of ``decode`` launches first, where it appends or rotates."""

    def __init__(self, problem, plan, backend):
        super().__init__(problem, plan, APPEND_POINTERS, backend)
        self.made = {x.name: _Allocation(x) for x in plan.buffers if x.name in ("totals", "rotated")}

    def _run(self, held):
        """Launch on arrays by name; what it has made."""
        made = {name: allocation(self.empty) for name, allocation in self.made.items()}
        held = held | made
        # An array without elements, such as angles of no pairs, has no address, but is there all the same.
        self._launch(*(0 if (x := held.get(name)) is None else x.data.ptr or 1 for name in self.names))
        return made


class _GpuDecode(_Gpu):
    """A prepared call of ``decode`` on a GPU."""

    def __init__(self, problem, plan, backend=None):
        before = tuple(step for step in plan.steps if step.variant.kernel == "append")
        super().__init__(problem, replace(plan, steps=plan.steps[len(before) :]), DECODE_POINTERS, backend)
        self.append = _GpuAppend(problem, replace(plan, steps=before), self.backend) if before else None
        self.return_lse = problem.return_lse
        self.latent = bool(plan.steps) and plan.steps[-1].variant.kernel == "decode_latent"
        self.out, self.lse = map(_Allocation, plan.buffers[:2])
        buffers = {buffer.name: buffer for buffer in plan.buffers}
        stands = {name: made for name, made in (("lengths", "totals"), ("q", "rotated")) if made in buffers}
        self.read = [stands.get(name, name) for name in self.names[:-1]]  # the last are counters
        self.early = tuple(name for name in self.copies if name not in ("k", "v"))
        self.late = tuple(name for name in self.copies if name in ("k", "v"))  # with what an append has written
        self.parts, self.splits = None, 0
        if "parts" in buffers:
            self.parts, self.splits = _Allocation(buffers["parts"]), math.prod(buffers["arrived"].shape)
            self.backend.counters(self.device, self.splits)  # so that there are some

    def _run(self, given, out):
        given["out"] = result = self.out(self.empty) if out is None else out
        given["lse"] = lse = self.lse(self.empty) if self.return_lse else None
        if self.steps or self.append:
            self._decode(given)
        return (result, lse) if self.return_lse else result

    def _decode(self, given):
        """Launch on arrays by name."""
        made, counters = {}, 0
        if self.copies or self.append:
            for name in self.early:
                made[name] = self._laid_out(name, given[name])
            if self.append:
                made |= self.append._run(given | made)
            for name in self.late:
                made[name] = self._laid_out(name, given[name])
        held = given | made if made else given
        if self.parts is not None:
            held["parts"] = made["parts"] = self.parts(self.empty)
            counters = self.backend.counters(self.device, self.splits)
        self._launch(*[0 if (x := held.get(name)) is None else x.data.ptr for name in self.read], counters)
        if "out" in made:
            given["out"][...] = made["out"][..., : given["out"].shape[-1]]
        if made and self.backend.is_capturing():
            _kept.append(made)

    def _laid_out(self, name, array):
        """What stands for an operand that a kernel cannot address."""
        copy = self.copies[name]
        if isinstance(copy, Integers):
            return self.backend.integers(array, copy.lowest, copy.highest)
        return self._rows(copy) if name == "out" else self._copied(copy, array)


def decode(
    q, k_cache, v_cache, lengths, page_table, k_scale, v_scale, kv_format, k_new, v_new, rotary, rotary_interleaved,
    overflow, scale, causal, window, splits, batch_invariant, return_lse, out, engine,
):  # fmt: skip
    """Run ``decode``: by a prepared call where one of its kind has been made before."""
    cos, sin = _problem.rotary_pair(rotary) or (None, None)
    given = {
        "q": q, "k": k_cache, "v": v_cache, "lengths": lengths, "page_table": page_table, "k_scale": k_scale,
        "v_scale": v_scale, "k_new": k_new, "v_new": v_new, "cos": cos, "sin": sin, "overflow": overflow,
    }  # fmt: skip
    arrays = [x for x in (*given.values(), out) if x is not None]
    kind = (
        "decode", *[x is None for x in given.values()], out is None, kv_format, bool(rotary_interleaved), return_lse,
        splits, type(splits), bool(batch_invariant),
    )
    key, call = _prepared(arrays, kind, scale, causal, window, engine)
    if call is not None and call.latent and k_cache.data.ptr != v_cache.data.ptr:
        call = None  # values that are no columns of the keys, of which validation says what is wrong
    if call is not None:
        if out is not None or k_new is not None:
            read = {_DECODE_NAMES.get(name, name): x for name, x in given.items() if x is not None}
            written = () if k_new is None else ("k_cache", "v_cache", "overflow")
            written = {name: read.pop(name) for name in written if name in read}
            _problem.check_overlaps("decode", written if out is None else written | {"out": out}, read)
        return call(given, out)
    for name, x in given.items():
        given[name] = x if x is None else _problem.adopt("decode", _DECODE_NAMES.get(name, name), x)
    out = out if out is None else _problem.adopt("decode", "out", out)
    named = {_DECODE_NAMES.get(name, name): x for name, x in given.items()}
    cos, sin = (named.pop(_DECODE_NAMES[name]) for name in ("cos", "sin"))
    problem = _problem.decode(
        **named, rotary=None if rotary is None else (cos, sin), rotary_interleaved=rotary_interleaved,
        kv_format=kv_format, scale=scale, causal=causal, window=window, splits=splits,
        batch_invariant=batch_invariant, return_lse=return_lse, out=out, engine=engine,
    )  # fmt: skip
    plan = make_plan(problem)
    call = (_NumpyDecode if plan.engine == "numpy" else _GpuDecode)(problem, plan)
    result = call(given, out)
    _keep(key, call)
    return result


# Elementwise ------------------------------------------------------------------------------------------------------


def _home(array):
    """The module an array is of, and a context in which its device is the current one."""
    if _problem.library(array) == "numpy":
        return np, nullcontext()
    import cupy

    return cupy, cupy.cuda.Device(array.data.device_id)


def merge(outs, lses):
    """Run ``merge``, in float32 (float64 for float64): elementwise work that NumPy and CuPy do well."""
    outs, lses = _problem.merge(outs, lses)
    xp, place = _home(outs[0])
    with place, np.errstate(all="ignore"):
        top = lses[0]
        for lse in lses[1:]:
            top = xp.fmax(top, lse)
        shift = xp.where(top == -xp.inf, 0, top)
        weights = [xp.exp(lse - shift) for lse in lses]
        total = sum(weights[1:], weights[0])
        inverse = 1 / xp.where(total == 0, 1, total)  # first of all: out never leaves the range of its parts
        joined = xp.zeros(outs[0].shape, top.dtype)
        for out, lse, weight in zip(outs, lses, weights, strict=True):
            joined += xp.where(lse[..., None] == -xp.inf, 0, (weight * inverse)[..., None] * out.astype(top.dtype))
        return joined.astype(outs[0].dtype), xp.log(total) + shift


def quantize(x, kv_format, axis):
    """Run ``quantize``, in float32: elementwise work too."""
    x = _problem.quantize(x, kv_format, axis)
    xp, place = _home(x)
    with place, np.errstate(all="ignore"):
        largest = 127.0 if kv_format == "int8" else float(E4M3[-1])
        x = x.astype(np.float32)
        sizes = abs(x)
        most = sizes.max if x.size else sizes.sum  # a maximum of nothing is an error
        scales = most(axis=axis, keepdims=True) * np.float32(1 / largest)
        scales = xp.where(scales == 0, np.float32(1), scales)
        x = x / scales
        if kv_format == "int8":
            elements = xp.clip(xp.rint(x), -127, 127).astype(np.int8)
        else:  # CuPy has no such dtype: a code is the number of midpoints below
            midpoints = xp.asarray((E4M3[1:] + E4M3[:-1]) / 2)
            codes = xp.searchsorted(midpoints, abs(x)).astype(np.uint8)
            codes = xp.where(xp.isnan(x), np.uint8(0x7F), codes)
            elements = codes | xp.signbit(x).astype(np.uint8) << np.uint8(7)
        return elements, scales.squeeze(axis)
