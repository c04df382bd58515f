"""Every case of the matrix: steps are counted, and gradients equal those of backward."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from recording import tracking
from torch import Tensor, nn

from backlight.capture.hub import HUB
from cases import CASE_NAMES, CASES, Case, build, build_with_sgd, loop

EVERY = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


@pytest.fixture
def truth(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, Tensor]]:
    """Return the gradients of all parameters after each backward, taken without hooks of backlight."""
    recorded: list[dict[int, Tensor]] = []
    original = torch.Tensor.backward

    def backward(self: Tensor, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        recorded.append({id(p): p.grad.detach().clone() for p in leaves() if p.grad is not None})

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    return recorded


def leaves() -> list[Tensor]:
    import gc

    return [o for o in gc.get_objects() if issubclass(type(o), torch.nn.Parameter)]


@pytest.mark.slow
@EVERY
def test_steps_and_parameter_names(case: Case) -> None:
    with tracking() as sink:
        case.train()
    assert len(sink.summaries) == case.steps
    assert [s.index for s in sink.summaries] == list(range(case.steps))
    measured = {name for step in sink.grads for name, grad in step.items() if grad is not None}
    for name in case.unmeasured:
        assert name not in measured
    assert measured, "no gradient was measured"
    assert not any(name.startswith(("_orig_mod", "optimizer")) for name in measured)


@pytest.mark.parametrize("name", CASE_NAMES)
def test_training_is_bit_identical(name: str) -> None:
    case = CASES[name]
    alone = case.train()
    with tracking():
        watched = case.train()
    again = case.train()
    for one, two, three in zip(alone, watched, again, strict=True):
        assert torch.equal(one.nan_to_num(), two.nan_to_num())
        assert torch.equal(one.nan_to_num(), three.nan_to_num())


def test_hooks_are_removed() -> None:
    import torch.nn.modules.module as modules
    from torch.nn.utils import clip_grad
    from torch.optim import optimizer

    def state() -> tuple[object, ...]:
        return (
            torch.autograd.backward,
            clip_grad._clip_grads_with_norm_,
            clip_grad._get_total_norm,
            clip_grad._group_tensors_by_device_and_dtype,
            torch.amp.GradScaler.step,
            torch.amp.GradScaler.unscale_,
            torch.optim.Optimizer.__init__,
            len(optimizer._global_optimizer_pre_hooks),
            len(optimizer._global_optimizer_post_hooks),
            len(modules._global_module_registration_hooks),
            len(modules._global_parameter_registration_hooks),
        )

    before = state()
    with tracking():
        assert state() != before
    assert state() == before


@pytest.mark.parametrize(
    "name",
    [
        *("plain", "clipped_by_norm", "clipped_by_imported_name", "clipped_in_two_halves"),
        *("clipped_by_value", "adamw_fused", "closure_by_keyword", "tied"),
    ],
)
def test_gradients_equal_those_of_backward(name: str, truth: list[dict[int, Tensor]]) -> None:
    with tracking() as sink:
        CASES[name].train()
    for step, expected in zip(sink.grads, truth, strict=False):
        collected = [g for g in step.values() if g is not None]
        assert len(collected) >= 1
        for grad in collected:
            assert any(e.shape == grad.shape and torch.equal(e, grad) for e in expected.values())


@pytest.mark.parametrize("name", ["scaler", "scaler_with_clipping", "scaler_with_fused"])
def test_scaled_gradients_are_unscaled(name: str, truth: list[dict[int, Tensor]]) -> None:
    with tracking() as sink:
        CASES[name].train()
    for step, scaled in zip(sink.grads, truth, strict=False):
        for grad in step.values():
            assert any(e.shape == grad.shape and torch.allclose(e / 1024, grad) for e in scaled.values())
    assert all(float(s.scale) == 1024 for s in sink.summaries)


def test_loss_is_recorded_before_scaling() -> None:
    with tracking() as plain:
        CASES["plain"].train()
    with tracking() as scaled:
        CASES["scaler"].train()
    assert plain.of_steps("loss") == pytest.approx(scaled.of_steps("loss"), rel=0.05)


@pytest.mark.slow
def test_skipped_steps_are_reported() -> None:
    with tracking() as sink:
        CASES["scaler_skips"].train()
    assert [s.skipped for s in sink.summaries] == [False, True, False, False]
    with tracking() as sink:
        CASES["scaler_skips_with_fused"].train()
    assert [bool(s.skipped) for s in sink.summaries] == [False, True, False, False]


@pytest.mark.slow
def test_manual_weight_change_is_observed() -> None:
    with tracking() as sink:
        CASES["clipped_by_hand"].train()
    assert all(s.changed_by_hand == 6 for s in sink.summaries)
    with tracking() as sink:
        CASES["plain"].train()
    assert all(s.changed_by_hand == 0 for s in sink.summaries)


def test_internal_error_does_not_reach_the_training() -> None:
    alone = CASES["plain"].train()
    with tracking() as sink:
        sink.error = ZeroDivisionError("injected")
        watched = CASES["plain"].train()
    assert sink.collections == 1, "the listener was not taken off after its error"
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))


def test_only_the_given_optimizer_counts() -> None:
    model, optimizer = build_with_sgd()
    with tracking(models=[model], optimizers=[optimizer]) as sink:
        CASES["plain"].train()
        loop(model, optimizer)
    assert len(sink.summaries) == 4
    assert set(sink.grads[0]) == {n for n, _ in model.named_parameters()}


@pytest.mark.parametrize("fails", [False, True])
def test_step_that_calls_the_step_of_its_base_class_is_one(fails: bool) -> None:
    class Decaying(torch.optim.SGD):
        broken = False

        def step(self, closure: Any = None) -> Any:
            if self.broken:
                raise RuntimeError("no step")
            for group in self.param_groups:
                group["lr"] *= 0.9
            return super().step(closure)

    model, _ = build_with_sgd()  # torch hooks the step of a class when there is an instance of it
    optimizer = Decaying(model.parameters(), lr=0.1)
    with tracking(models=[model], optimizers=[optimizer]) as sink:
        if fails:
            loop(model, optimizer)
            optimizer.broken = True
            with pytest.raises(RuntimeError, match="no step"):
                loop(model, optimizer)
            optimizer.broken = False
        loop(model, optimizer)
    # The one that failed to update the weights is a step of its own: its loss is not that of the next.
    assert [s.backwards for s in sink.summaries] == [1] * (9 if fails else 4)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_step_within_a_step_is_seen_where_the_compiler_has_wrapped_it(
    is_wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scaled(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model, _ = build_with_sgd()
    optimizer = Scaled(model.parameters(), lr=0.1)
    if is_wrapped:  # as torch does when it compiles the first function of a process
        for kind in (Scaled, torch.optim.SGD):
            monkeypatch.setattr(kind, "step", torch.compiler.disable(kind.step))
    with tracking(models=[model], optimizers=[optimizer]) as sink:
        loop(model, optimizer)
    assert len(sink.summaries) == 4


@pytest.mark.parametrize("retries", [False, True])
def test_step_that_is_interrupted_ends_where_the_next_begins(retries: bool) -> None:
    """Also with two optimizers, of which no one knows which is the last in a step."""

    class Interrupted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise KeyboardInterrupt

    model, optimizer = build_with_sgd()
    broken = Interrupted(model.parameters(), lr=0.1)
    with tracking(models=[model], optimizers=[optimizer, broken]) as sink:
        loop(model, optimizer)
        with pytest.raises(KeyboardInterrupt):
            loop(model, broken)
        if retries:
            optimizer.step()
        loop(model, optimizer)
    assert [s.backwards for s in sink.summaries] == [1] * 9


def test_two_listeners_receive_the_same_data() -> None:
    with tracking() as outer, tracking() as inner:
        CASES["clipped_by_norm"].train()
    assert len(outer.summaries) == len(inner.summaries) == 4
    for one, two in zip(outer.grads, inner.grads, strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[k], two[k]) for k in one)


def test_model_is_freed_as_without_backlight() -> None:
    import gc
    import weakref

    with tracking():
        model, optimizer = build_with_sgd()
        loop(model, optimizer)
        dead = weakref.ref(model.first.weight)
        del model, optimizer
        gc.collect()
        assert dead() is None
        CASES["plain"].train()


@pytest.mark.slow
def test_forked_child_reports_no_events() -> None:
    import os

    with tracking():
        child = os.fork()
        if child == 0:
            os._exit(int(HUB.active))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert HUB.active


def test_existing_optimizer_is_tracked_from_its_first_clipping() -> None:
    model, optimizer = build_with_sgd()
    largest = []

    def clip(model: torch.nn.Module) -> None:
        largest.append(max(p.grad.abs().max().item() for p in model.parameters()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    with tracking() as sink:
        loop(model, optimizer, clip)
    assert sink.collections == 4
    assert [max(g.abs().max().item() for g in step.values()) for step in sink.grads[:4]] == largest


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_a_step_that_clips_before_backward_are_those_of_backward(set_to_none: bool) -> None:
    model, optimizer = build_with_sgd()
    largest = []
    with tracking() as sink:
        for _ in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = model(torch.randn(8, 4)).square().mean()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            loss.backward()
            largest.append(max(p.grad.abs().max().item() for p in model.parameters()))
            optimizer.step()
    assert [max(g.abs().max().item() for g in step.values()) for step in sink.grads[:4]] == largest


def test_gradients_that_the_script_sets_are_collected_before_clipping() -> None:
    model, optimizer = build_with_sgd()
    largest = []
    with tracking() as sink:
        for _ in range(4):
            loss = model(torch.randn(8, 4)).square().mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            largest.append(max(gradient.abs().max().item() for gradient in gradients))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
    assert [max(g.abs().max().item() for g in step.values()) for step in sink.grads[:4]] == largest


def test_module_with_a_reused_id_is_found() -> None:
    from backlight.capture.modules import SeenModules

    modules = SeenModules()
    gone = torch.nn.Linear(1, 1)
    modules.note(gone)
    model = build()
    modules._modules[id(model)] = modules._modules.pop(id(gone))  # as if the address had been reused
    del gone
    modules.note(model)
    assert model in modules.roots()


def test_replaced_parameters_keep_their_names() -> None:
    from backlight.capture.modules import SeenModules, install
    from backlight.capture.parameters import build_table

    seen = SeenModules()
    handles = install(seen)
    try:
        body = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        model = torch.nn.ModuleDict({"body": body, "head": torch.nn.Linear(2, 3)})
        optimizer = torch.optim.SGD([*model.parameters(), torch.zeros(1, requires_grad=True)], lr=0.1)
        model["head"] = torch.nn.Linear(2, 5)
        body[1].bias = torch.nn.Parameter(torch.zeros(2))
    finally:
        for handle in handles:
            handle.remove()
    records = build_table([model], [optimizer], seen).records
    former = [record for record in records if not record.in_model]
    assert [record.name for record in former] == [
        "replaced.body.1.bias",
        "replaced.head.weight",
        "replaced.head.bias",
        "optimizer0.group0.parameter6",
    ]
    assert [record.shape for record in former] == [(2,), (3, 2), (3,), (1,)]


class Sleeping(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        time.sleep(0.01)
        return super().step(closure)


def test_optimizers_of_one_step_are_timed_apart() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    slow, fast = Sleeping(model[0].parameters(), lr=0.1), torch.optim.SGD(model[1].parameters(), lr=0.1)
    with tracking(models=[model], optimizers=[slow, fast]) as sink:
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
            slow.step()
            fast.step()
    assert len(sink.summaries) == 3
    for summary in sink.summaries:
        assert set(summary.optimizer_seconds) == {0, 1}
        assert summary.optimizer_seconds[0] >= 0.01
        assert sum(summary.optimizer_seconds.values()) == pytest.approx(summary.phases["optimizer"])
