"""Formatting of numbers, escaping of hostile text, and KEY=VALUE items."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backlight import text
from backlight.text import count, duration, listed, number, percent, score, visible, with_unit


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (12345, "12,345"),
        (12345.0, "12,345"),
        (0.0123456, "0.01235"),
        (1.2e-9, "1.2e-9"),
        (123456.7, "123,457"),
        (-0.5, "-0.5"),
        (3.0e20, "3e20"),
        (0.99999, "1"),
        (float("nan"), "NaN"),
        (float("inf"), "inf"),
        (-float("inf"), "-inf"),
        (None, "not measured"),
    ],
)
def test_number_format(value: float | None, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.slow
@given(st.floats(-1e300, 1e300))
def test_formatted_number_is_close_to_the_value(value: float) -> None:
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=6e-4)


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0, "0 %"), (1e-5, "< 0.1 %"), (0.5, "50 %"), (0.1234, "12.3 %"), (0.99999, "> 99.9 %"), (1, "100 %")],
)
def test_percent_is_0_or_100_only_when_exact(share: float, shown: str) -> None:
    assert percent(share) == shown


def test_score_is_1_only_when_exact() -> None:
    assert [score(value) for value in (0.0, 0.25, 0.9999, 1.0)] == ["0", "0.25", "> 0.999", "1"]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (2e-5, "20 \N{MICRO SIGN}s"),
        (0.023, "23 ms"),
        (9.5, "9.5 s"),
        (192, "3 min 12 s"),
        (7325, "2 h 2 min"),
        (-1, "not known"),
    ],
)
def test_duration_format(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_counts_lists_and_units() -> None:
    assert count(1, "step") == "1 step"
    assert count(2000, "process", "processes") == "2,000 processes"
    assert listed(["a", "b", "c", "d"]) == "a, b, c and 1 more"
    assert with_unit(0.5, "s") == "0.5 s"
    assert with_unit(0.5, "gradient") == "0.5"
    assert with_unit("nan", "1") == "nan"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 中", "plain é 中"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("two\nlines\r", "two\\nlines\\r"),
        ("\u202eevil", "\\u202eevil"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("\udc80", "\\udc80"),
    ],
)
def test_invisible_characters_are_escaped(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_sizes_use_powers_of_1000() -> None:
    assert [text.size(n) for n in (0, 999, 1500, -2e6, 1.25e9, 1234e12)] == [
        "0 B", "999 B", "1.5 kB", "-2 MB", "1.25 GB", "1.23 PB",
    ]  # fmt: skip


def test_similar_name_is_suggested() -> None:
    assert text.did_you_mean("contrl", ["control", "levels"]) == "; did you mean 'control'?"
    assert text.did_you_mean("x", ["control", "levels"]) == "; there are: control, levels"
    assert text.did_you_mean("x", []) == "; there are none"


def test_assignments_are_parsed() -> None:
    assert text.assignments(["a=1", " b = x=y "], "--set", "KEY=VALUE") == {"a": "1", "b": "x=y"}
    for item in ("a", "a=", "=1"):
        with pytest.raises(ValueError, match=r"--set '.*': expected KEY=VALUE"):
            text.assignments([item], "--set", "KEY=VALUE")
    with pytest.raises(ValueError, match=r"--set 'a=2': a is given twice"):
        text.assignments(["a=1", "a=2"], "--set", "KEY=VALUE")
