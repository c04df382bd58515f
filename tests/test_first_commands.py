"""What a new user types: every command of README and pages exists, and the first ones run from a clone."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import new_environments
from backlight.cli import app
from processes import run_captured

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
FIRST_PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("index", "install")),
]
KINDS = {"rank", "columns", "arrays"}
"""Kinds of files in docs/format.md, which begin with `backlight` as well."""

TRAIN = """
import sys, torch
print("arguments:", sys.argv[1:])
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, noise = torch.randn(40, 16, 4), torch.randn(40, 16, 2)
for x, e in zip(inputs, noise):
    loss = (model(x) - x[:, :2] - e).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

ENDS = {"|", "||", "&&", ";", "&", ">", "<", "2>"}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]


def command_lines(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a page, in fenced blocks and in inline code."""
    fences = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    blocks = [text for header, text in fences.findall(text) if header.partition(" ")[0] in {"", "bash"}]
    prose = fences.sub("", text)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for line in lines + re.findall(r"`([^`\n]+)`", prose):
        reader = shlex.shlex(line, posix=True, punctuation_chars=True)
        reader.whitespace_split = True
        try:
            words = list(reader)
        except ValueError:  # text, or the start of a quotation that goes on in the next line
            continue
        end = next((i for i, word in enumerate(words) if word in ENDS), len(words))
        yield words[:end]


def unknown(words: list[str], commands: dict[str, Any]) -> str:
    """Return what a command of backlight, pip, make or Python names that does not exist."""
    match words:
        case ["pip", "install", *rest]:
            extras = [name for word in rest for name in re.findall(r"\[(.+)\]", word)]
            return next((e for names in extras for e in names.split(",") if e not in EXTRAS), "")
        case ["make", target, *_] if re.fullmatch(r"[a-z-]+", target):
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            return "" if re.search(rf"^{target}:", makefile, re.MULTILINE) else target
        case ["python", path, *_] if path.startswith(("bench/", "docs/", "examples/", "tests/")):
            return "" if (ROOT / path).is_file() else path
    for place, word in enumerate(words):
        if (
            word == "backlight"
            and place + 1 < len(words)
            and (place == 0 or words[0] in {"torchrun", "srun"})
        ):
            name, rest = words[place + 1], words[place + 2 :]
            if rest[:1] and f"{name} {rest[0]}" in commands:
                name, rest = f"{name} {rest[0]}", rest[1:]
            elif name == "memory":
                name = "memory measure"
            if name not in commands:
                return name if re.fullmatch(r"[a-z][a-z-]+", name) and name not in KINDS else ""
            return refused(commands[name], rest)
    return ""


def refused(command: Any, words: list[str]) -> str:
    """Return the option that a command does not have."""
    context = command.context_class(command, info_name="backlight", **command.context_settings)
    try:
        command.make_parser(context).parse_args(list(words))
    except click.NoSuchOption as error:
        return error.option_name
    except click.UsageError:
        return ""
    return ""


@pytest.fixture(scope="module")
def commands() -> dict[str, Any]:
    return {**app.all_commands(), "grok": app.grok, "memory": app.memory}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_exist(page: Path, commands: dict[str, Any]) -> None:
    lines = list(command_lines(page.read_text(encoding="utf-8")))
    problems = {" ".join(words): name for words in lines if (name := unknown(words, commands))}
    assert not problems


def test_commands_that_do_not_exist_are_found(commands: dict[str, Any]) -> None:
    wrong = {
        "pip install 'backlight[torhc]'": "torhc", "make tset": "tset",
        "python bench/none.py": "bench/none.py",
        "backlight rnu train.py": "rnu", "backlight run --evrey 3 train.py": "--evrey",
        "torchrun --no-python backlight report --opne": "--opne", "backlight grok list --n": "--n",
    }  # fmt: skip
    sound = [
        "backlight run train.py --its-own",
        "pip install '.[torch,live]'  # or x",
        "make demo",
        "backlight RUN",
    ]
    page = "```bash\n" + "\n".join([*wrong, *sound]) + "\n```\n"
    lines = list(command_lines(page))
    assert [unknown(words, commands) for words in lines] == [*wrong.values(), *[""] * len(sound)]


@pytest.mark.full
@pytest.mark.parametrize("page", FIRST_PAGES, ids=lambda page: page.stem)
def test_first_commands_run_in_a_new_environment(page: Path, tmp_path: Path) -> None:
    """Run what a page says to install and to run, in a clone.

    The requirements are those of this environment, and pip builds with them; `make` has tests of its own
    (tests/test_packaging.py). The quickstart runs whole from the wheel there.
    """
    folder = new_environments.clone(tmp_path / "clone")
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    target = new_environments.environment_with_packages(tmp_path / "venv")
    pip = tmp_path / "venv" / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec "{pip.with_name("python")}" -m pip "$@"\n', encoding="utf-8")
    pip.chmod(0o755)
    lines = list(command_lines(page.read_text(encoding="utf-8")))
    installs = [words for words in lines if words[:2] == ["pip", "install"] and words[2:]]
    uses = [words for words in lines if words == ["backlight", "doctor"] or "--its-own" in words]
    runnable = [*installs, *uses]
    assert uses
    assert runnable[0][:2] == ["pip", "install"]
    outputs = {}
    for words in runnable:
        done = run_captured(words, cwd=folder, env=new_environments.variables_of(tmp_path / "venv"))
        assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
        outputs[words[1]] = done.stdout + done.stderr
    assert (target / "backlight" / "__init__.py").is_file()
    assert "Successfully installed backlight" in outputs["install"]
    if "run" in outputs:
        assert "arguments: ['--its-own', '--arguments']" in outputs["run"]
        assert "No findings." in outputs["run"]


@pytest.mark.full
def test_the_base_install_is_as_small_as_its_bench_allows() -> None:
    """Install backlight and its requirements into a new environment; pip downloads what it has not cached."""
    done = run_captured([sys.executable, str(ROOT / "bench" / "install_size.py")])
    assert done.returncode == 0, done.stdout + done.stderr
    total = re.search(r"without numpy: ([\d.]+) MB of 60 MB", done.stdout)
    assert total is not None
    assert 20 < float(total[1]) <= 60
