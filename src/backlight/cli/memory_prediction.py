"""``backlight memory --fake``: the options around a recipe, and the prediction that they ask for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backlight.terminal import make_console
from backlight.text import parse_size


@dataclass(frozen=True)
class FakeOptions:
    """Request of the command line for a prediction."""

    recipe: str
    settings: tuple[str, ...] = ()
    budget: str | None = None
    batch_setting: str = "batch"
    checkpointing: bool = False
    out: Path | None = None
    as_json: bool = False
    full: bool = False


def fake_options(target: str, rest: list[str], *, fake: bool, **options: Any) -> FakeOptions | None:
    """Return the options of a prediction, before and after the recipe; None for a script to be run."""
    if not fake and "--fake" not in rest:
        for name in ("settings", "budget", "checkpointing"):
            if options[name]:
                flag = "--set" if name == "settings" else f"--{name}"
                raise ValueError(f"{flag} belongs to a prediction: add --fake, and give a recipe")
        return None
    settings = list(options.pop("settings"))
    for name, value in _pairs(target, rest):
        match name:
            case "--fake":
                pass
            case "--set":
                settings.append(value)
            case "--budget" | "--batch-setting":
                options[name.removeprefix("--").replace("-", "_")] = value
            case "--out":
                options["out"] = Path(value)
            case "--checkpointing":
                options["checkpointing"] = True
            case "--json":
                options["as_json"] = True
            case "--full":
                options["full"] = True
            case _:
                settings.append(f"{name.removeprefix('--').replace('-', '_')}={value}")
    return FakeOptions(target, tuple(settings), **options)


_FLAGS = {"--fake", "--json", "--checkpointing", "--full"}


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
            try:
                value = next(waiting)
            except StopIteration:
                raise ValueError(f"{target}: {name} lacks its value") from None
        yield name, value


def predict(options: FakeOptions) -> None:
    """Predict the memory of a recipe, print it and store it where asked."""
    from backlight.cli.render.memory import print_predicted
    from backlight.diagnose.memory.predictor import (
        Predictor,
        UnreadRecipe,
        checkpointing_savings,
        largest_batch,
    )
    from backlight.diagnose.memory.result import open_memory_run, store_memory
    from backlight.launch.recipe import parse_settings

    budget = None if options.budget is None else parse_size(options.budget, "--budget")
    recipe = UnreadRecipe(Path(options.recipe), parse_settings(options.settings))
    # A setting that the recipe does not take is refused now, not after a prediction.
    accepts = () if budget is None else (options.batch_setting,)
    console = make_console(stderr=True)
    with (
        Predictor() as predictor,  # first: it may fork, which no open run should see
        nullcontext()
        if options.out is None
        else open_memory_run(options.out, options.recipe, options.settings) as writer,
        console.status("predicting") as status,
    ):
        prediction = predictor.predict(recipe, accepts=accepts)
        if options.checkpointing:
            status.update("predicting with checkpointing")
            savings = checkpointing_savings(predictor, recipe, prediction)
            prediction = replace(prediction, checkpointing=savings)
        if budget is not None:

            def show(batch: int, peak: int) -> None:
                status.update(f"predicted a batch of {batch}: {peak / 1e9:.2f} GB")

            setting = options.batch_setting
            fit = largest_batch(predictor, recipe, budget, setting=setting, progress=show)
            prediction = replace(prediction, fit=fit)
        status.stop()
        print_predicted(prediction, wanted=options.checkpointing, as_json=options.as_json, full=options.full)
        if writer is not None:
            store_memory(writer, prediction)
