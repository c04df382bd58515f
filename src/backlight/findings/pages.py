"""The documentation page of a rule, for what shows a finding without a network."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
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

_LIMITS = "<!-- limits -->"
"""Where the limits of the rule belong."""


@functools.cache
def rule_page(rule: str) -> tuple[tuple[str, str], ...]:
    """Return the page of a rule as (kind, text), empty where it has none.

    A kind is ``heading``, ``paragraph``, ``item`` or ``cell``. Code stands between backticks; links are
    their text. A name that is no rule, as a run may hold, is not looked up.
    """
    text = _page_text(rule)
    blocks: list[tuple[str, str]] = []
    kind = "paragraph"
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type in _KINDS and (kind != "item" or token.type != "paragraph_open"):
            kind = _KINDS[token.type]
        elif token.type == "list_item_close":
            kind = "paragraph"
        elif token.type == "inline":
            blocks.append((kind, _text(token)))
    return tuple(block for block in blocks[1:] if block != ("heading", _GENERATED))


def _page_text(rule: str) -> str:
    """Return the page as it is written, empty where a rule has none."""
    if rule not in RULES:
        return ""
    file = next((place for folder in _FOLDERS if (place := folder / f"{rule}.md").is_file()), None)
    return "" if file is None else file.read_text(encoding="utf-8")


def summary(rule: str) -> str:
    """Return the first sentence of a rule's page, of one without a page that of its function."""
    blocks = rule_page(rule)
    text = blocks[0][1] if blocks else inspect.getdoc(RULES[rule].evaluate) or ""
    return text.partition(". ")[0].split("\n")[0].rstrip(".") + "."


def page_lines(rule: str) -> list[tuple[str, bool]]:
    """Return the page of a rule for a terminal, as lines with whether each is a heading.

    A paragraph is one line; links are their text, and tables stay as they are written. A rule of another
    package that has no page is explained by the docstring of its function.
    """
    text = _page_text(rule) or f"# `{rule}`\n\n{inspect.getdoc(RULES[rule].evaluate) or ''}"
    lines: list[tuple[str, bool]] = []
    is_code, is_left_out = False, False
    for line in re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text).splitlines():
        is_fence = line.startswith("```")
        is_code ^= is_fence
        if line.startswith("#") and not is_code:
            is_left_out = line.strip("# ") == _GENERATED
            if not is_left_out:
                lines.append((line.lstrip("# ").strip("`"), True))
        elif line == _LIMITS:
            lines += [(text, False) for text in _limits(rule)]
        elif is_left_out or is_fence or line.startswith("<!--"):
            continue
        elif lines and _continues(line, lines[-1]) and not is_code:
            lines[-1] = (f"{lines[-1][0]} {line.strip()}", False)
        elif line or (lines and lines[-1][0]):
            lines.append((f"    {line}" if is_code else line, False))
    return lines


def _limits(rule: str) -> list[str]:
    """Return the limits of a rule with their defaults, as items; empty where it has none."""
    limits = RULES[rule].limits
    items = [] if limits is None else dataclasses.fields(limits)
    head = f"Limits, `[thresholds.{RULES[rule].monitor}]` of a file of settings:"
    return (
        [head, "", *(f"- `{each.name} = {each.default}`: {each.metadata['reason']}" for each in items)]
        if items
        else []
    )


def _continues(line: str, before: tuple[str, bool]) -> bool:
    """Return whether a line goes on with the paragraph or the item before it."""
    text, is_heading = before
    begins = not line.strip() or line.startswith(("- ", "|", "1. "))
    return not (begins or is_heading or not text or text.startswith(("|", "    ")))


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
