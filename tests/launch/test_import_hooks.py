"""Finders that others installed before backlight: the script imports torch as it does without it, watched."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from backlight.store.read.run import open_run

Console = Callable[..., subprocess.CompletedProcess[str]]

TRAIN = """
import sys, torch
print(type(torch.__loader__).__name__, type(torch.__spec__.loader).__name__, *seen)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print([type(finder).__name__ for finder in sys.meta_path if type(finder).__module__ == "sitecustomize"])
"""

LOOKS_UP = """
import builtins, importlib.util, sys
builtins.seen = []
class Finder:
    busy = False
    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self.busy:
            return None
        self.busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.busy = False
        CHANGED
        return spec
sys.meta_path.insert(0, Finder())
"""

CHAINED = """
class Chained:
            def __init__(self, loader): self.loader = loader
            def __getattr__(self, name): return getattr(self.loader, name)
            def exec_module(self, module): self.loader.exec_module(module); seen.append(module.__name__)
        spec.loader = Chained(spec.loader)
"""

HOOKS = {
    "looks the package up again": LOOKS_UP.replace("CHANGED", ""),
    "two that look it up": LOOKS_UP.replace("CHANGED", "") + "sys.meta_path.insert(0, Finder())\n",
    "loader of its own": LOOKS_UP.replace("CHANGED", CHAINED.strip()),
    "behind the others": LOOKS_UP.replace("CHANGED", "").replace("insert(0, ", "append("),
}


@pytest.mark.parametrize("place", ["sitecustomize", "pth"])
@pytest.mark.parametrize("hook", [pytest.param(code, id=name) for name, code in HOOKS.items()])
def test_torch_is_imported_as_without_backlight(
    hook: str, place: str, tmp_path: Path, console_script: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    if place == "pth":  # a line of a file of a directory of packages, as agents install one
        (site / "agent.py").write_text(hook)
        (site / "agent.pth").write_text("import agent\n")
        hook = f"import site; site.addsitedir({str(site)!r})\n"
    (site / "sitecustomize.py").write_text(hook)
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.setenv("PYTHONPATH", str(site))
    plain = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    watched = console_script(tmp_path, "run", "--out", "run", "train.py")
    assert (watched.returncode, watched.stdout) == (0, plain.stdout), watched.stderr
    assert list(open_run(tmp_path / "run").scalar("loss").steps) == [0, 1, 2, 3]
