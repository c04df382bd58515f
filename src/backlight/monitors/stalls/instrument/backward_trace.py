"""Trace of backward: a line for each gradient that arrives, each module that backward enters, each bucket.

Nothing waits and nothing is computed: hooks on parameters and on the node behind a module's output read
names and a clock. They return gradients unchanged, and in-place edits of outputs keep working, unlike
under full backward hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_hook

from backlight import clock
from backlight.capture.batches import tensors_in
from backlight.capture.calls import module_names
from backlight.capture.hub import HUB, Listener
from backlight.capture.parameters import candidates, named_roots
from backlight.interrupts import is_interrupt
from backlight.monitors.stalls.instrument.ddp_buckets import Assignment, assignment, wrappers

if TYPE_CHECKING:
    from torch import Tensor, nn

MAX_MODULE_CALLS = 5_000
"""Module calls that are traced between two backward passes: each keeps a Python object in the graph."""

Emit = Callable[[str, dict[str, Any]], None]
"""Receives ``(text, payload)`` of one line."""


class Tracer(Listener):
    """Traces every backward of the process; ``emit`` receives each line at the moment it happens."""

    def __init__(self, kinds: Sequence[str], emit: Emit) -> None:
        self._kinds = frozenset(kinds)
        self._emit = emit
        self._handles: list[Any] = []
        self._hooked: dict[int, weakref.ref[Any]] = {}
        self._names: dict[int, str] = {}
        self._modules: dict[int, str] = {}
        self._changes = -1
        self._num_calls = 0
        self._begin = 0.0
        self._arrived = 0
        self._expected = 0
        self._missing: dict[tuple[int, int], set[int]] = {}
        self._bucket_of: dict[int, tuple[int, int]] = {}
        self._assignments: list[Assignment] = []
        self._reported: dict[int, Assignment] = {}
        self._inside = False

    def start(self) -> None:
        """Attach the hooks."""
        HUB.seen.scan()
        if "modules" in self._kinds:
            _TRACERS.append(weakref.ref(self))
            self._handles.append(register_module_forward_hook(_on_forward))
        HUB.add(self)

    def stop(self) -> None:
        """Remove the hooks."""
        HUB.remove(self)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        _TRACERS[:] = [reference for reference in _TRACERS if reference() not in {None, self}]

    # Events

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Hook new parameters, and trace the begin of backward."""
        self._arrived = 0
        self._num_calls = 0
        self._start_pass("backward begins", "begin")
        if "buckets" in self._kinds:
            self._buckets()
        self._inside = True

    def backward_end(self) -> None:
        """Trace the end of backward with the number of gradients."""
        if not self._inside:
            return
        self._inside = False
        reduced = any(a.reduced and a.buckets for a in self._assignments)
        text = f"backward ends: {self._arrived} gradients arrived"
        if "gradients" not in self._kinds and not self._bucket_of:
            text = "backward ends"
        self._line(text + ("; every bucket is reduced" if reduced else ""), "end")

    def grad_begin(self, roots: Sequence[Tensor]) -> None:
        """Trace the begin of ``torch.autograd.grad``, in which parameters get no gradient."""
        self._start_pass("torch.autograd.grad begins", "grad_begin")
        self._inside = True

    def grad_end(self) -> None:
        """Trace the end of ``torch.autograd.grad``."""
        if self._inside:
            self._inside = False
            self._line("torch.autograd.grad ends", "grad_end")

    def _start_pass(self, text: str, what: str) -> None:
        if self._changes != HUB.seen.changes:
            self._changes = HUB.seen.changes
            self._attach()
        self._begin = clock.perf_counter()
        self._line(text, what)

    def _line(self, text: str, what: str, **payload: Any) -> None:
        seconds = clock.perf_counter() - self._begin
        self._emit(f"+{seconds * 1e3:.1f} ms {text}", {"what": what, "seconds": seconds, **payload})

    # Gradients

    def _attach(self) -> None:
        HUB.seen.refresh()
        roots = named_roots(HUB.seen)
        self._modules = module_names(roots)
        self._names = {}
        for candidate in candidates(roots):
            parameter = candidate.parameter
            if not (parameter.requires_grad and parameter.is_leaf):
                continue
            self._names[id(parameter)] = candidate.name
            hooked = self._hooked.get(id(parameter))
            if hooked is None or hooked() is not parameter:
                self._hooked[id(parameter)] = weakref.ref(parameter)
                tensor: Any = parameter
                self._handles.append(tensor.register_post_accumulate_grad_hook(self._arrive))
        self._expected = len(self._names)

    def _arrive(self, parameter: Tensor) -> None:
        try:
            self._arrived += 1
            name = self._names.get(id(parameter), "")
            if "gradients" in self._kinds:
                shape = "x".join(map(str, parameter.shape)) or "scalar"
                count = f"{self._arrived}/{self._expected}"
                self._line(f"gradient {count} {name} [{shape}]", "gradient", name=name, number=self._arrived)
            if self._bucket_of:
                self._fill(id(parameter))
        except Exception as error:
            if is_interrupt(error):
                raise
            HUB.remove(self)
            self._kinds = frozenset()
            self._bucket_of = {}
            self._emit(f"tracing ended after {type(error).__name__}: {error}", {"what": "error"})

    # Modules

    def trace_module(self, module: nn.Module, output: Any) -> None:
        """Trace when backward enters the output of ``module``."""
        if self._num_calls >= MAX_MODULE_CALLS or not torch.is_grad_enabled():
            return
        first = next((t for t in tensors_in(output) if t.requires_grad), None)
        if first is None or first.grad_fn is None:
            return
        self._num_calls += 1
        reference, kind = weakref.ref(module), type(module).__name__
        if self._num_calls == MAX_MODULE_CALLS:
            self._emit(
                f"more than {MAX_MODULE_CALLS} module calls: the rest is not traced", {"what": "limit"}
            )

        def before(_grads: Any) -> None:
            if not self._inside:
                return  # a backward whose begin was not captured
            owner = reference()
            name = self._modules.get(id(owner), "") if owner is not None else ""
            self._line(f"module {name or '(no name)'} ({kind})", "module", name=name, type=kind)

        first.grad_fn.register_prehook(before)

    # Buckets

    def _buckets(self) -> None:
        self._bucket_of, self._missing = {}, {}
        alive = {id(m): m for root in HUB.seen.roots() for m in root.modules()}
        self._assignments = []
        for model in wrappers(alive.values()):
            assigned = assignment(model)
            self._assignments.append(assigned)
            number = len(self._assignments) - 1
            if self._reported.get(id(model)) != assigned:
                self._reported[id(model)] = assigned
                note = f" ({assigned.note})" if assigned.note else ""
                self._line(
                    f"{assigned.model}: {len(assigned.buckets)} buckets{note}", "assignment",
                    model=assigned.model, buckets=[list(b) for b in assigned.buckets], note=assigned.note,
                )  # fmt: skip
            for bucket, ids in enumerate(assigned.ids):
                self._missing[number, bucket] = set(ids)
                for key in ids:
                    self._bucket_of[key] = (number, bucket)

    def _fill(self, key: int) -> None:
        found_in = self._bucket_of.get(key)
        if found_in is None:
            return
        number, bucket = found_in
        missing = self._missing[number, bucket]
        missing.discard(key)
        if missing:
            return
        assigned = self._assignments[number]
        names = assigned.buckets[bucket]
        span = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        count = f"{bucket + 1}/{len(assigned.buckets)}"
        then = "its all-reduce starts" if assigned.reduced else "not reduced (no_sync)"
        noun = "gradient" if len(names) == 1 else "gradients"
        self._line(
            f"bucket {count} has its {len(names)} {noun} ({span}); {then}",
            "bucket", bucket=bucket, model=assigned.model, parameters=list(names), reduced=assigned.reduced,
        )  # fmt: skip


_TRACERS: list[weakref.ref[Tracer]] = []


def _on_forward(module: nn.Module, _args: Any, output: Any) -> None:
    # A module-level function, so that compiled code traces a plain return.
    if torch.compiler.is_compiling():
        return
    for reference in _TRACERS:
        tracer = reference()
        if tracer is not None and HUB.active:
            tracer.trace_module(module, output)
