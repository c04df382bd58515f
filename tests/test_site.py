"""The documentation site: navigation, no external resources, and a full build."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import building
import page_pictures
import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NAV = (ROOT / "mkdocs.yml").read_text().split("nav:\n")[1]


def test_every_page_is_in_the_navigation() -> None:
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    named = set(re.findall(r"([\w/-]+\.md)$", NAV, re.MULTILINE))
    assert {page for page in pages if not page.startswith("findings/")} <= named
    assert named - {"gallery.md", "examples/index.md"} <= pages  # the build generates these two


def test_every_page_is_three_clicks_from_the_first() -> None:
    """Follow links in the text alone, without the navigation."""
    reached = {DOCS / "index.md"}
    for _ in range(3):
        targets = {
            (page.parent / link).resolve()
            for page in reached
            for link in re.findall(r"\]\(([\w./-]+\.md)", page.read_text())
        }
        reached |= {target for target in targets if target.exists() and DOCS in target.parents}
    assert sorted({*DOCS.rglob("*.md")} - reached) == []


def test_no_link_leaves_the_site() -> None:
    for page in DOCS.rglob("*.md"):
        text = building.linked(page.read_text(), "../" * len(page.parent.relative_to(DOCS).parts))
        for link in re.findall(r"\]\(([\w./-]+)[)#]", text):
            assert DOCS in (page.parent / link).resolve().parents, f"{page}: {link}"


def test_every_part_of_the_picture_is_described() -> None:
    described = re.findall(r"^(\d)\. ", (DOCS / "reading-the-report.md").read_text(), re.MULTILINE)
    assert described == [str(number) for number, _ in enumerate(page_pictures.PARTS, start=1)]


def test_no_page_loads_external_resources() -> None:
    for page in DOCS.rglob("*.md"):
        assert not re.search(r"!\[[^\]]*\]\(https?:|<(script|img|iframe)[^>]+https?:", page.read_text()), page
    assert "font: false" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_site_builds_and_its_examples_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for page, output in (
        ("quickstart", "`2.weight` and `2.bias` are not in any optimizer"),
        ("guides/not-learning", "`head.weight` and `head.bias` are not in any optimizer"),
        ("guides/nan", "produced by div.Tensor in SqrtBackward0"),
        ("guides/hang", "BLOCKED: the main thread waits for a lock"),
        ("guides/out-of-memory", "largest batch: batch=2633 takes 2 GB of 2 GB"),
        ("grokking", "grokking, strong"),
    ):
        text = html.unescape(re.sub(r"<[^>]+>", "", (tmp_path / "site" / f"{page}.html").read_text()))
        assert output in text, page
    assert list((tmp_path / "site" / "gallery").glob("*.svg"))
    for page in (tmp_path / "site").rglob("*.html"):
        assert not re.search(r"<(script|img|link)[^>]+(src|href)=\"https?:", page.read_text()), page
