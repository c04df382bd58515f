"""No branch on the words of a sentence: what is decided on are enums and numbers, and text is made last."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import backlight

SOURCE = Path(backlight.__file__).parent
READERS = (
    "watchdog", "monitors/stalls", "cli/commands/attach.py",
    "integrations/ray.py", "diagnose/test_matrix", "analysis/mcp_server.py",
)  # fmt: skip
RENDERERS = {"text.py", "text_parts.py", "words.py"}
"""Modules that make sentences."""

SENTENCES = {"claim", "detail", "title", "refuted_if", "next_check", "fix", "words"}
"""Attributes and variables that hold one."""

READS = {
    "startswith", "endswith", "partition", "rpartition", "split", "find", "index", "removeprefix",
    "removesuffix", "replace", "count", "match", "search", "fullmatch",
}  # fmt: skip
"""Methods that look for a part of a text."""


def is_sentence(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in SENTENCES


def read_sentences(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that look for words in a sentence."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            operators = (ast.In, ast.NotIn, ast.Eq, ast.NotEq)
            if any(isinstance(op, operators) for op in node.ops) and any(map(is_sentence, sides)):
                yield node.lineno
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in READS
            and any(map(is_sentence, (node.func.value, *node.args)))
        ):
            yield node.lineno


def test_no_branch_depends_on_words() -> None:
    roots = [SOURCE / name for name in READERS]
    paths = [path for root in roots for path in ([root] if root.is_file() else root.rglob("*.py"))]
    assert len(paths) > 30
    lines = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in paths
        if path.name not in RENDERERS
        for line in read_sentences(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not lines


@pytest.mark.parametrize(
    "code",
    [
        "diagnosis.claim.startswith(before)", "'SIGABRT' in claim", "claim.partition(': ')",
        "re.search('rank 1', finding.detail)", "before != found.claim",
    ],
)  # fmt: skip
def test_branches_on_words_are_recognised(code: str) -> None:
    assert list(read_sentences(ast.parse(code)))
