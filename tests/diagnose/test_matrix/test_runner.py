"""A whole test matrix over processes that end, hang, spin, crawl and fail: evaluated, resumed, rendered."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from backlight.diagnose.test_matrix.evaluation import Effect, Status
from backlight.diagnose.test_matrix.plan import PlanError
from backlight.diagnose.test_matrix.report import (
    MatrixDirectoryError,
    MatrixReport,
    answer,
    is_matrix,
    read_report,
    write_bundle,
    write_report,
)
from backlight.diagnose.test_matrix.runner import execute, prepare
from backlight.launch.subprocess import mark_of
from backlight.processes import Process, read_process, read_process_table
from backlight.records import DiagnosisKind
from observed_processes import wait_until

Writer = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]

alone = pytest.mark.alone

PLAN = """
time_limit = 6
name = 'a <b>matrix</b>'
[base]
command = ["job.py"]
watch = false
environment = { HUB_TOKEN = "sesame", PLAIN = "x" }
progress = 'step (\\d+)/'
success = '^finished'
[factors.job]
ends = {}
fails = { arguments = ["fail"] }
waits = { arguments = ["wait"] }
spins = { arguments = ["spin"] }
crawls = { arguments = ["crawl"] }
shell = { command = ["sh", "-c", "exit 0"] }
[factors.nothing]
unset = {}
set = { environment = { NOTHING_READS_THIS = "1" } }
[tree.start]
ask = "Does waiting matter?"
compare = "job=waits"
on = { causes = "it-does", none = "it-does-not" }
[tree.it-does]
conclusion = "the wait"
actions = [{ do = "do not wait", at = "job.py:7" }]
[tree.it-does-not]
conclusion = "something else"
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, script: str) -> tuple[Path, MatrixReport]:
    folder = tmp_path_factory.mktemp("matrix")
    (folder / "job.py").write_text(script)
    (folder / "plan.toml").write_text(PLAN)
    return folder, execute(prepare(folder / "plan.toml"), folder / "out")


@alone
def test_every_case_has_its_verdict(done: tuple[Path, MatrixReport]) -> None:
    _, report = done
    verdicts = {one.case.name: one.evaluation.verdict for one in report.cases}
    assert verdicts == {
        "base": DiagnosisKind.PASS,
        "job=fails": DiagnosisKind.CRASH,
        "job=waits": DiagnosisKind.BLOCKED,
        "job=spins": DiagnosisKind.SPIN,
        "job=crawls": DiagnosisKind.SLOW,
        "nothing=set": DiagnosisKind.PASS,
        "job=shell": DiagnosisKind.UNKNOWN,  # it exits with 0 and does not print what the plan calls success
    }
    lines = {one.case.name: one.evaluation.line.rpartition("/")[2] for one in report.cases}
    assert lines["job=waits"] == "job.py:7"
    assert lines["job=spins"] == "job.py:10"
    assert lines["job=fails"] == "job.py:18"


@alone
def test_no_process_is_left(done: tuple[Path, MatrixReport]) -> None:
    folder, report = done
    marks = {json.loads(start.read_text())["mark"] for start in folder.glob("out/cases/*/*/start.json")}
    assert len(marks) == len(report.cases)
    assert not [pid for pid in read_process_table() if mark_of(pid) in marks]
    ended = {one.case.name: one.observation.ended_by for one in report.cases}
    assert ended["base"] == ()
    assert ended["job=waits"][0].startswith("SIGTERM to ")


@alone
def test_evidence_was_collected_before_the_end(done: tuple[Path, MatrixReport]) -> None:
    folder, report = done
    waits = next(one for one in report.cases if one.case.name == "job=waits")
    evidence = (folder / "out" / waits.attempt / "evidence.txt").read_text()
    # The process was alive when it was sampled: its main thread sleeps.
    assert " S " in evidence
    assert "job.py:7" in evidence


@alone
def test_cases_are_compared_with_their_controls(done: tuple[Path, MatrixReport]) -> None:
    _, report = done
    said = {c.case: c for c in report.comparisons}
    causes = dict.fromkeys(("job=fails", "job=waits", "job=spins", "job=crawls"), "causes")
    assert {name: c.outcome for name, c in said.items()} == causes | {"job=shell": "", "nothing=set": ""}
    assert said["job=waits"].effect is Effect.OBSERVED
    assert said["job=waits"].factor == "job"
    assert said["nothing=set"].effect is Effect.NONE
    assert said["nothing=set"].why == "the factor had no effect that shows in the outputs"


@alone
def test_the_tree_is_walked_and_actions_are_ordered(done: tuple[Path, MatrixReport]) -> None:
    _, report = done
    assert {b.name: b.status for b in report.branches} == {
        "start": Status.SUPPORTED, "it-does": Status.SUPPORTED, "it-does-not": Status.REFUTED,
    }  # fmt: skip
    assert report.headline == "the wait"
    first, *others = next(t for t in answer(report).tables if t.title == "What to do, in this order").rows
    assert first[:3] == ("do not wait", "job.py:7", "the wait")
    assert first[3].startswith("backlight test-matrix ")
    _, at, why, verify = next(row for row in others if row[0] == "find out what should end this wait")
    assert at.endswith("job.py:7")
    assert why.startswith("job=waits: BLOCKED")
    assert verify.endswith("--again job=waits")


@alone
def test_the_report_is_read_back_and_rendered(done: tuple[Path, MatrixReport]) -> None:
    folder, report = done
    out = folder / "out"
    assert is_matrix(out)
    assert not is_matrix(folder)
    assert read_report(out) == report
    text = write_report(out, folder / "ticket.md").read_text()
    wanted = ("# a &lt;b&gt;matrix", "What to do, in this order", "not observable", "job.py:7", "BLOCKED")
    for part in wanted:
        assert part in text, part
    stated = next(t for t in answer(report).tables if t.title == "Evidence").rows
    files = [name for _, what, text in stated if what == "files" for name in text.split(", ")]
    assert len(files) >= 2 * len(report.cases)
    for name in files:
        assert (out / name).exists(), name
    html = write_report(out, folder / "page.html").read_text()
    assert "default-src 'none'" in html
    assert "<b>matrix" not in html
    with pytest.raises(ValueError, match=r"report.txt: expected a file that ends in .html or .md"):
        write_report(out, folder / "report.txt")


@alone
def test_secrets_are_hidden(done: tuple[Path, MatrixReport]) -> None:
    folder, report = done
    assert report.cases[0].case.environment == {"HUB_TOKEN": "<redacted>", "PLAIN": "x"}
    files = [p for p in (folder / "out").rglob("*") if p.is_file() and p.name != "plan.toml"]
    assert files
    assert not any("sesame" in path.read_text(errors="replace") for path in files)


@alone
def test_everything_goes_into_one_archive(done: tuple[Path, MatrixReport], tmp_path: Path) -> None:
    out = done[0] / "out"
    write_report(out, out / "report.html")
    with tarfile.open(write_bundle(out, tmp_path / "all.tar.gz")) as tar:
        names = set(tar.getnames())
    with zipfile.ZipFile(write_bundle(out, tmp_path / "all.zip")) as archive:
        assert set(archive.namelist()) == names
        assert archive.testzip() is None
    assert {"all/test-matrix.json", "all/plan.toml", "all/report.html"} <= names
    assert "all/cases/job=waits/000/evidence.txt" in names
    assert not [name for name in names if name.endswith((".lock", ".tmp"))]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["all.tar.gz", "all.zip"]
    with pytest.raises(ValueError, match=r"all.rar: expected a name that ends in .tar.gz, .tgz, .zip"):
        write_bundle(out, tmp_path / "all.rar")


TWO = """
[factors.job]
ends = {}
fails = { arguments = ["fail"] }
[cases.a]
[cases.b]
control = "a"
levels = { job = "fails" }
"""


def test_a_case_with_a_result_does_not_run_again(folder: Path, plan: Writer) -> None:
    path = plan(TWO)
    started: list[str] = []

    def run(**options: object) -> MatrixReport:
        started.clear()
        return execute(
            prepare(path), folder / "out", on_start=lambda case: started.append(case.name), **options
        )

    run()
    assert started == ["a", "b"]
    run()
    assert started == []
    report = run(again=["b"])
    assert started == ["b"]
    assert [case.attempt for case in report.cases] == ["cases/a/000", "cases/b/001"]
    # A script that changed makes every earlier result a result of something else.
    (folder / "job.py").write_text((folder / "job.py").read_text() + "# changed\n")
    run()
    assert started == ["a", "b"]
    # An attempt that was cut short has no result, and the next one does not touch it.
    (folder / "out/cases/a/001/result.json").write_text('{"seconds": 2, "lim')
    report = run()
    assert started == ["a"]
    assert report.cases[0].attempt == "cases/a/002"
    with pytest.raises(PlanError, match=r"no case is called 'c'; there are: a, b"):
        run(again=["c"])


def test_another_directory_is_left_alone(folder: Path, plan: Writer) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "mine.txt").write_text("mine")
    with pytest.raises(
        MatrixDirectoryError, match=r"out: holds something that is no test matrix; choose another --out"
    ):
        execute(prepare(plan("[cases.a]\n")), folder / "out")
    assert [p.name for p in (folder / "out").iterdir()] == ["mine.txt"]
    assert not is_matrix(folder / "out")
    (folder / "out" / "test-matrix.json").write_text("{}")
    with pytest.raises(MatrixDirectoryError, match=r"test-matrix.json: is damaged, or of another release"):
        read_report(folder / "out")


def runs(process: Process) -> bool:
    now = read_process(process.pid)
    return now is not None and now.start == process.start and not now.is_dead


def cli(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "backlight", "test-matrix", "plan.toml", "--out", "out"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def first_process(folder: Path, attempt: str) -> Process:
    """Wait until an attempt runs, and return its process."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for start in folder.glob(f"out/cases/*/{attempt}/start.json"):
            mark = json.loads(start.read_text())["mark"]
            for process in read_process_table().values():
                if mark_of(process.pid) == mark:
                    return process
        time.sleep(0.05)
    raise AssertionError("no case was started")


def test_a_killed_and_an_interrupted_matrix_resume(folder: Path, plan: Writer) -> None:
    path = plan("[cases.a]\n", base='command = ["job.py", "wait"]\nwatch = false', top="time_limit = 60")
    process = cli(folder)
    left = first_process(folder, "000")
    process.kill()
    process.communicate(timeout=30)
    assert runs(left)
    process = cli(folder)
    of_case = first_process(folder, "001")
    assert not runs(left)
    with pytest.raises(MatrixDirectoryError, match="another test matrix is running in it"):
        execute(prepare(path), folder / "out")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 130
    wait_until(lambda: not runs(of_case), "the killed process of the case has ended")
    assert not list(folder.glob("out/cases/a/*/result.json"))
    report = execute(prepare(plan("[cases.a]\n", top="time_limit = 60")), folder / "out")
    assert [(c.attempt, c.evaluation.verdict) for c in report.cases] == [("cases/a/002", DiagnosisKind.PASS)]


def test_the_command_line(folder: Path, plan: Writer, command: Command) -> None:
    plan(TWO)
    code, out, _ = command("test-matrix", "plan.toml", "--check")
    assert code == 0
    assert "job.py fail" in " ".join(out.split())  # a long path folds
    assert not (folder / "runs").exists()
    for arguments, message in (
        (("nowhere.toml",), "nowhere.toml: cannot be read"),
        (("plan.toml", "--bundle", "x.rar"), "--bundle x.rar: expected a name that ends in"),
        (("plan.toml", "--bundle", "no/x.zip"), "no such folder"),
        (("plan.toml", "--again", "c"), "no case is called 'c'"),
    ):
        code, _, err = command("test-matrix", *arguments)
        assert code == 2, arguments
        assert message in err
        assert err.count("\n") == 1
        assert not (folder / "runs").exists()
    code, out, err = command("test-matrix", "plan.toml", "--json", "--bundle", "x.zip", "--fail-on", "CRASH")
    assert code == 1
    report = json.loads(out)
    assert [c["evaluation"]["verdict"] for c in report["cases"]] == ["PASS", "CRASH"]
    assert "CRASH" in err
    assert (folder / "x.zip").is_file()
    assert (folder / "runs/test-matrix-plan/report.html").is_file()
    code, out, _ = command("test-matrix", "plan.toml")
    assert code == 0
    assert "ValueError: injected" in out
    assert os.path.join("runs", "test-matrix-plan", "report.html") in out  # noqa: PTH118 - text, not a path


def test_hostile_text_is_escaped(folder: Path, plan: Writer, command: Command) -> None:
    (folder / "job.py").write_text(
        "print('\\x1b[31m<script>alert(1)</script> | `code` @someone')\nraise SystemExit(3)\n"
    )
    plan("[cases.a]\n[tree.x]\nconclusion = '<img src=x> [link](http://example.org) @someone'\n")
    code, out, _ = command("test-matrix", "plan.toml")
    assert code == 0
    assert "\x1b[31m" not in out
    folder_out = folder / "runs" / "test-matrix-plan"
    html, text = ((folder_out / f"report.{kind}").read_text() for kind in ("html", "md"))
    assert "<script>alert" not in html
    assert "<img src=x" not in html + text
    assert "\\[link\\]" in text
    assert "http:" not in text
