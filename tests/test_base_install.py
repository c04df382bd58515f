"""The base install: its size, and what works without the packages of the extra `research`."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from backlight.cli.app import error_line
from backlight.extras import EXTRA_OF, MissingPackageError, require
from processes import run_captured

ROOT = Path(__file__).parents[1]

MAX_BYTES = 60e6

RESEARCH = ("scipy", "h5py", "matplotlib", "yaml", "sklearn", "ruptures")

TRAIN = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(40):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

BLOCKED = f"""
import contextlib, io, shlex, sys
sys.modules.update(dict.fromkeys({RESEARCH}))
from backlight.cli.app import main
for line in sys.argv[1:]:
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            main(shlex.split(line))
        except SystemExit as end:
            code = end.code or 0
    sys.__stdout__.write(f"\\n{{code}} {{line}}: {{(errors.getvalue().splitlines() or [''])[-1]}}\\n")
"""


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def installed(lines: Iterable[str], found: dict[str, importlib.metadata.Distribution]) -> None:
    """Add the distributions that ``lines`` require, and what those require."""
    for wanted in map(Requirement, lines):
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        if name not in found and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            found[name] = importlib.metadata.distribution(wanted.name)
            installed(found[name].requires or (), found)


def test_base_install_is_small() -> None:
    found: dict[str, importlib.metadata.Distribution] = {}
    installed(PROJECT["dependencies"], found)
    assert not {"scipy", "h5py", "matplotlib", "pyyaml", "scikit-learn", "torch"} & set(found)
    sizes = {}
    for name, distribution in found.items():
        files = [Path(str(file.locate())) for file in distribution.files or ()]
        sizes[name] = sum(file.stat().st_size for file in files if file.is_file())
    # Here it is installed from the checkout: its files, and bytecode of the same size.
    sizes["backlight"] = sum(2 * f.stat().st_size for f in (ROOT / "src").rglob("*") if f.suffix != ".pyc")
    # Environments that train have numpy already, and it is larger than all the rest.
    added = sum(size for name, size in sizes.items() if name != "numpy")
    assert 20e6 < added <= MAX_BYTES, sizes


@pytest.mark.slow
def test_commands_work_without_the_research_packages(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    works = [
        "--help", "doctor", "run --out a train.py", "findings a", "report a -o page.html", "compare a a",
        "ls .", "export a out.csv", "compact a", "grok list",
    ]  # fmt: skip
    refused = {
        "grok run modular": "backlight grok: needs yaml; pip install 'backlight[research]'",
        "spectra train.py": "backlight spectra: needs h5py; pip install 'backlight[research]'",
        "run --monitors spectra train.py": "backlight: the monitor spectra: needs h5py; pip install",
        "run --monitors grokking train.py": "backlight: the monitor grokking: needs h5py; pip install",
        "export a out.h5": "backlight: out.h5: needs h5py; pip install 'backlight[research]'",
        "memory --out m train.py": "backlight: a stored memory result: needs h5py; pip install",
        "report --plots p a": "backlight report: needs matplotlib; pip install 'backlight[plots]'",
    }
    done = run_captured([sys.executable, "-c", BLOCKED, *works, *refused], cwd=tmp_path)
    answers = dict(re.findall(r"^(?:\d+) (.*?): (.*)$", done.stdout, re.MULTILINE))
    codes = {line: int(code) for code, line in re.findall(r"^(\d+) (.*?): ", done.stdout, re.MULTILINE)}
    assert {line: codes.get(line) for line in works} == dict.fromkeys(works, 0), done.stdout + done.stderr
    for line, text in refused.items():
        assert codes[line] == 2, line
        assert answers[line].startswith(text)


def test_missing_package_names_the_extra() -> None:
    with pytest.raises(MissingPackageError, match=r"^x: needs h5py; pip install 'backlight\[research\]'$"):
        raise MissingPackageError("h5py", "x")
    require("numpy")
    plain = ModuleNotFoundError("No module named 'scipy.stats'", name="scipy.stats")
    assert error_line(plain, "gram") == "backlight gram: needs scipy; pip install 'backlight[research]'"


def test_every_extra_is_declared() -> None:
    assert set(EXTRA_OF.values()) <= set(PROJECT["optional-dependencies"])
