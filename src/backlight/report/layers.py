"""Numbers of layers over steps: as lines of a chart, and the handful of them under the verdict."""

from __future__ import annotations

import math
from statistics import median

from backlight.report.charts import Line
from backlight.report.spectra import LINES, Spectra, numbers_of
from backlight.text import number, visible


def lines_over_steps(found: Spectra, name: str) -> tuple[list[Line], list[str]]:
    """Return a line for each of the layers with the largest signal share, and a remark on the others."""
    chosen, amount = numbers_of(found, name)
    lines = [Line(visible(layer.parameter), steps, values, gaps=True) for layer, steps, values in chosen]
    remarks = []
    if amount > LINES:
        remarks.append(
            f"{amount:,} layers were measured; those {LINES} with the largest share of signal at the last "
            "step "
            "are drawn."
        )
    return lines, remarks


def figures_of(found: Spectra) -> list[dict[str, str]]:
    """Return the numbers under the verdict of a run of which spectra alone were measured."""
    last = [found.measured[layer.parameter][-1] for layer in found.layers]
    shares = [one["signal_share"] for one in last if not math.isnan(one["signal_share"])]
    scales = [one["noise_scale"] for one in last if not math.isnan(one["noise_scale"])]
    fewest, most = min(one.replicates for one in last), max(one.replicates for one in last)
    steps = found.steps
    return [
        {"label": "layers", "value": number(len(last)), "note": ""},
        {
            "label": "steps",
            "value": number(len(steps)),
            "note": f"{number(int(steps[0]))} to {number(int(steps[-1]))}",
        },
        {
            "label": "replicates",
            "value": number(most) if fewest == most else f"{number(fewest)} to {number(most)}",
            "note": "at the last step of each layer",
        },
        {
            "label": "signal share",
            "value": number(median(shares), 3) if shares else "not measured",
            "note": "median of the layers",
        },
        {
            "label": "noise scale",
            "value": number(median(scales), 3) if scales else "not measured",
            "note": "samples, median of the layers",
        },
    ]
