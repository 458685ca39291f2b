"""Setups of the laboratory's own models: from a configuration, or from a run at one of its checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from normlab.base.units import rate
from normlab.diagnosis.subject import SMALL_TOKENS
from normlab.lab.config import Config, run_id
from normlab.lab.data.tokenizer import EOS, PAD
from normlab.lab.recipes.grammar import describe, require_known
from normlab.lab.runs.folder import RunFolder
from normlab.lab.runs.manifest import committed
from normlab.lab.tasks import TASKS
from normlab.lab.training.checkpoint import has_checkpoint, load_checkpoint
from normlab.lab.training.devices import prepare_process
from normlab.lab.training.parallel import SingleProcess
from normlab.lab.training.trainer import AnyTask
from normlab.lab.training.weights import checkpoint_of, load_initial_weights, with_start
from normlab.nn import after_step
from normlab.optim import ScheduleState, build_optimizer, clipped_together, schedule_factor, set_rate
from normlab.setups.function import draw_seed
from normlab.setups.named import NamedSetup
from normlab.setups.setup import Declaration, Setup
from normlab.setups.step import plain_step

FIRST: Final = 0
"""Index of the training batch that is examined."""
MINI_BATCHES: Final = 4
"""Number of small batches for studies that take many passes."""


def setup_from_config(config: Config, root: Path, *, tokens: int) -> NamedSetup:
    """Return the setup of a resolved configuration, in float32 on ``tokens`` positions of its text, at its
    start: freshly drawn, or with the weights that ``train.init_from`` names.

    The text is prepared under ``root``. Raises UserError for a configuration that cannot be trained, and
    FileNotFoundError if there are no such weights.
    """
    task = task_of(with_start(config, root), root, tokens)
    optim = task.config.optim
    trained = bool(task.config.train.init_digest)
    setup = _setup(task, task.build(), optim.lr, trained=trained, is_scheduled=True)
    if trained:
        load_initial_weights(SingleProcess(setup.model), task)
    facts = _facts(task)
    if optim.warmup_steps:
        facts["warm-up"] = f"{optim.warmup_steps:,} steps to this rate"
    if trained:
        facts["weights"] = task.config.train.init_from
    name = f"{config.recipe}-{run_id(task.config)[:8]}"
    batches = partial(_mini_batches, task)
    return NamedSetup(_title_of(config), setup, facts, name, optim.warmup_steps, batches)


def setup_from_run(folder: RunFolder, checkpoint: str | int, *, tokens: int) -> NamedSetup:
    """Return the setup of a run at a checkpoint, at the rate of the run's next step.

    At the last checkpoint the optimizer has the run's moments. The others keep none: there it starts afresh.

    Args:
        folder: the run.
        checkpoint: ``last``, ``best`` or ``average``, or the step of one that the run has kept.
        tokens: the positions of a batch.

    Raises:
        UserError: no checkpoint has that name, or the configuration cannot be trained.
        FileNotFoundError: the run has no such checkpoint.
    """
    path = committed(checkpoint_of(folder, checkpoint))
    task = task_of(folder.config(), folder.path.parent, tokens)
    config, model = task.config, task.build()
    restored_optimizer = None
    if (path / "optimizer.safetensors").exists():
        restored_optimizer = build_optimizer(model, config.optim)
    progress = load_checkpoint(path, model, restored_optimizer, run=folder.id()).progress()
    step = f"step {progress.step:,}"
    if isinstance(checkpoint, str):
        in_title, in_facts, name = f"{checkpoint} checkpoint", f"{checkpoint}, {step}", checkpoint
    else:
        in_title, in_facts, name = step, step, f"step-{checkpoint}"
    facts = {"run": folder.path.name, "checkpoint": in_facts, **_facts(task)}
    lr = progress.learning_rate(config, ahead=1)
    if not lr:
        # a step at the rate 0 changes nothing, so there would be nothing to examine
        lr = config.optim.lr
        facts["learning rate"] = f"0 by now; the peak, {rate(lr)}, is examined instead"
    # The schedule begins at step 1, and this is a later one: its rate is set, and nothing changes it.
    setup = _setup(task, model, lr, trained=progress.step > 0, is_scheduled=False)
    if restored_optimizer is not None:
        setup = replace(setup, optimizer=set_rate(restored_optimizer, lr))
    title = f"{_title_of(config)}, {in_title}"
    return NamedSetup(title, setup, facts, name, mini_batches=partial(_mini_batches, task))


def checkpoints(folder: RunFolder, names: Sequence[str] = (), step: int | None = None) -> list[str | int]:
    """Return the checkpoints to examine: those that are named, and the step; without any, ``last``, and also
    ``best`` if it is from another step, if they exist. Raises UserError for a run of an unknown recipe.
    """
    require_known(folder.config())
    chosen: list[str | int] = [*names]
    if step is not None:
        chosen.append(step)
    if chosen:
        return chosen
    if has_checkpoint(folder.last):
        chosen.append("last")
    status = folder.status()
    same_weights = bool(chosen) and status.step == status.best_step
    if has_checkpoint(folder.best) and not same_weights:
        chosen.append("best")
    return chosen or ["last"]  # whose error says what there is


def _title_of(config: Config) -> str:
    """Name a configuration by its recipe, its layers and its width."""
    layers = [str(n) for n in (config.model.encoder_layers, config.model.decoder_layers) if n]
    return f"{config.recipe}, {'+'.join(layers)} layers of width {config.model.dim}"


def _facts(task: AnyTask) -> dict[str, str]:
    batch = task.batch(FIRST)
    return {
        "recipe": describe(task.config),
        "tokens": f"{batch.tokens:,} predicted in {batch.padded_tokens:,} positions",
    }


def task_of(config: Config, root: Path, tokens: int) -> AnyTask:
    """Return the task of a configuration, in float32 with batches of ``tokens`` positions."""
    kind = TASKS[config.task]
    kind.check(config)
    device = prepare_process(config.machine)
    data, corpus = kind.prepare(config.data, root / "data")
    sized = replace(config.train, max_tokens=tokens, precision="fp32")
    return kind(replace(config, data=data, train=sized), corpus, device)


def _mini_batches(task: AnyTask) -> list[Any]:
    train = replace(task.config.train, max_tokens=min(task.config.train.max_tokens, SMALL_TOKENS))
    small = type(task)(replace(task.config, train=train), task.corpus, task.device)
    return [small.batch(i) for i in range(MINI_BATCHES)]


class _TrainingBatches:
    """The training batches of a task, without end; each iteration begins again at the first of them."""

    def __init__(self, task: AnyTask) -> None:
        self.task = task

    def __iter__(self) -> Iterator[Any]:
        return map(self.task.batch, itertools.count(FIRST))


def _setup(task: AnyTask, model: nn.Module, lr: float, *, trained: bool, is_scheduled: bool) -> Setup:
    """Return a task's training as a setup: the steps that a run of it takes, with the optimizer at the rate
    ``lr``, and if it is scheduled with the run's schedule from its first step on.
    """
    config, optim = task.config, task.config.optim
    state = ScheduleState(optim, config.train.steps)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        # An instrument may have cut or changed the batch since its tokens were counted.
        counted = batch.recounted() if hasattr(batch, "recounted") else batch
        return task.loss(model, counted).loss / counted.tokens

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return set_rate(build_optimizer(model, optim), lr)

    def scheduler(optimizer: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: schedule_factor(step + 1, state))

    def clip(model: nn.Module) -> None:
        if not optim.max_grad_norm:
            return
        parameters = list(model.parameters())
        for indices in clipped_together(model, optim):
            nn.utils.clip_grad_norm_([parameters[i] for i in indices], optim.max_grad_norm)

    def make() -> nn.Module:
        seeds = replace(config.seeds, init=draw_seed())
        with torch.device(task.device):  # the start may need a pass on real numbers, not on meta
            fresh = type(task)(replace(config, seeds=seeds), task.corpus, task.device).build()
        default = torch.get_default_device()
        return fresh.to(default) if default.type == "meta" else fresh

    return Setup(
        model,
        _TrainingBatches(task),
        loss=loss,
        optimizer=optimizer,
        scheduler=scheduler if is_scheduled else None,
        step=plain_step(loss, clip=clip, after=after_step, scheduled=True),
        lr=lr,
        declare=Declaration(
            pad_id=PAD,
            eos_id=EOS,
            steps=config.train.steps,
            peak_lr=optim.lr,
            # nothing says that a start is untrained: whether its weights know something is measured
            trained=trained or None,
        ),
        make=make,
    )
