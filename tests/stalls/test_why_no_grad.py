"""Every planted reason is found, with its line, before backward where the graph allows; twins are silent."""

from __future__ import annotations

import contextlib
import re
import warnings

import pytest
import torch

from backlight.capture.hub import HUB
from backlight.stalls.missing import Missing, Row, WhyNoGrad
from cases import CASES
from faults.missing_gradients import FAULTS, OVERWRITTEN, adversarial
from faults.planting import Fault, Train


class _Stop(BaseException):
    """Ends a training that has been observed for long enough."""


def observe(train: Train, planted: bool, steps: int = 2) -> tuple[Missing, list[Row]]:
    early: list[Row] = []

    def end() -> None:
        raise _Stop

    observer = WhyNoGrad(steps, end, lambda rows, _line: early.extend(rows))
    with observer, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(_Stop, RuntimeError):
            train(planted)
    assert not HUB.active
    assert not observer.answer.notes
    return observer.answer, early


EACH = pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))


@EACH
def test_the_reason_and_its_line(fault: Fault) -> None:
    answer, early = observe(fault.train, planted=True)
    expected = fault.expected
    found = {row.name: row for row in answer.rows}
    assert set(found) == set(expected["names"])
    for row in found.values():
        assert row.reason.cause == expected["cause"]
        assert re.search(expected["text"], row.reason.text), row.reason.text
        if fault.line is not None:
            assert row.reason.line is not None
            assert row.reason.line.path == fault.train.__code__.co_filename
            assert row.reason.line.number == fault.line
    before = {row.name for row in early}
    late = expected.get("after") or expected["cause"] in {"not in an optimizer", "optimizer holds another"}
    assert before == (set() if late else set(found))


@EACH
def test_the_healthy_twin_is_silent(fault: Fault) -> None:
    answer, early = observe(fault.train, planted=False)
    assert [f"{r.name}: {r.reason.text}" for r in answer.rows] == []
    assert early == []
    assert answer.steps == 2
    assert answer.failure is None


def test_a_saved_tensor_changed_in_place() -> None:
    answer, _ = observe(OVERWRITTEN.train, planted=True)
    assert answer.failure is not None
    assert re.search(r"of shape \(5, 8\) .* in place by add_ after tanh had used it", answer.failure.text)
    assert answer.failure.line.number == OVERWRITTEN.line
    assert "tanh(self.first(x))" in answer.failure.saved.text
    assert observe(OVERWRITTEN.train, planted=False)[0].failure is None


def test_what_arrives_in_a_later_backward_is_taken_back() -> None:
    answer, early = observe(adversarial, planted=False, steps=3)
    assert {row.name for row in early} == {"Linear.weight", "Linear.bias"}
    assert answer.rows == []


@pytest.mark.parametrize("name", list(CASES))
def test_cases_stay_bit_identical_and_only_the_known_ones_are_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
    alone = case.train()

    def end() -> None:
        raise AssertionError("ended too early")

    observer = WhyNoGrad(10**6, end)
    with observer:
        watched = case.train()
    for one, two in zip(alone, watched, strict=True):
        assert torch.equal(one.nan_to_num(), two.nan_to_num())
    assert {row.name for row in observer.answer.rows} == set(case.unmeasured)
    assert observer.answer.notes == []
