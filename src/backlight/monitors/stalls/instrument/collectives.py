"""Collective calls of this rank, noted on the board: our own records, since not every backend keeps any.

The functions of ``torch.distributed`` are wrapped by name. What the reducer of DDP does in native code is
not seen here; it shows as a backward that waits.
"""

from __future__ import annotations

import functools
import inspect
import threading
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from backlight.capture.hooks import Patches
from backlight.monitors.stalls.model.shared_state import SharedState, Slot

CALLS = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object",
    "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "recv", "all_reduce_coalesced", "all_gather_coalesced",
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
"""Arguments that must be alike on every rank, of calls in which others may differ by right."""

LONGEST = 4
"""Tensors of a list that are described."""


class Collectives:
    """Wraps the collective calls while it is attached.

    ``on_group(key, ranks)`` is called once per group with the checksum of its name and its global ranks.
    """

    def __init__(self, board: SharedState, on_group: Callable[[int, list[int]], None]) -> None:
        self._board = board
        self._on_group = on_group
        self._patches = Patches()
        self._numbers: dict[int, int] = {}
        self._here = threading.local()

    def attach(self) -> None:
        """Wrap what there is."""
        if not dist.is_available():
            return
        module: Any = dist.distributed_c10d
        for name in CALLS:
            original = vars(module).get(name)
            if original is None:
                continue
            wrapped = self._wrap(name, original)
            # Both places, one wrapper: most scripts look the name up in the package.
            for owner in (module, dist):
                if vars(owner).get(name) is original:
                    self._patches.replace(owner, name, functools.partial(_instead, wrapped))

    def detach(self) -> None:
        """Take everything off."""
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
            waits = not _argument("async_op", async_at, args, kwargs)
            given = {**usual, **dict(zip(parameters, args, strict=False)), **kwargs}
            place = self._enter(name, _argument("group", group_at, args, kwargs), given, waits=waits)
            here.deep = failed = True
            try:
                result = original(*args, **kwargs)
                failed = False
            finally:
                here.deep = False
                if place is not None:
                    self._board.leave(place, waits=waits, failed=failed)
            return result

        return call

    def _enter(self, name: str, group: Any, given: dict[str, Any], *, waits: bool) -> int | None:
        try:
            key, label = self._group(group)
            if name == "recv":  # between two ranks: it has no number that others share
                key = zlib.crc32(f"recv {dist.get_rank()} {key}".encode())
            number = self._numbers[key] = self._numbers.get(key, 0) + 1
            alike = _SAME.get(name)
            same = [_described(v for k, v in given.items() if alike is None or k in alike)]
            same += [f"{given.get('op')} {_root(given, group)}"]
            text = f"{name}({_described(given.values())}) #{number}{label}"
            self._board.slots[Slot.DISTRIBUTED] = 1
            return self._board.enter(
                key,
                number,
                zlib.crc32(name.encode()),
                zlib.crc32(", ".join(same).encode()),
                text.encode(),
                waits=waits,
            )
        except Exception:  # noqa: BLE001 - a record less, but the call must be made
            return None

    def _group(self, group: Any) -> tuple[int, str]:
        world = group is None or group is dist.group.WORLD
        ranks = (
            list(range(dist.get_world_size()))
            if world
            else [int(r) for r in dist.get_process_group_ranks(group)]
        )
        # Two groups of the same ranks are told apart by their name, under which the ranks found each other.
        key = zlib.crc32(f"{ranks} {'' if world else getattr(group, 'group_name', '')}".encode())
        if key not in self._numbers:
            self._on_group(key, ranks)
        return key, "" if world else f" of group {ranks[:8]}"


def _instead(wrapped: Any, _original: Any) -> Any:
    return wrapped


def _argument(name: str, at: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name in kwargs:
        return kwargs[name]
    return args[at] if 0 <= at < len(args) else None


def _root(given: dict[str, Any], group: Any) -> int | None:
    """Return the rank, among all, from or to which a call goes, None where it has none."""
    for name in ("src", "dst"):
        if given.get(name) is not None:
            return int(given[name])
        if given.get(f"group_{name}") is not None:
            place: Any = group or dist.group.WORLD
            return dist.get_global_rank(place, int(given[f"group_{name}"]))
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
            out.append(f"{len(value)} of [{_described(value[:LONGEST])}]")
    return ", ".join(out)
