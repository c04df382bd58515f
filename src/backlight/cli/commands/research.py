"""Commands of the group Research that measure a recipe; those of ``grok`` have files of their own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from backlight.cli.app import command
from backlight.cli.console import print_json
from backlight.cli.options import Json, Overwrite, Ray, Tables
from backlight.cli.progress import count_bar
from backlight.extras import require
from backlight.terminal import write
from backlight.text import parse_size


@command(
    "spectra", "backlight spectra recipe.py",
    "backlight spectra recipe.py --checkpoints 'ckpt/*.pt' -o runs/spectra",
)  # fmt: skip
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
    method: Annotated[
        str, Option(metavar="NAME", help="Decomposition: auto, svd, gram, randomized.")
    ] = "auto",
    max_directions: Annotated[int | None, Option(min=1, help="Maximum directions of a layer.")] = None,
    device: Annotated[
        str | None, Option(metavar="NAME", help="Device: cpu, cuda, cuda:1; default CUDA if available.")
    ] = None,
    dtype: Annotated[
        str | None, Option(metavar="NAME", help="Data type: float32, bfloat16, float64.")
    ] = None,
    seed: Annotated[int, Option(help="Random seed.")] = 0,
    budget: Annotated[str, Option(metavar="SIZE", help="Memory for replicates per rank, as 2G.")] = "2G",
    out: Annotated[
        Path | None,
        Option("--out", "-o", metavar="DIR", help="Run directory, resumed if it exists; default runs/..."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Separate signal from noise in gradient singular directions.

    Each replicate is the gradient of one batch of the recipe. Without --checkpoints the freshly built model
    is measured. Under torchrun the layers are distributed over the ranks; the numbers stay the same.
    """
    require("h5py", "scipy")
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


@command(
    "sweep", "backlight sweep recipe.py --set dim=512,768,1024",
    "backlight sweep recipe.py --set dim=512,1024 --fake --at dim=4096",
)  # fmt: skip
def sweep(
    recipe: Annotated[Path, Argument(metavar="RECIPE.py", help="Recipe file.")],
    chosen: Annotated[
        list[str],
        Option("--set", metavar="KEY=V,V", help="Recipe setting, or several values of it (repeatable)."),
    ],
    timed: Annotated[int, Option(min=12, help="Steps to time at each size.")] = 30,
    fake: Annotated[bool, Option("--fake", help="Predict memory and operations on fake tensors.")] = False,
    limit: Annotated[float, Option(metavar="SECONDS", min=1, help="Time limit of a size.")] = 600.0,
    max_memory: Annotated[str | None, Option(metavar="SIZE", help="Memory limit of a size, as 8G.")] = None,
    at: Annotated[
        list[str] | None, Option(metavar="KEY=VALUE", help="Setting to extrapolate to (repeatable).")
    ] = None,
    ray: Ray = None,
    full: Tables = False,
    as_json: Json = False,
) -> int:
    """Measure a recipe at several sizes and fit how it scales.

    Each size runs in its own process, one after the other; with --ray as a task of a Ray cluster.
    """
    from backlight.cli.render.sweep import show
    from backlight.diagnose.scaling.sweep import parse_axes
    from backlight.diagnose.scaling.sweep import sweep as run
    from backlight.launch.ray_tasks import RayOptions
    from backlight.launch.recipe import parse_settings

    axes = parse_axes(chosen)
    options = None if ray is None else RayOptions.of(ray)
    memory = None if max_memory is None else parse_size(max_memory, "--max-memory")
    wanted = parse_settings(at) if at else None
    with count_bar("sizes", quiet=as_json) as bar:
        found = run(
            recipe, axes, fake=fake, steps=timed, limit=limit, max_memory=memory, at=wanted, on_point=bar,
            ray=options,
        )  # fmt: skip
    if as_json:
        print_json(found)
    else:
        show(found, full=full)
    return 0


@command(
    "gram", "backlight gram recipe.py --set batch=64",
    "backlight gram recipe.py --checkpoint ckpt/1000.pt -o gram.h5",
)  # fmt: skip
def gram(
    recipe: Annotated[Path, Argument(metavar="RECIPE.py", help="build_model, batches and loss.")],
    checkpoint: Annotated[Path | None, Option(metavar="FILE", help="Checkpoint to load first.")] = None,
    changes: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="Recipe setting (repeatable).")
    ] = None,
    reduction: Annotated[
        str, Option(metavar="NAME", help="The recipe's loss over the samples: mean or sum.")
    ] = "mean",
    rows: Annotated[int, Option(min=1, help="Maximum rows of a printed table.")] = 10,
    device: Annotated[str | None, Option(metavar="NAME", help="Device, as cpu, cuda or cuda:1.")] = None,
    dtype: Annotated[str | None, Option(metavar="NAME", help="Data type: float32 or float64.")] = None,
    out: Annotated[
        Path | None, Option("--out", "-o", metavar="FILE", help="HDF5 file for Grams and eigenvalues, .h5.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Measure exact gradient outer products of a recipe's batch.

    A sample is a row along the first dimension of the batch. The eigenvalues are those of the second moment
    of the per-sample gradients; every Gram is checked against backward.
    """
    from backlight.cli.render.gram import as_object, show
    from backlight.launch.recipe import parse_settings
    from backlight.store.export.files import check_target, write_arrays

    if out is not None:
        check_target(out, (".h5",), "use .h5")
    settings = parse_settings(changes or [])
    from backlight.diagnose.recipe_gram import measure_gram

    found = measure_gram(
        recipe, settings, checkpoint=checkpoint, reduction=reduction, device=device, dtype=dtype
    )
    if as_json:
        print_json(as_object(found))
    else:
        show(found, rows)
    if out is not None:
        write(write_arrays(out, found.arrays(), overwrite=overwrite), file=sys.stderr if as_json else None)
