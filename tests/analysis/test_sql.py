"""SQL over a run: results, one-line errors, and no access outside the database."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import backlight
from backlight.analysis.sql import QueryError, query, tables, write
from backlight.store.errors import ExportError
from backlight.store.read.run import Run, open_run
from cases import CASES

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    with backlight.watch(run=path, every=1, monitors=("health", "steptime")) as watch:
        CASES["clipped_by_norm"].train()
        watch.log(accuracy=0.5)
    return path


@pytest.fixture(scope="module")
def run(path: Path) -> Run:
    return open_run(path)


def select(run: Run, statement: str) -> list[tuple[Any, ...]]:
    with query(run, statement) as answer:
        return list(answer.rows())


@pytest.mark.slow
def test_query_results_equal_reader(run: Run) -> None:
    frame = run.frame("gradient", "norm")
    largest = select(run, "select parameter, max(norm) m from gradient group by parameter order by m desc")
    assert dict(largest) == pytest.approx(dict(zip(frame.names, frame.values.max(axis=0), strict=True)))
    at = frame.steps[2]
    zeros = run.frame("gradient", "zeros").values
    assert select(run, f"select sum(zeros) from gradient where step = {at}") == [(int(zeros[2].sum()),)]
    assert select(run, "select count(*) from gradient") == [(frame.values.size,)]
    # A filter over a column that is not selected, a view that is scanned twice, and a join.
    filtered = f"select step from gradient where parameter = '{frame.names[0]}' and step < 2"
    assert select(run, filtered) == [(0,), (1,)]
    twice = "select count(*) from gradient a join gradient b using (step, parameter) where a.norm = b.norm"
    assert select(run, twice) == [(int(np.isfinite(frame.values).sum()),)]
    loss = run.scalar("loss").values
    assert select(run, "select loss from steps order by step") == [(value,) for value in loss]
    ratio = run.frame("update", "ratio")
    counts = select(run, "select count(*), count(ratio) from update")
    assert counts == [(ratio.values.size, int(ratio.measured.sum()))]


@pytest.mark.slow
def test_every_table_can_be_queried(run: Run) -> None:
    for name, table in tables(run).items():
        with query(run, f"select * from {name}") as answer:
            assert answer.names == table.names
            list(answer.rows())


def test_findings_table_equals_current_findings(run: Run) -> None:
    assert select(run, "select rule, severity from findings") == [
        (f.rule, f.severity.value) for f in backlight.findings_of(run)
    ]


@pytest.mark.slow
def test_only_queried_columns_are_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[str, str]] = []
    frame = Run.frame
    monkeypatch.setattr(Run, "frame", lambda self, s, c, **k: read.append((s, c)) or frame(self, s, c, **k))
    select(run, "select max(norm) from gradient where zeros = 0")
    assert set(read) == {("gradient", "norm"), ("gradient", "zeros")}
    read.clear()
    select(run, "select count(*) from parameters")
    assert read == []


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("select nrm from gradient", r"column \"nrm\" not found.* - gradient has step, attempt, .*norm"),
        ("select * from gradients", r"gradients does not exist! - tables: gradient, update"),
        ("selec 1", r"syntax error at or near \"selec\" - tables: gradient"),
        ("select 1; select 2", "expected one SELECT over: gradient"),
        ("", "expected one SELECT"),
        ("drop view gradient", "expected one SELECT"),
        ("create table x as select 1", "expected one SELECT"),
        ("insert into gradient values (1)", "expected one SELECT|Catalog"),
        ("copy (select 1) to '{outside}.csv'", "expected one SELECT"),
        ("attach '{outside}.db'", "expected one SELECT"),
        ("set enable_external_access = true", "expected one SELECT"),
        ("install httpfs", "expected one SELECT"),
        ("select * from read_csv('{inside}')", "file system operations are disabled"),
        ("select * from read_text('{inside}')", "file system operations are disabled"),
        ("select * from '{inside}'", "does not exist|disabled"),
        ("select * from glob('/*')", "disabled"),
        ("from run", "does not exist"),
    ],
)
def test_invalid_statement_is_refused(run: Run, tmp_path: Path, statement: str, message: str) -> None:
    (tmp_path / "inside.csv").write_text("secret\n")
    filled = statement.format(outside=tmp_path / "outside", inside=tmp_path / "inside.csv")
    with pytest.raises(QueryError, match=message) as refused:
        select(run, filled)
    assert "\n" not in str(refused.value)
    assert [p.name for p in tmp_path.iterdir()] == ["inside.csv"]


def test_failure_while_rows_are_read_is_value_error(run: Run) -> None:
    with pytest.raises(ValueError, match="Could not convert string"):
        select(run, "select cast(parameter as integer) from gradient")


def test_query_leaves_run_directory_unchanged(run: Run) -> None:
    before = sorted(p.name for p in run.path.rglob("*"))
    select(run, "select parameter, step, norm from gradient order by norm, parameter")
    assert sorted(p.name for p in run.path.rglob("*")) == before


@pytest.mark.slow
def test_query_command(command: Command, path: Path, tmp_path: Path) -> None:
    statement = 'select step, loss, "user/accuracy" from steps order by step'
    code, out, _ = command("query", path, statement, "--json")
    rows = json.loads(out)
    assert code == 0
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert rows[0]["user/accuracy"] is None
    code, out, _ = command("query", path, statement, "--csv")
    assert list(csv.reader(out.splitlines()))[1][2] == ""
    code, out, _ = command("query", path, statement, "--rows", 2)
    assert "the first 2 rows" in out
    code, out, _ = command("query", path, statement, "--out", tmp_path / "x.parquet")
    assert out.strip() == str(tmp_path / "x.parquet")
    import pyarrow.parquet as pq

    assert pq.read_table(tmp_path / "x.parquet")["loss"].to_pylist() == [row["loss"] for row in rows]
    assert command("query", path, statement, "--out", tmp_path / "x.parquet")[0] == 2
    code, out, _ = command("query", path, "--tables")
    assert "gradient    type     unit      meaning\n" in out
    assert "note: one row per step and parameter of the series gradient\n" in out
    listed = json.loads(command("query", path, "--tables", "--json")[1])
    norm = next(c for t in listed if t["table"] == "gradient" for c in t["columns"] if c["name"] == "norm")
    assert norm["unit"] == "gradient"
    code, _, errors = command("query", path, "select nrm from gradient")
    assert code == 2
    assert errors.startswith('backlight: Binder Error: Referenced column "nrm" not found')
    assert errors.count("\n") == 1
    assert "give one SELECT" in command("query", path)[2]
    assert "exclude one another" in command("query", path, "select 1", "--json", "--csv")[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "statement",
    [
        pytest.param("select * from scalars limit 2", marks=pytest.mark.full),
        "select * from gradient where norm > 0",
    ],
)
def test_process_ends_without_reading_all_rows(path: Path, statement: str) -> None:
    arguments = [sys.executable, "-m", "backlight", "query", str(path), statement, "--rows", "1"]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "the first 1 rows" in ended.stdout


def test_files_are_csv_or_parquet(run: Run, tmp_path: Path) -> None:
    with query(run, "select norm, 'nan'::double as n from gradient") as answer:
        with pytest.raises(ExportError, match=r"the ending '\.txt' is not known"):
            write(answer, tmp_path / "x.txt")
        write(answer, tmp_path / "x.csv")
    first = (tmp_path / "x.csv").read_text().splitlines()[1]
    assert math.isnan(float(first.split(",")[1]))
