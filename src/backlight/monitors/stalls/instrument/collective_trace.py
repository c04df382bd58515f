"""The collectives of this process that have not completed, for the watchdog: asked for while a stall is near.

Two sources: torch's flight recorder, which also holds what native code issues and which some backends and
releases lack; and the handles of asynchronous calls, kept weakly.
"""

from __future__ import annotations

import json
import pickle
import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from backlight import clock
from backlight.devices import GATE
from backlight.watchdog.runtime_dir import write_document

PERIOD_S = 1.0
"""Time between two dumps: one of a full buffer takes 0.06 s with the interpreter lock held."""

MAX_HANDLES = 256
"""Latest asynchronous calls whose handles are kept."""

MAX_ENTRIES = 512
"""Latest entries of the flight recorder that the document holds."""

MAX_FRAMES = 64
"""Innermost frames of a stack that the document holds."""

_NAMES = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
_PICKLES = ("_dump_nccl_trace", "_dump_fr_trace")


class CollectiveTrace:
    """Writes the document ``collectives``; :meth:`follow` keeps the handle of an asynchronous call."""

    def __init__(self, document: Path) -> None:
        self._document = document
        self._handles: deque[tuple[int, Callable[[], Any]]] = deque(maxlen=MAX_HANDLES)
        self._written_at = 0.0

    def follow(self, call: int, handle: Any) -> None:
        """Keep the handle of the call with this number in the shared state, weakly."""
        try:
            self._handles.append((call, weakref.ref(handle)))
        except TypeError:  # some backends return objects of their own
            return

    def open_calls(self) -> list[int]:
        """Return the numbers of calls that are known not to have completed."""
        return [call for call, ref in list(self._handles) if _is_open(ref())]

    def write(self) -> None:
        """Write the document, unless a recent one is there, or a graph of kernels is being captured.

        To ask whether a collective has completed queries an event, which would end the capture.
        """
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return
        now = clock.monotonic()
        if now - self._written_at < PERIOD_S:
            return
        with GATE.held() as is_open:
            if is_open:
                self._written_at = now
                write_document(self._document, self._content(distributed))

    def _content(self, distributed: Any) -> dict[str, Any]:
        content = {"at": clock.monotonic_ns(), "open": self.open_calls(), "groups": _groups(distributed)}
        dumped = [dump for dump in map(_dump, _NAMES) if dump.get("entries")]
        entries = [e for d in dumped for e in d["entries"][-MAX_ENTRIES:]]
        if not all(map(_is_completed, entries)):
            _add_frames(entries)
        content["dump"] = {"entries": entries} if dumped else None
        return content


def _is_open(handle: Any) -> bool:
    try:
        return handle is not None and not handle.is_completed()
    except RuntimeError:  # it has failed, which ends it
        return False


def _dump(name: str) -> dict[str, Any]:
    """Return what the flight recorder holds, empty where this torch or this backend has none."""
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), name, None)
    try:
        return dict(json.loads(dump())) if dump is not None else {}
    except (RuntimeError, TypeError, ValueError):
        return {}


def _is_completed(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _add_frames(entries: list[dict[str, Any]]) -> None:
    """Add the stacks of open collectives, which only dumps as pickles hold."""
    frames: dict[tuple[Any, Any], Any] = {}
    for name in _PICKLES:
        dump = getattr(getattr(torch._C, "_distributed_c10d", None), name, None)
        try:
            found = pickle.loads(dump(True, True, True)) if dump is not None else {}  # of this process
            frames |= {(e["record_id"], e["time_created_ns"]): e["frames"] for e in found.get("entries", ())}
        except (RuntimeError, TypeError, ValueError, KeyError, pickle.UnpicklingError):
            continue
    for entry in entries:
        key = entry.get("record_id"), entry.get("time_created_ns")
        if key in frames and not _is_completed(entry):
            entry["frames"] = frames[key][:MAX_FRAMES]


def _groups(distributed: Any) -> dict[str, list[int]]:
    """Return the ranks of each process group by its name, which dumps do not hold for every backend."""
    world = getattr(distributed.distributed_c10d, "_world", None)
    groups = list(getattr(world, "pg_map", ())) or [distributed.group.WORLD]
    found = {}
    for group in groups:
        try:
            found[str(group.group_name)] = list(map(int, distributed.get_process_group_ranks(group)))
        except (RuntimeError, ValueError, KeyError, AttributeError):
            continue
    return found
