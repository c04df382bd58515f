"""Plug-ins of other distributions: loaded completely, or skipped with one warning."""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
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
from backlight.monitor import MONITORS, Monitor
from backlight.registry import RULES, DuplicateNameError, PlugIn, PlugInWarning, Registry, Rule
from backlight.report.page import rendered
from backlight.report.panel import PANELS, Drawn, Failed, Panel, PanelWarning
from backlight.report.source import Source
from backlight.store.read.run import open_run
from run_builder import build_run, parameter

NUMBERS = itertools.count()
RULE = "from backlight.registry import Rule\nmade = lambda name: Rule(name, 'health', 1, lambda run, t: ())\n"

Plug = Callable[..., Registry[Any]]


@pytest.fixture
def plug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plug:
    """Install distributions with one module each; return a registry of their entry-point group."""

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

    return install


def plug_in_warnings(of: Registry[Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(of)
    assert all(w.category is PlugInWarning for w in caught)
    return [str(w.message) for w in caught]


def test_plug_in_module_registers_with_its_distribution(plug: Plug) -> None:
    found = plug("REGISTRY.add('silent', made('silent')); REGISTRY.add('loud', made('loud'))")
    assert plug_in_warnings(found) == []
    assert list(found) == ["loud", "silent"]
    (plug_in,) = found.plug_ins()
    assert (plug_in.kind, plug_in.name, plug_in.version) == ("rule", "plug0", "1.0")
    assert set(plug_in.entries) == {"silent", "loud"}
    assert found.origin("silent") is plug_in
    assert found.origin("unknown") is None


def test_entry_point_may_name_the_entry_itself(plug: Plug) -> None:
    found = plug("it = made('silent')", value=":it")
    assert plug_in_warnings(found) == []
    assert list(found) == ["silent"]


@pytest.mark.parametrize(
    ("source", "value", "message"),
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
def test_unusable_plug_in_warns_once_and_is_skipped(
    plug: Plug, source: str, value: str, message: str
) -> None:
    found = plug(source, value=value)
    (warning,) = plug_in_warnings(found)
    assert "rule plug-in 'plug0'" in warning
    assert " 1.0 could not be loaded and is left out: " in warning
    assert message in warning
    assert list(found) == []
    assert plug_in_warnings(found) == []
    (plug_in,) = found.plug_ins()
    assert message in plug_in.problem
    assert plug_in.entries == ()


def test_duplicate_name_skips_the_whole_second_plug_in(plug: Plug) -> None:
    first = "REGISTRY.add('same', made('same'))"
    found = plug(first, "REGISTRY.add('other', made('other'))\n" + first)
    (warning,) = plug_in_warnings(found)
    assert "'plug1'" in warning
    assert "DuplicateNameError: rule 'same' is registered twice" in warning
    assert list(found) == ["same"]
    assert [p.problem == "" for p in found.plug_ins()] == [True, False]


def test_built_in_name_cannot_be_replaced() -> None:
    rule = RULES["vanishing"]
    both = r"registered twice: by \S*health\.rules\.vanishing\.\w+ and by \S*registry\.\S*<lambda>"
    with pytest.raises(DuplicateNameError, match=f"rule 'vanishing' is {both}"):
        RULES.add("vanishing", Rule("vanishing", "health", 1, lambda *_: ()))
    assert RULES["vanishing"] is rule


OF_SOME = """
import sys
from {module} import {name} as found
watched = ["health", "steptime"]
some = [name for name, one in found.of(watched) if one.monitor in watched]
assert not {{"backlight.monitors.grokking.model", "backlight.monitors.spectra.panels"}} & sys.modules.keys()
assert some == [name for name, one in found.items() if one.monitor in watched]
assert found.of(()) == found.items()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name"), [("backlight.registry", "RULES"), ("backlight.report.panel", "PANELS")]
)
def test_entries_of_some_monitors_need_no_module_of_others(module: str, name: str) -> None:
    subprocess.run([sys.executable, "-c", OF_SOME.format(module=module, name=name)], check=True)


def test_warnings_as_errors_do_not_end_loading(plug: Plug, capfd: pytest.CaptureFixture[str]) -> None:
    found = plug("raise OSError('no disk')")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(found) == []
    assert "OSError: no disk" in capfd.readouterr().err


# Failing plug-in entries in use: the registry is patched to list the entry as a plug-in's.


@pytest.fixture
def add_third_party(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Registry[Any], Any], None]]:
    added = []

    def add(to: Registry[Any], entry: Any) -> None:
        to.add(entry.name, entry)
        added.append((to, entry.name))
        own = PlugIn(to.kind, "acme", "acme", "acme-tools", "1.2", (entry.name,))
        monkeypatch.setattr(to, "_plug_ins", [own])

    yield add
    for to, name in added:
        to._entries.pop(name)


def third_party(result: Any = None, **hooks: Any) -> type[Monitor]:
    """Return a third-party monitor class that adds ``result`` to the scalars of each step."""

    class Zebra(Monitor):
        name = "zebra"
        calls = 0

        def on_step_end(self, summary: Any, record: Any) -> None:
            type(self).calls += 1
            if isinstance(result, Exception):
                raise result
            record.add_scalars({f"zebra/{name}": value for name, value in dict(result).items()})

    for hook, function in hooks.items():
        setattr(Zebra, hook, function)
    return Zebra


def train(path: Path) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitors = ("health", "zebra") if "zebra" in MONITORS else ("health",)
    with backlight.watch(model, optimizer, run=path, every=1, monitors=monitors):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    return model


@pytest.mark.slow
def test_scalars_of_a_third_party_monitor_are_stored(
    tmp_path: Path, add_third_party: Callable[..., None]
) -> None:
    add_third_party(MONITORS, third_party({"one": 1.5, "loss": torch.tensor([2.5])}))
    train(tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert run.scalar("zebra/one").values.tolist() == [1.5] * 4
    assert run.scalar("zebra/loss").values.tolist() == [2.5] * 4
    assert run.scalar("loss").values[0] != 2.5
    assert len(run.frame("gradient", "norm").steps) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("result", "error"),
    [
        (ValueError("no"), "ValueError: no"),
        ({"x": torch.ones(3)}, "TypeError: zebra/x: expected one number, got 3"),
        ({"x": "much"}, "ValueError: could not convert"),
        (7, "TypeError"),
    ],
    ids=["raises", "tensor", "text", "number"],
)
def test_failing_third_party_monitor_is_disabled(
    tmp_path: Path, add_third_party: Callable[..., None], result: Any, error: str
) -> None:
    alone = train(tmp_path / "alone")
    monitor = third_party(result)
    add_third_party(MONITORS, monitor)
    with pytest.warns(RuntimeWarning, match=f"not measured: zebra from here on, after {error}") as warned:
        model = train(tmp_path / "run")
    assert len(warned) == 1
    assert monitor.calls == 1
    assert torch.equal(model.weight, alone.weight)
    run = open_run(tmp_path / "run")
    assert len(run.frame("gradient", "norm").steps) == 4
    assert run.has("update")
    (event,) = (e for e in run.events("unmeasured") if e.payload["what"].startswith("zebra"))
    assert error.split(":", maxsplit=1)[0] in event.payload["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["attach", "wants_step", "on_gradients_ready", "on_step_stored", "on_flush"])
def test_error_in_any_hook_disables_that_monitor_only(
    tmp_path: Path, add_third_party: Callable[..., None], hook: str
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("not here")

    add_third_party(MONITORS, third_party({}, **{hook: broken}))
    with pytest.warns(RuntimeWarning, match="zebra from here on, after RuntimeError: not here") as warned:
        train(tmp_path / "run")
    assert len(warned) == 1
    assert len(open_run(tmp_path / "run").frame("gradient", "norm").steps) == 4


@pytest.mark.slow
def test_third_party_monitor_that_cannot_be_built_is_skipped(
    tmp_path: Path, add_third_party: Callable[..., None]
) -> None:
    def broken(_settings: Any) -> None:
        raise RuntimeError("not here")

    add_third_party(MONITORS, third_party({}, from_settings=staticmethod(broken)))
    with pytest.warns(PlugInWarning, match="the monitor 'zebra' is left out: RuntimeError: not here"):
        train(tmp_path / "unmade")
    assert len(open_run(tmp_path / "unmade").frame("gradient", "norm").steps) == 4


def test_raising_plug_in_rule_is_reported_with_its_distribution(
    tmp_path: Path, add_third_party: Callable[..., None]
) -> None:
    def broken(*_: Any) -> Iterator[Any]:
        raise ZeroDivisionError("rule")

    build_run(tmp_path / "run", monitors=("health",), table=[parameter("weight")])
    add_third_party(RULES, Rule("zebra", "health", 1, broken))
    with pytest.warns(RuleFailedWarning, match=r"rule 'zebra' .* which acme-tools 1\.2 adds, failed"):
        evaluate_rules(open_run(tmp_path / "run"))


@pytest.mark.parametrize("shown", [ZeroDivisionError("\x1b[31mpanel"), "a text"], ids=["raises", "text"])
def test_failing_plug_in_panel_is_replaced_by_a_reason(
    tmp_path: Path, add_third_party: Callable[..., None], shown: Any
) -> None:
    def render(_source: Source) -> Any:
        if isinstance(shown, Exception):
            raise shown
        return shown

    build_run(tmp_path / "run", monitors=("health",), table=[parameter("weight")])
    add_third_party(PANELS, Panel("zebra", "Stripes", 1, (), render, monitor="health"))
    message = r"Panel 'zebra' could not be drawn: the plug-in 'acme' of acme-tools 1\.2 failed"
    with pytest.warns(PanelWarning, match=message) as caught:
        panels = {panel.name: result for panel, result in rendered(Source(open_run(tmp_path / "run")))}
    assert "\x1b" not in str(caught[0].message)  # it is printed to a terminal
    gap = panels.pop("zebra")
    assert isinstance(gap, Failed)
    assert "the plug-in 'acme' of acme-tools 1.2 failed: " in gap.reason
    assert any(isinstance(result, Drawn) for result in panels.values())


@pytest.mark.slow
def test_forked_child_needs_no_thread_of_its_parent() -> None:
    """A thread reads the rules as the process forks; the child reads them as well."""
    program = (
        "import os, signal, threading\n"
        "from backlight.registry import Registry\n"
        "registry, inside, over = Registry('rule'), threading.Event(), threading.Event()\n"
        "def read():\n"
        "    with registry._lock:\n"
        "        inside.set()\n"
        "        over.wait()\n"
        "thread = threading.Thread(target=read)\n"
        "thread.start()\n"
        "inside.wait()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    signal.alarm(20)\n"
        "    os._exit(len(registry.items()))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "over.set()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "0\n", done.stderr
