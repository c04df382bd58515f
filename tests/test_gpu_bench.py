"""``make test-gpu`` without a GPU: its logic on commands that stand in for tests and bench."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

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
    spec = importlib.util.spec_from_file_location("gpu_bench", ROOT / "bench" / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_without_a_device_it_prints_one_line(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "describe_device", lambda: {"torch": "2.13.0+cpu"})
    assert gpu.main(["--page", str(tmp_path / "gpu.md")]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "test-gpu: torch 2.13.0+cpu finds no GPU; nothing was run, and gpu.md stays"
    assert list(tmp_path.iterdir()) == []


def test_page_states_device_tests_and_figures(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests are two of a file here; the bench is a command that prints, and one that hangs."""
    tests = tmp_path / "test_two.py"
    marked = "@pytest.mark.gpu\ndef test_{}(): {}\n"
    tests.write_text("import pytest\n" + marked.format("one", "pass") + marked.format("two", "1 / 0"))
    python = sys.executable

    def todo(kind: str, results: Path) -> list[object]:
        pytest_ = (
            python,
            "-m",
            "pytest",
            "-q",
            "-m",
            "gpu",
            "--junit-xml",
            str(results),
            "-o",
            "markers=gpu",
        )
        return [
            gpu.Step("Tests", (*pytest_, "-c", "/dev/null", str(tests)), 120.0),
            gpu.Step("Figures", (python, "-c", "print('1.01 x')"), 60.0),
            gpu.Step("Hung", (python, "-c", "print('begun', flush=True); import time; time.sleep(99)"), 2.0),
        ]

    monkeypatch.setattr(gpu, "describe_device", lambda: DEVICE)
    monkeypatch.setattr(gpu, "steps", todo)
    assert gpu.main(["--page", str(tmp_path / "gpu.md")]) == 1
    text = (tmp_path / "gpu.md").read_text()
    assert "1 x a device, driver 1.2, runtime 13, torch 2.13.0" in text
    assert "Tests that need a device: 1 passed, 1 failed, 0 skipped." in text
    assert "1.01 x" in text
    assert "Ended at its limit of 2 s" in text
    assert gpu.NOT_RUN not in text
    assert not (tmp_path / "gpu.xml").exists()


def test_steps_fit_into_nine_minutes(gpu: ModuleType, tmp_path: Path) -> None:
    todo = gpu.steps("cuda", tmp_path / "results.xml")
    assert sum(step.limit_s for step in todo) <= gpu.LIMIT_S + 20 <= 540
    for step in todo:
        assert all((ROOT / part).exists() for part in step.command if part.startswith("bench/"))
    late = gpu.run([gpu.Step("late", (sys.executable, "-c", ""), 60.0)], limit_s=0.0)
    assert [one.outcome for one in late] == ["not run: no time was left"]


def test_pages_say_that_it_has_not_been_run(gpu: ModuleType) -> None:
    """README and docs change with the page: both say so, or none does."""
    page, readme = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/gpu.md", "README.md"))
    assert ("not yet run on a gpu" in readme.lower()) is (gpu.NOT_RUN in page)
