"""The catalogue of findings says what the rules do: every rule, every threshold, every default."""

import dataclasses
import re
from pathlib import Path

import pytest

from backlight.monitors.health.model.thresholds import Thresholds
from backlight.registry import RULES

PAGES = Path(__file__).resolve().parents[4] / "docs" / "findings"
NAMES = [name for name, rule in RULES.items() if rule.monitor == "health"]
SECTIONS = (
    "What is claimed",
    "How it is judged",
    "What it looks like",
    "How to check next",
    "What would refute it",
    "Common causes",
    "False alarms and gaps",
)


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


def table(text: str) -> dict[str, float]:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, re.MULTILINE)
    return {name: float(value) for name, value in rows}


def test_every_rule_has_its_page_and_every_page_its_rule() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == {*RULES, "index"}


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_its_sections_and_the_version_of_its_rule(name: str) -> None:
    text = page(name)
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == list(SECTIONS)
    assert text.startswith(f"# `{name}`\n")
    assert f"Version of the rule: {RULES[name].version}." in text
    assert re.search(rf"^(info|warning|error)  {name}$", text, re.MULTILINE)
    assert "evidence  " in text


@pytest.mark.parametrize("name", NAMES)
def test_a_page_names_each_threshold_with_its_default(name: str) -> None:
    text = page(name)
    defaults = {f.name: f.default for f in dataclasses.fields(Thresholds)}
    stated = table(text)
    assert set(stated) == set(RULES[name].thresholds)
    for threshold, value in stated.items():
        assert value == pytest.approx(defaults[threshold], rel=1e-5)
        assert len(re.findall(rf"\b{threshold}\b", text)) >= 2, (
            f"{threshold} is in the table and in no sentence"
        )


def test_the_index_links_every_page_and_states_the_penalties() -> None:
    text = page("index")
    linked = re.findall(r"^\| \[`(\w+)`\]\((\w+)\.md\)", text, re.MULTILINE)
    assert {a for a, b in linked if a == b} == set(RULES)
    assert table(text) == {"penalty_vanishing": 0.5, "penalty_exploding": 0.8}


def test_every_link_leads_somewhere() -> None:
    for path in PAGES.glob("*.md"):
        for target in re.findall(r"\]\(([\w./]+)\)", path.read_text(encoding="utf-8")):
            assert (PAGES / target).is_file(), f"{path.name} links to {target}"
        for test in re.findall(r"`(tests/[\w/]+\.py)`", path.read_text(encoding="utf-8")):
            assert (PAGES.parents[1] / test).is_file(), f"{path.name} names {test}"
