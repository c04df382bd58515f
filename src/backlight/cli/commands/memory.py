"""``backlight memory``: where the memory of a step goes, measured or predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def memory(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="A training script; with --fake, a recipe; with -m, a module."),
    ],
    module: Annotated[bool, typer.Option("-m", help="TARGET is a module, as for python -m.")] = False,
    fake: Annotated[
        bool,
        typer.Option("--fake", help="Predict: TARGET is a recipe, run on fake tensors that take no memory."),
    ] = False,
    warmup: Annotated[int, typer.Option("--warmup", min=1, help="Steps to let pass before recording.")] = 2,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to record.")] = 1,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="With --fake, a setting of the recipe: name=value.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", help="With --fake: find the largest batch within this, such as 24G."),
    ] = None,
    batch_setting: Annotated[
        str, typer.Option("--batch-setting", help="The recipe's setting that is the batch.")
    ] = "batch",
    checkpointing: Annotated[
        bool,
        typer.Option(
            "--checkpointing", help="With --fake: predict what checkpointing repeated blocks saves and costs."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Also store the account as a run, for backlight report.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one object; what the script prints goes to standard error.")
    ] = False,
) -> int:
    """Say where the memory of a step goes: backlight memory [OPTIONS] TARGET [ITS ARGUMENTS].

    A script runs until some steps are recorded, and is ended. With --fake, also after TARGET, nothing is
    allocated: the options may follow the recipe, and --NAME VALUE is a setting of it.
    """
    from backlight.cli.launch.memory_options import fake_options

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
        from backlight.cli.launch.memory_prediction import run_prediction

        run_prediction(options)
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


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``; what follows a script belongs to the script."""
    app.command(
        "memory",
        context_settings={
            "allow_extra_args": True,
            "allow_interspersed_args": False,
        },
    )(memory)
