"""The spectra of one layer at one step, with a chooser of layers and a slider over steps."""

from __future__ import annotations

from backlight.report.panel import Drawn, Fact, NotMeasured, panel
from backlight.report.source import Source
from backlight.report.spectra import explorer
from backlight.text import count, number


@panel(
    "spectra",
    title="Spectra over replicates",
    order=22,
    series=("scalars/spectra", "arrays/spectra"),
    note="What of a layer's gradient comes back with other data, direction by direction. A band is an "
    "interval over replicates; what chance shows is the null.",
    monitor="spectra",
)
def spectra(source: Source) -> Drawn | NotMeasured:
    """Hand over the tables of the layers, by signal share."""
    found = source.spectra
    if not found.layers:
        return NotMeasured(
            source.reason(
                "spectra",
                otherwise='No spectra recorded: watch(..., monitors=("spectra",)), or backlight spectra.',
            )
        )
    data, remarks = explorer(found, source.muon)
    if not data["layers"]:
        return NotMeasured("The arrays of the spectra were lost; the numbers of the layers are below.")
    if source.muon is None:
        remarks.append("Muon's curve was not handed over.")
    if found.left_out:
        reasons = sorted(set(found.left_out.values()))
        remarks.append(f"{count(len(found.left_out), 'parameter')} left out: {'; '.join(reasons[:3])}.")
    facts = (
        Fact("layers", number(len(found.layers))),
        Fact("steps", number(len(found.steps))),
    )
    return Drawn("spectra", data, facts, tuple(remarks))
