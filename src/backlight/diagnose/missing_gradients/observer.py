"""Which parameter gets no gradient, and why: what ``backlight why-no-grad`` observes.

Before each backward the graph behind the loss is walked: a parameter that it does not reach will
get no gradient, and the tape of the forward pass says where its value was cut. After backward the
gradients that did not arrive although they were reached are told apart.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from backlight.capture.expected_parameters import Candidate, RegistrationLines, candidates, named_roots
from backlight.capture.hooks import Patches
from backlight.capture.hub import HUB, Listener
from backlight.capture.module_calls import ModuleCalls
from backlight.diagnose.missing_gradients import custom_functions, reasons
from backlight.diagnose.missing_gradients.flow import Flow
from backlight.diagnose.missing_gradients.graph import Graph, WalkError, walk
from backlight.diagnose.missing_gradients.inplace_error import find_overwritten
from backlight.diagnose.missing_gradients.nonleaf import nonleaf_grad_reads, nonleaf_parameters
from backlight.diagnose.missing_gradients.parameter_rows import MissingGradients, Row
from backlight.diagnose.missing_gradients.reasons import Cause, Reason
from backlight.diagnose.missing_gradients.tape import Tape
from backlight.user_code import SourceLine, user_line

if TYPE_CHECKING:
    from torch import Tensor


class MissingGradientObserver(Listener):
    """Observes the first steps of a training; a context manager around the script.

    Parameters
    ----------
    steps:
        Optimizer steps to observe.
    end:
        Called when they are over; expected to raise what ends the script.
    early:
        Called once with the rows that are known before the first backward, and the line that
        called it.
    """

    def __init__(
        self,
        steps: int,
        end: Callable[[], None],
        early: Callable[[list[Row], SourceLine | None], None] = lambda _rows, _line: None,
    ) -> None:
        self._steps = steps
        self._end = end
        self._early = early
        self._calls = ModuleCalls()
        self._tape = Tape(self._calls, self.dropped)
        self._registration_lines = RegistrationLines()
        self._patches = Patches()
        self._handles: list[Any] = []
        self._hooked: dict[int, weakref.ref[Any]] = {}
        self._rows: dict[int, Row] = {}
        self._plain: list[Row] = []
        self._graph: Graph | None = None
        self._nones: list[custom_functions.NoneReturned] = []
        self._stepped = False
        self._changes = -1
        self._roots: list[tuple[str, torch.nn.Module]] = []
        self._candidates: list[Candidate] = []
        self._optimizers = 0
        self._stale: dict[int, list[tuple[int, ...]]] = {}
        self._before: BaseException | None = None
        self._exit = contextlib.ExitStack()
        self.answer = MissingGradients()

    # Life

    def __enter__(self) -> MissingGradientObserver:
        """Begin to observe everything that the process trains."""
        HUB.add(self)
        self._handles = self._registration_lines.install(self._patches)
        custom_functions.install(self._patches, self._tape, self._nones.append)
        self._exit.enter_context(self._calls)
        self._exit.enter_context(self._tape)
        return self

    def __exit__(self, *_: object) -> None:
        """Take everything off and complete the answer."""
        self._tape.paused = True
        self._exit.close()
        self._patches.undo()
        for handle in self._handles:
            handle.remove()
        HUB.remove(self)
        self._complete()
        self._candidates.clear()
        self._roots.clear()

    def dropped(self, error: Exception) -> None:
        """Say that observing ended early."""
        note = f"observing stopped after {type(error).__name__}: {error}; what follows is not known"
        if note not in self.answer.notes:
            self.answer.notes.append(note)

    @contextlib.contextmanager
    def _unrecorded(self) -> Iterator[None]:
        before, self._tape.paused = self._tape.paused, True
        try:
            yield
        finally:
            self._tape.paused = before

    # Events

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Walk the graph behind the loss and say what it does not reach."""
        # Where no optimizer can end a step, each backward is one.
        if self._stepped or (self.answer.backwards and not HUB.optimizers.alive()):
            self._stepped = False
            self.answer.steps += 1
            self._tape.clear()
        if self.answer.steps >= self._steps:
            self._end()
            return
        line = user_line()
        self._before = sys.exception()
        with self._unrecorded():
            self.answer.backwards += 1
            self._update()
            try:
                self._graph = walk(roots)
            except WalkError as error:
                self._graph = None
                self.dropped(error)
            else:
                self.answer.nodes = max(self.answer.nodes, len(self._graph))
                self._judge_before(roots, self._graph)
        if self.answer.backwards == 1:
            self._early(self._known(before=True), line)
        self._nones.clear()
        self._tape.in_backward = True

    def backward_end(self) -> None:
        """See which gradients arrived; find out about those that did not."""
        self._tape.in_backward = False
        error = sys.exception()
        with self._unrecorded():
            if error is not None and error is not self._before and isinstance(error, RuntimeError):
                self.answer.failure = find_overwritten(str(error), self._tape.operations)
            self._survey()
            if self._graph is not None and (error is None or error is self._before):
                self._judge_after(self._graph)
            self._graph = None

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Note gradients that came by another way, and who holds which parameter."""
        with self._unrecorded():
            self._update()
            self._survey()
        self._tape.paused = not has_closure  # with a closure the forward pass is inside

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        """The next backward belongs to the next step."""
        self._tape.paused = False
        self._stepped = self.answer.backwards > 0

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
                seen = functools.partial(self._passed, weakref.ref(parameter))
                self._handles.append(tensor.register_hook(seen))
                self._handles.append(tensor.register_post_accumulate_grad_hook(self._arrived))

    def _row(self, candidate: Candidate) -> Row:
        parameter = candidate.parameter
        row = self._rows.get(id(parameter))
        if row is None or row.reference is None or row.reference() is not parameter:
            row = Row(candidate.name, tuple(parameter.shape), weakref.ref(parameter))
            self._rows[id(parameter)] = row
        return row

    def _arrived(self, parameter: Tensor) -> None:
        row = self._rows.get(id(parameter))
        if row is not None and parameter.grad is not None:
            row.arrived = True

    def _passed(self, weak: weakref.ref[Tensor], grad: Tensor | None) -> None:
        parameter = weak()
        if parameter is not None and grad is not None and id(parameter) in self._rows:
            self._rows[id(parameter)].arrived = True

    def _survey(self) -> None:
        optimizers = HUB.optimizers.alive()
        self._optimizers = max(self._optimizers, len(optimizers))
        held = {id(p): n for n, o in enumerate(optimizers) for g in o.param_groups for p in g["params"]}
        own = {id(c.parameter) for c in self._candidates}
        self._stale = {}
        for number, optimizer in enumerate(optimizers):
            strangers = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in own]
            if strangers:
                self._stale[number] = [tuple(p.shape) for p in strangers]
        for candidate in self._candidates:
            row = self._row(candidate)
            parameter = candidate.parameter
            row.arrived |= parameter.grad is not None
            row.held |= id(parameter) in held
            if not parameter.requires_grad:
                frozen = self._tape.frozen_at.get(id(parameter))
                line = frozen[1] if frozen is not None and frozen[0]() is parameter else None
                row.keep(reasons.frozen(line, held.get(id(parameter))), "before backward")
            elif row.arrived and not row.held and optimizers:
                row.keep(
                    reasons.not_held(parameter, optimizers, self._stale, self._registration_lines),
                    "at the optimizer",
                )

    # Reasons

    def _judge_before(self, roots: Sequence[Tensor], graph: Graph) -> None:
        self._survey()
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
                reason = Reason(Cause.UNDETERMINED, "sharded: the graph holds another tensor in its place")
            elif reasons.pending_checkpoint(flow, use):
                # A later step that sees less must not call it unused.
                text = "inside a re-entrant checkpoint: known after recomputation"
                reason = Reason(Cause.UNDETERMINED, text, weight=3)
            else:
                reason = reasons.before_backward(
                    flow,
                    use,
                    loss,
                    module_ran=owner is not None and self._calls.was_called(owner),
                    elsewhere=owner is not None
                    and (id(owner) in self._calls.elsewhere or isinstance(owner, torch.jit.ScriptModule)),
                )
            row.keep(reason, "before backward")
        if self.answer.backwards == 1:
            self._plain = nonleaf_parameters(flow, self._roots, self._tape.number)

    def _judge_after(self, graph: Graph) -> None:
        below: list[tuple[custom_functions.NoneReturned, set[int]]] = []
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
                if not row.arrived and row.reason is not None and row.reason.cause is Cause.UNDETERMINED:
                    self._judge_recomputed(row, candidate)
                continue
            given = next((none for none, nodes in below if leaf in nodes), None)
            if given is not None:
                reason = reasons.none_returned(given.function, given.applied, given.defined)
            else:
                text = "reached, but no gradient arrived: backward(inputs=...) or a hook may have kept it"
                reason = Reason(Cause.UNDETERMINED, text, None, 1)
            row.keep(reason, "after backward")

    def _judge_recomputed(self, row: Row, candidate: Candidate) -> None:
        flow = Flow([o for o in self._tape.operations if o.in_backward])
        use = flow.use(self._tape.number(candidate.parameter))
        if use.cuts:
            cut = flow.operations[use.cuts[0]]
            text = f"cut inside a re-entrant checkpoint, by {cut.name} during recomputation"
            row.keep(Reason(Cause.CUT, text, cut.line, 6), "after backward")

    # The answer

    def _known(self, *, before: bool = False) -> list[Row]:
        trained = {r.root for r in self._rows.values() if r.held or r.arrived or (before and r.reached)}
        rows = [r for r in self._rows.values() if r.root in trained or not trained]
        rows = [r for r in (*rows, *self._plain) if r.reason is not None]
        if before:
            return [
                r for r in rows if not r.arrived and r.reason and r.reason.cause is not Cause.UNDETERMINED
            ]
        return [r for r in rows if not r.arrived or not (r.held or not self._optimizers)]

    def _complete(self) -> None:
        answer = self.answer
        answer.steps += self._stepped
        self._stepped = False
        rows = self._known()
        for row in self._rows.values():
            if row.arrived and row.held and row.reason is not None and row.reason.cause is not Cause.FROZEN:
                row.reason = None
        answer.rows = [r for r in rows if r.reason is not None]
        answer.watched = sum(row.reference is not None for row in self._rows.values())
        if self._tape.full:
            answer.notes.append(
                "the forward pass had too many operations; reasons rest on the first part of it"
            )
        if not self._optimizers:
            answer.notes.append("no torch optimizer was seen, so who updates the parameters is not known")
        answer.rows += nonleaf_grad_reads(self._tape.grad_reads.values())
