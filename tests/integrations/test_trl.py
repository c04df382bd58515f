"""Trainers of TRL with adapters of PEFT: the example, its control, and an injected fault."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import backlight
from backlight.capture.modules import named_parameters
from backlight.store.read.run import Run
from integrations.torchrun import environment

peft = pytest.importorskip("peft", reason="needs peft")

EXAMPLE = Path(__file__).parents[2] / "examples" / "with_trl.py"


def example(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        env={**environment(), "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, cwd=folder,
        timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


class Base(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q_proj(x)


def test_adapters_have_readable_names_and_frozen_weights_no_finding(tmp_path: Path) -> None:
    model = peft.get_peft_model(Base(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert [one.name for one in named_parameters(model)] == [
        "q_proj.base_layer.weight", "q_proj.base_layer.bias",
        "q_proj.lora_A.default.weight", "q_proj.lora_B.default.weight",
    ]  # fmt: skip
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    x = torch.randn(8, 4)
    with backlight.watch(model, optimizer, run=tmp_path / "run", every=1, quiet=True) as watch:
        for _ in range(12):
            optimizer.zero_grad()
            (model(x) - x).square().mean().backward()
            optimizer.step()
    assert watch.findings == []
    run = backlight.open_run(tmp_path / "run")
    frozen = [record.name for record in run.parameters() if record.unmeasured == "frozen"]
    assert frozen == ["q_proj.base_layer.weight", "q_proj.base_layer.bias"]


def test_prompt_tuning_keeps_its_own_parameters() -> None:
    model = peft.get_peft_model(Base(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.prompt_encoder = torch.nn.Embedding(3, 4)
    assert "prompt_encoder.weight" in {one.name for one in named_parameters(model)}


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "scalars"),
    [
        ("grpo", {"reward", "entropy"}),
        ("dpo", {"rewards/margins", "rewards/accuracies"}),
        ("sft", {"entropy"}),
    ],
)
def test_trainer_is_identical_and_without_findings(tmp_path: Path, method: str, scalars: set[str]) -> None:
    pytest.importorskip("trl", reason="needs trl")
    example(tmp_path, "--method", method, "--steps", "12", "--out", "run", "--save", "watched.pt")
    example(tmp_path, "--method", method, "--steps", "12", "--unwatched", "--save", "plain.pt")
    watched, plain = (torch.load(tmp_path / name, weights_only=True) for name in ("watched.pt", "plain.pt"))
    assert watched
    assert all(torch.equal(watched[name], plain[name]) for name in plain)
    run = backlight.open_run(tmp_path / "run")
    assert backlight.findings_of(run) == []
    assert scalars <= set(run.scalar_names("user"))
    assert measured(run) == {record.name for record in run.parameters() if "lora_" in record.name}


def measured(run: Run) -> set[str]:
    frame = run.frame("gradient", "norm")
    return {name for name, seen in zip(frame.names, frame.measured.any(axis=0), strict=True) if seen}


@pytest.mark.full
def test_constant_reward_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs trl")
    example(tmp_path, "--steps", "24", "--out", "run", "--constant-reward")
    findings = backlight.findings_of(backlight.open_run(tmp_path / "run"))
    assert [(f.rule, f.severity.value) for f in findings] == [("no_gradient", "error")]
