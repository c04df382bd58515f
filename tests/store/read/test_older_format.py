"""Runs of formats 1 (few checksums) and 2 (a row per scalar value) are read, resumed and compacted."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from backlight.store.format.schema import FORMAT_VERSION
from backlight.store.maintenance.compact import compact
from backlight.store.read.run import Run, open_run
from backlight.store.write.writer import RunWriter
from store.conftest import floats_at


@pytest.fixture(params=[1, 2])
def older(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Unpack a run that a release of an older format wrote."""
    with zipfile.ZipFile(Path(__file__).with_name(f"format-{request.param}.zip")) as archive:
        archive.extractall(tmp_path)
    return tmp_path / "run"


def check_values(run: Run) -> None:
    frame = run.frame("gradient", "norm")
    assert frame.steps.tolist() == list(range(5))
    assert np.array_equal(frame.values, [floats_at(step, 3)[:, 0] for step in range(5)])
    assert np.array_equal(run.scalar("loss").values, [1, 1 / 2, 1 / 3, np.nan, 1 / 5], equal_nan=True)
    assert run.scalar("accuracy", "user").values.tolist() == [0, 0.1, 0.2, 0.3, 0.4]
    assert [(event.step, event.payload) for event in run.events("note")] == [(2, {"text": "kept"})]
    assert run.array("w")[1][3].tolist() == [[3.0] * 3] * 2


def test_is_read_without_a_loss(older: Path) -> None:
    assert json.loads((older / "manifest.json").read_text())["format"] < FORMAT_VERSION
    run = open_run(older)
    check_values(run)
    assert (run.last_step(), run.losses) == (4, ())


def test_is_resumed_in_the_present_format(older: Path) -> None:
    with RunWriter.create(older, resume=True) as writer:
        writer.scalar(0, "loss", 7.0)
    assert json.loads((older / "manifest.json").read_text())["format"] == FORMAT_VERSION
    run = open_run(older)
    assert (run.scalar("loss").values[-1], run.scalar("loss").steps[-1], run.losses) == (7.0, 5, ())


def test_is_compacted(older: Path) -> None:
    pytest.importorskip("pyarrow")
    compact(older)
    assert not (older / "attempt-000/rank-00000.db").exists()
    check_values(open_run(older))
