"""Recipes: checks before the call, settings, checkpoints."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from backlight.launch.recipe import MINIMAL, Recipe, RecipeError, parse_settings, read_recipe

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt_recipe.py"

GOOD = """
import torch
from torch import nn

def build_model(dim=4, bias=True):
    return nn.Linear(dim, 2, bias=bias)

def batches(rank, world_size, batch=3, dim=4):
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randn(batch, dim, generator=generator)

def loss(model, batch):
    return model(batch).square().mean()
"""


def write_recipe(folder: Path, text: str) -> Path:
    path = folder / "recipe.py"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return read_recipe(write_recipe(tmp_path, GOOD), {"dim": 6})


def test_settings_are_passed_to_the_functions_that_take_them(tmp_path: Path) -> None:
    recipe = read_recipe(write_recipe(tmp_path, GOOD), {"dim": 6, "batch": 5, "bias": False})
    model = recipe.build_model()
    batch = next(recipe.batches(rank=1, world_size=2))
    assert isinstance(model, nn.Linear)
    assert model.in_features == 6
    assert model.bias is None
    assert batch.shape == (5, 6)
    assert recipe.loss(model, batch).shape == ()


def test_with_settings_returns_a_new_recipe(recipe: Recipe) -> None:
    other = recipe.with_settings({"dim": 8})
    assert recipe.build_model().in_features == 6
    assert other.build_model().in_features == 8


def test_keyword_arguments_accept_every_setting(tmp_path: Path) -> None:
    text = GOOD.replace("dim=4, bias=True", "dim=4, bias=True, **settings")
    recipe = read_recipe(write_recipe(tmp_path, text), {"dim": 6, "anything": 1})
    assert recipe.build_model().in_features == 6


def test_example_recipe_trains() -> None:
    recipe = read_recipe(EXAMPLE, {"dim": 16, "heads": 2, "n_blocks": 1, "seq": 16, "batch": 8, "lr": 1e-2})
    model = recipe.build_model()
    optimizer = recipe.build_optimizer(model)
    data = recipe.batches()
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = recipe.loss(model, next(data))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert max(losses[-3:]) < losses[0] - 1
    weight = dict(model.named_parameters())["blocks.0.qkv.weight"]
    parts = recipe.split("blocks.0.qkv.weight", weight)
    assert [part.shape for part in parts.values()] == [(16, 16)] * 3
    assert torch.equal(torch.cat(list(parts.values())), weight)
    assert list(recipe.split("head.weight", weight)) == ["head.weight"]


def test_ranks_of_the_example_draw_disjoint_batches() -> None:
    recipe = read_recipe(EXAMPLE, {"batch": 64, "seq": 32})
    rows = [{tuple(row.tolist()) for row in next(recipe.batches(rank, 2))[0]} for rank in (0, 1)]
    assert not rows[0] & rows[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "def batches(rank, world_size): ...",
            r"expected `def build_model\(\*\*settings\)`, .*; found batches",
        ),
        (
            GOOD.replace("def loss", "def losses"),
            r"expected `def loss\(model, batch\)`; found build_model, batches",
        ),
        (f"import nothing_of_that_name\n{GOOD}", r"fails when it is read: ModuleNotFoundError.*\(line 1\)"),
        ("def broken(:", "fails when it is read: SyntaxError"),
        (None, "no such recipe; expected a Python file"),
        (GOOD, "takes the setting 'dimm'; did you mean 'dim'"),
    ],
    ids=["nothing", "no-loss", "import", "syntax", "missing", "setting"],
)
def test_invalid_recipe_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "absent.py" if text is None else write_recipe(tmp_path, text)
    with pytest.raises(RecipeError, match=message):
        read_recipe(path, {"dimm": 3} if text == GOOD else {})


BATCHES = GOOD[GOOD.index("def batches") : GOOD.index("def loss")]
LOSS = "return model(batch).square().mean()"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return nn.Linear(dim, 2, bias=bias)", "return 3", "build_model returned int"),
        (LOSS, "return model(batch)", r"loss returned a tensor of shape \(3, 2\)"),
        (LOSS, "return 1.0", "loss returned float"),
        (
            BATCHES,
            "def batches(rank, world_size):\n    return 3\n",
            "batches returned int, expected an iterable",
        ),
        ("", "", r"defines no build_optimizer; add `def build_optimizer\(model\)`"),
    ],
    ids=["model", "loss-shape", "loss-type", "batches", "optimizer"],
)
def test_return_values_are_checked(tmp_path: Path, old: str, new: str, message: str) -> None:
    recipe = read_recipe(write_recipe(tmp_path, GOOD.replace(old, new)))
    with pytest.raises(RecipeError, match=message):
        call_all(recipe)


def call_all(recipe: Recipe) -> None:
    model = recipe.build_model()
    recipe.loss(model, next(recipe.batches()))
    recipe.build_optimizer(model)


@pytest.mark.parametrize("wrapped", [None, "model", "state_dict"])
def test_checkpoint_is_loaded(tmp_path: Path, recipe: Recipe, wrapped: str | None) -> None:
    saved, loaded = recipe.build_model(), recipe.build_model()
    state = {f"module.{name}": value for name, value in saved.state_dict().items()}
    torch.save(state if wrapped is None else {wrapped: state, "step": 3}, tmp_path / "c.pt")
    recipe.load(loaded, tmp_path / "c.pt")
    assert torch.equal(saved.weight, loaded.weight)


class CreatesDirectory:
    """Creates a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.mkdir, (str(self.path), 0o700)


def write_checkpoint(path: Path, content: object) -> None:
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (nn.Linear(5, 2).state_dict(), r"c.pt: does not fit the model of .*size mismatch for weight"),
        (b"", "cannot be read"),
        (b"not a checkpoint", "refused|cannot be read"),
    ],
    ids=["another-model", "empty", "text"],
)
def test_invalid_checkpoint_is_refused(tmp_path: Path, recipe: Recipe, content: object, message: str) -> None:
    write_checkpoint(tmp_path / "c.pt", content)
    with pytest.raises(RecipeError, match=message):
        recipe.load(recipe.build_model(), tmp_path / "c.pt")


def test_checkpoint_that_could_run_code_is_refused(tmp_path: Path, recipe: Recipe) -> None:
    write_checkpoint(tmp_path / "c.pt", {"model": CreatesDirectory(tmp_path / "proof")})
    with pytest.raises(RecipeError, match="refused, because it is not a file of tensors alone"):
        recipe.load(recipe.build_model(), tmp_path / "c.pt")
    assert not (tmp_path / "proof").exists()


def test_settings_are_parsed_from_the_command_line() -> None:
    given = parse_settings(["dim=512", "lr=1e-3", "bias=False", "fast=true", "name=adam", "sizes=[1, 2]"])
    assert given == {"dim": 512, "lr": 1e-3, "bias": False, "fast": True, "name": "adam", "sizes": [1, 2]}


@pytest.mark.parametrize(
    ("pairs", "message"), [(["dim"], "expected name=value"), (["a=1", "a=2"], "a is given twice")]
)
def test_invalid_settings_are_refused(pairs: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_settings(pairs)


@pytest.mark.parametrize("line", ["gram", "spectra", "memory predict", "sweep --set dim=2,4"])
def test_a_training_script_is_refused_with_a_minimal_recipe_and_not_run(
    tmp_path: Path, line: str, command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = write_recipe(tmp_path, "import torch\nloss = torch.zeros(())\nprint('trained')\n")
    monkeypatch.chdir(tmp_path)
    code, output, errors = command(*line.split(), script)
    assert (code, output) == (2, "")
    first, _, shown = errors.partition("\n\n")
    assert first == (
        f"backlight: {script}: is a script, not a recipe; expected a file that defines build_model, batches "
        "and loss, such as:"
    )
    assert shown.strip() == MINIMAL.strip()
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.py"]


def test_the_minimal_recipe_is_one(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text("from torch import nn\nMyModel = lambda: nn.Linear(16, 10)\n")
    recipe = read_recipe(write_recipe(tmp_path, MINIMAL))
    assert recipe.loss(recipe.build_model(), next(recipe.batches())).requires_grad
