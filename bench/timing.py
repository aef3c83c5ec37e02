"""One timer for every figure.

Ours and the contenders run in one process on the same tensors by the same loop: rounds that take turns, each of some
launches, the L2 cache swept by a write of 256 MB before each launch, time from CUDA events around it. A round's figure
is the median of its launches, a ratio the median over rounds of theirs / ours, so that a drift of the clock cancels.
On the CPU the same loop runs by wall clock and nothing is swept.
"""

import contextlib
import statistics
import time
import tracemalloc

SWEPT_BYTES = 256 << 20  # several times the L2 of any GPU
HOST_CALLS = 5  # of each case, whose host time is shown beside its figures


class EventTimer:
    """Milliseconds of each of some launches on CuPy's current stream, by CUDA events; cold L2 if asked."""

    def __init__(self, cold=True):
        import cupy

        self.cuda = cupy.cuda
        self.scratch = cupy.cuda.alloc(SWEPT_BYTES) if cold else None

    def _sweep(self, stream):
        if self.scratch is not None:
            self.cuda.runtime.memsetAsync(self.scratch.ptr, 1, SWEPT_BYTES, stream.ptr)

    def __call__(self, call, launches):
        stream = self.cuda.get_current_stream()
        marks = [(self.cuda.Event(), self.cuda.Event()) for _ in range(launches)]
        for _ in range(4):  # a head start for the host, so that no launch waits for Python
            self._sweep(stream)
        for begin, end in marks:
            self._sweep(stream)
            begin.record(stream)
            call()
            end.record(stream)
        stream.synchronize()
        return [self.cuda.get_elapsed_time(begin, end) for begin, end in marks]


class WallTimer:
    """Milliseconds of each of some calls by a clock in seconds."""

    def __init__(self, clock=time.perf_counter):
        self.clock = clock

    def __call__(self, call, launches):
        taken = []
        for _ in range(launches):
            begin = self.clock()
            call()
            taken.append((self.clock() - begin) * 1e3)
        return taken


def interleave(timer, calls, *, rounds=5, launches=20, warmup=3, scopes=None):
    """Median milliseconds of each round: ``{name: [one a round]}``.

    Parameters
    ----------
    timer : callable
        ``timer(call, launches)`` gives the milliseconds of each launch.
    calls : dict
        Name to a callable without arguments. Each round runs all of them. Who is first changes from round to round,
        and every other round goes backwards, so that nobody always runs behind the same one: a kernel behind a hungry
        one reads up to 3 % slower.
    scopes : dict, optional
        Name to a function that gives a context manager, entered around each of that name's runs.
    """
    scopes = scopes or {}
    names = list(calls)
    medians = {name: [] for name in names}
    for name in names:
        with scopes.get(name, contextlib.nullcontext)():
            for _ in range(warmup):
                calls[name]()
    for turn in range(rounds):
        first = turn // 2 % len(names)
        order = names[first:] + names[:first]
        for name in reversed(order) if turn % 2 else order:
            with scopes.get(name, contextlib.nullcontext)():
                medians[name].append(statistics.median(timer(calls[name], launches)))
    return medians


def by_wall_clock(call, child, *, rounds=5, calls=20, synchronize=lambda: None, clock=time.perf_counter):
    """Milliseconds of each round of ours and of a contender in a process of its own, back to back, by the clock."""
    ours, theirs = [], []
    for _ in range(3):
        call()
    for _ in range(rounds):
        synchronize()
        begin = clock()
        for _ in range(calls):
            call()
        synchronize()
        ours.append((clock() - begin) / calls * 1e3)
        theirs.append(child(calls))
    return ours, theirs


def ratio(ours, theirs):
    """Median over rounds of theirs / ours: above 1 where ours is faster."""
    return statistics.median(their / our for our, their in zip(ours, theirs, strict=True))


def figures(rounds, names, rival, walls=None):
    """What a row of the record says of rounds: ours, each contender's, the ratios, and whom ours is judged against.

    Parameters
    ----------
    rounds : dict
        Milliseconds of each round, by name; "ours" among them.
    names : iterable of str
        Contenders. Those without rounds get None.
    rival : str or None
        One of them, or "best".
    walls : dict, optional
        Our rounds beside a contender in a process of its own, by its name.
    """
    theirs = {name: rounds.get(name) for name in names}
    if rival == "best":
        rival = min(filter(theirs.get, theirs), key=lambda name: statistics.median(theirs[name]), default=None)
    return {
        "ms": statistics.median(rounds["ours"]),
        "spread": spread(rounds["ours"]),
        "contenders": {name: each and statistics.median(each) for name, each in theirs.items()},
        "rival": rival,
        "ratios": {
            name: each and ratio((walls or {}).get(name, rounds["ours"]), each) for name, each in theirs.items()
        },
        "rounds": rounds,
    }


def spread(rounds):
    """How far the rounds lie apart, as a share of their median."""
    return (max(rounds) - min(rounds)) / statistics.median(rounds)


def host_us(call, *, count=10_000, chunks=10, synchronize=lambda: None, clock=time.perf_counter):
    """Microseconds of host time a call, back to back: the median over chunks of their mean."""
    for _ in range(min(count, 200)):
        call()
    means = []
    for _ in range(chunks):
        synchronize()
        begin = clock()
        for _ in range(count // chunks):
            call()
        means.append((clock() - begin) / (count // chunks) * 1e6)
    synchronize()
    return statistics.median(means)


def case_host_us(call, synchronize):
    """The same of a call that may take long on the GPU, and is warm: of a few, each behind nothing else."""
    return host_us(call, count=HOST_CALLS, chunks=HOST_CALLS, synchronize=synchronize)


def host_text(row):
    """A row's host time as a part of its line: empty where the host is what computes."""
    us = (row["host_us"] or {}).get("ours")
    return f"  host {us:5.1f} us" if us else ""


def extra_bytes(call, library):
    """Peak bytes a call holds beyond its inputs and its results, in CuPy's pool or NumPy's arrays; and the results."""
    peak, results = (_pool_peak if library == "cupy" else _array_peak)(call)
    unit = 512 if library == "cupy" else 1  # the pool rounds each block up
    given = sum(-(-array.nbytes // unit) * unit for array in (results if isinstance(results, tuple) else (results,)))
    return max(0, peak - given), results


def _pool_peak(call):
    from cupy.cuda import MemoryHook

    class Peak(MemoryHook):
        name = "cuflash peak"
        held = peak = 0

        def malloc_postprocess(self, **facts):
            self.held += facts["mem_size"]
            self.peak = max(self.peak, self.held)

        def free_postprocess(self, **facts):
            self.held -= facts["mem_size"]

    hook = Peak()
    with hook:
        results = call()
    return hook.peak, results


def _array_peak(call):
    tracemalloc.start()
    try:
        results = call()
        return tracemalloc.get_traced_memory()[1], results
    finally:
        tracemalloc.stop()
