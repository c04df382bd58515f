"""Gradient statistics, histograms, updates and alarms of a live run."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self

import numpy as np

from backlight.capture.parameters import local
from backlight.measure.stats.histogram import histogram
from backlight.measure.stats.statistics import statistics
from backlight.measure.stats.update import WeightSample
from backlight.monitor import Gradients, Monitor, RunHandle, StoredStep
from backlight.monitors.health.model.history import LiveLeaps, live_limits
from backlight.monitors.health.settings import HealthSettings
from backlight.series import GRADIENT

if TYPE_CHECKING:
    from torch import Tensor

    from backlight.session.settings import Settings
    from backlight.session.step_recorder import StepRecord

UPDATE_SPACING = 4
"""Recorded steps from one measured update to the next."""

SAMPLED_WEIGHTS = 1024
"""Weights of a tensor that an update is measured over, unless ``exact_updates`` asks for all."""

_NORM = GRADIENT.floats.index("norm")
_MEASURED, _NAN, _INF = (GRADIENT.integers.index(name) for name in ("measured", "nan", "inf"))


class GradientMonitor(Monitor):
    """Norm, largest value, sum and counts of every gradient; see ``docs/formulas.md``, section 1."""

    name = "health"
    records = "gradient statistics"

    def __init__(self, *, wants_backwards: bool = False) -> None:
        self.wants_backwards = wants_backwards

    @classmethod
    def from_settings(cls, settings: Settings) -> Self | None:
        """Return the monitor; ``per_backward`` requests every backward pass of an accumulation."""
        if cls.name not in settings.monitors:
            return None
        return cls(wants_backwards=HealthSettings.of(settings).per_backward)

    def on_backward_end(self, gradients: Gradients, part: int, record: StepRecord) -> None:
        """Measure what has accumulated after one backward of several."""
        self._measure(gradients, record, part)

    def on_gradients_ready(self, gradients: Gradients, record: StepRecord) -> None:
        """Measure the gradients that the optimizer, or clipping, is about to take."""
        self._measure(gradients, record, 0)

    def on_gradients_left(self, gradients: Gradients, record: StepRecord) -> None:
        """Measure what the last step has left."""
        self._measure(gradients, record, 0)

    def _measure(self, gradients: Gradients, record: StepRecord, part: int) -> None:
        pending = statistics(gradients.tensors, scale=gradients.scale, transfer=record.transfer)
        record.add("gradient", gradients.rows, pending, part)

    def on_step_stored(self, step: StoredStep) -> None:
        """Add the total norm: the root of the sum of squares over measured parameters."""
        if ("gradient", 0) in step.blobs:
            floats, integers = step.blobs["gradient", 0]
            measured = integers[:, _MEASURED] > 0
            if measured.any():
                step.scalars["total_norm"] = float(np.sqrt(np.sum(np.square(floats[measured, _NORM]))))


class HistogramMonitor(Monitor):
    """Exponent histograms of gradients: on request at every recorded step, else at those in detail."""

    name = "histogram"
    requested_by = "health"
    records = "histograms of gradients"

    def __init__(self, *, always: bool = False) -> None:
        self._always = always

    @classmethod
    def from_settings(cls, settings: Settings) -> Self | None:
        """Return the monitor; ``histogram`` requests histograms of every step."""
        always = HealthSettings.of(settings).histogram
        return cls(always=always) if "health" in settings.monitors else None

    def on_gradients_ready(self, gradients: Gradients, record: StepRecord) -> None:
        """Count the values of each gradient per power of two."""
        if self._always or record.in_detail:
            pending = histogram(gradients.tensors, scale=gradients.scale, transfer=record.transfer)
            record.add("histogram", gradients.rows, pending)


class UpdateMonitor(Monitor):
    """Norm of the step that an optimizer really took, and of the weights before it.

    Parameters
    ----------
    per_tensor:
        Weights sampled per tensor at most; None for all of them.
    spacing:
        Recorded steps of an optimizer from one measured update to the next; all of them while steps are
        recorded in detail.
    """

    name = "update"
    requested_by = "health"
    records = "updates of weights"

    def __init__(self, per_tensor: int | None = SAMPLED_WEIGHTS, spacing: int = UPDATE_SPACING) -> None:
        self._per_tensor, self._spacing = per_tensor, spacing
        self._sample: WeightSample | None = None
        self._rows: list[int] = []
        self._due = False
        self._recorded: dict[int, int] = {}

    @classmethod
    def from_settings(cls, settings: Settings) -> Self | None:
        """Return the monitor; ``exact_updates`` requests all weights, at every Nth recorded step."""
        if "health" not in settings.monitors:
            return None
        spacing = HealthSettings.of(settings).exact_updates
        return cls() if spacing is None else cls(None, spacing)

    def attach(self, run: RunHandle) -> None:
        """Remember where the parameter table is."""
        self._scope = run.scope

    def detach(self, error: BaseException | None) -> None:
        """Drop the weights that are kept."""
        self._sample = None

    def on_before_optimizer_step(self, parameters: Sequence[Tensor], record: StepRecord) -> None:
        """Keep the sampled weights as they are before the step."""
        # Of each optimizer by itself: those of a GAN step in turn, and only one would be measured.
        optimizer = id(parameters[0]) if parameters else 0
        recorded = self._recorded.get(optimizer, 0)
        self._recorded[optimizer] = recorded + 1
        self._due = record.in_detail or recorded % self._spacing == 0
        if not self._due:
            return
        rows = [(row, p) for p in parameters if (row := self._scope.table.row(p)) is not None]
        self._rows = [row for row, _ in rows]
        tensors = [p for _, p in rows]
        if self._sample is None or not self._sample.is_of(tensors):
            self._sample = WeightSample(tensors, per_tensor=self._per_tensor, local=_local)
        self._sample.before()

    def on_after_optimizer_step(self, record: StepRecord) -> None:
        """Compare with the same weights after the step."""
        if self._due and self._sample is not None:
            record.add("update", self._rows, self._sample.after(record.transfer))


class AlarmMonitor(Monitor):
    """Requests detail where gradients are not finite, or their total norm or the loss leaps."""

    name = "alarms"
    requested_by = "health"
    records = "alarms about single steps"
    after = ("health",)  # whose total norm it reads

    def attach(self, run: RunHandle) -> None:
        """Remember where alarms go, and the thresholds of the rule ``spike``."""
        self._alarm = run.alarm
        limits = live_limits(run.settings.thresholds)
        self._leaps: defaultdict[frozenset[str], LiveLeaps] = defaultdict(lambda: LiveLeaps(limits))

    def on_step_stored(self, step: StoredStep) -> None:
        """Look for NaN, infinities and a spike, among the steps of the same optimizers."""
        total = step.scalars.get("total_norm")
        if total is None or ("gradient", 0) not in step.blobs:
            self.on_step_scalars(step.step, step.scalars)
            return
        _, integers = step.blobs["gradient", 0]
        if integers[integers[:, _MEASURED] > 0][:, [_NAN, _INF]].any():
            # A skipped step is how a loss scale finds its size, not an alarm.
            if not step.scalars.get("scaler/skipped"):
                self._alarm(step.step, "non_finite")
            return
        if self._leaps_of(step.scalars).add(total, step.scalars.get("loss"), step.scalars):
            self._alarm(step.step, "spike")

    def on_step_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Look for a loss that leaps, or is not finite, in a step that is not recorded."""
        loss = values.get("loss")
        if loss is None or values.get("scaler/skipped"):
            return
        if not math.isfinite(loss):
            self._alarm(step, "non_finite")
        elif self._leaps_of(values).leaps(loss):
            self._alarm(step, "spike")

    def _leaps_of(self, scalars: Mapping[str, float]) -> LiveLeaps:
        """Return those of the steps of the same optimizers."""
        return self._leaps[frozenset([name for name in scalars if name[:3] == "lr/"])]


def _local(parameter: Tensor) -> Tensor:
    return local(parameter.detach())
