"""The recipes of ``CONTRIBUTING.md``, executed in a copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from page_commands import blocks, execute

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_first_command_is_the_quick_one() -> None:
    assert re.findall(r"^make ([\w-]+)", PAGE, re.MULTILINE)[0] == "quick"
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", PAGE, re.MULTILINE)) <= targets


def test_directories_of_the_tree_exist() -> None:
    tree = PAGE.split("```\nsrc/backlight/\n")[1].split("```")[0]
    packages = re.findall(r"^  (\w+)/", tree, re.MULTILINE)
    assert set(packages) == {path.parent.name for path in (ROOT / "src/backlight").glob("*/__init__.py")}


@pytest.mark.slow
def test_monitor_setting_rule_panel_and_command_are_added_as_told(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(tmp_path / "src"), "COLUMNS": "100"}
    outputs = [execute(block, tmp_path, environment) for block in blocks(PAGE)]
    printed = outputs[-1]
    assert "Nearly every gradient entry is zero" in printed
    assert "98% of the entries are zero at step 4." in printed  # all but the bias of the last layer
    assert re.search(r"^98%$", printed, re.MULTILINE)
    assert re.search(r"^  sparsity +Print the share of zero gradient entries", printed, re.MULTILINE)
    assert "Zero gradients" in (tmp_path / "report.html").read_text(encoding="utf-8")
