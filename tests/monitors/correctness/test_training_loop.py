"""Each injected error of a training loop has its finding, and each control has none."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import backlight
from backlight.capture.loss_graph import SHOWS_HOOKS
from backlight.findings.evaluate import Findings, evaluate_rules
from backlight.store.read.run import open_run
from faults import silent
from faults.injection import text_of
from faults.silent.checkpoints import train_sequences

pytestmark = pytest.mark.slow


def findings(path: Path, train: Callable[[], None]) -> Findings:
    """Return the findings of a watched training run, whose recorded steps do not depend on the load."""
    with backlight.watch(run=path, monitors=("correctness",), every=1):
        train()
    run = open_run(path)
    unmeasured = {event.payload["what"] for event in run.events("unmeasured")}
    assert unmeasured <= (set() if SHOWS_HOOKS else {"uneven_microbatches"})
    return evaluate_rules(run)


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # by torch.compile
@pytest.mark.parametrize("name", silent.FAULTS)
def test_injected_error_is_found_and_its_control_is_not(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    fault = silent.FAULTS[name]
    if fault.expected["rule"] == "uneven_microbatches":
        request.getfixturevalue("read_targets")
    (found,) = findings(tmp_path / "injected", lambda: fault.train(True))
    assert found.rule == fault.expected["rule"]
    assert found.severity.value == fault.expected["severity"]
    assert found.subject.step == fault.expected["step"]
    assert str(fault.expected["names"]) in text_of(found)
    line = re.search(r"[\w/.-]+\.py:\d+", found.detail)  # where annotations of a CI job show it
    assert found.subject.line == (line and line[0])
    events = open_run(tmp_path / "injected").events("contradiction")
    assert {evidence.step for evidence in found.evidence} <= {event.step for event in events}
    assert {event.payload.get("kind") for event in events} == {
        fault.expected.get("kind", events[0].payload.get("kind")),
        *([fault.expected["also"]] if "also" in fault.expected else []),  # a consequence that is not reported
    }
    assert findings(tmp_path / "control", lambda: fault.train(False)) == []


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
@pytest.mark.parametrize("name", silent.CONTROLS)
def test_loop_that_comes_close_has_no_finding(name: str, tmp_path: Path) -> None:
    assert findings(tmp_path / "run", silent.CONTROLS[name]) == []
    rules = {event.payload["rule"] for event in open_run(tmp_path / "run").events("contradiction")}
    # Weights that a fold initialises again, or that come back, are recorded as changed: that is no finding.
    assert rules <= ({"weights_changed"} if name.startswith(("folds_", "best_weights_")) else set())


@pytest.mark.slow
def test_optimizers_of_a_rate_finder_are_silent(tmp_path: Path) -> None:
    assert findings(tmp_path / "run", silent.restarts.rate_finder) == []


class Configured(nn.Module):
    """Follows ``tie_word_embeddings``, as the models of Transformers do, or should."""

    _tied_weights_keys = ("head.weight",)

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=True)
        self.embedding, self.head = nn.Embedding(7, 8), nn.Linear(8, 7, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x).mean(1))


def test_embeddings_that_the_configuration_ties(tmp_path: Path) -> None:
    lost, kept = Configured(False), Configured(True)  # built before watching begins
    (found,) = findings(tmp_path / "lost", lambda: train_sequences(lost))
    assert (found.rule, found.title) == (
        "trained_tensors",
        "`embedding.weight` and `head.weight` are no longer tied",
    )
    assert found.detail.startswith("`config.tie_word_embeddings` is True.")
    assert findings(tmp_path / "kept", lambda: train_sequences(kept)) == []


def test_targets_that_are_sorted_by_class_are_not_reported_in_the_end(tmp_path: Path) -> None:
    classes = silent.losses.targets_of(lambda step: torch.full((128,), int(step > 15)))
    with backlight.watch(run=tmp_path / "run", monitors=("correctness",), every=1, quiet=True):
        silent.loop.train(silent.loop.perceptron(), data=classes, steps=20)
    run = open_run(tmp_path / "run")
    assert [event.payload["kind"] for event in run.events("contradiction")][-1] == "several_classes"
    assert not list(evaluate_rules(run))
