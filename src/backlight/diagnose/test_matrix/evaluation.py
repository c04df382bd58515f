"""The verdict on a case by itself, on its factor by its control, and on the branches of the decision tree."""

from __future__ import annotations

import enum
import graphlib
import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path, PurePath

from backlight import codec
from backlight.diagnose.test_matrix.case_run import CaseObservation, open_case_run, read_output
from backlight.diagnose.test_matrix.plan import UNDECIDED, Case, MatrixPlan, Node, PlanError
from backlight.records import DiagnosisKind
from backlight.store.read.run import Run
from backlight.text import did_you_mean
from backlight.watchdog.attach import Attached

MAX_DIFFERENCES = 4
_NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:[eE][-+]?\d+)?")
_ALTERNATIVES = {
    DiagnosisKind.BLOCKED: "it waits for something that would have come later",
    DiagnosisKind.SPIN: "a single long call from that line",
    DiagnosisKind.LONG_OP: "the operation is slow and will end",
}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A verdict, what would refute it, and what else the evidence allows; ``line`` is ``file:line``."""

    verdict: DiagnosisKind
    claim: str
    confidence: str = "high"
    refuted_if: str = ""
    line: str = ""
    alternatives: tuple[str, ...] = ()


class Effect(enum.StrEnum):
    """Whether the factor changed anything besides the verdict."""

    OBSERVED = "observed"
    POSSIBLE = "possible"
    NONE = "none"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CaseResult:
    """A case that has run, with its digest; ``attempt`` is relative to the directory of the test matrix."""

    case: Case
    digest: str
    attempt: str
    observation: CaseObservation
    evaluation: Evaluation


@dataclass(frozen=True, slots=True)
class CaseComparison:
    """A case and its control. ``outcome`` is an answer of the plan's tree; empty if undecided."""

    case: str
    control: str
    factor: str
    effect: Effect
    differences: tuple[str, ...]
    compared: tuple[str, ...]
    outcome: str
    claim: str
    why: str = ""


def evaluate(observed: CaseObservation) -> Evaluation:
    """Return the verdict on one case; time alone supports none."""
    if observed.exit_code is not None:
        return _exited(observed, observed.exit_code)
    evaluations = (rule(observed) for rule in (_moving, _stalled, _diagnosed))
    return next((each for each in evaluations if each is not None), _undecided(observed))


def _exited(observed: CaseObservation, code: int) -> Evaluation:
    after = f"after {observed.seconds:.1f} s"
    if code:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        claim = f"was ended by {name} {after}" if code < 0 else f"left with exit code {code} {after}"
        return Evaluation(
            DiagnosisKind.CRASH, f"{claim}{': ' if observed.error else ''}{observed.error}",
            refuted_if="the same command exits with 0 when run again", line=observed.error_line,
            alternatives=("another process killed it (out of memory, a batch system)",) if code == -9 else (),
        )  # fmt: skip
    if observed.success is False:
        return Evaluation(
            DiagnosisKind.UNKNOWN, f"exited with 0 {after}, but the pattern of success is not in its output",
            "none", alternatives=("it ended early without an error", "the pattern is wrong"),
        )  # fmt: skip
    claim = f"finished in {observed.seconds:.1f} s"
    return Evaluation(DiagnosisKind.PASS, claim, refuted_if="it does not finish when run again")


def _moving(observed: CaseObservation) -> Evaluation | None:
    for p in observed.progress:
        # A case that moved in the first half only may be hung since.
        if p.before < p.middle < p.after:
            counts = f"{p.before}, {p.middle}, {p.after} {p.source} in {observed.window_s:.1f} s"
            refuted_if = "the count does not change over a longer window"
            return Evaluation(DiagnosisKind.SLOW, f"slow, not hung: {counts}", refuted_if=refuted_if)
    return None


def _stalled(observed: CaseObservation) -> Evaluation | None:
    stall = observed.stall
    if stall is None or stall.subject.verdict not in set(DiagnosisKind):
        return None
    line = stall.subject.line or next((p.diagnosis.line for p in _ranked(observed) if p.diagnosis.line), "")
    claim = f"stall finding of the run: {stall.title}; {stall.detail}"
    return Evaluation(DiagnosisKind(stall.subject.verdict), claim, "as the finding", stall.refuted_if, line)


def _diagnosed(observed: CaseObservation) -> Evaluation | None:
    """Return the diagnosis of a process, where output, progress and the other processes agree with it."""
    still = all(p.after == p.middle for p in observed.progress)
    silent = not observed.output and all(process.idle for process in observed.processes)
    agrees = {
        DiagnosisKind.STOPPED: True,
        DiagnosisKind.BLOCKED: still and silent,
        DiagnosisKind.SPIN: still,
        # A run at work shows one operation, too.
        DiagnosisKind.LONG_OP: still and bool(observed.progress),
    }
    for kind in (kind for kind, agreed in agrees.items() if agreed):
        for process in _ranked(observed):
            diagnosis, spins = process.diagnosis, kind is DiagnosisKind.SPIN and process.spins
            if diagnosis.kind is not kind and not spins:
                continue
            claim, line = diagnosis.claim, diagnosis.line or ""
            if spins:
                claim = f"SPIN: every sample shows {PurePath(line).name}, with the interpreter lock held"
            sure = kind is DiagnosisKind.STOPPED or (observed.progress and kind is not DiagnosisKind.LONG_OP)
            other = (_ALTERNATIVES[kind],) if kind in _ALTERNATIVES else ()
            return Evaluation(kind, claim, "high" if sure else "medium", diagnosis.refuted_if, line, other)
    return None


def _undecided(observed: CaseObservation) -> Evaluation:
    claim, alternatives = f"did not finish in {observed.seconds:.0f} seconds", ("it is slow", "it hangs")
    if not observed.processes:
        refuted_if = "it finishes with a longer limit"
        return Evaluation(DiagnosisKind.DID_NOT_FINISH, claim, "none", refuted_if, "", alternatives)
    diagnosis = _ranked(observed)[0].diagnosis
    claim = f"{claim}; {diagnosis.claim}"
    return Evaluation(
        DiagnosisKind.UNKNOWN, claim, "none", diagnosis.refuted_if, diagnosis.line or "", alternatives
    )


def _ranked(observed: CaseObservation) -> list[Attached]:
    return sorted(observed.processes, key=lambda process: not process.diagnosis.line)


def compare(result: CaseResult, control: CaseResult, root: Path) -> CaseComparison:
    """Compare a case with its control; a factor without an observed effect is not cleared."""
    effect, differences, compared = _effect(result, control, root)
    verdict, before, factor = result.evaluation.verdict, control.evaluation.verdict, result.case.factor
    outcome = why = ""
    if verdict in UNDECIDED:
        why = f"the verdict of the case is {verdict}"
    elif before in UNDECIDED:
        why = f"the verdict of the control is {before}"
    elif effect is Effect.NONE:
        why = f"the factor had no effect that shows in {', '.join(compared)}"
    elif verdict is not before:
        outcome = {before: "causes", verdict: "cures"}.get(DiagnosisKind.PASS, "changes")
    elif effect is Effect.OBSERVED:
        outcome = "none"
    else:
        why = "no evidence that the factor changed anything; add shows = 'regular expression'"
    words = {"": f"undecided: {why}", "none": "makes no difference"}.get(outcome, f"{outcome} it")
    return CaseComparison(
        result.case.name, control.case.name, factor, effect, tuple(differences), tuple(compared), outcome,
        f"{factor} {words} ({before} -> {verdict})", why,
    )  # fmt: skip


def _effect(result: CaseResult, control: CaseResult, root: Path) -> tuple[Effect, list[str], list[str]]:
    """Return the effect of the factor, what differs, and what was compared."""
    paths = root / result.attempt, root / control.attempt
    texts = tuple(map(read_output, paths))
    signs: list[tuple[bool, str]] = []  # what differs for certain (True), and what may differ by chance
    compared: list[str] = []
    for pattern in set(result.case.shows) - set(control.case.shows):
        here, there = (re.search(pattern, each, re.MULTILINE) for each in texts)
        if here is None:
            return Effect.NONE, [], [f"its output, which lacks {pattern!r}"]
        compared.append(f"{pattern!r} in the outputs")
        signs += [] if there else [(True, f"output shows {here[0]!r}, its control's does not")]
    finished = result.evaluation.verdict is control.evaluation.verdict is DiagnosisKind.PASS
    runs = [run for path in paths if (run := open_case_run(path)) is not None]
    if len(runs) == 2:
        signs += [(True, difference) for difference in _fingerprint_differences(*runs)]
        compared.append("the fingerprints of the runs")
    if all(text.strip() for text in texts):
        signs += _output_differences(*map(_lines, paths), whole=finished)
        compared.append("the outputs")
    if certain := [difference for sure, difference in signs if sure]:
        return Effect.OBSERVED, certain[:MAX_DIFFERENCES], compared
    if signs:
        notes = [f"{each} (chance, if training is not seeded)" for _, each in signs[:MAX_DIFFERENCES]]
        return Effect.POSSIBLE, notes, compared
    # What a case that was cut short did not reach may still differ.
    return Effect.NONE if compared and finished else Effect.UNKNOWN, [], compared


def _fingerprint_differences(run: Run, control: Run) -> list[str]:
    here, there = (codec.plain(each.fingerprint()) or {} for each in (run, control))
    # Requested settings and the host are no effect; the module hash repeats the module table.
    keys = (here.keys() & there.keys()) - {"script", "script_hash", "arguments", "host", "module_hash"}
    moved = sorted(key for key in keys if here[key] != there[key])
    return [f"fingerprint {key}: {str(there[key])[:80]} and {str(here[key])[:80]}" for key in moved]


def _output_differences(lines: list[str], others: list[str], *, whole: bool) -> Iterator[tuple[bool, str]]:
    """Compare the outputs line by line: words differ for certain, numbers may differ by chance."""
    pairs = zip_longest(lines, others, fillvalue="") if whole else zip(lines, others, strict=False)
    for here, there in pairs:
        if here != there:
            sure = _NUMBER.sub("#", here) != _NUMBER.sub("#", there)
            yield sure, f"output {here.strip()[:80]!r} where its control has {there.strip()[:80]!r}"


def _lines(attempt: Path) -> list[str]:
    text = (attempt / "stdout.txt").read_text(encoding="utf-8", errors="replace")
    complete = text[: text.rfind("\n") + 1]  # the last line of a case that was ended may be cut
    # Paths of the attempt and addresses always differ.
    return re.sub(r"0x[0-9a-fA-F]+", "0x", complete.replace(str(attempt), "{case}")).splitlines()


# The decision tree of a plan: which branches the evidence supports, refutes, or leaves open.


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
