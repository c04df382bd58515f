"""Expressions over findings, for ``--fail-on``: a small language, parsed by hand and never evaluated.

    expression := term { "or" term }
    term       := factor { "and" factor }
    factor     := "not" factor | "(" expression ")" | comparison | RULE
    comparison := FIELD OPERATOR VALUE

A bare word is the name of a rule. Fields are ``severity`` (ordered: info < warning < error), ``rule``,
``parameter``, ``module``, ``made``, ``step`` and ``rank``; operators are ``== != < <= > >=``, of which
words know only the first two. Values are words, numbers, or text in quotes.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from backlight.records import Finding, Made, Severity
from backlight.registry import RULES

Predicate = Callable[[Finding], bool]


class ExpressionError(ValueError):
    """An expression that cannot be understood; the message points to the place."""


_TOKEN = re.compile(
    r"""\s*(?:(?P<operator>==|!=|<=|>=|<|>)|(?P<bracket>[()])|(?P<text>"[^"]*"|'[^']*')"""
    r"""|(?P<number>-?\d+(?:\.\d+)?(?![\w.]))|(?P<word>\w[\w./*-]*))"""
)

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

_KEYWORDS = ("and", "or", "not")
_NUMBERS = ("step", "rank")
_WORDS: dict[str, Callable[[Finding], str | None]] = {
    "rule": lambda finding: finding.rule,
    "parameter": lambda finding: finding.subject.parameter,
    "module": lambda finding: finding.subject.module,
    "made": lambda finding: finding.made.value,
}
FIELDS = ("severity", *_WORDS, *_NUMBERS)
"""Names that a comparison may begin with."""


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    place: int


def compile(expression: str, rules: Iterable[str] | None = None) -> Predicate:
    """Turn an expression into a function of one finding.

    Parameters
    ----------
    expression:
        Such as ``non_finite or severity>=error`` or ``not (rule==spike) and step>100``.
    rules:
        Names of the rules that exist; by default all that are registered.

    Returns
    -------
    A function that tells whether a finding matches. Raises :class:`ExpressionError` for anything that
    the language does not have, with the position and what was expected.
    """
    return _Parser(expression, sorted(RULES if rules is None else rules)).parse()


class _Parser:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, expression: str, rules: list[str]) -> None:
        self._expression = expression
        self._rules = rules
        self._tokens: list[_Token] = []
        self._next = 0
        position = 0
        while expression[position:].strip():
            match = _TOKEN.match(expression, position)
            if match is None:
                place = position + len(expression[position:]) - len(expression[position:].lstrip())
                raise self._error(f"{expression[place]!r} has no meaning here", place)
            kind = str(match.lastgroup)
            self._tokens.append(_Token(kind, match[kind], match.start(kind)))
            position = match.end()

    def parse(self) -> Predicate:
        """Parse the whole expression."""
        if not self._tokens:
            raise self._error("the expression is empty; expected the name of a rule or a comparison", 0)
        found = self._alternatives()
        if self._next < len(self._tokens):
            token = self._tokens[self._next]
            raise self._error(f"expected 'and', 'or' or the end, got {token.text!r}", token.place)
        return found

    def _alternatives(self) -> Predicate:
        parts = [self._conjunction()]
        while self._take("or"):
            parts.append(self._conjunction())
        return parts[0] if len(parts) == 1 else lambda finding: any(part(finding) for part in parts)

    def _conjunction(self) -> Predicate:
        parts = [self._factor()]
        while self._take("and"):
            parts.append(self._factor())
        return parts[0] if len(parts) == 1 else lambda finding: all(part(finding) for part in parts)

    def _factor(self) -> Predicate:
        if self._take("not"):
            negated = self._factor()
            return lambda finding: not negated(finding)
        if self._take("("):
            inner = self._alternatives()
            if not self._take(")"):
                raise self._error("expected ')'", self._place())
            return inner
        token = self._any("the name of a rule or a comparison")
        if token.kind not in {"word", "text"} or token.text in _KEYWORDS:
            raise self._error(f"expected the name of a rule or a comparison, got {token.text!r}", token.place)
        following = self._tokens[self._next] if self._next < len(self._tokens) else None
        if following is not None and following.kind == "operator":
            return self._comparison(token)
        if token.text in FIELDS:
            raise self._error(f"expected an operator after the field {token.text!r}", self._place())
        name = self._rule(token)
        return lambda finding: finding.rule == name

    def _comparison(self, field: _Token) -> Predicate:
        if field.text not in FIELDS:
            raise self._error(
                f"no field is called {field.text!r}; there are {', '.join(FIELDS)}", field.place
            )
        sign = self._any("an operator")
        compare = _COMPARE[sign.text]
        value = self._any(f"a value after {field.text}{sign.text}")
        if value.kind not in {"word", "text", "number"} or value.text in _KEYWORDS:
            raise self._error(f"expected a value, got {value.text!r}", value.place)
        if field.text == "severity":
            rank = self._one_of(value, [s.value for s in Severity], "severity")
            wanted = Severity(rank).rank
            return lambda finding: compare(finding.severity.rank, wanted)
        if field.text in _NUMBERS:
            return self._number(field.text, compare, value)
        if sign.text not in {"==", "!="}:
            raise self._error(f"{field.text} knows only == and !=, got {sign.text!r}", sign.place)
        if field.text == "rule":
            text = self._rule(value)
        elif field.text == "made":
            text = self._one_of(value, [m.value for m in Made], "origin")
        else:
            text = _plain(value)
        read = _WORDS[field.text]
        return lambda finding: compare(read(finding), text)

    def _number(self, name: str, compare: Callable[[Any, Any], bool], value: _Token) -> Predicate:
        if value.kind != "number":
            raise self._error(f"{name} is compared with a number, got {value.text!r}", value.place)
        number = float(value.text)

        def holds(finding: Finding) -> bool:
            mine = getattr(finding.subject, name)
            return mine is not None and compare(mine, number)

        return holds

    def _rule(self, token: _Token) -> str:
        return self._one_of(token, self._rules, "rule")

    def _one_of(self, token: _Token, known: list[str], kind: str) -> str:
        name = _plain(token)
        if name in known:
            return name
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise self._error(
            f"no {kind} is called {name!r}; {hint}there are {', '.join(known) or 'none'}", token.place
        )

    def _take(self, text: str) -> bool:
        if self._next < len(self._tokens):
            token = self._tokens[self._next]
            if token.text == text and token.kind in {"word", "bracket"}:
                self._next += 1
                return True
        return False

    def _any(self, expected: str) -> _Token:
        if self._next >= len(self._tokens):
            raise self._error(f"expected {expected}, got the end", len(self._expression))
        self._next += 1
        return self._tokens[self._next - 1]

    def _place(self) -> int:
        return self._tokens[self._next].place if self._next < len(self._tokens) else len(self._expression)

    def _error(self, what: str, place: int) -> ExpressionError:
        return ExpressionError(f"--fail-on {self._expression!r}, position {place + 1}: {what}")


def _plain(token: _Token) -> str:
    return token.text[1:-1] if token.kind == "text" else token.text
