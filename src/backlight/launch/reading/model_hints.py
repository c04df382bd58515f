"""Hints on models, losses, optimizers and data."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from backlight.launch.reading.hint import Files, Remark, hint
from backlight.launch.reading.loop_hints import OPTIMIZERS, backwards, constructed
from backlight.launch.reading.syntax import CallSite, Namespace, SourceFile, dotted

LOSSES = {
    "cross_entropy": "cross_entropy", "CrossEntropyLoss": "cross_entropy",
    "binary_cross_entropy_with_logits": "binary_cross_entropy_with_logits",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "nll_loss": "nll_loss", "NLLLoss": "nll_loss",
}  # fmt: skip
"""Loss functions and classes, with the function that they are."""

ACTIVATIONS = {"softmax": "softmax", "Softmax": "softmax", "sigmoid": "sigmoid", "Sigmoid": "sigmoid",
               "log_softmax": "log_softmax", "LogSoftmax": "log_softmax"}  # fmt: skip

UNFIT = {
    ("cross_entropy", "softmax"): "which applies its own",
    ("binary_cross_entropy_with_logits", "sigmoid"): "which applies its own",
    ("nll_loss", "softmax"): "which expects log-probabilities",
}
"""Loss and activation before it, with the reason why they do not fit."""

_KEEPS = {"squeeze", "view", "flatten", "float", "reshape", "to", "cuda", "cpu", "unsqueeze", "contiguous"}
_WITH_PARAMETERS = re.compile(
    r"^(Linear|Bilinear|Conv\w*|ConvTranspose\w*|Embedding\w*|LSTM\w*|GRU\w*|RNN\w*|BatchNorm\w*|LayerNorm"
    r"|GroupNorm|MultiheadAttention|Transformer\w+|Parameter|PReLU)$"
)
_DEPTH = 6


@hint("loss_input", steps=8)
def activation_before_loss(source: SourceFile, files: Files) -> Iterator[Remark]:
    """A softmax or sigmoid in front of a loss that applies its own."""
    for call in source.calls:
        loss = _loss_of(call, source)
        scores = call.argument("input", 0) if loss else None
        if scores is None:
            continue
        activation = _activation(scores, source, call.place.scope, call.position, files)
        if activation is None:
            continue
        where, name, node = activation
        if reason := UNFIT.get((loss, name)):
            fix = "give it the logits" if loss != "nll_loss" else "give it the result of `log_softmax`"
            shown = node if where is source else call.node
            yield shown, f"`{name}` before `{loss}`, {reason}", fix


def _loss_of(call: CallSite, source: SourceFile) -> str:
    """Return the loss function that a call computes, empty for none."""
    function = call.node.func
    if call.method in LOSSES and call.method[0].islower():
        return LOSSES[call.method]
    if isinstance(function, ast.Call):  # nn.CrossEntropyLoss()(x, y)
        return LOSSES.get(dotted(function.func).rpartition(".")[2], "")
    name = dotted(function)
    made = constructed(source, name) if len(call.node.args) >= 2 else []
    kinds = {LOSSES.get(dotted(value.func).rpartition(".")[2], "") for value in made}
    return kinds.pop() if len(kinds) == 1 and len(made) == len(source.named(name)) else ""


Activation = tuple[SourceFile, str, ast.AST]


def _activation(
    node: ast.expr | None,
    source: SourceFile,
    scope: Namespace,
    before: tuple[int, int],
    files: Files,
    depth: int = 0,
) -> Activation | None:
    """Return the activation that made the value of an expression; None where that is not known."""
    if depth > _DEPTH or node is None:
        return None
    name = dotted(node)
    if name:
        value = source.visible_value(name, scope, before)
        position = (value.lineno, value.col_offset) if value is not None else before
        return _activation(value, source, scope, position, files, depth + 1)
    if not isinstance(node, ast.Call):
        return None
    function = node.func
    last = function.attr if isinstance(function, ast.Attribute) else dotted(function)
    if last in _KEEPS and isinstance(function, ast.Attribute):
        return _activation(function.value, source, scope, before, files, depth + 1)
    if last in ACTIVATIONS and last[0].islower():
        return source, ACTIVATIONS[last], node
    if isinstance(function, ast.Call):  # nn.Softmax(1)(x)
        kind = ACTIVATIONS.get(dotted(function.func).rpartition(".")[2])
        return (source, kind, node) if kind else None
    return _of_model(dotted(function), node, source, scope, before, files, depth)


def _of_model(
    name: str,
    node: ast.Call,
    source: SourceFile,
    scope: Namespace,
    before: tuple[int, int],
    files: Files,
    depth: int,
) -> Activation | None:
    """Return the activation at the end of the module that ``name`` calls."""
    value = source.visible_value(name, scope, before) if name else None
    if value is None and name and "." not in name:  # an argument: what the file calls by that name
        values = [each.value for each in source.named(name) if each.operator is None]
        value = values[0] if len(values) == 1 else None
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _KEEPS:
        value = value.func.value
    if not isinstance(value, ast.Call):
        return None
    kind = dotted(value.func).rpartition(".")[2]
    if kind in ACTIVATIONS:
        return source, ACTIVATIONS[kind], node
    if kind == "Sequential" and value.args and isinstance(value.args[-1], ast.Call):
        last = ACTIVATIONS.get(dotted(value.args[-1].func).rpartition(".")[2])
        return (source, last, value.args[-1]) if last else None
    module = files.class_named(kind)
    forward = module and next(
        (s for s in module[0].scopes if s.parent is module[1] and s.name == "forward"), None
    )
    if not module or not forward or not forward.returns:
        return None
    made = [
        _activation(each.value, module[0], forward, (each.lineno, each.col_offset), files, depth + 1)
        for each in forward.returns
    ]
    first = made[0]
    if first is None or any(each is None or each[1] != first[1] for each in made):
        return None
    return module[0], first[1], first[2]


@hint("trained_tensors", steps=8)
def layers_in_a_list(source: SourceFile, _files: Files) -> Iterator[Remark]:
    """Layers in a plain list, dictionary or tuple of a module, which registers none of them."""
    for each in source.assignments:
        owner = each.place.scope.owner
        if owner is None or not each.target.startswith("self.") or not _is_module(owner):
            continue
        elements: list[ast.expr] = []
        if isinstance(each.value, (ast.List, ast.Tuple)):
            elements = each.value.elts
        elif isinstance(each.value, ast.ListComp):
            elements = [each.value.elt]
        elif isinstance(each.value, ast.Dict):
            elements = each.value.values
        if not elements:
            appended = [
                call for call in source.methods.get("append", ())
                if call.owner == each.target and call.place.scope.owner is owner
            ]  # fmt: skip
            is_empty = isinstance(each.value, (ast.List, ast.Dict))
            elements = [call.node.args[0] for call in appended if call.node.args] if is_empty else []
        if any(map(_makes_parameters, elements)) and not _is_registered(source, each.target, owner):
            name = each.target.removeprefix("self.")
            yield (
                each.node,
                f"`{name}` is a plain list or dictionary, in which no layer is registered",
                "use `nn.ModuleList`, `nn.ModuleDict` or `nn.ParameterList`",
            )


def _is_module(scope: Namespace) -> bool:
    bases = scope.node.bases if isinstance(scope.node, ast.ClassDef) else []
    return any(dotted(base).rpartition(".")[2] in {"Module", "LightningModule"} for base in bases)


def _makes_parameters(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = dotted(node.func)
    if name.rpartition(".")[2] == "Sequential":
        return any(map(_makes_parameters, node.args))
    return name.startswith(("nn.", "torch.nn.")) and bool(_WITH_PARAMETERS.match(name.rpartition(".")[2]))


def _is_registered(source: SourceFile, name: str, owner: Namespace) -> bool:
    """Return whether a list is handed to something in its class, which may register what it holds."""
    for call in source.calls:
        if call.place.scope.owner is not owner:
            continue
        if call.method in {"add_module", "register_module", "register_parameter", "setattr"}:
            return True
        for argument in (*call.node.args, *(word.value for word in call.node.keywords)):
            inner = argument.value if isinstance(argument, ast.Starred) else argument
            if dotted(inner) == name and call.method not in {"len", "zip", "enumerate", "reversed", "range"}:
                return True
    return any(
        each.value is not None and each.target != name and dotted(each.value) == name
        for each in source.assignments
    )


@hint("trained_tensors", steps=8)
def replaced_after_optimizer(source: SourceFile, _files: Files) -> Iterator[Remark]:
    """A layer or model that is replaced after the optimizer was created from it."""
    for created in source.assignments:
        if not isinstance(created.value, ast.Call) or (
            dotted(created.value.func).rpartition(".")[2] not in OPTIMIZERS
        ):
            continue
        first = created.value.args[0] if created.value.args else None
        function = first.func if isinstance(first, ast.Call) else None
        if not isinstance(function, ast.Attribute) or function.attr != "parameters":
            continue
        model = dotted(function.value)
        place = created.place
        again = [
            each.position for each in source.named(created.target)
            if each is not created and each.place.branch == place.branch
        ]  # fmt: skip
        if not model:
            continue
        for each in source.assignments:
            if (
                each.place.scope is place.scope
                and each.place.branch == place.branch
                and each.position > created.position
                and all(position < each.position for position in again)
                and isinstance(each.value, ast.Call)
                and _replaces(each.target, each.value, model)
            ):
                yield (
                    each.node,
                    f"`{each.target}` is replaced after `{created.target}` was created from `{model}`",
                    f"create `{created.target}` after it",
                )


def _replaces(target: str, value: ast.Call, model: str) -> bool:
    """Return whether an assignment gives a model other parameters than it had."""
    kind = dotted(value.func).rpartition(".")[2]
    if target == model:
        return kind in {"deepcopy", "FullyShardedDataParallel", "FSDP"}
    return target.startswith(f"{model}.") and _makes_parameters(value)


@hint("repeated_data", steps=0)
def generator_of_every_worker(source: SourceFile, files: Files) -> Iterator[Remark]:
    """A data set with a generator of its own, which all workers of its loader copy."""
    loaders = [call for each in files.sources for call in each.methods.get("DataLoader", ())]
    if not any(
        workers is not None and getattr(workers, "value", 1) != 0
        and loader.argument("worker_init_fn") is None and not loader.has_unknown_arguments
        for loader in loaders
        for workers in [loader.argument("num_workers", 5)]
    ):  # fmt: skip
        return
    for each in source.assignments:
        owner = each.place.scope.owner
        name = dotted(each.value.func) if isinstance(each.value, ast.Call) else ""
        if (
            owner is not None
            and each.target.startswith("self.")
            and each.place.scope.name == "__init__"
            and name.rpartition(".")[2] in {"default_rng", "RandomState", "Generator", "Random"}
            and any(s.parent is owner and s.name in {"__getitem__", "__iter__"} for s in source.scopes)
            and any(
                call.owner == each.target and call.place.scope.name in {"__getitem__", "__iter__"}
                for call in source.calls
            )
        ):
            yield (
                each.node,
                f"every worker of the loader gets a copy of `{each.target}`, and draws the same numbers",
                "create it in a `worker_init_fn`, or seed it by `torch.initial_seed()` in the worker",
            )


@hint("not_restored", steps=1, needs_run=True)
def keys_that_do_not_match(source: SourceFile, _files: Files) -> Iterator[Remark]:
    """``load_state_dict`` with ``strict=False`` whose result nothing reads."""
    for call in source.methods.get("load_state_dict", ()):
        strict = call.argument("strict", 1)
        if call.is_statement and isinstance(strict, ast.Constant) and strict.value is False:
            yield (
                call.node,
                "`strict=False` ignores keys that do not match, and nothing reads which",
                "print `missing_keys` and `unexpected_keys` of the result",
            )


@hint("repeated_data", needs_run=True)
def training_in_order(source: SourceFile, files: Files) -> Iterator[Remark]:
    """A loader of training data without ``shuffle`` or a sampler."""
    if not any(backwards(each) for each in files.sources):
        return
    for each in source.assignments:
        value = each.value
        if not isinstance(value, ast.Call) or dotted(value.func).rpartition(".")[2] != "DataLoader":
            continue
        words = {word.arg for word in value.keywords}
        dataset = next((w.value for w in value.keywords if w.arg == "dataset"), None) or (
            value.args[0] if value.args else None
        )
        names = f"{each.target} {dotted(dataset)}".lower()
        if (
            "train" in each.target.rpartition(".")[2].lower()
            and not re.search("eval|val|test|iter|stream", names)
            and None not in words
            and not words & {"shuffle", "sampler", "batch_sampler"}
            and len(value.args) < 3
            and not files.mention("IterableDataset")
        ):
            yield (
                value,
                f"`{each.target}` yields the samples in the same order in every epoch",
                "pass `shuffle=True`, or a sampler",
            )
