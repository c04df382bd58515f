"""The words of a diagnosis: one renderer for every cause and decision. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from backlight.findings import phrases
from backlight.processes import WaitReason
from backlight.records import DiagnosisKind, Phase
from backlight.watchdog.collectives import (
    Absence,
    Awaited,
    CollectiveRecord,
    Cycle,
    Mismatch,
    Part,
    Unfinished,
)
from backlight.watchdog.diagnosis import MEDIUM, Cause, Decision, Failure, What
from backlight.watchdog.graph_samples import NodeShare
from backlight.watchdog.observation import Workers
from backlight.watchdog.stacks import Frame, RecomputedRegion
from backlight.watchdog.waits import WorkerStack
from backlight.watchdog.words import (
    HEADS,
    NAME_THEIR_RANK,
    OUTSIDE,
    WORDS,
    Words,
    call_text,
    describe_wait,
    end_text,
    in_phase,
    issued_text,
    join,
    span,
    verb,
    was_text,
)

MAX_CLAIM_CHARS = 200
"""Characters of a message that a claim repeats."""

MAX_RANKS = 8
"""Ranks whose calls a claim repeats."""

MAX_MISSING = 16
"""Ranks without a dump that a claim repeats."""


@dataclass(frozen=True)
class Diagnosis:
    """A decision in words, with its refutation."""

    kind: DiagnosisKind
    phase: Phase
    claim: str
    refuted_if: str
    next_check: str
    confidence: str = MEDIUM
    rank: int | None = None
    line: str | None = None
    parameter: str | None = None
    module: str | None = None
    waits: bool = False  # the rank waits for other ranks


def describe(decision: Decision | Cause) -> Diagnosis:
    """Return a decision, or the cause of one rank, in words."""
    if isinstance(decision, Cause):
        decision = Decision(decision)
    cause = decision.cause
    if cause.what is What.MATCHED:
        words = _matched(cause)
    else:
        outside = None if cause.is_watched else OUTSIDE.get(cause.what)
        values = _values(cause)
        words = Words(*(template.format_map(values) for template in outside or WORDS[cause.what]))
    head = HEADS.get(cause.what, cause.kind).format(phase=cause.phase)
    is_named = cause.what in NAME_THEIR_RANK and cause.is_watched
    if decision.named is not None and not is_named:
        head += f": rank {decision.named}{f' (process {cause.pid})' if decision.shows_pid else ''}"
    failures = "; ".join(map(_failure_text, decision.failures[:3]))
    claim = f"{words.claim}{_consequences(decision)}"
    if failures:
        is_first = cause.what is What.FAILED_TOGETHER
        claim = f"{failures}; {claim}" if is_first else f"{claim}; {failures}"
    return Diagnosis(
        cause.kind, cause.phase, f"{head}: {claim}", words.refuted_if, words.next_check, cause.confidence,
        cause.rank, cause.line, cause.parameter, cause.module, cause.waits,
    )  # fmt: skip


def title_and_detail(diagnosis: Diagnosis) -> tuple[str, str]:
    """Return the first clause and the others; where names are shortened, the detail is the whole claim."""
    first, _, others = diagnosis.claim.partition("; ")
    title = phrases.shorten(first)
    if title != first:
        return title, f"{diagnosis.claim}."
    return title, f"{others or f'{in_phase(diagnosis.phase)}, with {diagnosis.confidence} confidence'}."


def _consequences(decision: Decision) -> str:
    """Return what follows the cause: ranks behind, ended and waiting, and what is not observed."""
    out = ""
    if decision.behind is not None:
        behind = decision.behind
        is_subject = decision.cause.what in {What.TRAINING_ENDED, What.TRAINING_FAILED}
        out += "" if is_subject else f"; rank {behind.rank} is there"
        out += f", with {behind.backwards} backward passes where the others are at {behind.others}"
    if decision.noticed is not None:
        rank, end = decision.noticed
        out += f"; rank {rank} {end_text(end)} in it"
    if decision.later:
        out += f"; after it rank {join(decision.later)}"
    out += _waiting_text(decision.waiting)
    if decision.unobserved is not None:
        missing, world_size = decision.unobserved
        out += f"; {missing} of {world_size} ranks are not observable from this machine, so the cause is open"
    if decision.no_dump:
        out += f"; rank {join(decision.no_dump[:MAX_MISSING])} left no dump, so the cause may be there"
    return out


def _waiting_text(waiting: Mapping[int, Awaited | None]) -> str:
    if not waiting:
        return ""
    if None in waiting.values():
        return f". Rank {span(tuple(waiting))} {verb(waiting)} for it"
    ranks: dict[str, list[int]] = {}
    for rank, call in waiting.items():
        ranks.setdefault(call_text(call), []).append(rank)
    return ". Waiting for it: " + "; ".join(f"rank {join(r)} in {text}" for text, r in ranks.items())


def _failure_text(failure: Failure) -> str:
    call = failure.call.text if isinstance(failure.call, CollectiveRecord) else failure.call
    # The first sentence, without source positions and addresses of the backend.
    message = re.sub(r"\s*\[[^\]]*\]:?\d*", "", failure.message)
    message = re.split(r"\. |: This ", message, maxsplit=1)[0][:160]
    return f"rank {join(failure.ranks)} failed in {call} ({message})"


# Values of the templates


def _values(cause: Cause) -> dict[str, object]:
    frame, what, call = cause.frame, cause.what, cause.call
    at = _at(frame)
    in_words = "" if cause.phase is Phase.OTHER else f"in {cause.phase}"
    function = f" ({cause.function})" if cause.function else ""
    values: dict[str, object] = {
        "rank": cause.rank, "pid": cause.pid, "step": cause.step, "phase": cause.phase,
        "seconds": f"{cause.silence_s:.0f} s", "cpu": f"{100 * (cause.cpu or 0.0):.0f} %",
        "tail": "; ".join(
            [*_region(cause.region), *_cpu(cause), f"{cause.silence_s:.0f} s", *_reached(cause)]
        ),
        "thread": f"thread {cause.thread}" if cause.thread else "the main thread",
        "waits": _wait_text(cause.wait), "function": cause.function, "inside": _inside(frame),
        "holds": f" in C code that holds the interpreter lock{function}" if cause.holds_interpreter else "",
        "at": at, "now_at": at and f"; now{at}",
        "seen_at": at and f"; {'in every sample' if cause.same_line else 'now'}{at}",
        "after_at": at and f";{at}", "called_at": at and f", called{at}",
        "at_line": f" (at {cause.line})" if cause.line else "", "at_which": cause.line,
        "line": f": {cause.line}" if cause.line else "", "where_idle": _where_idle(cause),
        "at_step": "" if cause.step is None else f" at step {cause.step}, {in_phase(cause.phase)}",
        "where": "" if cause.step is None else f" (step {cause.step}, {cause.phase})",
        "in_phase_": in_words and f"{in_words}, ", "in_phase_now": in_words and f"; {in_words} now",
        "operation": cause.function or "one native operation",
        "both_show": f" (both samples show {cause.function})" if cause.function else "",
        "now_in": f", now in {cause.function}" if cause.function else "",
        "or_call": "" if cause.holds_interpreter else "; an endless loop and a long call are not "
        "distinguishable from outside",
        "call": call.text if isinstance(call, CollectiveRecord) else "a collective",
        "issued_call": call_text(call), "bare_call": _bare(call), "usual": _bare(cause.usual),
        "ranks": join(cause.ranks), "num_ranks": f"{len(cause.ranks):,}", "others": join(cause.others),
        "span": span(cause.ranks), "first_rank": next(iter(cause.ranks), None), "count": f"{cause.count:,}",
        "doing": "is not observed"
        if cause.step is None
        else f"is {in_phase(cause.phase)} of step {cause.step}",
        "running": "".join(f"rank {r} is {in_phase(p)} of step {s}; " for r, p, s in cause.running),
        "lines": "; ".join(f"rank {span(r)}{_at(f) or ' without a stack'}" for r, f in cause.lines),
    }  # fmt: skip
    if what is What.WAITS:
        workers = cause.workers
        values["workers"] = f"; {_workers_text(workers)}" if workers is not None else ""
        worker = workers.stacks[0] if workers is not None and workers.stacks else None
        values["at_worker"] = _at(worker.frame) if worker is not None else at
        values["waits"] = f"waits for {_worker_text(worker)}," if worker is not None else values["waits"]
    if cause.end is not None:
        has = "" if cause.end.signal else "has "
        values |= {"end": end_text(cause.end), "has_ended": f"{has}{was_text(cause.end)}"}
    if cause.named is not None:
        named, fix = describe_wait(cause.named)
        values |= {"named": named, "fix": "attach again later" if cause.named.progresses else fix}
    if cause.speed is not None:
        values |= _speed(cause)
    if what is What.OUTSIDE_BACKWARD:
        values |= _outside_backward(cause)
    if what is What.NOT_COME:
        values["not_come"] = _not_come(cause)
    if cause.error is not None:
        values["error"] = _error(cause)
    return values


def _at(frame: Frame | None) -> str:
    return "" if frame is None else f" at {frame.location} in {frame.qualified_name}"


def _inside(frame: Frame | None) -> str:
    return "" if frame is None else f" in {frame.qualified_name}, {frame.location}"


def _bare(call: Awaited | None) -> str:
    return call.call_text if isinstance(call, CollectiveRecord) else call_text(call)


def _wait_text(reason: WaitReason) -> str:
    return "sleeps" if reason is WaitReason.SLEEP else f"waits for {reason}" if reason else "waits"


def _cpu(cause: Cause) -> list[str]:
    return [] if cause.cpu is None else [f"CPU {100 * cause.cpu:.0f} %"]


def _region(region: RecomputedRegion | None) -> list[str]:
    if region is None:
        return []
    line = f" of {Path(region.line).name}" if region.line else ""
    function = f" ({region.frame.qualified_name})" if region.frame is not None else ""
    return [f"it is in the recomputation of the checkpointed region{line}{function}"]


def _reached(cause: Cause) -> list[str]:
    if not cause.expected:
        return []
    if not cause.reached:
        return [f"no parameter reached yet (of {cause.expected})"]
    return [f"last parameter reached: {cause.parameter} ({cause.reached} of {cause.expected})"]


def _where_idle(cause: Cause) -> str:
    inside = _inside(cause.frame)
    if cause.same_line:
        return inside
    node = f" in {cause.module}" if cause.module and not inside else ""
    return f"{node or inside} (not the same line in every sample)" if cause.is_sampled else node


def _speed(cause: Cause) -> dict[str, object]:
    speed = cause.speed
    assert speed is not None
    if speed.nodes_done > 0 and speed.nodes_total > 0:
        parts = [f"backward {speed.nodes_done:,} of {speed.nodes_total:,} nodes"]
    elif speed.nodes_total:
        parts = [f"backward of {speed.nodes_total:,} nodes, position not known"]
    else:
        parts = ["backward"]
    rate, remaining_s, share = speed.nodes_per_s, speed.remaining_s, speed.share
    if speed.recomputed:
        # One node of the graph may stand for any number of recomputed nodes.
        parts.append(f"{speed.recomputed:,} nodes recomputed so far, remaining time not known")
    elif rate:
        text = f"{rate / 1e3:.1f}k/s" if rate >= 1e3 else f"{rate:.0f}/s"
        parts.append(text if remaining_s is None else f"{text}, ETA {remaining_s:.0f} s")
    parts += [f"{speed.phase_s:.0f} s so far", *_reached(cause)]
    if cause.module and speed.custom_calls:
        parts.append(f"{speed.custom_calls:,} custom functions so far, now {cause.module}")
    origin, change = "the line that made the nodes is not known", "find the line that makes most nodes"
    if share is not None:
        origin = share_text(share)
        change = f"change {Path(share.file).name}:{share.line}, so that it makes fewer nodes"
    unless = " for as long as the ETA"
    if speed.recomputed:
        unless = ", and none is recomputed, for as long as it has run now"
    return {"speed": f"{', '.join(parts)}; {origin}", "change": change, "unless": unless}


def share_text(share: NodeShare) -> str:
    """Return the share of the nodes that a line made, with its method."""
    where = f"{Path(share.file).name}:{share.line}{' (a Python loop)' if share.is_loop else ''}"
    when = "recomputation" if share.recomputed else "forward"
    nodes = "the recomputed nodes" if share.recomputed else "the nodes"
    amount = f"about {100 * share.share:.0f} % (± {ceil(100 * share.margin)}) of {nodes}"
    return f"{amount} come from {where}, by {share.samples} samples of {when}"


_PHASES = {
    Phase.DATA: "waiting for data",
    Phase.OTHER: "between steps",
    Phase.LOSS: "between forward and backward",
}


def _outside_backward(cause: Cause) -> dict[str, object]:
    doing = _PHASES.get(cause.phase, f"in {cause.phase}")
    parts = [f"{doing} for {cause.silence_s:.0f} s", *_cpu(cause)]
    if cause.frame is not None:
        parts.append(f"{'in every sample' if cause.same_line else 'now'}{_at(cause.frame)}")
    worker = cause.workers.stacks[0] if cause.workers is not None and cause.workers.stacks else None
    if worker is not None:
        parts[0] = f"waiting for {cause.silence_s:.0f} s for {_worker_text(worker)}"
    elif cause.wait:
        parts.append(f"it {_wait_text(cause.wait)}")
    if cause.workers is not None:
        parts.append(_workers_text(cause.workers))
    look = "time the data loader alone" if cause.phase is Phase.DATA else "read the code at that line"
    if worker is not None:
        look = f"read the code of the worker{_at(worker.frame)}"
    return {"outside": "; ".join(parts), "look": look}


def _workers_text(workers: Workers) -> str:
    parts = [f"{workers.count} worker processes"]
    for word, pids in (("dead", workers.dead), ("stopped", workers.stopped)):
        if pids:
            parts.append(f"{len(pids)} of them {word} ({join(pids)})")
    words = sorted("sleep" if r is WaitReason.SLEEP else f"wait for {r}" for r in workers.waits)
    if words and not workers.stacks:
        parts.append(f"they {', '.join(words)}")
    parts += [f"worker {worker.pid}{_at(worker.frame)}" for worker in workers.stacks[1:]]
    return ", ".join(parts)


def _worker_text(worker: WorkerStack) -> str:
    doing = f" {_wait_text(worker.wait)}" if worker.wait else " is"
    return f"worker {worker.pid} of the data loader, which{doing}{_at(worker.frame)}"


def _error(cause: Cause) -> str:
    reason = cause.error
    assert reason is not None
    error = reason.error
    error = error if len(error) <= MAX_CLAIM_CHARS else f"{error[:MAX_CLAIM_CHARS]}…"
    at = f" at {Path(reason.line).name} in {reason.function}" if reason.line else ""
    step = "" if cause.step is None else f", step {cause.step}"
    return f"{' out of memory' if reason.out_of_memory else ''}: {error}{at}{step}"


def _not_come(cause: Cause) -> str:
    parts = [f"rank {span(cause.ranks)} {verb(cause.ranks)}"]
    if cause.others:
        are = "are" if len(cause.others) > 1 else "is"
        parts.append(f"rank {span(cause.others)} of this machine {are} elsewhere")
    if cause.missing:
        keys = "; the store holds no key of them" if cause.is_store_read else ""
        parts.append(f"rank {span(cause.missing)} has no process on this machine{keys}")
    return "; ".join(parts)


# Collectives of several ranks

_PARTS = {
    Part.OPERATION: "the ranks call different operations", Part.SIZES: "the sizes of the ranks differ",
    Part.ARGUMENTS: "the arguments of the ranks differ", Part.DTYPES: "the dtypes of the ranks differ",
}  # fmt: skip


def _matched(cause: Cause) -> Words:
    match cause.match:
        case Mismatch() as mismatch:
            return Words(
                _mismatch(mismatch), "the records of the ranks agree up to this number",
                "compare the branches that the ranks take before this call",
            )  # fmt: skip
        case Cycle() as cycle:
            parts = [f"rank {join(ranks)} {verb(ranks)} in {call.text}" for call, ranks in cycle.waits]
            order = "make all ranks issue the collectives of these groups in the same order"
            if cycle.waits[0][0].peer is not None:
                order = "let one of the ranks receive before it sends, or put both calls into one "
                order += "`batch_isend_irecv`"
            claim = f"ranks wait for each other: {'; '.join(parts)}"
            return Words(claim, "one of these collectives completes", order)
        case Absence() as absence:
            refuted_if = "that rank was about to issue it"
            check = "look for what keeps that rank from this call: `backlight attach PID` on it"
            if absence.elsewhere and absence.absent != (absence.cause,):
                refuted_if = "the ranks outside were about to enter that call"
                check = "look for a call that only some ranks make"
            return Words(_absence(absence), refuted_if, check)
        case Unfinished() as unfinished:
            return _unfinished(unfinished)
    raise TypeError(f"expected a match of collectives, got {cause.match!r}")


def _mismatch(mismatch: Mismatch) -> str:
    calls, lone = mismatch.calls, mismatch.rank
    first = next(iter(calls.values()))
    at = f"{'collective' if first.peer is None else first.operation} {mismatch.number}{first.group_text}"
    if lone is None:
        each = "; ".join(f"rank {r} {c.call_text}" for r, c in sorted(calls.items())[:MAX_RANKS])
        return f"at {at} {_PARTS[mismatch.part]}: {each}"
    usual = next(call for rank, call in calls.items() if rank != lone)
    issued = f"; issued at {calls[lone].line}" if calls[lone].line else ""
    return f"at {at} rank {lone} calls {calls[lone].call_text}, the others call {usual.call_text}{issued}"


def _absence(absence: Absence) -> str:
    call, inside = absence.wait.call, sorted(absence.wait.inside)
    missing = call.text
    if call.peer is not None:
        missing = f"the {'receive' if call.operation == 'send' else 'send'} for {call.text}"
    after = ""
    if absence.last is not None:
        at = f" at {absence.last.line}" if absence.last.line else ""
        after = f"; its last one there is {absence.last.text}{at}"
    elif absence.absent == (absence.cause,) and absence.wait.last:
        after = "; it has issued none there"
    ranks: dict[str, list[int]] = {}
    for rank, other in absence.elsewhere.items():
        ranks.setdefault(other.text if isinstance(other, CollectiveRecord) else call_text(other), []).append(
            rank
        )
    for text, members in ranks.items():
        who = "it waits" if len(absence.absent) == 1 else f"rank {join(members)} {verb(members)}"
        after += f"; {who} in {text}"
    who = f"rank {join(sorted(absence.absent))} has not issued {missing}"
    return f"{who}, in which rank {join(inside)} {verb(inside)}{issued_text(call)}{after}"


def _unfinished(unfinished: Unfinished) -> Words:
    call, inside, late = unfinished.wait.call, sorted(unfinished.wait.inside), unfinished.late
    issued = issued_text(call)
    if late:
        others = join(r for r in inside if r not in late)
        claim = f"rank {join(late)} has issued {call.text}, and its device has not started it, while that of "
        claim += f"rank {others} waits in it{issued}"
        check = "find out what the device of that rank computes: earlier kernels of its stream do not end"
    else:
        claim = (
            f"all observed ranks have issued {call.text}; it does not complete on rank {join(inside)}{issued}"
        )
        check = "check the network and the devices between these ranks; the calls of the ranks agree"
    return Words(claim, "the collective completes by itself", check)
