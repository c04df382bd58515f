"""Each probe of ``backlight check`` fails on its injected error, and passes on the control."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from answer_schemas import schema_of
from jsonschema import validate
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from backlight.diagnose.probes import observer as probe_observer
from backlight.diagnose.probes.observer import ProbeObserver
from backlight.diagnose.probes.result import Probe, ProbeResult
from faults.injection import end, run_under
from faults.probes import FAULTS, Series, Transformer, fit, images, language


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def probed(train: Callable[[bool], Any], *probes: Probe, injected: bool = False) -> dict[str, ProbeResult]:
    """Return the results of a script's first step, by probe."""
    observer = ProbeObserver(frozenset(probes), None, end)
    run_under(observer, train, injected)
    assert observer.backwards == 1
    return {result.probe.value: result for result in observer.results}


def asked(name: str) -> list[Probe]:
    probe = Probe(FAULTS[name].expected["probe"])
    return [Probe.OVERFIT, probe] if probe is Probe.LABELS else [probe]


@pytest.mark.parametrize("name", FAULTS)
def test_injected_error_fails_its_probe_and_the_control_passes(name: str) -> None:
    fault = FAULTS[name]
    probe = str(fault.expected["probe"])
    found = probed(fault.train, *asked(name), injected=True)[probe]
    assert found.outcome == fault.expected.get("outcome", "failed")
    assert re.search(str(fault.expected["text"]), found.text)
    torch.manual_seed(0)
    assert probed(fault.train, *asked(name))[probe].outcome == "passed"


def test_scores_that_lack_the_last_position_are_compared_with_their_targets() -> None:
    class Shifting(nn.Module):
        """Computes its own loss, as models with a language-model head do."""

        def __init__(self) -> None:
            super().__init__()
            self.inside = Transformer(causal=True)

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            scores = self.inside(tokens)[:, :-1]
            return F.cross_entropy(scores.reshape(-1, scores.shape[-1]), labels[:, 1:].reshape(-1))

    def train(injected: bool) -> None:
        tokens, shifted = language()
        Shifting()(tokens, shifted if injected else tokens).backward()

    assert probed(train, Probe.TARGETS)["targets"].text == "each target is the next input"
    found = probed(train, Probe.TARGETS, injected=True)["targets"]
    assert found.outcome == "failed"
    assert "the input 2 positions on" in found.text


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (
            lambda model: model(images()[0]).square().mean(),
            "neither embeddings nor an input of three dimensions",
        ),
        (
            lambda model: Custom.apply(model(images()[0])),
            "does not come from a module by operations of torch",
        ),
        (lambda model: nn.Bilinear(2, 3, 1)(torch.ones(1, 2), torch.ones(1, 3)).sum(), "neither embeddings"),
    ],
)
def test_reason_is_given_where_nothing_is_probed(loss: Callable[[nn.Module], Tensor], reason: str) -> None:
    found = probed(lambda _: loss(nn.Linear(16, 4)).backward(), Probe.FUTURE)
    assert found["future"].outcome == "not probed"
    assert reason in found["future"].text


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.expand(32, 4)


def test_output_per_sample_has_no_positions() -> None:
    class Last(Series):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, -1]

    model = Last(bidirectional=False)
    found = probed(lambda _: model(torch.randn(8, 12, 3)).square().mean().backward(), Probe.THROUGH_TIME)
    assert found["through-time"].text == "no output has one row for each of 8x12 positions"


class Compared(nn.Module):
    """Similarities of samples to another view of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        views = [F.normalize(self.inside(x + shift), dim=-1) for shift in (0.0, 0.1)]
        return views[0] @ views[1].T / 0.1


class Routed(nn.Module):
    """Each sample goes through one of two experts, all at once for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(16, 2), nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out[choice == number] = expert(x[choice == number]) * weight[choice == number, None]
        return self.head(out)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        lengths = [4] * 16 + [3] * 16
        packed = nn.utils.rnn.pack_padded_sequence(x.unflatten(1, (4, 4)), lengths, batch_first=True)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0][:, 0])


class Standardised(nn.Module):
    """Batch norm that is written out, in front of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x - x.mean(0)) / x.std(0))


class Neighbours(nn.Module):
    """Adds up the features of neighbours in a graph of 32 nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 4)
        self.edges = torch.arange(64).reshape(2, 32) % 31

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(32, 4).index_add(0, self.edges[0], self.head(x)[self.edges[1]])


@pytest.mark.parametrize(
    ("model", "outcome", "text"),
    [
        (nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 4)), "passed", "batch norm"),
        (Compared(), "passed", "compares two of 32 samples"),
        (Routed(), "passed", "no output depends on another of 32 samples"),
        (Packed(), "passed", "no output depends on another of 32 samples"),
        (Standardised(), "undecided", "mixed by `mean` in `Standardised`"),
        (Neighbours(), "undecided", "right if the model is to relate samples"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)  # fmt: skip
def test_samples_that_a_model_couples_on_purpose(model: nn.Module, outcome: str, text: str) -> None:
    result = probed(lambda _: fit(model, images), Probe.SAMPLES)["samples"]
    assert result.outcome == outcome
    assert text in result.text


@pytest.mark.parametrize(("length", "outcome"), [(12, "undecided"), (8, "undecided")])
def test_axis_of_the_samples_is_not_guessed(length: int, outcome: str) -> None:
    """Outputs at each position of a layer that takes time first: axis 0 may be either."""

    def train(_: bool) -> None:
        layer = nn.GRU(3, 4)
        scores = layer(torch.randn(length, 8, 3))[0].flatten(0, 1)
        F.cross_entropy(scores, torch.randint(0, 4, (length * 8,))).backward()

    result = probed(train, Probe.SAMPLES)["samples"]
    assert result.outcome == outcome
    assert "right if axis 0 is the time" in result.text


def test_batch_that_a_loader_has_stacked_has_its_samples_first() -> None:
    def train(injected: bool) -> None:
        layer = nn.GRU(3, 4, batch_first=not injected)
        for x, y in DataLoader(TensorDataset(torch.randn(16, 12, 3), torch.randint(0, 4, (16, 12))), 8):
            F.cross_entropy(layer(x)[0].flatten(0, 1), y.flatten()).backward()

    assert probed(train, Probe.SAMPLES, injected=True)["samples"].outcome == "failed"
    assert probed(train, Probe.SAMPLES)["samples"].outcome == "passed"


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (torch.ones(1, 16), "no batch of two samples or more"),
        (torch.ones(8, 16), "all samples of the batch are equal"),
    ],
)
def test_samples_that_cannot_be_told_apart(batch: Tensor, reason: str) -> None:
    result = probed(lambda _: nn.Linear(16, 4)(batch).square().mean().backward(), Probe.SAMPLES)["samples"]
    assert result.outcome == "not probed"
    assert reason in result.text


def test_probes_change_nothing_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_observer, "STEPS", 3)

    def weights() -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4))
        return [*fit(model, images).state_dict().values(), torch.get_rng_state()]

    unprobed, result = weights(), []
    observer = ProbeObserver(frozenset(Probe), 10, end)
    run_under(observer, lambda _: result.extend(weights()), False)
    assert observer.steps == 2
    assert [one.outcome.value for one in observer.results if one.probe is Probe.OVERFIT] != []
    assert all(torch.equal(one, other) for one, other in zip(unprobed, result, strict=True))
    assert not nn.modules.module._has_any_global_hook()


SCRIPT = """
import sys
import torch
from faults.probes import FAULTS
torch.manual_seed(0)
FAULTS["attention_without_mask"].train("bad" in sys.argv)
print("the script goes on")
"""


def test_command_prints_each_probe_and_fails_on_request(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "backlight", "check", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip

    done = run("--causal", "--fail-on", "future", "train.py", "bad")
    assert done.returncode == 1, done.stderr
    assert re.search(r"future +failed +the output up to position 0", done.stdout)
    assert re.search(r"targets +passed +each target is the next input", done.stdout)
    assert "the script goes on" not in done.stdout
    done = run("--causal", "--fail-on", "any", "--json", "--steps", "9", "train.py")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    validate(answer, schema_of("check"))
    assert [p["outcome"] for p in answer["probes"]] == ["passed", "passed"]
    assert "the script goes on" in done.stderr


def test_unknown_probe_is_refused(command: Callable[..., tuple[int, str, str]]) -> None:
    code, _, errors = command("check", "--fail-on", "futur", "train.py")
    assert code == 2
    assert "--fail-on: no such name as 'futur'; did you mean 'future'?" in errors


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (F.cross_entropy, "ln 4 is 1.386"),
        (lambda out, y: F.nll_loss(out.log_softmax(1), y), "ln 4 is 1.386"),
        (lambda out, y: F.mse_loss(out, torch.full((32, 4), 2.0)), "the mean square of the targets is 4"),
    ],
)
def test_first_loss_is_compared_with_that_of_a_guess(loss: Callable[..., Tensor], text: str) -> None:
    x, y = images()
    model = nn.Linear(16, 4)
    found = probed(lambda _: loss(model(x), y).backward(), Probe.FIRST_LOSS)["first-loss"]
    assert (found.outcome, text in found.text) == ("passed", True)


def test_targets_between_0_and_1_stay_there() -> None:
    model, x = nn.Sequential(nn.Linear(16, 1), nn.Sigmoid()), images()[0]
    found = probed(lambda _: nn.BCELoss()(model(x), torch.ones(32, 1)).backward(), Probe.INPUTS)["inputs"]
    assert found.text == "the loss changes with `input` of Sequential, `target` of BCELoss"


def test_input_of_whole_numbers_that_changes_nothing_is_undecided() -> None:
    class Numbered(nn.Module):
        """Is given the numbers of its samples, and has no use for them."""

        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(16, 4)

        def forward(self, x: Tensor, number: Tensor) -> Tensor:
            return self.inside(x)

    model, (x, y) = Numbered(), images()
    train = lambda _: F.cross_entropy(model(x, torch.arange(32)), y).backward()  # noqa: E731
    found = probed(train, Probe.INPUTS)["inputs"]
    assert (found.outcome, "`number` of Numbered" in found.text) == ("undecided", True)
