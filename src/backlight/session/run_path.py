"""Where a run lands when nobody says where."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from backlight.store.names import safe_name


def default_path(script: str = "") -> Path:
    """Return ``runs/<script>-<time>``, with a number where that exists."""
    stem = safe_name(Path(script or (sys.argv[0] if sys.argv else "")).stem or "training")
    base = Path("runs") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path
