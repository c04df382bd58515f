"""Names that come from outside: they never become a path, and every one of them can be stored.

Run names, parameter names and scalar names are hostile input: line breaks, NUL, ``../``, quotes,
lone surrogates, any length.
"""

from __future__ import annotations

import unicodedata

LONGEST = 80
"""Bytes of a sanitised name; file systems commonly allow 255 and callers append to it."""

_KEPT = "._-"
_RESERVED = {"con", "prn", "aux", "nul", *(f"{d}{i}" for d in ("com", "lpt") for i in range(1, 10))}


def safe_name(text: str, fallback: str = "run") -> str:
    """Return a name that is safe as one component of a path on any common file system.

    Letters, digits, dot, dash and underscore stay, every run of other characters becomes one dash,
    no name begins with a dot or a dash, and the length is at most 80 bytes. Different texts may give
    the same name: append what makes it unique.
    """
    text = unicodedata.normalize("NFC", text[: 4 * LONGEST])
    kept = "".join(c if (c.isalnum() or c in _KEPT) and c.isprintable() else "-" for c in text)
    while "--" in kept:
        kept = kept.replace("--", "-")
    kept = kept.strip("-. ")
    kept = kept.encode("utf-8")[:LONGEST].decode("utf-8", "ignore").strip("-. ")
    if kept.split(".", maxsplit=1)[0].lower() in _RESERVED:
        kept = f"_{kept}"
    return kept or fallback


def storable(text: object) -> str:
    """Return ``text`` so that it can be stored as UTF-8: lone surrogates become escapes."""
    return str(text).encode("utf-8", "backslashreplace").decode("utf-8")
