"""The table of the presets in the docs is what the bench measured, with the presets and checks of now."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from backlight.experiments.experiment import EXPERIMENTS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "grokking_experiments", ROOT / "bench" / "grokking_experiments.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def stored(bench: ModuleType) -> dict[str, Any]:
    runs: dict[str, Any] = bench.read()
    assert runs
    return runs


def test_rows_are_of_the_presets_and_checks_of_now(bench: ModuleType, stored: dict[str, Any]) -> None:
    versions = {name: entry["version"] for name, entry in stored.items()}
    assert versions == {name: bench.version(name) for name in stored}, (
        "a preset, its control or its check changed: run `python bench/grokking_experiments.py NAME` again, "
        "or remove its rows from bench/grokking_experiments.json"
    )


def test_verdicts_are_those_of_the_accuracies(bench: ModuleType, stored: dict[str, Any]) -> None:
    for name, entry in stored.items():
        for row in entry["rows"]:
            summary = bench.summary(bench.evaluated(row["curves"]))
            assert {key: row[key] for key in summary} == summary, (name, row["run"], row["seed"])


def test_page_has_the_table_of_the_runs(bench: ModuleType, stored: dict[str, Any]) -> None:
    text = bench.PAGE.read_text(encoding="utf-8")
    assert bench.page(text, stored) == text, "run `python bench/grokking_experiments.py --table`"
    for name in EXPERIMENTS:
        assert f"`{name}`" in bench.table(stored)


def test_effects_show_in_every_seed_and_in_no_control(stored: dict[str, Any]) -> None:
    for name, entry in stored.items():
        shown = [row["effect"] for row in entry["rows"] if row["run"] == "ci"]
        controls = [row["effect"] for row in entry["rows"] if row["run"] != "ci"]
        assert (len(shown) >= 5, all(shown), any(controls)) == (True, True, False), name


def test_version_follows_preset_and_code(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    before = bench.version("levi")
    assert before == bench.version("levi") != bench.version("doshi")
    claim = copy.copy(bench.CLAIMS["levi"])
    monkeypatch.setitem(
        bench.CLAIMS, "levi", bench.dataclasses.replace(claim, control={"data.train_size": 60})
    )
    assert bench.version("levi") != before
    monkeypatch.setitem(bench.CLAIMS, "levi", bench.dataclasses.replace(claim, check=bench.structure))
    assert bench.version("levi") != before
    monkeypatch.setitem(bench.CLAIMS, "levi", claim)
    levi = EXPERIMENTS["levi"]
    changed = bench.dataclasses.replace(levi, ci=bench.changed(levi.ci, {"training.lr": 0.2}))
    monkeypatch.setattr(bench, "EXPERIMENTS", {"levi": changed})
    assert bench.version("levi") != before
