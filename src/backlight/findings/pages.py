"""The documentation page of a rule, for what shows a finding without a network."""

from __future__ import annotations

import functools
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from backlight.registry import RULES

_PACKAGE = Path(__file__).parents[1]
# In the package of a wheel, or in a checkout.
_FOLDERS = (_PACKAGE / "findings" / "pages", _PACKAGE.parents[1] / "docs" / "findings")

_KINDS = {
    "heading_open": "heading",
    "paragraph_open": "paragraph",
    "list_item_open": "item",
    "td_open": "cell",
}

_GENERATED = "Example"
"""The section that only the site fills."""


@functools.cache
def rule_page(rule: str) -> tuple[tuple[str, str], ...]:
    """Return the page of a rule as (kind, text), empty where it has none.

    A kind is ``heading``, ``paragraph``, ``item`` or ``cell``. Code stands between backticks; links are
    their text. A name that is no rule, as a run may hold, is not looked up.
    """
    if rule not in RULES:
        return ()
    file = next((place for folder in _FOLDERS if (place := folder / f"{rule}.md").is_file()), None)
    if file is None:
        return ()
    blocks: list[tuple[str, str]] = []
    kind = "paragraph"
    for token in MarkdownIt("commonmark").enable("table").parse(file.read_text(encoding="utf-8")):
        if token.type in _KINDS and (kind != "item" or token.type != "paragraph_open"):
            kind = _KINDS[token.type]
        elif token.type == "list_item_close":
            kind = "paragraph"
        elif token.type == "inline":
            blocks.append((kind, _text(token)))
    return tuple(block for block in blocks[1:] if block != ("heading", _GENERATED))


def page_blocks(rule: str) -> list[str]:
    """Return the page of a rule as Markdown, one text per heading, paragraph or item."""
    marks = {"heading": "## ", "item": "- "}
    return [marks.get(kind, "") + text for kind, text in rule_page(rule)]


def _text(token: Token) -> str:
    """Return an inline token as text."""
    parts = []
    for child in token.children or ():
        if child.type == "code_inline":
            parts.append(f"`{child.content}`")
        else:
            parts.append(" " if child.type in {"softbreak", "hardbreak"} else child.content)
    return "".join(parts)
