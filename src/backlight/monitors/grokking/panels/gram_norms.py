"""Norms: of the gradient, and of the second moment of the per-sample gradients."""

from __future__ import annotations

from backlight.report.geometry import metric_panel
from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.source import Source


@panel(
    "gram_norms",
    title="Norms",
    order=7,
    series=("scalars/gradient", "scalars/gram/model/frobenius", "scalars/gram/model/spectral"),
    note="The norm of the training gradient is that of its rank-one product as well; the others are of the "
    "second moment over samples.",
    monitor="grokking",
)
def gram_norms(source: Source) -> Drawn | NotMeasured:
    """Draw the gradient's norm, and the norms of the second moment."""
    moment = tuple((f"gram/model/{name}", name) for name in ("spectral", "frobenius", "nuclear"))
    return metric_panel(
        source,
        [
            ("Gradient", "norm", (("gradient/norm", "gradient norm"),)),
            ("Second moment", "norm", moment),
        ],
        by_scope=("frobenius", "Frobenius norm"),
        otherwise="No norm was recorded.",
        subjects=("gradient", "gram", "gram/model"),
    )
