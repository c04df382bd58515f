"""The slider over steps as files: one PNG for each step of a layer, and a GIF of them."""

from __future__ import annotations

from pathlib import Path

from backlight.report.panel import PANELS, Drawn
from backlight.report.plots.writing import file_name, prepared, styled
from backlight.report.source import Source

DPI = 90

PER_SECOND = 2
"""Steps that a GIF shows in a second."""


def write_animations(source: Source, folder: Path) -> tuple[Path, ...]:
    """Write the steps of the layers with the largest share of signal into ``folder``.

    For each layer a GIF and, in a folder of its own, a PNG for each step; both have the same axes
    throughout. A run without spectra gives nothing.

    Raises
    ------
    ModuleNotFoundError
        If matplotlib is not installed; the command line names the extra.
    ValueError
        If the folder is a file.
    """
    from matplotlib.animation import PillowWriter  # noqa: PLC0415 - an optional package, wanted only here
    from matplotlib.figure import Figure  # noqa: PLC0415 - the same

    from backlight.report.plots import spectra  # noqa: PLC0415 - needs it as well

    folder = prepared(folder)
    result = PANELS["spectra"].render(source)
    if not isinstance(result, Drawn):
        return ()
    written: list[Path] = []
    with styled():
        for layer in result.data["layers"][: spectra.PICTURED]:
            views = spectra.views_of(layer, result.data)
            limits = spectra.limits_of(views)
            frames = folder / file_name("spectra", layer["name"])
            frames.mkdir(exist_ok=True)
            figure = Figure(figsize=(spectra.WIDTH, spectra.HEIGHT))
            writer = PillowWriter(fps=PER_SECOND)
            gif = frames.with_name(f"{frames.name}.gif")
            with writer.saving(figure, str(gif), DPI):
                for view in views:
                    figure.clear()
                    spectra.draw(figure, view, limits)
                    frame = frames / f"step-{view.step:08d}.png"
                    figure.savefig(frame, dpi=DPI)
                    writer.grab_frame()
                    written.append(frame)
            written.append(gif)
    return tuple(written)
