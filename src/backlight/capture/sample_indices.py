"""Dataset indices of the batches of DataLoaders, as their samplers gave them.

A loader with workers asks its sampler ahead; a batch is the one that was asked for under the same number.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import dataloader

if TYPE_CHECKING:
    from backlight.capture.hooks import Patches
    from backlight.capture.hub import Hub

SPARE = 8
"""Batches that are remembered beyond those that the workers of a loader are ahead."""


@dataclass(slots=True)
class _Asked:
    """What one pass over a sampler has given: how many batches, and the latest of them."""

    sampler: Any
    count: int
    latest: deque[Any]


_ASKED: weakref.WeakKeyDictionary[Any, _Asked] = weakref.WeakKeyDictionary()


def install_sample_indices(hub: Hub, patches: Patches) -> None:
    """Remember what the samplers of loaders give, where torch has the class we know."""
    base = getattr(dataloader, "_BaseDataLoaderIter", None)
    if base is None or not hasattr(base, "_next_index"):
        return

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def _next_index(self: Any) -> Any:
            given = original(self)
            if hub.listeners:
                sampler = self.__dict__.get("_sampler_iter")
                asked = _ASKED.get(self)
                if asked is None or asked.sampler is not sampler:  # another epoch
                    ahead = (getattr(self, "_prefetch_factor", 0) or 0) * (
                        getattr(self, "_num_workers", 0) or 0
                    )
                    asked = _ASKED[self] = _Asked(sampler, 0, deque(maxlen=ahead + SPARE))
                asked.count += 1
                asked.latest.append(given)
            return given

        return _next_index

    patches.replace(base, "_next_index", wrap)


def indices_of(iterator: Any, number: int) -> Sequence[int] | None:
    """Return the dataset indices of batch ``number`` of a loader's iterator.

    None where they are not known: of a stream, of workers that give batches in any order, of a batch that was
    asked for before watching began, or too long ago.
    """
    asked = _ASKED.get(iterator)
    if asked is None or not getattr(iterator, "_in_order", True):
        return None
    back = asked.count - number
    if not 0 < back <= len(asked.latest):
        return None
    given = asked.latest[-back]
    given = given.tolist() if hasattr(given, "tolist") else given
    known = isinstance(given, (list, tuple)) and all(type(one) is int for one in given)
    return given if known else None
