"""Rule ``not_restored``: what a checkpoint holds, and the training run does not begin with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from backlight.findings import phrases
from backlight.findings.limits import Limits
from backlight.monitors.correctness.model.contradictions import contradictions, evidence_of
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Event, Run
from backlight.text import count


@rule("not_restored", monitor="correctness")
def not_restored(run: Run, _limits: Limits) -> Iterator[Finding]:
    """Find states that match nothing, overwritten weights, optimizers that start anew, and lost ties."""
    found = contradictions(run, "not_restored")
    for kind in dict.fromkeys(event.payload["kind"] for event in found):
        yield _CASES[kind]([event for event in found if event.payload["kind"] == kind])


def _nothing_loaded(found: Sequence[Event]) -> Finding:
    facts = found[0].payload
    model, keys = facts["model"], int(facts["count"])
    return Finding(
        severity=Severity.ERROR,
        title=f"{model}.load_state_dict loads nothing",
        detail=(
            f"None of the {count(keys, 'key')} of the state{_at(facts['line'])} is one of {model}: it has "
            f"`{facts['given']}`, and the model `{facts['expected']}`. With `strict=False` this raises no "
            "error, and the training starts from scratch."
        ),
        subject=Subject(module=model, step=found[0].step, line=facts["line"] or None),
        evidence=(evidence_of(found, facts["given"], "unexpected key"),),
        fix="Rename the keys (a wrapper adds a prefix such as `module.`), and drop `strict=False`.",
        refuted_if="the weights before and after `load_state_dict` differ.",
    )


def _overwritten(found: Sequence[Event]) -> Finding:
    facts = found[0].payload
    names, amount = facts["parameters"], int(facts["count"])
    return Finding(
        severity=Severity.WARNING,
        title="Loaded weights are overwritten before the first step",
        detail=(
            f"At step {found[0].step} {phrases.parameters(names, amount)}, every matrix that is compared, "
            "are unrelated to what `load_state_dict` put there (largest cosine "
            f"{phrases.number(float(facts['cosine']))}), as if they had been initialised again."
        ),
        subject=Subject(parameter=names[0], step=found[0].step),
        evidence=(evidence_of(found, float(facts["cosine"]), "cosine"),),
        fix="Load the checkpoint after the code that initialises (`init_weights`, `reset_parameters`).",
        refuted_if="the weights at the first forward are those of the checkpoint.",
    )


def _optimizer_state(found: Sequence[Event]) -> Finding:
    facts = found[0].payload
    optimizer, amount = facts["optimizer"], int(facts["count"])
    return Finding(
        severity=Severity.WARNING,
        title=f"The state of {optimizer} in the checkpoint is not restored",
        detail=(
            f"The checkpoint{_at(facts['line'])} holds the state of an optimizer with the same settings and "
            f"{count(amount, 'parameter')} of the same shapes. The weights were loaded; {optimizer} takes "
            "its first step with an empty state: its moments start from zero."
        ),
        subject=Subject(step=found[0].step, line=facts["line"] or None),
        evidence=(evidence_of(found, amount, "parameters"),),
        fix='Call `optimizer.load_state_dict(checkpoint["optimizer"])` before the first step.',
        refuted_if="a new training run begins here with these weights, and not the one that was interrupted.",
    )


def _untied(found: Sequence[Event]) -> Finding:
    facts = found[0].payload
    names = [str(name) for name in facts["parameters"]]
    return Finding(
        severity=Severity.WARNING,
        title=f"{phrases.parameters(names, len(names))} are tied in the checkpoint only",
        detail=(
            f"The checkpoint holds one tensor under these names. {facts['model']} loaded it"
            f"{_at(facts['line'])} into {len(names)} parameters, which the optimizer changes apart from one "
            "another."
        ),
        subject=Subject(parameter=names[0], step=found[0].step, line=facts["line"] or None),
        evidence=(evidence_of(found, len(names), "parameters"),),
        fix="Tie them again before the optimizer is created: `model.head.weight = model.embedding.weight`.",
        refuted_if="they are meant to part, as copies that begin with one matrix.",
    )


_CASES = {
    "nothing_loaded": _nothing_loaded,
    "overwritten": _overwritten,
    "optimizer_state": _optimizer_state,
    "untied": _untied,
}


def _at(line: str) -> str:
    return f" (`{line}`)" if line else ""
