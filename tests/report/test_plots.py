"""Plots: one per panel with a picture, in both formats, with the values of the page."""

from __future__ import annotations

import builtins
import errno
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from synthetic import Plan, write_run

from backlight.report import page as pages
from backlight.report.page import rendered
from backlight.report.panel import Drawn, Panel, PanelWarning, in_order
from backlight.report.plots import panels, writer
from backlight.report.plots.style import colours
from backlight.report.plots.writer import write_plots
from backlight.report.source import Source
from grokking_runs import Grok, write_grokking_run

HOSTILE = "$x_{</text><script>alert(1)</script>"


def drawn(source: Source, name: str) -> tuple[Panel, Drawn]:
    panel, result = next((panel, result) for panel, result in rendered(source) if panel.name == name)
    assert isinstance(result, Drawn)
    return panel, result


@pytest.mark.full
def test_every_plot_is_written_in_both_formats(full: Source, tmp_path: Path) -> None:
    written = write_plots(full, tmp_path / "new" / "plots")
    names = {file.stem for file in written.files}
    pictures = {p.name for p, r in rendered(full) if isinstance(r, Drawn) and r.kind in panels.DRAWERS}
    assert {"parameters", "depth", "exponents", "phases", "health", "progress", "gram_spectrum"} <= pictures
    assert pictures <= names
    assert {f"parameters-{name}" for name in ("max_abs", "zero_share", "non_finite", "ratio")} <= names
    for name in names:
        svg, png = (tmp_path / "new" / "plots" / f"{name}.{form}" for form in ("svg", "png"))
        assert ET.parse(svg).getroot().tag.endswith("svg")
        assert png.read_bytes().startswith(b"\x89PNG")
        assert png.stat().st_size > 5_000, name
    assert set(written.words_only) >= {"Events", "Fingerprint"}


@pytest.mark.slow
def test_line_has_the_recorded_values(full: Source) -> None:
    panel, result = drawn(full, "total_norm")
    figure = panels.lines(full, panel.title, result.data)[""]
    norm = full.run.scalar("total_norm")
    x, y = figure.axes[0].get_lines()[0].get_data()
    finite = np.isfinite(np.asarray(y, float))
    kept = np.isfinite(norm.values)
    assert np.array_equal(np.asarray(x)[finite], norm.steps[kept])
    assert np.array_equal(np.asarray(y)[finite], norm.values[kept])
    assert figure.axes[0].get_yscale() == "log"
    broken = [line for line in figure.axes[0].get_lines() if line.get_marker() == "v"]
    assert broken[0].get_xdata().tolist() == norm.steps[~kept].tolist()


@pytest.mark.slow
def test_unmeasured_cells_are_masked(full: Source) -> None:
    panel, result = drawn(full, "parameters")
    figure = panels.parameters(full, panel.title, result.data)[""]
    cells = figure.axes[0].collections[0].get_array()
    assert cells is not None
    rows = cells.reshape(len(full.parameters), -1)
    assert np.ma.getmaskarray(rows)[7].all()
    assert not np.ma.getmaskarray(rows)[1, :80].any()
    rms = full.run.frame("gradient", "rms").values
    assert np.allclose(np.ma.getdata(rows)[1, :80], rms[:80, 1], rtol=0)


@pytest.mark.slow
def test_memorisation_and_generalisation_are_marked(tmp_path: Path) -> None:
    from backlight.analysis.report import source_of
    from backlight.monitors.grokking.panels.learning_curves import analysis_of

    source = source_of(write_grokking_run(tmp_path / "run", Grok(steps=1500, geometry=False)))
    panel, result = drawn(source, "learning_curves")
    figure = panels.lines(source, panel.title, result.data)[""]
    marks = [text.get_text() for text in figure.axes[0].texts]
    assert marks == ["t_m", "t_g"]
    spans = [patch.get_x() for patch in figure.axes[0].patches]  # type: ignore[attr-defined] # rectangles
    found = analysis_of(source)
    assert found is not None
    times = (found.detection.memorised, found.detection.generalised)
    assert spans == [time.after for time in times if time is not None]


@pytest.mark.slow
def test_hostile_name_is_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", Plan(steps=20, blocks=1, user={HOSTILE: 1.0}, rename={3: HOSTILE}))
    known = [panel for panel in in_order() if panel.name in {"user_scalars", "parameters"}]
    monkeypatch.setattr(pages, "in_order", lambda: known)
    written = write_plots(Source(run), tmp_path / "plots", formats=("svg",))
    for file in written.files:
        text = file.read_text()
        assert "<script" not in text
        ET.fromstring(text)
    assert any("&lt;script&gt;alert" in file.read_text() for file in written.files)


@pytest.mark.slow
def test_failing_plot_is_named_and_the_others_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(write_run(tmp_path / "run", Plan(steps=5)))
    known = [panel for panel in in_order() if panel.name == "total_norm"]
    wrong = Panel("strange", "Strange", 1, (), lambda _: Drawn("lines", {"charts": [{}]}))
    monkeypatch.setattr(pages, "in_order", lambda: [wrong, *known])
    with pytest.warns(PanelWarning, match="Panel 'strange' could not be drawn: KeyError"):
        written = write_plots(source, tmp_path / "plots", formats=("svg",))
    assert [file.name for file in written.files] == ["total_norm.svg"]


def test_full_disk_raises_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    source = Source(write_run(tmp_path / "run", Plan(steps=5)))
    monkeypatch.setattr(writer, "_save", full_disk)
    with pytest.raises(OSError, match="No space left on device"):
        write_plots(source, tmp_path / "plots", formats=("svg",))


def test_colours_match_the_page() -> None:
    tones = colours()
    assert tones["tone-first"] == "#1f6fd0"
    assert {f"tone-{name}" for name in (*panels.TONES, "health", "loss", "limit")} <= set(tones)


def test_file_instead_of_directory_is_rejected(full: Source, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is a file; --plots takes a folder"):
        write_plots(full, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_missing_matplotlib_error_names_the_extra(
    full: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from backlight.cli.app import error_line

    real = builtins.__import__

    def blocked(name: str, *rest: object) -> object:
        if name.split(".", maxsplit=1)[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name="matplotlib")
        return real(name, *rest)  # type: ignore[arg-type] # passed on unchanged

    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(ModuleNotFoundError) as refused:
        write_plots(full, tmp_path / "plots")
    line = error_line(refused.value, "report")
    assert line == "backlight report: needs matplotlib; pip install 'backlight[plots]'"
    assert not (tmp_path / "plots").exists()


@pytest.mark.slow
def test_picture_of_spectra_shows_the_last_step(tmp_path: Path) -> None:
    from backlight.report.plots import spectra as pictures
    from spectra_runs import Injected, write_spectra_run

    source = Source(
        write_spectra_run(tmp_path / "run", Injected(steps=(0, 10), shapes={"head.weight": (20, 36)}))
    )
    panel, result = drawn(source, "spectra")
    figure = pictures.spectra(source, panel.title, result.data)[""]
    figure.draw_without_rendering()
    labels = [
        t.get_text() for axes in figure.axes for t in (*axes.get_xticklabels(), *axes.get_yticklabels())
    ]
    assert not [label for label in labels if "$" in label or "\\" in label]
    echo = figure.axes[1].get_lines()[0].get_ydata()
    stored = np.sort(np.asarray(result.data["layers"][0]["table"])[-1, 1])
    assert np.array_equal(np.sort(np.asarray(echo, np.float32)), stored, equal_nan=True)
