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


@dataclass(frozen=True)
class Transfer:
    """What this rank sent or got; ``ranks`` are to hold equal values of it.

    ``channel`` and ``number``, which counts the calls of a channel, are the same on all of them. ``versions``
    are those of the tensors when the transfer was started.
    """

    call: str
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
        self._pending: WeakKeyDictionary[Any, list[Transfer]] = WeakKeyDictionary()
        self._coalesced: dict[int, list[Transfer]] = {}

    def wrap(self, method: str, original: Any) -> Any:
        """Return ``original`` with a report: of a send as it begins, of all others as they end."""

        @functools.wraps(original)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(group, *args, **kwargs)
            transfer = self._counted(method, group, args, kwargs)
            if transfer is not None and method == "send":
                self._hub.emit("transferred", transfer)
            work = original(group, *args, **kwargs)
            if transfer is not None and method != "send":
                self._started(group, work, transfer)
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
    ) -> Transfer | None:
        """Count a call; return the transfer if someone listens."""
        try:
            channel, peer = str(group.group_name), None
            if method in BETWEEN_TWO:
                peer, tag = int(args[1]), args[2] if len(args) > 2 else kwargs.get("tag", 0)
                own = group.rank()
                ends = (own, peer) if method == "send" else (peer, own)
                channel = f"{channel} {ends[0]} {ends[1]} {tag}"
            self._numbers[channel] += 1
            if not self._hub.delivers("transferred") or (peer is not None and ends[0] == ends[1]):
                return None
            ranks = tuple(dist.get_process_group_ranks(group))
            if peer is not None:
                ranks = ranks[ends[0]], ranks[ends[1]]
            tensors = tuple(_flat(args[0] if args else next(iter(kwargs.values()))))
            return Transfer(
                EQUAL.get(method, method),
                channel,
                self._numbers[channel],
                ranks,
                dist.get_backend(group),
                tensors,
                _versions(tensors),
            )
        except Exception:  # noqa: BLE001 - a group that torch does not know, or other arguments
            return None

    def _started(self, group: Any, work: Any, transfer: Transfer) -> None:
        together = self._coalesced.get(id(group))
        if together is None:
            self._begun(work, [transfer])
        else:
            together.append(transfer)

    def _begun(self, work: Any, transfers: list[Transfer]) -> None:
        if not transfers:
            return
        if work is None:  # the current stream has it
            self._arrived(transfers)
        else:
            self._pending[work] = transfers

    def _arrived(self, transfers: Any) -> None:
        for transfer in transfers:
            # What the script wrote to since is no longer what arrived; gloo itself copies what it gathers.
            if transfer.call == "all_gather" or _versions(transfer.tensors) == transfer.versions:
                self._hub.emit("transferred", transfer)


def install_transfers(hub: Hub, patches: Patches) -> None:
    """Report collectives with equal results, and what is sent from rank to rank."""
    if not dist.is_available():
        return
    transfers = Transfers(hub)
    for method in (*EQUAL, *BETWEEN_TWO):
        wrap: Callable[[Any], Any] = functools.partial(transfers.wrap, method)
        patches.replace(dist.ProcessGroup, method, wrap)
    patches.replace(dist.ProcessGroup, "_start_coalescing", transfers.wrap_start)
    patches.replace(dist.ProcessGroup, "_end_coalescing", transfers.wrap_end)
    patches.replace(dist.Work, "wait", transfers.wrap_wait)


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for one in value:
            yield from _flat(one)


def _versions(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    # Tensors made in inference mode have none.
    return tuple(0 if one.is_inference() else one._version for one in tensors)
