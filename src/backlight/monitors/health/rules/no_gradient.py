"""Rule ``no_gradient``: parameters without a gradient, with the reason, and gradients of zero."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from backlight.findings import phrases
from backlight.findings.limits import limit
from backlight.findings.phrases import optimizer_name
from backlight.monitors.health.model.history import Bools, Integers, ending_streaks
from backlight.monitors.health.model.parameters import (
    MembershipLimits,
    first_missing,
    without_optimizer,
)
from backlight.records import Evidence, Finding, ParameterRecord, RunStatus, Severity, Subject
from backlight.registry import rule
from backlight.store.format.schema import REQUIRES_GRAD
from backlight.store.read.run import Frame, Run
from backlight.text import count, percent


@dataclass(frozen=True)
class _Reason:
    severity: Severity
    words: str
    fix: str
    path: str


_FROZEN = _Reason(
    Severity.INFO,
    "`requires_grad` is False",
    "If they should train, call `requires_grad_(True)` before the optimizer is created.",
    "requires_grad",
)
_WEIGHTED = frozenset({"Linear", "Conv1d", "Conv2d", "Conv3d"})
"""Layers whose weight gets the products of its inputs with the gradients that its bias sums."""

_PASSING = frozenset(
    {"Dropout", "Dropout1d", "Dropout2d", "Flatten", "Identity", "MaxPool1d", "MaxPool2d", "AvgPool2d"}
)
"""Modules whose output is zero where their input is."""

_OUTSIDE = _Reason(
    Severity.WARNING,
    "not in any watched optimizer, and no gradient reached them",
    "Create the optimizer after the last module was added, and compare its parameter groups with "
    "`model.named_parameters()`.",
    "group",
)
_FOREIGN = _Reason(
    Severity.WARNING,
    "in an optimizer, but not a parameter of the model",
    "Create the optimizer after the model is final and on its device: a module that was replaced, copied or "
    "rebuilt later has new parameters.",
    "group",
)
_UNUSED = _Reason(
    Severity.WARNING,
    "trainable and in an optimizer, but not used in forward, or cut from the loss by detach, no_grad, .data "
    "or an integer cast",
    "Run `backlight why-no-grad SCRIPT`: it names the reason and the source line for each parameter.",
    "group",
)

_POOLER = _Reason(
    Severity.INFO,
    "in an optimizer, and the loss does not use the output of this pooler of a pretrained model",
    "Nothing has to be done: `add_pooling_layer=False` builds the model without it.",
    "group",
)


@dataclass(frozen=True)
class NoGradientLimits(MembershipLimits):
    """Limits of the rule ``no_gradient``."""

    zero_window: int = limit(
        20,
        "recorded steps up to the end at which every value is zero; zero-initialised branches are alive "
        "after one or two steps",
        low=1,
    )
    zero_everything: int = limit(
        8, "the same where no parameter ever had another value: then no branch can come alive", low=2
    )
    ceased_before: int = limit(
        20,
        "recorded steps, all with a gradient, before the last ones without one: not a branch taken by chance",
        low=1,
    )


@rule("no_gradient", monitor="health", version=3, limits=NoGradientLimits, explained_by=("large_update",))
def no_gradient(run: Run, limits: NoGradientLimits) -> Iterator[Finding]:
    """Find parameters without any measured gradient, one finding per reason, and dead ones."""
    if run.has("gradient") and run.frame("gradient", "norm").measured.any():
        yield from _missing(run, limits)
        yield from _ceased(run, limits)
        yield from _zero(run, limits)
    else:
        yield from _nothing(run)


def _nothing(run: Run) -> Iterator[Finding]:
    """Find backward passes after which no parameter that is to be trained has a gradient."""
    without = {str(name) for e in run.events("no_grad_at_step") for name in e.payload.get("parameters") or ()}
    wanted = [p for p in run.parameters() if p.requires_grad and p.group and p.numel and not p.unmeasured]
    backwards = run.scalar("backwards")
    steps = backwards.steps[backwards.values > 0]
    if not wanted or not len(steps) or any(p.name not in without for p in wanted):
        return
    contradictions = [event.payload for event in run.events("contradiction")]
    if any(facts.get("rule") in {"gradients_discarded", "trained_tensors"} for facts in contradictions):
        return  # they know where the gradients are
    leaves = [facts for facts in contradictions if facts.get("rule") == "no_gradient"]
    line = str(leaves[0].get("line") or "") if leaves else ""
    cause = (
        " The loss depends on no parameter: `requires_grad` was set on the loss itself, which hides the "
        "error that backward would raise."
        if leaves
        else ""
    )
    yield Finding(
        severity=Severity.ERROR,
        title="No parameter has a gradient at the optimizer's step",
        detail=(
            f"At {count(len(steps), 'recorded step')} from step {int(steps[0])} on, backward ran and none "
            f"of {count(len(wanted), 'trainable parameter')} had a gradient when the optimizer began. "
            f"Nothing is trained.{cause}"
        ),
        subject=Subject(step=int(steps[0]), line=line or None),
        evidence=tuple(e for p in wanted[:1] for e in first_missing(run, p.name)),
        fix=(
            "Run `backlight why-no-grad SCRIPT`: it names the operation that cuts the loss from the "
            "parameters (a threshold, `argmax`, `detach()`, `.item()`, `no_grad`), and its line."
        ),
        refuted_if="a parameter has a gradient after backward in a step that was not recorded.",
    )


def _missing(run: Run, limits: NoGradientLimits) -> Iterator[Finding]:
    frame = run.frame("gradient", "norm")
    rows = np.flatnonzero(frame.measured.any(axis=1))
    if len(rows) == 0:
        return
    # What one rank measured has a gradient, also where the ranks do not make up a whole.
    measured_SP = frame.measured if frame.any_rank is None else frame.any_rank
    seen = {frame.names[i] for i in np.flatnonzero(measured_SP.any(axis=0))}
    records = run.parameters()
    missing = [p for p in records if p.name not in seen and p.numel > 0 and not _waits(p, run)]
    missing = [p for p in missing if p.group or not _gave_its_parts(p, records)]
    reported, since, kinds = _reported(run), _unfrozen(run), _module_kinds(run)
    has_groups = any(p.group for p in records)
    by_reason: dict[tuple[_Reason, int], list[ParameterRecord]] = {}
    for record in missing:
        reason = _reason(record, reported, has_groups)
        if reason is _UNUSED and _is_in_pooler(record, kinds):
            reason = _POOLER
        case = (reason, since.get(record.name, 0))
        by_reason.setdefault(case, []).append(record)
    # While a run goes on, a branch may still be used; once it has ended, every step counts.
    needed = limits.no_gradient_steps if run.status is RunStatus.RUNNING else 1
    weights = sum(p.numel for p in records)
    for (reason, begin), group in by_reason.items():
        steps = frame.steps[rows][frame.steps[rows] >= begin]
        if reason is not _FROZEN and len(steps) < needed:
            continue
        first, last = int(steps[0]), int(steps[-1])
        if reason is _FROZEN and _has_adapters(run):
            continue
        alone = _left_alone(records, seen) if reason is _FROZEN else None
        if reason is _FOREIGN and without_optimizer(run, limits.no_gradient_steps):
            continue  # one cause, one finding: no_update reports both sides of it
        order = phrases.loudest(group, lambda p: p.numel)
        worst, mine = order[0], sum(p.numel for p in group)
        named, severity = phrases.parameters([p.name for p in order], len(group)), reason.severity
        title = f"{named} never received a gradient"
        if reason is _FROZEN:
            title = f"{named} {'is' if len(group) == 1 else 'are'} frozen"
        idle = _idle_optimizer(group, records) if reason is _UNUSED else None
        if idle is not None:
            severity = Severity.ERROR
        if alone is not None:
            severity = Severity.WARNING
            title = f"Only `{alone.name}` is trained: the weight of its module is frozen"
        yield Finding(
            severity=severity,
            title=title,
            detail=(
                f"No gradient in {count(len(steps), 'recorded step')} ({first} to {last}): "
                f"{f'trainable since step {begin}, ' if begin else ''}{reason.words}. Affected: "
                f"{phrases.share(len(group), len(records), 'parameters')}, "
                f"{percent(mine / max(weights, 1))} of the weights."
                f"{f' {optimizer_name(run, idle)} steps and trains nothing.' if idle is not None else ''}"
            ),
            subject=Subject(parameter=worst.name, module=worst.module or None, step=first),
            evidence=(
                *(Evidence(f"series/gradient/measured/{p.name}", last, 0, "1") for p in order),
                Evidence(f"parameters/{reason.path}/{worst.name}", None, _shown(worst, reason), "1"),
                *(first_missing(run, worst.name) if reason.path == "group" else ()),
            ),
            fix=reason.fix,
            refuted_if=f"a step, possibly an unrecorded one, gives `{worst.name}` a gradient.",
        )


def _ceased(run: Run, limits: NoGradientLimits) -> Iterator[Finding]:
    """Find parameters that had a gradient at every recorded step, and have none any more.

    Only steps count at which others of the same optimizer have one: training may go on with another one, or
    with another model, whose parameters take the place of these.
    """
    if run.events("parameters_changed"):
        return
    frame, records = run.frame("gradient", "norm"), {p.name: p for p in run.parameters()}
    measured_SP = frame.measured if frame.any_rank is None else frame.any_rank
    needed = limits.no_gradient_steps if run.status is RunStatus.RUNNING else 2
    columns: dict[str, list[int]] = {}
    for i, name in enumerate(frame.names):
        if (p := records.get(name)) is not None and p.requires_grad and p.group and p.numel:
            columns.setdefault(p.group.partition("/")[0], []).append(i)
    for of_optimizer in columns.values():
        rows = np.flatnonzero(measured_SP[:, of_optimizer].any(axis=1))
        if len(rows) <= needed:
            continue
        # Of most runs none is left here, and the history of all parameters is not read.
        mine = [i for i in of_optimizer if not measured_SP[rows[-needed:], i].any()]
        had_RP = measured_SP[rows][:, mine]
        counts_P, ends_P = had_RP.sum(axis=0), len(rows) - had_RP[::-1].argmax(axis=0)
        is_long_P = (counts_P >= limits.ceased_before) & (len(rows) - counts_P >= needed)
        ended_P = is_long_P & (counts_P == ends_P)  # without a gap up to the last one
        for count_before in np.unique(counts_P[ended_P]).tolist():
            names = [frame.names[mine[i]] for i in np.flatnonzero(ended_P & (counts_P == count_before))]
            order = phrases.loudest(names, lambda name: records[name].numel)
            steps = frame.steps[rows]
            last, since, end = (int(steps[i]) for i in (count_before - 1, count_before, -1))
            has = "has" if len(names) == 1 else "have"
            yield Finding(
                severity=Severity.WARNING,
                title=f"{phrases.parameters(order, len(names))} {has} had no gradient since step {since:,}",
                detail=(
                    f"One was there at each of the {count_before:,} recorded steps up to {last:,}, and none "
                    f"at the {len(rows) - count_before:,} from {since:,} to {end:,}, at which others of the "
                    "same optimizer had one. Affected: "
                    f"{phrases.share(len(names), len(records), 'parameters')}."
                ),
                subject=Subject(parameter=order[0], module=records[order[0]].module or None, step=since),
                evidence=tuple(Evidence(f"series/gradient/measured/{name}", since, 0, "1") for name in order),
                fix=(
                    f"Look for what cuts `{order[0]}` from the loss after step {last:,}: a `detach()`, a "
                    "branch that is not taken any more, `no_grad`. If its training is to end there, set "
                    "`requires_grad_(False)`."
                ),
                refuted_if=f"a step that was not recorded gives `{order[0]}` a gradient.",
            )


def _unfrozen(run: Run) -> dict[str, int]:
    """Return the steps at which parameters became trainable, by name, of those that were frozen before."""
    steps: dict[str, int] = {}
    for event in run.events(REQUIRES_GRAD):
        if event.payload.get("value"):
            for name in event.payload.get("parameters") or ():
                steps.setdefault(str(name), event.step or 0)
    return steps


def _idle_optimizer(missing: Sequence[ParameterRecord], records: Sequence[ParameterRecord]) -> int | None:
    """Return the number of an optimizer all of whose parameters are missing, None for none."""
    sizes = Counter(p.group.partition("/")[0] for p in records if p.group and p.numel)
    counts = Counter(p.group.partition("/")[0] for p in missing if p.group)
    return next((int(number) for number, n in counts.items() if n == sizes[number]), None)


def _left_alone(records: Sequence[ParameterRecord], seen: Collection[str]) -> ParameterRecord | None:
    """Return the only parameter that is trained, if it is a bias whose weight is frozen."""
    trained = [p for p in records if p.name in seen]
    if len(trained) != 1 or len(trained[0].shape) != 1:
        return None
    weights = [p for p in records if p.module == trained[0].module and len(p.shape) > 1]
    return trained[0] if any(not p.requires_grad for p in weights) else None


def _gave_its_parts(record: ParameterRecord, records: Sequence[ParameterRecord]) -> bool:
    """Return whether all that is trained of a model is part of another one as well, such as a backbone.

    ``nn.Sequential(*list(resnet.children())[:-1])`` leaves a head that belongs to nothing that runs.
    """
    root = record.name.partition(".")[0]
    trained = [p for p in records if p.group and p.name.partition(".")[0] == root]
    return bool(trained) and all(any(alias.partition(".")[0] != root for alias in p.aliases) for p in trained)


def _has_adapters(run: Run) -> bool:
    """Return whether adapters of PEFT are trained in a model, all of which they freeze."""
    return any(name.rpartition(".")[2] == "base_layer" for name in _module_kinds(run))


def _module_kinds(run: Run) -> dict[str, str]:
    """Return the names of the classes of all modules, by the name of the module."""
    fingerprint = run.fingerprint()
    return {} if fingerprint is None else dict(fingerprint.modules)


def _is_in_pooler(record: ParameterRecord, kinds: Mapping[str, str]) -> bool:
    """Return whether a parameter is of the pooler of a model of transformers, as `BertPooler` of `BertModel`.

    The model always calls it, and losses on tokens, or on their mean, do not use what it returns.
    """
    name = record.module
    while name:
        holder, kind = name.rpartition(".")[0], kinds.get(name, "")
        if kind.endswith("Pooler") and kinds.get(holder) == f"{kind.removesuffix('Pooler')}Model":
            return True
        name = holder
    return False


def _waits(record: ParameterRecord, run: Run) -> bool:
    """Return whether the optimizer of a parameter has not stepped while others have: its turn may come."""
    stepped = {name.split("/")[1] for name in run.scalar_names("backlight") if name.startswith("lr/")}
    return bool(record.group and stepped) and record.group.partition("/")[0] not in stepped


def _reported(run: Run) -> dict[str, str]:
    """Return the recorded reasons why parameters were not measured, by name."""
    reported = {}
    for event in run.events("unmeasured"):
        for name in event.payload.get("parameters") or ():
            reported[str(name)] = str(event.payload.get("reason", "backlight could not measure it"))
    return reported


def _reason(record: ParameterRecord, reported: dict[str, str], has_groups: bool) -> _Reason:
    if record.unmeasured == "frozen" or not record.requires_grad:
        return _FROZEN
    reason = reported.get(record.name) or record.unmeasured
    if reason:
        return _Reason(
            Severity.INFO,
            f"not measured: {reason}",
            "Read the reason: these gradients were not measured.",
            "unmeasured",
        )
    if has_groups and not record.group:
        return _OUTSIDE
    if not record.in_model:
        return _FOREIGN
    return _UNUSED if record.group else _ALONE


_ALONE = _Reason(
    Severity.WARNING,
    "trainable, but not used in forward, or cut from the loss by detach, no_grad, .data or an integer cast",
    _UNUSED.fix,
    "requires_grad",
)


def _shown(record: ParameterRecord, reason: _Reason) -> str:
    if reason.path == "requires_grad":
        return str(record.requires_grad)
    return record.group or "none" if reason.path == "group" else reason.words


def _zero(run: Run, limits: NoGradientLimits) -> Iterator[Finding]:
    """Find parameters whose gradient is exactly zero up to the end of the run."""
    zeros, sizes = run.frame("gradient", "zeros"), run.frame("gradient", "numel")

    def marks(rows: slice, columns: Integers) -> tuple[Bools, Bools]:
        size, zero = sizes.values[rows][:, columns], zeros.values[rows][:, columns]
        measured = zeros.measured[rows][:, columns] & (size > 0)
        return measured & (zero == size), measured

    streaks_P, ever_P = ending_streaks(marks, len(zeros.steps), len(zeros.names), limits.zero_window)
    whole = int(ever_P.sum())
    steps_P = zeros.measured.sum(axis=0)
    if ((streaks_P == steps_P) & (streaks_P >= limits.zero_everything))[ever_P].all():
        dead = np.flatnonzero(ever_P)
    else:
        dead = np.flatnonzero(streaks_P >= limits.zero_window)
    if len(dead) == 0:
        return
    scalars = {i: int(sizes.values[:, i].max()) for i in dead.tolist()}
    order = phrases.loudest(scalars, lambda i: float(scalars[i]))
    worst = order[0]
    name = zeros.names[worst]
    lasts = {i: int(np.flatnonzero(marks(slice(None), np.array([i]))[0][:, 0])[-1]) for i in order}
    rows = np.flatnonzero(zeros.measured[:, worst] & (sizes.values[:, worst] > 0))
    begin = int(rows[-int(streaks_P[worst])])
    since = int(zeros.steps[begin])
    alive_before = begin > rows[0]
    everything = len(dead) == whole
    if everything and any(event.payload.get("kind") == "no_target" for event in run.events("contradiction")):
        return  # `loss_input` reports why: the loss has no target
    # A vector alone may have no effect by construction, such as a bias before a batch norm; its gradient is
    # exactly zero with some kernels and rounding error with others.
    shapes = {p.name: p.shape for p in run.parameters()}
    vectors = all(len(shapes[zeros.names[i]]) < 2 for i in dead)
    history = "earlier it was not" if alive_before else "no recorded step had another value"
    names = [zeros.names[i] for i in dead.tolist()]
    starved = None if everything else _starved_layer(_module_kinds(run), shapes, zeros, names, since)
    if starved is not None:
        steps = f"the last {int(streaks_P[worst])} recorded steps, since step {since}; {history}"
        affected = phrases.share(len(dead), whole, "measured parameters")
        yield starved.finding(steps, affected, since)
        return
    yield Finding(
        severity=Severity.ERROR if everything else Severity.INFO if vectors else Severity.WARNING,
        title=(
            "Every gradient is exactly zero"
            if everything
            else f"{phrases.gradient_of([zeros.names[i] for i in order], len(dead))} "
            f"{'is' if len(dead) == 1 else 'are'} exactly zero"
        ),
        detail=(
            f"Every value of the gradient of `{name}` ({scalars[worst]} values) is zero in the last "
            f"{int(streaks_P[worst])} recorded steps, since step {since}; {history}. Affected: "
            f"{phrases.share(len(dead), whole, 'measured parameters')}."
        ),
        subject=Subject(parameter=name, module=phrases.modules_of(run).get(name), step=since),
        evidence=tuple(
            Evidence(
                f"series/gradient/zeros/{zeros.names[row]}",
                int(zeros.steps[lasts[row]]),
                int(zeros.values[lasts[row], row]),
                f"zeros of {scalars[row]}",
            )
            for row in order
        ),
        fix=_fix_zero(name, [zeros.names[i] for i in dead.tolist()], vectors=vectors, everything=everything),
        refuted_if=f"a recorded step shows a non-zero gradient of `{name}`.",
    )


@dataclass(frozen=True)
class _StarvedLayer:
    """A layer whose bias gets gradients and whose weight gets none: its input is zero for every sample.

    ``activation`` is the module in front of it in a Sequential that can give zeros, with its class.
    """

    name: str
    activation: str
    evidence: tuple[Evidence, ...]

    def finding(self, steps: str, affected: str, since: int) -> Finding:
        claim = f"The input of `{self.name}` is zero for every sample"
        return Finding(
            severity=Severity.WARNING,
            title=f"All units of {self.activation} are dead" if self.activation else claim,
            detail=(
                f"{claim}: its bias gets gradients, and `{self.name}.weight` exactly zero, in {steps}. "
                f"What is in front of it is not trained through it. Gradients are exactly zero of {affected}."
            ),
            subject=Subject(parameter=f"{self.name}.weight", module=self.name, step=since),
            evidence=self.evidence,
            fix=(
                "If a ReLU is in front of it, start biases at 0, lower the learning rate or the scale of the "
                "inputs, normalise in front of the ReLU, or use LeakyReLU or GELU; else look for a mask or a "
                "gate that is zero."
            ),
            refuted_if=f"some value of the input of `{self.name}` is not zero.",
        )


def _starved_layer(
    kinds: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    zeros: Frame,
    dead: Collection[str],
    since: int,
) -> _StarvedLayer | None:
    """Return the first layer whose input the gradients show to be zero.

    That of its bias sums the gradients of its outputs, that of its weight their products with its inputs.
    """
    rows = zeros.steps >= since
    for weight in dead:
        name = weight.removesuffix(".weight")
        bias = f"{name}.bias"
        if name == weight or kinds.get(name) not in _WEIGHTED or bias not in zeros.names:
            continue
        column = zeros.names.index(bias)
        values = zeros.values[rows & zeros.measured[:, column], column]
        size = math.prod(shapes[bias])
        if bias not in dead and len(values) and (values < size).all():
            step = int(zeros.steps[rows & zeros.measured[:, column]][-1])
            evidence = Evidence(f"series/gradient/zeros/{bias}", step, int(values[-1]), f"zeros of {size}")
            return _StarvedLayer(name, _activation_before(kinds, name), (evidence,))
    return None


def _activation_before(kinds: Mapping[str, str], name: str) -> str:
    """Return the activation in front of a layer of a Sequential, whose order is that of its calls."""
    parent, _, last = name.rpartition(".")
    if kinds.get(parent) != "Sequential" or not last.isdecimal():
        return ""
    for number in range(int(last) - 1, -1, -1):
        before = f"{parent}.{number}" if parent else str(number)
        kind = kinds.get(before, "")
        if "relu" in kind.lower():
            return f"`{before}` ({kind})"
        if kind not in _PASSING:
            break
    return ""


def _fix_zero(worst: str, names: Sequence[str], *, vectors: bool, everything: bool) -> str:
    """Return what to do about gradients that are zero, by the parameters that have them."""
    if everything:
        return (
            "Check that the loss depends on the output: a margin that is met, a constant target, or a mask "
            "that hides everything."
        )
    if all(re.search(r"weight_hh_l\d+_reverse$", name) for name in names):
        return (
            "Do not read a bidirectional RNN at its last step alone: there the reverse direction has seen "
            "one input, from a state of zeros. Use `h_n`, or `output[:, 0]` for the reverse half."
        )
    if vectors and all(name.rpartition(".")[2] == "bias" for name in names):
        return (
            f"Leave `{worst}` out (`bias=False`): what it adds cancels in a difference of outputs, as in the "
            "loss of a Wasserstein critic or of a ranking, or in a normalisation."
        )
    return (
        f"Check the activations that follow `{worst}`: a ReLU that is never positive, a multiplication by "
        "zero (a mask, a gate, an output layer that stays at zero), an expert without tokens, or, with "
        "DeepSpeed, a `detach()`."
    )
