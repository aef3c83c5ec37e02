"""Launch: allocate, pack arguments, set the device, launch. Decides nothing.

An engine is a class here: made from a problem and its plan it is a prepared call, which takes the caller's arrays and
returns results. For CuPy arrays prepared calls are kept in a bounded dict, so that the second call of its kind packs
pointers and launches, and nothing more.
"""

import struct
import sys
import threading
from contextlib import nullcontext
from functools import cache

import numpy as np

from . import _compile, _numpy, _plan, _problem
from ._dtypes import ELEMENTS
from ._tensor_map import tensor_map

MOST_CALLS = 1024  # prepared calls that are kept

TICKETS, TICKET_BYTES = 1024, 128  # made at once; each alone in a line of the cache
MOST_MAPS = 64  # sets of operands whose tensor maps a prepared call keeps

_calls = {}
_tickets = {}  # by device, stream and thread
_spare_tickets = {}  # by device
_kept = []  # what graphs read and write, whose replays do not end where a call does; and all tickets
_lock = threading.Lock()


def forward(q, k, v, scale, causal, window, return_lse, out, engine):
    """Run ``forward``: by a prepared call where one of its kind has been made before."""
    key = call = None
    kind = getattr(sys.modules.get("cupy"), "ndarray", ())  # who holds a CuPy array has imported CuPy
    if all(isinstance(x, kind) for x in ((q, k, v) if out is None else (q, k, v, out))):
        try:
            key = (
                *(_key(q), _key(k), _key(v), None if out is None else _key(out)),
                *(scale, type(scale), causal, type(causal), return_lse, engine),
                (*window, *map(type, window)) if isinstance(window, tuple) else window,
            )
            call = _calls.get(key)
        except TypeError:  # a keyword that cannot be hashed: validation says what is wrong, or makes it a number
            key = None
        if call is not None:
            if out is not None:
                _problem.check_overlap("forward", "out", out, {"q": q, "k": k, "v": v})
            return call(q, k, v, out)
    q, k, v = (_problem.adopt("forward", name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    out = out if out is None else _problem.adopt("forward", "out", out)
    problem = _problem.forward(
        q, k, v, scale=scale, causal=causal, window=window, return_lse=return_lse, out=out, engine=engine
    )
    plan = make_plan(problem)
    call = (_NumpyForward if plan.engine == "numpy" else _GpuForward)(problem, plan)
    result = call(q, k, v, out)
    if key is not None:
        with _lock:
            if len(_calls) >= MOST_CALLS:
                del _calls[next(iter(_calls))]
            _calls[key] = call
    return result


def make_plan(problem):
    """The plan of a problem on the device its arrays are on."""
    return _plan.plan(problem, None if problem.library == "numpy" else limits(problem.device))


def explain(function, arrays, keywords):
    """The plan of a call of any of the three functions."""
    names = {"forward": "q k v", "backward": "dout q k v out lse", "decode": "q k_cache v_cache"}
    if function not in names:
        raise ValueError(f"explain: function is {function!r}; wanted one of {', '.join(map(repr, names))}")
    defaults = {
        "forward": {"causal": False, "return_lse": False, "out": None},
        "backward": {"causal": False, "dlse": None, "grads": None},
        "decode": {"causal": True, "return_lse": False, "out": None, "lengths": None, "page_table": None},
    }[function] | {"scale": None, "window": None, "engine": None}
    wanted = names[function].split()
    if len(arrays) != len(wanted):
        raise ValueError(f"explain: {function} takes the arrays {', '.join(wanted)}; got {len(arrays)}")
    arrays = [_problem.adopt(function, name, x) for name, x in zip(wanted, arrays, strict=True)]
    problem = getattr(_problem, function)(*arrays, **(defaults | keywords))
    if function != "forward":
        _on_the_cpu(function, problem)
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
        self.shape = tuple(buffer.shape[axis] for axis in order)
        self.dtype = ELEMENTS[buffer.dtype].dtype
        self.axes = None if order == tuple(range(len(order))) else tuple(np.argsort(order).tolist())

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

    def __call__(self, q, k, v, out):
        problem = self.problem
        result = self.out(np.empty) if out is None else _problem.canonical(out, problem.batch)
        lse = np.empty(*self.lse) if problem.return_lse else None
        _numpy.forward(problem, *(_problem.canonical(x, problem.batch) for x in (q, k, v)), result, lse)
        out = _visible(result, problem) if out is None else out
        return (out, _visible(lse, problem)) if problem.return_lse else out


class _CuPy:
    """What a prepared call takes from CuPy. The emulator of the kernels has the like for arrays on the host."""

    def __init__(self):
        import cupy

        self.empty, self.multiply = cupy.empty, cupy.multiply
        self.current_device, self.with_device = cupy.cuda.runtime.getDevice, cupy.cuda.Device
        self.current_stream = cupy.cuda.get_current_stream

    def load(self, variant, device):
        """The kernel, called as ``kernel(grid, threads, (args,), shared_mem=bytes)``."""
        return _compile.load(variant, device)

    def is_capturing(self):
        """Whether launches go into a graph, to run again later."""
        return self.current_stream().is_capturing()

    def ticket(self, device):
        """Address of an int32 that is 0 whenever a launch in the current stream begins, as each leaves it.

        A launch in a graph has its own: where it is replayed is not known here. So has a thread, since the streams
        that are each thread's own share a handle.
        """
        stream = self.current_stream()
        if stream.is_capturing():
            return self._spare_ticket(device)
        key = device, stream.ptr, threading.get_ident()
        ticket = _tickets.get(key)
        if ticket is None:
            ticket = _tickets[key] = self._spare_ticket(device)
        return ticket

    def _spare_ticket(self, device):
        with _lock:
            spare = _spare_tickets.setdefault(device, [])
            if not spare:  # which waits for the GPU, once for many calls, and cannot be while a graph is captured
                with self.with_device(device):
                    zeros = self.empty((TICKETS, TICKET_BYTES // 4), np.int32)
                    zeros.fill(0)
                    self.current_stream().synchronize()
                _kept.append(zeros)
                spare += range(zeros.data.ptr, zeros.data.ptr + zeros.nbytes, TICKET_BYTES)
            return spare.pop()

    tensor_map = staticmethod(tensor_map)


class _GpuForward:
    """A prepared call of ``forward`` on a GPU: kernels loaded, arguments packed but for the pointers."""

    def __init__(self, problem, plan, backend=None):
        self.backend = backend or _CuPy()
        self.problem, self.device, self.return_lse = problem, problem.device, problem.return_lse
        self.current_device, self.with_device = self.backend.current_device, self.backend.with_device
        self.empty = self.backend.empty
        self.itemsize = ELEMENTS[problem.dtype].itemsize
        self.copies = {copy.name: copy for copy in plan.copies}
        self.out, self.lse = map(_Allocation, plan.buffers[:2])
        self.ticket = any(buffer.zeroed for buffer in plan.buffers)
        if self.ticket:
            self.backend.ticket(self.device)  # so that there are some
        self.pointers = struct.Struct("6Q" if self.ticket else "5Q")  # q, k, v, out, lse, ticket
        self.steps = [self._pack(step) for step in plan.steps]

    def _pack(self, step):
        """What a launch needs: arguments as bytes but for the pointers, which come first; a dict for them with maps."""
        args = np.zeros(1, step.variant.args)
        for name, value in step.args.items():
            args[name] = value
        rest = args.tobytes()[self.pointers.size :]
        kernel = self.backend.load(step.variant, self.device)
        return kernel, (step.grid,), (step.threads,), step.shared_bytes, rest, step, {}

    def _with_maps(self, rest, step, kept, pointers):
        """The arguments after the pointers with the tensor maps of these operands in their places."""
        maps = kept.get(pointers)
        if maps is None:
            if len(kept) >= MOST_MAPS:
                kept.clear()
            packed = bytearray(self.pointers.size) + rest
            for field, tensor in step.tensor_maps.items():
                start = step.variant.args.fields[field][1]
                pointer = pointers[("q", "k", "v", "out").index(tensor.operand)]
                encoded = self.backend.tensor_map(pointer, self.itemsize, tensor.dims, tensor.strides, tensor.box)
                packed[start : start + len(encoded)] = encoded
            maps = kept[pointers] = bytes(packed[self.pointers.size :])
        return maps

    def __call__(self, q, k, v, out):
        if self.current_device() == self.device:
            return self._run(q, k, v, out)
        with self.with_device(self.device):
            return self._run(q, k, v, out)

    def _run(self, q, k, v, out):
        copies = self.copies
        if copies:
            q, k, v = (self._copied(copies[n], x) if n in copies else x for n, x in (("q", q), ("k", k), ("v", v)))
        result = self.out(self.empty) if out is None else out
        lse = self.lse(self.empty) if self.return_lse else None
        written = self._rows(copies["out"]) if "out" in copies else result
        pointers = [0 if x is None else x.data.ptr for x in (q, k, v, written, lse)]
        if self.ticket:
            pointers.append(self.backend.ticket(self.device))
        packed = self.pointers.pack(*pointers)
        for kernel, grid, threads, shared_bytes, rest, step, kept in self.steps:
            if step.tensor_maps:
                rest = self._with_maps(rest, step, kept, tuple(pointers[:4]))
            kernel(grid, threads, (np.void(packed + rest),), shared_mem=shared_bytes)
        if written is not result:
            target = result if out is None else _problem.canonical(out, self.problem.batch)
            target[...] = written[..., : target.shape[-1]]
        if copies and self.backend.is_capturing():
            _kept.append((q, k, v, written))
        out = _visible(result, self.problem) if out is None else out
        return (out, _visible(lse, self.problem)) if self.return_lse else out

    def _rows(self, copy):
        dtype = ELEMENTS[self.problem.dtype].dtype
        return self.empty((*copy.shape[:-1], copy.pitch // dtype.itemsize), dtype)

    def _copied(self, copy, array):
        """A fresh addressable array with the contents of an input."""
        rows = self._rows(copy)
        view = _problem.canonical(array, self.problem.batch)
        view = view[tuple(slice(0, length) for length in copy.shape)]
        if copy.factor == 1.0:
            rows[..., : copy.shape[-1]] = view
        else:
            self.backend.multiply(view, copy.factor, out=rows[..., : copy.shape[-1]], dtype=rows.dtype)
        return rows


# The functions that run on the CPU engine alone -------------------------------------------------------------------


def _on_the_cpu(function, problem):
    if problem.library != "numpy":
        raise NotImplementedError(
            f"{function}: has no GPU kernel yet; wanted NumPy arrays, such as those of cupy.asnumpy"
        )


def backward(dout, q, k, v, out, lse, scale, causal, window, dlse, grads, engine):
    """Run ``backward``."""
    named = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    dout, q, k, v, out, lse = (_problem.adopt("backward", name, x) for name, x in named.items())
    dlse = dlse if dlse is None else _problem.adopt("backward", "dlse", dlse)
    if isinstance(grads, (tuple, list)) and len(grads) == 3:
        names = ("dq", "dk", "dv")
        grads = [_problem.adopt("backward", name, x) for name, x in zip(names, grads, strict=True)]
    problem = _problem.backward(
        dout, q, k, v, out, lse, scale=scale, causal=causal, window=window, dlse=dlse, grads=grads, engine=engine
    )
    _on_the_cpu("backward", problem)
    if grads is None:
        grads = tuple(_like(x) for x in (q, k, v))
    wide = lambda x: None if x is None else _with_heads(x, problem)  # noqa: E731
    _numpy.backward(
        problem,
        wide(dout),
        *(_problem.canonical(x, problem.batch) for x in (q, k, v)),
        *(wide(x) for x in (out, lse, dlse)),
        *(_leading(x, problem) for x in grads),
    )
    return tuple(grads)


def _with_heads(array, problem):
    return array if problem.head_axis else array[None]


def _like(array):
    """A new array of the shape, dtype and order of axes of another."""
    shape = array.shape
    order = _problem.Operand(shape, array.strides, True).order
    return _Allocation(_plan.Buffer("", shape, array.dtype.name, order))(np.empty)


def _leading(array, problem):
    """A gradient along the canonical axes, those that broadcasting stretched of length 1."""
    missing = len(problem.batch) + 3 - array.ndim
    return array[(None,) * missing]


def decode(q, k_cache, v_cache, lengths, page_table, scale, causal, window, return_lse, out, engine):
    """Run ``decode``."""
    named = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    q, k_cache, v_cache = (_problem.adopt("decode", name, x) for name, x in named.items())
    lengths = lengths if lengths is None else _problem.adopt("decode", "lengths", lengths)
    page_table = page_table if page_table is None else _problem.adopt("decode", "page_table", page_table)
    out = out if out is None else _problem.adopt("decode", "out", out)
    problem = _problem.decode(
        q, k_cache, v_cache, lengths=lengths, page_table=page_table, scale=scale, causal=causal, window=window,
        return_lse=return_lse, out=out, engine=engine,
    )  # fmt: skip
    _on_the_cpu("decode", problem)
    if out is None:
        out = _Allocation(_plan.Buffer("out", problem.out_shape, problem.dtype, problem.q.order))(np.empty)
    lse = np.empty(problem.lse_shape, ELEMENTS[problem.dtype].lse) if return_lse else None
    _numpy.decode(problem, q, k_cache, v_cache, lengths, page_table, out, lse)
    return (out, lse) if return_lse else out


def merge(outs, lses):
    """Run ``merge``, in float32 (float64 for float64): elementwise work that NumPy and CuPy do well."""
    outs, lses = _problem.merge(outs, lses)
    xp, place = np, nullcontext()
    if _problem.library(outs[0]) == "cupy":
        import cupy as xp

        place = xp.cuda.Device(outs[0].data.device_id)
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
