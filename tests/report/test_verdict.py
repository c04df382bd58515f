"""What is said first: never more than what was measured."""

from __future__ import annotations

from pathlib import Path

from synthetic import Plan, finding, write_run

from backlight.records import Severity
from backlight.report.source import Source
from backlight.report.verdict import outcome


def test_findings_set_the_tone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Plan(steps=10))
    findings = [
        finding("embed.weight", 3, severity=Severity.INFO),
        finding("embed.weight", 3),
        finding("embed.weight", 4),
        finding("embed.weight", 3, severity=Severity.WARNING),
    ]
    said = outcome(Source(run, findings))
    assert (said.tone, said.headline) == ("error", "2 errors, 1 warning, 1 note")
    assert said.detail == "Gradients of all 51 parameters were measured at 10 steps."
    assert said.losses == ()
    assert said.unmeasured == ()


def test_no_findings_is_not_a_clean_bill(tmp_path: Path) -> None:
    plan = Plan(steps=10, unmeasured={7: "frozen", 9: "frozen", 30: "unused in forward"}, updates=False)
    said = outcome(Source(write_run(tmp_path / "run", plan)))
    assert (said.tone, said.headline) == ("clear", "No findings")
    assert "48 of 51 parameters" in said.detail
    assert "Nothing is said about what was not measured" in said.detail
    gaps = {(gap.what, gap.reason): gap.names for gap in said.unmeasured}
    assert gaps["2 parameters", "frozen"] == ("blocks.0.ln_2.weight", "blocks.0.mlp.up.weight")
    assert gaps["1 parameter", "unused in forward"] == ("blocks.2.attn.out.bias",)
    assert gaps["update", "the optimizer steps inside backward"] == ()


def test_nothing_measured_is_never_fine(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Plan(steps=10, gradients=False, updates=False))
    said = outcome(Source(run))
    assert (said.tone, said.headline) == ("unmeasured", "Nothing was measured")
    assert said.detail.startswith("No optimizer step was seen. Nothing can be said")
    words = f"{said.headline} {said.detail} {said.status}".casefold()
    assert "healthy" not in words
    assert "no findings" not in words


def test_a_killed_run_says_so_with_its_attempts_and_losses(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Plan(steps=40, attempts=2, killed=True))
    said = outcome(Source(run))
    assert said.status.startswith("the process ended without closing the run")
    assert "2 attempts (restarted at step 20)" in said.status
    assert said.losses
    assert "attempt 1" in said.losses[0]
    assert "attempt 1 of 2" in outcome(Source(run, attempt=0)).status
