"""The end of a watch: rank 0 judges the run, once the other ranks have written what they have."""

from __future__ import annotations

from backlight.findings.evaluate import evaluate_rules
from backlight.records import Finding, Made
from backlight.registry import RULES
from backlight.store.maintenance.wait import wait_for_ranks
from backlight.store.read.run import open_run
from backlight.store.write.writer import RunWriter

PATIENCE = 2.0
"""Seconds that rank 0 waits at most, after the training, for ranks that are about to close their files."""


def final_findings(writer: RunWriter, *, failed: bool) -> list[Finding]:
    """Judge a run whose training is over, and store what is found; on other ranks than 0 there is nothing.

    A finding is stored for good, so that it must not be made of what the first rank to finish happens to see
    of the others: their last second of rows may not have been written yet.

    Parameters
    ----------
    writer:
        The writer of this rank, flushed and still open.
    failed:
        An exception ended the training. Then nobody is waited for: the others may be waiting for this rank.
    """
    if writer.lost is not None or writer.rank != 0:
        return []
    complete = wait_for_ranks(writer.path, 0.0 if failed else PATIENCE)
    findings = evaluate_rules(open_run(writer.path), made=Made.LIVE)
    if complete:  # else a reader makes them of the whole
        for finding in findings:
            if not RULES[finding.rule].restates:  # else it is stored already
                writer.finding(finding)
    return findings
