"""Compiled statistics, cold and warm, against eager ones on the host and on the device."""

from __future__ import annotations

import time

import numpy as np
import torch
from check import Check

from backlight.measure.stats.compiled_rows import COMPILED_ROWS
from backlight.measure.stats.fused_rows import failures
from backlight.measure.stats.statistics import statistics

EXPECTED = (
    "the pass of the device compiles; norm, maximum and sum equal those of the device within 1e-6, and all "
    "counts are equal"
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tensors(check: Check) -> list[torch.Tensor]:
    """Return tensors of each type with zeros, and some with NaN or infinite values."""
    width = check.choose(2048, 64)
    generator = torch.Generator().manual_seed(0)
    found = []
    for dtype in DTYPES:
        normal = torch.randn(width, width, generator=generator).mul_(1e-2).to(dtype)
        normal[:3] = 0
        broken = normal[: width // 2].clone()
        broken[5, :7], broken[6, :5] = float("nan"), float("inf")
        found += [normal, normal.T, normal[0], broken]
    return found


def main(check: Check) -> None:
    """Measure the same values in five ways."""
    on_host = tensors(check)
    on_device = [tensor.to(check.kind) for tensor in on_host]
    ways = {
        "device, eager": (on_device, "eager"),
        "device, compiled, cold": (on_device, "compiled"),
        "device, compiled, warm": (on_device, "compiled"),
        "host, eager": (on_host, "eager"),
        "host, compiled, cold": (on_host, "compiled"),
        "host, compiled, warm": (on_host, "compiled"),
    }
    results = {}
    for name, (given, tier) in ways.items():
        begin = time.perf_counter()
        results[name] = statistics(given, tier=tier).arrays()
        check.figure(f"{name}, ms", f"{1e3 * (time.perf_counter() - begin):.2f}")
    floats, integers = results["device, eager"]
    for name, (other, counts) in results.items():
        is_equal = np.allclose(other, floats, rtol=1e-6, atol=1e-9, equal_nan=True)
        off = np.nanmax(
            np.abs(other - floats) / np.maximum(np.abs(floats), 1e-3), initial=0, where=np.isfinite(floats)
        )
        check.expect(f"{name}, largest difference", f"{off:.1e}", "at most 1e-6", holds=bool(is_equal))
        same = np.array_equal(counts, integers)
        check.expect(f"{name}, counts", "equal" if same else "differ", "equal", holds=same)
    check.figure("compiled on the host", COMPILED_ROWS.reason or "yes")
    reasons = "; ".join(failures())
    check.expect("compiled on the device", reasons or "yes", "yes", holds=not reasons)


if __name__ == "__main__":
    Check.run(main, EXPECTED)
