"""PagedCache: drawn calls against a plain list of arrays, and the edges written out."""

import doctest

import numpy as np
import pytest
from drawn import DTYPES
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

import cuflash
from cuflash import _cache, bounds, reference

pytestmark = pytest.mark.parametrize("engine", ["numpy", "portable"], indirect=True, scope="module")

MOST_ROWS = 9  # of one call
HEADS, KEY_HEADS, HEAD_DIM, VALUE_DIM = 4, 2, 8, 16


class Machine(RuleBasedStateMachine):
    """A cache of few pages beside a model of it: the rows of each sequence, arrays (layers, key_heads, rows, dim)."""

    engine = None  # set by the test

    @initialize(
        pages=st.integers(1, 12), page_size=st.sampled_from([1, 2, 3, 4, 7]), layers=st.sampled_from([None, None, 2]),
        dtype=st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    )  # fmt: skip
    def begin(self, pages, page_size, layers, dtype):
        self.pages, self.dtype, self.layers = pages, dtype, layers
        self.cache = cuflash.PagedCache(
            pages, KEY_HEADS, page_size, HEAD_DIM, VALUE_DIM, layers=layers, dtype=DTYPES[dtype], xp=self.engine.xp
        )
        self.model = {}  # id: (k, v)
        self.drawn = np.random.default_rng(0)

    # What the rules are made of

    def some(self, data, most=3):
        return data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, max_size=most, unique=True))

    def rows(self, *lead, layers=True):
        """Random k and v, on the host."""
        lead = (self.layers or 1, *lead) if layers else lead
        return [self.drawn.standard_normal((*lead, d)).astype(DTYPES[self.dtype]) for d in (HEAD_DIM, VALUE_DIM)]

    def given(self, arrays, layers=True):
        """The same as arrays of the engine, without an axis of layers where the cache has none."""
        return [self.engine.xp.asarray(x[0] if layers and self.layers is None else x) for x in arrays]

    def snapshot(self):
        """All that a failed call must leave as it was."""
        cache = self.cache
        state = {id: (one.length, one.room, list(one.pages)) for id, one in cache._sequences.items()}
        pools = [reference.host(x).tobytes() for x in (cache.k, cache.v)]
        return state, list(cache._owners), sorted(cache._free), pools

    def attempt(self, call):
        """Run a call; whether there were pages enough."""
        before = self.snapshot()
        try:
            call()
        except MemoryError:
            assert self.snapshot() == before
            return False
        return True

    def owned(self, id, first, end):
        """Whether the pages of some rows are this sequence's alone."""
        pages = self.cache._sequences[id].pages[first // self.cache.page_size : -(-end // self.cache.page_size)]
        return all(self.cache._owners[page] == 1 for page in pages if end > first)

    # Rules

    @rule(count=st.integers(0, MOST_ROWS))
    def add(self, count):
        rows, made = self.rows(KEY_HEADS, count), []
        given = self.given(rows) if count else ()
        if self.attempt(lambda: made.append(self.cache.add(*given))):
            assert made[0] not in self.model
            self.model[made[0]] = rows

    @precondition(lambda self: self.model)
    @rule(data=st.data(), count=st.integers(0, MOST_ROWS))
    def append(self, data, count):
        ids = self.some(data)
        rows = self.rows(len(ids), KEY_HEADS, count)
        if self.attempt(lambda: self.cache.append(ids, *self.given(rows))):
            for n, id in enumerate(ids):
                self.model[id] = [np.concatenate([x, y[:, n]], -2) for x, y in zip(self.model[id], rows, strict=True)]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fork(self, data):
        (id,) = self.some(data, 1)
        length = data.draw(st.none() | st.integers(0, self.model[id][0].shape[-2]))
        free = self.cache.free_pages
        self.model[self.cache.fork(id, length)] = [x[..., :length, :].copy() for x in self.model[id]]
        assert self.cache.free_pages == free

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data):
        ids = self.some(data)
        self.cache.free(ids)
        for id in ids:
            del self.model[id]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), count=st.integers(0, MOST_ROWS), share=st.integers(0, MOST_ROWS), fork=st.booleans())
    def reserve_and_advance(self, data, count, share, fork):
        """Rows come through the page table, as a kernel writes them; then those that were wanted are kept."""
        ids = self.some(data)
        if not self.attempt(lambda: self.cache.reserve(ids, count)):
            return
        tables = {name: reference.host(x) for name, x in self.cache.tables(ids).items()}
        if fork:  # between room and rows: the fork must not see what is written
            self.model[self.cache.fork(ids[0])] = [x.copy() for x in self.model[ids[0]]]
        rows = self.rows(len(ids), KEY_HEADS, count)
        given = self.given(rows)
        for b, id in enumerate(ids):
            length = self.model[id][0].shape[-2]
            assert tables["lengths"][b] == length
            assert fork or self.owned(id, length, length + count)
            for i in range(count):
                n, slot = divmod(length + i, self.cache.page_size)
                for pool, x in zip((self.cache.k, self.cache.v), given, strict=True):
                    pool[..., tables["page_table"][b, n], :, slot, :] = x[..., b, :, i, :]
        kept = [min(share + n, count) for n in range(len(ids))]
        self.cache.advance(ids, kept)
        for b, (id, keep) in enumerate(zip(ids, kept, strict=True)):
            self.model[id] = [
                np.concatenate([x, y[:, b, :, :keep]], -2) for x, y in zip(self.model[id], rows, strict=True)
            ]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), count=st.integers(0, MOST_ROWS))
    def write(self, data, count):
        ids = self.some(data)
        count = min([count, *(self.model[id][0].shape[-2] for id in ids)])
        layer = None if self.layers is None else data.draw(st.sampled_from([None, *range(self.layers)]))
        rows = self.rows(len(ids), KEY_HEADS, count, layers=layer is None)
        if self.attempt(lambda: self.cache.write(ids, *self.given(rows, layer is None), layer=layer)):
            for b, id in enumerate(ids):
                for x, y in zip(self.model[id], rows, strict=True):
                    where = x if layer is None else x[layer : layer + 1]
                    where[..., x.shape[-2] - count :, :] = y[:, b] if layer is None else y[b]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), queries=st.integers(1, 3))
    def decode(self, data, queries):
        ids = self.some(data)
        q = self.drawn.standard_normal((len(ids), HEADS, queries, HEAD_DIM)).astype(DTYPES[self.dtype])
        layer = data.draw(st.sampled_from(range(self.layers or 1)))
        pools = [x if self.layers is None else x[layer] for x in (self.cache.k, self.cache.v)]
        results = cuflash.decode(self.engine.xp.asarray(q), *pools, **self.cache.tables(ids), return_lse=True)
        path = f"{'numpy' if self.engine.name == 'numpy' else 'portable'} {self.dtype}"
        for b, id in enumerate(ids):
            exact = bounds.decode(q[b : b + 1], *(x[layer : layer + 1] for x in self.model[id]), path=path)
            assert bounds.worst([x[b : b + 1] for x in results], exact) <= 1

    # Invariants

    @invariant()
    def pages_are_owned_as_counted(self):
        if not hasattr(self, "cache"):
            return
        cache, found = self.cache, [0] * self.pages
        for one in cache._sequences.values():
            assert len(set(one.pages)) == len(one.pages)
            assert one.length <= one.room and len(one.pages) == -(-one.room // cache.page_size)
            for page in one.pages:
                found[page] += 1
        assert found == cache._owners
        assert sorted(cache._free) == [page for page, owners in enumerate(found) if not owners]
        assert cache.free_pages == len(cache._free)

    @invariant()
    def contents_are_the_models(self):
        if not hasattr(self, "cache"):
            return
        assert set(self.cache._sequences) == set(self.model)
        for id, rows in self.model.items():
            assert self.cache._sequences[id].length == rows[0].shape[-2]
            for x, y in zip(self.cache.read(id), rows, strict=True):
                x = reference.host(x)[None] if self.layers is None else reference.host(x)
                assert x.shape == y.shape and x.tobytes() == y.tobytes()

    @invariant()
    def tables_say_where(self):
        if not hasattr(self, "cache"):
            return
        ids = sorted(self.model)
        lengths, table = (reference.host(self.cache.tables(ids)[name]) for name in ("lengths", "page_table"))
        assert lengths.dtype == table.dtype == np.int32 and table.shape[0] == len(ids)
        for b, id in enumerate(ids):
            pages = list(self.cache._sequences[id].pages)
            assert lengths[b] == self.cache._sequences[id].length
            assert table[b].tolist() == pages + [-1] * (table.shape[1] - len(pages))


def test_any_calls(engine):
    machine = type("Machine", (Machine,), {"engine": engine})
    examples = 100 if engine.name == "numpy" else 30
    run_machine(machine, settings=settings(max_examples=examples, stateful_step_count=25, deadline=None))


# Pages --------------------------------------------------------------------------------------------------------------


def filled(engine, lengths, pages=16, page_size=4, **options):
    """A cache of two heads with a sequence of each length, and the names of these."""
    cache = cuflash.PagedCache(pages, 2, page_size, 8, xp=engine.xp, **options)
    return cache, [cache.add(*rows(engine, 2, length, seed=n)) for n, length in enumerate(lengths)]


def rows(engine, *lead, seed=0):
    """Random k and v for it."""
    drawn = np.random.default_rng(seed)
    return [engine.xp.asarray(drawn.standard_normal((*lead, 8)).astype(np.float16)) for _ in range(2)]


def contents(cache, ids):
    return [reference.host(x).tobytes() for id in ids for x in cache.read(id)]


def test_a_fork_costs_a_page_when_it_grows_and_none_before(engine):
    cache, (first,) = filled(engine, [6])
    assert cache.free_pages == 14
    forks = [cache.fork(first) for _ in range(3)]
    assert cache.free_pages == 14
    before = contents(cache, [first])
    cache.append(forks[:1], *rows(engine, 1, 2, 1))
    assert cache.free_pages == 13 and contents(cache, [first]) == before
    cache.append([first, *forks[1:]], *rows(engine, 3, 2, 1))  # the last of the three keeps the page they shared
    assert cache.free_pages == 11
    cache.free([first, *forks])
    assert cache.free_pages == 16


def test_a_fork_at_the_end_of_a_page_copies_nothing(engine):
    cache, (first,) = filled(engine, [8])
    second = cache.fork(first)
    cache.append([first, second], *rows(engine, 2, 2, 1))
    assert cache.free_pages == 12
    table = reference.host(cache.page_table([first, second]))
    assert (table[0, :2] == table[1, :2]).all() and table[0, 2] != table[1, 2]


def test_a_shorter_fork_leaves_the_rest_behind(engine):
    cache, (first,) = filled(engine, [11])
    before = contents(cache, [first])
    second = cache.fork(first, 5)
    k, v = rows(engine, 1, 2, 4)
    cache.append(second, k, v)
    assert contents(cache, [first]) == before
    for old, new, more in zip(cache.read(first), cache.read(second), (k, v), strict=True):
        assert np.array_equal(*(reference.host(x) for x in (new, engine.xp.concatenate([old[:, :5], more[0]], 1))))


def test_without_pages_nothing_changes(engine):
    cache, (first, second) = filled(engine, [8, 7], pages=5)
    third = cache.fork(second)
    state = repr(cache), contents(cache, [first, second, third])
    for call in (
        lambda: cache.append([first, second], *rows(engine, 2, 2, 1)),  # a page and a copy
        lambda: cache.reserve([second, third], [1, 2]),
        lambda: cache.add(*rows(engine, 2, 5)),
    ):
        with pytest.raises(MemoryError, match=r"PagedCache\.\w+: 1 of 5 pages are free; wanted 2"):
            call()
        assert (repr(cache), contents(cache, [first, second, third])) == state
    cache.append([second, third], *rows(engine, 2, 2, 1))  # one copy is enough
    assert cache.free_pages == 0


def test_a_device_without_memory_leaves_every_sequence_as_it_was(engine, monkeypatch):
    cache, (first,) = filled(engine, [3])
    before = contents(cache, [first])

    def full(*arguments):
        raise MemoryError

    monkeypatch.setattr(cache, "_places", full)
    for call in (lambda: cache.add(*rows(engine, 2, 5)), lambda: cache.append([first], *rows(engine, 1, 2, 2))):
        with pytest.raises(MemoryError):
            call()
        assert contents(cache, [first]) == before and repr(cache).count("1 sequences")
    assert cache.free_pages == 14  # the page for the rows of append is kept for them


def test_room_is_used_once(engine):
    cache, (first,) = filled(engine, [3])
    cache.reserve(first, 5)
    assert cache.free_pages == 14
    cache.reserve(first, 5)
    assert cache.free_pages == 14
    cache.advance(first, 2)
    assert reference.host(cache.lengths(first)).tolist() == [5]
    cache.advance([first], [3])
    with pytest.raises(ValueError, match="PagedCache.advance: count is 1, sequence 0 has 0 rows reserved; wanted no"):
        cache.advance(first, 1)
    second = cache.fork(first, 3)
    with pytest.raises(ValueError, match="has 0 rows reserved"):  # room is not inherited
        cache.advance(second, 1)


# Layers and tables --------------------------------------------------------------------------------------------------


def test_layers_write_and_decode_in_turn(engine):
    cache, ids = filled(engine, [], layers=3)
    whole = [rows(engine, 2, 2, 6, seed=layer) for layer in range(3)]  # (sequences, key_heads, rows, dim)
    ids = [cache.add() for _ in range(2)]
    for first, end in ((0, 5), (5, 6)):
        cache.reserve(ids, end - first)
        cache.advance(ids, end - first)
        for layer, both in enumerate(whole):
            cache.write(ids, *(x[:, :, first:end] for x in both), layer=layer)
    q = rows(engine, 2, 4, 1)[0]
    for layer, (k, v) in enumerate(whole):
        for b, id in enumerate(ids):
            for x, y in zip(cache.read(id, layer=layer), (k, v), strict=True):
                assert np.array_equal(reference.host(x), reference.host(y[b]))
        paged = cuflash.decode(q, cache.k[layer], cache.v[layer], **cache.tables(ids))
        assert np.array_equal(*(reference.host(x) for x in (paged, cuflash.decode(q, k, v))))


def test_tables_are_made_again_when_something_changes_and_not_before(engine):
    cache, ids = filled(engine, [3, 9])
    lengths, table = cache.lengths(ids), cache.page_table(ids)
    assert cache.lengths(ids) is lengths and cache.page_table(ids) is table
    cache.append(ids[:1], *rows(engine, 1, 2, 1))  # fits the page
    assert cache.page_table(ids) is table
    assert reference.host(cache.lengths(ids)).tolist() == [4, 9]
    cache.append(ids[:1], *rows(engine, 1, 2, 1))
    assert reference.host(cache.page_table(ids)).tolist() == [[0, 4, -1, -1], [1, 2, 3, -1]]
    assert reference.host(cache.page_table(ids[::-1])).tolist() == [[1, 2, 3, -1], [0, 4, -1, -1]]
    assert cache.page_table([]).shape == (0, 1) and cache.lengths([]).shape == (0,)


def test_tables_that_are_kept_cannot_be_spoilt(engine):
    cache, ids = filled(engine, [3])
    if engine.name != "numpy":
        pytest.skip("CuPy's arrays are never read-only")
    for array in cache.tables(ids).values():
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5


def test_tables_in_place(engine):
    cache, ids = filled(engine, [3, 9])
    out = {"lengths": engine.xp.full(4, 7, np.int32), "page_table": engine.xp.full((4, 5), 7, np.int32)}
    assert cache.tables(ids, out) is out
    assert reference.host(out["lengths"]).tolist() == [3, 9, 0, 0]
    assert reference.host(out["page_table"]).tolist() == [[0, -1, -1, -1, -1], [1, 2, 3, -1, -1], [-1] * 5, [-1] * 5]
    q = rows(engine, 4, 2, 1)[0]
    assert not reference.host(cuflash.decode(q, cache.k, cache.v, **out))[2:].any()
    for name, wrong, error in (
        ("page_table", engine.xp.zeros((4, 2), np.int32), ValueError),
        ("lengths", engine.xp.zeros(1, np.int32), ValueError),
        ("lengths", engine.xp.zeros(4, np.int64), TypeError),
        ("lengths", [0, 0], TypeError),
    ):
        with pytest.raises(error, match=rf"PagedCache.tables: out\['{name}'\]"):
            cache.tables(ids, out | {name: wrong})
    for wrong in ({}, [1, 2], {"lengths": out["lengths"]}):
        with pytest.raises(TypeError, match="PagedCache.tables: out is .* wanted a dict"):
            cache.tables(ids, wrong)
    with pytest.raises(ValueError, match="page_table shares memory with lengths"):
        cache.tables(ids, out | {"lengths": out["page_table"][:, 0]})
    if engine.name == "numpy":
        before = {name: x.copy() for name, x in out.items()}
        out["page_table"].flags.writeable = False
        with pytest.raises(ValueError, match="is read-only"):
            cache.tables(ids, out)
        assert all((out[name] == x).all() for name, x in before.items())


# Arguments ----------------------------------------------------------------------------------------------------------


def test_any_strides(engine):
    cache, _ = filled(engine, [])
    k, v = rows(engine, 5, 2)  # (rows, key_heads, dim)
    id = cache.add(k.swapaxes(0, 1), v.swapaxes(0, 1)[:, ::-1])
    found = [reference.host(x) for x in cache.read(id)]
    assert np.array_equal(found[0], reference.host(k).swapaxes(0, 1))
    assert np.array_equal(found[1], reference.host(v).swapaxes(0, 1)[:, ::-1])


def test_wrong_arguments(engine):
    cache, (first, second) = filled(engine, [3, 4])
    k, v = rows(engine, 1, 2, 1)
    for call, error, words in (
        (lambda: cache.append([first, 7], k, v), KeyError, "PagedCache.append: there is no sequence 7"),
        (lambda: cache.free([second, 9]), KeyError, "PagedCache.free: there is no sequence 9"),
        (lambda: cache.fork(5), KeyError, "PagedCache.fork: there is no sequence 5"),
        (lambda: cache.tables([5]), KeyError, "there is no sequence 5"),
        (lambda: cache.read(5), KeyError, "PagedCache.read: there is no sequence 5"),
        (lambda: cache.free([first, first]), ValueError, "wanted each sequence once"),
        (lambda: cache.free(1.5), TypeError, "PagedCache.free: ids is 1.5"),
        (lambda: cache.lengths(engine.xp.zeros((1, 1), int)), TypeError, "PagedCache.lengths: ids is"),
        (lambda: cache.fork(first, 4), ValueError, "PagedCache.fork: length is 4, sequence 0 has 3"),
        (lambda: cache.fork(first, -1), ValueError, "PagedCache.fork: length is -1"),
        (lambda: cache.reserve(first, -1), ValueError, "PagedCache.reserve: count is -1"),
        (lambda: cache.reserve([first, second], [1]), ValueError, "count has 1 entries, ids has 2"),
        (lambda: cache.reserve([first, second], [1, 0.5]), TypeError, r"count\[1\] is 0.5"),
        (lambda: cache.append(first, k[0], v), ValueError, "PagedCache.append: k has shape"),
        (lambda: cache.append(first, k, v[:, :, :0]), ValueError, "PagedCache.append: v has shape"),
        (lambda: cache.append(first, k, v.astype(np.float32)), TypeError, "PagedCache.append: v has dtype float32"),
        (lambda: cache.append(first, k, None), TypeError, "PagedCache.append: v is a NoneType"),
        (lambda: cache.add(k[0]), TypeError, "PagedCache.add: v is a NoneType"),
        (lambda: cache.add(k, v), ValueError, "PagedCache.add: k has shape"),
        (lambda: cache.write(first, *rows(engine, 1, 2, 4)), ValueError, "k has 4 rows, sequence 0 has 3"),
        (lambda: cache.write(first, k, v, layer=0), ValueError, "layer is 0, the cache has 0 layers"),
    ):
        before = repr(cache), contents(cache, [first, second])
        with pytest.raises(error, match=words):
            call()
        assert (repr(cache), contents(cache, [first, second])) == before
    for sizes, options, error, words in (
        ((0, 1, 1, 1), {}, ValueError, "PagedCache: pages is 0; wanted 1 or more"),
        ((1, 1, 1, 1.0), {}, TypeError, "PagedCache: head_dim is 1.0; wanted an integer"),
        ((1, 1, 1, 1, -1), {}, ValueError, "PagedCache: value_dim is -1; wanted 0 or more"),
        ((1, 1, 1, 1), {"layers": 0}, ValueError, "PagedCache: layers is 0"),
        ((1, 1, 1, 1), {"dtype": np.int32}, TypeError, "PagedCache: dtype is <class 'numpy.int32'>; wanted one of"),
        ((1, 1, 1, 1), {"dtype": "nothing"}, TypeError, "PagedCache: dtype is 'nothing'"),
        ((1, 1, 1, 1), {"xp": "cupy"}, TypeError, "PagedCache: xp is 'cupy'; wanted the module numpy or cupy"),
    ):
        with pytest.raises(error, match=words):
            cuflash.PagedCache(*sizes, **({"xp": engine.xp} | options))


def test_arrays_of_one_library(engine):
    if engine.name == "numpy":
        pytest.skip("needs CuPy's arrays")
    cache, (first,) = filled(engine, [3])
    with pytest.raises(TypeError, match="k is a numpy array, the cache a cupy one"):
        cache.append(first, *(reference.host(x) for x in rows(engine, 1, 2, 1)))


def test_the_stream_of_the_caller_is_used(engine):
    if engine.name == "numpy":
        pytest.skip("needs streams")

    def decoded():
        cache, ids = filled(engine, [3, 9])
        cache.append([cache.fork(ids[0]), *ids], *rows(engine, 3, 2, 2))
        return cuflash.decode(rows(engine, 2, 2, 1)[0], cache.k, cache.v, **cache.tables(ids))

    wanted = decoded()
    with engine.xp.cuda.Stream(non_blocking=True) as stream:
        found = decoded()
    stream.synchronize()
    assert np.array_equal(reference.host(found), reference.host(wanted))


def test_a_captured_graph_follows_the_tables(engine):
    if engine.name == "numpy":
        pytest.skip("needs CUDA graphs")
    stream = engine.xp.cuda.Stream(non_blocking=True)
    engine.xp.cuda.Device().synchronize()
    with stream:
        cache, ids = filled(engine, [3, 9])
        q = rows(engine, 3, 2, 1)[0]
        tables = {"lengths": engine.xp.zeros(3, np.int32), "page_table": engine.xp.zeros((3, 8), np.int32)}
        cuflash.decode(q, cache.k, cache.v, **tables, splits=2)
        stream.begin_capture()
        out = cuflash.decode(q, cache.k, cache.v, **tables, splits=2)
        graph = stream.end_capture()
        for _ in range(3):
            cache.append(ids, *rows(engine, len(ids), 2, 5))
            ids = [ids[1], cache.fork(ids[0], 4), ids[0]]
            cache.tables(ids, tables)
            graph.launch(stream)
            dense = [cache.read(id) for id in ids]
            for b, (k, v) in enumerate(dense):
                alone = cuflash.decode(q[b : b + 1], k[None], v[None])
                np.testing.assert_allclose(reference.host(out[b]), reference.host(alone[0]), atol=4e-3)
            ids = ids[:2]


def test_what_the_docstring_shows_is_true(engine):
    assert doctest.testmod(_cache).attempted and not doctest.testmod(_cache).failed
