"""The pages of this monitor's findings say what its rules do: sections, version, thresholds and defaults."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from backlight.monitors.steptime.model.thresholds import Thresholds
from backlight.registry import RULES

PAGES = Path(__file__).resolve().parents[4] / "docs" / "findings"
NAMES = [name for name, rule in RULES.items() if rule.monitor == "steptime"]
SECTIONS = [
    "What is claimed",
    "How it is judged",
    "What it looks like",
    "How to check next",
    "What would refute it",
    "Common causes",
    "False alarms and gaps",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_what_its_rule_does(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# `{name}`\n")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
    assert f"Monitor: steptime. Version of the rule: {RULES[name].version}." in text
    assert re.search(rf"^(info|warning|error)  {name}$", text, re.MULTILINE)
    assert "evidence  " in text
    defaults = {f.name: f.default for f in dataclasses.fields(Thresholds)}
    stated = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, re.MULTILINE))
    assert set(stated) == set(RULES[name].thresholds)
    for threshold, value in stated.items():
        assert float(value) == pytest.approx(defaults[threshold])
        assert len(re.findall(rf"`{threshold}`", text)) >= 2, (
            f"{threshold} is in the table and in no sentence"
        )
