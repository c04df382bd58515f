"""``backlight spectra``: what in the gradients of a recipe's model is signal, over its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from backlight.cli.app import command
from backlight.cli.console import print_json
from backlight.cli.options import Json, parse_size
from backlight.cli.progress import count_bar


@command("spectra", "Research")
def spectra(
    recipe: Annotated[Path, Argument(metavar="RECIPE.py", help="build_model, batches and loss.")],
    checkpoints: Annotated[
        list[str] | None, Option(metavar="PATTERN", help="Checkpoints, quoted: 'ckpt/*.pt' (repeatable).")
    ] = None,
    replicates: Annotated[int, Option(min=3, help="Number of batches to compare.")] = 16,
    include: Annotated[
        list[str] | None, Option(metavar="PATTERN", help="Matrices to measure, as 'blocks.*' (repeatable).")
    ] = None,
    exclude: Annotated[
        list[str] | None, Option(metavar="PATTERN", help="Matrices to skip (repeatable).")
    ] = None,
    changes: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="Recipe setting (repeatable).")
    ] = None,
    method: Annotated[str, Option(help="Decomposition: auto, svd, gram, randomized.")] = "auto",
    max_directions: Annotated[int | None, Option(min=1, help="Maximum directions of a layer.")] = None,
    device: Annotated[
        str | None, Option(help="Device: cpu, cuda, cuda:1; default CUDA if available.")
    ] = None,
    dtype: Annotated[str | None, Option(help="Data type: float32, bfloat16, float64.")] = None,
    seed: Annotated[int, Option(help="Random seed.")] = 0,
    budget: Annotated[str, Option(help="Memory for replicates per rank, as 2G.")] = "2G",
    out: Annotated[Path | None, Option(help="Run directory, resumed if it exists; default runs/...")] = None,
    as_json: Json = False,
) -> int:
    """Separate signal from noise in gradient singular directions.

    Each replicate is the gradient of one batch of the recipe. Without --checkpoints the freshly built model
    is measured. Under torchrun the layers are distributed over the ranks; the numbers stay the same.
    """
    from backlight.cli.render.spectra import as_object, show
    from backlight.diagnose.spectra.options import SpectraRequest
    from backlight.launch.recipe import parse_settings

    request = SpectraRequest(
        recipe=recipe, settings=parse_settings(changes or []), checkpoints=tuple(checkpoints or ()),
        replicates=replicates, include=tuple(include or ()), exclude=tuple(exclude or ()),
        method=method, max_directions=max_directions, device=device, dtype=dtype, seed=seed,
        budget=parse_size(budget, "--budget"), out=out,
    )  # fmt: skip
    from backlight.diagnose.spectra.run import measure_spectra

    with count_bar("layers") as bar:
        outcome = measure_spectra(request, lambda stage: bar(stage.done, stage.total, stage.text))
    if outcome.rank:
        return 0
    from backlight.store.read.run import open_run

    run = open_run(outcome.path)
    if as_json:
        print_json(as_object(outcome, run))
    else:
        show(outcome, run)
    return 0
