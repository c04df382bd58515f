"""A whole matrix over processes that end, hang, spin, crawl and fail: evaluated, resumed, rendered."""

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
from html.parser import HTMLParser
from pathlib import Path

import pytest

from backlight.diagnose.matrix.comparison import Effect
from backlight.diagnose.matrix.decision_tree import Status
from backlight.diagnose.matrix.plan import PlanError
from backlight.diagnose.matrix.report import (
    MatrixDirectoryError,
    MatrixReport,
    as_markdown,
    is_matrix,
    page,
    read_report,
    write_bundle,
)
from backlight.diagnose.matrix.runner import execute, prepare
from backlight.launch.subprocess import mark_of
from backlight.processes import Process, read_process, read_process_table
from backlight.records import DiagnosisKind

Writer = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]

alone = pytest.mark.alone

BASE = """
script = "job.py"
watch = false
progress = 'step (\\d+)/(\\d+)'
success = '^finished'
"""

CASES = """
[cases.base]
[cases.fails]
control = "base"
arguments = ["fail"]
[cases.waits]
control = "base"
arguments = ["wait"]
[cases.spins]
control = "base"
arguments = ["spin"]
[cases.crawls]
control = "base"
arguments = ["crawl"]
[cases.nothing]
control = "base"
environment = { NOTHING_READS_THIS = "1" }
[cases.gone]
command = ["sh", "-c", "exit 0"]
[tree.start]
ask = "Does waiting matter?"
compare = "waits"
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
    (folder / "plan.toml").write_text(f"time_limit = 4\nname = 'a <b>matrix</b>'\n[base]\n{BASE}\n{CASES}")
    return folder, execute(prepare(folder / "plan.toml"), folder / "out")


@alone
def test_every_case_has_its_verdict(done: tuple[Path, MatrixReport]) -> None:
    _, report = done
    verdicts = {one.case.name: one.evaluation.verdict for one in report.cases}
    assert verdicts == {
        "base": DiagnosisKind.PASS,
        "fails": DiagnosisKind.CRASH,
        "waits": DiagnosisKind.BLOCKED,
        "spins": DiagnosisKind.SPIN,
        "crawls": DiagnosisKind.SLOW,
        "nothing": DiagnosisKind.PASS,
        "gone": DiagnosisKind.UNKNOWN,  # it exits with 0 and does not print what the plan calls success
    }
    lines = {one.case.name: one.evaluation.line.rpartition("/")[2] for one in report.cases}
    assert lines["waits"] == "job.py:7"
    assert lines["spins"] == "job.py:10"
    assert lines["fails"] == "job.py:18"
    assert report.not_run == ()


@alone
def test_no_process_is_left(done: tuple[Path, MatrixReport]) -> None:
    folder, report = done
    marks = {json.loads(start.read_text())["mark"] for start in folder.glob("out/cases/*/*/start.json")}
    assert len(marks) == len(report.cases)
    assert not [pid for pid in read_process_table() if mark_of(pid) in marks]
    ended = {one.case.name: one.observation.ended_by for one in report.cases}
    assert ended["base"] == ()
    assert ended["waits"][0].startswith("SIGTERM to ")


@alone
def test_evidence_was_collected_before_the_end(done: tuple[Path, MatrixReport]) -> None:
    folder, report = done
    waits = next(one for one in report.cases if one.case.name == "waits")
    files = {Path(name).name.split("-")[0] for name in waits.observation.files}
    assert {"processes.txt", "tail.txt", "stacks", "stdout.txt", "start.json"} <= files
    for one in report.cases:
        for name in one.observation.files:
            assert (folder / "out" / one.attempt / name).exists(), name
    # The process was alive when it was sampled: its main thread sleeps.
    assert " S " in (folder / "out" / waits.attempt / "evidence/processes.txt").read_text()
    assert any("stdout: mode: wait" in line for line in waits.observation.tail)


@alone
def test_cases_are_compared_with_their_controls(done: tuple[Path, MatrixReport]) -> None:
    _, report = done
    said = {c.case: c for c in report.comparisons}
    assert {name: c.outcome for name, c in said.items()} == {
        "fails": "causes", "waits": "causes", "spins": "causes", "crawls": "causes", "nothing": "",
    }  # fmt: skip
    assert said["waits"].effect is Effect.OBSERVED
    assert said["waits"].factor == "argument positional"
    assert said["nothing"].effect is Effect.NONE
    assert said["nothing"].why == "the factor had no effect that shows in the outputs"
    assert any("NOTHING_READS_THIS reaches the training script" in action.do for action in report.actions)


@alone
def test_the_tree_is_walked_and_actions_are_ordered(done: tuple[Path, MatrixReport]) -> None:
    _, report = done
    assert {b.name: b.status for b in report.branches} == {
        "start": Status.SUPPORTED, "it-does": Status.SUPPORTED, "it-does-not": Status.REFUTED,
    }  # fmt: skip
    assert report.headline == "the wait"
    first, *others = report.actions
    assert (first.do, first.at, first.why) == ("do not wait", "job.py:7", "the wait")
    waits = next(a for a in others if a.at.endswith("job.py:7"))
    assert waits.verify.endswith("--again waits")


@alone
def test_the_report_is_read_back_and_rendered(done: tuple[Path, MatrixReport]) -> None:
    folder, report = done
    out = folder / "out"
    assert is_matrix(out)
    assert not is_matrix(folder)
    assert read_report(out) == report
    text = as_markdown(read_report(out))
    wanted = ("# a &lt;b&gt;matrix", "Environment", "Left open", "Evidence that could not be collected")
    wanted += ("What to do, in this order", "Commands to verify", "`job.py:7`", "BLOCKED")
    for part in wanted:
        assert part in text, part
    html = page(read_report(out))
    assert "a &lt;b&gt;matrix&lt;/b&gt;" in html
    assert "<b>" not in html
    assert "default-src 'none'" in html
    links = _Links()
    links.feed(html)
    assert links.scripts == 0
    assert links.found
    for link in links.found:
        assert (out / link).exists(), link


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag in {"script", "img", "link", "iframe"}
        self.found += [value for name, value in attrs if name == "href" and value]


@alone
def test_everything_goes_into_one_archive(done: tuple[Path, MatrixReport], tmp_path: Path) -> None:
    out = done[0] / "out"
    with tarfile.open(write_bundle(out, tmp_path / "all.tar.gz")) as tar:
        names = set(tar.getnames())
    with zipfile.ZipFile(write_bundle(out, tmp_path / "all.zip")) as archive:
        assert set(archive.namelist()) == names
        assert archive.testzip() is None
    assert {"all/matrix.json", "all/plan.toml", "all/report.html", "all/report.md"} <= names
    assert "all/cases/waits/000/evidence/processes.txt" in names
    assert not [name for name in names if name.endswith((".lock", ".tmp"))]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["all.tar.gz", "all.zip"]
    with pytest.raises(ValueError, match=r"all.rar: expected a name that ends in .tar.gz, .tgz, .zip"):
        write_bundle(out, tmp_path / "all.rar")


def test_a_case_with_a_result_does_not_run_again(folder: Path, plan: Writer) -> None:
    path = plan("[cases.a]\n[cases.b]\narguments = ['fail']\n")
    started: list[str] = []

    def run(**options: object) -> MatrixReport:
        started.clear()
        return execute(
            prepare(path), folder / "out", on_start=lambda case: started.append(case.name), **options
        )

    report = run(only=["b"])
    assert (started, report.not_run) == (["b"], ("a",))
    report = run()
    assert (started, report.not_run) == (["a"], ())
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
        run(only=["c"])


def test_another_directory_is_left_alone(folder: Path, plan: Writer) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "mine.txt").write_text("mine")
    with pytest.raises(
        MatrixDirectoryError, match=r"out: holds something that is no matrix; choose another --out"
    ):
        execute(prepare(plan("[cases.a]\n")), folder / "out")
    assert [p.name for p in (folder / "out").iterdir()] == ["mine.txt"]
    with pytest.raises(
        MatrixDirectoryError,
        match=r"matrix.json: cannot be read: No such file.*is .* the directory of a matrix\?",
    ):
        read_report(folder / "out")


def runs(process: Process) -> bool:
    now = read_process(process.pid)
    return now is not None and now.start == process.start and not now.is_dead


def cli(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "backlight", "matrix", "plan.toml", "--out", "out"],
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
    path = plan("[cases.a]\narguments = ['wait']\n", top="time_limit = 60")
    process = cli(folder)
    left = first_process(folder, "000")
    process.kill()
    process.communicate(timeout=30)
    assert runs(left)
    process = cli(folder)
    of_case = first_process(folder, "001")
    assert not runs(left)
    with pytest.raises(MatrixDirectoryError, match="another matrix is running in it"):
        execute(prepare(path), folder / "out")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert not runs(of_case)
    assert not list(folder.glob("out/cases/a/*/result.json"))
    report = execute(prepare(plan("[cases.a]\n", top="time_limit = 60")), folder / "out")
    assert [(c.attempt, c.evaluation.verdict) for c in report.cases] == [("cases/a/002", DiagnosisKind.PASS)]


VARIANTS = f"""
time_limit = 30
[base]
script = "show.py"
watch = false
arguments = ["c.json", "--config=c.txt"]
[cases.base]
environment = {{ HUB_TOKEN = "sesame", PLAIN = "x" }}
[cases.text]
control = "plain"
edits = [{{ file = "c.txt", find = "depth = 2", replace = "depth = 7" }}]
[cases.key]
control = "plain"
edits = [{{ file = "c.json", key = "net.depth", value = 9 }}]
[cases.plain]
[cases.interpreter]
control = "plain"
interpreter = "other"
[cases.wrapped]
command = ["env", "-u", "KNOB", "{sys.executable}", "-c", "import time; time.sleep(1)"]
[cases.knob]
control = "wrapped"
command = ["env", "-u", "KNOB", "{sys.executable}", "-c", "import time; time.sleep(1)"]
environment = {{ KNOB = "1" }}
"""


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MatrixReport]:
    """Run cases that edit files, take another interpreter, hold secrets and lose a variable."""
    folder = tmp_path_factory.mktemp("variants")
    (folder / "c.json").write_text('{"net": {"depth": 2}}')
    (folder / "c.txt").write_text("depth = 2\n")
    (folder / "show.py").write_text(
        "import sys\nfor a in sys.argv[1:]: print(open(a.removeprefix('--config=')).read())\n"
    )
    other = folder / "other" / "bin" / "python"
    other.parent.mkdir(parents=True)
    other.write_text(f'#!/bin/sh\necho "the other"\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    (folder / "plan.toml").write_text(VARIANTS)
    prepared = prepare(folder / "plan.toml")
    assert set(prepared.interpreters) == {sys.executable, str(other)}
    return folder, execute(prepared, folder / "out")


def test_a_variable_that_a_wrapper_drops_had_no_effect(variants: tuple[Path, MatrixReport]) -> None:
    knob = next(c for c in variants[1].comparisons if c.case == "knob")
    assert knob.effect is Effect.NONE
    assert "environment KNOB, which did not reach the process that does the work" in knob.why


def test_edits_are_made_in_copies(variants: tuple[Path, MatrixReport]) -> None:
    folder, report = variants
    printed = {c.case.name: (folder / "out" / c.attempt / "stdout.txt").read_text() for c in report.cases}
    assert '"depth": 2' in printed["plain"]
    assert "depth = 7" in printed["text"]
    assert '"depth": 9' in printed["key"]
    assert (folder / "c.json").read_text() == '{"net": {"depth": 2}}'
    assert (folder / "c.txt").read_text() == "depth = 2\n"
    # Only a number differs in what was printed, which by itself could be chance.
    effects = {c.case: c.effect for c in report.comparisons}
    assert (effects["text"], effects["key"]) == (Effect.POSSIBLE, Effect.POSSIBLE)


def test_an_interpreter_of_its_own(variants: tuple[Path, MatrixReport]) -> None:
    found = next(c for c in variants[1].comparisons if c.case == "interpreter")
    assert (found.factor, found.effect) == ("interpreter", Effect.OBSERVED)


def test_secrets_are_hidden(variants: tuple[Path, MatrixReport]) -> None:
    folder, report = variants
    assert report.cases[0].case.environment == {"HUB_TOKEN": "(hidden)", "PLAIN": "x"}
    files = [p for p in (folder / "out").rglob("*") if p.is_file() and p.name != "plan.toml"]
    assert files
    assert not any("sesame" in path.read_text(errors="replace") for path in files)


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_a_branch_runs_from_a_copy_of_its_files(folder: Path, plan: Writer) -> None:
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "job.py")
    git(folder, "commit", "-q", "-m", "first")
    (folder / "job.py").write_text("print('changed here')\n")
    status = subprocess.run(
        ["git", "status", "--porcelain"], cwd=folder, capture_output=True, check=True
    ).stdout
    path = plan("[cases.here]\n[cases.main]\ncontrol = 'here'\nbranch = 'main'\n")
    assert prepare(path).cases[1].inputs.keys() == {"commit"}
    path = plan("[cases.here]\n[cases.main]\ncontrol = 'here'\nbranch = 'mian'\n")
    with pytest.raises(PlanError, match=r"branch 'mian': not found in .*: no such commit"):
        prepare(path)
    path = plan("[cases.here]\n[cases.main]\ncontrol = 'here'\nbranch = 'main'\n")
    report = execute(prepare(path), folder / "out")
    said = {c.case.name: (folder / "out" / c.attempt / "stdout.txt").read_text() for c in report.cases}
    assert said == {"here": "changed here\n", "main": "mode: end\nfinished\n"}
    assert subprocess.run(
        ["git", "status", "--porcelain", "--", "job.py"], cwd=folder, capture_output=True, check=True
    ).stdout in status  # fmt: skip
    assert report.comparisons[0].effect is Effect.OBSERVED


def test_the_command_line(folder: Path, plan: Writer, command: Command) -> None:
    plan("[cases.a]\n[cases.b]\ncontrol = 'a'\narguments = ['fail']\n")
    code, out, _ = command("matrix", "plan.toml", "--check")
    assert code == 0
    assert "argument positional" in out
    assert not (folder / "runs").exists()
    for arguments, message in (
        (("nowhere.toml",), "nowhere.toml: cannot be read"),
        (("plan.toml", "--fail-on", "BLOKED"), "did you mean 'BLOCKED'?"),
        (("plan.toml", "--bundle", "x.rar"), "--bundle x.rar: expected a name that ends in"),
        (("plan.toml", "--bundle", "no/x.zip"), "no such folder"),
        (("plan.toml", "train.py"), "unexpected 'train.py': a script is only taken with --init"),
        (("plan.toml", "--only", "c"), "no case is called 'c'"),
    ):
        code, _, err = command("matrix", *arguments)
        assert code == 2, arguments
        assert message in err
        assert err.count("\n") == 1
        assert not (folder / "runs").exists()
    code, out, err = command("matrix", "plan.toml", "--json", "--bundle", "x.zip", "--fail-on", "CRASH")
    assert code == 1
    report = json.loads(out)
    assert [c["evaluation"]["verdict"] for c in report["cases"]] == ["PASS", "CRASH"]
    assert "CRASH" in err
    assert (folder / "x.zip").is_file()
    assert (folder / "runs/matrix-plan/report.html").is_file()
    code, out, _ = command("matrix", "plan.toml")
    assert code == 0
    assert "ValueError: injected" in out
    assert os.path.join("runs", "matrix-plan", "report.html") in out  # noqa: PTH118 - text, not a path


def test_hostile_text_is_escaped(folder: Path, plan: Writer, command: Command) -> None:
    (folder / "job.py").write_text(
        "print('\\x1b[31m<script>alert(1)</script> | `code` @someone')\nraise SystemExit(3)\n"
    )
    plan("[cases.a]\n[tree.x]\nconclusion = '<img src=x> [link](http://example.org) @someone'\n")
    code, out, _ = command("matrix", "plan.toml")
    assert code == 0
    assert "\x1b[31m" not in out
    folder_out = folder / "runs" / "matrix-plan"
    html, text = page(read_report(folder_out)), as_markdown(read_report(folder_out))
    assert "<script" not in html
    assert "<img" not in html + text
    assert "\\[link\\]" in text
    assert "http:" not in text
