"""Contenders: other ways to compute the same answer from the same memory, each optional.

    naive                         two products and a softmax in CuPy or NumPy, scores in memory; forward, backward
    fa2, cudnn, efficient, math   back ends of torch's scaled_dot_product_attention; all passes, math may lack memory
    flex                          torch's flex_attention, compiled by Triton for each case; forward, backward
    fa3                           FlashAttention-3, flash_attn_interface; all passes, backward where it is built
    fa4                           FlashAttention-4, flash_attn.cute; forward, backward
    flashinfer                    FlashInfer; forward, decode from pages
    jax                           jax.nn.dot_product_attention, in 16 bits by cuDNN, in a process of its own; forward,
                                  backward

(Triton alone is none of them: it ships no attention. `flex` is what it compiles.)

A contender has a ``name``; ``missing()``, which says why it cannot run here, or None; ``scope()``, a context manager
entered around each of its runs; and ``prepare(case, q, k, v)``, which gives a callable that computes the answer, an
array or tensor (..., heads, queries, value_dim), or raises ``Unfit`` with the reason. For gradients there is
``prepare_backward(case, dout, q, k, v)``, whose callable gives dq, dk and dv; what that keeps of a forward pass is made
beforehand. For decode, ``prepare_decode(case, q, tables)`` gives a function of caches, two tensors, that can be
captured in a CUDA graph. What cannot live in this process, such as JAX, has ``child(case)``: see there.

Private ones live in a folder named by the environment variable ``CUFLASH_CONTENDERS``: each ``*.py`` there that
defines ``contenders()``, a function that returns such objects.
"""

import contextlib
import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import ml_dtypes
import numpy as np
import progress_bar

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


LOOSE = {"float16": 1e-2, "bfloat16": 3e-2, "float32": 5e-3, "float64": 1e-6}  # how far its answer may be from ours


class Unfit(Exception):
    """A contender does not compute this case."""


def reason_of(error):
    """An exception as one line: of a compiler's the first may only say that another follows."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason given"]
    reason = (" ".join(lines[:2]) if lines[0].endswith(":") else lines[0])[:200]
    return reason if isinstance(error, Unfit) else f"{type(error).__name__}: {reason}"


_said = set()  # in this run


def left_out(name, error):
    """Say, once a run, why cases go on without a contender: they fail in ways of their own."""
    text = f"  {name} left out: {reason_of(error)}"
    if text not in _said:
        _said.add(text)
        progress_bar.say(text)


def beside(row, show):
    """How a row stands to its contenders, as the end of its line; ``show`` gives the text of milliseconds."""
    ratios, width = row["ratios"], len(show(0)) + 8
    text = f"  best {min(filter(None, ratios.values())):6.3f}x" if any(ratios.values()) else ""
    for name, ms in row["contenders"].items():
        text += f"  {name} " + (f"{show(ms)} {ratios[name]:6.3f}x" if ms else f"{'-':>{width}}")
    return text


class Contender:
    """What contenders share."""

    name = ""

    def missing(self):
        """Why it cannot run on this machine, or None."""

    def scope(self):
        """Context manager to be entered around its runs."""
        return contextlib.nullcontext()

    def prepare(self, case, q, k, v):
        """Give a callable without arguments that computes the case."""
        raise Unfit(f"does not compute {case.what}")

    def prepare_backward(self, case, dout, q, k, v):
        """Give a callable without arguments that computes the case's gradients."""
        raise Unfit(f"does not compute {case.what}")

    def prepare_decode(self, case, q, tables):
        """Give a function of caches of keys and of values that computes the case; ``tables`` are decode's keywords."""
        raise Unfit(f"does not compute {case.what}")

    def child(self, case):
        """Give None or, where the case is for a process of its own, a context manager of that process.

        Its value ``run(calls)`` has the process compute the case so many times, on numbers that it has drawn and with
        an answer that it has checked, and gives the milliseconds of one by the clock.
        """


def to_torch(array):
    """A CuPy or NumPy array as a torch tensor over the same memory; a tensor as it is."""
    import torch

    if isinstance(array, torch.Tensor):
        return array
    if array.dtype == BFLOAT16:  # DLPack of either side may not know the type
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def to_host(array):
    """A CuPy or NumPy array or a torch tensor as a NumPy array."""
    if isinstance(array, np.ndarray):
        return array
    if type(array).__module__.partition(".")[0] == "torch":
        import torch

        array = array.detach()
        if array.dtype == torch.bfloat16:
            return array.contiguous().view(torch.int16).cpu().numpy().view(BFLOAT16)
        return array.cpu().numpy()
    if array.dtype == BFLOAT16:  # moved as integers: no kernel of CuPy's for the type is needed
        return array.view(np.uint16).get().view(BFLOAT16)
    return array.get()


def on_torch(arrays):
    """Several of them."""
    return [to_torch(x) for x in arrays]


def swapped(x):
    """Of an array (batch, heads, rows, columns) the view (batch, rows, heads, columns), and the other way round."""
    return x.swapaxes(1, 2)


# By torch -------------------------------------------------------------------------------------------------------


class TorchFunction(Contender):
    """What computes tensors of torch's by a function that autograd knows, and needs a module beside torch."""

    module = "torch"

    def missing(self):
        try:
            import torch

            if not torch.cuda.is_available():
                return "torch sees no GPU"
            importlib.import_module(self.module)
        except Exception as error:  # of the module's own too
            return reason_of(error)
        return None

    def scope(self):
        import torch

        return torch.no_grad()

    def function(self, case, q):
        """The function of q, k, v for a case; of q only the device counts."""
        raise Unfit(f"does not compute {case.what}")

    def prepare(self, case, q, k, v):
        q, k, v = on_torch((q, k, v))
        function = self.function(case, q)
        return lambda: function(q, k, v)

    def prepare_backward(self, case, dout, q, k, v):
        import torch

        dout, *inputs = on_torch((dout, q, k, v))
        inputs = [x.detach().requires_grad_() for x in inputs]
        with self.scope(), torch.enable_grad():
            out = self.function(case, inputs[0])(*inputs)
        return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


class Torch(TorchFunction):
    """One back end of torch's scaled_dot_product_attention."""

    module = "torch.nn.attention"

    def __init__(self, name, backend):
        self.name, self.backend = name, backend

    def missing(self):
        reason = super().missing()
        if reason is None:
            from torch.nn.attention import SDPBackend

            reason = None if hasattr(SDPBackend, self.backend) else f"torch has no {self.backend}"
        return reason

    def scope(self):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        stack = contextlib.ExitStack()
        stack.enter_context(super().scope())
        stack.enter_context(sdpa_kernel([getattr(SDPBackend, self.backend)]))
        return stack

    def function(self, case, q):
        from torch.nn.functional import scaled_dot_product_attention

        _only_square(case)
        keywords = {"is_causal": case.mask == "causal"} | ({"enable_gqa": True} if case.heads != case.key_heads else {})
        return functools.partial(scaled_dot_product_attention, **keywords)

    def prepare_decode(self, case, q, tables):
        _only_16_bits(case)
        if case.page_size:
            raise Unfit("caches in one piece only")
        if case.shortest is not None:
            raise Unfit("sequences of one length only")
        if case.queries > 1:
            raise Unfit("one query a sequence only: its causal mask is top-left")
        from torch.nn.functional import scaled_dot_product_attention

        keywords = {"enable_gqa": True} if case.heads != case.key_heads else {}
        return functools.partial(scaled_dot_product_attention, to_torch(q), **keywords)


class Flex(TorchFunction):
    """torch's flex_attention, compiled by Triton anew for each case.

    Of one function the compiler keeps a few cases; one more, and it runs the expression, which stores the scores.
    """

    name, module = "flex", "triton"

    def function(self, case, q):
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch.compiler.reset()
        keywords = {"enable_gqa": True} if case.heads != case.key_heads else {}
        seen = self.seen(case)
        if seen is not None:
            keywords["block_mask"] = create_block_mask(seen, None, None, case.queries, case.length, device=q.device)
        return functools.partial(torch.compile(flex_attention, dynamic=False), **keywords)

    @staticmethod
    def seen(case):
        """Whether row i sees key j, as a function of batch, head, i and j; None where each sees all."""
        left, right = ends(case)
        if left is None and right is None:
            return None
        far, offset = case.queries + case.length, case.length - case.queries
        first, last = (-far if left is None else offset - left), (far if right is None else offset + right)
        return lambda b, h, i, j: (i + first <= j) & (j <= i + last)


class FlashAttention(TorchFunction):
    """FlashAttention-3 or -4 by its public function. Tensors are (batch, rows, heads, columns)."""

    def __init__(self, name, module):
        self.name, self.module = name, module

    def function(self, case, q):
        attention = importlib.import_module(self.module).flash_attn_func
        keywords = {"causal": case.mask == "causal"} | ({"window_size": self.window(case)} if case.window else {})

        def function(q, k, v):
            out = attention(swapped(q), swapped(k), swapped(v), **keywords)
            return swapped(out[0] if isinstance(out, tuple) else out)  # lse comes along in some versions

        return function

    def window(self, case):
        """The window as it is told: FlashAttention-3 has -1 for unlimited."""
        return tuple(-1 if end is None and self.name == "fa3" else end for end in case.window)

    def prepare_decode(self, case, q, tables):
        if self.name != "fa3":
            raise Unfit("no decode from caches")
        _only_16_bits(case)
        attention = importlib.import_module(self.module).flash_attn_with_kvcache
        keywords = {"cache_seqlens": to_torch(tables["lengths"]), "causal": True}
        if case.page_size:
            keywords["page_table"] = to_torch(tables["page_table"])
        q = swapped(to_torch(q))
        return lambda k, v: swapped(attention(q, swapped(k), swapped(v), **keywords))


class FlashInfer(TorchFunction):
    """FlashInfer: prefill of a batch whose sequences lie one behind the other, decode from pages."""

    name = module = "flashinfer"
    workspace_bytes = 512 << 20

    def function(self, case, q):
        import torch
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        left, right = ends(case)
        if right not in (0, None) or right is None and left is not None:
            raise Unfit("windows to the left only")
        starts = torch.arange(case.batch + 1, dtype=torch.int32, device=q.device)
        wrapper = BatchPrefillWithRaggedKVCacheWrapper(self.workspace(q), "NHD")
        wrapper.plan(
            starts * case.queries, starts * case.length, case.heads, case.key_heads, case.head_dim,
            causal=right == 0, window_left=-1 if left is None else left, q_data_type=q.dtype, kv_data_type=q.dtype,
        )  # fmt: skip

        def function(q, k, v):
            out = wrapper.run(*(swapped(x).flatten(0, 1) for x in (q, k, v)))
            return swapped(out.unflatten(0, (case.batch, case.queries)))

        return function

    def prepare_backward(self, case, dout, q, k, v):
        raise Unfit("no gradients")

    def prepare_decode(self, case, q, tables):
        _only_16_bits(case)
        if not case.page_size or case.queries > 1:
            raise Unfit("caches in pages and one query a sequence only")
        import torch
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        q, table = to_torch(q).squeeze(2), to_torch(tables["page_table"])
        lengths = to_torch(tables["lengths"])
        pages = (lengths + case.page_size - 1) // case.page_size  # of each sequence
        starts = torch.zeros(case.batch + 1, dtype=torch.int32, device=q.device)
        starts[1:] = pages.cumsum(0)
        last = lengths - (pages - 1) * case.page_size
        owned = torch.arange(table.shape[1], device=q.device) < pages[:, None]
        tensor_cores = case.heads > case.key_heads  # heads that share keys are the rows of their products
        wrapper = BatchDecodeWithPagedKVCacheWrapper(self.workspace(q), "HND", use_tensor_cores=tensor_cores)
        sizes = case.heads, case.key_heads, case.head_dim, case.page_size
        wrapper.plan(starts, table[owned], last, *sizes, q_data_type=q.dtype, kv_data_type=q.dtype)
        return lambda k, v: wrapper.run(q, (k, v)).unsqueeze(2)

    def workspace(self, q):
        """Memory for its plan and for partial results."""
        import torch

        return torch.zeros(self.workspace_bytes, dtype=torch.uint8, device=q.device)


# In a process of its own ----------------------------------------------------------------------------------------


class Jax(Contender):
    """JAX, which has streams and memory of its own: in another process, by the clock.

    That process is this file, run with the case as its argument. It answers a line that says that it is ready, and
    then one for each number of calls that it reads.
    """

    name = "jax"

    def missing(self):
        return None if importlib.util.find_spec("jax") else "jax is not installed"

    def child(self, case):
        if case.mask != "full" and case.queries != case.length:
            raise Unfit("masks with as many queries as keys only: they are top-left")
        return self.process(case)

    @contextlib.contextmanager
    def process(self, case):
        """The process, ready; its value is what ``child`` promises."""
        more = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
        more |= {"JAX_PLATFORMS": "cpu"} if case.engine == "numpy" else {}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        command = [sys.executable, str(Path(__file__).resolve()), json.dumps(asdict(case))]
        other = subprocess.Popen(command, text=True, env=os.environ | more, **pipes)

        def answer():
            line = other.stdout.readline()
            if not line:
                raise Unfit(f"its process ended, with {other.wait()}")
            found = json.loads(line)
            if "reason" in found:
                raise Unfit(found["reason"])
            return found.get("ms")

        def run(calls):
            other.stdin.write(f"{calls}\n")
            other.stdin.flush()
            return answer()

        try:
            answer()
            yield run
        finally:
            with contextlib.suppress(OSError):  # it may have ended
                other.stdin.close()
            try:
                other.wait(timeout=30)
            except subprocess.TimeoutExpired:
                other.kill()
                other.wait()
            other.stdout.close()


def serve(case, lines, answer):
    """Be that process: ``lines`` are what it reads, ``answer(**facts)`` writes."""
    try:
        call, block = jax_call(case)
        for _ in range(3):
            block(call())
        answer()
        for line in lines:
            calls = int(line)
            begin = time.perf_counter()
            for _ in range(calls):
                last = call()
            block(last)
            answer(ms=(time.perf_counter() - begin) / calls * 1e3)
    except Exception as error:  # goes to whoever asked
        answer(reason=reason_of(error))


def jax_call(case):
    """A case as a call of JAX's, checked, and what waits for its results."""
    import jax
    import jax.numpy as jnp

    on_gpu = case.engine != "numpy"
    if on_gpu and jax.default_backend() != "gpu":
        raise Unfit("jax sees no GPU")
    if case.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    left, right = ends(case)
    keywords = {"is_causal": right == 0, "implementation": "xla"}
    if on_gpu and case.dtype in ("float16", "bfloat16"):
        keywords["implementation"] = "cudnn"
    if left is not None or right not in (0, None):
        keywords["local_window_size"] = tuple(case.length if end is None else end for end in (left, right))
    attention = functools.partial(jax.nn.dot_product_attention, **keywords)
    rows, keys = (case.batch, case.queries, case.heads), (case.batch, case.length, case.key_heads)
    shapes = (*rows, case.head_dim), (*keys, case.head_dim), (*keys, case.value_dim), (*rows, case.value_dim)
    drawn = zip(jax.random.split(jax.random.key(2205), 4), shapes, strict=True)
    q, k, v, dout = (jax.random.normal(key, shape, case.dtype) for key, shape in drawn)

    def formula(q, k, v):
        wide = jnp.promote_types(q.dtype, jnp.float32)
        q, k, v = (x.astype(wide) for x in (q, k, v))
        scores = jnp.einsum("bihd,bjgd->bhij", q, k, precision="highest") / case.head_dim**0.5
        i, j = jnp.arange(case.queries)[:, None], jnp.arange(case.length)
        first, last = 0 if left is None else i - left, case.length if right is None else i + right
        weights = jax.nn.softmax(jnp.where((first <= j) & (j <= last), scores, -jnp.inf), axis=-1)
        return jnp.einsum("bhij,bjgd->bihd", weights, v, precision="highest")

    group = slice(case.heads // case.key_heads)  # heads of the first sequence that share its first keys
    part = q[:1, :, group], k[:1, :, :1], v[:1, :, :1]
    if case.what == "backward":
        pullback = jax.jit(lambda *inputs: jax.vjp(attention, *inputs)[1])(q, k, v)
        call = functools.partial(jax.jit(lambda pullback, dout: pullback(dout)), pullback, dout)
        found, wanted = call(), jax.vjp(formula, *part)[1](dout[:1, :, group].astype(formula(*part).dtype))
    else:
        call = functools.partial(jax.jit(attention), q, k, v)
        found, wanted = [call()], [formula(*part)]
    for x, y in zip(found, wanted, strict=True):
        x = x[:1, :, : y.shape[2]].astype(y.dtype)
        far = float(jnp.linalg.norm((x - y).ravel()) / jnp.linalg.norm(y.ravel()))
        if not far <= LOOSE[case.dtype]:
            raise Unfit(f"its answer is {far:.3g} from the formula's")
    return call, jax.block_until_ready


# Naive ----------------------------------------------------------------------------------------------------------


class Naive(Contender):
    """Two products and a softmax in place, in the arrays' own library and dtype.

    bfloat16, for which neither library has all that it takes, goes through float32.
    """

    name = "naive"

    def prepare(self, case, q, k, v):
        _only_square(case)
        if case.heads != case.key_heads:
            raise Unfit("one key head a query head only")
        bias = causal_bias(_wide(q)) if case.mask == "causal" else None

        def attention():
            wide = [_wide(x) for x in (q, k, v)]
            return _library(q).matmul(naive_weights(*wide[:2], bias), wide[2]).astype(q.dtype, copy=False)

        return attention

    def prepare_backward(self, case, dout, q, k, v):
        self.prepare(case, q, k, v)  # or says why not
        weights = naive_weights(_wide(q), _wide(k), causal_bias(_wide(q)) if case.mask == "causal" else None)
        matmul, scale = _library(q).matmul, weights.dtype.type(1 / np.sqrt(q.shape[-1]))

        def gradients():
            wide = [_wide(x) for x in (dout, q, k, v)]
            slopes = matmul(wide[0], wide[3].swapaxes(-2, -1))
            dv = matmul(weights.swapaxes(-2, -1), wide[0])
            slopes -= (slopes * weights).sum(axis=-1, keepdims=True)
            slopes *= weights
            slopes *= scale
            grads = matmul(slopes, wide[2]), matmul(slopes.swapaxes(-2, -1), wide[1]), dv
            return tuple(x.astype(q.dtype, copy=False) for x in grads)

        return gradients


def _wide(x):
    return x.astype(np.float32) if x.dtype == BFLOAT16 else x


def naive_weights(q, k, bias=None):
    """softmax(q k^T / sqrt(head_dim) + bias), all of it in memory, in the arrays' own library and dtype."""
    xp = _library(q)
    scores = xp.matmul(q, k.swapaxes(-2, -1))
    scores *= q.dtype.type(1 / np.sqrt(q.shape[-1]))
    if bias is not None:
        scores += bias
    scores -= scores.max(axis=-1, keepdims=True)
    xp.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def causal_bias(q):
    """What hides the keys after a row, for as many keys as rows."""
    xp = _library(q)
    return xp.where(xp.tri(q.shape[-2], dtype=bool), 0, -xp.inf).astype(q.dtype)


def _library(array):
    if isinstance(array, np.ndarray):
        return np
    import cupy

    return cupy


# What a case asks for --------------------------------------------------------------------------------------------


def ends(case):
    """How many keys a row sees to the left and to the right of its own, None for all."""
    left, right = case.window or (None, None)
    return left, 0 if case.mask == "causal" else right


def _only_square(case):
    if case.window is not None or case.mask == "window":
        raise Unfit("no windows")
    if case.mask == "causal" and case.queries != case.length:
        raise Unfit("causal with as many queries as keys only")


def _only_16_bits(case):
    if case.kv_format:
        raise Unfit("16-bit caches only")


# Which there are ------------------------------------------------------------------------------------------------


def found():
    """All contenders by name, private ones included; those that are named alike come from the last file."""
    known = [
        Torch("fa2", "FLASH_ATTENTION"),
        Torch("cudnn", "CUDNN_ATTENTION"),
        Torch("efficient", "EFFICIENT_ATTENTION"),
        Torch("math", "MATH"),
        Flex(),
        FlashAttention("fa3", "flash_attn_interface"),
        FlashAttention("fa4", "flash_attn.cute"),
        FlashInfer(),
        Jax(),
        Naive(),
    ]
    folder = os.environ.get("CUFLASH_CONTENDERS")
    for path in sorted(Path(folder).glob("*.py")) if folder else []:
        spec = importlib.util.spec_from_file_location(f"contenders_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # a private file's own trouble is not ours
            progress_bar.say(f"contenders: {path.name} left out: {reason_of(error)}")
            continue
        known += module.contenders() if hasattr(module, "contenders") else []
    return {contender.name: contender for contender in known}


def ready(names):
    """The contenders of these names that can run here; the reasons of the others are printed. It begins a run."""
    _said.clear()
    known, chosen, missing = found(), {}, {}
    for name in known if list(names) == ["all"] else names:
        reason = known[name].missing() if name in known else "not known"
        if reason is None:
            chosen[name] = known[name]
        else:
            missing.setdefault(next(iter(reason.splitlines()), ""), []).append(name)
    for reason, absent in missing.items():
        progress_bar.say(f"contenders: {', '.join(absent)} left out: {reason}")
    return chosen


if __name__ == "__main__":
    from record import Case

    told, sys.stdout = sys.stdout, sys.stderr  # what else is printed must not stand between the answers
    case = Case.of(json.loads(sys.argv[1]))
    serve(case, sys.stdin, lambda **facts: print(json.dumps(facts), file=told, flush=True))
