"""The arguments of ``memory --fake``, which may stand before or after the recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class FakeOptions:
    """What is to be predicted."""

    recipe: str
    settings: tuple[str, ...] = ()
    budget: str | None = None
    batch_setting: str = "batch"
    checkpointing: bool = False
    out: Path | None = None
    as_json: bool = False


def fake_options(target: str, rest: list[str], *, fake: bool, **options: Any) -> FakeOptions | None:
    """Return the options of a prediction; None for a script to be run.

    Parameters
    ----------
    target, rest:
        The file, and what stands behind it.
    fake, options:
        What stands before it.

    Raises
    ------
    ValueError
        If what stands behind a recipe is no option and no setting, or a prediction is asked of a script.
    """
    if not fake and "--fake" not in rest:
        for name in ("settings", "budget", "checkpointing"):
            if options[name]:
                flag = "--set" if name == "settings" else f"--{name}"
                raise ValueError(f"{flag} belongs to a prediction: add --fake, and give a recipe")
        return None
    settings = list(options.pop("settings"))
    chosen = FakeOptions(target, **options)
    for name, value in _pairs(target, rest):
        match name:
            case "--fake":
                pass
            case "--set":
                settings.append(value)
            case "--budget":
                chosen = replace(chosen, budget=value)
            case "--batch-setting":
                chosen = replace(chosen, batch_setting=value)
            case "--checkpointing":
                chosen = replace(chosen, checkpointing=True)
            case "--out":
                chosen = replace(chosen, out=Path(value))
            case "--json":
                chosen = replace(chosen, as_json=True)
            case _:
                settings.append(f"{name.removeprefix('--').replace('-', '_')}={value}")
    return replace(chosen, settings=tuple(settings))


_FLAGS = {"--fake", "--json", "--checkpointing"}


def _pairs(target: str, rest: list[str]) -> Iterator[tuple[str, str]]:
    waiting = iter(rest)
    for word in waiting:
        name, sign, value = word.partition("=")
        if not name.startswith("--") or len(name) < 3:
            raise ValueError(
                f"{target}: {word!r} is no option and no setting; with --fake, what follows a recipe is "
                "--set NAME=VALUE or --NAME VALUE"
            )
        if not sign and name not in _FLAGS:
            found = next(waiting, None)
            if found is None:
                raise ValueError(f"{target}: {name} lacks its value")
            value = found
        yield name, value
