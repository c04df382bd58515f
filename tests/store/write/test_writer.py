from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backlight.records import (
    Evidence,
    Finding,
    Fingerprint,
    Layout,
    Made,
    ParameterRecord,
    Placement,
    RunStatus,
    Severity,
    Subject,
)
from backlight.series import GRADIENT, HISTOGRAM, UPDATE
from backlight.store.read.run import open_run
from backlight.store.write.writer import RunWriter

FINDING = Finding(
    rule="vanishing",
    severity=Severity.WARNING,
    title="title",
    detail="<script>alert(1)</script> 'quotes' \"double\" \0 \udcff",
    subject=Subject(parameter="a\n../b", step=3),
    evidence=(Evidence("series/gradient/rms/a", 3, 1e-12, "gradient"), Evidence("x", value="text")),
    fix="look",
    refuted_if="never",
    version=2,
    made=Made.LIVE,
    overridden={"vanishing_rms": 1e-3},
)
HOSTILE = [
    "a\nb",
    "nul\0in",
    "../../etc",
    "q'u\"o`te",
    "x" * 10_000,
    "lone\udcff",
    "",
    "🙂",
    "a/b",
    "; DROP TABLE x",
]
TABLE = (ParameterRecord("w", (2,), "float32", "cpu", 2),)


def test_written_run_round_trips(tmp_path: Path, record: Callable[..., object]) -> None:
    path = tmp_path / "deep" / "run"
    writer = RunWriter.create(
        path,
        name="first",
        script="train.py",
        arguments=("--lr", "0.1"),
        monitors=("health", "steptime"),
        groups={"host": "encoder.*"},
        overrides={"health": {"vanishing_rms": 1e-3}},
    )
    assert (writer.attempt, writer.step_offset, writer.path, writer.lost) == (0, 0, path, None)
    fingerprint = Fingerprint(script="train.py", versions={"torch": "2"}, modules=(("a", "Linear"),))
    writer.fingerprint(Fingerprint(script="replaced"))
    writer.fingerprint(fingerprint)
    table = record(writer, 5)
    writer.scalars(2, {"accuracy": 0.5, "inf": math.inf, "nan": math.nan}, source="user")
    writer.event(None, "config", {"every": 10, "bad": math.nan})
    writer.event(3, "clip_by_value", {"value": np.float64(1.5)})
    writer.finding(FINDING)
    writer.close()
    run = open_run(path)
    assert (run.name, run.status, run.monitors) == ("first", RunStatus.FINISHED, ("health", "steptime"))
    assert dict(run.groups) == {"host": "encoder.*"}
    assert run.overrides == {"health": {"vanishing_rms": 1e-3}}
    assert run.parameters() == table
    assert run.fingerprint() == fingerprint
    assert run.fingerprint(attempt=3) is None
    assert run.losses == ()
    (attempt,) = run.attempts
    assert (attempt.argv, attempt.script, attempt.ranks, attempt.world_size) == (
        ("--lr", "0.1"),
        "train.py",
        (0,),
        1,
    )
    assert attempt.ended is not None
    assert attempt.started <= attempt.ended
    assert run.scalar("loss").values.tolist() == [1.0 / (s + 1) for s in range(5)]
    assert run.scalar("loss").unit == "loss"
    with pytest.raises(KeyError, match="it is recorded with source='backlight'"):
        run.scalar("loss", source="user")
    assert run.scalar("inf", source="user").values.tolist() == [math.inf]
    assert np.isnan(run.scalar("nan", source="user").values[0])
    assert run.scalar_names() == ("loss", "accuracy", "inf", "nan")
    assert run.scalar_names("user") == ("accuracy", "inf", "nan")
    config, clip = run.events()
    assert (config.step, config.kind, config.rank, config.attempt) == (None, "config", 0, 0)
    assert config.payload["every"] == 10
    assert math.isnan(config.payload["bad"])
    assert (clip.step, clip.payload) == (3, {"value": 1.5})
    assert run.events("config") == (config,) or math.isnan(run.events("config")[0].payload["bad"])
    assert run.stored_findings() == (FINDING,)


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_numbers_round_trip(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("run")
    source = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    schema = data.draw(st.sampled_from([GRADIENT, UPDATE, HISTOGRAM]))
    P, steps = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 12))
    special = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e300, 5e-324, 1.0])
    floats = source.choice(special, (steps, P, len(schema.floats)))
    floats[source.random(floats.shape) < 0.5] = source.standard_normal()
    ints = source.integers(-(2**62), 2**62, (steps, P, len(schema.integers))) >> source.integers(0, 62)
    ints[:, :, 0] = source.integers(0, 2, (steps, P))
    table = tuple(ParameterRecord(f"p{i}", (3,), "float32", "cpu", 3) for i in range(P))
    writer = RunWriter.create(path)
    identifier = writer.parameter_table(table)
    for step in range(steps):
        writer.append(schema.name, step, identifier, floats[step], ints[step])
        if source.random() < 0.3:
            writer.flush()
    writer.close()
    run = open_run(path)
    measured = ints[:, :, 0] != 0
    for k, name in enumerate(schema.floats):
        frame = run.frame(schema.name, name)
        assert np.array_equal(frame.measured, measured)
        expected = np.where(measured, floats[:, :, k], np.nan)
        assert np.array_equal(frame.values, expected, equal_nan=True)
    for k, name in enumerate(schema.integers):
        expected = np.where(measured, ints[:, :, k], 0)
        assert np.array_equal(run.frame(schema.name, name).values, expected)
    assert run.losses == ()


@pytest.mark.slow
def test_hostile_names_are_stored_safely(tmp_path: Path) -> None:
    path = tmp_path / "run"
    writer = RunWriter.create(path, name="\n../\0\udcff" * 50, script="../x", arguments=("\udcff",))
    table = tuple(ParameterRecord(n, (1,), "float32", "cpu", 1, module=n, aliases=(n,)) for n in HOSTILE)
    identifier = writer.parameter_table(table)
    ints = np.array([[1, 1, 0, 0, 0]] * len(HOSTILE))
    writer.append("gradient", 0, identifier, np.ones((len(HOSTILE), 3)), ints)
    for i, name in enumerate(HOSTILE):
        writer.scalar(0, name, i, source="user")
        writer.event(0, name, {name: name})
        writer.array(name, 0, np.array([i]), dims=("x",), unit=name)
        writer.evidence(name, name)
    writer.close()
    run = open_run(path)
    assert [p.name for p in run.parameters()] == HOSTILE
    assert run.frame("gradient", "norm").names == tuple(HOSTILE)
    for i, name in enumerate(HOSTILE):
        assert run.scalar(name, source="user").values.tolist() == [i]
        assert run.array(name)[1][0].tolist() == [i]
    assert [e.payload for e in run.events()] == [{n: n} for n in HOSTILE]
    assert run.losses == ()
    below = {p.parent.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()}
    assert below == {".", "attempt-000", "attempt-000/arrays", "attempt-000/evidence"}
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_equal_tables_share_an_id(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run")
    other = (ParameterRecord("w", (2,), "float32", "cpu", 2, placement=Placement(Layout.SHARD)),)
    first = writer.parameter_table(TABLE)
    assert writer.parameter_table(tuple(TABLE)) == first
    assert writer.parameter_table(other) != first
    writer.close()


def test_table_with_duplicate_rows_is_rejected(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run")
    with pytest.raises(ValueError, match="names 'w' twice"):
        writer.parameter_table(TABLE * 2)
    writer.close()


def test_arrays_of_wrong_shape_are_rejected(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run")
    table = writer.parameter_table(TABLE)
    with pytest.raises(ValueError, match=r"got floats \(2, 3\) and integers \(1, 5\), expected \(1, 3\)"):
        writer.append("gradient", 0, table, np.ones((2, 3)), np.ones((1, 5), dtype=int))
    with pytest.raises(KeyError):
        writer.append("no such series", 0, table, np.ones((1, 3)), np.ones((1, 5), dtype=int))
    writer.close()
    assert not open_run(tmp_path / "run").has("gradient")


@pytest.mark.parametrize("arguments", [{"rank": 1}, {"rank": -1}, {"max_disk": 0}, {"flush_interval": -1.0}])
def test_arguments_out_of_range_are_rejected(tmp_path: Path, arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected 0 <= rank < world_size"):
        RunWriter.create(tmp_path / "run", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_the_caller_may_reuse_its_arrays(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run")
    table = writer.parameter_table(TABLE)
    floats, ints = np.ones((1, 3)), np.array([[1, 2, 0, 0, 0]])
    writer.append("gradient", 0, table, floats, ints)
    floats[:], ints[:] = 9.0, 9
    writer.close()
    assert open_run(tmp_path / "run").frame("gradient", "norm").values.tolist() == [[1.0]]


def test_parts_of_a_step_are_read_separately(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run")
    table = writer.parameter_table(TABLE)
    for part in range(3):
        writer.append("gradient", 0, table, np.full((1, 3), part + 1.0), np.ones((1, 5), int), part=part)
    writer.close()
    run = open_run(tmp_path / "run")
    assert [run.frame("gradient", "norm", part=p).values.tolist() for p in range(4)] == [
        [[1.0]],
        [[2.0]],
        [[3.0]],
        [],
    ]


def test_last_write_of_a_step_is_read(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run")
    table = writer.parameter_table(TABLE)
    for step, value in [(0, 1.0), (2, 2.0), (1, 3.0), (2, 4.0)]:
        writer.append("gradient", step, table, np.full((1, 3), value), np.ones((1, 5), int))
        writer.scalar(step, "loss", value)
    writer.close()
    run = open_run(tmp_path / "run")
    assert run.frame("gradient", "norm").values[:, 0].tolist() == [1.0, 3.0, 4.0]
    assert run.scalar("loss").values.tolist() == [1.0, 3.0, 4.0]


def test_findings_are_written_immediately(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run")
    writer.finding(FINDING)
    writer.event(0, "after", {})
    run = open_run(tmp_path / "run")
    assert (len(run.stored_findings()), len(run.events())) == (1, 0)
    writer.flush()
    assert len(open_run(tmp_path / "run").events()) == 1
    writer.close()


def test_second_close_and_later_writes_have_no_effect(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run")
    writer.close(RunStatus.FAILED)
    writer.close(RunStatus.FINISHED)
    table = writer.parameter_table(TABLE)
    writer.append("gradient", 0, table, np.ones((1, 3)), np.ones((1, 5), int))
    writer.scalar(0, "loss", 1.0)
    writer.event(0, "late", {})
    writer.finding(FINDING)
    writer.fingerprint(Fingerprint())
    writer.flush()
    assert writer.evidence("late", b"") == ""
    run = open_run(tmp_path / "run")
    assert (run.status, run.scalar_names(), run.events(), run.losses) == (RunStatus.FAILED, (), (), ())


def test_finished_run_has_no_database_log(tmp_path: Path, record: Callable[..., object]) -> None:
    record(tmp_path / "run", 3)
    names = sorted(p.relative_to(tmp_path / "run").as_posix() for p in (tmp_path / "run").rglob("*"))
    assert names == [
        "attempt-000",
        "attempt-000/rank-00000.db",
        "attempt-000/rank-00000.json",
        "manifest.json",
    ]
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    (attempt,) = manifest["attempts"]
    assert attempt["progress"]["files"]["attempt-000/rank-00000.db"]["series_gradient"] == 3
    assert attempt["progress"]["step"] == 2


@pytest.mark.slow
def test_concurrent_writes_and_flushes(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run", flush_interval=0.0)
    table = writer.parameter_table(TABLE)
    stop = threading.Event()

    def flush() -> None:
        while not stop.is_set():
            writer.flush()

    def write(part: int) -> None:
        for step in range(300):
            writer.append("gradient", step, table, np.full((1, 3), float(step)), np.ones((1, 5), int), part)
            writer.scalar(step, f"s{part}", step)
            writer.event(step, "e", {"part": part})

    flusher = threading.Thread(target=flush)
    flusher.start()
    writers = [threading.Thread(target=write, args=(part,)) for part in range(4)]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    flusher.join()
    writer.close()
    run = open_run(tmp_path / "run")
    for part in range(4):
        assert run.frame("gradient", "norm", part=part).values[:, 0].tolist() == list(range(300))
        assert run.scalar(f"s{part}").values.tolist() == list(range(300))
    assert len(run.events()) == 1200


def test_rows_over_the_buffer_limit_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Callable[..., object]
) -> None:
    monkeypatch.setattr("backlight.store.write.writer.MAX_BUFFERED_BYTES", 4000)
    record(tmp_path / "run", 50)
    run = open_run(tmp_path / "run")
    stored = len(run.series_steps("gradient"))
    assert 0 < stored < 50
    (event,) = run.events("not_stored")
    assert event.payload["rows"]["gradient"] == 50 - stored
    assert any("were not stored" in loss for loss in run.losses)
