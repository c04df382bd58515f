"""Commands of the release workflow: compare tag and version, print the notes, use the built wheel.

    python .github/release.py version v0.1.0     # fails unless tag, package and CHANGELOG.md agree
    python .github/release.py notes v0.1.0       # the section of the version in CHANGELOG.md
    python .github/release.py check dist VENV    # install the wheel of dist/ into VENV and use it

`check` creates VENV unless it exists. It needs nothing but Python and pip, since no package is installed
before it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def version() -> str:
    """Return the version of the package."""
    text = (ROOT / "src" / "backlight" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert found is not None
    return found[1]


def section(text: str, number: str) -> tuple[str, str]:
    """Return heading and content of the section of a version in a changelog, empty if it has none."""
    found = re.search(rf"^## ({re.escape(number)}\b[^\n]*)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return (found[1], found[2].strip()) if found else ("", "")


def problem(tag: str, number: str, changelog: str) -> str:
    """Return why a tag cannot be released, or an empty string."""
    if tag != f"v{number}":
        return f"the tag is {tag}, expected v{number}, the version in src/backlight/__init__.py"
    heading, notes = section(changelog, number)
    if not notes:
        return f"CHANGELOG.md: no section `## {number}`"
    if "unreleased" in heading:
        return f"CHANGELOG.md: `## {heading}` has no date; replace (unreleased) with the day of the release"
    return ""


def check(dist: Path, folder: Path) -> None:
    """Install the wheel with the extras of the README into an environment, and use it as a new user does."""
    (wheel,) = dist.resolve().glob("*.whl")
    python = folder.resolve() / "bin" / "python"
    if not python.exists():
        venv.create(folder, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", f"{wheel}[torch,live]"], check=True)
    variables = {name: os.environ[name] for name in os.environ if not name.startswith("PYTHON")}
    variables["PATH"] = os.pathsep.join([str(python.parent), variables["PATH"]])
    with tempfile.TemporaryDirectory() as work:

        def call(*command: str) -> str:
            print("$", *command, flush=True)
            done = subprocess.run(
                command, cwd=work, env=variables, stdout=subprocess.PIPE, text=True, check=True
            )
            print(done.stdout, flush=True)
            return done.stdout

        expect("--version", call("backlight", "--version"), version())
        call("backlight", "doctor")
        call("backlight", "demo", "--steps", "60", "--out", "demo")
        bug = "`head.weight` and `head.bias` are not in any optimizer"
        expect("findings of the demo", call("backlight", "findings", "demo"), bug)
        call("backlight", "findings", "demo-fixed", "--fail-on", "warning")
        call("backlight", "report", "demo", "--out", "page.html")
        expect("page.html", Path(work, "page.html").read_text(encoding="utf-8"), "not in any optimizer")
        call("python", "-c", "import backlight.report.live.server")


def expect(name: str, text: str, part: str) -> None:
    """Exit unless a text contains a part."""
    if part not in text:
        sys.exit(f"{name}: expected {part}, got {text[:300]}")


def main(arguments: list[str]) -> str | None:
    """Run one command; return what is wrong."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    match arguments:
        case ["version", tag]:
            return problem(tag, version(), changelog) or None
        case ["notes", tag]:
            print(section(changelog, tag.removeprefix("v"))[1])
        case ["check", dist, folder]:
            check(Path(dist), Path(folder))
        case _:
            return __doc__
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
