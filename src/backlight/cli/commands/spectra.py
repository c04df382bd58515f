"""``backlight spectra``: what in the gradients of a recipe's model is signal, over its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def spectra(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.py", help="build_model, batches and loss.")],
    checkpoints: Annotated[
        list[str] | None,
        typer.Option(
            "--checkpoints", metavar="PATTERN", help="Files to load, quoted: 'ckpt/*.pt'; again for more."
        ),
    ] = None,
    replicates: Annotated[
        int, typer.Option("--replicates", min=3, help="Batches whose gradients are compared.")
    ] = 16,
    include: Annotated[
        list[str] | None,
        typer.Option("--include", metavar="PATTERN", help="Matrices to measure: 'blocks.*'; again for more."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="PATTERN", help="Matrices to leave out; again for more."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of the recipe; again for more."),
    ] = None,
    method: Annotated[
        str, typer.Option("--method", help="How matrices are decomposed: auto, svd, gram, randomized.")
    ] = "auto",
    max_directions: Annotated[
        int | None, typer.Option("--max-directions", min=1, help="Most directions of a layer to measure.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, cuda, cuda:1; without it CUDA where there is some.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Of the model and its inputs: float32, bfloat16, float64.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of everything that is drawn.")] = 0,
    budget: Annotated[
        str, typer.Option("--budget", help="Memory for replicates on each rank; less means more backwards.")
    ] = "2G",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Run directory; one that is there is gone on with. Without it runs/..."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object.")] = False,
) -> int:
    """Measure which singular directions of the gradients would come back with other data.

    Each replicate is the gradient of one batch of the recipe. Without --checkpoints the freshly built model
    is measured. Under torchrun the layers are spread over the ranks; the numbers stay the same.
    """
    from backlight.cli.options import parse_size
    from backlight.cli.render.spectra import as_object, bar, show
    from backlight.diagnose.spectra.options import Asked, method_of
    from backlight.launch.recipe import parse_settings

    asked = Asked(
        recipe=recipe,
        settings=parse_settings(changes or []),
        checkpoints=tuple(checkpoints or ()),
        replicates=replicates,
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        method=method_of(method),
        max_directions=max_directions,
        device=device,
        dtype=dtype,
        seed=seed,
        budget=parse_size(budget, "--budget"),
        out=out,
    )
    from backlight.diagnose.spectra.run import measure_spectra

    with bar() as on_stage:
        outcome = measure_spectra(asked, on_stage)
    if outcome.rank:
        return 0
    from backlight.store.read.run import open_run

    run = open_run(outcome.path)
    if as_json:
        from backlight.cli.console import print_json

        print_json(as_object(outcome, run))
    else:
        show(outcome, run)
    return 0


def add_to(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("spectra")(spectra)
