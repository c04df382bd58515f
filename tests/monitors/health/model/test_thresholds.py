import dataclasses
import subprocess
import sys

import pytest

from backlight.findings.thresholds import ThresholdError
from backlight.monitors.health.model.thresholds import Thresholds
from backlight.registry import RULES

FIELDS = dataclasses.fields(Thresholds)
SCORE = {"penalty_vanishing", "penalty_exploding"}


@pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.name)
def test_every_threshold_states_its_reason_and_its_source(field: dataclasses.Field[float]) -> None:
    assert len(field.metadata["reason"]) > 20
    assert len(field.metadata["source"]) > 10
    assert field.metadata["low"] <= field.default <= field.metadata["high"]
    assert isinstance(field.default, (int, float))


def test_every_threshold_is_read_by_a_rule_or_the_score() -> None:
    read = {name for _, rule in RULES.items() if rule.monitor == "health" for name in rule.thresholds}
    assert read | SCORE == {f.name for f in FIELDS}


def test_the_sheet_of_formulas_is_kept() -> None:
    limits = Thresholds()
    assert (limits.penalty_vanishing, limits.penalty_exploding) == (0.5, 0.8)
    assert (limits.vanishing_rms, limits.vanishing_relative) == (1e-8, 1e-4)
    assert (limits.exploding_factor, limits.exploding_clip_factor) == (1e3, 10.0)


def test_an_override_is_a_new_object_of_the_right_types() -> None:
    limits = Thresholds()
    other = limits.override({"zero_window": 5.0, "spike_deviations": 8})
    assert (other.zero_window, other.spike_deviations) == (5, 8.0)
    assert isinstance(other.zero_window, int)
    assert isinstance(other.spike_deviations, float)
    assert limits == Thresholds()
    assert other.changed() == {"zero_window": 5, "spike_deviations": 8.0}
    assert limits.override({}) == limits
    with pytest.raises(dataclasses.FrozenInstanceError):
        limits.zero_window = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vanishing_rm": 1e-9}, "has no threshold 'vanishing_rm'; nearest: vanishing_rms"),
        ({"xyzzy": 1}, "has no threshold 'xyzzy'; there are: accumulating_growth, "),
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
def test_a_wrong_override_names_the_key_and_the_way_out(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ThresholdError, match=message):
        Thresholds().override(changes)


def test_what_a_run_recorded_is_taken_as_far_as_it_is_known() -> None:
    limits, problems = Thresholds.recorded({"zero_window": 5, "of_the_future": 1.0, "spike_gap": 0})
    assert limits == Thresholds(zero_window=5)
    assert ["of_the_future" in problems[0], "at least 1, got 0" in problems[1]] == [True, True]


def test_judging_a_run_never_reaches_torch() -> None:
    modules = "judge", "comparison", "expression", "likeness"
    script = "import sys; sys.modules['torch'] = None\n"
    script += "".join(f"import backlight.session.{name}\n" for name in modules)
    script += "from backlight.registry import RULES\nassert 'vanishing' in RULES\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
