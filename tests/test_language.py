"""Text that a user reads has no banned word (left column of the glossary); no module name is a gerund."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

BANNED = {
    r"rooms?": "monitor",
    r"run folders?": "run directory",
    r"trainings|(?:a|each|every|another|one|two|watched|small|whole) training(?! \w)": "training run, run",
    r"told right|told wrong|was told|is told|are told|untold": "reported, recorded",
    r"verdict on a hang": "diagnosis",
    r"judged?|judging|judgements?": "evaluate, evaluation, diagnosis",
    r"twins?": "control, counterpart",
    r"planted": "injected",
    r"knobs?": "option, setting",
    r"birthplaces?|born": "origin",
    r"stands? still|stood still": "is hung, is stalled, is idle",
    r"what escapes": "known limitations",
    r"sidecars?|witness(?:es)?": "watchdog process, stack sampler",
    r"in turns": "interleaved",
    r"over each other": "overlaid",
    r"beside": "next to, alongside",
    r"circumstances": "runtime info",
    r"likeness|alike": "comparability, comparable, equal",
    r"ledgers?": "progress",
    r"sacred": "never break",
    r"somebody|nobody|whoever|strangers?|ours|anybody": "the user, no one, third-party code, backlight",
    r"mend (?:it|them)": "fix it",
    r"house's": "backlight's",
}
"""Pattern → what to write. Left out, because they are ordinary English as well: seen, heard, known, places,
ways, stands, exchange, board, beat, witness of a proof, rendezvous (a term of torch.distributed)."""

PATTERN = re.compile(rf"\b(?:{'|'.join(BANNED)})\b", re.IGNORECASE)

NOT_GERUNDS = {
    "sampling": "the technique",
    "sharding": "the technique",
    "grokking": "the phenomenon",
    "lightning": "the framework",
    "exploding": "the name of a rule",
    "vanishing": "the name of a rule",
}
"""Module names that end in -ing and are the field's nouns, with the reason."""


def strings_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the string constants of a module that are no docstrings, with their lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs.add(id(node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.lineno, node.value


def banned_words() -> dict[str, list[str]]:
    """Return the banned words by file."""
    hits: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for line, text in strings_of(path):
            # An identifier is a name, not prose: names of events, columns and options have their own review.
            if " " in text.strip():
                hits.setdefault(name, []).extend(f"{line}: {m[0]}" for m in PATTERN.finditer(text))
        # A command's docstring is its help.
        if "/cli/" in name:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
                    hits.setdefault(name, []).extend(f"{node.lineno}: {m[0]}" for m in PATTERN.finditer(doc))
    for path in [*(ROOT / "bench").glob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        hits[str(path.relative_to(ROOT))] = [m[0] for m in PATTERN.finditer(text)]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for path in pages:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        hits[str(path.relative_to(ROOT))] = [m[0] for m in PATTERN.finditer(text)]
    for path in sorted((ROOT / "src" / "backlight" / "report" / "assets").rglob("*.js")):
        text = " ".join(
            re.findall(r"\"[^\"\n]* [^\"\n]*\"|`[^`\\n]* [^`\\n]*`", path.read_text(encoding="utf-8"))
        )
        hits[str(path.relative_to(ROOT))] = [m[0] for m in PATTERN.finditer(re.sub(r"\$\{[^}]*\}", "", text))]
    return {name: words for name, words in hits.items() if words}


@pytest.mark.slow
def test_user_text_has_no_banned_word() -> None:
    listed = "\n".join(f"{name}: {word}" for name, words in banned_words().items() for word in words)
    assert not listed, f"write what the glossary says instead:\n{listed}"


def test_no_module_name_is_a_gerund() -> None:
    modules = (ROOT / "src" / "backlight").rglob("*.py")
    assert not [path for path in modules if path.stem.endswith("ing") and path.stem not in NOT_GERUNDS]


WORDS_WITHOUT_SUBJECT = frozenset({"found", "one", "known", "held", "given", "own", "said", "apart", "odd"})
"""Names that say how a value came, not what it is."""

STORED_OR_PUBLIC = {
    "cli/doctor.py": {"found"},
    "monitors/correctness/rules/restored_state.py": {"given"},
    "monitors/grokking/model/verdicts.py": {"held"},
    "trace/ranks.py": {"given"},
}
"""Fields by these names that are keys of events and answers."""


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of every variable, parameter, attribute, function and class that a module binds."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.alias(asname=str(name)):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case (
                ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
            ):
                yield node.lineno, name


@pytest.mark.parametrize(
    "code",
    [
        "found = 1",
        "(one, two) = pair",
        "for known in names: pass",
        "[held for held in gradients]",
        "def f(given): pass",
        "self._own = 1",
        "if (said := f()): pass",
        "with f() as apart: pass",
        "def odd(): pass",
        "class Row:\n    found: bool",
        "lambda one: 1",
        "try: pass\nexcept Exception as found: pass",
        "match x:\n    case [one, *_]: pass",
        "from x import y as held",
    ],
)
def test_bindings_are_found(code: str) -> None:
    assert {name.strip("_") for _, name in bound_names(ast.parse(code))} & WORDS_WITHOUT_SUBJECT


def test_variables_say_what_they_hold() -> None:
    source = ROOT / "src" / "backlight"
    listed: list[str] = []
    for path in sorted(source.rglob("*.py")):
        name = path.relative_to(source).as_posix()
        refused = WORDS_WITHOUT_SUBJECT - STORED_OR_PUBLIC.get(name, set())
        for line, bound in bound_names(ast.parse(path.read_text(encoding="utf-8"))):
            if bound.strip("_") in refused:
                listed.append(f"{name}:{line}: {bound}")
    assert not listed, "name what the value is (`findings`, `parameter`, `entry`):\n" + "\n".join(listed)


SAME_NAME = {
    "BacklightCallback": "the callback of three frameworks, each called as its own are",
    "Data": "of the setup of an experiment, one class for each",
    "Frame": "a stack has frames, and so have the tables of a run",
    "Model": "as Data",
    "Part": "of a step that a monitor recorded, and of a collective",
    "Snapshot": "of a database, and of tensors",
    "Training": "as Data",
}
"""Class names that are left with two meanings, with the reason; none is added."""


def test_a_class_name_has_one_meaning() -> None:
    defined: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src" / "backlight").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    several = {name for name, paths in defined.items() if len(paths) > 1}
    assert several <= set(SAME_NAME), {name: defined[name] for name in several - set(SAME_NAME)}
