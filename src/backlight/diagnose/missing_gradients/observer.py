"""Parameters without a gradient, and why: what ``backlight why-no-grad`` observes.

Before each backward the graph behind the loss is walked: a parameter that it does not reach gets no gradient,
and the tape of the forward pass shows where its value was cut. After backward, gradients that did not arrive
although they were reached are explained.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from backlight.capture.hub import HUB
from backlight.capture.optimizers import parameters_of
from backlight.capture.parameters import Candidate, RegistrationLines, candidates, named_roots
from backlight.diagnose.missing_gradients import reasons
from backlight.diagnose.missing_gradients.reasons import (
    Flow,
    Graph,
    MissingCause,
    MissingGradients,
    ParameterState,
    Reason,
    WalkError,
    find_freed,
    find_overwritten,
    nonleaf_grad_reads,
    nonleaf_parameters,
    walk,
)
from backlight.diagnose.missing_gradients.tape import NoneReturned, Tape, record_custom_functions
from backlight.diagnose.script_observer import ScriptObserver
from backlight.user_code import SourceLine, user_line

if TYPE_CHECKING:
    from torch import Tensor


class MissingGradientObserver(ScriptObserver):
    """Observes the first steps of a training run; a context manager around the script.

    ``early`` is called once with the rows that are known before the first backward, and its line.
    """

    def __init__(
        self,
        max_steps: int,
        end: Callable[[], None],
        early: Callable[[list[ParameterState], SourceLine | None], None] = lambda _rows, _line: None,
    ) -> None:
        super().__init__(max_steps, end)
        self._early = early
        self._tape = Tape(self._calls, self.dropped)
        self._registration_lines = RegistrationLines()
        self._handles: list[Any] = []
        self._hooked: dict[int, weakref.ref[Any]] = {}
        self._rows: dict[int, ParameterState] = {}
        self._plain: list[ParameterState] = []
        self._graph: Graph | None = None
        self._nones: list[NoneReturned] = []
        self._changes = -1
        self._roots: list[tuple[str, torch.nn.Module]] = []
        self._candidates: list[Candidate] = []
        self._num_optimizers = 0
        self._versions: list[tuple[Tensor, int]] = []  # of what the optimizer in progress may write
        self._stale: dict[int, list[tuple[int, ...]]] = {}
        self._handled: BaseException | None = None
        self._loss: list[int] = []  # of the backward in progress
        self._earlier: set[int] = set()  # losses of those that ended
        self.answer = MissingGradients()

    def _record(self) -> Iterator[Any]:
        self._handles = self._registration_lines.install(self._patches)
        record_custom_functions(self._patches, self._tape, self._nones.append)
        yield self._tape

    def __exit__(self, *error: object) -> None:
        """Remove everything and complete the answer."""
        self._tape.paused = True
        for handle in self._handles:
            handle.remove()
        super().__exit__(*error)
        self._candidates.clear()
        self._roots.clear()

    # Events

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Walk the graph behind the loss and explain what it does not reach."""
        if self._begins_step():
            self._tape.clear()
        if self._is_over():
            self._end()
            return
        line = user_line()
        self._handled = sys.exception()
        with self._tape.pause():
            self.backwards += 1
            self._loss = [self._tape.number(root) for root in roots]
            self._update()
            try:
                self._graph = walk(roots)
            except WalkError as error:
                self._graph = None
                self.dropped(error)
            else:
                self.answer.nodes = max(self.answer.nodes, len(self._graph))
                self._explain_before(roots, self._graph)
        if self.backwards == 1:
            self._early(self._explained(before=True), line)
        self._nones.clear()
        self._tape.in_backward = True

    def backward_end(self) -> None:
        """Record which gradients arrived, and explain the others."""
        self._tape.in_backward = False
        error = sys.exception()
        with self._tape.pause():
            if error is not None and error is not self._handled and isinstance(error, RuntimeError):
                recorded = [*itertools.chain(*self._tape.earlier), *self._tape.operations]
                parameters = {self._tape.number(candidate.parameter) for candidate in self._candidates}
                self.answer.failure = find_overwritten(str(error), recorded) or find_freed(
                    str(error), recorded, self._loss, self._earlier, parameters
                )
            else:
                self._earlier.update(self._loss)
            self._check_parameters()
            if self._graph is not None and (error is None or error is self._handled):
                self._explain_after(self._graph)
            self._graph = None

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Record gradients that arrived in another way, and the optimizer of each parameter."""
        with self._tape.pause():
            self._update()
            self._check_parameters()
            self._versions = [(p, p._version) for p in parameters_of(optimizer)]
        self._tape.paused = not has_closure  # with a closure the forward pass is inside

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        """The next backward belongs to the next step."""
        self._tape.paused = False
        self._tape.add_update(f"{type(optimizer).__name__}.step", user_line(), self._versions)
        self._versions = []
        self._stepped = self.backwards > 0

    # Rows

    def _update(self) -> None:
        if self._changes != HUB.seen.changes:
            self._changes = HUB.seen.changes
            HUB.seen.refresh()
        if not self._rows:
            HUB.optimizers.scan()
        self._roots = named_roots(HUB.seen)
        self._candidates = candidates(self._roots)
        for candidate in self._candidates:
            row = self._row(candidate)
            row.name, row.root, row.aliases = candidate.name, candidate.root, candidate.aliases
            parameter = candidate.parameter
            hooked = self._hooked.get(id(parameter))
            if (
                parameter.requires_grad
                and parameter.is_leaf
                and (hooked is None or hooked() is not parameter)
            ):
                self._hooked[id(parameter)] = weakref.ref(parameter)
                # Undefined gradients come to the second kind of hook as well, sharded ones only to it.
                tensor: Any = parameter
                seen = functools.partial(self._on_gradient, weakref.ref(parameter))
                self._handles.append(tensor.register_hook(seen))
                self._handles.append(tensor.register_post_accumulate_grad_hook(self._on_accumulated))

    def _row(self, candidate: Candidate) -> ParameterState:
        parameter = candidate.parameter
        row = self._rows.get(id(parameter))
        if row is None or row.reference is None or row.reference() is not parameter:
            row = ParameterState(candidate.name, tuple(parameter.shape), weakref.ref(parameter))
            self._rows[id(parameter)] = row
        return row

    def _on_accumulated(self, parameter: Tensor) -> None:
        row = self._rows.get(id(parameter))
        if row is not None and parameter.grad is not None:
            row.arrived = True

    def _on_gradient(self, weak: weakref.ref[Tensor], grad: Tensor | None) -> None:
        parameter = weak()
        if parameter is not None and grad is not None and id(parameter) in self._rows:
            self._rows[id(parameter)].arrived = True

    def _check_parameters(self) -> None:
        optimizers = HUB.optimizers.alive()
        self._num_optimizers = max(self._num_optimizers, len(optimizers))
        optimizer_of = {
            id(p): n for n, o in enumerate(optimizers) for g in o.param_groups for p in g["params"]
        }
        candidates = {id(c.parameter) for c in self._candidates}
        self._stale = {}
        for number, optimizer in enumerate(optimizers):
            unknown = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in candidates]
            if unknown:
                self._stale[number] = [tuple(p.shape) for p in unknown]
        for candidate in self._candidates:
            row = self._row(candidate)
            parameter = candidate.parameter
            row.arrived |= parameter.grad is not None
            row.in_optimizer |= id(parameter) in optimizer_of
            if not parameter.requires_grad:
                frozen = self._tape.frozen_at.get(id(parameter))
                line = frozen[1] if frozen is not None and frozen[0]() is parameter else None
                row.keep(reasons.frozen(line, optimizer_of.get(id(parameter))), "before backward")
            elif row.arrived and not row.in_optimizer and optimizers:
                row.keep(
                    reasons.not_held(parameter, optimizers, self._stale, self._registration_lines),
                    "at the optimizer",
                )

    # Reasons

    def _explain_before(self, roots: Sequence[Tensor], graph: Graph) -> None:
        self._check_parameters()
        flow = Flow(self._tape.operations)
        loss = flow.behind([self._tape.number(root) for root in roots])
        for candidate in self._candidates:
            parameter, row = candidate.parameter, self._row(candidate)
            if not parameter.requires_grad:
                continue
            if graph.reaches(parameter):
                row.reached = True
                continue
            if row.arrived:
                continue
            use = flow.use(self._tape.number(parameter))
            owner = candidate.owner
            if hasattr(parameter, "_local_tensor"):
                reason = Reason(
                    MissingCause.UNDETERMINED, "sharded: the graph holds another tensor in its place"
                )
            else:
                reason = reasons.before_backward(
                    flow,
                    use,
                    loss,
                    module_ran=owner is not None and self._calls.was_called(owner),
                    unrecorded=owner is not None
                    and (
                        id(owner) in self._calls.in_other_threads or isinstance(owner, torch.jit.ScriptModule)
                    ),
                )
            row.keep(reason, "before backward")
        if self.backwards == 1:
            self._plain = nonleaf_parameters(flow, self._roots, self._tape.number)

    def _explain_after(self, graph: Graph) -> None:
        below: list[tuple[NoneReturned, set[int]]] = []
        index = (
            {number: node for node, number in enumerate(graph.sequence) if number >= 0} if self._nones else {}
        )
        for none in self._nones:
            node = index.get(none.sequence)
            if node is not None and none.edge < len(graph.edges[node]):
                start = graph.edges[node][none.edge]
                below.append((none, graph.below(start) if start >= 0 else set()))
        for candidate in self._candidates:
            row = self._row(candidate)
            leaf = graph.leaves.get(id(candidate.parameter))
            if row.arrived or leaf is None:
                if (
                    not row.arrived
                    and row.reason is not None
                    and row.reason.cause is MissingCause.UNDETERMINED
                ):
                    self._explain_recomputed(row, candidate)
                continue
            returned = next((none for none, nodes in below if leaf in nodes), None)
            if returned is not None:
                reason = reasons.none_returned(returned)
            else:
                text = "reached, but no gradient arrived: backward(inputs=...) or a hook may have kept it"
                reason = Reason(MissingCause.UNDETERMINED, text, None, 1)
            row.keep(reason, "after backward")

    def _explain_recomputed(self, row: ParameterState, candidate: Candidate) -> None:
        flow = Flow([o for o in self._tape.operations if o.in_backward])
        use = flow.use(self._tape.number(candidate.parameter))
        if use.cuts:
            cut = flow.operations[use.cuts[0]]
            text = f"cut inside a re-entrant checkpoint, by {cut.name} during recomputation"
            row.keep(Reason(MissingCause.CUT, text, cut.line, 6), "after backward")

    # The answer

    def _explained(self, *, before: bool = False) -> list[ParameterState]:
        trained = {
            r.root for r in self._rows.values() if r.in_optimizer or r.arrived or (before and r.reached)
        }
        rows = [r for r in self._rows.values() if r.root in trained or not trained]
        rows = [r for r in (*rows, *self._plain) if r.reason is not None]
        if before:
            return [
                r
                for r in rows
                if not r.arrived and r.reason and r.reason.cause is not MissingCause.UNDETERMINED
            ]
        return [r for r in rows if not r.arrived or not (r.in_optimizer or not self._num_optimizers)]

    def _complete(self) -> None:
        answer = self.answer
        answer.steps, answer.backwards = self.steps + self._stepped, self.backwards
        rows = self._explained()
        for row in self._rows.values():
            if (
                row.arrived
                and row.in_optimizer
                and row.reason is not None
                and row.reason.cause is not MissingCause.FROZEN
            ):
                row.reason = None
        answer.rows = [r for r in rows if r.reason is not None]
        answer.watched = sum(row.reference is not None for row in self._rows.values())
        if self._tape.full:
            self.notes.append(
                "the forward pass had too many operations; reasons rest on the first part of it"
            )
        if not self._num_optimizers:
            self.notes.append(
                "no torch optimizer was observed, so it is not known what updates the parameters"
            )
        answer.rows += nonleaf_grad_reads(self._tape.grad_reads.values())
        answer.notes = self.notes
