"""The host side without a GPU: what is rejected and in which words, masks, plans, text, and a whole GPU call.

For the last, `pretended_gpu` puts a CuPy of a few lines in place of the real one, and `python_kernel` does what the
kernels do with their arguments: it finds rows and keys by address alone.
"""

import contextlib
import ctypes
import math
import re
import struct
import sys
from collections import Counter
from dataclasses import fields, replace
from functools import cache, partial
from itertools import product
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import _compile, _launch, _masks, _plan, _problem, _variant, bounds, reference, testing
from cuflash._dtypes import ELEMENTS

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
HOPPER = _plan.KNOWN[9, 0]
OLDER = replace(HOPPER, nvrtc=(12, 8))  # a compiler that knows too little of Hopper
KEYWORDS = {"scale": None, "causal": False, "window": None, "return_lse": False, "out": None, "engine": None}


# A GPU that is not there ----------------------------------------------------------------------------------------


class DeviceArray:
    """A CuPy array whose memory is a NumPy array's."""

    def __init__(self, host, device=0):
        self.host, self.number = host, device
        self.data = SimpleNamespace(ptr=host.ctypes.data, device_id=device, memset_async=self.fill)
        self.device = SimpleNamespace(id=device)

    def __getattr__(self, name):
        return getattr(self.host, name)

    def __getitem__(self, index):
        return DeviceArray(self.host[index])

    def __setitem__(self, index, value):
        self.host[index] = getattr(value, "host", value)

    def __iadd__(self, other):
        self.host += other.host
        return self

    def fill(self, value, size, stream):
        assert self.host.flags.c_contiguous and (value, size) == (0, self.host.nbytes)
        self.host[...] = 0

    def transpose(self, axes):
        return DeviceArray(self.host.transpose(axes))

    def clip(self, low, high):
        return DeviceArray(self.host.clip(low, high))

    def astype(self, dtype, order):
        return DeviceArray(self.host.astype(dtype, order=order))


def multiply(x, factor, out, dtype):
    np.multiply(x.host, np.asarray(factor, dtype), out=out.host)


PRETENDED = SimpleNamespace(
    ndarray=DeviceArray,
    empty=lambda shape, dtype: DeviceArray(np.full((*shape, dtype.itemsize), 0xFF, np.uint8).view(dtype)[..., 0]),
    multiply=multiply,
    broadcast_to=lambda x, shape: DeviceArray(np.broadcast_to(x.host, shape)),
    cuda=SimpleNamespace(
        runtime=SimpleNamespace(getDevice=lambda: 0),
        Device=contextlib.nullcontext,
        get_current_stream=lambda: SimpleNamespace(is_capturing=lambda: False, ptr=0),
    ),
)


@contextlib.contextmanager
def pretended_gpu(limits=OLDER):
    """Inside, `DeviceArray` is CuPy's array; yields the (batch, head, row) that the kernels wrote."""
    written = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", PRETENDED)
        patch.setattr(_launch, "_calls", {})
        patch.setattr(_launch, "limits", lambda device: limits)
        patch.setattr(_compile, "load", lambda variant, device: python_kernel(variant, written))
        patch.setattr(_compile, "launcher", python_launcher)
        yield written


def python_launcher(kernel, device, grid, threads, shared_bytes, cooperative, cluster):
    """`_compile.launcher` of a kernel that is a Python function, and knows whether it is to be cooperative."""
    assert grid % cluster == 0
    return lambda stream, argument: kernel(grid, threads, bytes(argument.packed), shared_bytes, cooperative)


def memory(address, shape, strides, dtype):
    """An array over the memory at an address."""
    interface = {"version": 3, "data": (int(address), False), "shape": shape, "strides": strides}
    holder = SimpleNamespace(__array_interface__={**interface, "typestr": f"|V{dtype.itemsize}"})
    return np.asarray(holder).view(dtype)


def python_kernel(variant, written):
    """What a kernel of ``variant`` does, in float64 and without tiles of keys. Notes the rows it writes."""
    if variant.backward:
        return python_backward_kernel(variant, written)
    element, mask = ELEMENTS[variant.element], variant.mask

    def kernel(grid, threads, packed, shared_bytes, cooperative):
        assert len(packed) == variant.args.itemsize and not cooperative
        assert (threads, shared_bytes) == (32 * variant.warps, variant.shared_bytes)
        args = np.frombuffer(packed, variant.args)[0]
        args = {name: args[name].item() for name in variant.args.names}
        for index in range(grid):
            block(args, args["first_block"] + index)

    def block(args, number):
        tiles, section, heads = args["schedule"]
        first = number // (section * tiles) * section
        here = min(heads - first, section)
        tile, position = divmod(number - first * tiles, here)
        tile = tile if mask == "full" else tiles - 1 - tile
        batch, head = divmod(first + position, args["head_blocks"])
        head *= args["pack"]
        place = divmod(batch, args["batches1"])

        def matrix(name, h, length, dim):
            *outer, row = args[f"{name}_strides"]
            address = args[name] + sum(n * stride for n, stride in zip((*place, h), outer, strict=True))
            return memory(address, (length, dim), (row, element.itemsize), element.dtype)

        def integer(name, offset):
            return memory(args[name] + offset, (1,), (4,), np.dtype(np.int32))[0].item()

        def cached(name, h, length, dim):
            _, page_step, head_step, row = args[f"{name}_strides"]
            rows = np.zeros((length, dim), element.dtype)
            for j in range(length):
                n, slot = divmod(j, args["page_size"])
                entry = args["table_stride"] * batch + args["table_step"] * n
                page = integer("page_table", entry) if args["page_table"] else batch
                assert 0 <= page < args["pages"]
                address = args[name] + page * page_step + h * head_step + slot * row
                rows[j] = memory(address, (dim,), (element.itemsize,), element.dtype)
            return rows

        keys, key_head = args["keys"], head // args["group"]
        first_shift, end_shift = args["first_shift"], args["end_shift"]
        if variant.paged:
            if args["lengths"]:
                keys = int(np.clip(integer("lengths", args["length_stride"] * batch), 0, keys))
            offset = 0 if args["top_left"] else keys - args["queries"]
            first_shift, end_shift = offset - args["left"], offset + args["right"] + 1
        matrix_of = cached if variant.paged else matrix
        k = matrix_of("k", key_head, keys, args["head_dim"]).astype(np.float64)
        v = matrix_of("v", key_head, keys, args["value_dim"]).astype(np.float64)
        rows, j = np.arange(tile * variant.tile_q, (tile + 1) * variant.tile_q), np.arange(keys)
        for h in range(head, head + args["pack"]):
            assert h // args["group"] == key_head
            i = rows[rows % args["pack"] == h - head] // args["pack"]
            i = i[i < args["queries"]]
            q = matrix("q", h, args["queries"], args["head_dim"])[i].astype(np.float64)
            scores = args["scale_log2"] * math.log(2) * (q @ k.T)
            if mask != "full":
                scores[j >= i[:, None] + end_shift] = -np.inf
            if mask == "window":
                scores[j < i[:, None] + first_shift] = -np.inf
            top = scores.max(axis=1, initial=-np.inf, keepdims=True)
            weights = np.exp(scores - np.where(top == -np.inf, 0, top))
            total = weights.sum(axis=1, keepdims=True)
            total[total == 0] = 1
            out = matrix("out", h, args["queries"], args["value_dim"])
            out[i] = (weights @ v / total).astype(element.dtype)
            assert not args["out_vectors"] or (out.ctypes.data % 16, out.strides[0] % 16) == (0, 0)
            if args["lse"]:
                first = (batch * args["heads"] + h) * args["queries"] * element.lse.itemsize
                lse = memory(args["lse"] + first, (args["queries"],), (element.lse.itemsize,), element.lse)
                lse[i] = (top + np.log(total))[:, 0]
            written.extend((batch, h, row) for row in i.tolist())

    return kernel


MAIN_BACKWARD = ("backward", "backward_f32", "backward_f64", "backward_sm90")


def python_backward_kernel(variant, written):
    """The same of a kernel of backward. The one in the middle notes the heads of keys that it writes."""
    element, main = ELEMENTS[variant.element], variant.kernel in MAIN_BACKWARD

    def kernel(grid, threads, packed, shared_bytes, cooperative):
        assert threads == 32 * variant.warps and shared_bytes <= variant.shared_bytes and cooperative == main
        args = np.frombuffer(packed, variant.args)[0]
        args = {name: args[name].item() for name in variant.args.names if not name.endswith("_map")}
        tiles, key_heads = args["key_tiles"], args["heads"] // args["group"]
        batches = args["items"] // (tiles * key_heads)
        padded = args["query_tiles"] * args["tile_q"]
        heads = batches * args["heads"]
        real = element.lse  # dtype of sums

        def rows(name, shape):
            return memory(args[name], shape, np.empty(shape, real).strides, real)

        def matrix(name, place, length, dim):
            *outer, row = args[f"{name}_strides"]
            dtype = real if args.get(f"{name}_wide") else element.dtype
            address = args[name] + sum(n * stride for n, stride in zip(place, outer, strict=True))
            return memory(address, (length, dim), (row, dtype.itemsize), dtype)

        queries, keys, head_dim, value_dim = (args[n] for n in ("queries", "keys", "head_dim", "value_dim"))
        row_lse, row_delta = rows("row_lse", (heads, padded)), rows("row_delta", (heads, padded))
        turns = memory(args["turns"], (32,), (4,), np.dtype(np.int32))
        # Where the main kernel leaves dq out it has no sum of it: another kernel writes it.
        summed, alone = args["columns"] > 0, variant.kernel == "backward_dq_sm90"
        # Blocks of rows and of 8 columns, then 16 rows; in these a lane's numbers lie together or, of 64 bits, apart.
        rows16 = _plan.finish_variant(variant.element).warps
        order = (0, 4, 1, 2, 6, 3, 5) if real.itemsize == 8 else (0, 4, 1, 3, 5, 2, 6)
        shape = padded // (16 * rows16), rows16, 2, 8, args["columns"] // 8, 4, 2
        sums = rows("dq_sum", (heads, *(shape[axis] for axis in order))) if summed else None
        i, j = np.arange(queries)[:, None], np.arange(keys)
        seen = (j >= i + args["first_shift"]) & (j < i + args["end_shift"])
        assert args["cyclic"] <= seen.all() and args["section"] >= 1
        if main:
            assert (turns == 0).all() and grid <= args["items"] and shared_bytes == variant.shared_bytes
            assert not memory(args["suspects"], (args["items"],), (4,), np.dtype(np.int32)).any()
            turns[0] = args["items"]
            section = min(args["section"], args["items"] // args["key_tiles"])
            wave = section * -(-args["key_tiles"] >> args["passes_log2"])
            assert wave <= max(grid, 1), "a wave is more than a grid"
        for batch, key_head in np.ndindex(batches, key_heads):
            place = *divmod(batch, args["batches1"]), key_head
            k, v = matrix("k", place, keys, head_dim), matrix("v", place, keys, value_dim)
            dk, dv = np.zeros(k.shape), np.zeros(v.shape)
            for head in range(key_head * args["group"], (key_head + 1) * args["group"]):
                linear, place = batch * args["heads"] + head, (*place[:2], head)
                q, dout = matrix("q", place, queries, head_dim), matrix("dout", place, queries, value_dim)
                if variant.kernel == "backward_rows":
                    out = matrix("out", place, queries, value_dim)
                    lse = rows("lse", (heads, queries))[linear]
                    dead = (lse == -np.inf) | ~seen.any(1)
                    delta = (dout.astype(np.float64) * out.astype(np.float64)).sum(1)
                    delta -= rows("dlse", (heads, queries))[linear] if args["dlse"] else 0
                    row_lse[linear, :], row_delta[linear, :] = np.inf, 0
                    row_lse[linear, :queries] = np.where(dead, np.inf, lse * np.log2(np.e))
                    row_delta[linear, :queries] = np.where(dead, 0, delta)
                elif main or alone:
                    q, dout, wide_k, wide_v = (x.astype(np.float64) for x in (q, dout, k, v))
                    exponent = args["scale_log2"] * (q @ wide_k.T) - row_lse[linear, :queries, None]
                    p = np.where(seen, np.exp2(exponent), 0)
                    ds = np.where(seen, p * (dout @ wide_v.T - row_delta[linear, :queries, None]), 0)
                    dk += args["scale"] * ds.T @ q
                    dv += p.T @ dout
                    if alone:
                        matrix("dq", place, queries, head_dim)[...] = args["scale"] * ds @ wide_k
                    if not summed:
                        continue
                    dq = np.zeros((padded, args["columns"]))
                    dq[:queries, :head_dim] = ds @ wide_k
                    parts = dq.reshape(-1, rows16, 2, 8, args["columns"] // 8, 4, 2)  # of rows: ..., half, g; then t, e
                    sums[linear] = parts.transpose(order)
                elif summed:
                    dq = sums[linear].transpose(np.argsort(order))
                    dq = dq.reshape(padded, args["columns"])[:queries, :head_dim]
                    matrix("dq", place, queries, head_dim)[...] = args["scale"] * dq
            if main:
                place = *place[:2], key_head
                matrix("dk", place, keys, head_dim)[...], matrix("dv", place, keys, value_dim)[...] = dk, dv
                written.append((batch, key_head))
        for name, dim in (("dq", head_dim), ("dk", head_dim), ("dv", value_dim)):
            size = 4 if args[f"{name}_wide"] else element.itemsize
            strides = args[f"{name}_strides"]
            assert not dim or args[name] % 16 == 0
            assert dim * size % 16 == 0 or max(queries, keys) == 1 or strides[3] >= -(-dim * size // 16) * 16

    return kernel


SMALL = {"max_length": 40, "max_head_dim": 40, "dtypes": ("float32", "float16", "bfloat16", "float64")}


@settings(max_examples=500)
@given(testing.problems(**SMALL), st.sampled_from(sorted(_plan.KNOWN)), st.sampled_from((2**31 - 1, 3)))
def test_a_gpu_call_reads_and_writes_the_right_rows(recipe, capability, largest_grid):
    q, k, v = (DeviceArray(x) for x in recipe.arrays())
    limits = replace(_plan.KNOWN[capability], nvrtc=OLDER.nvrtc)
    with pretended_gpu(limits) as written, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_plan, "LARGEST_GRID", largest_grid)
        for _ in range(2):  # the second call is a prepared one
            written.clear()
            out, lse = cuflash.forward(q, k, v, return_lse=True, **recipe.keywords)
            assert max(Counter(written).values(), default=1) == 1, "a row was written twice"
            assert len(written) == lse.size, "a row was left out"
            path = f"portable {recipe.dtype}"
            testing.assert_attention_close((out.host, lse.host), q.host, k.host, v.host, path=path, **recipe.keywords)
    assert lse.flags.c_contiguous and (out.strides[-1] == out.itemsize or out.size == 0 or out.shape[-1] == 1)


def prefill(recipe, values=None, **changes):
    """A call of forward on a cache that a pretended GPU holds."""
    *arrays, tables = recipe.arrays(np, values)
    arrays, tables = [DeviceArray(x) for x in arrays], {name: DeviceArray(x) for name, x in tables.items()}
    return cuflash.forward(*arrays, **tables, return_lse=True, **(recipe.keywords | changes))


@settings(max_examples=300)
@given(
    testing.prefills(max_length=40, max_head_dim=40), st.sampled_from(sorted(_plan.KNOWN)),
    st.sampled_from((2**31 - 1, 3)), st.sampled_from((None, *testing.CACHE_LAYOUTS)),
)  # fmt: skip
def test_a_call_on_a_cache_reads_and_writes_the_right_rows(recipe, capability, largest_grid, layout):
    values, more = recipe.values(), {}
    if layout:
        out = np.zeros((*values[0].shape[:-1], recipe.value_dim), values[0].dtype)
        more["out"] = DeviceArray(testing.lay_out(out, layout))
    lengths = np.array(recipe.lengths, int)
    exact = bounds.forward(*values, path=f"portable {recipe.dtype}", lengths=lengths, **recipe.keywords)
    with pretended_gpu(_plan.KNOWN[capability]) as written, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_plan, "LARGEST_GRID", largest_grid)
        for again in (False, True):  # the second call is a prepared one, unless it lies otherwise
            written.clear()
            out, lse = prefill(recipe, values, **more)
            assert max(Counter(written).values(), default=1) == 1, "a row was written twice"
            assert len(written) == lse.size, "a row was left out"
            assert bounds.worst((out.host, lse.host), exact) <= 1
            assert again or len(_launch._calls) == 1


@settings(max_examples=150)
@given(testing.problems(**SMALL), st.sampled_from(testing.LAYOUTS))
def test_a_gpu_call_writes_out_with_any_strides(recipe, layout):
    q, k, v = (DeviceArray(x) for x in recipe.arrays())
    with pretended_gpu():
        wanted = cuflash.forward(q, k, v, **recipe.keywords)
        assume(wanted.size and layout not in ("broadcast", "missing"))
        out = DeviceArray(testing.lay_out(np.zeros(wanted.shape, wanted.dtype), layout))
        assert cuflash.forward(q, k, v, out=out, **recipe.keywords) is out
    assert np.array_equal(out.host, wanted.host, equal_nan=True)


GRADIENTS = {**SMALL, "dtypes": tuple(DTYPES)}


@settings(max_examples=150)
@given(
    testing.problems(**GRADIENTS), st.sampled_from(sorted(_plan.KNOWN)), st.integers(1, 3), st.booleans(),
    st.sampled_from(("contiguous", "swapped", "offset", "strided", "stretched")),
)  # fmt: skip
def test_a_backward_call_reads_and_writes_the_right_rows(recipe, capability, processors, with_dlse, layout):
    hosts = recipe.arrays()
    out, lse = reference_forward(recipe, hosts)
    dout, dlse = recipe.dout(), recipe.normal(4, lse.shape).astype(lse.dtype)
    if layout == "stretched":
        dout = np.broadcast_to(dout[..., :1, :], dout.shape)
    elif dout.ndim >= 3:
        dout = testing.lay_out(dout, layout)
        lse = testing.lay_out(lse[..., None], layout)[..., 0]
    q, k, v, dout, out, lse, dlse = (DeviceArray(x) for x in (*hosts, dout, out, lse, dlse))
    more = {"dlse": dlse} if with_dlse else {}
    limits = replace(_plan.KNOWN[capability], nvrtc=OLDER.nvrtc, processors=processors)
    with pretended_gpu(limits) as written:
        for again in (False, True):  # the second call is a prepared one
            assert again == (len(_launch._calls) == 1)
            written.clear()
            grads = cuflash.backward(dout, q, k, v, out, lse, **more, **recipe.keywords)
            assert len(set(written)) == len(written)
            exact = bounds.backward(
                dout.host, *hosts, path=f"portable {recipe.dtype}", dlse=dlse.host if with_dlse else None,
                **recipe.keywords,
            )  # fmt: skip
            assert bounds.worst([grad.host for grad in grads], exact) <= 1
    for grad, x in zip(grads, hosts, strict=True):
        like = np.empty_like(x)
        assert (grad.shape, grad.dtype) == (x.shape, x.dtype)
        if x.size and 0 not in x.strides and min(x.strides, default=1) > 0:
            order = np.argsort([-s for s in x.strides], kind="stable")
            assert grad.host.transpose(order).flags.c_contiguous, (grad.strides, like.strides)


def reference_forward(recipe, arrays):
    out, lse = reference.forward(*arrays, **recipe.keywords)
    return out.astype(arrays[0].dtype), lse.astype(ELEMENTS[recipe.dtype].lse)


@settings(max_examples=50)
@given(testing.problems(**GRADIENTS), st.lists(st.sampled_from(testing.LAYOUTS), min_size=3, max_size=3))
def test_a_backward_call_writes_gradients_with_any_strides(recipe, layouts):
    hosts = recipe.arrays()
    out, lse = reference_forward(recipe, hosts)
    arrays = [DeviceArray(x) for x in (recipe.dout(), *hosts, out, lse)]
    layouts = [layout for layout in layouts if layout not in ("broadcast", "missing")]
    with pretended_gpu():
        wanted = cuflash.backward(*arrays, **recipe.keywords)
        assume(len(layouts) == 3 and all(x.size for x in wanted))
        grads = [testing.lay_out(np.zeros(x.shape, x.dtype), layout) for x, layout in zip(wanted, layouts, strict=True)]
        grads = [DeviceArray(x) for x in grads]
        assert cuflash.backward(*arrays, grads=grads, **recipe.keywords) == tuple(grads)
    assert all(np.array_equal(x.host, y.host, equal_nan=True) for x, y in zip(grads, wanted, strict=True))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
def test_parts_are_summed_along_axes(shape, data):
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1)))
    parts = np.random.default_rng(0).integers(-9, 9, shape).astype(np.float32)
    wanted = parts.sum(axis=tuple(axes), keepdims=True)
    assert np.array_equal(_launch._summed(parts, sorted(axes)), wanted)


def test_a_prepared_call_is_not_used_for_another_problem():
    """Whatever differs in a call shows in its result."""
    rng = np.random.default_rng(0)
    q, k, v = (DeviceArray(rng.standard_normal((2, 4, 6, 8))) for _ in range(3))
    keywords = [
        {}, {"causal": True}, {"causal": "top-left"}, {"window": (1, 0)}, {"window": (1, 1)}, {"window": (1, None)},
        {"scale": 1}, {"scale": 2.0}, {"scale": np.float16(0.5)}, {"scale": np.array(0.25)}, {"causal": "bottom-right"},
        {"causal": np.True_}, {"window": [1, 1]}, {"engine": "portable"},
    ]  # fmt: skip
    arrays = [(q, k, v), (q[:, :, :3], k, v), (q, k[:1], v[:1]), (q, k[:, ::2], v[:, ::2]), (q[0, 0], k[0, 0], v[0, 0])]
    with pretended_gpu():
        for _ in range(2):
            for words in keywords:
                asked = {name: value for name, value in words.items() if name != "engine"}
                for each in arrays:
                    out, hosts = cuflash.forward(*each, **words).host, [x.host for x in each]
                    testing.assert_attention_close(out, *hosts, path="portable float64", **asked)
        with pytest.raises(ValueError, match="causal is 1;"):
            cuflash.forward(q, k, v, causal=1)
        with pytest.raises(ValueError, match="causal is 1.0;"):
            cuflash.forward(q, k, v, causal=1.0)
        with pytest.raises(ValueError, match="window is array"):
            cuflash.forward(q, k, v, window=np.array([1, 1]))


def test_a_prepared_call_checks_overlap_again():
    q, k, v = (DeviceArray(np.zeros((1, 4, 8))) for _ in range(3))
    with pretended_gpu():
        cuflash.forward(q, k, v, out=DeviceArray(np.zeros((1, 4, 8))))
        with pytest.raises(ValueError, match="out shares memory with v"):
            cuflash.forward(q, k, v, out=v)


def test_a_prepared_call_of_backward_checks_overlap_again():
    dout, q, k, v, out, *grads = (DeviceArray(np.zeros((1, 4, 8), np.float16)) for _ in range(8))
    lse = DeviceArray(np.zeros((1, 4), np.float32))
    with pretended_gpu():
        assert cuflash.backward(dout, q, k, v, out, lse, grads=grads) == tuple(grads)
        assert len(_launch._calls) == 1
        for wrong, sentence in (
            ((grads[0], v, grads[2]), "dk shares memory with v"),
            ((grads[0], grads[1], grads[0]), "dv shares memory with dq"),
            ((lse, *grads[1:]), r"dq has shape \(1, 4\); wanted \(1, 4, 8\)"),
        ):
            with pytest.raises(ValueError, match=sentence):
                cuflash.backward(dout, q, k, v, out, lse, grads=wrong)


def test_prepared_calls_are_bounded():
    with pretended_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_launch, "MOST_CALLS", 4)
        for n in range(1, 12):
            x = DeviceArray(np.zeros((n, 8), np.float32))
            cuflash.forward(x, x, x)
            assert len(_launch._calls) <= 4


@pytest.mark.parametrize("capturing", [False, True])
def test_precisions_are_calls_of_their_own_and_graphs_keep_their_parts(monkeypatch, capturing):
    """The parts of q, k and v live as long as the graph that writes and reads them, else as long as the call."""
    ran, maps = [], []
    with pretended_gpu(HOPPER):
        monkeypatch.setattr(_compile, "load", lambda variant, device: lambda *args, **_: ran.append(variant))
        monkeypatch.setattr(_launch._CuPy, "tensor_map", lambda self, *given: maps.append(given) or bytes(128))
        monkeypatch.setattr(_launch._CuPy, "is_capturing", lambda self: capturing)
        monkeypatch.setattr(_launch, "_kept", [])
        q, k, v = (DeviceArray(np.zeros((2, length, 40), np.float32)) for length in (9, 30, 30))
        for turn in range(2):
            for precision in (None, "tf32"):
                cuflash.forward(q, k, v, precision=precision)
            assert len(_launch._calls) == 2
            assert [each.parts for each in ran] == [3, 3, 2, 2] * (turn + 1), "the second turn is prepared"
        assert len(_launch._kept) == (4 if capturing else 0)
        for parts, kept in zip((3, 2, 3, 2), _launch._kept, strict=False):
            made = kept[-1]
            assert [x.shape for x in made] == [(parts, 2, length, 64) for length in (9, 30, 30)]
            assert {x.data.ptr for x in made} <= {pointer for pointer, *_ in maps}
        assert {given[1] for given in maps} == {2}, "bytes of an element of parts"


def test_counters_belong_to_a_stream_or_a_graph(monkeypatch):
    stream = SimpleNamespace(ptr=0, capturing=False, waited=0)
    stream.is_capturing = lambda: stream.capturing
    stream.synchronize = lambda: setattr(stream, "waited", stream.waited + 1)
    cuda = SimpleNamespace(**vars(PRETENDED.cuda) | {"get_current_stream": lambda: stream})
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(**vars(PRETENDED) | {"cuda": cuda}))
    for name, empty in (("_counters", {}), ("_spare_zeros", {}), ("_kept", [])):
        monkeypatch.setattr(_launch, name, empty)
    backend, taken = _launch._CuPy(), []

    def counters(count, ptr=0, capturing=False):
        stream.ptr, stream.capturing = ptr, capturing
        address = backend.counters(0, count)
        assert not memory(address, (count,), (4,), np.dtype(np.int32)).any() and address % 4 == 0
        taken.append((address, address + 4 * count))
        return address

    first = counters(40)
    assert counters(1) == counters(40) == first, "fewer, or as many, are the same ones"
    assert counters(41) == counters(33) == taken[-1][0]
    alone = {first, counters(1000), counters(1, ptr=7), counters(7, capturing=True), counters(7, capturing=True)}
    assert len(alone) == 5 and stream.waited == 1
    counters(2**20)  # more than were made at once
    assert stream.waited == 2
    counters(2**23, capturing=True)  # more than are left while nothing can be waited for: the graph clears its own
    assert stream.waited == 2
    distinct = sorted(set(taken))
    regions = {a: max(end for b, end in distinct if b == a) for a, _ in distinct}
    assert all(regions[a] <= b for a, b in zip(sorted(regions), sorted(regions)[1:], strict=False)), "two overlap"


def test_a_gpu_before_sm_80_is_refused():
    runtime = SimpleNamespace(
        deviceGetAttribute=lambda *_: 0, cudaDevAttrMaxSharedMemoryPerBlockOptin=0, cudaDevAttrMultiProcessorCount=0
    )
    device = lambda number: SimpleNamespace(compute_capability="75")  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, Device=device)))
        with pytest.raises(RuntimeError) as error:
            _launch.limits.__wrapped__(3)
    assert str(error.value) == "cuflash: device 3 has compute capability 7.5; wanted 8.0 (Ampere) or newer"


# Rejections -----------------------------------------------------------------------------------------------------


def x(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def on_gpu(*shape, device=0, dtype=np.float32):
    return DeviceArray(np.zeros(shape, dtype), device)


def words(**keywords):
    return keywords


def stretched(*shape):
    """An array of a shape of any size."""
    return np.broadcast_to(np.zeros((1,) * (len(shape) - 1) + shape[-1:], np.float32), shape)


def read_only(*shape):
    array = x(*shape)
    array.flags.writeable = False
    return array


class Rocm:
    def __dlpack_device__(self):
        return 10, 0


class Locked:
    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **keywords):
        raise BufferError("it is locked")


def misaligned(*shape):
    return np.zeros(4 * math.prod(shape) + 4, np.uint8)[2:-2].view(np.float32).reshape(shape)


SHAPE = (2, 4, 8)
QKV = [x(*SHAPE) for _ in range(3)]
ANY = "a CuPy or NumPy array, or one on the CPU or a CUDA device with __dlpack__ or __cuda_array_interface__"
KNOWN_DTYPES = "float16, bfloat16, float32, float64"
PACKED = x(2, 4, 3, 8)

FORWARD = [
    ([[0.0], *QKV[1:]], {}, TypeError, f"q is a list; wanted {ANY}"),
    ([QKV[0], np.float32(1), QKV[2]], {}, TypeError, f"k is a float32; wanted {ANY}"),
    ([*QKV[:2], Rocm()], {}, TypeError, f"v is a Rocm; wanted {ANY}"),
    ([QKV[0], Locked(), QKV[2]], {}, TypeError, "k cannot be taken by __dlpack__: it is locked"),
    (
        [QKV[0], np.ma.masked_array(QKV[1]), QKV[2]], {}, TypeError,
        "k is a masked array; wanted a plain one, such as that of its filled()",
    ),
    (
        [on_gpu(*SHAPE), DeviceArray(misaligned(*SHAPE)), on_gpu(*SHAPE)], {}, ValueError,
        "k has elements at addresses that are no multiple of 4 bytes; wanted aligned ones",
    ),
    (
        [on_gpu(*SHAPE)] * 3, words(out=DeviceArray(misaligned(*SHAPE))), ValueError,
        "out has elements at addresses that are no multiple of 4 bytes; wanted aligned ones",
    ),
    (
        [stretched(2**31, 1, 4, 8), x(4, 8), x(4, 8)], {}, ValueError,
        "a leading axis has length 2147483648; wanted at most 2147483647",
    ),
    (QKV, words(out="out"), TypeError, f"out is a str; wanted {ANY}"),
    ([on_gpu(*SHAPE), *QKV[1:]], {}, TypeError, "q is a cupy array, k a numpy one; they must be of one library"),
    (QKV, words(out=on_gpu(*SHAPE)), TypeError, "q is a numpy array, out a cupy one; they must be of one library"),
    (
        [on_gpu(*SHAPE), on_gpu(*SHAPE), on_gpu(*SHAPE, device=1)], {}, ValueError,
        "q is on device 0, v on device 1; they must be on one device",
    ),
    (
        [on_gpu(*SHAPE)] * 3, words(out=on_gpu(*SHAPE, device=2)), ValueError,
        "q is on device 0, out on device 2; they must be on one device",
    ),
    ([x(*SHAPE, dtype=np.int32)] * 3, {}, TypeError, f"q has dtype int32; wanted one of {KNOWN_DTYPES}"),
    ([x(*SHAPE, dtype=np.complex64)] * 3, {}, TypeError, f"q has dtype complex64; wanted one of {KNOWN_DTYPES}"),
    ([x(*SHAPE, dtype=bool)] * 3, {}, TypeError, f"q has dtype bool; wanted one of {KNOWN_DTYPES}"),
    ([QKV[0], x(*SHAPE, dtype=">f4"), QKV[2]], {}, TypeError, f"k has dtype >f4; wanted one of {KNOWN_DTYPES}"),
    (
        [QKV[0], QKV[1], x(*SHAPE, dtype=np.float16)], {}, TypeError,
        "v has dtype float16, q has float32; they must be equal",
    ),
    ([x(8), *QKV[1:]], {}, ValueError, "q has shape (8,); wanted at least 2 axes (length, dim)"),
    ([*QKV[:2], np.array(1.0, np.float32)], {}, ValueError, "v has shape (); wanted at least 2 axes (length, dim)"),
    ([x(2, 4, 9), *QKV[1:]], {}, ValueError, "k has head_dim 8, q has 9; they must be equal"),
    ([x(2, 4, 0), x(2, 4, 0), QKV[2]], {}, ValueError, "q has head_dim 0; wanted 1 or more"),
    ([*QKV[:2], x(2, 5, 8)], {}, ValueError, "v has 5 keys, k has 4; they must be equal"),
    ([*QKV[:2], x(1, 4, 8)], {}, ValueError, "v has 1 heads, k has 2; they must be equal"),
    ([x(3, 4, 8), *QKV[1:]], {}, ValueError, "q has 3 heads, k has 2; wanted a multiple of k's, at least one"),
    ([x(4, 8), *QKV[1:]], {}, ValueError, "q has 1 heads, k has 2; wanted a multiple of k's, at least one"),
    ([QKV[0], *[x(0, 4, 8)] * 2], {}, ValueError, "q has 2 heads, k has 0; wanted a multiple of k's, at least one"),
    ([stretched(10**9 + 1, 8), x(4, 8), x(4, 8)], {}, ValueError, "q has length 1000000001; wanted at most 1000000000"),
    ([x(4, 8), *[stretched(10**9 + 1, 8)] * 2], {}, ValueError, "k has length 1000000001; wanted at most 1000000000"),
    ([on_gpu(4, 257)] * 3, {}, ValueError, "q has head_dim 257; wanted at most 256 on a GPU"),
    ([on_gpu(4, 8), on_gpu(4, 8), on_gpu(4, 300)], {}, ValueError, "v has value_dim 300; wanted at most 256 on a GPU"),
    (
        [x(3, *SHAPE), x(2, *SHAPE), x(1, *SHAPE)], {}, ValueError,
        "leading axes are q (3,), k (2,), v (1,); wanted shapes that broadcast together",
    ),
    (QKV, words(scale="1"), TypeError, "scale is '1'; wanted a real number or None"),
    (QKV, words(scale=True), TypeError, "scale is True; wanted a real number or None"),
    (QKV, words(scale=1j), TypeError, "scale is 1j; wanted a real number or None"),
    (QKV, words(scale=np.inf), ValueError, "scale is inf; wanted a finite number"),
    (QKV, words(scale=np.float16("nan")), ValueError, "scale is nan; wanted a finite number"),
    (QKV, words(scale=10**400), ValueError, "scale is inf; wanted a finite number"),
    (QKV, words(causal=1), ValueError, "causal is 1; wanted False, True, 'bottom-right' or 'top-left'"),
    (QKV, words(causal=None), ValueError, "causal is None; wanted False, True, 'bottom-right' or 'top-left'"),
    (QKV, words(causal="top"), ValueError, "causal is 'top'; wanted False, True, 'bottom-right' or 'top-left'"),
    (QKV, words(window=3), ValueError, "window is 3; wanted None or a pair (left, right)"),
    (QKV, words(window=(1, 2, 3)), ValueError, "window is (1, 2, 3); wanted None or a pair (left, right)"),
    (QKV, words(window="ab"), ValueError, "window is 'ab'; wanted None or a pair (left, right)"),
    (
        [on_gpu(*SHAPE)] * 3, words(window=range(2)), ValueError,
        "window is range(0, 2); wanted None or a pair (left, right)",
    ),
    ([on_gpu(*SHAPE)] * 3, words(window=1j), ValueError, "window is 1j; wanted None or a pair (left, right)"),
    (QKV, words(window=np.ones(2)), ValueError, "window is array([1., 1.]); wanted None or a pair (left, right)"),
    (QKV, words(window=(0.5, None)), TypeError, "window left is 0.5; wanted an integer or None"),
    (QKV, words(window=(0, False)), TypeError, "window right is False; wanted an integer or None"),
    (
        QKV, words(window=(-1, 0)), ValueError,
        "window left is -1, negative; wanted 0 or more, or None for unlimited",
    ),
    (
        QKV, words(window=(0, -1), causal=True), ValueError,
        "window right is -1, negative; wanted 0 or more, or None for unlimited",
    ),
    (QKV, words(engine="fast"), ValueError, "engine is 'fast'; wanted None or one of 'numpy', 'portable', 'sm90'"),
    (QKV, words(engine=[]), ValueError, "engine is []; wanted None or one of 'numpy', 'portable', 'sm90'"),
    (
        QKV, words(engine=np.ones(2)), ValueError,
        "engine is array([1., 1.]); wanted None or one of 'numpy', 'portable', 'sm90'",
    ),
    (QKV, words(engine=1), ValueError, "engine is 1; wanted None or one of 'numpy', 'portable', 'sm90'"),
    (
        QKV, words(engine="portable"), ValueError,
        "engine is 'portable', the arrays are numpy's; wanted an engine for those",
    ),
    (
        [on_gpu(*SHAPE)] * 3, words(engine="numpy"), ValueError,
        "engine is 'numpy', the arrays are cupy's; wanted an engine for those",
    ),
    (QKV, words(precision="tf16"), ValueError, "precision is 'tf16'; wanted None or 'tf32'"),
    (QKV, words(precision=32), ValueError, "precision is 32; wanted None or 'tf32'"),
    (QKV, words(precision=["tf32"]), ValueError, "precision is ['tf32']; wanted None or 'tf32'"),
    (QKV, words(precision=False), ValueError, "precision is False; wanted None or 'tf32'"),
    (
        [on_gpu(*SHAPE, dtype=np.float16)] * 3, words(precision="tf32"), ValueError,
        "precision is 'tf32', the arrays are of float16; wanted float32 for that",
    ),
    (QKV, words(out=x(2, 4, 9)), ValueError, "out has shape (2, 4, 9); wanted (2, 4, 8)"),
    (QKV, words(out=x(8)), ValueError, "out has shape (8,); wanted (2, 4, 8)"),
    ([x(4, 8)] * 3, words(out=x(1, 4, 8)), ValueError, "out has shape (1, 4, 8); wanted (4, 8)"),
    (QKV, words(out=x(*SHAPE, dtype=np.float64)), TypeError, "out has dtype float64; wanted float32"),
    (QKV, words(out=x(*SHAPE, dtype=">f4")), TypeError, "out has dtype >f4; wanted float32"),
    (QKV, words(out=read_only(*SHAPE)), ValueError, "out is read-only; wanted an array that can be written"),
    (
        QKV, words(out=np.lib.stride_tricks.as_strided(x(64), SHAPE, (64, 16, 4))), ValueError,
        "out overlaps itself (strides (64, 16, 4)); wanted distinct elements",
    ),
    (QKV, words(out=QKV[1][::-1]), ValueError, "out shares memory with k; wanted memory of its own"),
    (
        [PACKED[:, :, 0], *QKV[1:]], words(out=PACKED[:, ::-1, 0]), ValueError,
        "out shares memory with q; wanted memory of its own",
    ),
]  # fmt: skip

LSE = x(2, 4)
SIX = [QKV[0], *QKV, QKV[0], LSE]
BACKWARD = [
    ([x(2, 5, 8), *QKV, QKV[0], LSE], {}, ValueError, "dout has shape (2, 5, 8); wanted (2, 4, 8)"),
    ([QKV[0], *QKV, x(4, 8), LSE], {}, ValueError, "out has shape (4, 8); wanted (2, 4, 8)"),
    (
        [x(*SHAPE, dtype=np.float64), *QKV, QKV[0], LSE], {}, TypeError,
        "dout has dtype float64, q has float32; they must be equal",
    ),
    ([QKV[0], *QKV, QKV[0], x(2, 4, 1)], {}, ValueError, "lse has shape (2, 4, 1); wanted (2, 4)"),
    ([QKV[0], *QKV, QKV[0], x(2, 4, dtype=np.float64)], {}, TypeError, "lse has dtype float64; wanted float32"),
    ([QKV[0], *QKV, QKV[0], [0.0]], {}, TypeError, f"lse is a list; wanted {ANY}"),
    (SIX, words(dlse=x(4)), ValueError, "dlse has shape (4,); wanted (2, 4)"),
    (
        SIX, words(dlse=x(2, 4, dtype=np.int64)), TypeError,
        "dlse has dtype int64; wanted float32",
    ),
    (
        [QKV[0], *QKV, QKV[0], on_gpu(2, 4)], {}, TypeError,
        "q is a numpy array, lse a cupy one; they must be of one library",
    ),
    (SIX, words(grads=x(3)), ValueError, "grads is ndarray; wanted None or the three arrays (dq, dk, dv)"),
    (SIX, words(grads=QKV[:2]), ValueError, "grads is list; wanted None or the three arrays (dq, dk, dv)"),
    (
        SIX, words(grads=(x(*SHAPE), x(*SHAPE), x(1, 4, 8))), ValueError,
        "dv has shape (1, 4, 8); wanted (2, 4, 8)",
    ),
    (
        SIX, words(grads=(x(*SHAPE), x(*SHAPE, dtype=np.float16), x(*SHAPE))), TypeError,
        "dk has dtype float16; wanted float32",
    ),
    (
        SIX, words(grads=(read_only(*SHAPE), x(*SHAPE), x(*SHAPE))), ValueError,
        "dq is read-only; wanted an array that can be written",
    ),
    (
        SIX, words(grads=(PACKED[:, :, 0], PACKED[:, :, 1], PACKED[:, :, 1])), ValueError,
        "dv shares memory with dk; wanted memory of its own",
    ),
    (
        SIX, words(grads=(x(*SHAPE), QKV[2], x(*SHAPE))), ValueError,
        "dk shares memory with v; wanted memory of its own",
    ),
]  # fmt: skip

CACHE = x(3, 2, 6, 8)
Q = x(3, 2, 1, 8)
CACHED = [Q, CACHE, CACHE]
LENGTHS = np.array([6, 0, 1])
TABLE = np.zeros((3, 2), np.int32)
INT8 = [Q.astype(np.float16), *[CACHE.astype(np.int8)] * 2]
BYTES = [INT8[0], *[CACHE.astype(np.uint8)] * 2]
HEADS, SLOTS = x(2), x(3, 2, 6)
INTEGERS = np.zeros(3, np.int32)
APPEND = words(lengths=LENGTHS, k_new=x(3, 2, 1, 8), v_new=x(3, 2, 1, 8))
LATENT, ROW = (on_gpu(2, 1, n, 576, dtype=np.float16) for n in (6, 1))
DECODE = [
    ([QKV[0], CACHE, CACHE], {}, ValueError, "q has shape (2, 4, 8); wanted 4 axes"),
    ([Q, CACHE[0], CACHE], {}, ValueError, "k_cache has shape (2, 6, 8); wanted 4 axes"),
    ([Q, CACHE[:, :1, :, :7], CACHE], {}, ValueError, "k_cache has head_dim 7, q has 8; they must be equal"),
    ([Q, CACHE, CACHE[:, :, :5]], {}, ValueError, "v_cache has 5 keys, k_cache has 6; they must be equal"),
    ([Q, CACHE, CACHE[:, :1]], {}, ValueError, "v_cache has 1 heads, k_cache has 2; they must be equal"),
    (
        [Q[:, :1], CACHE, CACHE], {}, ValueError,
        "q has 1 heads, k_cache has 2; wanted a multiple of k_cache's, at least one",
    ),
    ([Q, CACHE[:2], CACHE], {}, ValueError, "k_cache has 2 sequences, q has 3; they must be equal"),
    ([Q, CACHE, CACHE[:1]], {}, ValueError, "v_cache has 1 sequences, q has 3; they must be equal"),
    (
        [Q, CACHE[:2], CACHE[:1]], words(page_table=TABLE, lengths=LENGTHS), ValueError,
        "v_cache has 1 pages, k_cache has 2; they must be equal",
    ),
    (
        CACHED, words(page_table=TABLE[:2], lengths=LENGTHS), ValueError,
        "page_table has shape (2, 2); wanted (3, pages a sequence)",
    ),
    (
        CACHED, words(page_table=TABLE[0], lengths=LENGTHS), ValueError,
        "page_table has shape (2,); wanted (3, pages a sequence)",
    ),
    (
        CACHED, words(page_table=TABLE), ValueError,
        "lengths is None, page_table is given; wanted the length of each sequence",
    ),
    (
        CACHED, words(page_table=TABLE.astype(float), lengths=LENGTHS), TypeError,
        "page_table has dtype float64; wanted integers",
    ),
    (CACHED, words(lengths=LENGTHS.astype(np.float32)), TypeError, "lengths has dtype float32; wanted integers"),
    (CACHED, words(splits=0), ValueError, "splits is 0; wanted 1 or more"),
    *(
        ([wide_q, k, v], {}, ValueError, f"{said}; wanted at most 256 on a GPU, or 576 and 512 where v_cache is "
         "k_cache[..., :value_dim] in 16 bits")
        for wide_q, k, v, said in (
            (ROW, LATENT, LATENT[..., 1:], "q has head_dim 576"),  # other columns
            (ROW, LATENT, on_gpu(2, 1, 6, 512, dtype=np.float16), "q has head_dim 576"),
            (ROW, LATENT, LATENT, "v_cache has value_dim 576"),
            (*(on_gpu(2, 1, n, 577, dtype=np.float16) for n in (1, 6)), None, "q has head_dim 577"),
            (*(on_gpu(2, 1, n, 300) for n in (1, 6)), None, "q has head_dim 300"),  # of float32
        )
        for v in [k[..., :512] if v is None else v]
    ),
    (
        [ROW, LATENT, LATENT[..., :512]],
        words(k_new=ROW, v_new=ROW[..., :512], lengths=on_gpu(2, dtype=np.int32)), ValueError,
        "v_cache shares memory with k_cache; wanted memory of its own",
    ),
    (CACHED, words(splits=True), TypeError, "splits is True; wanted an integer or None"),
    (CACHED, words(splits=2.0), TypeError, "splits is 2.0; wanted an integer or None"),
    (
        [Q, CACHE, CACHE], words(page_table=np.broadcast_to(TABLE[:, :1], (3, 2 * 10**8)), lengths=LENGTHS), ValueError,
        "page_table has room for 1200000000 keys a sequence; wanted at most 1000000000",
    ),
    (CACHED, words(lengths=LENGTHS > 0), TypeError, "lengths has dtype bool; wanted integers"),
    (CACHED, words(lengths=[1, 2, 3]), TypeError, f"lengths is a list; wanted {ANY}"),
    (CACHED, words(lengths=LENGTHS[:2]), ValueError, "lengths has shape (2,); wanted (3,)"),
    (CACHED, words(lengths=LENGTHS[None]), ValueError, "lengths has shape (1, 3); wanted (3,)"),
    (CACHED, words(lengths=LENGTHS - 1), ValueError, "lengths[1] is -1; wanted 0 to 6, what the cache can hold"),
    (CACHED, words(lengths=LENGTHS + 1), ValueError, "lengths[0] is 7; wanted 0 to 6, what the cache can hold"),
    (
        CACHED, words(page_table=TABLE, lengths=LENGTHS + 7), ValueError,
        "lengths[0] is 13; wanted 0 to 12, what the cache can hold",
    ),
    (
        CACHED, words(page_table=TABLE + 3, lengths=LENGTHS), ValueError,
        "page_table[0, 0] is 3; wanted a page from 0 to 2",
    ),
    (
        CACHED, words(page_table=TABLE - 1, lengths=LENGTHS), ValueError,
        "page_table[0, 0] is -1; wanted a page from 0 to 2",
    ),
    (
        CACHED, words(lengths=DeviceArray(LENGTHS)), TypeError,
        "q is a numpy array, lengths a cupy one; they must be of one library",
    ),
    (CACHED, words(out=x(3, 2, 1, 7)), ValueError, "out has shape (3, 2, 1, 7); wanted (3, 2, 1, 8)"),
    (CACHED, words(out=x(8)), ValueError, "out has shape (8,); wanted (3, 2, 1, 8)"),
    (CACHED, words(out=x(3, 2, 1, 8, dtype=np.float16)), TypeError, "out has dtype float16; wanted float32"),
    (CACHED, words(out=CACHE[:, :, 2:3]), ValueError, "out shares memory with k_cache; wanted memory of its own"),
    (CACHED, words(kv_format="fp8"), ValueError, "kv_format is 'fp8'; wanted None, 'int8' or 'e4m3'"),
    (CACHED, words(kv_format=8), ValueError, "kv_format is 8; wanted None, 'int8' or 'e4m3'"),
    (CACHED, words(kv_format="int8"), TypeError, "k_cache has dtype float32, kv_format is 'int8'; wanted int8"),
    (INT8, words(kv_format="e4m3"), TypeError, "k_cache has dtype int8, kv_format is 'e4m3'; wanted uint8"),
    (BYTES, words(kv_format="int8"), TypeError, "k_cache has dtype uint8, kv_format is 'int8'; wanted int8"),
    (BYTES, {}, TypeError, "k_cache has dtype uint8, kv_format is None; wanted 'e4m3'"),
    (
        [CACHE[:, :, :1], *INT8[1:]], {}, TypeError,
        "q has dtype float32; wanted float16 or bfloat16 beside 8-bit caches",
    ),
    ([*INT8[:2], BYTES[2]], {}, TypeError, "v_cache has dtype uint8, k_cache has int8; they must be equal"),
    (
        CACHED, words(v_scale=HEADS), ValueError,
        "v_scale is given, k_cache has dtype float32; wanted scales of 8-bit caches alone",
    ),
    (
        INT8, APPEND, ValueError, "k_new is given, k_cache has dtype int8; wanted caches of 16 bits or more",
    ),
    (INT8, words(k_scale=HEADS.astype(float)), TypeError, "k_scale has dtype float64; wanted float32"),
    (INT8, words(v_scale=2.0), TypeError, f"v_scale is a float; wanted {ANY}"),
    (
        INT8, words(k_scale=HEADS[:1]), ValueError,
        "k_scale has shape (1,); wanted (2,), one a key head, or (3, 2, 6), one a slot",
    ),
    (
        INT8, words(v_scale=SLOTS[..., None]), ValueError,
        "v_scale has shape (3, 2, 6, 1); wanted (2,), one a key head, or (3, 2, 6), one a slot",
    ),
    (
        INT8, words(k_scale=DeviceArray(HEADS)), TypeError,
        "q is a numpy array, k_scale a cupy one; they must be of one library",
    ),
    (CACHED, words(scale=np.nan), ValueError, "scale is nan; wanted a finite number"),
    (CACHED, words(causal=2), ValueError, "causal is 2; wanted False, True, 'bottom-right' or 'top-left'"),
    (
        CACHED, words(engine="portable"), ValueError,
        "engine is 'portable', the arrays are numpy's; wanted an engine for those",
    ),
    (CACHED, words(k_new=Q, lengths=LENGTHS), ValueError, "v_new is None, k_new is given; wanted both, or neither"),
    (CACHED, words(v_new=Q, lengths=LENGTHS), ValueError, "k_new is None, v_new is given; wanted both, or neither"),
    (
        CACHED, words(k_new=Q, v_new=Q), ValueError,
        "lengths is None, k_new is given; wanted the length of each sequence without it",
    ),
    (CACHED, APPEND | words(k_new=x(3, 2, 2, 8)), ValueError, "k_new has shape (3, 2, 2, 8); wanted (3, 2, 1, 8)"),
    (CACHED, APPEND | words(v_new=x(3, 1, 1, 8)), ValueError, "v_new has shape (3, 1, 1, 8); wanted (3, 2, 1, 8)"),
    (
        CACHED, APPEND | words(v_new=x(3, 2, 1, 8, dtype=np.float16)), TypeError,
        "v_new has dtype float16, q has float32; they must be equal",
    ),
    ([Q, CACHE, x(3, 2, 6, 8)], APPEND | words(k_new=[1]), TypeError, f"k_new is a list; wanted {ANY}"),
    (
        [Q, read_only(3, 2, 6, 8), CACHE], APPEND, ValueError,
        "k_cache is read-only; wanted an array that can be written",
    ),
    (
        [Q, np.broadcast_to(CACHE[:, :, :1], CACHE.shape), x(3, 2, 6, 8)], APPEND, ValueError,
        "k_cache is read-only; wanted an array that can be written",
    ),
    (
        [Q, CACHE, np.lib.stride_tricks.as_strided(x(6 * 8), CACHE.shape, (0, 0, 32, 4))], APPEND, ValueError,
        "v_cache overlaps itself (strides (0, 0, 32, 4)); wanted distinct elements",
    ),
    (
        [Q, CACHE, x(3, 2, 6, 8)], APPEND | words(overflow=np.zeros(3)), TypeError,
        "overflow has dtype float64; wanted int32",
    ),
    (CACHED, APPEND, ValueError, "v_cache shares memory with k_cache; wanted memory of its own"),
    (
        [CACHE[:, :, :1], CACHE, x(3, 2, 6, 8)], APPEND, ValueError,
        "k_cache shares memory with q; wanted memory of its own",
    ),
    (
        [Q, CACHE, x(3, 2, 6, 8)], APPEND | words(v_new=CACHE[:, :, 5:]), ValueError,
        "k_cache shares memory with v_new; wanted memory of its own",
    ),
    (
        [Q, CACHE, x(3, 2, 6, 8)], APPEND | words(out=CACHE[:, :, 1:2]), ValueError,
        "out shares memory with k_cache; wanted memory of its own",
    ),
    (
        [Q, CACHE, x(3, 2, 6, 8)], APPEND | words(overflow=np.zeros(2, np.int32)), ValueError,
        "overflow has shape (2,); wanted (3,)",
    ),
    (
        [Q, CACHE, x(3, 2, 6, 8)], APPEND | words(lengths=INTEGERS, overflow=INTEGERS), ValueError,
        "overflow shares memory with lengths; wanted memory of its own",
    ),
    (CACHED, words(overflow=INTEGERS), ValueError, "overflow is given, k_new is None; wanted both, or neither"),
    (CACHED, words(rotary=x(9, 4)), ValueError, "rotary is ndarray; wanted None or the two arrays (cos, sin)"),
    (CACHED, words(rotary=[x(9, 4)]), ValueError, "rotary is list; wanted None or the two arrays (cos, sin)"),
    (
        CACHED, words(rotary=(x(9, 5), x(9, 5))), ValueError,
        "rotary cos has shape (9, 5); wanted (positions, pairs), at most 4 pairs for head_dim 8",
    ),
    (CACHED, words(rotary=(x(9, 4), x(8, 4))), ValueError, "rotary sin has shape (8, 4); wanted (9, 4)"),
    (
        CACHED, words(rotary=(x(9, 4, dtype=np.float64), x(9, 4))), TypeError,
        "rotary cos has dtype float64; wanted float32 or q's, float32",
    ),
    (
        CACHED, words(rotary=(x(9, 4), x(9, 4, dtype=np.float16))), TypeError,
        "rotary sin has dtype float16; wanted float32",
    ),
    (CACHED, words(rotary=(x(9, 4), 3)), TypeError, f"rotary sin is a int; wanted {ANY}"),
]  # fmt: skip

PREFILL = [  # what forward says of caches, by its own names
    ([QKV[0], CACHE, CACHE], words(lengths=LENGTHS), ValueError, "q has shape (2, 4, 8); wanted 4 axes"),
    ([Q, CACHE[:2], CACHE], words(lengths=LENGTHS), ValueError, "k has 2 sequences, q has 3; they must be equal"),
    (
        [Q, CACHE[:2], CACHE[:1]], words(page_table=TABLE, lengths=LENGTHS), ValueError,
        "v has 1 pages, k has 2; they must be equal",
    ),
    ([Q, CACHE, CACHE[:, :, :5]], words(lengths=LENGTHS), ValueError, "v has 5 keys, k has 6; they must be equal"),
    (
        CACHED, words(page_table=TABLE), ValueError,
        "lengths is None, page_table is given; wanted the length of each sequence",
    ),
    (
        CACHED, words(page_table=TABLE[:2], lengths=LENGTHS), ValueError,
        "page_table has shape (2, 2); wanted (3, pages a sequence)",
    ),
    (CACHED, words(lengths=[6, 0, 1]), TypeError, f"lengths is a list; wanted {ANY}"),
    (CACHED, words(lengths=LENGTHS[:2]), ValueError, "lengths has shape (2,); wanted (3,)"),
    (CACHED, words(lengths=LENGTHS.astype(np.float32)), TypeError, "lengths has dtype float32; wanted integers"),
    (CACHED, words(lengths=LENGTHS + 1), ValueError, "lengths[0] is 7; wanted 0 to 6, what the cache can hold"),
    (
        CACHED, words(page_table=TABLE + 3, lengths=LENGTHS), ValueError,
        "page_table[0, 0] is 3; wanted a page from 0 to 2",
    ),
    (
        CACHED, words(lengths=DeviceArray(LENGTHS)), TypeError,
        "q is a numpy array, lengths a cupy one; they must be of one library",
    ),
    (CACHED, words(lengths=LENGTHS, out=x(3, 2, 1, 7)), ValueError, "out has shape (3, 2, 1, 7); wanted (3, 2, 1, 8)"),
    (
        CACHED, words(lengths=LENGTHS, out=CACHE[:, :, 2:3]), ValueError,
        "out shares memory with k; wanted memory of its own",
    ),
    (
        CACHED, words(lengths=LENGTHS, causal=2), ValueError,
        "causal is 2; wanted False, True, 'bottom-right' or 'top-left'",
    ),
]  # fmt: skip

MERGE = [
    ([[], []], ValueError, "outs has 0 parts, lses 0; wanted the same number, at least one"),
    ([[QKV[0]], [LSE, LSE]], ValueError, "outs has 1 parts, lses 2; wanted the same number, at least one"),
    ([x(3, 4, 8), x(2, 4)], ValueError, "outs has 3 parts, lses 2; wanted the same number, at least one"),
    ([5, LSE], TypeError, "outs is a int; wanted a sequence of arrays, or one with the parts along its first axis"),
    (
        [x(2, 4, 8), np.float32(0)], TypeError,
        "lses is a float32; wanted a sequence of arrays, or one with the parts along its first axis",
    ),
    ([[QKV[0], "part"], [LSE, LSE]], TypeError, f"outs[1] is a str; wanted {ANY}"),
    ([[QKV[0]], [0.0]], TypeError, f"lses[0] is a float; wanted {ANY}"),
    ([[x(4)], [x()]], ValueError, "outs[0] has shape (4,); wanted at least 2 axes (queries, value_dim)"),
    ([QKV[:2], [LSE, x(2, 5)]], ValueError, "lses[1] has shape (2, 5); wanted (2, 4)"),
    ([[QKV[0], x(2, 4, 7)], [LSE, LSE]], ValueError, "outs[1] has shape (2, 4, 7); wanted (2, 4, 8)"),
    (
        [[QKV[0], x(*SHAPE, dtype=np.float64)], [LSE, LSE]], TypeError,
        "outs[1] has dtype float64, outs[0] has float32; they must be equal",
    ),
    ([QKV[:2], [LSE, LSE.astype(np.float16)]], TypeError, "lses[1] has dtype float16; wanted float32"),
    ([[x(*SHAPE, dtype=np.int8)], [LSE]], TypeError, f"outs[0] has dtype int8; wanted one of {KNOWN_DTYPES}"),
    (
        [[QKV[0], on_gpu(*SHAPE)], [LSE, LSE]], TypeError,
        "outs[0] is a numpy array, outs[1] a cupy one; they must be of one library",
    ),
]  # fmt: skip

REJECTED = [
    *((cuflash.forward, *each) for each in (*FORWARD, *PREFILL)),
    *((cuflash.backward, *each) for each in BACKWARD),
    *((cuflash.decode, *each) for each in DECODE),
    *((cuflash.merge, arguments, {}, *rest) for arguments, *rest in MERGE),
]


@pytest.mark.parametrize(
    "function, arrays, keywords, error, sentence",
    [pytest.param(*each, id=f"{each[0].__name__}: {each[4]}") for each in REJECTED],
)
def test_rejected_with_a_sentence_and_nothing_written(function, arrays, keywords, error, sentence):
    if function in (cuflash.forward, cuflash.decode):  # an out that is asked for is not touched either
        shape = (3, 2, 1, 8) if getattr(arrays[-1], "ndim", 0) == 4 else (2, 4, 8)
        keywords = {"out": np.ones(shape, np.float32)} | keywords
    given = [*arrays, *keywords.values(), *keywords.get("grads", ())]
    given = [each for each in given if isinstance(each, np.ndarray) and each.size < 10**6]
    before = [each.copy() for each in given]
    with pretended_gpu() as written, pytest.raises(error) as raised:
        if any(isinstance(each, DeviceArray) for each in arrays):
            keywords = {name: each for name, each in keywords.items() if not isinstance(each, np.ndarray)}
        function(*arrays, **keywords)
    assert str(raised.value) == f"{function.__name__}: {sentence}"
    assert all(np.array_equal(one, other) for one, other in zip(given, before, strict=True)) and not written


def test_pages_of_no_keys_are_legal():
    out, lse = cuflash.decode(
        Q, CACHE[:, :, :0], CACHE[:, :, :0], lengths=LENGTHS * 0, page_table=TABLE, return_lse=True
    )  # fmt: skip
    assert not out.any() and (lse == -np.inf).all()


@pytest.mark.parametrize("shape", [(3, 2, 0, 8), (0, 2, 4, 8), (3, 0, 4, 8), (3, 2, 4, 0)])
def test_an_empty_out_is_legal(shape):
    batch, heads, queries, value_dim = shape
    out, k = x(*shape), x(batch, 2, 5, 8)
    assert cuflash.forward(x(batch, heads, queries, 8), k, x(batch, 2, 5, value_dim), out=out) is out


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_gpu_kernel_yet(dtype):
    arrays = [on_gpu(1, 1, 4, 8, dtype=np.dtype(dtype)) for _ in range(3)]
    with pretended_gpu():
        for call in (cuflash.forward, partial(cuflash.explain, "forward")):
            with pytest.raises(NotImplementedError) as error:
                call(*arrays, lengths=on_gpu(1, dtype=np.int32))
            assert str(error.value) == (
                f"forward: has no GPU kernel for {dtype} with lengths yet; wanted float16 or bfloat16, or NumPy arrays"
            )


def test_decode_explains_a_kernel_for_each_dtype():
    """Of several splits, which make parts in the dtype of sums."""
    for dtype in DTYPES:
        kind = ELEMENTS[dtype]
        problem = planned_problem(testing.CacheRecipe(lengths=(2000,), dtype=dtype, splits=9))
        plan = _plan.plan(problem, HOPPER)
        assert plan.variant.element == dtype and plan.variant.args["scale_log2"] == kind.lse
        assert {each.name: each.dtype for each in plan.buffers} == {
            "out": dtype, "lse": kind.lse.name, "parts": kind.lse.name, "arrived": "int32",
        }  # fmt: skip
        assert f"decode{'_real' * (kind.itemsize > 2)}_{kind.short}_" in str(plan)


@pytest.mark.parametrize("head_dim, runs", [(40, (0, 0, 0)), (128, (16, 16, 1)), (200, (16, 16, 1))])
def test_pages_of_eight_bits_that_are_no_whole_runs_have_kernels_of_their_own(head_dim, runs):
    """And these have the tiles of the others, which the order of arithmetic follows."""
    recipes = [testing.CacheRecipe(lengths=(90,), page_size=size, head_dim=head_dim) for size in (None, 48, 24)]
    eight = [replace(recipe, dtype="float16", kv_format="int8") for recipe in recipes]
    made = [_plan.plan(planned_problem(recipe), HOPPER).variant for recipe in eight]
    assert tuple(variant.run for variant in made) == runs
    assert len({replace(variant, run=0) for variant in made}) == 1
    assert len({_plan.plan(planned_problem(recipe), HOPPER).variant for recipe in recipes}) == 1  # of 16 bits: one


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["merge", *QKV], "function is 'merge'; wanted one of 'forward', 'backward', 'decode'"),
        ([cuflash.merge, *QKV], "function is 'merge'; wanted one of 'forward', 'backward', 'decode'"),
        ([cuflash.forward, *QKV[:2]], "forward takes the arrays q, k, v; got 2"),
        (["backward", *QKV], "backward takes the arrays dout, q, k, v, out, lse; got 3"),
    ],
)
def test_explain_refuses_what_it_cannot(arguments, sentence):
    with pytest.raises(ValueError) as error:
        cuflash.explain(*arguments)
    assert str(error.value) == f"explain: {sentence}"


@st.composite
def views(draw, buffer=24):
    """Shape, strides and start of an array of up to three axes inside a buffer of that many elements."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    strides = [draw(st.integers(-6, 6)) for _ in shape]
    ends = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    low, high = sum(min(e, 0) for e in ends), sum(max(e, 0) for e in ends)
    assume(high - low < buffer)
    return shape, strides, draw(st.integers(-low, buffer - 1 - high))


def addresses(shape, strides, start):
    index = np.indices(shape).reshape(len(shape), -1)
    return (start + np.array(strides) @ index).tolist()


@settings(max_examples=1000)
@given(views(), views())
def test_overlap_is_decided_exactly(out, other):
    buffer = np.zeros(24, np.float32)
    places = [addresses(*each) for each in (out, other)]
    out, other = (
        np.lib.stride_tricks.as_strided(buffer[start:], shape, [4 * s for s in strides])
        for shape, strides, start in (out, other)
    )
    wanted = None
    if len({*places[0]}) < len(places[0]):
        wanted = "out overlaps itself"
    elif {*places[0]} & {*places[1]}:
        wanted = "out shares memory with q"
    with pytest.raises(ValueError, match=wanted) if wanted else contextlib.nullcontext():
        _problem._result("forward", "out", out, out.shape, out.dtype, {"q": other})


# Masks ----------------------------------------------------------------------------------------------------------

LENGTH = st.integers(0, 40)
SIDE = st.none() | st.integers(0, 45) | st.sampled_from((10**9, 10**30))
CAUSAL = st.sampled_from((False, "bottom-right", "top-left"))


def dense(queries, keys, causal, window):
    """The rule of visibility, pair by pair."""
    left, right = window or (None, None)
    offset = 0 if causal == "top-left" else keys - queries
    seen = np.ones((queries, keys), bool)
    for i in range(queries):
        for j in range(keys):
            if left is not None and j < i + offset - left:
                seen[i, j] = False
            if right is not None and j > i + offset + right:
                seen[i, j] = False
            if causal and j > i + offset:
                seen[i, j] = False
    return seen


@settings(max_examples=1000)
@given(LENGTH, LENGTH, CAUSAL, st.none() | st.tuples(SIDE, SIDE))
@example(40, 40, False, (10**30, None))
def test_a_mask_is_one_run_of_keys_a_row(queries, keys, causal, window):
    mask = _masks.make(queries, keys, causal, window)
    rows = np.arange(queries)
    first, end = mask.first_key(rows, keys), mask.end_key(rows, keys)
    seen = dense(queries, keys, causal, window)
    j = np.arange(keys)
    assert ((j >= first[:, None]) & (j < end[:, None]) == seen).all()
    assert all(((0 <= each) & (each <= keys)).all() and (np.diff(each) >= 0).all() for each in (first, end))
    assert [mask.first_key(i, keys) for i in range(queries)] == first.tolist()
    assert [mask.end_key(i, keys) for i in range(queries)] == end.tolist()
    assert max(abs(mask.first_shift), abs(mask.end_shift)) <= max(queries, keys), "sums with a row fit 32 bits"
    if queries and keys:
        left = (seen & (j > 0)).any() and not all(row[0] for row in seen if row.any())
        if mask.name == "full":
            assert seen.all()
        else:
            assert not seen.all()
            assert left or mask.name == "causal" or not seen[-1].any(), "a window that hides nothing on the left"


@settings(max_examples=1000)
@given(LENGTH, LENGTH, CAUSAL, st.none() | st.tuples(SIDE, SIDE), st.integers(1, 9), st.integers(1, 9), st.data())
def test_tiles_to_visit_and_tiles_without_a_test_follow_from_the_ends(
    queries, keys, causal, window, tile_q, tile_k, data
):
    assume(queries)
    mask, seen = _masks.make(queries, keys, causal, window), dense(queries, keys, causal, window)
    top = data.draw(st.integers(0, queries - 1)) // tile_q * tile_q
    bottom = min(top + tile_q, queries) - 1
    rows = seen[top : bottom + 1]
    first, end = mask.first_key(top, keys), mask.end_key(bottom, keys)
    visited = range(first // tile_k, -(-end // tile_k)) if first < end else range(0)
    for tile in range(keys // tile_k + 1):
        start = tile * tile_k
        part = rows[:, start : start + tile_k]
        assert part.any() == (tile in visited)
        untested = mask.first_key(bottom, keys) <= start and start + tile_k <= mask.end_key(top, keys)
        assert untested == (part.shape[1] == tile_k and part.all())


def structs(file):
    text = (_variant.folder() / file).read_text()
    return dict(re.findall(r"^struct (\w+) \{\n(.*?)^\};", text, re.M | re.S))


def test_every_mask_has_a_struct_and_conversely():
    assert {mask.__name__ for mask in _masks.MASKS.values()} == structs("mask.cuh").keys()
    assert all(mask.name == name for name, mask in _masks.MASKS.items())
    for mask in _masks.MASKS.values():
        (members,) = re.findall(r"^    int (.*);", structs("mask.cuh")[mask.__name__], re.M)
        assert members.split(", ") == ["keys", *(field.name for field in fields(mask))]


@pytest.mark.parametrize("mask", _masks.MASKS.values(), ids=_masks.MASKS)
@given(st.integers(-50, 50), st.integers(-50, 50), st.integers(0, 40))
def test_structs_give_the_same_ends(mask, first_shift, end_shift, keys):
    body = structs("mask.cuh")[mask.__name__]
    shifts = {"first_shift": first_shift, "end_shift": end_shift}
    twin = mask(**{field.name: shifts[field.name] for field in fields(mask)})
    names = {"clamp": lambda value, low, high: min(max(value, low), high), "keys": keys, **shifts}
    for end in ("first_key", "end_key"):
        (formula,) = re.findall(rf"int {end}\(int ?i?\) const \{{ return (.*); \}}", body)
        for i in range(40):
            assert eval(formula, names | {"i": i}) == getattr(twin, end)(i, keys)


# Plans ----------------------------------------------------------------------------------------------------------


@cache
def listed(limits):
    """The variants that plans may ask for."""
    return frozenset(_plan.variants(limits))


def planned(q, k, v, limits=HOPPER, engine=None, **keywords):
    """The plan for NumPy arrays, were they on a GPU."""
    problem = _problem.forward(q, k, v, **(KEYWORDS | keywords))
    return _plan.plan(replace(problem, library="cupy", device=0, engine=engine), limits)


@pytest.mark.parametrize("limits", _plan.KNOWN.values(), ids=str)
def test_variants_fit_the_device_and_are_few(limits):
    variants = _plan.variants(limits)
    assert len(variants) <= 200
    assert len({each.name for each in variants}) == len({each.text() for each in variants}) == len(variants)
    assert max(each.shared_bytes for each in variants) <= limits.shared_bytes


@pytest.mark.parametrize("limits", _plan.KNOWN.values(), ids=str)
@pytest.mark.parametrize("head_dim, value_dim", [(1, 1), (3, 3), (64, 64), (65, 65), (130, 180), (40, 256), (256, 256)])
def test_float32_goes_to_tensor_cores_whatever_the_mask(limits, head_dim, value_dim):
    q, v = np.zeros((2, 70, head_dim), np.float32), np.zeros((2, 70, value_dim), np.float32)
    masks = {}, {"causal": True}, {"window": (9, 3)}, {"precision": "tf32"}
    plans = [planned(q, q, v, limits, engine="portable", **mask) for mask in masks]
    (variant,) = {step.variant for plan in plans for step in plan.steps}
    assert {plan.engine for plan in plans} == {"portable"} and variant in _plan.variants(limits)
    assert variant.kernel == "forward_f32" and variant.tile_q == 16 * variant.warps
    assert variant.head_dim >= head_dim and variant.value_dim >= value_dim
    parts = 6 * (variant.tile_q * variant.head_dim + variant.tile_k * (variant.head_dim + variant.value_dim))
    assert 0 <= variant.shared_bytes - parts < 1024
    assert variant.tile_k <= bounds.PATHS["portable float32"].block, "a tile is summed by itself"
    assert variant.tile_k >= bounds.PATHS["portable float32"].tile


@pytest.mark.parametrize("precision, parts", [(None, 3), ("tf32", 2)])
@pytest.mark.parametrize(
    "dims, padded", [((64, 64), 64), ((33, 3), 64), ((5, 40), 64), ((65, 64), 128), ((128, 100), 128)]
)
def test_float32_on_hopper_is_split_first(precision, parts, dims, padded):
    """Parts of q by packed rows, of k and of v; boxes of them are what the kernel that follows waits for."""
    given = (3, 8, 5, dims[0]), (3, 2, 150, dims[0]), (3, 2, 150, dims[1])
    q, k, v = (np.zeros(shape, np.float32) for shape in given)
    masks = {}, {"causal": True}, {"window": (9, 3)}
    plans = [planned(q, k, v, precision=precision, **mask) for mask in masks]
    assert len({step.variant for plan in plans for step in plan.steps}) == 2, "one kernel for all masks"
    plan = plans[0]
    split, main = plan.steps
    assert (plan.engine, plan.variant) == ("sm90", main.variant) and "Hopper" in plan.reason
    assert bool(plan.copies) == any(dim % 4 for dim in dims), "rows that are no multiple of 16 bytes"
    assert [step.variant.kernel for step in plan.steps] == ["forward_parts", "forward_f32_sm90"]
    for variant in (split.variant, main.variant):
        assert variant in _plan.variants(HOPPER)
        assert (variant.head_dim, variant.value_dim, variant.parts) == (padded, padded, parts)
    assert main.shared_bytes <= HOPPER.shared_bytes and main.threads == 32 * main.variant.warps == 384
    assert main.variant.tile_k <= bounds.PATHS["sm90 tf32" if precision else "sm90 float32"].block

    shapes = {"q_parts": (parts, 6, 20, padded), "k_parts": (parts, 6, 150, padded), "v_parts": (parts, 6, 150, padded)}
    assert {each.name: each.shape for each in plan.buffers[2:]} == shapes
    assert {(each.dtype, each.order, each.zeroed) for each in plan.buffers[2:]} == {("bfloat16", (0, 1, 2), False)}
    assert split.args["pack"] == main.args["pack"] == 4 and split.args["schedule"] == main.args["schedule"]
    assert (split.args["query_blocks"], split.args["key_blocks"], split.grid) == (6, 18, 42)
    assert not split.tensor_maps and main.args["first_block"] == 0 and main.grid == 6
    for name, tensor in main.tensor_maps.items():
        _, heads, rows, _ = shapes[tensor.operand]
        assert name[0] == tensor.operand[0] and tensor.itemsize == 2
        assert tensor.dims == (padded, rows, heads, parts, 1)
        assert tensor.strides[:3] == tuple(2 * padded * n for n in (1, rows, rows * heads))
        assert tensor.box == (64, 64 if name == "q_map" else main.variant.tile_k, 1, 1, 1)
        assert tensor.box[0] * tensor.itemsize == 128 and max(tensor.box) <= 256  # a span of the swizzle; the most
        assert all(stride % 16 == 0 for stride in tensor.strides)


def test_float32_on_hopper_is_split_from_where_it_lies():
    """Tensor maps are of the parts: operands that have none themselves, of negative steps, are not copied for that."""
    base = np.zeros((2, 90, 3, 72), np.float32)
    q, k, v = (base[..., n, 4:68] for n in range(3))
    assert not planned(q[:, ::-1], k[:, ::-2], np.broadcast_to(v[:1], v.shape)[:, :45]).copies
    assert [copy.name for copy in planned(base[..., 0, 3:67], k, v).copies] == ["q"]  # no multiple of 16 bytes
    assert [copy.name for copy in planned(q, k, v, scale=-1.0).copies] == ["q"]


def test_float32_on_hopper_of_more_blocks_than_a_grid_holds_is_split_once(monkeypatch):
    monkeypatch.setattr(_plan, "LARGEST_GRID", 40)
    q = np.zeros((5, 7, 300, 40), np.float32)
    plan = planned(q, q, q)
    assert [step.variant.kernel for step in plan.steps] == ["forward_parts", *["forward_f32_sm90"] * 3]
    assert [step.grid for step in plan.steps[1:]] == [40, 40, 25] and plan.variant.kernel == "forward_f32_sm90"
    assert [step.args["first_block"] for step in plan.steps[1:]] == [0, 40, 80]


@pytest.mark.parametrize("shape", [(0, 2, 9, 64), (3, 0, 9, 64), (3, 2, 0, 64)])
def test_float32_on_hopper_without_rows_has_no_launch(shape):
    k = np.zeros((*shape[:1], 1, 9, 64), np.float32)
    plan = planned(np.zeros(shape, np.float32), k, k)
    assert (plan.engine, plan.steps, len(plan.buffers)) == ("sm90", (), 2)


@pytest.mark.parametrize("capability, shared", [((9, 0), 228), ((10, 0), 228)])
def test_as_many_blocks_fit_a_multiprocessor_as_the_registers_leave_room_for(capability, shared):
    for each in _plan.variants(_plan.KNOWN[capability]):
        assert each.blocks_per_sm * (each.shared_bytes + 1024) <= shared * 1024  # the system keeps 1 KB a block


@pytest.mark.parametrize("limits", _plan.KNOWN.values(), ids=str)
def test_float64_pads_to_what_its_instructions_take(limits):
    assert _plan.float64_dims(3, 1) == (4, 8) and _plan.float64_dims(5, 8) == (8, 8)
    assert _plan.float64_dims(8, 33) == (8, 64) and _plan.float64_dims(200, 3) == (256, 256)
    for dims in product(range(1, 257, 5), repeat=2):
        padded = _plan.float64_dims(*dims)
        assert all(size >= dim for size, dim in zip(padded, dims, strict=True))
        assert _plan.float64_dims(*padded) == padded
    for padded in _plan.FLOAT64_TILES:
        variant = _plan.forward_variant("float64", "full", *padded, limits)
        assert (variant.head_dim, variant.value_dim, variant.kernel) == (*padded, "forward_f64")
        assert variant.tall_products == (limits.capability >= (9, 0))
        shares = 16 * variant.warps // variant.tile_q  # warps that share rows
        assert variant.tile_q >= 16 and shares == (2 if variant.value_dim > 128 else 1)
        assert {_plan.forward_variant("float64", mask, *padded, limits) for mask in _masks.MASKS} == {variant}


NO_TABLES = {
    "lengths": None, "page_table": None, "k_scale": None, "v_scale": None, "kv_format": None, "k_new": None,
    "v_new": None, "rotary": None, "rotary_interleaved": False, "overflow": None, "return_lse": True, "out": None,
    "engine": None,
}  # fmt: skip


def planned_problem(recipe):
    """The problem of a `testing.CacheRecipe`, were its arrays on a GPU."""
    q, k, v, tables = recipe.arrays()
    problem = _problem.decode(q, k, v, **(NO_TABLES | tables | recipe.keywords | recipe.splitting))
    return replace(problem, library="cupy", device=0)


@pytest.mark.parametrize("limits", _plan.KNOWN.values(), ids=str)
@settings(max_examples=200)
@given(testing.caches(dtypes=tuple(DTYPES)) | testing.caches(formats=(None,), latent=True))
def test_every_plan_of_decode_asks_for_a_listed_variant(limits, recipe):
    problem = planned_problem(recipe)
    plan = _plan.plan(problem, limits)
    before = recipe.append or recipe.rotary
    kind = recipe.kv_format or recipe.dtype
    named = {"int8": "decode_8bit", "e4m3": "decode_8bit", "float32": "decode_real", "float64": "decode_real"}
    named = dict.fromkeys(named, "decode_latent") | {kind: "decode_latent"} if recipe.latent else named
    kernels = (["append"] if before else []) + [named.get(kind, "decode")]
    assert plan.engine == "portable"
    assert [step.variant.kernel for step in plan.steps] == (kernels if recipe.lengths and recipe.queries else [])
    assert all(step.variant in listed(limits) for step in plan.steps)
    for step in plan.steps[-1:]:
        assert plan.variant == step.variant
        assert step.variant.head_dim >= recipe.head_dim and step.variant.value_dim >= recipe.value_dim
        assert step.variant.element == kind
        items = len(recipe.lengths) * recipe.key_heads * step.args["tiles"]
        several = step.grid > items and (step.cluster == 1 or "sequences" in step.args)  # parts in global memory
        assert step.grid % step.cluster == 0 and step.cluster in (1, step.args["splits"])
        made = ["out", "lse", *["totals"] * bool(before), *["rotated"] * bool(recipe.rotary)]
        assert [buffer.name for buffer in plan.buffers] == [*made, *["parts", "arrived"] * several]
        assert {buffer.name for buffer in plan.buffers if buffer.zeroed} == {*["arrived"] * several}
    reason, once = "asked for", "; v is k's first columns, which are read once"
    reason += once * bool(recipe.latent and plan.steps)
    assert _plan.plan(replace(problem, engine="portable"), limits).reason == reason
    with pytest.raises(ValueError, match="engine is 'sm90', but"):
        _plan.plan(replace(problem, engine="sm90"), limits)


@pytest.mark.parametrize("limits", _plan.KNOWN.values(), ids=str)
@settings(max_examples=200)
@given(testing.prefills())
def test_every_plan_on_a_cache_asks_for_a_listed_variant(limits, recipe):
    q, k, v, tables = recipe.arrays()
    problem = _problem.forward(q, k, v, **(KEYWORDS | tables | recipe.keywords))
    problem = replace(problem, library="cupy", device=0)
    plan = _plan.plan(problem, limits)
    assert plan.engine == "portable" and len(plan.steps) == bool(recipe.lengths and recipe.queries)
    for step in plan.steps:
        assert step.variant in listed(limits) and step.variant.name.endswith("_paged")
        assert step.variant.head_dim >= recipe.head_dim and step.variant.value_dim >= recipe.value_dim
        assert step.shared_bytes == step.variant.shared_bytes
    assert {copy.name for copy in plan.copies} <= {"q", "k", "v", "lengths", "page_table"}
    with pytest.raises(ValueError, match="engine is 'sm90', but (rows of a cache|wgmma)"):
        _plan.plan(replace(problem, engine="sm90"), limits)


def test_values_that_are_columns_of_keys_are_found_where_they_lie():
    cache = np.zeros((3, 2, 8, 40), np.float16)
    for k, v, found in (
        (cache, cache[..., :24], True),
        (cache.swapaxes(1, 2), cache.swapaxes(1, 2)[..., :24], True),
        (cache, cache, True),
        (cache, cache[..., :0], True),
        (cache[..., :24], cache[..., :24], True),
        (cache[:, :, ::-1], cache[:, :, ::-1, :24], True),
        (cache[:, :1], cache[:, :1, :, :24], True),
        (cache, cache[..., 1:24], False),
        (cache, cache[..., :24].copy(), False),
        (cache, cache[..., ::2], False),
        (cache, cache[:, :, ::-1, :24], False),
        (cache[..., :24], cache, False),
        (cache[:, :1], cache[:, 1:, :, :24], False),
        (cache, cache.view(np.uint16)[..., :24], False),
    ):
        assert _problem.in_keys(k, v) == found
        assert _problem.in_keys(DeviceArray(k), DeviceArray(v)) == found


def test_a_call_prepared_for_columns_of_keys_takes_no_other_values(monkeypatch):
    launched = []
    with pretended_gpu():
        monkeypatch.setattr(_compile, "load", lambda variant, device: variant.kernel)
        monkeypatch.setattr(_compile, "launcher", lambda kernel, *facts: lambda *_: launched.append(kernel))
        for _ in range(2):  # the second is prepared, and other caches are as good
            cache = on_gpu(2, 1, 6, 576, dtype=np.float16)
            cuflash.decode(ROW, cache, cache[..., :512])
            other = on_gpu(2, 1, 6, 576, dtype=np.float16)[..., :512]
            with pytest.raises(ValueError, match="q has head_dim 576; wanted at most 256"):
                cuflash.decode(ROW, cache, other)
        assert launched == ["decode_latent"] * 2 and len(_launch._calls) == 1


@pytest.mark.parametrize("limits", _plan.KNOWN.values(), ids=str)
def test_keys_whose_columns_are_values_are_read_once(limits):
    """By blocks that there is room for, rows in as few tiles as that allows; a copy is one of keys alone."""
    for heads, tile_q in ((1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (128, 64)):
        recipe = testing.CacheRecipe(lengths=(5000, 40), heads=heads, head_dim=576, value_dim=512, latent=True)
        plan = _plan.plan(planned_problem(recipe), limits)
        (step,) = plan.steps
        small = limits.shared_bytes < 100 * 1024
        assert step.variant.tile_q == (min(tile_q, 32) if small else tile_q) and not plan.copies
        assert step.shared_bytes <= limits.shared_bytes and "v_strides" not in step.args
        assert step.args["tiles"] == -(-heads // step.variant.tile_q)
        (copy,) = _plan.plan(planned_problem(replace(recipe, k="offset")), limits).copies
        assert copy.name == "k"


def test_parts_of_values_that_are_columns_of_keys_are_few():
    """They are long, and one block adds them."""
    splits = {}
    for length in (1000, 8192, 65536):
        recipe = testing.CacheRecipe(lengths=(length,), heads=16, head_dim=576, value_dim=512, latent=True)
        (step,) = _plan.plan(planned_problem(recipe), HOPPER).steps
        splits[length] = step.args["splits"]
    assert splits == {1000: 6, 8192: 17, 65536: 46}
    recipe = testing.CacheRecipe(lengths=(8192,) * 32, heads=16, head_dim=576, value_dim=512, latent=True)
    (step,) = _plan.plan(planned_problem(recipe), HOPPER).steps
    assert step.args["splits"] == 4 and step.grid == max(4 * 32, HOPPER.processors)


def test_what_a_cache_has_room_for_changes_no_order_of_arithmetic():
    recipe = testing.CacheRecipe(lengths=(40, 3), heads=6, key_heads=2, queries=70, head_dim=64, value_dim=24)
    facts = set()
    for changes in ({}, {"spare": 3000}, {"lengths": (9,) * 7}, {"page_size": 16}, {"k": "offset"}, {"q": "swapped"}):
        q, k, v, tables = replace(recipe, **changes).arrays()
        problem = replace(_problem.forward(q, k, v, **(KEYWORDS | tables)), library="cupy", device=0)
        (step,) = _plan.plan(problem, HOPPER).steps
        facts.add((step.variant, step.args["pack"]))
    assert len(facts) == 1


def test_an_append_goes_first_a_warp_a_row():
    recipe = testing.CacheRecipe(
        lengths=(40, 3, 9), append=True, heads=6, key_heads=2, queries=2, head_dim=64, value_dim=24, page_size=16
    )
    for changes, rows, vectors in (
        ({}, 2 * 4, (1, 1)),
        ({"rotary": 32}, 2 * (6 + 4), (1, 1)),
        ({"rotary": 32, "append": False}, 2 * 6, (0, 0)),
        ({"value_dim": 20}, 2 * 4, (1, 0)),
        ({"k": "offset"}, 2 * 4, (0, 1)),
        ({"rows": "strided"}, 2 * 4, (0, 0)),
    ):
        problem = planned_problem(replace(recipe, **changes))
        append, decode = _plan.plan(problem, HOPPER).steps
        assert (append.variant.kernel, decode.variant.kernel, append.variant.function) == ("append", "decode", "decode")
        assert append.args["rows"] == rows and append.args["items"] == 3 * rows
        assert append.grid == -(-3 * rows // 8) and append.threads == 256
        assert (append.args.get("k_vectors", 0), append.args.get("v_vectors", 0)) == vectors
        assert decode.args["appended"] == 1 and decode.args["length_stride"] == 4
    (alone,) = _plan.plan(planned_problem(replace(recipe, append=False)), HOPPER).steps
    assert alone.args["appended"] == 0


def test_more_rows_to_append_than_a_grid_holds_are_several_launches(monkeypatch):
    problem = planned_problem(testing.CacheRecipe(lengths=(4,) * 5, append=True, key_heads=1, queries=3, rotary=2))
    monkeypatch.setattr(_plan, "LARGEST_GRID", 20)
    steps = [step for step in _plan.plan(problem, HOPPER).steps if step.variant.kernel == "append"]
    assert [(step.args["first_sequence"], step.args["items"]) for step in steps] == [(0, 18), (2, 18), (4, 9)]
    monkeypatch.setattr(_plan, "LARGEST_GRID", 8)
    with pytest.raises(ValueError, match="decode: a sequence has 9 rows to append and rotate; wanted at most 8"):
        _plan.plan(problem, HOPPER)


def shares(args, tile_k, length, first_key=0):
    """Runs of keys of the splits that take part, as the kernel shares them out."""
    first_tile = first_key // tile_k
    if first_key >= length:
        return [(length, length)]
    tiles = (length - 1) // tile_k + 1 - first_tile
    share = max(-(-tiles // args["splits"]), args["fewest"])
    used = max(-(-tiles // share), 1)
    ends = [min((split + 1) * share, tiles) for split in range(used)]
    return [
        (max((first_tile + start) * tile_k, first_key), min((first_tile + end) * tile_k, length))
        for start, end in zip([0, *ends], ends, strict=False)
    ]


@settings(max_examples=300)
@given(
    st.integers(1, 10**6), st.sampled_from((None, 1, 2, 3, 7, 64, 10**6)), st.booleans(), st.integers(1, 70),
    st.sampled_from((32, 64, 128)), st.integers(0, 10**6), st.integers(0, 10**6),
)  # fmt: skip
def test_splits_share_each_key_once(capacity, splits, batch_invariant, sequences, head_dim, length, first_key):
    q = np.zeros((sequences, 8, 1, head_dim), np.float16)
    k = np.broadcast_to(q[:1, :2], (sequences, 2, capacity, head_dim))
    problem = _problem.decode(
        q, k, k, **NO_TABLES, scale=None, causal=True, window=None, splits=splits, batch_invariant=batch_invariant
    )
    (step,) = _plan.plan(replace(problem, library="cupy", device=0), HOPPER).steps
    args, tile_k = step.args, step.variant.tile_k
    assert step.grid == sequences * 2 * args["splits"] and (splits is None or args["splits"] <= splits)
    for keys in {length % (capacity + 1), capacity, 0, 1}:
        first = first_key % (keys + 1)
        runs = shares(args, tile_k, keys, first)
        assert len(runs) <= args["splits"], "a share has no block"
        assert runs[0][0] == first and runs[-1][1] == keys
        assert [start for start, _ in runs[1:]] == [end for _, end in runs[:-1]]
        assert all(start % tile_k == 0 for start, _ in runs[1:]), "a tile is shared"
        if batch_invariant and splits is None and not first:
            assert all(end - start == 1024 for start, end in runs[:-1]) and runs[-1][1] - runs[-1][0] <= 1024


def splits_of(args, tiles):
    """Splits of sequences whose rows see so many tiles of keys, as ``kernels/shares.cuh`` shares them out."""
    if 8 * sum(tiles) >= 7 * max(tiles) * len(tiles):
        return [args["splits"]] * len(tiles)
    total = sum(tiles) * args["key_heads"] * args["tiles"]
    lone, wave, waves = (-(-total // args[blocks]) for blocks in ("lone", "wave", "waves"))
    short = min(max(lone, args["least_share"]), args["short_share"])
    share = max(min(max(wave, short), args["usual_share"]), waves)
    return [max(-(-each // share), 1) for each in tiles]


def ragged_step(
    sequences, capacity, key_heads, queries, head_dim, limits=HOPPER, *, group=4, page_size=None, **keywords
):
    """The plan of a batch of which only the device knows the lengths, and its launch. Its arrays take no memory."""
    q = np.broadcast_to(np.float16(0), (sequences, group * key_heads, queries, head_dim))
    k = np.broadcast_to(np.float16(0), (sequences, key_heads, page_size or capacity, head_dim))
    given = NO_TABLES | {"lengths": np.zeros(sequences, np.int32)}
    if page_size:
        given["page_table"] = np.zeros((sequences, -(-capacity // page_size)), np.int32)
    given |= {"scale": None, "causal": True, "window": None, "splits": None, "batch_invariant": False} | keywords
    problem = _problem.decode(q, k, k, **given)
    plan = _plan.plan(replace(problem, library="cupy", device=0), limits)
    return plan, plan.steps[-1]


@pytest.mark.parametrize("limits", _plan.KNOWN.values(), ids=str)
@settings(max_examples=150)
@given(
    st.integers(2, 1024), st.integers(1, 10**5), st.integers(1, 40), st.sampled_from((1, 3, 17, 70)),
    st.sampled_from((32, 128, 256)), st.sampled_from((None, (100, None), (5000, 0))), st.integers(0, 2**32),
)  # fmt: skip
def test_a_grid_has_room_for_all_lengths(limits, sequences, capacity, key_heads, queries, head_dim, window, seed):
    plan, step = ragged_step(sequences, capacity, key_heads, queries, head_dim, limits, window=window)
    args, tile_k = step.args, step.variant.tile_k
    items, rng = args["key_heads"] * args["tiles"], np.random.default_rng(seed)
    if "sequences" not in args:  # numbers that leave 31 bits
        assert sequences * items * -(-capacity // tile_k) > _plan.LARGEST_SUM
        return
    assert args["sequences"] == sequences and len(plan.steps) == 1
    parts = {buffer.name: buffer.shape[0] for buffer in plan.buffers}.get("parts", 0)
    uneven = np.exp(rng.uniform(0, math.log(capacity + 1), sequences)).astype(int)
    few = np.where(np.arange(sequences) < 1 + seed % 3, capacity, 1)
    for lengths in (uneven, few, np.full(sequences, capacity), rng.integers(0, capacity + 1, sequences), 0 * few):
        lengths = np.minimum(lengths, capacity)
        first = 0 if window is None else np.clip(lengths - queries - window[0], 0, lengths)
        tiles = np.where(lengths > first, (lengths - 1) // tile_k + 1 - first // tile_k, 0).tolist()
        splits = splits_of(args, tiles)
        assert sum(splits) * items <= step.grid, "a split has no block"
        assert step.grid <= parts or max(splits) == 1 or splits[0] == args["splits"] == 1, "a part has no room"
        assert 8 * sum(tiles) < 2**31 and sum(tiles) * items + args["waves"] < 2**31


def test_splits_follow_all_lengths():
    """Of 64 sequences from 100 to 64k keys, no block has much more than a quarter of a multiprocessor's share."""
    plan, step = ragged_step(64, 65536, 8, 1, 128)
    args = step.args
    for seed in range(10):
        lengths = np.exp(np.random.default_rng(seed).uniform(math.log(100), math.log(65536), 64)).astype(int)
        tiles = [-(-int(length) // step.variant.tile_k) for length in lengths]
        splits = splits_of(args, tiles)
        longest = max(-(-each // n) for each, n in zip(tiles, splits, strict=True))
        usual = _plan.RAGGED_KEYS // step.variant.tile_k
        assert max(splits) > 8 and longest <= max(8 * sum(tiles) / (4 * 2 * HOPPER.processors) + 1, usual)
        assert sum(splits) * 8 <= 4 * 2 * HOPPER.processors + 64 * 8
    assert splits_of(args, [512] * 64) == [args["splits"]] * 64, "alike: as many each as if they were full"
    for fixed in ({"splits": 4}, {"batch_invariant": True}, {"lengths": None}):
        _, step = ragged_step(64, 65536, 8, 1, 128, **fixed)
        assert "sequences" not in step.args and step.grid == 64 * 8 * step.args["splits"]
    _, step = ragged_step(1, 65536, 8, 1, 128)  # one alone has nobody to share with
    assert "sequences" not in step.args
    _, step = ragged_step(8, 1024, 8, 1, 128)  # what takes little time has few blocks to spare
    assert step.grid == HOPPER.processors and splits_of(step.args, [64, *[1] * 7]) == [64 // 8, *[1] * 7]


def test_few_short_splits_are_the_blocks_of_a_cluster():
    for sequences, capacity, changes, wanted in (
        (1, 1024, {}, 8),  # eight splits and no more
        (1, 8192, {}, 1),  # 16 splits
        (1, 2048, {"splits": 4}, 4),
        (1, 8192, {"splits": 4}, 1),  # too long
        (1, 8192, {"splits": 2}, 2),
        (1, 8192, {"splits": 1}, 1),
        (1, 1024, {"splits": 2, "queries": 20}, 1),  # several tiles of rows
        (8, 8192, {}, 2),  # for when they are alike
        (7, 8192, {}, 2),
        (8, 8192, {"page_size": 16}, 1),
        (64, 8192, {}, 1),
    ):
        sizes = dict(key_heads=8, queries=1, head_dim=128) | changes
        plan, step = ragged_step(sequences, capacity, **sizes)
        assert step.cluster == wanted and step.cluster in (1, step.args["splits"]), (sequences, capacity, changes)
        parts = any(buffer.name == "parts" for buffer in plan.buffers)
        several = step.args["splits"] > 1 or sequences > 1
        assert parts == (several and (wanted == 1 or "sequences" in step.args)), (sequences, capacity, changes)
        for older in (limits for limits in _plan.KNOWN.values() if limits.capability < (9, 0)):
            assert ragged_step(sequences, capacity, **sizes, limits=older)[1].cluster == 1


def test_long_splits_are_for_two_blocks_a_multiprocessor():
    """As many as fit on it, so long as a split keeps enough keys and a second block fits for each."""
    for sequences, capacity, key_heads, wanted in (
        (1, 65536, 8, 16), (1, 131072, 8, 32), (1, 65536, 32, 8), (8, 65536, 8, 4), (6, 8192, 32, 1),
    ):  # fmt: skip
        _, step = ragged_step(sequences, capacity, key_heads, 1, 128, group=32 // key_heads, lengths=None)
        assert step.args["splits"] == wanted and step.grid == sequences * key_heads * wanted


def test_of_many_waves_half_of_the_first_begins_late():
    for sequences, wanted in ((64, (132, 264)), (32, ()), (1, ())):
        _, step = ragged_step(sequences, 1024, 8, 1, 128)
        assert tuple(step.args[name] for name in ("late_first", "late_end") if name in step.args) == wanted


def test_a_launch_in_clusters_is_the_drivers(monkeypatch):
    """Its struct of facts and its one attribute, as the driver's header has them."""
    launched = []

    def start(config, function, arguments, extra):
        *facts, attributes, count = struct.unpack("=7I4xQQI4x", config)
        attribute = struct.unpack("=I4x3I52x", ctypes.string_at(attributes, 72))
        launched.append((facts, attribute, count, function, arguments, extra))
        return len(launched) - 1

    driver = SimpleNamespace(check_status=lambda status: status and pytest.fail(f"status {status}"))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(driver=driver)))
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(driver=driver))
    monkeypatch.setattr(_compile, "driver_function", lambda name, *types: {"cuLaunchKernelEx": start}[name])
    launch = _compile._in_clusters(4)
    launch(77, 8, 1, 1, 128, 1, 1, 4096, 99, 1234)
    assert launched == [([8, 1, 1, 128, 1, 1, 4096, 99], (4, 4, 1, 1), 1, 77, 1234, None)]
    with pytest.raises(pytest.fail.Exception, match="status 1"):
        launch(77, 8, 1, 1, 128, 1, 1, 4096, 99, 1234)


def test_lengths_of_too_many_sequences_are_not_read_by_each():
    for sequences, capacity in ((_plan.MOST_RAGGED + 1, 100), (1024, 2**25)):
        _, step = ragged_step(sequences, capacity, 8, 1, 128)
        assert "sequences" not in step.args and step.grid == sequences * 8 * step.args["splits"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 48, 255, 256, 257, 1000, 2**29 + 1, 10**9])
def test_pages_are_found_without_division(size):
    pages = 10**9 // size
    problem = planned_problem(testing.CacheRecipe())
    places = replace(problem.k, shape=(pages, 1, size, 8))
    (step,) = _plan.plan(replace(problem, keys=pages * size, k=places, v=places), HOPPER).steps
    multiplier, shift = step.args["page_multiplier"], step.args["page_shift"]
    edges = [n * size + d for n in (0, 1, 2, pages // 2, pages - 1, pages) for d in (-1, 0, 1)]
    for n in [n for n in (*edges, *np.random.default_rng(0).integers(0, 10**9, 1000).tolist()) if 0 <= n <= 10**9]:
        assert ((n * multiplier >> 32) + n) >> shift == n // size


def test_a_window_needs_few_splits():
    problem = planned_problem(testing.CacheRecipe())
    long = replace(problem, keys=10**6, k=replace(problem.k, shape=(1, 1, 10**6, 8)))
    for window, most in (((1000, None), 1000), ((0, 0), 1), (None, 10**6)):
        (step,) = _plan.plan(replace(long, window=window, splits=10**6), HOPPER).steps
        assert most <= step.args["splits"] * step.variant.tile_k <= most + 2 * step.variant.tile_k + 16


@pytest.mark.parametrize("largest_grid", [2**31 - 1, 40])
def test_more_blocks_of_decode_than_a_grid_holds_are_several_launches(monkeypatch, largest_grid):
    monkeypatch.setattr(_plan, "LARGEST_GRID", largest_grid)
    sequences = 2**31 - 1 if largest_grid > 40 else 33
    problem = planned_problem(testing.CacheRecipe(lengths=(200, 200), heads=8, key_heads=2, queries=3, splits=2))
    batch = {name: replace(x, shape=(sequences, *x.shape[1:]), strides=(0, *x.strides[1:])) for name, x in (
        ("q", problem.q), ("k", problem.k), ("v", problem.v))}  # fmt: skip
    steps = _plan.plan(replace(problem, batch=(sequences,), **batch), HOPPER).steps
    blocks = 2 * steps[0].args["tiles"] * steps[0].args["splits"]
    assert sum(step.grid for step in steps) == sequences * blocks
    assert max(step.grid for step in steps) <= largest_grid and len(steps) > 1
    first = 0
    for step in steps:
        assert step.args["first_sequence"] == first
        first += step.grid // blocks
    monkeypatch.setattr(_plan, "LARGEST_GRID", 3)
    with pytest.raises(ValueError, match="decode: a sequence has 12 rows, 4 blocks; wanted at most 3 of each"):
        _plan.plan(problem, HOPPER)


@pytest.mark.parametrize("limits", _plan.KNOWN.values(), ids=str)
@settings(max_examples=500)
@given(
    st.integers(1, 256), st.integers(0, 256), st.sampled_from(sorted(DTYPES)), st.sampled_from((False, True)),
    st.sampled_from((None, (3, 3))), st.sampled_from((None, "tf32")),
)  # fmt: skip
def test_every_plan_asks_for_listed_variants(limits, head_dim, value_dim, dtype, causal, window, precision):
    q, k, v = (np.zeros((1, 8, dim), DTYPES[dtype]) for dim in (head_dim, head_dim, value_dim))
    precision = precision if dtype == "float32" else None
    plan = planned(q, k, v, limits, causal=causal, window=window, precision=precision)
    assert len(plan.steps) == (2 if (plan.engine, dtype) == ("sm90", "float32") else 1)
    for step in plan.steps:
        assert step.variant in listed(limits)
        assert step.variant.head_dim >= head_dim and step.variant.value_dim >= value_dim
        assert step.shared_bytes == step.variant.shared_bytes and step.threads == 32 * step.variant.warps


def planned_backward(q, k, v, limits=HOPPER, engine=None, **keywords):
    """The plan of backward for NumPy arrays, were they on a GPU."""
    shape = (*np.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v))), *q.shape[-3:-1])
    real = np.float64 if q.dtype == np.float64 else np.float32
    dout, lse = np.broadcast_to(q[..., :1], (*shape, v.shape[-1])), np.broadcast_to(real(0), shape)
    given = {"scale": None, "causal": False, "window": None, "dlse": None, "grads": None} | keywords
    problem = _problem.backward(dout, q, k, v, dout, lse, **given, engine=None)
    return _plan.plan(replace(problem, library="cupy", device=0, engine=engine), limits)


@pytest.mark.parametrize("limits", _plan.KNOWN.values(), ids=str)
@settings(max_examples=300)
@given(
    st.integers(1, 256), st.integers(0, 256), st.sampled_from(tuple(DTYPES)),
    st.sampled_from((False, True)), st.sampled_from((None, (3, 3))), st.integers(1, 2000), st.integers(1, 2000),
    st.sampled_from((None, "portable")),
)  # fmt: skip
def test_every_plan_of_backward_asks_for_listed_variants(
    limits, head_dim, value_dim, dtype, causal, window, queries, keys, engine
):
    lengths = ((queries, head_dim), (keys, head_dim), (keys, value_dim))
    q, k, v = (np.broadcast_to(np.zeros(1, DTYPES[dtype]), (2, 3, *shape)) for shape in lengths)
    plan = planned_backward(q, k, v, limits, engine, causal=causal, window=window)
    before, *alone, main, behind = plan.steps
    for step in plan.steps:
        assert step.variant in listed(limits)
        assert step.shared_bytes == step.variant.shared_bytes and step.threads == 32 * step.variant.warps
        assert before.args.keys() <= step.args.keys() and not (step.tensor_maps and step in (before, behind))
        assert step.cooperative == (step is main)
    args, variant = main.args, main.variant
    assert variant.head_dim >= head_dim and variant.value_dim >= value_dim and plan.variant == variant
    assert len(alone) == (plan.engine == "sm90" and variant.head_dim > 128)
    assert args["columns"] == (0 if alone else variant.head_dim)
    assert ("dq_sum" in [buffer.name for buffer in plan.buffers]) == (not alone)
    assert main.grid <= min(args["items"], limits.processors * variant.blocks_per_sm)
    section = min(args["section"], args["items"] // args["key_tiles"])
    assert 1 <= section * -(-args["key_tiles"] >> args["passes_log2"]) <= main.grid, "a wave is more than a grid"
    assert args["key_tiles"] * args["tile_k"] >= keys
    assert behind.grid == max(0 if alone else 6 * -(-queries // behind.variant.tile_q), args["items"])
    assert before.grid * before.variant.tile_q == 6 * args["query_tiles"] * args["tile_q"]
    assert args["tile_q"] % behind.variant.tile_q == 0, "whole blocks of rows of dq_sum"
    assert all(step.grid == 6 * -(-queries // step.variant.tile_q) for step in alone)


def test_more_than_tickets_count_is_refused():
    q = np.broadcast_to(np.zeros((1, 8), np.float16), (2**15, 2**15, 1, 8))
    for engine, rows in (("portable", 2**30), ("sm90", 2**31)):
        with pytest.raises(ValueError, match=f"^backward: has {2**30} tiles of keys and {rows} of 64 rows, counted"):
            planned_backward(q, q, q, engine=engine)
    with pytest.raises(ValueError, match=f"^backward: has {2**30} tiles of keys and {2**32} of 16 rows, counted"):
        planned_backward(*[np.broadcast_to(np.zeros((1, 8)), q.shape)] * 3)


def test_tiles_of_backward_in_float32():
    """Where shared memory is small tiles are."""
    for capability, dim, tiles in (
        ((9, 0), 32, (64, 64, 4, 2)), ((9, 0), 64, (64, 128, 8, 1)), ((9, 0), 128, (64, 64, 8, 1)),
        ((9, 0), 256, (32, 32, 8, 1)), ((8, 0), 128, (32, 64, 4, 1)), ((8, 0), 256, (16, 32, 4, 1)),
        ((8, 6), 32, (64, 64, 4, 1)), ((8, 6), 128, (16, 32, 4, 1)), ((8, 6), 256, (16, 16, 4, 1)),
    ):  # fmt: skip
        limits = _plan.KNOWN[capability]
        for dims in ((dim, dim // 2), (dim // 2, dim)):
            variant = _plan.backward_variant("float32", *dims, limits)
            assert (variant.tile_q, variant.tile_k, variant.warps, variant.blocks_per_sm) == tiles
        blocks = variant.blocks_per_sm
        assert blocks * (variant.shared_bytes + 1024) <= limits.shared_bytes + 1024
        assert 32 * variant.warps * blocks <= 256 and variant.vector_adds == (capability >= (9, 0))


def test_tiles_of_backward_in_float64():
    """Where shared memory is small tiles are; where it has no room for keys they stay in global memory."""
    for capability, dim, tiles in (
        ((9, 0), 32, (64, 64, 1)), ((9, 0), 128, (32, 64, 1)), ((9, 0), 256, (16, 32, 1)), ((8, 0), 128, (32, 32, 1)),
        ((9, 0), 192, (32, 32, 1)), ((8, 0), 192, (16, 32, 1)), ((8, 0), 256, (16, 16, 1)),
        ((8, 6), 96, (16, 16, 1)), ((8, 6), 128, (16, 16, 1)), ((8, 6), 192, (16, 16, 0)), ((8, 6), 256, (16, 16, 0)),
    ):  # fmt: skip
        limits = _plan.KNOWN[capability]
        variant = _plan.float64_backward_variant(dim, dim // 2, limits)
        assert (variant.tile_q, variant.tile_k, variant.keys_shared) == tiles
        assert variant.shared_bytes <= limits.shared_bytes and variant.tall_products == (capability >= (9, 0))


def test_grads_that_broadcasting_stretched_are_parts_to_be_summed():
    q, k, v = (np.zeros(shape, np.float16) for shape in ((4, 1, 2, 20, 20), (1, 3, 2, 30, 20), (2, 30, 16)))
    plan = planned_backward(q, k, v)
    parts = {copy.name: (copy.shape, copy.pitch, copy.dtype, copy.summed) for copy in plan.copies if copy.summed}
    assert parts == {
        "dq": ((4, 3, 2, 20, 20), 80, "float32", (1,)),
        "dk": ((4, 3, 2, 30, 20), 80, "float32", (0,)),
        "dv": ((4, 3, 2, 30, 16), 64, "float32", (0, 1)),
    }
    args = plan.steps[1].args
    assert (args["dq_wide"], args["dk_wide"], args["dv_wide"], args["boxes"]) == (1, 1, 1, 0)
    assert [buffer.shape for buffer in plan.buffers[:3]] == [(4, 1, 2, 20, 20), (1, 3, 2, 30, 20), (1, 1, 2, 30, 16)]
    assert not {"dk_map", "dv_map"} & plan.steps[1].tensor_maps.keys()
    plan = planned_backward(*(x.astype(np.float64) for x in (q, k, v)))
    assert {copy.dtype for copy in plan.copies if copy.summed} == {"float64"}


def test_a_plan_of_backward_without_work_has_no_launch():
    for shapes in (((0, 8), (4, 8), (4, 8)), ((4, 8), (0, 8), (0, 8))):
        plan = planned_backward(*(np.zeros(shape, np.float16) for shape in shapes))
        assert plan.steps == plan.copies == () and len(plan.buffers) == 3


def test_tensor_maps_of_backward():
    q, k, v = (np.zeros((3, 90, heads, 64), np.float16).swapaxes(-3, -2) for heads in (8, 2, 2))
    plan = planned_backward(q, k, v, causal=True)
    (_, step, _), size = plan.steps, 2
    assert {copy.name for copy in plan.copies} == {"dout", "out", "lse"}, "these have strides of 0 here"
    boxes = {name: tensor.box for name, tensor in step.tensor_maps.items()}
    rows = {"q": 128, "dout": 128, "k": 128, "v": 128, "dk": 64, "dv": 64}
    assert boxes == {f"{name}_map": (64, 1, n, 1, 1) for name, n in rows.items()}
    assert step.tensor_maps["dk_map"].strides == (64 * size, 128 * size, 16, 90 * 128 * size)
    assert step.args["boxes"] == 1 and step.args["parts"] == 2


# The order of sums ----------------------------------------------------------------------------------------------


@st.composite
def orders(draw):
    """A head's tiles, mask, passes and sections, as plans make them; small tiles, so that there are many."""
    queries, keys = draw(st.integers(1, 60)), draw(st.integers(1, 60))
    causal, window = draw(CAUSAL), draw(st.none() | st.tuples(SIDE, SIDE))
    mask, group, blocks = _masks.make(queries, keys, causal, window), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    tile_q, tile_k = draw(st.sampled_from((1, 2, 3, 8))), draw(st.sampled_from((1, 2, 3, 8)))
    query_tiles, key_tiles = -(-queries // tile_q), -(-keys // tile_k)
    heads = draw(st.integers(1, 4))
    problem = SimpleNamespace(queries=queries, keys=keys, mask=mask, key_heads=heads)
    engine, head_dim = draw(st.sampled_from(("portable", "sm90"))), draw(st.sampled_from((64, 256)))
    variant = SimpleNamespace(engine=engine, head_dim=head_dim, tile_q=tile_q, tile_k=tile_k)
    passes = _plan._passes(problem, variant, key_tiles, blocks)
    return SimpleNamespace(
        **vars(problem), **_plan._shifts(problem), group=group, blocks=blocks, tile_q=tile_q, tile_k=tile_k,
        query_tiles=query_tiles, key_tiles=key_tiles, cyclic=mask.name == "full", passes=passes,
        section=_plan._section_of_heads(mask, passes, key_tiles, blocks),
    )  # fmt: skip


def wave_of(order, index):
    """Twin of `wave_of` in kernels/visits.cuh: (first head, heads, pass, first item, one past the last)."""
    first_head = index // (order.section * order.key_tiles) * order.section
    heads = min(order.section, order.key_heads - first_head)
    end, number = first_head * order.key_tiles, -1
    while end <= index:
        number += 1
        first, end = end, end + heads * len(range(number, order.key_tiles, order.passes))
    return first_head, heads, number, first, end


def visits_of(order, index):
    """Twin of `locate_item`, `Visit` and `turn_of` there: (key head, key tile, [(head, query tile, turn)])."""

    def clamp(value, high):
        return min(max(value, 0), high)

    def tiles_before(tiles):  # of passes before this one
        return sum(tile % order.passes < number for tile in range(tiles))

    first_head, heads, number, first_item, _ = wave_of(order, index)
    rank, head = divmod(index - first_item, heads)
    key_head, key_tile = first_head + head, number + rank * order.passes
    here = len(range(number, order.key_tiles, order.passes))
    if order.cyclic:
        first, end, visits = 0, order.query_tiles, order.group * order.query_tiles
        head, tile = divmod(rank * visits // here, order.query_tiles)
    else:
        last_key = clamp((key_tile + 1) * order.tile_k, order.keys) - 1
        first = clamp(key_tile * order.tile_k - order.end_shift + 1, order.queries)
        end = clamp(last_key - order.first_shift + 1, order.queries)
        first, end = first // order.tile_q, (end - 1) // order.tile_q + 1 if first < end else first // order.tile_q
        visits, head, tile = order.group * (end - first), 0, first
    made = []
    for _ in range(visits):
        if order.cyclic:
            place = head * order.query_tiles + tile
            later = ((place + 1) * here + visits - 1) // visits - 1 - rank
            turn = tiles_before(order.key_tiles) + (later + here if later < 0 else later)
        else:
            last_row = clamp((tile + 1) * order.tile_q, order.queries) - 1
            low = clamp(tile * order.tile_q + order.first_shift, order.keys) // order.tile_k
            high = (clamp(last_row + order.end_shift, order.keys) - 1) // order.tile_k + 1
            turn = tiles_before(high) - tiles_before(low) + (high - 1 - key_tile) // order.passes
        made.append((head, tile, turn))
        tile += 1
        if tile == end:
            tile, head = first, (head + 1) % order.group
    return key_head, key_tile, made


@settings(max_examples=1000)
@given(orders())
def test_turns_of_a_query_tile_are_those_of_its_visitors(order):
    """Every pair of tiles with something to see meets once, and its turns are 0, 1, 2, ... without a gap."""
    turns, items = {}, [visits_of(order, index) for index in range(order.key_heads * order.key_tiles)]
    assert sorted(item[:2] for item in items) == list(np.ndindex(order.key_heads, order.key_tiles))
    for key_head, key_tile, made in items:
        for head, tile, turn in made if key_head == 0 else ():
            turns.setdefault((head, tile), {})[key_tile] = turn
    for visitors in turns.values():
        assert sorted(visitors.values()) == list(range(len(visitors)))
    i, j = np.arange(order.queries)[:, None], np.arange(order.keys)
    seen = (order.mask.first_key(i, order.keys) <= j) & (j < order.mask.end_key(i, order.keys))
    for head, tile in np.ndindex(order.group, order.query_tiles):
        rows = seen[tile * order.tile_q : (tile + 1) * order.tile_q]
        some = {t for t in range(order.key_tiles) if rows[:, t * order.tile_k : (t + 1) * order.tile_k].any()}
        assert some == turns.get((head, tile), {}).keys()
        # backward_finish.cu knows from the two ends whether anything was stored
        first, last = tile * order.tile_q, min((tile + 1) * order.tile_q, order.queries) - 1
        stored = order.mask.first_key(first, order.keys) < order.mask.end_key(last, order.keys)
        assert stored == bool(some)


@settings(max_examples=200)
@given(orders(), st.randoms(use_true_random=False))
def test_turns_end_whatever_the_speed_of_blocks(order, random):
    """As many blocks as a plan's grid, each of which draws its next item when it has done with one."""
    items = [visits_of(order, index) for index in range(order.key_heads * order.key_tiles)]
    assert all(wave_of(order, n)[4] - wave_of(order, n)[3] <= order.blocks for n in range(len(items)))
    ticket, counters = iter(items), Counter()
    blocks = [None] * min(order.blocks, len(items))
    for _ in range(10**6):
        ready = []
        for n, block in enumerate(blocks):
            if block is None:
                item = next(ticket, None)
                blocks[n] = block = False if item is None else (item[0], list(item[2]))
            if block and (not block[1] or counters[(block[0], *block[1][0][:2])] == block[1][0][2]):
                ready.append(n)
        if not any(blocks):
            return
        assert ready, "every block waits for another"
        n = random.choice(ready)
        key_head, left = blocks[n]
        if left:
            counters[(key_head, *left.pop(0)[:2])] += 1
        if not left:
            blocks[n] = None
    raise AssertionError("it did not end")


@pytest.mark.parametrize("shape", [(2**20, 2**12, 1, 8), (2**16, 2**16, 1, 1, 8), (2**8, 2**12, 2**12, 1, 1, 8)])
def test_more_blocks_than_a_grid_holds_are_several_launches(shape):
    """Also where the leading axes, merged into one, would be longer than an int."""
    q = np.broadcast_to(np.zeros((1, 8), np.float16), shape)
    steps = planned(q, q, q).steps
    assert [step.args["first_block"] for step in steps] == [0, 2**31 - 1, 2**32 - 2]
    assert sum(step.grid for step in steps) == 2**32 and max(step.grid for step in steps) == 2**31 - 1
    for step in steps:
        args = np.zeros(1, step.variant.args)
        for name, value in step.args.items():
            args[name] = value  # raises where a number does not fit


@settings(max_examples=200)
@given(testing.problems(max_length=300), st.lists(st.sampled_from(testing.LAYOUTS), min_size=3, max_size=3))
def test_the_order_of_arithmetic_does_not_depend_on_batch_strides_or_alignment(recipe, layouts):
    """Engine, variant and packing are a function of one problem's own shape, dtype and keywords."""
    same = dict.fromkeys("qkv", "contiguous")
    alone = planned(*replace(recipe, batch=(), **same).arrays(), **recipe.keywords)
    assume(alone.steps)
    for batch in ((2,), (5, 3)):
        other = replace(recipe, batch=batch, **dict(zip("qkv", layouts, strict=True)))
        plan = planned(*other.arrays(), **recipe.keywords)
        assert plan.engine == alone.engine
        assert [step.variant for step in plan.steps] == [step.variant for step in alone.steps]
        assert plan.steps[0].args["pack"] == alone.steps[0].args["pack"]


def unaddressable(array):
    """Whether a kernel cannot read an array where it lies: the rule of the design."""
    strides = [s for n, s in zip(array.shape, array.strides, strict=True) if n > 1]
    strided = array.shape[-1] > 1 and array.strides[-1] != array.itemsize
    rows = strides[:-1] if array.shape[-1] > 1 else strides
    odd = array.ctypes.data % 16 or any(s % 16 for s in rows)
    return array.size > 0 and bool(strided or odd)


def no_tensor(array):
    """Whether a tensor map cannot hold an array: rows that are one, or a stride that is negative."""
    axes = [(n, s) for n, s in zip(array.shape[:-1], array.strides, strict=False) if n > 1]
    return array.size > 0 and (any(s < 0 for _, s in axes) or (array.shape[-2] > 1 and array.strides[-2] == 0))


@pytest.mark.parametrize("limits", [OLDER, HOPPER], ids=["portable", "sm90"])
@settings(max_examples=1000)
@given(testing.problems(max_length=40))
def test_copies_are_made_only_where_a_kernel_cannot_address(limits, recipe):
    q, k, v = recipe.arrays()
    plan = planned(q, k, v, limits, **recipe.keywords)
    scale = recipe.scale if recipe.scale is not None else 1
    wanted = {name for name, array in zip("qkv", (q, k, v), strict=True) if unaddressable(array)}
    wanted |= {"q"} if scale <= 0 else set()
    if plan.engine == "sm90" and recipe.dtype != "float32":  # whose tensor maps are of its parts
        wanted |= {name for name, array in zip("qkv", (q, k, v), strict=True) if no_tensor(array)}
        wanted |= {"out"} if recipe.value_dim % 8 else set()
    if not plan.steps:  # nothing is going to be read
        wanted = set()
    assert {copy.name for copy in plan.copies} == wanted
    for copy in plan.copies:
        assert copy.pitch % 16 == 0 and copy.factor == (1.0 if copy.name != "q" or scale > 0 else np.sign(scale))
        if copy.name != "out":
            assert math.prod(copy.shape) <= max(dict(zip("qkv", (q, k, v), strict=True))[copy.name].size, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_leading_axes_are_merged_without_copies_where_they_can_be(dtype):
    q = np.zeros((2, 3, 4, 5, 8, 16), DTYPES[dtype])
    assert not planned(q, q, q).copies
    assert not planned(q, q[:, :1, :1], q[:, :1, :1]).copies  # two axes are left, each with a stride
    assert not planned(q, q[0, 0, 0], q[0, 0, 0]).copies
    assert {copy.name for copy in planned(q, q[:, :1], q[:, :1]).copies} == {"q", "k", "v", "out"}


@pytest.mark.parametrize("causal", [False, True])
def test_short_rows_share_a_block_by_group(causal):
    q, k = np.zeros((2, 8, 1, 64), np.float16), np.zeros((2, 2, 500, 64), np.float16)
    (step,) = planned(q, k, k, causal=causal).steps
    assert (step.args["pack"], step.grid) == (4, 4)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [0.0, -0.0, 1e-300, -1e-40, 1e300, -1e300, -2.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_reach_the_kernel_positive_and_normal(scale, dtype):
    q = np.zeros((4, 8), DTYPES[dtype])
    plan = planned(q, q, q, scale=scale)
    limits = np.finfo(np.float64 if dtype == "float64" else np.float32)
    assert float(limits.tiny) <= plan.steps[0].args["scale_log2"] <= float(limits.max)
    factor = {copy.name: copy.factor for copy in plan.copies}.get("q", 1.0)
    assert factor == (0 if abs(scale) < float(limits.tiny) else np.sign(scale))


def test_a_problem_and_a_plan_print_themselves_in_a_line():
    q, k, v = x(3, 2, 8, 4, 64, dtype=np.float16), x(1, 2, 2, 90, 64, dtype=np.float16), x(2, 90, 300)[..., ::10]
    problem = _problem.forward(q, k, v.astype(np.float16), **(KEYWORDS | {"causal": True}))
    assert str(problem) == "forward float16 causal batch 3x2 heads 8/2 queries 4 keys 90 head_dim 64/30"
    older, hopper = (_plan.plan(replace(problem, library="cupy", device=0), limits) for limits in (OLDER, HOPPER))
    assert str(older) == (
        "portable (the engine of every GPU since sm_80, here sm_90, 227 KB shared, 132 SMs; NVRTC 12.8 is older than "
        f"12.9): {older.steps[0].variant.name} x 12; copies v"
    )
    assert str(hopper) == (
        f"sm90 (Hopper's own, here sm_90, 227 KB shared, 132 SMs): {hopper.steps[0].variant.name} x 12; copies v, out"
    )
    assert str(_plan.plan(problem, None)) == "numpy (the arrays are NumPy's): no launch"


@pytest.mark.parametrize(
    "dtype, shape, limits, why",
    [
        ("float16", (4, 8), HOPPER, None),
        ("float16", (0, 8), HOPPER, "a tensor map has no empty axis"),
        ("float32", (4, 33), HOPPER, None),
        ("float32", (4, 128), HOPPER, None),
        ("float32", (4, 32), HOPPER, "it pads to 64 columns, the portable engine to 32"),
        ("float32", (4, 129), HOPPER, "three parts of more than 128 columns do not fit its shared memory"),
        ("float32", (0, 64), HOPPER, "a tensor map has no empty axis"),
        ("float32", (4, 64), OLDER, "NVRTC 12.8 is older than 12.9"),
        ("float32", (4, 64), _plan.KNOWN[12, 0], "wgmma is sm_90's alone"),
        ("float64", (4, 64), HOPPER, "wgmma has no float64"),
        ("bfloat16", (4, 8), OLDER, "NVRTC 12.8 is older than 12.9"),
        ("bfloat16", (4, 8), _plan.KNOWN[8, 0], "wgmma is sm_90's alone"),
        ("bfloat16", (4, 8), _plan.KNOWN[10, 0], "wgmma is sm_90's alone"),
    ],
)
def test_what_hopper_does_not_take_goes_to_the_portable_engine(dtype, shape, limits, why):
    q = np.zeros(shape, DTYPES[dtype])
    plan = planned(q, q, q, limits)
    assert plan.engine == ("portable" if why else "sm90") and (why or "Hopper") in plan.reason
    if why:
        with pytest.raises(ValueError, match=f"^forward: engine is 'sm90', but {why}; wanted 'portable' or None$"):
            planned(q, q, q, limits, engine="sm90")
    assert planned(q, q, q, limits, engine="portable").reason == "asked for"


def test_a_tensor_map_is_what_a_kernel_takes_a_box_of():
    q, k, v = (np.zeros((3, 90, heads, 64), np.float16).swapaxes(-3, -2) for heads in (8, 2, 2))
    plan = planned(q[:, :, :5], k, v, causal=True)
    (step,) = plan.steps
    assert not plan.copies and step.args["pack"] == 4 and step.args["rows"] == 64
    maps, size = step.tensor_maps, 2
    assert maps["k_map"].dims == (64, 2, 90, 1, 3) and maps["k_map"].box == (64, 1, step.variant.tile_k, 1, 1)
    assert maps["k_map"].strides == (64 * size, 128 * size, 16, 90 * 128 * size)
    assert maps["q_map"].dims == (64, 8, 5, 1, 3) and maps["q_map"].box == (64, 4, 16, 1, 1)
    assert maps["out_map"].box == (64, 4, 4, 1, 1)
    three = planned(q[:, :6, :5], k, v).steps[0]
    assert three.args["rows"] == 63 and three.tensor_maps["q_map"].box == (64, 3, 21, 1, 1)
    assert "out_map" not in three.tensor_maps and not three.args["out_boxes"]


def test_explain_says_what_would_run_and_why():
    plan = cuflash.explain(cuflash.forward, *QKV, causal=True)
    assert (plan.engine, plan.reason, plan.steps) == ("numpy", "the arrays are NumPy's", ())
    with pretended_gpu() as written:
        arrays = [on_gpu(*SHAPE, dtype=np.float16)] * 3
        plan = cuflash.explain("forward", *arrays)
        assert plan.engine == "portable" and "sm_90" in plan.reason and not written
        assert cuflash.explain("forward", *arrays, engine="portable").reason == "asked for"
        assert plan.steps[0].variant.name in str(plan) and "\n" not in str(plan)
        plan = cuflash.explain("backward", arrays[0], *arrays, arrays[0], on_gpu(2, 4))
        assert [step.variant.kernel for step in plan.steps] == ["backward_rows", "backward", "backward_finish"]
        assert plan.variant.kernel == "backward" and not written
    assert cuflash.explain("backward", QKV[0], *QKV, QKV[0], LSE).engine == "numpy"
    assert cuflash.explain("decode", Q, CACHE, CACHE, lengths=LENGTHS).engine == "numpy"
    with pretended_gpu():
        q, k, v = (DeviceArray(x) for x in BYTES)
        plan = cuflash.explain("decode", q, k, v, kv_format="e4m3", k_scale=DeviceArray(HEADS))
        assert plan.variant.name.startswith("decode_8bit_e4m3_d64_")
        plan = cuflash.explain("decode", ROW, LATENT, LATENT[..., :512])
        assert plan.variant.name.startswith("decode_latent_f16_d576v512_q16_")


# Results --------------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.permutations(range(4)), st.tuples(*[st.sampled_from((1, 2, 3))] * 4), st.booleans(), st.booleans())
def test_swapping_back_gives_a_contiguous_array(order, shape, reversed_rows, wide_keys):
    """out and the gradients have the order of axes of their inputs."""
    inverse = np.argsort(order)

    def laid_out(shape):
        array = np.ones([(*shape, 5)[axis] for axis in (*order, 4)], np.float32)
        return array[::-1 if reversed_rows else 1].transpose(*inverse, 4)

    q, k = laid_out(shape), laid_out((*shape[:3], 4))
    v = laid_out((*shape[:3], 4))[..., :3]
    out, lse = cuflash.forward(q, k, v, return_lse=True)
    assert out.transpose(*order, 4).flags.c_contiguous and lse.flags.c_contiguous
    grads = cuflash.backward(out.copy(), q, k, v, out, lse)
    assert all(grad.transpose(*order, 4).flags.c_contiguous for grad in grads)


def test_axes_that_q_has_not_come_first_in_out():
    q, k = np.ones((4, 2, 5, 8), np.float32).swapaxes(1, 2).swapaxes(0, 1), np.ones((3, 5, 1, 2, 8), np.float32)
    q = q.transpose(0, 2, 1, 3)  # (5, 2, 4, 8): batch, heads, rows, of falling strides rows, heads, batch
    out = cuflash.forward(q, k, k)
    assert out.shape == (3, 5, 2, 4, 8) and out.transpose(0, 3, 2, 1, 4).flags.c_contiguous
    q = np.broadcast_to(np.ones((1, 2, 4, 8), np.float32), (5, 2, 4, 8))
    out = cuflash.forward(q.swapaxes(0, 1), k[0, :1, 0, 0], k[0, :1, 0, 0])
    assert out.shape == (2, 5, 4, 8) and out.transpose(1, 0, 2, 3).flags.c_contiguous


# merge ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=200)
@given(st.integers(1, 5), st.integers(0, 2**16), st.booleans())
def test_merging_weighs_each_part_by_its_share(dtype, parts, seed, stacked):
    rng = np.random.default_rng(seed)
    outs = rng.standard_normal((parts, 2, 3, 4)).astype(DTYPES[dtype])
    lses = rng.uniform(-5, 5, (parts, 2, 3)).astype(ELEMENTS[dtype].lse)
    lses[rng.random(lses.shape) < 0.2] = -np.inf
    out, lse = cuflash.merge(outs, lses) if stacked else cuflash.merge([*outs], (*lses,))
    assert (out.dtype, lse.dtype) == (outs.dtype, lses.dtype)
    weights = np.exp(lses.astype(np.float64))
    total = weights.sum(0)
    shares = (weights / np.where(total == 0, 1, total))[..., None] * outs.astype(np.float64)
    unit = float(np.finfo(lses.dtype).eps)
    bound = float(ml_dtypes.finfo(outs.dtype).eps) * abs(shares.sum(0)) + 16 * unit * abs(shares).sum(0)
    assert (abs(out.astype(np.float64) - shares.sum(0)) <= bound).all()
    assert (abs(np.exp(lse.astype(np.float64)) - total) <= 16 * unit * total).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [np.nan, np.inf, -np.inf])
def test_a_part_that_saw_nothing_is_ignored_whatever_it_holds(dtype, hidden):
    lse_dtype = ELEMENTS[dtype].lse
    good, bad = np.full((2, 3), 2, DTYPES[dtype]), np.full((2, 3), hidden, DTYPES[dtype])
    one, nothing = np.array([1.5, -np.inf], lse_dtype), np.full(2, -np.inf, lse_dtype)
    good[1] = hidden
    for outs, lses in (([bad, good], [nothing, one]), ([good, bad, bad], [one, nothing, nothing])):
        out, lse = cuflash.merge(outs, lses)
        assert out.tolist() == [[2] * 3, [0] * 3] and lse.tolist() == [1.5, -np.inf]


def test_a_visible_nan_survives_merging():
    out, lse = cuflash.merge([np.array([[np.nan, 1.0]]), np.ones((1, 2))], [np.zeros(1), np.zeros(1)])
    assert np.isnan(out[0, 0]) and out[0, 1] == 1 and lse[0] == np.log(2)
    for first in (0, 1):
        lses = [np.zeros(1), np.zeros(1)]
        lses[first][0] = np.nan
        out, lse = cuflash.merge([np.ones((1, 2)), np.ones((1, 2))], lses)
        assert np.isnan(out).all() and np.isnan(lse).all()


def test_merging_does_not_overflow():
    lses = [np.array([1e4]), np.array([-1e4]), np.array([1e4])]
    out, lse = cuflash.merge([np.full((1, 1), n) for n in (1.0, 5.0, 3.0)], lses)
    assert out[0, 0] == 2 and lse[0] == 1e4 + np.log(2)


# Text -----------------------------------------------------------------------------------------------------------

EXAMPLES = [_plan.forward_variant(dtype, mask, 64, 64, HOPPER) for dtype in DTYPES for mask in _masks.MASKS]
EXAMPLES += [_plan.hopper_variant("float16", mask, 64, 64) for mask in _masks.MASKS]
EXAMPLES += [_plan.backward_variant("float16", 64, 64, HOPPER), _plan.hopper_backward_variant("float16", 64)]
EXAMPLES += [_plan.hopper_dq_variant("float16", 256)]
EXAMPLES += [make(64, parts) for make in (_plan.parts_variant, _plan.hopper_float32_variant) for parts in (2, 3)]
for dtype in ("float16", "float32", "float64"):
    EXAMPLES += [_plan.rows_variant(dtype), _plan.finish_variant(dtype), _plan.backward_variant(dtype, 64, 64, HOPPER)]
EXAMPLES += [_plan.append_variant("float16"), _plan.decode_variant("float16", 64, HOPPER)]
EXAMPLES += [_plan.decode_8bit_variant("e4m3", 64, HOPPER), _plan.cache_variant("float16", 64, 64, HOPPER)]
for dtype in ("float32", "float64"):
    EXAMPLES += [_plan.decode_real_variant(dtype, 64, HOPPER), _plan.append_variant(dtype)]
EXAMPLES += [_plan.latent_variant("float16", HOPPER)]
EXAMPLES = list(dict.fromkeys(EXAMPLES))  # float32 and float64 have one kernel for all masks


@pytest.mark.parametrize("variant", EXAMPLES, ids=lambda variant: variant.name)
def test_text_holds_each_file_once_and_says_where_each_line_is_from(variant):
    lines = variant.text().splitlines()
    started, name, number = Counter(), None, 0
    for line in lines[len((variant.products() + variant.preamble()).splitlines()) :]:
        mark = re.fullmatch(r'#line (\d+) "kernels/(.+)"', line)
        if mark:
            number, name = int(mark[1]), mark[2]
            started[name] += number == 1
            continue
        original = (_variant.folder() / name).read_text().splitlines()[number - 1]
        assert line == original or (line == "" and re.match("#include|#pragma once", original)), f"{name}:{number}"
        number += 1
    assert set(started.values()) == {1} and variant.file in started
    assert (name, number) == (variant.file, len((_variant.folder() / name).read_text().splitlines()) + 1)


@pytest.mark.parametrize("variant", EXAMPLES, ids=lambda variant: variant.name)
def test_the_preamble_holds_constants_and_types_alone(variant):
    form = (
        r"//.*|namespace cuflash \{|\}|struct \w+;|using \w+ = \w+;|constexpr (int|bool) [A-Z_]+ = \w+;.*"
        r"|#ifdef .*|#define .*|#else|#endif|template <typename A>|struct ArgsLayout \{|    static_assert\(.*\);|\};"
    )
    for line in variant.preamble().splitlines():
        assert re.fullmatch(form, line), line
    constants = dict(re.findall(r"constexpr int (\w+) = (\d+);", variant.preamble()))
    owners = {
        "query_steps": "forward_sm90 decode_latent", "out_staged": "forward_sm90", "early": "forward_sm90",
        "ordered": " ".join(MAIN_BACKWARD), "tall_products": "forward_f64 backward_f64",
        "keys_shared": "backward_f64", "vector_adds": "backward backward_f32",
        "converts": "decode_8bit", "paged": "forward",
        "clusters": "decode decode_8bit decode_latent decode_real", "run": "decode decode_8bit decode_real",
        "parts": "forward_f32 forward_f32_sm90 forward_parts backward_f32",
    }  # fmt: skip
    numbers = {
        field.name: getattr(variant, field.name)
        for field in fields(variant)
        if variant.kernel in owners.get(field.name, variant.kernel).split()
        and field.name not in _variant._UNUSED.get(variant.kernel, ())
    }
    assert {name.lower(): int(value) for name, value in constants.items()} == {
        name: value for name, value in numbers.items() if isinstance(value, int)
    }


def test_every_file_is_part_of_some_kernel():
    files = {name for each in EXAMPLES for name in re.findall(r'#line 1 "kernels/(.+)"', each.text())}
    assert files == {path.name for path in _variant.folder().iterdir() if path.suffix in (".cu", ".cuh")}


def test_an_overlay_replaces_single_files(tmp_path):
    (tmp_path / "ptx.cuh").write_text("#pragma once\nstruct Emulated;\n")
    text = EXAMPLES[0].text(tmp_path)
    assert '#line 1 "kernels/ptx.cuh"\n\nstruct Emulated;\n' in text and "asm" not in text
    assert "Emulated" not in EXAMPLES[0].text()


@pytest.mark.parametrize(
    "kernel, real",
    [
        (kernel, real)
        for kernel, (_, args) in _variant.KERNELS.items()
        for real in (args if isinstance(args, dict) else ["float64" if kernel.endswith("f64") else "float32"])
    ],
)
def test_args_lie_where_the_struct_puts_them(kernel, real):
    """The layout of C, computed from the struct's declaration."""
    file, args = _variant.KERNELS[kernel]
    args = args[real] if isinstance(args, dict) else args
    sizes = {"const char*": 8, "char*": 8, "int64": 8, "int": 4, "float": 4, "double": 8, "Strides": 32, "Schedule": 16}
    sizes |= {"TensorMap": 128, "uint32": 4, "Steps": 32, "Real": np.dtype(real).itemsize}
    offset, widest, found = 0, 1, {}
    shared = {"decode": ("split.cuh", "Args"), "forward": ("forward_args.cuh", "DenseArgs")}
    shared = shared.get(kernel.split("_")[0], ("backward_args.cuh", "Args"))
    file, name = (file, "Args") if "Args" in structs(file) else shared
    declarations = re.sub("//.*", "", structs(file)[name]).replace("char* ", "char *")
    for kind, names in re.findall(r"(const char|\w+) (.+?);", declarations):
        for name in names.split(", "):
            size = sizes[kind + "*" * name.startswith("*")]
            align = size if kind == "TensorMap" else min(size, 8)
            offset = -(-offset // align) * align
            found[name.lstrip("*")] = offset
            offset, widest = offset + size, max(widest, align)
    assert found == {name: args.fields[name][1] for name in args.names}
    assert args.itemsize == -(-offset // widest) * widest
    pointers = "q k v dout out lse dlse dq dk dv row_lse row_delta dq_sum turns suspects"
    forward = _variant.FORWARD_POINTERS
    others = {"append": _variant.APPEND_POINTERS, "forward_parts": forward["forward_f32_sm90"]} | forward
    others |= dict.fromkeys(("decode", "decode_8bit", "decode_real", "decode_latent"), _variant.DECODE_POINTERS)
    pointers = others.get(kernel, pointers if kernel.startswith("backward") else "q k v out lse")
    assert args.names[: len(pointers.split())] == tuple(pointers.split()), "a launch packs the pointers first"
