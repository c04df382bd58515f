"""The decision tree of a plan: which branches the evidence supports, refutes, or leaves open."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from backlight.diagnose.matrix.comparison import Comparison
from backlight.diagnose.matrix.evaluation import Judgement
from backlight.diagnose.matrix.plan import UNDECIDED, Node, Plan
from backlight.diagnose.matrix.plan_errors import PlanError, near


class Standing(enum.StrEnum):
    """What the evidence says of a node of the tree."""

    SUPPORTED = "supported"
    REFUTED = "refuted"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Branch:
    """One node after the walk.

    ``answer`` is what decided a question, ``leads`` the node that it leads to, ``why`` says on what
    the standing rests.
    """

    name: str
    standing: Standing
    ask: str = ""
    answer: str = ""
    conclusion: str = ""
    why: str = ""
    leads: str = ""

    @property
    def label(self) -> str:
        """What the standing means for a reader: a question is asked, or does not arise, or waits."""
        if self.conclusion:
            return self.standing.value
        asked = {Standing.SUPPORTED: "asked", Standing.REFUTED: "not asked", Standing.OPEN: "open"}
        return asked[self.standing]

    @property
    def text(self) -> str:
        """The conclusion, or the question with its answer."""
        return self.conclusion or f"{self.ask or self.name} {self.answer or 'undecided'}"


def check_tree(plan: Plan, cases: Mapping[str, str], path: Path) -> str:
    """Check the tree of a plan and return the name of its root, empty where the plan has no tree.

    Parameters
    ----------
    plan:
        What the file says.
    cases:
        The control of each case by the case's name, empty where it has none.
    path:
        The file, for messages.

    Raises
    ------
    PlanError
        If a question asks about an unknown case, leads to an unknown node, or the tree has a cycle,
        no single root, or one answer that leads to two places.
    """
    for name, node in plan.tree.items():
        where = f"{path}: [tree.{name}]"
        about = node.case or node.compare
        if about is not None and about not in cases:
            raise PlanError(f"{where}: no case is called {about!r}{near(about, cases)}")
        if node.compare is not None and not cases[node.compare]:
            raise PlanError(
                f"{where}: compare = {node.compare!r}, which has no control; ask case = {node.compare!r}"
            )
        seen: set[str] = set()
        for answers, target in node.on.items():
            if target not in plan.tree:
                raise PlanError(
                    f"{where}: {answers!r} leads to {target!r}, which is no node{near(target, plan.tree)}"
                )
            for answer in _split(answers):
                if answer in seen:
                    raise PlanError(f"{where}: {answer!r} leads to two nodes; expected one")
                seen.add(answer)
    _refuse_cycle(plan.tree, path)
    targets = {target for node in plan.tree.values() for target in node.on.values()}
    roots = [name for name in plan.tree if name not in targets]
    if len(roots) > 1:
        raise PlanError(
            f"{path}: the tree has {len(roots)} roots: {', '.join(roots)}; expected one question at its top"
        )
    return roots[0] if roots else ""


def _refuse_cycle(tree: Mapping[str, Node], path: Path) -> None:
    done: set[str] = set()
    for start in tree:
        trail: list[str] = []
        todo = [(start, False)]
        while todo:
            name, left = todo.pop()
            if left:
                done.add(trail.pop())
                continue
            if name in trail:
                loop = " -> ".join([*trail[trail.index(name) :], name])
                raise PlanError(
                    f"{path}: the tree is cyclic: {loop}; a question must not lead back to itself"
                )
            if name in done:
                continue
            trail.append(name)
            todo.append((name, True))
            todo += [(target, False) for target in tree[name].on.values()]


def walk(
    plan: Plan, root: str, judged: Mapping[str, Judgement], compared: Mapping[str, Comparison]
) -> tuple[Branch, ...]:
    """Walk the tree from its root and return every node, in the order of the walk.

    A question whose verdict is UNKNOWN or DID_NOT_FINISH, or whose knob had no effect, leaves all that
    hangs below it open. Where several ways lead to a node, the best of its standings counts.
    """
    if not root:
        return ()
    reached: dict[str, tuple[Standing, str]] = {root: (Standing.SUPPORTED, "the root")}
    order = _order(plan.tree, root)
    answers: dict[str, str] = {}
    for name in order:
        node = plan.tree[name]
        standing, _ = reached[name]
        answer, why = _answer(node, judged, compared)
        answers[name] = answer
        for given, target in node.on.items():
            mark, reason = _edge(name, standing, given, answer, why)
            before = reached.get(target)
            if before is None or _RANK[mark] > _RANK[before[0]]:
                reached[target] = (mark, reason)
    return tuple(
        Branch(
            name,
            reached[name][0],
            plan.tree[name].ask,
            answers[name],
            plan.tree[name].conclusion,
            reached[name][1],
            next((t for given, t in plan.tree[name].on.items() if answers[name] in _split(given)), ""),
        )
        for name in order
    )


_RANK = {Standing.REFUTED: 0, Standing.OPEN: 1, Standing.SUPPORTED: 2}


def _edge(name: str, standing: Standing, given: str, answer: str, why: str) -> tuple[Standing, str]:
    if standing is Standing.REFUTED:
        return Standing.REFUTED, f"{name} does not arise"
    if not answer:
        return Standing.OPEN, f"{name}: {why}"
    if answer not in _split(given):
        return Standing.REFUTED, f"{name} is answered by {answer}"
    return standing, f"{name} is answered by {answer}"


def _answer(
    node: Node, judged: Mapping[str, Judgement], compared: Mapping[str, Comparison]
) -> tuple[str, str]:
    """Return the answer to a question, or an empty one and what it lacks."""
    if node.case is not None:
        if node.case not in judged:
            return "", f"case {node.case} has not run"
        verdict = judged[node.case].verdict
        return (
            ("", f"the verdict of {node.case} is {verdict.value}")
            if verdict in UNDECIDED
            else (verdict.value, "")
        )
    if node.compare is not None:
        if node.compare not in compared:
            return "", f"case {node.compare} or its control has not run"
        return compared[node.compare].outcome, compared[node.compare].why
    return "", ""


def _order(tree: Mapping[str, Node], root: str) -> list[str]:
    """Return the nodes so that each comes after all that lead to it."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(name: str) -> None:
        if name not in seen:
            seen.add(name)
            for target in reversed(tree[name].on.values()):
                visit(target)
            order.append(name)

    visit(root)
    return order[::-1]


def _split(answers: str) -> tuple[str, ...]:
    return tuple(answer.strip() for answer in answers.split("|"))
