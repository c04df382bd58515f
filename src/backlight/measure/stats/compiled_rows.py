"""The compiled pass over tensors on the host: ``rows.c``, built in a subprocess and called by address.

A C compiler needs a third of a second of another core for it. ``torch.compile`` needs 15 s to minutes for the
same pass, and where it traces it holds the interpreter lock, which stops the training thread. Until the
library is there, and wherever it cannot be, the eager kernels serve, whose numbers agree within rounding.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._device import DeviceContext

from backlight.interrupts import is_interrupt
from backlight.threads import UNBLOCKED, BackgroundThread

T = TypeVar("T")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types that it measures, in the order of ``rows.c``: those whose squares float64 always holds. The others
are rare, and eager."""

COMPILE_S = 0.5
"""Processor seconds that compiling takes (``bench/measure.py`` prints it)."""

ROW = 2**16
"""Scalars of a row."""

PARALLEL_SCALARS = 2**22
"""Scalars from which further threads are worth their start."""

_NUMBERS = 4
_OPTIONS = ("-O3", "-march=native", "-fno-trapping-math", "-shared", "-fPIC", "-pthread")
_SOURCE = Path(__file__).with_name("rows.c")

# A process in between starts the command and exits, so that it is no child of this process: a script that
# waits for its children would wait for it.
_DETACHED = '{ "$@" & echo "$!"; wait "$!"; echo "= $?"; } &'

# In a process of its own: a library that this processor cannot run ends that process, not the training.
_CHECK = """
import ctypes, sys
measure = ctypes.CDLL(sys.argv[1]).measure_rows
for kind, minus_one in enumerate((b"\\0\\0\\x80\\xbf", b"\\x80\\xbf", b"\\0\\xbc")):
    values, out = ctypes.c_char_p(minus_one * 1001), (ctypes.c_double * 4)()
    size = ctypes.c_int64(1001)
    measure(kind, ctypes.c_int64(1), ctypes.byref(values), ctypes.byref(size), size, 2, out)
    assert [*out] == [1001**0.5, 1.0, -1001.0, 1001.0], [*out]
"""


def is_plain(values: Tensor) -> bool:
    """Return whether the scalars lie one after another where the address of the tensor is."""
    return type(values) is Tensor and values.is_contiguous() and not values.is_neg()


def c_compiler() -> list[str]:
    """Return the command of the C compiler: ``CC``, or the first of the usual names; empty without one."""
    candidates = (shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"])
    return next((command for command in candidates if command and shutil.which(command[0])), [])


def _is_intercepted() -> bool:
    """Return whether a mode sees operations of this thread; one that sets the default device changes none."""
    count = getattr(torch._C, "_len_torch_function_stack", int)()
    mode_at = getattr(torch._C, "_get_function_stack_at", lambda _: None)
    return getattr(torch._C, "_len_torch_dispatch_stack", int)() > 0 or not all(
        type(mode_at(number)) is DeviceContext for number in range(count)
    )


class CompileError(RuntimeError):
    """There is no compiler, or it failed; the message says how."""


class CompiledPass:
    """A pass that a thread compiles. ``reason`` says why there is none; empty while nothing has failed."""

    def __init__(self) -> None:
        self.reason = ""
        self._thread: BackgroundThread | None = None
        self._function: Any = None

    def request(self) -> None:
        """Start to compile, on the first call; nothing waits for it."""
        if self._thread is None:
            self._thread = BackgroundThread(target=self._compile, name="backlight-compiler")
            self._thread.start()

    def wait(self) -> None:
        """Wait until the request has ended, well or not."""
        self.request()
        if self._thread is not None:
            self._thread.join()

    def is_ready(self) -> bool:
        """Return whether the pass can be called here: not where operations are intercepted."""
        return self._function is not None and not self.reason and not _is_intercepted()

    def spend(self, seconds: float) -> None:
        """Count processor time of eager work, after which the compiled pass may be worth its cost."""
        raise NotImplementedError

    def attempt(self, call: Callable[[], T]) -> T | None:
        """Return what a call of the pass returns; one that fails disables it, and returns None."""
        try:
            return call()
        except Exception as error:
            if is_interrupt(error):
                raise
            self.fail(error)
            return None

    def fail(self, error: Exception) -> None:
        """Disable the compiled pass for good, and keep the first lines of the reason."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        self.reason = f"{type(error).__name__}: {' '.join(lines[:2]) or 'no message'}"

    def forget_thread(self) -> None:
        """Compile nothing in a forked child, where the thread does not exist."""
        if self._function is None:
            self.reason = self.reason or "not compiled in a forked process"

    def _compile(self) -> None:
        """Set ``_function``, or call :meth:`fail`; on the thread."""
        raise NotImplementedError


class CompiledRows(CompiledPass):
    """The compiled pass of a process over tensors on the host.

    It is requested once the eager work has taken as long as compiling does, so that the two together never
    take more than twice the better of them (ski rental).
    """

    def __init__(self) -> None:
        super().__init__()
        self._spent = 0.0
        self._compiler = 0

    def spend(self, seconds: float) -> None:
        """Count processor time of eager work; request the compiled pass once it has taken long enough."""
        self._spent += seconds
        if self._spent >= COMPILE_S:
            self.request()

    def measure(self, values: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
        """Measure contiguous tensors of one of :data:`DTYPES` on the host.

        Returns float64 ``[N, 4]``, for each row of at most :data:`ROW` scalars norm, largest magnitude, sum
        and number of non-zero values; and how many of the rows belong to each tensor.
        """
        counts = [tensor.numel() for tensor in values]
        rows = [-(-count // ROW) for count in counts]
        measured = torch.empty((sum(rows), _NUMBERS), dtype=torch.float64, device="cpu")
        threads = torch.get_num_threads() if sum(counts) >= PARALLEL_SCALARS else 1
        addresses = (ctypes.c_void_p * len(values))(*[tensor.data_ptr() for tensor in values])
        sizes = (ctypes.c_int64 * len(values))(*counts)
        kind = DTYPES.index(values[0].dtype) if values else 0
        self._function(kind, len(values), addresses, sizes, ROW, threads, measured.data_ptr())
        return measured, rows

    def forget_thread(self) -> None:
        """Compile nothing in a forked child; the compiler belongs to the parent."""
        super().forget_thread()
        self._compiler = 0

    def end_compiler(self) -> None:
        """End a compiler that still runs: its process exists until its output has ended."""
        if self._compiler:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._compiler, signal.SIGTERM)

    # On a thread of its own

    def _compile(self) -> None:
        owner = os.getpid()
        try:
            folder = tempfile.mkdtemp(prefix="backlight-")
        except OSError as error:
            self.fail(error)
            return

        def remove() -> None:
            if os.getpid() == owner:
                self.end_compiler()
                shutil.rmtree(folder, ignore_errors=True)

        atexit.register(remove)
        try:
            self._function = self._build(Path(folder) / "rows.so")
        except (OSError, CompileError) as error:
            self.fail(error)
        finally:
            atexit.unregister(remove)
            remove()

    def _build(self, library: Path) -> Any:
        compiler = c_compiler()
        if not compiler or not sys.executable:
            raise CompileError("no C compiler; expected cc, gcc or clang in PATH, or its name in CC")
        self._run([*compiler, *_OPTIONS, str(_SOURCE), "-lm", "-o", str(library)])
        self._run([sys.executable, "-I", "-S", "-c", _CHECK, str(library)])
        measure = ctypes.CDLL(str(library)).measure_rows
        integers = ctypes.POINTER(ctypes.c_int64)
        measure.argtypes = [
            ctypes.c_int, ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p), integers, ctypes.c_int64,
            ctypes.c_int, ctypes.c_void_p,
        ]  # fmt: skip
        measure.restype = None
        return measure

    def _run(self, command: Sequence[str]) -> None:
        """Run a command that is no child of this process; :class:`CompileError` where it fails."""
        reading, writing = os.pipe()
        try:
            subprocess.Popen(
                [*UNBLOCKED, "/bin/sh", "-c", _DETACHED, "sh", *command],
                stdin=subprocess.DEVNULL, stdout=writing, stderr=writing, start_new_session=True,
            ).wait()  # fmt: skip
        finally:
            os.close(writing)
        with os.fdopen(reading, encoding="utf-8", errors="replace") as output:
            self._compiler = int(output.readline() or 0)
            lines: list[str] = []
            # Not until the end of the stream: a child that the script forks meanwhile holds it open.
            while (line := output.readline()) and not line.startswith("= "):
                lines.append(line)
            self._compiler = 0
        if line.strip() != "= 0":
            raise CompileError(f"{Path(command[0]).name} failed: {''.join(lines)[:500]}")


COMPILED_ROWS = CompiledRows()
"""The compiled pass of this process."""

os.register_at_fork(after_in_child=COMPILED_ROWS.forget_thread)
