"""Spectra of a run on two ranks: unreduced gradients, no waiting, equal reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backlight.store import spectra as stored
from backlight.store.read.run import open_run
from spectra.processes import start_ranks

pytestmark = pytest.mark.slow

MATRICES = {"embed.weight", "block.qkv.weight", "block.up.weight", "block.down.weight", "head.weight"}


def run_modes(out: Path, *modes: str) -> Path:
    for process in start_ranks(
        2, Path(__file__).parents[2] / "spectra" / "rank_script.py", out, ",".join(modes)
    ):
        errors = process.communicate(timeout=240)[1]
        assert process.returncode == 0, errors[-3000:]
    return out


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the modes on two ranks, once."""
    return run_modes(tmp_path_factory.mktemp("ranks"), "ddp", "exchange", "missing", "fsdp", "fewer")


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the modes of the full tests."""
    return run_modes(tmp_path_factory.mktemp("variants"), "ddp_static", "controls")


def reports(results: Path, mode: str) -> list[dict[str, Any]]:
    return [json.loads((results / f"{mode}-{rank}.json").read_text()) for rank in range(2)]


def measured(results: Path, mode: str) -> set[tuple[int, str]]:
    return {(m.step, m.parameter) for m in stored.measurements(open_run(results / mode / "run"))}


def test_training_is_unchanged_on_every_rank(results: Path) -> None:
    for mode in ("ddp", "exchange", "missing", "fsdp", "fewer"):
        assert [one["same"] for one in reports(results, mode)] == [True, True], mode


def test_ddp_layers_are_measured_by_one_rank_before_reduction(results: Path) -> None:
    one, other = reports(results, "ddp")
    assert not set(one["replicates"]) & set(other["replicates"])
    assert set(one["replicates"]) | set(other["replicates"]) == MATRICES
    assert set(one["replicates"].values()) == {4}
    assert [one["exact"], other["exact"]] == [True, True]
    assert measured(results, "ddp") == {(step, name) for step in (0, 2) for name in MATRICES}
    assert not one["warnings"]


@pytest.mark.full
def test_static_graphs_and_bucket_views_are_supported(variants: Path) -> None:
    assert [one["same"] for one in reports(variants, "ddp_static")] == [True, True]
    assert measured(variants, "ddp_static") == {(step, name) for step in (0, 2) for name in MATRICES}


def test_exchange_combines_replicates_of_all_ranks(results: Path) -> None:
    one, other = reports(results, "exchange")
    assert {**one["replicates"], **other["replicates"]} == dict.fromkeys(MATRICES, 4)
    found = stored.measurements(open_run(results / "exchange" / "run"), "head.weight")[0]
    assert (found.replicates, found["batch"]) == (4, 8)


@pytest.mark.full
def test_same_data_on_two_ranks_are_reported(variants: Path) -> None:
    messages = [text for result in reports(variants, "controls") for text in result["warnings"]]
    assert messages
    assert all("are the same, as if both came from the same data" in text for text in messages)
    assert not measured(variants, "controls")


def test_gradient_that_one_rank_lacks_is_dropped_by_all(results: Path) -> None:
    one, other = (result["warnings"] for result in reports(results, "missing"))
    assert len(one) == 1
    assert one == other
    assert "spectra of block.up.weight are not measured" in one[0]
    assert "no whole set of gradients on rank 1" in one[0]
    assert {name for _, name in measured(results, "missing")} == MATRICES - {"block.up.weight"}


def test_no_rank_waits_for_one_that_has_ended(results: Path) -> None:
    waiting, _ended = reports(results, "fewer")
    assert any("replicates of all ranks, from here on" in text for text in waiting["warnings"])
    # On a busy machine step 2 may not be there within the timeout; no later one can be.
    assert {0} <= {step for step, _ in measured(results, "fewer")} <= {0, 2}


def test_fsdp2_gradients_are_captured_before_scattering(results: Path) -> None:
    one, other = reports(results, "fsdp")
    assert set(one["replicates"]) | set(other["replicates"]) == MATRICES
    assert set(one["replicates"].values()) == {3}
    assert [one["exact"], other["exact"]] == [True, True]
    assert measured(results, "fsdp") == {(step, name) for step in (0, 2) for name in MATRICES}
