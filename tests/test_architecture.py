"""Architecture rules that import-linter cannot check."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import backlight

SOURCE = Path(backlight.__file__).parent

WITHOUT_TORCH = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ImportError("torch is blocked here")
sys.meta_path.insert(0, Block())
import importlib, pkgutil
import backlight.records, backlight.registry, backlight.store, backlight.report
import backlight.diagnose.test_matrix
from backlight.registry import RULES
names = [
    m.name
    for package in (backlight.store, backlight.report, backlight.diagnose.test_matrix)
    for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
]
names += ["backlight.findings.evaluate", "backlight.analysis.compare",
          "backlight.analysis.report", "backlight.cli.doctor", "backlight.analysis.live",
          "backlight.cli.app"]
import backlight.cli
names += [m.name for m in pkgutil.walk_packages(backlight.cli.__path__, "backlight.cli.")]
for name in names:
    importlib.import_module(name)
print(len(list(RULES)), len(names), "torch" in sys.modules)
backlight.open_run
"""


@pytest.mark.slow
def test_reading_packages_never_import_torch() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rules, modules, torch = done.stdout.split()
    assert int(rules) >= 14
    assert int(modules) >= 30
    assert torch == "False"


@pytest.mark.slow
def test_help_does_not_import_torch() -> None:
    code = (
        "import sys\nfrom backlight.cli.app import main\n"
        "try:\n    main(['report', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "offline" in done.stdout


@pytest.mark.slow
def test_file_length_and_module_names() -> None:
    for path in SOURCE.rglob("*.py"):
        lines = path.read_text().count("\n")
        assert lines <= 600, f"{path.relative_to(SOURCE)}: {lines} lines"
        assert path.stem not in {"util", "utils", "helper", "helpers", "common", "core", "misc", "manager"}


def test_package_init_files_are_empty() -> None:
    for init in SOURCE.rglob("__init__.py"):
        if init.parent != SOURCE:
            assert init.read_text() == "", f"{init}: importing a child would run this"


@pytest.mark.slow
def test_every_module_imports() -> None:
    # tests/integrations imports the frameworks, which takes seconds.
    frameworks = ("lightning", "huggingface", "accelerate", "torchtitan", "deepspeed", "ray")
    left_out = {f"backlight.integrations.{name}" for name in frameworks}
    for module in pkgutil.walk_packages([str(SOURCE)], "backlight."):
        if not module.name.endswith("__main__") and module.name not in left_out:
            importlib.import_module(module.name)


DEVICE_MODULES = {"cuda", "accelerator", "xpu", "mps"}


def device_modules(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that use a device module of torch."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name("torch"), attr=name):
                names = [f"torch.{name}"]
            case ast.Import(aliases):
                names = [alias.name for alias in aliases]
            case ast.ImportFrom(module, aliases, 0):
                names = [f"{module}.{alias.name}" for alias in aliases]
            case _:
                continue
        for name in names:
            package, *below = name.split(".")
            if package == "torch" and DEVICE_MODULES & set(below[:1]):
                yield node.lineno


def launcher_variables(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that name an environment variable of a launcher."""
    named = re.compile(r"(LOCAL_)?(RANK|WORLD_SIZE)|SLURM_\w+")
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and named.fullmatch(node.value):
            yield node.lineno


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "uses"), [("devices.py", device_modules), ("distributed.py", launcher_variables)]
)
def test_devices_and_launcher_variables_have_one_owner(
    owner: str, uses: Callable[[ast.AST], Iterator[int]]
) -> None:
    found = {
        f"{path.relative_to(SOURCE)}:{line}"
        for path in SOURCE.rglob("*.py")
        for line in uses(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert {use for use in found if not use.startswith(f"{owner}:")} == set()
    assert found


@pytest.mark.parametrize(
    ("uses", "code", "count"),
    [
        (device_modules, "torch.cuda.Event()", 1),
        (device_modules, "import torch.cuda as cuda", 1),
        (device_modules, "from torch import mps, nn", 1),
        (device_modules, "from torch.cuda import Event", 1),
        (device_modules, "def f(stream: torch.xpu.Stream): torch.accelerator.current_stream()", 2),
        (device_modules, "from torch import nn; torch.backends.cuda.matmul; torch.device('cuda')", 0),
        (launcher_variables, "os.environ['LOCAL_RANK']; os.environ.get('SLURM_PROCID')", 2),
        (launcher_variables, "'srun --export=SLURM_JOB_ID'; Slot.RANK; 'rank'", 0),
    ],
)
def test_owner_rules_find_each_use(uses: Callable[[ast.AST], Iterator[int]], code: str, count: int) -> None:
    assert len(list(uses(ast.parse(code)))) == count


def opened_for_writing(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that open a path for writing other than as a new file, or replace a file by name."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="write_text" | "write_bytes")):
                yield node.lineno
            case ast.Call(func=ast.Attribute(value=ast.Name("os"), attr="replace" | "rename")):
                yield node.lineno
            case ast.Call(ast.Name("open") | ast.Attribute(attr="open"), args, keywords):
                modes = [*args, *(keyword.value for keyword in keywords if keyword.arg == "mode")]
                texts = (mode.value for mode in modes if isinstance(mode, ast.Constant))
                if any(re.fullmatch("[wa][bt+]*|r[bt]*[+][bt]*", str(text)) for text in texts):
                    yield node.lineno


WRITERS = {
    "analysis/live.py": "a file in a private temporary folder",
    "diagnose/scaling/sweep.py": "a file in a private temporary folder",
    "diagnose/scaling/worker.py": "a file in a private temporary folder",
    "diagnose/test_matrix/case_run.py": "files in a directory that this process has just made",
    "monitors/health/samples_monitor.py": "a file of the kernel",
    "watchdog/runtime_dir.py": "documents in a directory with mode 0700",
    "threads.py": "a file of the kernel",
    "store/read/snapshot.py": "a copy in a private temporary folder",
}
"""Modules that open a path for writing without :mod:`backlight.atomic_files`, and why they may."""


@pytest.mark.slow
def test_files_are_written_by_atomic_files() -> None:
    found = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if any(opened_for_writing(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert found == set(WRITERS)


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("path.write_text(text); path.write_bytes(data)", 2),
        ("open(path, 'w'); path.open('ab'); path.open(mode='r+b'); os.replace(a, b)", 4),
        (
            "path.open('xb'); path.open(); open(path, 'rb'); gzip.open(path, 'rt'); write_text(a, b)",
            0,
        ),
    ],
)
def test_writers_are_found(code: str, count: int) -> None:
    assert len(list(opened_for_writing(ast.parse(code)))) == count


def test_public_names() -> None:
    assert sorted(backlight.__all__) == [
        "Collected", "Evidence", "Finding", "GroupValues", "Monitor", "Pending", "Run", "Severity",
        "SpectralEcho", "StopTraining",
        "Watch", "__version__", "collect", "collect_groups", "findings_of", "gathered", "gram", "ntk",
        "open_run", "outer_product", "spectral_echo", "to_pandas", "to_polars", "watch",
    ]  # fmt: skip
    for name in backlight.__all__:
        assert getattr(backlight, name) is not None


def test_makefile_covers_every_alone_test() -> None:
    root = Path(__file__).parents[1]
    (named,) = re.findall(r"^ALONE := (.*)$", (root / "Makefile").read_text(), re.MULTILINE)
    folders = [root / name for name in named.split()]
    for folder in folders:
        assert folder.is_dir()
    alone = [file for file in root.glob("tests/**/*.py") if re.search(r"mark\.alone\b", file.read_text())]
    assert alone
    assert [file for file in alone if not any(folder in file.parents for folder in folders)] == []


def test_files_named_in_the_architecture_page_exist() -> None:
    root = Path(__file__).parents[1]
    named = re.findall(r"`((?:src|tests|bench)/[^`\s]+)`", (root / "docs" / "architecture.md").read_text())
    assert len(named) > 10
    assert [name for name in named if not (root / name).exists()] == []


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names that a file imports, and those of members that may be modules."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(aliases):
                yield from (alias.name for alias in aliases)
            case ast.ImportFrom(module, aliases):
                yield module or ""
                yield from (f"{module}.{alias.name}" for alias in aliases)


@pytest.mark.slow
def test_no_test_module_imports_another() -> None:
    root = Path(__file__).parent
    tests = {path.stem for path in root.rglob("test_*.py")} | {"conftest"}
    importing = {
        f"{path.relative_to(root)}: {name}"
        for path in root.rglob("*.py")
        for name in imported_modules(ast.parse(path.read_text(encoding="utf-8")))
        if name.rpartition(".")[2] in tests and not name.startswith("backlight.")
    }
    assert importing == set()


def test_conftest_does_not_import_torch() -> None:
    tree = ast.parse((Path(__file__).parent / "conftest.py").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {name.split(".")[0] for node in imports for name in imported_modules(node)}
    assert "pytest" in names
    assert names.isdisjoint({"torch", "backlight"})
