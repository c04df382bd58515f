"""Power laws with known exponents, and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from backlight.diagnose.scaling.sweep import ScalingError, fit


def test_exponents_of_two_settings_are_found_exactly() -> None:
    dims, layers = [64, 128, 256, 64, 128, 256], [2, 2, 2, 8, 8, 8]
    values = [3e-3 * d**2 * n**0.5 for d, n in zip(dims, layers, strict=True)]
    law = fit("memory", {"dim": dims, "layers": layers}, values)
    assert [e.value for e in law.exponents] == pytest.approx([2.0, 0.5])
    assert law.misfit < 1e-9
    assert [e.setting for e in law.exponents if e.faster_than_linear] == ["dim"]
    assert law.at({"dim": 512, "layers": 4}) == pytest.approx(3e-3 * 512**2 * 2)


def test_intervals_have_their_nominal_coverage() -> None:
    random = np.random.default_rng(0)
    sizes = [64, 96, 128, 192, 256]
    held = []
    for _ in range(400):
        values = [d**1.5 * np.exp(random.normal(0, 0.05)) for d in sizes]
        (exponent,) = fit("step", {"dim": sizes}, values).exponents
        held.append(exponent.low <= 1.5 <= exponent.high)
    assert 0.92 <= np.mean(held) <= 0.98


def test_linear_growth_is_rarely_called_faster_than_linear() -> None:
    random = np.random.default_rng(1)
    sizes = [64, 96, 128, 192, 256]
    laws = [
        fit("step", {"dim": sizes}, [d * np.exp(random.normal(0, 0.05)) for d in sizes]) for _ in range(200)
    ]
    assert np.mean([law.exponents[0].faster_than_linear for law in laws]) <= 0.05


@pytest.mark.parametrize("size", [520, 31])
def test_no_extrapolation_beyond_twice_the_range(size: int) -> None:
    law = fit("step", {"dim": [64, 128, 256]}, [1.0, 2.0, 4.1])
    assert law.at({"dim": 512}) == pytest.approx(8, rel=0.05)
    with pytest.raises(ScalingError, match=f"dim={size} lies beyond twice the range that was measured"):
        law.at({"dim": size})
    with pytest.raises(ScalingError, match="no value of dim"):
        law.at({"heads": 4})


@pytest.mark.parametrize(
    ("sizes", "values", "message"),
    [
        ({"dim": [1, 2]}, [1, 2], "2 points for 1 settings; an interval takes 3"),
        ({"dim": [1, 2, 3]}, [1, 2, 0], "takes positive numbers"),
        ({"a": [1, 2, 4, 8], "b": [2, 4, 8, 16]}, [1, 2, 3, 4], "a and b move together"),
    ],
)
def test_invalid_points_are_refused(sizes: dict[str, list[float]], values: list[float], message: str) -> None:
    with pytest.raises(ScalingError, match=message):
        fit("step", sizes, values)
