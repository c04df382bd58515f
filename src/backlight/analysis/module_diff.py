"""How two module trees differ in words, and which argument should have shaped them and did not. No torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from backlight.records import Fingerprint

NAMES_SHOWN = 4
"""Modules that a difference of module trees lists."""

LAYERS = re.compile(
    r"(n|num|number_of|nb)?_?(hidden_|encoder_|decoder_|transformer_)?(layers?|blocks?)|depth|n_?layers?"
)
"""Arguments that are taken to say how many layers a model has."""

SHAPES = re.compile(
    r".*(layers?|blocks?|depth|width|dim|dims|hidden|hidden_size|d_model|n_embd|channels|vocab|vocabulary|experts|"
    r"vocab_size|ffn|d_ff|mlp_ratio)"
)
"""Arguments that are taken to shape a model, so that another value should give other parameters."""


def layers(modules: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the container with the most numbered children that are alike, and their number.

    Parameters
    ----------
    modules:
        Types by dotted name.

    Returns
    -------
    Name and count, None where no container has two children of one type.
    """
    children: dict[str, Counter[str]] = {}
    for name, kind in modules.items():
        parent, _, last = name.rpartition(".")
        if last.isdigit():
            children.setdefault(parent, Counter())[kind] += 1
    # Of the outermost containers that repeat something composite; a Sequential of Linear and ReLU is none.
    counted = [
        (parent, most)
        for parent, kinds in children.items()
        if (most := max(kinds.values())) >= 2 and most > sum(kinds.values()) / 2
    ]
    outermost = [
        (parent, count)
        for parent, count in counted
        if not any(parent != other and parent.startswith(f"{other}.") for other, _ in counted)
    ]
    return max(outermost, key=lambda found: found[1], default=None)


def tree_words(a: Mapping[str, str], b: Mapping[str, str]) -> str:
    """Say how two module trees differ: by the number of layers where that is it, else by name and type."""
    one, other = layers(a), layers(b)
    if one is not None and other is not None and one[0] == other[0] and one[1] != other[1]:
        return f"layers {one[1]} against {other[1]} ({one[0] or 'the root'})"
    parts = []
    for mine, theirs, side in ((a, b, "first"), (b, a, "second")):
        only = [name for name in mine if name not in theirs]
        if only:
            dots = ", ..." if len(only) > NAMES_SHOWN else ""
            parts.append(f"{len(only)} only in the {side} ({', '.join(only[:NAMES_SHOWN])}{dots})")
    changed = [name for name in a if name in b and a[name] != b[name]]
    if changed:
        shown = ", ".join(f"{n or 'the root'} {a[n]} against {b[n]}" for n in changed[:NAMES_SHOWN])
        parts.append(f"{len(changed)} of another type ({shown})")
    return "modules: " + ("; ".join(parts) or "the same names and types, but other shapes of parameters")


def count_words(a: int, b: int) -> str:
    """Say two numbers of parameters, short where that still tells them apart."""
    if min(a, b) >= 10**6 and f"{a / 1e6:.1f}" != f"{b / 1e6:.1f}":
        return f"{a / 1e6:,.1f} M against {b / 1e6:,.1f} M parameters"
    return f"{a:,} against {b:,} parameters"


def ignored(
    a: Fingerprint, b: Fingerprint, one: Mapping[str, str], other: Mapping[str, str]
) -> dict[str, str]:
    """Return the arguments that should have shaped a model and did not, each with the reason in words.

    Parameters
    ----------
    a, b:
        The two runs.
    one, other:
        Their arguments by name.

    Returns
    -------
    By argument. One that asks for a number of layers is ignored where both runs ask for the same and
    have different ones, or ask for different ones and have the same; another that shapes a model is
    ignored where its values differ and module tree and shapes agree.
    """
    found = {}
    same_tree = a.module_hash == b.module_hash and a.module_hash != ""
    counts = layers(dict(a.modules)), layers(dict(b.modules))
    for key in (key for key in one if key in other):
        plain = key.lstrip("-").rpartition(".")[2].lower().replace("-", "_")
        if one[key] != other[key]:
            if same_tree and SHAPES.fullmatch(plain):
                found[key] = f"the argument `{_shown(key)}` was ignored: modules and parameters are the same"
            continue
        first, second = counts
        if not LAYERS.fullmatch(plain) or not one[key].isdigit() or first is None or second is None:
            continue
        wanted = int(one[key])
        missed = [side for side, count in (("first", first[1]), ("second", second[1])) if count != wanted]
        if first[1] != second[1] and missed:
            where = "" if len(missed) == 2 else f" in the {missed[0]} run"
            found[key] = f"the argument `{_shown(key)}` was ignored{where}"
    return found


def _shown(key: str) -> str:
    return key.lstrip("-")
