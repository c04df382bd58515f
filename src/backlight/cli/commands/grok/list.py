"""``backlight grok list``: the experiments that there are."""

from __future__ import annotations

import json

from rich.table import Table

from backlight.cli.app import command
from backlight.cli.console import make_console
from backlight.cli.options import Json


@command("list", group="grok")
def listing(
    as_json: Json = False,
) -> None:
    """List the experiments with their sources and effects."""
    from backlight.experiments.experiment import EXPERIMENTS

    found = [
        {
            "name": name,
            "title": experiment.title,
            "arxiv": experiment.paper.arxiv,
            "paper": experiment.paper.title,
            "claim": experiment.paper.claim,
            "unclear": experiment.paper.unclear,
            "effect": experiment.effect,
            "expects": experiment.expects,
            "ci_expects": experiment.ci_expects,
        }
        for name, experiment in EXPERIMENTS.items()
    ]
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "experiment", "arXiv", "effect", "expects", "ci"):
        table.add_column(column, no_wrap=column not in ("experiment", "effect"))
    for one in found:
        expects = one["expects"] or "-"
        table.add_row(one["name"], one["title"], one["arxiv"], one["effect"], expects, one["ci_expects"])
    make_console().print(table)
