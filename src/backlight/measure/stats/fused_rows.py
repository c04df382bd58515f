"""The fused pass over tensors on a device: ``rows.cu``, compiled in a thread and launched by address.

Statistics of all tensors of a type, the sample of all weights and its comparison are one launch each, where
the eager kernels need hundreds. Those serve until the fused ones are compiled, and wherever they cannot be;
the numbers agree within rounding. To compile takes neither time of the training thread nor of the device, so
that it is requested at once.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backlight import devices
from backlight.measure.stats.compiled_rows import DTYPES, ROW, CompiledPass, CompileError
from backlight.measure.transfer import UPLOADS

# Kernels compiled from source by NVRTC, which torch's builds for CUDA bring along, and launched by address.
#
# torch has the same in ``torch.cuda._compile_kernel``: private, with arguments of 32 bits, and it imports
# ``torch.utils.cpp_extension``, which looks for a CUDA toolkit in subprocesses.

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


EXIT_TIMEOUT_S = 10.0
"""Seconds that the exit of the process waits for a compiler at work, whose library must not end before it."""

KERNELS = ("measure_rows", "digest_rows", "keep_rows", "compare_rows")
"""Names of the kernels of ``rows.cu``."""

LOADERS: dict[str, Callable[[torch.device, bytes, Sequence[str]], Launch]] = {"cuda": load}
"""What compiles and loads kernels, by type of device."""

_SOURCE = Path(__file__).with_name("rows.cu")
_NUMBERS = 6

Entry = tuple[int, int, int, int, int]
"""Address, type, step, scalars and first row of a tensor, as in ``rows.cu``."""


def entry(tensor: Tensor | None, step: int, count: int, row: int) -> Entry:
    """Return the entry of a contiguous tensor; of None, one that is left out."""
    if tensor is None:
        return 0, 0, step, count, row
    return tensor.data_ptr(), DTYPES.index(tensor.dtype), step, count, row


def _in_rows(values: Sequence[Tensor]) -> tuple[list[Entry], list[int]]:
    """Return the entries of whole tensors, and how many rows each has."""
    rows = [-(-tensor.numel() // ROW) for tensor in values]
    first = np.cumsum([0, *rows]).tolist()
    return [entry(t, 1, t.numel(), row) for t, row in zip(values, first, strict=False)], rows


class AddressTable:
    """Entries on a device, which are sent again only where one has changed."""

    def __init__(self) -> None:
        self._content: tuple[bytes, int] | None = None
        self._table: Tensor | None = None
        self._sent: deque[tuple[torch.Event, Tensor]] = deque()  # pinned memory that a copy may still read

    def on(self, device: torch.device, entries: NDArray[np.int64]) -> Tensor:
        """Return the entries on the device, in its current stream."""
        # A table that another stream has been sent may not be there yet.
        content = (entries.tobytes(), devices.current_stream(device).stream_id)
        if self._table is None or content != self._content:
            while self._sent and devices.GATE.is_done(self._sent[0][0]):
                self._sent.popleft()
            host = UPLOADS.take(entries.shape, torch.int64)
            host.numpy()[:] = entries
            self._table = host.to(device, non_blocking=True)
            self._sent.append((devices.record_event(device), host))
            self._content = content
        return self._table


class FusedRows(CompiledPass):
    """The fused pass of a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._lock = threading.Lock()
        self._tables: dict[torch.dtype, AddressTable] = {}
        atexit.register(self._wait_at_exit)

    def spend(self, seconds: float) -> None:
        """Request the pass: to compile it takes no time of the training thread and none of the device."""
        self.request()

    def measure(self, values: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
        """Measure contiguous tensors of one of :data:`DTYPES`, none of them empty.

        Returns float64 ``[N, 6]``, column after column in memory, in the order of ``statistics.COLUMNS``, for
        each row of at most :data:`ROW` scalars; and how many of the rows belong to each tensor.
        """
        entries, rows = _in_rows(values)
        out = torch.empty((_NUMBERS, sum(rows)), dtype=torch.float64, device=self._device)
        table = self._tables.setdefault(values[0].dtype, AddressTable())
        self._launch("measure_rows", table, entries, (out.data_ptr(), sum(rows)), sum(rows))
        return out.t(), rows

    def digest(self, table: AddressTable, values: Sequence[Tensor]) -> tuple[Tensor, Tensor, list[int]]:
        """Return the sums of the words and of the squared scalars of each row of tensors, as for ``measure``.

        They are int64 ``[N]`` and float64 ``[N]``: words are signed integers of the size of a scalar, which
        wrap around at 32 bits. The third result is how many rows each tensor has.
        """
        entries, rows = _in_rows(values)
        digests = torch.empty(sum(rows), dtype=torch.int64, device=self._device)
        squares = torch.empty(sum(rows), dtype=torch.float64, device=self._device)
        self._launch("digest_rows", table, entries, (digests.data_ptr(), squares.data_ptr()), sum(rows))
        return digests, squares, rows

    def keep(self, table: AddressTable, entries: Sequence[Entry], kept: Tensor) -> Tensor:
        """Copy the sampled weights into the rows of ``kept``, and return it."""
        self._launch("keep_rows", table, entries, (kept.data_ptr(),), len(kept))
        return kept

    def compare(self, table: AddressTable, entries: Sequence[Entry], kept: Tensor) -> Tensor:
        """Return the norms of the change and of what was kept, row by row: float64 ``[2 * N]``."""
        out = torch.empty(2 * len(kept), dtype=torch.float64, device=self._device)
        arguments = (kept.data_ptr(), DTYPES.index(kept.dtype), out.data_ptr(), len(kept))
        self._launch("compare_rows", table, entries, arguments, len(kept))
        return out

    def _launch(
        self, name: str, table: AddressTable, entries: Sequence[Entry], arguments: Sequence[int], blocks: int
    ) -> None:
        with self._lock:
            sent = table.on(self._device, np.array(entries, dtype=np.int64))
            self._function(name, blocks, (sent.data_ptr(), len(entries), *arguments))

    # On a thread of its own

    def _compile(self) -> None:
        self._function = self.attempt(self._load)

    def _load(self) -> Launch:
        launch = LOADERS[self._device.type](self._device, _SOURCE.read_bytes(), KERNELS)
        stream = devices.current_stream(self._device)
        with devices.GATE.work([str(self._device)]), devices.on_stream(stream):
            UPLOADS.take((1,), torch.int64)  # allocates the block, which the training thread must not do
        return launch

    def _wait_at_exit(self) -> None:
        if self._thread is not None:
            self._thread.join(EXIT_TIMEOUT_S)


_OF_DEVICE: dict[torch.device, FusedRows] = {}


def fused_rows(device: torch.device) -> FusedRows | None:
    """Return the fused pass of a device; None where its type has none."""
    if device.type not in LOADERS:
        return None
    if device not in _OF_DEVICE:
        _OF_DEVICE[device] = FusedRows(device)
    return _OF_DEVICE[device]


def failures() -> list[str]:
    """Return why devices have no fused pass."""
    return [f"{device}: {fused.reason}" for device, fused in _OF_DEVICE.items() if fused.reason]


def _forget_threads() -> None:
    for fused in _OF_DEVICE.values():
        fused.forget_thread()


os.register_at_fork(after_in_child=_forget_threads)
