"""Rule ``below_noise``: layers of which no direction stands above the noise of one replicate."""

from __future__ import annotations

from collections.abc import Iterator

from backlight.monitors.spectra.model.conditions import below_noise as holds
from backlight.monitors.spectra.model.layer_steps import Hit, among, evidence, followed, worst, written
from backlight.monitors.spectra.model.thresholds import Thresholds
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@rule("below_noise", monitor="spectra", restates=True)
def below_noise(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Name the layers without an identifiable direction where they were measured last."""
    known = followed(run)
    hits = []
    for layer in known:
        found = holds(layer.last.identifiable, float("nan"), layer.last["edge"])
        if found is not None:
            hits.append(Hit(layer.layer, layer.last, found))
    if not hits:
        return
    shown = worst(hits, lambda hit: -hit.at["signal_share"])
    first = shown[0]
    name = first.layer.parameter
    since = next(f for f in known if f.name == name)
    start = len(since.measured)
    while start and since.measured[start - 1].identifiable == 0:
        start -= 1
    yield Finding(
        severity=Severity.WARNING if len(hits) * 2 > len(known) else Severity.INFO,
        title=f"No gradient direction exceeds the noise in {len(hits)} of {len(known)} layers",
        detail=(
            f"No direction of the gradient of {name}{among(len(hits), len(known))} stands above the noise of "
            f"one replicate ({written(first.at['batch'])} samples) at step {first.at.step}, and so since "
            "step "
            f"{since.measured[start].step}; the share of signal in its squared norm is "
            f"{written(first.at['signal_share'])}."
        ),
        subject=Subject(parameter=name, module=first.layer.layer or None, step=first.at.step),
        evidence=(
            *evidence(shown, "identifiable"),
            Evidence(f"scalars/spectra/{name}/edge", first.at.step, first.at["edge"], "gradient"),
        ),
        fix=(
            "Measure with larger replicates (more samples in each) and look whether directions appear; "
            "compare the signal share, which counts what is spread over many weak directions."
        ),
        refuted_if=(
            "replicates of the same size, more of them or with other data, show an identifiable "
            "direction of "
            f"{name}, or an echo above its null."
        ),
    )
