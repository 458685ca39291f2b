"""The watch of a training by any trainer or loop: which hooks it has, and what it does with what they see."""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normlab.base.files import write_json_atomic
from normlab.base.io import validated
from normlab.diagnosis import Probe, Record, Structure
from normlab.diagnosis.probes import Emit
from normlab.errors import UserError
from normlab.private_torch import runs_compiled
from normlab.trace.tensors import unwrap
from normlab.watching import NOTES
from normlab.watching.checks import Checks, WatchReports
from normlab.watching.losses import Losses
from normlab.watching.meter import OptimizerSteps, joined
from normlab.watching.observation import Observation
from normlab.watching.record_file import RecordFile
from normlab.watching.recorder import Recorder
from normlab.watching.sinks import Sink, sink_of

OUT: Final = "watch"
FETCH: Final = 16
"""How many steps are fetched from the device in one transfer and then looked at."""


class WatchWarning(UserWarning):
    """Something about a training that is watched; the training goes on."""


@validated
class Watch:
    """Watches a training: one step in ``every_steps`` is observed, and every step goes to a flight recorder.
    In its first steps the loop is checked, and a copy of the model by some properties of ``check``.

    ``out`` is a folder for ``watch.jsonl`` and the page ``watch.html``, or a path that ends in ``.jsonl``,
    which gets its page next to it. ``emit`` takes the records instead of the file. After construction nothing
    here raises: a failure becomes one warning, and the training continues.
    Raises UserError for a preset or a sink that does not exist and for steps below 1.
    """

    def __init__(
        self,
        probes: str | Sequence[Probe] = "standard",
        *,
        out: str | Path = OUT,
        every_steps: int = 50,
        emit: Emit | None = None,
        structure: Structure | None = None,
        sinks: Sequence[Any] = (),
    ) -> None:
        if every_steps < 1:
            raise UserError(f"every_steps is {every_steps}, and must be 1 or more, as in every_steps=50")
        path = Path(out)
        self._every, self._emit = every_steps, emit
        self._rows = RecordFile(path if path.suffix == ".jsonl" else path / "watch.jsonl")
        self._sinks: list[Sink] = [sink_of(sink, path.with_suffix("")) for sink in sinks]
        self._observation = Observation(probes, structure, self._record, self._note)
        self._reports = WatchReports(self._warn)
        self._recorder = Recorder(self._reports)
        self._checks = Checks(self._reports, self)
        self._failed: set[str] = set()
        """What has failed before; the user is told once."""
        self._notes: list[str] = []
        self._values: dict[str, float] = {}
        """What the sinks get of this step."""
        self._losses = Losses()
        self._optimizers: list[OptimizerSteps] = []
        self._hooks: list[Any] = []
        self.until_closed = ExitStack()
        """What ends when the watch is closed."""
        self._model: nn.Module | None = None
        self._step = 0
        self._counts = False
        """Whether steps are counted here."""
        self._compiled = False
        self.steps = 0
        """How many steps were seen."""

    @property
    def path(self) -> Path:
        return self._rows.path

    @property
    def page(self) -> Path:
        return self.path.with_suffix(".html")

    @property
    def flight(self) -> Path:
        """The file with the reports, with notes about what could not be watched, and the number of losses."""
        return self.path.with_suffix(".flight.json")

    @property
    def worst(self) -> str:
        """What went wrong first, in a few words; else the first thing to note; empty if nothing did."""
        triggers = [report["trigger"] for report in self.reports]
        faults = [trigger for trigger in triggers if trigger["kind"] not in NOTES]
        gravest_first = [*faults, *triggers]
        return str(gravest_first[0]["words"]) if gravest_first else ""

    @property
    def reports(self) -> list[dict[str, Any]]:
        """The recorder's reports, with ``trigger`` and ``verdict``; empty for a training that went well."""
        return self._reports.flights()

    def start(self, step: int) -> None:
        """Begin a training at step 0, moving the files of an earlier one aside, or resume one at ``step``,
        from where rows are written again. A process that ends without ``close`` closes the watch.
        """
        with self._guard("the watch cannot begin"):
            self._observation.reset()
            self._remove_hooks()
            self._reports = WatchReports(self._warn)
            self._recorder, self._step, self.steps = Recorder(self._reports), step, 0
            self._failed.clear()
            self._notes.clear()
            self._losses.clear()
            _OPEN.add(self)
            atexit.unregister(_close_open)
            atexit.register(_close_open)  # anew, so that it comes before what a trainer has registered
            rates = self._rows.begin(step) if self._emit is None else None
            self._checks = Checks(self._reports, self, step, rates)

    def attach(self, model: nn.Module, optimizers: Sequence[Any], *, compiled: bool = False) -> None:
        """Watch the losses that the model returns and the steps that the optimizers take, until ``close``."""
        with self._guard("updates cannot be watched"):
            self._remove_hooks()
            self._model = inner = unwrap(model)
            self._compiled = (
                compiled or runs_compiled(model) or any(runs_compiled(m) for m in inner.modules())
            )
            if not self._compiled:
                self._hooks.append(inner.register_forward_hook(self._answered, with_kwargs=True))
                self._checks.attach(inner)
            for optimizer in map(innermost, optimizers):
                steps = OptimizerSteps(optimizer, inner)
                self._optimizers.append(steps)
                self._hooks.append(optimizer.register_step_pre_hook(partial(self._before, steps)))
                self._hooks.append(optimizer.register_step_post_hook(partial(self._after, steps)))

    def count_steps(self) -> None:
        """Count the steps here, by those of the optimizers, since no trainer does."""
        self._counts = True
        if self._model is not None and not self._compiled:
            self._hooks.append(self._model.register_forward_pre_hook(self._called, with_kwargs=True))

    def begin(self, model: nn.Module, step: int, *, compiled: bool = False, own_calls: int = 0) -> None:
        """Begin a step, and observe it if its turn has come; see ``Observation.begin``."""
        if step != self._step:
            self._finish_step()
        self._step = step
        self._observe(model, compiled=compiled, own_calls=own_calls)

    def loss(self, loss: Tensor | float) -> None:
        """Give the recorder the loss of a batch, or of each micro-batch, not divided by their number.
        Nothing waits for the device. A loss given here counts instead of the one in the model's output.
        """
        with self._guard("the loss cannot be recorded"):
            self._losses.give(loss)
        with self._guard("the loop cannot be checked"):
            if isinstance(loss, Tensor):
                self._checks.loop.saw_loss(loss, "loop")

    def logged_loss(self, loss: float) -> None:
        """Give the recorder a loss that the trainer logs, for a step whose own loss was not seen."""
        if not self._losses:
            self.loss(loss)

    def stepping(self) -> None:
        """Measure weights and gradients: the optimizer is about to step."""
        self.end()
        for steps in self._optimizers:
            with self._guard("gradients cannot be recorded"):
                steps.measure_gradients()

    def end(self) -> None:
        """Fetch and write the measurements of the observed step, and remove their hooks."""
        with self._guard("a step cannot be recorded"):
            self._observation.end()
        self._write_rows()

    def close(self) -> None:
        """Write what is left, report what went wrong, remove all hooks, and draw the page."""
        _OPEN.discard(self)
        self.end()
        self._finish_step()
        self._remove_hooks()
        with self._guard("the recorder failed"):
            self._checks.conclude(self._recorder)
            if self._recorder.ring and not self._recorder.curve.count and not self.reports:
                self._note("no loss was seen, so a divergence may go unseen: pass it to watch.loss(loss)")
        with self._guard("the page cannot be drawn"):
            if self._emit is None:
                self._draw()
        self.until_closed.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._checks.loop.detach()
        self._hooks.clear()
        self._optimizers.clear()

    @property
    def _stepped(self) -> list[OptimizerSteps]:
        """The optimizers that have stepped since the last step was recorded."""
        return [steps for steps in self._optimizers if steps.stepped]

    @property
    def _due(self) -> bool:
        """Whether this step is observed."""
        return self._step % self._every == 0

    def _observe(self, model: nn.Module, **how: Any) -> None:
        if self._due:
            with self._guard("the model cannot be observed"):
                self._observation.begin(model, self._step, **how)

    def _called(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a step at the model's first call in training mode after an optimizer's step."""
        if not model.training or not torch.is_grad_enabled() or self._observation.running:
            return
        if self._stepped:
            self._finish_step()
        self._observe(model, given=(args, kwargs))

    def _answered(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if model.training and torch.is_grad_enabled():
            with self._guard("the loss is not recorded"):
                self._checks.saw_call(args, kwargs, output, self._losses)

    def _before(
        self, steps: OptimizerSteps, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Look at the weights and gradients before an optimizer's step."""
        steps.depth += 1
        if steps.depth > 1:  # the parent class's step, called by the subclass's
            return
        if steps.stepped:  # the last step ended and no call of the model was seen since
            self._finish_step()
        if self._counts and self._model is not None and not self._observation.running and not self._stepped:
            self._observe(self._model, compiled=self._compiled, missed=True)
        with self._guard("updates cannot be watched"):
            steps.before()
        given = (*args[1:], *kwargs.values())  # the optimizer itself comes first
        has_closure = any(value is not None for value in given)
        if not has_closure:  # which would run the model in the step
            self.end()
            with self._guard("gradients cannot be recorded"):
                steps.measure_gradients()
            with self._guard("the loop cannot be checked"):
                self._checks.before(self._step, steps)

    def _after(self, steps: OptimizerSteps, *_: Any) -> None:
        """Look at the weights after an optimizer's step."""
        steps.depth -= 1
        if steps.depth > 0:
            return
        self.end()
        with self._guard("updates cannot be watched"):
            steps.after()
        with self._guard("the loop cannot be checked"):
            self._checks.loop.after(steps.parameters)

    def _finish_step(self) -> None:
        """Give the recorder the step that the optimizers took, and emit its updates if its turn had come."""
        stepped = self._stepped
        if stepped:
            with self._guard("updates cannot be recorded"):
                self._take(stepped, due=self._due and bool(self._observation.preset))
            self._write_rows()
            for steps in stepped:
                steps.forget()
        self._feed_sinks()
        self._losses.clear()
        if self._counts and stepped:
            self._step += 1

    def _feed_sinks(self) -> None:
        values, self._values = self._values, dict[str, float]()
        if not values:
            return
        for sink in list(self._sinks):
            try:
                sink(self._step, values)
            except Exception as error:
                self._sinks.remove(sink)
                self._note(f"a sink failed and is left out from now on: {type(error).__name__}: {error}")

    def _take(self, stepped: Sequence[OptimizerSteps], *, due: bool) -> None:
        """Record a step, look at it if its turn has come or many wait, and emit its updates if ``due``."""
        self.steps += 1
        loss = self._losses.of_step()
        record = joined([steps.record(self._step, loss) for steps in stepped])
        self._recorder.add(record)
        self._checks.loop.end_step()
        if due or self._recorder.pending >= FETCH:
            self._checks.look(self._recorder)
        if not due:
            return
        for steps in stepped:
            for key, value in steps.ratios(self._observation.sites):
                self._record(Record(self._step, *key, "update", "ratio", value))
        numbers = {"loss": self._recorder.numbers[self._step].get("loss"), "lr": record.lr}
        for name, value in numbers.items():
            if value is not None:
                self._record(Record(self._step, None, None, "", name, "value", value))

    def _record(self, record: Record) -> None:
        name = f"{record.module}/{record.signal}.{record.statistic}".lstrip("/")
        self._values[name] = record.value
        (self._emit or self._rows)(record)

    def _write_rows(self) -> None:
        with self._guard("rows cannot be written"):
            if self._emit is None:
                sites = [site for site in self._observation.sites if site.index is not None]
                self._rows.sites = {(site.stack or None, site.index): site for site in sites}
                self._rows.write()

    def _draw(self) -> None:
        if not self.path.exists() and not self.reports:
            return
        self.flight.parent.mkdir(parents=True, exist_ok=True)
        flight = {
            "reports": self.reports,
            "notes": self._notes,
            "steps": self.steps,
            "losses": self._recorder.curve.count,
        }
        write_json_atomic(self.flight, flight, flat=True)
        if self._rows.rank:
            return
        from normlab.report.watch import write_probes_page

        write_probes_page(self.path, self.page)

    @contextmanager
    def _guard(self, failure: str) -> Iterator[None]:
        """Run our own code in this block; a failure becomes a note, because it must not end a training."""
        try:
            yield
        except Exception as error:
            why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            if failure not in self._failed:
                self._failed.add(failure)
                self._note(f"{failure} ({why}); the training goes on")

    def _note(self, sentence: str) -> None:
        self._notes.append(sentence)
        self._warn(sentence)

    def _warn(self, sentence: str) -> None:
        """Warn the user; this is the only place that does so while a training runs."""
        warnings.warn(f"normlab: {sentence}", WatchWarning, stacklevel=2)


_OPEN: Final[WeakSet[Watch]] = WeakSet()
"""Watches that the end of the process closes, as when a trainer has raised."""


def _close_open() -> None:
    for watch in list(_OPEN):
        watch.close()


def innermost(optimizer: Any) -> Optimizer:
    """Return the optimizer inside a trainer's wrappers, the one that takes the actual steps.

    Raises UserError for something that takes no steps of torch's kind.
    """
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    if not callable(getattr(optimizer, "register_step_post_hook", None)):
        raise UserError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer; its steps cannot be watched"
        )
    return optimizer
