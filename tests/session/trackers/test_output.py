"""Trackers: the data they receive, and isolation of the training from their errors."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import backlight
from backlight.monitor import StoredStep
from backlight.notifier import Notifier
from backlight.records import Finding, Layout, ParameterRecord, Placement
from backlight.session.settings import Settings
from backlight.session.trackers import output
from backlight.session.trackers.base import TRACKERS, Point, Tracked, Tracker, TrackerError
from backlight.session.trackers.metrics import MOST_GROUPS, Naming, groups_of, is_split, points_of, send
from backlight.store.read.run import open_run

MONITORS = ("health", "steptime")
"""Without stalls, whose watchdog process is irrelevant to trackers."""

Opening = Callable[[str, Tracked, Any], Any]


@dataclass
class RecordingSink:
    """A tracker sink that stores what it receives."""

    points: list[Point] = field(default_factory=list)
    found: list[Finding] = field(default_factory=list)
    closed: list[bool] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)

    def send(self, points: Sequence[Point]) -> None:
        self.points.extend(points)
        self.threads.add(threading.current_thread().name)

    def findings(self, findings: Sequence[Finding], step: int) -> None:
        self.found.extend(findings)

    def close(self, *, failed: bool) -> None:
        self.closed.append(failed)


@pytest.fixture
def register() -> Iterator[Callable[..., None]]:
    names = []

    def add(name: str, opening: Opening, active: Callable[[], Any] = lambda: None) -> None:
        TRACKERS.add(name, Tracker(name, opening, active))
        names.append(name)

    yield add
    for name in names:
        TRACKERS._entries.pop(name)


def train(
    run: Path, trackers: Sequence[str] = (), *, steps: int = 6, fail: bool = False, every: int = 1
) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"every": every, "monitors": MONITORS, "trackers": trackers}
    with backlight.watch(model, optimizer, run=run, **options) as watch:
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 4)).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            watch.log(step=1000 + step, accuracy=step / 10)
        if fail:
            raise KeyError("the user's own")
    return model


def test_points_are_sent_to_the_tracker(tmp_path: Path, register: Callable[..., None]) -> None:
    sink, opened = RecordingSink(), []

    def opening(target: str, run: Tracked, active: Any) -> RecordingSink:
        opened.append((target, run.path, run.live, active))
        return sink

    where = []
    register("recorder", opening, lambda: where.append(threading.current_thread()) or "the user's run")
    train(tmp_path / "run", ["recorder=there"])
    assert opened == [("there", tmp_path / "run", True, "the user's run")]
    assert where == [threading.main_thread()]
    assert sink.threads == {"backlight-recorder"}
    assert sink.closed == [False]
    assert [point.step for point in sink.points] == list(range(1000, 1006))
    run = open_run(tmp_path / "run")
    losses = run.scalar("loss").values
    assert [point.values["loss"] for point in sink.points] == losses.tolist()
    names = set(sink.points[0].values)
    assert {
        "total_norm",
        "lr/0/0",
        "clip/factor",
        "phase/backward",
        "norm/0",
        "norm/2",
        "user/accuracy",
    } <= names
    assert "user/step" not in names
    norms = run.frame("gradient", "norm")
    rows = [norms.names.index(name) for name in ("2.weight", "2.bias")]
    expected = np.sqrt((norms.values[:, rows] ** 2).sum(axis=1))
    np.testing.assert_allclose([point.values["norm/2"] for point in sink.points], expected, rtol=1e-12)
    (spread,) = sink.points[0].spreads.values()
    assert np.isfinite(spread).all()
    assert len(spread) == 4
    assert "ratio/2" in names
    assert not any(value.spreads for value in sink.points[1:4])  # updates are measured at every 4th step


@pytest.mark.slow
def test_loss_of_every_step_is_sent_recorded_or_not(tmp_path: Path, register: Callable[..., None]) -> None:
    sink = RecordingSink()
    register("recorder", lambda *_: sink)
    train(tmp_path / "run", ["recorder"], steps=60, every=50)
    run = open_run(tmp_path / "run")
    assert run.coverage().with_gradients < 10
    assert [point.values["loss"] for point in sink.points] == run.scalar("loss").values.tolist()
    assert len(sink.points) == 60
    assert sum("total_norm" in point.values for point in sink.points) == run.coverage().with_gradients


def test_fast_loop_sends_losses_of_some_steps_and_all_that_are_not_finite() -> None:
    feed: list[Point] = []
    of = output.TrackerOutput([], {})
    of._offset = 0
    of._feeds = [SimpleNamespace(take=feed.append)]  # type: ignore[list-item]
    for begin in (0, 1000):
        for step in range(begin, begin + 1000):
            of.on_step_scalars(step, {"loss": math.inf if step == 1555 else 1.0})
        of.on_flush()
    sent = [point.step for point in feed]
    assert sent[:1000] == list(range(1000))  # nothing is known of its speed
    assert sent[1000:] == sorted([*range(1000, 1990, 10), 1555])  # the last one is held


@pytest.mark.slow
def test_stored_run_gives_the_points_sent_live(tmp_path: Path, register: Callable[..., None]) -> None:
    live, stored = RecordingSink(), RecordingSink()
    register("live", lambda *_: live)
    register("stored", lambda *_: stored)
    train(tmp_path / "run", ["live"])
    sent = send(open_run(tmp_path / "run"), "stored")
    assert (sent.steps, sent.findings) == (6, len(stored.found))
    assert stored.closed == [False]
    for one, other in zip(live.points, stored.points, strict=True):
        assert one.step == other.step
        assert one.time == other.time
        assert dict(one.values) == pytest.approx(dict(other.values), rel=1e-12)
        assert set(one.spreads) == set(other.spreads)
        for name in one.spreads:
            np.testing.assert_allclose(one.spreads[name], other.spreads[name])


@pytest.mark.slow
def test_findings_and_final_status_are_sent(tmp_path: Path, register: Callable[..., None]) -> None:
    sink = RecordingSink()
    register("recorder", lambda *_: sink)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(KeyError, match="own"):
        with backlight.watch(
            model, optimizer, run=tmp_path / "run", every=1, monitors=MONITORS, trackers="recorder"
        ):
            for _ in range(3):
                model(torch.full((2, 2), float("nan"))).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            raise KeyError("own")
    assert "non_finite" in {finding.rule for finding in sink.found}
    assert sink.closed == [True]
    assert all(np.isnan(point.values["loss"]) for point in sink.points)


@pytest.mark.slow
def test_finding_is_sent_during_training(tmp_path: Path, register: Callable[..., None]) -> None:
    live: list[tuple[str, int]] = []
    reported = threading.Event()

    class Live(RecordingSink):
        def findings(self, findings: Sequence[Finding], step: int) -> None:
            live.extend((finding.rule, step) for finding in findings)
            reported.set()
            self.found = list(findings)

    sink = Live()
    register("recorder", lambda *_: sink)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with backlight.watch(
        model, optimizer, run=tmp_path / "run", every=1, monitors=MONITORS, trackers="recorder"
    ):
        for step in range(5):
            model(torch.full((2, 2), float("nan") if step == 2 else 1.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert reported.wait(30), "nothing was sent before the end"
        rule, step = live[0]
        assert (rule, 2 <= step <= 4) == ("non_finite", True)
    assert [finding.rule for finding in sink.found].count("non_finite") == 1


class Raises(RecordingSink):
    """A tracker sink that raises in one method."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__()
        self.where, self.error = where, error

    def _at(self, where: str) -> None:
        if where == self.where:
            raise self.error

    def send(self, points: Sequence[Point]) -> None:
        self._at("send")

    def findings(self, findings: Sequence[Finding], step: int) -> None:
        self._at("findings")

    def close(self, *, failed: bool) -> None:
        self._at("close")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("active", ValueError("no")),
        ("open", TrackerError("no credentials\nmore")),
        ("open", SystemExit(3)),
        ("send", OSError("gone")),
        ("findings", KeyError("x")),
        ("close", RuntimeError("late")),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_raising_tracker_is_reported_once_and_disabled(
    tmp_path: Path, register: Callable[..., None], where: str, error: BaseException
) -> None:
    sink, broken = RecordingSink(), Raises(where, error)

    def opening(*_: Any) -> RecordingSink:
        broken._at("open")
        return broken

    register("broken", opening, lambda: broken._at("active"))
    register("recorder", lambda *_: sink)
    alone = train(tmp_path / "alone")
    with pytest.warns(RuntimeWarning, match="tracker 'broken' is left out") as caught:
        model = train(tmp_path / "run", ["broken", "recorder"])
    assert len([w for w in caught if "broken" in str(w.message)]) == 1
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other)
    assert len(sink.points) == 6
    run = open_run(tmp_path / "run")
    assert run.status.value == "finished"
    (event,) = [e for e in run.events("unmeasured") if e.payload["what"] == "tracker broken"]
    assert type(error).__name__ in event.payload["reason"]


@pytest.mark.slow
def test_warnings_as_errors_do_not_end_the_training(
    tmp_path: Path, register: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    register("broken", lambda *_: Raises("send", OSError("gone")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(tmp_path / "run", ["broken"])
    assert "'broken' is left out: OSError: gone" in capfd.readouterr().err


@pytest.mark.slow
def test_hanging_tracker_is_abandoned_after_a_timeout(
    tmp_path: Path, register: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "END_TIMEOUT_S", 0.2)
    monkeypatch.setattr(output, "MAX_QUEUED_POINTS", 4)
    monkeypatch.setattr(output, "DELIVERY_PERIOD_S", 0.01)
    free = threading.Event()
    register("stuck", lambda *_: free.wait(60) and RecordingSink())
    try:
        with pytest.warns(
            RuntimeWarning, match=r"tracker 'stuck' did not come to an end .* 4 steps were not"
        ):
            train(tmp_path / "run", ["stuck"], steps=9)
    finally:
        free.set()
    assert open_run(tmp_path / "run").status.value == "finished"


@pytest.mark.slow
def test_slow_tracker_drops_the_oldest_points_and_warns(
    tmp_path: Path, register: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "MAX_QUEUED_POINTS", 4)
    sink, free = RecordingSink(), threading.Event()
    stopped = output.Feed.ask_to_stop

    def ask(feed: Any, *, failed: bool) -> None:
        stopped(feed, failed=failed)
        free.set()

    monkeypatch.setattr(output.Feed, "ask_to_stop", ask)
    register("slow", lambda *_: free.wait(60) and sink)
    with pytest.warns(RuntimeWarning, match="'slow' was too slow: 5 steps were not sent"):
        train(tmp_path / "run", ["slow"], steps=9)
    assert [point.step for point in sink.points] == [1005, 1006, 1007, 1008]


def test_unknown_tracker_is_rejected_before_any_write(tmp_path: Path) -> None:
    expected = "^trackers: no tracker is called 'tensorbord'; did you mean 'tensorboard'"
    with pytest.raises(ValueError, match=expected):
        backlight.watch(run=tmp_path / "run", trackers=["tensorbord=x"])
    assert not (tmp_path / "run").exists()


def test_only_the_first_rank_has_trackers(register: Callable[..., None]) -> None:
    opened: list[int] = []
    register("recorder", lambda *_: RecordingSink(), lambda: opened.append(1))
    settings = Settings.of({"trackers": ["recorder"]})
    for rank in (1, 0):
        run: Any = SimpleNamespace(
            path=Path("run"),
            rank=rank,
            writer=SimpleNamespace(step_offset=0),
            notifier=Notifier(Path("run")),
            clock=SimpleNamespace(done=1),
        )
        several = output.TrackerOutput(settings.trackers, settings.groups)
        several.attach(run)
        several.on_step_start(0)
        several.on_step_stored(StoredStep(0, (), {"loss": 1.0}, {}))
        several.on_run_end([], failed=False)
        assert len(opened) == 1 - rank


def test_shard_is_not_sent_as_the_whole_parameter() -> None:
    whole = ParameterRecord("a.weight", (4,), "float32", "cpu", 4)
    part = ParameterRecord("a.bias", (4,), "float32", "cpu", 2, placement=Placement(layout=Layout.SHARD))
    assert not is_split([whole])
    assert is_split([whole, part])
    norm, measured = np.ones(2), np.ones(2, dtype=bool)
    split, joined = (Naming(["a.weight", "a.bias"], {}, split=split) for split in (True, False))
    assert split.scalars({"total_norm": 1.0, "loss": 2.0}) == {"loss": 2.0}
    assert split.gradient(norm, measured) == {}
    assert split.update(norm, norm, measured) == ({}, {})
    assert joined.gradient(norm, measured) == {"norm/a": pytest.approx(np.sqrt(2))}


def test_groups() -> None:
    names = ["net.0.weight", "net.0.bias", "net.1.weight"]
    assert {g: r.tolist() for g, r in groups_of(names, {}).items()} == {"net.0": [0, 1], "net.1": [2]}
    assert {g: r.tolist() for g, r in groups_of(names, {"all": "*", "no": "x"}).items()} == {"all": [0, 1, 2]}
    assert groups_of([f"m{i}.weight" for i in range(MOST_GROUPS + 1)], {}) == {}
    assert groups_of([], {}) == {}


def test_unmeasured_values_are_not_sent() -> None:
    naming = Naming(["a.w", "b.w"], {})
    measured = np.array([True, False])
    assert naming.gradient(np.array([3.0, 0.0]), measured) == {"norm/a": 3.0}
    values, spreads = naming.update(np.array([1.0, 0.0]), np.array([2.0, 0.0]), measured)
    assert values == {"ratio/a": 0.5}
    assert spreads["update_ratio"].tolist() == [0.5]


@pytest.mark.slow
def test_failing_tracker_is_named_when_sending_a_stored_run(
    tmp_path: Path, register: Callable[..., None]
) -> None:
    train(tmp_path / "run")
    register("broken", lambda *_: Raises("send", OSError("gone")))
    with pytest.raises(TrackerError, match="the tracker 'broken=x' failed: OSError: gone"):
        send(open_run(tmp_path / "run"), "broken=x")
    assert [point.step for point in points_of(open_run(tmp_path / "run"))] == list(range(1000, 1006))
