"""Rule ``trained_tensors``: the tensors that optimizers hold are not those that the loss trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.monitors.correctness.model.contradictions import (
    contradictions,
    evidence_of,
    observed,
    steps_of,
)
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Event, Run
from backlight.text import count


@dataclass(frozen=True)
class TrainedTensorsLimits(Limits, monitor="correctness"):
    """Limits of the rule ``trained_tensors``."""

    other_tensors_steps: int = limit(2, "observed steps at which the optimizer had no gradient at all", low=1)
    frozen_tensors_steps: int = limit(2, "observed steps with the same gradients of frozen tensors", low=1)
    left_out_steps: int = limit(2, "observed steps at which trained parameters were in no optimizer", low=1)


@rule("trained_tensors", monitor="correctness", limits=TrainedTensorsLimits)
def trained_tensors(run: Run, limits: TrainedTensorsLimits) -> Iterator[Finding]:
    """Find gradients that no optimizer uses, and tensors of optimizers that no loss depends on."""
    needed = {
        "copy": limits.other_tensors_steps,
        "frozen": limits.frozen_tensors_steps,
        "left_out": limits.left_out_steps,
    }
    cases: dict[tuple[str, str], list[Event]] = {}
    events = contradictions(run, "trained_tensors")
    joined = [event for event in events if event.payload["kind"] == "joined"]
    for event in events:
        facts = event.payload
        if event in joined or _has_joined(event, joined):
            continue
        about = next((facts[n] for n in ("model", "container", "optimizer", "parameters") if n in facts), "")
        cases.setdefault((facts["kind"], str(about)), []).append(event)
    is_loaded = any(e.payload["kind"] == "untied" for e in contradictions(run, "not_restored"))
    for (kind, _), found in cases.items():
        if kind == "untied" and is_loaded:  # that rule knows the checkpoint
            continue
        enough = 1 if found[0].payload.get("is_unfrozen") else needed.get(kind, 1)
        if len(steps_of(found)) >= enough:
            yield _CASES[kind](found)


def _has_joined(event: Event, joined: Sequence[Event]) -> bool:
    """Return whether an optimizer holds later what an event reports as being in none."""
    facts, step = event.payload, event.step or 0
    later = [one.payload for one in joined if (one.step or 0) > step and one.rank == event.rank]
    return any(one["model"] == facts.get("model") and one["count"] >= facts.get("count", 0) for one in later)


def _unregistered(found: Sequence[Event]) -> Finding:
    facts = found[0].payload
    model, names, amount = facts["model"], facts["modules"], int(facts["count"])
    container, attribute = phrases.parameters(names, amount), names[0].partition("[")[0]
    return Finding(
        severity=Severity.ERROR,
        title=f"{container} {'is' if amount == 1 else 'are'} not registered with {model}",
        detail=(
            f"`{attribute}` is a plain container: `{model}.parameters()` leaves out the weights of "
            f"{count(amount, 'module')} in it. They get gradients, and no optimizer holds them: they are "
            "neither trained nor saved."
        ),
        subject=Subject(module=names[0], step=found[0].step),
        evidence=(evidence_of(found, amount, "modules"),),
        fix=f"Make `{attribute}` an `nn.ModuleList` or `nn.ModuleDict`, before the optimizer is created.",
        refuted_if="the script updates these weights without an optimizer of torch.",
    )


def _copy(found: Sequence[Event]) -> Finding:
    steps, facts = steps_of(found), found[0].payload
    optimizer, model, amount = facts["optimizer"], facts["model"], int(facts["count"])
    return Finding(
        severity=Severity.ERROR,
        title=f"{optimizer} holds other tensors than the {model} that is trained",
        detail=(
            f"At {observed(steps)} no tensor of {optimizer} had a gradient, while "
            f"{count(amount, 'parameter')} of the {model} that the loss depends on had one and "
            f"{'is' if amount == 1 else 'are'} in no optimizer. Nothing is updated."
        ),
        subject=Subject(module=model, step=steps[0]),
        evidence=(evidence_of(found, amount, "parameters"),),
        fix="Create the optimizer from the parameters of the model that the loop calls, after any copy.",
        refuted_if="the script updates these weights without an optimizer of torch.",
    )


def _outside(found: Sequence[Event]) -> Finding:
    steps, facts = steps_of(found), found[0].payload
    model, amount = facts["model"], int(facts["count"])
    tensors = count(amount, "parameter")
    return Finding(
        # Weights from a file may be meant to stay, as those of a network that compares images.
        severity=Severity.WARNING if facts.get("is_loaded") else Severity.ERROR,
        title=f"The {model} that the loss depends on is in no optimizer",
        detail=(
            f"At {observed(steps)} backward gave gradients to {tensors} of a {model}. No optimizer holds "
            "them, and nothing has changed their weights."
        ),
        subject=Subject(module=model, step=steps[0]),
        evidence=(evidence_of(found, amount, "parameters"),),
        fix=(
            "Give its parameters to the optimizer too. If it is to stay as it is, call `eval()` and "
            "`requires_grad_(False)` on it, which saves its gradients."
        ),
        refuted_if="an optimizer that is not of torch updates it later.",
    )


def _left_out(found: Sequence[Event]) -> Finding:
    steps, facts = steps_of(found), found[-1].payload
    names, amount = facts["parameters"], int(facts["count"])
    named, model = phrases.parameters(names, amount), facts["model"]
    is_one, is_unfrozen = amount == 1, bool(facts["is_unfrozen"])
    may_be_meant = not is_unfrozen and (facts.get("is_loaded") or facts["is_evaluated"])
    history = (
        f" {'It was' if is_one else 'They were'} frozen before, and the optimizer was created without "
        f"{'it' if is_one else 'them'}."
        if is_unfrozen
        else ""
    )
    return Finding(
        severity=Severity.WARNING if may_be_meant else Severity.ERROR,
        title=f"{named} {'is' if is_one else 'are'} not in any optimizer",
        detail=(
            f"At {observed(steps)} backward gave {named} of {model} "
            f"{'a gradient that is' if is_one else 'gradients that are'} not zero. No optimizer holds "
            f"{'it' if is_one else 'them'}, and nothing has changed {'it' if is_one else 'them'}.{history}"
        ),
        subject=Subject(parameter=names[0], step=steps[0]),
        evidence=(evidence_of(found, amount, "parameters"),),
        fix=(
            "Add them when they are unfrozen: `optimizer.add_param_group({'params': layer.parameters()})`."
            if is_unfrozen
            else "Create the optimizer from `model.parameters()`. Call `requires_grad_(False)` on parameters "
            "that are to stay as they are."
        ),
        refuted_if="an optimizer that is not of torch updates them later.",
    )


def _target(found: Sequence[Event]) -> Finding:
    steps, facts = steps_of(found), found[0].payload
    model, amount = facts["model"], int(facts["count"])
    return Finding(
        severity=Severity.INFO,
        title=f"The copy of {model} in the loss gets gradients that are not used",
        detail=(
            f"At {observed(steps)} backward gave gradients to {count(amount, 'parameter')} of a {model} that "
            "began with the weights of the trained one. No optimizer holds them, as for a target network."
        ),
        subject=Subject(module=model, step=steps[0]),
        evidence=(evidence_of(found, amount, "parameters"),),
        fix="Call it under `torch.no_grad()`: that saves its backward and the memory of its gradients.",
        refuted_if="the copy is to be trained: then give its parameters to an optimizer.",
    )


def _replaced(found: Sequence[Event]) -> Finding:
    facts = found[0].payload
    names, amount, stale = facts["parameters"], int(facts["count"]), int(facts["stale"])
    optimizer, line = facts["optimizer"], facts["line"]
    named, are = phrases.parameters(names, amount), "is" if amount == 1 else "are"
    built = f" was built at `{line}`, before a module was replaced: it" if line else ""
    return Finding(
        severity=Severity.ERROR,
        title=f"{named} {are} not in any optimizer",
        detail=(
            f"{optimizer}{built} holds {count(stale, 'tensor')} that no module uses any more. {named} "
            f"{'gets a gradient' if amount == 1 else 'get gradients'} and {are} never updated."
        ),
        subject=Subject(parameter=names[0], step=found[0].step, line=line or None),
        evidence=(evidence_of(found, amount, "parameters"),),
        fix="Create the optimizer after the last module was replaced, and after any copy of the model.",
        refuted_if="the script updates these weights without an optimizer of torch.",
    )


def _frozen(found: Sequence[Event]) -> Finding:
    steps, facts = steps_of(found), found[0].payload
    names, amount, optimizer = facts["parameters"], int(facts["count"]), facts["optimizer"]
    named, has = phrases.parameters(names, amount), "has" if amount == 1 else "have"
    return Finding(
        severity=Severity.WARNING,
        title=f"{optimizer} still updates {named}, which {'is' if amount == 1 else 'are'} frozen",
        detail=(
            f"{named} {has} been trained, and {'does' if amount == 1 else 'do'} not require a gradient any "
            f"more. At {observed(steps)} {optimizer} used the gradient that was left, with its moments and "
            "weight decay."
        ),
        subject=Subject(parameter=names[0], step=steps[0]),
        evidence=(evidence_of(found, amount, "parameters"),),
        fix="Set `parameter.grad = None` where `requires_grad` is set to False.",
        refuted_if="these weights are equal before and after `optimizer.step()`.",
    )


def _shared(found: Sequence[Event]) -> Finding:
    facts = found[0].payload
    container, module, amount = facts["container"], facts["module"], int(facts["count"])
    return Finding(
        severity=Severity.INFO,
        title=f"`{container}` holds one {module} {amount} times",
        detail=(
            f"{amount} children of `{container}` are the same {module}: they share their weights, and the "
            "model is as deep but has the parameters of one."
        ),
        subject=Subject(module=container, step=found[0].step),
        evidence=(evidence_of(found, amount, "children"),),
        fix="Build one module for each place: `[Block() for _ in range(n)]`, not `[Block()] * n`.",
        refuted_if="sharing the weights is meant.",
    )


def _untied(found: Sequence[Event]) -> Finding:
    facts = found[0].payload
    names = [str(name) for name in facts["parameters"]]
    setting = facts["setting"]
    cause = f"`{setting}` is True" if setting else "They were one tensor when the model was built"
    return Finding(
        severity=Severity.WARNING,
        title=f"{phrases.parameters(names, len(names))} are no longer tied",
        detail=(
            f"{cause}. At step {found[0].step} they are {len(names)} parameters with gradients of their own, "
            "which the optimizer changes apart from one another."
        ),
        subject=Subject(parameter=names[0], step=found[0].step),
        evidence=(evidence_of(found, len(names), "parameters"),),
        fix=(
            "Tie them again before the optimizer is created, after a layer was replaced or resized, after "
            "`load_state_dict(..., assign=True)` and after `to_empty()`: "
            "`model.head.weight = model.embedding.weight`, or `model.tie_weights()`."
        ),
        refuted_if="they are meant to part.",
    )


_CASES = {
    "untied": _untied,
    "unregistered": _unregistered,
    "copy": _copy,
    "outside": _outside,
    "target": _target,
    "left_out": _left_out,
    "replaced": _replaced,
    "frozen": _frozen,
    "shared": _shared,
}
