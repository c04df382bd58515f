"""Accelerators: availability, names, memory, random state, streams and events.

The only user of torch.cuda, torch.accelerator, torch.xpu and torch.mps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of the current device in bytes, and how often the allocator had to retry."""

    peak_allocated: int
    peak_reserved: int
    capacity: int
    retries: int


def is_available() -> bool:
    """Return whether there is an accelerator."""
    return torch.cuda.is_available()


def is_in_use() -> bool:
    """Return whether an accelerator is initialised, without initialising it."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's


def count() -> int:
    """Return the number of accelerators."""
    return torch.cuda.device_count()


def name_of(device: str | int | torch.device | None = None) -> str:
    """Return the product name of an accelerator; None for the current one."""
    return str(torch.cuda.get_device_name(device))


def is_capturing_graph() -> bool:
    """Return whether a CUDA graph is being captured, where nothing of backlight may run."""
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def synchronize(device: str | torch.device | None = None) -> None:
    """Wait for everything that was launched on a device; nothing on a host."""
    if torch.cuda.is_available() and (device is None or torch.device(device).type == "cuda"):
        torch.cuda.synchronize(device)


# Memory


def memory() -> DeviceMemory | None:
    """Return the memory of the current device, None where there is none or nothing was allocated."""
    if not torch.cuda.is_available() or not torch.cuda.memory_stats():
        return None
    device = torch.cuda.current_device()
    stats = torch.cuda.memory_stats(device)
    return DeviceMemory(
        peak_allocated=int(stats.get("allocated_bytes.all.peak", 0)),
        peak_reserved=int(stats.get("reserved_bytes.all.peak", 0)),
        capacity=capacity(),
        retries=int(stats.get("num_alloc_retries", 0)),
    )


def allocator_statistics() -> dict[str, Any]:
    """Return the statistics of the current device's allocator under torch's names; empty without any."""
    return dict(torch.cuda.memory_stats())


def capacity() -> int:
    """Return the bytes of memory of the current device."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def peak_allocated(device: torch.device | None = None) -> int:
    """Return the most bytes that were allocated at once on a device; None for the current one."""
    return int(torch.cuda.max_memory_allocated(device))


def reset_peak_memory() -> None:
    """Count the peaks of the current device's memory from now on."""
    torch.cuda.reset_peak_memory_stats()


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on an accelerator."""
    return int(torch.cuda.mem_get_info(device)[0])


# Random state


def random_states(devices: Iterable[torch.device]) -> list[torch.Tensor]:
    """Return the random state of the host, followed by that of each device."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def set_random_states(devices: Sequence[torch.device], states: Sequence[torch.Tensor]) -> None:
    """Restore what :func:`random_states` returned for the same devices."""
    first, *others = states
    torch.set_rng_state(first)
    for device, state in zip(devices, others, strict=True):
        torch.cuda.set_rng_state(state, device)


def accelerator_random_states() -> list[torch.Tensor]:
    """Return the random state of every accelerator, initialising them; empty where there is none."""
    return list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else []


def set_accelerator_random_states(states: Sequence[torch.Tensor]) -> None:
    """Restore :func:`accelerator_random_states`; nothing where the number of accelerators differs."""
    if states and torch.cuda.device_count() == len(states):
        torch.cuda.set_rng_state_all(states)


# Streams and events


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream in which an accelerator works now."""
    return torch.cuda.current_stream(device)


def side_stream(device: str | torch.device) -> torch.cuda.Stream:
    """Return a new stream of an accelerator."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Work on ``stream``; None changes nothing."""
    with torch.cuda.stream(stream):
        yield


@contextlib.contextmanager
def own_streams(devices: Iterable[str]) -> Iterator[None]:
    """Work on a new stream of each accelerator among ``devices``."""
    with contextlib.ExitStack() as stack:
        for device in sorted({device for device in devices if device.startswith("cuda")}):
            stack.enter_context(on_stream(side_stream(device)))
        yield


def record_event(device: torch.device) -> torch.Event:
    """Return an event behind the work of the current stream of ``device``."""
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def timing_event() -> torch.cuda.Event:
    """Return a new event that measures time; it is not recorded yet."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's


def record_events(devices: Iterable[str]) -> list[Any]:
    """Return an event per accelerator that is over when everything launched there so far is done."""
    events = []
    for device in sorted({device for device in devices if device.startswith("cuda")}):
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return events
