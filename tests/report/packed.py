"""Decoder of the packed arrays of a page."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np


def unpack(node: dict[str, Any]) -> np.ndarray:
    """Read a packed array like ``assets/data.js``."""
    width = np.dtype(node["type"]).itemsize
    grouped = np.frombuffer(zlib.decompress(base64.b64decode(node["data"])), np.uint8)
    plain = grouped.reshape(width, -1).T.tobytes()
    codes = np.frombuffer(plain, f"<{node['type']}").reshape(node["shape"])
    if node.get("scale") == "share":
        return np.where(codes == 0, np.nan, (codes.astype(np.float64) - 1) / 65000)
    if node.get("scale") == "log":
        with np.errstate(over="ignore"):
            values = 2 ** (node["low"] + (codes.astype(np.float64) - 2) * node["step"])
        return np.select([codes == 0, codes == 1, codes == 65535], [np.nan, 0.0, np.inf], values)
    return codes
