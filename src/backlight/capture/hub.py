"""The only module that changes torch: installs the hooks once and delivers events to listeners.

Hooks are installed when the first listener arrives and removed when the last one leaves. After a fork the
child is switched off for good: data-loader workers must not see anything of backlight.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from backlight import clock
from backlight.capture import (
    batches,
    call_hooks,
    checkpoint_regions,
    engines,
    graph_capture,
    hooks,
    modules,
    state_hooks,
    transfers,
)
from backlight.capture.engines import install_engines
from backlight.capture.optimizers import SeenOptimizers, hooked_steps
from backlight.capture.training_threads import TrainingThreads, count_modes, outside_modes
from backlight.capture.unrecorded import BOARD_LENGTH, Board, UnrecordedSteps
from backlight.interrupts import is_interrupt
from backlight.records import Phase

if TYPE_CHECKING:
    from backlight.capture.step_summary import ScalarSink


class UserError(BaseException):
    """Carries an exception of the user's code through :meth:`Hub.emit`, back to the user's code."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Listener:
    """Receives the raw events of the process; each method does nothing here.

    An exception removes the listener and never reaches the training script; only a :class:`BaseException`
    that is no :class:`Exception`, such as a requested end of the script, passes through. One that needs the
    events of recorded steps only sets ``every_step`` to False.
    """

    every_step: ClassVar[bool] = True

    uses_modes = False
    """Whether it enters modes of its own for more than a call, as commands do; else the script's are left."""

    @property
    def reads_gradients(self) -> bool:
        """Whether ``optimizer_begin`` reads gradients in this step, which an engine may keep elsewhere."""
        return True

    def unrecorded_begin(self) -> None:
        """No event comes until :meth:`unrecorded_end`, but for new optimizers: no listener needs them."""

    def unrecorded_end(self) -> None:
        """Events are delivered again, from here on."""

    def phase_changed(self, phase: Phase) -> None:
        """The process enters ``phase``; reported by a :class:`backlight.capture.phase_clock.PhaseClock`."""

    def forward_begin(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A root ``module`` is called with arguments by position and by name.

        See :mod:`backlight.capture.forward`.
        """

    def forward_end(self, module: torch.nn.Module, result: Any) -> None:
        """That ``module`` has returned ``result``; None also where it raised."""

    def backward_begin(self, roots: Sequence[torch.Tensor]) -> None:
        """Outermost backward starts from ``roots``; empty where it starts from edges of a graph."""

    def backward_end(self) -> None:
        """Outermost backward is over, also when it raised."""

    def backward_raised(self, error: BaseException) -> None:
        """That backward, or computation of gradients, ends with ``error``; its end is reported after this."""

    def nested_begin(self) -> None:
        """A further backward, or computation of gradients, starts inside the outermost one."""

    def model_freed(self) -> None:
        """A model that a step tracker follows is about to be freed; its parameters still exist."""

    def grad_begin(self, roots: Sequence[torch.Tensor]) -> None:
        """``torch.autograd.grad`` starts from ``roots``, outside any backward."""

    def grad_end(self) -> None:
        """``torch.autograd.grad`` is over, also when it raised."""

    def scaled(self, scaler: Any, loss: torch.Tensor, result: torch.Tensor) -> None:
        """``scaler`` multiplied ``loss`` and returned ``result``."""

    def unscaled(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """The gradients of ``optimizer`` were just divided by the loss scale."""

    def norm_begin(self) -> None:
        """The norm of all gradients is being computed, as clipping by norm does first."""

    def norm_end(self) -> None:
        """That norm is computed; clipping by it is still to come."""

    def clip_nears(self, tensors: Sequence[torch.Tensor]) -> None:
        """Clipping of ``tensors`` follows, whose :meth:`clip_begin` comes when it is done."""

    def clip_begin(
        self, kind: str, tensors: Sequence[torch.Tensor], limit: float, norm: torch.Tensor | None
    ) -> None:
        """Clipping of ``tensors`` (parameters or gradients) starts; ``kind`` is norm, value or refused."""

    def clip_end(self) -> None:
        """Clipping is over."""

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` has just been constructed."""

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """``optimizer.step`` starts; with a closure the gradients are not there yet."""

    def closure_end(self, optimizer: torch.optim.Optimizer) -> None:
        """A closure has been evaluated inside ``optimizer.step``: the gradients are there."""

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer.step`` is over."""

    def replayed(self, work: graph_capture.CapturedWork) -> None:
        """A captured graph with backward passes has been launched again; no hook reports what is in it."""

    def scaler_begin(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """``scaler.step(optimizer)`` starts."""

    def scaler_end(self, scaler: Any, optimizer: torch.optim.Optimizer, *, stepped: bool) -> None:
        """``scaler.step(optimizer)`` is over; ``stepped`` says whether the optimizer was called."""

    def loaded(self, value: Any) -> None:
        """``torch.load`` is about to return ``value``."""

    def state_loaded(self, module: torch.nn.Module, state: Mapping[str, Any], result: Any) -> None:
        """``module.load_state_dict(state)`` has returned ``result``."""

    def averaged(self, average: torch.nn.Module, count: int) -> None:
        """``update_parameters`` of an AveragedModel is about to run, ``count`` times after the first."""

    def copy_begin(self, module: torch.nn.Module) -> None:
        """A copy of a trained model that a check follows is about to be called."""

    def emptied(self, module: torch.nn.Module) -> None:
        """``module.to_empty()`` has returned."""

    def own_state_loaded(self, module: torch.nn.Module) -> None:
        """The state that ``module`` is about to report as loaded holds the module's parameters themselves."""

    def optimizer_loaded(self, optimizer: torch.optim.Optimizer, state: Any, result: Any) -> None:
        """``optimizer.load_state_dict(state)`` has returned."""

    def schedule_made(self, schedule: Any, steps_per_epoch: int | None) -> None:
        """``schedule`` has just been constructed, a OneCycleLR perhaps with its ``steps_per_epoch``."""

    def schedule_end(self, schedule: Any) -> None:
        """``schedule.step()`` is over."""

    def plateau_end(self, schedule: Any, metric: Any) -> None:
        """``step(metric)`` of a ReduceLROnPlateau is over, which has read it: a number or a tensor."""

    def seeded(self, seed: int) -> None:
        """``torch.manual_seed(seed)`` has returned."""

    def random_state_set(self) -> None:
        """``torch.set_rng_state`` has returned, as at the end of ``fork_rng``."""

    def region_begin(self, region: checkpoint_regions.CheckpointedRegion) -> None:
        """The forward of a checkpointed region begins."""

    def region_tensor(self, region: checkpoint_regions.CheckpointedRegion, tensor: torch.Tensor) -> None:
        """A run of a region that has a record saves ``tensor``, or returns it if it is re-entrant."""

    def region_end(self, region: checkpoint_regions.CheckpointedRegion) -> None:
        """The forward of that region is over."""

    def recomputation_begin(self, region: checkpoint_regions.CheckpointedRegion) -> None:
        """A region that has a record is about to run again."""

    def recomputation_end(self, region: checkpoint_regions.CheckpointedRegion) -> None:
        """That run is over, perhaps by an exception."""

    def autocast_begin(self, region: Any) -> None:
        """An outermost ``torch.autocast`` that is enabled has been entered."""

    def autocast_end(self, region: Any) -> None:
        """That region is about to be left."""

    def loss_given(self, function: str, inputs: torch.Tensor) -> None:
        """The function ``cross_entropy_loss`` or ``kl_div`` is called; only where a listener observes it."""

    def targets_too_long(self, needed: int, frames: int, count: int, samples: int) -> None:
        """``count`` of the targets of ``ctc_loss`` need more frames than there are; only where observed."""

    def transferred(self, transfer: transfers.RankTransfer) -> None:
        """A collective or a receive has ended, or a send begins."""

    def batch_begin(self, source: int) -> None:
        """A DataLoader is asked for a batch; ``source`` identifies the data set."""

    def batch(self, index: int, seconds: float) -> None:
        """A DataLoader gave its batch number ``index`` after ``seconds`` of waiting."""

    def batch_given(self, iterator: Any, index: int, batch: Any) -> None:
        """An iterator of a DataLoader is about to hand ``batch`` to the loop."""

    def batch_missing(self) -> None:
        """A DataLoader that was asked had no batch left."""

    def batch_raised(self, error: BaseException) -> None:
        """A DataLoader that was asked raised ``error``."""

    def dropped(self, error: Exception) -> None:
        """The listener raised ``error`` and has been taken off."""


MAX_EPOCHS = 16
"""Begins of epochs that end a stretch of unrecorded steps."""

EVALUATION_STEPS = 64
"""Unrecorded steps after which an evaluation ends them: some loops have one in every step."""


class Hub:
    """Keeps the listeners of this process and what is attached to torch for them.

    ``loader_workers`` is the largest number of workers of a DataLoader that was asked for a batch since the
    hooks were installed; None before the first. ``unrecorded`` counts steps while no event is delivered, on
    ``board``; ``captured`` is what the graph in capture holds so far. ``forward_depth`` is how many calls of
    root modules are open, each in the one before. ``spent`` are the processor seconds
    that all listeners have taken so far; the step in progress counts for ``timed_steps``, with 0 it is not
    timed. ``is_emitting`` is whether a listener is being called.
    """

    def __init__(self) -> None:
        self.listeners: tuple[Listener, ...] = ()
        self._on_error: dict[int, Callable[[Exception], None]] = {}
        self._receivers: dict[str, tuple[tuple[Listener, Callable[..., None]], ...]] = {}
        self.forward_depth = self.backward_depth = self.grad_depth = self.own_passes = 0
        self.in_engine = self._has_engines = self._has_fsdp = False
        self.spent, self.timed_steps = 0.0, 1
        self.is_emitting = False
        self.loader_workers: int | None = None
        self.unrecorded: UnrecordedSteps | None = None
        self.captured: graph_capture.CapturedWork | None = None
        self._uses_modes = self.has_phase_listeners = False
        self.board: Board = [0] * BOARD_LENGTH
        self._epochs = self._since_evaluation = 0
        self.seen = modules.SeenModules()
        self.optimizers = SeenOptimizers()
        self.training = TrainingThreads()
        self._patches = hooks.Patches()
        self._handles: list[Any] = []
        self._pid = os.getpid()

    @property
    def active(self) -> bool:
        """Whether events are wanted of this thread, and this is not a forked child."""
        if self.training.others and self.training.is_elsewhere:
            return False
        return bool(self.listeners) and not self.own_passes and self.unrecorded is None

    def count_steps(
        self,
        optimizer: torch.optim.Optimizer,
        number: int,
        steps: range,
        scalars: ScalarSink,
        ended: Callable[[UnrecordedSteps], None],
    ) -> bool:
        """Deliver no events in ``steps``, then call ``ended``; return whether no listener needs them.

        Whatever is no plain step of that optimizer ends it sooner: a closure, a gradient scaler, another
        optimizer, a new listener.
        """
        is_engine = isinstance(optimizer, engines.EngineOptimizer)
        if self.own_passes or is_engine or any(listener.every_step for listener in self.listeners):
            return False
        self.emit("unrecorded_begin")
        call_hooks.HUB_COUNTING[0] = self
        may_nest = len(hooked_steps(type(optimizer))) > 1
        self.unrecorded = UnrecordedSteps(
            id(optimizer), number, steps.start, len(steps), scalars, self.board, ended, may_nest
        )
        return True

    def resume(self) -> None:
        """Deliver events again, from the training thread."""
        if self.training.is_elsewhere:
            return
        unrecorded, self.unrecorded = self.unrecorded, None
        call_hooks.HUB_COUNTING[0] = None
        if unrecorded is not None:
            try:
                self._since_evaluation += unrecorded.done
                self.emit("unrecorded_end")
            finally:  # an interrupt that a listener passes on may not lose what was counted
                unrecorded.ended(unrecorded)

    def ends_for_epoch(self) -> bool:
        """Resume where an epoch begins, the first times: its batches are compared with those of the last."""
        self._epochs += 1
        if self._epochs <= MAX_EPOCHS:
            self.resume()
        return self.unrecorded is None

    def ends_for_evaluation(self) -> bool:
        """Resume where a forward without gradients begins, after enough steps since the last time."""
        unrecorded = self.unrecorded
        if unrecorded is not None and self._since_evaluation + unrecorded.done >= EVALUATION_STEPS:
            self.resume()
            self._since_evaluation = 0
        return self.unrecorded is None

    def resume_soon(self) -> None:
        """Deliver events again after the step in progress; from any thread."""
        unrecorded = self.unrecorded
        if unrecorded is not None:
            unrecorded.end_soon()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Report nothing meanwhile: passes on behalf of backlight are no part of the training run."""
        self.own_passes += 1
        try:
            yield
        finally:
            self.own_passes -= 1

    def add(self, listener: Listener, on_error: Callable[[Exception], None] | None = None) -> None:
        """Report to ``listener`` from now on; installs the hooks if it is the first.

        ``on_error`` is called instead of :meth:`Listener.dropped` with what the listener raised.
        """
        if listener in self.listeners:
            return
        if not self.listeners:
            self._install()
        self.resume_soon()
        self._set_listeners((*self.listeners, listener))
        if on_error is not None:
            self._on_error[id(listener)] = on_error

    def remove(self, listener: Listener) -> None:
        """Stop reporting to ``listener``; removes the hooks if it was the last."""
        if listener not in self.listeners:
            return
        self._set_listeners(tuple(other for other in self.listeners if other is not listener))
        self._on_error.pop(id(listener), None)
        if not self.listeners:
            self._uninstall()

    def _set_listeners(self, listeners: tuple[Listener, ...]) -> None:
        self.listeners, self._receivers = listeners, {}
        self._uses_modes = any(listener.uses_modes for listener in listeners)
        nothing = Listener.phase_changed
        self.has_phase_listeners = any(type(each).phase_changed is not nothing for each in listeners)

    def reads_gradients(self) -> bool:
        """Return whether a listener reads gradients when the optimizer of this step begins."""
        return any(listener.reads_gradients for listener, _ in self._receivers_of("optimizer_begin"))

    def delivers(self, event: str) -> bool:
        """Return whether a listener gets ``event`` now."""
        receivers = self._receivers.get(event)
        return self.active and bool(self._receivers_of(event) if receivers is None else receivers)

    def _receivers_of(self, event: str) -> tuple[tuple[Listener, Callable[..., None]], ...]:
        # Only those that do something at this event.
        nothing = getattr(Listener, event)
        receivers = self._receivers[event] = tuple(
            (obs, getattr(obs, event)) for obs in self.listeners if getattr(type(obs), event) is not nothing
        )
        return receivers

    def emit(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Call the method ``event`` of every listener; one that raises is removed, and its error reported.

        This is the only guard around listeners, and the only stopwatch: one for all, since a listener that
        has nothing to do is over sooner than the clock is read.
        """
        receivers = self._receivers.get(event)
        if self.own_passes or receivers == () or self.unrecorded is not None:
            return
        if self.training.others and self.training.is_elsewhere:
            return
        if count_modes() and not self._uses_modes:
            with outside_modes():
                self.emit(event, *args, **kwargs)
            return
        if receivers is None:
            receivers = self._receivers_of(event)
        weight = 0 if self.is_emitting else self.timed_steps
        begin = clock.thread_time() if weight else 0.0
        grad_mode, raised = torch.is_grad_enabled(), None
        is_inner, self.is_emitting = self.is_emitting, True
        try:
            for listener, method in receivers:
                try:
                    if self._uses_modes:
                        method(*args, **kwargs)
                    else:
                        with torch._C.DisableTorchFunction():
                            method(*args, **kwargs)
                except Exception as error:  # noqa: BLE001 - never break the user's training
                    if is_interrupt(error):  # the others still get the event
                        raised = error
                    else:
                        self._drop(listener, error)
        except UserError as carried:
            raised = carried.error
        finally:
            self.is_emitting = is_inner
            if torch.is_grad_enabled() is not grad_mode:  # interrupted where a mode is entered or left
                torch._C._set_grad_enabled(grad_mode)
            if weight:
                self.spent += weight * (clock.thread_time() - begin)
        if raised is not None:
            try:
                raise raised  # outside the handler, so that it is as the user's code raised it
            finally:
                del raised  # else it would hold this frame, which holds it

    def _drop(self, listener: Listener, error: Exception) -> None:
        on_error = self._on_error.get(id(listener), listener.dropped)
        self.remove(listener)
        try:
            on_error(error)
        except Exception as second:
            if is_interrupt(second):
                raise
            warnings.warn(
                f"backlight: stopped measuring after {type(error).__name__}: {error} "
                f"(and could not record that: {second}). Your training continues unchanged.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _install(self) -> None:
        self.forward_depth = self.backward_depth = self.grad_depth = 0
        self.loader_workers, self.training = None, TrainingThreads()
        for install in (
            hooks.install_backward,
            hooks.install_clipping,
            hooks.install_grad_scaler,
            hooks.install_dataloader,
            batches.install_sample_indices,
            state_hooks.install_loading,
            state_hooks.install_averages,
            state_hooks.install_modes,
            state_hooks.install_schedules,
            state_hooks.install_random,
            state_hooks.install_autocast,
            checkpoint_regions.install_recomputation,
            transfers.install_transfers,
            graph_capture.install_graph_capture,
        ):
            install(self, self._patches)
        self._has_engines = self._has_fsdp = False
        self.meet_engines()
        self._handles = [*hooks.install_optimizers(self, self._patches), *modules.install(self.seen)]

    def meet_engines(self) -> None:
        """Report steps of DeepSpeed and clipping of FSDP1, where the script has imported it by now."""
        if not self._has_fsdp and hooks.FSDP in sys.modules:
            self._has_fsdp = True
            hooks.install_fsdp_clipping(self, self._patches)
        if not self._has_engines and engines.are_imported():
            self._has_engines = True
            install_engines(self, self._patches)
            for engine in engines.live_engines():
                self.optimizers.use_engine(engine)

    def _uninstall(self) -> None:
        self.unrecorded = call_hooks.HUB_COUNTING[0] = None
        self._patches.undo()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.optimizers.rest()

    def switch_off(self) -> None:
        """Forget every listener without calling any, in a forked child."""
        self._set_listeners(())
        self.unrecorded = call_hooks.HUB_COUNTING[0] = None
        self._on_error.clear()
        self.forward_depth = self.backward_depth = self.grad_depth = 0


HUB = Hub()
"""The hub of this process."""

os.register_at_fork(after_in_child=HUB.switch_off)


class NextEvent(Listener):
    """Calls a function at the next event at which torch iterates over no hooks: it may remove them."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def batch_begin(self, source: int) -> None:
        """Call the function."""
        self._function()

    def backward_begin(self, roots: Sequence[torch.Tensor]) -> None:
        """Call the function."""
        self._function()
