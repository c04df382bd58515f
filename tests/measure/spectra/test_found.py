"""Directions count as found where replicates share them, and not where noise has a structure of its own."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    file = Path(__file__).parents[3] / "bench" / "spectra.py"
    spec = importlib.util.spec_from_file_location("bench_spectra", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_language_model_on_random_tokens_has_no_directions(bench: ModuleType) -> None:
    found = [row for seed in range(3) for row in bench.language(seed, random=True, steps=100).values()]
    above = sum(candidates > 0 for _, candidates in found)
    assert above >= len(found) // 4, "the edge of independent noise alone would have found some"
    assert sum(identifiable > 0 for identifiable, _ in found) <= 0.05 * len(found) + 1


def test_language_model_on_tokens_with_a_rule_has_directions(bench: ModuleType) -> None:
    found = bench.language(0, random=False)
    assert sum(identifiable > 0 for identifiable, _ in found.values()) >= len(found) // 2, found


@pytest.mark.parametrize("kind", [0, 1, 2, 3, 4])
def test_structured_noise_has_no_directions(bench: ModuleType, kind: int) -> None:
    name = bench.STRUCTURES[kind]
    found = [bench.structured(seed, name) for seed in range(10)]
    assert sum(identifiable > 0 for identifiable, _ in found) <= 1, (name, found)
