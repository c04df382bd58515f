"""Kernels compiled from source by NVRTC, which torch's builds for CUDA bring along, and launched by address.

torch has the same in ``torch.cuda._compile_kernel``: private, with arguments of 32 bits, and it imports
``torch.utils.cpp_extension``, which looks for a CUDA toolkit in subprocesses.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from backlight import devices
from backlight.measure.stats.compiled_rows import CompileError

Launch = Callable[[str, int, Sequence[int]], None]
"""Launches a kernel by name in the current stream of its device: blocks, and arguments of 64 bits each."""

THREADS = 256
"""Threads of a block."""

_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


def nvrtc() -> Any:
    """Return the library of NVRTC; OSError where there is none."""
    version = (torch.version.cuda or "").split(".")[0]
    try:
        return ctypes.CDLL(f"libnvrtc.so.{version}")
    except OSError:
        # The loader does not search the wheels of NVIDIA.
        spec = importlib.util.find_spec("nvidia")
        folders = [] if spec is None else spec.submodule_search_locations or []
        pattern = f"*/lib/libnvrtc.so.{version or '[0-9]*'}"
        libraries = sorted(path for folder in folders for path in Path(folder).glob(pattern))
        if not libraries:
            raise
        return ctypes.CDLL(str(libraries[-1]))


def compile_source(source: bytes, architecture: str) -> bytes:
    """Return the binary of a source for an architecture, such as ``sm_90``; CompileError where it fails."""
    library, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()

    def text(call: str) -> bytes:
        check(getattr(library, f"nvrtcGet{call}Size")(program, ctypes.byref(size)))
        content = ctypes.create_string_buffer(size.value)
        check(getattr(library, f"nvrtcGet{call}")(program, content))
        return content.raw

    def check(result: int) -> None:
        if result:
            library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise CompileError(f"NVRTC: {library.nvrtcGetErrorString(result).decode()}")

    check(library.nvrtcCreateProgram(ctypes.byref(program), source, b"rows.cu", 0, None, None))
    try:
        option = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
        if library.nvrtcCompileProgram(program, 1, option):
            log = text("ProgramLog").rstrip(b"\0").decode(errors="replace")[:500]
            raise CompileError(f"NVRTC for {architecture}: {log}")
        return text("CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def load(device: torch.device, source: bytes, names: Sequence[str]) -> Launch:
    """Compile a source for a device and load its kernels there, in a thread of backlight.

    All is done in the primary context of the device, which torch uses and has made.

    Raises
    ------
    CompileError
        If torch is not built for CUDA, or NVRTC fails.
    """
    if torch.version.cuda is None:
        raise CompileError("this build of torch is not for CUDA")
    driver = ctypes.CDLL("libcuda.so.1")

    def check(result: int) -> None:
        if result:
            text = ctypes.c_char_p()
            driver.cuGetErrorString(result, ctypes.byref(text))
            raise RuntimeError(f"CUDA: {(text.value or b'unknown error').decode()}")

    ordinal, context, module = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    check(driver.cuDeviceGet(ctypes.byref(ordinal), device.index))
    capability = [ctypes.c_int(), ctypes.c_int()]
    for number, attribute in zip(capability, _CAPABILITY, strict=True):
        check(driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, ordinal))
    binary = compile_source(source, f"sm_{capability[0].value}{capability[1].value}")
    functions = {name: ctypes.c_void_p() for name in names}

    def in_context(work: Callable[[], None]) -> None:
        check(driver.cuCtxPushCurrent_v2(context))
        try:
            work()
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def load_module() -> None:
        check(driver.cuModuleLoadData(ctypes.byref(module), binary))
        for name, function in functions.items():
            check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))

    with devices.GATE.work([str(device)]):  # a module that is loaded ends a capture
        check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal))
        in_context(load_module)
    shape = [ctypes.c_uint] * 7
    pointers = ctypes.POINTER(ctypes.c_void_p)
    driver.cuLaunchKernel.argtypes = [ctypes.c_void_p, *shape, ctypes.c_void_p, pointers, ctypes.c_void_p]

    def launch(name: str, blocks: int, arguments: Sequence[int]) -> None:
        numbers = (ctypes.c_int64 * len(arguments))(*arguments)
        begin = ctypes.addressof(numbers)
        addresses = (ctypes.c_void_p * len(arguments))(*range(begin, begin + ctypes.sizeof(numbers), 8))
        stream = devices.stream_handle(device)
        in_context(
            lambda: check(
                driver.cuLaunchKernel(
                    functions[name], blocks, 1, 1, THREADS, 1, 1, 0, stream, addresses, None
                )
            )
        )

    return launch
