"""The verdict and the findings of a run as Markdown, for a ticket or a pull request."""

from __future__ import annotations

import re
from collections.abc import Sequence

from backlight.answer import Answer
from backlight.records import Finding, Made
from backlight.report.evidence_links import collected
from backlight.report.panel import MAX_ROWS
from backlight.report.source import Source
from backlight.report.verdict import PARTED, RunOutcome, hints_line, measurements, outcome, where
from backlight.store.read.run import Run
from backlight.text import number, visible

MOST_NAMES = 20
"""Names that a list of unmeasured parameters spells out."""

QUOTED, QUOTED_LINES = 4, 120
"""Files of evidence that are quoted, and lines of each."""

_SPECIAL = re.compile(r"([\\`*_\[\]#|~$])")
_BULLET = re.compile(r"^(\d*)([-+=.)])(?=\s|$|[-=])")
_ADDRESS = re.compile(r"(?i)\b(https?|ftp)(?=:)|\bwww(?=\.)|@")


def render_markdown(run: Run, findings: Sequence[Finding]) -> str:
    """Return the verdict, the findings and what was not measured; no text of the run acts as markup."""
    source = Source(run, tuple(findings))
    summary = outcome(source)
    lines = [f"# {escape(run.name) or 'unnamed run'}: {prose(summary.headline)}", "", summary.summary, ""]
    parts = (summary.state, summary.status, *summary.about)
    lines.append(PARTED.join(escape(part) for part in parts if part))
    lines += [f"\n{escape(line.text)}" for line in summary.lines]
    lines += [f"\n**Lost:** {escape(loss)}" for loss in summary.losses]
    lines += [f"\n{prose(withdrawal.text)}" for withdrawal in summary.withdrawn]
    for finding in source.findings:
        lines += ["", *_finding(finding)]
    lines += _unmeasured(summary)
    if line := hints_line(source):
        lines += ["", escape(line)]
    lines += _collected(source)
    lines += _environment(run)
    return "\n".join(lines) + "\n"


def answer_markdown(answer: Answer, title: str) -> str:
    """Return an answer with its tables; no text of it acts as markup."""
    lines = [f"# {escape(title)}: {escape(answer.verdict)}", "", *(f"- {escape(f)}" for f in answer.facts)]
    for table in answer.tables:
        titles = [escape(column.title) for column in table.columns]
        rules = ["--:" if column.kind == "number" else ":--" for column in table.columns]
        rows = ([escape(cell) for cell in cells] for cells in table.cells(MAX_ROWS))
        lines += ["", *([f"## {escape(table.title)}", ""] if table.title else [])]
        lines += [f"| {' | '.join(cells)} |" for cells in (titles, rules, *rows)]
        lines += [f"\n{escape(note)}" for note in table.notes]
    return "\n".join([*lines, "", *(f"- {escape(note)}" for note in answer.notes)]) + "\n"


def _finding(finding: Finding) -> list[str]:
    lines = [f"## {finding.severity.value}: {prose(finding.title)}", "", prose(finding.detail), ""]
    lines.append(f"- fix: {prose(finding.fix)}")
    lines += [f"- {label}: {code(value)}" for label, value in where(finding)]
    for path, step, value in measurements(finding):
        at = f" at step {step}" if step else ""
        lines.append(f"- evidence: {code(path)}{at}{': ' if value else ''}{escape(value)}")
    lines.append(f"- refuted if: {prose(finding.refuted_if)}")
    lines += [f"- overridden: {code(name)} = {number(v, 6)}" for name, v in finding.overridden.items()]
    made = "while training" if finding.made is Made.LIVE else "on reading"
    lines.append(f"- rule: {code(finding.rule)} version {finding.version}, made {made}")
    return lines


def prose(text: str) -> str:
    """Return escaped text in which what stands between backticks is code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # an unpaired backtick, as of a hostile name
        return escape(text)
    return "".join(code(part) if i % 2 and part else escape(part) for i, part in enumerate(parts))


def _unmeasured(summary: RunOutcome) -> list[str]:
    if not summary.unmeasured:
        return []
    lines = ["", "## Not measured", ""]
    for item in summary.unmeasured:
        shown = ", ".join(code(name) for name in item.names[:MOST_NAMES])
        more = f" and {len(item.names) - MOST_NAMES:,} more" if len(item.names) > MOST_NAMES else ""
        lines.append(f"- {escape(item.what)}: {escape(item.reason)}{': ' if shown else ''}{shown}{more}")
    return lines


def _collected(source: Source) -> list[str]:
    """List the evidence of stalls; runs in which nothing stalled have none."""
    evidence = collected(source)
    if not evidence.files and not evidence.missing:
        return []
    lines = ["", "## Evidence that could not be collected", ""]
    lines += [f"- rank {escape(rank)}: {escape(reason)}" for rank, reason in evidence.missing] or ["None."]
    if evidence.files:
        lines += ["", "## Evidence", ""]
    for path, text in evidence.files[:QUOTED]:
        quoted = text.splitlines()
        more = f"    ({len(quoted) - QUOTED_LINES} more lines)" if len(quoted) > QUOTED_LINES else ""
        lines += [f"{code(path)}:", "", *(f"    {line}" for line in quoted[:QUOTED_LINES]), more, ""]
    if len(evidence.files) + evidence.more > QUOTED:
        rest = [code(path) for path, _ in evidence.files[QUOTED:]]
        lines.append(
            f"Further files: {', '.join(rest)}{f' and {evidence.more} more' if evidence.more else ''}"
        )
    return lines


def _environment(run: Run) -> list[str]:
    """Say where and with what the run was made, as its lowest rank states it."""
    fingerprint = run.fingerprint()
    if fingerprint is None:
        return []
    pairs = {
        "script": code(" ".join((fingerprint.script, *fingerprint.arguments))),
        "redacted": ", ".join(map(code, fingerprint.redacted)),
        "parameters": f"{fingerprint.parameter_count:,}",
        "device": escape(fingerprint.device),
        "host": escape(fingerprint.host),
        "processes": str(fingerprint.world_size),
        "versions": ", ".join(f"{escape(n)} {escape(v)}" for n, v in fingerprint.versions.items()),
        "flags": ", ".join(f"{escape(n)} {escape(v)}" for n, v in fingerprint.flags.items()),
    }
    return ["", "## Environment", "", *(f"- {name}: {value}" for name, value in pairs.items() if value)]


def escape(text: str) -> str:
    """Return ``text`` as Markdown that shows it: no emphasis, link, mention, table cell or HTML."""
    safe = visible(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    safe = _SPECIAL.sub(r"\\\1", safe)
    safe = _BULLET.sub(r"\1\\\2", safe)
    # A bare address or a mention would become a link: an invisible joiner keeps it from being one.
    return _ADDRESS.sub(lambda match: match.group(0) + "&#8203;", safe)


def code(text: str) -> str:
    """Return ``text`` as inline code, with a fence longer than any run of backticks in it."""
    shown = visible(text)
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") or not shown.strip() else ""
    return f"{fence}{pad}{shown}{pad}{fence}"
