"""bench/serving.py: what it serves is what a forward over all tokens gives, and a mistake is noticed."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import serving

import cuflash
from cuflash._dtypes import ELEMENTS


def server(*arguments):
    """A server of the small stack, and its requests."""
    options = serving.parse(["--numpy", *arguments])
    stack = serving.Stack(options, np, ELEMENTS[options.dtype].dtype)
    requests = serving.draw_requests(options)
    return serving.Server(stack, requests, checked=requests[-1]), requests


def test_it_serves_and_says_how_fast(capsys):
    assert serving.main(["--numpy"]) == 0
    said = capsys.readouterr().out
    for words in ("tokens/s", "attention", "of the memory's rate", "measured by a copy", "last hidden state"):
        assert words in said
    assert "weights of the first" not in said


def test_on_a_gpu(gpu, capsys):
    small = {name.replace("_", "-"): size for name, size in serving.SMALL.items()} | {"dtype": "float16"}
    sizes = [f"--{name}={'-'.join(map(str, x)) if isinstance(x, tuple) else x}" for name, x in small.items()]
    assert serving.main([*sizes, "--share-weights", "--bandwidth", "1000"]) == 0
    said = capsys.readouterr().out
    assert "cupy" in said and "all with the weights of the first" in said and "as given" in said


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_dtypes(dtype):
    assert serving.main(["--numpy", "--dtype", dtype, "--requests", "4", "--layers", "2"]) == 0


def test_every_request_gets_its_tokens():
    served, requests = server("--pages", "16", "--requests", "12")
    served.run()
    assert served.prefilled == sum(len(request.prompt) for request in requests)
    assert served.decoded == sum(request.output - 1 for request in requests)
    assert all(request.steps == request.output - 1 for request in requests)
    assert len(requests[-1].fed) == requests[-1].output - 1
    assert served.cache.free_pages == 16


def test_requests_are_admitted_in_order_while_pages_last():
    served, requests = server("--pages", "20")
    new = served.admit()
    assert new == requests[: len(new)] and 0 < len(new) < len(requests)
    pages = [-(-request.rows // 4) for request in requests]
    assert served.cache.free_pages == 20 - sum(pages[: len(new)])
    rows = sum(len(request.prompt) for request in requests[: len(new) + 1])
    assert pages[len(new)] > served.cache.free_pages or rows > served.sizes.prefill or len(new) == served.sizes.batch


def test_a_mistake_in_decode_is_noticed(monkeypatch, capsys):
    decode = cuflash.decode
    monkeypatch.setattr(cuflash, "decode", lambda *arrays, **tables: decode(*arrays, **tables, window=(4, None)))
    assert serving.main(["--numpy"]) == 1
    assert "is allowed" in capsys.readouterr().out


def test_a_row_that_is_not_written_is_noticed(monkeypatch):
    write = cuflash.PagedCache.write

    def forgetful(cache, ids, k, v, *, layer):
        if layer:
            write(cache, ids, k, v, layer=layer)

    monkeypatch.setattr(cuflash.PagedCache, "write", forgetful)
    assert serving.main(["--numpy"]) == 1


def test_requests_that_no_cache_can_hold_are_refused(capsys):
    with pytest.raises(SystemExit):
        serving.parse(["--numpy", "--pages", "4"])
    assert "--pages hold 16 keys, the longest request may have 55" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        serving.parse(["--numpy", "--output", "1-4"])
    assert "begins below 2" in capsys.readouterr().err
