"""Cases for a diagnosis: a configuration at its initialisation, a run at a checkpoint, or any model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from normlab.config.config import Config, OptimConfig
from normlab.config.units import rate
from normlab.diagnosis import Diagnosis, StackView, Structure, diagnose, read_structure
from normlab.diagnosis.diagnose import Options, step_of
from normlab.diagnosis.subject import SMALL_TOKENS
from normlab.errors import UserError
from normlab.nn.sublayer import Sublayer
from normlab.optim import build_optimiser, set_rate
from normlab.runs.folder import RunFolder
from normlab.trace.step import OptimizerFactory
from normlab.training import setups
from normlab.training.recipes.grammar import describe
from normlab.training.trainer import AnyTask

MINI_BATCHES: Final = 4


@dataclass(frozen=True)
class Case:
    """A model with everything that its diagnosis needs."""

    title: str
    model: nn.Module
    batch: Any
    loss: Callable[[nn.Module, Any], Tensor] | None = None
    lr: float | None = None
    """Learning rate of Adam, if no optimiser is given."""
    optimiser: torch.optim.Optimizer | OptimizerFactory | None = None
    batches: Sequence[Any] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    warmup_steps: int = 0
    """Steps over which the learning rate rises to its peak, in the training ahead, if that is known."""

    def diagnosed(
        self, preset: str, *, blocks: Sequence[str] = (), branches: Sequence[str] = ()
    ) -> Diagnosis:
        """Run the studies of a preset, see ``diagnosis.diagnose``. Raises UserError if that is impossible."""
        options: Options = {"batches": self.batches, "warmup_steps": self.warmup_steps}
        if blocks or branches:
            options |= {"blocks": blocks, "branches": branches}
        elif (structure := _structure(self.model, self.batch)) is not None:
            options["structure"] = structure
        return diagnose(
            self.model,
            self.batch,
            loss=self.loss,
            lr=self.lr,
            optimizer=self.optimiser,
            preset=preset,
            **options,
        )


def _structure(model: nn.Module, batch: Any) -> Structure | None:
    """Read a model that has our sublayers, or return None, so that a diagnosis says what is wrong.

    A sublayer that shows no sum, as if its placement keeps the stream on a sphere, is read by its branch.
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
            by_branch = read_structure(model, batch, branches=("f",))
            return replace(by_branch, stacks=tuple(seen.get(stack.name, stack) for stack in by_branch.stacks))
    return None


def of_setup(source: setups.NamedSetup, lr: float | None = None) -> Case:
    """Examine a setup, stepped by its optimizer or, if it has none, by Adam at the rate ``lr``.

    Raises UserError for several optimizers, and for a rate if the optimizer has its own.
    """
    setup = source.setup
    optimizer, rate = step_of(setup, lr)
    return Case(source.title, setup.model, setup.batch, setup.loss, rate, optimizer, facts=source.facts)


def of_config(config: Config, root: Path, *, tokens: int) -> Case:
    """Examine a resolved configuration, as it is initialised, in float32 on ``tokens`` positions of its text.

    The text is prepared under ``root``. Raises UserError for a configuration that cannot be trained.
    """
    task = setups.task_of(config, root, tokens)
    facts = {"recipe": describe(config)}
    if warm := config.optim.warmup_steps:
        facts["warm-up"] = f"{warm:,} steps to this rate"
    return _case(setups.title_of(config), task, task.build(), facts)


def of_run(folder: RunFolder, checkpoint: str | int, *, tokens: int) -> Case:
    """Examine a run on the first batch of its training text, at a checkpoint of ``training.weights``.

    At the last checkpoint the optimiser takes the run's next step, with its moments and at its learning rate;
    the others keep no moments, so there it starts afresh. Raises FileNotFoundError for a run without that
    checkpoint.
    """
    task, model, optimizer, progress = setups.load_run(folder, checkpoint, tokens=tokens)
    config, label = folder.config(), setups.label_of(checkpoint, progress)
    lr = progress.learning_rate(config, ahead=1)
    facts = {"run": folder.path.name, "checkpoint": label, "recipe": describe(config)}
    if not lr:
        facts["learning rate"] = f"0 by now, so that the peak of {rate(config.optim.lr)} is examined"
    which = label if isinstance(checkpoint, int) else f"{checkpoint} checkpoint"
    case = _case(f"{setups.title_of(config)}, {which}", task, model, facts)
    lr = lr or config.optim.lr
    own = set_rate(optimizer, lr) if optimizer else _factory(model, config.optim, lr)
    return replace(case, optimiser=own, warmup_steps=0)  # the rate is already this step's


def _case(title: str, task: AnyTask, model: nn.Module, facts: Mapping[str, str]) -> Case:
    train = replace(task.config.train, max_tokens=min(task.config.train.max_tokens, SMALL_TOKENS))
    small = type(task)(replace(task.config, train=train), task.corpus, task.device)
    micro = task.batch(setups.FIRST)
    return Case(
        title=title,
        model=model,
        batch=_task_inputs(task, model, micro),
        loss=mean_loss,
        optimiser=_factory(model, task.config.optim, task.config.optim.lr),
        batches=[_task_inputs(small, model, small.batch(i)) for i in range(MINI_BATCHES)],
        facts=dict(facts) | {"tokens": f"{micro.tokens:,} predicted in {micro.padded_tokens:,} positions"},
        warmup_steps=task.config.optim.warmup_steps,
    )


def _factory(model: nn.Module, optim: OptimConfig, lr: float) -> OptimizerFactory:
    return lambda parameters: set_rate(build_optimiser(model, optim, parameters), lr)


class TaskInputs(dict[str, Any]):
    """The keyword arguments of a model, with the task and the micro-batch that give its loss."""

    def __init__(self, task: AnyTask, batch: Any, arguments: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        self.task, self.batch = task, batch


@torch.no_grad()
def _task_inputs(task: AnyTask, model: nn.Module, batch: Any) -> TaskInputs:
    """Find the arguments of a model by watching how the task's loss calls it on a micro-batch.

    Raises UserError if the loss does not call the model itself.
    """
    calls = setups.calls_of(model, lambda: task.loss(model, batch))
    if not calls:
        raise UserError(
            f"the loss of the task {task.name} does not call the model as a whole; diagnose the model from "
            "Python: normlab.diagnose(model, batch, loss=…)"
        )
    return TaskInputs(task, batch, calls[0])


def mean_loss(model: nn.Module, inputs: TaskInputs) -> Tensor:
    """Return the task's loss on its micro-batch, as a mean over the tokens that it predicts."""
    return inputs.task.loss(model, inputs.batch).loss / inputs.batch.tokens
