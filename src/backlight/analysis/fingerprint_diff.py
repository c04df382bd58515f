"""Differences of the configurations of runs, field by field, and what each means if strict. No torch.

A strict comparison takes fingerprints that agree, except for one factor that the caller names. Consequences
of that factor (another number of layers is another module tree) are accepted.
"""

from __future__ import annotations

import enum
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from backlight.records import Fingerprint
from backlight.text import count, listed

OUTPUT_ARGUMENTS = frozenset({
    "out", "output", "output_dir", "out_dir", "save", "save_dir", "log_dir", "logdir", "run_name", "name",
    "checkpoint_dir", "ckpt_dir",
})  # fmt: skip
"""Arguments that are assumed to name an output path, without influence on training."""

DERIVED_FIELDS = frozenset({"modules", "parameter_count", "dtypes", "optimizers", "hyperparameters", "lr"})
"""Fields that an argument of the script may change, so that they may follow from the factor."""


MAX_NAMES = 3
"""Modules or parameters of a run that a difference lists."""

LETTERS = string.ascii_uppercase
"""Letters of the runs of a comparison."""

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
class FingerprintDifference:
    """One field in which runs differ, such as ``arguments.--lr``, with its value in each run.

    ``name`` is the field as it is printed; ``remark`` adds what the values do not show.
    """

    field: str
    name: str
    values: tuple[str, ...]
    role: Role = Role.OBSTACLE
    remark: str = ""

    @property
    def text(self) -> str:
        """The difference in one line."""
        remark = f" ({self.remark})" if self.remark else ""
        return f"{self.name} {' against '.join(self.values)}{remark}"


Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of parameters by name."""


def differences(prints: Sequence[Fingerprint], shapes: Sequence[Shapes] = ()) -> list[FingerprintDifference]:
    """Return every field in which fingerprints differ, before roles are assigned.

    ``shapes`` are those of the runs: they show what differs where the names of all modules agree.
    """
    arguments_of = [arguments(each.arguments) for each in prints]
    ignored = ignored_arguments(prints, arguments_of)
    diffs = _of("script", "script", [PurePath(each.script).name for each in prints])
    hashes = [each.script_hash for each in prints]
    if not diffs and all(hashes):
        edited = f"{PurePath(prints[0].script).name} was edited between the runs"
        rows = _of("script_hash", "script content", [each[:8] for each in hashes])
        diffs += [replace(row, remark=edited) for row in rows]
    diffs += _by_key("arguments", arguments_of, absent="not given")
    diffs += _by_key("versions", [each.versions for each in prints])
    diffs += _by_key("flags", [each.flags for each in prints])
    if len({each.module_hash for each in prints}) > 1:
        trees = describe_trees([dict(each.modules) for each in prints])
        values = trees or describe_shapes(shapes or [{} for _ in prints])
        diffs.append(FingerprintDifference("modules", "modules" if trees else "shapes", values))
    diffs += _of("parameter_count", "parameters", [f"{each.parameter_count:,}" for each in prints])
    diffs += _of("device", "device", [each.device for each in prints])
    diffs += _of("world_size", "ranks", [str(each.world_size) for each in prints])
    diffs += _of("optimizers", "optimizer", [", ".join(each.optimizers) for each in prints])
    options = [each.hyperparameters for each in prints]
    if len({each.optimizers for each in prints}) == 1 and all(options):
        diffs += _by_key("hyperparameters", options)
    diffs += _of("dtypes", "type of weights", [_types(each.dtypes) for each in prints])
    diffs += [replace(each, role=Role.NOTE) for each in _of("host", "host", [each.host for each in prints])]
    return [replace(each, remark=each.remark or _remark(each, ignored)) for each in diffs]


def _types(dtypes: Mapping[str, int]) -> str:
    return ", ".join(dtypes if len(dtypes) < 2 else (f"{name} {of:,}" for name, of in dtypes.items()))


def _remark(difference: FingerprintDifference, ignored: Mapping[str, str]) -> str:
    """Return why an argument that should have shaped the model did not, with what it should have changed."""
    field, _, key = difference.field.partition(".")
    if field == "arguments":
        return ignored.get(key, "")
    return "; ".join(ignored.values()) if field == "modules" else ""


def assign_roles(diffs: list[FingerprintDifference], factor: str | None) -> list[FingerprintDifference]:
    """Assign each difference its role: what the named factor explains is no obstacle.

    What an argument may change, such as the module tree, is its consequence, provided that the script and all
    other arguments agree.
    """
    named = [_with_role(difference, factor) for difference in diffs]
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


def _with_role(difference: FingerprintDifference, factor: str | None) -> FingerprintDifference:
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


def arguments(tokens: tuple[str, ...]) -> dict[str, str]:
    """Read arguments such as ``--lr 0.1``, ``lr=0.1`` and ``--flag``; others are ``argument 1`` and so on."""
    read: dict[str, str] = {}
    name = ""
    position = 0
    for token in tokens:
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


def _of(field: str, name: str, values: Sequence[str]) -> list[FingerprintDifference]:
    if len(set(values)) < 2:
        return []
    return [FingerprintDifference(field, name, tuple(value or "unknown" for value in values))]


def _by_key(
    field: str, maps: Sequence[Mapping[str, str]], absent: str = "none"
) -> list[FingerprintDifference]:
    keys = dict.fromkeys(key for each in maps for key in each)
    rows = [_of(f"{field}.{key}", key, [str(each.get(key, absent)) for each in maps]) for key in keys]
    return [row for differing in rows for row in differing]


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
    deepest = max(outermost, key=lambda name: counted[name], default=None)
    return None if deepest is None else (deepest, counted[deepest])


def describe_trees(trees: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """Return how module trees differ: in the number of layers if that explains it, else by their modules.

    Empty where names and types agree.
    """
    counted = [layers(tree) for tree in trees]
    layered = [each for each in counted if each is not None]
    if len(layered) == len(trees) and len({name for name, _ in layered}) == 1 < len({n for _, n in layered}):
        return tuple(f"{count(number, 'layer')} in {name or 'the root'}" for name, number in layered)
    shared = set.intersection(*(set(tree.items()) for tree in trees))
    unshared = [
        [f"{name or 'root'} {kind}" for name, kind in tree.items() if (name, kind) not in shared]
        for tree in trees
    ]
    return tuple(listed(names, MAX_NAMES) or "no others" for names in unshared) if any(unshared) else ()


def describe_shapes(shapes: Sequence[Shapes]) -> tuple[str, ...]:
    """Return the shapes of the parameters in which runs differ."""
    shared = set.intersection(*(set(each.items()) for each in shapes))
    unshared = [
        [f"{name} {list(shape)}" for name, shape in each.items() if (name, shape) not in shared]
        for each in shapes
    ]
    return tuple(listed(names, MAX_NAMES) or "other shapes" for names in unshared)


def ignored_arguments(prints: Sequence[Fingerprint], by_run: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the arguments that should have shaped a model and did not, each with the reason.

    One that sets a number of layers is ignored where all runs ask for the same and have different ones;
    another that shapes a model where its values differ and module tree and shapes agree.
    """
    reasons = {}
    same_tree = len({each.module_hash for each in prints}) == 1 and prints[0].module_hash != ""
    counted = [layers(dict(each.modules)) for each in prints]
    numbers = [str(each[1]) for each in counted if each is not None]
    for key in (key for key in by_run[0] if all(key in each for each in by_run)):
        name, ignored = normalize(key).rpartition(".")[2], f"the argument `{key.lstrip('-')}` was ignored"
        wanted = by_run[0][key]
        if len({each[key] for each in by_run}) > 1:
            if same_tree and SHAPE_ARGUMENTS.fullmatch(name):
                reasons[key] = f"{ignored}: modules and parameters are the same"
        elif len(numbers) == len(prints) and len(set(numbers)) > 1 and LAYER_ARGUMENTS.fullmatch(name):
            missed = [letter for letter, number in zip(LETTERS, numbers, strict=False) if number != wanted]
            if wanted.isdigit():
                reasons[key] = f"{ignored} in {', '.join(missed)}" if len(missed) < len(prints) else ignored
    return reasons
