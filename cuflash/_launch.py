"""Launch: allocate, pack arguments, set the device, launch. Decides nothing.

Engines are objects with ``plan(problem)`` and ``prepare(problem, plan) -> call``; a call takes the caller's arrays and
returns results. For CuPy arrays prepared calls are kept in a bounded dict, so that the second call of its kind packs
pointers and launches, and nothing more.
"""

from functools import lru_cache

import numpy as np

from . import _compile, _numpy, _plan, _problem
from ._dtypes import ELEMENTS

MOST_CALLS = 1024  # prepared calls that are kept

_calls = {}


def forward(q, k, v, scale, causal, window, return_lse, out, engine):
    """Run ``forward``: by a prepared call where one of its kind has been made before."""
    arrays = (q, k, v) if out is None else (q, k, v, out)
    key = call = None
    if all(_problem.library(x) == "cupy" for x in arrays):
        keywords = scale, causal, window, bool(return_lse), engine
        try:
            key = (*map(_key, arrays), keywords, _types(keywords))
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
        if len(_calls) >= MOST_CALLS:
            _calls.clear()
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
    arrays = [_problem.adopt(function, name, x) for name, x in zip(names[function].split(), arrays, strict=True)]
    problem = getattr(_problem, function)(*arrays, **(defaults | keywords))
    if function != "forward":
        _on_the_cpu(function, problem)
    return make_plan(problem)


@lru_cache(maxsize=None)
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
    return _plan.Limits(capability, shared_bytes, processors)


def _key(array):
    """What a prepared call depends on of a CuPy array."""
    data = array.data
    return array.shape, array.strides, array.dtype, data.ptr & 15, data.device_id


def _types(value):
    """The type of a keyword, and of its parts: 1, 1.0 and True are equal, but not alike."""
    return tuple(map(_types, value)) if isinstance(value, tuple) else type(value)


def _allocate(empty, buffer):
    """An array along the canonical axes, contiguous in the buffer's order of axes."""
    order = (*buffer.order, len(buffer.shape) - 1)
    array = empty(tuple(buffer.shape[axis] for axis in order), ELEMENTS[buffer.dtype].dtype)
    return array if order == tuple(range(len(order))) else array.transpose(np.argsort(order).tolist())


def _visible(array, problem):
    """A canonical result as the caller sees it: without a head axis where no input had one."""
    return array if problem.head_axis else array[0]


class _NumpyForward:
    """A call of the CPU engine."""

    def __init__(self, problem, plan):
        self.problem = problem
        shape = (*problem.batch, problem.heads, problem.queries)
        self.out = _plan.Buffer("out", (*shape, problem.value_dim), problem.dtype, problem.q.order)
        self.lse = shape, ELEMENTS[problem.dtype].lse

    def __call__(self, q, k, v, out):
        problem = self.problem
        result = _allocate(np.empty, self.out) if out is None else _problem.canonical(out, problem.batch)
        lse = np.empty(*self.lse) if problem.return_lse else None
        _numpy.forward(problem, *(_problem.canonical(x, problem.batch) for x in (q, k, v)), result, lse)
        out = _visible(result, problem) if out is None else out
        return (out, _visible(lse, problem)) if problem.return_lse else out


class _GpuForward:
    """A prepared call of ``forward`` on a GPU: kernels loaded, arguments packed but for the pointers."""

    def __init__(self, problem, plan):
        import cupy

        self.cupy = cupy
        self.problem = problem
        self.copies = {copy.name: copy for copy in plan.copies}
        self.out, self.lse = plan.buffers
        self.steps = [] if 0 in self.lse.shape else [self._pack(step) for step in plan.steps]

    def _pack(self, step):
        args = np.zeros(1, step.variant.args)
        for name, value in step.args.items():
            args[name] = value
        return _compile.load(step.variant, self.problem.device), (step.grid,), (step.threads,), args, step.shared_bytes

    def __call__(self, q, k, v, out):
        runtime, device = self.cupy.cuda.runtime, self.problem.device
        if runtime.getDevice() == device:
            return self._run(q, k, v, out)
        with self.cupy.cuda.Device(device):
            return self._run(q, k, v, out)

    def _run(self, q, k, v, out):
        problem, copies = self.problem, self.copies
        if copies:
            q, k, v = (self._copied(copies[n], x) if n in copies else x for n, x in (("q", q), ("k", k), ("v", v)))
        result = _allocate(self.cupy.empty, self.out) if out is None else out
        lse = self.cupy.empty(self.lse.shape, self.lse.dtype) if problem.return_lse else None
        written = self._rows(copies["out"]) if "out" in copies else result
        pointers = (q.data.ptr, k.data.ptr, v.data.ptr, written.data.ptr, 0 if lse is None else lse.data.ptr)
        for kernel, grid, threads, template, shared_bytes in self.steps:
            args = template.copy()
            args.view(np.uint64)[:5] = pointers
            kernel(grid, threads, (args[0],), shared_mem=shared_bytes)
        if written is not result:
            target = result if out is None else _problem.canonical(out, problem.batch)
            target[...] = written[..., : problem.value_dim]
        out = _visible(result, problem) if out is None else out
        return (out, _visible(lse, problem)) if problem.return_lse else out

    def _rows(self, copy):
        dtype = ELEMENTS[self.problem.dtype].dtype
        return self.cupy.empty((*copy.shape[:-1], copy.pitch // dtype.itemsize), dtype)

    def _copied(self, copy, array):
        """A fresh addressable array with the contents of an input."""
        rows = self._rows(copy)
        view = _problem.canonical(array, self.problem.batch)
        view = view[tuple(slice(0, length) for length in copy.shape)]
        if copy.factor == 1.0:
            rows[..., : copy.shape[-1]] = view
        else:
            self.cupy.multiply(view, copy.factor, out=rows[..., : copy.shape[-1]], dtype=rows.dtype)
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
    return _allocate(np.empty, _plan.Buffer("", shape, array.dtype.name, order))


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
        out = _allocate(np.empty, _plan.Buffer("out", problem.out_shape, problem.dtype, problem.q.order))
    lse = np.empty(problem.lse_shape, ELEMENTS[problem.dtype].lse) if return_lse else None
    _numpy.decode(problem, q, k_cache, v_cache, lengths, page_table, out, lse)
    return (out, lse) if return_lse else out


def merge(outs, lses):
    """Run ``merge``, in float32 (float64 for float64): elementwise work that NumPy and CuPy do well."""
    outs, lses = _problem.merge(outs, lses)
    if _problem.library(outs[0]) == "numpy":
        xp = np
    else:
        import cupy as xp
    with np.errstate(all="ignore"):
        top = lses[0]
        for lse in lses[1:]:
            top = xp.fmax(top, lse)
        shift = xp.where(top == -xp.inf, 0, top)
        total = xp.zeros_like(top)
        joined = xp.zeros(outs[0].shape, top.dtype)
        for out, lse in zip(outs, lses, strict=True):
            weight = xp.exp(lse - shift)
            total += weight
            weight = weight[..., None]
            joined += xp.where(lse[..., None] == -xp.inf, 0, weight * out.astype(top.dtype))
        joined /= xp.where(total == 0, 1, total)[..., None]
        return joined.astype(outs[0].dtype), xp.log(total) + shift
