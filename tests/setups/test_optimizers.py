"""Third-party optimizers: gradients before the step, and the actual updates."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from setups.truth import Noted, backward, net, train, watched

Make = Callable[[nn.Module], torch.optim.Optimizer]


def bits(name: str) -> Make:
    """Return a bitsandbytes optimizer; states of 4,096 elements or more are stored in 8 bits."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        package = pytest.importorskip("bitsandbytes")
        return getattr(package.optim, name)(model.parameters(), lr=1e-2)  # type: ignore[no-any-return]

    return make


def ao(name: str) -> Make:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        package = pytest.importorskip("torchao.optim")
        return getattr(package, name)(model.parameters(), lr=1e-2)  # type: ignore[no-any-return]

    return make


def ecosystem(name: str, **options: Any) -> Make:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        package = pytest.importorskip("pytorch_optimizer")
        return getattr(package, name)(model.parameters(), **{"lr": 1e-2, **options})  # type: ignore[no-any-return]

    return make


def fused(kind: type[torch.optim.Optimizer]) -> Make:
    return lambda model: kind(model.parameters(), lr=1e-2, fused=True)  # type: ignore[call-arg]


def lookahead(model: nn.Module) -> torch.optim.Optimizer:
    package = pytest.importorskip("pytorch_optimizer")
    return package.Lookahead(torch.optim.SGD(model.parameters(), lr=0.1), k=2)  # type: ignore[no-any-return]


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """Pass only matrices, which Muon requires."""
    kind = getattr(torch.optim, "Muon", None)
    if kind is None:
        pytest.skip(f"torch {torch.__version__} has no Muon")
    return kind([p for p in model.parameters() if p.dim() == 2], lr=0.02)  # type: ignore[no-any-return]


OPTIMIZERS: dict[str, Make] = {"bitsandbytes Adam8bit": bits("Adam8bit"), "torch Muon": muon}
MORE: dict[str, Make] = {
    "bitsandbytes AdamW8bit": bits("AdamW8bit"),
    "bitsandbytes Lion8bit": bits("Lion8bit"),
    "torchao AdamW8bit": ao("AdamW8bit"),
    "torchao AdamW4bit": ao("AdamW4bit"),
    "torchao AdamWFp8": ao("AdamWFp8"),
    "pytorch_optimizer SOAP": ecosystem("SOAP"),
    "pytorch_optimizer ScheduleFreeAdamW": ecosystem("ScheduleFreeAdamW"),
    "pytorch_optimizer Shampoo": ecosystem("Shampoo"),
    "pytorch_optimizer ScalableShampoo": ecosystem("ScalableShampoo"),
    "pytorch_optimizer ScheduleFreeSGD": ecosystem("ScheduleFreeSGD"),
    "pytorch_optimizer Lion": ecosystem("Lion"),
    "pytorch_optimizer Adan": ecosystem("Adan"),
    "pytorch_optimizer Lookahead": lookahead,
    "torch SGD, fused": fused(torch.optim.SGD),
    "torch Adam, fused": fused(torch.optim.Adam),
    "torch Adagrad, fused": fused(torch.optim.Adagrad),
    "torch Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
}

EVERY = [
    *(pytest.param(make, id=name) for name, make in OPTIMIZERS.items()),
    *(pytest.param(make, id=name, marks=pytest.mark.full) for name, make in MORE.items()),
]


# Optional packages warn about missing extras, and torchao compiles its step.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", EVERY)
def test_gradients_and_updates_are_correct(make: Make, tmp_path: Path) -> None:
    states: list[torch.optim.Optimizer] = []

    def run() -> Noted:
        model = net()
        states.append(make(model))
        if hasattr(states[-1], "train"):
            states[-1].train()
        return train(model, states[-1])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, stored = watched(run, tmp_path / "run", monitors="health,stalls,steptime")
    assert not [str(w.message) for w in caught if "backlight" in str(w.message)]
    assert not stored.events("unmeasured")
    assert list(stored.scalar("lr/0/0").steps) == [0, 1, 2, 3]
    if "8bit" in type(states[-1]).__name__:
        kept = [
            t for state in states[-1].state.values() for t in state.values() if isinstance(t, torch.Tensor)
        ]
        assert any(t.dtype == torch.uint8 or "8bit" in type(t).__name__ for t in kept)


def test_two_evaluations_record_the_gradient_at_the_weights(tmp_path: Path) -> None:
    """SAM climbs, evaluates again, and steps from the original weights with the second gradient."""
    package = pytest.importorskip("pytorch_optimizer")

    def run() -> Noted:
        model, last = net(), []
        optimizer = package.SAM(model.parameters(), torch.optim.SGD, lr=0.1)

        def first(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
            last[:] = [x, y]
            backward(model, x, y)

        return train(
            model, optimizer, backward=first, step=lambda: optimizer.step(lambda: backward(model, *last))
        )

    _, stored = watched(run, tmp_path / "run", monitors="health")
    assert not stored.events("unmeasured")
    assert set(stored.scalar("backwards").values) == {2.0}
