"""Comparability of two runs: the differences of their fingerprints, and what each means. No torch.

Two runs are compared only where their fingerprints agree, field by field, except for one factor that the
caller names. Consequences of that factor (another number of layers is another module tree) are accepted and
reported.
"""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath

from backlight.records import Fingerprint

OUTPUT_ARGUMENTS = frozenset({
    "out", "output", "output_dir", "out_dir", "save", "save_dir", "log_dir", "logdir", "run_name", "name",
    "checkpoint_dir", "ckpt_dir",
})  # fmt: skip
"""Arguments that are assumed to name an output path, without influence on training."""

DERIVED_FIELDS = frozenset({"modules", "parameter_count", "dtypes", "optimizers", "lr"})
"""Fields that an argument of the script may change, so that they may follow from the factor."""


MAX_NAMES = 4
"""Modules that a difference of module trees lists."""

LAYER_ARGUMENTS = re.compile(
    r"(n|num|number_of|nb)?_?(hidden_|encoder_|decoder_|transformer_)?(layers?|blocks?)|depth|n_?layers?"
)
"""Arguments that are assumed to set the number of layers of a model."""

SHAPE_ARGUMENTS = re.compile(
    r".*(layers?|blocks?|depth|width|dim|dims|hidden|hidden_size|d_model|n_embd|channels|vocab|vocabulary|experts|"
    r"vocab_size|ffn|d_ff|mlp_ratio)"
)
"""Arguments that are assumed to shape a model, so that another value should give other parameters."""


class Role(enum.StrEnum):
    """Consequence of a difference for a comparison."""

    OBSTACLE = "obstacle"
    FACTOR = "factor"
    CONSEQUENCE = "consequence"
    NOTE = "note"


@dataclass(frozen=True)
class Difference:
    """One field in which two runs differ: ``field`` is such as ``arguments.--lr`` or ``versions.torch``."""

    field: str
    text: str
    role: Role = Role.OBSTACLE

    def because(self, reasons: list[str]) -> Difference:
        """Return the difference with its reasons, if there are any."""
        return replace(self, text=f"{self.text} ({', '.join(reasons)})") if reasons else self


def differences(a: Fingerprint, b: Fingerprint) -> list[Difference]:
    """Return every field in which two fingerprints differ, before roles are assigned."""
    found = []
    if PurePath(a.script).name != PurePath(b.script).name:
        found.append(Difference("script", f"script {a.script or 'unknown'} against {b.script or 'unknown'}"))
    one, other = arguments(a.arguments), arguments(b.arguments)
    without_effect = ignored_arguments(a, b, one, other)
    for difference in _by_key("arguments", "argument ", one, other, absent="not given"):
        reason = without_effect.get(difference.field.removeprefix("arguments."))
        found.append(difference.because([reason] if reason else []))
    found += _by_key("versions", "", a.versions, b.versions)
    found += _by_key("flags", "flag ", a.flags, b.flags)
    if a.module_hash != b.module_hash:
        found.append(Difference("modules", describe_trees(dict(a.modules), dict(b.modules))))
    if a.parameter_count != b.parameter_count:
        found.append(Difference("parameter_count", describe_counts(a.parameter_count, b.parameter_count)))
    if a.module_hash != b.module_hash:
        reasons = [reason for key, reason in without_effect.items() if one.get(key) == other.get(key)]
        found[-1] = found[-1].because(reasons)
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


def assign_roles(found: list[Difference], factor: str | None) -> list[Difference]:
    """Assign each difference its role: what the named factor explains is no obstacle.

    What an argument may change, such as the module tree, is its consequence, provided that the script and all
    other arguments agree.
    """
    named = [_with_role(difference, factor) for difference in found]
    unexplained = any(d.role is Role.OBSTACLE and d.field.startswith(("arguments", "script")) for d in named)
    by_argument = any(d.role is Role.FACTOR and d.field.startswith("arguments") for d in named)
    if not by_argument or unexplained:
        return named
    return [
        replace(d, role=Role.CONSEQUENCE)
        if d.role is Role.OBSTACLE and d.field.partition(".")[0] in DERIVED_FIELDS
        else d
        for d in named
    ]


def _with_role(difference: Difference, factor: str | None) -> Difference:
    head, _, key = difference.field.partition(".")
    if difference.role is not Role.OBSTACLE:
        return difference
    if difference.field == "versions.backlight" or (
        head == "arguments" and normalize(key) in OUTPUT_ARGUMENTS
    ):
        return replace(difference, role=Role.NOTE)
    whole_field = None if head == "arguments" else normalize(head)  # one argument, not all of them
    if factor and normalize(factor) in {normalize(difference.field), normalize(key) or None, whole_field}:
        return replace(difference, role=Role.FACTOR)
    return difference


def normalize(name: str) -> str:
    """Return a name without leading dashes, in lower case, with underscores."""
    return name.lstrip("-").lower().replace("-", "_")


def arguments(given: tuple[str, ...]) -> dict[str, str]:
    """Read arguments such as ``--lr 0.1``, ``lr=0.1`` and ``--flag``; others are ``argument 1`` and so on."""
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
    field: str, words: str, a: Mapping[str, object], b: Mapping[str, object], absent: str = "none"
) -> list[Difference]:
    return [
        # A positional one is called "argument 1" already.
        Difference(
            f"{field}.{key}",
            f"{words}{key.removeprefix(words)} {a.get(key, absent)} against {b.get(key, absent)}",
        )
        for key in dict.fromkeys([*a, *b])
        if a.get(key) != b.get(key)
    ]


def _shown(value: object) -> str:
    return "unknown" if value in {"", None} else str(value)


def layers(modules: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the container with the most numbered children of one type, and their number, if there is one."""
    children: dict[str, Counter[str]] = {}
    for name, kind in modules.items():
        parent, _, last = name.rpartition(".")
        if last.isdigit():
            children.setdefault(parent, Counter())[kind] += 1
    # Of the outermost containers that repeat a composite; a Sequential of Linear and ReLU does not.
    counted = {
        parent: most
        for parent, kinds in children.items()
        if (most := max(kinds.values())) >= 2 and most > sum(kinds.values()) / 2
    }
    outermost = [name for name in counted if not any(name.startswith(f"{other}.") for other in counted)]
    found = max(outermost, key=lambda name: counted[name], default=None)
    return None if found is None else (found, counted[found])


def describe_trees(a: Mapping[str, str], b: Mapping[str, str]) -> str:
    """Return how two module trees differ: in the number of layers if that explains it, else by name."""
    one, other = layers(a), layers(b)
    if one is not None and other is not None and one[0] == other[0] and one[1] != other[1]:
        return f"layers {one[1]} against {other[1]} ({one[0] or 'the root'})"
    parts = []
    for mine, theirs, side in ((a, b, "first"), (b, a, "second")):
        only = [name for name in mine if name not in theirs]
        if only:
            dots = ", ..." if len(only) > MAX_NAMES else ""
            parts.append(f"{len(only)} only in the {side} ({', '.join(only[:MAX_NAMES])}{dots})")
    changed = [name for name in a if name in b and a[name] != b[name]]
    if changed:
        shown = ", ".join(f"{n or 'the root'} {a[n]} against {b[n]}" for n in changed[:MAX_NAMES])
        parts.append(f"{len(changed)} of another type ({shown})")
    return "modules: " + ("; ".join(parts) or "the same names and types, but other shapes of parameters")


def describe_counts(a: int, b: int) -> str:
    """Return two numbers of parameters, abbreviated where they still differ."""
    if min(a, b) >= 10**6 and f"{a / 1e6:.1f}" != f"{b / 1e6:.1f}":
        return f"{a / 1e6:,.1f} M against {b / 1e6:,.1f} M parameters"
    return f"{a:,} against {b:,} parameters"


def ignored_arguments(
    a: Fingerprint, b: Fingerprint, one: Mapping[str, str], other: Mapping[str, str]
) -> dict[str, str]:
    """Return the arguments that should have shaped a model and did not, each with the reason.

    One that sets a number of layers is ignored where both runs ask for the same and have different ones;
    another that shapes a model where its values differ and module tree and shapes agree.
    """
    found = {}
    same_tree = a.module_hash == b.module_hash and a.module_hash != ""
    first, second = layers(dict(a.modules)), layers(dict(b.modules))
    for key in (key for key in one if key in other):
        name, ignored = normalize(key).rpartition(".")[2], f"the argument `{key.lstrip('-')}` was ignored"
        if one[key] != other[key]:
            if same_tree and SHAPE_ARGUMENTS.fullmatch(name):
                found[key] = f"{ignored}: modules and parameters are the same"
        elif first and second and first[1] != second[1] and LAYER_ARGUMENTS.fullmatch(name):
            counts = {"first": str(first[1]), "second": str(second[1])}
            missed = [side for side, count in counts.items() if count != one[key]]
            if one[key].isdigit():
                found[key] = f"{ignored} in the {missed[0]} run" if len(missed) == 1 else ignored
    return found
