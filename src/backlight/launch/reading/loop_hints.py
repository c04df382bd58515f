"""Hints on the order of calls in a training loop."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from backlight.launch.reading.hint import Files, Remark, hint
from backlight.launch.reading.syntax import Binding, CallSite, CodePlace, Namespace, SourceFile, dotted

OPTIMIZERS = frozenset(
    {"SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop",
     "SparseAdam", "Adafactor", "Lion"}
)  # fmt: skip
"""Classes of optimizers whose step takes no closure."""

_OPTIMIZER_NAME = re.compile(r"(^|_)optim|optimi[sz]er|^opt(_|$)", re.IGNORECASE)
_GRADLESS = {"no_grad", "inference_mode"}
CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")


def constructed(source: SourceFile, name: str) -> list[ast.Call]:
    """Return the calls whose results a dotted name is assigned anywhere in the file."""
    return [each.value for each in source.named(name) if isinstance(each.value, ast.Call)]


def is_optimizer(source: SourceFile, name: str) -> bool:
    """Return whether a dotted name is an optimizer by what it is assigned, or by its last part."""
    if any(dotted(call.func).rpartition(".")[2] in OPTIMIZERS for call in constructed(source, name)):
        return True
    return bool(_OPTIMIZER_NAME.search(name.rpartition(".")[2])) and "sched" not in name.lower()


def backwards(source: SourceFile) -> list[tuple[CallSite, str]]:
    """Return the backward passes, each with the dotted name of its loss, empty where it has none."""
    passes = []
    for call in source.methods.get("backward", ()):
        function = call.node.func
        if call.place.scope.name == "backward" or not isinstance(function, ast.Attribute):
            continue
        # accelerator.backward(loss), scaler.scale(loss).backward()
        inner = function.value if isinstance(function.value, ast.Call) else call.node
        argument = dotted(inner.args[0]) if inner.args else ""
        is_given = not call.owner or re.search("accelerator|fabric|engine|autograd", call.owner)
        passes.append((call, argument if is_given else call.owner))
    return passes


def optimizer_steps(source: SourceFile) -> list[tuple[CallSite, str]]:
    """Return the calls that step an optimizer, each with its dotted name; not those with a closure."""
    steps = []
    for call in source.methods.get("step", ()):
        if call.owner.rpartition(".")[2].endswith("scaler") and call.node.args:
            steps.append((call, dotted(call.node.args[0])))
        elif not call.node.args and not call.node.keywords and is_optimizer(source, call.owner):
            steps.append((call, call.owner))
    return steps


def shares_branch(first: CodePlace, second: CodePlace) -> bool:
    """Return whether two places are in one list of statements, so that the earlier line runs first."""
    return first.scope is second.scope and first.branch == second.branch


def _between(calls: list[CallSite], begin: CallSite, end: CallSite) -> bool:
    return any(
        begin.position < call.position < end.position and call.place.scope is begin.place.scope
        for call in calls
    )


@hint("no_gradient", "weights_unchanged", "gradients_not_cleared", "gradients_discarded", steps=8)
def step_before_backward(source: SourceFile, _files: Files) -> Iterator[Remark]:
    """A step that no backward pass of the same function precedes, with one behind it."""
    passes = [call for call, _ in backwards(source)]
    for step, optimizer in optimizer_steps(source):
        alike = [call for call in passes if shares_branch(call.place, step.place)]
        before = [
            call
            for call in passes
            if call.place.scope in set(step.place.scope.around()) and call.position < step.position
        ]
        if alike and not before and not _is_called_with_backward(source, step, passes):
            yield (
                step.node,
                f"`{optimizer}.step()` comes before the backward pass",
                f"call `{optimizer}.step()` after `backward()`",
            )


def _is_called_with_backward(source: SourceFile, step: CallSite, passes: list[CallSite]) -> bool:
    """Return whether something that is called before the step may run a backward pass."""
    names = {call.place.scope.name for call in passes}
    return any(
        call.method in names and call.place.scope is step.place.scope and call.position < step.position
        for call in source.calls
    )


@hint("gradients_discarded", steps=8)
def cleared_before_step(source: SourceFile, _files: Files) -> Iterator[Remark]:
    """The gradients of an optimizer are cleared between backward and its step."""
    passes = [call for call, _ in backwards(source)]
    steps = optimizer_steps(source)
    for clear in source.methods.get("zero_grad", ()):
        if not clear.owner:
            continue
        for step, optimizer in steps:
            if (
                optimizer == clear.owner
                and shares_branch(clear.place, step.place)
                and clear.position < step.position
                and not _between(passes, clear, step)
                and not _between([other for other, _ in steps], clear, step)
                and any(
                    shares_branch(call.place, clear.place)
                    and call.position < clear.position
                    and not _between([other for other, name in steps if name == optimizer], call, clear)
                    for call in passes
                )
            ):
                yield (
                    clear.node,
                    "gradients are cleared between `backward()` and `step()`",
                    "clear them before `backward()`, or after `step()`",
                )


@hint("gradients_not_cleared", steps=8)
def never_cleared(source: SourceFile, files: Files) -> Iterator[Remark]:
    """A loop with a backward pass and a step, and nothing that clears gradients."""
    if any(files.mention(text) for text in ("grad = None", "grad=None", "grad.zero_", "grad.data.zero_")):
        return
    clears = [call for each in files.sources for call in each.methods.get("zero_grad", ())]
    passes = [call for call, _ in backwards(source)]
    for step, optimizer in optimizer_steps(source):
        if not step.place.loops or _is_closure_step(source, optimizer):
            continue
        inner = next((c for c in passes if c.place.scope is step.place.scope
                      and c.place.loops and c.place.loops[-1] in step.place.loops), None)  # fmt: skip
        if inner is None:
            continue
        loop = inner.place.loops[-1]
        if any(loop in each.place.loops for each in source.named(optimizer)):
            continue  # a new optimizer each time
        outside = [c for c in clears if c.place.scope is step.place.scope and loop not in c.place.loops]
        if len(outside) == len(clears):
            when = "once before the loop over batches" if clears else "nowhere"
            yield (
                step.node,
                f"gradients are cleared {when}: each step adds to those of the steps before",
                f"call `{optimizer}.zero_grad()` before each `backward()`",
            )


def _is_closure_step(source: SourceFile, name: str) -> bool:
    """Return whether an optimizer is of a class that may clear gradients itself, or takes a closure."""
    made = constructed(source, name)
    return bool(made) and not any(dotted(c.func).rpartition(".")[2] in OPTIMIZERS for c in made)


@hint("clipping", steps=8)
def clipped_after_step(source: SourceFile, _files: Files) -> Iterator[Remark]:
    """Clipping behind the step that used the gradients."""
    passes = [call for call, _ in backwards(source)]
    for name in CLIPS:
        for clip in source.methods.get(name, ()):
            steps = [
                step
                for step, _ in optimizer_steps(source)
                if shares_branch(step.place, clip.place)
                and step.position < clip.position
                and not _between(passes, step, clip)
            ]
            later = any(
                step.place.scope is clip.place.scope and step.position > clip.position
                for step, _ in optimizer_steps(source)
            )
            if steps and not later and any(shares_branch(call.place, clip.place) for call in passes):
                yield (
                    clip.node,
                    "gradients are clipped after the step that used them",
                    "clip between `backward()` and `step()`",
                )


@hint("memory", steps=0)
def accumulated_loss(source: SourceFile, _files: Files) -> Iterator[Remark]:
    """A sum or list of losses that keeps the graph of each."""
    passes = [(call, loss) for call, loss in backwards(source) if loss and call.place.loops]
    used = {loss for _, loss in backwards(source)}
    for call, loss in passes:
        scope, loop = call.place.scope, call.place.loops[-1]
        for each in source.assignments:
            if (
                each.operator is ast.Add
                and _is_kept(each.place, scope, loop)
                and each.target not in used
                and carries(each.value, loss)
                and not _is_reset(source, each.target, scope, loop)
                and not _is_assigned_between(source, loss, call, each.position)
            ):
                yield (
                    each.node,
                    f"`{each.target}` keeps the graph of every `{loss}` that it adds up",
                    f"add `{loss}.item()`, or `{loss}.detach()`",
                )
        for append in source.methods.get("append", ()):
            kept = append.node.args[0] if append.node.args else None
            if (
                dotted(kept) == loss
                and _is_kept(append.place, scope, loop)
                and not _is_reset(source, append.owner, scope, loop)
                and not _is_combined(source, append.owner)
                and not _is_assigned_between(source, loss, call, append.position)
            ):
                yield (
                    append.node,
                    f"the list `{append.owner}` keeps the graph of every `{loss}`",
                    f"append `{loss}.item()`, or `{loss}.detach()`",
                )


def _is_kept(place: CodePlace, scope: Namespace, loop: ast.stmt) -> bool:
    return place.scope is scope and loop in place.loops and not is_gradless(place)


def _is_reset(source: SourceFile, target: str, scope: Namespace, loop: ast.stmt) -> bool:
    """Return whether what collects losses begins anew, or is detached, within the loop."""
    return any(
        each.operator is None and each.place.scope is scope and loop in each.place.loops
        for each in source.named(target)
    ) or any(
        call.owner == target and call.place.scope is scope
        for method in ("clear", "detach_", "backward")
        for call in source.methods.get(method, ())
    )


def _is_combined(source: SourceFile, name: str) -> bool:
    """Return whether a list of losses is made into a tensor, which is trained perhaps."""
    return any(
        call.node.args and dotted(call.node.args[0]) == name
        for method in ("stack", "cat", "sum")
        for call in source.methods.get(method, ())
    )


def _is_assigned_between(source: SourceFile, name: str, begin: CallSite, end: tuple[int, int]) -> bool:
    return any(
        min(begin.position, end) < each.position < max(begin.position, end)
        and each.place.scope is begin.place.scope
        for each in source.named(name)
    )


def carries(value: ast.expr | None, name: str) -> bool:
    """Return whether an expression is a tensor with the graph of ``name``."""
    if isinstance(value, ast.BinOp):
        return carries(value.left, name) or carries(value.right, name)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        return value.func.attr in {"mean", "sum", "cpu"} and carries(value.func.value, name)
    return dotted(value) == name


def is_gradless(place: CodePlace) -> bool:
    """Return whether a place is below ``no_grad`` or ``inference_mode`` of the same function."""
    for block in reversed(place.withs):
        for item in block.items:
            name = _called(item.context_expr)
            if name in {"enable_grad", "set_grad_enabled"}:
                return False
            if name in _GRADLESS:
                return True
    return any(_called(each) in _GRADLESS for each in getattr(place.scope.node, "decorator_list", ()))


def _called(node: ast.expr) -> str:
    return dotted(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]


@hint("no_gradient", steps=0)
def trained_without_gradients(source: SourceFile, _files: Files) -> Iterator[Remark]:
    """A backward pass under ``no_grad``, where its loss is computed as well."""
    for call, loss in backwards(source):
        made = [
            each for each in source.named(loss)
            if each.place.scope is call.place.scope and each.position < call.position
        ]  # fmt: skip
        if is_gradless(call.place) and made and is_gradless(made[-1].place):
            yield (
                call.node,
                "the loss is computed under `no_grad`, so that this backward pass fails",
                "compute it outside of `torch.no_grad()`",
            )


EPOCH_SCHEDULES = frozenset({"StepLR", "MultiStepLR", "ReduceLROnPlateau", "CosineAnnealingLR"})
STEP_SCHEDULES = frozenset({"OneCycleLR", "CyclicLR", "get_linear_schedule_with_warmup",
                            "get_cosine_schedule_with_warmup"})  # fmt: skip
_STEPS = re.compile(r"step|iter|batch|len\(|updates", re.IGNORECASE)
_EPOCHS = re.compile(r"epoch", re.IGNORECASE)


@hint("schedule", steps=0)
def schedule_per_batch(source: SourceFile, _files: Files) -> Iterator[Remark]:
    """The step of a schedule in epochs within the loop over batches, and one in batches outside of it."""
    passes = [call for call, _ in backwards(source) if len(call.place.loops) > 1]
    for step in source.methods.get("step", ()):
        made = constructed(source, step.owner)
        if len(made) != 1 or not passes:
            continue
        kind = dotted(made[0].func).rpartition(".")[2]
        settings = " ".join(map(ast.unparse, [*made[0].args[1:], *(k.value for k in made[0].keywords)]))
        for call in passes:
            if call.place.scope is not step.place.scope or step.node.args[1:]:
                continue
            inner, outer = call.place.loops[-1], call.place.loops[-2]
            counts_epochs = bool(_EPOCHS.search(settings)) and not _STEPS.search(settings)
            if inner in step.place.loops and kind in EPOCH_SCHEDULES and counts_epochs:
                yield (
                    step.node,
                    f"`{kind}` counts epochs, and steps at every batch",
                    "step it once per epoch, outside of the loop over batches",
                )
            elif (
                outer in step.place.loops
                and inner not in step.place.loops
                and (kind in STEP_SCHEDULES or (kind in EPOCH_SCHEDULES and "len(" in settings))
                and "epoch" not in _loop_target(inner)
            ):
                yield (
                    step.node,
                    f"`{kind}` counts batches, and steps once per epoch",
                    "step it after each `optimizer.step()`",
                )
            break


def _loop_target(loop: ast.stmt) -> str:
    return ast.unparse(loop.target) if isinstance(loop, ast.For) else ""


@hint("module_modes", steps=0)
def never_back_in_training_mode(source: SourceFile, files: Files) -> Iterator[Remark]:
    """An evaluation within the loop over epochs, and no ``train()`` anywhere."""
    if any(
        not re.search("trainer|engine", call.owner, re.IGNORECASE)
        for each in files.sources
        for call in each.methods.get("train", ())
        if call.owner
    ):
        return
    passes = [call for call, _ in backwards(source)]
    trainers = {call.place.scope.name for call in passes}
    for call in source.methods.get("eval", ()):
        if not call.owner or call.node.args:
            continue
        scope = call.place.scope
        if call.owner in scope.params:
            calls = [c for c in source.methods.get(scope.name, ()) if c.place.loops]
            is_alternating = any(_trains(c.place, passes, trainers, source) for c in calls)
        else:
            is_alternating = bool(call.place.loops) and _trains(call.place, passes, trainers, source)
            is_alternating &= files.mention(f"{call.owner}.parameters()")
        if is_alternating:
            yield (
                call.node,
                f"`{call.owner}` is never put back into training mode",
                f"call `{call.owner}.train()` before the next epoch",
            )


def _trains(place: CodePlace, passes: list[CallSite], trainers: set[str], source: SourceFile) -> bool:
    """Return whether the outermost loop around a place also trains, itself or by a function."""
    if not place.loops:
        return False
    loop = place.loops[0]
    trained = [c for c in passes if c.place.scope is place.scope and loop in c.place.loops]
    by_call = [
        c for c in source.calls
        if c.method in trainers - {""} and c.place.scope is place.scope and loop in c.place.loops
    ]  # fmt: skip
    return bool(trained or by_call)


@hint("no_gradient", "trained_tensors", steps=0)
def leaf_is_replaced(source: SourceFile, _files: Files) -> Iterator[Remark]:
    """A leaf that requires a gradient and is changed in place, or replaced by a result, under autograd."""
    leaves: dict[str, Binding] = {}
    for each in source.assignments:
        if isinstance(each.value, ast.Call) and any(
            word.arg == "requires_grad" and getattr(word.value, "value", None) is True
            for word in each.value.keywords
        ):
            leaves.setdefault(each.target, each)
    for name, leaf in leaves.items():
        for each in source.named(name):
            is_update = f"{name}.grad" in ast.unparse(each.value) if each.value is not None else False
            if (
                is_update
                and each.place.scope is leaf.place.scope
                and each.place.loops
                and not is_gradless(each.place)
            ):
                what = "changed in place" if each.operator else "replaced by a result"
                yield (
                    each.node,
                    f"`{name}` is a leaf that requires a gradient, and is {what} under autograd",
                    f"update it under `torch.no_grad()`: `{name} -= ...`",
                )
