"""The reference against masks drawn by hand, a formula written another way, and differences."""

import numpy as np
import pytest

from cuflash import reference
from cuflash.reference import visible

EMPTY = {"causal": True}  # with more queries than keys


def draw(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def picture(text):
    return np.array([[mark == "x" for mark in row.split()] for row in text.strip().splitlines()])


@pytest.mark.parametrize("queries, keys, keywords, expected", [
    (2, 3, {}, "x x x\n x x x"),
    (2, 4, {"causal": True}, "x x x .\n x x x x"),
    (2, 4, {"causal": "bottom-right"}, "x x x .\n x x x x"),
    (2, 4, {"causal": "top-left"}, "x . . .\n x x . ."),
    (3, 2, {"causal": True}, ". .\n x .\n x x"),
    (3, 2, {"causal": "top-left"}, "x .\n x x\n x x"),
    (3, 3, {"window": (0, 0)}, "x . .\n . x .\n . . x"),
    (3, 3, {"window": (1, None)}, "x x x\n x x x\n . x x"),
    (3, 3, {"window": (None, 1)}, "x x .\n x x x\n x x x"),
    (2, 4, {"window": (1, 0)}, ". x x .\n . . x x"),
    (2, 4, {"window": (1, 0), "causal": "top-left"}, "x . . .\n x x . ."),
    (3, 4, {"window": (1, 9), "causal": True}, "x x . .\n . x x .\n . . x x"),
    (4, 2, {"window": (0, 0)}, ". .\n . .\n x .\n . x"),
    (3, 1, {"window": (0, None), "causal": "top-left"}, "x\n .\n ."),
])  # fmt: skip
def test_visible(queries, keys, keywords, expected):
    assert (visible(queries, keys, **keywords) == picture(expected)).all()


@pytest.mark.parametrize("queries, keys", [(0, 3), (3, 0), (0, 0)])
def test_nothing_is_visible(queries, keys):
    assert visible(queries, keys, causal=True, window=(1, 1)).shape == (queries, keys)


def one_by_one(q, k, v, sees, scale):
    """Out and lse of one head by loops over plain numbers."""
    out, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), -np.inf)
    for i in range(len(q)):
        seen = [j for j in range(len(k)) if sees[i, j]]
        weights = [np.exp(scale * sum(a * b for a, b in zip(q[i], k[j], strict=True))) for j in seen]
        if seen:
            out[i] = sum(w * v[j] for w, j in zip(weights, seen, strict=True)) / sum(weights)
            lse[i] = np.log(sum(weights))
    return out, lse


MASKS = [{}, {"causal": True}, {"causal": "top-left"}, {"window": (2, 1)}, {"window": (1, None), "causal": True}]


@pytest.mark.parametrize("keywords", MASKS)
@pytest.mark.parametrize("queries, keys", [(5, 5), (3, 7), (7, 3)])
@pytest.mark.parametrize("scale", [None, -0.7, 0])
def test_forward_is_the_formula(queries, keys, keywords, scale):
    q, k, v = draw((2, 4, queries, 3), (2, 2, keys, 3), (2, 2, keys, 2))
    out, lse = reference.forward(q, k, v, scale=scale, **keywords)
    sees = visible(queries, keys, **keywords)
    for b, h in np.ndindex(2, 4):
        expected = one_by_one(q[b, h], k[b, h // 2], v[b, h // 2], sees, 3**-0.5 if scale is None else scale)
        np.testing.assert_allclose(out[b, h], expected[0], rtol=1e-13, atol=1e-14)
        np.testing.assert_allclose(lse[b, h], expected[1], rtol=1e-13, atol=1e-14)


def test_chosen_rows():
    q, k, v = draw((2, 9, 4), (2, 6, 4), (2, 6, 4))
    whole, part = (reference.forward(q, k, v, causal=True, rows=rows) for rows in (None, [8, 0, 3]))
    assert all((x[:, [8, 0, 3]] == y).all() for x, y in zip(whole, part, strict=True))


@pytest.mark.parametrize("keywords", MASKS)
@pytest.mark.parametrize("shapes", [
    ((2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 2)),
    ((3, 1, 2, 6, 3), (2, 2, 5, 3), (2, 5, 2)),
    ((5, 3), (4, 3), (4, 2)),
])  # fmt: skip
def test_backward_is_the_derivative(shapes, keywords):
    operands = draw(*shapes)
    out, lse = reference.forward(*operands, **keywords)
    dout, dlse = draw(out.shape, lse.shape, seed=1)

    def loss(*operands):
        out, lse = reference.forward(*operands, **keywords)
        return np.sum(dout * out) + np.sum(np.where(lse == -np.inf, 0, dlse * np.where(lse == -np.inf, 0, lse)))

    grads = reference.backward(dout, *operands, dlse=dlse, **keywords)
    for n, (x, grad) in enumerate(zip(operands, grads, strict=True)):
        assert grad.shape == x.shape
        for place in [(0,) * x.ndim, tuple(length - 1 for length in x.shape), tuple(length // 2 for length in x.shape)]:
            moved = [[y.copy() for y in operands] for _ in range(2)]
            moved[0][n][place] += 1e-5
            moved[1][n][place] -= 1e-5
            difference = (loss(*moved[0]) - loss(*moved[1])) / 2e-5
            np.testing.assert_allclose(grad[place], difference, rtol=1e-6, atol=1e-8)


def test_rows_that_see_nothing():
    q, k, v = draw((1, 5, 4), (1, 2, 4), (1, 2, 4))
    q[0, :3] = np.nan
    out, lse = reference.forward(q, k, v, **EMPTY)
    assert not out[0, :3].any() and (lse[0, :3] == -np.inf).all() and np.isfinite(out).all()
    dout, dlse = draw((1, 5, 4), (1, 5))
    dout[0, :3] = dlse[0, :3] = np.nan
    dq, dk, dv = reference.backward(dout, q, k, v, dlse=dlse, **EMPTY)
    assert not dq[0, :3].any() and all(np.isfinite(grad).all() for grad in (dq, dk, dv))


def test_no_keys():
    q, k, v = draw((2, 3, 4), (2, 0, 4), (2, 0, 5))
    out, lse = reference.forward(q, k, v)
    assert out.shape == (2, 3, 5) and not out.any() and (lse == -np.inf).all()
    assert [grad.shape for grad in reference.backward(out, q, k, v)] == [(2, 3, 4), (2, 0, 4), (2, 0, 5)]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_hidden_does_not_matter(value):
    q, k, v = draw((1, 6, 4), (1, 6, 4), (1, 6, 4))
    before = reference.forward(q, k, v, causal=True)
    k[0, 4], v[0, 4] = value, value
    after = reference.forward(q, k, v, causal=True)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one[0, :4], other[0, :4])


def test_visible_nan_shows():
    q, k, v = draw((1, 6, 4), (1, 6, 4), (1, 6, 4))
    nan = q.copy(), k.copy(), v.copy()
    nan[0][0, 2, 1] = nan[1][0, 4, 1] = nan[2][0, 3, 1] = np.nan
    rows = np.arange(6)
    out, lse = reference.forward(nan[0], k, v, causal=True)
    assert (np.isnan(lse[0]) == (rows == 2)).all() and (np.isnan(out[0]) == (rows == 2)[:, None]).all()
    out, lse = reference.forward(q, nan[1], v, causal=True)
    assert (np.isnan(lse[0]) == (rows >= 4)).all() and (np.isnan(out[0]) == (rows >= 4)[:, None]).all()
    out, lse = reference.forward(q, k, nan[2], causal=True)
    assert np.isfinite(lse).all()
    assert (np.isnan(out[0]) == ((rows >= 3)[:, None] & (np.arange(4) == 1))).all()


def test_nan_reaches_no_gradient_of_hidden_keys():
    dout, q, k, v = draw(*[(1, 6, 4)] * 4)
    k[0, 2] = np.nan
    dq, dk, dv = reference.backward(dout, q, k, v, window=(0, 0))
    for grad in (dq, dk, dv):
        assert (np.isnan(grad[0]).any(axis=1) == (np.arange(6) == 2)).all()


def test_scores_of_minus_infinity():
    q, k, v = draw((1, 3, 4), (1, 5, 4), (1, 5, 4))
    q[..., 0], k[0, 3:, 0] = 1, -np.inf
    out, lse = reference.forward(q, k, v)
    expected = reference.forward(q, k[:, :3], v[:, :3])
    np.testing.assert_allclose(out, expected[0], rtol=1e-14)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-14)
    k[..., 0] = -np.inf
    out, lse = reference.forward(q, k, v)
    assert not out.any() and (lse == -np.inf).all()
    assert not any(grad.any() for grad in reference.backward(out + 1, q, k, v))


def test_large_scores_do_not_overflow():
    q, k, v = draw((1, 3, 4), (1, 5, 4), (1, 5, 4))
    out, lse = reference.forward(q, k, v, scale=1e6)
    best = (q[0] @ k[0].T).argmax(axis=1)
    np.testing.assert_allclose(out[0], v[0, best], rtol=1e-13)
    np.testing.assert_allclose(lse[0], 1e6 * (q[0] @ k[0].T).max(axis=1), rtol=1e-13)


def test_decode_is_forward_on_each_sequence():
    q, k, v = draw((3, 4, 2, 8), (3, 2, 10, 8), (3, 2, 10, 5))
    lengths = np.array([10, 0, 7])
    out, lse = reference.decode(q, k, v, lengths=lengths)
    for b, length in enumerate(lengths):
        expected = reference.forward(q[b], k[b, :, :length], v[b, :, :length], causal=True)
        np.testing.assert_array_equal(out[b], expected[0])
        np.testing.assert_array_equal(lse[b], expected[1])
    table = np.array([[4, 0], [9, 9], [2, 5]])
    pages = [np.full((6, 2, 5, x.shape[-1]), np.nan) for x in (k, v)]
    for cache, x in zip(pages, (k, v), strict=True):
        for b in (0, 2):
            for n in range(2):
                cache[table[b, n]] = x[b, :, 5 * n : 5 * n + 5]
    for one, other in zip(reference.decode(q, *pages, lengths=lengths, page_table=table), (out, lse), strict=True):
        np.testing.assert_array_equal(one, other)


def test_e4m3_is_what_its_bits_say():
    codes = np.arange(256, dtype=np.uint8)
    sign, exponent, significand = codes >> 7, codes >> 3 & 15, codes & 7
    normal = (1 + significand / 8) * 2.0 ** (exponent.astype(int) - 7)
    sizes = np.where(exponent == 0, significand / 8 * 2.0**-6, normal)
    wanted = np.where(codes & 127 == 127, np.nan, np.where(sign, -sizes, sizes))
    assert np.array_equal(reference.dequantised(codes, kv_format="e4m3"), wanted, equal_nan=True)


def test_decode_of_8_bit_caches_is_that_of_what_they_stand_for():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 4, 1, 8)).astype(np.float16)
    k, v = (rng.integers(-128, 128, (3, 2, 5, 8)).astype(np.int8) for _ in range(2))
    table, lengths = np.array([[2, 0], [1, 1]]), np.array([7, 5])
    slots, heads = rng.random((3, 2, 5)).astype(np.float32), np.float32([0.5, -2])
    given = {"lengths": lengths, "page_table": table}
    wide = k * slots[..., None].astype(float), v * heads[:, None, None].astype(float)
    results = reference.decode(q, k, v, k_scale=slots, v_scale=heads, **given), reference.decode(q, *wide, **given)
    assert all(np.array_equal(x, y) for x, y in zip(*results, strict=True))


def test_rotation_turns_by_its_angle():
    """As complex numbers, pairs are multiplied with e^(i angle)."""
    (x,), angles = draw((2, 5, 8)), np.arange(15.0).reshape(5, 3)
    for interleaved, first, second in ((False, slice(3), slice(3, 6)), (True, slice(0, 6, 2), slice(1, 6, 2))):
        turned = reference.rotate(x, np.cos(angles), np.sin(angles), interleaved=interleaved)
        before, after = (y[..., first] + 1j * y[..., second] for y in (x, turned))
        np.testing.assert_allclose(after, before * np.exp(1j * angles))
        np.testing.assert_array_equal(turned[..., 6:], x[..., 6:])


def test_decode_appends_before_it_looks():
    """As if the new keys, rotated, had been in the cache; q is rotated too."""
    q, k, v, k_new, v_new = draw((2, 4, 3, 8), (2, 2, 12, 8), (2, 2, 12, 5), (2, 2, 3, 8), (2, 2, 3, 5))
    lengths, angles = np.array([9, 0]), np.random.default_rng(0).standard_normal((12, 4))
    rotary = np.cos(angles), np.sin(angles)
    results = reference.decode(q, k, v, lengths=lengths, k_new=k_new, v_new=v_new, rotary=rotary)
    for b, length in enumerate(lengths):
        rows = slice(length, length + 3)
        turn = lambda x, rows=rows: reference.rotate(x, rotary[0][rows], rotary[1][rows])  # noqa: E731
        k1, v1 = (np.concatenate([x[b, :, :length], new], axis=1) for x, new in ((k, turn(k_new[b])), (v, v_new[b])))
        for one, other in zip(results, reference.forward(turn(q[b]), k1, v1, causal=True), strict=True):
            np.testing.assert_array_equal(one[b], other)
    without = reference.decode(q, k, v, lengths=np.array([10, -1]), k_new=k_new, v_new=v_new)
    assert all(np.isnan(x).all() for x in without)
