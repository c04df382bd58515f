"""Calls of outermost modules are reported, and nothing of it is in what a script saves, copies or exports."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn, package

import backlight
from backlight.capture.call_hooks import CallHooks, _followed
from processes import run_captured

X = torch.ones(2, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Wider(Net):
    pass


class Calling(nn.Module):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) + 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.fixture
def calls() -> Iterator[list[str]]:
    yield []
    assert not any("__call__" in vars(kind) for kind in (Net, Wider, nn.Sequential, nn.Module.__mro__[1]))
    assert Calling.__call__.__module__ == __name__


@pytest.fixture
def follow(calls: list[str]) -> Iterator[Callable[..., CallHooks]]:
    made = []

    def following(*modules: nn.Module) -> CallHooks:
        made.append(
            CallHooks(
                lambda module, args, kwargs: calls.append("begin"), lambda module, result: calls.append("end")
            )
        )
        made[-1].follow(modules)
        return made[-1]

    yield following
    for hooks in made:
        hooks.leave()


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    assert b"backlight.capture" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


def packaged(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    with package.PackageExporter(file) as exporter:
        exporter.extern("**")
        exporter.save_pickle("model", "model.pkl", model)
    assert b"backlight.capture" not in file.getvalue()
    file.seek(0)
    return package.PackageImporter(file).load_pickle("model", "model.pkl")


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "torch.save": saved,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "jit.script": torch.jit.script,
    "jit.trace": lambda model: torch.jit.trace(model, (X,)),
    "fx": fx.symbolic_trace,
    "export": lambda model: torch.export.export(model, (X,)).module(),
    "export strict": lambda model: torch.export.export(model, (X,), strict=True).module(),
    "compile": lambda model: torch.compile(model, backend="eager", fullgraph=True),
    "package": packaged,
}


HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def ours(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(("backlight", __name__))


@pytest.mark.filterwarnings("ignore:.*TypedStorage:UserWarning", "ignore:.*torch.jit")
@pytest.mark.parametrize("kind", [Net, lambda: Net().layers, Calling])
@pytest.mark.parametrize("way", WAYS)
def test_result_is_that_of_an_unwatched_model(
    way: str, kind: Callable[[], nn.Module], calls: list[str], follow: Callable[..., CallHooks]
) -> None:
    model = kind()
    expected, output = WAYS[way](model)(X), model(X)
    follow(model)
    result = WAYS[way](model)
    calls.clear()
    for held in (model, result):
        state = vars(held)
        assert not [hook for name in HOOKS for hook in (state.get(name) or {}).values() if ours(hook)]
    assert torch.equal(result(X), expected)
    assert not calls
    assert torch.equal(model(X), output)
    assert calls == ["begin", "end"]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_call_inside_a_trace_is_not_reported(calls: list[str], follow: Callable[..., CallHooks]) -> None:
    model = Net()
    follow(model)
    torch.jit.trace(model, (X,), check_trace=False)  # the check calls the model itself
    assert not calls


def test_fx_sees_the_leaves_below_a_followed_class(follow: Callable[..., CallHooks]) -> None:
    model = Net()
    graphs = [str(fx.symbolic_trace(model).graph)]
    follow(model, model.layers)
    graphs.append(str(fx.symbolic_trace(model).graph))
    assert graphs[0] == graphs[1]


def test_one_class_reports_where_base_and_derived_are_followed(
    calls: list[str], follow: Callable[..., CallHooks]
) -> None:
    wider, net = Wider(), Net()
    first = follow(wider)
    second = follow(net, wider)
    wider(X)
    assert calls == ["begin"] * 2 + ["end"] * 2  # two pairs of functions
    calls.clear()
    first.leave()
    wider(X)
    net(X)
    Net()(X)
    assert calls == ["begin", "end"] * 2
    second.leave()
    wider(X)
    assert len(calls) == 4


def test_the_same_pair_is_called_once(calls: list[str]) -> None:
    def before(module: Any, args: Any, kwargs: Any) -> None:
        calls.append("begin")

    first, second, model = CallHooks(before), CallHooks(before), Net()
    first.follow([model, model])
    second.follow([model])
    model(X)
    first.leave()
    model(X)
    second.leave()
    model(X)
    assert calls == ["begin", "begin"]


@pytest.mark.parametrize("kind", [Net, Calling])
def test_replaced_call_looks_as_the_original(kind: type, follow: Callable[..., CallHooks]) -> None:
    def looks() -> tuple[object, ...]:
        call = kind.__call__
        return call.__qualname__, call.__module__, call.__doc__, inspect.signature(call)

    alone, model = looks(), kind()
    follow(model)
    assert looks() == alone


def test_module_that_raises_and_one_that_is_gone(calls: list[str], follow: Callable[..., CallHooks]) -> None:
    model = Calling()
    hooks = follow(model)
    with pytest.raises(TypeError, match="unsupported operand"):
        model(None)
    assert calls == ["begin", "end"]
    # A compiler may be reading the class when the module is freed: it changes with the next one.
    del model
    assert hasattr(Calling.__call__, "__wrapped__")
    hooks.follow([Net()])
    assert not hasattr(Calling.__call__, "__wrapped__")
    assert len(hooks._entries) <= 1


def test_module_with_the_id_of_one_that_is_gone_is_another_one(
    calls: list[str], follow: Callable[..., CallHooks]
) -> None:
    model, other = Calling(), Calling()
    hooks = follow(model)
    hooks._entries[id(other)] = _followed[id(other)] = hooks._entries.pop(id(model))
    del _followed[id(model)], model
    other(X)
    assert calls == []
    hooks.follow([other])
    other(X)
    assert calls == ["begin", "end"]
    hooks.leave()
    assert not _followed
    assert Calling.__call__.__module__ == __name__


def test_replacement_by_someone_else_stays(calls: list[str], follow: Callable[..., CallHooks]) -> None:
    model = Calling()
    original = Calling.__call__
    hooks = follow(model)
    ours = Calling.__call__
    theirs = lambda self, x: ours(self, x) * 3  # noqa: E731
    try:
        Calling.__call__ = theirs  # type: ignore[method-assign]
        hooks.leave()
        assert torch.equal(model(X), 9 * X)
        assert calls == []
    finally:
        del Calling.__call__
        Calling.__call__ = original  # type: ignore[method-assign]


@pytest.mark.slow
def test_class_of_the_main_module_pickled_by_value(tmp_path: Path, follow: Callable[..., CallHooks]) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    space: dict[str, Any] = {"nn": nn, "__name__": "__main__"}
    exec("class Own(nn.Module):\n    def forward(self, x):\n        return 2 * x", space)
    model = space["Own"]()
    follow(model)
    (tmp_path / "model.pkl").write_bytes(cloudpickle.dumps(model))
    assert without_backlight(tmp_path, "model = pickle.load(open('model.pkl', 'rb'))") == "torch.Size([2, 4])"


@pytest.mark.slow
def test_checkpoint_of_a_watched_script_loads_without_backlight(tmp_path: Path) -> None:
    script = tmp_path / "net.py"
    script.write_text("import torch\nclass Net(torch.nn.Linear):\n    pass\n")
    sys.path.insert(0, str(tmp_path))
    try:
        from net import Net as Saved

        model = Saved(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with backlight.watch(model, optimizer, run=tmp_path / "run", every=1):
            for _ in range(2):
                model(X).sum().backward()
                optimizer.step()
                torch.save(model, tmp_path / "model.pt")
                duplicate = copy.deepcopy(model)
                assert not duplicate._forward_hooks
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("net", None)
    load = "model = torch.load('model.pt', weights_only=False)"
    assert without_backlight(tmp_path, load) == "torch.Size([2, 1])"


def without_backlight(directory: Path, load: str) -> str:
    """Return the shape that a loaded ``model`` gives in a process where backlight cannot be imported."""
    show = "print(model(torch.ones(2, 4)).shape)"
    code = f"import pickle, sys, torch\nsys.modules['backlight'] = None\n{load}\n{show}"
    answer = run_captured([sys.executable, "-c", code], cwd=directory)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()
