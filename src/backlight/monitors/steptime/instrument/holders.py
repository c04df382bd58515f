"""What holds tensors of earlier steps: names in the user's code, and the line that adds to them.

Containers are those that the frames of the training thread, the objects in them and the modules name. The
line is that of the statement that adds to such a name, from the source of the frame.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor, nn

from backlight.user_code import SourceLine, is_user_code, user_scopes

MIN_HELD = 8
"""Tensors that a container holds at least."""

SAMPLED = 64
"""Items of a container that are looked at, from its end."""

MAX_VALUES = 4000
"""Values that are looked at in all."""

MAX_DEPTH = 3
"""Objects and containers between a name and what holds tensors: a trainer, its meter, the lists by name."""

_ADDING = frozenset({"append", "appendleft", "extend", "insert", "add", "update", "put", "push"})
_REMOVING = frozenset({"clear", "pop", "popleft", "popitem", "remove"})
_DETACHING = frozenset({"detach", "item", "detach_"})


@dataclass(frozen=True)
class Holder:
    """A name that holds tensors: ``count`` of them in a container, 0 for a tensor computed from itself.

    ``size`` is in bytes, estimated from the last items of a container, 0 where it was not asked for. ``key``
    is that of a container in this process. ``is_bounded``: the container drops items by itself;
    ``is_emptied``: a statement of the script removes some; ``is_local``: it ends with a function.
    """

    name: str
    count: int
    is_bounded: bool
    line: SourceLine | None
    is_emptied: bool = False
    is_local: bool = False
    is_mapping: bool = False
    size: int = 0
    device: str = ""
    key: int = 0

    @property
    def only_grows(self) -> bool:
        """Whether it is a container of no function, to which a line adds, and nothing is removed."""
        return bool(self.count and self.line) and not (self.is_bounded or self.is_emptied or self.is_local)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON types."""
        line = self.line
        return {
            "name": self.name,
            "count": self.count,
            "line": None if line is None else str(line),
            "source": None if line is None else line.text.strip(),
        }


def find_graph_holder(frame: FrameType | None) -> Holder | None:
    """Return what holds the most graphs among the names of the user's frames from ``frame`` outwards.

    A container counts before a variable that is computed from itself. Nothing of a frame is kept.
    """
    holders = _Search(_has_graph, MIN_HELD).holders(frame)
    return max(holders, key=lambda holder: (not holder.is_bounded, holder.count), default=None)


def find_data_holders(frame: FrameType | None, at_least: int = MIN_HELD) -> list[Holder] | None:
    """Return what holds tensors without a graph among the names of the user's frames, with their sizes.

    None where no frame is the user's, as at the end of a run.
    """
    search = _Search(_is_data, at_least)
    holders = search.holders(frame)
    return holders if search.frames else None


def _has_graph(value: Any) -> bool:
    return issubclass(type(value), Tensor) and value.requires_grad and value.grad_fn is not None


def _is_data(value: Any) -> bool:
    return type(value) is Tensor and not value.requires_grad and value.device.type != "meta"


class _Search:
    """Search for names that hold at least ``at_least`` tensors that ``counts``."""

    def __init__(self, counts: Callable[[Any], bool], at_least: int) -> None:
        self._counts = counts
        self._at_least = at_least
        self._seen: set[int] = set()
        self.frames = 0

    def holders(self, frame: FrameType | None) -> list[Holder]:
        """Return what the user's frames from ``frame`` outwards hold, and count these ``frames``."""
        holders: list[Holder] = []
        for code, names in user_scopes(frame):
            self.frames += 1
            for name, value in names.items():
                holders += self._of(name, value, (code.co_filename, code.co_firstlineno))
        return holders

    def _of(self, name: str, value: Any, scope: tuple[str, int], depth: int = 0) -> Iterator[Holder]:
        """Yield what a name holds: itself, or the attributes and items of an object of the user's code."""
        kind, seen = type(value), self._seen  # an unknown object may not be asked for its class
        if id(value) in seen or len(seen) > MAX_VALUES or issubclass(kind, (str, bytes, int, float, type)):
            return
        seen.add(id(value))
        if issubclass(kind, Tensor):
            if self._counts(value):
                yield from self._variable(name, value, scope)
            return
        if issubclass(kind, (list, tuple, deque, set, dict)):
            items = list(value.values() if issubclass(kind, dict) else value)[-SAMPLED:]
            tensors = [tensor for item in items for tensor in self._tensors(item)]
            holding = sum(1 for item in items if self._tensors(item)) if tensors else 0
            if holding >= self._at_least and 2 * holding >= len(items):
                yield self._container(name, value, scope, tensors, len(items))
            elif issubclass(kind, tuple) and holding:
                yield from self._variable(name, tensors[0], scope)
            elif depth < MAX_DEPTH:
                for item in items:
                    yield from self._of(name, item, scope, depth + 1)
            return
        if issubclass(kind, nn.Module):
            for module in value.modules():
                yield from self._attributes(type(module).__name__, module, depth)
        elif depth < MAX_DEPTH:
            yield from self._attributes(name, value, depth)

    def _attributes(self, name: str, value: Any, depth: int) -> Iterator[Holder]:
        """Yield what the attributes of an object hold, if its class is of the user's code."""
        if is_user_code(source := _file_of(type(value))):
            for key, item in list(getattr(value, "__dict__", {}).items()):
                if not key.startswith("_"):
                    yield from self._of(f"{name}.{key}", item, (source, 0), depth + 1)

    def _tensors(self, item: Any) -> list[Tensor]:
        """Return the tensors that count of an item, of a tuple or dictionary its first four."""
        if issubclass(type(item), dict):
            item = tuple(item.values())
        items = item[:4] if issubclass(type(item), (tuple, list)) else (item,)
        return [tensor for tensor in items if self._counts(tensor)]

    def _variable(self, name: str, value: Tensor, scope: tuple[str, int]) -> Iterator[Holder]:
        if (line := _uses(scope, name).line(from_itself=True)) is not None:
            yield Holder(name, 0, is_bounded=False, line=line, **self._size(0, [value], 1))

    def _container(
        self, name: str, value: Any, scope: tuple[str, int], tensors: list[Tensor], sampled: int
    ) -> Holder:
        uses = _uses(scope, name)
        return Holder(
            name,
            len(value),
            is_bounded=isinstance(value, deque) and value.maxlen is not None,
            line=uses.line(),
            is_emptied=uses.removes,
            is_local=uses.is_local,
            is_mapping=isinstance(value, dict),
            **self._size(id(value), tensors, len(value) / sampled),
        )

    def _size(self, key: int, tensors: list[Tensor], scale: float) -> dict[str, Any]:
        """Return the key; for tensors without a graph also their device, and bytes times ``scale``."""
        if self._counts is not _is_data:
            return {"key": key}
        storages = {s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}
        size = round(sum(storages.values()) * scale)
        return {"key": key, "size": size, "device": str(tensors[0].device)}


def _file_of(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def _uses(scope: tuple[str, int], name: str) -> _Uses:
    """Return the uses of a name in the function at a line of a file, or of an attribute in the file."""
    path, first_line = scope
    uses = _Uses(name.rpartition(".")[2], path, is_attribute="." in name)
    if (tree := _parsed(path)) is not None:
        root = tree if "." in name else _function(tree, first_line)
        uses.is_local = root is not tree
        uses.visit(root)
    return uses


def _function(tree: ast.Module, first_line: int) -> ast.AST:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.decorator_list[0] if node.decorator_list else node
            if first.lineno == first_line:
                return node
    return tree


class _Uses(ast.NodeVisitor):
    """Statements that add to a name or compute it from itself, with the loops around each, or empty it."""

    def __init__(self, name: str, path: str, *, is_attribute: bool) -> None:
        self._name = name
        self._path = path
        self._is_attribute = is_attribute
        self._depth = 0
        self._is_in_init = False
        self._added: list[tuple[int, int]] = []
        self._from_itself: list[tuple[int, int]] = []
        self._reset_depth = -1
        self.removes = False
        self.is_local = False

    def line(self, *, from_itself: bool = False) -> SourceLine | None:
        """Return the statement that adds to the name, or with ``from_itself`` computes it from itself.

        A variable that the same loop also sets anew holds nothing of the step before: its line is None.
        """
        lines = self._from_itself if from_itself else self._added or self._from_itself
        if not lines:
            return None
        depth, line = max(lines, key=lambda item: item[0])
        is_reset = from_itself and not self._is_attribute and self._reset_depth >= depth
        return None if is_reset else SourceLine(self._path, line, "")

    def _is_name(self, part: ast.AST) -> bool:
        while isinstance(part, (ast.Subscript, ast.Starred)) or _is_item(part):
            part = part.func.value if isinstance(part, ast.Call) else part.value  # type: ignore[attr-defined]
        if isinstance(part, ast.Attribute):
            return part.attr == self._name
        return isinstance(part, ast.Name) and part.id == self._name and not self._is_attribute

    def _visit_loop(self, node: ast.AST) -> None:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1

    visit_For = visit_While = visit_AsyncFor = _visit_loop  # noqa: N815

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self._is_in_init = self._is_in_init, node.name == "__init__"
        self.generic_visit(node)
        self._is_in_init = outer

    def visit_Delete(self, node: ast.Delete) -> None:
        self.removes |= any(isinstance(t, ast.Subscript) and self._is_name(t) for t in node.targets)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if self._is_name(node.target):
            self._from_itself.append((self._depth, node.lineno))

    def visit_Assign(self, node: ast.Assign) -> None:
        targets = [part for target in node.targets for part in getattr(target, "elts", [target])]
        own_names = [part for part in targets if self._is_name(part)]
        is_detached = isinstance(node.value, ast.Call) and getattr(node.value.func, "attr", "") in _DETACHING
        if own_names and any(isinstance(part, ast.Subscript) for part in own_names):
            self._added.append((self._depth, node.lineno))
        elif own_names and not is_detached:
            if any(map(self._is_name, ast.walk(node.value))):
                self._from_itself.append((self._depth, node.lineno))
                self.removes |= isinstance(node.value, ast.Subscript)  # x = x[-100:]
            else:
                self._reset_depth = max(self._reset_depth, self._depth)
                self.removes |= self._depth > 0 or (self._is_attribute and not self._is_in_init)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Attribute) and self._is_name(function.value):
            if function.attr in _ADDING:
                self._added.append((self._depth, node.lineno))
            self.removes |= function.attr in _REMOVING
        self.generic_visit(node)


def _is_item(part: ast.AST) -> bool:
    """Return whether an expression is ``name.setdefault(...)``, an item of the mapping."""
    is_attribute = isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute)
    return is_attribute and part.func.attr == "setdefault"  # type: ignore[attr-defined]


@functools.lru_cache(32)
def _parsed(path: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return None
