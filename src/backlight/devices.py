"""Accelerators: availability, names, memory, random state, streams and events.

The only user of torch.accelerator, torch.cuda, torch.xpu and torch.mps. What torch.accelerator lacks comes
from the module of the device type, which back-ends outside of torch register too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from backlight.threads import is_own_thread

COMPARED_GROUPS = 8
"""Groups of spans with which a group is compared: the work of recorded steps hardly differs."""

WITHOUT_FLOAT64 = frozenset({"mps"})
"""Types of devices that have no float64."""

POLL_S = 1e-3
"""Seconds between two queries of an event by a thread that waits for it."""

synchronizations: Counter[str] = Counter()
"""How often backlight itself waited for a whole device in this process, by reason."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of the current device in bytes, and how often the allocator had to retry."""

    peak_allocated: int
    peak_reserved: int
    capacity: int
    retries: int


def _built_for() -> str | None:
    """Return the type of accelerator that this build of torch is for; asks no driver."""
    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type


def kind() -> str | None:
    """Return the type of this process's accelerators, such as ``cuda``; None where there is none.

    It may ask the driver, after which a fork of the process cannot use CUDA: only commands call it. A script
    may load a back-end at any time: what is true before its imports need not be true later.
    """
    backend = _built_for()
    return backend if is_in_use() or (backend is not None and torch.accelerator.is_available()) else None


def is_accelerator(device: str | torch.device) -> bool:
    """Return whether a device, which holds tensors, is an accelerator of this process."""
    return torch.device(device).type == _built_for()


def types() -> tuple[str, ...]:
    """Return the device types of this process: the host's, and that of its accelerators."""
    accelerator = kind()
    return ("cpu",) if accelerator is None else ("cpu", accelerator)


def is_available() -> bool:
    """Return whether there is an accelerator; as for :func:`kind`, only commands may ask."""
    return kind() is not None


def is_in_use() -> bool:
    """Return whether an accelerator is initialised, without initialising it."""
    accelerator = _built_for()
    if accelerator is None:
        return False
    is_initialized = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    # Some device modules, such as torch.mps, cannot be asked: they count as initialised.
    return bool(is_initialized() if is_initialized is not None else torch.accelerator.is_available())


def count() -> int:
    """Return the number of accelerators."""
    return torch.accelerator.device_count() if is_available() else 0


def name_of(device: str | int | torch.device | None = None) -> str:
    """Return the product name of an accelerator, or its type if it has no name; None for the current one."""
    name = getattr(torch.get_device_module(kind()), "get_device_name", None)
    return str(name(device)) if name is not None else str(kind())


def uuid_of(device: str | torch.device) -> str | None:
    """Return the identifier of a CUDA device that its driver has, None where torch does not have it."""
    identifier = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if identifier is None else str(identifier)


def matmul_precision() -> str:
    """Return the precision of float32 products: ``highest``, or as ``tf32 on cuda, bf16 on cpu``.

    The older switches of torch warn, and raise where a script uses ``fp32_precision``, which sets both.
    """
    backends: dict[str, Any] = {"cuda": torch.backends.cuda, "cpu": torch.backends.mkldnn}
    lower = {name: backend.matmul.fp32_precision for name, backend in backends.items()}
    return ", ".join(f"{p} on {name}" for name, p in lower.items() if p not in {"none", "ieee"}) or "highest"


def is_capturing_graph() -> bool:
    """Return whether a graph of kernels is being captured, where nothing of backlight may run."""
    # Asked often: on a build without accelerators by one call.
    if torch.accelerator.current_accelerator() is None or not is_in_use():
        return False
    if _built_for() == "cuda":
        return bool(torch.cuda.is_current_stream_capturing())
    return bool(getattr(torch.accelerator.current_stream(), "is_capturing", lambda: False)())


def graph_classes() -> list[type]:
    """Return the classes whose ``capture_begin`` starts the capture of a graph, as ``CUDAGraph``."""
    built = _built_for()
    modules = [torch.cuda, torch.accelerator, *([] if built is None else [torch.get_device_module(built)])]
    classes = (
        vars(module)[name] for module in modules for name in sorted(vars(module)) if name.endswith("Graph")
    )
    return list(dict.fromkeys(c for c in classes if isinstance(c, type) and "capture_begin" in vars(c)))


def synchronize(reason: str, device: str | torch.device | None = None) -> None:
    """Wait for everything that was launched on a device, and count it; nothing on a host."""
    if is_in_use() and (device is None or is_accelerator(device)):
        synchronizations[reason] += 1
        torch.accelerator.synchronize(device)


# Memory


def memory() -> DeviceMemory | None:
    """Return the memory of the current device; None where there is none, unused, or of an unknown size."""
    stats = allocator_statistics()
    if not stats.get("allocated_bytes.all.allocated"):
        return None
    info = _memory_info(None)
    if info is None:
        return None
    return DeviceMemory(
        peak_allocated=int(stats.get("allocated_bytes.all.peak", 0)),
        peak_reserved=int(stats.get("reserved_bytes.all.peak", 0)),
        capacity=info[1],
        retries=int(stats.get("num_alloc_retries", 0)),
    )


def allocator_statistics(device: torch.device | None = None) -> dict[str, Any]:
    """Return the statistics of a device's allocator under torch's names; empty without any.

    ``device`` is None for the current one.
    """
    if not is_in_use():
        return {}
    try:
        return dict(torch.accelerator.memory_stats(device))
    except RuntimeError:  # an allocator that counts nothing, as that of MPS
        return {}


def peak_allocated(device: torch.device | None = None) -> int:
    """Return the most bytes that were allocated at once on a device; None for the current one."""
    return int(allocator_statistics(device).get("allocated_bytes.all.peak", 0))


def reset_peak_memory() -> None:
    """Count the peaks of the current device's memory from now on."""
    if allocator_statistics():
        torch.accelerator.reset_peak_memory_stats()


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that are free on an accelerator; None where its back-end does not report them."""
    info = _memory_info(device)
    return None if info is None else info[0]


def lacks_memory_of_a_pass(device: torch.device, more: int) -> bool:
    """Return whether what a pass has taken at most, and ``more`` bytes, are not free; False where unknown.

    Free is what the driver reports, and what the allocator of torch holds without a use.
    """
    free, stats = free_memory(device), allocator_statistics(device)
    allocated, reserved, peak = (
        int(stats.get(f"{name}_bytes.all.{which}", 0))
        for name, which in (("allocated", "current"), ("reserved", "current"), ("allocated", "peak"))
    )
    return free is not None and allocated > 0 and free + reserved < peak + more


def _memory_info(device: torch.device | None) -> tuple[int, int] | None:
    try:
        # torch.accelerator has the function since 2.10; before, and in both, a back-end may lack it.
        read = getattr(torch.accelerator, "get_memory_info", None)
        free, total = (read or torch.get_device_module(kind()).mem_get_info)(device)
    except (AttributeError, NotImplementedError):
        return None
    return int(free), int(total)


# Random state


def random_states(devices: Iterable[torch.device]) -> list[torch.Tensor]:
    """Return the random state of the host, followed by that of each device."""
    states = [torch.get_rng_state()]
    for device in devices:
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def set_random_states(devices: Sequence[torch.device], states: Sequence[torch.Tensor]) -> None:
    """Restore what :func:`random_states` returned for the same devices."""
    first, *others = states
    torch.set_rng_state(first)
    for device, state in zip(devices, others, strict=True):
        torch.get_device_module(device).set_rng_state(state, device)


def accelerator_random_states() -> list[torch.Tensor]:
    """Return the random state of every accelerator, initialising them; empty where there is none."""
    return random_states(_all())[1:]


def set_accelerator_random_states(states: Sequence[torch.Tensor]) -> None:
    """Restore :func:`accelerator_random_states`; nothing where the number of accelerators differs."""
    if states and count() == len(states):
        set_random_states(_all(), [torch.get_rng_state(), *states])


def _all() -> list[torch.device]:
    return [torch.device(str(kind()), index) for index in range(count())]


# Numbers


def widest_float(device: torch.device) -> torch.dtype:
    """Return the type in which sums on a device are exact enough: float64, float32 where it has none."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


# Copies, streams and events


def has_async_copies(device: torch.device) -> bool:
    """Return whether copies between a device and pinned host memory run in its stream."""
    return is_accelerator(device) and _has_pinned_memory(device.type)


@functools.cache
def _has_pinned_memory(kind: str) -> bool:
    if kind == "mps":  # memory is shared, and a copy waits
        return False
    try:
        return torch.empty(1, device="cpu", pin_memory=True).is_pinned()
    except RuntimeError:  # a back-end without page-locked memory
        return False


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream in which an accelerator works now."""
    return torch.accelerator.current_stream(device)


def stream_handle(device: torch.device) -> int:
    """Return the driver's handle of the stream in which a CUDA device works now."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def side_stream(device: str | torch.device) -> torch.Stream:
    """Return the stream of an accelerator on which backlight works beside the script.

    It is one for each device: the allocator and the libraries keep memory for every stream that is used.
    """
    where = torch.device(device)
    index = torch.accelerator.current_device_index() if where.index is None else where.index
    return _side_stream(where.type, index)


@functools.cache
def _side_stream(kind: str, index: int) -> torch.Stream:
    return torch.Stream(torch.device(kind, index))


@contextlib.contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Work on ``stream``; None changes nothing."""
    with stream or contextlib.nullcontext():
        yield


@contextlib.contextmanager
def own_streams(devices: Iterable[str], tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Work on the side stream of each accelerator among ``devices``.

    The memory of ``tensors``, which other streams have made, is used again only after that work.
    """
    with contextlib.ExitStack() as stack:
        for device in sorted(filter(is_accelerator, set(devices))):
            stack.enter_context(on_stream(side_stream(device)))
        for tensor in tensors:
            if has_async_copies(tensor.device):
                tensor.record_stream(current_stream(tensor.device))
        yield


def record_event(device: str | torch.device) -> torch.Event:
    """Return an event behind the work of the current stream of ``device``."""
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def timing_event() -> torch.Event:
    """Return a new event that measures time; it is not recorded yet."""
    return torch.Event(enable_timing=True)


class WorkTimer:
    """Device time of work that is launched in spans, known once it is done; nothing waits for it.

    ``spent`` are the seconds so far. A span also contains the time in which the device waits for a late host:
    a group of spans counts as twice the shortest of the last :data:`COMPARED_GROUPS` at most.
    """

    def __init__(self) -> None:
        self.spent = 0.0
        self._spans: list[tuple[torch.Event, torch.Event]] = []
        self._groups: deque[list[tuple[torch.Event, torch.Event]]] = deque()
        self._recent: deque[float] = deque(maxlen=COMPARED_GROUPS)
        self._has_events = True

    @contextlib.contextmanager
    def span(self, device: torch.device) -> Iterator[None]:
        """Time what is launched in the current stream of an accelerator."""
        begin = self._record(device) if self._has_events else None
        yield
        end = self._record(device) if begin is not None else None
        if begin is not None and end is not None:
            self._spans.append((begin, end))

    def end_group(self) -> None:
        """End a group, of one step for instance, and count earlier ones whose work is done."""
        if self._spans:
            self._groups.append(self._spans)
            self._spans = []
        while self._groups and GATE.is_done(self._groups[0][-1][1]):
            seconds = sum(begin.elapsed_time(end) for begin, end in self._groups.popleft()) / 1e3
            self._recent.append(seconds)
            self.spent += min(seconds, 2 * min(self._recent))

    def _record(self, device: torch.device) -> torch.Event | None:
        try:
            event = torch.Event(device, enable_timing=True)
            event.record(torch.accelerator.current_stream(device))
        except RuntimeError:  # a back-end without such events
            self._has_events = False
            return None
        return event


class CaptureGate:
    """What keeps calls of backlight's threads off a device while a graph of kernels is captured.

    In its default mode a capture ends with an error as soon as any thread of the process queries an event.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Open the gate, in a forked child: a thread that does not exist there may have held its lock."""
        self._changed = threading.Condition()
        self._captures = self._working = 0

    @property
    def is_closed(self) -> bool:
        """Whether a graph is being captured."""
        return self._captures > 0

    def close(self) -> None:
        """Let no further call begin, after the work in progress."""
        with self._changed:
            while self._working:
                self._changed.wait()
            self._captures += 1

    def open(self) -> None:
        """End one capture."""
        with self._changed:
            self._captures -= 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def work(self, devices: Iterable[str]) -> Iterator[None]:
        """Work on ``devices`` in a thread of backlight: after the captures in progress, and before others.

        Not for work that waits for other ranks, which may wait for a capture here.
        """
        on_device = any(map(is_accelerator, devices))
        with self._changed:
            while on_device and self._captures:
                self._changed.wait()
            self._working += on_device
        try:
            yield
        finally:
            with self._changed:
                self._working -= on_device
                self._changed.notify_all()

    @contextlib.contextmanager
    def outside_captures(self) -> Iterator[bool]:
        """Let no capture begin during a short call; False, so that nothing may be called, during one."""
        with self._changed:
            yield not self._captures

    def is_done(self, event: torch.Event) -> bool:
        """Return whether an event is over, without waiting; False during a capture."""
        with self._changed:
            return not self._captures and _query(event)

    def wait(self, event: torch.Event) -> None:
        """Wait for an event, in a thread of backlight without holding a capture up."""
        while not self.is_done(event):
            if not is_own_thread():
                with _current(event.device):
                    event.synchronize()
                return
            with self._changed:
                self._changed.wait(POLL_S)


GATE = CaptureGate()
os.register_at_fork(after_in_child=GATE.reset)


def _query(event: torch.Event) -> bool:
    with _current(event.device):
        return bool(event.query())


def _current(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Make a device the current one of this thread.

    torch queries an event under the current device of the thread, and where none was set that makes a context
    on device 0. A thread of backlight stays on the device, so that what it frees is freed there.
    """
    if not is_own_thread():
        return torch.accelerator.device_index(device.index)
    if torch.accelerator.current_device_index() != device.index:
        torch.accelerator.set_device_index(device.index)
    return contextlib.nullcontext()


def record_events(devices: Iterable[str]) -> list[torch.Event]:
    """Return an event per accelerator that is over when everything launched there so far is done."""
    return [record_event(device) for device in sorted(filter(is_accelerator, set(devices)))]
