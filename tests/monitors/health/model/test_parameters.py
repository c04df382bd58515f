import math
from typing import Any

import numpy as np
import pytest

from backlight.monitors.health.model.parameters import (
    GroupError,
    group_rms,
    members,
    ratio,
    untrained_parameters,
)
from run_builder import parameter

NAMES = ("encoder.0.weight", "encoder.0.bias", "encoder.1.weight", "head.weight", "headless.weight")


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("encoder", 3),
        ("encoder.*", 3),
        ("encoder.?", 3),
        ("encoder.0", 2),
        ("*.bias", 1),
        ("head", 1),
        ("head*", 2),
        ("head, *.bias", 2),
        ("head.weight", 1),
        ("encoder.[01].weight", 2),
        ("*", 5),
    ],
)
def test_pattern_selects_members(pattern: str, count: int) -> None:
    found = members(NAMES, pattern)
    assert len(found) == count
    assert list(found) == [name for name in NAMES if name in found]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("encodr.*", "'encodr.*' matches none of 5 parameters; did you mean 'encoder'"),
        ("", "matches none of 5 parameters; there are: encoder, encoder.0, "),
        ("Head", "did you mean 'head'"),
    ],
)
def test_unmatched_pattern_suggests_close_names(pattern: str, message: str) -> None:
    with pytest.raises(GroupError, match=message.replace("*", r"\*")):
        members(NAMES, pattern)


def test_ratio_has_no_epsilon() -> None:
    assert ratio(1e-12, 1e-12) == 1.0
    assert ratio(1e-300, 1e-305) == pytest.approx(1e5)
    assert ratio(1.0, 0.0) == math.inf
    assert ratio(0.0, 1.0) == 0.0
    assert np.isnan(ratio(0.0, 0.0))
    assert np.isnan(ratio(np.nan, 1.0))


def test_group_rms_pools_the_values_of_its_members(synthetic: Any) -> None:
    run = synthetic({"a.x": [1.0, 1.0, 1.0], "a.y": [3.0, float("nan"), float("nan")], "b": [5.0, 5.0, 5.0]})
    group = group_rms(run, "a")
    assert group.names == ("a.x", "a.y")
    np.testing.assert_allclose(group.values, [math.sqrt((1 + 9) / 2), 1.0, 1.0])
    none = group_rms(synthetic({"a": [float("nan")] * 2, "b": [1.0, 1.0]}), "a")
    assert np.isnan(none.values).all()


@pytest.mark.parametrize(("steps", "expected"), [(4, ()), (5, ("cut", "zero", "outside"))])
def test_untrained_parameters_have_no_gradient_or_no_optimizer(
    steps: int, expected: tuple[str, ...], synthetic: Any
) -> None:
    nothing = [math.nan] * steps
    rms = {"good": [1.0] * steps, "late": [*nothing[1:], 1.0], "cut": nothing, "zero": [0.0] * steps}
    rms |= {"outside": [1.0] * steps, "frozen": nothing, "sharded": nothing}
    records = {
        "outside": parameter("outside", group=""),
        "frozen": parameter("frozen", unmeasured="frozen", requires_grad=False),
    }
    sharded = (None, "unmeasured", {"reason": "the ranks are not here", "parameters": ["sharded"]})
    run = synthetic(rms, records=records, events=[sharded])
    assert untrained_parameters(run) == expected
