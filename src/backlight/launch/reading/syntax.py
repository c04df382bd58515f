"""The syntax tree of a file as lists that hints are read from, in source order.

One pass over the tree. What is not a call, an assignment, a return or a block has no entry.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def dotted(node: ast.AST | None) -> str:
    """Return ``a.b.c`` as text, empty for anything but names and attributes."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join((node.id, *reversed(parts)))


@dataclass(eq=False, slots=True)
class Namespace:
    """A module, class or function. ``params`` are the names of its arguments."""

    node: ast.AST
    parent: Namespace | None = None
    params: frozenset[str] = frozenset()
    returns: list[ast.Return] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its name, empty for a module."""
        return getattr(self.node, "name", "")

    def around(self) -> Iterator[Namespace]:
        """Yield this scope and those around it, outwards."""
        scope: Namespace | None = self
        while scope is not None:
            yield scope
            scope = scope.parent

    @property
    def owner(self) -> Namespace | None:
        """The class whose method this is, also from a function within the method."""
        return next((scope for scope in self.around() if isinstance(scope.node, ast.ClassDef)), None)


@dataclass(eq=False, slots=True)
class CodePlace:
    """Where something stands: its scope, the loops of that scope around it, and the branch.

    ``branch`` is the innermost list of statements that belongs to a loop, an ``if`` or a function: bodies of
    ``with`` and ``try`` are part of the list around them.
    """

    scope: Namespace
    loops: tuple[ast.stmt, ...] = ()
    branch: int = 0
    withs: tuple[ast.With | ast.AsyncWith, ...] = ()


@dataclass(eq=False, slots=True)
class CallSite:
    """A call: ``owner.method(...)``, both dotted names; ``owner`` is empty for a plain function.

    The owner of a call of a result, as ``scaler.scale(loss).backward()``, is empty as well.
    """

    node: ast.Call
    owner: str
    method: str
    place: CodePlace
    is_statement: bool

    @property
    def position(self) -> tuple[int, int]:
        """Line and column."""
        return self.node.lineno, self.node.col_offset

    def argument(self, name: str, index: int | None = None) -> ast.expr | None:
        """Return an argument by its keyword or position, None where it is not there."""
        for keyword in self.node.keywords:
            if keyword.arg == name:
                return keyword.value
        if index is not None and len(self.node.args) > index:
            return self.node.args[index]
        return None

    @property
    def has_unknown_arguments(self) -> bool:
        """Whether arguments come from a dictionary or a list."""
        return any(word.arg is None for word in self.node.keywords) or any(
            isinstance(argument, ast.Starred) for argument in self.node.args
        )


@dataclass(eq=False, slots=True)
class Binding:
    """``target = value``, or with ``operator`` the type of an augmented one; a loop's has no value."""

    target: str
    value: ast.expr | None
    node: ast.stmt
    place: CodePlace
    operator: type[ast.operator] | None = None

    @property
    def position(self) -> tuple[int, int]:
        """Line and column."""
        return self.node.lineno, self.node.col_offset


class SourceFile:
    """A file that was read: ``calls`` and ``assignments`` in source order, ``classes`` and ``functions``."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        self.lines = text.splitlines()
        self.calls: list[CallSite] = []
        self.assignments: list[Binding] = []
        self.classes: dict[str, Namespace] = {}
        self.functions: dict[str, Namespace] = {}
        self.scopes: list[Namespace] = []
        tree = ast.parse(text)
        scope = self._scope(tree, None)
        self._block(tree.body, CodePlace(scope, branch=id(tree.body)))
        self.calls.sort(key=attrgetter("position"))
        self._by_target: dict[str, list[Binding]] = {}
        for assignment in self.assignments:
            self._by_target.setdefault(assignment.target, []).append(assignment)

    def named(self, target: str) -> Sequence[Binding]:
        """Return the assignments to a dotted name, in all scopes."""
        return self._by_target.get(target, ())

    @cached_property
    def methods(self) -> dict[str, list[CallSite]]:
        """The calls by the name of what is called."""
        calls: dict[str, list[CallSite]] = {}
        for call in self.calls:
            calls.setdefault(call.method, []).append(call)
        return calls

    def visible_value(self, name: str, scope: Namespace, before: tuple[int, int]) -> ast.expr | None:
        """Return what a name was last assigned in its scope, before a position, or in a scope around it.

        For an attribute of ``self`` that is any assignment in the class. A parameter, the target of a loop
        and a name that is assigned something else in another branch have no value.
        """
        candidates = [each for each in self.named(name) if each.operator is None]
        if name.startswith("self."):
            values = [c.value for c in candidates if c.place.scope.owner is scope.owner]
            return values[0] if len(values) == 1 else None
        for around in scope.around():
            if isinstance(around.node, ast.ClassDef) and around is not scope:
                continue
            inner = [c for c in candidates if c.place.scope is around]
            earlier = [c for c in inner if around is not scope or c.position < before]
            if earlier:
                last = earlier[-1]
                alike = around is scope or len(earlier) == 1
                return last.value if alike else None
            if name.partition(".")[0] in around.params or inner:
                return None
        return None

    def _scope(self, node: ast.AST, parent: Namespace | None) -> Namespace:
        params: frozenset[str] = frozenset()
        if isinstance(node, _FUNCTIONS):
            arguments = node.args
            listed = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            params = frozenset(argument.arg for argument in listed)
        scope = Namespace(node, parent, params)
        self.scopes.append(scope)
        if isinstance(node, ast.ClassDef):
            self.classes.setdefault(node.name, scope)
        elif isinstance(node, _FUNCTIONS):
            self.functions.setdefault(node.name, scope)
        return scope

    def _block(self, body: Sequence[ast.stmt], place: CodePlace) -> None:
        for statement in body:
            self._statement(statement, place)

    def _statement(self, node: ast.stmt, place: CodePlace) -> None:
        scope = place.scope
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            for decorator in node.decorator_list:
                self._expression(decorator, place)
            self._block(node.body, CodePlace(self._scope(node, scope), branch=id(node.body)))
        elif isinstance(node, _LOOPS):
            if isinstance(node, ast.While):
                self._expression(node.test, place)
            else:
                self._expression(node.iter, place)
                self._assign(node.target, None, node, CodePlace(scope, (*place.loops, node), id(node.body)))
            inside = CodePlace(scope, (*place.loops, node), id(node.body), place.withs)
            self._block(node.body, inside)
            self._block(node.orelse, place)
        elif isinstance(node, ast.If):
            self._expression(node.test, place)
            for body in (node.body, node.orelse):
                self._block(body, CodePlace(scope, place.loops, id(body), place.withs))
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                self._expression(item.context_expr, place)
                if item.optional_vars is not None:
                    self._assign(item.optional_vars, None, node, place)
            self._block(node.body, CodePlace(scope, place.loops, place.branch, (*place.withs, node)))
        elif isinstance(node, (ast.Try, ast.TryStar)):
            self._block([*node.body, *node.orelse, *node.finalbody], place)
            for handler in node.handlers:
                self._block(handler.body, CodePlace(scope, place.loops, id(handler.body), place.withs))
        else:
            self._simple(node, place)

    def _simple(self, node: ast.stmt, place: CodePlace) -> None:
        if isinstance(node, ast.Expr):
            self._expression(node.value, place, is_statement=True)
            return
        if isinstance(node, ast.Return):
            place.scope.returns.append(node)
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value, node, place)
        elif isinstance(node, ast.AnnAssign):
            self._assign(node.target, node.value, node, place)
        elif isinstance(node, ast.AugAssign):
            self.assignments.append(Binding(dotted(node.target), node.value, node, place, type(node.op)))
        if isinstance(value, ast.expr):
            self._expression(value, place)
        elif not isinstance(node, (ast.Import, ast.ImportFrom, ast.Pass)):
            for child in ast.iter_child_nodes(node):
                self._expression(child, place)

    def _assign(self, target: ast.expr, value: ast.expr | None, node: ast.stmt, place: CodePlace) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
            for i, part in enumerate(target.elts):
                paired = values[i] if len(values) == len(target.elts) else None
                self._assign(part, paired, node, place)
        elif name := dotted(target):
            self.assignments.append(Binding(name, value, node, place))

    def _expression(self, node: ast.AST, place: CodePlace, *, is_statement: bool = False) -> None:
        pending = [node]
        while pending:
            current = pending.pop()
            if isinstance(current, ast.Call):
                function = current.func
                if isinstance(function, ast.Attribute):
                    owner, method = dotted(function.value), function.attr
                else:
                    owner, method = "", function.id if isinstance(function, ast.Name) else ""
                self.calls.append(CallSite(current, owner, method, place, is_statement and current is node))
            # ast.iter_child_nodes takes twice as long.
            for name in current._fields:
                child = getattr(current, name, None)
                if isinstance(child, list):
                    pending += [part for part in child if isinstance(part, ast.AST)]
                elif isinstance(child, ast.expr) and not isinstance(child, (ast.Name, ast.Constant)):
                    pending.append(child)
