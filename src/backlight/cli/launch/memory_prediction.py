"""``memory --fake``: read the recipe, predict, search, print."""

from __future__ import annotations

from rich.console import Console

from backlight.cli.launch.memory_options import FakeOptions
from backlight.cli.render.memory import print_predicted


def run_prediction(options: FakeOptions) -> None:
    """Predict what the options ask for and print it.

    Raises
    ------
    ValueError
        From what cannot be read or predicted.
    """
    from backlight.cli.options import parse_size
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
    console = Console(stderr=True)
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
    print_predicted(prediction, asked=options.checkpointing, as_json=options.as_json)
    if writer is not None:
        store_memory(writer, prediction)
