"""What a script finds as its main module, path and depth is what ``python`` leaves, however it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipapp
from collections.abc import Callable
from pathlib import Path
from py_compile import compile as compile_file
from typing import Any

import pytest

from backlight.launch.script import run_as_main

Console = Callable[..., subprocess.CompletedProcess[str]]

PROBE = """
import inspect, json, sys

def depth(calls=0):
    try:
        return depth(calls + 1)
    except RecursionError:
        return calls

main, kinds = sys.modules["__main__"], (str, dict, tuple, type(None))
attributes = {name: value if isinstance(value, kinds) else type(value).__name__
              for name, value in vars(main).items() if name.startswith("__")}
loader, spec = __loader__, __spec__
print(json.dumps({
    "attributes": attributes, "is main": vars(main) is globals(), "names": sorted(globals()),
    "loader": [getattr(loader, key, None) for key in ("name", "path", "archive")],
    "spec": spec and [spec.name, spec.origin, spec.parent, spec.cached],
    "path": sys.path, "arguments": sys.argv, "flags": list(sys.flags), "depth": depth(),
    "module of depth": depth.__module__, "file": inspect.getsourcefile(depth),
}))
"""

WAYS: dict[str, list[str]] = {
    "file": ["train.py", "--lr", "1"],
    "below the working directory": ["sub/train.py"],
    "with a dot": ["./train.py"],
    "through a parent": ["../here/train.py"],
    "link to a file": ["link.py"],
    "compiled": ["train.pyc"],
    "compiled, without an ending": ["compiled"],
    "archive": ["app.pyz"],
    "directory": ["app"],
    "module": ["-m", "package.train", "x"],
    "package": ["-m", "package"],
    "standard input": ["-"],
}
MORE: dict[str, list[str]] = {
    "without an ending": ["plain"],
    "archive without an ending": ["archive"],
    "zip": ["app.zip"],
    "directory with a slash": ["app/"],
    "package as a directory": ["package"],
    "module in the working directory": ["-m", "train"],
    "namespace package": ["-m", "sub.train"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("starts") / "here"
    for name in (
        "train.py",
        "plain",
        "sub/train.py",
        "app/__main__.py",
        "package/__main__.py",
        "package/train.py",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(PROBE)
    (folder / "package" / "__init__.py").touch()
    (folder / "link.py").symlink_to("sub/train.py")
    for name in ("train.pyc", "compiled"):
        compile_file(str(folder / "train.py"), cfile=str(folder / name), doraise=True)
    for name in ("app.pyz", "app.zip", "archive"):
        zipapp.create_archive(folder / "app", folder / name)
    return folder


def found(command: list[str], folder: Path, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False,
        input=PROBE if command[-1] == "-" else "", env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(
    "way",
    [
        *(pytest.param(way, id=name) for name, way in WAYS.items()),
        *(pytest.param(way, id=name, marks=pytest.mark.full) for name, way in MORE.items()),
    ],
)
def test_main_module_is_that_of_python(way: list[str], folder: Path, tmp_path: Path) -> None:
    console = str(Path(sys.executable).parent / "backlight")
    watched = found([console, "run", "--out", str(tmp_path / "run"), *way], folder)
    assert watched == found([sys.executable, *way], folder)


@pytest.mark.parametrize("way", [["sub/train.py"], ["-m", "package.train"], ["app"]], ids=" ".join)
def test_safe_path_and_a_start_as_a_module_leave_the_path_of_python(
    way: list[str], folder: Path, tmp_path: Path
) -> None:
    run = [sys.executable, "-m", "backlight", "run", "--out", str(tmp_path / "run"), *way]
    assert found(run, folder) == found([sys.executable, *way], folder)
    # The module is in the working directory, which a safe path leaves out.
    safe = {"PYTHONSAFEPATH": "1"} | ({"PYTHONPATH": str(folder)} if way[0] == "-m" else {})
    assert found(run, folder, **safe) == found([sys.executable, *way], folder, **safe)


@pytest.mark.parametrize(
    "way", [["broken.py"], ["-m", "broken"], ["syntax.py"], ["-m", "syntax"]], ids=" ".join
)
def test_traceback_is_that_of_python(
    way: list[str], folder: Path, tmp_path: Path, console_script: Console
) -> None:
    (folder / "broken.py").write_text("def f():\n    return 1 / 0\nf()\n")
    (folder / "syntax.py").write_text("x = (\n")
    plain = subprocess.run([sys.executable, *way], cwd=folder, capture_output=True, text=True, check=False)
    watched = console_script(folder, "run", "--out", str(tmp_path / "run"), *way)
    assert (watched.returncode, watched.stdout) == (plain.returncode, plain.stdout)
    assert watched.stderr.startswith(plain.stderr)


def test_tracer_of_the_process_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring the depth reaches the recursion limit, at which a tracer raises and is lost."""
    (tmp_path / "traced.py").write_text("import sys\ntracer = sys.gettrace()\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])

    def tracer(*_: object) -> None:
        """Trace nothing."""

    sys.settrace(tracer)
    try:
        run_as_main(str(tmp_path / "traced.py"), module=False)
    finally:
        sys.settrace(None)
    assert vars(sys.modules["__main__"])["tracer"] is tracer
