"""Collective calls of this rank, recorded in the shared state, since not every backend keeps records.

The functions of ``torch.distributed`` are wrapped by name. The reducer of DDP works in native code and is not
captured; it shows as a backward that waits.
"""

from __future__ import annotations

import functools
import inspect
import json
import pickle
import sys
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from backlight import clock
from backlight.capture.hooks import Patches
from backlight.devices import GATE
from backlight.interrupts import is_interrupt
from backlight.watchdog.runtime_dir import write_document
from backlight.watchdog.shared_state import SharedState, Slot

CALLS = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
    "all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather",
    "gather_object", "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "recv", "all_reduce_coalesced",
    "all_gather_coalesced",
)  # fmt: skip
"""Functions that no rank of a group may skip; ``recv`` waits for one other rank."""

_SAME: dict[str, tuple[str, ...]] = {
    "all_gather": ("tensor_list",),
    "all_gather_object": (),
    "all_to_all": (),
    "all_to_all_single": (),
    "broadcast_object_list": (),
    "gather": ("tensor",),
    "gather_object": (),
    "reduce_scatter": ("input_list",),
    "scatter": ("tensor",),
    "scatter_object_list": (),
}
"""Arguments that must agree on all ranks, of calls whose other arguments may differ."""

MAX_TENSORS = 4
"""Tensors of a list that a description holds."""


class Collectives:
    """Wraps the collective calls while attached.

    ``on_group(key, ranks)`` is called once per group, ``on_handle(call, handle)`` with the handle that an
    asynchronous call returns and the number of the call among all of this rank.
    """

    def __init__(
        self,
        shared_state: SharedState,
        on_group: Callable[[int, list[int]], None],
        on_handle: Callable[[int, Any], None] | None = None,
    ) -> None:
        self._shared_state = shared_state
        self._on_handle = on_handle
        self._on_group = on_group
        self._patches = Patches()
        self._numbers: dict[int, int] = {}
        self._here = threading.local()

    def attach(self) -> None:
        """Wrap the functions that this torch has."""
        if not dist.is_available():
            return
        module: Any = dist.distributed_c10d
        for name in CALLS:
            original = vars(module).get(name)
            if original is None:
                continue
            wrapped = self._wrap(name, original)
            # Both modules, one wrapper: most scripts use the name of the package.
            for owner in (module, dist):
                if vars(owner).get(name) is original:
                    self._patches.replace(owner, name, functools.partial(_instead, wrapped))

    def detach(self) -> None:
        """Unwrap the functions."""
        self._patches.undo()

    def _wrap(self, name: str, original: Any) -> Any:
        signature = inspect.signature(original).parameters
        parameters = list(signature)
        usual = {k: p.default for k, p in signature.items() if p.default is not p.empty}
        group_at = parameters.index("group") if "group" in parameters else -1
        async_at = parameters.index("async_op") if "async_op" in parameters else -1

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            here = self._here
            if getattr(here, "deep", False) or torch.compiler.is_compiling() or not dist.is_initialized():
                return original(*args, **kwargs)
            blocking = not _argument("async_op", async_at, args, kwargs)
            bound = {**usual, **dict(zip(parameters, args, strict=False)), **kwargs}
            index = self._enter(name, _argument("group", group_at, args, kwargs), bound, blocking=blocking)
            number = self._shared_state.slots[Slot.COLLECTIVES] - 1
            here.deep = failed = True
            try:
                result = original(*args, **kwargs)
                failed = False
            finally:
                here.deep = False
                if index is not None:
                    self._shared_state.leave_collective(index, blocking=blocking, failed=failed)
            if index is not None and not blocking and result is not None and self._on_handle is not None:
                self._on_handle(number, result)
            return result

        return call

    def _enter(self, name: str, group: Any, call_args: dict[str, Any], *, blocking: bool) -> int | None:
        try:
            key = self._group(group)
            if name == "recv":  # between two ranks: no number is shared
                key = zlib.crc32(f"recv {dist.get_rank()} {key}".encode())
            number = self._numbers[key] = self._numbers.get(key, 0) + 1
            compared = _SAME.get(name)
            same = [_described(v for k, v in call_args.items() if compared is None or k in compared)]
            same += [f"{call_args.get('op')} {_root(call_args, group)}"]
            text = f"{name}({_described(call_args.values())})"
            self._shared_state.slots[Slot.DISTRIBUTED] = 1
            return self._shared_state.enter_collective(
                key,
                number,
                zlib.crc32(name.encode()),
                zlib.crc32(", ".join(same).encode()),
                text.encode(),
                blocking=blocking,
            )
        except Exception as error:
            if is_interrupt(error):
                raise
            return None

    def _group(self, group: Any) -> int:
        world = group is None or group is dist.group.WORLD
        ranks = (
            list(range(dist.get_world_size()))
            if world
            else [int(r) for r in dist.get_process_group_ranks(group)]
        )
        # Two groups of the same ranks differ in their name.
        key = zlib.crc32(f"{ranks} {'' if world else getattr(group, 'group_name', '')}".encode())
        if key not in self._numbers:
            self._on_group(key, ranks)
        return key


def _instead(wrapped: Any, _original: Any) -> Any:
    return wrapped


def _argument(name: str, at: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name in kwargs:
        return kwargs[name]
    return args[at] if 0 <= at < len(args) else None


def _root(call_args: dict[str, Any], group: Any) -> int | None:
    """Return the rank, among all, from or to which a call goes, None where it has none."""
    for name in ("src", "dst"):
        if call_args.get(name) is not None:
            return int(call_args[name])
        if call_args.get(f"group_{name}") is not None:
            member: Any = group or dist.group.WORLD
            return dist.get_global_rank(member, int(call_args[f"group_{name}"]))
    return None


def _described(values: Iterable[Any]) -> str:
    """Return shapes and types of the tensors among arguments."""
    out: list[str] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            out.append(
                f"{'x'.join(map(str, value.shape)) or 'scalar'} {str(value.dtype).removeprefix('torch.')}"
            )
        elif isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            out.append(f"{len(value)} of [{_described(value[:MAX_TENSORS])}]")
    return ", ".join(out)


# Open collectives, for the watchdog: asked for while a stall is near. Two sources: torch's flight recorder,
# which also holds what native code issues and which some backends and releases lack; and the handles of
# asynchronous calls, kept weakly.

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
        with GATE.outside_captures() as is_open:
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
            dumped = pickle.loads(dump(True, True, True)) if dump is not None else {}  # of this process
            frames |= {(e["record_id"], e["time_created_ns"]): e["frames"] for e in dumped.get("entries", ())}
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
    ranks_of = {}
    for group in groups:
        try:
            ranks_of[str(group.group_name)] = list(map(int, distributed.get_process_group_ranks(group)))
        except (RuntimeError, ValueError, KeyError, AttributeError):
            continue
    return ranks_of
