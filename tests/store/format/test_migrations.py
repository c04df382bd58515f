"""The way from an old format to this one, shown on a made-up format 0."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backlight.records import ParameterRecord, RunStatus
from backlight.store.errors import RunFormatError
from backlight.store.format import manifest, migrations
from backlight.store.maintenance.compact import compact
from backlight.store.read.run import open_run
from backlight.store.write.database import TABLES
from backlight.store.write.writer import RunWriter

Digest = Callable[[Path], dict[str, str]]


@pytest.fixture
def old_run(tmp_path: Path, record: Callable[..., tuple[ParameterRecord, ...]]) -> Path:
    """A run as format 0 would have left it: the manifest says ``title``, the table of scalars ``metric``."""
    path = tmp_path / "run"
    writer = RunWriter.create(path, name="old")
    record(writer, 4)
    writer.close()
    document = json.loads((path / "manifest.json").read_text())
    document["format"], document["title"] = 0, document.pop("name")
    (path / "manifest.json").write_text(json.dumps(document))
    connection = sqlite3.connect(path / "attempt-000" / "rank-00000.db")
    connection.execute("UPDATE meta SET value = '0' WHERE key = 'format'")
    connection.execute("ALTER TABLE scalar RENAME TO metric")
    connection.commit()
    connection.close()
    return path


@pytest.fixture
def format_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def document(data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "name": data["title"]}

    def database(connection: sqlite3.Connection) -> None:
        connection.execute(TABLES["scalar"])
        connection.execute("INSERT INTO scalar SELECT * FROM metric")

    monkeypatch.setitem(migrations.MIGRATIONS, 0, migrations.Migration(document, database))
    monkeypatch.setattr(manifest, "OLDEST_READABLE", 0)


@pytest.mark.usefixtures("format_zero")
def test_an_old_run_is_read_and_left_as_it_is(old_run: Path, digest: Digest) -> None:
    before = digest(old_run)
    run = open_run(old_run)
    assert (run.name, run.status, run.losses) == ("old", RunStatus.FINISHED, ())
    assert run.scalar("loss").values.tolist() == [1.0, 1 / 2, 1 / 3, 1 / 4]
    assert run.frame("gradient", "norm").values.shape == (4, 4)
    assert digest(old_run) == before


@pytest.mark.usefixtures("format_zero")
def test_an_old_run_is_continued_and_its_old_attempts_stay(
    old_run: Path, digest: Digest, record: Callable[..., object]
) -> None:
    before = digest(old_run / "attempt-000")
    writer = RunWriter.create(old_run)
    record(writer, 2)
    writer.close()
    assert any("rank-00000.db stay as they are" in note for note in compact(old_run, every=2).notes)
    assert digest(old_run / "attempt-000") == before
    run = open_run(old_run)
    assert (run.name, run.losses) == ("old", ())
    assert run.scalar("loss").values.tolist() == [1.0, 1 / 2, 1 / 3, 1 / 4, 1.0, 1 / 2]
    assert run.frame("gradient", "norm").steps.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures("format_zero")
def test_an_old_database_that_is_damaged_is_refused(old_run: Path) -> None:
    connection = sqlite3.connect(old_run / "attempt-000" / "rank-00000.db")
    connection.execute("DROP TABLE metric")
    connection.commit()
    connection.close()
    with pytest.raises(RunFormatError, match="format 0 cannot be migrated: no such table: metric"):
        open_run(old_run)


def test_without_a_migration_an_old_run_is_refused(old_run: Path) -> None:
    with pytest.raises(
        RunFormatError, match=r"format 0, this release of backlight reads 1 to 1\. Open it with"
    ):
        open_run(old_run)


def test_there_is_a_migration_for_every_format_that_can_be_read() -> None:
    from backlight.store.format.schema import FORMAT_VERSION, OLDEST_READABLE

    assert sorted(migrations.MIGRATIONS) == list(range(OLDEST_READABLE, FORMAT_VERSION))
