"""Opening the run of this process: its rank, the folder, and what is said where those are not as expected."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from backlight.capture.process_group import launch_id, place
from backlight.distributed import world
from backlight.notifier import Notifier
from backlight.records import OTHERS
from backlight.session.settings import Settings
from backlight.store.errors import RunExistsError
from backlight.store.format.hdf5_filters import Filters
from backlight.store.write.attempt import JOIN_TIMEOUT
from backlight.store.write.writer import RunWriter


def open_writer(
    path: Path, settings: Settings, notifier: Notifier, *, script: str, arguments: tuple[str, ...]
) -> RunWriter:
    """Open the run in ``path``, as the rank that this process is.

    A process whose environment makes no sense is watched alone, beside ``path`` where that is taken; a rank
    that does not find the run of rank 0 writes a part of it. Both are said and recorded.

    Raises
    ------
    RunExistsError
        If the folder cannot take this run. RunWriteError and RunFormatError pass through as well.
    """
    rank, size = place()
    problem = world().problem if size == 1 else ""
    given: dict[str, Any] = {
        "name": path.name,
        "script": script,
        "arguments": arguments,
        "max_disk": settings.max_disk,
        "overrides": settings.overrides(),
        "groups": settings.groups,
        "monitors": settings.monitors,
        "flush_interval": settings.flush_interval,
        "on_lost": notifier.lost,
        "step_offset": settings.step_offset,
        "rank": rank,
        "world_size": size,
        "run_id": None if problem else launch_id(),
        "filters": Filters(settings.measures.compression, settings.measures.level),
        "options": _options(settings, size),
        "join_timeout": join_timeout(),
    }
    try:
        writer = RunWriter.create(path, **given)
    except RunExistsError:
        if not problem:
            raise
        writer = RunWriter.create(path.with_name(f"{path.name}.process-{os.getpid()}"), **given)
    notifier.writer = writer
    if problem:
        where = f" in {writer.path}" if writer.path != path else ""
        notifier.warn("ranks", f"{problem}; this process is watched alone{where}")
        notifier.unmeasured(OTHERS, problem)
    if writer.apart:
        notifier.warn(
            "ranks",
            f"rank {rank} does not see the run of rank 0 and writes a part of it in {writer.path}: bring the "
            f"folders together with `backlight join` ({writer.apart})",
        )
        notifier.unmeasured(OTHERS, writer.apart)
    return writer


def join_timeout() -> float:
    """Return the seconds that a rank waits for rank 0: ``BACKLIGHT_JOIN_TIMEOUT`` where that is a number."""
    try:
        seconds = float(os.environ.get("BACKLIGHT_JOIN_TIMEOUT", JOIN_TIMEOUT))
    except ValueError:
        return JOIN_TIMEOUT
    return seconds if 0.0 <= seconds < float("inf") else JOIN_TIMEOUT


def _options(settings: Settings, size: int) -> dict[str, Any]:
    """Return what all ranks are expected to have in common."""
    return {
        "world_size": size,
        "monitors": list(settings.monitors),
        "every": "by budget" if settings.every is None else settings.every,
        "histogram": settings.histogram,
        "exact_updates": "sampled" if settings.exact_updates is None else settings.exact_updates,
        "per_backward": settings.per_backward,
    }
