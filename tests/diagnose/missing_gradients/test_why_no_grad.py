"""Injected reasons are found with their line, before backward where possible; controls are silent."""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from answers import Command
from backlight.capture.hub import HUB
from backlight.diagnose.missing_gradients.observer import (
    MissingGradientObserver,
    MissingGradients,
    ParameterState,
)
from cases import CASE_NAMES, CASES, assert_equal
from faults.injection import Ended, Fault, Train, end, run_under
from faults.missing_gradients import FAULTS, NON_LEAF, OVERWRITTEN, adversarial


def observe(train: Train, injected: bool, steps: int = 2) -> tuple[MissingGradients, list[ParameterState]]:
    early: list[ParameterState] = []
    observer = MissingGradientObserver(steps, end, lambda rows, _line: early.extend(rows))
    run_under(observer, train, injected)
    assert not HUB.active
    return observer.answer, early


EACH = pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))


@EACH
def test_reason_and_line(fault: Fault) -> None:
    answer, early = observe(fault.train, injected=True)
    expected = fault.expected
    found = {row.name: row for row in answer.rows}
    assert set(found) == set(expected["names"])
    for row in found.values():
        assert row.reason.cause == expected["cause"]
        assert re.search(expected["text"], row.reason.text), row.reason.text
        if fault.line is not None:
            assert row.reason.line.path == fault.train.__code__.co_filename
            assert row.reason.line.number == fault.line
    before = {row.name for row in early}
    late = expected.get("after") or expected["cause"] in {"not in an optimizer", "optimizer holds another"}
    assert before == (set() if late else set(found))


@EACH
def test_control_is_silent(fault: Fault) -> None:
    answer, early = observe(fault.train, injected=False)
    assert [f"{r.name}: {r.reason.text}" for r in answer.rows] == []
    assert early == []
    assert answer.steps == 2
    assert answer.failure is None


def test_saved_tensor_changed_in_place() -> None:
    answer, _ = observe(OVERWRITTEN.train, injected=True)
    assert re.search(r"of shape \(5, 8\) .* in place by add_ after tanh had used it", answer.failure.text)
    assert answer.failure.line.number == OVERWRITTEN.line
    assert "tanh(self.first(x))" in answer.failure.saved.text
    assert observe(OVERWRITTEN.train, injected=False)[0].failure is None


def carried(*, detached: bool) -> None:
    """Carry a hidden state from step to step."""
    cell = torch.nn.Linear(6, 4)
    optimizer = torch.optim.Adam(cell.parameters())
    state = torch.zeros(3, 4)
    for _ in range(3):
        state = cell(torch.cat([torch.ones(3, 2), state.detach() if detached else state], 1)).tanh()
        optimizer.zero_grad()
        state.square().sum().backward(retain_graph=True)
        optimizer.step()


def two_losses(*, in_turn: bool) -> None:
    """Step between the backward passes of two losses of one forward, or behind both."""
    first, second = torch.nn.Linear(4, 5), torch.nn.Linear(5, 4)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    for _ in range(2):
        output = second(first(torch.ones(2, 4)).tanh())
        output.sum().backward(retain_graph=True)
        if not in_turn:
            optimizer.step()
        output.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("injected", "control", "named"),
    [
        (lambda: carried(detached=False), lambda: carried(detached=True), "Adam.step"),
        (lambda: two_losses(in_turn=False), lambda: two_losses(in_turn=True), "SGD.step"),
    ],
    ids=["carried", "two losses"],
)
def test_weight_that_the_optimizer_changed_before_backward_needs_it(
    injected: Callable[[], None], control: Callable[[], None], named: str
) -> None:
    answer, _ = observe(lambda _: injected(), injected=True, steps=4)
    assert f"changed in place by {named} after linear had used it at" in answer.failure.text
    assert "The graph is older than that step" in answer.failure.text
    assert "optimizer.step()" in answer.failure.line.text
    assert observe(lambda _: control(), injected=False)[0].failure is None


def two_backwards(*, summed: bool) -> None:
    """Call backward of two losses of one forward, or of their sum."""
    first, second = torch.nn.Linear(4, 5), torch.nn.Linear(5, 4)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    for _ in range(2):
        shared = first(torch.ones(2, 4)).sigmoid()
        losses = [shared.sum(), second(shared).square().sum()]
        for loss in [sum(losses)] if summed else losses:
            loss.backward()
        optimizer.step()


def recurrent(*, detached: bool) -> None:
    """Carry a hidden state from step to step, without a graph that is kept."""
    cell = torch.nn.GRU(3, 4)
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
    hidden = None
    for _ in range(3):
        output, hidden = cell(torch.ones(2, 1, 3), hidden)
        output.sum().backward()
        optimizer.step()
        hidden = hidden.detach() if detached else hidden


def same_loss(*, anew: bool) -> None:
    """Compute a loss once, or for each backward."""
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    loss = layer(torch.ones(2, 4)).square().sum()
    for _ in range(2):
        loss.backward()
        optimizer.step()
        loss = layer(torch.ones(2, 4)).square().sum() if anew else loss


@pytest.mark.parametrize(
    ("injected", "control", "expected"),
    [
        (lambda: two_backwards(summed=False), lambda: two_backwards(summed=True), "value that sigmoid made"),
        (
            lambda: recurrent(detached=False),
            lambda: recurrent(detached=True),
            "gru uses a value that gru made",
        ),
        (lambda: same_loss(anew=False), lambda: same_loss(anew=True), "again on a loss whose graph"),
    ],
)
def test_graph_that_an_earlier_backward_has_freed(
    injected: Callable[[], None], control: Callable[[], None], expected: str
) -> None:
    answer, _ = observe(lambda _: injected(), injected=True, steps=4)
    assert expected in answer.failure.text
    assert observe(lambda _: control(), injected=False)[0].failure is None


def test_read_of_the_grad_of_a_computed_tensor() -> None:
    answers = []
    for injected in (True, False):  # without an optimizer, of which the observer makes a note
        observer = MissingGradientObserver(3, end)
        with observer, contextlib.suppress(Ended), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            NON_LEAF.train(injected)
        answers.append(observer.answer)
    (row,) = answers[0].rows
    assert (row.reason.cause, row.reason.line.number) == ("not a leaf", NON_LEAF.line)
    assert "so backward leaves nothing in its .grad, read at" in row.reason.text
    assert (answers[1].rows, answers[1].steps) == ([], 3)


def test_gradient_in_a_later_backward_removes_the_reason() -> None:
    answer, early = observe(adversarial, injected=False, steps=3)
    assert {row.name for row in early} == {"Linear.weight", "Linear.bias"}
    assert answer.rows == []


@pytest.mark.parametrize("name", CASE_NAMES)
def test_cases_stay_bit_identical_and_report_unmeasured_parameters(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
    plain = case.train()

    def end() -> None:
        raise AssertionError("ended too early")

    observer = MissingGradientObserver(10**6, end)
    with observer:
        watched = case.train()
    assert_equal(plain, watched)
    assert {row.name for row in observer.answer.rows} == set(case.unmeasured)
    assert observer.answer.notes == []


SCRIPT = """
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    print("step", step, sys.argv[1:])
    hidden = model[1](model[0](torch.ones(2, 3)))
    loss = model[2](hidden.detach()).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_command_reports_before_the_first_backward(tmp_path: Path, command: Command) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    code, out, errors = command("why-no-grad", "--steps", "1", "train.py", "--json")
    assert code == 0, errors
    lines = out.splitlines()
    assert lines[0] == "step 0 ['--json']"
    assert lines[1] == "before the first backward (train.py:10):"
    text = "  2 parameters  cut on its way to the loss by detach: detached  train.py:8  loss ="
    assert lines[2].startswith(text)
    assert lines[3] == "    0.weight [4x3], 0.bias [4]"
    # The second step's forward runs before its backward ends the script.
    summary = "2 parameters are not trained (4 parameters, 1 step, 1 backward)"
    assert lines[4:] == ["step 1 ['--json']", summary]


def test_command_in_json(tmp_path: Path, command: Command) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    code, out, errors = command("why-no-grad", "--json", "--fail-on", "any", "train.py")
    assert code == 1, errors
    answer = json.loads(out)
    assert [(r["parameter"], r["cause"], r["when"]) for r in answer["not_trained"]] == [
        ("0.weight", "cut", "before backward"),
        ("0.bias", "cut", "before backward"),
    ]
    assert answer["not_trained"][0]["line"]["number"] == 8
    assert errors.startswith("step 0 []\n")


def test_example(command: Command) -> None:
    example = Path(__file__).parents[3] / "examples" / "cut_gradient.py"
    code, out, errors = command("why-no-grad", "--json", str(example), "--plant")
    assert code == 0, errors
    answer = json.loads(out)
    rows = answer["not_trained"]
    causes = {row["parameter"]: row["cause"] for row in rows}
    assert causes == {"centres": "cut", "encoder.weight": "left torch", "encoder.bias": "left torch"}
    assert "< 0.5).sum" in answer["facts"][0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "train.py: no such script"),
        (
            "print('idle')\n",
            "train.py: finished (exit code 0) without calling loss.backward(); expected a script",
        ),
        ("import sys\nsys.exit(5)\n", "train.py: finished (exit code 5) without calling"),
    ],
)
@pytest.mark.parametrize("name", ["why-no-grad", "nan", "check --recompute"])
def test_script_without_a_backward(
    name: str, text: str | None, message: str, tmp_path: Path, command: Command
) -> None:
    if text is not None:
        (tmp_path / "train.py").write_text(text)
    code, _, errors = command(*name.split(), "train.py")
    assert code == 2
    assert message in errors
    assert errors.count("\n") == 1


def test_branch_cut_inside_a_reentrant_checkpoint_is_not_unused() -> None:
    def train(_injected: bool) -> None:
        first, cut, last = (torch.nn.Linear(4, 4) for _ in range(3))
        model = torch.nn.ModuleList([first, cut, last])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            hidden = checkpoint(lambda h: h + cut(h).detach(), first(torch.ones(2, 4)), use_reentrant=True)
            last(hidden).sum().backward()
            optimizer.step()

    answer, _ = observe(train, injected=True, steps=3)
    assert {row.name for row in answer.rows} == {"1.weight", "1.bias"}
    assert all("re-entrant checkpoint" in row.reason.text for row in answer.rows), answer.rows
