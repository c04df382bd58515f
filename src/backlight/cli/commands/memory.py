"""``backlight memory``: where the memory of a step goes, measured or predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Context, Option

from backlight.cli.app import command
from backlight.cli.console import make_console
from backlight.cli.options import Json, Module, StoreIn, parse_size


@command("memory", "Diagnose", script=True)
def memory(
    context: Context,
    target: Annotated[
        str, Argument(metavar="TARGET", help="Training script; with --fake a recipe, with -m a module.")
    ],
    module: Module = False,
    fake: Annotated[bool, Option("--fake", help="Predict for a recipe on fake tensors.")] = False,
    warmup: Annotated[int, Option(min=1, help="Steps before recording.")] = 2,
    steps: Annotated[int, Option(min=1, help="Steps to record.")] = 1,
    settings: Annotated[
        list[str] | None, Option("--set", help="Recipe setting NAME=VALUE, with --fake (repeatable).")
    ] = None,
    budget: Annotated[str | None, Option(help="Memory for the largest batch, as 24G, with --fake.")] = None,
    batch_setting: Annotated[str, Option(help="Recipe setting that is the batch size.")] = "batch",
    checkpointing: Annotated[
        bool, Option("--checkpointing", help="Predict savings of checkpointing, with --fake.")
    ] = False,
    out: StoreIn = None,
    as_json: Json = False,
) -> int:
    """Profile the memory of a step by module and tensor kind.

    A script runs until some steps are recorded, and is ended. With --fake nothing is allocated: TARGET is a
    recipe, options may follow it, and --NAME VALUE is a setting of it.
    """
    arguments = list(context.args)
    options = fake_options(
        target, arguments, fake=fake, settings=settings or [], budget=budget, out=out, as_json=as_json,
        batch_setting=batch_setting, checkpointing=checkpointing,
    )  # fmt: skip
    if options is not None:
        _predict(options)
        return 0
    from backlight.launch.script import check

    check(target, module=module)
    from backlight.cli.render.memory import print_measured
    from backlight.diagnose.memory.measure import measure_memory
    from backlight.diagnose.memory.result import open_memory_run, store_memory

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
            case _:
                settings.append(f"{name.removeprefix('--').replace('-', '_')}={value}")
    return FakeOptions(target, tuple(settings), **options)


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
            try:
                value = next(waiting)
            except StopIteration:
                raise ValueError(f"{target}: {name} lacks its value") from None
        yield name, value


def _predict(options: FakeOptions) -> None:
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

            def show(batch: int, peak: int) -> None:
                status.update(f"predicted a batch of {batch}: {peak / 1e9:.2f} GB")

            setting = options.batch_setting
            fit = largest_batch(predictor, recipe, budget, setting=setting, progress=show)
            prediction = prediction.model_copy(update={"fit": fit})
    print_predicted(prediction, wanted=options.checkpointing, as_json=options.as_json)
    if writer is not None:
        store_memory(writer, prediction)
