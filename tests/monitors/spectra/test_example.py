"""The example: the demo model on two ranks, its spectra, findings, page and table."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path

import pytest

from backlight.analysis.report import write_html
from backlight.store.export import export
from backlight.store.read.run import open_run
from backlight.store.spectra import layers, measurements
from processes import run_captured

EXAMPLE = Path(__file__).parents[3] / "examples" / "spectra_ddp.py"


@pytest.mark.full
def test_two_ranks_record_their_spectra(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    small = ["--steps", "11", "--every", "5", "--width", "32", "--context", "32"]
    ended = run_captured(
        [*launcher, str(EXAMPLE), "--out", str(tmp_path / "run"), *small],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr
    run = open_run(tmp_path / "run")
    names = {layer.parameter for layer in layers(run)}
    assert {"blocks.0.qkv.weight:q", "blocks.1.down.weight", "token.weight"} <= names
    found = measurements(run)
    assert {one.step for one in found} == {0, 5, 10}
    assert {one.parameter for one in found} == names
    assert {one.replicates for one in found} == {16}
    assert {one["batch"] for one in found} == {4.0}
    early = [one["signal_share"] for one in found if one.step == 0 and one.parameter != "position.weight"]
    assert min(early) > 0.2
    assert "spectra-step" in write_html(run.path, tmp_path / "page.html").read_text()
    (table,) = export(run, tmp_path / "out.csv", max_directions=4)
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len({(row["step"], row["parameter"]) for row in rows}) == 3 * len(names)
