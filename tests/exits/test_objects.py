"""Objects of the script: under a watch each is freed at the moment at which it is without one."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from processes import run_captured

PRELUDE = """
import atexit, contextlib, gc, os, sys, weakref
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)

def watch(model, optimizer):
    if "WATCH" not in os.environ:
        return contextlib.nullcontext()
    import backlight
    return backlight.watch(model, optimizer, run=f"run-{id(model)}", quiet=True)

def build(width=16):
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, 3))

def sgd(model, **settings):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.01, "momentum": 0.9, **settings})

def batches(count):
    for _ in range(count):
        yield torch.randn(4, 8), torch.randint(0, 3, (4,))

def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss

def train(model, optimizer, count=12):
    for x, y in batches(count):
        step(model, optimizer, x, y)

def look(moment, *references):
    print(moment, [reference() is not None for reference in references], flush=True)

class Loud(nn.Module):
    def __init__(self, name, width=16):
        super().__init__()
        self.name, self.body = name, build(width)

    def forward(self, x):
        return self.body(x)

    def __del__(self):
        print("gone:", self.name, flush=True)

def refs(model, optimizer):
    weight = model.body[0].weight
    return [weakref.ref(one) for one in (model, optimizer, weight, weight.grad, model.body[1])]
"""

SCRIPTS = {
    "a_file_that_is_open_at_exit": """
class Logged(Loud):
    def __init__(self):
        super().__init__("logged")
        self.file = open("metrics.txt", "w")

    def forward(self, x):
        self.file.write("x")
        return super().forward(x)

model = Logged()
optimizer = sgd(model)
with watch(model, optimizer):
    train(model, optimizer)
""",
    "a_model_deleted_while_training_goes_on": """
def held():
    storages = {t.untyped_storage().data_ptr(): t.nbytes for t in gc.get_objects() if type(t) is torch.Tensor
                or type(t) is nn.Parameter}
    return sum(storages.values()) >> 22

first, second = Loud("first", 1 << 19), Loud("second")
optimizers = [sgd(first), sgd(second)]
with watch(first, optimizers[0]):
    train(first, optimizers[0])
    found = refs(first, optimizers[0])
    before = held()
    del first, optimizers[0]
    look("at once", *found)
    print("blocks freed", before - held())
    gc.collect()
    train(second, optimizers[0])
    look("later", *found)
print("blocks freed", before - held())
""",
    "finalizers_and_functions_at_exit": """
model, data = Loud("model"), TensorDataset(*next(batches(1)))
optimizer = sgd(model)
named = {"model": model, "optimizer": optimizer, "data": data, "weight": model.body[0].weight}
for kind, one in named.items():
    weakref.finalize(one, print, "finalized:", kind, flush=True)
    atexit.register(print, "at exit, after the finalizer of", kind, flush=True)
with watch(model, optimizer):
    for x, y in DataLoader(data):
        step(model, optimizer, x.expand(4, 8), y.expand(4))
    del data, named, one
    optimizer = None
    print("the end", flush=True)
""",
    "an_optimizer_that_is_replaced": """
model = Loud("model")
optimizer = sgd(model)
with watch(model, optimizer):
    train(model, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, 1)
    schedule.step()
    momentum = optimizer.state[model.body[0].weight]["momentum_buffer"]
    found = [weakref.ref(one) for one in (optimizer, schedule, momentum)]
    del momentum
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))
    look("schedule left", *found)
    del schedule
    look("replaced", *found)
    gc.collect()
    look("collected", *found)
    train(model, optimizer)
    rate = weakref.ref(optimizer.param_groups[0]["lr"])
    optimizer.param_groups[0]["lr"] = 0.001
    look("rate", rate)
""",
    "a_function_at_exit_that_looks": """
def training():
    model = Loud("inside of the function")
    optimizer = sgd(model)
    with watch(model, optimizer):
        train(model, optimizer)
        return refs(model, optimizer)

found = training()
look("returned", *found)
kept = Loud("kept")
atexit.register(look, "at exit", *found, weakref.ref(kept))
train(kept, sgd(kept))
""",
    "a_model_for_each_epoch": """
for epoch in range(4):
    model = Loud(f"epoch {epoch}")
    optimizer = sgd(model)
    with watch(model, optimizer):
        train(model, optimizer)
        model.eval()
        with torch.no_grad():
            model(torch.randn(4, 8))
""",
    "batches_outputs_and_losses": """
model = Loud("model")
optimizer = sgd(model)
with watch(model, optimizer):
    source = batches(40)
    for number in range(40):
        x, y = next(source)
        optimizer.zero_grad(set_to_none=number % 2 > 0)
        found = [weakref.ref(x), weakref.ref(y)]
        out = model(x)
        del x
        loss = nn.functional.cross_entropy(out, y)
        found += [weakref.ref(out), weakref.ref(loss)]
        del y, out
        look(f"{number} forward", *found)
        loss.backward()
        del loss
        look(f"{number} without the loss", *found[1:])  # where the step leaps, the batch explains it
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        look(f"{number} step", *found)
""",
    "loaders_and_their_data": """
class Data(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.randn(8), index % 3

    def __del__(self):
        print("gone: data of", os.getpid() == parent, flush=True)

parent, model = os.getpid(), Loud("model")
optimizer = sgd(model)
with watch(model, optimizer):
    for workers in (0, 2):
        loader = DataLoader(Data(), batch_size=4, shuffle=True, num_workers=workers)
        for _ in range(3):
            iterator = iter(loader)
            for x, y in iterator:
                step(model, optimizer, x, y)
        found = [weakref.ref(one) for one in (loader, loader.sampler, loader.dataset, iterator)]
        loader = None
        look(f"{workers} workers, loader", *found)
        iterator = None
        look(f"{workers} workers, iterator", *found)
        gc.collect()
        look(f"{workers} workers, collected", *found)
""",
    "gradients_that_no_step_follows": """
model = Loud("model")
with watch(model, None):
    for number in range(3):
        x = torch.randn(64, 8)
        found = [weakref.ref(x)]
        model(x).mean().backward()
        del x
        look(f"{number} gradients", *found)
optimizer = sgd(model)
with watch(model, optimizer):
    train(model, optimizer)
    for number in range(3):
        x = torch.randn(64, 8)
        found.append(weakref.ref(x))
        model(x).mean().backward()
        del x
    look("after training", *found)
""",
    "two_optimizers_and_an_unused_layer": """
generator, critic = Loud("generator"), Loud("critic")
generator.unused = nn.Linear(8, 8)
optimizers = [sgd(generator), sgd(critic)]
with watch([generator, critic], optimizers):
    for x, y in batches(12):
        step(critic, optimizers[1], x, y)
        step(generator, optimizers[0], x, y)
    found = [*refs(generator, optimizers[0]), *refs(critic, optimizers[1])]
    found += [weakref.ref(generator.unused.weight), weakref.ref(x), weakref.ref(y)]
    del generator, critic, optimizers, x, y
    look("deleted", *found)
    gc.collect()
""",
    "an_exception_that_is_caught": """
def training():
    model = Loud("model")
    optimizer = sgd(model)
    found.append(weakref.ref(model))
    with watch(model, optimizer):
        train(model, optimizer)
        raise ValueError("too much")

found = []
try:
    training()
except ValueError as error:
    print(error)
look("caught", *found)
again = Loud("again")
train(again, sgd(again))
""",
    "a_thread_that_holds_its_model": """
import threading

class Training(threading.Thread):
    def __init__(self):
        super().__init__()
        self.model = Loud("model")

    def run(self):
        optimizer = sgd(self.model)
        with watch(self.model, optimizer):
            train(self.model, optimizer)

thread = Training()
thread.start()
thread.join()
found = weakref.ref(thread)
del thread
look("joined", found)
again = Loud("again")
train(again, sgd(again))
""",
    "outputs_that_are_not_for_training": """
model = Loud("model")
optimizer = sgd(model)
with watch(model, optimizer):
    for count in (3, 30):
        train(model, optimizer, count)
        x = torch.randn(64, 8)
        found = [weakref.ref(x)]
        score = model(x).mean().item()
        del x
        look("evaluated with gradients", *found)
    found = refs(model, optimizer)
    del model, optimizer
    look("deleted", *found)
""",
    "scalers_and_closures": """
model = Loud("model")
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2)
scaled = Loud("scaled")
scaler, other = torch.amp.GradScaler("cpu"), sgd(scaled)
with watch([model, scaled], [optimizer, other]):
    for x, y in batches(12):
        def closure():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss
        optimizer.step(closure)
        other.zero_grad()
        scaler.scale(nn.functional.cross_entropy(scaled(x), y)).backward()
        scaler.unscale_(other)
        nn.utils.clip_grad_norm_(scaled.parameters(), 1.0)
        scaler.step(other)
        scaler.update()
    found = [*refs(model, optimizer), *refs(scaled, other), *map(weakref.ref, (scaler, x, y))]
    del model, scaled, optimizer, other, scaler, x, y
    look("deleted", *found)
    gc.collect()
    look("collected", *found)
""",
    "one_step_and_copies": """
import copy
model = Loud("model")
average = torch.optim.swa_utils.AveragedModel(model)
optimizer = sgd(model)
with watch(model, optimizer):
    train(model, optimizer, 1)
    average.update_parameters(model)
    other = copy.deepcopy(model)
    state = model.state_dict()
    other.load_state_dict(state)
    found = [*refs(model, optimizer), weakref.ref(other), weakref.ref(average)]
    del model, optimizer, state
    look("original", *found)
    del other
    look("copy", *found)
    average = None
    look("average", *found)
""",
}

BEFORE_TORCH = """
import atexit, weakref
class Early: pass
early = Early()
atexit.register(print, "registered before torch", flush=True)
weakref.finalize(early, print, "finalized: early", flush=True)
"""


def ran(
    folder: Path, source: str, *command: str, **environment: str
) -> tuple[int, str, dict[str, bytes], str]:
    """Return exit code, output, files and errors of a script."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(source)
    done = run_captured([*command, "train.py"], cwd=folder, env={**os.environ, **environment}, timeout=200)
    files = {file.name: file.read_bytes() for file in folder.glob("*.txt")}
    return done.returncode, done.stdout, files, done.stderr


Ran = Callable[[str], tuple[int, str, dict[str, bytes], str]]

IN_BOTH_WAYS = {
    "a_model_deleted_while_training_goes_on",
    "an_exception_that_is_caught",
    "a_model_for_each_epoch",
}

CASES = [
    pytest.param(script, way, marks=[] if way == "run" or script in IN_BOTH_WAYS else pytest.mark.full)
    for script in SCRIPTS
    for way in ("run", "watch")
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    @functools.cache
    def result(source: str) -> tuple[int, str, dict[str, bytes], str]:
        return ran(tmp_path_factory.mktemp("plain"), source, sys.executable)

    return result


@pytest.mark.parametrize(("script", "way"), CASES)
def test_objects_are_freed_as_without_a_watch(script: str, way: str, plain: Ran, tmp_path: Path) -> None:
    source = BEFORE_TORCH + PRELUDE + SCRIPTS[script]
    expected = plain(source)
    assert expected[0] == 0, expected[3]
    backlight = str(Path(sys.executable).with_name("backlight"))
    if way == "run":
        code, output, files, errors = ran(tmp_path, source, backlight, "run", "--out", "run", "--quiet")
    else:
        code, output, files, errors = ran(tmp_path, source, sys.executable, WATCH="1")
    assert (code, errors) == (0, expected[3])
    assert output == expected[1]
    assert files == expected[2]
    assert len(list(tmp_path.glob("run*"))) >= 1
