"""Active probes of the first step of a script: what ``backlight check`` runs.

The step is recorded, and replayed in a forked child before its backward begins: nothing of it reaches the
script. Where an accelerator is in use, which no child can share, the probes restore the state themselves.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import default_collate

from backlight import devices
from backlight.capture.batches import tensors_in
from backlight.capture.forked_child import ChildError, in_child, silence
from backlight.capture.hub import HUB
from backlight.diagnose.checkpointing.observer import CheckpointObserver
from backlight.diagnose.probes.parts import (
    probe_adapters,
    probe_first_loss,
    probe_frozen,
    probe_gradients,
    probe_inputs,
)
from backlight.diagnose.probes.result import Probe, ProbeOutcome, ProbeResult
from backlight.diagnose.probes.samples import LOSSES, SampleProbeError, probe_samples
from backlight.diagnose.probes.sequence import (
    SequenceProbeError,
    Sequences,
    probe_future,
    probe_targets,
    probe_through_time,
)
from backlight.diagnose.probes.tape import StepTape, TapedStep, TapeError, restored_state
from backlight.diagnose.script_observer import ScriptObserver
from backlight.user_code import SourceLine

STEPS = 50
"""Steps on the batch at each learning rate."""

RATES = (1e-3, 1e-2, 1e-4)
"""Learning rates of Adam, until one of them lowers the loss."""

FALLEN = 0.1
"""Share of the loss by which it must fall."""

SHUFFLES = 4
MIN_ROWS = 16
"""Targets below which a shuffle leaves too much as it was."""

TIMEOUT_S = 60.0
"""Time after which a probe ends with what it has."""


class _Targets(TorchFunctionMode):
    """Gives the loss functions of torch their targets in another order; ``rows`` is how many there are."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self._seed = seed
        self.rows = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, a loss with shuffled targets."""
        kwargs = dict(kwargs or {})
        if func in LOSSES:
            target = kwargs.pop("target", args[1] if len(args) > 1 else None)
            if isinstance(target, Tensor) and target.ndim and bool((target != target.reshape(-1)[0]).any()):
                self.rows = max(self.rows, target.shape[0])
                if self._seed is not None:
                    generator = torch.Generator().manual_seed(self._seed)
                    target = target[torch.randperm(target.shape[0], generator=generator).to(target.device)]
            args = (args[0], target, *args[2:]) if args else (kwargs.pop("input"), target)
        return func(*args, **kwargs)


def trained(
    step: TapedStep, rate: float, steps: int, deadline: float, seed: int | None = None
) -> tuple[list[float], int]:
    """Return the losses of ``steps`` updates on one batch, and how many targets its loss has.

    The same random numbers are drawn in each, so that dropout drops the same. Weights are restored.
    """
    losses: list[float] = []
    with restored_state(step.modules()):
        parameters = [p for module in step.modules() for p in module.parameters() if p.requires_grad]
        grads = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        optimizer = torch.optim.Adam(parameters, lr=rate)
        try:
            with _Targets(seed) as targets:
                while len(losses) <= steps and (len(losses) < 2 or time.monotonic() < deadline):
                    loss = step.replay()[-1]
                    losses.append(float(loss.detach()))
                    optimizer.zero_grad()
                    torch.autograd.backward(loss)
                    optimizer.step()
        finally:
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
    return losses, targets.rows


def probe_one_batch(step: TapedStep) -> list[ProbeResult]:
    """Probe whether the loss of one batch falls, and whether less with shuffled labels."""
    deadline = time.monotonic() + TIMEOUT_S
    best: list[float] = []
    rows = 0
    for rate in RATES:
        losses, rows = trained(step, rate, STEPS, deadline)
        if not best or min(losses, key=_or_infinite) < min(best, key=_or_infinite):
            best = losses
        if _has_fallen(losses):
            text = (
                f"the loss of one batch falls from {losses[0]:.3g} to {min(losses):.3g} in {len(losses) - 1} "
                f"steps of Adam at {rate:g}"
            )
            return [
                ProbeResult(Probe.OVERFIT, ProbeOutcome.PASSED, text),
                probe_labels(step, rate, rows, time.monotonic() + TIMEOUT_S),
            ]
    if len(best) <= STEPS // 2:
        text = f"a step takes too long: {len(best) - 1} of {STEPS} in {TIMEOUT_S:.0f} s"
        return [ProbeResult(probe, ProbeOutcome.NOT_PROBED, text) for probe in (Probe.OVERFIT, Probe.LABELS)]
    text = (
        f"the loss of one batch begins at {best[0]:.3g} and does not fall below "
        f"{min(best, key=_or_infinite):.3g} in {STEPS} steps of Adam at "
        f"{', '.join(f'{rate:g}' for rate in RATES)}: the model cannot learn it"
    )
    return [
        ProbeResult(Probe.OVERFIT, ProbeOutcome.FAILED, text),
        ProbeResult(Probe.LABELS, ProbeOutcome.NOT_PROBED, "the loss does not fall"),
    ]


def _or_infinite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def _has_fallen(losses: Sequence[float]) -> bool:
    return losses[0] - min(losses, key=_or_infinite) > FALLEN * abs(losses[0])


def probe_labels(step: TapedStep, rate: float, rows: int, deadline: float) -> ProbeResult:
    """Probe whether labels are learned faster in their own order: then they are related to the inputs."""
    if rows < MIN_ROWS:
        why = "its loss is none of torch's" if not rows else f"the batch has {rows} targets"
        return ProbeResult(Probe.LABELS, ProbeOutcome.NOT_PROBED, f"{why}; expected at least {MIN_ROWS}")
    ordered = _fall(trained(step, rate, STEPS, deadline)[0])
    shuffled = sorted(_fall(trained(step, rate, STEPS, deadline, seed)[0]) for seed in range(1, SHUFFLES + 1))
    numbers = (
        f"the loss falls by {ordered:.3g}, with shuffled labels by {shuffled[0]:.3g} to {shuffled[-1]:.3g}"
    )
    if ordered > shuffled[-1]:
        text = f"labels are learned faster in their own order: {numbers}"
        return ProbeResult(Probe.LABELS, ProbeOutcome.PASSED, text)
    text = f"unrelated to the inputs, or too few to learn how: {numbers}"
    return ProbeResult(Probe.LABELS, ProbeOutcome.UNDECIDED, text)


def _fall(losses: Sequence[float]) -> float:
    return losses[0] - losses[-1]


TIMEOUT_S = 600.0
"""Time after which the probes are ended."""

PARTS: dict[Probe, Callable[[TapedStep], list[ProbeResult]]] = {
    Probe.INPUTS: probe_inputs, Probe.FIRST_LOSS: probe_first_loss, Probe.FROZEN: probe_frozen,
    Probe.GRADIENTS: probe_gradients, Probe.ADAPTERS: probe_adapters,
}  # fmt: skip
"""Probes of the parts of a model."""

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
        self._stacked: set[int] = set()  # numbers of samples that a loader stacks along the first axis

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

    def batch_given(self, iterator: Any, index: int, batch: Any) -> None:
        """Note how many samples a loader has stacked."""
        if getattr(iterator, "_collate_fn", None) is default_collate:
            self._stacked = {len(x) for x in tensors_in(batch) if x.ndim}

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
            step = TapedStep.of(self._tape, roots)
        except TapeError as error:
            self._fail(str(error))
            return
        self._patches.undo()
        self.line, self.loss = step.line, float(step.root.detach())
        try:
            if devices.is_in_use():
                with HUB.aside():
                    answers = _answers(step, self._probes, self._stacked)
            else:
                answers = in_child(lambda: _in_child(step, self._probes, self._stacked), TIMEOUT_S)
        except (ChildError, TapeError, RuntimeError) as error:
            self._fail(f"the replay {error}" if isinstance(error, ChildError) else str(error))
            return
        self.results = [ProbeResult(Probe(p), ProbeOutcome(o), text) for p, o, text in answers]

    def _fail(self, why: str) -> None:
        self.results = [ProbeResult(p, ProbeOutcome.NOT_PROBED, why) for p in Probe if p in self._probes]


def _in_child(
    step: TapedStep, probes: frozenset[Probe], stacked: AbstractSet[int]
) -> list[tuple[str, str, str]]:
    """Answer quietly and on one thread: those of the parent's pool are not in the child."""
    silence()
    torch.set_num_threads(1)
    return _answers(step, probes, stacked)


def _answers(
    step: TapedStep, probes: frozenset[Probe], stacked: AbstractSet[int]
) -> list[tuple[str, str, str]]:
    results: list[ProbeResult] = []
    with torch.enable_grad():
        if probes & {Probe.FUTURE, Probe.TARGETS, Probe.THROUGH_TIME}:
            results += _sequence(step, probes)
        if Probe.SAMPLES in probes:
            results += _attempt((Probe.SAMPLES,), lambda: [probe_samples(step, stacked)])
        for probe, ask in PARTS.items():
            if probe in probes:
                results += _attempt((probe,), functools.partial(ask, step))
        if Probe.OVERFIT in probes:
            results += _attempt((Probe.OVERFIT, Probe.LABELS), lambda: probe_one_batch(step))
        if Probe.RECOMPUTATION in probes:
            results += _attempt((Probe.RECOMPUTATION,), lambda: [_recomputation(step)])
    return [(result.probe.value, result.outcome.value, result.text) for result in results]


def _sequence(step: TapedStep, probes: frozenset[Probe]) -> list[ProbeResult]:
    wanted = {
        Probe.FUTURE: probe_future, Probe.TARGETS: probe_targets, Probe.THROUGH_TIME: probe_through_time,
    }  # fmt: skip
    chosen = {probe: ask for probe, ask in wanted.items() if probe in probes}

    def ask() -> list[ProbeResult]:
        with restored_state(step.modules()):
            sequences = Sequences.of(step)
            return [probe(sequences) for probe in chosen.values()]

    return _attempt(tuple(chosen), ask)


def _attempt(probes: Sequence[Probe], ask: Callable[[], list[ProbeResult]]) -> list[ProbeResult]:
    try:
        return ask()
    except (SequenceProbeError, SampleProbeError, TapeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        return [ProbeResult(probe, ProbeOutcome.NOT_PROBED, reason) for probe in probes]


def _recomputation(step: TapedStep) -> ProbeResult:
    """Run the step again, and compare each checkpointed region with its recomputation."""
    observer = CheckpointObserver(2, lambda: None)
    with restored_state(step.modules()), observer, contextlib.ExitStack() as grads:
        for parameter in (p for module in step.modules() for p in module.parameters()):
            grads.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        torch.autograd.backward(step.replay(keeps_random=False)[-1])
    regions = observer.regions
    if not regions:
        return ProbeResult(Probe.RECOMPUTATION, ProbeOutcome.NOT_PROBED, "no checkpointed region")
    for region in regions:
        for remark in region.remarks:
            if remark.kind in RECOMPUTED:
                text = f"{region.function} at {region.line}: {remark.text}"
                return ProbeResult(Probe.RECOMPUTATION, ProbeOutcome.FAILED, text)
    amount = f"{len(regions)} region{'s' if len(regions) > 1 else ''}"
    text = f"{amount} computed the same values again"
    return ProbeResult(Probe.RECOMPUTATION, ProbeOutcome.PASSED, text)
