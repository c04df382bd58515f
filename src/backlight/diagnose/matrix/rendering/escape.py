"""Text from cases and plans, made safe for the form that shows it: nothing of it acts as markup."""

from __future__ import annotations

import html
import re
import unicodedata

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
_LINKED = re.compile(r"(?i)\b(https?|ftp)(?=:)|\bwww(?=\.)|@|#(?=\d)")


def visible(text: object) -> str:
    """Return ``text`` on one line with invisible and reordering characters as escapes."""
    return "".join(
        c
        if unicodedata.category(c) not in _HIDDEN
        else c.encode("unicode_escape", "backslashreplace").decode()
        for c in str(text)
    )


def markdown(text: object) -> str:
    """Return ``text`` as Markdown that shows it as it is, without links, mentions or HTML."""
    shown = visible(text).replace("&", "&amp;").replace("<", "&lt;")
    shown = re.sub(r"([\\`*_{}\[\]!|~$^])", r"\\\1", shown)
    # These are only markup where a line begins, a list, a heading or a quotation with them.
    shown = re.sub(r"^(?=[-+=#>])|^(\d+)(?=[.)](?:\s|$))", r"\1\\", shown)
    # Mentions, tickets and addresses become links wherever they stand: a blank of no width breaks them.
    return _LINKED.sub(lambda m: m[0][0] + "&#8203;" + m[0][1:], shown)


def code(text: object) -> str:
    """Return ``text`` as a Markdown code span, whatever backticks it holds."""
    shown = visible(text)
    fence = "`" * (max((len(run) for run in re.findall(r"`+", shown)), default=0) + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") or not shown else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def markup(text: object) -> str:
    """Return ``text`` for HTML, attributes included."""
    return html.escape(visible(text), quote=True)
