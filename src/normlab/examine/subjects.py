"""Cases for a diagnosis: a configuration at its initialisation, a run at a checkpoint, or any model."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from normlab.diagnosis import Diagnosis, StackView, Structure, diagnose, read_structure
from normlab.diagnosis.diagnose import Options
from normlab.diagnosis.probing.step import OptimiserFactory
from normlab.diagnosis.study import SMALL_TOKENS
from normlab.errors import UserError
from normlab.examine.inputs import mean_loss, task_inputs
from normlab.nn.sublayer import Sublayer
from normlab.optim import ScheduleState, build_optimiser, schedule_factor
from normlab.recipes.grammar import describe
from normlab.spec.config import Config, OptimConfig
from normlab.spec.units import rate
from normlab.store.folder import RunFolder
from normlab.store.manifest import committed
from normlab.tasks.registry import TASKS
from normlab.tasks.task import Task
from normlab.training.checkpoint import has_checkpoint, load_checkpoint
from normlab.training.devices import prepare_process
from normlab.training.weights import checkpoint_of

Tasks: TypeAlias = tuple[Task[Any, Any, Any], Task[Any, Any, Any]]
MINI_BATCHES: Final = 4
FIRST: Final = 0
"""Index of the training batch that is examined."""


@dataclass(frozen=True)
class Case:
    """A model with everything that its diagnosis needs."""

    title: str
    model: nn.Module
    batch: Any
    loss: Callable[[nn.Module, Any], Tensor] | None = None
    lr: float | None = None
    """Learning rate of an Adam, if no optimiser is given."""
    optimiser: torch.optim.Optimizer | OptimiserFactory | None = None
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


def of_config(config: Config, root: Path, *, tokens: int) -> Case:
    """Examine a resolved configuration, as it is initialised, in float32 on ``tokens`` positions of its text.

    The text is prepared under ``root``. Raises UserError for a configuration that cannot be trained.
    """
    task, small = _tasks(config, root, tokens)
    model = task.build()
    facts = {"recipe": describe(config)}
    if warm := config.optim.warmup_steps:
        facts["warm-up"] = f"{warm:,} steps to this rate"
    return _case(_title(config), (task, small), model, facts)


def of_run(folder: RunFolder, checkpoint: str | int, *, tokens: int) -> Case:
    """Examine a run on the first batch of its training text, at its checkpoint ``last``, ``best`` or
    ``average``, or at a step whose weights were kept.

    At the last checkpoint, the step of the optimiser is the run's next one, with its moments and at its
    learning rate; the other checkpoints keep no moments, so that the optimiser starts afresh. Raises
    FileNotFoundError for a run without that checkpoint.
    """
    path = committed(checkpoint_of(folder, checkpoint))
    config = folder.config()
    task, small = _tasks(config, folder.path.parent, tokens)
    model = task.build()
    optimiser = build_optimiser(model.parameters(), config.optim)
    amid = (path / "optimiser.safetensors").exists()
    progress = load_checkpoint(path, model, optimiser if amid else None, run=folder.id()).progress()
    step = progress.step
    state = ScheduleState(config.optim, config.train.steps, progress.val_decay.decays)
    lr = config.optim.lr * schedule_factor(step + 1, state)
    named = f"step {step:,}" if isinstance(checkpoint, int) else f"{checkpoint}, step {step:,}"
    facts = {"run": folder.path.name, "checkpoint": named, "recipe": describe(config)}
    if not lr:
        facts["learning rate"] = f"0 by now, so that the peak of {rate(config.optim.lr)} is examined"
    which = named if isinstance(checkpoint, int) else f"{checkpoint} checkpoint"
    case = _case(f"{_title(config)}, {which}", (task, small), model, facts)
    case.plan.pop("warmup_steps", None)  # the rate is that of this step already
    lr = lr or config.optim.lr
    return replace(case, optimiser=_at(optimiser, lr) if amid else partial(_make, optim=config.optim, lr=lr))


def _title(config: Config) -> str:
    layers = [str(n) for n in (config.model.encoder_layers, config.model.decoder_layers) if n]
    return f"{config.recipe}, {'+'.join(layers)} layers of width {config.model.dim}"


def checkpoints(folder: RunFolder) -> list[str]:
    """Return the checkpoints to examine: ``last``, and ``best`` if that is of another step, if they exist."""
    status = folder.status()
    found = [name for name in ("last", "best") if has_checkpoint(getattr(folder, name))]
    wanted = found[:1] if status.step == status.best_step else found
    return wanted or ["last"]


def of_names(model: str, batch: str, loss: str = "", *, optimiser: str = "", lr: float | None = None) -> Case:
    """Examine any model, named by ``package.module:function`` with functions that return the model and a
    batch for it and, if the model's output holds no loss, ``loss(model, batch)``. ``optimiser(model)`` makes
    the optimiser that steps it; without one that is an Adam at the rate ``lr``.

    A name may also be that of a module or a batch itself. Modules are imported as by ``import``, also from
    the current directory. Raises UserError for a name that cannot be imported.
    """
    built = _built(model, "--model", nn.Module)
    if not isinstance(built, nn.Module):
        kind = f"the class {built.__name__}" if isinstance(built, type) else f"a {type(built).__name__}"
        raise UserError(
            f"--model {model} gives {kind}, not a torch.nn.Module; name a function that returns one"
        )
    given = _built(batch, "--batch", (Tensor, dict, tuple, list))
    return Case(
        title=type(built).__name__,
        model=built,
        batch=given,
        loss=_named(loss, "--loss") if loss else None,
        optimiser=_made(optimiser, built) if optimiser else None,
        lr=lr,
        facts={"model from": model, "batch from": batch},
    )


def _made(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimiser that a named function makes for the model."""
    make, flag = _named(name, "--own-optimiser"), f"--own-optimiser {name}"
    if not callable(make):
        raise UserError(f"{flag} is not a function; name one of the model that returns its optimiser")
    try:
        made = make(model)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise UserError(f"{flag} was called with the model and raised {said}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise UserError(f"{flag} returns a {type(made).__name__}, not a torch.optim.Optimizer")
    return made


def _tasks(config: Config, root: Path, tokens: int) -> Tasks:
    """Return the task with batches of ``tokens`` positions, and with small ones."""
    kind = TASKS[config.task]
    kind.check(config)
    device = prepare_process(config.machine)
    data, corpus = kind.prepare(config.data, root / "data")
    sized = [
        replace(config, data=data, train=replace(config.train, max_tokens=size, precision="fp32"))
        for size in (tokens, min(tokens, SMALL_TOKENS))
    ]
    large, small = (kind(one, corpus, device) for one in sized)
    return large, small


def _case(title: str, tasks: Tasks, model: nn.Module, facts: Mapping[str, str]) -> Case:
    task, small = tasks
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


def _built(name: str, flag: str, kind: Any) -> Any:
    """Return the object of a name, or the result of calling it if it is a function."""
    found = _named(name, flag)
    if isinstance(found, kind) or not callable(found):
        return found
    try:
        return found()
    except Exception as error:
        raise UserError(
            f"{flag} {name} was called without arguments and raised {type(error).__name__}: {error}"
        ) from error


def _named(name: str, flag: str) -> Any:
    example = f"{flag} my_package.my_module:{flag.strip('-').replace('-', '_')}"
    module, colon, attribute = name.partition(":")
    if not colon or not re.fullmatch(r"[\w.]+", module) or not attribute:
        raise UserError(f"{flag} {name!r} is not a module and a name in it; type them as in {example}")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        found: Any = import_module(module)
    except Exception as error:
        where = f"; it is looked for in {Path.cwd()} and among what is installed"
        hint = where if isinstance(error, ModuleNotFoundError) else ""
        raise UserError(f"{flag}: cannot import {module!r}: {type(error).__name__}: {error}{hint}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            own = [n for n, value in vars(found).items() if callable(value) and not n.startswith("_")]
            raise UserError(f"{flag}: {module!r} has no {attribute!r}; it has {', '.join(own) or 'nothing'}")
        found = getattr(found, part)
    return found
