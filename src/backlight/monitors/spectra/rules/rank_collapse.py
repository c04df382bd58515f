"""Rule ``rank_collapse``: the update of a layer has become nearly one direction."""

from __future__ import annotations

from collections.abc import Iterator

from backlight.monitors.spectra.model.conditions import rank_collapse as holds
from backlight.monitors.spectra.model.layer_steps import Hit, among, evidence, followed, worst, written
from backlight.monitors.spectra.model.thresholds import Thresholds
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@rule("rank_collapse", monitor="spectra", thresholds=("collapse_rank", "collapse_share"), restates=True)
def rank_collapse(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Compare the stable rank of the last update of each layer with its earlier ones."""
    known = followed(run)
    hits, before = [], {}
    for layer in known:
        ranks = [one["stable_rank_update"] for one in layer.measured]
        found = holds(ranks[-1], ranks[:-1], limits)
        if found is not None:
            hits.append(Hit(layer.layer, layer.last, found))
            before[layer.name] = max(rank for rank in ranks[:-1] if rank == rank)  # noqa: PLR0124 - not NaN
    if not hits:
        return
    shown = worst(hits, lambda hit: -hit.condition.value)
    first = shown[0]
    name = first.layer.parameter
    yield Finding(
        severity=Severity.WARNING,
        title=f"The update of `{name}` collapsed to stable rank {written(first.condition.value)}",
        detail=(
            f"The update of {name}{among(len(hits), len(known))} has collapsed to stable rank "
            f"{written(first.condition.value)} at step {first.at.step}; it was up to {written(before[name])} "
            f"before. Nearly all of what the optimizer does there is one direction."
        ),
        subject=Subject(parameter=name, module=first.layer.layer or None, step=first.at.step),
        evidence=evidence(shown, "stable_rank_update"),
        fix=(
            "Look at the stable ranks of gradient and momentum beside it: where the gradient collapsed too, "
            "look at the batch (one token or class in all samples); where it did not, at the optimizer's "
            "state."
        ),
        refuted_if=f"updates of {name} at the steps around have a stable rank above "
        f"{written(first.condition.bound)}.",
    )
