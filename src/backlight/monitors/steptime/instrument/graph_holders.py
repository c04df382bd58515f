"""What holds graphs of earlier steps: names in the user's code, and the line that adds to them.

Containers are those that the frames of the training thread, the objects in them and the modules name. The
line is that of the statement that adds to such a name, from the source of the frame.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor, nn

from backlight.user_code import SourceLine, is_user_code

MIN_HELD = 8
"""Tensors with a graph that a container holds at least."""

SAMPLED = 64
"""Items of a container that are looked at, from its end."""

MAX_VALUES = 4000
"""Values that are looked at in all."""

_ADDING = frozenset({"append", "appendleft", "extend", "insert", "add", "update", "put", "push"})
_DETACHING = frozenset({"detach", "item", "detach_"})


@dataclass(frozen=True)
class Holder:
    """A name that holds graphs: ``count`` tensors in a container, 0 for a tensor with a growing graph."""

    name: str
    count: int
    is_bounded: bool
    line: SourceLine | None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON types."""
        line = self.line
        return {
            "name": self.name,
            "count": self.count,
            "line": None if line is None else str(line),
            "source": None if line is None else line.text.strip(),
        }


def find_holder(frame: FrameType | None, at_least: int = MIN_HELD) -> Holder | None:
    """Return what holds the most graphs among the names of the user's frames from ``frame`` outwards.

    A container counts before a variable that is computed from itself. Nothing of a frame is kept.
    """
    found: list[Holder] = []
    seen: set[int] = set()
    for code, names in _scopes(frame):
        for name, value in names.items():
            found += _holders(name, value, code.co_filename, at_least, seen)
    return max(found, key=lambda holder: (not holder.is_bounded, holder.count), default=None)


def _scopes(frame: FrameType | None) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield code and names of each frame of the user's code; what reading the names made is emptied again."""
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            values = frame.f_locals
            names = dict(values)
            # Before Python 3.13 the frame keeps this copy of its variables, and with it their values.
            if isinstance(values, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                values.clear()
            try:
                yield frame.f_code, names
            finally:
                names.clear()
        frame = frame.f_back


def _holders(
    name: str, value: Any, path: str, at_least: int, seen: set[int], depth: int = 0
) -> Iterator[Holder]:
    """Yield what a name holds: itself, or the attributes and items of an object of the user's code."""
    kind = type(value)  # an unknown object may not be asked for its class
    if id(value) in seen or len(seen) > MAX_VALUES or issubclass(kind, (str, bytes, int, float, type)):
        return
    seen.add(id(value))
    if issubclass(kind, Tensor):
        if _has_graph(value) and (line := _line(path, name, from_itself=True)) is not None:
            yield Holder(name, 0, is_bounded=False, line=line)
        return
    if issubclass(kind, (list, tuple, deque, set, dict)):
        items = list(value.values() if issubclass(kind, dict) else value)[-SAMPLED:]
        with_graph = sum(map(_holds_graph, items))
        if with_graph >= at_least and 2 * with_graph >= len(items):
            is_bounded = issubclass(kind, deque) and value.maxlen is not None
            yield Holder(name, len(value), is_bounded, _line(path, name))
        elif issubclass(kind, tuple) and with_graph and (line := _line(path, name, from_itself=True)):
            yield Holder(name, 0, is_bounded=False, line=line)
        elif depth < 2:
            for item in items:
                yield from _holders(name, item, path, at_least, seen, depth + 1)
        return
    if issubclass(kind, nn.Module):
        for module in value.modules():
            yield from _attributes(type(module).__name__, module, at_least, seen, depth)
    elif depth < 2:
        yield from _attributes(name, value, at_least, seen, depth)


def _attributes(name: str, value: Any, at_least: int, seen: set[int], depth: int) -> Iterator[Holder]:
    """Yield what the attributes of an object hold, if its class is of the user's code."""
    if is_user_code(source := _file_of(type(value))):
        for key, item in list(getattr(value, "__dict__", {}).items()):
            if not key.startswith("_"):
                yield from _holders(f"{name}.{key}", item, source, at_least, seen, depth + 1)


def _has_graph(value: Any) -> bool:
    return issubclass(type(value), Tensor) and value.requires_grad and value.grad_fn is not None


def _holds_graph(item: Any) -> bool:
    if issubclass(type(item), dict):
        item = tuple(item.values())
    return any(map(_has_graph, item[:4])) if issubclass(type(item), (tuple, list)) else _has_graph(item)


def _file_of(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def _line(path: str, name: str, *, from_itself: bool = False) -> SourceLine | None:
    """Return the statement that adds to ``name``, or with ``from_itself`` computes it from itself.

    A variable that the same loop also sets anew holds nothing of the step before: for it the answer is None.
    """
    tree = _parsed(path)
    additions = _Additions(name.rpartition(".")[2], is_attribute="." in name)
    if tree is not None:
        additions.visit(tree)
    found = additions.from_itself if from_itself else additions.added or additions.from_itself
    if not found:
        return None
    depth, line = max(found, key=lambda item: item[0])
    is_reset = from_itself and "." not in name and additions.reset_depth >= depth
    return None if is_reset else SourceLine(path, line, "")


class _Additions(ast.NodeVisitor):
    """Finds the statements that add to a name or compute it from itself, each with the loops around it."""

    def __init__(self, name: str, *, is_attribute: bool) -> None:
        self._name = name
        self._is_attribute = is_attribute
        self._depth = 0
        self.added: list[tuple[int, int]] = []
        self.from_itself: list[tuple[int, int]] = []
        self.reset_depth = -1

    def _is_name(self, part: ast.AST) -> bool:
        while isinstance(part, (ast.Subscript, ast.Starred)):
            part = part.value
        if isinstance(part, ast.Attribute):
            return part.attr == self._name
        return isinstance(part, ast.Name) and part.id == self._name and not self._is_attribute

    def _visit_loop(self, node: ast.AST) -> None:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1

    visit_For = visit_While = visit_AsyncFor = _visit_loop  # noqa: N815

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if self._is_name(node.target):
            self.from_itself.append((self._depth, node.lineno))

    def visit_Assign(self, node: ast.Assign) -> None:
        targets = [part for target in node.targets for part in getattr(target, "elts", [target])]
        own = [part for part in targets if self._is_name(part)]
        is_detached = isinstance(node.value, ast.Call) and getattr(node.value.func, "attr", "") in _DETACHING
        if own and not is_detached:
            if any(map(self._is_name, ast.walk(node.value))):
                self.from_itself.append((self._depth, node.lineno))
            elif any(isinstance(part, ast.Subscript) for part in own):
                self.added.append((self._depth, node.lineno))
            else:
                self.reset_depth = max(self.reset_depth, self._depth)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in _ADDING and self._is_name(function.value):
            self.added.append((self._depth, node.lineno))
        self.generic_visit(node)


@functools.lru_cache(32)
def _parsed(path: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return None
