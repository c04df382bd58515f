"""The step that an optimizer really took, relative to the weights, from a fixed sample."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from backlight.capture.parameters import local
from backlight.measure.stats.update import WeightSample
from backlight.measure.transfer import Pending, TransferBatch
from backlight.registry import Needs, probe


def _local(parameter: Tensor) -> Tensor:
    return local(parameter.detach())


@probe("update", monitor="health", needs=Needs.WEIGHTS, series="update", spacing=4)
class UpdateProbe:
    """Norm of the update and of the weights before it, per parameter.

    Parameters
    ----------
    per_tensor:
        Weights sampled per tensor at most; None for all of them.
    """

    def __init__(self, per_tensor: int | None = 1024) -> None:
        self._per_tensor = per_tensor
        self._sample: WeightSample | None = None
        self._ids: tuple[int, ...] = ()

    def before(self, parameters: Sequence[Tensor]) -> None:
        """Keep the sampled weights of ``parameters`` as they are before the step."""
        ids = tuple(map(id, parameters))
        if self._sample is None or ids != self._ids:
            self._sample = WeightSample(parameters, per_tensor=self._per_tensor, local=_local)
            self._ids = ids
        self._sample.before()

    def after(self, transfer: TransferBatch) -> Pending | None:
        """Compare with the same weights after the step; None where there was no before."""
        return None if self._sample is None else self._sample.after(transfer)
