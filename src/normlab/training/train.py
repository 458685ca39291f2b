"""Training a configuration, from its data to a finished run folder."""

from __future__ import annotations

import contextlib
import io
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from normlab.config.config import Config, run_id
from normlab.config.io import validated
from normlab.errors import UserError
from normlab.runs.examples import write_examples
from normlab.runs.files import named
from normlab.runs.folder import RunFolder, State, write_json_atomic, write_text_atomic
from normlab.runs.manifest import train_anew
from normlab.tasks.registry import TASKS
from normlab.tasks.task import Prepared
from normlab.training.callbacks.base import Callback, Row, RowCallback
from normlab.training.callbacks.log import Log, facts
from normlab.training.callbacks.tensorboard import TensorBoard, require_tensorboard
from normlab.training.checkpoint import has_checkpoint, load_checkpoint
from normlab.training.devices import autocast, prepare_process, resolved_precision
from normlab.training.phase import Phases
from normlab.training.ranks import Ranks, check_share, joined
from normlab.training.recipes.plugins import imported
from normlab.training.run import Run
from normlab.training.trainer import AnyTask, Trainer
from normlab.training.warm_start import with_start
from normlab.training.weights import checkpoint_of

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@validated
def train(
    config: Config,
    root: str | Path,
    on_row: Callable[[Row], None] = lambda row: None,
    *,
    callbacks: Sequence[Callback] = (),
) -> RunFolder:
    """Train one configuration under ``root`` and score it on its test text; return the run's folder.

    A run that is done is returned as it is, unless its scores are missing, which are made again; an
    interrupted one goes on from its last checkpoint. ``on_row``
    is called with every metrics row as it is written, ``callbacks`` see all events. Ctrl-C saves a checkpoint
    and raises KeyboardInterrupt. Under torchrun the processes share the micro-batches of a step, and the
    first one alone writes.

    Raises UserError for a task that nobody registered or that cannot do what the configuration asks for.
    """
    kind = TASKS[config.task]
    kind.check(config)
    check_share(config.train.grad_accum_steps)
    if config.machine.tensorboard:
        require_tensorboard()
    config, root = resolved_precision(config), Path(root)
    with joined(prepare_process(config.machine)) as (ranks, device):
        with ranks.main_first():
            config = with_start(config, root)
            data, corpus = kind.prepare(config.data, root / "data")
            config = replace(config, data=data)
            kind.check_text(config, corpus)
        folder = RunFolder(root / run_id(config))
        with contextlib.ExitStack() as held:
            if ranks.from_main(lambda: _enter(folder, config, corpus, held)):
                _work(kind(config, corpus, device), folder, [*callbacks, RowCallback(on_row)], ranks)
    return folder


def _enter(folder: RunFolder, config: Config, corpus: Prepared, held: contextlib.ExitStack) -> bool:
    """Take the run's lock and furnish its folder, unless the run is done; return whether it is to be done.

    A run that is done is still to be done as long as its scores are missing. Raises UserError for a folder
    from which a part was removed.
    """
    if _done(folder):
        return False
    folder.path.mkdir(parents=True, exist_ok=True)
    held.enter_context(folder.lock())
    if _done(folder):  # by another process, a moment ago
        return False
    checkpoints = (folder.last, folder.previous, folder.best, folder.average)
    if not folder.there() and any(map(has_checkpoint, checkpoints)):
        raise _removed(folder)
    _furnish(folder, config, corpus)
    return True


def _done(folder: RunFolder) -> bool:
    return folder.there() and folder.status().state == "done" and folder.scores.exists()


def _removed(folder: RunFolder) -> UserError:
    """The error about a folder that is gone, or in which the configuration is."""
    rest = f"remove the rest, rm -r {shlex.quote(str(folder.path))}; then " if folder.path.exists() else ""
    return UserError(
        f"{folder.path / 'config.json'} was removed, and with it what the run needs; {rest}the same command "
        "trains the run anew"
    )


def _work(task: AnyTask, folder: RunFolder, callbacks: Sequence[Callback], ranks: Ranks) -> None:
    """Train a run and score it; one that is done is only scored again."""
    if folder.status().state == "done":
        ranks.from_main(lambda: _score_again(task, folder))
        return
    try:
        with contextlib.ExitStack() as stack:
            with _polite_interrupt() as interrupted, contextlib.closing(Trainer(task, ranks)) as trainer:
                run = Run(trainer, folder, [*_own_callbacks(trainer, folder), *callbacks])
                stack.callback(run.callbacks.close)
                stack.enter_context(run.clock.watched())
                run.run(interrupted)
            model = trainer.parallel.plain()
            ranks.from_main(lambda: score_test(task, folder, model))
            ranks.on_main(_mark, folder, "done")
            run.callbacks.tell(trainer.progress.step, ended=True)
    except KeyboardInterrupt:
        ranks.on_main(_mark, folder, "interrupted")
        raise
    except Exception as error:
        ranks.on_main(_mark, folder, "failed", f"{type(error).__name__}: {error}")
        if not folder.there():
            raise _removed(folder) from error
        raise


def _own_callbacks(trainer: Trainer, folder: RunFolder) -> list[Callback]:
    log = Log(folder, partial(facts, folder, trainer.config, trainer.model, trainer.device))
    return [log, TensorBoard(folder.tensorboard)] if trainer.config.machine.tensorboard else [log]


def _mark(folder: RunFolder, state: State, error: str = "") -> None:
    with contextlib.suppress(OSError):  # a full disk would hide what it stopped
        status = folder.status()
        status = replace(status, state=state, phase="", phase_done=None)
        folder.set_status(replace(status, error=error or status.error))


def score_test(task: AnyTask, folder: RunFolder, model: nn.Module) -> None:
    """Test the run's weights: write ``scores.json``, the statistics of each example, and the outputs.

    A run with an average is tested with that; the files of its best weights are written beside these.
    """
    files = {checkpoint_of(folder): (folder.outputs, folder.examples, folder.scores)}
    files.setdefault(folder.best, (folder.best_outputs, folder.best_examples, folder.best_scores))
    phases = Phases(folder)
    for checkpoint, (outputs, examples, scores) in files.items():
        load_checkpoint(checkpoint, model, run=folder.id())
        precision = autocast(task.device, task.config.train.precision)
        with phases.during(task, "testing"), precision:
            tested = task.test(model)
        if tested.outputs is not None:
            write_text_atomic(outputs, "".join(f"{line}\n" for line in tested.outputs))
        if tested.examples:
            write_examples(examples, tested.examples)
        signatures = {"signatures": dict(tested.signatures)} if tested.signatures else {}
        write_json_atomic(scores, {**tested.scores, **signatures})


def _score_again(task: AnyTask, folder: RunFolder) -> None:
    """Test a run that is done and has lost its scores. Raises UserError if it has no weights either."""
    if not has_checkpoint(folder.best):
        raise UserError(
            f"the run {folder.path} is done and has neither {folder.scores.name} nor weights to be scored; "
            f"{train_anew(folder.best)}"
        )
    score_test(task, folder, task.build())


def _furnish(folder: RunFolder, config: Config, corpus: Prepared) -> None:
    """Write the files that a run folder needs to be used without its corpus, the configuration last."""
    if not folder.there():
        with named(folder.tokenizer):
            corpus.tokenizer.save(folder.tokenizer)
        types = io.BytesIO()  # NumPy's own error of a full disk names no file
        np.save(types, corpus.target_vocab, allow_pickle=False)
        with named(folder.target_vocab):
            folder.target_vocab.write_bytes(types.getbuffer())
        RunFolder.create(folder.path, config, TASKS[config.task].metrics, imported())


@contextmanager
def _polite_interrupt() -> Iterator[threading.Event]:
    """Let the first Ctrl-C, or a closed terminal, set an event, so that the step in progress is saved.

    The second one interrupts at once. A signal that is ignored, as ``nohup`` has it, stays ignored.
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
            sys.stderr.write("\nsaving after this step; once more stops at once\n")

    heard = (s for s in _STOPS if signal.getsignal(s) != signal.SIG_IGN)
    before = {s: signal.signal(s, handle) for s in heard}
    try:
        yield event
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
