"""A watched training on an asynchronous accelerator: its weights, its numbers, and what it makes wait."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simulated
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backlight
from backlight import devices
from backlight.measure import transfer
from backlight.threads import BackgroundThread
from cases import CASES, STEPS, assert_equal

WITHOUT_DEVICE = {
    "sparse": "torch has no sparse tensors for PrivateUse1",
    "compiled": "torch.compile needs a back-end of Inductor",
    "forked_workers": "no accelerator works in a forked process",
}
QUICK = ("plain", "accumulation", "scaler_with_clipping", "scaler_skips_with_fused", "optimizer_in_backward")


def on_host(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.cpu() for tensor in tensors]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.full])
        for name in CASES
        if name not in WITHOUT_DEVICE
    ],
)
def test_watching_changes_no_weight(name: str, tmp_path: Path) -> None:
    with torch.device("sim"):
        alone = on_host(CASES[name].train())
        with backlight.watch(run=tmp_path / "run", every=1):
            watched = on_host(CASES[name].train())
    assert_equal(alone, watched)
    run = backlight.open_run(tmp_path / "run")
    assert list(run.series_steps("gradient")) == list(range(CASES[name].steps))
    gaps = {event.payload["what"] for event in run.events("unmeasured")}
    assert gaps == {"device time on sim", *CASES[name].gaps}
    logged = run.scalar_names()
    assert all(scalar in logged for scalar in CASES[name].scalars)


def build(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4)).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches(device: str, count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [(torch.randn(4, 8, generator=generator), torch.randint(4, (4,), generator=generator))] * count
    return [(x.to(device), y.to(device)) for x, y in made]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(run: Path, device: str, *, busy_s: float = 0.0) -> backlight.Run:
    model, optimizer = build(device)
    given = batches(device, STEPS)
    with backlight.watch(model, optimizer, run=run, every=1, health={"histogram": True, "exact_updates": 1}):
        for x, y in given:
            if busy_s:
                simulated.sleep(busy_s)
            step(model, optimizer, x, y)
    return backlight.open_run(run)


def test_numbers_equal_those_of_the_cpu_however_late_the_device_is(tmp_path: Path) -> None:
    host, prompt = train(tmp_path / "host", "cpu"), train(tmp_path / "prompt", "sim")
    # Work of 50 ms before each step: a copy that does not wait for it reads what was there before.
    late = train(tmp_path / "late", "sim", busy_s=0.05)
    for series, column in (
        *(("gradient", name) for name in ("norm", "max_abs", "sum", "zeros", "nan", "inf")),
        ("update", "ratio"), ("histogram", "b30"),
    ):  # fmt: skip
        expected, found, delayed = (run.frame(series, column) for run in (host, prompt, late))
        assert expected.measured.any()
        assert np.array_equal(found.measured, expected.measured)
        assert np.allclose(found.values, expected.values, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert np.array_equal(delayed.values, found.values, equal_nan=True)
    losses = [run.scalar("loss").values for run in (host, prompt, late)]
    assert len(losses[0]) == STEPS
    assert np.allclose(losses[1], losses[0])
    assert np.array_equal(losses[2], losses[1])


COUNTERS = (simulated.SYNCHRONIZATION, simulated.DEVICE_TO_HOST, simulated.KERNEL)


@contextmanager
def counted(found: list[tuple[int, ...]]) -> Iterator[None]:
    """Append how often the host waited, copied to itself, and launched, in all threads."""
    before = [simulated.total(counter) for counter in COUNTERS]
    yield
    counts = (simulated.total(counter) for counter in COUNTERS)
    found.append(tuple(after - since for after, since in zip(counts, before, strict=True)))


def test_recorded_step_copies_once_without_waiting_and_others_copy_the_loss(tmp_path: Path) -> None:
    model, optimizer = build("sim")
    x, y = batches("sim", 1)[0]
    found: list[tuple[int, ...]] = []
    devices.synchronizations.clear()
    with backlight.watch(model, optimizer, run=tmp_path / "run", every=10, monitors=("health",)):
        for number in range(31):
            with simulated.no_synchronization() if number else counted([]), counted(found):
                step(model, optimizer, x, y)
    alone: list[tuple[int, ...]] = []
    for _ in range(2):
        with simulated.no_synchronization(), counted(alone):
            step(model, optimizer, x, y)
    assert len(set(alone)) == 1
    # The loss is copied on the device; what is there goes to the host when the writer thread asks.
    unrecorded = [counts for number, counts in enumerate(found) if number % 10]
    assert {(waits, launches) for waits, _, launches in unrecorded} == {(0, alone[0][2] + 1)}
    assert {copies for _, copies, _ in unrecorded} <= {0, 1}
    for waits, copies, launches in found[10::10]:
        assert (waits, copies - 1) in {(0, 0), (0, 1)}
        assert launches > alone[0][2]
    assert not devices.synchronizations
    run = backlight.open_run(tmp_path / "run")
    assert list(run.series_steps("gradient")) == [0, 10, 20, 30]
    assert run.losses == ()
    assert run.scalar("loss").steps.tolist() == list(range(31))


def test_activations_are_those_of_the_cpu_without_waiting(tmp_path: Path) -> None:
    runs = []
    for device in ("cpu", "sim"):
        model, optimizer = build(device)
        x, y = batches(device, 1)[0]
        path = tmp_path / device
        with backlight.watch(model, optimizer, run=path, monitors="activations", activations={"every": 1}):
            for _ in range(STEPS):
                with simulated.no_synchronization():
                    step(model, optimizer, x, y)
        runs.append(backlight.open_run(path))
    host, run = runs
    names = [name for name in host.scalar_names() if name.startswith("activations/")]
    assert {name.split("/")[1] for name in names} >= {"rms", "gradient", "zeros", "spread", "input_spread"}
    for name in names:
        expected, scalar = host.scalar(name), run.scalar(name)
        assert scalar.steps.tolist() == expected.steps.tolist() == list(range(STEPS))
        assert np.allclose(scalar.values, expected.values, rtol=1e-4, atol=1e-6)


def test_default_monitors_never_wait(tmp_path: Path) -> None:
    model, optimizer = build("sim")
    x, y = batches("sim", 1)[0]
    found: list[tuple[int, ...]] = []
    with warnings.catch_warnings(), backlight.watch(model, optimizer, run=tmp_path / "run", every=1):
        warnings.simplefilter("error")
        for _ in range(12):
            with simulated.no_synchronization(), counted(found):
                simulated.sleep(0.01)
                step(model, optimizer, x, y)
    assert {counts[0] for counts in found} == {0}
    assert backlight.open_run(tmp_path / "run").series_steps("gradient").size == 12


def test_model_on_two_devices(tmp_path: Path) -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 16).to("sim:0")
            self.last = nn.Linear(16, 4).to("sim:1")

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.first(x).relu().to("sim:1"))
            return out

    def trained(run: Path | None) -> tuple[list[Tensor], list[list[float]]]:
        torch.manual_seed(0)
        model = Split()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        norms: list[list[float]] = []
        x, y = torch.randn(4, 8, device="sim:0"), torch.tensor([0, 1, 2, 3], device="sim:1")
        with backlight.watch(model, optimizer, run=run, every=1) if run else counted([]):
            for _ in range(STEPS):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                norms.append([float(p.grad.cpu().double().norm()) for p in model.parameters()])
                optimizer.step()
        return on_host(list(model.parameters())), norms

    alone, _ = trained(None)
    watched, norms = trained(tmp_path / "run")
    assert_equal(alone, watched)
    run = backlight.open_run(tmp_path / "run")
    assert np.allclose(run.frame("gradient", "norm").values, norms, rtol=1e-6)
    whole = [float(np.linalg.norm(row)) for row in norms]
    assert np.allclose(run.scalar("total_norm").values, whole, rtol=1e-6)


def test_scaled_gradients_are_recorded_unscaled(tmp_path: Path) -> None:
    norms = []
    for name, scale in (("scaled", 1024.0), ("unscaled", 1.0)):
        model, optimizer = build("sim")
        scaler = torch.amp.GradScaler("sim", init_scale=scale)
        with backlight.watch(model, optimizer, run=tmp_path / name, every=1):
            for x, y in batches("sim", STEPS):
                optimizer.zero_grad()
                with torch.autocast("sim", dtype=torch.bfloat16):
                    loss = F.cross_entropy(model(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        run = backlight.open_run(tmp_path / name)
        norms.append(run.frame("gradient", "norm").values)
        assert set(run.scalar("scaler/scale").values) == {scale}
    assert np.allclose(norms[0], norms[1], rtol=1e-6)


@pytest.mark.parametrize("monitors", [("health",), None], ids=["health", "default"])
def test_nothing_runs_during_capture(
    monitors: tuple[str, ...] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = build("sim")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)  # torch 2.15 refuses to capture most others
    x, y = batches("sim", 1)[0]
    alone: list[tuple[int, ...]] = []
    for _ in range(2):
        with counted(alone):
            step(model, optimizer, x, y)
    found: list[tuple[int, ...]] = []
    asked = []
    query = devices._query
    monkeypatch.setattr(devices, "_query", lambda event: asked.append(devices.GATE.is_closed) or query(event))
    options = {} if monitors is None else {"monitors": monitors}
    with backlight.watch(model, optimizer, run=tmp_path / "run", every=1, summary=False, **options):
        for _ in range(3):
            simulated.sleep(0.02)  # the device is late, so that copies are on their way
            step(model, optimizer, x, y)
        simulated.set_capturing(True)
        try:
            assert devices.is_capturing_graph()
            with counted(found):
                step(model, optimizer, x, y)
        finally:
            simulated.set_capturing(False)
        step(model, optimizer, x, y)
    assert found == alone[1:]
    assert asked
    assert not any(asked)
    assert len(backlight.open_run(tmp_path / "run").frame("gradient", "norm").steps) == 4


@pytest.mark.parametrize("captured", ["step", "backward"])
@pytest.mark.parametrize("every", [1, 1000])
def test_replayed_steps_are_counted_with_their_loss(captured: str, every: int, tmp_path: Path) -> None:
    """Kernels are replayed without a hook: here a copy that sets the loss, and the gradients or weights."""
    model, _ = build("sim")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x, y = batches("sim", 1)[0]
    graph = simulated.SimulatedGraph()
    losses = []
    with backlight.watch(model, optimizer, run=tmp_path / "run", every=every, summary=False):
        for _ in range(8):
            losses.append(step(model, optimizer, x, y).item())
        graph.capture_begin()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if captured == "step":
            optimizer.step()
        graph.capture_end()
        for number in range(20):
            graph.work = lambda value=number: loss.detach().fill_(float(value))
            graph.replay()
            losses.append(float(number))
            if captured == "backward":
                optimizer.step()
        for _ in range(3):
            losses.append(step(model, optimizer, x, y).item())
    run = backlight.open_run(tmp_path / "run")
    stored = run.scalar("loss")
    assert stored.steps.tolist() == list(range(31))
    assert np.allclose(stored.values, losses, rtol=1e-6)
    reasons = [e.payload["reason"] for e in run.events("unmeasured")]
    assert any("replayed graph" in reason for reason in reasons) is (captured == "step")
    measured = set(run.frame("gradient", "norm").steps)
    assert measured.isdisjoint(range(8, 28)) is (captured == "step" or every > 1)


def test_graphs_without_a_backward_count_nothing(tmp_path: Path) -> None:
    model, optimizer = build("sim")
    x, y = batches("sim", 1)[0]
    graph = simulated.SimulatedGraph()
    with backlight.watch(model, optimizer, run=tmp_path / "run", every=1, summary=False):
        step(model, optimizer, x, y)
        graph.capture_begin()
        model(x)
        graph.capture_end()
        graph.replay()
        step(model, optimizer, x, y)
    run = backlight.open_run(tmp_path / "run")
    assert run.last_step() == 1
    assert not any("graph" in e.payload["reason"] for e in run.events("unmeasured"))


def test_no_thread_queries_an_event_while_the_gate_is_closed() -> None:
    gate = devices.CaptureGate()
    event = devices.record_event("sim")
    torch.accelerator.synchronize()
    gate.close()
    done = threading.Event()

    def wait() -> None:
        gate.wait(event)
        done.set()

    thread = BackgroundThread(wait, "waits")
    thread.start()
    assert not gate.is_done(event)
    assert not done.wait(0.05)
    gate.open()
    assert done.wait(30)
    assert gate.is_done(event)


def test_threads_ask_for_an_event_on_its_device() -> None:
    torch.accelerator.set_device_index(1)
    try:
        event, current = devices.record_event("sim:1"), []

        def ask() -> None:
            before = torch.accelerator.current_device_index()
            devices.GATE.wait(event)
            current.extend([before, torch.accelerator.current_device_index()])

        thread = BackgroundThread(ask, "asks")
        thread.start()
        thread.join()
        assert current == [0, 1]  # it stays there, so that it frees the event there
    finally:
        torch.accelerator.set_device_index(0)
    assert devices.GATE.is_done(event)
    assert torch.accelerator.current_device_index() == 0


def test_capture_and_work_of_a_thread_wait_for_each_other() -> None:
    gate, order = devices.CaptureGate(), []
    inside, may_end, again = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        with gate.work(["sim"]):
            inside.set()
            may_end.wait(30)
            order.append("work")

    def work_again() -> None:
        with gate.work(["sim"]):
            order.append("again")
        again.set()

    first, second = BackgroundThread(work, "works"), BackgroundThread(work_again, "works again")
    first.start()
    assert inside.wait(30)
    with gate.work(["cpu"]):  # work on the host delays no capture
        threading.Timer(0.05, may_end.set).start()
        gate.close()
        order.append("capture")
    second.start()
    assert not again.wait(0.05)
    gate.open()
    assert again.wait(30)
    assert order == ["work", "capture", "again"]


def test_pinned_memory_is_allocated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty, sizes = torch.empty, []

    def noted(*args: Any, **options: Any) -> Tensor:
        made = empty(*args, **options)
        if options.get("pin_memory"):
            sizes.append(made.nbytes)
        return made

    devices.has_async_copies(torch.device("sim"))  # asks by an allocation, once
    transfer.PINNED.reset()
    monkeypatch.setattr(torch, "empty", noted)
    model, optimizer = build("sim")
    with backlight.watch(
        model, optimizer, run=tmp_path / "run", every=1, health={"histogram": True}, summary=False
    ):
        for x, y in batches("sim", 40):
            simulated.sleep(0.01)  # copies are on their way for long
            step(model, optimizer, x, y)
    assert sizes == [transfer.BLOCK_BYTES]
    assert len(backlight.open_run(tmp_path / "run").frame("gradient", "norm").steps) == 40


def test_spectra_use_one_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    on_stream = devices.on_stream

    def noted(stream: Any) -> Any:
        used.append((stream.device_index, stream.stream_id))
        return on_stream(stream)

    monkeypatch.setattr(devices, "on_stream", noted)
    model, optimizer = build("sim")
    options = {"spectra": {"every": 1, "buffer": "device"}}
    with backlight.watch(
        model, optimizer, run=tmp_path / "run", monitors=("spectra",), summary=False, **options
    ):
        for _ in range(8):
            optimizer.zero_grad()
            for x, y in batches("sim", 4):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert len(used) >= 4
    assert len(set(used)) == 1


def test_failed_capture_opens_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any) -> None:
        raise RuntimeError("no capture")

    monkeypatch.setattr(simulated.SimulatedGraph, "capture_begin", fails)
    model, optimizer = build("sim")
    with backlight.watch(model, optimizer, run=tmp_path / "run", every=1, summary=False):
        with pytest.raises(RuntimeError, match="no capture"):
            simulated.set_capturing(True)
        assert not devices.GATE.is_closed
        for x, y in batches("sim", 2):
            step(model, optimizer, x, y)
    assert len(backlight.open_run(tmp_path / "run").frame("gradient", "norm").steps) == 2


def test_memory_is_not_reused_before_another_thread_has_read_it() -> None:
    """As tensors that the worker thread of spectra frees while its stream still works."""
    given = [torch.ones(300, device="sim")]
    torch.accelerator.synchronize()
    with devices.own_streams(["sim"], given):
        simulated.sleep(0.05)
        read = given.pop() + 0
    torch.full((300,), 7.0, device="sim")
    torch.accelerator.synchronize()
    assert (read.cpu() == 1).all()


@pytest.mark.parametrize("location", ["host", "device"])
def test_spectra_read_no_stale_gradient(location: str, tmp_path: Path) -> None:
    values = []
    for name, busy_s in (("prompt", 0.0), ("late", 0.05)):
        torch.manual_seed(0)
        model, optimizer = build("sim")
        given = batches("sim", 4)
        with backlight.watch(
            model,
            optimizer,
            run=tmp_path / name,
            every=1,
            monitors=("spectra",),
            spectra={"buffer": location},
        ):
            for _ in range(2):
                optimizer.zero_grad()
                for x, y in given:
                    if busy_s:
                        simulated.sleep(busy_s)
                    F.cross_entropy(model(x + torch.rand_like(x)), y).backward()
                optimizer.step()
        run = backlight.open_run(tmp_path / name)
        assert run.losses == ()
        values.append([event.payload["numbers"] for event in run.events("spectra_measured")])
    assert len(values[0]) == 4
    assert values[0] == values[1]


def test_logged_tensor_is_that_of_the_stream_of_the_loop(tmp_path: Path) -> None:
    model, optimizer = build("sim")
    x, y = batches("sim", 1)[0]
    torch.accelerator.synchronize()
    with (
        backlight.watch(model, optimizer, run=tmp_path / "run", summary=False, flush_interval=0.01) as watch,
        torch.Stream("sim"),
    ):
        for number in range(1, 4):
            step(model, optimizer, x, y)
            simulated.sleep(0.1)
            watch.log(mine=torch.zeros(1, device="sim", dtype=torch.bfloat16) + number)
    assert backlight.open_run(tmp_path / "run").scalar("mine", source="user").values.tolist() == [1, 2, 3]


def test_device_without_float64_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As MPS, which raises at any conversion to float64."""
    convert = Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.device.type == "sim" and torch.float64 in (*args, *kwargs.values()):
            raise TypeError("there is no float64 here")
        return convert(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(devices, "WITHOUT_FLOAT64", frozenset({"sim"}))
    model, optimizer = build("sim")
    with backlight.watch(model, optimizer, run=tmp_path / "run", every=1, summary=False) as watch:
        for x, y in batches("sim", 3):
            step(model, optimizer, x, y)
        watch.log(mine=torch.ones(1, device="sim"))
    run = backlight.open_run(tmp_path / "run")
    assert run.frame("gradient", "norm").measured.all()
    assert len(run.scalar("loss").values) == 3
    assert not [e for e in run.events("unmeasured") if "device time" not in e.payload["what"]]
