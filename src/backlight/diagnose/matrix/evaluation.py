"""The verdict on one case, from its observed alone, and the comparison of a case with its control."""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np

from backlight.diagnose.matrix.cases import Case
from backlight.diagnose.matrix.plan import UNDECIDED
from backlight.diagnose.matrix.results import Attempt, Observation, ProcessSample
from backlight.monitors.stalls.model import stacks
from backlight.records import DiagnosisKind, to_json
from backlight.store.errors import StoreError
from backlight.store.read.run import Run, open_run
from backlight.text import did_you_mean

IDLE_CORES = 0.05
"""Cores below which a process does nothing; launchers that poll stay below it."""

BUSY_CORES = 0.8
"""Cores above which a process computes without a pause; time in the queue for a core counts."""

QUEUED_CORES = 0.2
"""Cores queued for, above which a process is starved rather than idle."""

MIN_WINDOW_S = 1.0
"""Window below which CPU time, which the kernel counts in 0.01 s, decides nothing."""

COMPARED_STEPS = 5
MAX_DIFFERENCES = 4
_NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:[eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A verdict, what it rests on, what would refute it, and what else the evidence allows.

    ``line`` is ``file:line`` of the user's code where it is known.
    """

    verdict: DiagnosisKind
    claim: str
    confidence: str = "high"
    because: tuple[str, ...] = ()
    refuted_if: str = ""
    line: str = ""
    phase: str = ""
    alternatives: tuple[str, ...] = ()


def read_verdicts(text: str) -> tuple[DiagnosisKind, ...]:
    """Return the verdicts in a list separated by commas.

    Raises
    ------
    ValueError
        If one is unknown.
    """
    words = [word.strip().upper() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in set(DiagnosisKind):
            raise ValueError(
                f"no verdict is called {word!r}{did_you_mean(word, [v.value for v in DiagnosisKind])}"
            )
    return tuple(DiagnosisKind(word) for word in words)


def evaluate(observed: Observation) -> Evaluation:
    """Return the verdict on one case; time alone supports none."""
    if observed.problem:
        return Evaluation(DiagnosisKind.UNKNOWN, f"could not be started: {observed.problem}", "none")
    if observed.exit_code is not None:
        return _exited(observed, observed.exit_code)
    rules = (_moving, _stall, _stopped, _blocked, _busy) if observed.window is not None else ()
    return next((found for rule in rules if (found := rule(observed)) is not None), _undecided(observed))


def _exited(observed: Observation, code: int) -> Evaluation:
    after = f"after {observed.seconds:.1f} s"
    stalls = tuple(f"stall finding: {stall.claim}" for stall in observed.stalls)
    if code:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        how = f"was ended by {name}" if code < 0 else f"left with exit code {code}"
        return Evaluation(
            DiagnosisKind.CRASH, f"{how} {after}{': ' if observed.error else ''}{observed.error}",
            because=(f"exit code {code}", *stalls),
            refuted_if="the same command exits with 0 when run again", line=observed.error_line,
            alternatives=("another process killed it (out of memory, a batch system)",) if code == -9 else (),
        )  # fmt: skip
    if observed.success is False:
        return Evaluation(
            DiagnosisKind.UNKNOWN, f"exited with 0 {after}, but the pattern of success is not in its output",
            "none", ("exit code 0",), "another attempt prints what the pattern of success matches",
            alternatives=("it ended early without an error", "the pattern is wrong"),
        )  # fmt: skip
    proof = ("exit code 0", "the pattern of success matches") if observed.success else ("exit code 0",)
    return Evaluation(
        DiagnosisKind.PASS, f"finished in {observed.seconds:.1f} s", because=proof + stalls,
        refuted_if="it does not finish when run again",
    )  # fmt: skip


def _moving(observed: Observation) -> Evaluation | None:
    for p in observed.window.progress if observed.window else ():
        # A case that moved in the first half only may be hung since.
        if observed.window and p.before < p.middle < p.after:
            rate = (p.after - p.before) / observed.window.seconds
            eta = f", ETA {(p.total - p.after) / rate:.0f} s" if p.total > p.after else ""
            total = f" of {p.total}" if p.total else ""
            return Evaluation(
                DiagnosisKind.SLOW,
                f"slow, not hung: {p.after}{total} ({p.source}), {rate:.3g}/s over the last "
                f"{observed.window.seconds:.1f} s{eta}",
                because=(f"{p.source}: {p.before}, {p.middle}, {p.after}",),
                refuted_if="the count does not change over a longer window",
            )
    return None


def _stall(observed: Observation) -> Evaluation | None:
    if (
        not observed.stalls
        or observed.stalls[-1].over
        or observed.stalls[-1].verdict not in set(DiagnosisKind)
    ):
        return None
    stall = observed.stalls[-1]
    because = (f"finding of rule stall in {stall.path}", *_cpu(observed))
    line = stall.line or next((sample.line for sample in _ranked(observed) if sample.line), "")
    verdict = DiagnosisKind(stall.verdict)
    return Evaluation(verdict, stall.claim, "as the finding", because, stall.refuted_if, line, stall.phase)


def _stopped(observed: Observation) -> Evaluation | None:
    stopped = [sample for sample in observed.processes if sample.verdict is DiagnosisKind.STOPPED]
    return _from_sample(observed, stopped[0], DiagnosisKind.STOPPED, "high") if stopped else None


def _blocked(observed: Observation) -> Evaluation | None:
    idle = all(s.cpu < IDLE_CORES and s.delay < QUEUED_CORES for s in observed.processes)
    if not idle or _moved(observed) or (observed.window and observed.window.output_bytes):
        return None
    known = bool(observed.window and observed.window.progress)
    blocked = next((s for s in _ranked(observed) if s.verdict is DiagnosisKind.BLOCKED), None)
    why = () if known else ("it waits for something that would have come later",)
    return (
        None
        if blocked is None
        else _from_sample(observed, blocked, DiagnosisKind.BLOCKED, "high" if known else "medium", why)
    )


def _busy(observed: Observation) -> Evaluation | None:
    known = bool(observed.window and observed.window.progress)
    for sample in () if _moved(observed) else _ranked(observed):
        if sample.cpu + sample.delay < BUSY_CORES or sample.cpu < IDLE_CORES:
            continue
        # A run at work shows one line, too: without a known count, only the lock held on one line decides.
        if sample.spins or sample.verdict is DiagnosisKind.SPIN:
            why = ("a single long call from that line",)
            return _from_sample(observed, sample, DiagnosisKind.SPIN, "high" if known else "medium", why)
        if known and sample.verdict is DiagnosisKind.LONG_OP:
            return _from_sample(
                observed, sample, DiagnosisKind.LONG_OP, "medium", ("the operation is slow and will end",)
            )
    return None


def _from_sample(
    observed: Observation,
    sample: ProcessSample,
    verdict: DiagnosisKind,
    confidence: str,
    why: tuple[str, ...] = (),
) -> Evaluation:
    claim = sample.claim
    if verdict is DiagnosisKind.SPIN:
        claim = f"it computes on one line, {stacks.Frame(*_split(sample.line), '').location}; {claim}"
    return Evaluation(
        verdict, f"{verdict.value}: {claim}", confidence,
        (*_cpu(observed), f"every sample of process {sample.pid} shows the same line"),
        "a later sample shows another line, or progress moves", sample.line, sample.phase, why,
    )  # fmt: skip


def _undecided(observed: Observation) -> Evaluation:
    because = (
        f"{observed.seconds:.1f} s passed, the limit was {observed.limit:g} s",
        *_cpu(observed),
    )
    alternatives = ("it is slow and would finish", "it hangs")
    sampled = any(sample.claim for sample in observed.processes)
    if not sampled or observed.window is None or observed.window.seconds < MIN_WINDOW_S:
        return Evaluation(
            DiagnosisKind.DID_NOT_FINISH, f"did not finish in {observed.limit:g} seconds", "none", because,
            "it finishes with a longer limit", alternatives=alternatives,
        )  # fmt: skip
    first = _ranked(observed)[0]
    return Evaluation(
        DiagnosisKind.UNKNOWN, f"did not finish in {observed.limit:g} s; {first.claim}",
        "none", because, "does not apply", first.line,
        alternatives=(*alternatives, "set progress = 'regular expression' in [base] to decide"),
    )  # fmt: skip


def _moved(observed: Observation) -> bool:
    """Return whether a count moved in the second half of the window, or the window is too short to tell."""
    window = observed.window
    return window is None or window.seconds < MIN_WINDOW_S or any(p.after > p.middle for p in window.progress)


def _ranked(observed: Observation) -> list[ProcessSample]:
    # A process without children explains more than the launcher that waits for it.
    return sorted(observed.processes, key=lambda sample: (not sample.line, not sample.leaf, sample.pid))


def _split(line: str) -> tuple[str, int]:
    file, _, number = line.rpartition(":")
    return file, int(number) if number.isdigit() else 0


def _cpu(observed: Observation) -> tuple[str, ...]:
    each = ", ".join(f"{p.pid}: {100 * p.cpu:.0f} %" for p in observed.processes) or "no process"
    return (f"CPU over the last {observed.window.seconds / 2:.1f} s: {each}",) if observed.window else ()


class Effect(enum.StrEnum):
    """Whether the factor changed anything besides the verdict."""

    OBSERVED = "observed"
    POSSIBLE = "possible"
    NONE = "none"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Comparison:
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


@dataclass(frozen=True)
class Finished:
    """A case that has run, with its evaluation."""

    case: Case
    attempt: Attempt
    observation: Observation
    evaluation: Evaluation


def compare(one: Finished, control: Finished) -> Comparison:
    """Compare a case with its control; a factor without an observed effect is not cleared."""
    effect, differences, compared = _effect(one, control)
    verdict, before, factor = one.evaluation.verdict, control.evaluation.verdict, one.case.factor
    outcome = why = ""
    undecided = [n for n, v in (("the case", verdict), ("the control", before)) if v in UNDECIDED]
    if undecided:
        why = f"the verdict of {undecided[0]} is {(verdict if undecided[0] == 'the case' else before).value}"
    elif effect is Effect.NONE:
        why = f"the factor had no effect that shows in {', '.join(compared)}"
    elif verdict is not before:
        outcome = (
            "causes"
            if before is DiagnosisKind.PASS
            else "cures"
            if verdict is DiagnosisKind.PASS
            else "changes"
        )
    elif effect is Effect.OBSERVED:
        outcome = "none"
    else:
        why = "no evidence that the factor changed anything; add shows = 'regular expression'"
    words = {"causes": "causes it", "cures": "cures it", "changes": "changes it", "": f"undecided: {why}"}
    claim = f"{factor} {words.get(outcome, 'makes no difference to the verdict')}"
    claim += f" ({before.value} -> {verdict.value})"
    names = one.case.name, control.case.name, factor
    return Comparison(*names, effect, tuple(differences), tuple(compared), outcome, claim, why)


def _effect(one: Finished, control: Finished) -> tuple[Effect, list[str], list[str]]:
    given, before = one.case.launch, control.case.launch
    moved = {n for n in given.environment if given.environment[n] != before.environment.get(n)}
    moved |= set(given.unset) ^ set(before.unset)
    dropped = [name for name in sorted(moved) if one.observation.arrived.get(name) is False]
    if dropped:
        return (
            Effect.NONE,
            [],
            [f"environment {dropped[0]}, which did not reach the process that does the work"],
        )
    certain: list[str] = []
    chance: list[str] = []
    compared: list[str] = []
    text, control_text = ("\n".join(_text(p) for p in each.attempt.outputs) for each in (one, control))
    for pattern in set(one.case.shows) - set(control.case.shows):
        here, there = (re.search(pattern, each, re.MULTILINE) for each in (text, control_text))
        if here is None:
            return Effect.NONE, [], [f"its output, which lacks {pattern!r}"]
        compared.append(f"{pattern!r} in the outputs")
        certain += [] if there else [f"output shows {here[0]!r}, its control's does not"]
    finished = one.evaluation.verdict is control.evaluation.verdict is DiagnosisKind.PASS
    runs = _open(one.attempt.run), _open(control.attempt.run)
    if runs[0] is not None and runs[1] is not None:
        for sure, difference in _run_differences(runs[0], runs[1]):
            (certain if sure else chance).append(difference)
        compared.append("the fingerprints and first steps of the runs")
    if text.strip() and control_text.strip():
        for sure, difference in _output_differences(one.attempt, control.attempt, whole=finished):
            (certain if sure else chance).append(difference)
        compared.append("the outputs")
    if certain:
        return Effect.OBSERVED, certain[:MAX_DIFFERENCES], compared
    if chance:
        notes = [f"{each} (chance, if training is not seeded)" for each in chance[:MAX_DIFFERENCES]]
        return Effect.POSSIBLE, notes, compared
    # What a case that was cut short did not reach may still differ.
    return Effect.NONE if compared and finished else Effect.UNKNOWN, [], compared


def _run_differences(run: Run, control: Run) -> Iterator[tuple[bool, str]]:
    """Return what differs for certain (True), and what may differ by chance, between two runs."""
    fingerprints = run.fingerprint(), control.fingerprint()
    if fingerprints[0] and fingerprints[1]:
        here, there = (to_json(fingerprint) for fingerprint in fingerprints)
        # Requested settings and the host are no effect; the module hash repeats the module table.
        for key in here.keys() - {"script", "arguments", "host", "module_hash"}:
            if here[key] != there[key]:
                yield True, f"fingerprint {key}: {_change(there[key], here[key])}"
    tables = (
        [(p.name, p.shape, p.dtype, p.device, p.requires_grad) for p in r.parameters()]
        for r in (run, control)
    )
    first, second = tables
    if first and second and first != second:
        yield True, "the table of parameters"
    names = set(run.scalar_names("backlight")) & set(control.scalar_names("backlight"))
    for name in sorted(n for n in names if n.split("/")[0] not in {"cost", "time", "phase"}):
        values = [run.scalar(name), control.scalar(name)]
        now, before = (
            dict(zip(v.steps[:COMPARED_STEPS], v.values[:COMPARED_STEPS], strict=True)) for v in values
        )
        for step in sorted(now.keys() & before.keys()):
            if not np.array_equal(now[step], before[step], equal_nan=True):
                sure = step == 0 and (name == "backwards" or name.startswith("lr/"))
                yield sure, f"{name} at step {step}: {before[step]:.6g} and {now[step]:.6g}"
                break


def _change(before: object, after: object) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted(key for key in after.keys() | before.keys() if before.get(key) != after.get(key))
        return ", ".join(f"{key} {before.get(key, 'none')} and {after.get(key, 'none')}" for key in keys)
    if isinstance(before, Sequence) and isinstance(after, Sequence) and not isinstance(before, str):
        return f"{len(before)} and {len(after)} entries"
    return f"{before} and {after}"


def _output_differences(one: Attempt, control: Attempt, *, whole: bool) -> Iterator[tuple[bool, str]]:
    """Compare the outputs line by line: words differ for certain, numbers may differ by chance."""
    lines, others = _lines(one), _lines(control)
    pairs = zip_longest(lines, others, fillvalue="") if whole else zip(lines, others, strict=False)
    for here, there in pairs:
        if here != there:
            sure = _NUMBER.sub("#", here) != _NUMBER.sub("#", there)
            yield sure, f"output {here.strip()[:80]!r} where its control has {there.strip()[:80]!r}"


def _lines(attempt: Attempt) -> list[str]:
    text = _text(attempt.outputs[0])
    complete = text[: text.rfind("\n") + 1]  # the last line of a case that was ended may be cut
    # Paths of the attempt and addresses always differ.
    return re.sub(r"0x[0-9a-fA-F]+", "0x", complete.replace(str(attempt.path), "{case}")).splitlines()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _open(path: Path) -> Run | None:
    try:
        return open_run(path)
    except (StoreError, OSError):
        return None
