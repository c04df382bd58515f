"""Which release of a framework an integration needs, and the one error where it is not there."""

from __future__ import annotations

import importlib.metadata
import re

LEAST = {
    "lightning": "2.4",
    "pytorch-lightning": "2.4",
    "transformers": "4.50",
    "accelerate": "1.2",
    "torchtitan": "0.3",
    "keras": "3.8",
}
"""Oldest release that each integration takes, by distribution; pyproject.toml states the same."""


class FrameworkError(ImportError):
    """A framework that an integration is for is missing, or too old for it."""


def require(distribution: str, extra: str) -> str:
    """Return the installed version of ``distribution``, which is recent enough.

    Raises
    ------
    FrameworkError
        If it is missing or older than :data:`LEAST` says.
    """
    least = LEAST[distribution]
    try:
        found = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise FrameworkError(_text(extra, distribution, least, "it is not installed")) from None
    if _numbers(found) < _numbers(least):
        raise FrameworkError(_text(extra, distribution, least, f"got {found}"))
    return found


def _text(extra: str, distribution: str, least: str, got: str) -> str:
    return (
        f"backlight.integrations.{extra}: expected {distribution} {least} or newer, {got}; "
        f"run: pip install --upgrade {_source(extra)}"
    )


def _source(extra: str) -> str:
    names = {"lightning": "lightning", "huggingface": "huggingface", "accelerate": "huggingface"}
    names["keras"] = "keras"
    return f"'backlight[{names[extra]}]'" if extra in names else extra


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: ``2.10.0.dev3`` is ``(2, 10, 0)``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
