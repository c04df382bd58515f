"""Docs match the code: links resolve, snippets run, every public name is listed."""

from __future__ import annotations

import html
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import backlight
from backlight.cli.doctor import EXTRAS
from backlight.findings.limits import Limits
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import Rule
from backlight.session.settings import Settings
from backlight.store.read.run import Run
from run_builder import build_run, gradient_row

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "docs" / "llms.txt",
    *sorted(ROOT.glob("docs/**/*.md")),
]
GENERATED = {"gallery.md", "examples/index.md"}
"""Pages that only the built site has."""


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as mkdocs and GitHub derive them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        if "://" in target or target in GENERATED:
            continue
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{page.name} links to {target}#{anchor}"


def test_rule_example_runs(tmp_path: Path) -> None:
    snippet = re.search(
        r"```python\n(# src/backlight/monitors/health/rules/silent\.py.*?)```",
        (ROOT / "docs" / "extending.md").read_text(),
        re.DOTALL,
    )
    assert snippet is not None
    names: dict[str, object] = {}

    def rule(name: str, **declared: object) -> object:
        return lambda evaluate: names.setdefault(
            "rule_silent", Rule(name, "health", 1, evaluate, needs=("gradient",))
        )

    scope = {
        "rule": rule, "Run": Run, "Limits": Limits, "Iterator": Iterator, "Finding": Finding,
        "Severity": Severity, "Subject": Subject, "Evidence": Evidence,
    }  # fmt: skip
    exec(snippet[1], scope)
    made = names["rule_silent"]
    assert isinstance(made, Rule)
    for norm, expected in ((0.0, 1), (1.0, 0)):
        run = _run(tmp_path / str(norm), norm)
        assert len(list(made.evaluate(run, Limits()))) == expected


def _run(path: Path, norm: float) -> Run:
    from backlight.records import ParameterRecord

    table = [ParameterRecord("weight", (2,), "float32", "cpu", 2)]
    series = {"gradient": {0: gradient_row(table, norm)}}
    return build_run(path, monitors=("health",), table=table, series=series)


def test_documented_thresholds_exist(tmp_path: Path) -> None:
    block = re.search(r"```toml\n(.*?)```", (ROOT / "docs" / "health.md").read_text(), re.DOTALL)
    assert block is not None
    (tmp_path / "backlight.toml").write_text(block[1])
    settings = Settings.read(tmp_path / "backlight.toml", {})
    assert settings.every == 10
    assert settings.thresholds["health"]


def test_install_and_doctor_list_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "docs" / "install.md").read_text()
    listed = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)))
    assert sorted(listed) == sorted(project["optional-dependencies"])
    not_for_users = {"torch", "reader", "optimizers", "site", "peers", "dev"}
    assert {*EXTRAS} == {*project["optional-dependencies"]} - not_for_users


def test_readme_is_short_and_its_picture_is_current() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
    picture = (ROOT / "docs" / "images" / "terminal.svg").read_text()
    words = html.unescape(re.sub(r"<[^>]+>", "", picture)).replace("\xa0", " ")
    assert "`head.weight` and `head.bias` are not in any optimizer" in words


def test_reference_lists_every_public_name() -> None:
    named = set(re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
    public = {name: getattr(backlight, name) for name in backlight.__all__ if name != "__version__"}
    assert {f"{thing.__module__}.{thing.__qualname__}" for thing in public.values()} <= named


@pytest.mark.slow
def test_docstrings_of_the_api_page_are_parsed_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    griffe = pytest.importorskip("griffe")
    package = griffe.load("backlight", search_paths=[ROOT / "src"])
    names = re.findall(r"^::: backlight\.(\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert names
    for name in names:
        documented = package[name]
        for item in (documented, *documented.members.values()):
            if not item.is_alias and item.docstring is not None:
                item.docstring.parse("numpy")
    assert not caplog.messages


def test_no_file_names_the_build_machine() -> None:
    home = str(Path.home())
    for page in [*PAGES, *ROOT.glob("src/**/*.py"), *ROOT.glob("examples/*.py"), *ROOT.glob("bench/*.py")]:
        text = page.read_text()
        assert f"{ROOT}/" not in text, page
        assert f"{home}/" not in text, page
