"""The text of the findings is in one file; other tests check rule, severity, subject and evidence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from backlight.findings.phrases import TITLE_CHARACTERS
from backlight.registry import RULES
from findings_snapshot import SNAPSHOT, taken

STORED = SNAPSHOT.read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (\w+)\n\n(.*?)(?=^## |\Z)", STORED, re.MULTILINE | re.DOTALL))


@pytest.mark.slow
def test_snapshot_matches_the_rules(tmp_path: Path) -> None:
    assert taken(tmp_path) == STORED, "run `python tests/findings_snapshot.py --update` and review the diff"


def test_snapshot_contains_every_rule() -> None:
    assert set(SECTIONS) == {name for name in RULES if RULES.origin(name) is None}


@pytest.mark.parametrize("name", sorted(SECTIONS))
def test_finding_text_is_well_formed(name: str) -> None:
    texts = re.findall(
        r"^(?:info|warning|error): (.+)\n\n- detail: (.+)\n- fix: (.+)\n- refuted if: (.+)\n",
        SECTIONS[name],
        re.MULTILINE,
    )
    assert texts
    for head, detail, fix, refuted in texts:
        assert len(head) <= TITLE_CHARACTERS
        assert not head.endswith((".", "…"))
        assert detail.endswith(".")
        assert fix.endswith((".", "?", ")"))
        assert refuted.endswith(".")
