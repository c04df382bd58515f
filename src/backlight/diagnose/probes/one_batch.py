"""Probes that train on one batch: whether its loss falls, and whether the order of its labels matters."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from backlight.diagnose.probes.result import Outcome, Probe, ProbeResult
from backlight.diagnose.probes.tape import Step, restored_state

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

LOSSES = (
    functional.cross_entropy, functional.nll_loss, functional.mse_loss, functional.l1_loss,
    functional.smooth_l1_loss, functional.huber_loss, functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
)  # fmt: skip


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
    step: Step, rate: float, steps: int, deadline: float, seed: int | None = None
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


def probe_one_batch(step: Step) -> list[ProbeResult]:
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
                ProbeResult(Probe.OVERFIT, Outcome.PASSED, text),
                probe_labels(step, rate, rows, time.monotonic() + TIMEOUT_S),
            ]
    if len(best) <= STEPS // 2:
        text = f"a step takes too long: {len(best) - 1} of {STEPS} in {TIMEOUT_S:.0f} s"
        return [ProbeResult(probe, Outcome.NOT_PROBED, text) for probe in (Probe.OVERFIT, Probe.LABELS)]
    text = (
        f"the loss of one batch begins at {best[0]:.3g} and does not fall below "
        f"{min(best, key=_or_infinite):.3g} in {STEPS} steps of Adam at "
        f"{', '.join(f'{rate:g}' for rate in RATES)}: the model cannot learn it"
    )
    return [
        ProbeResult(Probe.OVERFIT, Outcome.FAILED, text),
        ProbeResult(Probe.LABELS, Outcome.NOT_PROBED, "the loss does not fall"),
    ]


def _or_infinite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def _has_fallen(losses: Sequence[float]) -> bool:
    return losses[0] - min(losses, key=_or_infinite) > FALLEN * abs(losses[0])


def probe_labels(step: Step, rate: float, rows: int, deadline: float) -> ProbeResult:
    """Probe whether labels are learned faster in their own order: then they are related to the inputs."""
    if rows < MIN_ROWS:
        why = "its loss is none of torch's" if not rows else f"the batch has {rows} targets"
        return ProbeResult(Probe.LABELS, Outcome.NOT_PROBED, f"{why}; expected at least {MIN_ROWS}")
    own = _fall(trained(step, rate, STEPS, deadline)[0])
    shuffled = sorted(_fall(trained(step, rate, STEPS, deadline, seed)[0]) for seed in range(1, SHUFFLES + 1))
    numbers = f"the loss falls by {own:.3g}, with shuffled labels by {shuffled[0]:.3g} to {shuffled[-1]:.3g}"
    if own > shuffled[-1]:
        text = f"labels are learned faster in their own order: {numbers}"
        return ProbeResult(Probe.LABELS, Outcome.PASSED, text)
    text = f"unrelated to the inputs, or too few to learn how: {numbers}"
    return ProbeResult(Probe.LABELS, Outcome.UNDECIDED, text)


def _fall(losses: Sequence[float]) -> float:
    return losses[0] - losses[-1]
