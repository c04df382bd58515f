"""Run what a page shows: its files, its edits and its commands, in their order.

The site runs pages while it is built, and `tests/test_quickstart.py` runs one of them in a new environment. A
fenced block is

- a file with ``title="train.py"``, written into the folder of the page;
- an edit of that file: ``diff`` with the same title;
- commands with ``exec``, run by bash. ``returncode=1`` is the exit code where it is not 0.

Other blocks are shown and not run. A page without files runs its commands at the root of the repository.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 900
"""Longest time that the commands of one block may take: the longest takes a minute on two idle cores."""

_FENCE = re.compile(r"^```(?P<header>\w[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class PageError(Exception):
    """What a page shows does not work: the page, the block and the output."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the options of its header, its text and where it is on the page."""

    language: str
    options: Mapping[str, str]
    text: str
    span: tuple[int, int]

    @property
    def is_file(self) -> bool:
        """Whether the block is the content of a file."""
        return "title" in self.options and self.language != "diff"


def blocks(markdown: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    for found in _FENCE.finditer(markdown):
        language, *words = shlex.split(found["header"])
        options = dict(word.partition("=")[::2] for word in words)
        yield Block(language, options, found["text"], found.span())


def execute(block: Block, folder: Path, environment: Mapping[str, str]) -> str:
    """Write, edit or run a block in a folder and return its output, which is empty except for commands.

    Raises
    ------
    PageError
        If an edit does not fit its file, or commands end with another exit code than expected.
    """
    if block.language == "diff" and "title" in block.options:
        path = folder / block.options["title"]
        before, after = _sides(block.text)
        text = path.read_text(encoding="utf-8")
        if text.count(before) != 1:
            raise PageError(f"{path.name}: the edit does not fit the file:\n{block.text}")
        path.write_text(text.replace(before, after), encoding="utf-8")
    elif block.is_file:
        (folder / block.options["title"]).write_text(block.text, encoding="utf-8")
    elif "exec" in block.options:
        return _run(block, folder, environment)
    return ""


def with_outputs(markdown: str, execute: Callable[[Block], str]) -> str:
    """Return a page with the output below each block of commands; ``execute`` gets every block in turn."""
    parts, end = [], 0
    for block in blocks(markdown):
        output = execute(block)
        if "exec" in block.options:
            shown = f"```text\n{output.rstrip()}\n```" if output.strip() else ""
            parts += [markdown[end : block.span[0]], f"```bash\n{block.text}```\n\n{shown}"]
            end = block.span[1]
    return "".join(parts) + markdown[end:]


def has_files(markdown: str) -> bool:
    """Return whether a page brings files of its own, so that its commands need a folder."""
    return any(block.is_file for block in blocks(markdown))


def _sides(diff: str) -> tuple[str, str]:
    lines = diff.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    return before, after


def _run(block: Block, folder: Path, environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-c", block.text], cwd=folder, env=dict(environment), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=TIMEOUT_S,
    )  # fmt: skip
    expected = int(block.options.get("returncode", "0"))
    if done.returncode != expected:
        raise PageError(
            f"exit code {done.returncode}, expected {expected}:\n{block.text}\n{done.stdout[-3000:]}"
        )
    return done.stdout
