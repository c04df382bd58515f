"""What a ledger says of one step: the peak by kind and module, the curve, the largest tensors. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from backlight.diagnose.memory.storage_log import Integers, Kind, Ledger

POINTS = 2000
"""Points of a reduced curve."""


@dataclass(frozen=True)
class Held:
    """Bytes of a module at the peak: by kind its own, and with all that is inside it."""

    name: str
    own: Mapping[Kind, int]
    inclusive: int

    @property
    def exclusive(self) -> int:
        """All of its own."""
        return sum(self.own.values())


@dataclass(frozen=True)
class Tensor:
    """Storages at the peak that are alike: of one kind, module, operation, shape and type."""

    kind: Kind
    module: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    nbytes: int


@dataclass(frozen=True)
class Account:
    """One or several steps of a ledger, from event ``start`` on.

    Parameters
    ----------
    ledger, start:
        What was recorded, and where the steps begin that count.
    granule:
        Sizes are rounded up to a multiple of this.
    """

    ledger: Ledger
    start: int = 0
    granule: int = 1

    @cached_property
    def curve(self) -> Integers:
        """Bytes that are live after each event of the steps, int64 [events]."""
        return self.ledger.curve(self.granule)[self.start :]

    @cached_property
    def position(self) -> int:
        """Index in the ledger of the event at which the peak is reached."""
        return self.ledger.peak(self.granule, self.start)[0]

    @property
    def peak(self) -> int:
        """Bytes at the peak."""
        return int(self.curve[self.position - self.start])

    @property
    def begin(self) -> int:
        """Bytes before the steps: what stays between them."""
        whole = self.ledger.curve(self.granule)
        return int(whole[self.start - 1]) if self.start else 0

    @property
    def phase(self) -> str:
        """Phase at the peak."""
        return self.ledger.phase_at(self.position)

    def kinds(self) -> dict[Kind, int]:
        """Return the peak by kind, every kind named."""
        return self.ledger.by_kind(self.position, self.granule)

    def phase_peaks(self) -> dict[str, int]:
        """Return the highest point of each phase of the steps."""
        found: dict[str, int] = {}
        borders = [*self.ledger.phases, (len(self.ledger.events), "")]
        for (begin, name), (end, _) in pairwise(borders):
            part = self.curve[max(0, begin - self.start) : max(0, end - self.start)]
            if len(part):
                found[name] = max(found.get(name, 0), int(part.max()))
        return found

    def modules(self) -> list[Held]:
        """Return the modules that hold something at the peak, the fullest first."""
        own = self.ledger.by_module(self.position, self.granule)
        inclusive: dict[str, int] = {}
        for name, kinds in own.items():
            total, above = sum(kinds.values()), name
            while True:
                inclusive[above] = inclusive.get(above, 0) + total
                if not above:
                    break
                above = above.rpartition(".")[0]
        held = [Held(name, own.get(name, {}), inclusive[name]) for name in inclusive]
        return sorted(held, key=lambda module: (-module.exclusive, module.name))

    def largest(self, count: int) -> list[Tensor]:
        """Return the live set at the peak, alike storages as one, the largest first."""
        groups: dict[tuple[Kind, str, str, tuple[int, ...], str], list[int]] = {}
        for index in self.ledger.live(self.position):
            s = self.ledger.storages[index]
            groups.setdefault((s.kind, s.module, s.operation, s.shape, s.dtype), []).append(index)
        sizes = self.ledger.sizes(self.granule)
        found = [
            Tensor(*key, count=len(members), nbytes=int(sizes[members].sum()))
            for key, members in groups.items()
        ]
        return sorted(found, key=lambda tensor: -tensor.nbytes)[:count]

    def curve_by_kind(self, points: int = POINTS) -> tuple[Integers, npt.NDArray[np.int64]]:
        """Return positions [P] within the steps, and bytes [K, P] there by kind, ordered as :class:`Kind`.

        Where there are more events than ``points``, each range of them is shown by its highest.
        """
        rows = self.ledger.curves(self.granule)[:, self.start :]
        total = self.curve
        if len(total) <= points:
            return np.arange(len(total), dtype=np.int64), rows
        edges = np.linspace(0, len(total), points + 1).astype(np.int64)
        chosen = [int(a + np.argmax(total[a:b])) for a, b in pairwise(edges) if b > a]
        at = np.array(chosen, dtype=np.int64)
        return at, rows[:, at]
