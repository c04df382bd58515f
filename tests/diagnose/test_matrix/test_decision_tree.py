"""The walk over a decision tree: what evidence supports, refutes, and leaves open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from backlight.diagnose.test_matrix.evaluation import (
    CaseComparison,
    Effect,
    Evaluation,
    Status,
    check_tree,
    walk,
)
from backlight.diagnose.test_matrix.plan import MatrixPlan, read_plan
from backlight.records import DiagnosisKind

TREE = """
[factors.knob]
off = {}
on = { arguments = ["wait"] }
[cases.base]
[cases.knob]
control = "base"
levels = { knob = "on" }
[tree.start]
ask = "How does it end?"
case = "base"
on = { PASS = "fine", "BLOCKED|SPIN" = "hangs", SLOW = "slow" }
[tree.hangs]
ask = "Does the knob help?"
compare = "knob"
on = { cures = "the-knob", none = "something-else" }
[tree.fine]
conclusion = "fine"
[tree.slow]
conclusion = "slow"
[tree.the-knob]
conclusion = "the knob"
[tree.something-else]
conclusion = "something else"
"""

YES, NO, OPEN = Status.SUPPORTED, Status.REFUTED, Status.OPEN


def evaluation(verdict: DiagnosisKind) -> Evaluation:
    return Evaluation(verdict, "")


def order(plan: MatrixPlan) -> tuple[str, ...]:
    return check_tree(plan, {"base": "", "knob": "base", "other": ""})


def comparison(outcome: str, why: str = "") -> CaseComparison:
    return CaseComparison("knob", "base", "argument", Effect.OBSERVED, (), (), outcome, "", why)


@pytest.mark.parametrize(
    ("base", "outcome", "expected"),
    [
        # fine, slow, hangs, the-knob, something-else
        ("PASS", "", (YES, NO, NO, NO, NO)),
        ("SPIN", "cures", (NO, NO, YES, YES, NO)),
        ("BLOCKED", "none", (NO, NO, YES, NO, YES)),
        ("BLOCKED", "", (NO, NO, YES, OPEN, OPEN)),
        ("UNKNOWN", "cures", (OPEN, OPEN, OPEN, OPEN, NO)),
        ("DID_NOT_FINISH", "", (OPEN, OPEN, OPEN, OPEN, OPEN)),
        ("CRASH", "", (NO, NO, NO, NO, NO)),
    ],
)
def test_the_status_of_every_branch(
    base: str, outcome: str, expected: tuple[Status, ...], plan: Callable[..., Path]
) -> None:
    read = read_plan(plan(TREE))
    comparisons = {"knob": comparison(outcome, "no effect")}
    branches = {
        b.name: b for b in walk(read, order(read), {"base": evaluation(DiagnosisKind(base))}, comparisons)
    }
    assert branches["start"].status is YES
    names = ("fine", "slow", "hangs", "the-knob", "something-else")
    assert tuple(branches[name].status for name in names) == expected
    assert branches["start"].answer == ("" if base in {"UNKNOWN", "DID_NOT_FINISH"} else base)
    if outcome == "" and base == "BLOCKED":
        assert branches["the-knob"].why == "hangs: no effect"


def test_a_case_that_has_not_run_leaves_everything_open(plan: Callable[..., Path]) -> None:
    read = read_plan(plan(TREE))
    branches = walk(read, order(read), {}, {})
    assert {b.status for b in branches if b.name != "start"} == {OPEN}
    assert next(b for b in branches if b.name == "hangs").why == "start: case base has not run"


def test_of_two_paths_to_a_conclusion_the_better_counts(plan: Callable[..., Path]) -> None:
    tree = """
    [cases.base]
    [cases.other]
    [tree.a]
    case = "base"
    on = { PASS = "b", SLOW = "end" }
    [tree.b]
    case = "other"
    on = { PASS = "end", CRASH = "no" }
    [tree.end]
    conclusion = "x"
    [tree.no]
    conclusion = "y"
    """
    evaluations = {"base": evaluation(DiagnosisKind.PASS), "other": evaluation(DiagnosisKind.PASS)}
    read = read_plan(plan(tree))
    branches = {b.name: b.status for b in walk(read, order(read), evaluations, {})}
    assert branches == {"a": YES, "b": YES, "end": YES, "no": NO}
