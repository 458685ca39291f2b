"""Cases for a diagnosis: a configuration at its initialisation, a run at a checkpoint, or any model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from normlab.config.config import Config, OptimConfig
from normlab.config.units import rate
from normlab.diagnosis import Diagnosis, StackView, Structure, diagnose, read_structure
from normlab.diagnosis.diagnose import Options
from normlab.diagnosis.study import SMALL_TOKENS
from normlab.errors import UserError
from normlab.nn.sublayer import Sublayer
from normlab.optim import ScheduleState, build_optimiser, schedule_factor
from normlab.runs.folder import RunFolder
from normlab.tasks.task import Task
from normlab.trace.step import OptimizerFactory
from normlab.trace.tensors import Side, arguments_of, forward_hooks
from normlab.training.recipes.grammar import describe
from normlab.training.setups import FIRST, Source, load_run, task_of, title_of

MINI_BATCHES: Final = 4


@dataclass(frozen=True)
class Case:
    """A model with everything that its diagnosis needs."""

    title: str
    model: nn.Module
    batch: Any
    loss: Callable[[nn.Module, Any], Tensor] | None = None
    lr: float | None = None
    """Learning rate of an Adam, if no optimiser is given."""
    optimiser: torch.optim.Optimizer | OptimizerFactory | None = None
    batches: Sequence[Any] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    plan: Options = field(default_factory=Options)
    """The training to come, where a configuration says it."""

    def diagnosed(
        self, preset: str, *, blocks: Sequence[str] = (), branches: Sequence[str] = ()
    ) -> Diagnosis:
        """Run the studies of a preset, see ``diagnosis.diagnose``. Raises UserError if that is impossible."""
        options: Options = {**self.plan, "batches": self.batches}
        if blocks or branches:
            options |= {"blocks": blocks, "branches": branches}
        elif (structure := _structure(self.model, self.batch)) is not None:
            options["structure"] = structure
        return diagnose(
            self.model,
            self.batch,
            loss=self.loss,
            lr=self.lr,
            optimiser=self.optimiser,
            preset=preset,
            **options,
        )


def _structure(model: nn.Module, batch: Any) -> Structure | None:
    """Read a model that has sublayers of ours, or return None, so that a diagnosis says what is wrong.

    A sublayer that shows no sum, as of a placement that keeps its stream on a sphere, is read by its branch.
    """
    ours = {path.rpartition(".")[0] for path, m in model.named_modules() if isinstance(m, Sublayer)}
    seen: dict[str, StackView] = {}
    if ours:
        with suppress(UserError):
            read = read_structure(model, batch)
            seen = {stack.name: stack for stack in read.stacks}
            if seen.keys() >= ours:
                return read
        with suppress(UserError):
            named = read_structure(model, batch, branches=("f",))
            return replace(named, stacks=tuple(seen.get(stack.name, stack) for stack in named.stacks))
    return None


def of_setup(source: Source, lr: float | None = None) -> Case:
    """Examine a setup, stepped by its optimizer or, if it has none, by an Adam at a rate.

    Raises UserError for several optimizers, and for a rate where the optimizer brings its own.
    """
    setup = source.setup
    made = setup.optimizer
    if made is not None and lr is not None:
        raise UserError("the setup's optimizer brings its own learning rate; leave --lr out")
    if callable(made):
        try:
            made = made(setup.model)
        except Exception as error:
            raise UserError(f"optimizer raised {type(error).__name__}: {error}") from error
    if isinstance(made, (list, tuple)):
        if len(made) > 1:
            raise UserError(f"the setup has {len(made)} optimizers, and a diagnosis steps with one")
        made = made[0] if made else None
    rate_ = lr if made is None and lr is not None else setup.lr if made is None else None
    return Case(source.title, setup.model, setup.batch, setup.loss, rate_, made, facts=source.facts)


def of_config(config: Config, root: Path, *, tokens: int) -> Case:
    """Examine a resolved configuration, as it is initialised, in float32 on ``tokens`` positions of its text.

    The text is prepared under ``root``. Raises UserError for a configuration that cannot be trained.
    """
    task = task_of(config, root, tokens)
    facts = {"recipe": describe(config)}
    if warm := config.optim.warmup_steps:
        facts["warm-up"] = f"{warm:,} steps to this rate"
    return _case(title_of(config), task, task.build(), facts)


def of_run(folder: RunFolder, checkpoint: str | int, *, tokens: int) -> Case:
    """Examine a run on the first batch of its training text, at its checkpoint ``last``, ``best`` or
    ``average``, or at a step whose weights were kept.

    At the last checkpoint, the step of the optimiser is the run's next one, with its moments and at its
    learning rate; the other checkpoints keep no moments, so that the optimiser starts afresh. Raises
    FileNotFoundError for a run without that checkpoint.
    """
    run = load_run(folder, checkpoint, tokens=tokens)
    config = folder.config()
    lr = config.optim.lr * schedule_factor(
        run.step + 1, ScheduleState(config.optim, config.train.steps, run.decays)
    )
    facts = {"run": folder.path.name, "checkpoint": run.label, "recipe": describe(config)}
    if not lr:
        facts["learning rate"] = f"0 by now, so that the peak of {rate(config.optim.lr)} is examined"
    which = run.label if isinstance(checkpoint, int) else f"{checkpoint} checkpoint"
    case = _case(f"{title_of(config)}, {which}", run.task, run.model, facts)
    case.plan.pop("warmup_steps", None)  # the rate is that of this step already
    lr = lr or config.optim.lr
    make = _at(run.optimizer, lr) if run.amid else partial(_make, optim=config.optim, lr=lr)
    return replace(case, optimiser=make)


def _case(title: str, task: Task[Any, Any, Any], model: nn.Module, facts: Mapping[str, str]) -> Case:
    train = replace(task.config.train, max_tokens=min(task.config.train.max_tokens, SMALL_TOKENS))
    small = type(task)(replace(task.config, train=train), task.corpus, task.device)
    micro = task.batch(FIRST)
    return Case(
        title=title,
        model=model,
        batch=task_inputs(task, model, micro),
        loss=mean_loss,
        optimiser=partial(_make, optim=task.config.optim, lr=task.config.optim.lr),
        batches=[task_inputs(small, model, small.batch(i)) for i in range(MINI_BATCHES)],
        facts=dict(facts) | {"tokens": f"{micro.tokens:,} predicted in {micro.padded_tokens:,} positions"},
        plan=Options(warmup_steps=task.config.optim.warmup_steps),
    )


def _make(parameters: list[nn.Parameter], *, optim: OptimConfig, lr: float) -> torch.optim.Optimizer:
    return _at(build_optimiser(parameters, optim), lr)


def _at(optimiser: torch.optim.Optimizer, lr: float) -> torch.optim.Optimizer:
    for group in optimiser.param_groups:
        group["lr"].fill_(lr)
    return optimiser


class TaskInputs(dict[str, Any]):
    """The keyword arguments of a model, with the task and the micro-batch that give its loss."""

    def __init__(self, task: Task[Any, Any, Any], batch: Any, arguments: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        self.task, self.batch = task, batch


def task_inputs(task: Task[Any, Any, Any], model: nn.Module, batch: Any) -> TaskInputs:
    """Find the arguments of a model by watching how the task's loss calls it on a micro-batch.

    Raises UserError if the loss does not call the model itself.
    """
    calls: list[Mapping[str, Any]] = []

    def see(_: str, side: Side, values: Any) -> None:
        if side == "input":
            calls.append(arguments_of(model, values))

    with torch.no_grad(), forward_hooks({"": model}, see):
        task.loss(model, batch)
    if not calls:
        raise UserError(
            f"the loss of the task {task.name} does not call the model as a whole; diagnose the model from "
            "Python: normlab.diagnose(model, batch, loss=…)"
        )
    return TaskInputs(task, batch, calls[0])


def mean_loss(model: nn.Module, inputs: TaskInputs) -> Tensor:
    """Return the task's loss on its micro-batch, as a mean over the tokens that it predicts."""
    return inputs.task.loss(model, inputs.batch).loss / inputs.batch.tokens
