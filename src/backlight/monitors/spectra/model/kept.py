"""How much of a step lies along the gradient, for what optimizers make of one replicate. No torch.

An optimizer that gives the directions of a replicate the weights ``f_i`` steps along
``sum_i f_i û_i v̂_i^T``. With ``d_i = û_i^T G v̂_i`` the squared cosine between this step and the gradient G is
``(sum_i f_i d_i)^2 / (sum_i f_i^2 |G|^2)``; to first order a step of given length lowers the loss by the root
of it. The other replicates give d_i and ``|G|^2 = rho T`` without the noise of the one that is decomposed;
docs/formulas.md, section 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backlight.answer import Column, Table, word
from backlight.monitors.spectra.model.echo_records import LayerHistory, between, digits
from backlight.store.spectra import SpectraTable

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Kept:
    """Squared cosines with the gradient of what is made of one replicate of a layer; NaN where not measured.

    ``whole`` is the replicate as it is, which is its share of signal; ``first`` its strongest direction,
    ``ranked`` its ``rank`` strongest ones, of all ranks the one that keeps most; ``orthogonal`` has all
    directions with the same weight, as the matrix sign of Muon and Shampoo.
    """

    layer: str
    step: int
    whole: float
    first: float
    rank: int
    ranked: float
    orthogonal: float
    noise_scale: float
    low: float
    high: float

    @property
    def best(self) -> str:
        """What keeps most of the gradient; empty where nothing is known of it."""
        shares = {"as it is": self.whole, f"rank {self.rank}": self.ranked, "orthogonal": self.orthogonal}
        finite = {name: share for name, share in shares.items() if not math.isnan(share)}
        return max(finite, key=lambda name: finite[name], default="")


def kept(table: SpectraTable) -> Kept | None:
    """Return what is kept of a layer at a step; None where its replicates show no signal.

    Where the interval of the noise scale has no end, the share of signal may be none: what is divided by it
    would be chance.
    """
    at, layer = table.measurement, table.layer
    share, sigma = at["signal_share"], at["noise_sigma"]
    if not 0 < share < 1 or not sigma > 0 or at["noise_scale_high"] == math.inf:
        return None
    # T, the mean squared norm of a replicate, of which rho is signal.
    signal = share * sigma**2 * layer.rows * layer.columns / (1 - share)
    values, sizes = table["singular_value"], table["unbiased"]
    seen = ~(np.isnan(values) | np.isnan(sizes))
    order = np.flatnonzero(seen)[np.argsort(-values[seen], kind="stable")]
    cosines = _squared_cosines(values[order], sizes[order], signal)
    if not len(cosines):
        return None
    rank = int(np.argmax(cosines)) + 1
    # Of directions that were not measured, the sum is not known.
    is_whole = len(order) == layer.directions
    alike = _squared_cosines(np.ones(len(order)), sizes[order], signal)[-1] if is_whole else math.nan
    return Kept(
        layer.parameter, at.step, share, float(cosines[0]), rank, float(cosines[rank - 1]), float(alike),
        at["noise_scale"], at["noise_scale_low"], at["noise_scale_high"],
    )  # fmt: skip


def _squared_cosines(weights: Floats, sizes: Floats, signal: float) -> Floats:
    """Return the squared cosine of the first k directions, for each k; 0 where they point away."""
    along = np.maximum(np.cumsum(weights * sizes), 0.0)
    length = np.cumsum(weights**2)
    with np.errstate(divide="ignore", invalid="ignore"):
        cosines = np.where(length > 0, along**2 / (length * signal), 0.0)
    return np.minimum(cosines, 1.0)


def kept_of(histories: Sequence[LayerHistory], tables: Iterable[Sequence[SpectraTable]]) -> tuple[Kept, ...]:
    """Return what is kept of layers at their last steps, from the tables of each.

    A layer without signal, or whose last arrays were lost, is left out.
    """
    pairs = zip(histories, tables, strict=True)
    last = [of[-1] for history, of in pairs if of and of[-1].measurement.step == history.last.step]
    return tuple(row for table in last if (row := kept(table)) is not None)


def kept_table(rows: Sequence[Kept], brief: int) -> Table:
    """Return the table of what is kept, with the batch at which noise equals signal."""
    return Table(
        (
            word("layer", "layer"), Column("as it is", "whole", digits), Column("rank 1", "first", digits),
            Column("best rank", "rank"), Column("keeps", "ranked", digits),
            Column("orthogonal", "orthogonal", digits), word("keeps most", "best"),
            Column("noise = signal at", "noise_scale", digits),
            Column("95 %", lambda row: between(row.low, row.high), str),
        ),
        rows, brief=brief, title="From spectra to action", wide=2,
        notes=(
            "squared cosine between the gradient and what is made of one replicate; a step of given length "
            "lowers the loss by its root, to first order",
            "layers whose signal may be none, so that their noise scale has no upper end, are left out",
        ),
    )  # fmt: skip
