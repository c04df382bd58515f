"""The report of a stalled run: as a page, as Markdown and as one archive."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from backlight.analysis.report import write_bundle, write_html, write_markdown
from backlight.cli.app import main
from backlight.records import Evidence, Finding, Fingerprint, Made, RunStatus, Severity, Subject
from backlight.store.errors import RunFormatError
from backlight.store.write.watchdog import WatchdogWriter
from backlight.store.write.writer import RunWriter
from run_builder import build_run

DUMP = (
    "taken by py-spy\n\nThread 0x1 MainThread (most recent call first)\n  at ops.py:22 in <b>backward</b>\n"
)
DENIED = "py-spy: Permission denied (os error 13)"


@pytest.fixture
def stalled(tmp_path: Path) -> Path:
    path = tmp_path / "run"

    def record_stall(_: RunWriter) -> None:
        watchdog = WatchdogWriter(path, path / "attempt-000")
        cited = watchdog.evidence("stall-rank-00000.txt", DUMP)
        claim = {"verdict": "BLOCKED", "claim": "BLOCKED: x", "not_collected": {"0": [DENIED]}, "rank": 0}
        watchdog.event(4, "stall", claim)
        watchdog.finding(
            Finding(
                rule="stall", severity=Severity.ERROR, title="BLOCKED: the main thread waits",
                detail="CPU 0 %; 12 s", subject=Subject(step=4, rank=0, verdict="BLOCKED"),
                evidence=(Evidence(cited, step=4),), fix="look", refuted_if="it moves", made=Made.LIVE,
            )
        )  # fmt: skip
        watchdog.close()

    fingerprint = Fingerprint(
        script="train.py", arguments=("--lr", "3"), versions={"torch": "2.13.0"}, device="cpu", host="node-7"
    )
    return build_run(
        path, name="stalled", monitors=("stalls",), script="train.py", fingerprint=fingerprint,
        scalars={"loss": [1.0]}, write=record_stall, status=RunStatus.FAILED,
    ).path  # fmt: skip


def test_markdown_has_evidence_environment_and_missing_evidence(stalled: Path, tmp_path: Path) -> None:
    text = write_markdown(stalled, tmp_path / "report.md").read_text()
    assert text.startswith("# stalled: BLOCKED: the main thread waits\n\nFailed. 1 error. ")
    missing = text.index("## Evidence that could not be collected")
    assert "rank 0: py-spy: Permission denied" in text[missing:].splitlines()[2]
    assert "      at ops.py:22 in <b>backward</b>" in text  # quoted, so that no markup acts
    assert "- host: node-7" in text
    assert "- script: `train.py --lr 3`" in text


def test_page_shows_and_links_stack_dump(stalled: Path, tmp_path: Path) -> None:
    page = write_html(stalled, tmp_path / "report.html").read_text()
    assert "Evidence of stalls" in page
    assert "at ops.py:22 in" in page
    assert DENIED in page
    assert '"panel":"evidence"' in page.replace(" ", "")


def test_run_without_stall_has_no_missing_evidence_section(tmp_path: Path) -> None:
    build_run(tmp_path / "run", monitors=("stalls",), scalars={"loss": [1.0]})
    assert "could not be collected" not in write_markdown(tmp_path / "run", tmp_path / "a.md").read_text()


@pytest.mark.slow
def test_archive_has_reports_findings_environment_and_evidence(stalled: Path, tmp_path: Path) -> None:
    with tarfile.open(write_bundle(stalled, tmp_path / "ticket.tar.gz")) as tar:
        read = {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]
    assert set(read) == {
        f"ticket/{name}"
        for name in (
            "report.html", "report.md", "findings.json", "environment.json", "events.json",
            "attempt-000/evidence/stall-rank-00000.txt",
        )
    }  # fmt: skip
    (found,) = json.loads(read["ticket/findings.json"])
    assert found["subject"]["verdict"] == "BLOCKED"
    environment = json.loads(read["ticket/environment.json"])
    assert environment["attempts"][0]["fingerprints"]["0"]["host"] == "node-7"
    assert read["ticket/attempt-000/evidence/stall-rank-00000.txt"].decode() == DUMP
    assert not (stalled / "report.md").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bundle", "x.rar"], "--bundle x.rar: expected a name that ends in"),
        (["--bundle", "no/x.zip"], "--bundle no/x.zip: no such folder"),
        (["--bundle", "x.zip", "--out", "y"], "--out y and --bundle x.zip exclude each other"),
    ],
)
def test_invalid_archive_path_is_one_line_error(
    options: list[str],
    message: str,
    stalled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as exit_info:
        main(["report", str(stalled), *options])
    assert exit_info.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert sorted(tmp_path.rglob("*")) == before


def test_directory_without_run_leaves_no_archive(tmp_path: Path) -> None:
    with pytest.raises(RunFormatError, match="is not a backlight run"):
        write_bundle(tmp_path, tmp_path / "x.zip")
    assert not (tmp_path / "x.zip").exists()
