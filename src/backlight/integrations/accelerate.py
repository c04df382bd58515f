"""Accelerate: ``with watch(accelerator, model, optimizer, run="runs/first"):`` around the loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from backlight.integrations.hosted import Hosted, Hosting, OnEnd, require

VERSION = require("accelerate", "accelerate")
"""The release of Accelerate that is here."""

from accelerate.tracking import GeneralTracker  # noqa: E402 - only once it is known to be recent enough

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import nn

    from backlight.monitor import Samples
    from backlight.session.watch import Watch


class AcceleratedWatch(Hosting):
    """One watched loop, made by :func:`watch`; nothing of it raises inside the loop."""

    def __init__(
        self,
        accelerator: Accelerator,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        hosted: Hosted,
        name: str,
        step: int,
    ) -> None:
        self._accelerator = accelerator
        self._models = list(models)
        self._optimizers = list(optimizers)
        self._hosted = hosted
        self._name = name
        self._step = step
        self._tracker = _Tracker(hosted)

    def __enter__(self) -> Self:
        """Attach, and listen to ``accelerator.log``."""
        self._hosted.begin(self._models, self._optimizers, name=self._name, step=self._step)
        with self._hosted.shield("watch", "what accelerator.log is given"):
            self._accelerator.trackers.append(self._tracker)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Remove everything and close the run; an exception goes on its way."""
        with self._hosted.shield("watch", "nothing, but a tracker is left behind"):
            trackers = self._accelerator.trackers
            trackers[:] = [tracker for tracker in trackers if tracker is not self._tracker]
        clean = isinstance(error, SystemExit) and error.code in {None, 0}
        self._hosted.end(None if clean else error)

    def log(self, step: int | None = None, **scalars: Any) -> None:
        """Record numbers of your own at the current step, on every rank."""
        self._hosted.log(scalars, step=step)


def watch(
    accelerator: Accelerator,
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    run: str | os.PathLike[str] | None = None,
    step: int = 0,
    samples: Samples | None = None,
    on_end: OnEnd | None = None,
    summary: bool = True,
    **settings: Any,
) -> AcceleratedWatch:
    """Watch a loop of Accelerate; use the result as a context manager around it.

    Parameters
    ----------
    accelerator, model, optimizer:
        The Accelerator, and what its ``prepare`` returned; several models or optimizers as a list.
    run:
        The run directory; None for ``runs/<script>-<time>``. A directory that holds a run gets a new attempt.
    step:
        Optimizer steps done before, after ``accelerator.load_state``.
    samples:
        For the monitors grokking and spectra; see :func:`backlight.watch`.
    on_end:
        Called on the main process with the list of findings at the end.
    summary:
        Print the findings once at the end, on the main process.
    **settings:
        Settings of :func:`backlight.watch`.

    Returns
    -------
    AcceleratedWatch
        Not yet attached. While it is entered, what ``accelerator.log`` is given is recorded.

    Raises
    ------
    ValueError
        If a setting is unknown or out of range.
    """
    hosted = Hosted("accelerate.watch", run, settings, samples=samples, on_end=on_end, summary=summary)
    models: list[Any] = list(model) if isinstance(model, (list, tuple)) else [model]
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    name = Path(sys.argv[0] if sys.argv else "").stem or type(models[0]).__name__
    return AcceleratedWatch(accelerator, models, optimizers, hosted, name, step)


class _Tracker(GeneralTracker):  # type: ignore[misc]  # Accelerate has no types
    """Takes what ``accelerator.log`` is given."""

    name = "backlight"
    requires_logging_directory = False

    def __init__(self, hosted: Hosted) -> None:
        super().__init__(_blank=True)
        self._hosted = hosted

    @property
    def tracker(self) -> Watch | None:
        """The watch behind it."""
        return self._hosted.watch

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Nothing: the run has its own fingerprint."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record what is one number."""
        self._hosted.log(values, step=step)
