"""What is shown of a layer at a step: fields, charts over directions or singular values, labels of numbers.

The page and the pictures draw these declarations. A column of a chart is a field, a value of the singular
values over the replicates, ``ranks``, ``directions``, ``edge`` (the noise edge), ``one``, or a column as a
share of the largest of another: ``muon / muon``.
"""

from __future__ import annotations

from dataclasses import dataclass

FIELDS = (
    "singular_value", "echo", "echo_low", "echo_high", "echo_null", "pooled", "residual", "expected",
    "block_echo", "left_alignment", "right_alignment", "ambiguity", "shrunk", "unbiased", "unbiased_low",
    "unbiased_high", "muon", "gap", "strength_gap",
)  # fmt: skip
"""What is known of a direction; all but the last three are as they are stored."""

VALUES = ("median", "smallest", "largest", "noise")
"""What is shown of the singular values of one rank: over the replicates, and those of pure noise."""

EXPECTED = ("threshold", "stable_rank_noise")
"""Numbers that the noise level and the shape give by theory, next to those that are stored."""

LABELS = (
    ("replicates", "replicates"), ("batch", "samples in each"), ("noise_sigma", "noise level"),
    ("edge", "noise edge"), ("threshold", "smallest strength that can be found"),
    ("signal_share", "signal share"), ("noise_scale", "noise scale"),
    ("identifiable", "identifiable"), ("stable_rank_gradient", "stable rank, gradient"),
    ("stable_rank_noise", "stable rank, pure noise"), ("stable_rank_weight", "stable rank, weight"),
)  # fmt: skip
"""Stored numbers and what they are called."""


@dataclass(frozen=True, slots=True)
class SpectraChart:
    """The columns ``x``, ``lines`` (label, style, tone, column) and ``band`` (label, tone, two columns)."""

    title: str
    across: str
    up: str
    x: str
    lines: tuple[tuple[str, str, str, str], ...]
    band: tuple[str, str, str, str] | None = None
    log_x: bool = False
    log_y: bool = False


CHARTS = (
    SpectraChart(
        "Singular values of the replicates", "rank", "singular value", "ranks",
        (
            ("median over the replicates", "line", "first", "median"),
            ("noise edge", "dashed", "limit", "edge"),
            ("pure noise (Marchenko-Pastur)", "dashed", "eighth", "noise"),
        ),
        ("smallest to largest", "first", "smallest", "largest"), log_y=True,
    ),
    SpectraChart(
        "Echo against singular value", "singular value", "spectral echo", "singular_value",
        (
            ("echo", "line", "first", "echo"), ("pooled echo", "line", "second", "pooled"),
            ("residual (1: contradicted)", "dashed", "fourth", "residual"),
            ("null (95 % of chance)", "dashed", "limit", "echo_null"),
            ("spiked model", "dashed", "eighth", "expected"),
            ("echo of the block", "dashed", "third", "block_echo"),
        ),
        ("interval over replicates", "first", "echo_low", "echo_high"), log_x=True,
    ),
    SpectraChart(
        "Left and right alignment with the mean of the other replicates", "direction", "overlap",
        "directions",
        (
            ("left", "line", "first", "left_alignment"), ("right", "line", "second", "right_alignment"),
            ("ambiguity (best less second best)", "dashed", "eighth", "ambiguity"),
        ),
    ),
    SpectraChart(
        "What to make of a singular value", "singular value", "share of its largest", "singular_value",
        (
            ("recommended by the data (no model)", "line", "third", "unbiased / unbiased"),
            ("recommended (spiked model)", "line", "first", "shrunk / shrunk"),
            ("Muon's iteration", "line", "fourth", "muon / muon"),
            ("left as it is", "dashed", "eighth", "singular_value / singular_value"),
        ),
        ("interval over replicates", "third", "unbiased_low / unbiased", "unbiased_high / unbiased"),
        log_x=True,
    ),
    SpectraChart(
        "Gap to the next direction", "direction", "gap / noise level", "directions",
        (
            ("as observed", "line", "first", "gap"),
            ("without noise (spiked model)", "line", "third", "strength_gap"),
            ("noise joins what is closer", "dashed", "limit", "one"),
        ),
        log_y=True,
    ),
)  # fmt: skip
"""The charts of a layer at a step, in order."""
