"""An accelerator for the tests, with two devices: asynchronous, and with memory that the host cannot read.

Importing this builds the extension in ``backend/`` where it is not built yet, and registers it with torch for
the whole process as device ``sim``. Kernels are those of the CPU; a thread per stream runs them, later.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import filelock
import torch
from torch.utils import cpp_extension

SOURCES = Path(__file__).parent / "backend"
KERNELS = Path(__file__).parents[2] / "src" / "backlight" / "measure" / "stats" / "rows.cu"
BUILT = Path(__file__).parents[2] / "build" / "accelerator"
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
SYNCHRONIZATION, DEVICE_TO_HOST, KERNEL = range(3)


def build() -> Path:
    """Return the shared library of this source and torch, compiling it where that has not been done."""
    files = [*sorted(SOURCES.iterdir()), KERNELS]
    content = b"".join(file.read_bytes() for file in files) + torch.__version__.encode()
    library = BUILT / f"backend-{hashlib.sha256(content).hexdigest()[:16]}.so"
    BUILT.mkdir(parents=True, exist_ok=True)
    # A lock of the operating system: cpp_extension.load waits for ever after a build that was killed.
    with filelock.FileLock(BUILT / "lock"):
        if not library.exists():
            unfinished = library.with_suffix(".tmp")
            subprocess.run(
                [
                    str(COMPILER), "-std=c++20", "-O1", "-fPIC", "-shared", "-w",
                    f"-I{KERNELS.parent}",
                    *(f"-isystem{path}" for path in cpp_extension.include_paths()),
                    SOURCES / "backend.cpp", "-o", unfinished,
                    *(f"-L{path}" for path in cpp_extension.library_paths()), "-lc10", "-ltorch_cpu",
                ],
                check=True,
            )  # fmt: skip
            unfinished.replace(library)
    return library


torch.utils.rename_privateuse1_backend("sim")
_library = ctypes.CDLL(str(build()))
_library.simulated_count.restype = ctypes.c_int64
_library.simulated_random_state.restype = ctypes.c_int64
_process = os.getpid()


def counts(counter: int) -> dict[str, int]:
    """Return how often something happened, by the name of the thread that asked for it."""
    threads = (ctypes.c_int * 256)()
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[str, int] = {}
    for thread in threads[: _library.simulated_threads(counter, threads, 256)]:
        name = names.get(thread) or _system_name(thread)
        found[name] = found.get(name, 0) + _library.simulated_count(counter, thread)
    return found


def _system_name(thread: int) -> str:
    try:
        return Path(f"/proc/self/task/{thread}/comm").read_text().strip()
    except OSError:
        return "ended"


def total(counter: int) -> int:
    """Return how often something happened, in all threads."""
    return int(_library.simulated_count(counter, -1))


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Raise where this thread waits for a device."""
    _library.simulated_forbid_synchronization(1)
    try:
        yield
    finally:
        _library.simulated_forbid_synchronization(0)


def set_delay(seconds: float) -> None:
    """Delay each kernel of every device from now on."""
    for device in range(2):
        _library.simulated_delay(device, ctypes.c_int64(round(seconds * 1e6)))


def sleep(seconds: float) -> None:
    """Keep the current stream busy for a while, without waiting here."""
    _library.simulated_sleep(ctypes.c_int64(round(seconds * 1e6)))


def load_kernels(
    device: torch.device, source: bytes, names: Sequence[str]
) -> Callable[[str, int, Sequence[int]], None]:
    """Return what launches the kernels of ``rows.cu`` on a device; they are built with the back-end."""
    assert source == KERNELS.read_bytes()

    def launch(name: str, blocks: int, arguments: Sequence[int]) -> None:
        assert name in names
        given = (ctypes.c_int64 * len(arguments))(*arguments)
        _library.simulated_launch(device.index, name.encode(), ctypes.c_int64(blocks), given, len(arguments))

    return launch


class SimulatedGraph:
    """A graph that captures nothing: the current stream reports meanwhile that it is captured.

    ``replay`` calls ``work``.
    """

    work: Callable[[], None] | None = None

    def capture_begin(self) -> None:
        """Begin the capture."""
        _library.simulated_capture(1)

    def capture_end(self) -> None:
        """End the capture."""
        _library.simulated_capture(0)

    def replay(self) -> None:
        """Run what stands for the captured kernels."""
        if self.work is not None:
            self.work()


_graph = SimulatedGraph()


def set_capturing(is_capturing: bool) -> None:
    """Begin or end the capture of a graph."""
    _graph.capture_begin() if is_capturing else _graph.capture_end()


def _manual_seed_all(seed: int) -> None:
    for device in range(2):
        _library.simulated_seed(device, ctypes.c_uint64(seed % 2**64))


def _index(device: int | str | torch.device) -> int:
    where = torch.device("sim", device) if isinstance(device, int) else torch.device(device)
    return torch.accelerator.current_device_index() if where.index is None else where.index


def _get_rng_state(device: int | str | torch.device = "sim") -> torch.Tensor:
    size = _library.simulated_random_state(_index(device), None, ctypes.c_int64(0), 0)
    state = torch.empty(size, dtype=torch.uint8, device="cpu")
    _library.simulated_random_state(
        _index(device), ctypes.c_void_p(state.data_ptr()), ctypes.c_int64(size), 0
    )
    return state


def _set_rng_state(state: torch.Tensor, device: int | str | torch.device = "sim") -> None:
    _library.simulated_random_state(
        _index(device), ctypes.c_void_p(state.data_ptr()), ctypes.c_int64(state.numel()), 1
    )


module = ModuleType("torch.sim")
module.is_available = lambda: True  # type: ignore[attr-defined]
module.is_initialized = lambda: True  # type: ignore[attr-defined]
module._is_in_bad_fork = lambda: os.getpid() != _process  # type: ignore[attr-defined]
module.device_count = lambda: 2  # type: ignore[attr-defined]
module.current_device = torch.accelerator.current_device_index  # type: ignore[attr-defined]
module.set_device = torch.accelerator.set_device_index  # type: ignore[attr-defined]
module.manual_seed_all = _manual_seed_all  # type: ignore[attr-defined]
module.get_rng_state = _get_rng_state  # type: ignore[attr-defined]
module.set_rng_state = _set_rng_state  # type: ignore[attr-defined]
module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]  # type: ignore[attr-defined]
module.SimulatedGraph = SimulatedGraph  # type: ignore[attr-defined]
torch._register_device_module("sim", module)
torch.utils.generate_methods_for_privateuse1_backend()
atexit.register(_library.simulated_wait)
