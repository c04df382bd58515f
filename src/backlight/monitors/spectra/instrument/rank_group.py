"""The ranks that measure together: shared values, errors raised on all of them, replicates sent to an owner.

Every method is called by all ranks in the same order, so that each send has its receive. A rank reports its
error to all others before any of them waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from backlight.distributed import world
from backlight.interrupts import is_interrupt
from backlight.monitors.spectra.settings import SpectraError

T = TypeVar("T")

CHUNK_BYTES = 16 * 2**20
"""Bytes of a replicate that are sent at once."""

# A rank may decompose for long while others wait; the end of a rank is noticed at once.
_TIMEOUT = timedelta(days=7)


class RankGroup:
    """One rank of a group; ``group`` is a process group over gloo, the default group if None."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank, self.size, self._group = rank, size, group

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def all_gather(self, value: T) -> list[T]:
        """Return the value of every rank, by rank."""
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        with _contact():
            dist.all_gather_object(out, value, group=self._group)
        return out

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0."""
        if self.size == 1:
            return value
        box = [value]
        with _contact():
            dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def raise_first(self, problem: tuple[Any, Exception] | None) -> None:
        """Raise the SpectraError of the first position on every rank if any has a problem."""
        reported = None if problem is None else (problem[0], _text(problem[1]))
        problems = [entry for entry in self.all_gather(reported) if entry is not None]
        if problems:
            raise SpectraError(min(problems)[1]) from (None if problem is None else problem[1])

    def run(self, work: Callable[[], T], position: Any = ()) -> T:
        """Return the result of ``work`` here once it has succeeded on every rank; else raise on all."""
        problem: tuple[Any, Exception] | None = None
        result: Any = None
        try:
            result = work()
        except Exception as error:
            if is_interrupt(error):
                raise
            problem = (position, error)
        self.raise_first(problem)
        return result  # type: ignore[no-any-return]  # raise_first has raised where there is none

    def gather_at(
        self,
        owner: int,
        replicates: Sequence[Tensor],
        sources: Sequence[int],
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> list[Tensor]:
        """Return all replicates on the host of the rank ``owner``, none on others; sent in bounded chunks.

        ``replicates`` are those of this rank in order, ``sources`` the rank of each replicate.
        """
        local_replicates, out = iter(replicates), []
        for source in sources:
            if source == self.rank:
                tensor = next(local_replicates).to("cpu").contiguous()
                if owner == self.rank:
                    out.append(tensor)
                    continue
                with _contact():
                    for chunk in _chunks(tensor, chunk_bytes):
                        dist.send(chunk, owner, group=self._group)
            elif owner == self.rank:
                received = torch.empty(tuple(shape), dtype=dtype)
                with _contact():
                    for chunk in _chunks(received, chunk_bytes):
                        dist.recv(chunk, source, group=self._group)
                out.append(received)
        return out


@contextmanager
def launched_ranks() -> Iterator[RankGroup]:
    """Yield the group of ranks that the launcher started, over gloo on the host."""
    size = world().size
    if size == 1:
        yield RankGroup()
        return
    initialised_here = not dist.is_initialized()
    if initialised_here:
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        yield RankGroup(dist.get_rank(), dist.get_world_size())
    finally:
        if initialised_here:
            dist.destroy_process_group()


def new_group(timeout_s: float) -> RankGroup:
    """Return a process group of backlight's own; SpectraError if the training script has none."""
    if not dist.is_available() or not dist.is_initialized():
        raise SpectraError("no process group exists yet: call init_process_group before watch")
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return RankGroup(dist.get_rank(), dist.get_world_size(), group)


def _chunks(x: Tensor, chunk_bytes: int) -> Iterator[Tensor]:
    yield from torch.split(x.view(-1), max(1, chunk_bytes // x.element_size()))


@contextmanager
def _contact() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise SpectraError(f"lost contact: another rank has ended or does not answer ({first})") from error


def _text(error: Exception) -> str:
    text = str(error) or type(error).__name__
    expected = isinstance(error, (ValueError, OSError, ArithmeticError))
    return text if expected else f"{type(error).__name__}: {text}"
