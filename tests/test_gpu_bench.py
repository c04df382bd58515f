"""``make test-gpu`` without a GPU: its logic on commands that stand in for tests and bench."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from bare_environment import bare_environment, gpu_bench

ROOT = Path(__file__).parents[1]
DEVICE = {
    "type": "cuda",
    "device": "a device",
    "count": 1,
    "driver": "1.2",
    "runtime": "13",
    "torch": "2.13.0",
}


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    return gpu_bench()


def test_without_a_device_it_prints_one_line(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "describe_device", lambda: {"torch": "2.13.0+cpu"})
    assert gpu.main(["--page", str(tmp_path / "gpu.md")]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "test-gpu: torch 2.13.0+cpu finds no GPU; nothing was run, and gpu.md stays"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_page_states_results_as_they_come(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A check that is cut leaves the results of those before it, and what it has printed itself."""
    page, python = tmp_path / "gpu.md", sys.executable
    programs = {
        "Figures": "print('1.01 x')",
        "Part": "print('NCCL: not run: there is none'); print('holds')",
        "Wrong": "print('1.5 x'); raise SystemExit(1)",
        "Lacks": f"print('skipped: no NCCL'); raise SystemExit({gpu.SKIPPED})",
        "Broken": "raise SystemExit(3)",
        "Page": f"print(open({str(page)!r}).read().count('| not run |'))",
        "Hung": "print('begun', flush=True); import time; time.sleep(99)",
        "Last": "",
    }
    todo = [
        gpu.Check(title, f"of {title} | all", (python, "-c", program), 2.0 if title == "Hung" else 60.0)
        for title, program in programs.items()
    ]
    monkeypatch.setattr(gpu, "describe_device", lambda: DEVICE)
    monkeypatch.setattr(gpu, "checks", lambda kind, is_small: todo)
    page.write_text(f"stale\n{gpu.BY_HAND}\nkept\n")
    assert gpu.main(["--page", str(page)]) == 1
    text, printed = page.read_text(), "\n" + capsys.readouterr().out
    assert "1 x a device, driver 1.2, runtime 13, torch 2.13.0." in text
    for title, result in {
        "Figures": "holds",
        "Part": "holds; 1 part not run",
        "Wrong": "does not hold",
        "Lacks": "skipped: no NCCL",
        "Broken": "failed with exit code 3",
        "Page": "holds",
        "Hung": "ended at its limit of 2 s",
        "Last": "holds",
    }.items():
        assert f"| {title} | of {title} \\| all | {result}, " in text
        assert f"\n{title}: {result}, " in printed
    assert "## Page\n\n```text\n3\n```" in text  # itself and the two behind it
    assert "## Hung\n\n```text\nbegun\n```" in text
    assert text.endswith(f"\n{gpu.BY_HAND}\nkept\n")
    assert "stale" not in text
    assert gpu.NOT_RUN not in text
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.md"]


@pytest.mark.slow
def test_failed_tests_do_not_hold_and_skipped_ones_are_skipped(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    marked = "import pytest\n@pytest.mark.gpu\ndef test(): {}\n"
    found = []
    for body in ("pass", "1 / 0", "pytest.skip('needs a CUDA device')"):
        file = tmp_path / "test_one.py"
        file.write_text(marked.format(body))
        command = (sys.executable, *gpu.PYTEST, "-o", "markers=gpu", "-c", "/dev/null", str(file))
        found += [one.outcome for one in gpu.run([gpu.Check("", "", command, 60.0)])]
    assert found[:2] == ["holds", "does not hold"]
    assert found[2].startswith("skipped: 1 skipped in ")


def test_all_ends_within_nine_minutes(gpu: ModuleType) -> None:
    assert gpu.LIMIT_S <= 9 * 60 - 20
    late = gpu.run([gpu.Check("late", "", (sys.executable, "-c", ""), 60.0)], limit_s=0.0)
    assert [one.outcome for one in late] == ["not run: no time was left"]


def test_all_files_are_listed(gpu: ModuleType) -> None:
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^ *(@|)pytest\.mark\.gpu\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert marked == set(gpu.MARKED)
    present = {path.name for path in gpu.CHECKS.glob("*.py")} - gpu.SHARED
    assert [name for name, _ in gpu.SUBJECTS] == list(dict(gpu.SUBJECTS))
    assert set(dict(gpu.SUBJECTS)) == present


def test_page_lists_what_runs(gpu: ModuleType) -> None:
    """``python bench/gpu.py --list`` writes it."""
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    kept = gpu.by_hand(text)
    assert kept
    if gpu.NOT_RUN in text:
        assert text == gpu.page(None, gpu.checks("cuda"), [], "", kept)


@pytest.mark.slow
def test_wheels_are_enough_to_collect(gpu: ModuleType, tmp_path: Path) -> None:
    """The marked tests, uninstalled: no package is importable but those that the page names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = {Requirement(text).name for text in project["dependencies"]}
    assert set(gpu.WHEELS) == own | {
        "torch",
        "pytest",
        "h5py",
        "scipy",
        "msgspec",
    }  # of spectra, and of profile
    done = subprocess.run(
        [sys.executable, *gpu.PYTEST, "--collect-only", *gpu.MARKED],
        cwd=ROOT, env=bare_environment(tmp_path, gpu),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for file in gpu.MARKED:
        assert f"{file}::" in done.stdout


def test_pages_say_that_it_has_not_been_run(gpu: ModuleType) -> None:
    """README and docs change with the page: both say so, or none does."""
    page, readme = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/gpu.md", "README.md"))
    assert ("not yet run on a gpu" in readme.lower()) is (gpu.NOT_RUN in page)
