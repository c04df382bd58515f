"""Each tracker with its real package: sent data is read back with the tracker's own reader."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import backlight
from backlight.records import Finding, Severity, Subject
from backlight.session.trackers.base import TRACKERS, Tracked, TrackerError
from backlight.session.trackers.metrics import send
from backlight.store.read.run import open_run

STEPS = 6
MONITORS = ("health", "steptime")


def train(run: Path, tracker: str, *, poisoned: bool = True) -> list[float]:
    """Train with a user step that counts in tens; return the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    settings = {"every": 1, "monitors": MONITORS, "trackers": [tracker], "resume": run.exists()}
    with backlight.watch(model, optimizer, run=run, **settings) as watch:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 4)).square().mean()
            loss.backward()
            if poisoned and step == STEPS - 1:
                model[2].bias.grad.fill_(float("nan"))
            optimizer.step()
            watch.log(step=10 * step, accuracy=0.5)
            losses.append(loss.item())
    return losses


def events(folder: Path) -> Any:
    # TensorBoard's own reader; the older event accumulator does not handle tensor restarts.
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return reader


def tags(reader: Any) -> dict[str, Any]:
    """Return the tags without the memory of the process, whose last reading follows the last step."""
    found = reader.Tags()
    return {**found, "tensors": sorted({*found["tensors"]} - {"backlight/host/memory"})}


def values(reader: Any, tag: str) -> list[tuple[int, Any]]:
    from tensorboard.util import tensor_util

    return [(e.step, tensor_util.make_ndarray(e.tensor_proto)) for e in reader.Tensors(tag)]


def test_tensorboard(tmp_path: Path) -> None:
    losses = train(tmp_path / "run", "tensorboard")
    reader = events(tmp_path / "run" / "export" / "tensorboard")
    recorded_values = values(reader, "backlight/loss")
    assert [step for step, _ in recorded_values] == [10 * i for i in range(STEPS)]
    np.testing.assert_allclose([float(v) for _, v in recorded_values], losses, rtol=1e-6)
    assert {
        "backlight/total_norm",
        "backlight/lr/0/0",
        "backlight/norm/0",
        "backlight/phase/backward",
    } <= set(reader.Tags()["tensors"])
    ((first, spread), *_) = values(reader, "backlight/update_ratio")
    assert first == 0
    assert spread[:, 2].sum() == 4  # parameters
    (step, text), *_ = values(reader, "backlight/findings")
    assert step == STEPS - 1
    assert "`non_finite`" in text.item().decode()
    assert "2.bias" in text.item().decode()


def test_tensorboard_export_of_a_stored_run_is_identical(tmp_path: Path) -> None:
    train(tmp_path / "run", f"tensorboard={tmp_path / 'live'}")
    send(open_run(tmp_path / "run"), f"tensorboard={tmp_path / 'later'}")
    live, later = events(tmp_path / "live" / "run"), events(tmp_path / "later" / "run")
    assert tags(live) == tags(later)
    for tag in ("backlight/loss", "backlight/norm/2", "backlight/update_ratio", "backlight/user/accuracy"):
        for one, other in zip(values(live, tag), values(later, tag), strict=True):
            assert one[0] == other[0]
            np.testing.assert_allclose(one[1], other[1], rtol=1e-6)


def test_tensorboard_purges_steps_rewritten_by_a_new_attempt(tmp_path: Path) -> None:
    for _ in range(2):
        train(tmp_path / "run", "tensorboard", poisoned=False)
    reader = events(tmp_path / "run" / "export" / "tensorboard")
    assert [step for step, _ in values(reader, "backlight/loss")] == [10 * i for i in range(STEPS)]


def test_tensorboard_separates_two_runs_in_one_directory(tmp_path: Path) -> None:
    for name in ("first", "second"):
        train(tmp_path / name, f"tensorboard={tmp_path / 'logs'}", poisoned=False)
    for name in ("first", "second"):
        recorded_values = values(events(tmp_path / "logs" / name), "backlight/loss")
        assert [step for step, _ in recorded_values] == [10 * i for i in range(STEPS)]


@pytest.mark.parametrize(("name", "folder"), [("../../out", "out"), ("/etc", "etc"), ("", "run")])
def test_tensorboard_never_writes_outside_its_directory(tmp_path: Path, name: str, folder: str) -> None:
    logs = tmp_path / "a" / "logs"
    sink: Any = TRACKERS["tensorboard"].open(
        str(logs), Tracked(name, tmp_path / "runs" / "run", live=False), None
    )
    sink.close(failed=False)
    assert [file.parent for file in tmp_path.rglob("*.backlight")] == [logs / folder]


def test_unwritable_tensorboard_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match=r"tracker 'tensorboard' is left out: \w+Error.*file") as caught:
        train(tmp_path / "run", f"tensorboard={tmp_path / 'file' / 'below'}")
    assert caught[0].filename == __file__  # the line of the watch call, although a background thread warns


# Prometheus


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def metrics(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_can_be_scraped_during_training(tmp_path: Path) -> None:
    port, text = free_port(), ""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pause = threading.Event()
    watch = backlight.watch(
        model, optimizer, run=tmp_path / "run", every=1, monitors=MONITORS, trackers=[f"prometheus={port}"]
    )
    with watch:
        for _ in range(400):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            pause.wait(0.02)
            if pause.is_set() or "backlight_loss{" in text:
                break
            try:
                text = scrape(port)
            except OSError:
                continue  # the port opens with the first delivery
    recorded_values = metrics(text)
    run = ("run", "run")
    assert recorded_values["backlight_loss", (("optimizer", ""), run)] > 0
    assert recorded_values["backlight_learning_rate", (("group", "0"), ("optimizer", "0"), run)] == 0.1
    assert recorded_values["backlight_phase_seconds", (("phase", "backward"), run)] > 0
    with pytest.raises(OSError, match=r"refused"):
        scrape(port)  # the port closes with the run


def test_prometheus_listens_on_loopback_only() -> None:
    port = free_port()
    sink: Any = TRACKERS["prometheus"].open(str(port), Tracked("r", Path("r"), live=True), None)
    try:
        assert sink._server.server_address[0] == "127.0.0.1"
    finally:
        sink.close(failed=False)


def test_prometheus_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.warns(
            RuntimeWarning, match=rf"127.0.0.1:{port} cannot be listened on \(.*in use\); name"
        ):
            train(tmp_path / "run", f"prometheus={port}")
    with pytest.warns(RuntimeWarning, match="'prometheus' is left out: TrackerError: 'x:y': expected PORT"):
        train(tmp_path / "other", "prometheus=x:y")


def test_prometheus_writes_a_textfile_for_the_collector(tmp_path: Path) -> None:
    target = tmp_path / "backlight.prom"
    losses = train(tmp_path / "run", f"prometheus={target}")
    recorded_values = metrics(target.read_text())
    run = ("run", "run")
    assert recorded_values["backlight_loss", (("optimizer", ""), run)] == pytest.approx(losses[-1])
    assert recorded_values["backlight_step", (run,)] == 10 * (STEPS - 1)
    assert recorded_values["backlight_findings", (("rule", "non_finite"), run, ("severity", "error"))] >= 1
    assert [path.name for path in tmp_path.glob("*.prom*")] == ["backlight.prom"]
    live = {key: value for key, value in recorded_values.items()}
    target.unlink()
    send(open_run(tmp_path / "run"), f"prometheus={target}")
    assert metrics(target.read_text()) == pytest.approx(live, nan_ok=True)
    with pytest.raises(
        TrackerError, match=r"a stored run has no endpoint: name a file, prometheus=FILE\.prom"
    ):
        send(open_run(tmp_path / "run"), "prometheus")


# Weights & Biases


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run W&B offline without a user, and stop its service afterwards."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    import wandb

    yield wandb
    wandb.teardown()


def recorded(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of history in the one .wandb file below a folder, then summary, tags and alerts."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.rglob("*.wandb")
    for _ in range(200):  # W&B writes the file after finish() has returned
        records = list(map(Record.FromString, leveldb_records(path.read_bytes())))
        if records and records[-1].HasField("exit"):
            break
        time.sleep(0.1)
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for record in records:
        if record.HasField("history"):
            rows.append({name_of(item): json.loads(item.value_json) for item in record.history.item})
        if record.HasField("summary"):
            for item in record.summary.update:
                summary[name_of(item)] = json.loads(item.value_json)
        if record.HasField("run") and record.run.tags:
            summary["tags"] = list(record.run.tags)
        if record.HasField("alert"):
            summary.setdefault("alerts", []).append((record.alert.title, record.alert.level))
    return [*rows, summary]


def name_of(item: Any) -> str:
    return ".".join(item.nested_key) or item.key


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of W&B's log: LevelDB's format in blocks of 32 KiB, behind a header of 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in {1, 4}:  # whole, or the last part
            yield parts
            parts = b""


@pytest.mark.full
def test_wandb_creates_its_own_run(tmp_path: Path, offline: Any) -> None:
    losses = train(tmp_path / "run", "wandb=somewhere")
    assert offline.run is None  # the script's own run stays its own
    *rows, summary = recorded(tmp_path / "run" / "export")
    assert [row["backlight/step"] for row in rows] == [10 * i for i in range(STEPS)]
    np.testing.assert_allclose([row["backlight/loss"] for row in rows], losses)
    assert rows[0]["backlight/update_ratio._type"] == "histogram"
    assert "backlight/norm/2" in rows[0]
    assert rows[0]["backlight/user/accuracy"] == 0.5
    assert summary["backlight/findings/non_finite"].startswith("error: ")
    assert "backlight/non_finite" in summary["tags"]
    assert summary["alerts"].count(("backlight: non_finite", "ERROR")) == 1


def test_wandb_replaces_findings_per_watch() -> None:
    from backlight.session.trackers.wandb import _Run

    alerts: list[tuple[str, str, str]] = []
    user_run = SimpleNamespace(
        summary={"backlight/findings/spike": "warning: of before"},
        tags=None,
        define_metric=lambda *_, **__: None,
        alert=lambda title, text, level: alerts.append((title, text, level)),
    )
    sink = _Run(None, user_run, is_own=False)
    finding = Finding(
        rule="spike",
        severity=Severity.WARNING,
        title="a spike",
        detail="",
        subject=Subject(step=3),
        evidence=(),
        fix="",
        refuted_if="",
    )
    for _ in range(2):  # during the run, and at its end
        sink.findings([finding], 3)
    assert user_run.summary == {"backlight/findings/spike": "warning: of before\nwarning: a spike"}
    assert user_run.tags == ("backlight/spike",)
    assert alerts == [("backlight: spike", "- **warning** `spike`: a spike", "WARN")]
    sink.findings([replace(finding, rule="note", severity=Severity.INFO)], 3)
    _Run(None, user_run, is_own=True, alerts=False).findings([finding], 3)  # a stored run
    assert len(alerts) == 1


@pytest.mark.full
def test_wandb_uses_the_open_run_without_advancing_its_step(tmp_path: Path, offline: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own_run = offline.init(project="own_run", dir=str(tmp_path / "own_run"))
    with backlight.watch(model, optimizer, run=tmp_path / "run", every=1, trackers=["wandb"]) as watch:
        for step in range(5):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.log(accuracy=0.5)
            own_run.log({"own_run": step}, step=step)
    own_run.finish()
    assert not (tmp_path / "run" / "export").exists()
    *rows, _ = recorded(tmp_path / "own_run")
    assert [row["own_run"] for row in rows] == [0, 1, 2, 3, 4]
    recorded_values = [row for row in rows if "backlight/loss" in row]
    assert recorded_values
    assert recorded_values[-1]["backlight/step"] == 4
    assert not any("backlight/user/accuracy" in row for row in rows)


@pytest.mark.full
def test_wandb_without_credentials(tmp_path: Path, offline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.warns(
        RuntimeWarning, match="'wandb' is left out: TrackerError: no credentials of W&B: run wan"
    ):
        train(tmp_path / "run", "wandb")
    assert open_run(tmp_path / "run").status.value == "finished"


@pytest.mark.full
def test_wandb_does_not_wait_for_an_unreachable_server(
    tmp_path: Path, offline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from backlight.session.trackers import wandb as wandb_tracker

    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", 40 * "a")
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(wandb_tracker, "TIMEOUT_S", 2.0)
    with pytest.warns(
        RuntimeWarning, match="'wandb' is left out: CommError: "
    ):  # did not wait for the timeout
        train(tmp_path / "run", "wandb")
    assert open_run(tmp_path / "run").status.value == "finished"


def test_wandb_honours_the_timeout_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    from backlight.session.trackers.wandb import TIMEOUT_S, _timeouts

    for name in ("INIT", "FINISH"):
        monkeypatch.delenv(f"WANDB_{name}_TIMEOUT", raising=False)
    training, stored = (Tracked("run", tmp_path, live=live) for live in (True, False))
    assert _timeouts(wandb, training)["init_timeout"] == TIMEOUT_S
    assert set(_timeouts(wandb, stored)) == {"init_timeout"}
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "300")
    assert "init_timeout" not in _timeouts(wandb, training)
    assert wandb.Settings(**_timeouts(wandb, training)) is not None


# MLflow

QUIET = pytest.mark.filterwarnings(
    # MLflow 3.17 uses features that SQLAlchemy 2.1 deprecates.
    "ignore:The ``noload`` loader strategy is deprecated",
    "ignore::DeprecationWarning:mlflow",
    "ignore::FutureWarning:mlflow",
    "ignore::ResourceWarning",
)


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("DO_NOT_TRACK", "true")
    import mlflow as library

    yield library
    library.set_tracking_uri(None)


@pytest.mark.full
@QUIET
def test_mlflow_creates_its_own_run(tmp_path: Path, mlflow: Any) -> None:
    losses = train(tmp_path / "run", f"mlflow={tmp_path / 'store'}")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'store' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("backlight")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "run"
    assert run.info.status == "FINISHED"
    history = sorted(client.get_metric_history(run.info.run_id, "backlight/loss"), key=lambda m: m.step)
    assert [metric.step for metric in history] == [10 * i for i in range(STEPS)]
    np.testing.assert_allclose([metric.value for metric in history], losses)
    assert {"backlight/norm/0", "backlight/lr/0/0", "backlight/user/accuracy"} <= set(run.data.metrics)
    assert run.data.tags["backlight/findings/non_finite"].startswith("error: ")
    assert mlflow.active_run() is None


@pytest.mark.full
@QUIET
def test_mlflow_uses_the_open_run(tmp_path: Path, mlflow: Any) -> None:
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'own_run.db'}")
    experiment = mlflow.create_experiment("own_run", artifact_location=str(tmp_path / "artifacts"))
    with mlflow.start_run(experiment_id=experiment) as own_run:
        train(tmp_path / "run", "mlflow")
        assert mlflow.active_run().info.run_id == own_run.info.run_id
        mlflow.log_metric("own", 1.0)
    client = mlflow.MlflowClient()
    run = client.get_run(own_run.info.run_id)
    assert {"own", "backlight/loss"} <= set(run.data.metrics)
    assert "backlight/user/accuracy" not in run.data.metrics
    assert client.get_experiment_by_name("backlight") is None


@pytest.mark.full
@QUIET
def test_unreachable_mlflow_server_is_reported_quickly(
    tmp_path: Path, mlflow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from backlight.session.trackers import mlflow as mlflow_tracker

    train(tmp_path / "run", f"prometheus={tmp_path / 'run.prom'}")
    monkeypatch.setattr(mlflow_tracker, "ATTEMPTS", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "7")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES")  # set here: removed after the test
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"  # bound, but no server listens
        with pytest.raises(TrackerError, match=f"'mlflow={address}' failed: MlflowException: API request"):
            send(open_run(tmp_path / "run"), f"mlflow={address}")
    assert mlflow.environment_variables.MLFLOW_HTTP_REQUEST_MAX_RETRIES.get() == 1


def test_missing_tracker_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if re.match(r"tensorboard(\.|$)", name)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.warns(
        RuntimeWarning,
        match=r"'tensorboard' is left out: ModuleNotFoundError: .*; pip install 'backlight\[tensorboard\]'",
    ):
        train(tmp_path / "run", "tensorboard")
