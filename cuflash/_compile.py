"""Compile: a variant's text to a kernel. All that is to be known about RawModule, NVRTC and CuPy's quirks is here.

Two doors: ``load`` compiles and loads for a device; ``check`` compiles for any architecture where no driver is.
"""

import ctypes
import struct
import sys
import threading
from functools import cache

# CuPy appends _CUPYS and the device's -arch to these; its disk cache is keyed by options, text and NVRTC's version.
_OPTIONS = ("-std=c++17",)
_CUPYS = ("-ftz=true", "--device-as-default-execution-space")
_HOPPER = ("-arch=sm_90a",)  # beside the -arch=sm_90 that CuPy appends: NVRTC then takes sm_90a

_kernels = {}
_lock = threading.Lock()
_thread = threading.local()  # devices whose context the thread has


class CompileError(RuntimeError):
    """A kernel did not compile. The message holds the variant's name and the compiler's log."""

    def __init__(self, variant, log):
        super().__init__(variant, log)  # the arguments, so that it passes between processes

    def __str__(self):
        variant, log = self.args
        return f"cuflash: {variant.name} did not compile; this is a defect of cuflash. The log:\n{log}"


def load(variant, device):
    """The compiled kernel of a variant on a device, once a device and process.

    Function attributes belong to a loaded module and so to a device: the kernel is made while it is current.
    """
    key = (variant, device)
    kernel = _kernels.get(key)
    if kernel is None:
        import cupy
        from cupy.cuda.compiler import CompileException

        with _lock, cupy.cuda.Device(device):
            if key in _kernels:
                return _kernels[key]
            module = cupy.RawModule(code=variant.text(), options=_OPTIONS + _HOPPER * variant.hopper)
            try:
                kernel = module.get_function(variant.entry)
            except CompileException as error:
                raise CompileError(variant, error.get_message()) from None
            kernel.max_dynamic_shared_size_bytes = variant.shared_bytes
            _kernels[key] = kernel
    return kernel


class Argument:
    """The bytes of a kernel's one argument, where the driver reads them when it is launched."""

    __slots__ = ("packed", "address", "_place")

    def __init__(self, packed):
        self.packed = ctypes.create_string_buffer(packed, len(packed))
        self._place = ctypes.c_void_p(ctypes.addressof(self.packed))
        self.address = ctypes.addressof(self._place)  # of the list of arguments


def launcher(kernel, device, grid, threads, shared_bytes, cooperative, cluster):
    """What launches a kernel: ``launch(stream, argument)``, for the address of a stream and an `Argument`.

    By the driver's function, since a kernel of CuPy's looks at each argument anew and makes cooperative launches, whose
    blocks are on the device at once, of modules with relocatable code alone. That these need not be: nothing here asks
    the device's library for a barrier of the grid. Blocks may be in clusters, of which the grid is a multiple.
    """
    from cupy.cuda import driver, runtime

    start, function = driver.launchCooperativeKernel if cooperative else driver.launchKernel, kernel.kernel.ptr
    rest = () if cooperative else (0,)
    if cluster > 1:
        start, rest = _in_clusters(cluster), ()

    def launch(stream, argument):
        known = _thread.__dict__
        if device not in known:  # a call of the runtime gives a thread its context, and the driver's alone does not
            runtime.memGetInfo()
            known[device] = True
        start(function, grid, 1, 1, threads, 1, 1, shared_bytes, stream, argument.address, *rest)

    return launch


_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


def _in_clusters(cluster):
    """The like of ``driver.launchKernel`` for blocks in clusters: cuLaunchKernelEx, which CuPy does not wrap."""
    from cupy.cuda import driver

    start = driver_function("cuLaunchKernelEx", ctypes.c_char_p, *[ctypes.c_void_p] * 3)
    packed = struct.pack("=I4x3I52x", _CLUSTER_DIMENSION, cluster, 1, 1)
    attribute = ctypes.create_string_buffer(packed)

    def launch(function, *facts):
        *facts, arguments = facts
        config = struct.pack("=7I4xQQI4x", *facts, ctypes.addressof(attribute), 1)
        driver.check_status(start(config, function, arguments, None))

    return launch


@cache
def driver_function(name, *types):
    """A function of the driver that CuPy does not wrap, for arguments of these ctypes; it returns an error code."""
    function = getattr(ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"), name)
    function.argtypes, function.restype = types, ctypes.c_int
    return function


def check(variant, arch):
    """Compile for an architecture such as 80 or 90 and return the compiler's whole log, registers and spills included.

    Raises
    ------
    CompileError
        Where it does not compile.
    """
    from cupy.cuda import nvrtc

    target = _HOPPER if variant.hopper else (f"-arch=sm_{arch}",)
    options = (*_OPTIONS, *_CUPYS, *target, "--ptxas-options=-v")
    if nvrtc.getVersion() >= (13, 0):  # its own cache answers without the log
        options += ("--no-cache",)
    program = nvrtc.createProgram(variant.text(), f"{variant.name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        return nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError:
        raise CompileError(variant, nvrtc.getProgramLog(program)) from None
    finally:
        nvrtc.destroyProgram(program)


def nvrtc_version():
    """Version of the compiler CuPy uses, such as (13, 0)."""
    from cupy.cuda import nvrtc

    return nvrtc.getVersion()
