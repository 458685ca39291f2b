"""Train a configuration, from its data to a finished run folder."""

from __future__ import annotations

import io
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from normlab.base.files import name_in_errors
from normlab.base.io import validated
from normlab.errors import UserError
from normlab.lab.config import Config, run_id
from normlab.lab.recipes.plugins import imported
from normlab.lab.runs.examples import write_examples
from normlab.lab.runs.folder import Row, RunFolder, write_json_atomic, write_text_atomic
from normlab.lab.runs.manifest import train_anew
from normlab.lab.tasks import TASKS
from normlab.lab.training.checkpoint import has_checkpoint, load_checkpoint
from normlab.lab.training.devices import in_precision, prepare_process, resolved_precision
from normlab.lab.training.log import Log, TensorBoard, notice, require_tensorboard
from normlab.lab.training.parts import OnRow, RunPart
from normlab.lab.training.progress import Phases, mark, marked
from normlab.lab.training.ranks import Ranks, check_share, join_processes
from normlab.lab.training.run import Run
from normlab.lab.training.trainer import AnyTask, Trainer, load_task
from normlab.lab.training.weights import checkpoint_of, with_start


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
        with ExitStack() as held:  # the run's lock
            if ranks.from_main(lambda: not _finished(folder) and _acquire_run(folder, task, held)):
                observers: list[RunPart] = [Log()]
                if config.machine.tensorboard:
                    observers.append(TensorBoard())
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
    content = io.BytesIO()  # NumPy's own error for a full disk names no file
    np.save(content, task.corpus.target_vocab, allow_pickle=False)
    with name_in_errors(folder.target_vocab):
        folder.target_vocab.write_bytes(content.getbuffer())
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
    # No second entry for a run without an average: its tested checkpoint is the best one.
    files.setdefault(folder.best, (folder.best_outputs, folder.best_examples, folder.best_scores))
    phases = Phases(folder)
    for checkpoint, (outputs, examples, scores) in files.items():
        load_checkpoint(checkpoint, model, run=folder.id())
        with phases.during(task, "testing"), in_precision(task.device, task.config.train.precision):
            tested = task.test(model)
        if tested.outputs is not None:
            write_text_atomic(outputs, "".join(f"{line}\n" for line in tested.outputs))
        if tested.examples:
            write_examples(examples, tested.examples)
        content: dict[str, Any] = dict(tested.scores)
        if tested.signatures:
            content["signatures"] = dict(tested.signatures)
        write_json_atomic(scores, content)  # last: with it the run counts as scored


def _test_again(task: AnyTask, folder: RunFolder) -> None:
    """Test a run that is done and has lost its scores. Raises UserError if it has no weights either."""
    if not has_checkpoint(folder.best):
        raise UserError(
            f"the run {folder.path} is done and has neither {folder.scores.name} nor weights to be scored; "
            f"{train_anew(folder.best)}"
        )
    score_test(task, folder, task.build())
