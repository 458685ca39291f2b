"""Setups from where people keep them: a function in a file, a configuration, or a normlab run."""

from __future__ import annotations

import inspect
import itertools
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module, util
from pathlib import Path
from typing import Any, Final, Unpack, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from normlab.config.config import Config, run_id
from normlab.config.units import rate
from normlab.data.tokenizer import EOS, PAD
from normlab.diagnosis import Diagnosis, diagnose
from normlab.diagnosis.diagnose import Options
from normlab.diagnosis.subject import SMALL_TOKENS
from normlab.errors import UserError
from normlab.nn import after_step
from normlab.optim import ScheduleState, build_optimiser, clipped_together, schedule_factor, set_rate
from normlab.runs.folder import RunFolder
from normlab.runs.manifest import committed
from normlab.tasks import TASKS
from normlab.trace.rehearsal import plain_step
from normlab.trace.setup import Declaration, Setup
from normlab.trace.tensors import Side, arguments_of, forward_hooks, unwrap
from normlab.trace.untouched import same_random_state
from normlab.training.checkpoint import has_checkpoint, load_checkpoint
from normlab.training.devices import prepare_process
from normlab.training.parallel import SingleProcess
from normlab.training.recipes.grammar import describe, require_known
from normlab.training.trainer import AnyTask
from normlab.training.weights import checkpoint_of, load_initial_weights, with_start

FIRST: Final = 0
"""Index of the training batch that is examined."""
MINI_BATCHES: Final = 4
ANEW: Final = ("seed", "width", "depth")
"""Arguments that a ``setup`` function may declare."""
SIZED: Final = {"width": (256, "n_embd"), "depth": (4, "n_layer")}
"""Sizes, with the value and the argument that the example of such a function shows for them."""


@dataclass(frozen=True)
class NamedSetup:
    """A setup, with what to call it and where it comes from."""

    title: str
    setup: Setup
    facts: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    """A run's checkpoint, or the recipe and the id of a configuration; empty for a file."""
    warmup_steps: int = 0
    """Steps over which the rate rises to its peak, in the training ahead, if that is known."""
    mini_batches: Callable[[], Sequence[Any]] = tuple
    """Makes small training batches for studies that take many passes; none if unknown."""

    def diagnosed(self, preset: str, lr: float | None = None, **options: Unpack[Options]) -> Diagnosis:
        """Run the studies of a preset, see ``diagnosis.diagnose``. Raises UserError if that is impossible."""
        own: Options = {"batches": self.mini_batches(), "warmup_steps": self.warmup_steps}
        return diagnose(self.setup, loss=None, lr=lr, optimizer=None, preset=preset, **(own | options))


@contextmanager
def setup_from_file(reference: str, *, seed: int) -> Iterator[NamedSetup]:
    """Yield the setup that the function after the colon returns, see ``function_from_file``.

    The function may declare the arguments ``seed``, ``width`` and ``depth``; with ``seed`` the setup can draw
    its model anew. Raises UserError for a file that raises, and for a function that returns no setup.
    """
    with function_from_file(reference, seed=seed) as function:
        with redirect_stdout(sys.stderr), same_random_state(seed):
            setup = called(function, reference, seed)
        yield NamedSetup(f"{type(setup.model).__name__} of {reference}", setup)


@contextmanager
def function_from_file(reference: str, *, seed: int) -> Iterator[Any]:
    """Run a file, or import a module, and yield what the name after the colon (default ``setup``) refers to.

    The file runs once, not as ``__main__``, with its own name as ``sys.argv`` and its folder, or the current
    one for a module, first on ``sys.path``; both are restored when the block ends. What it prints goes to
    standard error. Raises UserError for a file that raises.
    """
    where, colon, name = reference.partition(":")
    path, arguments = list(sys.path), list(sys.argv)
    try:
        with redirect_stdout(sys.stderr), same_random_state(seed):
            value = _attribute(_load(where), where, name if colon else "setup")
        yield value
    finally:
        sys.path[:], sys.argv[:] = path, arguments


def _load(where: str) -> Any:
    file = Path(where)
    if not where.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return _guard(lambda: import_module(where), f"the module {where!r}")
    if not file.is_file():
        raise UserError(f"there is no file {where}; give one that defines setup(), as in train.py:setup")
    name = file.stem if file.stem not in sys.modules and file.stem.isidentifier() else f"normlab_{file.stem}"
    spec = util.spec_from_file_location(name, file.resolve())
    if spec is None or spec.loader is None:
        raise UserError(f"{where} cannot be run as Python")
    module = sys.modules[name] = util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))
    sys.argv[:] = [where]
    run = spec.loader.exec_module
    try:
        _guard(lambda: run(module), where)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _attribute(module: Any, where: str, name: str) -> Any:
    if hasattr(module, name):
        return getattr(module, name)
    own = [n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_")]
    raise UserError(
        f"{where} has no {name!r}; define {name}(), which returns normlab.Setup(model, batches, …)"
        + (f", or name another function: {', '.join(own[:8])}" if own else "")
    )


def called(value: Any, reference: str, seed: int, **size: int) -> Setup:
    """The setup that a function returns at a ``width`` or ``depth``, or a setup itself.

    Raises UserError for anything else, and for a function that takes no such size.
    """
    if not callable(value) or isinstance(value, nn.Module):
        _require_sizes(size, {}, reference)
        return Setup.of(cast("Any", value))
    parameters: Mapping[str, inspect.Parameter] = {}
    with suppress(TypeError, ValueError):  # from functions written in C
        parameters = inspect.signature(value).parameters
    _require_sizes(size, parameters, reference)
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    given = {"seed", *size}
    needed = {n for n, p in parameters.items() if p.default is p.empty and p.kind not in kinds} - given
    if needed:
        rest = "give them defaults" if needed <= set(ANEW) else f"it may declare {', '.join(ANEW)}"
        asked = ", ".join(n for n in parameters if n in needed)
        raise UserError(f"{reference} needs the arguments {asked}; {rest}")
    seeded = "seed" in parameters
    setup = Setup.of(_guard(lambda: value(**size, **({"seed": seed} if seeded else {})), reference))
    if not seeded or setup.make is not None:
        return setup
    return replace(setup, make=lambda: Setup.of(value(**size, seed=draw_seed())).model)


def _require_sizes(sizes: Iterable[str], parameters: Iterable[str], reference: str) -> None:
    """Raise UserError, with what to write, if a function does not take a size by its name."""
    for name in set(sizes) - set(parameters):
        size, argument = SIZED[name]
        raise UserError(
            f"{reference} takes no {name}; it must build the model in any {name}, as in\n\n"
            f"  def setup({name}={size}, seed=0):\n"
            "      torch.manual_seed(seed)\n"
            f"      model = GPT({argument}={name})\n"
            "      optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
            "      return normlab.Setup(model, batches, optimizer=optimizer)"
        )


def _guard(run: Callable[[], Any], what: str) -> Any:
    """Run the user's own code. Raises UserError with the exception and the user's line that raised it."""
    try:
        return run()
    except (KeyboardInterrupt, UserError):
        raise
    except BaseException as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
        at = f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
        hint = ""
        if isinstance(error, SystemExit):
            hint = '; put the code that trains under if __name__ == "__main__":'
        elif isinstance(error, ImportError) and "relative import" in str(error):
            hint = "; name it as a module of its package, as in my_package.train:setup"
        raise UserError(f"{what} raised {type(error).__name__}: {error}{at}{hint}") from error


def draw_seed() -> int:
    """Return a seed that depends only on torch's random state, whatever the default device."""
    return int(torch.randint(2**31, (), device="cpu"))


def setup_from_config(config: Config, root: Path, *, tokens: int) -> NamedSetup:
    """Return the setup of a resolved configuration, in float32 on ``tokens`` positions of its text, at its
    start: freshly drawn, or with the weights that ``train.init_from`` names.

    The text is prepared under ``root``. Raises UserError for a configuration that cannot be trained, and
    FileNotFoundError if there are no such weights.
    """
    task = task_of(with_start(config, root), root, tokens)
    optim, trained = task.config.optim, bool(task.config.train.init_digest)
    setup = _setup(task, task.build(), optim.lr, trained=trained)
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
    """Return the setup of a run at a checkpoint of ``training.weights``, at the rate of the run's next step.
    At the last one the optimizer has the run's moments; the others keep none, so there it starts afresh.

    Raises FileNotFoundError for a run without that checkpoint.
    """
    path = committed(checkpoint_of(folder, checkpoint))
    task = task_of(folder.config(), folder.path.parent, tokens)
    config, model, optimizer = task.config, task.build(), None
    if (path / "optimiser.safetensors").exists():
        optimizer = build_optimiser(model, config.optim)
    progress = load_checkpoint(path, model, optimizer, run=folder.id()).progress()
    step = f"step {progress.step:,}"
    if isinstance(checkpoint, str):
        label, which, name = f"{checkpoint}, {step}", f"{checkpoint} checkpoint", checkpoint
    else:
        label, which, name = step, step, f"step-{checkpoint}"
    facts = {"run": folder.path.name, "checkpoint": label, **_facts(task)}
    if not (lr := progress.learning_rate(config, ahead=1)):
        lr = config.optim.lr
        facts["learning rate"] = f"0 by now, so that the peak of {rate(lr)} is examined"
    setup = replace(_setup(task, model, lr, trained=progress.step > 0), scheduler=None)
    if optimizer is not None:
        setup = replace(setup, optimizer=set_rate(optimizer, lr))
    title = f"{_title_of(config)}, {which}"
    return NamedSetup(title, setup, facts, name, mini_batches=partial(_mini_batches, task))


def checkpoints(folder: RunFolder, names: Sequence[str] = (), step: int | None = None) -> list[str | int]:
    """Return the checkpoints to examine: those that are named, and the step; without any, ``last``, and also
    ``best`` if it is from another step, if they exist. Raises UserError for a run of an unknown recipe.
    """
    require_known(folder.config())
    if names or step is not None:
        return [*names, *([] if step is None else [step])]
    status = folder.status()
    there = [name for name in ("last", "best") if has_checkpoint(getattr(folder, name))]
    return [*there[: 1 if status.step == status.best_step else 2]] or ["last"]


def _title_of(config: Config) -> str:
    """Name a configuration by its recipe, its layers and its width."""
    layers = [str(n) for n in (config.model.encoder_layers, config.model.decoder_layers) if n]
    return f"{config.recipe}, {'+'.join(layers)} layers of width {config.model.dim}"


def _facts(task: AnyTask) -> dict[str, str]:
    micro = task.batch(FIRST)
    return {
        "recipe": describe(task.config),
        "tokens": f"{micro.tokens:,} predicted in {micro.padded_tokens:,} positions",
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
    """The training batches of a task, in an endless stream."""

    def __init__(self, task: AnyTask) -> None:
        self.task = task

    def __iter__(self) -> Iterator[Any]:
        return map(self.task.batch, itertools.count(FIRST))


def _setup(task: AnyTask, model: nn.Module, lr: float, *, trained: bool) -> Setup:
    config, optim = task.config, task.config.optim
    state = ScheduleState(optim, config.train.steps)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        own = batch.recounted() if hasattr(batch, "recounted") else batch
        return task.loss(model, own).loss / own.tokens

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return set_rate(build_optimiser(model, optim), lr)

    def scheduler(optimizer: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: schedule_factor(step + 1, state))

    def clip(model: nn.Module) -> None:
        parameters = list(model.parameters())
        for own in clipped_together(model, optim) if optim.max_grad_norm else ():
            nn.utils.clip_grad_norm_([parameters[i] for i in own], optim.max_grad_norm)

    def make() -> nn.Module:
        seeds = replace(config.seeds, init=draw_seed())
        with torch.device(task.device):  # the start may need a pass on real numbers, not on meta
            made = type(task)(replace(config, seeds=seeds), task.corpus, task.device).build()
        default = torch.get_default_device()
        return made.to(default) if default.type == "meta" else made

    return Setup(
        model,
        _TrainingBatches(task),
        loss=loss,
        optimizer=optimizer,
        scheduler=scheduler,
        step=plain_step(loss, clip=clip, after=after_step, scheduled=True),
        lr=lr,
        declare=Declaration(
            pad_id=PAD, eos_id=EOS, steps=config.train.steps, peak_lr=optim.lr, trained=trained or None
        ),
        make=make,
    )


class _EnoughError(Exception):
    """All the calls that were wanted have been seen."""


def calls_of(model: nn.Module, run: Callable[[], object], most: int | None = None) -> list[Mapping[str, Any]]:
    """Return the arguments of a model's calls while a function runs, for the first ``most`` calls or all."""
    calls: list[Mapping[str, Any]] = []

    def see(_: str, side: Side, values: Any) -> None:
        if side == "input" and len(calls) == most:
            raise _EnoughError
        if side == "input":
            calls.append(arguments_of(model, values))

    with suppress(_EnoughError), forward_hooks({"": model}, see):
        run()
    return calls


def sources(setup: Setup, places: Iterable[str]) -> dict[str, dict[str, str | int]]:
    """Return ``file`` and ``line`` of each place: of the function behind "loss", "step" and the like, or of
    the class of a module.

    If a class is not in the current folder, as ``nn.Linear``, the nearest enclosing module whose class is
    stands in for it; if there is none, the model's own class does, as a file below its package.
    """
    model = unwrap(setup.model)
    functions = {n: _line(getattr(setup, n)) for n in ("loss", "step", "optimizer", "scheduler")}
    return {place: functions.get(place) or _line_of_module(model, place) for place in places}


def _line_of_module(model: nn.Module, path: str) -> dict[str, str | int]:
    names = path.split(".") if path else []
    for kept in range(len(names), -1, -1):
        with suppress(AttributeError):  # no such module: a parameter, or an entry of the batch
            if line := _line(type(model.get_submodule(".".join(names[:kept])))):
                return line
    return {"file": f"{type(model).__module__.replace('.', '/')}.py", "line": 1}


def _line(code: Any) -> dict[str, str | int] | None:
    """Return the place of a function or class if it is in a file in the current folder."""
    with suppress(OSError, TypeError):  # no source, or built in
        file, line = Path(inspect.getsourcefile(code) or "").resolve(), inspect.getsourcelines(code)[1]
        if file.is_relative_to(Path.cwd()):
            return {"file": file.relative_to(Path.cwd()).as_posix(), "line": max(line, 1)}
    return None
