"""One clear error for a missing or outdated framework."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import tomllib
from pathlib import Path

import pytest

from backlight.integrations.hosted import OLDEST_RELEASES, FrameworkError, require

FAKED = [
    ("lightning", "lightning", "2.4", r"'backlight\[lightning\]'"),
    ("huggingface", "transformers", "4.50", r"'backlight\[huggingface\]'"),
    ("accelerate", "accelerate", "1.2", r"'backlight\[huggingface\]'"),
    ("torchtitan", "torchtitan", "0.3", "torchtitan"),
    ("ray", "ray", "2.60", r"'backlight\[ray\]'"),
    ("deepspeed", "deepspeed", "0.19.8", r"'backlight\[deepspeed\]'"),
]


@pytest.mark.parametrize(("module", "distribution", "least", "source"), FAKED)
def test_outdated_framework_error_names_the_fix(
    monkeypatch: pytest.MonkeyPatch, module: str, distribution: str, least: str, source: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "0.0.9")
    monkeypatch.delitem(sys.modules, f"backlight.integrations.{module}", raising=False)
    expected = f"expected {distribution} {least} or newer, got 0.0.9; run: pip install --upgrade {source}$"
    with pytest.raises(FrameworkError, match=expected):
        importlib.import_module(f"backlight.integrations.{module}")


def test_missing_framework_raises_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"integrations.lightning: expected lightning 2.4 .* not installed"):
        require("lightning", "lightning")


@pytest.mark.parametrize(
    ("found", "enough"),
    [("2.4", True), ("2.4.0.dev1", True), ("2.10.1", True), ("3", True), ("2.3.9", False), ("1.99", False)],
)
def test_versions_are_compared_numerically(monkeypatch: pytest.MonkeyPatch, found: str, enough: bool) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: found)
    if enough:
        assert require("lightning", "lightning") == found
    else:
        with pytest.raises(FrameworkError, match=f"got {found}"):
            require("lightning", "lightning")


def test_extras_require_the_same_releases() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = {entry.replace("[train]", "") for entries in extras.values() for entry in entries}
    for distribution in OLDEST_RELEASES.keys() - {"pytorch-lightning"}:
        assert f"{distribution}>={OLDEST_RELEASES[distribution]}" in required
