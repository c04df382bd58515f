"""Whether two trainings are alike enough for their numbers to be compared, and in words why not.

Two runs are compared only where their fingerprints agree, field by field, but for one factor that the
caller names. What follows from that factor (another number of layers is another module tree) is
accepted with it, and said.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

from backlight.analysis.module_diff import count_words, ignored, tree_words
from backlight.records import Fingerprint

PLACES = frozenset({
    "out", "output", "output_dir", "out_dir", "save", "save_dir", "log_dir", "logdir", "run_name", "name",
    "checkpoint_dir", "ckpt_dir",
})  # fmt: skip
"""Arguments that are taken to name a place to write, without influence on the training."""

DERIVED = frozenset({"modules", "parameter_count", "dtypes", "optimizers", "lr"})
"""Fields that an argument of the script may change, so that they may follow from the factor."""


class Role(enum.StrEnum):
    """What a difference means for a comparison."""

    OBSTACLE = "obstacle"
    FACTOR = "factor"
    CONSEQUENCE = "consequence"
    NOTE = "note"


@dataclass(frozen=True)
class Difference:
    """One field in which two runs differ: ``field`` is such as ``arguments.--lr`` or ``versions.torch``."""

    field: str
    words: str
    role: Role = Role.OBSTACLE


def differences(a: Fingerprint, b: Fingerprint) -> list[Difference]:
    """Return every field in which two fingerprints differ, in words, none of them excused yet."""
    found = []
    if PurePath(a.script).name != PurePath(b.script).name:
        found.append(Difference("script", f"script {a.script or 'unknown'} against {b.script or 'unknown'}"))
    one, other = arguments(a.arguments), arguments(b.arguments)
    shapeless = ignored(a, b, one, other)
    for difference in _by_key("arguments", "argument ", one, other, {"absent": "not given"}):
        reason = shapeless.get(difference.field.removeprefix("arguments."))
        words = f"{difference.words} ({reason})" if reason else difference.words
        found.append(Difference(difference.field, words))
    found += _by_key("versions", "", a.versions, b.versions)
    found += _by_key("flags", "flag ", a.flags, b.flags)
    if a.module_hash != b.module_hash:
        found.append(Difference("modules", tree_words(dict(a.modules), dict(b.modules))))
    if a.parameter_count != b.parameter_count:
        found.append(Difference("parameter_count", count_words(a.parameter_count, b.parameter_count)))
    if a.module_hash != b.module_hash:
        alike = [reason for key, reason in shapeless.items() if one.get(key) == other.get(key)]
        if alike:
            last = found.pop()
            found.append(Difference(last.field, f"{last.words} ({', '.join(alike)})"))
    for field, words, mine, theirs in (
        ("device", "device", a.device, b.device),
        ("world_size", "ranks", a.world_size, b.world_size),
        ("optimizers", "optimizers", ", ".join(a.optimizers), ", ".join(b.optimizers)),
    ):
        if mine != theirs:
            found.append(Difference(field, f"{words} {_shown(mine)} against {_shown(theirs)}"))
    found += _by_key("dtypes", "weights in ", a.dtypes, b.dtypes)
    if a.host != b.host:
        found.append(Difference("host", f"host {_shown(a.host)} against {_shown(b.host)}", Role.NOTE))
    return found


def judged(found: list[Difference], factor: str | None) -> list[Difference]:
    """Give each difference its role: what the named factor explains is no obstacle.

    A factor is an argument (``--lr``, ``training.lr``) or a field (``device``, ``versions.torch``). What an
    argument may change in turn, such as the module tree, is its consequence, provided that the script and
    all other arguments agree.
    """
    named = [_excused(difference, factor) for difference in found]
    unexplained = any(d.role is Role.OBSTACLE and d.field.startswith(("arguments", "script")) for d in named)
    by_argument = any(d.role is Role.FACTOR and d.field.startswith("arguments") for d in named)
    if not by_argument or unexplained:
        return named
    return [
        Difference(d.field, d.words, Role.CONSEQUENCE)
        if d.role is Role.OBSTACLE and d.field.partition(".")[0] in DERIVED
        else d
        for d in named
    ]


def _excused(difference: Difference, factor: str | None) -> Difference:
    head, _, key = difference.field.partition(".")
    if difference.role is Role.OBSTACLE:
        if head == "versions" and key == "backlight":
            return Difference(difference.field, difference.words, Role.NOTE)
        if head == "arguments" and plain(key) in PLACES:
            return Difference(difference.field, difference.words, Role.NOTE)
        whole_field = None if head == "arguments" else plain(head)  # one argument, not all of them
        if factor and plain(factor) in {plain(difference.field), plain(key) or None, whole_field}:
            return Difference(difference.field, difference.words, Role.FACTOR)
    return difference


def plain(name: str) -> str:
    """Return a name without leading dashes, in lower case, with underscores."""
    return name.lstrip("-").lower().replace("-", "_")


def arguments(given: tuple[str, ...]) -> dict[str, str]:
    """Read a script's arguments as names with values.

    ``--lr 0.1``, ``--lr=0.1``, ``-b 32``, ``lr=0.1`` and ``--flag`` are understood; what stands alone is
    ``argument 1`` and so on, by its position.
    """
    read: dict[str, str] = {}
    name = ""
    position = 0
    for token in given:
        negative = re.fullmatch(r"-\d+(\.\d*)?([eE][+-]?\d+)?", token)
        assigned = re.fullmatch(r"(-{0,2}[A-Za-z_][\w./-]*)=(.*)", token, re.DOTALL)
        if assigned:
            read[assigned[1]] = assigned[2]
            name = ""
        elif token.startswith("-") and len(token) > 1 and not negative:
            name = token
            read[name] = ""
        elif name:
            read[name] = f"{read[name]} {token}".strip()
        else:
            position += 1
            read[f"argument {position}"] = token
    return {key: value or "given" for key, value in read.items()}


def _by_key(
    field: str,
    words: str,
    a: Mapping[str, object],
    b: Mapping[str, object],
    wording: Mapping[str, str] | None = None,
) -> list[Difference]:
    absent = (wording or {}).get("absent", "none")
    return [
        # What stands alone is called "argument 1" already.
        Difference(
            f"{field}.{key}",
            f"{words}{key.removeprefix(words)} {a.get(key, absent)} against {b.get(key, absent)}",
        )
        for key in dict.fromkeys([*a, *b])
        if a.get(key) != b.get(key)
    ]


def _shown(value: object) -> str:
    return "unknown" if value in {"", None} else str(value)
