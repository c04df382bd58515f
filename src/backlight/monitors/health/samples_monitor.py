"""Which samples a spike comes from: decomposes the step at which gradients or loss leap, in a forked child.

The child is made when the gradients of the step are final and its weights have not moved, so that what it
computes is exact for this step. It shares nothing with the training run, and exists only at a leap.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pathlib
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from backlight.capture.forked_child import ChildError, ForkedChild, silence
from backlight.capture.step_inputs import StepInputs
from backlight.devices import is_accelerator
from backlight.distributed import world
from backlight.monitor import NEVER, Gradients, Monitor, RunContext, StoredStep
from backlight.monitors.health.instrument.sample_shares import samples_of_step
from backlight.monitors.health.model.leaps import LiveHistory
from backlight.monitors.health.model.spike_samples import SAMPLES
from backlight.monitors.health.rules.spike import SpikeLimits
from backlight.processes import available_memory, resident_memory
from backlight.store.format.schema import GRADIENT

if TYPE_CHECKING:
    from backlight.session.step_recorder import StepRecord

MAX_STEPS = 4
"""Steps of a process that are decomposed."""

TIMEOUT_S = 120.0
"""Seconds that a child may take."""

END_TIMEOUT_S = 5.0
"""Seconds that the end of the run waits for a child."""

KNOWN_STEPS = 64
"""Recorded steps whose dataset indices are kept where a leap is known late."""

_NORM = GRADIENT.floats.index("norm")
_MEASURED, _NAN, _INF = (GRADIENT.integers.index(name) for name in ("measured", "nan", "inf"))

LIMITS = SpikeLimits()


class SpikeSamplesMonitor(Monitor):
    """Finds the samples that carry a spike or give a gradient that is not finite.

    Where the numbers of a step are on an accelerator, which no child can share, and known late, the dataset
    indices of the batch are recorded only.
    """

    name = "spike_samples"
    requested_by = "health"
    records = "samples of spikes"
    order = 5  # after the gradients, whose norms it reads

    def attach(self, run: RunContext) -> None:
        """Hold the inputs of each step by reference."""
        self._run = run
        self._inputs = StepInputs()
        self._norms: defaultdict[tuple[int, int], LiveHistory] = defaultdict(_history)
        self._losses: defaultdict[tuple[int, int], LiveHistory] = defaultdict(_history)
        self._child: tuple[int, dict[str, Any], ForkedChild] | None = None
        self._receiving = threading.Lock()
        self._known: dict[int, list[dict[str, Any]]] = {}
        self._left, self._last, self._was_ill = MAX_STEPS, -LIMITS.spike_gap - 1, False
        run.listen(self._inputs)
        run.follow_forwards()

    def detach(self, error: BaseException | None) -> None:
        """Wait for a child."""
        self._inputs.restart()
        self._receive(wait=True)

    def next_step(self, step: int) -> int:
        """Return no step: those between recorded ones are not needed."""
        return NEVER

    def on_step_start(self, step: int) -> None:
        """Drop what is held of the step before."""
        self._inputs.restart()

    def on_gradients_ready(self, gradients: Gradients, record: StepRecord) -> None:
        """Decompose the step if its gradients or its loss leap."""
        found = next((p for p in record.parts if p.rows is gradients.rows and p.series == "gradient"), None)
        if found is None or not gradients.rows:
            return
        if any(map(is_accelerator, {p.device.type for p in gradients.parameters})):
            self._inputs.keeps = False
            self._keep_indices(record.step)
        elif found.pending.ready() and self._inputs.calls:
            loss = self._inputs.loss
            # On the host: numpy reads it where it lies.
            value = loss.detach().double().numpy().item() if _is_plain(loss) else None
            number = None if value is None else value / self._inputs.scale()
            floats, integers = found.pending.arrays()
            cause = self._cause(_key(gradients.rows), floats, integers, number)
            if cause:
                self._decompose(cause, gradients, record.step)

    def _cause(self, key: tuple[int, int], floats: Any, integers: Any, loss: float | None) -> dict[str, Any]:
        """Return how the step leaps, with what is usual; empty where it does not."""
        measured = integers[:, _MEASURED] > 0
        has_ill_loss = loss is not None and not math.isfinite(loss)
        if has_ill_loss or integers[measured][:, [_NAN, _INF]].any():
            # A gradient scaler makes values that are not finite on purpose.
            first, self._was_ill = not self._was_ill and self._inputs.scaler is None, True
            return {"cause": "non_finite"} if first else {}
        norm = math.sqrt(float((floats[measured, _NORM] ** 2).sum()))
        norms = self._norms[key]
        cause = {}
        if norms.leaps(norm, LIMITS.spike_norm_ratio):
            cause = {"cause": "norm", "norm": norm, "usual_norm": norms.median}
        if loss is not None:
            losses = self._losses[key]
            if losses.leaps(loss, LIMITS.spike_loss_ratio):
                cause = {"cause": "loss", **cause, "loss": loss, "usual_loss": losses.median}
        return cause

    def _decompose(self, cause: Mapping[str, Any], gradients: Gradients, step: int) -> None:
        if self._child is not None or not self._left or step - self._last <= LIMITS.spike_gap:
            return
        self._left, self._last = self._left - 1, step
        facts = {**cause, "ranks": world().size}
        if available_memory() < resident_memory():
            # What the child changes is copied, and it needs what a forward and backward pass do.
            self._record(step, facts, {"calls": [], "reason": "there was too little memory for a child"})
            return
        names = [gradients.table.records[row].name for row in gradients.rows]
        scale = 1.0 if gradients.scale is None else float(gradients.scale)
        loss_scale = self._inputs.scale()
        compute = functools.partial(
            samples_of_step,
            list(self._inputs.calls),
            gradients.parameters,
            gradients.tensors,
            names,
            scale=scale,
            loss_scale=loss_scale,
            world_size=world().size,
        )
        try:
            self._child = step, facts, ForkedChild(functools.partial(_alone, compute))
        except (ChildError, OSError) as error:
            self._record(step, facts, {"calls": [], "reason": str(error)})

    def _keep_indices(self, step: int) -> None:
        if len(self._known) >= KNOWN_STEPS:
            del self._known[next(iter(self._known))]
        self._known[step] = [
            {"number": n, "batch": call.batch, "indices": call.indices, "top": []}
            for n, call in enumerate(self._inputs.calls)
        ]

    # On the writer thread

    def on_step_stored(self, step: StoredStep) -> None:
        """Look for leaps that are known only now, and for the answer of a child."""
        self._receive(wait=False)
        known = self._known.pop(step.step, None)
        if known is None or ("gradient", 0) not in step.blobs:
            return
        floats, integers = step.blobs["gradient", 0]
        cause = self._cause((len(floats), 0), floats, integers, step.scalars.get("loss"))
        if cause and self._left and step.step - self._last > LIMITS.spike_gap:
            self._left, self._last = self._left - 1, step.step
            calls = [{**one, "indices": list(one["indices"] or ()) or None} for one in known]
            reason = "its gradients are on an accelerator, which a forked child cannot share"
            self._record(step.step, {**cause, "ranks": world().size}, {"calls": calls, "reason": reason})

    def on_flush(self) -> None:
        """Look for the answer of a child."""
        self._receive(wait=False)

    def _receive(self, *, wait: bool) -> None:
        # The training thread waits at the end while the writer thread looks: the second to close the pipe of
        # the child would close a descriptor of the script.
        if not self._receiving.acquire(blocking=wait):
            return
        try:
            child = self._child
            if child is None:
                return
            step, facts, forked = child
            try:
                timeout_s = min(TIMEOUT_S, forked.age_s + END_TIMEOUT_S) if wait else TIMEOUT_S
                answer = forked.answer(timeout_s, wait=wait)
            except ChildError as error:
                answer = {"calls": [], "reason": f"the child that decomposes the step {error}"}
            if answer is not None:
                self._child = None
                self._record(step, facts, answer)
        finally:
            self._receiving.release()

    def _record(self, step: int, facts: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        self._run.recorder.event(step, SAMPLES, {**facts, **answer})


def _alone(compute: functools.partial[dict[str, Any]]) -> dict[str, Any]:
    """Compute in the child: quietly, behind the training run, and first to go where memory ends."""
    silence()
    with contextlib.suppress(OSError):
        os.nice(10)
    with contextlib.suppress(OSError), pathlib.Path("/proc/self/oom_score_adj").open("w") as file:
        file.write("1000")
    torch.set_num_threads(1)  # those of the parent's pool are not here
    return compute()


def _history() -> LiveHistory:
    return LiveHistory(LIMITS.spike_window, LIMITS.spike_minimum, LIMITS.spike_deviations)


def _key(rows: Sequence[int]) -> tuple[int, int]:
    return len(rows), rows[0]


def _is_plain(loss: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return (
        loss is not None
        and type(loss) is torch.Tensor
        and loss.device.type == "cpu"
        and not loss.is_complex()
    )
