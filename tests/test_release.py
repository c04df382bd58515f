"""The release workflow: its order, its permissions, and the commands of its jobs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import backlight
import new_environments

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".github" / "release.py"
WORKFLOW: dict[Any, Any] = yaml.safe_load(
    (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
)
JOBS: dict[str, dict[str, Any]] = WORKFLOW["jobs"]


def commands(job: str) -> list[str]:
    return [step["run"] for step in JOBS[job]["steps"] if "run" in step]


def bash(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the workflow as its shell does, `python` being that of the tests."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", command],
        cwd=folder, env={**os.environ, "PATH": path, **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = new_environments.clone(tmp_path / "clone")
    changelog = folder / "CHANGELOG.md"
    text = changelog.read_text(encoding="utf-8")
    changelog.write_text(text.replace("(unreleased)", "(2030-01-01)"), encoding="utf-8")
    return folder


def test_only_a_tag_starts_it_and_the_upload_waits_for_the_check() -> None:
    assert WORKFLOW[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads the key `on` as a truth value
    assert {name: job.get("needs") for name, job in JOBS.items()} == {
        "build": None, "check": "build", "publish": ["build", "check"], "announce": "publish",
    }  # fmt: skip
    steps = {name: str(job["steps"]) for name, job in JOBS.items()}
    uploads = [
        name for name, text in steps.items() if "gh-action-pypi-publish" in text or "gh release" in text
    ]
    assert uploads == ["publish", "announce"]
    declared = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert JOBS["check"]["strategy"]["matrix"]["python"] == declared


def test_each_job_has_the_least_permissions_and_pinned_actions() -> None:
    assert WORKFLOW["permissions"] == {}
    assert {name: job["permissions"] for name, job in JOBS.items()} == {
        "build": {"contents": "read"},
        "check": {"contents": "read"},
        "publish": {"id-token": "write"},
        "announce": {"contents": "write"},
    }
    steps = [step for job in JOBS.values() for step in job["steps"]]
    used = [step["uses"] for step in steps if "uses" in step]
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name) for name in used), used
    checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout")]
    assert all(step["with"] == {"persist-credentials": False} for step in checkouts)
    # The job that may upload runs no code of the repository; no command gets text that GitHub inserts.
    assert commands("publish") == []
    assert not any("${{" in step["run"] for step in steps if "run" in step)
    assert JOBS["publish"]["environment"] == "release"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tag", "is_released"),
    [(f"v{backlight.__version__}", True), ("v99.0", False), (backlight.__version__, False)],
)
def test_the_tag_must_name_the_version(clone: Path, tag: str, is_released: bool) -> None:
    command = next(run for run in commands("build") if "version" in run)
    done = bash(command, clone, GITHUB_REF_NAME=tag)
    assert done.returncode == (0 if is_released else 1), done.stderr
    if not is_released:
        assert done.stderr.strip() == (
            f"the tag is {tag}, expected v{backlight.__version__}, the version in src/backlight/__init__.py"
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heading", "reason"),
    [("(unreleased)", "has no date; replace (unreleased)"), (None, "no section"), ("(2030-01-01)", "")],
)
def test_the_changelog_must_have_a_dated_section(clone: Path, heading: str | None, reason: str) -> None:
    section = f"## {backlight.__version__} {heading}\n\n- A change.\n" if heading else ""
    (clone / "CHANGELOG.md").write_text(f"# Changelog\n\n{section}\n## 0.0.1\n\n- Older.\n", encoding="utf-8")
    tag = f"v{backlight.__version__}"
    done = bash(f"python .github/release.py version {tag}", clone)
    assert done.returncode == bool(reason)
    assert reason in done.stderr
    notes = next(run for run in commands("announce") if "notes" in run and "release.py" in run)
    assert bash(notes, clone, GITHUB_REF_NAME=tag).returncode == 0
    assert (clone / "notes.md").read_text(encoding="utf-8").strip() == ("- A change." if heading else "")


@pytest.mark.full
def test_the_commands_of_build_and_check_run(clone: Path) -> None:
    """Run both jobs; packages are those of this environment, so that only backlight itself is installed."""
    substitutes = {
        "python -m pip install build==1.6.1": "python -m build --version",
        # Without isolation: hatchling is that of this environment as well.
        "python -m build": "python -m build --no-isolation",
    }
    assert set(substitutes) <= set(commands("build"))
    for command in commands("build"):
        done = bash(substitutes.get(command, command), clone, GITHUB_REF_NAME=f"v{backlight.__version__}")
        assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    target = new_environments.environment_with_packages(clone / "venv")
    for command in commands("check"):
        done = bash(command, clone)
        assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    assert sorted(path.suffix for path in (clone / "dist").iterdir()) == [".gz", ".whl"]
    assert (target / "backlight" / "cli" / "demo" / "new_head.py").is_file()
    assert f"backlight {backlight.__version__}" in done.stdout
