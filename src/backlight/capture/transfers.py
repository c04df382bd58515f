"""Hooks on process groups that report what ranks got from each other.

The methods of ``ProcessGroup`` are wrapped, which a call from Python ends in whatever name a script imported.
The reducer of DDP and functional collectives run in native code and are not captured.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from backlight.interrupts import is_interrupt

if TYPE_CHECKING:
    from backlight.capture.hooks import Patches
    from backlight.capture.hub import Hub

EQUAL = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
}
"""Methods whose result is the same on all ranks of the group, and the function that calls each."""

BETWEEN_TWO = ("send", "recv")

EXCHANGES = {
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "scatter": "scatter",
    "gather": "gather",
}
"""Methods that give each rank something else, and the function that calls each."""

_COPIED = ("all_gather", "all_to_all", "gather")
"""Functions whose results gloo itself copies to where the script wants them, which counts as writing."""

NEIGHBOURS = 4
"""Next ranks to which the parts of an exchange are read."""


@dataclass(frozen=True)
class RankTransfer:
    """What this rank sent or got; ``ranks`` are to hold equal values of it.

    ``channel`` and ``number``, which counts the calls of a channel, are the same on all of them. ``versions``
    are those of the tensors when the transfer was started. ``end`` is ``send`` or ``recv`` between two ranks.
    """

    call: str
    end: str
    channel: str
    number: int
    ranks: tuple[int, ...]
    backend: str
    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]


class Transfers:
    """Counts the transfers of this process, and reports those whose data is there."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._numbers: Counter[str] = Counter()
        self._pending: WeakKeyDictionary[Any, list[RankTransfer]] = WeakKeyDictionary()
        self._coalesced: dict[int, list[RankTransfer]] = {}

    def wrap(self, method: str, original: Any) -> Any:
        """Return ``original`` with a report: of a send as it begins, of all others as they end."""

        @functools.wraps(original)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(group, *args, **kwargs)
            transfers = self._counted(method, group, args, kwargs)
            for transfer_of in transfers:
                if transfer_of.end == "send":
                    self._hub.emit("transferred", transfer_of)
            work = original(group, *args, **kwargs)
            if transfers:
                self._started(group, work, [t for t in transfers if t.end != "send"])
            return work

        return call

    def wrap_wait(self, original: Any) -> Any:
        """Return ``original`` with a report of what has arrived by then."""

        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(work, *args, **kwargs)
            if self._pending and result is not False and not torch.compiler.is_compiling():
                self._arrived(self._pending.pop(work, ()))
            return result

        return wait

    def wrap_start(self, original: Any) -> Any:
        """Return ``original``: what follows is started together, by the call that ends it."""

        @functools.wraps(original)
        def start(group: Any, *args: Any, **kwargs: Any) -> Any:
            self._coalesced[id(group)] = []
            return original(group, *args, **kwargs)

        return start

    def wrap_end(self, original: Any) -> Any:
        """Return ``original``, whose work stands for all that was started together."""

        @functools.wraps(original)
        def end(group: Any, *args: Any, **kwargs: Any) -> Any:
            work = original(group, *args, **kwargs)
            self._begun(work, self._coalesced.pop(id(group), []))
            return work

        return end

    def _counted(
        self, method: str, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[RankTransfer]:
        """Count a call; return its transfers if someone listens."""
        try:
            channel, here = str(group.group_name), group.rank()
            if method in EXCHANGES:
                channel += f" {EXCHANGES[method]}"
            elif method in BETWEEN_TWO:
                peer, tag = int(args[1]), args[2] if len(args) > 2 else kwargs.get("tag", 0)
                ends = (here, peer) if method == "send" else (peer, here)
                channel += f" {ends[0]} {ends[1]} {tag}"
            self._numbers[channel] += 1
            if not self._hub.delivers("transferred"):
                return []
            number, members = self._numbers[channel], tuple(dist.get_process_group_ranks(group))
            backend = dist.get_backend(group)

            def transfer(
                call: str, end: str, channel: str, ranks: tuple[int, ...], value: Any
            ) -> RankTransfer:
                tensors = tuple(_flat(value))
                return RankTransfer(call, end, channel, number, ranks, backend, tensors, _versions(tensors))

            if method in EXCHANGES:
                return [
                    transfer(
                        EXCHANGES[method],
                        "send" if a == here else "recv",
                        f"{channel} {a} {b}",
                        (members[a], members[b]),
                        part,
                    )
                    for a, b, part in _parts(EXCHANGES[method], here, len(members), args)
                    if 0 < (b - a) % len(members) <= NEIGHBOURS
                ]
            value = args[0] if args else next(iter(kwargs.values()))
            if method not in BETWEEN_TWO:
                return [transfer(EQUAL[method], "", channel, members, value)]
            if ends[0] == ends[1]:
                return []
            return [transfer(method, method, channel, (members[ends[0]], members[ends[1]]), value)]
        except Exception as error:
            if is_interrupt(error):
                raise
            return []

    def _started(self, group: Any, work: Any, transfers: list[RankTransfer]) -> None:
        together = self._coalesced.get(id(group))
        if together is None:
            self._begun(work, transfers)
        else:
            together += transfers

    def _begun(self, work: Any, transfers: list[RankTransfer]) -> None:
        if not transfers:
            return
        if work is None:  # the current stream has it
            self._arrived(transfers)
        else:
            self._pending[work] = transfers

    def _arrived(self, transfers: Any) -> None:
        for transfer in transfers:
            # What the script wrote to since is no longer what arrived.
            if transfer.call in _COPIED or _versions(transfer.tensors) == transfer.versions:
                self._hub.emit("transferred", transfer)


def install_transfers(hub: Hub, patches: Patches) -> None:
    """Report collectives with equal results, and what goes from rank to rank."""
    if not dist.is_available():
        return
    transfers = Transfers(hub)
    for method in (*EQUAL, *BETWEEN_TWO, *EXCHANGES):
        wrap: Callable[[Any], Any] = functools.partial(transfers.wrap, method)
        patches.replace(dist.ProcessGroup, method, wrap)
    patches.replace(dist.ProcessGroup, "_start_coalescing", transfers.wrap_start)
    patches.replace(dist.ProcessGroup, "_end_coalescing", transfers.wrap_end)
    patches.replace(dist.Work, "wait", transfers.wrap_wait)


def _parts(call: str, here: int, size: int, args: tuple[Any, ...]) -> Iterator[tuple[int, int, Tensor]]:
    """Yield what an exchange takes from this rank and gives it, each with the two ranks of the group."""
    outputs, inputs = args[:2]
    if call == "all_to_all":
        if isinstance(outputs, Tensor):
            whole, counts = (outputs, inputs), args[2:4]
            outputs, inputs = (
                flat.split(count or len(flat) // size) for flat, count in zip(whole, counts, strict=True)
            )
        yield from ((here, peer, part) for peer, part in enumerate(inputs))
        yield from ((peer, here, part) for peer, part in enumerate(outputs))
        return
    root = int(args[2].rootRank)
    if call == "scatter":
        yield from ((root, peer, part) for peer, part in enumerate(inputs[0])) if here == root else ()
        yield from ((root, here, part) for part in outputs if here != root)
    else:
        yield from ((peer, root, part) for peer, part in enumerate(outputs[0])) if here == root else ()
        yield from ((here, root, part) for part in inputs if here != root)


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for part in value:
            yield from _flat(part)


def _versions(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    # Tensors made in inference mode have none.
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)
