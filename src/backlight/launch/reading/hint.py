"""A hint of the static reading of a script, and the registry of what makes hints. No torch."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from backlight.user_code import SourceLine

if TYPE_CHECKING:
    from backlight.launch.reading.syntax import Namespace, SourceFile


SHOWN = 88
"""Characters of a source line that are shown."""


@dataclass(frozen=True, slots=True)
class Hint:
    """What a line of a script looks like, before it has run.

    ``rules`` are the rules that report it where it is a fault; ``steps`` are the optimizer steps after which
    they do, 0 where a few steps cannot show it. What ``needs_run`` is often meant, and is a hint only where
    the run confirms it. ``line`` and the columns count from 1, ``end`` is exclusive.
    """

    name: str
    rules: tuple[str, ...]
    steps: int
    needs_run: bool
    title: str
    fix: str
    path: str
    line: int
    column: int
    end: int
    source: str

    @property
    def place(self) -> str:
        """``FILE:LINE``, relative to the working directory where the file is below it."""
        return str(SourceLine(self.path, self.line))

    def as_event(self) -> dict[str, Any]:
        """Return what the run stores of the hint: the line that findings of its rules are given."""
        return {"rules": list(self.rules), "place": self.place, "title": self.title}

    def view(self) -> list[str]:
        """Return the hint as lines: place and title, the source, a caret line, and the fix."""
        margin = " " * len(str(self.line))
        indent = len(self.source) - len(self.source.lstrip())
        # Of a long line what is marked; a line that is broken would part the marks from it.
        begin = indent if self.column + SHOWN // 2 < SHOWN else max(indent, self.column - 1 - SHOWN // 4)
        text = self.source[begin : begin + SHOWN]
        before = self.column - 1 - begin
        mark = "^" * max(1, min(self.end - self.column, len(text) - before))
        return [
            f"{self.place}:{self.column}: {self.title}",
            f"  {self.line} | {text}",
            f"  {margin} | {' ' * max(0, before)}{mark}",
            f"  fix: {self.fix}",
        ]


@dataclass(frozen=True)
class Files:
    """The script and the local modules that it imports, the script first."""

    sources: Sequence[SourceFile]

    def class_named(self, name: str) -> tuple[SourceFile, Namespace] | None:
        """Return a class that is defined in one of the files."""
        short = name.rpartition(".")[2]
        return next(((each, each.classes[short]) for each in self.sources if short in each.classes), None)

    def function_named(self, name: str) -> tuple[SourceFile, Namespace] | None:
        """Return a function that is defined in one of the files."""
        short = name.rpartition(".")[2]
        places = ((each, each.functions[short]) for each in self.sources if short in each.functions)
        return next(places, None)

    def mention(self, text: str) -> bool:
        """Return whether a text occurs in a line of the files."""
        return any(text in source.text for source in self.sources)


Remark = tuple[ast.AST, str, str]
"""A node, what is remarkable about it, and the fix."""

Reader = Callable[["SourceFile", Files], Iterator[Remark]]


@dataclass(frozen=True)
class HintKind:
    """A kind of hint and the function that reads it."""

    name: str
    rules: tuple[str, ...]
    steps: int
    needs_run: bool
    read: Reader


KINDS: list[HintKind] = []


def hint(*rules: str, steps: int = 0, needs_run: bool = False) -> Callable[[Reader], Reader]:
    """Register a function as the reader of a kind of hint, by its name."""

    def register(read: Reader) -> Reader:
        KINDS.append(HintKind(read.__name__.replace("_", "-"), rules, steps, needs_run, read))
        return read

    return register


def hints_in(files: Files, kinds: Iterable[HintKind]) -> Iterator[Hint]:
    """Yield what each kind reads in each file, in source order within a file."""
    for source in files.sources:
        hints = [
            Hint(
                kind.name,
                kind.rules,
                kind.steps,
                kind.needs_run,
                title,
                fix,
                source.path,
                *_span(node, source),
            )
            for kind in kinds
            for node, title, fix in kind.read(source, files)
        ]
        yield from sorted(set(hints), key=lambda each: (each.line, each.column, each.name))


def _span(node: ast.AST, source: SourceFile) -> tuple[int, int, int, str]:
    """Return line, column, end and text of a node; of one over several lines the first."""
    line: int = getattr(node, "lineno", 1)
    column: int = getattr(node, "col_offset", 0)
    text = source.lines[line - 1] if line <= len(source.lines) else ""
    end = getattr(node, "end_col_offset", None)
    if end is None or getattr(node, "end_lineno", line) != line:
        end = len(text.rstrip())
    # Offsets of the tree are in bytes.
    encoded = text.encode()
    begin, end = (len(encoded[:offset].decode(errors="replace")) for offset in (column, end))
    return line, begin + 1, end + 1, text.rstrip()
