"""decode on every engine: the checks of `cuflash.testing` on drawn caches, and the edges written out."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from drawn import DTYPES, changed, draw, draw_far_below

import cuflash
from cuflash import _plan, bounds, reference, testing
from cuflash.testing import CacheRecipe

ENGINES = ["numpy", "emulated portable", "portable"]
pytestmark = pytest.mark.parametrize("engine", ENGINES, indirect=True, scope="module")


def path(engine, dtype):
    return f"{'numpy' if engine.name == 'numpy' else 'portable'} {dtype}"


def same(one, other):
    return all(np.array_equal(reference.host(x), reference.host(y)) for x, y in zip(one, other, strict=True))


def close(engine, q, k, v, **keywords):
    """Out and lse, after they have been found inside the bound."""
    results = cuflash.decode(q, k, v, return_lse=True, **keywords)
    meant = {name: x for name, x in keywords.items() if name not in ("splits", "batch_invariant")}
    assert bounds.worst(results, bounds.decode(q, k, v, path=path(engine, q.dtype.name), **meant)) <= 1
    return results


def hold(engine, check, recipe):
    check(cuflash.decode, recipe, engine.xp, path(engine, recipe.dtype))


@pytest.mark.parametrize("check", testing.decode_checks, ids=lambda check: check.__name__)
def test_property(engine, check):
    size = {
        "numpy": {"examples": 60, "max_length": 130, "max_head_dim": 130},
        "emulated": {"examples": 8, "max_length": 130, "max_head_dim": 64},  # test_emulated.py draws more
    }.get(engine.name, {"examples": 150, "max_length": 600})
    testing.fuzz(check, cuflash.decode, xp=engine.xp, dtypes=tuple(DTYPES), **size)


# Sequences and pages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", [1, 3, 17])
@pytest.mark.parametrize(
    "keywords", [{}, {"causal": False}, {"window": (7, None)}, {"causal": "top-left"}, {"scale": -0.5}]
)
def test_every_sequence_has_its_length(engine, queries, keywords):
    lengths = [0, 1, 33, 129, 130]
    for dtype in DTYPES:
        q, k, v = draw(engine, (5, 6, queries, 16), (5, 2, 130, 16), (5, 2, 130, 24), dtype=dtype)
        out, lse = close(engine, q, k, v, lengths=engine.xp.asarray(lengths), **keywords)
        assert not reference.host(out[0]).any() and (reference.host(lse[0]) == -np.inf).all()
        for b, length in enumerate(lengths if engine.name == "numpy" else ()):
            alone = {"causal": True} | keywords  # is forward on its keys
            one = q[b], k[b, :, :length], v[b, :, :length]
            assert same((out[b], lse[b]), cuflash.forward(*one, return_lse=True, **alone))


def test_last_rows_of_forward(engine):
    for dtype in DTYPES:
        q, k, v = draw(engine, (2, 4, 70, 16), (2, 2, 70, 16), (2, 2, 70, 16), dtype=dtype)
        rows = np.arange(65, 70)
        out, lse = close(engine, q[:, :, 65:], k, v)
        whole = cuflash.forward(q, k, v, causal=True, return_lse=True)
        for results in ((out, lse), (whole[0][:, :, 65:], whole[1][:, :, 65:])):
            testing.assert_attention_close(results, q, k, v, rows=rows, causal=True, path=path(engine, dtype))


@pytest.mark.parametrize("size", [1, 16, 48, 200])
@pytest.mark.parametrize("queries", [1, 2, 20])
def test_pages_are_one_cache(engine, size, queries):
    for dtype in DTYPES:
        recipe = CacheRecipe(
            lengths=(130, 0, 97, 5), page_size=size, heads=6, key_heads=2, queries=queries, head_dim=16, value_dim=24,
            dtype=dtype, splits=3,
        )  # fmt: skip
        hold(engine, testing.check_decode_bound, recipe)
        hold(engine, testing.check_decode_placement, recipe)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e4])
def test_beyond_a_length_a_cache_may_hold_anything(engine, garbage):
    q, k, v = draw(engine, (3, 2, 1, 16), (3, 2, 64, 16), (3, 2, 64, 16), dtype="float16")
    lengths = [1, 40, 63]
    before = close(engine, q, k, v, lengths=engine.xp.asarray(lengths))
    for b, length in enumerate(lengths):
        k, v = (changed(engine, x, (b, slice(None), slice(length, None)), garbage) for x in (k, v))
    assert same(before, cuflash.decode(q, k, v, lengths=engine.xp.asarray(lengths), return_lse=True))


def test_nothing(engine):
    for shape, cache in (((0, 2, 1, 8), (0, 2, 5, 8)), ((2, 0, 1, 8), (2, 2, 5, 8)), ((2, 2, 0, 8), (2, 2, 5, 8)),
                         ((2, 2, 1, 8), (2, 2, 0, 8))):  # fmt: skip
        out, lse = close(engine, *draw(engine, shape, cache, cache, dtype="float16"))
        assert out.shape == shape and not reference.host(out).any() and (reference.host(lse) == -np.inf).all()
    q, k, v = draw(engine, (2, 2, 1, 8), (2, 2, 5, 8), (2, 2, 5, 0), dtype="float16")
    assert close(engine, q, k, v)[0].shape == (2, 2, 1, 0)


def test_results(engine):
    q, k, v = draw(engine, (2, 1, 4, 16), (2, 60, 2, 16), (2, 60, 2, 16), dtype="float16")
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    out, lse = close(engine, q, k, v)
    assert out.swapaxes(1, 2).flags.c_contiguous and lse.dtype == np.float32
    assert same([cuflash.decode(q, k, v)], [out])  # lse asked for or not
    target = engine.xp.zeros((2, 4, 1, 32), np.float16)[..., ::2]
    assert cuflash.decode(q, k, v, out=target) is target and same([target], [out])


def test_wrong_arguments(engine):
    q, k, v = draw(engine, (2, 4, 1, 8), (2, 2, 32, 8), (2, 2, 32, 8), dtype="float16")
    table = engine.xp.zeros((2, 3), np.int32)
    array = engine.xp.asarray
    values = [
        ({"lengths": array([1, 33])}, ValueError, r"lengths\[1\] is 33"),
        ({"lengths": array([-1, 3])}, ValueError, r"lengths\[0\] is -1"),
        ({"page_table": table + 2, "lengths": array([0, 33])}, ValueError, r"page_table\[1, 0\] is 2"),
    ]
    for keywords, error, words in (
        *(values if engine.name == "numpy" else ()),  # those of a GPU's arrays are not read
        ({"lengths": array([1, 2, 3])}, ValueError, "lengths has shape"),
        ({"lengths": array([1.0, 2.0])}, TypeError, "lengths has dtype"),
        ({"page_table": table}, ValueError, "lengths is None"),
        ({"page_table": table[0], "lengths": array([1, 2])}, ValueError, "page_table has shape"),
        ({"out": q}, ValueError, "out shares memory with q"),
        ({"splits": 0}, ValueError, "splits is 0"),
    ):
        with pytest.raises(error, match=words):
            cuflash.decode(q, k, v, **keywords)
    with pytest.raises(ValueError, match="k_cache has shape"):
        cuflash.decode(q, k[0], v[0])


# Splits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 63, 10**6])
def test_no_key_is_lost_between_splits(engine, splits):
    """One after the other, each key of some is the only one that weighs."""
    for length in (17, 64, 65, 128, 250):
        q, k, v = draw(engine, (1, 1, 1, 32), (1, 1, 250, 32), (1, 1, 250, 32), dtype="float16")
        for j in {0, 15, 16, length // 2, length - 17, length - 1}:
            keys = changed(engine, k, (0, 0, j), np.sign(reference.host(q)[0, 0, 0]) * 8)
            out, _ = close(engine, q, keys, v, lengths=engine.xp.asarray([length]), splits=splits)
            assert np.abs(reference.double(out)[0, 0, 0] - reference.double(v)[0, 0, j]).max() < 0.2


def test_parts_add_up_to_the_same_bits_wherever_they_are(engine):
    """In the shared memory of a cluster's blocks, or in global memory, where a cache has room for more keys.

    Of four splits sequences take all, one and some.
    """
    for dtype in DTYPES:
        q, k, v = draw(engine, (3, 6, 2, 40), (3, 2, 2100, 40), (3, 2, 2100, 24), dtype=dtype)
        lengths = engine.xp.asarray([700, 0, 90])
        one, other = (
            close(engine, q, k[:, :, :capacity], v[:, :, :capacity], lengths=lengths, splits=4)
            for capacity in (700, 2100)
        )
        assert same(one, other)


def test_parts_that_are_not_there_change_no_zero(engine):
    """Of eight splits the last has a value that leaves -0 of the smallest negative number: at the end it is 0."""
    q, k, v = (np.zeros((1, 1, length, 64), DTYPES["bfloat16"]) for length in (1, 4200, 4200))
    q[..., 0], k[:, :, :600, 0], v[:, :, 699] = 8, 4, -(2.0**-125)
    q, k, v, lengths = (engine.xp.asarray(x) for x in (q, k, v, np.array([700])))
    for capacity in (700, 4200):
        out, _ = close(engine, q, k[:, :, :capacity], v[:, :, :capacity], lengths=lengths, splits=8)
        assert engine.name == "numpy" or not np.signbit(reference.double(out)).any()


def test_batch_invariance(engine):
    """Lengths of several splits at fixed multiples of keys; capacity and neighbours change no bit."""
    recipe = CacheRecipe(
        lengths=(2500, 1024, 1025, 0, 40), page_size=64, heads=4, key_heads=2, head_dim=32, value_dim=32, spare=300,
        batch_invariant=True,
    )  # fmt: skip
    hold(engine, testing.check_decode_bound, recipe)
    hold(engine, testing.check_decode_one_by_one, recipe)
    hold(engine, testing.check_decode_placement, recipe)


RAGGED = {"heads": 4, "key_heads": 2, "head_dim": 32, "value_dim": 32}


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"dtype": "float32"}, {"kv_format": "int8", "k_scale": "slot"}, {"kv_format": "e4m3", "v_scale": "head"},
        {"queries": 20, "window": (150, None)}, {"queries": 3, "page_size": 7, "q": "offset"},
        {"append": True, "rotary": 8, "queries": 2, "spare": 9}, {"heads": 40, "causal": False, "window": (90, 5)},
        {"head_dim": 300, "value_dim": 200, "key_heads": 1, "latent": True},
    ],
    ids=str,
)  # fmt: skip
def test_sequences_of_different_lengths(engine, changes):
    """The plan's own splits, which follow all lengths: of nothing, of more sequences than a warp has lanes."""
    many = (700, 0, 33, 130, *[1, 0, 20] * 10, 260, 64)
    for lengths in (many, many[:4], (0, 0, 0), (16, 900)):
        recipe = CacheRecipe(lengths=lengths, **RAGGED | changes)
        hold(engine, testing.check_decode_bound, recipe)
        hold(engine, testing.check_decode_rerun, recipe)


@pytest.mark.parametrize("processors", [1, 2, 5, 40])
def test_splits_of_different_lengths(request, engine, processors):
    """Few waves of few blocks, and one of many; lengths that differ much, little, and not at all."""
    if engine.name != "emulated":
        pytest.skip("a GPU has as many multiprocessors as it has")
    emulator = request.getfixturevalue("emulator")
    rng = np.random.default_rng(processors)
    for n in range(4):
        lengths = (rng.integers(1, 400, 5), rng.integers(90, 100, 3), np.full(4, 80), [500, *[3] * 40])[n]
        recipe = CacheRecipe(lengths=tuple(map(int, lengths)), **RAGGED, queries=1 + n % 2 * 20, seed=n)
        made = emulator.Emulator(n, replace(_plan.KNOWN[9, 0], processors=processors))
        testing.check_decode_bound(made.decode, recipe, np, "portable float16")
        testing.check_decode_hidden_keys(made.decode, recipe, np, "portable float16")


def test_several_launches(engine, monkeypatch):
    """Where a grid cannot hold all blocks."""
    monkeypatch.setattr(_plan, "LARGEST_GRID", 20)
    recipe = CacheRecipe(
        lengths=(90, 0, 130, 65, 1), page_size=7, heads=6, key_heads=2, queries=6, head_dim=24, value_dim=16, splits=3
    )
    hold(engine, testing.check_decode_bound, recipe)
    hold(engine, testing.check_decode_placement, recipe)


@pytest.mark.parametrize("head_dim, value_dim", [(1, 1), (33, 32), (64, 64), (72, 96), (128, 128), (192, 150),
                                                 (256, 256), (40, 200)])  # fmt: skip
def test_head_dims(engine, head_dim, value_dim):
    for changes in (
        {}, {"queries": 3, "window": (40, 20)}, {"page_size": 16, "k": "offset"}, {"queries": 12, "window": (40, None)},
    ):  # fmt: skip
        recipe = CacheRecipe(
            lengths=(300, 77), heads=6, key_heads=2, head_dim=head_dim, value_dim=value_dim, splits=3, seed=head_dim
        )
        hold(engine, testing.check_decode_bound, testing.replace(recipe, **changes))


@pytest.mark.parametrize("queries", [1, 4, 20])
def test_hidden_keys(engine, queries):
    for changes in ({}, {"causal": "top-left"}, {"causal": False, "window": (9, 9)}, {"window": (3, None)}):
        for seed in range(3):
            recipe = CacheRecipe(
                lengths=(200, 3, 33), heads=4, key_heads=2, queries=queries, head_dim=32, value_dim=32, splits=3,
                seed=seed, page_size=16,
            )  # fmt: skip
            hold(engine, testing.check_decode_hidden_keys, testing.replace(recipe, **changes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("below", [slice(0, 200), slice(100, 300), slice(0, 31)])
def test_keys_far_below_others_are_nothing(engine, dtype, below):
    """Whichever come first, of whatever warp and split."""
    q, k, v, scale = draw_far_below(engine, dtype, 300, below)
    for splits in (1, 2, 4):
        close(engine, q, k, v, scale=scale, splits=splits)


def test_huge_scores(engine):
    """Scores of which a float32 holds no fraction."""
    q, k, v = draw(engine, (2, 2, 1, 32), (2, 2, 100, 32), (2, 2, 100, 32), dtype="bfloat16")
    close(engine, q, k, v, scale=1e8, splits=2)


def test_a_visible_nan_is_seen(engine):
    q, k, v = draw(engine, (1, 4, 1, 32), (1, 2, 300, 32), (1, 2, 300, 32), dtype="float16")
    v = changed(engine, v, (0, 0, 200, 5), np.nan)
    k = changed(engine, k, (0, 1, 100, 0), np.nan)
    out, lse = (reference.double(x) for x in close(engine, q, k, v, splits=4))
    assert np.isnan(out[0, :2, 0]).sum() == 2 and np.isnan(out[0, 2:]).all() and np.isnan(lse[0, 2:]).all()


# Values that are columns of keys ----------------------------------------------------------------------------------


def latent(**changes):
    sizes = {"heads": 16, "key_heads": 1, "head_dim": 576, "value_dim": 512, "latent": True, "splits": 2}
    return CacheRecipe(lengths=(150, 0, 65), **(sizes | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"heads": 20, "dtype": "bfloat16"}, {"heads": 128, "splits": 1, "page_size": 64},
        {"queries": 3, "page_size": 7, "heads": 5}, {"k": "offset", "window": (40, 0), "queries": 2},
        {"head_dim": 300, "value_dim": 1}, {"key_heads": 2, "value_dim": 300}, {"head_dim": 64, "value_dim": 40},
        {"batch_invariant": True, "splits": None}, {"k": "swapped", "q": "swapped", "scale": -0.1, "planted": True},
    ],
    ids=str,
)  # fmt: skip
def test_values_that_are_columns_of_keys(engine, changes):
    recipe = latent(**changes)
    hold(engine, testing.check_decode_bound, recipe)
    if changes.get("heads") != 128:  # which take their time where kernels are emulated
        hold(engine, testing.check_decode_placement, recipe)


@pytest.mark.parametrize("queries, heads", [(1, 6), (4, 5), (2, 20)])
def test_hidden_keys_whose_columns_are_values(engine, queries, heads):
    for changes in ({}, {"causal": False, "window": (9, 9), "page_size": 16}):
        hold(engine, testing.check_decode_hidden_keys, latent(queries=queries, heads=heads, **changes))


def test_a_visible_nan_in_keys_whose_columns_are_values_is_seen(engine):
    q, k = draw(engine, (2, 16, 1, 576), (2, 1, 150, 576), dtype="float16")
    k = changed(engine, k, (0, 0, 100, 550), np.nan)
    out, lse = (reference.double(x) for x in close(engine, q, k, k[..., :512], splits=2))
    assert np.isnan(out[0]).all() and np.isnan(lse[0]).all() and np.isfinite(out[1]).all()


def test_columns_of_a_page_that_does_not_exist_are_not_read(engine):
    """Rows that see them are NaN on a GPU, whoever of a block's warps has looked them up; a host says so."""
    if engine.name == "numpy":
        pytest.skip("the CPU engine refuses such a table")
    for heads in (16, 40):
        q, k = draw(engine, (2, heads, 1, 576), (20, 1, 16, 576), dtype="bfloat16")
        table = np.arange(20, dtype=np.int32).reshape(2, 10)
        for page in (0, 3, 9):
            broken = table.copy()
            broken[0, page] = (-1, 20, 2**31 - 1)[page % 3]
            given = {"lengths": engine.xp.asarray(np.full(2, 160, np.int32)), "splits": 2, "return_lse": True}
            out, lse = cuflash.decode(q, k, k[..., :512], page_table=engine.xp.asarray(broken), **given)
            whole = cuflash.decode(q, k, k[..., :512], page_table=engine.xp.asarray(table), **given)
            assert np.isnan(reference.double(out[0])).all() and np.isnan(reference.host(lse[0])).all()
            assert same((out[1], lse[1]), (whole[0][1], whole[1][1]))


# 8-bit caches -----------------------------------------------------------------------------------------------------

CODES = np.arange(256, dtype=np.uint8)
FORMATS = {"int8": CODES.view(np.int8), "e4m3": CODES}


def meaning(kv_format):
    """What the codes of a format stand for."""
    return reference.dequantised(FORMATS[kv_format], kv_format=kv_format)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_element_of_a_format_comes_out(engine, kv_format, dtype):
    """A sequence of one key has its value as out, and as lse its score."""
    codes = engine.xp.asarray(FORMATS[kv_format])
    ones = engine.xp.asarray(np.ones((256, 1, 1, 1), DTYPES[dtype]))
    k = codes[:, None, None, None]
    v = engine.xp.broadcast_to(codes, (256, 1, 1, 256))
    out, lse = (reference.double(x) for x in close(engine, ones, k, v, scale=1, kv_format=kv_format))
    wanted, nan = meaning(kv_format), np.isnan(meaning(kv_format))
    assert np.isnan(out[nan]).all() and np.array_equal(out[~nan, 0, 0], np.tile(wanted, (256, 1))[~nan], equal_nan=True)
    assert np.isnan(lse[nan]).all() and (np.abs(lse[~nan, 0, 0] - wanted[~nan]) <= 1e-4).all()


def quantised(engine, kv_format, scales=("slot", "slot"), dtype="bfloat16", **changes):
    """q and caches of two sequences, and the keywords that go with them."""
    recipe = CacheRecipe(
        lengths=(300, 77), heads=4, key_heads=2, head_dim=64, value_dim=64, dtype=dtype, kv_format=kv_format,
        k_scale=scales[0], v_scale=scales[1], **changes,
    )  # fmt: skip
    *arrays, tables = recipe.arrays(engine.xp)
    return arrays, tables | recipe.keywords


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("k_scale", [None, "head", "slot"])
@pytest.mark.parametrize("v_scale", [None, "head", "slot"])
def test_scales(engine, kv_format, k_scale, v_scale):
    for dtype in ("float16", "bfloat16"):
        for size in (None, 16, 5):
            recipe = CacheRecipe(
                lengths=(100, 33), page_size=size, heads=4, key_heads=2, queries=2, head_dim=32, value_dim=48,
                dtype=dtype, kv_format=kv_format, k_scale=k_scale, v_scale=v_scale, splits=2, planted=True,
            )  # fmt: skip
            hold(engine, testing.check_decode_bound, recipe)
            hold(engine, testing.check_decode_hidden_keys, recipe)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e-6, 1e6, 1e12, 1e30])
def test_scales_of_any_size(engine, size):
    """Those of some slots, or of all."""
    arrays, keywords = quantised(engine, "int8")
    for name in ("k_scale", "v_scale"):
        for place in ((0, slice(None), slice(100, 180, 3)), Ellipsis):
            scales = reference.host(keywords[name])[place] * np.float32(size)
            more = {"scale": 1e-2 / size} if name == "k_scale" and place is Ellipsis else {}
            with np.errstate(over="ignore"):
                close(engine, *arrays, **(keywords | {name: changed(engine, keywords[name], place, scales)} | more))


def test_a_visible_scale_that_is_nan_is_seen(engine):
    arrays, keywords = quantised(engine, "int8")
    for name in ("k_scale", "v_scale"):
        scales = changed(engine, keywords[name], (0, 0, 200), np.nan)
        out, lse = (reference.double(x) for x in close(engine, *arrays, **(keywords | {name: scales})))
        assert np.isnan(out[0, :2]).all() and np.isfinite(out[0, 2:]).all() and np.isfinite(out[1]).all()
        assert np.isnan(lse[0, :2]).all() == (name == "k_scale")


@pytest.mark.parametrize("dtype, sizes", [("bfloat16", (1e-30, 1e-3, 1e4, 1e30)), ("float16", (1e-6, 1e3))])
def test_queries_of_any_size(engine, dtype, sizes):
    """Rows of bfloat16 that float16 does not hold, and elements of unlike sizes in one."""
    (q, k, v), keywords = quantised(engine, "int8", dtype=dtype)
    for size in sizes:
        rows = reference.double(q) * size
        rows[:, 1, :, ::2] *= 1e-4
        rows[:, 2] = 0
        rows = engine.xp.asarray(rows.astype(DTYPES[dtype]))
        close(engine, rows, k, v, **(keywords | {"scale": min(0.1 / size, 1e28)}))


@pytest.mark.parametrize("kv_format", FORMATS)
def test_huge_scores_of_8_bits(engine, kv_format):
    arrays, keywords = quantised(engine, kv_format)
    close(engine, *arrays, **(keywords | {"scale": 1e8}), splits=2)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_quantize_takes_the_nearest(engine, kv_format, dtype):
    (x,) = draw(engine, (2, 3, 40, 24), dtype=dtype)
    x = changed(engine, changed(engine, x, (0, 1, 3), 0), (1, 0, 0), 1e3)
    values = meaning(kv_format)
    values = values[~np.isnan(values) & (values > -128)] if kv_format == "int8" else values[~np.isnan(values)]
    for axis, shape in ((-1, (2, 3, 40)), ((0, 2, 3), (3,)), ((3, 2), (2, 3))):
        elements, scales = cuflash.quantize(x, kv_format, axis=axis)
        assert scales.shape == shape and scales.dtype == np.float32 and elements.dtype == FORMATS[kv_format].dtype
        one = np.expand_dims(reference.double(scales), axis)
        exact, given = reference.dequantised(reference.host(elements), kv_format=kv_format), reference.double(x)
        nearest = np.abs(given[..., None] / one[..., None] - values).min(-1)
        assert (np.abs(given / one - exact) <= nearest + 1e-4).all()
        assert (np.abs(exact).max(axis) == (127 if kv_format == "int8" else 448)).sum() == (given != 0).any(axis).sum()


def test_quantize_of_little(engine):
    empty = engine.xp.zeros((2, 0, 8), np.float32)
    for kv_format in FORMATS:
        for axis, shape in ((-1, (2, 0)), ((0, 1, 2), ()), (1, (2, 8))):
            elements, scales = cuflash.quantize(empty, kv_format, axis=axis)
            assert elements.shape == (2, 0, 8) and scales.shape == shape and (reference.host(scales) == 1).all()
        nan = changed(engine, engine.xp.ones((1, 8), np.float32), (0, 3), np.nan)
        elements, scales = cuflash.quantize(nan, kv_format)
        assert np.isnan(reference.double(scales)).all()


@pytest.mark.parametrize(
    "arguments, keywords, error, words",
    [
        ((np.zeros((2, 8)), "fp8"), {}, ValueError, "quantize: kv_format is 'fp8'; wanted 'int8' or 'e4m3'"),
        ((np.zeros((2, 8), int), "int8"), {}, TypeError, "quantize: x has dtype int64; wanted one of"),
        (([1.0], "int8"), {}, TypeError, "quantize: x is a list; wanted"),
        ((np.zeros((2, 8)), "int8"), {"axis": 2}, ValueError, "quantize: axis is 2; wanted one or more of x's axes"),
        ((np.zeros((2, 8)), "int8"), {"axis": (1, -1)}, ValueError, r"quantize: axis is \(1, -1\); wanted one or more"),
    ],
)
def test_quantize_says_what_is_wrong(engine, arguments, keywords, error, words):
    with pytest.raises(error, match=words):
        cuflash.quantize(*arguments, **keywords)


def test_int8_is_the_default_of_its_dtype(engine):
    arrays, keywords = quantised(engine, "int8", ("head", None))
    results = [cuflash.decode(*arrays, return_lse=True, **(keywords | {"kv_format": f})) for f in (None, "int8")]
    assert same(*results)


# Appends ----------------------------------------------------------------------------------------------------------


def appending(lengths, **changes):
    sizes = {"heads": 6, "key_heads": 2, "head_dim": 16, "value_dim": 24, "spare": 40, "append": True}
    return CacheRecipe(lengths=lengths, **(sizes | changes))


@pytest.mark.parametrize("rotary", [0, 4, 8])
@pytest.mark.parametrize("page_size", [None, 1, 16, 48])
@pytest.mark.parametrize("queries", [1, 3, 20])
def test_appends(engine, queries, page_size, rotary):
    for n, dtype in enumerate(DTYPES):
        recipe = appending(
            (0, 1, 31, 90), queries=queries, page_size=page_size, rotary=rotary, rotary_interleaved=bool(n % 2),
            dtype=dtype, seed=n, angles=dtype if queries == 3 else "float32",
        )  # fmt: skip
        for check in (testing.check_decode_bound, testing.check_decode_append, testing.check_decode_overflow):
            hold(engine, check, recipe)


@pytest.mark.parametrize("layout", testing.CACHE_LAYOUTS)
def test_appends_to_views(engine, layout):
    """Also to those that kernels cannot read in place: what is copied has the new keys."""
    for where in ({"k": layout, "v": layout}, {"rows": layout}, {"q": layout, "scale": -0.3}):
        recipe = appending((5, 40, 0), queries=2, page_size=7, rotary=5, **where)
        hold(engine, testing.check_decode_bound, recipe)
        hold(engine, testing.check_decode_append, recipe)


def test_step_by_step(engine):
    """A cache that grows by steps of some rows is the cache that had them all, and lengths are the caller's."""
    q, k, v = draw(engine, (3, 4, 70, 16), (3, 2, 70, 16), (3, 2, 70, 24), dtype="float16")
    caches = [engine.xp.zeros_like(x) for x in (k, v)]
    lengths, before = engine.xp.zeros(3, np.int32), 0
    for queries in (1, 5, 33, 1, 30):
        rows = slice(before, before + queries)
        new = {"k_new": k[:, :, rows], "v_new": v[:, :, rows]}
        results = cuflash.decode(q[:, :, rows], *caches, lengths=lengths, return_lse=True, **new)
        assert reference.host(lengths).tolist() == [before] * 3
        lengths += queries
        before += queries
        exact = bounds.decode(q[:, :, rows], k, v, path=path(engine, "float16"), lengths=np.full(3, before))
        assert bounds.worst(results, exact) <= 1
    assert same(caches, (k, v))


def test_rotary_without_an_append(engine):
    """Rows are at the last positions; of one sequence the tables are too short, of another nothing is there."""
    for changes in ({}, {"causal": False}, {"rotary_interleaved": True}, {"page_size": 16}):
        recipe = appending((70, 2, 0, 71), queries=4, rotary=6, append=False, **changes)
        hold(engine, testing.check_decode_bound, recipe)
        q, k, v, tables = recipe.arrays(engine.xp)
        whole = cuflash.decode(q, k, v, return_lse=True, **tables | recipe.keywords)
        tables["rotary"] = [x[:70] for x in tables["rotary"]]
        some = cuflash.decode(q, k, v, return_lse=True, **tables | recipe.keywords)
        assert same([x[:3] for x in some], [x[:3] for x in whole])
        assert all(np.isnan(reference.double(x)[3]).all() for x in some)
        tables["rotary"] = [x[:0] for x in tables["rotary"]]
        none = [reference.double(x) for x in cuflash.decode(q, k, v, return_lse=True, **tables | recipe.keywords)]
        assert np.isnan(none[0][[0, 1, 3]]).all() and not none[0][2].any() and (none[1][2] == -np.inf).all()


def test_no_pairs_is_no_rotation(engine):
    recipe = appending((30, 2), queries=2)
    q, k, v, tables = recipe.arrays(engine.xp)
    wanted = cuflash.decode(q, k, v, return_lse=True, **tables)
    rotary = [engine.xp.zeros((60, 0), np.float32)] * 2
    assert same(cuflash.decode(q, k, v, return_lse=True, rotary=rotary, **tables), wanted)


def test_appends_of_nothing(engine):
    """No rows, no heads, no sequences, values without columns."""
    for shape, cache in (((2, 4, 0, 8), (2, 2, 5, 8)), ((2, 0, 1, 8), (2, 2, 5, 8)), ((0, 4, 1, 8), (0, 2, 5, 8))):
        q, k, v = draw(engine, shape, cache, cache, dtype="float16")
        new = engine.xp.ones((shape[0], 2, shape[2], 8), np.float16)
        angles = [engine.xp.ones((9, 2), np.float32)] * 2
        for rotary in (None, angles):
            overflow = engine.xp.full(shape[0], 7, np.int32)
            keys, values = k.copy(), v.copy()
            out = cuflash.decode(
                q, keys, values, lengths=engine.xp.full(shape[0], 3, np.int32), k_new=new, v_new=new,
                overflow=overflow, rotary=rotary,
            )  # fmt: skip
            assert out.shape == shape and not reference.host(overflow).any()
            assert same([values[:, :, 3 : 3 + shape[2]], values[:, :, :3]], [new, v[:, :, :3]])
    q, k, v = draw(engine, (2, 2, 1, 8), (2, 2, 5, 8), (2, 2, 5, 0), dtype="float16")
    cuflash.decode(q, k, v, lengths=engine.xp.asarray([1, 2]), k_new=q, v_new=q[..., :0])
    assert same([k[0, :, 1], k[1, :, 2]], [q[0, :, 0], q[1, :, 0]])


def test_appends_in_several_launches(engine, monkeypatch):
    monkeypatch.setattr(_plan, "LARGEST_GRID", 60)
    recipe = appending((90, 0, 13, 65, 1), page_size=7, queries=3, rotary=8, splits=2)
    for check in (testing.check_decode_bound, testing.check_decode_append, testing.check_decode_overflow):
        hold(engine, check, recipe)


def test_a_call_that_is_refused_appends_nothing(engine):
    q, k, v = draw(engine, (2, 4, 1, 8), (2, 2, 32, 8), (2, 2, 32, 8), dtype="float16")
    new, before = q[:, :2].copy(), (k.copy(), v.copy())
    call = partial(cuflash.decode, q, k, v, lengths=engine.xp.asarray([3, 4]), v_new=new)
    for keywords, words in (
        ({"k_new": k[:, :, 31:]}, "k_cache shares memory with k_new"),
        ({"k_new": new, "out": q}, "out shares memory with q"),
        ({"k_new": new[:, :1]}, "k_new has shape"),
        ({"k_new": new, "scale": np.nan}, "scale is nan"),
        ({}, "k_new is None, v_new is given"),
    ):
        with pytest.raises(ValueError, match=words):
            call(**keywords)
    assert same((k, v), before)
    call(k_new=new)
    with pytest.raises(ValueError, match="k_cache shares memory with k_new"):
        call(k_new=k[:, :, :1])


# What the host does not look at ------------------------------------------------------------------------------------


def test_lengths_outside_the_cache_are_brought_inside(engine):
    if engine.name == "numpy":
        pytest.skip("an error there")
    q, k, v = draw(engine, (4, 2, 1, 32), (4, 2, 50, 32), (4, 2, 50, 32), dtype="float16")
    wanted = close(engine, q, k, v, lengths=engine.xp.asarray([50, 0, 50, 7]))
    for kind, lengths in ((np.int32, [51, -1, 2**31 - 1, 7]), (np.int64, [2**40, -(2**40), 2**32 + 50, 7])):
        lengths = engine.xp.asarray(np.array(lengths, kind))
        assert same(cuflash.decode(q, k, v, lengths=lengths, return_lse=True), wanted)


@pytest.mark.parametrize("page", [-1, 4, 2**31 - 1, -(2**31)])
def test_a_page_that_does_not_exist_makes_nan(engine, page):
    if engine.name == "numpy":
        pytest.skip("an error there")
    q, k, v = draw(engine, (3, 2, 1, 32), (4, 2, 16, 32), (4, 2, 16, 32), dtype="float16")
    table = np.array([[0, 1, 2], [1, page, 3], [2, 1, page]], np.int32)
    lengths = np.array([40, 40, 32])
    call = partial(cuflash.decode, q, k, v, lengths=engine.xp.asarray(lengths), return_lse=True)
    for splits in (1, 2, 3):
        out, lse = (reference.double(x) for x in call(page_table=engine.xp.asarray(table), splits=splits))
        assert np.isnan(out[1]).all() and np.isnan(lse[1]).all() and np.isfinite(out[[0, 2]]).all()
    none = cuflash.decode(q, k[:0], v[:0], lengths=engine.xp.asarray(lengths), page_table=engine.xp.asarray(table))
    assert np.isnan(reference.double(none)).all()
