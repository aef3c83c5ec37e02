"""What the tests share: one Hypothesis profile, and fixtures that run a test on every engine that is here."""

import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context

# Before NumPy comes: matrices are small here, and threads that wait for one another keep other processes waiting.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import pytest
from hypothesis import settings

import cuflash
from cuflash import _compile, _launch, _plan, testing

# A first example may contain a compilation, so no deadline. Where CI is set, every run draws the same examples.
settings.register_profile("cuflash", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("cuflash")

NO_GPU = "needs an NVIDIA GPU of sm_80 or newer and CuPy; none is here"
NO_HOPPER = "needs a GPU of sm_90 and NVRTC 12.9 or newer; the one here: "
NO_COMPILER = "needs a C++ compiler to emulate the kernels: g++ or clang++, or CXX naming one; none is here"


class Engine(str):
    """An engine's name, which every function takes as ``engine``, and the library whose arrays it runs on."""

    def __new__(cls, name, xp):
        engine = super().__new__(cls, name)
        engine.xp = xp
        return engine

    @property
    def name(self):
        """The name, as a plain str."""
        return str(self)


@pytest.fixture(scope="session")
def gpu():
    """CuPy, where a GPU that runs our kernels is; else the test is skipped."""
    try:
        import cupy

        if max(int(cupy.cuda.Device(n).compute_capability) for n in range(cupy.cuda.runtime.getDeviceCount())) >= 80:
            return cupy
    except Exception:  # no CuPy, no driver or no device: CuPy has an error class for each
        pass
    pytest.skip(NO_GPU)


@pytest.fixture(scope="session")
def nvrtc():
    """Version of the compiler, which needs no GPU."""
    try:
        return _compile.nvrtc_version()
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"needs CuPy with NVRTC: pip install -e '.[cuda13]' ({error})")


@pytest.fixture(scope="session")
def emulator():
    """The module that emulates the kernels, where a C++ compiler is; else the test is skipped."""
    import emulator

    if os.environ.get("CUFLASH_REQUIRE_GPU") == "1":
        pytest.skip("the kernels run on the GPU here")
    if emulator.compiler() is None:
        pytest.skip(NO_COMPILER)
    return emulator


@pytest.fixture(scope="session", autouse=True)
def ahead(request):
    """By module, what its function ``begin`` returns: futures of work that processes of their own begin with at once.

    Such a module's tests come last and ask for them: until then the processes, one a processor, work beside this one's
    tests. They are spawned: a fork would share what threads have locked.
    """
    modules = {}
    for item in request.session.items:
        if hasattr(item.module, "begin") and hasattr(item, "callspec"):
            modules.setdefault(item.module, []).append(item.callspec.params)
    processes = ProcessPoolExecutor(min(os.cpu_count(), 16), get_context("spawn"))
    begun = {}
    for module, params in modules.items():
        with suppress(pytest.skip.Exception):  # which its tests will meet, too
            begun[module] = module.begin(request, processes, params)
    yield begun
    processes.shutdown(cancel_futures=True)


@pytest.fixture(scope="module", params=["numpy", "portable", "sm90"])
def engine(request):
    """Each engine: its name, with ``name`` and ``xp`` as attributes.

    On a GPU the functions of cuflash then run the portable engine, or, for "sm90", what the plan chooses on Hopper: the
    sm90 engine for what it takes, not all that a test asks for. A module may also ask for "emulated portable" and
    "emulated sm90": the kernels of either, run on NumPy arrays.
    """
    name = request.param.removeprefix("emulated ")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            yield Engine("numpy", np)
        elif name != request.param:
            emulator = request.getfixturevalue("emulator")

            def emulated(function):
                return lambda *arrays, **given: getattr(emulator.Emulator(engine=name), function)(*arrays, **given)

            for function in ("forward", "backward", "decode"):
                patch.setattr(cuflash, function, emulated(function))
            patch.setattr(testing, "_path", lambda path, array: path or f"portable {array.dtype.name}")
            yield Engine("emulated", np)
        else:
            gpu = request.getfixturevalue("gpu")
            if name == "sm90" and (obstacle := _plan.not_hopper(_launch.limits(0))):
                pytest.skip(NO_HOPPER + obstacle)

            def chosen(function):
                def call(q, *arrays, engine=None, **given):
                    if not isinstance(q, np.ndarray) and engine in (None, name):
                        engine = "portable" if name == "portable" else None
                    return function(q, *arrays, engine=engine, **given)

                return call

            for function in ("forward", "backward", "decode"):
                patch.setattr(cuflash, function, chosen(getattr(cuflash, function)))
            yield Engine(name, gpu)


@pytest.fixture(scope="module")
def xp(engine):
    """The library, numpy or cupy, whose arrays the engine runs on."""
    return engine.xp


def pytest_collection_modifyitems(config, items):
    """With CUFLASH_SHARE=i/n every n-th test from the i-th on, so that a file can run in several processes.

    Last come those whose work begins `ahead`.
    """
    share, shares = map(int, os.environ.get("CUFLASH_SHARE", "0/1").split("/"))
    chosen = items[share::shares]
    config.hook.pytest_deselected(items=[item for n, item in enumerate(items) if n % shares != share])
    items[:] = sorted(chosen, key=lambda item: hasattr(item.module, "begin"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Skips for want of a GPU or a compiler are a line each; those of a GPU fail with CUFLASH_REQUIRE_GPU=1."""
    report = yield
    wanted = next((what for what in (NO_GPU, NO_COMPILER) if report.skipped and what in str(report.longrepr)), None)
    if wanted:
        report.longrepr = (__file__, None, f"Skipped: {wanted}")
        if wanted == NO_GPU and os.environ.get("CUFLASH_REQUIRE_GPU") == "1":
            report.outcome, report.longrepr = "failed", f"CUFLASH_REQUIRE_GPU=1, but the test {NO_GPU}"
    return report
