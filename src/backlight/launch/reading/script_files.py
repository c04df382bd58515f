"""Reads a script and the local modules that it imports, without importing any, for hints. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from backlight.launch.reading import loop_hints, model_hints  # noqa: F401 - they register their readers
from backlight.launch.reading.hint import KINDS, Files, Hint, hints_in
from backlight.launch.reading.syntax import SourceFile

MAX_FILES = 40
MAX_CHARACTERS = 300_000
"""Characters that are read at most; what the script imports first comes first."""

_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(?P<origin>[.\w]+)[ \t]+import[ \t]+(?P<names>[^#\n]*)"
    r"|import[ \t]+(?P<modules>[^#\n]+))",
    re.MULTILINE,
)
_RELEVANT = re.compile(r"backward\(|nn\.Module|DataLoader\(|load_state_dict\(|Dataset\)|[.]eval\(")


def read_script(script: str, *, module: bool = False, path: Path | None = None) -> list[Hint]:
    """Return the hints of a script and of the local modules that it imports, in the order of the files.

    ``module`` says that ``script`` is the name of a module below ``path``, the working directory by default.
    A file that cannot be read or parsed has no hints.
    """
    root = Path.cwd() if path is None else path
    start = _module_file(script, root) if module else Path(script)
    if start is None or not start.is_file():
        return []
    sources = list(_sources(start, root if module else start.parent))
    return list(hints_in(Files(sources), KINDS))


def _sources(start: Path, root: Path) -> Iterator[SourceFile]:
    """Yield the start file, then what it imports below ``root``, breadth first."""
    pending, read, left = [start], {start.resolve()}, MAX_CHARACTERS
    while pending:
        file = pending.pop(0)
        try:
            text = file.read_text(encoding="utf-8")
            is_read = file == start or (bool(_RELEVANT.search(text)) and len(text) <= left)
            source = SourceFile(str(file), text) if is_read and len(text) <= MAX_CHARACTERS else None
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if source is not None:
            left -= len(text)
            yield source
        for imported in _imports(text, file, root):
            if imported.resolve() not in read and len(read) < MAX_FILES:
                read.add(imported.resolve())
                pending.append(imported)


def _imports(text: str, file: Path, root: Path) -> Iterator[Path]:
    for match in _IMPORT.finditer(text):
        if match["modules"]:
            names = [part.split()[0] for part in match["modules"].split(",") if part.split()]
        else:
            origin = match["origin"]
            imported = [part.split()[0] for part in match["names"].strip("() \t").split(",") if part.split()]
            names = [origin, *(f"{origin}{'' if origin.endswith('.') else '.'}{name}" for name in imported)]
        for name in names:
            stripped = name.lstrip(".")
            dots = len(name) - len(stripped)
            base = file.parents[dots - 1] if 0 < dots <= len(file.parents) else root
            if stripped and (target := _module_file(stripped, base)):
                yield target


def _module_file(name: str, root: Path) -> Path | None:
    """Return the file of a module below a directory, of a package its ``__main__`` or ``__init__``."""
    if not re.fullmatch(r"\w+(\.\w+)*", name):
        return None
    place = root.joinpath(*name.split("."))
    choices = (place.with_name(f"{place.name}.py"), place / "__main__.py", place / "__init__.py")
    return next((choice for choice in choices if choice.is_file()), None)
