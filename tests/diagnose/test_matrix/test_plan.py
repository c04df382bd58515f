"""A plan that cannot be run is refused in one sentence, before anything is written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from backlight.diagnose.test_matrix.plan import PlanError
from backlight.diagnose.test_matrix.runner import prepare

Writer = Callable[..., Path]

END = "[tree.b]\nconclusion = 'x'\n"
OTHER = "[tree.c]\nconclusion = 'y'\n"
FACTORS = """
[factors.checkpointing]
off = {}
on = { arguments = ["--checkpoint"] }
[factors.ranks]
one = { ranks = 1 }
two = { ranks = 2 }
"""
PAIR = FACTORS + "[cases.base]\n[cases.other]\ncontrol = 'base'\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour = 1\n", r"\[base\]: unknown key 'colour'; there are: arguments"),
        ("[case.base]\n", r"unknown key 'case'; did you mean 'cases'\?"),
        ("[cases.base]\ncontrl = 'x'\n", r"\[cases.base\]: unknown key 'contrl'; did you mean 'control'\?"),
        ("[tree.a]\nactions = [{ verfy = 'x' }]\n", r"unknown key 'verfy'; did you mean 'verify'\?"),
        ("", r"no cases: write \[factors.NAME.LEVEL\]"),
        (PAIR, r"case 'other' is equal to its control 'base'; change one factor"),
        (PAIR + "levels = { checkpointing = 'on', ranks = 'two' }\n", r"in 2 factors: checkpointing, ranks"),
        (PAIR.replace("'base'", "'basis'"), r"unknown control 'basis'; did you mean 'base'\?"),
        (PAIR.replace("'base'", "'other'"), r"case 'other' is equal to its control 'other'"),
        (PAIR + "levels = { rank = 'two' }\n", r"no factor is called 'rank'; did you mean 'ranks'\?"),
        (PAIR + "levels = { ranks = 'too' }\n", r"ranks has no level 'too'; did you mean 'two'\?"),
        ("ranks = 'two'\n[cases.base]\n", r"base.ranks: expected int \| null, got 'two'"),
        ("[cases.'a/b']\n", r"cases.a/b: expected a name of letters, digits and .*"),
        ("directory = 'nowhere'\n[cases.base]\n", r"case 'base': .*nowhere: no such directory"),
        ("shows = '('\n[cases.base]\n", r"base: shows: expected a regular expression, got '\('"),
        ("[factors.a.only]\n[cases.base]\n", r"factors.a: expected 2 levels or more, got 1"),
        (
            "[factors.a.off]\n[factors.a.on]\n",
            r"'a=on' is equal to its control 'base' \(a changes nothing of what is started\)",
        ),
        (
            "[factors.a]\noff = {}\non = { environment = { X = '1' } }\n"
            "[factors.b]\noff = {}\non = { environment = { X = '2' } }\n"
            "[cases.both]\nlevels = { a = 'on', b = 'on' }\n",
            r"factors.a.on and factors.b.on both set environment X",
        ),
    ],
)  # fmt: skip
def test_a_bad_plan_is_one_sentence(text: str, message: str, plan: Writer, folder: Path) -> None:
    refused(plan(text), message, folder)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("watch = false", r"base: the key 'command' is missing"),
        ("command = []", r"base.command: expected a list of length >= 1"),
        ("command = ['nowhere.py']", r"case 'base': .*nowhere.py: no such file"),
        ("command = ['no-such-program']", r"case 'base': no-such-program: no such program"),
        ("command = ['echo', '{rnu}']", r"unknown placeholder \{rnu\}; did you mean 'run'\?"),
        ("command = ['echo']\nranks = 2", r"ranks is given, but its command has no \{ranks\}"),
    ],
)
def test_a_bad_command_is_one_sentence(base: str, message: str, plan: Writer, folder: Path) -> None:
    refused(plan("[cases.base]\n", base=base), message, folder)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("0", r"time_limit: expected float >= 3.0"),
        ("inf", r"time_limit: expected float <= 604800.0"),
        ("'long'", r"time_limit: expected float, got 'long'"),
    ],
)
def test_a_bad_limit_is_one_sentence(limit: str, message: str, plan: Writer, folder: Path) -> None:
    refused(plan("[cases.base]\n", top=f"time_limit = {limit}"), message, folder)


def refused(path: Path, message: str, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(PlanError, match=message) as caught:
        prepare(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ("[tree.a]\ncase = 'base'\non = { PASS = 'b' }\n[tree.b]\ncase = 'base'\non = { PASS = 'a' }\n",
         r"the tree is cyclic: a -> b -> a|the tree is cyclic: b -> a -> b"),
        ("[tree.a]\ncase = 'base'\non = { PASS = 'a' }\n", r"the tree is cyclic: a -> a"),
        ("[tree.a]\ncase = 'bse'\non = { PASS = 'b' }\n" + END, r"called 'bse'; did you mean 'base'"),
        ("[tree.a]\ncase = 'base'\non = { PASS = 'c' }\n", r"leads to 'c', which is no node; there are: a"),
        ("[tree.a]\ncase = 'base'\non = { PASSED = 'b' }\n" + END, r"unknown answer 'PASSED'"),
        ("[tree.a]\ncase = 'base'\non = { UNKNOWN = 'b' }\n" + END, r"unknown answer 'UNKNOWN'"),
        ("[tree.a]\ncase = 'base'\non = { causes = 'b' }\n" + END, r"unknown answer 'causes'"),
        ("[tree.a]\ncompare = 'base'\non = { causes = 'b' }\n" + END, r"'base', which has no control"),
        ("[tree.a]\ncase = 'base'\non = { PASS = 'b', 'PASS|SLOW' = 'c' }\n" + END + OTHER,
         r"one answer leads to two nodes"),
        ("[tree.a]\nconclusion = 'x'\n[tree.b]\nconclusion = 'y'\n", r"the tree has 2 roots: a, b"),
        ("[tree.a]\ncase = 'base'\ncompare = 'base'\non = {}\n", r"it has both case and compare"),
        ("[tree.a]\nask = 'well?'\n", r"expected a question \(case or compare, with on\) or a conclusion"),
        ("[tree.a]\ncase = 'base'\n", r"the question leads nowhere"),
    ],
)  # fmt: skip
def test_a_bad_tree_is_one_sentence(tree: str, message: str, plan: Writer) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        prepare(plan("[cases.base]\n" + tree))
    assert "\n" not in str(caught.value)


def test_files_that_are_no_plan(folder: Path) -> None:
    with pytest.raises(PlanError, match=r"nowhere.toml: cannot be read: No such file.*--init nowhere.toml"):
        prepare(Path("nowhere.toml"))
    (folder / "broken.toml").write_text("cases = [")
    with pytest.raises(PlanError, match=r"broken.toml: not valid TOML"):
        prepare(folder / "broken.toml")


def test_without_cases_each_factor_is_taken_alone(plan: Writer) -> None:
    cases = prepare(plan(FACTORS)).cases
    assert [(c.name, c.control, c.factor) for c in cases] == [
        ("base", "", ""),
        ("checkpointing=on", "base", "checkpointing"),
        ("ranks=two", "base", "ranks"),
    ]
    # One rank is started by the same launcher as two: the launcher is no second factor.
    assert all("torch.distributed.run" in c.argv for c in cases)
    assert [a for a in cases[0].argv if "nproc" in a] == ["--nproc-per-node=1"]
    assert cases[1].argv[-1] == "--checkpoint"


def test_without_several_ranks_there_is_no_launcher(plan: Writer) -> None:
    path = plan("[cases.base]\n", base='command = ["job.py"]\nrun_options = ["--every", "5"]')
    (case,) = prepare(path).cases
    assert case.argv[1:] == ("-m", "backlight", "run", "--out", "{run}", "--every", "5", "job.py")
    path = plan("[cases.base]\n", base='command = ["{python}", "{ranks}", "{run}"]\nranks = 3')
    assert prepare(path).cases[0].argv == (sys.executable, "3", "{run}")


def test_a_level_may_bundle_what_only_makes_sense_together(plan: Writer) -> None:
    both = "{ command = ['-m', 'json'], arguments = ['--a'], environment = { B = 1 } }"
    on = prepare(plan(f"[factors.ab]\noff = {{}}\non = {both}\n")).cases[1]
    assert (on.factor, on.environment, on.argv[1:]) == ("ab", {"B": "1"}, ("-m", "json", "--a"))


def test_the_root_of_a_tree_is_found(plan: Writer) -> None:
    tree = "[tree.z]\nconclusion = 'x'\n[tree.a]\ncase = 'base'\non = { PASS = 'z' }\n"
    assert prepare(plan("[cases.base]\n" + tree)).order == ("a", "z")


def test_init_writes_a_plan_that_is_ready_to_be_fitted(
    folder: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    assert command("test-matrix", "--init", "mine.toml")[:2] == (0, "mine.toml\n")
    (folder / "train.py").touch()
    prepared = prepare(folder / "mine.toml")
    assert [c.name for c in prepared.cases] == ["base", "checkpointing=on", "ranks=two"]
    assert prepared.order[0] == "base"
    code, _, err = command("test-matrix", "--init", "mine.toml")
    assert code == 2
    assert "mine.toml: exists already" in err
