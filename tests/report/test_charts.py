"""Lines of a chart: those that overlap, those with gaps, and axes that a slow step does not set."""

from __future__ import annotations

import numpy as np
import pytest

from backlight.report.charts import Axis, Line, chart, clipped_top, constant

STEPS = np.arange(100, dtype=np.int64)


def overlaps(*lines: Line) -> list[int]:
    return [line["over"] for line in chart(lines, Axis(""), Axis(""))["lines"]]


def test_overlapping_lines_are_counted() -> None:
    flat, rising = np.full(100, 0.1), np.arange(100.0)
    assert overlaps(Line("a", STEPS, flat), Line("b", STEPS, flat), Line("c", STEPS, flat)) == [0, 1, 2]
    assert overlaps(Line("a", STEPS, flat), Line("b", STEPS, rising)) == [0, 0]
    assert overlaps(Line("a", STEPS, rising), Line("b", STEPS, rising + 0.3)) == [0, 1]
    assert overlaps(Line("a", STEPS, rising), Line("b", STEPS, rising + 3.0)) == [0, 0]
    broken = np.where(STEPS > 30, np.nan, flat)
    assert overlaps(Line("a", STEPS, broken), Line("b", STEPS, broken)) == [0, 1]
    assert overlaps(Line("a", STEPS, broken + np.nan), Line("b", STEPS, broken)) == [0, 0]
    # Only steps of both lines count; a few different values change nothing.
    other = np.where(STEPS % 5 == 0, 0.3, flat)
    assert overlaps(Line("a", STEPS[:40], flat[:40]), Line("b", STEPS, other)) == [0, 1]
    assert overlaps(Line("a", STEPS[:40], flat[:40]), Line("b", STEPS[60:], flat[60:])) == [0, 0]


def test_distance_on_a_logarithmic_axis_is_in_decades() -> None:
    decades = np.logspace(-6, 0, 100)
    # A value of 0 does not extend a logarithmic axis.
    from_zero = np.where(STEPS > 0, decades, 0.0)
    for first, second, expected in (
        (decades, 2 * decades, [0, 0]),
        (decades, 1.01 * decades, [0, 1]),
        (from_zero, 2 * from_zero, [0, 0]),
    ):
        lines = [Line("a", STEPS, first), Line("b", STEPS, second)]
        assert [line["over"] for line in chart(lines, Axis("", log=True))["lines"]] == expected


def test_distance_is_relative_to_the_chart_height() -> None:
    waving = 0.95 + 0.01 * np.sin(STEPS)
    lines = [Line("a", STEPS, waving), Line("b", STEPS, waving + 0.003)]
    assert overlaps(*lines) == [0, 0]
    assert [line["over"] for line in chart(lines, Axis("", low=0.0, high=1.0))["lines"]] == [0, 1]
    assert overlaps(*lines, Line("c", STEPS, np.linspace(-5.0, 5.0, 100))) == [0, 1, 0]
    assert overlaps(*lines, Line("c", STEPS, np.linspace(-5.0, 5.0, 100), axis="right")) == [0, 0, 0]


def test_lines_on_other_axes_or_styles_do_not_overlap() -> None:
    flat = np.full(100, 0.1)
    assert overlaps(Line("a", STEPS, flat), Line("b", STEPS, flat, axis="right")) == [0, 0]
    assert overlaps(Line("a", STEPS, flat), Line("b", STEPS, flat, style="dashed")) == [0, 0]


def test_area_edges_do_not_overlap() -> None:
    rising = np.arange(100.0)
    area = [
        Line("middle 80 %", STEPS, rising + 0.1, style="edge", down_to="lower tenth"),
        Line("lower tenth", STEPS, rising - 0.1, style="edge"),
    ]
    assert overlaps(*area, Line("median", STEPS, rising)) == [0, 0, 0]


def test_breaks_stay_when_a_chart_is_reduced() -> None:
    steps = np.concatenate([np.arange(50_000), np.arange(60_000, 70_000)])
    values = np.sin(steps / 1000)
    drawn = chart([Line("a", steps, values)], Axis(""), numbers=2000)
    (line,) = drawn["lines"]
    assert line["breaks"].tolist() == [49_999, 60_000]
    assert {0, 49_999, 60_000, 69_999} <= set(drawn["steps"].tolist())
    assert len(drawn["steps"]) < 1100
    assert drawn["range"] == 60_000 // 500
    assert line["values"].min() == values.min()
    assert line["values"].max() == values.max()


@pytest.mark.parametrize(
    ("values", "top"),
    [
        ([900.0, *[10.0] * 30], 10.5),  # the cold first step
        ([10.0, *[10.0] * 30], None),
        ([9.0, *[10.0] * 30], None),
        ([900.0, *[10.0] * 99, 700.0], 21.0),  # a slow step among many
        ([900.0], None),
        ([np.nan, *[10.0] * 5], None),
    ],
)
def test_cold_and_slow_steps_do_not_set_the_scale(values: list[float], top: float | None) -> None:
    found = clipped_top(np.arange(len(values)), np.array(values), {0})
    assert found == (None if top is None else pytest.approx(top))


def test_constant_ignores_what_is_not_finite() -> None:
    assert constant(np.array([1.0, np.nan, 1.0]), np.array([1.0])) == 1.0
    assert constant(np.array([1.0, 2.0])) is None
    assert constant(np.array([np.nan])) is None
