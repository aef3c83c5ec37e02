"""``PagedCache``: keys and values of many sequences in pages of one pool, and who owns which page.

Lengths, lists of pages and counts of their owners live on the host, as lists; keys and values live in two arrays that
only array operations touch. What a device must know of a step, lengths and page table, is sent to it once.
"""

import itertools
import math
from array import array
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np

from . import _problem

MOST_KEPT = 64  # arrays of a kind for as many lists of sequences, such as the prompts of a step, each written by itself


@dataclass
class _Sequence:
    """What one sequence owns."""

    length: int = 0
    room: int = 0  # rows before this one may be written: when room was made, their pages were this sequence's alone
    pages: array = field(default_factory=lambda: array("i"))  # page n has the rows from n * page_size


class PagedCache:
    """Keys and values of sequences that grow, in pages of one pool, for `decode` and `forward`.

    A sequence owns pages, not a stretch of memory: it grows by a page at a time, and leaves its pages to others when
    it is freed [1]_. Sequences with a common beginning share its pages. To its user each sequence is a value of its
    own: what is written to one is never seen in another.

    Parameters
    ----------
    pages : int
        Pages in the pool.
    key_heads, page_size, head_dim : int
        Heads of keys and values, keys of a page, columns of keys.
    value_dim : int, optional
        Columns of values. Default ``head_dim``.
    layers : int, optional
        A stack of layers has a cache each, whose tables are the same: with ``layers`` the pools have an axis of layers
        in front, and layer n decodes with ``cache.k[n]`` and ``cache.v[n]``.
    dtype : dtype, default float16
        float16, bfloat16 (``ml_dtypes``), float32 or float64.
    xp : module, default numpy
        ``numpy`` or ``cupy``. CuPy's pools lie on the device that is current here.

    Attributes
    ----------
    k : array, shape (pages, key_heads, page_size, head_dim)
        All keys; with ``layers``, of shape (layers, pages, key_heads, page_size, head_dim).
    v : array, shape (pages, key_heads, page_size, value_dim)
        All values, likewise.
    page_size : int
        Keys of a page.
    free_pages : int
        Pages that no sequence owns.

    Notes
    -----
    A sequence is named by the integer that `add` or `fork` returned; functions of several take a list of these, or one.
    An unknown name is a KeyError, a lack of pages a MemoryError, and both leave everything as it was.

    On a GPU no function waits for it. All work goes to the current stream of the cache's device, in the order of the
    calls; who uses several streams lets them wait for each other, as for any array. What `lengths`, `page_table` and
    `tables` return is kept until something changes, and must not be written. One thread at a time.

    References
    ----------
    .. [1] W. Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> cache = cuflash.PagedCache(8, key_heads=1, page_size=2, head_dim=4, dtype=np.float32)
    >>> k = v = np.ones((1, 3, 4), np.float32)                          # a prompt of three tokens
    >>> first = cache.add(k, v)
    >>> second = cache.fork(first)                                      # shares both pages
    >>> cache.append([first, second], 2 * k[None, :, :1].repeat(2, 0), 2 * v[None, :, :1].repeat(2, 0))
    >>> cache.free_pages                                                # a page of two rows was copied, none added
    5
    >>> q = np.zeros((2, 1, 1, 4), np.float32)
    >>> cuflash.decode(q, cache.k, cache.v, **cache.tables([first, second]))[:, 0, 0]
    array([[1.25, 1.25, 1.25, 1.25],
           [1.25, 1.25, 1.25, 1.25]], dtype=float32)

    A prompt with a beginning that is in the cache already needs no more than its own rows.

    >>> third = cache.fork(first, 3)
    >>> cache.append(third, 3 * k[None, :, :2], 3 * v[None, :, :2])
    >>> q = np.zeros((1, 1, 2, 4), np.float32)
    >>> cuflash.forward(q, cache.k, cache.v, **cache.tables(third), causal=True)[0, 0]
    array([[1.5, 1.5, 1.5, 1.5],
           [1.8, 1.8, 1.8, 1.8]], dtype=float32)
    """

    def __init__(
        self, pages, key_heads, page_size, head_dim, value_dim=None, *, layers=None, dtype=np.float16, xp=np
    ):  # fmt: skip
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {"pages": pages, "key_heads": key_heads, "page_size": page_size}
        dtype = _problem.pool({**sizes, "head_dim": head_dim, "value_dim": value_dim}, layers, dtype, xp)
        lead = () if layers is None else (layers,)
        self.k, self.v = (xp.zeros((*lead, *sizes.values(), dim), dtype) for dim in (head_dim, value_dim))
        self.page_size = page_size
        self._pools = self.k, self.v
        self._xp, self._key_heads, self._lead = xp, key_heads, lead
        self._free = list(range(pages))[::-1]  # a stack, page 0 on top
        self._owners = [0] * pages
        self._sequences = {}
        self._names = itertools.count()
        self._kept = {"lengths": {}, "page_table": {}, "places": {}}  # of what: the array that was made

    def __repr__(self):
        used = len(self._owners) - len(self._free)
        return (
            f"<PagedCache of {self._xp.__name__} {self.k.dtype.name}: {len(self._sequences)} sequences, "
            f"{used} of {len(self._owners)} pages of {self.page_size} keys>"
        )

    @property
    def free_pages(self):
        """Pages that no sequence owns."""
        return len(self._free)

    # Sequences ----------------------------------------------------------------------------------------------------

    def add(self, k=None, v=None):
        """Begin a sequence, empty or with its first rows.

        Parameters
        ----------
        k : array, shape (key_heads, rows, head_dim), optional
            Its keys, any strides; with ``layers``, of shape (layers, key_heads, rows, head_dim).
        v : array, shape (key_heads, rows, value_dim), optional
            Its values, likewise.

        Returns
        -------
        int
            The sequence's name, which no other sequence has had.
        """
        new, count = _Sequence(), 0
        if k is not None or v is not None:
            k, v, count = _problem.cache_rows("PagedCache.add", self._pools, k, v, self._lead, self._key_heads)
            self._make_room("PagedCache.add", [new], [0], [count])
        new.length = count
        id = self._register(new)
        if count:
            try:
                self._scatter((id,), *(x[..., None, :, :, :] for x in (k, v)), None)
            except MemoryError:  # the device's, for indices or a contiguous copy
                self.free(id)
                raise
        return id

    def fork(self, id, length=None):
        """Begin a sequence with the first rows of another, at the cost of no page.

        The two share pages. A page of which only a part is filled is copied when either of them gets rows in it.

        Parameters
        ----------
        id : int
        length : int, optional
            So many rows. Default: all.

        Returns
        -------
        int
            The new sequence's name.
        """
        old = self._sequences[self._known("PagedCache.fork", [id])[0]]
        length = old.length if length is None else _problem.whole("PagedCache.fork", "length", length, 0)
        if length > old.length:
            raise ValueError(f"PagedCache.fork: length is {length}, sequence {id} has {old.length}; wanted no more")
        pages = old.pages[: self._pages(length)]
        for page in pages:
            self._owners[page] += 1
        self._changed()
        return self._register(_Sequence(length, length, pages))

    def free(self, ids):
        """End some sequences. Pages that nobody else shares are free again."""
        ids = self._distinct("PagedCache.free", ids)
        for id in ids:
            for page in self._sequences.pop(id).pages:
                self._disown(page)

    # Rows ---------------------------------------------------------------------------------------------------------

    def append(self, ids, k, v):
        """Append rows to some sequences, as many to each.

        Parameters
        ----------
        ids : list of int
            Each at most once.
        k : array, shape (sequences, key_heads, rows, head_dim)
            Keys, any strides; with ``layers``, of shape (layers, sequences, key_heads, rows, head_dim).
        v : array, shape (sequences, key_heads, rows, value_dim)
            Values, likewise.
        """
        function = "PagedCache.append"
        ids = self._distinct(function, ids)
        k, v, count = _problem.cache_rows(function, self._pools, k, v, (*self._lead, len(ids)), self._key_heads)
        self._extend(function, ids, [count] * len(ids))
        self._advance(ids, [count] * len(ids))
        try:
            self._scatter(ids, k, v, None)
        except MemoryError:  # the device's: the rows stay reserved
            self._advance(ids, [-count] * len(ids))
            raise

    def reserve(self, ids, count):
        """Make room for rows that are written by others: page tables then name their pages, lengths stay.

        Parameters
        ----------
        ids : list of int
            Each at most once.
        count : int or list of int
            So many rows beyond the length of each. Room that is there already is used.
        """
        ids = self._distinct("PagedCache.reserve", ids)
        self._extend("PagedCache.reserve", ids, _problem.cache_counts("PagedCache.reserve", count, ids))

    def advance(self, ids, count):
        """Let some sequences grow by rows for which `reserve` has made room.

        Parameters
        ----------
        ids : list of int
            Each at most once.
        count : int or list of int
            By so many rows each, which have been written through the page table, or follow by `write`.
        """
        function = "PagedCache.advance"
        ids = self._distinct(function, ids)
        counts = _problem.cache_counts(function, count, ids)
        for id, more in zip(ids, counts, strict=True):
            room = self._sequences[id].room - self._sequences[id].length
            if more > room:
                raise ValueError(f"{function}: count is {more}, sequence {id} has {room} rows reserved; wanted no more")
        self._advance(ids, counts)

    def write(self, ids, k, v, *, layer=None):
        """Overwrite the newest rows of some sequences.

        A stack of layers knows the rows of a layer only when the layer before has run. It makes room once, by `reserve`
        and `advance`; then each layer writes its rows and decodes.

        Parameters
        ----------
        ids : list of int
            Each at most once.
        k : array, shape (sequences, key_heads, rows, head_dim)
            Keys, any strides; those of all layers have an axis of layers in front.
        v : array, shape (sequences, key_heads, rows, value_dim)
            Values, likewise.
        layer : int, optional
            The layer whose rows these are. Default: all layers.
        """
        function = "PagedCache.write"
        ids = self._distinct(function, ids)
        lead = self._layer(function, layer)
        k, v, count = _problem.cache_rows(function, self._pools, k, v, (*lead, len(ids)), self._key_heads)
        if (ids, count) not in self._kept["places"]:
            sequences = [self._sequences[id] for id in ids]
            ends = [sequence.length for sequence in sequences]
            for id, end in zip(ids, ends, strict=True):
                if count > end:
                    raise ValueError(f"{function}: k has {count} rows, sequence {id} has {end}; wanted no more")
            self._make_room(function, sequences, [end - count for end in ends], ends)
        self._scatter(ids, k, v, layer)

    def read(self, id, *, layer=None):
        """Keys and values of a sequence in one piece, copied.

        Parameters
        ----------
        id : int
        layer : int, optional
            Of this layer. Default: of all, with an axis of layers in front where the cache has one.

        Returns
        -------
        k : array, shape (key_heads, length, head_dim)
        v : array, shape (key_heads, length, value_dim)
        """
        sequence = self._sequences[self._known("PagedCache.read", [id])[0]]
        self._layer("PagedCache.read", layer)
        pages = np.asarray(sequence.pages[: self._pages(sequence.length)])
        with self._device():
            pages = self._xp.asarray(pages)
            found = [(x if layer is None else x[layer]).take(pages, axis=-4).swapaxes(-4, -3) for x in self._pools]
            return tuple(
                x.reshape(*x.shape[:-3], len(pages) * self.page_size, x.shape[-1])[..., : sequence.length, :]
                for x in found
            )

    # Tables -------------------------------------------------------------------------------------------------------

    def lengths(self, ids):
        """Rows of some sequences: int32, shape (sequences,), on the cache's device."""
        ids = self._known("PagedCache.lengths", ids)
        return self._keep("lengths", ids, lambda: self._lengths(ids, len(ids)))

    def page_table(self, ids):
        """Pages of some sequences: int32, shape (sequences, pages of the longest or more), on the cache's device.

        Pages for rows that are only reserved are in it. Entries that mean nothing are -1; there are enough of them
        that the width is a power of two or the size of the pool, so that a step of `decode` seldom has another shape
        than the one before.
        """
        ids = self._known("PagedCache.page_table", ids)

        width = min(1 << max(self._most_pages(ids) - 1, 0).bit_length(), len(self._owners))
        return self._keep("page_table", ids, lambda: self._page_table(ids, len(ids), width))

    def tables(self, ids, out=None):
        """The keywords of `decode` and `forward` that say where the keys of some sequences lie.

        Parameters
        ----------
        ids : list of int
        out : dict, optional
            Int32 arrays ``lengths`` and ``page_table`` to write to instead, such as those that a captured graph reads.
            What they have more of sequences is given length 0, what they have more of pages -1.

        Returns
        -------
        dict
            Arrays ``lengths`` and ``page_table``, as `lengths` and `page_table` return them, or ``out``.
        """
        if out is None:
            return {"lengths": self.lengths(ids), "page_table": self.page_table(ids)}
        if not isinstance(out, dict) or set(out) != {"lengths", "page_table"}:
            raise TypeError(f"PagedCache.tables: out is {out!r}; wanted a dict of lengths and page_table")
        ids = self._known("PagedCache.tables", ids)
        least = {"lengths": (len(ids),), "page_table": (len(ids), self._most_pages(ids))}
        for name, shape in least.items():
            _problem.cache_table("PagedCache.tables", name, out[name], self.k, shape)
        _problem.check_overlaps("PagedCache.tables", out, {})
        with self._device():
            out["lengths"][...] = self._xp.asarray(self._lengths(ids, len(out["lengths"])))
            out["page_table"][...] = self._xp.asarray(self._page_table(ids, *out["page_table"].shape))
        return out

    # Pages --------------------------------------------------------------------------------------------------------

    def _pages(self, length):
        """Pages that so many rows lie in."""
        return -(-length // self.page_size)

    def _make_room(self, function, sequences, firsts, ends):
        """Let each sequence own its rows from first to end alone: what it lacks is taken from the pool, what it shares
        is copied."""
        owners, shared = {}, []
        for sequence, first, end in zip(sequences, firsts, ends, strict=True):
            for n in range(first // self.page_size, min(self._pages(end), len(sequence.pages)) if end > first else 0):
                page = sequence.pages[n]
                left = owners.setdefault(page, self._owners[page])
                if left > 1:  # the last of its owners keeps it
                    shared.append((sequence, n))
                    owners[page] = left - 1
        missing = [
            max(self._pages(end) - len(sequence.pages), 0) for sequence, end in zip(sequences, ends, strict=True)
        ]
        wanted = len(shared) + sum(missing)
        if wanted > len(self._free):
            raise MemoryError(f"{function}: {len(self._free)} of {len(self._owners)} pages are free; wanted {wanted}")
        if shared:  # before anything is changed, since a device may run out of memory here
            with self._device():
                old = self._xp.asarray([sequence.pages[n] for sequence, n in shared])
                new = self._xp.asarray(self._free[: -len(shared) - 1 : -1])
                for pool in self._pools:
                    pool[..., new, :, :, :] = pool[..., old, :, :, :]
        if wanted:
            self._changed("page_table")
        for (sequence, n), page in zip(shared, self._take(len(shared)), strict=True):
            self._disown(sequence.pages[n])
            sequence.pages[n] = page
        for sequence, count in zip(sequences, missing, strict=True):
            sequence.pages.extend(self._take(count))
        for sequence, end in zip(sequences, ends, strict=True):
            sequence.room = max(sequence.room, end)

    def _take(self, count):
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def _disown(self, page):
        self._owners[page] -= 1
        if not self._owners[page]:
            self._free.append(page)

    # What the functions share ---------------------------------------------------------------------------------------

    def _known(self, function, ids):
        ids = _problem.cache_ids(function, ids)
        for id in ids:
            if id not in self._sequences:
                raise KeyError(f"{function}: there is no sequence {id}; wanted one that add or fork returned")
        return ids

    def _distinct(self, function, ids):
        ids = self._known(function, ids)
        if len(set(ids)) < len(ids):
            raise ValueError(f"{function}: ids is {list(ids)}; wanted each sequence once")
        return ids

    def _layer(self, function, layer):
        """The axes in front of a sequence's rows, after a look at the number of a layer."""
        if layer is None:
            return self._lead
        layers = self._lead[0] if self._lead else 0
        if _problem.whole(function, "layer", layer, 0) >= layers:
            raise ValueError(f"{function}: layer is {layer}, the cache has {layers} layers; wanted one of them")
        return ()

    def _register(self, sequence):
        id = next(self._names)
        self._sequences[id] = sequence
        return id

    def _extend(self, function, ids, counts):
        sequences = [self._sequences[id] for id in ids]
        firsts = [sequence.length for sequence in sequences]
        self._make_room(function, sequences, firsts, [first + n for first, n in zip(firsts, counts, strict=True)])

    def _advance(self, ids, counts):
        for id, count in zip(ids, counts, strict=True):
            self._sequences[id].length += count
        self._changed("lengths")

    def _scatter(self, ids, k, v, layer):
        """Write the newest rows of some sequences, all in one go."""
        count = k.shape[-2]
        places = self._keep("places", (ids, count), lambda: self._places(ids, count))
        with self._device():
            for pool, rows in zip(self._pools, (k, v), strict=True):
                pool = pool if layer is None else pool[layer]
                lead = pool.shape[:-4]
                pool.reshape(*lead, math.prod(pool.shape[-4:-1]), pool.shape[-1])[..., places, :] = rows

    def _places(self, ids, count):
        """Where the newest rows of each head lie when the pool is a list of rows: (sequences, key_heads, rows)."""
        found = [self._sequences[id] for id in ids]
        rows = np.array([one.length - count for one in found], np.intp)[:, None] + np.arange(count)
        n, slots = np.divmod(rows, self.page_size)
        pages = np.zeros_like(n)
        for b, one in enumerate(found):
            pages[b] = np.asarray(one.pages)[n[b]]
        heads = np.arange(self._key_heads)[:, None]
        return (pages[:, None] * self._key_heads + heads) * self.page_size + slots[:, None]

    def _most_pages(self, ids):
        return max((len(self._sequences[id].pages) for id in ids), default=0)

    def _lengths(self, ids, sequences):
        lengths = np.zeros(sequences, np.int32)
        lengths[: len(ids)] = [self._sequences[id].length for id in ids]
        return lengths

    def _page_table(self, ids, sequences, width):
        table = np.full((sequences, width), -1, np.int32)
        for row, id in zip(table, ids, strict=False):
            pages = self._sequences[id].pages
            row[: len(pages)] = pages
        return table

    def _keep(self, name, of, make):
        """What ``make`` made of this the last time, if nothing it says has changed since, on the cache's device."""
        kept = self._kept[name]
        if of not in kept:
            if len(kept) == MOST_KEPT:
                kept.clear()
            made = make()
            if self._xp is np:
                made.flags.writeable = False
            else:
                with self._device():
                    made = self._xp.asarray(made)
            kept[of] = made
        return kept[of]

    def _changed(self, *names):
        """Forget what no longer holds; places always, which are kept while their pages have one owner."""
        for name in (*names, "places"):
            self._kept[name].clear()

    def _device(self):
        return nullcontext() if self._xp is np else self._xp.cuda.Device(self.k.data.device_id)
