"""Rule ``replicas_differ``: ranks whose weights or gradients are to be equal and are not, or out of step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.monitors.correctness.model.replicas import (
    Differing,
    Digests,
    Moment,
    OutOfStep,
    Transferred,
    Values,
    differing,
    moments,
    out_of_step,
)
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import count, listed

ROUNDING = 1e-5
"""Relative difference of norms up to which values that each rank computes on its own count as equal."""


@dataclass(frozen=True)
class ReplicaLimits(Limits, monitor="correctness"):
    """Limits of the rule ``replicas_differ``."""

    apart_steps: int = limit(2, "observed steps at which ranks must be apart", low=1)
    equal_updates: int = limit(
        3, "updates through which plain tensors must have been equal before they count as replicas", low=1
    )


@dataclass
class _Apart:
    """A moment at which replicas differ: what each rank held of each, and how many there are."""

    moment: Moment
    differing: dict[str, dict[int, Values]]
    compared: int


@dataclass
class _History:
    """Through how many updates the plain tensors of a name have been equal on all ranks."""

    digest: int | None = None
    updates: int = 0
    is_apart: bool = False


@dataclass
class _Replicas:
    """Compares the moments of a run in order."""

    limits: ReplicaLimits
    has_equal_devices: bool
    plain: dict[str, _History] = field(default_factory=dict)

    def compare(self, moment: Moment) -> tuple[_Apart, _Apart]:
        """Return what is promised to be equal and is not, and what was equal until now."""
        promised, plain = _Apart(moment, {}, 0), _Apart(moment, {}, 0)
        for name, values in moment.parameters.items():
            if any(entry.promise.by for entry in values.values()):
                members = _members(values)
                promised.compared += any(len(group) > 1 for group in members)
                for group in members:
                    if self._differs(group):
                        promised.differing.setdefault(name, {}).update(group)
            elif moment.name == "weights" and len(values) > 1:
                plain.compared += 1
                if self._has_parted(self.plain.setdefault(name, _History()), values):
                    plain.differing[name] = values
        return promised, plain

    def _differs(self, group: Mapping[int, Values]) -> bool:
        members = list(group.values())
        if all(replica.digest == members[0].digest for replica in members):
            return False
        return (self.has_equal_devices and all(v.promise.exact for v in members)) or not _close(members)

    def _has_parted(self, history: _History, values: Mapping[int, Values]) -> bool:
        members = list(values.values())
        if any(replica.digest != members[0].digest for replica in members):
            history.is_apart |= history.updates >= self.limits.equal_updates and not _close(members)
            history.updates *= history.is_apart
        elif history.digest != members[0].digest:
            history.updates += history.digest is not None
            history.digest, history.is_apart = members[0].digest, False
        return history.is_apart


def _close(members: Sequence[Values]) -> bool:
    low, high = (of(replica.norm for replica in members) for of in (min, max))
    return high - low <= ROUNDING * high


def _members(values: Mapping[int, Values]) -> list[dict[int, Values]]:
    """Return the ranks that are promised to be equal to each other, group by group."""
    groups = dict.fromkeys(replica.promise.ranks for replica in values.values() if replica.promise.by)
    return [{rank: values[rank] for rank in ranks if rank in values} for ranks in groups]


@rule("replicas_differ", monitor="correctness", version=4, limits=ReplicaLimits)
def replicas_differ(run: Run, limits: ReplicaLimits) -> Iterator[Finding]:
    """Find ranks out of step, data that changed in transfer, and replicated parameters that differ."""
    late = out_of_step(run)
    if late is not None and late.steps >= limits.apart_steps:
        yield _out_of_step(late)
    transfers, compared = differing(run)
    if len({transfer.step for transfer in transfers}) >= limits.apart_steps:
        yield _changed_in_transfer(transfers, compared)  # what ranks hold differs because of it
        return
    replicas = _Replicas(limits, _has_equal_devices(run))
    promised: list[_Apart] = []
    plain: list[_Apart] = []
    steps: list[int] = []
    is_averaged = False
    for moment in moments(run):
        steps.append(moment.step)
        for kind, comparison in zip((promised, plain), replicas.compare(moment), strict=True):
            if comparison.differing:
                kind.append(comparison)
        # Local SGD: what was not reduced, on purpose, meets again.
        has_met = moment.name == "weights" and (not promised or promised[-1].moment is not moment)
        is_averaged |= has_met and bool(promised and promised[0].moment.unsynced)
    for differences in (plain,) if is_averaged else (promised, plain):
        if len({difference.moment.step for difference in differences}) >= limits.apart_steps:
            yield _finding(run, differences, is_first=differences[0].moment.step == steps[0])
            return


def _changed_in_transfer(transfers: Sequence[Differing], compared: int) -> Finding:
    first, steps = transfers[0], sorted({transfer.step for transfer in transfers})
    ranks = sorted({rank for transfer in transfers for rank in transfer.ranks})
    named = listed([f"`{call}`" for call in sorted({transfer.call for transfer in transfers})])
    who = f"{'Rank' if len(ranks) == 1 else 'Ranks'} {listed(list(map(str, ranks)))}"
    norms = listed([f"{phrases.number(norm)} on rank {rank}" for rank, norm in list(first.norms.items())[:4]])
    if len({phrases.number(norm) for norm in first.norms.values()}) == 1:
        norms += ", with other values"
    return Finding(
        severity=Severity.ERROR,
        title=(
            f"{who} received other values than were sent, from step {steps[0]} on"
            if all(transfer.is_pair for transfer in transfers)
            else f"{named} gave {who.lower()} other results from step {steps[0]} on"
        ),
        detail=(
            f"{count(len(transfers), 'transfer')} by {named} of {compared} that were compared differ, at "
            f"{count(len(steps), 'observed step')}. At step {first.step} the norm of the data is {norms}. "
            "Each rank read it as the call ended, a sender as it began."
        ),
        subject=Subject(step=first.step, rank=first.ranks[0]),
        evidence=tuple(
            Evidence(f"events/{Transferred.event}, rank {rank}", first.step, phrases.plain(norm), "norm")
            for rank, norm in list(first.norms.items())[: phrases.EVIDENCE_ROWS]
        ),
        fix=(
            "Test the link between these devices (`all_reduce_perf` and `sendrecv_perf` of nccl-tests check "
            "values), and look for Xid and ECC errors. If `NCCL_P2P_DISABLE=1` helps, it is the "
            "direct link."
        ),
        refuted_if="another thread or stream writes to the tensor while the transfer is under way.",
    )


def _out_of_step(fact: OutOfStep) -> Finding:
    """Report ranks that have seen another number of backward passes at the same count of optimizer steps."""
    alone = len(fact.ranks) == 1
    who = f"{'Rank' if alone else 'Ranks'} {', '.join(map(str, fact.ranks[:8]))}"
    counts = ", ".join(str(fact.seen[rank]) for rank in fact.ranks[:8])
    others = [rank for rank in fact.seen if rank not in fact.ranks]
    return Finding(
        severity=Severity.ERROR,
        title=f"{who} {'is' if alone else 'are'} out of step with the others from step {fact.step} on",
        detail=(
            f"{who} had run {counts} backward passes at the end of step {fact.step}, the others "
            f"{fact.common}: {'it' if alone else 'they'} skipped or added an optimizer step, or accumulated "
            f"differently. In the {count(fact.steps, 'recorded step')} since, equal step numbers "
            "mean different steps, so the replicas drift apart."
        ),
        subject=Subject(step=fact.step, rank=fact.ranks[0] if alone else None),
        evidence=tuple(
            Evidence(f"scalars/backwards_seen, rank {rank}", fact.step, fact.seen[rank], "1")
            for rank in (*fact.ranks[:4], *others[:2])
        ),
        fix=(
            "Find the condition around `optimizer.step()` that each rank decides alone (its loss, its shard, "
            "an empty batch), and reduce it over all ranks first."
        ),
        refuted_if="the ranks accumulate different numbers of microbatches per step by design.",
    )


def _has_equal_devices(run: Run) -> bool:
    """Return whether all ranks compute on the same kind of device, and so round the same way."""
    fingerprints = [run.fingerprint(rank=rank) for rank in run.attempts[-1].ranks] if run.attempts else []
    kinds = {re.sub(r"(cuda):\d+", r"\1", p.device) for p in fingerprints if p is not None}
    hosts = {fingerprint.host for fingerprint in fingerprints if fingerprint is not None}
    return len(kinds) <= 1 and (len(hosts) <= 1 or not any("cpu" in kind for kind in kinds))


def _finding(run: Run, differences: Sequence[_Apart], *, is_first: bool) -> Finding:
    first = differences[0]
    moment, names = first.moment, sorted(first.differing, key=lambda name: -_spread(first.differing[name]))
    values = dict(sorted(first.differing[names[0]].items()))
    by = next(iter(values.values())).promise.by
    steps = sorted({difference.moment.step for difference in differences})
    is_meant = bool(moment.unsynced)  # and so may be local SGD
    cause, fix = _cause(run, first, is_first=is_first, by=by)
    norms = ", ".join(f"{phrases.number(v.norm)} on rank {rank}" for rank, v in list(values.items())[:4])
    if len({phrases.number(replica.norm) for replica in values.values()}) == 1:
        norms += ", with other values"
    kept = phrases.parameters(names, len(names))
    kept += f" of {count(first.compared, 'parameter')} that {by} keeps equal" if by else ", equal until then,"
    return Finding(
        severity=Severity.ERROR if by and not is_meant else Severity.WARNING,
        title=f"Replicated {moment.name} differ between ranks from step {moment.step} on",
        detail=(
            f"The {moment.name} of {kept} differ at {count(len(steps), 'observed step')}. "
            f"At step {moment.step} the norm of `{names[0]}` is {norms}. {cause}"
        ),
        subject=Subject(parameter=names[0], module=phrases.modules_of(run).get(names[0]), step=moment.step),
        evidence=tuple(
            Evidence(
                f"events/{Digests.event}, rank {rank}", moment.step, phrases.plain(replica.norm), moment.name
            )
            for rank, replica in list(values.items())[: phrases.EVIDENCE_ROWS]
        ),
        fix=fix,
        refuted_if="the ranks are meant to train apart and to be averaged now and then (local SGD).",
    )


def _spread(values: Mapping[int, Values]) -> float:
    norms = [replica.norm for replica in values.values()]
    return (max(norms) - min(norms)) / max(*norms, 1e-30)


def _cause(run: Run, first: _Apart, *, is_first: bool, by: str) -> tuple[str, str]:
    """Return what the facts name as the cause, and what to do about it."""
    moment = first.moment
    if moment.unsynced:
        return (
            "The last backward before the step ran inside `no_sync()`.",
            "Run the last backward before each step outside `no_sync()`.",
        )
    if moment.name == "gradients" and len(first.differing) == first.compared:
        return (
            "The weights were equal at the forward, and no gradient agrees: nothing reduces them.",
            "Call the model that DistributedDataParallel returned, and edit gradients on all ranks.",
        )
    if moment.name == "gradients":
        return (
            "The weights were equal at the forward, and the other gradients agree: these are left out of the "
            "reduction, changed on one rank, or one rank received another sum.",
            "Create DDP after all parameters exist and require gradients; edit gradients on all ranks.",
        )
    if is_first:
        return (
            "They differ before the first update: something wrote weights after they were broadcast.",
            "Load checkpoints and initialise weights before DDP is built, or on all ranks.",
        )
    if (rates := _learning_rates(run, moment.step)) is not None:
        return f"The learning rate is {rates}.", "Give the optimizers of all ranks the same settings."
    return (
        f"{'Weights and gradients' if by else 'They'} were equal at the observed step before: one rank "
        "skipped an update, uses another optimizer, or something else wrote its weights.",
        "Find what runs on one rank only: a condition around `optimizer.step()`, other settings of the "
        "optimizer, an edit of weights.",
    )


def _learning_rates(run: Run, before: int) -> str | None:
    """Return the learning rates in words if ranks used different ones before a step."""
    for name in run.scalar_names():
        if not name.startswith("lr/"):
            continue
        rates = run.spread(name, attempt=run.attempts[-1].index)
        rows = [row for row, step in enumerate(rates.steps) if step < before and rates.logged[row].all()]
        for row in rows:
            if len(set(rates.values[row])) > 1:
                shown = zip(rates.values[row][:4], rates.ranks, strict=False)
                return " and ".join(f"{phrases.number(float(rate))} on rank {rank}" for rate, rank in shown)
    return None
