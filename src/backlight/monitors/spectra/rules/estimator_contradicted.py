"""Rule ``estimator_contradicted``: echoes that their own residual contradicts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from backlight.monitors.spectra.model.conditions import estimator_contradicted as holds
from backlight.monitors.spectra.model.conditions import modes_too_close
from backlight.monitors.spectra.model.layer_steps import Hit, among, followed, worst, written
from backlight.monitors.spectra.model.reader import Table, tables
from backlight.monitors.spectra.model.thresholds import Thresholds
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run

_SHOWN = 5


@rule("estimator_contradicted", monitor="spectra", thresholds=("misfit", "above_null"), restates=True)
def estimator_contradicted(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Name the layers with identifiable directions whose echo does not fit the model behind it."""
    known = followed(run)
    hits: list[Hit] = []
    tables_of: dict[str, Table] = {}
    for layer in known:
        stored = tables(run, layer.name)
        if not stored:
            continue  # its arrays were lost, which the run states
        last = stored[-1]
        k = last.measurement.identifiable
        found = holds(last["residual"][:k], last["echo"][:k], last["echo_null"][:k], limits)
        if found is not None:
            hits.append(Hit(layer.layer, last.measurement, found))
            tables_of[layer.name] = last
    if not hits:
        return
    shown = worst(hits, lambda hit: hit.condition.value)
    first = shown[0]
    name, table = first.layer.parameter, tables_of[first.layer.parameter]
    directions = first.condition.directions
    close = modes_too_close(table.measurement.blocks)
    named = ", ".join(str(i + 1) for i in directions[:_SHOWN])
    more = f" and {len(directions) - _SHOWN} more" if len(directions) > _SHOWN else ""
    because = ""
    signless = [i for i in directions if table["pooled_low"][i] <= 0]
    if close is not None and set(directions) & set(close.directions):
        block = table["block_echo"][directions[0]]
        because = (
            " Their strengths lie so close that noise turns them into one another"
            f"{'' if np.isnan(block) else f'; the echo of their block is {written(float(block))}'}."
        )
    elif signless:
        i = signless[0]
        because = (
            f" Replicates share direction {i + 1} but not its sign (pooled echo "
            f"{written(float(table['pooled'][i]))}, interval from {written(float(table['pooled_low'][i]))}): "
            "noise that lies along one direction looks like that."
        )
    s = "s" if len(directions) > 1 else ""
    yield Finding(
        rule="estimator_contradicted",
        severity=Severity.INFO,
        claim=(
            f"The echo of direction{s} {named}{more} of {name}{among(len(hits), len(known))} at step "
            f"{first.at.step} is contradicted by its own residual, {written(first.condition.value)}: it is "
            f"no property of the direction.{because}"
        ),
        subject=Subject(parameter=name, module=first.layer.layer or None, step=first.at.step),
        evidence=tuple(
            Evidence(
                f"arrays/spectra/{hit.layer.parameter}/directions/residual",
                hit.at.step,
                float(hit.condition.value),
            )
            for hit in shown[:_SHOWN]
        ),
        next_check=(
            "Read the unbiased diagonal and the pooled echo in its place, and where modes are close the echo "
            "of their block (block_echo)."
        ),
        refuted_if="more replicates, or larger ones, bring the residual of these directions below "
        f"{limits.misfit:g}.",
    )
