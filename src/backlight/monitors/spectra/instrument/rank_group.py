"""The ranks that measure together: agreeing on errors, and moving replicates to the owner of a layer.

Every method is called by all ranks in the same order. Whatever goes wrong on one of them is said to all
before any of them would wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from backlight.distributed import world
from backlight.monitors.spectra.model.errors import SpectraError

T = TypeVar("T")

CHUNK = 16 * 2**20
"""Bytes of a replicate that travel at once."""

# A rank may decompose for long while others wait; one that dies is noticed at once.
_PATIENCE = timedelta(days=7)


class Team:
    """One rank among those that measure together; alone where no launcher started several.

    Attributes
    ----------
    rank, size
        Which of how many.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def leads(self) -> bool:
        """Tell whether this rank speaks for all."""
        return self.rank == 0

    def everywhere(self, value: T) -> list[T]:
        """Return what every rank gives, by rank."""
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        with _contact():
            dist.all_gather_object(out, value)
        return out

    def shared(self, value: T) -> T:
        """Return what rank 0 gives."""
        if self.size == 1:
            return value
        box = [value]
        with _contact():
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def agree(self, problem: tuple[Any, Exception] | None) -> None:
        """Raise the same error on every rank if any of them has a problem.

        Parameters
        ----------
        problem
            None, or where it came up and what it is; of several the one that comes first is raised, so that
            it does not depend on the number of ranks.

        Raises
        ------
        SpectraError
            If a rank has a problem.
        """
        said = None if problem is None else (problem[0], _text(problem[1]))
        found = [one for one in self.everywhere(said) if one is not None]
        if found:
            raise SpectraError(min(found)[1]) from (None if problem is None else problem[1])

    def together(self, work: Callable[[], T], place: Any = ()) -> T:
        """Return what ``work`` gives here, once it has succeeded on every rank.

        Raises
        ------
        SpectraError
            If it has failed on any.
        """
        problem: tuple[Any, Exception] | None = None
        result: Any = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must not wait for this rank
            problem = (place, error)
        self.agree(problem)
        return result  # type: ignore[no-any-return]  # agree has raised where there is none

    def gathered(
        self,
        held: Mapping[int, Tensor],
        owner: int,
        *,
        replicates: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        chunk: int = CHUNK,
    ) -> list[Tensor]:
        """Bring all replicates of a layer to its owner, a bounded piece at a time.

        Parameters
        ----------
        held
            The replicates that this rank computed, on the host, by number: those that
            :func:`replicates_of` gives it.
        owner
            The rank that gets them.
        replicates, shape, dtype
            R, and what one of them is.
        chunk
            Bytes of a piece.

        Returns
        -------
        list[Tensor]
            R tensors in order on the owner, none elsewhere.
        """
        out: list[Tensor] = []
        # One order for all ranks: whoever sends or receives next has somebody who does the other.
        for replicate in range(replicates):
            source = replicate % self.size
            if source == self.rank == owner:
                out.append(held[replicate])
            elif source == self.rank and owner != self.rank:
                with _contact():
                    for piece in _pieces(held[replicate], chunk):
                        dist.send(piece, owner)
            elif owner == self.rank:
                arrived = torch.empty(tuple(shape), dtype=dtype)
                with _contact():
                    for piece in _pieces(arrived, chunk):
                        dist.recv(piece, source)
                out.append(arrived)
        return out


def replicates_of(rank: int, size: int, replicates: int) -> range:
    """Return the numbers of the replicates that a rank computes."""
    return range(rank, replicates, size)


@contextmanager
def assembled() -> Iterator[Team]:
    """Give the team that the environment describes, as torchrun sets it; over gloo, on the host."""
    size = world().size
    if size == 1:
        yield Team()
        return
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo", timeout=_PATIENCE)
    try:
        yield Team(dist.get_rank(), dist.get_world_size())
    finally:
        if ours:
            dist.destroy_process_group()


def _pieces(x: Tensor, chunk: int) -> Iterator[Tensor]:
    flat = x.view(-1)
    step = max(1, chunk // x.element_size())
    for begin in range(0, len(flat), step):
        yield flat[begin : begin + step]


@contextmanager
def _contact() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise SpectraError("lost contact: another rank has ended; what it said last tells why") from error


def _text(error: Exception) -> str:
    said = str(error) or type(error).__name__
    return (
        said
        if isinstance(error, (ValueError, OSError, ArithmeticError))
        else f"{type(error).__name__}: {said}"
    )
