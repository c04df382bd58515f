"""Active probes of the first step of a script: what ``backlight check`` runs.

The step is recorded, and replayed in a forked child before its backward begins: nothing of it reaches the
script. Where an accelerator is in use, which no child can share, the probes restore the state themselves.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from backlight import devices
from backlight.capture.forked_child import ChildError, in_child, silence
from backlight.capture.hub import HUB
from backlight.diagnose.checkpointing.observer import CheckpointObserver
from backlight.diagnose.probes.one_batch import probe_one_batch
from backlight.diagnose.probes.result import Outcome, Probe, ProbeResult
from backlight.diagnose.probes.sequence import (
    SequenceProbeError,
    Sequences,
    probe_future,
    probe_targets,
    probe_through_time,
)
from backlight.diagnose.probes.tape import Step, StepTape, TapeError, restored_state
from backlight.diagnose.script_observer import ScriptObserver
from backlight.user_code import SourceLine

TIMEOUT_S = 600.0
"""Time after which the probes are ended."""

RECOMPUTED = frozenset({"state", "random", "recomputation"})
"""Kinds of remarks on a checkpointed region that mean a gradient other than that of the forward."""


class ProbeObserver(ScriptObserver):
    """Probes the first step that is about to begin its backward; a context manager around the script.

    ``max_steps`` are the steps after which the script is ended; None for right after the probes.
    """

    def __init__(self, probes: frozenset[Probe], max_steps: int | None, end: Callable[[], None]) -> None:
        super().__init__(max_steps, end)
        self._probes = probes
        self._tape = StepTape(self._calls)
        self.results: list[ProbeResult] = []
        self.line: SourceLine | None = None
        self.loss: float | None = None

    def _record(self) -> Iterator[Any]:
        self._patches.replace(torch.utils.checkpoint, "checkpoint", self._wrap_checkpoint)
        yield self._tape

    def _wrap_checkpoint(self, original: Any) -> Any:
        """Return a function that scripts may import by name, and that finds a later observer of regions."""

        @functools.wraps(original)
        def checkpoint(*args: Any, **kwargs: Any) -> Any:
            current = torch.utils.checkpoint.checkpoint
            return (original if current is checkpoint else current)(*args, **kwargs)

        return checkpoint

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Probe the step whose forward is complete."""
        self._begins_step()
        if not self.backwards:
            self._tape.paused = True
            self._probe(roots)
            self._tape.clear()
        self.backwards += 1
        if self._max_steps is None or self._is_over():
            self._end()

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        """A step is complete."""
        self._stepped = self.backwards > 0

    def _probe(self, roots: Sequence[Tensor]) -> None:
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if ranks > 1:
            self._fail(f"the script trains on {ranks} ranks; run it on one")
            return
        try:
            step = Step.of(self._tape, roots)
        except TapeError as error:
            self._fail(str(error))
            return
        self._patches.undo()
        self.line, self.loss = step.line, float(step.root.detach())
        try:
            if devices.is_in_use():
                with HUB.aside():
                    found = _answers(step, self._probes)
            else:
                found = in_child(lambda: _in_child(step, self._probes), TIMEOUT_S)
        except (ChildError, TapeError, RuntimeError) as error:
            self._fail(f"the replay {error}" if isinstance(error, ChildError) else str(error))
            return
        self.results = [ProbeResult(Probe(p), Outcome(o), text) for p, o, text in found]

    def _fail(self, why: str) -> None:
        self.results = [ProbeResult(p, Outcome.NOT_PROBED, why) for p in Probe if p in self._probes]


def _in_child(step: Step, probes: frozenset[Probe]) -> list[tuple[str, str, str]]:
    """Answer quietly and on one thread: those of the parent's pool are not in the child."""
    silence()
    torch.set_num_threads(1)
    return _answers(step, probes)


def _answers(step: Step, probes: frozenset[Probe]) -> list[tuple[str, str, str]]:
    found: list[ProbeResult] = []
    with torch.enable_grad():
        if probes & {Probe.FUTURE, Probe.TARGETS, Probe.THROUGH_TIME}:
            found += _sequence(step, probes)
        if Probe.OVERFIT in probes:
            found += _attempt((Probe.OVERFIT, Probe.LABELS), lambda: probe_one_batch(step))
        if Probe.RECOMPUTATION in probes:
            found += _attempt((Probe.RECOMPUTATION,), lambda: [_recomputation(step)])
    return [(one.probe.value, one.outcome.value, one.text) for one in found]


def _sequence(step: Step, probes: frozenset[Probe]) -> list[ProbeResult]:
    wanted = {
        Probe.FUTURE: probe_future, Probe.TARGETS: probe_targets, Probe.THROUGH_TIME: probe_through_time,
    }  # fmt: skip
    chosen = {probe: ask for probe, ask in wanted.items() if probe in probes}

    def ask() -> list[ProbeResult]:
        with restored_state(step.modules()):
            sequences = Sequences.of(step)
            return [one(sequences) for one in chosen.values()]

    return _attempt(tuple(chosen), ask)


def _attempt(probes: Sequence[Probe], ask: Callable[[], list[ProbeResult]]) -> list[ProbeResult]:
    try:
        return ask()
    except (SequenceProbeError, TapeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        return [ProbeResult(probe, Outcome.NOT_PROBED, reason) for probe in probes]


def _recomputation(step: Step) -> ProbeResult:
    """Run the step again, and compare each checkpointed region with its recomputation."""
    observer = CheckpointObserver(2, lambda: None)
    with restored_state(step.modules()), observer, contextlib.ExitStack() as grads:
        for parameter in (p for module in step.modules() for p in module.parameters()):
            grads.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        torch.autograd.backward(step.replay(keeps_random=False)[-1])
    regions = observer.regions
    if not regions:
        return ProbeResult(Probe.RECOMPUTATION, Outcome.NOT_PROBED, "no checkpointed region")
    for region in regions:
        for remark in region.remarks:
            if remark.kind in RECOMPUTED:
                text = f"{region.function} at {region.line}: {remark.text}"
                return ProbeResult(Probe.RECOMPUTATION, Outcome.FAILED, text)
    amount = f"{len(regions)} region{'s' if len(regions) > 1 else ''}"
    text = f"{amount} computed the same values again"
    return ProbeResult(Probe.RECOMPUTATION, Outcome.PASSED, text)
