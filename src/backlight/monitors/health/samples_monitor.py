"""Which samples a spike comes from: decomposes the step at which gradients or loss leap, in a forked child.

The child is made when the gradients of the step are final and its weights have not moved, so that what it
computes is exact for this step. It shares nothing with the training run, and exists only at a leap, or at a
step that was requested. In a process with an accelerator a child can neither share device memory nor run
autograd: there the training process computes the step once more, and only where that was requested.
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
from backlight.capture.model_state import preserve_state
from backlight.capture.step_inputs import StepInputs
from backlight.devices import is_accelerator, is_in_use, lacks_memory_of_a_pass
from backlight.distributed import world
from backlight.generators import kept_random
from backlight.interrupts import is_interrupt
from backlight.monitor import NEVER, Gradients, Monitor, RunHandle, StoredStep
from backlight.monitors.health.instrument.sample_shares import samples_of_step
from backlight.monitors.health.model.history import LiveLeaps, live_limits
from backlight.monitors.health.model.spike_samples import REQUESTED, SAMPLES
from backlight.monitors.health.settings import HealthSettings
from backlight.processes import available_memory, resident_memory
from backlight.records import Layout
from backlight.series import GRADIENT

if TYPE_CHECKING:
    from backlight.session.step_recorder import StepRecord

MAX_STEPS = 4
"""Steps of a process that are decomposed."""

TIMEOUT_S = 120.0
"""Seconds that a child may take."""

SHARDED = "its parameters are sharded over ranks, and a forward pass of one rank alone cannot gather them"
"""Why a step of FSDP is not decomposed."""

END_TIMEOUT_S = 5.0
"""Seconds that the end of the run waits for a child."""

KNOWN_STEPS = 64
"""Recorded steps whose dataset indices are kept where a leap is known late."""

_NORM = GRADIENT.floats.index("norm")
_MEASURED, _NAN, _INF = (GRADIENT.integers.index(name) for name in ("measured", "nan", "inf"))


class SpikeSamplesMonitor(Monitor):
    """Finds the samples that carry a spike or give a gradient that is not finite, or a requested step.

    In a process with an accelerator dataset indices of the batch are recorded only, unless the step was
    requested. A leap on an accelerator is known late, when its step is over.
    """

    name = "spike_samples"
    requested_by = "health"
    records = "samples of spikes"
    after = ("health", "stalls")  # whose norms it reads; a wait for a child is no stall

    def attach(self, run: RunHandle) -> None:
        """Hold the inputs of each step by reference."""
        self._run = run
        self._inputs = StepInputs()
        self._limits = live_limits(run.settings.thresholds)
        self._leaps: defaultdict[tuple[int, int], LiveLeaps] = defaultdict(lambda: LiveLeaps(self._limits))
        self._child: tuple[int, dict[str, Any], ForkedChild] | None = None
        self._receiving = threading.Lock()
        self._answers: dict[int, dict[str, Any]] = {}
        offset = run.writer.step_offset
        self._requested = sorted(
            {step - offset for step in HealthSettings.of(run.settings).decompose if step >= offset}
        )
        self._on_accelerator = False
        self._left, self._last, self._was_ill = MAX_STEPS, -self._limits.spike_gap - 1, False
        run.listen(self._inputs)
        run.follow_forwards()

    def detach(self, error: BaseException | None) -> None:
        """Wait for a child."""
        self._inputs.restart()
        self._receive(wait=True)

    def wants_step(self, step: int) -> bool:
        """Return whether the step was requested."""
        return step in self._requested

    def next_step(self, step: int) -> int:
        """Return the next step that was requested."""
        return next((step_wanted for step_wanted in self._requested if step_wanted > step), NEVER)

    def on_step_start(self, step: int) -> None:
        """Drop what is held of the step before."""
        self._inputs.restart()
        self._inputs.is_requested = step in self._requested
        self._inputs.keeps = not self._on_accelerator or self._inputs.is_requested

    def on_gradients_ready(self, gradients: Gradients, record: StepRecord) -> None:
        """Decompose the step if its gradients or its loss leap."""
        parts = [p for p in record.parts if p.rows is gradients.rows and p.series == "gradient"]
        if not parts or not gradients.rows:
            return
        is_requested, pending = self._inputs.is_requested, parts[0].pending
        if any(map(is_accelerator, {p.device.type for p in gradients.parameters} - {"cpu"})):
            self._on_accelerator = True
            self._know(record.step, self._here(gradients) if is_requested else self._indices())
        elif pending.ready() and (self._inputs.calls or is_requested):
            loss = self._inputs.loss
            # On the host: numpy reads it where it lies.
            value = loss.detach().double().numpy().item() if _is_plain(loss) else None
            number = value
            if value is not None and self._inputs.scaler is not None:
                number = value / self._inputs.scale()
            floats, integers = pending.arrays()
            cause = self._cause(_key(gradients.rows), floats, integers, number, record.scalars)
            if cause or is_requested:
                self._decompose(cause, gradients, record.step)

    def _cause(
        self,
        key: tuple[int, int],
        floats: Any,
        integers: Any,
        loss: float | None,
        scalars: Mapping[str, float],
    ) -> dict[str, Any]:
        """Return how the step leaps, with what is usual; empty where it does not."""
        measured = integers[:, _MEASURED] > 0
        has_ill_loss = loss is not None and not math.isfinite(loss)
        if has_ill_loss or integers[measured][:, [_NAN, _INF]].any():
            # A gradient scaler makes values that are not finite on purpose.
            first, self._was_ill = not self._was_ill and self._inputs.scaler is None, True
            return {"cause": "non_finite"} if first else {}
        norm = math.sqrt(float((floats[measured, _NORM] ** 2).sum()))
        cause: dict[str, Any] = {}
        for name, usual in self._leaps[key].add(norm, loss, scalars).items():
            cause |= {"cause": name, name: norm if name == "norm" else loss, f"usual_{name}": usual}
        return cause

    def _decompose(self, cause: Mapping[str, Any], gradients: Gradients, step: int) -> None:
        if self.wants_step(step):
            self._receive(wait=True)
        elif self._child is not None or not self._may_decompose(step):
            return
        facts = _facts(cause)
        if _is_sharded(gradients):
            self._record(step, facts, {"calls": [], "reason": SHARDED})
            return
        if is_in_use():
            answer = self._here(gradients) if self.wants_step(step) else self._not_here(step, self._indices())
            self._record(step, facts, answer)
            return
        if available_memory() < resident_memory():
            # What the child changes is copied, and it needs what a forward and backward pass do.
            self._record(step, facts, {"calls": [], "reason": "there was too little memory for a child"})
            return
        try:
            self._child = step, facts, ForkedChild(functools.partial(_alone, self._computation(gradients)))
        except (ChildError, OSError) as error:
            self._record(step, facts, {"calls": [], "reason": str(error)})

    def _may_decompose(self, step: int) -> bool:
        """Count a leap, and return whether it is one of the first and no neighbour of another."""
        if not self._left or step - self._last <= self._limits.spike_gap:
            return False
        self._left, self._last = self._left - 1, step
        return True

    def _computation(self, gradients: Gradients) -> functools.partial[dict[str, Any]]:
        return functools.partial(
            samples_of_step,
            list(self._inputs.calls),
            gradients.parameters,
            gradients.tensors,
            [gradients.table.records[row].name for row in gradients.rows],
            scale=1.0 if gradients.scale is None else float(gradients.scale),
            loss_scale=self._inputs.scale(),
            world_size=world().size,
        )

    def _here(self, gradients: Gradients) -> dict[str, Any]:
        """Decompose the step in this process, and leave models and random state as they were."""
        if _is_sharded(gradients):
            return {**self._indices(), "reason": SHARDED}
        tensors = [gradient for gradient in gradients.tensors if gradient is not None]
        for device in {gradient.device for gradient in tensors if is_accelerator(gradient.device)}:
            # The pass and its gradients: torch would empty its cache before it gives up.
            size = sum(gradient.nbytes for gradient in tensors if gradient.device == device)
            if lacks_memory_of_a_pass(device, size):
                reason = f"there was too little free memory on {device} for a pass more"
                return {**self._indices(), "reason": reason}
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(kept_random())
                modules = [module for call in self._inputs.calls if (module := call.module) is not None]
                for module in {id(module_of): module_of for module_of in modules}.values():
                    stack.enter_context(preserve_state(module))
                answer = self._computation(gradients)()
        except Exception as error:
            if is_interrupt(error):
                raise
            answer = {"calls": [], "reason": f"{type(error).__name__}: {error}".split("\n")[0]}
        return answer if answer["calls"] else {**answer, **self._indices()}

    def _indices(self) -> dict[str, Any]:
        return {
            "calls": [
                {"number": n, "batch": call.batch, "indices": call.indices, "top": []}
                for n, call in enumerate(self._inputs.calls)
            ]
        }

    def _not_here(self, step: int, answer: Mapping[str, Any]) -> dict[str, Any]:
        number = step + self._run.writer.step_offset
        reason = (
            "in a process with an accelerator no forked child can compute it; in a run with "
            f"--set health.decompose={number} the training process does"
        )
        return {**answer, "reason": reason}

    def _know(self, step: int, answer: dict[str, Any]) -> None:
        if len(self._answers) >= KNOWN_STEPS:
            del self._answers[next(iter(self._answers))]
        self._answers[step] = answer

    # On the writer thread

    def on_step_stored(self, step: StoredStep) -> None:
        """Look for leaps that are known only now, and for the answer of a child."""
        self._receive(wait=False)
        answer = self._answers.pop(step.step, None)
        if answer is None or ("gradient", 0) not in step.blobs:
            return
        floats, integers = step.blobs["gradient", 0]
        cause = self._cause((len(floats), 0), floats, integers, step.scalars.get("loss"), step.scalars)
        if self.wants_step(step.step):
            self._record(step.step, _facts(cause), answer)
        elif cause and self._may_decompose(step.step):
            self._record(step.step, _facts(cause), self._not_here(step.step, answer))

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
                hurries = wait and not self.wants_step(step)
                timeout_s = min(TIMEOUT_S, forked.age_s + END_TIMEOUT_S) if hurries else TIMEOUT_S
                answer = forked.answer(timeout_s, wait=wait)
            except ChildError as error:
                answer = {"calls": [], "reason": f"the child that decomposes the step {error}"}
            if answer is not None:
                self._child = None
                self._record(step, facts, answer)
        finally:
            self._receiving.release()

    def _record(self, step: int, facts: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        calls = [{**call, "indices": list(call.get("indices") or ()) or None} for call in answer["calls"]]
        self._run.recorder.event(step, SAMPLES, {**facts, **answer, "calls": calls})


def _alone(compute: functools.partial[dict[str, Any]]) -> dict[str, Any]:
    """Compute in the child: quietly, behind the training run, and first to go where memory ends."""
    silence()
    with contextlib.suppress(OSError):
        os.nice(10)
    with contextlib.suppress(OSError), pathlib.Path("/proc/self/oom_score_adj").open("w") as file:
        file.write("1000")
    torch.set_num_threads(1)  # those of the parent's pool are not here
    return compute()


def _is_sharded(gradients: Gradients) -> bool:
    records = gradients.table.records
    return any(records[row].placement.layout is Layout.SHARD for row in gradients.rows)


def _facts(cause: Mapping[str, Any]) -> dict[str, Any]:
    return {"cause": REQUESTED, **cause, "ranks": world().size}


def _key(rows: Sequence[int]) -> tuple[int, int]:
    return len(rows), rows[0]


def _is_plain(loss: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return (
        loss is not None
        and type(loss) is torch.Tensor
        and loss.device.type == "cpu"
        and not loss.is_complex()
    )
