"""The wheel: the quickstart and the demo run from it, and it reads runs without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import page_commands
import pytest

import backlight
from cases import CASES
from processes import run_captured

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
READER = {
    *("numpy", "numpy.libs", "pyarrow", "msgspec", "rich", "markdown_it", "mdurl", "pygments"),
    *("click", "filelock", "psutil"),
}

READING = """
from backlight.cli.app import main
for line in ("findings run --json", "report run --out page.html", "export run out.parquet",
             "compare run run"):
    try:
        main(line.split())
    except SystemExit as end:
        assert not end.code, (line, end.code)
print("read")
"""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = run_captured(command)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def environment(folder: Path, wheel: Path, *, torch: bool) -> Path:
    """Create an environment with the wheel and either the reader's dependencies or all packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    subprocess.run(
        [*pip, "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True
    )
    target = next((folder / "lib").glob("python*")) / "site-packages"
    installed = [Path(entry) for entry in sys.path if entry.endswith("site-packages")]
    for item in (item for entry in installed for item in entry.iterdir()):
        if (
            item.suffix == ".pth"
            or item.name.startswith(("backlight", "_backlight", "__editable__"))
            or (target / item.name).exists()
        ):
            continue
        name = item.name.split("-")[0].lower()
        if torch or item.name in READER or name in READER:
            (target / item.name).symlink_to(item)
    return python


def test_reader_without_torch(wheel: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with backlight.watch(run=run, every=1):
        CASES["clipped_by_norm"].train()
    python = environment(tmp_path / "venv", wheel, torch=False)

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_captured([str(python), "-m", "backlight", *arguments], cwd=tmp_path)

    missing = run_captured([str(python), "-c", "import torch"])
    assert "No module named 'torch'" in missing.stderr
    done = run_captured([str(python), "-c", READING], cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["read"]), done.stderr
    assert (tmp_path / "page.html").stat().st_size > 50_000
    done = call("doctor")
    assert done.returncode == 1
    assert "runs can be read, not recorded" in " ".join(done.stdout.split())
    (tmp_path / "train.py").write_text("")
    done = call("run", "train.py")
    assert done.returncode == 2
    assert "torch" in done.stderr
    assert "Traceback" not in done.stderr


def test_wheel_contains_every_package_file_and_the_demo(wheel: Path) -> None:
    sources = (ROOT / "src" / "backlight").rglob("*")
    expected = {p.relative_to(ROOT / "src").as_posix() for p in sources if p.is_file() and p.suffix != ".pyc"}
    expected |= {f"backlight/findings/pages/{p.name}" for p in (ROOT / "docs" / "findings").iterdir()}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("backlight/")}
    assert names == expected | {"backlight/cli/demo/new_head.py"}


def test_quickstart_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    scripts = environment(tmp_path / "venv", wheel, torch=True).parent
    folder = tmp_path / "work"
    folder.mkdir()
    variables = {name: os.environ[name] for name in os.environ if not name.startswith("PYTHON")}
    variables |= {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "200"}
    page = list(page_commands.blocks((ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")))
    # The environment has the wheel and its dependencies: what the first command would install.
    assert page.pop(0).text.startswith("pip install '.[torch,live]'")
    outputs = [
        page_commands.execute(block, folder, variables)
        for block in [page_commands.Block("bash", {"exec": ""}, "command -v backlight\n", (0, 0)), *page]
    ]
    program, first, report, fixed, listed = (output for output in outputs if output)
    assert Path(program.strip()) == scripts / "backlight"
    assert "`2.weight` and `2.bias` are not in any optimizer" in first
    assert "first.html" in report
    assert "are not in any optimizer" in (folder / "first.html").read_text(encoding="utf-8")
    assert "✓ No findings. Gradients of all 4 parameters were measured" in fixed
    assert listed.count("train-") == 2


def demo_reports(done: subprocess.CompletedProcess[str]) -> list[Path]:
    """Return the reports of a demo that found the bug and not the fix."""
    assert done.returncode == 0, done.stderr
    bug, fixed = done.stderr.split("backlight: recording in ")[1:]
    assert "`head.weight` and `head.bias` are not in any optimizer" in " ".join(bug.split())
    assert "Create the optimizer after" in " ".join(bug.split())
    assert "✓ No findings." in fixed
    lines = done.stdout.strip().splitlines()
    reports = [Path(line.partition(": ")[2]) for line in lines if line.startswith("report of the ")]
    assert [report.is_file() for report in reports] == [True, True]
    return reports


@pytest.mark.full
def test_make_demo_runs_from_another_directory(wheel: Path, tmp_path: Path) -> None:
    environment(tmp_path / "venv", wheel, torch=True)
    (tmp_path / "venv" / ".demo").touch()  # installed already
    done = run_captured(
        ["make", "-C", str(ROOT), "--no-print-directory", "demo", f"VENV={tmp_path / 'venv'}"], cwd=tmp_path
    )
    reports = demo_reports(done)
    assert all(ROOT in report.parents for report in reports)
    for report in reports:
        shutil.rmtree(report.parent)


@pytest.mark.full
def test_demo_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", wheel, torch=True)
    done = run_captured(
        [str(python), "-m", "backlight", "demo", "--steps", "60", "--out", "demo"], cwd=tmp_path
    )
    assert demo_reports(done) == [
        (tmp_path / name / "report.html").resolve() for name in ("demo", "demo-fixed")
    ]
    run = backlight.open_run(tmp_path / "demo")
    assert list(run.scalar("loss").steps) == list(range(60))
    # A busy machine records fewer steps; of the last nothing is left once the script's function is over.
    assert 0 in set(run.series_steps("gradient"))
