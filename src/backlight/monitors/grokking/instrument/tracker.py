"""Measures gradient geometry at the logged steps of a live run, independently of who runs the loop.

``.grad`` after backward gives the gradient itself, the products of its matrices and the window over the last
steps. Measures of per-sample gradients come from a probe batch, see
:mod:`backlight.monitors.grokking.instrument.probe_batch`. Neither changes the training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from backlight.interrupts import is_interrupt
from backlight.measure.gram.eigenvalues import product_spectrum, spectrum
from backlight.monitors.grokking.instrument.gradient_history import (
    GradientSketch,
    GradientWindow,
    record_array,
    stored,
)
from backlight.monitors.grokking.model.measures import finite

if TYPE_CHECKING:
    from backlight.monitor import Recorder
    from backlight.monitors.grokking.instrument.probe_batch import ProbedModel
    from backlight.monitors.grokking.settings import Measures


class MeasureTracker:
    """Measures the geometry of gradients at logged steps.

    ``measures`` may be replaced by cheaper ones during the run. ``probe`` gives the per-sample gradients,
    None without samples. ``warn(what, reason)`` is called for each failed measurement; None lets the error
    propagate.
    """

    def __init__(
        self,
        measures: Measures,
        recorder: Recorder,
        probe: ProbedModel | None = None,
        warn: Callable[[str, str], None] | None = None,
    ) -> None:
        self.measures = measures
        self.recorder = recorder
        self.probe = probe
        self._warn = warn
        self._window = GradientWindow(measures.window_steps)
        self._sketch = GradientSketch(measures.sketch_rows)
        self._step = -1
        self._gradients: dict[str, Tensor] = {}

    def measure(self, step: int, gradients: Iterable[tuple[str, Tensor | None]]) -> None:
        """Measure all that is due at ``step``, given all gradients and the weights they were taken at."""
        if self.measures.logs(step):
            self.gradients(step, gradients)
            self.close(step)
            self.sample(step)

    def gradients(self, step: int, gradients: Iterable[tuple[str, Tensor | None]]) -> None:
        """Copy gradients of ``step`` by parameter name, as backward left them; may come in several calls."""
        if step != self._step:
            self._step, self._gradients = step, {}
        for name, gradient in gradients:
            if gradient is None or name in self._gradients:
                continue
            dense = gradient.coalesce().to_dense() if gradient.is_sparse else gradient
            # A copy: the optimizer, clipping or the next backward may write over it.
            self._gradients[name] = dense.detach().to("cpu", copy=True)

    def close(self, step: int) -> None:
        """Measure the gradients of ``step``, once all of them were given."""
        gradients, self._gradients = self._gradients, {}
        if not gradients or step != self._step:
            return
        measures = self.measures
        squares = [
            float(torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float64))) ** 2
            for g in gradients.values()
        ]
        self.recorder.scalars(step, {"gradient/norm": sum(squares) ** 0.5})
        if measures.due(measures.gradients, step):
            for name, gradient in gradients.items():
                values = stored(gradient, measures.precision)
                record_array(self.recorder, f"gradient/{name}", step, values, _axes(gradient))
        if measures.window:
            self._window.add(step, gradients)
            if measures.due(measures.window, step) and len(self._window) > 1:
                self._guarded("window", self._measure_window, step)
        if measures.sketch:
            self._guarded("sketch", self._sketch.add, gradients)
            if measures.due(measures.sketch, step):
                self._guarded("sketch", self._sketch.record, step, self.recorder)
        if measures.due(measures.products, step):
            for name, gradient in gradients.items():
                if gradient.ndim >= 2 and min(gradient.shape[0], gradient[0].numel()) > 1:
                    self._guarded(f"product/{name}", self._measure_product, step, name, gradient)

    def sample(self, step: int) -> None:
        """Measure what needs per-sample gradients, at the current weights."""
        if self.probe is not None:
            self._step = step
            self._guarded("gram", self.probe.measure, step, self.measures, self.recorder)
            self._guarded("agop", self.probe.agop, step, self.measures, self.recorder)
            self._guarded("influence", self.probe.influence, step, self.measures, self.recorder)
            self._guarded("ntk", self.probe.ntk, step, self.measures, self.recorder)

    def without_window(self) -> None:
        """Stop measuring the window and release its gradients."""
        self.measures = replace(self.measures, window=0)
        self._window = GradientWindow(self.measures.window_steps)

    def state(self) -> dict[str, Any]:
        """Return the state with which a resumed run measures as an uninterrupted one."""
        start = None if self.probe is None else self.probe.kernels.start
        return {"window": self._window.state(), "sketch": self._sketch.state(), "ntk": start}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        self._window.load_state(state["window"])
        self._sketch.load_state(state["sketch"])
        if self.probe is not None:
            self.probe.kernels.start = state.get("ntk")

    def _measure_window(self, step: int) -> None:
        matrix, steps = self._window.gram()
        eigen = spectrum(torch.from_numpy(matrix))
        metrics = finite(eigen.metrics())
        metrics.pop("noise_scale", None)  # steps of one trajectory are not samples of one distribution
        self.recorder.scalars(step, {f"window/{k}": v for k, v in metrics.items()})
        if self.measures.matrices:
            record_array(self.recorder, "window/matrix", step, matrix, ("step", "step"))
            record_array(self.recorder, "window/steps", step, np.array(steps, dtype=np.int64), ("step",))
        if self.measures.spectra:
            record_array(self.recorder, "window/eigenvalues", step, eigen.eigenvalues, ("rank",))

    def _measure_product(self, step: int, name: str, gradient: Tensor) -> None:
        eigen = product_spectrum(gradient)
        metrics = finite(eigen.metrics(of_samples=False))
        self.recorder.scalars(step, {f"product/{name}/{key}": value for key, value in metrics.items()})
        if self.measures.spectra:
            record_array(self.recorder, f"product/{name}/eigenvalues", step, eigen.eigenvalues, ("rank",))

    def _guarded(self, what: str, measure: Callable[..., None], *arguments: Any) -> None:
        """Call ``measure``; a failure becomes an event and a warning, or is raised without ``warn``."""
        try:
            measure(*arguments)
        except Exception as error:  # a measurement must not end the run
            if is_interrupt(error):
                raise
            if self._warn is None:
                raise
            self.recorder.event(self._step, "unmeasured", {"what": what, "reason": f"{error}"})
            self._warn(what, f"{type(error).__name__}: {error}")


def _axes(gradient: Tensor) -> tuple[str, ...]:
    names = {1: ("out",), 2: ("out", "in")}
    return names.get(gradient.ndim, tuple(f"axis_{i}" for i in range(gradient.ndim)))
