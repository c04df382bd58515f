"""Share of mutants that the quick tests kill, per package: swapped operators, moved boundaries and constants.

    python bench/mutants.py [PACKAGE ...] [--count 24] [--seed 0]

A copy of the repository is mutated, one place at a time; the tests that cover the place run on it, those of
``make quick``, so that nothing starts a process. A mutant is killed if one of them fails. The others are
listed, with those that exceed the time limit: some change nothing, as a boundary that no value meets.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import coverage

ROOT = Path(__file__).parents[1]
PACKAGES = ("measure", "findings", "monitors", "trace", "store")
SELECTION = "not slow and not full and not alone"
TIMEOUT_S = 300

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A change of one line of a file below ``src/backlight``."""

    file: str
    line: int
    before: str
    after: str
    source: str


def swapped(node: ast.AST) -> ast.AST | None:
    """Return what takes the place of a node, None where nothing does."""
    changed = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPS:
            changed.ops = [SWAPS[type(operator)]()]  # type: ignore[list-item]
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in SWAPS:
            changed.op = SWAPS[type(operator)]()  # type: ignore[assignment]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            changed = operand
        case ast.Constant(value=bool(value)):
            changed.value = not value
        case ast.Constant(value=int(value) | float(value)):
            changed.value = value + 1 if isinstance(value, int) else 2 * value or 1.0
        case _:
            return None
    return changed


def _is_text(node: ast.AST) -> bool:
    """Return whether a ``+`` or ``%`` joins texts or types, where no swap runs."""
    return any(
        isinstance(part, ast.JoinedStr) or isinstance(getattr(part, "value", None), str)
        for part in ast.walk(node)
    )


def places(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that can be swapped: none in annotations, decorators and conditions on types."""
    for field, value in ast.iter_fields(tree):
        if field in {"annotation", "returns", "decorator_list", "format_spec"}:
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            can_swap = isinstance(node, ast.expr) and node.lineno == node.end_lineno
            if (
                can_swap
                and not (isinstance(node, ast.BinOp) and _is_text(node))
                and swapped(node) is not None
            ):
                yield node
            yield from places(node)


def mutants_of(root: Path, package: str) -> list[Mutant]:
    """Return every mutant of a package."""
    made = []
    for path in sorted((root / "src/backlight" / package).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines(keepends=True)
        for node in places(ast.parse(source)):
            text = lines[node.lineno - 1].encode()
            before, after = text[node.col_offset : node.end_col_offset], ast.unparse(swapped(node)).encode()
            changed = [*lines]
            new = text[: node.col_offset] + b"(" + after + b")" + text[node.end_col_offset :]
            changed[node.lineno - 1] = new.decode()
            file = path.relative_to(root).as_posix()
            made.append(Mutant(file, node.lineno, before.decode(), after.decode(), "".join(changed)))
    return made


def copy_repository(root: Path) -> None:
    """Copy what git does not ignore."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)


def quick_tests(root: Path) -> list[str]:
    """Return the directories and files of ``make quick``."""
    (named,) = re.findall(
        r"^QUICK := \$\(addprefix tests/, (.*)\)$", (root / "Makefile").read_text(), re.MULTILINE
    )
    return [
        path.relative_to(root).as_posix()
        for word in named.split()
        for path in sorted(root.glob(f"tests/{word}"))
    ]


def pytest_arguments(root: Path) -> list[str]:
    return ["-q", "-p", "no:xdist", "--no-processes", "--rootdir", str(root), "-m", SELECTION]


def coverage_map(root: Path, packages: list[str]) -> Callable[[Mutant], list[str]]:
    """Run the quick tests once; return a function for the tests that cover the place of a mutant."""
    (root / "coverage.ini").write_text(f"[run]\ndata_file = {root}/map\n", encoding="utf-8")
    measured = [
        "--cov-config=coverage.ini", "--cov-context=test", "--cov-report=",
        *(f"--cov=backlight.{name}" for name in packages),
    ]  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "pytest", *pytest_arguments(root), *measured, *quick_tests(root)],
        cwd=root, env={**os.environ, "PYTHONPATH": str(root / "src")}, check=False, stdout=sys.stderr,
    )  # fmt: skip
    cache = root / ".pytest_cache/v/cache/lastfailed"
    failing = set(json.loads(cache.read_text(encoding="utf-8"))) if cache.exists() else set()
    if failing:
        print(f"left out, since they fail without a change: {', '.join(sorted(failing))}", flush=True)
    data = coverage.CoverageData(str(root / "map"))
    data.read()

    def tests_of(mutant: Mutant) -> list[str]:
        by_line = data.contexts_by_lineno(str(root / mutant.file))
        contexts = set(by_line.get(mutant.line, ()))
        if "" in contexts:  # runs when the module is imported: every test of the module may depend on it
            contexts = {context for line in by_line.values() for context in line}
        tests = {context.partition("|")[0] for context in contexts} - failing - {""}
        folder = f"tests/{mutant.file.split('/')[2]}/"  # the tests of the package are the first to fail
        return sorted(tests, key=lambda name: (not name.startswith(folder), name))

    return tests_of


def outcome(root: Path, mutant: Mutant, tests: list[str], number: int) -> str:
    """Return killed, survived or timeout; the tests run in a fork, which has imported torch."""
    path = root / mutant.file
    original = path.read_text(encoding="utf-8")
    (root / "chosen").write_text("\n".join(tests), encoding="utf-8")
    try:
        path.write_text(mutant.source, encoding="utf-8")
        moment = time.time() + 10 * number  # bytecode is that of a source of this second
        os.utime(path, (moment, moment))
        pid = os.fork()
        if pid == 0:
            _run_tests(root)
        deadline = time.monotonic() + TIMEOUT_S
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return "timeout"
            time.sleep(0.05)
        return "killed" if ended[1] else "survived"
    finally:
        path.write_text(original, encoding="utf-8")
        os.utime(path, (moment + 5, moment + 5))


def _run_tests(root: Path) -> None:
    code = 1
    try:
        import pytest

        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
            code = pytest.main([*pytest_arguments(root), "-p", "no:cacheprovider", "-x", "@chosen"])
    finally:
        os._exit(code)


def main() -> None:
    """Print the killed share of each package, and the survivors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    parser.add_argument("--count", type=int, default=24, help="mutants per package")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root = Path(folder).resolve() / "repository"
        root.mkdir()
        copy_repository(root)
        tests_of = coverage_map(root, list(options.packages))
        import torch

        torch.set_num_threads(1)
        os.chdir(root)
        sys.path.insert(0, str(root / "src"))
        number = 0
        for package in options.packages:
            every = mutants_of(root, package)
            chosen = random.Random(f"{options.seed} {package}").sample(every, min(options.count, len(every)))
            results = []
            for mutant in chosen:
                number += 1
                tests = tests_of(mutant)
                results.append((mutant, outcome(root, mutant, tests, number) if tests else "no test"))
            killed = sum(result == "killed" for _, result in results)
            print(f"{package}: {killed} of {len(chosen)} killed, drawn from {len(every)}")
            for mutant, result in results:
                if result != "killed":
                    print(f"  {mutant.file}:{mutant.line}: {mutant.before} -> {mutant.after} ({result})")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
