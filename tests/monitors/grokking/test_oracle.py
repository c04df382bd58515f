"""The verdict on trained networks: the fast oracle groks, its nulls do not."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from backlight.monitors.grokking.model.verdicts import GrokkingVerdict


@pytest.fixture(scope="module")
def nulls() -> ModuleType:
    file = Path(__file__).parents[3] / "bench" / "grokking_nulls.py"
    spec = importlib.util.spec_from_file_location("grokking_nulls", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_fast_oracle_groks_in_expected_range(nulls: ModuleType, seed: int) -> None:
    found = nulls.trained(seed=seed, steps=1600)
    assert found.verdict is GrokkingVerdict.GROKKING
    assert found.strong
    assert 30 <= found.memorised.by <= 40
    assert 800 <= found.generalised.by <= 1400


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "steps", "verdict"),
    [
        pytest.param({"weight_decay": 0.1}, 2500, {"memorised", "censored"}, marks=pytest.mark.full),
        ({"control": "random-labels"}, 900, {"memorised"}),
        ({"train_share": 0.85}, 300, {"no-delay", "insufficient-data"}),
    ],
)
def test_oracle_null_is_not_grokking(
    nulls: ModuleType, change: dict[str, object], steps: int, verdict: set[str]
) -> None:
    assert nulls.trained(seed=3, steps=steps, **change).verdict in verdict


@pytest.mark.slow
def test_curriculum_is_not_grokking(nulls: ModuleType) -> None:
    assert nulls.curriculum(0, switch=500, steps=900).verdict is GrokkingVerdict.UNSTABLE


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(2, marks=pytest.mark.full)])
def test_sparse_parity_of_two_classes_groks(nulls: ModuleType, seed: int) -> None:
    found = nulls.sparse_parity(seed, steps=4000)
    assert found.verdict is GrokkingVerdict.GROKKING
    assert found.memorised_test < 0.6


@pytest.mark.slow
def test_no_synthetic_null_is_called_grokking(nulls: ModuleType) -> None:
    found = [*nulls.synthetic(repeats=2), *nulls.shapes(repeats=3)]
    assert len(found) >= 58
    assert [name for name, detection in found if detection.verdict is GrokkingVerdict.GROKKING] == []
    # The nulls must be evaluated: refusing all of them for lack of data would prove nothing.
    verdicts = {detection.verdict for _, detection in found}
    assert len(verdicts) >= 4


@pytest.mark.parametrize("chance", [1 / 23, 0.5])
def test_synthetic_positive_is_grokking(nulls: ModuleType, chance: float) -> None:
    for seed in range(5):
        found = nulls.delayed(seed, chance)
        assert found.verdict is GrokkingVerdict.GROKKING
        assert dataclasses.asdict(found)["strong"]


@pytest.mark.parametrize("logs", [40, 60, 100])
@pytest.mark.parametrize("chance", [1 / 23, 0.5])
def test_logarithmic_logs_are_not_censored(nulls: ModuleType, logs: int, chance: float) -> None:
    for seed in range(5):
        found = nulls.delayed_at_logarithmic_logs(seed, logs, chance)
        assert found.verdict is GrokkingVerdict.GROKKING, found
