"""Runs of the user's own setups, trained by their code at rates that a comparison chooses.

A configuration holds no paths: only the command line names the files that a run needs.
"""

from __future__ import annotations

import hashlib
import math
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, final

import torch

from normlab.base.files import write_json_atomic
from normlab.base.metric import NLL, Cost, Metric
from normlab.base.model_config import derive
from normlab.base.units import rate
from normlab.errors import UserError
from normlab.lab.config import Config, run_id
from normlab.lab.runs.folder import Row, RunFolder, State, Status
from normlab.lab.training.cost import cost_of
from normlab.lab.training.devices import hardware, prepare_process
from normlab.lab.training.jobs import Worker
from normlab.lab.training.outcome import outcome
from normlab.lab.training.own_setups import opened_setup
from normlab.lab.training.progress import marked
from normlab.private_torch import runs_compiled
from normlab.setups.setup import Setup
from normlab.trace.optimizers import copied
from normlab.trace.restore import same_globals, same_random_state, undisturbed
from normlab.trace.tensors import bytes_of, tensors_in, unwrap
from normlab.trials.course import Course, read_course
from normlab.trials.fingerprint import fingerprint
from normlab.trials.scale import Scale, read_scale
from normlab.trials.training import Training, first_steps, train

LOSS: Final = Metric(NLL.name, "loss", higher_is_better=False, digits=NLL.digits)
"""The loss as the step returns it, if it is not known to be a pure cross-entropy."""
HELD_OUT: Final = 128
"""The most batches of ``Setup.dev`` that are read."""
FIRST: Final = 16
"""Batches from which rates and targets are read."""
ENDS: Final = 0.1
"""Without ``Setup.dev``, the share of the steps, at the end, whose losses count, each before its step."""
PURE: Final = 1e-4
"""A loss counts as NLL if at most this share of it, as from rounding, is not cross-entropy."""


@dataclass(frozen=True)
class SetupFacts:
    """What the first steps of a setup show."""

    course: Course
    scale: Scale
    digest: str
    """A digest of the files that the setup came from and, after a dot, of its weights, optimizer, batches."""
    batches: str
    """A digest of the first setup's batches."""
    cost: Cost
    held_out: int
    """The number of batches of ``Setup.dev``."""
    kind: str
    """The classes of the model and of its optimizers."""
    device: str
    planned_steps: int | None
    compiled: bool
    """Whether the model is a compiled one, which is trained uncompiled."""


def metric_of(scale: Scale) -> Metric:
    """NLL for a loss that is a cross-entropy of known targets; for any other the loss as it is."""
    loss_at_start = scale.weight * scale.start + scale.rest
    pure = abs(scale.rest) <= PURE * abs(loss_at_start)
    return NLL if scale.unigram is not None and pure else LOSS


def _batch_stream(setup: Setup, seed: int) -> Iterator[Any]:
    """Yield the batches of a training, each drawn from its own random state, whatever the model."""
    stream = setup.stream()
    for index in range(sys.maxsize):
        with same_random_state(derive(seed, "batch", index) >> 31):  # numpy takes 32 bits
            batch = next(stream)
        yield batch


def _held_out(setup: Setup) -> list[Any]:
    """The batches that are not trained on, the same for every seed."""
    with same_random_state(0):
        return setup.held_out(HELD_OUT)


def read(setups: Mapping[str, Any], name: str, seed: int) -> SetupFacts:
    """Read rates, targets, cost and code of a setup. Raises UserError for one that cannot be trained."""
    with same_globals(), opened_setup(setups, name, seed) as (setup, first_setup, code):
        batches = list(islice(_batch_stream(first_setup, seed), FIRST))
        _, course, scale = _first_steps(setup, batches, seed)
        digests = fingerprint(setup, batches)
        dev = _held_out(first_setup)
        if dev and setup.loss is None:
            _loss_of(setup, setup.model, dev[:1])  # whose error names what is missing, before any training
        cost = cost_of(setup.model, lambda model: setup.loss_of(model, batches[0]), _tokens(scale))
        content = hashlib.sha256(" ".join(digests.values()).encode())
        for _, tensor in tensors_in(dev):
            content.update(bytes_of(tensor))
        optimizers = copied(setup)[1]
        return SetupFacts(
            course=course,
            scale=scale,
            digest=f"{code}.{content.hexdigest()}",
            batches=digests["batches"],
            cost=cost,
            held_out=len(dev),
            kind=", ".join(type(part).__name__ for part in (unwrap(setup.model), *optimizers)),
            device=next((p.device.type for p in setup.model.parameters()), "cpu"),
            planned_steps=setup.declare.steps,
            compiled=any(map(runs_compiled, setup.model.modules())),
        )


def rehearse(config: Config, setups: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return the seconds of a step, a validation and a whole run of a setup, measured on its parts: opening
    it, a few steps, the held-out loss.
    """
    prepare_process(config.machine)
    seed = config.seeds.init
    lap_began = time.perf_counter()

    def lap() -> float:
        """Return the seconds since the last lap."""
        nonlocal lap_began
        seconds = time.perf_counter() - lap_began
        lap_began += seconds
        return seconds

    with same_globals(), opened_setup(setups, config.recipe, seed) as (setup, first_setup, _):
        opening = lap()
        batches = list(islice(_batch_stream(first_setup, seed), FIRST))
        drawing = lap()
        seen, _, _ = _first_steps(setup, batches, seed)
        stepping = lap()
        dev = _held_out(first_setup)
        reading = lap()
        if dev:
            _loss_of(setup, setup.model, dev)
        validation = lap() / 2  # every second batch
    step = statistics.median(seen.seconds[1:] or seen.seconds)
    steps, every = config.train.steps, config.train.validate_every_steps
    training = steps * (step + drawing / FIRST) + (steps // every + 2) * validation
    return step, validation, opening + stepping + reading + training


def _first_steps(setup: Setup, batches: Sequence[Any], seed: int) -> tuple[Training, Course, Scale]:
    """Train a copy for a few steps at its own rates to read rates and targets."""
    if setup.optimizer is None:
        raise UserError("setup() has no optimizer; return one, as in optimizer=torch.optim.AdamW(…, lr=1e-3)")
    seen = first_steps(setup, batches, seed=seed, groups={})
    course = read_course(setup, seen)
    scale = read_scale(setup, batches[: FIRST // 2], math.inf, seen.losses[0])
    return seen, course, scale


def _tokens(scale: Scale) -> int:
    """The targets of a batch; 0 if they are not known."""
    return scale.targets // scale.batches if scale.batches else 0


def _loss_of(setup: Setup, model: torch.nn.Module, batches: Sequence[Any]) -> float:
    """The mean loss of batches, without training."""
    with undisturbed(model), torch.no_grad():
        return statistics.fmean(float(setup.loss_of(model, batch)) for batch in batches)


@dataclass
class _OwnRun:
    """One training in progress: rows while it goes, scores at its end."""

    folder: RunFolder
    config: Config
    setup: Setup
    scale: Scale
    factor: float
    """The factor on the setup's own rates that makes the largest of them the configuration's."""
    dev: Sequence[Any]
    """Held-out batches: every second one helps to choose rates, the others are reported."""
    stop: threading.Event
    rows: list[Row] = field(default_factory=list)
    pending: list[float] = field(default_factory=list)
    """The losses since the last row."""

    def train(self, batches: Iterator[Any]) -> None:
        """Train to the last step, or until a loss is not finite; leave the run done."""
        seen = train(
            self.setup,
            islice(batches, self.config.train.steps),
            lambda _, rates: [self.factor * rate for rate in rates],
            seed=self.config.seeds.init,
            groups={},
            enough=self._after,
        )
        if seen.stopped.startswith("raised"):
            raise RuntimeError(f"the step {seen.stopped}")
        chosen_by, reported = self._scores(seen)
        self._write_dev(seen, chosen_by)
        write_json_atomic(self.folder.scores, {NLL.name: reported})
        step = len(seen.losses)
        unigram = math.inf  # by which no run counts as stuck
        if self.scale.unigram is not None:
            unigram = self.scale.unigram
        ended = outcome(
            self.rows,
            unigram_entropy_nats=unigram,
            total_steps=self.config.train.steps,
            best_step=step,
            has_source=False,
            final=True,
        )
        self._report("done", seen, outcome=ended, best_step=step, best_dev={NLL.name: chosen_by})

    def _after(self, seen: Training) -> str:
        """Write rows after a step; return why the training ends here, if it does. Raises KeyboardInterrupt
        once asked to stop.
        """
        if self.stop.is_set():
            raise KeyboardInterrupt
        step, every = len(seen.losses), self.config.machine.log_every_steps
        self.pending.append(seen.losses[-1])
        broken = not math.isfinite(seen.losses[-1])
        last = step == self.config.train.steps
        if step == 1 or step % every == 0 or last or broken:
            self._log(seen)
            self._report("running", seen)
        if self.dev and not last and step % self.config.train.validate_every_steps == 0:
            self._write_dev(seen, self._nats(seen, self.dev[::2]))
        return "diverged" if broken else ""

    def _log(self, seen: Training) -> None:
        step, loss = len(seen.losses), statistics.fmean(self.pending)
        self.pending.clear()
        row: Row = {"kind": "train", "step": step, "loss": loss, "nll": self.scale.nats(loss)}
        row["lr"] = self.factor * max(seen.rates.get(step - 1, [0.0]))
        tokens = _tokens(self.scale)
        if tokens:
            row["tokens"] = step * tokens
        row["seconds"] = round(sum(seen.seconds), 3)
        self._write(row)

    def _write_dev(self, seen: Training, nll: float) -> None:
        self._write({"kind": "dev", "step": len(seen.losses), "nll": nll, "seconds": sum(seen.seconds)})

    def _write(self, row: Row) -> None:
        self.rows.append(row)
        self.folder.append_metrics(row)

    def _scores(self, seen: Training) -> tuple[float, float]:
        """The loss that chooses a rate and the one that is reported, in nats if targets are known."""
        if self.dev:
            return self._nats(seen, self.dev[::2]), self._nats(seen, self.dev[1::2] or self.dev)
        count = max(2, math.ceil(ENDS * self.config.train.steps))
        last = seen.losses[-count:]
        choosing, reported = statistics.fmean(last[::2]), statistics.fmean(last[1::2])
        return self.scale.nats(choosing), self.scale.nats(reported)

    def _nats(self, seen: Training, batches: Sequence[Any]) -> float:
        assert seen.model is not None
        return self.scale.nats(_loss_of(self.setup, seen.model, batches))

    def _report(self, state: State, seen: Training, **ended: Any) -> None:
        device = next((p.device for p in unwrap(self.setup.model).parameters()), torch.device("cpu"))
        so_far = {"step": len(seen.losses), "train_seconds": sum(seen.seconds)}
        self.folder.set_status(Status(state, hardware=hardware(device), **so_far, **ended))


def train_own(
    config: Config, root: Path, setups: Mapping[str, Any], stop: threading.Event | None = None
) -> RunFolder:
    """Train the setup that ``config.recipe`` names, and return the run's folder.

    ``setups`` are the sources of ``opened_setup``. A run that is done is returned as it is; one that was
    interrupted starts over. Raises UserError for code whose digest is not ``config.own_code``.
    """
    folder = RunFolder(root / run_id(config))
    if folder.there() and folder.status().state == "done":
        return folder
    folder.path.mkdir(parents=True, exist_ok=True)
    seed = config.seeds.init
    with folder.lock():
        prepare_process(config.machine)
        with (
            marked(folder),
            same_globals(),
            opened_setup(setups, config.recipe, seed) as (setup, first_setup, code),
        ):
            if code != config.own_code.partition(".")[0]:
                raise UserError(
                    f"the code of {config.recipe} has changed since the comparison began; type the same "
                    "command again, and it is trained anew"
                )
            batches = _batch_stream(first_setup, seed)
            first = list(islice(batches, FIRST))
            _, course, scale = _first_steps(setup, first, seed)
            repeat = _repeat_command(config, setups)
            RunFolder.create(folder.path, config, (metric_of(scale),), repeat=repeat)
            folder.cut_rows(-1)  # of a run that was interrupted
            run = _OwnRun(
                folder,
                config,
                setup,
                scale,
                factor=config.optim.lr / course.rate,
                dev=_held_out(first_setup),
                stop=stop or threading.Event(),
            )
            run.train(chain(first, batches))
    return folder


def _repeat_command(config: Config, setups: Mapping[str, Any]) -> str:
    """Return the command that trains the run again, alongside those that it is compared with."""
    if not all(isinstance(value, str) for value in setups.values()):
        return f"normlab.compare(request, setups=…) in Python, with {config.recipe} among the setups"
    rest = f"--steps {config.train.steps} --validate-every-steps {config.train.validate_every_steps}"
    rest += f" --lrs {rate(config.optim.lr)} --first-seed {config.seeds.init} --seeds 1 --out again"
    return f"{shlex.join(['normlab', 'compare', *setups])} {rest}"


@final
class Here(Worker):
    """A worker that trains setups in this process, one after the other."""

    def __init__(self, root: Path, setups: Mapping[str, Any]) -> None:
        self._root, self._setups, self._stop = root, setups, threading.Event()

    def train(self, config: Config) -> str:
        try:
            train_own(config, self._root, self._setups, self._stop)
        except Exception as error:
            return " ".join(f"{type(error).__name__}: {error}".split())
        return "done"

    def interrupt(self) -> None:
        self._stop.set()
