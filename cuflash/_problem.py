"""Validate: arrays and keywords in, a ``Problem`` out. Every complaint about an argument is raised here.

A ``Problem`` says what is to be computed and how the operands lie in memory. It holds no pointer and knows nothing
of what a device can do, so it can be made, printed and planned where no GPU is.
"""

import importlib
import math
import numbers
import sys
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from . import _masks
from ._dtypes import ELEMENTS, FORMATS

ENGINES = ("numpy", "portable", "sm90")
LONGEST = 10**9  # rows or keys of one head: a row index plus a mask's shift fits 32 bits
LARGEST_AXIS = 2**31 - 1  # of those in front of heads
WIDEST = 256  # head_dim and value_dim of the GPU engines
WIDEST_LATENT = 576, 512  # and of decode where values are the first columns of their keys, of these dtypes
LATENT_DTYPES = "float16", "bfloat16"


@dataclass(frozen=True)
class Operand:
    """How one array lies in memory, seen along the canonical axes ``(*batch, heads, length, dim)``.

    Strides are in bytes and 0 where the array is broadcast; ``aligned`` says that the base is a multiple of 16 bytes,
    ``stretched`` along which axes the array itself is shorter: there its gradient is a sum.
    """

    shape: tuple
    strides: tuple
    aligned: bool
    stretched: tuple = ()

    @property
    def order(self):
        """The axes but the last, outermost first: those of length 1 or stride 0, then by falling stride."""
        axes = range(len(self.shape) - 1)
        still = [axis for axis in axes if self.shape[axis] == 1 or self.strides[axis] == 0]
        return (*still, *sorted((a for a in axes if a not in still), key=lambda a: -abs(self.strides[a])))


@dataclass(frozen=True)
class Table:
    """An array of integers, scales or angles that goes with a cache, and how it lies in memory."""

    name: str
    shape: tuple
    strides: tuple
    dtype: str


@dataclass(frozen=True)
class Problem:
    """One call of ``forward``, ``backward`` or ``decode``: sizes, meaning, and where the operands lie."""

    function: str
    library: str  # "numpy" or "cupy"
    device: int | None
    engine: str | None  # asked for by the caller
    dtype: str
    batch: tuple
    heads: int
    key_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    head_axis: bool
    scale: float
    causal: bool | str
    window: tuple | None
    mask: _masks.Full | _masks.Causal | _masks.Window
    return_lse: bool = False
    precision: str | None = None  # of float32: "tf32" where it will do
    q: Operand | None = None
    k: Operand | None = None
    v: Operand | None = None
    out: Operand | None = None  # None: to be allocated
    # Of backward. lse and dlse have no last axis; gradients that are None are to be allocated.
    dout: Operand | None = None
    lse: Operand | None = None
    dlse: Operand | None = None
    dq: Operand | None = None
    dk: Operand | None = None
    dv: Operand | None = None
    # Of caches, whose k and v have pages, or sequences, along their first axis; keys is what a sequence has room for.
    lengths: Table | None = None
    page_table: Table | None = None
    # Of decode.
    kv_format: str | None = None  # of 8-bit caches; None: they are of q's dtype
    k_scale: Table | None = None
    v_scale: Table | None = None
    k_new: Operand | None = None
    v_new: Operand | None = None
    cos: Table | None = None
    sin: Table | None = None
    rotary_interleaved: bool = False
    overflow: Table | None = None
    splits: int | None = None
    batch_invariant: bool = False
    latent: bool = False  # whether v is k's first columns, where these lie

    @property
    def cached(self):
        """Whether it is a forward whose keys lie in a cache."""
        return self.function == "forward" and self.lengths is not None

    @property
    def appended(self):
        """Keys by which the call lengthens each sequence."""
        return 0 if self.k_new is None else self.queries

    @property
    def group(self):
        """Query heads that read one key head."""
        return self.heads // self.key_heads

    @property
    def out_shape(self):
        """Shape of out as the caller sees it."""
        return (*self.lse_shape, self.value_dim)

    @property
    def lse_shape(self):
        """Shape of lse as the caller sees it."""
        return (*self.batch, *([self.heads] if self.head_axis else []), self.queries)

    def __str__(self):
        batch = "x".join(map(str, self.batch)) or "1"
        heads = f"{self.heads}" if self.group == 1 else f"{self.heads}/{self.key_heads}"
        dims = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"
        kinds = f" from {self.kv_format}" if self.kv_format else ""
        return (
            f"{self.function} {self.dtype}{kinds} {self.mask.name} batch {batch} heads {heads} "
            f"queries {self.queries} keys {self.keys} head_dim {dims}"
        )


# Arrays ---------------------------------------------------------------------------------------------------------


def library(array):
    """The library an array belongs to: "numpy", "cupy", or None for a foreign object."""
    if isinstance(array, np.ndarray):
        return "numpy"
    kind = getattr(sys.modules.get("cupy"), "ndarray", ())  # who holds a CuPy array has imported CuPy
    return "cupy" if isinstance(array, kind) else None


def adopt(function, name, array):
    """A foreign array as one of NumPy's or CuPy's, without a copy; their own pass as they are."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{function}: {name} is a masked array; wanted a plain one, such as that of its filled()")
    if library(array) is not None:
        return array
    if hasattr(array, "__dlpack_device__"):
        kind = int(array.__dlpack_device__()[0])
        if kind in (1, 2, 13):  # kDLCPU, kDLCUDA, kDLCUDAManaged
            module = np if kind == 1 else importlib.import_module("cupy")
            try:
                return module.from_dlpack(array)
            except (BufferError, RuntimeError, TypeError, ValueError) as error:
                raise TypeError(f"{function}: {name} cannot be taken by __dlpack__: {error}") from error
    elif hasattr(array, "__cuda_array_interface__"):
        import cupy

        pointer, runtime = array.__cuda_array_interface__["data"][0], cupy.cuda.runtime
        device = runtime.pointerGetAttributes(pointer).device if pointer else runtime.getDevice()
        with cupy.cuda.Device(device):  # elsewhere asarray copies, and what is written to `out` is lost
            return cupy.asarray(array)
    raise TypeError(
        f"{function}: {name} is a {type(array).__name__}; wanted a CuPy or NumPy array, or one on the CPU or a CUDA "
        f"device with __dlpack__ or __cuda_array_interface__"
    )


def _common_library(function, arrays):
    (first, array), *rest = arrays.items()
    found = library(array)
    for name, other in rest:
        if library(other) != found:
            raise TypeError(
                f"{function}: {first} is a {found} array, {name} a {library(other)} one; they must be of one library"
            )
    if found == "numpy":
        return found, None
    for name, other in arrays.items():
        steps = (step for length, step in zip(other.shape, other.strides, strict=True) if length > 1)
        if other.size and any(place % other.itemsize for place in (other.data.ptr, *steps)):
            raise ValueError(
                f"{function}: {name} has elements at addresses that are no multiple of {other.itemsize} bytes; "
                f"wanted aligned ones"
            )
    device = array.device.id
    for name, other in rest:
        if other.device.id != device:
            raise ValueError(
                f"{function}: {first} is on device {device}, {name} on device {other.device.id}; "
                f"they must be on one device"
            )
    return found, device


def _common_dtype(function, arrays):
    first = None
    for name, array in arrays.items():
        if array.dtype.name not in ELEMENTS or not array.dtype.isnative:
            raise TypeError(f"{function}: {name} has dtype {array.dtype}; wanted one of {', '.join(ELEMENTS)}")
        first = first or (name, array.dtype.name)
        if array.dtype.name != first[1]:
            raise TypeError(
                f"{function}: {name} has dtype {array.dtype.name}, {first[0]} has {first[1]}; they must be equal"
            )
    return first[1]


def _expect(function, name, array, shape, dtype):
    if array.shape != shape:
        raise ValueError(f"{function}: {name} has shape {array.shape}; wanted {shape}")
    if array.dtype != dtype:
        raise TypeError(f"{function}: {name} has dtype {array.dtype}; wanted {np.dtype(dtype).name}")


def _result(function, name, array, shape, dtype, inputs):
    """Check an array that is going to be written."""
    _expect(function, name, array, shape, dtype)
    if library(array) == "numpy" and not array.flags.writeable:
        raise ValueError(f"{function}: {name} is read-only; wanted an array that can be written")
    shadow = _shadow(array)
    for axis, length in enumerate(array.shape if array.size else ()):
        slab = shadow[(0,) * axis]
        if length > 1 and np.shares_memory(slab[:1], slab[1:]):
            raise ValueError(f"{function}: {name} overlaps itself (strides {array.strides}); wanted distinct elements")
    check_overlap(function, name, array, inputs)


def check_overlap(function, name, array, inputs):
    """Refuse a result that shares an element with an input. Exact: a slot of a packed buffer is legal."""
    check_overlaps(function, {name: array}, inputs)


def check_overlaps(function, written, read):
    """The same of several arrays that are written, which share nothing with one another either."""
    others = [(name, array, *_extent(array)) for name, array in read.items()]
    for name, array in written.items():
        start, end = _extent(array)
        for other, given, first, last in others:
            if first < end and start < last and np.shares_memory(_shadow(array), _shadow(given)):
                raise ValueError(f"{function}: {name} shares memory with {other}; wanted memory of its own")
        others.append((name, array, start, end))


def _pointer(array):
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def _extent(array):
    """First address of an array's elements and the one after the last."""
    before, behind = _reach(array.shape, array.strides, array.itemsize)
    pointer = _pointer(array)
    return (pointer - before, pointer + behind) if behind else (0, 0)


@lru_cache(maxsize=1024)  # a call that is prepared asks for the same ones again
def _reach(shape, strides, itemsize):
    """Bytes of an array before its first element, and from there to its end; 0 for an empty one."""
    if 0 in shape:
        return 0, 0
    steps = [(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]
    return -sum(step for step in steps if step < 0), sum(step for step in steps if step > 0) + itemsize


class _Address:
    def __init__(self, array):
        self.__array_interface__ = {
            "version": 3,
            "data": (_pointer(array), True),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.itemsize}",
        }


def _shadow(array):
    """A NumPy array at the same addresses, never read: NumPy decides overlap from addresses alone."""
    return np.asarray(_Address(array))


def canonical(array, batch):
    """A view of an operand along the axes ``(*batch, heads, length, dim)``, leading axes broadcast."""
    view = array[None] if array.ndim == 2 else array
    shape = (*batch, *view.shape[-3:])
    if view.shape == shape:
        return view
    broadcast_to = np.broadcast_to if isinstance(array, np.ndarray) else sys.modules["cupy"].broadcast_to
    return broadcast_to(view, shape)


def _operand(array, batch):
    shape, strides = array.shape, array.strides
    if array.ndim == 2:
        shape, strides = (1, *shape), (0, *strides)
    missing = len(batch) + 3 - len(shape)
    lead = list(zip(batch, (1,) * missing + shape[:-3], (0,) * missing + strides[:-3], strict=True))
    return Operand(
        (*batch, *shape[-3:]),
        (*(0 if length != full else stride for full, length, stride in lead), *strides[-3:]),
        _pointer(array) % 16 == 0,
        tuple(axis for axis, (full, length, _) in enumerate(lead) if length != full),
    )


def _row_operand(array, problem):
    """An operand of one number a row."""
    lead = () if problem.head_axis else (1,)
    return Operand((*lead, *array.shape), (*(0 for _ in lead), *array.strides), _pointer(array) % 16 == 0)


# Keywords -------------------------------------------------------------------------------------------------------


def _scale(function, scale, head_dim):
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, np.ndarray) and scale.ndim == 0:
        scale = scale[()]
    if isinstance(scale, (bool, np.bool_)) or not isinstance(scale, (numbers.Real, *_scalar_types())):
        raise TypeError(f"{function}: scale is {scale!r}; wanted a real number or None")
    try:
        value = float(scale)
    except OverflowError:  # an integer beyond float64
        value = math.inf
    if not math.isfinite(value):
        raise ValueError(f"{function}: scale is {value}; wanted a finite number")
    return value


def _scalar_types():
    return tuple(element.dtype.type for element in ELEMENTS.values())


def _causal(function, causal):
    if isinstance(causal, (bool, np.bool_)):
        return "bottom-right" if causal else False
    if isinstance(causal, str) and causal in ("bottom-right", "top-left"):
        return causal
    raise ValueError(f"{function}: causal is {causal!r}; wanted False, True, 'bottom-right' or 'top-left'")


def _window(function, window):
    if window is None:
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"{function}: window is {window!r}; wanted None or a pair (left, right)")
    for name, side in zip(("left", "right"), window, strict=True):
        if side is None:
            continue
        if isinstance(side, (bool, np.bool_)) or not isinstance(side, numbers.Integral):
            raise TypeError(f"{function}: window {name} is {side!r}; wanted an integer or None")
        if side < 0:
            raise ValueError(f"{function}: window {name} is {side}, negative; wanted 0 or more, or None for unlimited")
    return tuple(None if side is None else int(side) for side in window)


def whole(function, name, value, least, wanted="an integer"):
    """An integer of at least a certain size."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{function}: {name} is {value!r}; wanted {wanted}")
    if value < least:
        raise ValueError(f"{function}: {name} is {value}; wanted {least} or more")
    return int(value)


def _splits(splits):
    return None if splits is None else whole("decode", "splits", splits, 1, "an integer or None")


def _precision(function, precision, dtype):
    if precision is None:
        return None
    if not (isinstance(precision, str) and precision == "tf32"):
        raise ValueError(f"{function}: precision is {precision!r}; wanted None or 'tf32'")
    if dtype != "float32":
        raise ValueError(f"{function}: precision is 'tf32', the arrays are of {dtype}; wanted float32 for that")
    return precision


def _engine(function, engine, found):
    if engine is not None and not (isinstance(engine, str) and engine in ENGINES):
        wanted = ", ".join(map(repr, ENGINES))
        raise ValueError(f"{function}: engine is {engine!r}; wanted None or one of {wanted}")
    if engine is not None and (engine == "numpy") != (found == "numpy"):
        raise ValueError(f"{function}: engine is {engine!r}, the arrays are {found}'s; wanted an engine for those")
    return engine


# The three functions --------------------------------------------------------------------------------------------


def _sizes(function, q, k, v, names=("q", "k", "v")):
    """Sizes of the operands along the canonical axes."""
    q_name, k_name, v_name = names
    for name, array in zip(names, (q, k, v), strict=True):
        if array.ndim < 2:
            raise ValueError(f"{function}: {name} has shape {array.shape}; wanted at least 2 axes (length, dim)")
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    if k.shape[-1] != head_dim:
        raise ValueError(
            f"{function}: {k_name} has head_dim {k.shape[-1]}, {q_name} has {head_dim}; they must be equal"
        )
    if head_dim == 0:
        raise ValueError(f"{function}: {q_name} has head_dim 0; wanted 1 or more")
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(f"{function}: {v_name} has {v.shape[-2]} keys, {k_name} has {k.shape[-2]}; they must be equal")
    heads, key_heads, value_heads = (array.shape[-3] if array.ndim > 2 else 1 for array in (q, k, v))
    if key_heads != value_heads:
        raise ValueError(f"{function}: {v_name} has {value_heads} heads, {k_name} has {key_heads}; they must be equal")
    if key_heads == 0 or heads % key_heads:
        raise ValueError(
            f"{function}: {q_name} has {heads} heads, {k_name} has {key_heads}; "
            f"wanted a multiple of {k_name}'s, at least one"
        )
    for name, array in ((q_name, q), (k_name, k)):
        if array.shape[-2] > LONGEST:
            raise ValueError(f"{function}: {name} has length {array.shape[-2]}; wanted at most {LONGEST}")
    if library(q) == "cupy":
        _check_widths(function, k, v, {f"{q_name} has head_dim": head_dim, f"{v_name} has value_dim": value_dim})
    return {
        "heads": heads,
        "key_heads": key_heads,
        "queries": q.shape[-2],
        "keys": k.shape[-2],
        "head_dim": head_dim,
        "value_dim": value_dim,
        "head_axis": max(q.ndim, k.ndim, v.ndim) > 2,
    }


def _check_widths(function, k, v, dims):
    """Head dims, by what a message says of each, against what the GPU engines are made for."""
    serves, wide = function == "decode", ""
    latent = serves and k.dtype.name in LATENT_DTYPES and in_keys(k, v)
    if serves:
        wide = f", or {WIDEST_LATENT[0]} and {WIDEST_LATENT[1]} where v_cache is k_cache[..., :value_dim] in 16 bits"
    for (said, dim), most in zip(dims.items(), WIDEST_LATENT if latent else (WIDEST, WIDEST), strict=True):
        if dim > most:
            raise ValueError(f"{function}: {said} {dim}; wanted at most {WIDEST} on a GPU{wide}")


def in_keys(k, v):
    """Whether v is the first columns of k, where these lie."""
    if k.shape[:-1] != v.shape[:-1] or k.shape[-1] < v.shape[-1] or k.dtype != v.dtype:
        return False
    axes = zip(v.shape, k.strides, v.strides, strict=True)
    return v.size == 0 or _pointer(k) == _pointer(v) and all(n == 1 or one == other for n, one, other in axes)


def _batch(function, arrays):
    try:
        return np.broadcast_shapes(*(array.shape[:-3] for array in arrays.values()))
    except ValueError:
        shapes = ", ".join(f"{name} {array.shape[:-3]}" for name, array in arrays.items())
        raise ValueError(f"{function}: leading axes are {shapes}; wanted shapes that broadcast together") from None


def _cache_sizes(function, inputs, tables):
    """Sizes of q and of caches k and v, by name; keys are those that a sequence has room for."""
    names, (q, k, v) = tuple(inputs), inputs.values()
    lengths, page_table = (tables.get(name) for name in ("lengths", "page_table"))
    for name, array in inputs.items():
        if array.ndim != 4:
            raise ValueError(f"{function}: {name} has shape {array.shape}; wanted 4 axes")
    sizes = _sizes(function, q, k, v, names)
    for name, array in tables.items():
        if array.dtype.kind not in "iu":
            raise TypeError(f"{function}: {name} has dtype {array.dtype}; wanted integers")
    sequences = q.shape[0]
    if page_table is None:
        for name in names[1:]:
            if inputs[name].shape[0] != sequences:
                raise ValueError(
                    f"{function}: {name} has {inputs[name].shape[0]} sequences, q has {sequences}; they must be equal"
                )
    else:
        if v.shape[0] != k.shape[0]:
            raise ValueError(
                f"{function}: {names[2]} has {v.shape[0]} pages, {names[1]} has {k.shape[0]}; they must be equal"
            )
        if page_table.ndim != 2 or page_table.shape[0] != sequences:
            raise ValueError(
                f"{function}: page_table has shape {page_table.shape}; wanted ({sequences}, pages a sequence)"
            )
        if lengths is None:
            raise ValueError(f"{function}: lengths is None, page_table is given; wanted the length of each sequence")
        sizes["keys"] *= page_table.shape[1]
        if sizes["keys"] > LONGEST:
            raise ValueError(
                f"{function}: page_table has room for {sizes['keys']} keys a sequence; wanted at most {LONGEST}"
            )
    if lengths is not None and lengths.shape != (sequences,):
        raise ValueError(f"{function}: lengths has shape {lengths.shape}; wanted ({sequences},)")
    return sizes


def _given(**arrays):
    """Those that are not None, by name."""
    return {name: x for name, x in arrays.items() if x is not None}


def _tables(arrays):
    return {name: Table(name, x.shape, x.strides, x.dtype.name) for name, x in arrays.items()}


def _describe(function, inputs, scale, causal, window, engine, tables=None):
    """The problem but for results; with ``tables`` k and v are caches."""
    tables = tables or {}
    found, device = _common_library(function, inputs | tables)
    dtype = _common_dtype(function, inputs)
    operands = {name: inputs[name] for name in ("q", "k", "v")}
    if tables:
        sizes = _cache_sizes(function, operands, tables)
        batches = {name: x.shape[:1] for name, x in operands.items()}
        if found == "numpy":
            _check_tables(function, tables, sizes["keys"], operands["k"])
    else:
        sizes = _sizes(function, *operands.values())
        batches = dict.fromkeys(operands, _batch(function, operands))
    batch = batches["q"]
    if max(batch, default=0) > LARGEST_AXIS:
        raise ValueError(f"{function}: a leading axis has length {max(batch)}; wanted at most {LARGEST_AXIS}")
    causal, window = _causal(function, causal), _window(function, window)
    return Problem(
        function=function,
        library=found,
        device=device,
        engine=_engine(function, engine, found),
        dtype=dtype,
        batch=batch,
        scale=_scale(function, scale, sizes["head_dim"]),
        causal=causal,
        window=window,
        mask=_masks.make(sizes["queries"], sizes["keys"], causal, window),
        **{name: _operand(x, batches[name]) for name, x in operands.items()},
        **_tables(tables),
        **sizes,
    )


def forward(
    q, k, v, *, scale, causal, window, return_lse, out, engine, lengths=None, page_table=None, precision=None
):  # fmt: skip
    """Validate a call of ``forward``."""
    inputs, tables = {"q": q, "k": k, "v": v}, _given(lengths=lengths, page_table=page_table)
    problem = _describe("forward", inputs, scale, causal, window, engine, tables)
    if out is not None:
        _common_library("forward", {"q": q, "out": out})
        _result("forward", "out", out, problem.out_shape, q.dtype, inputs | tables)
    precision = _precision("forward", precision, problem.dtype)
    out = None if out is None else _operand(out, problem.batch)
    return replace(problem, precision=precision, return_lse=bool(return_lse), out=out)


def backward(dout, q, k, v, out, lse, *, scale, causal, window, dlse, grads, engine):
    """Validate a call of ``backward``."""
    inputs = {"q": q, "k": k, "v": v, "dout": dout, "out": out}
    problem = _describe("backward", inputs, scale, causal, window, engine)
    results = {"lse": lse} if dlse is None else {"lse": lse, "dlse": dlse}
    _common_library("backward", inputs | results)
    for name in ("dout", "out"):
        _expect("backward", name, inputs[name], problem.out_shape, q.dtype)
    for name, array in results.items():
        _expect("backward", name, array, problem.lse_shape, ELEMENTS[problem.dtype].lse)
    written = {}
    if grads is not None:
        if not isinstance(grads, (tuple, list)) or len(grads) != 3:
            raise ValueError(f"backward: grads is {type(grads).__name__}; wanted None or the three arrays (dq, dk, dv)")
        for name, like, grad in zip(("dq", "dk", "dv"), (q, k, v), grads, strict=True):
            _common_library("backward", {"q": q, name: grad})
            _result("backward", name, grad, like.shape, like.dtype, inputs | results | written)
            written[name] = grad
    return replace(
        problem,
        **{name: _operand(inputs[name], problem.batch) for name in ("dout", "out")},
        **{name: _row_operand(array, problem) for name, array in results.items()},
        **{name: _operand(grad, problem.batch) for name, grad in written.items()},
    )


def decode(
    q, k_cache, v_cache, *, lengths, page_table, k_scale, v_scale, kv_format, k_new, v_new, rotary, rotary_interleaved,
    overflow, scale, causal, window, splits, batch_invariant, return_lse, out, engine,
):  # fmt: skip
    """Validate a call of ``decode``."""
    names = ("q", "k_cache", "v_cache")
    inputs = dict(zip(names, (q, k_cache, v_cache), strict=True))
    tables = _given(lengths=lengths, page_table=page_table)
    scales = _given(k_scale=k_scale, v_scale=v_scale)
    new = _pair("decode", {"k_new": k_new, "v_new": v_new})
    angles = dict(zip(ROTARY, rotary_pair(rotary), strict=False))
    found, device = _common_library("decode", inputs | tables | scales | new | angles)
    kv_format = _kv_format(k_cache, kv_format)
    if kv_format and new:
        raise ValueError(f"decode: k_new is given, k_cache has dtype {k_cache.dtype}; wanted caches of 16 bits or more")
    dtype = _common_dtype("decode", {"q": q} if kv_format else inputs | new)
    _check_formats(inputs, scales, kv_format)
    sizes, sequences = _cache_sizes("decode", inputs, tables), q.shape[0]
    _check_scales(scales, k_cache.shape)
    if new and lengths is None:
        raise ValueError("decode: lengths is None, k_new is given; wanted the length of each sequence without it")
    for name, like in (("k_new", k_cache), ("v_new", v_cache)) if new else ():
        shape = (sequences, sizes["key_heads"], sizes["queries"], like.shape[-1])
        _expect("decode", name, new[name], shape, q.dtype)
    if angles:
        _check_angles(angles, q)
    if found == "numpy" and lengths is not None:
        _check_tables("decode", tables, sizes["keys"], k_cache, sizes["queries"] if new else 0)
    read = {"q": q} | tables | new | angles
    written = _check_written(read, k_cache, v_cache, overflow) if new else {}
    if overflow is not None and not new:
        raise ValueError("decode: overflow is given, k_new is None; wanted both, or neither")
    causal, window = _causal("decode", causal), _window("decode", window)
    batch = (sequences,)
    described = tables | dict(zip(("cos", "sin"), angles.values(), strict=False))
    described |= {} if overflow is None else {"overflow": overflow}
    problem = Problem(
        function="decode",
        library=found,
        device=device,
        engine=_engine("decode", engine, found),
        dtype=dtype,
        batch=batch,
        scale=_scale("decode", scale, sizes["head_dim"]),
        causal=causal,
        window=window,
        mask=_masks.make(sizes["queries"], sizes["keys"], causal, window),
        return_lse=bool(return_lse),
        **sizes,
        q=_operand(q, batch),
        k=_operand(k_cache, k_cache.shape[:1]),
        v=_operand(v_cache, v_cache.shape[:1]),
        **{name: _operand(x, batch) for name, x in new.items()},
        rotary_interleaved=bool(rotary_interleaved),
        splits=_splits(splits),
        batch_invariant=bool(batch_invariant),
        kv_format=kv_format,
        latent=in_keys(k_cache, v_cache),
        **_tables(described | scales),
    )
    if out is None:
        return problem
    _common_library("decode", {"q": q, "out": out})
    _result("decode", "out", out, problem.out_shape, q.dtype, inputs | scales | read | written)
    return replace(problem, out=_operand(out, batch))


def _kv_format(k_cache, kv_format):
    """The format of 8-bit caches; None of those of q's dtype."""
    if kv_format is not None and not (isinstance(kv_format, str) and kv_format in FORMATS):
        raise ValueError(f"decode: kv_format is {kv_format!r}; wanted None, 'int8' or 'e4m3'")
    held = k_cache.dtype
    if kv_format is None and held == np.uint8:
        raise TypeError("decode: k_cache has dtype uint8, kv_format is None; wanted 'e4m3'")
    if kv_format is None and held == np.int8:
        return "int8"
    if kv_format is not None and held != FORMATS[kv_format].dtype:
        wanted = FORMATS[kv_format].dtype
        raise TypeError(f"decode: k_cache has dtype {held}, kv_format is {kv_format!r}; wanted {wanted}")
    return kv_format


def _check_formats(inputs, scales, kv_format):
    """Dtypes of 8-bit caches, of q beside them, and of scales."""
    if kv_format is None:
        for name in scales:
            held = inputs["k_cache"].dtype
            raise ValueError(f"decode: {name} is given, k_cache has dtype {held}; wanted scales of 8-bit caches alone")
        return
    q, k_cache, v_cache = inputs.values()
    if q.dtype.name not in ("float16", "bfloat16"):
        raise TypeError(f"decode: q has dtype {q.dtype}; wanted float16 or bfloat16 beside 8-bit caches")
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(
            f"decode: v_cache has dtype {v_cache.dtype}, k_cache has {k_cache.dtype}; they must be equal"
        )
    for name, array in scales.items():
        if array.dtype != np.float32 or not array.dtype.isnative:
            raise TypeError(f"decode: {name} has dtype {array.dtype}; wanted float32")


def _check_scales(scales, cache_shape):
    """Shapes of scales: one a key head, or one a slot of the cache."""
    *slots, _ = cache_shape
    for name, array in scales.items():
        if array.shape not in ((cache_shape[1],), tuple(slots)):
            raise ValueError(
                f"decode: {name} has shape {array.shape}; wanted ({cache_shape[1]},), one a key head, "
                f"or {tuple(slots)}, one a slot"
            )


ROTARY = ("rotary cos", "rotary sin")  # what messages call the two arrays


def rotary_pair(rotary):
    """The arrays (cos, sin) of the keyword; none where it is None."""
    if rotary is None:
        return ()
    if not isinstance(rotary, (tuple, list)) or len(rotary) != 2:
        raise ValueError(f"decode: rotary is {type(rotary).__name__}; wanted None or the two arrays (cos, sin)")
    return tuple(rotary)


def _pair(function, arrays):
    """Two arrays that come together, by name; none of them where both are None."""
    missing = [name for name, x in arrays.items() if x is None]
    if len(missing) == 1:
        (given,) = arrays.keys() - missing
        raise ValueError(f"{function}: {missing[0]} is None, {given} is given; wanted both, or neither")
    return {} if missing else arrays


def _check_angles(angles, q):
    (first, cos), (second, sin) = angles.items()
    if cos.ndim != 2 or 2 * cos.shape[1] > q.shape[-1]:
        raise ValueError(
            f"decode: {first} has shape {cos.shape}; wanted (positions, pairs), "
            f"at most {q.shape[-1] // 2} pairs for head_dim {q.shape[-1]}"
        )
    if cos.dtype not in (np.dtype(np.float32), q.dtype):
        raise TypeError(f"decode: {first} has dtype {cos.dtype}; wanted float32 or q's, {q.dtype}")
    _expect("decode", second, sin, cos.shape, cos.dtype)


def _check_written(read, k_cache, v_cache, overflow):
    """Check what an append writes: the caches and ``overflow``, by name."""
    written = {"k_cache": k_cache, "v_cache": v_cache}
    if overflow is not None:
        _common_library("decode", {"k_cache": k_cache, "overflow": overflow})
        written["overflow"] = overflow
    others = dict(read)
    for name, array in written.items():
        shape, dtype = (read["lengths"].shape, np.int32) if name == "overflow" else (array.shape, array.dtype)
        _result("decode", name, array, shape, dtype, others)
        others[name] = array
    return written


def _check_tables(function, tables, capacity, cache, appended=0):
    """Values of lengths and page_table, where the host can read them.

    A length that leaves no room for an append is no mistake: it is what ``overflow`` tells.
    """
    lengths, page_table, (pages, _, page_size, _) = tables["lengths"], tables.get("page_table"), cache.shape
    for b, length in enumerate(lengths.tolist()):
        if not 0 <= length <= capacity - appended:
            if appended:
                continue
            raise ValueError(f"{function}: lengths[{b}] is {length}; wanted 0 to {capacity}, what the cache can hold")
        if page_table is None:
            continue
        for column, page in enumerate(page_table[b, : -(-length // max(page_size, 1))].tolist()):
            if not 0 <= page < pages:
                raise ValueError(
                    f"{function}: page_table[{b}, {column}] is {page}; wanted a page from 0 to {pages - 1}"
                )


def quantize(x, kv_format, axis):
    """Validate a call of ``quantize``: the array, as one of NumPy's or CuPy's."""
    if not (isinstance(kv_format, str) and kv_format in FORMATS):
        raise ValueError(f"quantize: kv_format is {kv_format!r}; wanted 'int8' or 'e4m3'")
    x = adopt("quantize", "x", x)
    _common_dtype("quantize", {"x": x})
    axes = axis if isinstance(axis, tuple) else (axis,)
    plain = all(isinstance(a, numbers.Integral) and -x.ndim <= a < x.ndim for a in axes)
    if not plain or len({a % x.ndim for a in axes}) < len(axes):
        raise ValueError(f"quantize: axis is {axis!r}; wanted one or more of x's axes, which are {x.ndim}")
    return x


def merge(outs, lses):
    """Validate a call of ``merge``: lists of equal length, shapes and dtypes that belong together."""
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (list, tuple)) and not getattr(parts, "ndim", 0):
            raise TypeError(
                f"merge: {name} is a {type(parts).__name__}; wanted a sequence of arrays, "
                f"or one with the parts along its first axis"
            )
    outs, lses = list(outs), list(lses)
    if not outs or len(outs) != len(lses):
        raise ValueError(f"merge: outs has {len(outs)} parts, lses {len(lses)}; wanted the same number, at least one")
    outs = [adopt("merge", f"outs[{n}]", x) for n, x in enumerate(outs)]
    lses = [adopt("merge", f"lses[{n}]", x) for n, x in enumerate(lses)]
    named = {f"outs[{n}]": x for n, x in enumerate(outs)}
    dtype = _common_dtype("merge", named)
    _common_library("merge", named | {f"lses[{n}]": x for n, x in enumerate(lses)})
    if outs[0].ndim < 2:
        raise ValueError(f"merge: outs[0] has shape {outs[0].shape}; wanted at least 2 axes (queries, value_dim)")
    for n, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        _expect("merge", f"outs[{n}]", out, outs[0].shape, outs[0].dtype)
        _expect("merge", f"lses[{n}]", lse, outs[0].shape[:-1], ELEMENTS[dtype].lse)
    if library(outs[0]) == "numpy":  # a subclass may have products of its own
        outs, lses = ([np.asarray(x) for x in parts] for parts in (outs, lses))
    return outs, lses


# PagedCache -----------------------------------------------------------------------------------------------------


def pool(sizes, layers, dtype, xp):
    """Validate the sizes of a `PagedCache`: its element type."""
    for name, size in sizes.items():
        whole("PagedCache", name, size, 0 if name == "value_dim" else 1)
    if layers is not None:
        whole("PagedCache", "layers", layers, 1)
    if getattr(xp, "__name__", None) not in ("numpy", "cupy"):
        raise TypeError(f"PagedCache: xp is {xp!r}; wanted the module numpy or cupy")
    try:
        found = ELEMENTS.get(dtype if isinstance(dtype, str) else np.dtype(dtype).name)
    except TypeError:
        found = None
    if found is None:
        raise TypeError(f"PagedCache: dtype is {dtype!r}; wanted one of {', '.join(ELEMENTS)}")
    return found.dtype


def cache_ids(function, ids):
    """The numbers of some sequences; one number stands for itself."""
    if isinstance(ids, numbers.Integral):
        return (int(ids),)
    listed = isinstance(ids, (list, tuple, range)) or isinstance(ids, np.ndarray) and ids.ndim == 1
    if not listed or not all(type(id) is int or isinstance(id, numbers.Integral) for id in ids):
        raise TypeError(f"{function}: ids is {ids!r}; wanted an integer or a list of integers")
    return tuple(map(int, ids))


def cache_counts(function, count, ids):
    """A number of rows for each of some sequences, given once or for each."""
    if not isinstance(count, (list, tuple)) and not (isinstance(count, np.ndarray) and count.ndim == 1):
        return [whole(function, "count", count, 0)] * len(ids)
    if len(count) != len(ids):
        raise ValueError(f"{function}: count has {len(count)} entries, ids has {len(ids)}; they must be equal")
    return [whole(function, f"count[{n}]", one, 0) for n, one in enumerate(count)]


def cache_rows(function, pools, k, v, lead, heads):
    """Validate rows that go into the pools of a cache: arrays of shape ``(*lead, heads, rows, dim)``."""
    named = {name: adopt(function, name, x) for name, x in (("k", k), ("v", v))}
    _common_library(function, named | {"the cache": pools[0]})
    count = named["k"].shape[-2] if named["k"].ndim > 1 else 0
    for (name, array), pool in zip(named.items(), pools, strict=True):
        _expect(function, name, array, (*lead, heads, count, pool.shape[-1]), pool.dtype)
    return *named.values(), count


def cache_table(function, name, array, like, least):
    """Validate an array of integers that lengths or a page table are written to: at least so large."""
    if library(array) != library(like):
        raise TypeError(f"{function}: out[{name!r}] is a {type(array).__name__}; wanted a {library(like)} array")
    if array.dtype != np.int32:
        raise TypeError(f"{function}: out[{name!r}] has dtype {array.dtype}; wanted int32")
    if array.ndim != len(least) or any(have < want for have, want in zip(array.shape, least, strict=True)):
        raise ValueError(f"{function}: out[{name!r}] has shape {array.shape}; wanted at least {least}")
    if library(array) == "numpy" and not array.flags.writeable:
        raise ValueError(f"{function}: out[{name!r}] is read-only; wanted an array that can be written")
