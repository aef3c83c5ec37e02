"""Kernels compile for every architecture, without warnings and spills, and errors say where. No GPU is needed.

Logs are kept in pytest's cache, by text, architecture and compiler, so that a second run compiles what has changed.
"""

import hashlib
import os
import pickle
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from drawn import rotating

from cuflash import CompileError, _compile, _plan, _variant
from cuflash._dtypes import FORMATS
from cuflash._masks import MASKS

HOPPER = _plan.KNOWN[9, 0]
NARROW = ("float16", "bfloat16")
PAIRS = sorted({(each.head_dim, each.value_dim) for each in _plan.variants(HOPPER) if each.kernel == "forward"})


def jobs():
    """Every variant on sm_90; elsewhere each 16-bit dtype and pair of head dims with one mask, the masks taking turns,
    float32 and float64 with all head dims, the others with one dtype, and 8-bit caches with both formats."""
    yield from ((variant, 90) for variant in _plan.variants(HOPPER))
    others = [limits for capability, limits in _plan.KNOWN.items() if capability != (9, 0)]
    for (a, limits), (d, dtype), (p, pair) in product(enumerate(others), enumerate(NARROW), enumerate(PAIRS)):
        variant = _plan.forward_variant(dtype, list(MASKS)[(a + d + p) % len(MASKS)], *pair, limits)
        yield variant, int("".join(map(str, limits.capability)))
    for a, limits in enumerate(others):
        dtypes = [NARROW[(a + p) % 2] for p in range(len(PAIRS))]
        chosen = [_plan.backward_variant(dtype, *pair, limits) for dtype, pair in zip(dtypes, PAIRS, strict=True)]
        dims = [(dim, rows) for dim in _plan.DECODE_TILES for rows in (1, 17)]
        chosen += {_plan.decode_variant(dtypes[0], dim, limits, rows): None for dim, rows in dims}
        kinds = product(FORMATS, _plan.DECODE_8BIT_TILES, (0, 1))
        chosen += {_plan.decode_8bit_variant(kind, dim, limits, size): None for kind, dim, size in kinds}
        chosen += {_plan.latent_variant(dtypes[0], limits, rows): None for rows in _plan.LATENT_TILES}
        chosen += [_plan.cache_variant(dtypes[0], dim, dim, limits) for dim in _plan.CACHE_DIMS]
        chosen += [_plan.forward_variant("float32", "full", dim, dim, limits) for dim in _plan.FLOAT32_TILES]
        chosen += [_plan.forward_variant("float64", "full", *pair, limits) for pair in _plan.FLOAT64_TILES]
        chosen += [_plan.float32_backward_variant(dim, dim, limits) for dim in _plan.FLOAT32_BACKWARD_TILES]
        chosen += [_plan.float64_backward_variant(dim, dim, limits) for dim in _plan.FLOAT64_BACKWARD_DIMS]
        chosen += [make(dtypes[0]) for make in (_plan.append_variant, _plan.rows_variant, _plan.finish_variant)]
        around = (_plan.rows_variant, _plan.finish_variant)
        for dtype in ("float32", "float64"):
            chosen += [make(dtype) for make in around]
            chosen += [_plan.decode_real_variant(dtype, dim, limits) for dim in _plan.DECODE_REAL_TILES]
        chosen.append(_plan.append_variant("float64"))
        for variant in chosen:
            yield variant, int("".join(map(str, limits.capability)))


def chosen():
    """The jobs to be done. Where CI is set, every sixth that is not of sm_90, from a place on that the text decides."""
    every = list(jobs())
    if not os.environ.get("CI"):
        return every
    ours, others = ([job for job in every if (job[1] == 90) is hopper] for hopper in (True, False))
    return ours + rotating(others, 6)


def kept(request, version, job):
    """The file that keeps a job's log, None where pytest keeps nothing."""
    variant, arch = job
    cache = getattr(request.config, "cache", None)
    compiler = Path(_compile.__file__).read_bytes()  # its options
    name = hashlib.sha256(f"{variant.text()}{arch}{version}".encode() + compiler).hexdigest()
    return cache and cache.mkdir("cuflash-logs") / name


def begin(request, processes, params):
    """By job the file that keeps its log, and where none does yet, a future of the log."""
    version = request.getfixturevalue("nvrtc")
    files = {job: kept(request, version, job) for job in (each["job"] for each in params if "job" in each)}
    return {
        job: (file, None if file and file.is_file() else processes.submit(_compile.check, *job))
        for job, file in files.items()
    }


@pytest.fixture
def log_of(nvrtc, request, ahead):
    """The compiler's log of a job."""

    def log_of(job):
        file, future = ahead[request.module][job]
        if future is None:
            return file.read_text(encoding="utf-8")
        log = future.result()
        _variant._assemble.cache_clear()
        if file and file == kept(request, nvrtc, job):  # else kernels were edited meanwhile
            partial = file.with_suffix(f".{os.getpid()}")
            partial.write_text(log, encoding="utf-8")
            partial.replace(file)
        return log

    return log_of


@pytest.mark.parametrize("job", chosen(), ids=lambda job: f"sm_{job[1]}-{job[0].name}")
def test_compiles_without_warnings_and_spills(job, log_of):
    variant, arch = job
    log = log_of(job)
    assert f"Compiling entry function '{variant.entry}' for 'sm_{arch}{'a' * variant.hopper}'" in log
    assert "warning" not in log.lower() and "C75" not in log, log
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert len(spills) == log.count("Function properties") > 0 and {*spills} == {("0", "0")}, log
    registers = max(int(used) for used in re.findall(r"Used (\d+) registers", log))
    assert -(-registers // 8) * 8 * 32 * variant.warps * variant.blocks_per_sm <= 65536, log


# Errors ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def variant():
    return _plan.forward_variant("float16", "causal", 64, 64, HOPPER)


@pytest.mark.parametrize("name, before", [("forward.cu", "struct Args {"), ("softmax.cuh", "struct SoftmaxRow {")])
def test_an_error_points_into_the_kernel_file(nvrtc, variant, monkeypatch, tmp_path, name, before):
    lines = (_variant.folder() / name).read_text(encoding="utf-8").splitlines()
    number = next(n for n, line in enumerate(lines) if before in line)
    lines.insert(number, "int broken = undeclared;" if name.endswith(".cu") else "template <typename Real>")
    (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
    text = variant.text(tmp_path)
    monkeypatch.setattr(_variant.Variant, "text", lambda self: text)
    with pytest.raises(CompileError) as error:
        _compile.check(variant, 90)
    assert re.search(rf"^kernels/{re.escape(name)}\(({number + 1}|{number + 2})\): error", str(error.value), re.M)
    assert variant.name in str(error.value) and "defect of cuflash" in str(error.value)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"shared_bytes": 16}, "SHARED_BYTES: what the tiles and facts take"),
        ({"tile_q": 120}, "TILE_Q: 16 rows, or a multiple, for every warp"),
        ({"tile_k": 40}, "TILE_K: whole steps of 16 keys"),
    ],
)
def test_a_variant_that_cannot_be_is_refused_with_a_sentence(nvrtc, variant, changes, sentence):
    with pytest.raises(CompileError, match=re.escape(sentence)):
        _compile.check(replace(variant, **changes), 90)


@pytest.mark.parametrize(
    "make, changes, sentence",
    [
        (_plan.hopper_float32_variant, {"shared_bytes": 16}, "SHARED_BYTES: what the tiles and barriers take"),
        (_plan.hopper_float32_variant, {"warps": 8}, "WARPS: a producer, and a consumer every 64 rows"),
        (_plan.hopper_float32_variant, {"tile_q": 192, "warps": 16}, "CONSUMERS: as the registers are dealt out"),
        (_plan.hopper_float32_variant, {"tile_k": 40}, "TILE_K: whole steps of a product"),
        (_plan.parts_variant, {"tile_k": 32}, "nothing is shared, and all rows are alike"),
    ],
)
def test_so_is_one_of_float32_on_hopper(nvrtc, make, changes, sentence):
    with pytest.raises(CompileError, match=re.escape(sentence)):
        _compile.check(replace(make(64, 3), **changes), 90)


@pytest.mark.parametrize("parts", [2, 3])
def test_float32_on_hopper_multiplies_bfloat16(parts):
    """Keys of a tile at once, and columns of values: those of a panel, or all where there is one sum."""
    variant = _plan.hopper_float32_variant(128, parts)
    sizes = {int(n) for n in re.findall(r"m64n(\d+)k16\.f32\.bf16", variant.products())}
    assert sizes == {variant.tile_k, 64 if parts == 3 else 128} and "f16.f16" not in variant.products()
    assert f"constexpr int PARTS = {parts};" in variant.preamble() and variant.name.endswith(f"_p{parts}")


def test_arguments_that_lie_elsewhere_are_refused(nvrtc, variant, monkeypatch):
    fields = [(name, variant.args.fields[name][0]) for name in variant.args.names]
    keys = next(n for n, field in enumerate(fields) if field[0] == "keys")
    fields[keys : keys + 2] = reversed(fields[keys : keys + 2])
    swapped = np.dtype(fields, align=True)
    monkeypatch.setitem(_variant.KERNELS, variant.kernel, (variant.file, swapped))
    with pytest.raises(CompileError, match="Args.keys: not where Python puts it"):
        _compile.check(variant, 90)


def test_a_compile_error_holds_the_variant_and_the_log_and_passes_between_processes(variant):
    error = CompileError(variant, "kernels/forward.cu(7): error: no")
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert isinstance(each, CompileError)
        assert str(each) == (
            f"cuflash: {variant.name} did not compile; this is a defect of cuflash. The log:\n"
            f"kernels/forward.cu(7): error: no"
        )
