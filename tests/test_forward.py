"""forward on every engine: the checks of `cuflash.testing` on drawn problems, and the edges written out."""

from functools import partial

import numpy as np
import pytest
from drawn import DTYPES, changed, draw, draw_far_below
from emulator import mutations

import cuflash
from cuflash import reference, testing
from cuflash.testing import CacheRecipe

ENGINES = ["numpy", "emulated portable", "emulated sm90", "portable", "sm90"]
pytestmark = pytest.mark.parametrize("engine", ENGINES, indirect=True, scope="module")


def same(one, other):
    return np.array_equal(reference.host(one), reference.host(other))


def close(q, k, v, **keywords):
    """Out and lse on the host, after they have been found inside the bound."""
    out, lse = cuflash.forward(q, k, v, return_lse=True, **keywords)
    testing.assert_attention_close((out, lse), q, k, v, **keywords)
    return reference.double(out), reference.double(lse)


def size_of(engine):
    """How many problems to draw, and how large."""
    return {
        "numpy": {"examples": 25, "max_length": 130, "max_head_dim": 130},
        "emulated": {"examples": 5, "max_length": 130, "max_head_dim": 64},  # test_emulated.py draws more
    }.get(engine.name, {"examples": 60})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", testing.forward_checks, ids=lambda check: check.__name__)
def test_property(engine, check, dtype):
    testing.fuzz(check, cuflash.forward, xp=engine.xp, dtypes=[dtype], **size_of(engine))


@pytest.mark.parametrize("check", testing.forward_checks, ids=lambda check: check.__name__)
def test_property_where_tf32_will_do(engine, check):
    forward = partial(cuflash.forward, precision="tf32")
    path = "numpy tf32" if engine.name == "numpy" else "sm90 tf32"  # of two parts at least
    testing.fuzz(check, forward, xp=engine.xp, path=path, dtypes=["float32"], **size_of(engine))


# Sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "q_shape, k_shape, value_dim",
    [
        ((2, 3, 0, 8), (2, 3, 5, 8), 8),
        ((2, 3, 5, 8), (2, 3, 0, 8), 8),
        ((2, 3, 0, 8), (2, 3, 0, 8), 8),
        ((0, 3, 5, 8), (0, 3, 5, 8), 8),
        ((2, 0, 5, 8), (2, 3, 5, 8), 8),
        ((2, 3, 5, 8), (2, 3, 5, 8), 0),
    ],
    ids=["queries", "keys", "lengths", "batch", "heads", "value_dim"],
)
def test_nothing(engine, dtype, q_shape, k_shape, value_dim):
    q, k, v = draw(engine, q_shape, k_shape, (*k_shape[:-1], value_dim), dtype=dtype)
    out, lse = close(q, k, v, causal=True)
    assert out.shape == (*q_shape[:-1], value_dim) and lse.shape == q_shape[:-1]
    assert not out.any() or k_shape[-2]
    assert k_shape[-2] or (lse == -np.inf).all()


def test_head_dim_zero(engine):
    with pytest.raises(ValueError, match="head_dim 0"):
        cuflash.forward(*draw(engine, (1, 4, 0), (1, 4, 0), (1, 4, 8)))


def test_matrices_have_no_head_axis(engine):
    q, k, v = draw(engine, (5, 8), (7, 8), (7, 3))
    out, lse = close(q, k, v, causal=True)
    assert out.shape == (5, 3) and lse.shape == (5,)
    with_heads = close(q[None], k[None], v[None], causal=True)
    assert same(out, with_heads[0][0]) and (lse == with_heads[1][0]).all()
    assert close(q, k[None], v[None])[0].shape == (1, 5, 3)


def test_leading_axes_broadcast(engine):
    out, lse = close(*draw(engine, (2, 1, 4, 5, 8), (3, 2, 7, 8), (1, 1, 2, 7, 3)))
    assert out.shape == (2, 3, 4, 5, 3) and lse.shape == (2, 3, 4, 5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key_heads", [1, 2, 3, 6])
def test_query_head_reads_its_key_head(engine, key_heads, dtype):
    q, k, v = draw(engine, (2, 6, 70, 16), (2, key_heads, 70, 16), (2, key_heads, 70, 24), dtype=dtype)
    out, lse = close(q, k, v, causal=True)
    for h in range(6):
        reads = slice(h // (6 // key_heads), h // (6 // key_heads) + 1)
        one = q[:, h : h + 1], k[:, reads], v[:, reads]
        testing.assert_attention_close(cuflash.forward(*one, causal=True, return_lse=True), *one, causal=True)


# Keywords -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0, -1.5, 40.0, 1e4, 1e30, 1e-40, np.float32(0.5), np.array(0.25)])
def test_scale(engine, dtype, scale):
    out, lse = close(*draw(engine, (2, 33, 16), (2, 65, 16), (2, 65, 16), dtype=dtype), scale=float(scale))
    assert np.isfinite(out).all()


@pytest.mark.parametrize("causal, window", [
    (False, (0, 0)), (False, (3, None)), (False, (None, 2)), (True, (5, 9)), ("top-left", (2, None)),
    ("bottom-right", None), (False, (10**9, 10**9)), (False, (10**30, None)), (True, (0, 0)),
])  # fmt: skip
@pytest.mark.parametrize("queries, keys", [(40, 70), (70, 40), (40, 40)])
def test_masks(engine, causal, window, queries, keys):
    q, k, v = draw(engine, (1, queries, 16), (1, keys, 16), (1, keys, 16))
    out, lse = close(q, k, v, causal=causal, window=window)
    sees = reference.visible(queries, keys, causal=causal, window=window).any(axis=1)
    assert (np.isfinite(lse[0]) == sees).all()
    assert not out[0, ~sees].any()


def test_lse_only_when_asked_for(engine):
    arrays = draw(engine, (1, 4, 8), (1, 4, 8), (1, 4, 8), dtype="float16")
    out, lse = cuflash.forward(*arrays, return_lse=True)
    assert lse.dtype == np.float32 and lse.flags.c_contiguous
    assert same(cuflash.forward(*arrays), out)
    assert cuflash.forward(*(x.astype(np.float64) for x in arrays), return_lse=True)[1].dtype == np.float64


def test_engine_by_name(engine):
    if engine.name == "emulated":
        pytest.skip("the emulator is no engine that a user can name")
    arrays = draw(engine, (1, 4, 8), (1, 4, 8), (1, 4, 8), dtype="float16")
    assert same(cuflash.forward(*arrays, engine=engine.name), cuflash.forward(*arrays))
    assert cuflash.explain("forward", *arrays, engine=engine.name).engine == engine.name
    other = "sm90" if engine.name == "numpy" else "numpy"
    for wrong in ("fastest", other):
        with pytest.raises(ValueError, match=f"engine is '{wrong}'"):
            cuflash.forward(*arrays, engine=wrong)


@pytest.mark.parametrize("value_dim", [8, 40, 100])
def test_each_product_of_parts_of_float32_counts(engine, value_dim):
    """Numbers of three parts as large as can be: none of the products that make one may be left out."""
    recipe = testing.Recipe(heads=1, queries=8, keys=8, head_dim=8, value_dim=value_dim)
    mutations.check_split_products(cuflash.forward, recipe, engine.xp)


@pytest.mark.parametrize("dim", [8, 64, 100, 200])
def test_tf32_is_far_truer_than_its_name(engine, dim):
    """Than exact arithmetic with numbers rounded to the 10 bits that TF32 has."""
    arrays = draw(engine, (2, 90, dim), (2, 150, dim), (2, 150, dim))
    hosts = [reference.host(x) for x in arrays]
    exact, rounded = (reference.forward(*xs, causal=True)[0] for xs in (hosts, map(to_tf32, hosts)))
    out = reference.double(cuflash.forward(*arrays, causal=True, precision="tf32"))
    assert abs(out - exact).max() < abs(rounded - exact).max() / 16
    if dim == 8 or engine.name == "numpy":  # where three parts are as fast, or there are none, they are what it has
        assert same(cuflash.forward(*arrays, causal=True), cuflash.forward(*arrays, causal=True, precision="tf32"))


def to_tf32(x):
    """Rounded to the nearest with 10 bits behind the point."""
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def test_precision_is_for_float32_alone(engine):
    for dtype in ("float16", "float64"):
        with pytest.raises(ValueError, match=f"the arrays are of {dtype}; wanted float32"):
            cuflash.forward(*draw(engine, (4, 8), (4, 8), (4, 8), dtype=dtype), precision="tf32")


def test_the_largest_float32_does_not_show_where_it_is_hidden(engine):
    recipe = testing.Recipe(heads=2, key_heads=1, queries=70, keys=80, head_dim=24, value_dim=44, causal=True)
    mutations.check_hidden_largest(cuflash.forward, recipe, engine.xp)


# Results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_has_the_order_of_q(engine, dtype):
    q, k, v = draw(engine, (2, 33, 4, 16), (2, 33, 4, 16), (2, 33, 4, 24), dtype=dtype)
    out = cuflash.forward(*(x.swapaxes(1, 2) for x in (q, k, v)))
    assert out.shape == (2, 4, 33, 24) and out.swapaxes(1, 2).flags.c_contiguous
    assert cuflash.forward(*(x.transpose(1, 2, 0, 3) for x in (q, k, v))).transpose(2, 0, 1, 3).flags.c_contiguous
    assert cuflash.forward(q, k, v).flags.c_contiguous


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", testing.LAYOUTS[:2] + testing.LAYOUTS[4:])
def test_out_with_any_strides(engine, layout, dtype):
    q, k, v = draw(engine, (2, 3, 33, 16), (2, 3, 33, 16), (2, 3, 33, 24), dtype=dtype)
    out = testing.lay_out(np.full((2, 3, 33, 24), np.nan, DTYPES[dtype]), layout, engine.xp)
    assert cuflash.forward(q, k, v, out=out) is out
    assert same(out, cuflash.forward(q, k, v))


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_in_a_slot_of_a_packed_buffer(engine, dtype):
    (packed,) = draw(engine, (2, 33, 4, 3, 16), dtype=dtype)
    q, k, v, out = (packed[:, :, n].swapaxes(1, 2) for n in range(4))
    expected, inputs = cuflash.forward(q, k, v), packed[:, :, :3].copy()
    cuflash.forward(q, k, v, out=out)
    assert same(out, expected) and same(packed[:, :, :3], inputs)


def test_out_that_cannot_be_written(engine):
    q, k, v = draw(engine, (2, 8, 16), (2, 8, 16), (2, 8, 16))
    before = q.copy()
    (wide,) = draw(engine, (2, 8, 32))
    stretched = engine.xp.lib.stride_tricks.as_strided(wide, (2, 8, 16), (0, 64, 4))
    for out, error, words in (
        (q, ValueError, "out shares memory with q"),
        (k[::-1], ValueError, "out shares memory with k"),
        (stretched, ValueError, "out overlaps itself"),
        (wide, ValueError, "out has shape"),
        (wide[..., :16].astype(np.float64), TypeError, "out has dtype"),
    ):
        with pytest.raises(error, match=words):
            cuflash.forward(q, k, v, out=out)
    assert same(q, before)


def test_inputs_are_not_written(engine):
    arrays = draw(engine, (1, 20, 8), (1, 20, 8), (1, 20, 8))
    copies = [x.copy() for x in arrays]
    cuflash.forward(*arrays, causal=True, scale=-3.0)
    assert all(same(x, y) for x, y in zip(arrays, copies, strict=True))


# What is not finite ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries, keys", [(20, 20), (150, 150)])
def test_visible_nan_shows(engine, queries, keys, dtype):
    i, j, d = queries // 2, keys // 3, 5
    q, k, v = draw(engine, (1, queries, 16), (1, keys, 16), (1, keys, 16), dtype=dtype)
    rows = np.arange(queries)
    sees = reference.visible(queries, keys, causal=True)[:, j]

    out, lse = close(changed(engine, q, (0, i, 3), np.nan), k, v, causal=True)
    assert (np.isnan(lse[0]) == (rows == i)).all() and (np.isnan(out[0]) == (rows == i)[:, None]).all()

    out, lse = close(q, changed(engine, k, (0, j, 3), np.nan), v, causal=True)
    assert (np.isnan(lse[0]) == sees).all() and (np.isnan(out[0]) == sees[:, None]).all()

    out, lse = close(q, k, changed(engine, v, (0, j, d), np.nan), causal=True)
    assert np.isfinite(lse).all() and (np.isnan(out[0]) == (sees[:, None] & (np.arange(16) == d))).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_visible_infinite_values_show(engine, dtype):
    q, k, v = draw(engine, (1, 40, 16), (1, 40, 16), (1, 40, 16), dtype=dtype)
    sees = reference.visible(40, 40, causal=True)[:, 7]
    out, lse = close(q, k, changed(engine, v, (0, 7, 2), -np.inf), causal=True, scale=0.1)
    assert np.isfinite(lse).all() and ((out[0, :, 2] == -np.inf) == sees).all()
    assert np.isfinite(out[0][:, np.arange(16) != 2]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [3, 70, 150])
def test_scores_of_minus_infinity_weigh_nothing(engine, keys, dtype):
    q, k, v = draw(engine, (1, 40, 16), (1, keys, 16), (1, keys, 16), dtype=dtype)
    q = changed(engine, q, (0, slice(None), 0), 1)
    k1 = changed(engine, k, (0, slice(1, None, 2), 0), -np.inf)
    out, lse = close(q, k1, v)
    assert np.isfinite(out).all() and np.isfinite(lse).all()
    out, lse = close(q, changed(engine, k, (0, slice(None), 0), -np.inf), v)
    assert not out.any() and (lse == -np.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_nothing_may_hold_nan(engine, dtype):
    q, k, v = draw(engine, (1, 50, 16), (1, 20, 16), (1, 20, 16), dtype=dtype)
    out, lse = close(changed(engine, q, (0, slice(0, 30)), np.nan), k, v, causal=True)
    assert not out[0, :30].any() and (lse[0, :30] == -np.inf).all() and np.isfinite(lse[0, 30:]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("below", [slice(0, 200), slice(100, 300)])
def test_keys_far_below_others_are_nothing(engine, dtype, below):
    """Whichever come first."""
    *arrays, scale = draw_far_below(engine, dtype, 300, below)
    close(*arrays, scale=scale)


# Caches ---------------------------------------------------------------------------------------------------------


def kinds(engine):
    """What the engine's forward takes with lengths."""
    return list(DTYPES) if engine.name == "numpy" else ["float16", "bfloat16"]


@pytest.mark.parametrize("check", testing.prefill_checks, ids=lambda check: check.__name__)
def test_property_of_caches(engine, check):
    size = {
        "numpy": {"examples": 60, "max_length": 130, "max_head_dim": 130},
        "emulated": {"examples": 5, "max_length": 130, "max_head_dim": 64},  # test_emulated.py draws more
    }.get(engine.name, {"examples": 150, "max_length": 600})
    testing.fuzz(check, cuflash.forward, xp=engine.xp, dtypes=kinds(engine), **size)


@pytest.mark.parametrize("queries", [1, 5, 70])
@pytest.mark.parametrize("keywords", [{}, {"causal": True}, {"window": (30, 4)}, {"causal": "top-left"}])
def test_rows_see_keys_of_their_own_sequence(engine, queries, keywords):
    for dtype in kinds(engine):
        recipe = CacheRecipe(
            lengths=(100, 0, 1, 64), page_size=16, heads=4, key_heads=2, queries=queries, head_dim=16, value_dim=24,
            dtype=dtype, **({"causal": False} | keywords),
        )  # fmt: skip
        testing.check_prefill_bound(cuflash.forward, recipe, engine.xp)
        *arrays, tables = recipe.arrays(engine.xp)
        out, lse = cuflash.forward(*arrays, **tables, return_lse=True, **keywords)
        assert not reference.host(out)[1].any() and (reference.host(lse)[1] == -np.inf).all()
        assert same(out, cuflash.forward(*arrays, **tables, **keywords))


@pytest.mark.parametrize("dim", [64, 128])
def test_a_cache_is_its_sequences_side_by_side(engine, dim):
    """Bit for bit, under a mask for which both have the same tiles."""
    recipe = CacheRecipe(
        lengths=(150, 200), page_size=7, heads=4, key_heads=2, queries=70, head_dim=dim, value_dim=dim, causal=False,
        window=(50, 5),
    )  # fmt: skip
    q, k, v = recipe.values()
    *arrays, tables = recipe.arrays(engine.xp)
    forward = partial(cuflash.forward, return_lse=True, **recipe.keywords)
    out, lse = forward(*arrays, **tables)
    if engine.name == "emulated":  # what serves caches is the portable engine
        forward = partial(pytest.importorskip("emulator").Emulator().forward, **forward.keywords)
    elif engine.name != "numpy":
        forward = partial(forward, engine="portable")
    for b, length in enumerate(recipe.lengths):
        alone = forward(*(engine.xp.asarray(x) for x in (q[b], k[b, :, :length], v[b, :, :length])))
        assert same(out[b], alone[0]) and same(lse[b], alone[1])


def test_decode_of_all_rows(engine):
    recipe = CacheRecipe(lengths=(300, 40), page_size=16, heads=4, key_heads=2, queries=33, head_dim=64, value_dim=64)
    values, (*arrays, tables) = recipe.values(), recipe.arrays(engine.xp)
    for function in (cuflash.forward, cuflash.decode):
        results = function(*arrays, **tables, causal=True, return_lse=True)
        path = f"{'numpy' if engine.name == 'numpy' else 'portable'} float16"
        testing.assert_attention_close(results, *values, lengths=np.array(recipe.lengths), causal=True, path=path)


def test_a_chunk_after_the_other_is_the_whole(engine):
    """A prompt whose rows come in chunks, each on the cache of those before."""
    q, k, v = draw(engine, (1, 4, 200, 32), (1, 2, 200, 32), (1, 2, 200, 32), dtype="float16")
    whole = cuflash.forward(q, k, v, causal=True)
    for first, end in ((0, 90), (90, 91), (91, 200)):
        rows = np.arange(first, end)
        part = cuflash.forward(q[:, :, first:end], k, v, lengths=engine.xp.asarray([end]), causal=True)
        for out in (part, whole[:, :, first:end]):
            testing.assert_attention_close(out, q, k, v, causal=True, rows=rows)


def test_a_page_that_does_not_exist(engine):
    if engine.name == "numpy":
        pytest.skip("NumPy's tables are looked at before")
    mutations = pytest.importorskip("emulator.mutations")
    for changes in ({}, {"page_size": 1}, {"head_dim": 192, "value_dim": 192}):
        recipe = testing.replace(mutations.PREFILL, **changes)
        mutations.check_missing_pages(cuflash.forward, recipe, engine.xp, f"portable {recipe.dtype}")


def test_caches_that_are_empty(engine):
    for shape, cache in (((0, 2, 3, 8), (0, 2, 5, 8)), ((2, 0, 3, 8), (2, 2, 5, 8)), ((2, 2, 0, 8), (2, 2, 5, 8)),
                         ((2, 2, 3, 8), (2, 2, 0, 8))):  # fmt: skip
        arrays, lengths = draw(engine, shape, cache, cache, dtype="float16"), engine.xp.zeros(shape[0], np.int32)
        out, lse = cuflash.forward(*arrays, lengths=lengths, return_lse=True)
        assert out.shape == shape and not reference.host(out).any() and (reference.host(lse) == -np.inf).all()


# Foreign arrays -------------------------------------------------------------------------------------------------


def foreign(array, *protocols):
    """An object that is known by these protocols alone."""
    return type("Foreign", (), {name: property(lambda _, name=name: getattr(array, name)) for name in protocols})()


def test_foreign_arrays_by_dlpack(engine):
    arrays = draw(engine, (1, 20, 8), (1, 20, 8), (1, 20, 8))
    wrapped = [foreign(x, "__dlpack__", "__dlpack_device__") for x in arrays]
    out = cuflash.forward(*wrapped)
    assert isinstance(out, engine.xp.ndarray) and same(out, cuflash.forward(*arrays))
    result = engine.xp.empty_like(out)
    cuflash.forward(*arrays, out=foreign(result, "__dlpack__", "__dlpack_device__"))
    assert same(result, out)


def test_foreign_arrays_by_cuda_array_interface(engine):
    if engine.xp is np:
        pytest.skip("NumPy arrays are not on a CUDA device")
    arrays = draw(engine, (1, 20, 8), (1, 20, 8), (1, 20, 8), dtype="float16")
    out = cuflash.forward(*(foreign(x, "__cuda_array_interface__") for x in arrays))
    assert same(out, cuflash.forward(*arrays))


def test_torch_tensors(engine):
    torch = pytest.importorskip("torch")
    arrays = draw(engine, (1, 20, 8), (1, 20, 8), (1, 20, 8))
    out = cuflash.forward(*(torch.from_dlpack(x) for x in arrays))
    assert same(out, cuflash.forward(*arrays))


def test_what_is_no_array(engine):
    q, k, v = draw(engine, (1, 20, 8), (1, 20, 8), (1, 20, 8))
    with pytest.raises(TypeError, match="k is a list"):
        cuflash.forward(q, k.tolist(), v)
