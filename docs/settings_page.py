"""The page of all settings, made from their declarations; ``python docs/settings_page.py`` writes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backlight.session.settings import Settings
from backlight.settings import MONITOR_SETTINGS, options_of

PAGE = Path(__file__).parent / "settings.md"

HEAD = """# Settings

A setting is declared once, in the package that uses it, and has one name everywhere:

| | of the watch | of a monitor |
|---|---|---|
| Python | `watch(every=10)` | `watch(health={"exact_updates": 8})` |
| command line | `backlight run --every 10`, or `--set every=10` | `--set health.exact_updates=8` |
| file, given by `--config FILE` | `every = 10` | the table `[health]` with `exact_updates = 8` |

Those with an option have it in the last column. A monitor of another package declares its own as well:
[extending](extending.md).
"""


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD, *_section("Of the watch", Settings)]
    for name, kind in MONITOR_SETTINGS.items():
        parts += _section(f"Of the monitor {name}", kind)
    return "\n".join(parts)


def _section(title: str, kind: Any) -> Iterator[str]:
    yield f"## {title}\n\n| name | default | | option |\n|---|---|---|---|"
    options = options_of(kind)
    for field in dataclasses.fields(kind):
        if field.name in options:
            option = options[field.name]
            flags = ", ".join(f"`{flag}`" for flag in option.flags)
            least = f" {option.at_least:g} or more." if option.at_least else ""
            text = f"{option.help}{least}".replace("``", "`").replace("|", "\\|")
            yield f"| `{field.name}` | {_default(field)} | {text} | {flags} |"
    yield ""


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING or field.default in (None, ()):
        return ""
    value = field.default
    text = (
        ", ".join(value) if isinstance(value, tuple) else f"{value:,}" if type(value) is int else str(value)
    )
    return f"`{text.lower() if isinstance(value, bool) else text}`" if text else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
