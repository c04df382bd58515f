import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backlight
from backlight.records import ParameterRecord, RunStatus, Severity


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.cut, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.used(x)) + self.cut(x).detach())


def train(recorder: Any, model: nn.Module, held: list[nn.Parameter], steps: int = 12) -> Any:
    optimizer = torch.optim.SGD(held, lr=0.1)
    return recorder(model, optimizer).classify(optimizer, steps, inputs=6)


def test_each_reason_is_a_finding(recorder: Any, evaluated: Any) -> None:
    model = Net()
    held = [p for name, p in model.named_parameters() if not name.startswith("cut")]
    found = {f.subject.parameter: f for f in evaluated(train(recorder, model, held), "no_gradient")}
    assert set(found) == {"unused.weight", "cut.weight", "frozen.weight"}
    assert found["frozen.weight"].severity is Severity.INFO
    assert found["unused.weight"].severity is Severity.WARNING
    assert found["unused.weight"].evidence[-1].path == "events/no_grad_at_step"
    assert found["cut.weight"].severity is Severity.WARNING


def test_layer_whose_optimizer_has_not_stepped_waits_for_its_turn(synthetic: Any, evaluated: Any) -> None:
    later = ParameterRecord("later.weight", (4, 4), "float32", "cpu", 16, group="1/0")
    rms, first = {"first.weight": [1e-2] * 10}, {"lr/0/0": [0.1] * 10}
    assert not evaluated(synthetic(rms, extra=[later], scalars=first), "no_gradient")
    (finding,) = evaluated(
        synthetic(rms, extra=[later], scalars=first | {"lr/1/0": [0.1] * 10}), "no_gradient"
    )
    assert finding.subject.parameter == "later.weight"


def test_unused_parameters_need_enough_steps_while_the_run_goes_on(recorder: Any, evaluated: Any) -> None:
    model = Net()
    run = train(recorder, model, list(model.parameters()), steps=4)
    assert {f.severity for f in evaluated(run, "no_gradient")} == {Severity.INFO, Severity.WARNING}
    run.attempts = [dataclasses.replace(run.attempts[-1], status=RunStatus.RUNNING)]
    assert [f.severity for f in evaluated(run, "no_gradient")] == [Severity.INFO]  # the frozen ones


def test_steps_count_from_when_a_parameter_became_trainable(synthetic: Any, evaluated: Any) -> None:
    late = ParameterRecord("late.weight", (4, 4), "float32", "cpu", 16, group="0/0", module_type="Linear")
    unfrozen = (6, "requires_grad", {"parameters": ["late.weight"], "value": True})
    (finding,) = evaluated(synthetic({"a": [1e-2] * 10}, extra=[late], events=[unfrozen]), "no_gradient")
    assert finding.detail.startswith("No gradient in 4 recorded steps (6 to 9): trainable since step 6")


def test_no_gradient_at_all_is_an_error(recorder: Any, evaluated: Any) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = recorder(model, optimizer).fit(optimizer, 3, lambda _: torch.ones((), requires_grad=True))
    (finding,) = evaluated(run, "no_gradient")
    assert (finding.severity, finding.subject.step) == (Severity.ERROR, 0)
    assert "none of 2 trainable parameters had a gradient" in finding.detail
    assert "why-no-grad" in finding.fix


@pytest.mark.slow
def test_parameters_with_gradients_have_no_finding(recorder: Any, synthetic: Any, evaluated: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    assert not evaluated(train(recorder, model, list(model.parameters())), "no_gradient")
    rms = {"a": [1e-2] * 30, "rare": [float("nan")] * 29 + [1e-2]}
    assert not evaluated(synthetic(rms), "no_gradient")


def test_unmeasured_parameter_is_info_only(synthetic: Any, evaluated: Any) -> None:
    lost = ParameterRecord("inner", (4, 4), "float32", "cpu", 16, group="0/0", module_type="Linear")
    reason = {"what": "gradient", "reason": "stepped inside backward", "parameters": ["inner"]}
    run = synthetic({"a": [1e-2] * 10}, extra=[lost], events=[(0, "unmeasured", reason)])
    (finding,) = evaluated(run, "no_gradient")
    assert finding.severity is Severity.INFO


def test_tensor_outside_the_model_is_a_warning(synthetic: Any, evaluated: Any) -> None:
    stale = ParameterRecord("optimizer0.group0.parameter2", (4, 4), "float32", "cpu", 16, group="0/0")
    (finding,) = evaluated(synthetic({"a": [1e-2] * 10}, extra=[stale]), "no_gradient")
    assert (finding.severity, finding.subject.parameter) == (Severity.WARNING, stale.name)


class Cut(nn.Module):
    """Two layers, of which the first is cut from the loss at the steps of ``cut``."""

    def __init__(self, cut: Any) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.cut, self.step = cut, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        hidden = self.first(x)
        return self.head(hidden.detach() if self.cut(self, self.step) else hidden)


def cut_of(recorder: Any, evaluated: Any, cut: Any) -> list[str]:
    model = Cut(cut)
    found = evaluated(train(recorder, model, list(model.parameters()), 60), "no_gradient")
    return [f.title for f in found if f.severity is Severity.WARNING]


@pytest.mark.slow
def test_a_layer_that_is_cut_from_the_loss_later_is_found(recorder: Any, evaluated: Any) -> None:
    """Its gradients were there for long: that it had some hid that it has none any more."""
    titles = cut_of(recorder, evaluated, lambda _, step: step > 40)
    assert titles == ["`first.weight` and `first.bias` have had no gradient since step 40"]


@pytest.mark.slow
def test_a_branch_by_chance_and_a_short_gap_are_none(recorder: Any, evaluated: Any) -> None:
    for cut in (lambda _, step: step % 3 == 0, lambda _, step: 40 < step < 50):
        assert cut_of(recorder, evaluated, cut) == []
    by_chance = set(torch.randperm(60, generator=torch.Generator().manual_seed(0))[:20].tolist()) | {59, 60}
    assert cut_of(recorder, evaluated, lambda _, step: step in by_chance) == []


@pytest.mark.slow
@pytest.mark.parametrize("freezes", [True, False])
def test_a_layer_that_is_frozen_later_is_none(freezes: bool, tmp_path: Path, evaluated: Any) -> None:
    model = Cut(lambda _, step: step > 40 and not freezes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with backlight.watch(model, optimizer, run=tmp_path / "run", every=1, summary=False):
        for step in range(60):
            if freezes and step == 40:
                model.first.requires_grad_(False)
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
    found = evaluated(backlight.open_run(tmp_path / "run"), "no_gradient")
    assert any("have had no gradient since" in finding.title for finding in found) is not freezes


@pytest.mark.slow
def test_an_optimizer_without_any_gradient_does_not_fail_the_rule(tmp_path: Path, evaluated: Any) -> None:
    used, unused = nn.Linear(6, 6), nn.Linear(6, 6)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (used, unused)]
    model = nn.ModuleList([used, unused])
    with backlight.watch(model, optimizers, run=tmp_path / "run", every=1, summary=False):
        for _ in range(30):
            used(torch.randn(4, 6)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    found = evaluated(backlight.open_run(tmp_path / "run"), "no_gradient")
    assert [finding.subject.parameter for finding in found] == ["1.weight"]
    assert found[0].severity is Severity.ERROR
    assert "SGD of `1.weight` and `1.bias` steps and trains nothing" in found[0].detail


class Encoder(nn.Module):
    """A pretrained model with a head; another model is built from its children."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x))


@pytest.mark.parametrize("takes_parts", [True, False])
def test_a_head_that_stays_behind_when_parts_are_taken_is_none(
    takes_parts: bool, tmp_path: Path, evaluated: Any
) -> None:
    with backlight.watch(run=tmp_path / "run", every=1, quiet=True, monitors="health"):
        encoder = Encoder()
        parts = nn.Sequential(*list(encoder.children())[:-1])
        model = nn.Sequential(parts if takes_parts else encoder, nn.ReLU(), nn.Linear(6, 2))
        held = [p for name, p in model.named_parameters() if "head" not in name]
        optimizer = torch.optim.SGD(held, lr=0.1)
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    run = backlight.open_run(tmp_path / "run")
    assert sum("head" in p.name for p in run.parameters()) == 2
    titles = [f.title for f in evaluated(run, "no_gradient")]
    assert len(titles) == (not takes_parts)
    assert all("head.weight" in title and "never received" in title for title in titles)


class BertPooler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(x))


class BertModel(nn.Module):
    """A pretrained model that calls its pooler, whatever the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.pooler = nn.Linear(6, 6), BertPooler()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.encoder(x)
        return tokens, self.pooler(tokens)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bert, self.pooler, self.head = BertModel(), BertPooler(), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.bert(x)[0])


def test_pooler_of_a_pretrained_model_is_a_note_and_one_of_the_script_is_not(
    tmp_path: Path, evaluated: Any
) -> None:
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with backlight.watch(model, optimizer, run=tmp_path / "run", every=1, quiet=True, monitors="health"):
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
    findings = evaluated(backlight.open_run(tmp_path / "run"), "no_gradient")
    severities = {f.subject.parameter: f.severity for f in findings}
    assert severities == {"bert.pooler.dense.weight": Severity.INFO, "pooler.dense.weight": Severity.WARNING}
