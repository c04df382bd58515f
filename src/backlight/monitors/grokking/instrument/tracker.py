"""A live training at a logged step → arrays and scalars for a sink, whoever runs the loop.

What backward left in ``.grad`` gives the gradient itself, the products of its matrices and the window
over the last steps. What needs per-sample gradients comes from a fixed probe batch, see
:mod:`backlight.monitors.grokking.instrument.probe_batch`. Nothing of the training is changed by either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from backlight.measure.gram.eigenvalues import product_spectrum, spectrum
from backlight.monitors.grokking.instrument.gradient_history import Sketch, Window
from backlight.monitors.grokking.model.spectrum_fields import finite

if TYPE_CHECKING:
    from backlight.monitors.grokking.instrument.probe_batch import Probe
    from backlight.monitors.grokking.model.measures import Measures

_TYPES = {"float32": torch.float32, "float64": torch.float64}


class Sink(Protocol):
    """Where a tracker puts what it measures; :class:`backlight.store.write.writer.RunWriter` is one."""

    def scalars(self, step: int, values: Mapping[str, float], source: str = "backlight") -> None:
        """Take scalars of one step."""

    def array(
        self,
        name: str,
        step: int,
        values: Any,
        *,
        dims: tuple[str, ...] = (),
        unit: str = "1",
        encoding: str = "plain",
    ) -> None:
        """Take one array."""

    def event(self, step: int | None, kind: str, payload: Mapping[str, Any]) -> None:
        """Take an event."""


class Tracker:
    """Measures the geometry of gradients at logged steps.

    Parameters
    ----------
    measures:
        What is measured; may be exchanged for cheaper ones while the training runs.
    sink:
        Where everything goes.
    probe:
        Per-sample gradients of a probe batch; None where there are no samples.
    warn:
        Called as ``warn(what, reason)`` with what could not be measured at a step. None lets the
        error pass.
    """

    def __init__(
        self,
        measures: Measures,
        sink: Sink,
        probe: Probe | None = None,
        warn: Callable[[str, str], None] | None = None,
    ) -> None:
        self.measures = measures
        self.sink = sink
        self.probe = probe
        self._warn = warn
        self._window = Window(measures.window_steps)
        self._sketch = Sketch(measures.sketch_rows)
        self._step = -1
        self._held: dict[str, Tensor] = {}

    def wants(self, step: int) -> bool:
        """Tell whether ``step`` is a logged one."""
        return self.measures.logs(step)

    def gradients(self, step: int, gradients: Iterable[tuple[str, Tensor | None]]) -> None:
        """Take gradients of ``step``, by parameter name, as backward left them; may come in parts."""
        if step != self._step:
            self._step, self._held = step, {}
        for name, gradient in gradients:
            if gradient is None or name in self._held:
                continue
            dense = gradient.coalesce().to_dense() if gradient.is_sparse else gradient
            # A copy: the optimizer, clipping or the next backward may write over it.
            self._held[name] = dense.detach().to("cpu", copy=True)

    def hold(self, step: int) -> None:
        """Take the gradients of ``step`` into the window, and measure nothing."""
        held, self._held = self._held, {}
        self._window.add(step, held)

    def close(self, step: int) -> None:
        """Measure what the gradients of ``step`` allow, now that all of them are there."""
        held, self._held = self._held, {}
        if not held or step != self._step:
            return
        measures = self.measures
        norm = (
            sum(float(torch.linalg.vector_norm(g, dtype=_wide(g.dtype))) ** 2 for g in held.values()) ** 0.5
        )
        self.sink.scalars(step, {"gradient/norm": norm})
        if measures.due(measures.gradients, step):
            for name, gradient in held.items():
                self._array(f"gradient/{name}", step, stored(gradient, measures.precision), _axes(gradient))
        if measures.window:
            self._window.add(step, held)
            if measures.due(measures.window, step) and len(self._window) > 1:
                self._guarded("window", lambda: self._measure_window(step))
        if measures.sketch:
            self._guarded("sketch", partial(self._sketch.add, held))
            if measures.due(measures.sketch, step):
                self._guarded("sketch", partial(self._sketch.put, step, self.sink, self._array))
        if measures.due(measures.products, step):
            for name, gradient in held.items():
                if gradient.ndim >= 2 and min(gradient.shape[0], gradient[0].numel()) > 1:
                    self._guarded(f"product/{name}", partial(self._measure_product, step, name, gradient))

    def sample(self, step: int) -> None:
        """Measure what needs per-sample gradients, with the weights as they are now."""
        if self.probe is None:
            return
        self._step = step
        self._guarded("gram", partial(self.probe.measure, step, self.measures, self.sink, self._array))
        self._guarded("agop", partial(self.probe.agop, step, self.measures, self.sink, self._array))

    def without_window(self) -> None:
        """Measure no window from here on, and let go of the gradients that it holds."""
        self.measures = replace(self.measures, window=0)
        self._window = Window(self.measures.window_steps)

    def state(self) -> dict[str, Any]:
        """Return what a resumed training needs to measure on as if it had not stopped."""
        return {"window": self._window.state(), "sketch": self._sketch.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state` gave."""
        self._window.load_state(state["window"])
        self._sketch.load_state(state["sketch"])

    def _measure_window(self, step: int) -> None:
        matrix, steps = self._window.gram()
        found = spectrum(torch.from_numpy(matrix))
        told = finite(found.metrics())
        told.pop("noise_scale", None)  # steps of one path are no samples of one distribution
        self.sink.scalars(step, {f"window/{k}": v for k, v in told.items()})
        if self.measures.matrices:
            self._array("window/matrix", step, matrix, ("step", "step"))
            self._array("window/steps", step, np.array(steps, dtype=np.int64), ("step",))
        if self.measures.spectra:
            self._array("window/eigenvalues", step, found.eigenvalues, ("rank",))

    def _measure_product(self, step: int, name: str, gradient: Tensor) -> None:
        found = product_spectrum(gradient)
        told = finite(found.metrics())
        self.sink.scalars(step, {f"product/{name}/{key}": value for key, value in told.items()})
        if self.measures.spectra:
            self._array(f"product/{name}/eigenvalues", step, found.eigenvalues, ("rank",))

    def _array(self, name: str, step: int, values: Any, dims: tuple[str, ...]) -> None:
        if isinstance(values, np.ndarray):
            self.sink.array(name, step, values, dims=dims)
        elif values.dtype is torch.bfloat16:
            bits = values.contiguous().view(torch.uint16).numpy()
            self.sink.array(name, step, bits, dims=dims, encoding="bf16")
        else:
            self.sink.array(name, step, values.numpy(), dims=dims)

    def _guarded(self, what: str, measure: Callable[[], None]) -> None:
        """Measure; where that fails and somebody wants to be told, the training goes on.

        Raises
        ------
        Exception
            Whatever the measurement raised, where nobody is to be warned.
        """
        try:
            measure()
        except Exception as error:  # a measurement must not end a training
            if self._warn is None:
                raise
            self.sink.event(self._step, "unmeasured", {"what": what, "reason": f"{error}"})
            self._warn(what, f"{type(error).__name__}: {error}")


def stored(gradient: Tensor, precision: str) -> Tensor:
    """Return a gradient in the type that it is stored in: its own where that is no wider than asked for."""
    wanted = _TYPES[precision]
    if gradient.is_complex() or gradient.dtype.itemsize <= wanted.itemsize:
        return gradient
    return gradient.to(wanted)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _axes(gradient: Tensor) -> tuple[str, ...]:
    return {1: ("out",), 2: ("out", "in")}.get(
        gradient.ndim, tuple(f"axis_{i}" for i in range(gradient.ndim))
    )
