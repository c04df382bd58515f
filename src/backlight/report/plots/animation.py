"""The slider over steps as files: one PNG for each step of a layer, and a GIF of them."""

from __future__ import annotations

from pathlib import Path

from backlight.report.panel import PANELS, Drawn
from backlight.report.plots.save import file_name, prepared, styled
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
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional package, wanted only here
    from PIL import Image  # noqa: PLC0415 - comes with it

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
            pictures = []
            for view in views:
                figure.clear()
                spectra.draw(figure, view, limits)
                frame = frames / f"step-{view.step:08d}.png"
                figure.savefig(frame, dpi=DPI)
                written.append(frame)
                with Image.open(frame) as drawn:
                    pictures.append(drawn.convert("RGB").quantize(64))
            gif = frames.with_name(f"{frames.name}.gif")
            pictures[0].save(
                gif, save_all=True, append_images=pictures[1:], duration=1000 // PER_SECOND, loop=0
            )
            written.append(gif)
    return tuple(written)
