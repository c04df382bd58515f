"""Readings of the machine while a run goes on: memory of the process, and counters of its GPU by NVML.

They are taken by the writer thread, from files of Linux and from the driver, which waits for no kernel.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

from backlight import clock, processes
from backlight.interrupts import is_interrupt
from backlight.monitors.steptime.model.evidence import DEVICE_PREFIX, HOST_MEMORY

SHARE = 0.01
"""Pause between two readings, as a share of the time so far: a long run stores logarithmically many."""

THROTTLED = 0x08 | 0x20 | 0x40 | 0x80
"""Reasons of NVML for lower clocks that are a fault: slowdown by the hardware, by heat, by the power supply.

A cap of power that the user has set is none.
"""


class NvmlGpu:
    """Counters of one NVIDIA GPU, by its identifier as torch has it.

    Raises
    ------
    ImportError, Exception
        If ``pynvml`` (nvidia-ml-py) is not installed, or the driver refuses.
    """

    def __init__(self, uuid: str) -> None:
        self._nvml: Any = importlib.import_module("pynvml")
        self._nvml.nvmlInit()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        self._handle = self._nvml.nvmlDeviceGetHandleByUUID(name)

    def read(self) -> dict[str, float]:
        """Return utilization [share], memory in use [B], temperature [°C] and throttling [0 or 1].

        What the driver does not support is missing. The share is that of the last second.
        """
        nvml, handle = self._nvml, self._handle
        readings: dict[str, Callable[[], float]] = {
            "utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "memory": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "temperature": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "throttled": lambda: bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & THROTTLED),
        }
        values = {}
        for name, read in readings.items():
            with contextlib.suppress(nvml.NVMLError):
                values[f"{DEVICE_PREFIX}{name}"] = float(read())
        return values


class MachineReadings:
    """Reads memory of the process, and counters of the GPU of which ``uuid`` is the identifier.

    ``missing`` is called once with the reason where the GPU cannot be read; None of a run without one.
    """

    def __init__(self, uuid: str | None, missing: Callable[[str], None]) -> None:
        self._uuid, self._missing = uuid, missing
        self._gpu: NvmlGpu | None = None
        self._began = clock.monotonic()
        self._next = self._began
        self._last_step = -1

    def read(self, step: int) -> dict[str, float]:
        """Return the scalars of ``step``; empty where they are not due, or the step has them."""
        now = clock.monotonic()
        if now < self._next or step <= self._last_step:
            return {}
        self._next, self._last_step = now + SHARE * (now - self._began), step
        values = {HOST_MEMORY: float(processes.resident_memory())}
        if self._uuid is not None:
            try:
                self._gpu = self._gpu or NvmlGpu(self._uuid)
                values |= self._gpu.read()
            except Exception as error:  # a driver may raise anything; nothing depends on it
                if is_interrupt(error):
                    raise
                self._uuid = None
                self._missing(_reason(error))
        return values


def _reason(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "nvidia-ml-py is not installed (pip install 'backlight[gpu]')"
    return f"NVML: {error or type(error).__name__}"
