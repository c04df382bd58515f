"""Plug-ins of other distributions: taken whole, or named in one warning and left out."""

from __future__ import annotations

import importlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backlight
from backlight import registry
from backlight.findings.evaluate import RuleFailedWarning, evaluate_rules
from backlight.records import ParameterRecord
from backlight.registry import (
    PROBES,
    RULES,
    DuplicateNameError,
    Needs,
    PlugIn,
    PlugInWarning,
    Probe,
    Registry,
    Rule,
)
from backlight.report.page import rendered
from backlight.report.panel import PANELS, Drawn, Failed, Panel, PanelWarning
from backlight.report.source import Source
from backlight.store.read.run import open_run
from backlight.store.write.writer import RunWriter

NUMBERS = itertools.count()
RULE = "from backlight.registry import Rule\nmade = lambda name: Rule(name, 'health', 1, lambda run, t: ())\n"

Plug = Callable[..., Registry[Any]]


@pytest.fixture
def plug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plug]:
    """Install distributions with one module each, and return a registry whose group they are in."""
    before = list(registry._REGISTRIES)

    def install(*sources: str, value: str = "", holds: type = Rule) -> Registry[Any]:
        group = f"backlight.test{next(NUMBERS)}"
        found: Registry[Any] = Registry("rule", group=group, holds=holds)
        for number, source in enumerate(sources):
            name = f"{group.replace('.', '_')}_{number}"
            (tmp_path / f"{name}.py").write_text(
                f"{RULE}REGISTRY = __import__('{name}_here').REGISTRY\n{source}"
            )
            here = type(registry)(f"{name}_here")
            here.REGISTRY = found  # type: ignore[attr-defined]  # a module made here
            monkeypatch.setitem(__import__("sys").modules, f"{name}_here", here)
            folder = tmp_path / f"{name}-1.{number}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.{number}\n")
            (folder / "entry_points.txt").write_text(f"[{group}]\nplug{number} = {name}{value}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()
        return found

    yield install
    registry._REGISTRIES[:] = before


def told(of: Registry[Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        list(of)
    assert all(w.category is PlugInWarning for w in said)
    return [str(w.message) for w in said]


def test_a_module_registers_and_is_named_with_its_distribution(plug: Plug) -> None:
    found = plug("REGISTRY.add('silent', made('silent')); REGISTRY.add('loud', made('loud'))")
    assert told(found) == []
    assert list(found) == ["loud", "silent"]
    (plug_in,) = found.plug_ins()
    assert (plug_in.kind, plug_in.name, plug_in.version) == ("rule", "plug0", "1.0")
    assert set(plug_in.entries) == {"silent", "loud"}
    assert found.origin("silent") is plug_in
    assert found.origin("nobody's") is None


def test_an_entry_point_may_name_the_entry_itself(plug: Plug) -> None:
    found = plug("it = made('silent')", value=":it")
    assert told(found) == []
    assert list(found) == ["silent"]


@pytest.mark.parametrize(
    ("source", "value", "said"),
    [
        ("raise OSError('no disk')", "", "OSError: no disk"),
        ("raise SystemExit(4)", "", "SystemExit: 4"),
        ("import nowhere_to_be_found", "", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("REGISTRY.add('half', made('half')); 1 / 0", "", "ZeroDivisionError"),
        (
            "REGISTRY.add('wrong', 42)",
            "",
            "TypeError: rule 'wrong': expected backlight.registry.Rule, got int",
        ),
        ("it = 42", ":it", "it registers no rule, and is none: got int"),
        ("", "", "it registers no rule, and is none: got module"),
        ("", ":missing", "AttributeError"),
        ("REGISTRY.add('', made(''))", "", "TypeError: the name of a rule must be a text"),
        ("Rule('x', 'health', 1, 'no function')", "", "TypeError: rule 'x': evaluate must be callable"),
    ],
)
def test_what_cannot_be_used_is_named_once_and_left_out(
    plug: Plug, source: str, value: str, said: str
) -> None:
    found = plug(source, value=value)
    (warning,) = told(found)
    assert "rule plug-in 'plug0'" in warning
    assert " 1.0 could not be loaded and is left out: " in warning
    assert said in warning
    assert list(found) == []
    assert told(found) == []
    (plug_in,) = found.plug_ins()
    assert said in plug_in.problem
    assert plug_in.entries == ()


def test_a_name_that_is_taken_leaves_out_all_of_the_second_plug_in(plug: Plug) -> None:
    first = "REGISTRY.add('same', made('same'))"
    found = plug(first, "REGISTRY.add('other', made('other'))\n" + first)
    (warning,) = told(found)
    assert "'plug1'" in warning
    assert "DuplicateNameError: rule 'same' is registered twice" in warning
    assert list(found) == ["same"]
    assert [p.problem == "" for p in found.plug_ins()] == [True, False]


def test_a_name_of_ours_cannot_be_taken() -> None:
    rule = RULES["vanishing"]
    both = r"registered twice: by \S*health\.rules\.vanishing\.\w+ and by \S*registry\.\S*<lambda>"
    with pytest.raises(DuplicateNameError, match=f"rule 'vanishing' is {both}"):
        RULES.add("vanishing", Rule("vanishing", "health", 1, lambda *_: ()))
    assert RULES["vanishing"] is rule


def test_a_module_that_raises_leaves_nothing_in_other_registries(plug: Plug) -> None:
    other: Registry[Any] = Registry("rule", holds=Rule)
    found = plug("__import__('backlight').other.add('half', made('half'))\nraise OSError('late')")
    backlight.other = other  # type: ignore[attr-defined]  # reached by the plug-in
    try:
        assert "OSError: late" in told(found)[0]
    finally:
        del backlight.other  # type: ignore[attr-defined]  # as above
    assert list(other) == []


def test_warnings_that_are_errors_end_nothing(plug: Plug, capfd: pytest.CaptureFixture[str]) -> None:
    found = plug("raise OSError('no disk')")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(found) == []
    assert "OSError: no disk" in capfd.readouterr().err


# What is a plug-in's in use: the registry is told that the entry is one.


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Registry[Any], Any], None]]:
    added = []

    def add(to: Registry[Any], entry: Any) -> None:
        to.add(entry.name, entry)
        added.append((to, entry.name))
        own = PlugIn(to.kind, "strange", "strange", "strangers", "1.2", (entry.name,))
        monkeypatch.setattr(to, "_plug_ins", [own])

    yield add
    for to, name in added:
        to._entries.pop(name)


class Measuring:
    def __init__(self, result: Any) -> None:
        self.result = result
        self.calls = 0

    def measure(self, *_: Any) -> Any:
        self.calls += 1
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def train(path: Path) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with backlight.watch(model, optimizer, run=path, every=1, monitors=("health",)):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    return model


@pytest.mark.parametrize("needs", [Needs.GRADIENTS, Needs.STEPS])
def test_a_probe_of_a_plug_in_gives_scalars_below_its_name(
    tmp_path: Path, foreign: Callable[..., None], needs: Needs
) -> None:
    measuring = Measuring({"one": 1.5, "loss": torch.tensor([2.5])})
    foreign(PROBES, Probe("aardvark", "health", needs, lambda: measuring))  # before ours by its name
    train(tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert run.scalar("aardvark/one").values.tolist() == [1.5] * 4
    assert run.scalar("aardvark/loss").values.tolist() == [2.5] * 4
    assert run.scalar("loss").values[0] != 2.5
    assert len(run.frame("gradient", "norm").steps) == 4


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (ValueError("no"), "ValueError: no"),
        ({"x": torch.ones(3)}, "TypeError: x: expected one number, got 3"),
        ({"x": "much"}, "ValueError: could not convert"),
        (7, "TypeError"),
    ],
    ids=["raises", "tensor", "text", "number"],
)
def test_a_probe_of_a_plug_in_that_fails_is_left_out(
    tmp_path: Path, foreign: Callable[..., None], result: Any, said: str
) -> None:
    alone = train(tmp_path / "alone")
    measuring = Measuring(result)
    foreign(PROBES, Probe("zebra", "health", Needs.GRADIENTS, lambda: measuring))
    with pytest.warns(RuntimeWarning, match=rf"the probe 'zebra' of a plug-in is left out: {said}") as warned:
        model = train(tmp_path / "run")
    assert len(warned) == 1
    assert measuring.calls == 1
    assert torch.equal(model.weight, alone.weight)
    run = open_run(tmp_path / "run")
    assert len(run.frame("gradient", "norm").steps) == 4
    assert run.has("update")
    assert said.split(":", maxsplit=1)[0] in next(
        e.payload["reason"] for e in run.events("unmeasured") if e.payload["what"] == "probe zebra"
    )


def test_a_probe_that_cannot_be_made_is_left_out(tmp_path: Path, foreign: Callable[..., None]) -> None:
    def unmade() -> None:
        raise RuntimeError("not here")

    foreign(PROBES, Probe("zebra", "health", Needs.STEPS, unmade))
    with pytest.warns(
        RuntimeWarning, match="the probe 'zebra' of a plug-in is left out: RuntimeError: not here"
    ):
        train(tmp_path / "unmade")


def test_a_probe_that_asks_for_too_much_is_left_out(tmp_path: Path, foreign: Callable[..., None]) -> None:
    foreign(PROBES, Probe("zebra", "health", Needs.WEIGHTS, lambda: Measuring({}), series="update"))
    with pytest.warns(RuntimeWarning, match="a plug-in measures gradients or steps, and gives scalars"):
        train(tmp_path / "weights")
    assert len(open_run(tmp_path / "weights").frame("gradient", "norm").steps) == 4


def write(path: Path) -> None:
    writer = RunWriter.create(path, monitors=("health",))
    writer.parameter_table((ParameterRecord("weight", (2,), "float32", "cpu", 2),))
    writer.close()


def test_a_rule_of_a_plug_in_that_raises_is_named_with_its_distribution(
    tmp_path: Path, foreign: Callable[..., None]
) -> None:
    def broken(*_: Any) -> Iterator[Any]:
        raise ZeroDivisionError("rule")

    write(tmp_path / "run")
    foreign(RULES, Rule("zebra", "health", 1, broken))
    with pytest.warns(RuleFailedWarning, match=r"rule 'zebra' .* which strangers 1\.2 adds, failed"):
        evaluate_rules(open_run(tmp_path / "run"))


@pytest.mark.parametrize("shown", [ZeroDivisionError("\x1b[31mpanel"), "a text"], ids=["raises", "text"])
def test_a_panel_of_a_plug_in_that_fails_leaves_the_page(
    tmp_path: Path, foreign: Callable[..., None], shown: Any
) -> None:
    def render(_source: Source) -> Any:
        if isinstance(shown, Exception):
            raise shown
        return shown

    write(tmp_path / "run")
    foreign(PANELS, Panel("zebra", "Stripes", 1, (), render, monitor="health"))
    said = r"Panel 'zebra' could not be drawn: the plug-in 'strange' of strangers 1\.2 failed"
    with pytest.warns(PanelWarning, match=said) as told:
        panels = {panel.name: result for panel, result in rendered(Source(open_run(tmp_path / "run")))}
    assert "\x1b" not in str(told[0].message)  # a terminal prints it
    gap = panels.pop("zebra")
    assert isinstance(gap, Failed)
    assert "the plug-in 'strange' of strangers 1.2 failed: " in gap.reason.lower()
    assert any(isinstance(result, Drawn) for result in panels.values())
