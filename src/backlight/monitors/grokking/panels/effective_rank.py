"""How many directions the per-sample gradients use."""

from __future__ import annotations

from backlight.report.geometry import metric_panel
from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.source import Source


@panel(
    "effective_rank",
    title="Effective rank",
    order=8,
    series=(
        "scalars/gram/model/effective_rank",
        "scalars/gram/model/participation_ratio",
        "scalars/gram/model/numerical_rank",
    ),
    note="Exponential of the entropy of the spectrum, and its participation ratio; at most the number of "
    "samples in the probe batch.",
    monitor="grokking",
)
def effective_rank(source: Source) -> Drawn | NotMeasured:
    """Draw both counts of directions, centred as well, and that of each layer."""
    ranks = (
        ("gram/model/effective_rank", "effective rank"),
        ("gram/model/participation_ratio", "participation ratio"),
        ("gram/model/centred/effective_rank", "effective rank, centred"),
    )
    numerical = (("gram/model/numerical_rank", "numerical rank"),)
    return metric_panel(
        source,
        [("Whole model", "directions", ranks), ("Numerical rank", "directions", numerical)],
        by_scope=("effective_rank", "effective rank"),
        otherwise="No Gram was recorded: watch(..., samples=(loss_fn, batch)).",
    )
