"""Following a run: its state, what is read again, and what a page is sent."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from growing import Grow, Growing
from packed import unpack
from synthetic import Plan, finding

from backlight.analysis.live import followed
from backlight.records import Finding, RunStatus
from backlight.report import verdict
from backlight.report.live import follower
from backlight.report.live.follower import FollowedRun, Several, Standing
from backlight.report.panel import Drawn, Panel, in_order
from backlight.report.source import Source
from backlight.store.errors import RunFormatError
from backlight.store.read.run import Run, Scalar, open_run


def follow(path: Path, calls: list[Run] | None = None, cells: int | None = None) -> FollowedRun:
    def evaluate(run: Run) -> list[Finding]:
        if calls is not None:
            calls.append(run)
        return []

    def read(run: Run, findings: Sequence[Finding]) -> Source:
        return Source(run, findings, **({"cells": cells} if cells else {}))

    return FollowedRun(path, evaluate, read, open_run)


def content(followed: FollowedRun | Several, name: str, **options: Any) -> dict[str, Any]:
    sent = followed.panel(name, **options)
    assert sent is not None
    return json.loads(sent[1])


def figures(followed: FollowedRun) -> dict[str, str]:
    return {f["label"]: f["value"] for f in followed.head().get("verdict", {}).get("figures", ())}


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_run_state_from_empty_directory_to_end(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    view = follow(path)
    assert view.stand.word is Standing.READING
    view.look()
    assert view.stand.word is Standing.WAITING
    assert "no run began" in view.stand.detail
    path.rmdir()
    run = Growing(path)
    run.writer.flush()
    view.look()
    assert view.stand.word is Standing.WAITING
    assert "the run began" in view.stand.detail
    assert "verdict" not in view.head()  # it would report that nothing was measured
    run.steps(4)
    view.look()
    assert (view.stand.word, view.stand.detail) == (
        Standing.RUNNING,
        "The training runs; the last step is 3.",
    )
    assert not view.stand.over
    run.close()
    view.look()
    assert view.stand.word is Standing.FINISHED
    assert view.stand.over


def test_failed_run_reports_the_exception(grow: Grow) -> None:
    run = grow(2)
    run.writer.event(2, "exception", {"type": "ValueError", "message": "bad batch"})
    run.close(RunStatus.FAILED)
    view = follow(run.path)
    view.look()
    assert view.stand.word is Standing.FAILED
    assert view.stand.detail == "Failed with ValueError at step 2; the last step is 1."


@pytest.mark.slow
def test_killed_writer_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "run"
    child = os.fork()  # a dead process without the start-up time of a new interpreter
    if not child:
        Growing(path).steps(5)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    view = follow(path)
    view.look()
    assert view.stand.word is Standing.KILLED
    assert "ended without closing the run; the last step is 4" in view.stand.detail
    assert not view.stand.over  # it may be resumed


def test_unchanged_run_is_read_once(grow: Grow) -> None:
    run = grow(3)
    run.close()
    calls: list[Run] = []
    view = follow(run.path, calls)
    assert view.look()
    for _ in range(5):
        assert not view.look()
    assert (len(calls), view.version) == (1, 1)


@pytest.mark.slow
def test_nothing_is_read_without_a_client(grow: Grow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "IDLE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(follower, "POLL_INTERVAL_S", 0.01)
    run = grow(3)
    calls: list[Run] = []
    view = follow(run.path, calls)
    view.start()
    wait_for(lambda: bool(calls))
    time.sleep(0.5)
    amount = len(calls)
    run.steps(3)
    time.sleep(0.3)
    assert len(calls) == amount
    view.touch()
    wait_for(lambda: len(calls) > amount)
    view.close()
    assert not [thread for thread in threading.enumerate() if thread.name in {"follow run", "reduce run"}]


def test_unreadable_run_keeps_the_last_content(grow: Grow) -> None:
    run = grow(3)
    run.close()
    view = follow(run.path)
    view.look()
    (run.path / "manifest.json").write_text("{")
    view.look()
    assert view.stand.word is Standing.UNREADABLE
    assert "manifest.json" in view.stand.detail
    assert view.head()["run"]["name"] == "run"


def test_panel_is_sent_once_until_it_changes(grow: Grow) -> None:
    run = grow(30)
    view = follow(run.path)
    view.look()
    stamp, text = view.panel("total_norm")  # type: ignore[misc]  # there is one
    assert json.loads(text)["title"] == "Gradient norm"
    assert view.panel("total_norm", have=stamp) is None
    run.steps(5)
    view.look()
    other, text = view.panel("total_norm", have=stamp)  # type: ignore[misc]  # there is one
    assert other != stamp
    assert len(unpack(json.loads(text)["data"]["charts"][0]["steps"])) == 35
    named = {panel["name"] for panel in view.head()["panels"]}
    assert {"health", "total_norm", "parameters", "phases"} <= named
    with pytest.raises(KeyError):
        view.panel("nothing")


@pytest.mark.slow
def test_panel_size_does_not_grow_with_the_run(grow: Grow, monkeypatch: pytest.MonkeyPatch) -> None:
    """One column of the heat map is sent, with as many cells as a screen shows."""
    run = grow(0, plan=Plan(steps=1500, blocks=1))
    sizes = []
    for amount in (500, 1000):
        run.steps(amount)
        view = follow(run.path, cells=3000)
        view.look()
        panel = content(view, "parameters", column="ratio")
        data = panel["data"]
        assert [c["name"] for c in data["columns"] if c["high"]] == ["ratio"]
        assert data["columns"][0]["name"] == "rms"
        high = unpack(next(c for c in data["columns"] if c["high"])["high"])
        assert high.size <= 3000
        sizes.append(len(json.dumps(panel)))
    assert sizes[1] < 1.2 * sizes[0]


def test_expensive_reduction_is_deferred(grow: Grow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "REDUCTION_REST_FACTOR", 1e9)
    monkeypatch.setattr(follower, "QUICK_REDUCTION_S", -1.0)
    run = grow(10)
    view = follow(run.path)
    view.look()
    run.steps(5)
    assert view.look()
    assert figures(view)["steps recorded"] == "15"
    assert view.source is not None
    assert len(view.source.frames.buckets) == 10
    assert not view.catch_up()  # too soon
    monkeypatch.setattr(follower, "REDUCTION_REST_FACTOR", 0.0)
    assert view.catch_up()
    assert len(view.source.frames.buckets) == 15
    assert not view.catch_up()


def test_findings_are_sent_before_panels_are_read(grow: Grow) -> None:
    run = grow(5)
    headlines: list[tuple[int, str]] = []
    found: list[Finding] = []

    def gather(of: Run, findings: Sequence[Finding]) -> Source:
        if view.source is not None:
            headlines.append((view.version, view.head()["verdict"]["headline"]))
        return Source(of, findings)

    view = FollowedRun(run.path, lambda of: list(found), gather, open_run)
    view.look()
    run.steps(5, broken=2)
    found.append(finding(run.names[2], 9))
    view.look()
    assert headlines == [(2, found[0].title)]
    assert view.version == 3


@pytest.mark.slow
def test_zoomed_panel_has_the_recorded_values(grow: Grow) -> None:
    run = grow(300, plan=Plan(steps=300, blocks=1))
    view = follow(run.path, cells=48 * 15)
    view.look()
    whole = content(view, "parameters")["data"]
    assert (whole["exact"], whole["window"]) == (False, False)
    close = content(view, "parameters", between=(100, 139))["data"]
    assert (close["exact"], close["window"]) == (True, True)
    np.testing.assert_array_equal(unpack(close["first"]), np.arange(100, 140))
    recorded = open_run(run.path).frame("gradient", "rms").values[100:140].T
    np.testing.assert_array_equal(unpack(close["columns"][0]["high"]), recorded)
    nothing = content(view, "parameters", between=(900, 950))
    assert "missing" in nothing


@pytest.mark.slow
def test_several_runs_are_overlaid(tmp_path: Path) -> None:
    runs = [Growing(tmp_path / "one" / "run"), Growing(tmp_path / "two" / "run"), Growing(tmp_path / "third")]
    for amount, run in zip((10, 20), runs, strict=False):
        run.steps(amount)
    views = [follow(run.path) for run in runs]
    overlaid = Several(views)
    assert overlaid.head()["stand"]["word"] == "reading"
    for view in views:
        view.look()
    head = overlaid.head()
    assert head["stand"]["word"] == "running"
    assert [panel["name"] for panel in head["panels"]][:3] == ["runs", "loss", "total_norm"]
    rows = content(overlaid, "runs")["data"]["rows"]
    assert [row[:3] for row in rows] == [
        ["run", "running", "10"],
        ["run (2)", "running", "20"],
        ["third", "waiting", "0"],
    ]
    chart = content(overlaid, "loss")["data"]["charts"][0]
    assert [line["label"] for line in chart["lines"]] == ["run", "run (2)"]
    values = unpack(chart["lines"][1]["values"])
    np.testing.assert_allclose(values, 3.0 / (1 + 0.01 * np.arange(20)))
    before = head["news"]
    runs[0].steps(1)
    views[0].look()
    assert overlaid.version == before + 1
    for run in runs:
        run.close()
    for view in views:
        view.look()
    assert overlaid.head()["stand"] == {
        "word": "finished",
        "detail": "All of these runs ended.",
        "over": True,
    }


def test_directory_without_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(RunFormatError, match="there is no such folder"):
        followed([tmp_path / "nothing"])
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(RunFormatError, match="is not a backlight run"):
        followed([tmp_path])
    (tmp_path / "empty").mkdir()
    assert [run.name for run in followed([tmp_path / "empty"])] == ["empty"]
    assert not list((tmp_path / "empty").iterdir())


def test_failing_rule_and_panel_are_reported(grow: Grow, monkeypatch: pytest.MonkeyPatch) -> None:
    run = grow(3)

    def broken(of: Run) -> list[Finding]:
        raise ZeroDivisionError(f"in a rule about {of.name}")

    view = FollowedRun(run.path, broken, Source, open_run)
    view.look()
    assert view.stand.word is Standing.UNREADABLE
    assert view.stand.detail == "Reading it failed: ZeroDivisionError: in a rule about run"
    view = follow(run.path)
    monkeypatch.setattr(Source, "step_times", property(broken))
    monkeypatch.setattr(Source, "scalar_names", broken)
    view.look()
    panel = next(panel for panel in view.head()["panels"] if panel["name"] == "phases")
    assert panel["missing"].startswith("Panel 'phases' could not be drawn: TypeError")
    assert panel["kind"] == "failed"
    assert content(view, "total_norm")["kind"] == "lines"


@pytest.mark.slow
def test_failing_run_is_named_and_the_others_are_drawn(grow: Grow, monkeypatch: pytest.MonkeyPatch) -> None:
    views = [follow(grow(6, name).path) for name in ("one", "two")]
    for view in views:
        view.look()
    whole = Run.scalar

    def scalar(held: Run, name: str, *of: str, **more: Any) -> Scalar:
        if name == "loss" and held.path.name == "one":
            raise LookupError("no such rows")
        if name == "total_norm":
            raise ZeroDivisionError("norm")
        return whole(held, name, *of, **more)

    monkeypatch.setattr(Run, "scalar", scalar)
    overlaid = Several(views)
    names = [panel["name"] for panel in overlaid.head()["panels"]]
    assert {"runs", "loss", "total_norm", "times"} <= set(names)
    loss = content(overlaid, "loss")
    assert [line["label"] for line in loss["data"]["charts"][0]["lines"]] == ["two"]
    assert loss["remarks"] == ["Not drawn: one: LookupError: no such rows."]
    norm = content(overlaid, "total_norm")
    assert norm["kind"] == "failed"
    message = "one: ZeroDivisionError: norm; two: ZeroDivisionError: norm."
    assert norm["data"]["reason"] == f"Panel 'total_norm' could not be drawn: {message}"
    rows = content(overlaid, "runs")["data"]["rows"]
    assert rows[0][-1] == "could not be read: LookupError: no such rows"
    assert rows[1][2] == "6"


def drawing(name: str, render: Callable[[Source], Any], monitor: str = "") -> Panel:
    return Panel(name, f"Panel {name}", 5, (), render, monitor=monitor)


def failing(source: Source) -> Drawn:
    raise LookupError(f"no such column in {source.run.name}")


@pytest.mark.slow
def test_failing_panel_is_named_and_following_continues(grow: Grow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "POLL_INTERVAL_S", 0.01)
    known = in_order()
    wrong = [
        drawing("raises", failing),
        drawing("raises_unwatched", failing, monitor="spectra"),  # a monitor that did not watch
        drawing("returns_a_list", lambda source: []),
        drawing("draws_an_object", lambda source: Drawn("lines", {"values": object()})),
    ]
    monkeypatch.setattr(follower, "in_order", lambda: [*wrong, *known])
    run = grow(3)
    view = follow(run.path)
    view.start()
    for steps in ("3", "8"):
        wait_for(lambda steps=steps: figures(view).get("steps recorded") == steps, 30)
        panels = {panel["name"]: panel for panel in view.head()["panels"]}
        message = "Panel 'raises' could not be drawn: LookupError: no such column in run."
        assert panels["raises"]["missing"] == message
        assert panels["raises_unwatched"]["missing"] == message.replace("raises", "raises_unwatched")
        assert "returned list, not Drawn" in panels["returns_a_list"]["missing"]
        panel = content(view, "draws_an_object")
        assert panel["kind"] == panels["raises"]["kind"] == "failed"
        assert "TypeError" in panel["data"]["reason"]
        assert "missing" not in panels["total_norm"]
        assert message in [gap["reason"] for gap in view.head()["verdict"]["unmeasured"]]
        run.steps(5)
    assert view.stand.word is Standing.RUNNING
    view.close()


@pytest.mark.slow
def test_threads_survive_errors(grow: Grow, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("POLL_INTERVAL_S", 0.01),
        ("MAX_REST_S", 0.05),
        ("REDUCTION_REST_FACTOR", 0.0),
        ("QUICK_REDUCTION_S", -1.0),
    ):
        monkeypatch.setattr(follower, name, value)
    run = grow(3)
    broken = threading.Event()
    whole = follower._files

    def files(path: Path) -> Any:
        if broken.is_set():
            raise ZeroDivisionError("in the files")
        return whole(path)

    monkeypatch.setattr(follower, "_files", files)
    view = follow(run.path)
    view.start()

    wait_for(lambda: view.stand.word is Standing.RUNNING)
    broken.set()
    wait_for(lambda: view.stand.detail == "Following the run failed: ZeroDivisionError: in the files")
    version = view.version
    time.sleep(0.3)
    assert view.version == version  # reported once
    broken.clear()
    wait_for(lambda: view.stand.word is Standing.RUNNING)
    late = view._reduce

    def reducing(source: Source) -> None:
        raise KeyError("in the frames")

    view._reduce = reducing  # type: ignore[method-assign]  # like a column that is read late and fails
    run.steps(3)
    wait_for(lambda: "Reducing the run failed: KeyError" in view.stand.detail)
    view._reduce = late  # type: ignore[method-assign]  # it works again
    run.steps(3)
    wait_for(lambda: view.stand.word is Standing.RUNNING)
    wait_for(lambda: view.source is not None and len(view.source.frames.buckets) == 9)
    assert all(thread.is_alive() for thread in view._threads)
    view.close()


def test_failing_response_reports_the_error(grow: Grow, monkeypatch: pytest.MonkeyPatch) -> None:
    run = grow(3)
    run.close()
    view = follow(run.path)
    view.look()

    def outcome(source: Source) -> None:
        raise OSError("the disk went away")

    monkeypatch.setattr(verdict, "outcome", outcome)
    head = view.head()
    assert "run" not in head
    assert head["stand"] == {
        "word": "unreadable",
        "detail": "Showing it failed: OSError: the disk went away",
        "over": head["stand"]["over"],
    }
