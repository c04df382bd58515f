"""The decision tree of a plan: which branches the evidence supports, refutes, or leaves open."""

from __future__ import annotations

import enum
import graphlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from backlight.diagnose.matrix.comparison import Comparison
from backlight.diagnose.matrix.evaluation import Evaluation
from backlight.diagnose.matrix.plan import UNDECIDED, Node, Plan, PlanError
from backlight.text import did_you_mean


class Status(enum.IntEnum):
    """What the evidence says of a node; of several paths to a node the highest counts."""

    REFUTED = 0
    OPEN = 1
    SUPPORTED = 2


_QUESTION = {Status.SUPPORTED: "asked", Status.REFUTED: "not asked", Status.OPEN: "open"}


@dataclass(frozen=True, slots=True)
class Branch:
    """One node after the walk: ``answer`` decided a question, ``leads`` is the node that it leads to."""

    name: str
    status: Status
    ask: str = ""
    answer: str = ""
    conclusion: str = ""
    why: str = ""
    leads: str = ""

    @property
    def label(self) -> str:
        """The status of a conclusion, or whether a question is asked."""
        return self.status.name.lower() if self.conclusion else _QUESTION[self.status]

    @property
    def text(self) -> str:
        """The conclusion, or the question with its answer."""
        return self.conclusion or f"{self.ask or self.name} {self.answer or 'undecided'}"


def check_tree(plan: Plan, controls: Mapping[str, str], path: Path) -> tuple[str, ...]:
    """Return the nodes so that each comes after all that lead to it, the root first.

    ``controls`` holds the control of each case, empty where it has none; ``path`` is the plan's file.

    Raises
    ------
    PlanError
        If a question asks about an unknown case, leads to an unknown node, or the tree has a cycle,
        more than one root, or one answer that leads to two nodes.
    """
    for name, node in plan.tree.items():
        where = f"{path}: [tree.{name}]"
        about = node.case or node.compare
        if about is not None and about not in controls:
            raise PlanError(f"{where}: no case is called {about!r}{did_you_mean(about, controls)}")
        if node.compare is not None and not controls[node.compare]:
            raise PlanError(f"{where}: compare = {about!r}, which has no control; ask case = {about!r}")
        answers = [answer for answer, _ in node.edges]
        for answer, target in node.edges:
            if target not in plan.tree:
                hint = did_you_mean(target, plan.tree)
                raise PlanError(f"{where}: {answer!r} leads to {target!r}, which is no node{hint}")
            if answers.count(answer) > 1:
                raise PlanError(f"{where}: {answer!r} leads to two nodes; expected one")
    targets = {target for node in plan.tree.values() for target in node.on.values()}
    roots = [name for name in plan.tree if name not in targets]
    if len(roots) > 1:
        raise PlanError(
            f"{path}: the tree has {len(roots)} roots: {', '.join(roots)}; expected one question at its top"
        )
    leaves_first = {name: tuple(reversed(node.on.values())) for name, node in plan.tree.items()}
    try:
        return tuple(graphlib.TopologicalSorter(leaves_first).static_order())[::-1]
    except graphlib.CycleError as error:
        loop = " -> ".join(reversed(error.args[1]))
        raise PlanError(
            f"{path}: the tree is cyclic: {loop}; a question must not lead back to itself"
        ) from None


def walk(
    plan: Plan,
    order: tuple[str, ...],
    evaluations: Mapping[str, Evaluation],
    comparisons: Mapping[str, Comparison],
) -> tuple[Branch, ...]:
    """Walk the tree in the order of :func:`check_tree`; without an answer, everything below stays open."""
    reached = {name: (Status.SUPPORTED, "the root") for name in order[:1]}
    branches = []
    for name in order:
        node, (status, reason) = plan.tree[name], reached[name]
        answer, why = _answer(node, evaluations, comparisons)
        for given, target in node.edges:
            if status is Status.REFUTED:
                edge: tuple[Status, str] = status, f"{name} does not arise"
            elif not answer:
                edge = Status.OPEN, f"{name}: {why}"
            else:
                edge = status if answer == given else Status.REFUTED, f"{name} is answered by {answer}"
            if target not in reached or edge[0] > reached[target][0]:
                reached[target] = edge
        leads = dict(node.edges).get(answer, "")
        branches.append(Branch(name, status, node.ask, answer, node.conclusion, reason, leads))
    return tuple(branches)


def _answer(
    node: Node, evaluations: Mapping[str, Evaluation], comparisons: Mapping[str, Comparison]
) -> tuple[str, str]:
    """Return the answer to a question, or an empty one and the reason."""
    if node.compare is not None:
        if node.compare not in comparisons:
            return "", f"case {node.compare} or its control has not run"
        return comparisons[node.compare].outcome, comparisons[node.compare].why
    if node.case is None:
        return "", ""
    if node.case not in evaluations:
        return "", f"case {node.case} has not run"
    verdict = evaluations[node.case].verdict
    return ("", f"the verdict of {node.case} is {verdict}") if verdict in UNDECIDED else (verdict.value, "")
