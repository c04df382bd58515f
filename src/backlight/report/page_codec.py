"""Arrays and text on their way into the page: compact, and unable to end the script that holds them.

An array becomes ``{"type", "shape", "data"}``: its bytes are grouped by significance (all high bytes,
then all low bytes, which compress far better), deflated, and written as base64. The page reads it
with the browser's own ``DecompressionStream``.
"""

from __future__ import annotations

import base64
import enum
import json
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backlight import codec

Packed = dict[str, Any]

OCTAVE_STEPS = 256
"""Codes per factor of two in a quantised plane; half a code is 0.14 % of the value."""

PRECISION = 2 ** (0.5 / OCTAVE_STEPS) - 1
"""Largest relative error of a quantised value where its plane spans at most 255 factors of two."""

_NAN, _ZERO, _FIRST, _INF = 0, 1, 2, 65535
_TYPES = {"f8": "<f8", "f4": "<f4", "i4": "<i4", "u2": "<u2", "u1": "u1"}


def pack(array: NDArray[Any]) -> Packed:
    """Pack booleans and real numbers exactly, integers up to 2^53 as float64; TypeError for others."""
    if array.dtype == np.bool_:
        array = array.astype(np.uint8)
    if array.dtype.kind in "iu" and array.dtype.itemsize > 2:
        small = array.size == 0 or (array.min() >= -(2**31) and array.max() < 2**31)
        array = array.astype(np.int32 if small else np.float64)
    code = f"{array.dtype.kind}{array.dtype.itemsize}"
    if code not in _TYPES:
        raise TypeError(f"cannot put an array of {array.dtype} into the page; expected one of {list(_TYPES)}")
    plain = np.ascontiguousarray(array, dtype=_TYPES[code])
    grouped = plain.reshape(-1).view(np.uint8).reshape(-1, plain.dtype.itemsize).T
    data = zlib.compress(grouped.tobytes(), 6)
    return {"type": code, "shape": list(array.shape), "data": base64.b64encode(data).decode("ascii")}


@dataclass(frozen=True, slots=True)
class Quantised:
    """An array that the page may hold in 16 bits per value; ``scale`` is ``log`` or ``share``."""

    values: NDArray[np.float64]
    scale: str


def pack_log(values: NDArray[np.float64]) -> Packed:
    """Pack non-negative values as 16-bit logarithms; zero, NaN and infinity keep codes of their own.

    ``value = 2 ** (low + (code - 2) * step)``; the step is 1/256 of an octave unless the values span
    more than 255 octaves. Negative values, which no column has, are stored as NaN.
    """
    regular = np.isfinite(values) & (values > 0)
    logs = np.log2(values, where=regular, out=np.zeros_like(values, dtype=np.float64))
    low, high = (float(logs[regular].min()), float(logs[regular].max())) if regular.any() else (0.0, 0.0)
    step = max(1 / OCTAVE_STEPS, (high - low) / (_INF - 1 - _FIRST))
    codes = np.where(regular, np.rint((logs - low) / step) + _FIRST, _NAN).astype(np.uint16)
    codes[values == 0] = _ZERO
    codes[np.isposinf(values)] = _INF
    return {**pack(codes), "scale": "log", "low": low, "step": step}


def pack_share(values: NDArray[np.float64]) -> Packed:
    """Pack shares in [0, 1] in steps of 1/65,000; exactly 0 and exactly 1 stay what they are."""
    codes = np.full(values.shape, _NAN, dtype=np.uint16)
    regular = np.isfinite(values)
    inner = np.clip(np.rint(values[regular] * 65000), 1, 64999)
    inner[values[regular] <= 0] = 0
    inner[values[regular] >= 1] = 65000
    codes[regular] = inner.astype(np.uint16) + 1
    return {**pack(codes), "scale": "share"}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return pack(value)
    if isinstance(value, Quantised):
        return pack_share(value.values) if value.scale == "share" else pack_log(value.values)
    if isinstance(value, np.generic):
        return codec.finite(value.item())
    if isinstance(value, enum.Enum):
        return value.value
    raise TypeError(f"cannot put a {type(value).__name__} into the page: {value!r}")


def script_json(value: Any) -> str:
    r"""Return JSON, in ASCII and with ``<``, ``>`` and ``&`` escaped: no name in it can end the element."""
    text = json.dumps(codec.finite(value), default=_plain, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
