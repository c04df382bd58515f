"""Commands on a stored run, and the list of commands and options."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from answer_schemas import ANSWERS

import backlight
from backlight.cli import app as application
from backlight.cli.app import all_commands
from cases import CASES, build, loop

Run = Callable[..., tuple[int, str, str]]
Refused = Callable[..., str]


@pytest.fixture(scope="module")
def healthy_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "healthy"
    with backlight.watch(run=path, every=1):
        CASES["clipped_by_norm"].train()
    return path


@pytest.mark.slow
def test_findings(command: Run, refused: Refused, run_with_nan: Path, healthy_run: Path) -> None:
    code, out, _ = command("findings", run_with_nan)
    assert code == 0
    assert "last.weight" in out
    code, out, _ = command("findings", run_with_nan, "--json")
    finding = next(f for f in json.loads(out)["findings"] if f["rule"] == "non_finite")
    assert finding["severity"] == "error"
    assert finding["subject"]["parameter"] == "last.weight"
    assert finding["subject"]["step"] == 2
    for key in ("title", "detail", "fix", "refuted_if"):
        assert finding[key]
    assert {"path", "step", "value", "unit"} <= set(finding["evidence"][0])
    assert command("findings", run_with_nan, "--fail-on", "non_finite,error")[0] == 1
    assert command("findings", healthy_run, "--fail-on", "non_finite,error")[0] == 0
    assert "non_finite" in refused("findings", run_with_nan, "--fail-on", "nonfinite")


@pytest.mark.slow
def test_report(command: Run, run_with_nan: Path, tmp_path: Path) -> None:
    code, out, _ = command("report", run_with_nan, "--out", tmp_path / "page.html")
    assert code == 0
    assert out.strip() == str(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "last.weight" in page
    assert "Content-Security-Policy" in page
    command("report", run_with_nan, "--format", "md", "--out", tmp_path / "page.md")
    assert "last.weight" in (tmp_path / "page.md").read_text()


@pytest.mark.slow
def test_report_shows_parameter_groups(command: Run, tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    groups = {"body": "first,norm", "head": "last"}
    with backlight.watch(model, optimizer, run=tmp_path / "run", every=1, groups=groups):
        loop(model, optimizer)
    assert command("report", tmp_path / "run", "--out", tmp_path / "page.html")[0] == 0
    assert "body / head" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_export(command: Run, refused: Refused, healthy_run: Path, tmp_path: Path) -> None:
    import pyarrow.parquet

    for suffix in ("csv", "parquet", "h5"):
        code, out, errors = command("export", healthy_run, tmp_path / f"out.{suffix}")
        assert code == 0, errors
        assert all(Path(line).is_file() for line in out.split())
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert table.num_rows == 4 * 6
    assert "out.csv" in refused("export", healthy_run, tmp_path / "out.csv")
    assert command("export", healthy_run, tmp_path / "out.csv", "--overwrite")[0] == 0
    assert ".parquet" in refused("export", healthy_run, tmp_path / "out.xls")


@pytest.mark.slow
def test_compact_and_doctor(command: Run, healthy_run: Path) -> None:
    code, out, _ = command("compact", healthy_run)
    assert code == 0
    assert "B after" in out
    assert len(backlight.open_run(healthy_run).series_steps("gradient")) == 4
    code, out, _ = command("doctor")
    assert code == 0
    assert importlib.metadata.version("torch") in out
    assert "pip install 'backlight[NAME]'" in out
    code, out, _ = command("doctor", "--json")
    checks = {check["what"]: check for check in json.loads(out)}
    assert set(checks["torch"]) == {"what", "state", "found", "meaning", "required"}
    assert (checks["[parquet]"]["state"], checks["[parquet]"]["found"]) == ("ok", "installed")


@pytest.mark.parametrize("name", ["findings", "report", "compact"])
def test_missing_run_is_refused(name: str, refused: Refused, tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in refused(name, tmp_path / "nowhere")


def test_traceback_on_request(command: Run, tmp_path: Path) -> None:
    _, _, errors = command("--traceback", "findings", tmp_path / "nowhere")
    assert "Traceback" in errors


def test_version(command: Run) -> None:
    assert command("--version")[1] == f"backlight {backlight.__version__}\n"


def test_commands_and_options_match_surface_json() -> None:
    """``surface.json`` holds every command with its options; a change of it is a change for users."""
    surface = {
        name: sorted(o for parameter in command.params for o in parameter.opts if o.startswith("-"))
        for name, command in sorted(all_commands().items())
    }
    assert surface == json.loads(Path(__file__).with_name("surface.json").read_text())


def test_every_command_that_prints_json_has_a_schema() -> None:
    printing = {
        name
        for name, command in all_commands().items()
        if any("--json" in parameter.opts for parameter in command.params)
    }
    assert printing == set(ANSWERS)


def test_an_option_means_the_same_in_every_command() -> None:
    kinds: dict[str, dict[str, str]] = {}
    for name, command in all_commands().items():
        for parameter in command.params:
            if "--out" in parameter.opts:
                assert "-o" in parameter.opts, name
            for option in (o for o in parameter.opts if o.startswith("-")):
                kind = (
                    "a directory or file"
                    if option in {"--out", "-o"}
                    else (parameter.metavar or parameter.type.name)
                    if not parameter.is_flag
                    else ""
                )
                kinds.setdefault(option, {})[name] = kind
    # --set is repeatable where sizes are swept; --fail-on and --format take each command's names, --against
    # another one of what the command is given: a run, a trace.
    clashes = {o: found for o, found in kinds.items() if len(set(found.values())) > 1}
    assert sorted(clashes) == ["--against", "--fail-on", "--format", "--set"]


def test_help_texts_are_short() -> None:
    for name, command in all_commands().items():
        summary = command.help.split("\n\n")[0]
        assert len(summary) <= 70, name
        assert summary.endswith("."), name
        for parameter in command.params:
            if parameter.name not in {"help", "context"}:
                assert parameter.help, (name, parameter.name)
                assert len(parameter.help) <= 70, (name, parameter.name)


@pytest.mark.slow
def test_commands_are_grouped_in_help(command: Run) -> None:
    _, out, _ = command("--help")
    positions = [out.index(f"{panel}:\n") for panel in application.PANELS]
    assert positions == sorted(positions)
