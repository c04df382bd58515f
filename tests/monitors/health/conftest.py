"""Stored runs for the rules: synthetic series, and small real runs measured with plain torch."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from backlight.findings.evaluate import RuleFailedWarning, evaluate_rules
from backlight.records import Finding, Made, ParameterRecord, RunStatus
from backlight.registry import RULES
from backlight.store.read.run import Run, open_run
from backlight.store.write.writer import RunWriter
from run_builder import build_health_run


class HandRecorder:
    """Recorder that measures a real run with plain torch, one tensor at a time, in float64."""

    def __init__(self, path: Path, model: nn.Module, *optimizers: torch.optim.Optimizer, **more: Any) -> None:
        self.path, self.model, self.optimizers, self.step = path, model, optimizers, 0
        self.every = more.pop("every", 1)
        groups = {
            id(p): f"{o}/{g}"
            for o, optimizer in enumerate(optimizers)
            for g, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        modules = dict(model.named_modules())
        self.named = list(model.named_parameters())
        self.writer = RunWriter.create(path, name="hand", monitors=("health",), **more)
        self.table = self.writer.parameter_table(
            tuple(
                ParameterRecord(
                    name,
                    tuple(p.shape),
                    str(p.dtype).removeprefix("torch."),
                    "cpu",
                    p.numel(),
                    requires_grad=p.requires_grad,
                    module=name.rpartition(".")[0],
                    module_type=type(modules[name.rpartition(".")[0]]).__name__,
                    group=groups.get(id(p), ""),
                    unmeasured="" if p.requires_grad else "frozen",
                )
                for name, p in self.named
            )
        )

    def advance(
        self,
        loss: torch.Tensor | float,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        clip: float | None = None,
        scaler: Any = None,
        **scalars: float,
    ) -> None:
        """Measure the gradients, clip them, take the step and measure the update."""
        scale = 1.0
        if scaler is not None:
            scale = scaler.get_scale()
            scaler.unscale_(optimizer)
        floats = np.zeros((len(self.named), 3))
        ints = np.zeros((len(self.named), 5), dtype=np.int64)
        for i, (_, p) in enumerate(self.named):
            if p.grad is not None:
                g = p.grad.detach().double()
                floats[i] = (g.norm().item(), g.abs().max().item(), g.sum().item())
                counts = ((g == 0).sum(), g.isnan().sum(), g.isinf().sum())
                ints[i] = (1, g.numel(), *(int(c) for c in counts))
        total = float(np.sqrt(np.sum(floats[:, 0] ** 2)))
        values = {"loss": float(loss), "total_norm": total, "backwards": 1.0, **scalars}
        if clip is not None:
            norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), clip))
            values |= {"clip/norm": norm, "clip/limit": clip, "clip/factor": min(1.0, clip / (norm + 1e-6))}
        for o, one in enumerate(self.optimizers):
            values |= {f"lr/{o}/{g}": float(group["lr"]) for g, group in enumerate(one.param_groups)}
        before = [p.detach().clone() for _, p in self.named]
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
            values |= {"scaler/scale": scale, "scaler/skipped": float(scaler.get_scale() < scale)}
        elif optimizer is not None:
            optimizer.step()
        moved = np.zeros((len(self.named), 2))
        sampled = np.zeros((len(self.named), 3), dtype=np.int64)
        for i, ((_, p), old) in enumerate(zip(self.named, before, strict=True)):
            if p.grad is not None:
                moved[i] = ((p.detach() - old).double().norm().item(), old.double().norm().item())
                sampled[i] = (1, p.numel(), p.numel())
        if self.step % self.every == 0:
            self.writer.append("gradient", self.step, self.table, floats, ints)
            self.writer.append("update", self.step, self.table, moved, sampled)
            self.writer.scalars(self.step, values)
        self.step += 1

    def fit(
        self,
        optimizer: torch.optim.Optimizer,
        steps: int,
        loss_of: Callable[[int], torch.Tensor],
        *,
        zero_every: int | None = 1,
        scaler: Any = None,
        **options: Any,
    ) -> Run:
        """Train ``steps`` steps on the loss of each step and close the run; ``options`` go to ``advance``."""
        for step in range(steps):
            if zero_every and step % zero_every == 0:
                self.model.zero_grad()
            loss = loss_of(step)
            (loss if scaler is None else scaler.scale(loss)).backward()
            missing = [n for n, p in self.named if p.requires_grad and p.grad is None]
            if missing:
                self.writer.event(self.step, "no_grad_at_step", {"parameters": missing})
            self.advance(loss.detach(), optimizer, scaler=scaler, **options)
        return self.close()

    def classify(
        self, optimizer: torch.optim.Optimizer, steps: int, *, batch: int = 16, inputs: int, classes: int = 3
    ) -> Run:
        """Fit random inputs whose class is the index of the largest of their first values."""

        def loss_of(_step: int) -> torch.Tensor:
            x = torch.randn(batch, inputs)
            return functional.cross_entropy(self.model(x), x[:, :classes].argmax(1))

        return self.fit(optimizer, steps, loss_of)

    def close(self) -> Run:
        self.writer.close(RunStatus.FINISHED)
        return open_run(self.path)


@pytest.fixture
def synthetic(tmp_path: Path) -> Callable[..., Run]:
    counter = itertools.count()
    return lambda rms, **more: build_health_run(tmp_path / f"synthetic-{next(counter)}", rms, **more)


@pytest.fixture
def recorder(tmp_path: Path) -> Callable[..., HandRecorder]:
    counter = itertools.count()
    return lambda model, *optimizers, **more: HandRecorder(
        tmp_path / f"run-{next(counter)}", model, *optimizers, **more
    )


def check_evidence(run: Run, finding: Finding) -> None:
    """Check that every evidence path exists in the run with the stated value."""
    assert finding.refuted_if
    assert finding.evidence
    for evidence in finding.evidence:
        kind, _, rest = evidence.path.partition("/")
        if kind == "series":
            series, column, *names = rest.split("/", 2)
            frame = run.frame(series, column)
            if not names:
                assert evidence.step in frame.steps
                continue
            (name,) = names
            assert name in frame.names
            if evidence.unit != frame.unit:  # an aggregate such as a median
                continue
            recorded = frame.values[frame.steps == evidence.step, frame.names.index(name)]
            assert isinstance(evidence.value, (int, float))
            np.testing.assert_allclose(evidence.value, recorded[0])
        elif kind == "scalars":
            scalar = run.scalar(rest)
            np.testing.assert_allclose(
                float(str(evidence.value)), scalar.values[scalar.steps == evidence.step][0]
            )
        elif kind == "parameters":
            field, _, name = rest.partition("/")
            (record,) = (p for p in run.parameters() if p.name == name)
            assert hasattr(record, field)
        elif kind == "events":
            assert evidence.step in {event.step for event in run.events(rest)}
        else:
            assert kind == "groups"
            assert rest in run.groups


@pytest.fixture
def evaluated() -> Callable[..., list[Finding]]:
    """Evaluate one rule or all rules with changed thresholds, and check all evidence; no rule may fail."""

    def by_rule(run: Run, name: str | None = None, **changes: float) -> list[Finding]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = evaluate_rules(run, {"health": changes}, made=Made.READER)
        assert not [str(one.message) for one in caught if issubclass(one.category, RuleFailedWarning)]
        assert name is None or name in RULES
        for finding in found:
            check_evidence(run, finding)
        return [finding for finding in found if name in {None, finding.rule}]

    return by_rule
