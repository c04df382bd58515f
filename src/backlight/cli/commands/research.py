"""Commands of the group Research that measure a recipe; those of ``grok`` have files of their own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from backlight.cli.app import command
from backlight.cli.console import count_bar, print_answer
from backlight.cli.options import PATH, json_option, overwrite_option, ray_option, tables_option
from backlight.extras import require
from backlight.terminal import write
from backlight.text import parse_size


@command(
    "spectra", "backlight spectra recipe.py",
    "backlight spectra recipe.py --checkpoints 'ckpt/*.pt' -o runs/spectra",
)  # fmt: skip
@click.argument("recipe", type=PATH, metavar="RECIPE.py", help="build_model, batches and loss.")
@click.option(
    "--checkpoints", multiple=True, metavar="PATTERN", help="Checkpoints, quoted: 'ckpt/*.pt' (repeatable)."
)
@click.option(
    "--replicates", default=16, metavar="N", type=click.IntRange(min=3), help="Number of batches to compare."
)
@click.option(
    "--include", multiple=True, metavar="PATTERN", help="Matrices to measure, as 'blocks.*' (repeatable)."
)
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Matrices to skip (repeatable).")
@click.option("changes", "--set", multiple=True, metavar="KEY=VALUE", help="Recipe setting (repeatable).")
@click.option("--method", default="auto", metavar="NAME", help="Decomposition: auto, svd, gram, randomized.")
@click.option(
    "--max-directions", metavar="N", type=click.IntRange(min=1), help="Maximum directions of a layer."
)
@click.option("--device", metavar="NAME", help="Device: cpu, cuda, cuda:1; default CUDA if available.")
@click.option("--dtype", metavar="NAME", help="Data type: float32, bfloat16, float64.")
@click.option("--seed", default=0, metavar="N", type=int, help="Random seed.")
@click.option("--budget", default="2G", metavar="SIZE", help="Memory for replicates per rank, as 2G.")
@click.option(
    "--out", "-o", type=PATH, metavar="DIR", help="Run directory, resumed if it exists; default runs/..."
)
@json_option
def spectra(
    *,
    recipe: Path,
    checkpoints: Sequence[str],
    replicates: int,
    include: Sequence[str],
    exclude: Sequence[str],
    changes: Sequence[str],
    method: str,
    max_directions: int | None,
    device: str | None,
    dtype: str | None,
    seed: int,
    budget: str,
    out: Path | None,
    as_json: bool,
) -> int:
    """Separate signal from noise in gradient singular directions.

    Each replicate is the gradient of one batch of the recipe. Without --checkpoints the freshly built model
    is measured. Under torchrun the layers are distributed over the ranks; the numbers stay the same.
    """
    require("h5py", "scipy")
    from backlight.diagnose.spectra.options import SpectraRequest
    from backlight.launch.recipe import parse_settings

    request = SpectraRequest(
        recipe=recipe, settings=parse_settings(changes), checkpoints=tuple(checkpoints),
        replicates=replicates, include=tuple(include), exclude=tuple(exclude),
        method=method, max_directions=max_directions, device=device, dtype=dtype, seed=seed,
        budget=parse_size(budget, "--budget"), out=out,
    )  # fmt: skip
    from backlight.diagnose.spectra.run import measure_spectra

    with count_bar("layers") as bar:
        outcome = measure_spectra(request, lambda stage: bar(stage.done, stage.total, stage.text))
    if outcome.rank:
        return 0
    from backlight.diagnose.spectra.run import answer
    from backlight.store.read.run import open_run

    print_answer(answer(outcome, open_run(outcome.path)), as_json=as_json, full=True)
    return 0


@command(
    "sweep", "backlight sweep recipe.py --set dim=512,768,1024",
    "backlight sweep recipe.py --set dim=512,1024 --fake --at dim=4096",
)  # fmt: skip
@click.argument("recipe", type=PATH, metavar="RECIPE.py", help="Recipe file.")
@click.option(
    "chosen",
    "--set",
    multiple=True,
    required=True,
    metavar="KEY=V,V",
    help="Recipe setting, or several values of it (repeatable).",
)
@click.option(
    "--timed", default=30, metavar="N", type=click.IntRange(min=12), help="Steps to time at each size."
)
@click.option("--fake", is_flag=True, help="Predict memory and operations on fake tensors.")
@click.option(
    "--limit", default=600.0, type=click.FloatRange(min=1), metavar="SECONDS", help="Time limit of a size."
)
@click.option("--max-memory", metavar="SIZE", help="Memory limit of a size, as 8G.")
@click.option("--at", multiple=True, metavar="KEY=VALUE", help="Setting to extrapolate to (repeatable).")
@ray_option
@tables_option
@json_option
def sweep(
    *,
    recipe: Path,
    chosen: Sequence[str],
    timed: int,
    fake: bool,
    limit: float,
    max_memory: str | None,
    at: Sequence[str],
    ray: Sequence[str],
    full: bool,
    as_json: bool,
) -> int:
    """Measure a recipe at several sizes and fit how it scales.

    Each size runs in its own process, one after the other; with --ray as a task of a Ray cluster.
    """
    from backlight.diagnose.scaling.sweep import answer, parse_axes
    from backlight.diagnose.scaling.sweep import sweep as run
    from backlight.launch.ray_tasks import RayOptions
    from backlight.launch.recipe import parse_settings

    axes = parse_axes(chosen)
    options = None if ray is None else RayOptions.of(ray)
    memory = None if max_memory is None else parse_size(max_memory, "--max-memory")
    wanted = parse_settings(at) if at else None
    with count_bar("sizes", quiet=as_json) as bar:
        scaling = run(
            recipe, axes, fake=fake, steps=timed, limit=limit, max_memory=memory, at=wanted, on_point=bar,
            ray=options,
        )  # fmt: skip
    print_answer(answer(scaling), as_json=as_json, full=full)
    return 0


@command(
    "gram", "backlight gram recipe.py --set batch=64",
    "backlight gram recipe.py --checkpoint ckpt/1000.pt -o gram.h5",
)  # fmt: skip
@click.argument("recipe", type=PATH, metavar="RECIPE.py", help="build_model, batches and loss.")
@click.option("--checkpoint", type=PATH, metavar="FILE", help="Checkpoint to load first.")
@click.option("changes", "--set", multiple=True, metavar="KEY=VALUE", help="Recipe setting (repeatable).")
@click.option(
    "--reduction", default="mean", metavar="NAME", help="The recipe's loss over the samples: mean or sum."
)
@click.option(
    "--rows", default=10, metavar="N", type=click.IntRange(min=1), help="Maximum rows of a printed table."
)
@click.option("--device", metavar="NAME", help="Device, as cpu, cuda or cuda:1.")
@click.option("--dtype", metavar="NAME", help="Data type: float32 or float64.")
@click.option("--out", "-o", type=PATH, metavar="FILE", help="HDF5 file for Grams and eigenvalues, .h5.")
@overwrite_option
@json_option
def gram(
    *,
    recipe: Path,
    checkpoint: Path | None,
    changes: Sequence[str],
    reduction: str,
    rows: int,
    device: str | None,
    dtype: str | None,
    out: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Measure exact gradient outer products of a recipe's batch.

    A sample is a row along the first dimension of the batch. The eigenvalues are those of the second moment
    of the per-sample gradients; every Gram is checked against backward.
    """
    from backlight.launch.recipe import parse_settings
    from backlight.store.export import check_target, write_arrays

    if out is not None:
        check_target(out, (".h5",), "use .h5")
    settings = parse_settings(changes)
    from backlight.diagnose.recipe_gram import answer, measure_gram

    measured = measure_gram(
        recipe, settings, checkpoint=checkpoint, reduction=reduction, device=device, dtype=dtype
    )
    print_answer(answer(measured), as_json=as_json, full=True, rows=rows)
    if out is not None:
        write(write_arrays(out, measured.arrays(), overwrite=overwrite), file=sys.stderr if as_json else None)
