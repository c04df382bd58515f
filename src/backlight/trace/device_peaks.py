"""Peaks of devices by their names, from the data sheets of their vendors."""

from __future__ import annotations

import re
from typing import NamedTuple

HALF_TYPES = frozenset({"c10::Half", "c10::BFloat16"})
"""Types whose peak is listed; what others reach depends on settings that a trace does not show."""


class DevicePeak(NamedTuple):
    """Dense bf16 or fp16 operations, and bytes of memory, per second; None where the name leaves it open."""

    flops: float
    bandwidth: float | None


PEAKS: tuple[tuple[str, DevicePeak], ...] = (
    ("B200", DevicePeak(2250e12, 8.0e12)),
    ("H200", DevicePeak(989e12, 4.8e12)),
    ("H100 PCIe", DevicePeak(756e12, 2.0e12)),
    ("H100 80GB HBM3", DevicePeak(989e12, 3.35e12)),
    ("H100", DevicePeak(989e12, None)),
    ("A100-SXM4-80GB", DevicePeak(312e12, 2.039e12)),
    ("A100 80GB PCIe", DevicePeak(312e12, 1.935e12)),
    ("A100-SXM4-40GB", DevicePeak(312e12, 1.555e12)),
    ("A100", DevicePeak(312e12, None)),
    ("A10G", DevicePeak(70e12, 600e9)),
    ("A10", DevicePeak(125e12, 600e9)),
    ("L40S", DevicePeak(362e12, 864e9)),
    ("L4", DevicePeak(121e12, 300e9)),
    ("V100", DevicePeak(125e12, 900e9)),
    ("T4", DevicePeak(65e12, 320e9)),
    ("RTX 4090", DevicePeak(165e12, 1008e9)),
    ("RTX 3090", DevicePeak(71e12, 936e9)),
    ("MI300X", DevicePeak(1307e12, 5.3e12)),
    ("MI250X", DevicePeak(191.5e12, 1.638e12)),  # one of the two devices that it is to torch
    ("MI250", DevicePeak(181e12, 1.638e12)),
)
"""Peaks by words of the name; the first match counts."""


def peak_of(device: str) -> DevicePeak | None:
    """Return the peak of a device by its name, None for an unknown one."""
    matches = (peak for words, peak in PEAKS if re.search(rf"\b{re.escape(words)}\b", device, re.IGNORECASE))
    return next(matches, None)
