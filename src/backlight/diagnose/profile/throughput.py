"""Tokens per second and the share of the peak that they make (MFU).

``MFU = tokens/s · (6 N + 12 L d T) / (world · peak)`` (Chowdhery et al., 2204.02311, appendix B): six
operations per parameter and token for forward and backward, and attention's scores and mixing. Recomputed
forwards are work that the model did not need, and do not count.
"""

from __future__ import annotations

from dataclasses import dataclass

PEAKS: tuple[tuple[str, float], ...] = (
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("V100", 125e12),
    ("T4", 65e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
    ("MI300X", 1307e12),
    ("MI250", 362e12),
)
"""Dense bf16 or fp16 peak in FLOP/s by a part of the device's name, from the vendors' data sheets; the first
that fits counts. An MI250 is two devices to torch, and each has half of 362e12."""


@dataclass(frozen=True)
class Throughput:
    """What a step gets done; what was not given or is not known is None.

    Attributes
    ----------
    tokens_per_second:
        Over all ranks.
    mfu:
        Share of the peak.
    basis:
        What the MFU rests on, in words; why there is none where there is none.
    """

    tokens_per_second: float | None
    mfu: float | None
    basis: str


def peak_of(device: str) -> float | None:
    """Return the peak of a device by its name, None for one that the table does not hold."""
    for part, peak in PEAKS:
        if part.lower() in device.lower():
            return peak / 2 if part == "MI250" else peak
    return None


def throughput(
    step_seconds: float,
    *,
    tokens: int | None,
    parameters: int,
    attention: float | None,
    peak: float | None,
    world: int = 1,
    device: str = "",
    recomputed: float = 0.0,
) -> Throughput:
    """Return tokens per second and MFU.

    Parameters
    ----------
    step_seconds:
        Median time of a step.
    tokens:
        Tokens of one step over all ranks.
    parameters:
        N: parameters that a token passes through.
    attention:
        12 L d T: operations of attention per token, forward and backward; None where it is not known,
        and left out then.
    peak:
        FLOP/s of one device.
    world:
        Devices.
    device:
        Its name, where the peak is that of the table.
    recomputed:
        Seconds of a step that forwards inside backward take, which are stated.
    """
    if tokens is None:
        return Throughput(None, None, "tokens per step were not given (--tokens-per-step)")
    rate = tokens / step_seconds
    if peak is None:
        return Throughput(rate, None, "the peak of this device is not known (--peak-flops)")
    per_token = 6 * parameters + (attention or 0.0)
    terms = f"6 N with N = {parameters:,} (all parameters)"
    terms += (
        f", and {attention:,.4g} of attention (12 L d T) a token"
        if attention
        else ", attention not counted (no call of scaled_dot_product_attention with shapes in the trace)"
    )
    source = f" ({device}, dense 16 bit)" if device else ""
    again = (
        f", which takes {recomputed * 1e3:,.1f} ms of a step here"
        if recomputed
        else ", of which there is none"
    )
    basis = (
        f"{terms}; peak {peak / 1e12:,.4g} TFLOP/s a device{source} on {world} device(s); "
        f"recomputation is not counted as work{again}"
    )
    return Throughput(rate, rate * per_token / (world * peak), basis)
