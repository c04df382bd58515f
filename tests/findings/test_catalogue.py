"""Pages of the rules: sections in order; limits and examples are generated from the code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import building
import pytest

from backlight.registry import RULES

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = DOCS / "findings"
NAMES = [name for name in RULES if RULES.origin(name) is None]
SECTIONS = ["Symptom", "Cause", "Fix", "Refuted if", "When it is reported", "Example", "Known limitations"]


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


def test_pages_and_rules_match() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == {*NAMES, "index"}


@pytest.mark.parametrize("name", NAMES)
def test_page_has_its_sections_in_order(name: str) -> None:
    text = page(name)
    sections = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert text.startswith(f"# `{name}`\n")
    assert sections == [section for section in SECTIONS if section in sections]
    assert {"Symptom", "Fix", "When it is reported"} <= set(sections)
    assert "| threshold |" not in text  # limits are generated
    assert "<!-- example -->" in text or name == "stall"  # its example is a real diagnosis


@pytest.mark.parametrize("name", NAMES)
def test_page_has_every_limit_and_an_example(name: str) -> None:
    rule, text = RULES[name], page(name)
    limits = [f.name for f in dataclasses.fields(rule.limits)] if rule.limits else []
    assert ("<!-- limits -->" in text) == bool(limits)
    shown = building.generated(text, name)
    if "<!-- example -->" in text:
        assert re.search(r"^> \*\*(info|warning|error): ", shown, re.MULTILINE)
    rows = re.findall(r"^\| `(\w+)` \|", shown, re.MULTILINE)
    assert [row for row in rows if row in limits] == limits
    for limit in limits:
        assert re.search(rf"\b{limit}\b", text), f"{limit} is not explained on the page"


def test_index_links_every_page_and_lists_score_limits() -> None:
    text = page("index")
    linked = re.findall(r"^\| \[`(\w+)`\]\((\w+)\.md\)", text, re.MULTILINE)
    assert {a for a, b in linked if a == b} == set(NAMES)
    assert "| `penalty_vanishing` | 0.5 |" in building.generated(text, "index")


def test_tests_named_by_pages_exist() -> None:
    for path in PAGES.glob("*.md"):
        for test in re.findall(r"`(tests/[\w/]+\.py)`", path.read_text(encoding="utf-8")):
            assert (DOCS.parent / test).is_file(), f"{path.name} names {test}"
