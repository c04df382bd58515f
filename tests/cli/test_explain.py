"""``backlight explain``: the page of a rule in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from backlight.findings.pages import page_lines, summary
from backlight.records import Finding
from backlight.registry import RULES, Rule
from backlight.store.read.run import Run

Command = Callable[..., tuple[int, str, str]]

PAGES = Path(__file__).parents[2] / "docs" / "findings"


@pytest.mark.parametrize("rule", sorted(page.stem for page in PAGES.glob("*_*.md")))
def test_page_is_whole(rule: str) -> None:
    """Every word of the page is there, but for links, marks and what the site fills."""
    shown = " ".join(line for line, _ in page_lines(rule))
    headings = [line for line, is_heading in page_lines(rule) if is_heading]
    assert headings[:2] == [rule, "Symptom"]
    assert "Example" not in headings
    assert not any(mark in shown for mark in ("<!--", "](", "```"))
    written = (PAGES / f"{rule}.md").read_text()
    for line in written.splitlines():
        if line.startswith(("- ", "|")) and "](" not in line:
            assert line in shown


def test_prints_the_page(command: Command) -> None:
    code, out, _ = command("explain", "gradients-not-cleared")
    assert code == 0
    assert out.startswith(
        "gradients_not_cleared\n\nGradients are not cleared between optimizer steps.\n\nSymptom\n"
    )
    assert "Call `optimizer.zero_grad()` once per optimizer step, before backward" in out


def test_lists_the_rules(command: Command) -> None:
    _, out, _ = command("explain")
    assert [line.split()[0] for line in out.splitlines()] == list(RULES)
    assert "gradients_not_cleared  Gradients are not cleared between optimizer steps.\n" in out


def test_wrong_name_gets_the_near_one(command: Command) -> None:
    code, _, errors = command("explain", "scheduel")
    assert code == 2
    assert errors == "backlight: explain: no rule is called 'scheduel'; did you mean 'schedule'?\n"


def test_rule_of_another_package_is_explained_by_its_docstring(monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluate(_run: Run, _limits: object) -> list[Finding]:
        """Report weights that are odd. They are told apart by parity."""
        return []

    monkeypatch.setitem(RULES._entries, "odd_weights", Rule("odd_weights", "health", 1, evaluate))
    assert page_lines("odd_weights") == [
        ("odd_weights", True), ("", False), (evaluate.__doc__, False),
    ]  # fmt: skip
    assert summary("odd_weights") == "Report weights that are odd."


def test_limits_of_the_rule_are_listed_with_their_defaults() -> None:
    lines = [line for line, _ in page_lines("schedule")]
    head = lines.index("Limits, `[thresholds.correctness]` of a file of settings:")
    assert lines[head + 2].startswith("- `decayed_rate = 1e-05`: share of its highest value")
