"""A run as one archive for somebody else: report, findings, evidence and environment.

The recorded series stay behind: they may be gigabytes, and the report shows them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from backlight.analysis.report import write_html, write_markdown
from backlight.findings.evaluate import findings_of
from backlight.records import to_json
from backlight.store.export.archive import Member, check_archive, write_archive
from backlight.store.platform.atomic_json import dump
from backlight.store.read.run import Run, open_run


def bundle(path: Path, target: Path) -> Path:
    """Write the archive of the run in ``path`` to ``target`` and return where it is.

    A name that is not one of an archive raises what :func:`backlight.store.export.archive.check_archive`
    raises, a
    folder that holds no run what :func:`backlight.store.read.run.open_run` raises.
    """
    check_archive(target)
    run = open_run(path)
    with tempfile.TemporaryDirectory(prefix="backlight-") as folder:
        return write_archive(target, _members(run, Path(folder)))


def _members(run: Run, folder: Path) -> Iterator[Member]:
    yield "report.html", write_html(run.path, folder / "report.html")
    yield "report.md", write_markdown(run.path, folder / "report.md")
    yield "findings.json", dump(findings_of(run)).encode()
    yield "environment.json", dump(_environment(run)).encode()
    yield "events.json", dump([to_json(event) for event in run.events()]).encode()
    for name in run.evidence():
        yield name, run.read_evidence(name)


def _environment(run: Run) -> dict[str, object]:
    """Return every attempt with what its ranks state of themselves."""
    attempts = []
    for attempt in run.attempts:
        ranks = {str(rank): run.fingerprint(attempt.index, rank) for rank in attempt.ranks}
        attempts.append({**to_json(attempt), "fingerprints": to_json(ranks)})
    return {"run": run.name, "run_id": run.run_id, "attempts": attempts, "losses": list(run.losses)}
