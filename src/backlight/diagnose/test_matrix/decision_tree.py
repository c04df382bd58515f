"""The decision tree of a plan: which branches the evidence supports, refutes, or leaves open."""

from __future__ import annotations

import enum
import graphlib
from collections.abc import Mapping
from dataclasses import dataclass

from backlight.diagnose.test_matrix.evaluation import CaseComparison, Evaluation
from backlight.diagnose.test_matrix.plan import UNDECIDED, MatrixPlan, Node, PlanError
from backlight.text import did_you_mean


class Status(enum.IntEnum):
    """Status of a node by the evidence; of several paths to a node the highest counts."""

    REFUTED = 0
    OPEN = 1
    SUPPORTED = 2


@dataclass(frozen=True, slots=True)
class Branch:
    """One node after the walk; the ``answer`` to its question is empty if undecided."""

    name: str
    node: Node
    status: Status
    answer: str
    why: str

    @property
    def text(self) -> str:
        """The conclusion, or the question with its answer."""
        return self.node.conclusion or f"{self.node.ask or self.name} {self.answer or 'undecided'}"


def check_tree(plan: MatrixPlan, controls: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes, each after all that lead to it; a PlanError for an unknown name or a loop."""
    for name, node in plan.tree.items():
        where = f"[tree.{name}]"
        about = node.case or node.compare
        if about is not None and about not in controls:
            raise PlanError(f"{where}: no case is called {about!r}{did_you_mean(about, controls)}")
        if node.compare is not None and not controls[node.compare]:
            raise PlanError(f"{where}: compare = {about!r}, which has no control; ask case = {about!r}")
        for answer, target in node.edges:
            if target not in plan.tree:
                hint = did_you_mean(target, plan.tree)
                raise PlanError(f"{where}: {answer!r} leads to {target!r}, which is no node{hint}")
    targets = {target for node in plan.tree.values() for target in node.on.values()}
    roots = [name for name in plan.tree if name not in targets]
    if len(roots) > 1:
        raise PlanError(f"the tree has {len(roots)} roots: {', '.join(roots)}; expected one at its top")
    leaves_first = {name: tuple(reversed(node.on.values())) for name, node in plan.tree.items()}
    try:
        return tuple(graphlib.TopologicalSorter(leaves_first).static_order())[::-1]
    except graphlib.CycleError as error:
        loop = " -> ".join(reversed(error.args[1]))
        raise PlanError(f"the tree is cyclic: {loop}; no question may lead back to itself") from None


def walk(
    plan: MatrixPlan,
    order: tuple[str, ...],
    evaluations: Mapping[str, Evaluation],
    comparisons: Mapping[str, CaseComparison],
) -> tuple[Branch, ...]:
    """Walk the tree in the order of :func:`check_tree`; without an answer, everything below stays open."""
    reached = {name: (Status.SUPPORTED, "the root") for name in order[:1]}
    branches = []
    for name in order:
        node, (status, reason) = plan.tree[name], reached[name]
        answer, why = _answer(node, evaluations, comparisons)
        for value, target in node.edges:
            edge = min(status, Status.OPEN), f"{name}: {why}"
            if status is Status.REFUTED:
                edge = status, f"{name} does not arise"
            elif answer:
                edge = status if answer == value else Status.REFUTED, f"{name} is answered by {answer}"
            reached[target] = max(reached.get(target, edge), edge, key=lambda each: each[0])
        branches.append(Branch(name, node, status, answer, reason))
    return tuple(branches)


def _answer(
    node: Node, evaluations: Mapping[str, Evaluation], comparisons: Mapping[str, CaseComparison]
) -> tuple[str, str]:
    """Return the answer to a question, or an empty one and the reason."""
    if node.compare is not None:
        if node.compare not in comparisons:
            return "", f"case {node.compare} or its control has not run"
        return comparisons[node.compare].outcome, comparisons[node.compare].why
    if node.case is None or node.case not in evaluations:
        return "", f"case {node.case} has not run"
    verdict = evaluations[node.case].verdict
    return ("", f"the verdict of {node.case} is {verdict}") if verdict in UNDECIDED else (verdict.value, "")
