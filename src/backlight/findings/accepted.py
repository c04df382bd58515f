"""Findings that a project accepts, with the reason: ``[[tool.backlight.accept]]`` of its pyproject.toml.

An accepted finding fails nothing, and stays visible: it is a note that begins with the reason.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from backlight import atomic_files
from backlight.records import Finding, FindingKind, Severity
from backlight.registry import warn
from backlight.text import did_you_mean, listed
from backlight.untrusted_files import read_text

FILE = "pyproject.toml"
CHECK = "check"
"""The rule of an acceptance whose subject is a probe of ``backlight check``."""

KEYS = ("rule", "subject", "reason")


class AcceptanceError(ValueError):
    """What a project accepts cannot be read, or not be added."""


class AcceptanceWarning(UserWarning):
    """A pyproject.toml whose accepted findings cannot be read: none is accepted."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Findings of ``rule`` about a parameter or module that matches ``subject``, as ``layers.*``."""

    rule: str
    subject: str
    reason: str

    def covers(self, finding: Finding) -> bool:
        """Return whether a finding is accepted."""
        return finding.rule == self.rule and fnmatchcase(subject_of(finding), self.subject)


def accepted_probes() -> dict[str, str]:
    """Return why the project accepts that probes fail, by their names."""
    return {entry.subject: entry.reason for entry in acceptances() if entry.rule == CHECK}


def subject_of(finding: Finding) -> str:
    """Return the parameter or module that a finding is about, empty for the whole run."""
    return finding.subject.parameter or finding.subject.module or ""


def project_file() -> Path | None:
    """Return the pyproject.toml of the working directory, or of the nearest directory above it."""
    here = Path.cwd()
    return next((file for folder in (here, *here.parents) if (file := folder / FILE).is_file()), None)


def acceptances() -> tuple[Acceptance, ...]:
    """Return what the project accepts; AcceptanceError where its file cannot be read or holds others."""
    file = project_file()
    return () if file is None else _read(file, file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read(file: Path, _changed: int) -> tuple[Acceptance, ...]:
    return parsed(read_text(file), str(file))


def parsed(text: str, name: str) -> tuple[Acceptance, ...]:
    """Return what the text of a pyproject.toml, the file ``name``, accepts; AcceptanceError for a bad one."""
    try:
        table = tomllib.loads(text).get("tool", {}).get("backlight", {})
    except (tomllib.TOMLDecodeError, AttributeError) as error:
        raise AcceptanceError(f"{name}: no TOML: {error}") from None
    where = f"{name}: [tool.backlight]"
    if not isinstance(table, dict) or set(table) - {"accept"}:
        others = listed(sorted(set(table) - {"accept"})) if isinstance(table, dict) else repr(table)
        raise AcceptanceError(f"{where}: expected accept alone, got {others}")
    entries = table.get("accept", [])
    if not isinstance(entries, list):
        raise AcceptanceError(f"{where} accept: expected a list of tables, got {entries!r}")
    return tuple(
        _acceptance(entry, f"{where} accept, entry {number}") for number, entry in enumerate(entries, 1)
    )


def _acceptance(entry: Any, where: str) -> Acceptance:
    is_whole = isinstance(entry, dict) and set(entry) == set(KEYS)
    if not is_whole or not all(isinstance(value, str) for value in entry.values()):
        raise AcceptanceError(f"{where}: expected texts {listed(KEYS)}, got {entry!r}")
    if not entry["reason"].strip():
        raise AcceptanceError(f"{where}: the reason is empty")
    return Acceptance(**entry)


def mark_accepted(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings, those that the project accepts as notes that begin with the reason.

    A file that cannot be read accepts nothing, and is warned of.
    """
    try:
        accepting = acceptances()
    except (OSError, ValueError) as error:
        _warn_once(f"backlight: {error}; no finding is accepted")
        accepting = ()
    return [_marked(finding, accepting) for finding in findings]


@functools.cache
def _warn_once(text: str) -> None:
    warn(text, AcceptanceWarning)


def _marked(finding: Finding, accepting: Sequence[Acceptance]) -> Finding:
    entry = next((each for each in accepting if each.covers(finding)), None)
    if entry is None or finding.accepted or finding.is_hint:
        return finding
    reason = entry.reason.strip().rstrip(".")
    return dataclasses.replace(
        finding, severity=Severity.INFO, kind=FindingKind.STATISTIC, accepted=reason,
        detail=f"Accepted ({finding.severity.value}): {reason}. {finding.detail}",
    )  # fmt: skip


def accept(findings: Sequence[Finding], rule: str, subject: str, reason: str) -> tuple[Path, int]:
    """Add an entry to the pyproject.toml; return it, and what it covers; AcceptanceError for nothing."""
    entry = _acceptance({"rule": rule, "subject": subject, "reason": reason}, "--accept")
    covered = [finding for finding in findings if entry.covers(finding) and not finding.is_hint]
    if not covered:
        names = [f"{each.rule} {subject_of(each) or '*'}" for each in findings if not each.is_hint]
        of_rule = [subject_of(each) or "*" for each in findings if each.rule == rule]
        near = did_you_mean(subject, of_rule) if of_rule else f"; there are: {listed(names) or 'none'}"
        raise AcceptanceError(f"--accept: no finding of {rule} is about {subject!r}{near}")
    return _add(entry), len(covered)


def accept_probe(name: str, probes: Sequence[str], reason: str) -> Path:
    """Add an entry for a probe of ``check``, one of ``probes``, to the pyproject.toml; return the file.

    Raises
    ------
    AcceptanceError
        If there is no such probe, the reason is empty, or the file cannot take the entry.
    """
    if name not in probes:
        raise AcceptanceError(f"--accept {CHECK}: no probe {name!r}{did_you_mean(name, probes)}")
    return _add(_acceptance({"rule": CHECK, "subject": name, "reason": reason}, "--accept"))


def _add(entry: Acceptance) -> Path:
    file = project_file() or Path.cwd() / FILE
    text = read_text(file) if file.is_file() else ""
    lines = [f"{key} = {json.dumps(value)}" for key, value in dataclasses.asdict(entry).items()]
    added = "\n".join(["[[tool.backlight.accept]]", *lines, ""])
    text = f"{text.rstrip()}\n\n{added}" if text.strip() else added
    try:
        parsed(text, str(file))
    except AcceptanceError as error:
        raise AcceptanceError(f"{error}; add it by hand: {{{', '.join(lines)}}}") from None
    atomic_files.write(file.resolve(), text.encode())
    return file
