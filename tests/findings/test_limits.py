"""Limits of rules: one declaration with reason and bounds, overrides by monitor and name."""

from __future__ import annotations

import dataclasses

import pytest

from backlight.findings.limits import Limits, ThresholdError, declared, limit, merge_overrides, with_overrides
from backlight.monitors.health.model.score import ScoreLimits
from backlight.monitors.health.rules.spike import SpikeLimits
from backlight.registry import RULES

MONITORS = ("health", "stalls", "steptime", "grokking", "spectra")
FIELDS = [(monitor, field) for monitor in MONITORS for field in declared(monitor).values()]


@pytest.mark.parametrize(("monitor", "field"), FIELDS, ids=lambda v: getattr(v, "name", v))
def test_every_limit_has_reason_source_and_bounds(monitor: str, field: dataclasses.Field[float]) -> None:
    assert len(field.metadata["reason"]) > 15
    assert len(field.metadata["source"]) >= 6
    assert field.metadata["low"] <= field.default <= field.metadata["high"]
    assert isinstance(field.default, (int, float))


def test_every_health_limit_belongs_to_a_rule_or_the_score() -> None:
    owned = {f.name for _, r in RULES.items() if r.limits for f in dataclasses.fields(r.limits)}
    owned |= {f.name for f in dataclasses.fields(ScoreLimits)}
    assert set(declared("health")) <= owned


def test_limits_with_the_same_name_have_the_same_default() -> None:
    for _, rule in RULES.items():
        for field in dataclasses.fields(rule.limits) if rule.limits else ():
            assert declared(rule.monitor)[field.name].default == field.default


def test_score_limits_have_the_documented_defaults() -> None:
    limits = ScoreLimits()
    assert (limits.penalty_vanishing, limits.penalty_exploding) == (0.5, 0.8)
    assert (limits.vanishing_rms, limits.vanishing_relative) == (1e-8, 1e-4)
    assert (limits.exploding_factor, limits.exploding_clip_factor) == (1e3, 10.0)


def test_override_returns_a_new_object_with_converted_types() -> None:
    limits = SpikeLimits()
    other = limits.override({"spike_window": 80.0, "spike_deviations": 8})
    assert (other.spike_window, other.spike_deviations) == (80, 8.0)
    assert isinstance(other.spike_window, int)
    assert isinstance(other.spike_deviations, float)
    assert other.changed() == {"spike_window": 80, "spike_deviations": 8.0}
    assert limits.override({}) == limits == SpikeLimits()
    with pytest.raises(dataclasses.FrozenInstanceError):
        limits.spike_window = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vanishing_rm": 1e-9}, "has no threshold 'vanishing_rm'; did you mean 'vanishing_rms'"),
        ({"xyzzy": 1}, "has no threshold 'xyzzy'; there are: ceased_before, clipped_hard, "),
        ({"vanishing_rms": "small"}, "'vanishing_rms' of the health monitor must be a number, got 'small'"),
        ({"vanishing_rms": True}, "must be a number, got True"),
        ({"vanishing_rms": float("nan")}, "must be a number, got nan"),
        (
            {"zero_window": 2.5},
            "'zero_window' of the health monitor counts steps and must be a whole number, got 2.5",
        ),
        ({"zero_window": 0}, "'zero_window' of the health monitor must be at least 1, got 0"),
        ({"clipped_share": 1.5}, "'clipped_share' of the health monitor must be between 0 and 1, got 1.5"),
    ],
)
def test_invalid_override_error_names_key_and_fix(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ThresholdError, match=message):
        merge_overrides("health", overrides=changes)


def test_invalid_recorded_overrides_are_dropped_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="a threshold that the run recorded is ignored") as warned:
        merged = merge_overrides(
            "health", {"zero_window": 5, "of_the_future": 1.0, "spike_gap": 0}, {"spike_window": 80}
        )
    assert merged == {"zero_window": 5, "spike_window": 80}
    assert "of_the_future" in str(warned[0].message)
    assert "at least 1, got 0" in str(warned[1].message)
    assert with_overrides(SpikeLimits, merged) == SpikeLimits(spike_window=80)
    assert declared("no_such_monitor") == {}


def test_subclass_inherits_monitor_and_fields() -> None:
    @dataclasses.dataclass(frozen=True)
    class Base(Limits, monitor="of_this_test"):
        shared: float = limit(1.0, "a limit of two rules")

    @dataclasses.dataclass(frozen=True)
    class Own(Base):
        own: int = limit(3, "a limit of one rule", low=1)

    assert (Own.monitor, list(declared("of_this_test"))) == ("of_this_test", ["shared", "own"])
    assert with_overrides(Own, {"own": 2, "of_another_rule": 4}) == Own(own=2)
