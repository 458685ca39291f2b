"""Train a configuration, from its data to a finished run folder."""

from __future__ import annotations

import contextlib
import io
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch import nn

from normlab.base.files import name_in_errors
from normlab.base.io import validated
from normlab.errors import UserError
from normlab.lab.config import Config, run_id
from normlab.lab.recipes.plugins import imported
from normlab.lab.runs.examples import write_examples
from normlab.lab.runs.folder import Row, RunFolder, State, Status, write_json_atomic, write_text_atomic
from normlab.lab.runs.manifest import committed, read_state, train_anew
from normlab.lab.tasks import TASKS
from normlab.lab.training.checkpoint import (
    has_checkpoint,
    load_checkpoint,
    open_checkpoint,
    resume,
    save_checkpoint,
)
from normlab.lab.training.devices import (
    autocast,
    hardware,
    hardware_so_far,
    prepare_process,
    resolved_precision,
)
from normlab.lab.training.log import Log, TensorBoard, notice, require_tensorboard
from normlab.lab.training.parts import (
    FlightRecorder,
    KeptWeights,
    MetricRows,
    OnRow,
    ProbeRows,
    RunPart,
    StoppingRule,
    Validation,
)
from normlab.lab.training.progress import Phases, TrainingClock, mark, marked
from normlab.lab.training.ranks import Ranks, check_share, join_processes
from normlab.lab.training.trainer import AnyTask, Trainer, load_task
from normlab.lab.training.weights import checkpoint_of, with_start

_STOPS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Run:
    """A run in progress: the steps of a trainer, and what its parts do in between."""

    def __init__(self, trainer: Trainer, folder: RunFolder, observers: Sequence[RunPart] = ()) -> None:
        self.trainer, self.folder = trainer, folder
        self.config, self.ranks, self.progress = trainer.config, trainer.ranks, trainer.progress
        self.clock, self.hardware, self.saved = TrainingClock(), "", 0
        self.rows, self.probes = MetricRows(self), ProbeRows(self)
        self.stopping, self.recorder = StoppingRule(self), FlightRecorder(self)
        self.validation, self.weights = Validation(self), KeptWeights(self)
        own = (self.rows, self.probes, self.stopping, self.recorder, self.validation, self.weights)
        self.parts: tuple[RunPart, ...] = (*(observers if self.ranks.main else ()), *own)

    def resume(self) -> Run:
        """Continue from the newest usable checkpoint, or begin at the start; return the run."""
        with self.ranks.main_first():
            if refused := resume(self.folder.last, self.folder.previous, self._load):
                notice(self.folder, refused)
            if self.progress.best_step is not None:  # else the run would only find out at its end
                read_state(committed(self.folder.best), run=self.folder.id())
            self.ranks.on_main(self.folder.cut_rows, self.progress.step)
        self.rows.written = self.folder.metrics()
        if not self.progress.step and (initial := self.trainer.begin()):
            start = {**asdict(initial), "sentence": initial.sentence()}
            self.ranks.on_main(write_json_atomic, self.folder.start, start)
        self.saved, self.clock = self.progress.step, TrainingClock(self.progress.seconds)
        before, now = self.folder.status().hardware, hardware(self.trainer.device, self.ranks.count)
        self.hardware, changed = hardware_so_far(before, now, self.progress.step)
        if changed:
            self.ranks.on_main(notice, self.folder, changed)
        self.stopping.judge()
        self._report("running")
        return self

    def train(self) -> None:
        """Train to the last step, or to the step at which the outcome is clear.

        The first Ctrl-C saves a checkpoint after the step in progress and raises KeyboardInterrupt.
        """
        train, machine = self.config.train, self.config.machine
        with _graceful_interrupt() as interrupted, self.clock.watched():
            for part in self.parts:
                part.on_start(self)
            self.weights.keep()
            while not self.stopping.reached:
                self.step()
                step = self.progress.step
                last = step == train.steps
                if last or step % machine.log_every_steps == 0 or step == 1:
                    self.rows.flush()
                if last or step % train.validate_every_steps == 0:
                    self.validation.run()
                self.weights.keep()
                if self.stopping.consider():
                    self._conclude()
                if self.ranks.any(interrupted.is_set()):
                    self.checkpoint("interrupted")
                    raise KeyboardInterrupt
                if not self.stopping.reached and step % machine.checkpoint_every_steps == 0:
                    self.checkpoint("running")
            self.weights.keep(last=True)
            self.checkpoint("running")
            if train.average_last:
                self.validation.average()

    def step(self) -> None:
        record = self.trainer.step(self.probes.passing)
        for part in self.parts:
            part.on_step(record)

    def checkpoint(self, state: State) -> None:
        for part in self.parts:
            part.before_checkpoint(interrupted=state == "interrupted")
        self.saved = self.progress.step
        self.ranks.on_main(self.folder.sync_rows)
        self.progress.seconds = self.clock.seconds()
        parts = {part.key: part.state_dict() for part in self.parts if part.key}
        save = partial(save_checkpoint, run=self.folder.id(), previous=self.folder.previous)
        self.ranks.on_main(save, self.folder.last, self.trainer.state_dict() | parts)
        for part in self.parts:
            part.on_checkpoint(self.saved)
        self._report(state)

    def end(self) -> None:
        for part in self.parts:
            part.on_end()

    def close(self) -> None:
        for part in self.parts:
            part.close()

    def _load(self, folder: Path) -> int:
        checkpoint = open_checkpoint(folder, run=self.folder.id())
        state = checkpoint.state(self.trainer.parallel.shapes())
        with checkpoint.loading():
            self.trainer.load_state_dict(state)
            if self.progress.step > self.config.train.steps:
                steps = self.config.train.steps
                raise UserError(f"progress.step is {self.progress.step}, and the run has {steps} steps")
            for part in self.parts:
                part.load_state_dict(state.get(part.key, {}))
            self.folder.require_rows(self.rows.sizes, folder)
        return self.progress.step

    def _conclude(self) -> None:
        """Write the last rows before their step's checkpoint: a resumed run must not write them again."""
        p = self.progress
        if self.rows.pending:
            self.rows.flush()
        if p.best_step is None or (p.stopped and not self.rows.validated):
            self.validation.run()
        self.stopping.judge()

    def _report(self, state: State) -> None:
        p = self.progress
        status = Status(
            state=state,
            step=p.step,
            outcome=self.stopping.outcome,
            best_step=p.best_step,
            best_dev=dict(p.best_dev),
            train_seconds=p.seconds,
            hardware=self.hardware,
            stopped=p.stopped,
        )
        self.ranks.on_main(self.folder.set_status, status)


@contextmanager
def _graceful_interrupt() -> Iterator[threading.Event]:
    """Let the first Ctrl-C, or a closed terminal, set an event, so that the step in progress is saved.

    The second one interrupts at once. A signal that is ignored, as under ``nohup``, stays ignored.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def handle(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()
        with contextlib.suppress(OSError, RuntimeError, AttributeError):  # gone, busy just now, or none
            sys.stderr.write("\nsaving after this step; press Ctrl-C again to stop at once\n")

    before = {s: signal.signal(s, handle) for s in _STOPS if signal.getsignal(s) != signal.SIG_IGN}
    try:
        yield event
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


@validated
def train(
    config: Config,
    root: str | Path,
    on_row: Callable[[Row], None] = lambda row: None,
    *,
    callbacks: Sequence[RunPart] = (),
) -> RunFolder:
    """Train one configuration under ``root`` and score it on its test text; return the run's folder.

    A run that is done is returned as it is, or only scored if its scores are missing; an interrupted one
    continues from its last checkpoint. ``on_row`` is called with every metrics row as it is written;
    ``callbacks`` see everything that happens. Ctrl-C saves a checkpoint and raises KeyboardInterrupt. Under
    torchrun the processes share the micro-batches of a step, and only the first one writes.

    Raises UserError for a task that is not registered or cannot do what the configuration asks for.

    >>> run = normlab.train(normlab.resolve("pre+rmsnorm", config), "runs")
    >>> run.status().state
    'done'
    """
    root = Path(root)
    TASKS[config.task].check(config)
    check_share(config.train.grad_accum_steps)
    if config.machine.tensorboard:
        require_tensorboard()
    config = resolved_precision(config)
    with join_processes(prepare_process(config.machine)) as (ranks, device):
        with ranks.main_first():
            task = load_task(with_start(config, root), root, device)
        folder = RunFolder(root / run_id(task.config))
        with ExitStack() as held:
            if ranks.from_main(lambda: not _finished(folder) and _acquire_run(folder, task, held)):
                observers = [Log(), *([TensorBoard()] if config.machine.tensorboard else [])]
                _train_and_test(task, folder, [*observers, *callbacks, OnRow(on_row)], ranks)
    return folder


def _acquire_run(folder: RunFolder, task: AnyTask, held: ExitStack) -> bool:
    """Lock a run and create its folder; return whether the run still has to be finished. Raises UserError for
    a folder from which a part was removed.
    """
    folder.path.mkdir(parents=True, exist_ok=True)
    held.enter_context(folder.lock())
    if _finished(folder):  # by another process, a moment ago
        return False
    if not folder.there():
        if any(map(has_checkpoint, (folder.last, folder.previous, folder.best, folder.average))):
            raise _no_config(folder)
        _create_run_folder(folder, task)
    return True


def _finished(folder: RunFolder) -> bool:
    return folder.there() and folder.status().state == "done" and folder.scores.exists()


def _create_run_folder(folder: RunFolder, task: AnyTask) -> None:
    """Write the files that a run folder needs to be used without its corpus, the configuration last."""
    with name_in_errors(folder.tokenizer):
        task.corpus.tokenizer.save(folder.tokenizer)
    types = io.BytesIO()  # NumPy's own error for a full disk names no file
    np.save(types, task.corpus.target_vocab, allow_pickle=False)
    with name_in_errors(folder.target_vocab):
        folder.target_vocab.write_bytes(types.getbuffer())
    RunFolder.create(folder.path, task.config, task.metrics_on(task.corpus), imported())
    if warning := getattr(task.corpus, "warning", ""):
        notice(folder, warning)


def _no_config(folder: RunFolder) -> UserError:
    """Return the error for a run folder whose config.json is missing."""
    rest = f"remove the rest, rm -r {shlex.quote(str(folder.path))}; then " if folder.path.exists() else ""
    return UserError(
        f"{folder.path / 'config.json'} was removed, and the run cannot be used without it; {rest}the same "
        "command trains the run anew"
    )


def _train_and_test(task: AnyTask, folder: RunFolder, observers: Sequence[RunPart], ranks: Ranks) -> None:
    """Train a run and test it; if it is done, only test it again."""
    if folder.status().state == "done":
        ranks.from_main(lambda: _test_again(task, folder))
        return
    try:
        with marked(folder) if ranks.main else nullcontext(), ExitStack() as stack:
            with closing(Trainer(task, ranks)) as trainer:
                run = stack.enter_context(closing(Run(trainer, folder, observers)))
                run.resume().train()
            model = trainer.parallel.plain()
            ranks.from_main(lambda: score_test(task, folder, model))
            ranks.on_main(mark, folder, "done")
            run.end()
    except Exception as error:
        if not folder.there():
            raise _no_config(folder) from error
        raise


def score_test(task: AnyTask, folder: RunFolder, model: nn.Module) -> None:
    """Test the run's weights: write ``scores.json``, the statistics of each example, and the outputs.

    A run with an average is tested with that; the files of its best weights are written next to these.
    """
    files = {checkpoint_of(folder): (folder.outputs, folder.examples, folder.scores)}
    files.setdefault(folder.best, (folder.best_outputs, folder.best_examples, folder.best_scores))
    phases = Phases(folder)
    for checkpoint, (outputs, examples, scores) in files.items():
        load_checkpoint(checkpoint, model, run=folder.id())
        with phases.during(task, "testing"), autocast(task.device, task.config.train.precision):
            tested = task.test(model)
        if tested.outputs is not None:
            write_text_atomic(outputs, "".join(f"{line}\n" for line in tested.outputs))
        if tested.examples:
            write_examples(examples, tested.examples)
        signatures = {"signatures": dict(tested.signatures)} if tested.signatures else {}
        write_json_atomic(scores, {**tested.scores, **signatures})


def _test_again(task: AnyTask, folder: RunFolder) -> None:
    """Test a run that is done and has lost its scores. Raises UserError if it has no weights either."""
    if not has_checkpoint(folder.best):
        raise UserError(
            f"the run {folder.path} is done and has neither {folder.scores.name} nor weights to be scored; "
            f"{train_anew(folder.best)}"
        )
    score_test(task, folder, task.build())
