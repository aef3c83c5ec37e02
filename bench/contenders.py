"""Contenders: other ways to compute the same answer from the same memory, each optional.

A contender has a ``name``; ``missing()``, which says why it cannot run here, or None; ``scope()``, a context manager
entered around each of its runs; and ``prepare(case, q, k, v)``, which gives a callable that computes the answer, an
array or tensor (..., heads, queries, value_dim), or raises ``Unfit`` with the reason. For gradients there is
``prepare_backward(case, dout, q, k, v)``, whose callable gives dq, dk and dv; what that keeps of a forward pass is made
beforehand. What cannot live in this process, such as JAX, has ``child(case)``: see there.

Private ones live in a folder named by the environment variable ``CUFLASH_CONTENDERS``: each ``*.py`` there that
defines ``contenders()``, a function that returns such objects.
"""

import contextlib
import importlib.util
import os
from pathlib import Path

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Unfit(Exception):
    """A contender does not compute this case."""


def left_out(name, error):
    """Say why a case goes on without a contender: they fail in ways of their own."""
    print(f"  {name} left out: {type(error).__name__}: {str(error).splitlines()[:1]}")


def beside(row, show):
    """The contenders of a row as the end of its line, ``show`` giving the text of milliseconds."""
    return "".join(
        f"  {name} {show(ms)} {row['ratios'][name]:6.3f}x" if ms else f"  {name} -"
        for name, ms in row["contenders"].items()
    )


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


class Torch(Contender):
    """One back end of torch's scaled_dot_product_attention."""

    def __init__(self, name, backend):
        self.name, self.backend = name, backend

    def missing(self):
        try:
            import torch
            from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: F401

            if not torch.cuda.is_available():
                return "torch sees no GPU"
            getattr(SDPBackend, self.backend)
        except (ImportError, OSError, AttributeError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def scope(self):
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        stack = contextlib.ExitStack()
        stack.enter_context(torch.no_grad())
        stack.enter_context(sdpa_kernel([getattr(SDPBackend, self.backend)]))
        return stack

    def prepare(self, case, q, k, v):
        from torch.nn.functional import scaled_dot_product_attention

        _only_square(case)
        q, k, v = map(to_torch, (q, k, v))
        keywords = {"is_causal": case.mask == "causal"} | ({"enable_gqa": True} if case.heads != case.key_heads else {})
        return lambda: scaled_dot_product_attention(q, k, v, **keywords)

    def prepare_backward(self, case, dout, q, k, v):
        import torch

        dout, *inputs = map(to_torch, (dout, q, k, v))
        inputs = [x.detach().requires_grad_() for x in inputs]
        with self.scope(), torch.enable_grad():
            out = self.prepare(case, *inputs)()
        return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


class Naive(Contender):
    """Two products and a softmax in place, in the arrays' own library and dtype."""

    name = "naive"

    def prepare(self, case, q, k, v):
        _only_square(case)
        if case.heads != case.key_heads:
            raise Unfit("one key head a query head only")
        bias = causal_bias(q) if case.mask == "causal" else None
        return lambda: _library(q).matmul(naive_weights(q, k, bias), v)

    def prepare_backward(self, case, dout, q, k, v):
        self.prepare(case, q, k, v)  # or says why not
        weights = naive_weights(q, k, causal_bias(q) if case.mask == "causal" else None)
        matmul, scale = _library(q).matmul, q.dtype.type(1 / np.sqrt(q.shape[-1]))

        def gradients():
            slopes = matmul(dout, v.swapaxes(-2, -1))
            dv = matmul(weights.swapaxes(-2, -1), dout)
            slopes -= (slopes * weights).sum(axis=-1, keepdims=True)
            slopes *= weights
            slopes *= scale
            return matmul(slopes, k), matmul(slopes.swapaxes(-2, -1), q), dv

        return gradients


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


def _only_square(case):
    if case.window is not None or case.mask == "window":
        raise Unfit("no windows")
    if case.mask == "causal" and case.queries != case.length:
        raise Unfit("causal with as many queries as keys only")


def found():
    """All contenders by name, private ones included; those that are named alike come from the last file."""
    known = [
        Torch("fa2", "FLASH_ATTENTION"),
        Torch("cudnn", "CUDNN_ATTENTION"),
        Torch("efficient", "EFFICIENT_ATTENTION"),
        Torch("math", "MATH"),
        Naive(),
    ]
    folder = os.environ.get("CUFLASH_CONTENDERS")
    for path in sorted(Path(folder).glob("*.py")) if folder else []:
        spec = importlib.util.spec_from_file_location(f"contenders_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # a private file's own trouble is not ours
            print(f"contenders: {path.name} left out: {type(error).__name__}: {error}")
            continue
        known += module.contenders() if hasattr(module, "contenders") else []
    return {contender.name: contender for contender in known}


def ready(names):
    """The contenders of these names that can run here; the reason of each other one is printed."""
    known, chosen = found(), {}
    for name in names:
        reason = known[name].missing() if name in known else "not known"
        if reason is None:
            chosen[name] = known[name]
        else:
            print(f"contenders: {name} left out: {reason}")
    return chosen
