"""A run that is followed: what is said of it, what is read again, and what a page is sent."""

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
from growing import Growing
from packed import unpack
from synthetic import Plan, finding

from backlight.analysis.live import followed
from backlight.records import Finding, RunStatus
from backlight.report import verdict
from backlight.report.live import follower
from backlight.report.live.follower import Followed
from backlight.report.live.overlay import Several
from backlight.report.live.run_state import Standing
from backlight.report.panel import Drawn, Panel, in_order
from backlight.report.source import Source
from backlight.store.errors import RunFormatError
from backlight.store.read.run import Run, Scalar, open_run


def none(run: Run) -> list[Finding]:
    return []


def follow(path: Path, calls: list[Run] | None = None) -> Followed:
    def judge(run: Run) -> list[Finding]:
        if calls is not None:
            calls.append(run)
        return []

    return Followed(path, judge, Source, open_run)


def test_run_state_from_empty_directory_to_end(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    it = follow(path)
    assert it.stand.word is Standing.READING
    it.look()
    assert it.stand.word is Standing.WAITING
    assert "no run began" in it.stand.detail
    path.rmdir()
    run = Growing(path)
    run.writer.flush()
    it.look()
    assert it.stand.word is Standing.WAITING
    assert "the run began" in it.stand.detail
    assert "verdict" not in it.head()  # which would say that nothing was measured
    run.steps(4)
    it.look()
    assert (it.stand.word, it.stand.detail) == (
        Standing.LIVE,
        "The training runs; the last recorded step is 3.",
    )
    assert not it.stand.over
    run.close()
    it.look()
    assert it.stand.word is Standing.ENDED
    assert it.stand.over


def test_failed_run_reports_the_exception(tmp_path: Path) -> None:
    run = Growing(tmp_path / "run")
    run.steps(2)
    run.close(RunStatus.FAILED)
    it = follow(run.path)
    it.look()
    assert it.stand.word is Standing.ENDED
    assert "exception" in it.stand.detail


def test_killed_writer_is_stale(tmp_path: Path) -> None:
    path = tmp_path / "run"
    child = os.fork()  # a process that is gone, without the seconds of a fresh interpreter
    if not child:
        Growing(path).steps(5)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    it = follow(path)
    it.look()
    assert it.stand.word is Standing.STALE
    assert "ended without closing the run; the last recorded step is 4" in it.stand.detail
    assert not it.stand.over  # it may be taken up again


def test_unchanged_run_is_read_once(tmp_path: Path) -> None:
    run = Growing(tmp_path / "run")
    run.steps(3)
    run.close()
    calls: list[Run] = []
    it = follow(run.path, calls)
    assert it.look()
    for _ in range(5):
        assert not it.look()
    assert (len(calls), it.version) == (1, 1)


def test_nothing_is_read_without_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "PATIENCE", 0.2)
    monkeypatch.setattr(follower, "PAUSE", 0.01)
    run = Growing(tmp_path / "run")
    run.steps(3)
    calls: list[Run] = []
    it = follow(run.path, calls)
    it.start()
    until = time.monotonic() + 10
    while not calls and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.5)
    amount = len(calls)
    run.steps(3)
    time.sleep(0.3)
    assert len(calls) == amount
    it.touch()
    while len(calls) == amount and time.monotonic() < until:
        time.sleep(0.01)
    assert len(calls) > amount
    it.close()
    assert not [thread for thread in threading.enumerate() if thread.name in {"follow run", "reduce run"}]
    run.close()


def test_unreadable_run_keeps_the_last_content(tmp_path: Path) -> None:
    run = Growing(tmp_path / "run")
    run.steps(3)
    run.close()
    it = follow(run.path)
    it.look()
    (run.path / "manifest.json").write_text("{")
    it.look()
    assert it.stand.word is Standing.UNREADABLE
    assert "manifest.json" in it.stand.detail
    assert it.head()["run"]["name"] == "run"


def test_panel_is_sent_once_until_it_changes(tmp_path: Path) -> None:
    run = Growing(tmp_path / "run")
    run.steps(30)
    it = follow(run.path)
    it.look()
    stamp, text = it.panel("total_norm")  # type: ignore[misc]  # there is one
    assert json.loads(text)["title"] == "Gradient norm and clipping"
    assert it.panel("total_norm", have=stamp) is None
    run.steps(5)
    it.look()
    other, text = it.panel("total_norm", have=stamp)  # type: ignore[misc]  # there is one
    assert other != stamp
    assert len(unpack(json.loads(text)["data"]["charts"][0]["steps"])) == 35
    named = {panel["name"] for panel in it.head()["panels"]}
    assert {"health", "total_norm", "parameters", "phases"} <= named
    with pytest.raises(KeyError):
        it.panel("nothing")
    run.close()


def test_panel_size_does_not_grow_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the heat map one column is sent, with as many cells as a screen can show."""
    run = Growing(tmp_path / "run", Plan(steps=1500, blocks=1))
    sizes = []
    for amount in (500, 1000):
        run.steps(amount)
        it = Followed(run.path, none, lambda of, found: Source(of, found, cells=3000), open_run)
        it.look()
        _, text = it.panel("parameters", column="ratio")  # type: ignore[misc]  # there is one
        data = json.loads(text)["data"]
        assert [c["name"] for c in data["columns"] if c["high"]] == ["ratio"]
        assert data["columns"][0]["name"] == "rms"
        high = unpack(next(c for c in data["columns"] if c["high"])["high"])
        assert high.size <= 3000
        sizes.append(len(text))
    assert sizes[1] < 1.2 * sizes[0]
    run.close()


def test_expensive_reduction_is_deferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "PACE", 1e9)
    monkeypatch.setattr(follower, "QUICK", -1.0)
    run = Growing(tmp_path / "run")
    run.steps(10)
    it = follow(run.path)
    it.look()
    run.steps(5)
    assert it.look()
    figures = {f["label"]: f["value"] for f in it.head()["verdict"]["figures"]}
    assert figures["steps recorded"] == "15"
    assert it.source is not None
    assert len(it.source.frames.buckets) == 10
    assert not it.catch_up()  # too soon
    monkeypatch.setattr(follower, "PACE", 0.0)
    assert it.catch_up()
    assert len(it.source.frames.buckets) == 15
    assert not it.catch_up()
    run.close()


def test_findings_are_sent_before_panels_are_read(tmp_path: Path) -> None:
    run = Growing(tmp_path / "run")
    run.steps(5)
    told: list[tuple[int, str]] = []
    found: list[Finding] = []

    def gather(of: Run, findings: Sequence[Finding]) -> Source:
        if it.source is not None:
            told.append((it.version, it.head()["verdict"]["headline"]))
        return Source(of, findings)

    it = Followed(run.path, lambda of: list(found), gather, open_run)
    it.look()
    run.steps(5, broken=2)
    found.append(finding(run.names[2], 9))
    it.look()
    assert told == [(2, "1 error")]
    assert it.version == 3
    run.close()


def test_zoomed_panel_has_the_recorded_values(tmp_path: Path) -> None:
    run = Growing(tmp_path / "run", Plan(steps=300, blocks=1))
    run.steps(300)
    it = Followed(run.path, none, lambda of, found: Source(of, found, cells=48 * 15), open_run)
    it.look()
    whole = json.loads(it.panel("parameters")[1])["data"]  # type: ignore[index]  # there is one
    assert (whole["exact"], whole["window"]) == (False, False)
    close = json.loads(it.panel("parameters", between=(100, 139))[1])["data"]  # type: ignore[index]  # there is one
    assert (close["exact"], close["window"]) == (True, True)
    np.testing.assert_array_equal(unpack(close["first"]), np.arange(100, 140))
    recorded = open_run(run.path).frame("gradient", "rms").values[100:140].T
    np.testing.assert_array_equal(unpack(close["columns"][0]["high"]), recorded)
    nothing = json.loads(it.panel("parameters", between=(900, 950))[1])  # type: ignore[index]  # there is one
    assert "missing" in nothing
    run.close()


def test_several_runs_are_overlaid(tmp_path: Path) -> None:
    runs = [Growing(tmp_path / "one" / "run"), Growing(tmp_path / "two" / "run"), Growing(tmp_path / "third")]
    for amount, run in zip((10, 20), runs, strict=False):
        run.steps(amount)
    its = [follow(run.path) for run in runs]
    over = Several(its)
    assert over.head()["stand"]["word"] == "reading"
    for it in its:
        it.look()
    head = over.head()
    assert head["stand"]["word"] == "live"
    assert [panel["name"] for panel in head["panels"]][:3] == ["runs", "loss", "total_norm"]
    rows = json.loads(over.panel("runs")[1])["data"]["rows"]  # type: ignore[index]  # there is one
    assert [row[:3] for row in rows] == [
        ["run", "live", "10"],
        ["run (2)", "live", "20"],
        ["third", "waiting", "0"],
    ]
    chart = json.loads(over.panel("loss")[1])["data"]["charts"][0]  # type: ignore[index]  # there is one
    assert [line["label"] for line in chart["lines"]] == ["run", "run (2)"]
    values = unpack(chart["lines"][1]["values"])
    np.testing.assert_allclose(values, 3.0 / (1 + 0.01 * np.arange(20)))
    before = head["news"]
    runs[0].steps(1)
    its[0].look()
    assert over.version == before + 1
    for run in runs:
        run.close()
    for it in its:
        it.look()
    assert over.head()["stand"] == {"word": "ended", "detail": "All of these runs ended.", "over": True}


def test_directory_without_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(RunFormatError, match="there is no such folder"):
        followed([tmp_path / "nothing"])
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(RunFormatError, match="is not a backlight run"):
        followed([tmp_path])
    (tmp_path / "empty").mkdir()
    assert [run.name for run in followed([tmp_path / "empty"])] == ["empty"]
    assert not list((tmp_path / "empty").iterdir())


def test_failing_rule_and_panel_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Growing(tmp_path / "run")
    run.steps(3)

    def broken(of: Run) -> list[Finding]:
        raise ZeroDivisionError(f"in a rule about {of.name}")

    it = Followed(run.path, broken, Source, open_run)
    it.look()
    assert it.stand.word is Standing.UNREADABLE
    assert it.stand.detail == "Reading it failed: ZeroDivisionError: in a rule about run"
    it = follow(run.path)
    monkeypatch.setattr(Source, "step_times", property(broken))
    monkeypatch.setattr(Source, "scalar_names", broken)
    it.look()
    panel = next(panel for panel in it.head()["panels"] if panel["name"] == "phases")
    assert panel["missing"].startswith("Panel 'phases' could not be drawn: TypeError")
    assert panel["kind"] == "failed"
    assert json.loads(it.panel("total_norm")[1])["kind"] == "lines"  # type: ignore[index]  # there is one
    run.close()


def test_failing_run_is_named_and_the_others_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    its = []
    for name in ("one", "two"):
        run = Growing(tmp_path / name)
        run.steps(6)
        run.close()
        its.append(follow(run.path))
        its[-1].look()
    whole = Source.scalar

    def scalar(held: Source, name: str, **more: Any) -> Scalar:
        if name == "loss" and held.run.path.name == "one":
            raise LookupError("no such rows")
        if name == "total_norm":
            raise ZeroDivisionError("norm")
        return whole(held, name, **more)

    monkeypatch.setattr(Source, "scalar", scalar)
    over = Several(its)
    names = [panel["name"] for panel in over.head()["panels"]]
    assert {"runs", "loss", "total_norm", "times"} <= set(names)
    loss = json.loads(over.panel("loss")[1])  # type: ignore[index]  # there is one
    assert [line["label"] for line in loss["data"]["charts"][0]["lines"]] == ["two"]
    assert loss["remarks"] == ["Not drawn: one: LookupError: no such rows."]
    norm = json.loads(over.panel("total_norm")[1])  # type: ignore[index]  # there is one
    assert norm["kind"] == "failed"
    said = "one: ZeroDivisionError: norm; two: ZeroDivisionError: norm."
    assert norm["data"]["reason"] == f"Panel 'total_norm' could not be drawn: {said}"
    rows = json.loads(over.panel("runs")[1])["data"]["rows"]  # type: ignore[index]  # there is one
    assert rows[0][-1] == "could not be read: LookupError: no such rows"
    assert rows[1][2] == "6"


def drawing(name: str, render: Callable[[Source], Any], monitor: str = "") -> Panel:
    return Panel(name, f"Panel {name}", 5, (), render, monitor=monitor)


def failing(source: Source) -> Drawn:
    raise LookupError(f"no such column in {source.run.name}")


def test_failing_panel_is_named_and_following_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "PAUSE", 0.01)
    known = in_order()
    wrong = [
        drawing("raises", failing),
        drawing("raises_elsewhere", failing, monitor="spectra"),  # a monitor that did not watch
        drawing("returns_a_list", lambda source: []),
        drawing("draws_an_object", lambda source: Drawn("lines", {"values": object()})),
    ]
    monkeypatch.setattr(follower, "in_order", lambda: [*wrong, *known])
    run = Growing(tmp_path / "run")
    run.steps(3)
    it = follow(run.path)
    it.start()
    until = time.monotonic() + 30
    for steps in ("3", "8"):
        while time.monotonic() < until:
            figures = {f["label"]: f["value"] for f in it.head().get("verdict", {}).get("figures", ())}
            if figures.get("steps recorded") == steps:
                break
            time.sleep(0.02)
        assert figures["steps recorded"] == steps
        panels = {panel["name"]: panel for panel in it.head()["panels"]}
        said = "Panel 'raises' could not be drawn: LookupError: no such column in run."
        assert panels["raises"]["missing"] == said
        assert panels["raises_elsewhere"]["missing"] == said.replace("raises", "raises_elsewhere")
        assert "returned list, not Drawn" in panels["returns_a_list"]["missing"]
        _, text = it.panel("draws_an_object") or ("", "{}")
        content = json.loads(text)
        assert content["kind"] == panels["raises"]["kind"] == "failed"
        assert "TypeError" in content["data"]["reason"]
        assert "missing" not in panels["total_norm"]
        assert said in [gap["reason"] for gap in it.head()["verdict"]["unmeasured"]]
        run.steps(5)
    assert it.stand.word is Standing.LIVE
    it.close()
    run.close()


def test_threads_survive_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PAUSE", 0.01), ("LONGEST_REST", 0.05), ("PACE", 0.0), ("QUICK", -1.0)):
        monkeypatch.setattr(follower, name, value)
    run = Growing(tmp_path / "run")
    run.steps(3)
    broken = threading.Event()
    whole = follower._files

    def files(path: Path) -> Any:
        if broken.is_set():
            raise ZeroDivisionError("in the files")
        return whole(path)

    monkeypatch.setattr(follower, "_files", files)
    it = follow(run.path)
    it.start()

    def comes(wanted: Callable[[], bool]) -> None:
        until = time.monotonic() + 20
        while not wanted():
            assert time.monotonic() < until, it.stand
            time.sleep(0.01)

    comes(lambda: it.stand.word is Standing.LIVE)
    broken.set()
    comes(lambda: it.stand.detail == "Following the run failed: ZeroDivisionError: in the files")
    version = it.version
    time.sleep(0.3)
    assert it.version == version  # said once
    broken.clear()
    comes(lambda: it.stand.word is Standing.LIVE)
    late = it._reduce

    def reducing(source: Source) -> None:
        raise KeyError("in the frames")

    it._reduce = reducing  # type: ignore[method-assign]  # as a column would fail that is read late
    run.steps(3)
    comes(lambda: "Reducing the run failed: KeyError" in it.stand.detail)
    it._reduce = late  # type: ignore[method-assign]  # it is whole again
    run.steps(3)
    comes(lambda: it.stand.word is Standing.LIVE)
    comes(lambda: it.source is not None and len(it.source.frames.buckets) == 9)
    assert all(thread.is_alive() for thread in it._threads)
    it.close()
    run.close()


def test_failing_response_reports_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Growing(tmp_path / "run")
    run.steps(3)
    run.close()
    it = follow(run.path)
    it.look()

    def outcome(source: Source) -> None:
        raise OSError("the disk went away")

    monkeypatch.setattr(verdict, "outcome", outcome)
    told = it.head()
    assert "run" not in told
    assert told["stand"] == {
        "word": "unreadable",
        "detail": "Showing it failed: OSError: the disk went away",
        "over": told["stand"]["over"],
    }
