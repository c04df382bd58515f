"""Rule ``below_noise``: no direction of a layer exceeds the noise of one replicate."""

from __future__ import annotations

from collections.abc import Iterator

from backlight.findings.limits import Limits
from backlight.findings.phrases import number
from backlight.monitors.spectra.model.layer_history import (
    Hit,
    evidence,
    layer_histories,
    other_layers,
    worst_first,
)
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@rule("below_noise", monitor="spectra", restates=True)
def below_noise(run: Run, limits: Limits) -> Iterator[Finding]:
    """Report the layers without an identifiable direction at their last measurement."""
    histories = layer_histories(run)
    hits = [Hit(h.layer, h.last, 0.0, h.last["edge"]) for h in histories if h.last.identifiable == 0]
    if not hits:
        return
    shown = worst_first(hits, lambda hit: -hit.at["signal_share"])
    first = shown[0]
    name = first.layer.parameter
    history = next(h for h in histories if h.name == name)
    start = len(history.measured)
    while start and history.measured[start - 1].identifiable == 0:
        start -= 1
    layers = other_layers(len(hits), len(histories))
    yield Finding(
        severity=Severity.WARNING if len(hits) * 2 > len(histories) else Severity.INFO,
        title=f"No gradient direction exceeds the noise in {len(hits)} of {len(histories)} layers",
        detail=(
            f"No direction of the gradient of `{name}`{layers} exceeds the noise of one replicate "
            f"({number(first.at['batch'])} samples) at step {first.at.step}, and none has since step "
            f"{history.measured[start].step}. The signal share of its squared norm is "
            f"{number(first.at['signal_share'])}."
        ),
        subject=Subject(parameter=name, module=first.layer.layer or None, step=first.at.step),
        evidence=(
            *evidence(shown, "identifiable"),
            Evidence(f"scalars/spectra/{name}/edge", first.at.step, first.at["edge"], "gradient"),
        ),
        fix=(
            "Measure with larger replicates (more samples in each) and check whether directions appear; "
            "compare the signal share, which includes signal spread over many weak directions."
        ),
        refuted_if=(
            "replicates of the same size, more of them or with other data, show an identifiable direction of "
            f"`{name}`, or an echo above its null."
        ),
    )
