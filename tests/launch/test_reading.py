"""Each kind of hint: the mistake in a small script, its sound twin, and controls that come close."""

from __future__ import annotations

from pathlib import Path

import pytest

from backlight.launch.reading.hint import KINDS, Hint
from backlight.launch.reading.script_files import MAX_FILES, read_script

HEAD = """
import torch, copy
import numpy as np
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
"""


def in_loop(body: str, head: str = "", tail: str = "") -> str:
    lines = "".join(f"        {line}\n" for line in body.strip().splitlines())
    return f"{HEAD}{head}\nfor epoch in range(3):\n    for x, y in data:\n{lines}{tail}"


BACKWARD = "loss = criterion(model(x), y)\nloss.backward()\n"
STEP = "optimizer.zero_grad()\nloss = criterion(model(x), y)\nloss.backward()\noptimizer.step()\n"

MODULE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        {init}
    def forward(self, x):
        {forward}
model = Net()
"""


def module(init: str = "self.head = nn.Linear(4, 3)", forward: str = "return self.head(x)") -> str:
    return MODULE.format(init=init, forward=forward)


EVALUATE = "    {when}\n    model.eval()\n    with torch.no_grad():\n        model(x)\n"
RANDOM_DATA = """
class Noisy(Dataset):
    def __init__(self):
        self.rng = np.random.{make}
    def __getitem__(self, i):
        return self.rng.normal()
loader = DataLoader(Noisy(), num_workers={workers}{more})
"""
SCHEDULE = "scheduler = torch.optim.lr_scheduler.{}\n"

# By kind: scripts with the mistake, then sound ones.
CASES: dict[str, tuple[list[str], list[str]]] = {
    "step-before-backward": (
        [in_loop("optimizer.zero_grad()\nloss = criterion(model(x), y)\noptimizer.step()\nloss.backward()")],
        [
            in_loop(STEP),
            # of two optimizers the second
            in_loop(STEP + "g = model(x).sum()\noptimizer_g.zero_grad()\ng.backward()\noptimizer_g.step()"),
            in_loop("def closure():\n    loss.backward()\noptimizer.step(closure)"),
        ],
    ),
    "cleared-before-step": (
        [in_loop(BACKWARD + "optimizer.zero_grad()\noptimizer.step()")],
        [
            in_loop(BACKWARD + "optimizer.step()\noptimizer.zero_grad()"),
            in_loop(BACKWARD + "other_optimizer.zero_grad()\noptimizer.step()"),
        ],
    ),
    "never-cleared": (
        [
            in_loop(BACKWARD + "optimizer.step()"),
            in_loop(BACKWARD + "optimizer.step()", "optimizer.zero_grad()"),
        ],
        [
            in_loop(STEP),
            in_loop("model.zero_grad()\nloss = criterion(model(x), y)\nloss.backward()\noptimizer.step()"),
            in_loop(BACKWARD + "optimizer.step()\nfor p in model.parameters():\n    p.grad = None"),
            in_loop(
                "optimizer = torch.optim.SGD([x], lr=0.1)\nloss = x.sum()\nloss.backward()\noptimizer.step()"
            ),
            in_loop(BACKWARD + "engine.step()"),
        ],
    ),
    "clipped-after-step": (
        [in_loop(STEP + "nn.utils.clip_grad_norm_(model.parameters(), 1.0)")],
        [
            in_loop(
                "optimizer.zero_grad()\nloss = criterion(model(x), y)\nloss.backward()\n"
                "nn.utils.clip_grad_norm_(model.parameters(), 1.0)\noptimizer.step()"
            ),
            in_loop(
                STEP + "other = criterion(model(x), y)\nother.backward()\n"
                "nn.utils.clip_grad_norm_(model.parameters(), 1.0)\noptimizer.step()"
            ),
        ],
    ),
    "accumulated-loss": (
        [
            in_loop(STEP + "total += loss", "total = 0"),
            in_loop(STEP + "total += loss * len(x)", "total = 0"),
            in_loop(STEP + "losses.append(loss)", "losses = []"),
        ],
        [
            in_loop(STEP + "total += loss.item()", "total = 0"),
            in_loop(STEP + "total += float(loss)", "total = 0"),
            in_loop(STEP + "with torch.no_grad():\n    total += loss", "total = 0"),
            in_loop(STEP + "loss = loss.item()\ntotal += loss", "total = 0"),
            in_loop(STEP + "losses.append(loss.detach())", "losses = []"),
            in_loop("total = 0\n" + STEP + "total += loss"),
            in_loop("total += criterion(model(x), y)\ntotal.backward()\noptimizer.zero_grad()", "total = 0"),
        ],
    ),
    "trained-without-gradients": (
        [in_loop("with torch.no_grad():\n    loss = criterion(model(x), y)\n    loss.backward()")],
        [
            in_loop("loss = criterion(model(x), y)\nwith torch.no_grad():\n    loss.backward()"),
            in_loop(
                "with torch.no_grad():\n    with torch.enable_grad():\n"
                "        loss = criterion(model(x), y)\n        loss.backward()"
            ),
        ],
    ),
    "schedule-per-batch": (
        [
            in_loop(STEP + "scheduler.step()", SCHEDULE.format("CosineAnnealingLR(optimizer, epochs)")),
            in_loop(STEP, SCHEDULE.format("OneCycleLR(optimizer, 0.1, 30)"), "    scheduler.step()\n"),
        ],
        [
            in_loop(STEP, SCHEDULE.format("CosineAnnealingLR(optimizer, epochs)"), "    scheduler.step()\n"),
            in_loop(
                STEP + "scheduler.step()",
                SCHEDULE.format("CosineAnnealingLR(optimizer, epochs * len(loader))"),
            ),
            in_loop(STEP + "scheduler.step()", SCHEDULE.format("OneCycleLR(optimizer, 0.1, 30)")),
            in_loop(STEP + "scheduler.step()", SCHEDULE.format("StepLR(optimizer, 1000)")),
        ],
    ),
    "never-back-in-training-mode": (
        [
            in_loop(STEP, tail=EVALUATE.format(when="pass")),
            in_loop(
                STEP, "def evaluate(model):\n    model.eval()\n    return model(1)\n", "    evaluate(model)\n"
            ),
        ],
        [
            in_loop(STEP, tail=EVALUATE.format(when="model.train()")),
            in_loop(STEP, tail="model.eval()\n"),
            in_loop(STEP, tail="    teacher.eval()\n"),
        ],
    ),
    "leaf-is-replaced": (
        [
            "w = torch.zeros(3, requires_grad=True)\nfor i in range(9):\n    w.sum().backward()\n"
            "    w = w - 0.1 * w.grad\n",
            "w = torch.zeros(3, requires_grad=True)\nfor i in range(9):\n    w.sum().backward()\n"
            "    w -= 0.1 * w.grad\n",
        ],
        [
            "w = torch.zeros(3, requires_grad=True)\nfor i in range(9):\n    w.sum().backward()\n"
            "    with torch.no_grad():\n        w -= 0.1 * w.grad\n",
            "w = torch.zeros(3)\nfor i in range(9):\n    w -= 0.1 * w.grad\n",
        ],
    ),
    "activation-before-loss": (
        [
            HEAD + "loss = F.cross_entropy(F.softmax(model(x), 1), y)",
            HEAD + "p = model(x).softmax(-1)\nloss = criterion(p, y)",
            HEAD + "loss = nn.BCEWithLogitsLoss()(torch.sigmoid(model(x)).squeeze(1), y)",
            HEAD + "loss = F.nll_loss(F.softmax(model(x), 1), y)",
            HEAD + module(forward="return F.softmax(self.head(x), dim=1)") + "loss = criterion(model(x), y)",
            HEAD + "model = nn.Sequential(model, nn.Softmax(1)).to(0)\nloss = criterion(model(x), y)",
            HEAD
            + module("self.last = nn.Softmax(1)", "x = self.last(x)\n        return x")
            + "output = model(x)\nloss = criterion(output, y)",
        ],
        [
            HEAD + "loss = F.cross_entropy(model(x), y)\np = F.softmax(model(x), 1)",
            HEAD + "loss = F.nll_loss(F.log_softmax(model(x), 1), y)",
            HEAD + "loss = F.cross_entropy(F.log_softmax(model(x), 1), y)",
            HEAD + "loss = F.binary_cross_entropy(torch.sigmoid(model(x)), y)",
            HEAD
            + module(forward="if self.training:\n            return x\n        return F.softmax(x, dim=1)")
            + "loss = criterion(model(x), y)",
            HEAD + "loss = criterion(model(x), y)\nx = torch.softmax(x, 1)",
            HEAD + "model = nn.Sequential(nn.Linear(4, 3), nn.Softmax(1))\nloss = nn.MSELoss()(model(x), y)",
        ],
    ),
    "layers-in-a-list": (
        [
            HEAD + module("self.layers = [nn.Linear(4, 4) for _ in range(3)]"),
            HEAD + module("self.layers = {'a': nn.Linear(4, 4)}"),
            HEAD + module("self.layers = []\n        self.layers.append(nn.Conv2d(1, 2, 3))"),
        ],
        [
            HEAD + module("self.layers = nn.ModuleList([nn.Linear(4, 4)])"),
            HEAD + module("self.layers = [nn.Linear(4, 4)]\n        self.net = nn.Sequential(*self.layers)"),
            HEAD + module("self.layers = [nn.ReLU(), nn.MaxPool2d(2)]"),
            HEAD + module("layers = [nn.Linear(4, 4)]\n        self.net = nn.Sequential(*layers)"),
            HEAD + "class Pool:\n    def __init__(self):\n        self.models = [nn.Linear(1, 1)]\n",
        ],
    ),
    "replaced-after-optimizer": (
        [HEAD + "model.fc = nn.Linear(4, 5)\n", HEAD + "model = copy.deepcopy(model)\n"],
        [
            HEAD + "model.fc = nn.Linear(4, 5)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
            HEAD + "model = model.to('cpu')\n",
            HEAD + "average = copy.deepcopy(model)\nmodel.name = str(1)\n",
        ],
    ),
    "generator-of-every-worker": (
        [
            RANDOM_DATA.format(make="default_rng(0)", workers=2, more=""),
            RANDOM_DATA.format(make="RandomState(0)", workers="args.workers", more=""),
        ],
        [
            RANDOM_DATA.format(make="default_rng(0)", workers=0, more=""),
            RANDOM_DATA.format(make="default_rng(0)", workers=2, more=", worker_init_fn=seed"),
            RANDOM_DATA.replace("self.rng.normal()", "np.random.normal()").format(
                make="default_rng(0)", workers=2, more=""
            ),
        ],
    ),
    "keys-that-do-not-match": (
        [HEAD + "model.load_state_dict(state, strict=False)"],
        [
            HEAD + "model.load_state_dict(state)",
            HEAD + "missing = model.load_state_dict(state, strict=False)",
            HEAD + "print(model.load_state_dict(state, strict=False))",
        ],
    ),
    "training-in-order": (
        [in_loop(STEP, "train_loader = DataLoader(train_set, batch_size=4)")],
        [
            in_loop(STEP, "train_loader = DataLoader(train_set, batch_size=4, shuffle=True)"),
            in_loop(STEP, "train_loader = DataLoader(train_set, 4, sampler=sampler)"),
            in_loop(STEP, "test_loader = DataLoader(test_set, batch_size=4)"),
            HEAD + "train_loader = DataLoader(train_set, batch_size=4)",
        ],
    ),
}


def hints_of(text: str, folder: Path) -> list[Hint]:
    script = folder / "train.py"
    script.write_text(text)
    return read_script(str(script))


def test_every_kind_has_cases() -> None:
    assert {kind.name for kind in KINDS} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_mistake_is_a_hint_and_sound_scripts_have_none(name: str, tmp_path: Path) -> None:
    wrong, sound = CASES[name]
    for text in wrong:
        assert name in [hint.name for hint in hints_of(text, tmp_path)], text
    for text in sound:
        assert name not in [hint.name for hint in hints_of(text, tmp_path)], text


def test_hint_marks_the_expression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "import torch.nn.functional as F\nif True:\n    loss = F.cross_entropy(F.softmax(é, 1), y)\n"
    (hint,) = hints_of(text, tmp_path)
    assert hint.view() == [
        "train.py:3:28: `softmax` before `cross_entropy`, which applies its own",
        "  3 | loss = F.cross_entropy(F.softmax(é, 1), y)",
        "    |                        ^^^^^^^^^^^^^^^",
        "  fix: give it the logits",
    ]


def test_long_line_is_cut_around_the_mark(tmp_path: Path) -> None:
    (hint,) = hints_of(f"x = '{'a' * 200}'; F.cross_entropy(F.softmax(o, 1), y)", tmp_path)
    _, source, mark, _ = hint.view()
    assert max(len(source), len(mark)) < 100
    assert source[mark.index("^") :].startswith("F.softmax(o, 1)")
    assert mark.count("^") == len("F.softmax(o, 1)")


def test_local_modules_are_read_and_not_imported(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("from .net import Net\n")
    (tmp_path / "models" / "net.py").write_text(
        "raise SystemExit('imported')\nfrom torch import nn\n"
        "class Net(nn.Module):\n    def forward(self, x):\n        return nn.functional.softmax(x, 1)\n"
    )
    (hint,) = hints_of("from models import Net\nm = Net()\nl = F.cross_entropy(m(x), y)\n", tmp_path)
    assert hint.line == 3  # where it is given to the loss
    (tmp_path / "models" / "net.py").write_text(module("self.layers = [nn.Linear(4, 4)]"))
    (hint,) = hints_of("import torch, models.net as net\n", tmp_path)
    assert hint.path == str(tmp_path / "models" / "net.py")


@pytest.mark.parametrize("text", ["def (", "x = '\0'", "import train, missing, .\n", "from . import (\n"])
def test_file_that_cannot_be_read_has_no_hints(text: str, tmp_path: Path) -> None:
    assert hints_of(text, tmp_path) == []
    assert read_script(str(tmp_path / "missing.py")) == []
    assert read_script("missing.module", module=True, path=tmp_path) == []


def test_at_most_so_many_files_are_read(tmp_path: Path) -> None:
    wrong = module("self.layers = [nn.Linear(4, 4)]")
    for number in range(MAX_FILES + 5):
        (tmp_path / f"m{number}.py").write_text(f"import m{number + 1}\n{wrong}")
    assert len(hints_of("import m0\n", tmp_path)) == MAX_FILES - 1


def test_module_is_read_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("from package import train\n")
    (tmp_path / "package" / "train.py").write_text(module("self.layers = [nn.Linear(4, 4)]"))
    (hint,) = read_script("package", module=True, path=tmp_path)
    assert hint.name == "layers-in-a-list"
