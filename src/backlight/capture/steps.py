"""From raw events to steps: which gradients to collect, when, and where one step ends.

A step is the first optimizer step after a backward: two optimizers on one backward are one step. Gradients
are collected at the first of the end of unscaling, the entry into clipping and the entry into the
optimizer's step, because after any of them they are no longer what backward gave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from backlight.capture.hooks import scale_of
from backlight.capture.hub import HUB
from backlight.capture.left_gradients import FreedModels
from backlight.capture.loss_graph import addends, is_divided
from backlight.capture.optimizers import OpenSteps, ReachedOptimizers, UpdatesByHand, leaves_below
from backlight.capture.parameters import settled
from backlight.capture.phase_clock import PhaseEvents
from backlight.capture.step_summary import ScalarSink, StepSummary
from backlight.capture.training_stop import StopTraining
from backlight.capture.unrecorded import COUNTED_STEP_S, FORWARDS, PLAIN_STEPS, UnrecordedSteps
from backlight.devices import is_capturing_graph
from backlight.records import Phase

if TYPE_CHECKING:
    from backlight.capture.graph_capture import CapturedWork
    from backlight.capture.parameters import Scope


class StepTracker(PhaseEvents):
    """Follows the events of the optimizers in ``scope``, and moves the phase clock.

    A subclass decides which steps are recorded, and overrides what is called in those; here that does
    nothing. ``scalars`` takes the scalars of every step. ``per_backward`` also reports the end of every
    single backward (accumulation). The script is ended by :class:`StopTraining` when a step after
    ``max_steps`` begins. ``backwards`` counts backward passes, and ``failed_backwards`` those that an
    exception ended.
    """

    every_step = False

    def __init__(
        self,
        scope: Scope,
        scalars: ScalarSink | None = None,
        *,
        per_backward: bool = False,
        max_steps: int | None = None,
    ) -> None:
        super().__init__()
        self._scope = scope
        self._scalars = ScalarSink() if scalars is None else scalars
        self._per_backward = per_backward
        self._max_steps = max_steps
        self._index = -1
        self._recording = self._refreshed = self._scaling = False
        self._summary = StepSummary(-1)
        self._stepped: set[int] = set()
        self._collected: set[int] = set()
        self._inside = OpenSteps()
        self._optimizer_began = 0.0
        self._versions: dict[int, int] = {}
        self._reached, self._is_alone = ReachedOptimizers(scope), True
        self._unscaled_loss: tuple[int, torch.Tensor] | None = None
        self._before_steps: Callable[[], None] | None = None
        self._made: set[int] = set()
        self._is_by_hand, self._by_hand = False, UpdatesByHand()
        self._is_plain, self._plain_steps, self._clips, self._has_set = False, 0, 0, False
        self._is_whole = self._was_whole = True
        self._counted: UnrecordedSteps | None = None
        self._models = FreedModels(scope)
        self.backwards = self.failed_backwards = 0

    @property
    def reads_gradients(self) -> bool:
        """Whether the open step is recorded."""
        return self._recording

    @property
    def index(self) -> int:
        """Number of the step in progress, from 0."""
        return self._index + (self._counted.done if self._counted is not None else 0)

    @property
    def done(self) -> int:
        """Number of steps that have had an optimizer step."""
        return self.index + bool(self._stepped)

    @property
    def in_step(self) -> bool:
        """Whether the open step has had a backward or an optimizer step."""
        return bool(self._summary.backwards or self._stepped or self._inside.begun or HUB.backward_depth)

    def start(self) -> None:
        """Listen to the hub, and open step 0."""
        HUB.add(self)
        if self._index < 0:
            self._index = 0
            self._open()

    def finish(self) -> None:
        """Close a step whose optimizer has run, record what the last step has left, and listen no more."""
        if self._counted is not None:
            HUB.resume()
        self._note_update_by_hand()
        if self._stepped:
            self._close()
        self._measure_left()
        self._models.forget()
        HUB.remove(self)

    def _measure_left(self) -> None:
        parameters = self._scope.table.tensors()
        # Of a model that is gone, nothing is left; of several models, a part would count as the whole.
        is_whole = self._was_whole and len(parameters) == len(self._scope.table)
        self.run_ends(self._index - 1, parameters, has_begun=self.in_step, is_whole=is_whole)

    def model_freed(self) -> None:
        """Measure what the last step has left in it, before it is gone."""
        if not is_capturing_graph() and self._models.is_due(self._index):
            self._measure_left()

    def check_limit(self) -> None:
        """Raise :class:`StopTraining` once ``max_steps`` are done."""
        if self._max_steps is not None and self.done >= self._max_steps:
            raise StopTraining(0)

    def mark_step(self) -> None:
        """End the step of an update that no optimizer of torch made; collect the gradients that are left."""
        if self._counted is not None:
            HUB.resume()
        self._skip_capture()
        self._is_plain = self._is_whole = False
        if self._recording:
            if not self._refreshed:
                self._refresh()
            self._collect(self._scope.table.tensors(), None)
        self._stepped.add(0)
        self._close()

    def call_before_steps(self, action: Callable[[], None]) -> None:
        """Call ``action`` before the first backward of each step from here on."""
        self._before_steps = action
        HUB.resume_soon()

    def _call_before_step(self) -> None:
        action = self._before_steps
        if action is None or self._inside.begun or (self._summary.backwards and not self._stepped):
            return
        self._before_steps = None  # it may have backward passes of its own
        action()
        self._before_steps = action

    def _open(self) -> None:
        self._stepped.clear()
        self._collected.clear()
        self._versions.clear()
        self._made.clear()
        self._refreshed, self._is_plain, self._is_whole = False, True, True
        self._clips, self._has_set = 0, False
        self._summary = StepSummary(self._index)
        self._recording = self.step_opens(self._index) and not is_capturing_graph()

    def _skip_capture(self) -> None:
        """Record nothing of a step in a graph under capture, which an event or a copy would end."""
        if self._counted is not None:  # an interrupt came in between
            self._resumed(self._counted)
        self._recording = self._recording and not is_capturing_graph()

    def _close_complete(self) -> None:
        """Close the step if it has had its update, or has failed to take it; not within that update."""
        if self._inside.begun and self._inside.drop_raised():
            self._stepped.add(0)
        if self._stepped and not self._inside.begun:
            self._close()

    def _close(self) -> float:
        summary = self._summary
        summary.separated = self._clock.separated
        summary.backwards_seen = self.backwards
        summary.phases, summary.seconds = self._clock.take()
        if self._recording:
            self.step_closes(summary)
        else:
            self._scalars.close(self._index)
        self._was_whole = self._is_whole and self._is_alone
        is_plain = self._is_plain and self._summary.backwards > 0 and len(self._stepped) == 1
        self._plain_steps = self._plain_steps + 1 if is_plain else 0
        self._index += 1
        try:
            self._open()
        except BaseException:  # an interrupt, that may have come before anything was done
            self._open()
            raise
        return summary.seconds

    def _count(self, optimizer: torch.optim.Optimizer, seconds: float) -> None:
        """Observe nothing of the open step and those after it, up to the next that is needed."""
        if self._recording or seconds > COUNTED_STEP_S or self._plain_steps < PLAIN_STEPS:
            return
        until = self.next_step(self._index)
        if self._max_steps is not None:
            until = min(until, self._max_steps)
        if until <= self._index + 1:
            return
        number, steps = self._scope.number(optimizer), range(self._index, until)
        if HUB.count_steps(optimizer, number, steps, self._scalars, self._resumed):
            self._counted = HUB.unrecorded

    def _resumed(self, counted: UnrecordedSteps) -> None:
        self._counted, self._index = None, self._index + counted.done
        self.backwards += counted.backwards
        try:
            self._clock.restart()
        finally:  # an interrupt may not lose a step
            if counted.done:
                self._was_whole = True
                self._open()
        if counted.done < counted.steps:  # something else came than plain steps
            self._plain_steps = 0
            if counted.done:  # a part of the open step was only counted
                self._summary.forwards = self._summary.addends = None
        self._summary.backwards += counted.open_backwards

    def _note_update_by_hand(self) -> None:
        """Count the step as taken where the script has changed the weights itself."""
        if self._summary.backwards and not self._stepped and self._by_hand.is_made():
            self._stepped.add(0)
            self._by_hand.forget()
            self._is_plain = self._is_whole = False

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Note one that is made after the backward of this step: others may follow in the same step."""
        if self._summary.backwards:
            self._made.add(id(optimizer))

    def batch_begin(self, source: int) -> None:
        """Close a step that is complete: the next one begins with data."""
        self._close_complete()
        self._clock.enter(Phase.DATA)

    def batch(self, index: int, seconds: float) -> None:
        """Note which batch came."""
        self._clock.leave(Phase.DATA)
        self._summary.batch = index

    def forward_begin(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Close a step that is complete, and account for the forward; without gradients it is evaluation."""
        if Phase.BACKWARD in self._clock.open:
            return  # a checkpointed model is computed again: that is a part of backward
        if self._stepped or self._inside.begun or self._is_by_hand or self._counted is not None:
            self._skip_capture()
            if torch.is_grad_enabled():
                if self._is_by_hand:
                    self._note_update_by_hand()
                self._close_complete()
        phase = Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATION
        if phase not in self._clock.open:
            HUB.board[FORWARDS] += 1
            if phase is Phase.FORWARD and self._summary.forwards is not None:
                self._summary.forwards += 1
        self._clock.enter(phase)

    def scaled(self, scaler: Any, loss: torch.Tensor, result: torch.Tensor) -> None:
        """Remember the loss before scaling, to record that instead of the root of backward."""
        self._is_plain = self._is_whole = False
        self._unscaled_loss = (id(result), loss.detach())

    def backward_begin(self, roots: Sequence[torch.Tensor]) -> None:
        """Open a new step if the last one is complete, and note the loss."""
        self._skip_capture()
        if self._before_steps is not None:
            self._call_before_step()
        self.check_limit()
        if self._is_by_hand:
            self._note_update_by_hand()
        self._close_complete()
        if self._recording:
            self._is_by_hand = not self._scope.numbers and not self._scope.optimizers()
            if self._is_by_hand:
                self._scope.train_by_hand(leaves_below(roots))
            # Whose losses these are is asked below; parameters may still change until the pass is over.
            self._refresh()
            self._refreshed = False
        self._clock.enter(Phase.BACKWARD)
        scaled, self._unscaled_loss = self._unscaled_loss, None
        is_scaled = scaled is not None and len(roots) == 1 and scaled[0] == id(roots[0])
        # A closure that is evaluated again, or after a backward that was whole, is for other weights.
        is_again = bool(self._inside.begun and self._summary.backwards) and not HUB.optimizers.goes_on
        self._is_whole = self._is_whole and not is_again
        losses = () if is_again else (scaled[1],) if scaled is not None and is_scaled else roots
        self._scalars.add_losses(losses)
        self._is_alone = self._scope.alone()
        if not self._is_alone:
            self._reached.begin()
        if self._recording and losses and self._summary.backwards:
            self._summary.undivided += not is_divided(roots[0].grad_fn, is_scaled=is_scaled)
        if self._recording and roots and roots[0].numel() == 1:
            more, so_far = addends(roots[0].grad_fn), self._summary.addends
            self._summary.addends = None if more is None or so_far is None else so_far + more

    def backward_raised(self, error: BaseException) -> None:
        """Forget the loss of a backward that failed."""
        if Phase.BACKWARD in self._clock.open:  # and not in a computation of gradients on its own
            self._scalars.drop_losses()
            self.failed_backwards += 1

    def backward_end(self) -> None:
        """Count the backward; remember versions, by which a change by hand is detected later."""
        self._clock.leave(Phase.BACKWARD)
        self._summary.backwards += 1
        self.backwards += 1
        if self._is_by_hand and self._summary.backwards > 1:
            self._recording = False  # the gradients of the first one are not those of the step
        if not self._is_alone:
            self._scalars.reached(self._reached.end())
        if not self._recording:
            if self._is_by_hand:
                self._by_hand.note(self._scope.table.tensors())
            self._scalars.after_backward()
            return
        if not self._refreshed:
            self._refresh()
        parameters = self._scope.table.tensors()
        # With several optimizers a backward may reach only the parameters of another one.
        self._scalars.after_backward(parameters if self._is_alone else ())
        self._versions = {id(p): p.grad._version for p in parameters if p.grad is not None}
        if self._is_by_hand:  # the script may clear them before it updates the weights, or after
            self._by_hand.note(parameters)
            self._collect(parameters, None)
        if self._per_backward:
            self.backward_ended(parameters, self._summary.backwards - 1)

    def unscaled(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Collect: the gradients have their true size now, and nothing else has touched them."""
        if self._recording and self._scope.holds(optimizer):
            if not self._refreshed:
                self._refresh()
            self._note_scale(scaler)
            self._collect(self._scope.parameters_of(optimizer), None)

    def replayed(self, work: CapturedWork) -> None:
        """Count the backward passes and the steps of a graph of kernels; what it computed is not observed."""
        self._close_complete()
        self._is_plain = self._is_whole = False
        self._scalars.add_losses(work.losses)
        self._scalars.after_backward()
        self._summary.backwards += work.backwards
        self.backwards += work.backwards
        if not (stepped := [optimizer for optimizer in work.optimizers if self._scope.holds(optimizer)]):
            return
        for optimizer in stepped:
            self._scalars.add_rates(self._scope.number(optimizer), optimizer.param_groups)
        self._recording = False
        self.step_replayed(self._index)
        self._close()

    def grad_end(self) -> None:
        """Note gradients that the script may set itself."""
        self._has_set = True

    def clip_nears(self, tensors: Sequence[torch.Tensor]) -> None:
        """Collect, before the gradients change."""
        self._collect_clipped(tensors)

    def clip_begin(
        self, kind: str, tensors: Sequence[torch.Tensor], limit: float, norm: torch.Tensor | None
    ) -> None:
        """Collect before clipping; ``tensors`` are parameters or their gradients."""
        self._clock.enter(Phase.CLIP)
        self._scalars.add_norm(norm)
        number, self._clips = self._clips, self._clips + 1
        if not (parameters := self._collect_clipped(tensors)):
            return
        if kind == "norm" and norm is not None and settled(norm) is None:
            # The norm of sharded gradients is a part of it here; the reader knows that of all of them.
            clipped = {id(p) for p in parameters}
            if all(id(p) in clipped for p in self._scope.table.tensors() if p.grad is not None):
                kind = "total"
        self._summary.clips.append((number, kind, limit))

    def _collect_clipped(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Collect ``tensors``, parameters or gradients, unless before backward; return the parameters."""
        if not (self._recording and (self._summary.backwards or self._has_set)):
            return []
        if not self._refreshed:
            self._refresh()
        rows = self._scope.table.rows_of(tensors)
        parameters = [t for t, row in zip(tensors, rows, strict=True) if row is not None]
        if not parameters:
            # Gradients, or parameters of an optimizer that has not stepped since watching began.
            HUB.optimizers.use_holders(tensors)
            self._scope.refresh()
            wanted = {id(t) for t in tensors}
            parameters = [p for p in self._scope.table.tensors() if id(p) in wanted or id(p.grad) in wanted]
        if parameters:
            self._collect(parameters, None)
        return parameters

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Collect what is left of this optimizer's gradients, and note its learning rates."""
        self._skip_capture()
        self._is_by_hand = False
        if not self.in_step:  # no backward did it before
            self._call_before_step()
            self.check_limit()
        is_watched = self._scope.holds(optimizer)
        self._is_plain = self._is_plain and is_watched and not has_closure
        if is_watched:
            if self._inside.begun:
                self._inside.drop_raised()  # and is tried again
            if id(optimizer) in self._stepped and not HUB.backward_depth:
                self._close()  # no captured backward in between: gradients by autograd.grad, for instance
            self._inside.begin(optimizer)
        self._clock.enter(Phase.OPTIMIZER)
        if len(self._inside.begun) == 1:
            self._optimizer_began = self._clock.seconds(Phase.OPTIMIZER)
        number = self._scope.number(optimizer)
        if is_watched:
            self._scalars.add_rates(number, optimizer.param_groups)
        if not (is_watched and self._recording):
            return
        if not self._refreshed:
            self._refresh()
        self._summary.optimizers.append(number)
        parameters = self._scope.parameters_of(optimizer)
        whole = self._summary.backwards and not HUB.optimizers.goes_on
        if not has_closure or whole:  # else they come with the first evaluation
            self._collect([*parameters, *self._scope.orphans()], self._scale_inside(optimizer), at_step=True)
        self.update_begins(parameters)

    def closure_end(self, optimizer: torch.optim.Optimizer) -> None:
        """Collect after the first evaluation of a closure."""
        if self._recording and self._scope.holds(optimizer):
            parameters = self._scope.parameters_of(optimizer)
            self._collect([*parameters, *self._scope.orphans()], None)

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        """Measure the update that was taken."""
        self._clock.leave(Phase.OPTIMIZER)
        if not self._scope.holds(optimizer):
            return
        if self._inside.end(optimizer) and self._recording and not self._inside.begun:
            number, spent = self._scope.number(optimizer), self._summary.optimizer_seconds
            since = self._clock.seconds(Phase.OPTIMIZER) - self._optimizer_began
            spent[number] = spent.get(number, 0.0) + since
        self._stepped.add(id(optimizer))
        if self._recording:
            self.update_ends()
        is_last = self._scope.alone() and id(optimizer) not in self._made
        if is_last and not self._scaling and not HUB.backward_depth:
            self._count(optimizer, self._close())

    def scaler_begin(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Remember whose scale is in use."""
        self._is_plain = self._is_whole = False
        if self._scope.holds(optimizer):
            self._scaling = True
            if self._recording:
                self._note_scale(scaler)

    def scaler_end(self, scaler: Any, optimizer: torch.optim.Optimizer, *, stepped: bool) -> None:
        """A step that the scaler skipped is a step, recorded as skipped."""
        if not self._scope.holds(optimizer):
            return
        if not stepped:
            self._stepped.add(id(optimizer))
            self._summary.skipped = True
        elif self._summary.skipped is None:
            self._summary.skipped = False
        self._scaling = False
        if self._scope.alone():
            self._close()

    # Collecting

    def _refresh(self) -> None:
        self._refreshed = True
        if self._scope.refresh():
            self.parameters_changed()

    def _note_scale(self, scaler: Any) -> None:
        scale = scale_of(scaler)
        if self._summary.scale is None and scale is not None:
            # update() changes the scale in place before it is read.
            self._summary.scale = scale.detach().clone()

    def _scale_inside(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | float | None:
        flag = getattr(optimizer, "found_inf", None)
        if isinstance(flag, torch.Tensor):
            self._summary.skipped = flag.detach()
        scale = getattr(optimizer, "grad_scale", None)
        return scale.detach() if isinstance(scale, torch.Tensor) else scale

    def _collect(
        self,
        parameters: Sequence[torch.Tensor],
        scale: torch.Tensor | float | None,
        *,
        at_step: bool = False,
    ) -> None:
        if not (fresh := [p for p in parameters if id(p) not in self._collected]):
            return
        self._collected.update(map(id, fresh))
        compares = at_step and scale is None and bool(self._versions)
        missing = []
        for parameter in fresh:
            if (gradient := parameter.grad) is None:
                missing.append(parameter)
            elif compares and self._versions.get(id(parameter), gradient._version) != gradient._version:
                self._summary.changed_by_hand += 1
        if missing:
            table = self._scope.table
            records = [table.records[row] for row in table.rows_of(missing) if row is not None]
            self._summary.without_gradient += records
        self.collect(fresh, scale)

    # For a subclass

    def step_opens(self, index: int) -> bool:
        """Return whether this step is to be recorded."""
        return False

    def next_step(self, index: int) -> int:
        """Return the first step after ``index``, which is not recorded, that has to be observed."""
        return index + 1

    def collect(self, parameters: Sequence[torch.Tensor], scale: torch.Tensor | float | None) -> None:
        """Measure the gradients of ``parameters`` now; they are unchanged since backward."""

    def update_begins(self, parameters: Sequence[torch.Tensor]) -> None:
        """Parameters are about to be updated."""

    def update_ends(self) -> None:
        """Parameters have been updated."""

    def backward_ended(self, parameters: Sequence[torch.Tensor], index: int) -> None:
        """Backward number ``index`` of the step is over; only with ``per_backward``."""

    def step_closes(self, summary: StepSummary) -> None:
        """Receive the summary of a recorded step."""

    def step_replayed(self, index: int) -> None:
        """A step ran in a replayed graph: only its losses and learning rates are known."""

    def run_ends(
        self, step: int, parameters: Sequence[torch.Tensor], *, has_begun: bool, is_whole: bool
    ) -> None:
        """No step follows ``step``, of which the gradients may be left.

        ``has_begun`` is whether the one after it has begun, ``is_whole`` whether nothing but clipping and the
        optimizer can have changed the gradients since their backward pass.
        """

    def parameters_changed(self) -> None:
        """The parameter table of the scope is a new one."""
