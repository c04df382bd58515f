"""What the site needs beyond its pages: outputs of their commands, example programs, and a gallery.

mkdocs calls the functions below by their names. Outputs and pictures come from the commands next to them, run
while the site is built; a command that fails makes the build fail.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cli_reference
import page_commands
from mkdocs.structure.files import File, Files

from backlight.findings.limits import Limits, declared
from backlight.registry import RULES

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "build" / "docs"
"""Where pages and pictures put their runs: made anew by every build."""


_OUTPUTS: dict[str, str] = {}
"""Output of each block that ran at the root."""


@dataclass(frozen=True)
class Exhibit:
    """A part of the gallery: the command that makes its run, the folder, the pictures and their words."""

    title: str
    words: str
    command: str
    folder: str
    pictures: tuple[str, ...]


EXHIBITS = (
    Exhibit(
        "Health of a small transformer",
        "Every parameter is a row, every recorded step a column.",
        "backlight run --out build/docs/gpt examples/char_gpt.py --steps 40",
        "gpt",
        ("parameters", "total_norm", "phases"),
    ),
    Exhibit(
        "Grokking of a modular polynomial",
        "The accuracies, and the spectrum of the gradients of single samples while they part and meet again.",
        "backlight grok run doshi --control random-labels --out build/docs/doshi",
        "doshi",
        ("learning_curves", "gram_spectrum", "second_moment"),
    ),
    Exhibit(
        "Signal and noise in the gradients of one checkpoint",
        "Directions that come back with other data, and those that do not.",
        "backlight spectra examples/gpt_recipe.py --replicates 16 --out build/docs/spectra",
        "spectra",
        ("spectra", "spectra_signal"),
    ),
)


def on_pre_build(config: Any) -> None:
    """Begin with no run of an earlier build, and let the commands of the pages be found."""
    shutil.rmtree(RUNS, ignore_errors=True)
    RUNS.mkdir(parents=True)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    os.environ["COLUMNS"] = "80"  # what fits into a page without scrolling
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # more of them spin while other programs have the cores


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every example program, and the gallery with its pictures."""
    index = ["# Examples", "", "Short real programs; the tests run every one of them.", ""]
    for path in sorted((ROOT / "examples").glob("*.py")):
        text = path.read_text()
        files.append(
            File.generated(
                config, f"examples/{path.stem}.md", content=f"# {path.name}\n\n```python\n{text}```\n"
            )
        )
        index.append(f"- [{path.name}]({path.stem}.md): {_summary(text)}")
    for readme in sorted((ROOT / "examples").glob("*/README.md")):
        package = readme.parent
        parts = [readme.read_text().replace("](../../docs/", "](../")]
        for path in sorted([*package.rglob("*.toml"), *package.rglob("*.py")]):
            kind = "toml" if path.suffix == ".toml" else "python"
            parts.append(f"## {path.relative_to(package)}\n\n```{kind}\n{path.read_text()}```\n")
        files.append(File.generated(config, f"examples/{package.name}.md", content="\n".join(parts)))
        index.append(f"- [{package.name}]({package.name}.md), a package")
    files.append(File.generated(config, "examples/index.md", content="\n".join(index)))
    examples = ROOT / "examples"
    for path in sorted([*examples.glob("*.ipynb"), *examples.glob("ci/*.*")]):
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    lines = ["# Gallery", "", "Made while this site was built, each by the command above it.", ""]
    for exhibit in EXHIBITS:
        lines += [f"## {exhibit.title}", "", exhibit.words, "", "```bash", exhibit.command, "```", ""]
        for picture in _pictures(exhibit):
            source = f"gallery/{exhibit.folder}-{picture.name}"
            files.append(File.generated(config, source, abs_src_path=str(picture)))
            lines += [f"![{exhibit.title}: {picture.stem}]({source})", ""]
    files.append(File.generated(config, "gallery.md", content="\n".join(lines)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Run the commands of a page, insert what is generated, and link example programs to their pages."""
    markdown = generated(with_outputs_of(markdown, page.file.src_uri), Path(page.file.src_uri).stem)
    return linked(markdown, "../" * page.file.src_uri.count("/"))


def linked(markdown: str, up: str) -> str:
    """Return a page whose links to examples lead to their pages; ``up`` leads to the first page."""
    markdown = re.sub(
        r"\]\((?:\.\./)+examples/(\w+)(?:\.py|/README\.md)\)", rf"]({up}examples/\1.md)", markdown
    )
    return re.sub(r"\]\((?:\.\./)+examples/(ci/\w+\.\w+|\w+\.ipynb)\)", rf"]({up}examples/\1)", markdown)


def with_outputs_of(markdown: str, name: str) -> str:
    """Return a page with the output of its commands, run in a folder of its own if it brings files."""
    execute = _execute
    if page_commands.has_files(markdown):
        folder = RUNS / Path(name).stem
        folder.mkdir()
        execute = functools.partial(page_commands.execute, folder=folder, environment=os.environ)
    try:
        return page_commands.with_outputs(markdown, execute).replace(f"{ROOT}/", "")
    except page_commands.PageError as error:
        raise SystemExit(f"docs/{name}: {error}") from error


def generated(markdown: str, rule: str) -> str:
    """Return the page of a rule with its limits and an example of its finding, from the code.

    ``<!-- limits -->`` becomes the limits of the rule, ``<!-- limits module:Class -->`` those of a class, and
    ``<!-- example -->`` the finding on the injected fault of the tests; ``<!-- commands -->`` the reference
    of the command line.
    """
    if "<!-- commands -->" in markdown:
        markdown = markdown.replace("<!-- commands -->", cli_reference.reference())
    return re.sub(
        r"<!-- (limits|example) ?([\w.:]*) -->",
        lambda found: limits_table(rule, found[2]) if found[1] == "limits" else example(rule),
        markdown,
    )


def limits_table(rule: str, named: str = "") -> str:
    """Return the limits of a rule, or of the class ``module:Class``, as a table."""
    if named:
        module, _, name = named.partition(":")
        cls = getattr(importlib.import_module(module), name)
        names = list(cls.__annotations__)
        monitor = cls.monitor
    else:
        cls, monitor = RULES[rule].limits or Limits, RULES[rule].monitor
        names = [f.name for f in dataclasses.fields(cls)]
    known = declared(monitor)
    rows = [f"Threshold in `[thresholds.{monitor}]` | Default | Reason | Source", "---|---|---|---"]
    for name in names:
        of = known[name].metadata
        rows.append(f"`{name}` | {known[name].default:g} | {of['reason']} | {of['source']}")
    return "\n".join(f"| {row} |" for row in rows)


def example(rule: str) -> str:
    """Return the first finding of a rule on its injected fault, from the snapshot of the tests."""
    text = (ROOT / "tests" / "snapshots" / "findings.md").read_text()
    found = re.search(rf"^## {rule}\n\n(\w+: .*?^- refuted if: .*?)$", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit(f"docs/findings/{rule}.md: no such rule in tests/snapshots/findings.md")
    return f"> **{found[1].strip()}".replace("\n\n", "**\n>\n", 1).replace("\n- ", "\n> - ")


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Take the names of roles off the docstrings: what follows them is set as code already."""
    return re.sub(r":(?:func|class|meth|mod|attr|data|exc):(?=<code)", "", html)


def _summary(program: str) -> str:
    return (ast.get_docstring(ast.parse(program)) or "").partition("\n")[0]


def _execute(block: page_commands.Block) -> str:
    """Run a block at the root of the repository; the same commands on several pages run once."""
    if block.text not in _OUTPUTS:
        _OUTPUTS[block.text] = page_commands.execute(block, ROOT, os.environ)
    return _OUTPUTS[block.text]


def _pictures(exhibit: Exhibit) -> list[Path]:
    folder = RUNS / f"{exhibit.folder}-plots"
    plots = f"backlight report build/docs/{exhibit.folder} --plots {folder.relative_to(ROOT)}"
    for command in (exhibit.command, plots):
        _execute(page_commands.Block("bash", {"exec": ""}, f"{command}\n", (0, 0)))
    found = [
        path for wanted in exhibit.pictures for path in sorted(folder.glob("*.svg")) if path.stem == wanted
    ]
    if len(found) < len(exhibit.pictures):
        have = ", ".join(sorted(path.name for path in folder.glob("*.svg")))
        raise SystemExit(f"gallery: {exhibit.folder} has {have}, expected {', '.join(exhibit.pictures)}")
    return found
