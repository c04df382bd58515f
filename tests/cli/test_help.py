"""Help pages, completion and the generated reference: 80 columns, examples that parse, every command."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from backlight.cli import app as application
from backlight.cli.app import ScriptCommand

Console = Callable[..., subprocess.CompletedProcess[str]]
DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.slow
def test_no_help_page_is_wider_than_80_columns(command: Callable[..., tuple[int, str, str]]) -> None:
    for name, one in [*application.all_commands().items(), ("", None)]:
        code, out, _ = command(*name.split(), "--help")
        assert code == 0
        assert max(map(len, out.splitlines())) <= 80, name
        assert "<bool>" not in out
        assert "\x1b" not in out
        if one is not None:
            assert out.startswith(f"Usage: backlight {name} ")
            assert all(o in out for p in one.params for o in p.opts if o.startswith("-")), name


@pytest.mark.slow
def test_only_commands_that_run_a_script_mention_its_prints(
    command: Callable[..., tuple[int, str, str]],
) -> None:
    mentions: dict[bool, set[str]] = {True: set(), False: set()}
    for name, one in application.all_commands().items():
        if any("--json" in parameter.opts for parameter in one.params):
            _, out, _ = command(*name.split(), "--help")
            text = re.search(r"^ +--json(.*?)^ +-", out, re.DOTALL | re.MULTILINE)
            assert text is not None, name
            mentions["output of the script" in " ".join(text[1].split())].add(name)
    runs_a_script = {
        name for name, one in application.all_commands().items() if isinstance(one, ScriptCommand)
    }
    assert mentions[True] == runs_a_script - {"run"}
    assert {"doctor", "findings", "attach", "trace", "test-matrix"} <= mentions[False]


def test_every_command_has_an_example_that_parses() -> None:
    for name, command in application.all_commands().items():
        examples = command.epilog.splitlines()
        assert examples, name
        for line in examples:
            # The first command of the group memory may be left out.
            typed = name if f"backlight {name}" in line else name.removesuffix(" measure")
            _, _, arguments = line.partition(f"backlight {typed}")
            assert line.endswith(arguments), line
            words = shlex.split(arguments)
            context = command.make_context(name, list(words), resilient_parsing=False)
            assert not context.args or context.allow_extra_args, line


@pytest.mark.slow
def test_console_script_prints_groups_in_order_and_exits_0(console_script: Console, tmp_path: Path) -> None:
    for arguments in ((), ("-h",)):
        done = console_script(tmp_path, *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        listed = re.findall(r"^  ([a-z-]+)  ", done.stdout, re.MULTILINE)
        expected = [name for names in application.PANELS.values() for name in names]
        assert [name for name in listed if name in expected] == expected
    assert console_script(tmp_path, "grok").stdout.startswith("Usage: backlight grok [OPTIONS] COMMAND")
    assert console_script(tmp_path, "-V").stdout == console_script(tmp_path, "--version").stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "expected"), [("backlight wh", "why-no-grad"), ("backlight nan --fa", "--fail-on")]
)
def test_completion_completes_commands_and_options(line: str, expected: str) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("backlight")],
        env={
            **os.environ, "_BACKLIGHT_COMPLETE": "bash_complete", "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split()) - 1),
        },
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (f"plain,{expected}\n", "")


@pytest.mark.slow
def test_fail_on_an_unknown_name_is_refused_before_the_script_runs(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('the script ran')")
    for name, given, message in (
        ("nan", "nam", "did you mean 'nan'?"),
        ("why-no-grad", "unsued", "did you mean 'unused'?"),
        ("check --recompute", "states", "did you mean 'state'?"),
    ):
        assert message in refused(*name.split(), "--fail-on", given, tmp_path / "train.py")


@pytest.mark.slow
def test_the_reference_of_the_site_has_every_command() -> None:
    import building  # in the folder of the docs

    page = building.generated((DOCS / "cli.md").read_text(), "cli")
    for name, command in application.all_commands().items():
        assert f"### backlight {name}\n" in page
        assert f"Usage: backlight {name} " in page
        assert command.help.split("\n\n")[0] in page
    assert "<!--" not in page
    assert "\x1b" not in page


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("gop", "No such command 'gop'; use backlight gram: the exact Gram of per-sample gradients"),
        ("gradient_outer_product", "use backlight gram: "),
        ("agop", "use backlight grok run: records it"),
        ("ntk", "use backlight grok run: records it"),
        ("spectral-echo", "use backlight spectra: "),
        ("noise-scale", "use backlight run --set spectra.noise_scale=0: records the gradient noise scale"),
        ("dry-run", "use backlight memory predict: "),
        ("no-gradients", "use backlight why-no-grad: which parameters get no gradient"),
        ("gramm", "No such command 'gramm'; did you mean 'gram'?"),
        ("why-no-gradient", "did you mean 'why-no-grad'?"),
        ("xyzzy", "No such command 'xyzzy'; backlight --help lists the commands"),
        ("grok gop", "No such command 'gop'; use backlight gram: "),
        ("grok detekt", "did you mean 'detect'?"),
    ],
)
def test_unknown_command_names_the_one_that_is_meant(
    command: Callable[..., tuple[int, str, str]], typed: str, message: str
) -> None:
    code, out, error = command(*typed.split())
    assert (code, out, message in error) == (2, "", True), error


def test_commands_that_names_mean_exist() -> None:
    commands, groups = application.all_commands(), set(application.app.list_commands(None))
    for synonyms, (meant, _) in application.MEANT.items():
        words = meant.partition(" --")[0]
        assert words in commands, meant
        assert not groups.intersection(synonyms)
