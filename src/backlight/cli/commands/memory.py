"""``backlight memory``: where the memory of a step goes, measured or predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from backlight.cli.app import command
from backlight.cli.console import make_console
from backlight.cli.options import Json, Module


@command("memory", "Diagnose", script=True)
def memory(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="Training script; with --fake a recipe, with -m a module."),
    ],
    module: Module = False,
    fake: Annotated[
        bool,
        typer.Option("--fake", help="Predict for a recipe on fake tensors."),
    ] = False,
    warmup: Annotated[int, typer.Option("--warmup", min=1, help="Steps before recording.")] = 2,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to record.")] = 1,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Recipe setting NAME=VALUE, with --fake (repeatable).")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", help="Memory for the largest batch, as 24G, with --fake."),
    ] = None,
    batch_setting: Annotated[
        str, typer.Option("--batch-setting", help="Recipe setting that is the batch size.")
    ] = "batch",
    checkpointing: Annotated[
        bool,
        typer.Option("--checkpointing", help="Predict savings of checkpointing, with --fake."),
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Run directory to store the result in.")] = None,
    as_json: Json = False,
) -> int:
    """Profile the memory of a step by module and tensor kind.

    A script runs until some steps are recorded, and is ended. With --fake nothing is allocated: TARGET is a
    recipe, options may follow it, and --NAME VALUE is a setting of it.
    """
    options = fake_options(
        target,
        list(context.args),
        fake=fake,
        settings=settings or [],
        budget=budget,
        batch_setting=batch_setting,
        checkpointing=checkpointing,
        out=out,
        as_json=as_json,
    )
    if options is not None:
        _predict(options)
        return 0
    from backlight.launch.script import check

    check(target, module=module)
    from backlight.cli.render.memory import print_measured
    from backlight.diagnose.memory.measure import measure_memory
    from backlight.diagnose.memory.result import open_memory_run, store_memory

    arguments = list(context.args)
    writer = open_memory_run(out, target, arguments) if out is not None else None
    measured = measure_memory(target, arguments, module=module, warmup=warmup, steps=steps, quiet=as_json)
    print_measured(measured, as_json=as_json)
    if writer is not None:
        store_memory(writer, measured)
    return 0


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
        The file, and the arguments after it.
    fake, options:
        The options before it.

    Raises
    ------
    ValueError
        If an argument after a recipe is neither option nor setting, or a script is given for a prediction.
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


def _predict(options: FakeOptions) -> None:

    from backlight.cli.options import parse_size
    from backlight.cli.render.memory import print_predicted
    from backlight.diagnose.memory.predictor import Predictor, checkpointing_savings, largest_batch
    from backlight.diagnose.memory.result import open_memory_run, store_memory
    from backlight.launch.recipe import parse_settings, read_recipe

    budget = None if options.budget is None else parse_size(options.budget, "--budget")
    recipe = read_recipe(options.recipe, parse_settings(options.settings))
    if budget is not None:
        recipe.with_settings({options.batch_setting: 1})  # refused now, not after a prediction
    writer = None
    if options.out is not None:
        writer = open_memory_run(options.out, options.recipe, list(options.settings))
    console = make_console(stderr=True)
    with Predictor() as predictor, console.status("predicting") as status:
        prediction = predictor.predict(recipe)
        if options.checkpointing:
            status.update("predicting with checkpointing")
            savings = checkpointing_savings(predictor, recipe, prediction)
            prediction = prediction.model_copy(update={"checkpointing": savings})
        if budget is not None:
            fit = largest_batch(
                predictor,
                recipe,
                budget,
                setting=options.batch_setting,
                progress=lambda batch, peak: status.update(
                    f"predicted a batch of {batch}: {peak / 1e9:.2f} GB"
                ),
            )
            prediction = prediction.model_copy(update={"fit": fit})
    print_predicted(prediction, wanted=options.checkpointing, as_json=options.as_json)
    if writer is not None:
        store_memory(writer, prediction)
