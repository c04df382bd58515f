"""Tables of steps traced in this process: sums, lines, shapes, optimizations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from backlight.diagnose.profile.observer import ProfileObserver
from backlight.diagnose.profile.optimizations import OFF, ON, find_optimizations
from backlight.diagnose.profile.ranges import LineRanges, lines_possible
from backlight.diagnose.profile.step_summary import find_attention, throughput
from backlight.trace.events import Trace
from backlight.trace.module_times import attribute
from backlight.trace.operators import NO_OPERATOR
from backlight.trace.reader import read_trace
from backlight.trace.step_operators import Operations, read_operations, split
from synthetic_traces import TraceBuilder

BATCH, LENGTH, HEADS, SIZE, WORDS = 2, 8, 2, 4, 11


class ObservationEnded(BaseException):
    """The observer has recorded enough steps."""


class Model(nn.Module):
    """One layer of attention, in bfloat16 under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, HEADS * SIZE)
        self.head = nn.Linear(HEADS * SIZE, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        q = self.embed(words).view(BATCH, LENGTH, HEADS, SIZE).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, q, q).transpose(1, 2)
        wide = mixed.double()  # the copy
        return self.head(wide.float().flatten(2))


Traced = tuple[ProfileObserver, Trace, Trace, Operations]
LINE = 1 + next(i for i, line in enumerate(Path(__file__).read_text().splitlines()) if "# the copy" in line)


def observed(path: Path, traced: int = 2) -> ProfileObserver:
    model = Model()
    words = torch.randint(0, WORDS, (400, LENGTH))

    def stop() -> None:
        raise ObservationEnded

    observer = ProfileObserver(stop, 4, traced, path)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ObservationEnded), observer:
        # Another test of this process may have compiled something.
        patch.setattr("backlight.diagnose.profile.observer.has_compiled", lambda: False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for (batch,) in DataLoader(TensorDataset(words), batch_size=BATCH):
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(batch)
            loss = F.cross_entropy(logits.flatten(0, 1), batch.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return observer


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    path = tmp_path_factory.mktemp("traced") / "trace.json.gz"
    observer = observed(path)
    main, lines = split(read_trace(path), 2)
    assert lines is not None
    return observer, main, lines, read_operations(main, lines)


def test_operators_of_a_phase_add_up_to_it(traced: Traced) -> None:
    tables = traced[3]
    assert tables.traced_steps == 2
    assert tables.trace_sum_error < 1e-9
    assert {"data", "forward", "loss", "backward", "clip", "optimizer"} <= set(tables.traced_phases)
    for phase, whole in tables.traced_phases.items():
        rows = [row for row in tables.operators if row.phase == phase]
        assert sum(row.share for row in rows) == pytest.approx(1)
        assert sum(row.host_ms for row in rows) == pytest.approx(whole)
        assert any(row.name == NO_OPERATOR for row in rows)
    # One thread, one device-less machine: phases are the step.
    assert sum(tables.traced_phases.values()) == pytest.approx(tables.traced_step_ms, rel=0.5)


def test_forward_and_backward_of_an_operator_are_joined(traced: Traced) -> None:
    joined = {(pair.forward, pair.backward): pair for pair in traced[3].joined}
    pair = joined["aten::embedding", "EmbeddingBackward0"]
    assert pair.calls == 1
    assert pair.forward_ms > 0
    assert pair.backward_ms > 0


def test_copies_have_the_source_line_of_their_call(traced: Traced) -> None:
    rows = [row for row in traced[3].copies if row.line.startswith(f"{__file__}:{LINE} (forward)")]
    ahead = [row for row in rows if not row.line.endswith("backward")]
    behind = [row for row in rows if row.line.endswith("(forward), backward")]
    assert [(row.source, row.target, row.calls, row.elements) for row in ahead] == [
        ("c10::BFloat16", "double", 1, BATCH * LENGTH * HEADS * SIZE)
    ]
    assert [(row.source, row.target) for row in behind] == [("double", "c10::BFloat16")]


def test_lines_are_traced_in_an_additional_step(traced: Traced) -> None:
    observer, main, lines, _ = traced
    assert observer.observed.has_lines
    assert len(observer.observed.traced) == 2
    used = [{trace.events.words["name"][code] for code in trace.events["name"]} for trace in (main, lines)]
    assert not any(name.startswith("backlight.line/") for name in used[0])
    assert any(name.startswith("backlight.line/") for name in used[1])
    assert lines_possible()


def test_torch_function_mode_of_the_script_disables_lines(tmp_path: Path) -> None:
    with torch.device("cpu"):
        assert not LineRanges().begin()
        observer = observed(tmp_path / "trace.json", traced=1)
    assert not observer.observed.has_lines
    assert observer.observed.trouble == ["lines of copies: the script has its own mode of torch functions"]
    assert len(observer.observed.traced) == 1


def test_operations_of_attention_follow_from_its_shapes(traced: Traced) -> None:
    found = find_attention(traced[1], 2)
    assert found.calls == 1
    assert found.operations == 12 * BATCH * HEADS * LENGTH * LENGTH * SIZE
    assert found.shape == f"{BATCH}x{HEADS}x{LENGTH}x{SIZE}"
    reached = throughput(
        0.5, tokens=16, parameters=100, attention=found.operations / 16, peak=1e6, recomputed=0.002
    )
    # 12 L d T for one layer of width heads x size.
    assert reached.mfu == pytest.approx(32 * (600 + 12 * HEADS * SIZE * LENGTH) / 1e6)
    assert "N = 100 (all parameters)" in reached.mfu_basis
    assert "recomputation is not counted as work, which takes 2.0 ms of a step" in reached.mfu_basis


def test_logits_are_found_at_the_loss(traced: Traced) -> None:
    logits = traced[3].logits
    assert logits.shape == (BATCH * LENGTH, WORDS)
    assert logits.itemsize == {"bfloat16": 2, "float": 4}[logits.dtype]


def test_optimizations_in_use_are_found(traced: Traced) -> None:
    observer, main, _, tables = traced
    assert observer.observed.live is not None
    found = {o.name: o for o in find_optimizations(observer.observed.live, tables, attribute(main.events, 2))}
    assert (found["fused optimizer"].state, found["fused optimizer"].detail) == (ON, "AdamW: fused")
    assert found["low precision"].state == ON
    assert found["low precision"].detail.startswith("autocast to bfloat16; parameters: float32 ")
    assert found["fused attention"].state == ON
    assert found["checkpointing"].state == OFF
    assert found["data-loader workers"].detail == "0 workers"
    assert "called 1 times a step" in found["chunked loss"].detail


def test_optimizations_without_a_trace_are_not_measured(traced: Traced) -> None:
    live = traced[0].observed.live
    assert live is not None
    found = {o.name: o.state for o in find_optimizations(live, None, None)}
    assert found["fused attention"] == found["checkpointing"] == found["chunked loss"] == "not measured"
    assert found["fused optimizer"] == ON


def test_observer_removes_its_hooks(traced: Traced) -> None:
    for model in traced[0].forwards.models:
        for module in model.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks


@pytest.mark.parametrize("steps", [9, 12])
def test_traced_optimizers_are_apart(steps: int, tmp_path: Path) -> None:
    builder = TraceBuilder()
    for step in range(steps):
        builder.step(step, 1000 * step, 1000)
        for name, at, length in (("Muon", 100, 300 + 10 * step), ("AdamW", 600, 50)):
            builder.add("user_annotation", f"Optimizer.step#{name}.step", 1000 * step + at, length)
    found = read_operations(read_trace(builder.write(tmp_path / "made.json")), None)
    rows = [(one.type, one.steps, round(one.median_ms, 9), one.max_ms) for one in found.traced_optimizers]
    few = any("optimizers in the trace: 9 traced steps, 10 are needed" in note for note in found.trace_notes)
    assert few == (steps == 9)
    expected = [("Muon", 12, 0.355, pytest.approx(0.41)), ("AdamW", 12, 0.05, pytest.approx(0.05))]
    assert rows == ([] if few else expected)
