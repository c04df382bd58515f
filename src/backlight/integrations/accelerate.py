"""Accelerate: ``with watch(accelerator, model, optimizer):`` around the loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backlight.integrations.hosted import Hosted, HostedWatch, OnEnd, require
from backlight.session.settings import suggest_keywords

VERSION = require("accelerate", "accelerate")
"""The release of Accelerate that is here."""

from accelerate.tracking import GeneralTracker  # noqa: E402 - only once it is known to be recent enough

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import nn

    from backlight.monitor import Samples
    from backlight.session.watch import Watch


class AcceleratedWatch(HostedWatch):
    """One watched loop, made by :func:`watch`; what ``accelerator.log`` is given is recorded."""

    def __init__(
        self,
        accelerator: Accelerator,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        hosted: Hosted,
        step: int,
    ) -> None:
        super().__init__(hosted)
        self._accelerator = accelerator
        self._models = models
        self._optimizers = optimizers
        self._step = step
        self._tracker = _Tracker(hosted)

    def _attach(self) -> None:
        name = Path(sys.argv[0] if sys.argv else "").stem or type(self._models[0]).__name__
        self._hosted.begin(self._models, self._optimizers, name=name, step=self._step)
        with self._hosted.shield("watch", "what accelerator.log is given"):
            self._accelerator.trackers.append(self._tracker)

    def _detach(self) -> None:
        with self._hosted.shield("watch", "nothing, but a tracker is left behind"):
            trackers = self._accelerator.trackers
            trackers[:] = [tracker for tracker in trackers if tracker is not self._tracker]


@suggest_keywords
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
    step:
        Optimizer steps done before, after ``accelerator.load_state``.
    run, samples, on_end, summary, **settings:
        As for :class:`backlight.integrations.hosted.HostedCallback`. ``run`` is by default
        ``runs/<script>-<time>``.

    Returns
    -------
    AcceleratedWatch
        Not yet attached. While it is entered, what ``accelerator.log`` is given is recorded.

    Raises
    ------
    ValueError
        If a setting is out of range.
    """
    hosted = Hosted("accelerate.watch", run, settings, samples=samples, on_end=on_end, summary=summary)
    models: list[Any] = list(model) if isinstance(model, (list, tuple)) else [model]
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    return AcceleratedWatch(accelerator, models, optimizers, hosted, step)


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
