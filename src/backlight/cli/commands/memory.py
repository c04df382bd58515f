"""``backlight memory``: the memory of a step, measured of a script or predicted of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import click

from backlight.cli.app import command, memory
from backlight.cli.console import print_answer
from backlight.cli.options import (
    PATH,
    json_option,
    module_option,
    script_argument,
    script_json_option,
    store_option,
    tables_option,
)
from backlight.terminal import make_console
from backlight.text import parse_size


@command(
    "measure", "backlight memory train.py", "backlight memory --recorded 3 train.py --lr 0.1",
    group=memory, script=True,
)  # fmt: skip
@script_argument
@module_option
@click.option("--warmup", default=2, metavar="N", type=click.IntRange(min=1), help="Steps before recording.")
@click.option(
    "--recorded",
    default=1,
    metavar="N",
    type=click.IntRange(min=1),
    help="Steps to record, after which the script is ended.",
)
@store_option
@tables_option
@script_json_option
@click.pass_context
def measure(
    context: click.Context,
    *,
    script: str,
    module: bool,
    warmup: int,
    recorded: int,
    out: Path | None,
    full: bool,
    as_json: bool,
) -> int:
    """Measure the memory of a step of a script, by module and tensor kind.

    Ends the script after the recorded steps.
    """
    from backlight.launch.script import check

    check(script, module=module)
    from backlight.diagnose.memory.answer import answer
    from backlight.diagnose.memory.measure import measure_memory
    from backlight.diagnose.memory.result import open_memory_run, store_memory

    arguments = list(context.args)
    with nullcontext() if out is None else open_memory_run(out, script, arguments) as writer:
        measured = measure_memory(
            script, arguments, module=module, warmup=warmup, steps=recorded, quiet=as_json
        )
        print_answer(answer(measured), as_json=as_json, full=full)
        if writer is not None:
            store_memory(writer, measured)
    return 0


@command(
    "predict", "backlight memory predict recipe.py --set batch=64 --budget 24G", group=memory,
)  # fmt: skip
@click.argument("recipe", type=PATH, metavar="RECIPE", help="File with build_model, batches and loss.")
@click.option(
    "settings", "--set", multiple=True, metavar="KEY=VALUE", help="Setting of the recipe (repeatable)."
)
@click.option("--budget", metavar="SIZE", help="Memory for which the largest batch is searched, as 24G.")
@click.option(
    "--batch-setting", default="batch", metavar="KEY", help="Setting of the recipe that is the batch size."
)
@click.option("--checkpointing", is_flag=True, help="Predict the savings of checkpointing as well.")
@store_option
@tables_option
@json_option
def predict_memory(
    *,
    recipe: Path,
    settings: Sequence[str],
    budget: str | None,
    batch_setting: str,
    checkpointing: bool,
    out: Path | None,
    full: bool,
    as_json: bool,
) -> int:
    """Predict the memory of a step of a recipe, and allocate nothing."""
    from backlight.diagnose.memory.answer import answer
    from backlight.diagnose.memory.predictor import (
        Predictor,
        UnreadRecipe,
        checkpointing_savings,
        largest_batch,
    )
    from backlight.diagnose.memory.result import open_memory_run, store_memory
    from backlight.launch.recipe import parse_settings

    available = None if budget is None else parse_size(budget, "--budget")
    unread = UnreadRecipe(recipe, parse_settings(settings))
    # A setting that the recipe does not take is refused now, not after a prediction.
    accepts = () if available is None else (batch_setting,)
    with (
        Predictor() as predictor,  # first: it may fork, which no open run should see
        nullcontext() if out is None else open_memory_run(out, str(recipe), settings) as writer,
        make_console(stderr=True).status("predicting") as status,
    ):
        prediction = predictor.predict(unread, accepts=accepts)
        if checkpointing:
            status.update("predicting with checkpointing")
            prediction = replace(
                prediction, checkpointing=checkpointing_savings(predictor, unread, prediction)
            )
        if available is not None:

            def show(batch: int, peak: int) -> None:
                status.update(f"predicted a batch of {batch}: {peak / 1e9:.2f} GB")

            fit = largest_batch(predictor, unread, available, setting=batch_setting, progress=show)
            prediction = replace(prediction, fit=fit)
        status.stop()
        print_answer(answer(prediction, with_checkpointing=checkpointing), as_json=as_json, full=full)
        if writer is not None:
            store_memory(writer, prediction)
    return 0
