"""Accelerators: availability, names, memory, random state, streams and events."""

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
        capacity=int(torch.cuda.get_device_properties(device).total_memory),
        retries=int(stats.get("num_alloc_retries", 0)),
    )


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


# Streams and events


@contextlib.contextmanager
def own_streams(devices: Iterable[str]) -> Iterator[None]:
    """Work on a new stream of each accelerator among ``devices``."""
    with contextlib.ExitStack() as stack:
        for device in sorted({device for device in devices if device.startswith("cuda")}):
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))  # type: ignore[no-untyped-call]  # torch's
        yield


def record_events(devices: Iterable[str]) -> list[Any]:
    """Return an event per accelerator that is over when everything launched there so far is done."""
    events = []
    for device in sorted({device for device in devices if device.startswith("cuda")}):
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return events
