"""decode on the CPU engine: lengths, pages, and agreement with forward."""

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import bounds, testing

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


def draw(*shapes, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes]


def close(q, k, v, **keywords):
    """Out and lse, after they have been found inside the bound."""
    results = cuflash.decode(q, k, v, return_lse=True, **keywords)
    assert bounds.worst(results, bounds.decode(q, k, v, path=f"numpy {q.dtype.name}", **keywords)) <= 1
    return results


def paged(cache, size, seed=0):
    """Pages in random order, a page table, and NaN in a page that belongs to none."""
    sequences, heads, capacity, dim = cache.shape
    count = -(-capacity // size)
    table = np.random.default_rng(seed).permutation(sequences * count + 1)[: sequences * count]
    pages = np.full((sequences * count + 1, heads, size, dim), np.nan, cache.dtype)
    for n, page in enumerate(table):
        b, start = n // count, n % count * size
        part = cache[b, :, start : start + size]
        pages[page, :, : part.shape[1]] = part
    return pages, table.reshape(sequences, count).astype(np.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 3, 17])
@pytest.mark.parametrize(
    "keywords", [{}, {"causal": False}, {"window": (7, None)}, {"causal": "top-left"}, {"scale": -0.5}]
)
def test_every_sequence_has_its_length(queries, keywords, dtype):
    q, k, v = draw((5, 6, queries, 16), (5, 2, 130, 16), (5, 2, 130, 24), dtype=dtype)
    lengths = np.array([0, 1, 33, 129, 130])
    out, lse = close(q, k, v, lengths=lengths, **keywords)
    for b, length in enumerate(lengths):  # a sequence alone is forward on its keys
        alone = {"causal": True} | keywords
        one = q[b], k[b, :, :length], v[b, :, :length]
        expected = cuflash.forward(*one, return_lse=True, **alone)
        testing.assert_attention_close((out[b], lse[b]), *one, **alone)
        assert np.array_equal(out[b], expected[0]) and np.array_equal(lse[b], expected[1])
    assert not out[0].any() and (lse[0] == -np.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_last_rows_of_forward(dtype):
    q, k, v = draw((2, 4, 70, 16), (2, 2, 70, 16), (2, 2, 70, 16), dtype=dtype)
    out, lse = close(q[..., -5:, :], k, v)
    whole = cuflash.forward(q, k, v, causal=True, return_lse=True)
    for b in range(2):
        testing.assert_attention_close((out[b], lse[b]), q[b], k[b], v[b], rows=np.arange(65, 70), causal=True)
        rows = whole[0][b, :, 65:], whole[1][b, :, 65:]
        testing.assert_attention_close(rows, q[b], k[b], v[b], rows=np.arange(65, 70), causal=True)


@pytest.mark.parametrize("size", [1, 16, 48, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_are_one_cache(dtype, size):
    q, k, v = draw((4, 6, 2, 16), (4, 2, 130, 16), (4, 2, 130, 24), dtype=dtype)
    lengths = np.array([130, 0, 97, 5], np.int32)
    (k_pages, table), (v_pages, _) = paged(k, size), paged(v, size)
    out, lse = close(q, k_pages, v_pages, lengths=lengths, page_table=table)
    expected = cuflash.decode(q, k, v, lengths=lengths, return_lse=True)
    assert np.array_equal(out, expected[0]) and np.array_equal(lse, expected[1])
    for b, length in enumerate(lengths):  # beyond a length the table may hold anything
        table[b, -(-length // size) :] = -7
    assert np.array_equal(cuflash.decode(q, k_pages, v_pages, lengths=lengths, page_table=table), out)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e4])
def test_beyond_a_length_a_cache_may_hold_anything(garbage):
    q, k, v = draw((3, 2, 1, 16), (3, 2, 64, 16), (3, 2, 64, 16), dtype="float16")
    lengths = np.array([1, 40, 63])
    before = close(q, k, v, lengths=lengths)
    for b, length in enumerate(lengths):
        k[b, :, length:] = v[b, :, length:] = garbage
    after = cuflash.decode(q, k, v, lengths=lengths, return_lse=True)
    assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))


def test_nothing():
    for shape, cache in (((0, 2, 1, 8), (0, 2, 5, 8)), ((2, 0, 1, 8), (2, 2, 5, 8)), ((2, 2, 0, 8), (2, 2, 5, 8)),
                         ((2, 2, 1, 8), (2, 2, 0, 8))):  # fmt: skip
        q, k, v = draw(shape, cache, cache)
        out, lse = close(q, k, v)
        assert out.shape == shape and not out.any() and (lse == -np.inf).all()


def test_results():
    q, k, v = draw((2, 1, 4, 16), (2, 60, 2, 16), (2, 60, 2, 16), dtype="float16")
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    out, lse = close(q, k, v)
    assert out.swapaxes(1, 2).flags.c_contiguous and lse.dtype == np.float32
    target = np.zeros((2, 4, 1, 32), np.float16)[..., ::2]
    assert cuflash.decode(q, k, v, out=target) is target and np.array_equal(target, out)


def test_wrong_arguments():
    q, k, v = draw((2, 4, 1, 8), (2, 2, 32, 8), (2, 2, 32, 8))
    table = np.zeros((2, 3), np.int32)
    for keywords, error, words in (
        ({"lengths": np.array([1, 33])}, ValueError, r"lengths\[1\] is 33"),
        ({"lengths": np.array([-1, 3])}, ValueError, r"lengths\[0\] is -1"),
        ({"lengths": np.array([1, 2, 3])}, ValueError, "lengths has shape"),
        ({"lengths": np.array([1.0, 2.0])}, TypeError, "lengths has dtype"),
        ({"page_table": table}, ValueError, "lengths is None"),
        ({"page_table": table[0], "lengths": np.array([1, 2])}, ValueError, "page_table has shape"),
        ({"page_table": table + 2, "lengths": np.array([0, 33])}, ValueError, r"page_table\[1, 0\] is 2"),
        ({"out": q}, ValueError, "out shares memory with q"),
    ):
        with pytest.raises(error, match=words):
            cuflash.decode(q, k, v, **keywords)
    with pytest.raises(ValueError, match="k_cache has shape"):
        cuflash.decode(q, k[0], v[0])


def test_cupy_arrays_are_refused(engine):
    if engine.name == "numpy":
        pytest.skip("runs on NumPy arrays")
    with pytest.raises(NotImplementedError, match="decode: has no GPU kernel yet"):
        cuflash.decode(*(engine.xp.asarray(x) for x in draw((2, 4, 1, 8), (2, 2, 32, 8), (2, 2, 32, 8))))
