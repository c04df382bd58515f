"""Lightning: ``Trainer(callbacks=[BacklightCallback()])``.

Works with ``lightning.pytorch`` and, where a script has imported only that, with ``pytorch_lightning``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from backlight.integrations.hosted import HostedCallback, require

_OTHER = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
VERSION = require("pytorch-lightning" if _OTHER else "lightning", "lightning")
"""The release of Lightning that is here."""

if TYPE_CHECKING or not _OTHER:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    from pytorch_lightning import Callback, LightningModule, Trainer


class BacklightCallback(HostedCallback, Callback):
    """Watches every ``fit`` of the trainer that it is given to.

    Gradients are taken as backward left them: after accumulation and unscaling, before clipping and
    ``zero_grad``, at every recorded step of every optimizer, also in manual optimization. What the
    training logs with ``self.log`` is recorded at the trainer's own logging interval, at the end of an
    epoch and of a validation, with ``trainer.global_step``.

    Parameters are those of :class:`backlight.integrations.hosted.HostedCallback`: ``run`` (without it
    ``runs/<name of the LightningModule>-<time>``), ``samples``, ``on_end``, ``summary``, and the settings of
    :func:`backlight.watch` (``monitors``, ``every``, ``groups``, ``thresholds`` and others).
    """

    def _prepare(self) -> None:
        self._logged: dict[str, Any] = {}
        self._step = 0

    # Hooks, called by Lightning on every rank

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach: checkpoints are restored, wrappers are on, nothing has been trained."""
        with self._hosted.shield("on_train_start", "anything of this training run"):
            model = trainer.model if trainer.model is not None else pl_module
            self._logged.clear()
            self._step = trainer.global_step
            self._hosted.begin(
                [model], trainer.optimizers, name=type(pl_module).__name__, step=trainer.global_step
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record what was logged, where the trainer itself passes it to its loggers."""
        step = trainer.global_step
        interval = getattr(trainer, "log_every_n_steps", 1) or 1
        if step != self._step and step // interval != self._step // interval:
            self._log(trainer, "on_train_batch_end")
        self._step = step

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the results of a validation; the sanity check is none."""
        if not trainer.sanity_checking:
            self._log(trainer, "on_validation_end")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record what is logged once an epoch."""
        self._log(trainer, "on_train_epoch_end")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record what came last, and close the run."""
        self._log(trainer, "on_train_end")
        self._hosted.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close a run that failed or was interrupted."""
        self._hosted.end(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close what is still open."""
        self._hosted.end()

    def _log(self, trainer: Trainer, hook: str) -> None:
        if not self._hosted.active:
            return
        with self._hosted.shield(hook, "what the trainer logs"):
            metrics = trainer.callback_metrics
            # A value that was not logged again is the same object.
            fresh = {name: v for name, v in metrics.items() if self._logged.get(name) is not v}
            self._logged = dict(metrics)
            self._hosted.log(fresh, step=trainer.global_step)
