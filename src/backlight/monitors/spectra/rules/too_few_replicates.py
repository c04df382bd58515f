"""Rule ``too_few_replicates``: echoes that rest on too few replicates to rank directions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from backlight.monitors.spectra.model.conditions import too_few_replicates as holds
from backlight.monitors.spectra.model.layer_steps import Hit, among, evidence, followed, worst, written
from backlight.monitors.spectra.model.reader import tables
from backlight.monitors.spectra.model.thresholds import Thresholds
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@rule("too_few_replicates", monitor="spectra", thresholds=("replicates", "interval_width"), restates=True)
def too_few_replicates(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Name the layers measured with few replicates, else those whose intervals are wide."""
    known = followed(run)
    few: list[Hit] = []
    wide: list[Hit] = []
    for layer in known:
        stored = tables(run, layer.name)
        if not stored:
            continue  # its arrays were lost, which the run states
        last = stored[-1]
        found = holds(
            last.measurement.replicates,
            np.stack([last["echo_low"], last["echo_high"]], axis=1),
            last.measurement.identifiable,
            limits,
        )
        if found is not None:
            (wide if found.directions else few).append(Hit(layer.layer, last.measurement, found))
    if few:
        first = worst(few, lambda hit: -hit.condition.value)[0]
        yield Finding(
            rule="too_few_replicates",
            severity=Severity.WARNING,
            claim=(
                f"The echo of {first.layer.parameter}{among(len(few), len(known))} at step "
                f"{first.at.step} rests "
                f"on {first.at.replicates} replicates, fewer than {limits.replicates}: single pairs "
                "dominate it."
            ),
            subject=Subject(
                parameter=first.layer.parameter, module=first.layer.layer or None, step=first.at.step
            ),
            evidence=evidence(few, "replicates"),
            next_check=(
                "Measure with more replicates: smaller microbatches, more accumulation steps or ranks, "
                "--replicates for checkpoints."
            ),
            refuted_if="the same layers, measured with more replicates, have the same echoes.",
        )
    if wide:
        shown = worst(wide, lambda hit: hit.condition.value)
        first = shown[0]
        amount = len(first.condition.directions)
        yield Finding(
            rule="too_few_replicates",
            severity=Severity.INFO,
            claim=(
                f"The echo of {amount} of {first.at.identifiable} identifiable directions of "
                f"{first.layer.parameter}{among(len(wide), len(known))} at step {first.at.step} is known "
                "only to "
                f"an interval of width {written(first.condition.value)}, from {first.at.replicates} "
                "replicates."
            ),
            subject=Subject(
                parameter=first.layer.parameter, module=first.layer.layer or None, step=first.at.step
            ),
            evidence=tuple(
                Evidence(
                    f"arrays/spectra/{hit.layer.parameter}/directions/echo",
                    hit.at.step,
                    float(hit.condition.value),
                )
                for hit in shown[:5]
            ),
            next_check="Measure with more replicates; the width falls with the root of their number.",
            refuted_if="a measurement of the same step with other replicates stays inside the intervals.",
        )
