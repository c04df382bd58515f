"""A plan that cannot be run is refused in one sentence, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from backlight.diagnose.matrix.cases import cases_of, split_options
from backlight.diagnose.matrix.decision_tree import check_tree
from backlight.diagnose.matrix.plan import PlanError, read_plan
from backlight.diagnose.matrix.runner import prepare

Writer = Callable[..., Path]

END = "[tree.b]\nconclusion = 'x'\n"
OTHER = "[tree.c]\nconclusion = 'y'\n"
JSON = "[cases.base]\narguments = ['c.json']\nedits = "
PAIR = "[cases.base]\n[cases.other]\ncontrol = 'base'\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour = 1\n", r"\[base\]: unknown key 'colour'; there are|unknown key 'colour'"),
        ("[case.base]\n", r"unknown key 'case'; did you mean 'cases'\?"),
        ("[cases.base]\ncontrl = 'x'\n", r"\[cases.base\]: unknown key 'contrl'; did you mean 'control'\?"),
        (
            "[cases.base]\nedits = [{ file = 'a.json', fnd = 'x', replace = 'y' }]\n",
            r"unknown key 'fnd'; did you mean 'find'\?",
        ),
        ("", r"no cases: write \[cases.NAME\]"),
        (PAIR, r"case 'other' is equal to its control 'base'"),
        (
            PAIR + "arguments = ['wait']\nenvironment = { A = '1' }\n",
            r"in 2 factors: argument positional, environment A",
        ),
        (PAIR + "arguments = ['--a', '1', '--b=2']\n", r"in 2 factors: argument --a, argument --b"),
        (PAIR + "arguments = ['wait']\ntime_limit = 9\n", r"has 9 s, its control 'base' has 30 s"),
        (
            PAIR.replace("'base'", "'basis'") + "arguments = ['wait']\n",
            r"unknown control 'basis'; did you mean 'base'\?",
        ),
        (PAIR.replace("'base'", "'other'"), r"case 'other' is its own control"),
        ("[cases.base]\ntime_limit = 0\n", r"cases.base.time_limit: Input should be greater than 0, got 0"),
        ("[cases.base]\ntime_limit = inf\n", r"time_limit: Input should be a finite number, got inf"),
        ("[cases.base]\ntime_limit = 'long'\n", r"cases.base.time_limit: .*valid number.*got 'long'"),
        ("[cases.'a/b']\n", r"cases.a/b: String should match pattern .*, got 'a/b'"),
        ("[cases.base]\nscript = 'a.py'\nmodule = 'b'\n", r"script and module are both given"),
        ("[cases.base]\nscript = 'nowhere.py'\n", r"case 'base' cannot start: .*nowhere.py: No such file"),
        ("[cases.base]\ncommand = ['no-such-program']\n", r"cannot start: no-such-program: no such program"),
        ("[cases.base]\ncommand = ['echo', '{rnu}']\n", r"unknown placeholder \{rnu\}; did you mean 'run'\?"),
        ("[cases.base]\ncommand = ['echo']\nranks = 2\n", r"ranks is given, but command has no \{ranks\}"),
        ("[cases.base]\ndirectory = 'nowhere'\n", r"nowhere: no such directory"),
        ("[cases.base]\ninterpreter = './job.py'\n", r"job.py: no such program"),
        ("[cases.base]\ninterpreter = '/bin/echo'\n", r"/bin/echo: does not answer as a Python"),
        ("[cases.base]\nbranch = 'main'\n", r"branch 'main': not found"),
        ("[cases.base]\nlevels = { x = 'y' }\n", r"no factor is called 'x'; there are none"),
        ("[cases.base]\nshows = '('\n", r"'\(' is not a regular expression"),
        ("[factors.a.only]\n[cases.base]\n", r"factors.a: Dictionary should have at least 2 items"),
        (
            "[factors.a.off]\n[factors.a.on]\n[cases.base]\n"
            "[cases.on]\ncontrol = 'base'\nlevels = { a = 'on' }\n",
            r"equal to its control 'base' \(factor a changes nothing",
        ),
        (
            "[factors.a]\noff = {}\non = { environment = { X = '1' } }\n"
            "[factors.b]\noff = {}\non = { environment = { X = '2' } }\n"
            "[cases.both]\nlevels = { a = 'on', b = 'on' }\n",
            r"factors.a.on and factors.b.on both set environment X",
        ),
        (
            "[cases.base]\nedits = [{ file = 'job.py', find = 'x' }]\n",
            r"either find and replace, or key and value",
        ),
        (
            "[cases.base]\nedits = [{ file = 'job.py', find = 'no such text', replace = '' }]\n",
            r"'no such text' occurs 0 times in job.py",
        ),
        (
            JSON + "[{ file = 'c.json', key = 'net.dpth', value = 3 }]\n",
            r"c.json has no key 'net.dpth': 'dpth' is unknown; did you mean 'depth'\?",
        ),
        (
            JSON + "[{ file = 'c.json', key = 'net.depth', value = 2 }]\n",
            r"the edit of c.json changes nothing; 'net.depth' is set already",
        ),
        (
            "[cases.base]\nedits = [{ file = 'c.json', key = 'net.depth', value = 3 }]\n",
            r"no argument of the command names 'c.json'",
        ),
    ],
)  # fmt: skip
def test_a_bad_plan_is_one_sentence(text: str, message: str, plan: Writer, folder: Path) -> None:
    (folder / "c.json").write_text('{"net": {"depth": 2}}')
    path = plan(text)
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
        ("[tree.a]\ncase = 'base'\non = { UNKNOWN = 'b' }\n" + END, r"UNKNOWN decides nothing"),
        ("[tree.a]\ncase = 'base'\non = { causes = 'b' }\n" + END, r"unknown answer 'causes'"),
        ("[tree.a]\ncompare = 'base'\non = { causes = 'b' }\n" + END, r"'base', which has no control"),
        ("[tree.a]\ncase = 'base'\non = { PASS = 'b', 'PASS|SLOW' = 'c' }\n" + END + OTHER,
         r"'PASS' leads to two nodes"),
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
        read_plan(Path("nowhere.toml"))
    (folder / "broken.toml").write_text("cases = [")
    with pytest.raises(PlanError, match=r"broken.toml: not valid TOML"):
        read_plan(folder / "broken.toml")


FACTORS = """
[factors.checkpointing]
off = {}
on = { arguments = ["--checkpoint"] }
[factors.ranks]
one = { ranks = 1 }
two = { ranks = 2 }
"""


def test_a_product_gives_every_case_a_control_one_factor_away(plan: Writer) -> None:
    path = plan(FACTORS, top='time_limit = 3\ndesign = "product"')
    cases = cases_of(read_plan(path), path)
    assert [(c.name, c.control, c.factor) for c in cases] == [
        ("base", "", ""),
        ("ranks=two", "base", "ranks"),
        ("checkpointing=on", "base", "checkpointing"),
        ("checkpointing=on,ranks=two", "checkpointing=on", "ranks"),
    ]
    # One rank is started by the same launcher as two: the launcher is no second factor.
    assert all("torch.distributed.run" in c.argv for c in cases)
    assert [a for a in cases[0].argv if "nproc" in a] == ["--nproc-per-node=1"]
    assert "--checkpoint" in cases[3].argv


def test_one_at_a_time_takes_each_factor_alone(plan: Writer) -> None:
    path = plan(FACTORS, top='time_limit = 3\ndesign = "one-at-a-time"')
    assert [c.name for c in cases_of(read_plan(path), path)] == ["base", "ranks=two", "checkpointing=on"]


def test_without_several_ranks_there_is_no_launcher(plan: Writer) -> None:
    path = plan("[cases.base]\n", base='script = "job.py"\nrun_options = ["--every", "5"]')
    (case,) = cases_of(read_plan(path), path)
    assert case.argv[1:] == ("-m", "backlight", "run", "--out", "{run}", "--every", "5", "job.py")


def test_a_level_may_bundle_what_only_makes_sense_together(plan: Writer) -> None:
    both = "{ arguments = ['--a'], environment = { B = 1 } }"
    cases = "[cases.base]\n[cases.on]\ncontrol = 'base'\nlevels = { ab = 'on' }\n"
    path = plan(f"[factors.ab]\noff = {{}}\non = {both}\n{cases}")
    on = cases_of(read_plan(path), path)[1]
    assert (on.factor, on.environment) == ("ab", {"B": "1"})


def test_options_are_split_as_scripts_read_them() -> None:
    assert split_options(["x", "--a", "1", "--b=2", "-3", "--flag"]) == [
        ("positional", ("x",)),
        ("--a", ("1",)),
        ("--b", ("2", "-3")),
        ("--flag", ()),
    ]


def test_the_root_of_a_tree_is_found(plan: Writer) -> None:
    path = plan("[cases.base]\n[tree.z]\nconclusion = 'x'\n[tree.a]\ncase = 'base'\non = { PASS = 'z' }\n")
    assert check_tree(read_plan(path), {"base": ""}, path) == ("a", "z")


def test_init_writes_a_plan_that_is_ready_to_be_fitted(
    folder: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, _ = command("matrix", "--init", "mine.toml", "--", "python", "job.py", "--lr", "3")
    assert (code, out) == (0, "mine.toml\n")
    text = (folder / "mine.toml").read_text()
    # Outside of a repository the branch cannot be had: everything else stands as written.
    (folder / "mine.toml").write_text(
        text.replace('other = { branch = "HEAD" }', 'other = { directory = ".." }')
    )
    read = read_plan(folder / "mine.toml")
    assert set(read.factors) == {"checkpointing", "ranks", "backend", "branch"}
    assert (read.base.script, read.base.arguments) == ("job.py", ["--lr", "3"])
    cases = cases_of(read, folder / "mine.toml")
    assert [c.name for c in cases] == [
        "base",
        "branch=other",
        "backend=math",
        "ranks=two",
        "checkpointing=on",
    ]
    assert check_tree(read, {c.name: c.control for c in cases}, folder / "mine.toml")[0] == "base"
    code, _, err = command("matrix", "--init", "mine.toml")
    assert code == 2
    assert "mine.toml: exists already" in err
