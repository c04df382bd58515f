"""A run held against good ones: what repeats agree in, and what each kind of change contradicts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import backlight
from backlight.analysis.reference import Reference, answer, compare_with
from backlight.answer import Answer
from backlight.store.read.run import Run

STEPS = 40


def train(path: Path, seed: int = 0, batch: int = 32, width: int = 32, change: str = "") -> Run:
    """Return the run of a small network that learns; ``change`` names what is different."""
    torch.manual_seed(seed)
    norm: nn.Module = nn.BatchNorm1d(width)
    model = nn.Sequential(nn.Linear(8, width), norm, nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 2))
    held = model[:-1] if change == "head left out" else model
    model[0].requires_grad_(change != "frozen")
    optimizer = torch.optim.Adam([p for p in held.parameters() if p.requires_grad], lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    model.train(change != "evaluation mode")
    with backlight.watch(model, optimizer, run=path, every=1, monitors=("health", "correctness"), quiet=True):
        for _ in range(STEPS):
            x = torch.randn(batch, 8)
            target = (x[:, 0] > 0).long()
            x = 255 * x if change == "not normalised" else x
            scores = model(x)
            scores = scores.softmax(1) if change == "softmax twice" else scores
            loss = nn.functional.cross_entropy(scores, target) * (30 if change == "sum" else 1)
            optimizer.zero_grad()
            loss.backward()
            if change != "not clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if change != "no schedule":
                schedule.step()
    return backlight.open_run(path)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    folder = tmp_path_factory.mktemp("good")
    return [train(folder / str(seed), seed) for seed in range(2)]


def contradicted(reference: Reference) -> list[str]:
    return [fact.name for fact in reference.contradicted if fact.name != "findings"]


@pytest.mark.parametrize("options", [{"seed": 2}, {"batch": 16}, {"batch": 128}, {"width": 64}], ids=str)
def test_repeats_contradict_nothing(good: list[Run], tmp_path: Path, options: dict[str, int]) -> None:
    reference = compare_with(good, train(tmp_path / "run", **{"seed": 3, **options}))  # type: ignore[arg-type]
    assert reference.contradicted == ()
    assert sum(fact.holds is True for fact in reference.compared) >= 15


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ("frozen", "gradients at every step"),
        ("head left out", "parameters that an optimizer holds"),
        ("evaluation mode", "mode of dropout"),
        ("evaluation mode", "mode of batch norm"),
        ("not normalised", "size of input (rms)"),
        ("softmax twice", "loss functions"),
        ("sum", "first losses"),
        ("not clipped", "calls of a step"),
        ("no schedule", "learning rate of Adam over 40 steps"),
    ],
)
def test_change_contradicts_its_fact(good: list[Run], tmp_path: Path, change: str, fact: str) -> None:
    assert fact in contradicted(compare_with(good, train(tmp_path / "run", 3, change=change)))


def test_settings_differ_without_a_contradiction(good: list[Run], tmp_path: Path) -> None:
    reference = compare_with(good, train(tmp_path / "run", batch=16))
    batch = next(fact for fact in reference.compared if fact.name == "first dimension of input")
    assert (batch.good, batch.here, batch.word) == ("32", "16", "differs")


def test_answer_names_what_does_not_hold(good: list[Run], tmp_path: Path) -> None:
    changed = answer(compare_with(good, train(tmp_path / "run", 3, change="no schedule")))
    assert isinstance(changed, Answer)
    assert "hold here" in changed.verdict
    assert "learning rate of Adam over 40 steps: here constant; there changes" in changed.facts
    repeat = answer(compare_with(good[:1], good[1]))
    tested = [fact for fact in repeat.data.compared if fact.holds and not fact.setting]
    assert repeat.verdict == f"All {len(tested)} facts that held in {good[0].location} hold here."
    assert "One good run" in repeat.notes[0]


def test_nothing_in_common_is_refused(good: list[Run], tmp_path: Path) -> None:
    with backlight.watch(run=tmp_path / "empty", monitors=("health",), quiet=True):
        pass
    with pytest.raises(ValueError, match="empty: took no step"):
        compare_with(good, backlight.open_run(tmp_path / "empty"))
    with pytest.raises(ValueError, match="expected one good run or more"):
        compare_with([], good[0])


def test_command(good: list[Run], tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    changed = train(tmp_path / "run", 3, change="evaluation mode")
    references = [word for run in good for word in ("--against", run.path)]
    code, out, _ = command("compare", changed.path, *references, "--json")
    assert code == 1
    assert "mode of dropout: here evaluation; there training" in json.loads(out)["facts"]
    assert command("compare", good[1].path, "--against", good[0].path)[0] == 0
    code, _, errors = command("compare", changed.path, good[1].path, *references)
    assert code == 2
    assert "expected one run to check with --against, got 2" in errors
    code, _, errors = command("compare", changed.path, *references, "--strict")
    assert code == 2
    assert "--against excludes" in errors
