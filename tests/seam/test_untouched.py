"""What is the user's stays as it was, whichever instrument runs; a trial trains on batches as drawn."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

import normlab
from cases import each, mostly_slow

from .decoder import VOCAB, WIDTH, Decoder, loss_of, setup_of, text

INSTRUMENTS: dict[str, Callable[[normlab.Setup], Any]] = {
    "check": lambda setup: normlab.check(setup, budget_s=600),
    "trial": lambda setup: normlab.trial(setup, steps=16, rates=(1e-3, 3e-3, 1e-2), budget_s=600),
    "diagnose": lambda setup: normlab.diagnose(setup, preset="cheap"),
}
Case = tuple[normlab.Setup, Callable[[], Any]]
"""A setup, and a function that returns a copy of what must not change."""
CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


def same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    return bool(np.all(a == b))


# ------------------------------------------------------------ objects that a step changes


@dataclass(slots=True)
class Progress:
    steps: int = 0
    last: deque[float] = field(default_factory=lambda: deque(maxlen=3))
    seen: Counter[int] = field(default_factory=Counter)


class Averaging:
    """A step that is an object: it counts, keeps its last losses and averages weights by torch's class."""

    def __init__(self, model: nn.Module) -> None:
        self.progress, self.average = Progress(), AveragedModel(model)
        self.progress.last.extend([1.0, 2.0, 3.0])

    def __call__(self, model: nn.Module, ids: Tensor, optimizer: Any, _: Any) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        self.average.update_parameters(model)
        self.progress.steps += 1
        self.progress.last.append(loss.item())
        self.progress.seen.update(ids.flatten().tolist())
        return loss


@case
def an_object_that_averages() -> Case:
    model = Decoder()
    step = Averaging(model)

    def state() -> Any:
        progress = step.progress
        weights = [x.clone() for x in step.average.state_dict().values()]
        return progress.steps, list(progress.last), dict(progress.seen), weights

    return setup_of(model, step=step), state


REGISTRY: dict[str, Any] = {"steps": 0, "history": [], "norms": np.zeros(4)}


def log(name: str, value: float) -> None:
    REGISTRY["steps"] += 1
    REGISTRY["history"].append((name, value))
    REGISTRY["norms"][REGISTRY["steps"] % 4] = value
    log.calls = getattr(log, "calls", 0) + 1  # type: ignore[attr-defined]


@case
def a_registry_of_the_file() -> Case:
    def step(model: nn.Module, ids: Tensor, optimizer: Any, _: Any) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        log("norm", float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        return loss

    def state() -> Any:
        held = REGISTRY["steps"], list(REGISTRY["history"]), REGISTRY["norms"].copy()
        return *held, dict(vars(log))

    return setup_of(Decoder(), step=step), state


# ------------------------------------------------------------ the batch, and what draws it


class Prompted(Decoder):
    def forward(self, ids: Tensor, prompt: Tensor) -> Tensor:
        x = torch.cat([prompt, self.words(ids)], 1) + self.places.weight[: prompt.shape[1] + ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))[:, prompt.shape[1] :]


@case
def a_prompt_that_has_no_gradient_yet() -> Case:
    prompt = torch.randn(4, 2, WIDTH, requires_grad=True)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch["ids"][:, :-1], batch["prompt"])
        return F.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten())

    setup = setup_of(Prompted(), batches={"ids": text(), "prompt": prompt}, loss=loss)
    return setup, lambda: (prompt.grad is None, prompt.detach().clone(), prompt.requires_grad)


@case
def a_batch_that_is_part_of_a_graph() -> Case:
    encoder = nn.Linear(WIDTH, WIDTH)
    prompt = encoder(torch.randn(4, 2, WIDTH))
    encoder.weight.grad = torch.ones(WIDTH, WIDTH)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[0][:, :-1], batch[1])
        return F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())

    setup = setup_of(Prompted(), batches=(text(), prompt), loss=loss)
    return setup, lambda: (encoder.weight.grad.clone(), encoder.weight.detach().clone())


class Cropped(Dataset[Tensor]):
    """Random crops, drawn by numpy's and Python's own generators."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Tensor:
        start = random.randrange(20) + int(np.random.randint(5))  # noqa: NPY002
        return text(1, 40)[0, start : start + 9].roll(i)


def random_states() -> Any:
    return str(random.getstate()), str(np.random.get_state()), torch.get_rng_state()  # noqa: NPY002


@case
def crops_by_global_generators() -> Case:
    return setup_of(Decoder(), batches=DataLoader(Cropped(), 4, shuffle=True)), random_states


@case
def a_sampler_with_a_generator() -> Case:
    rows, draw = TensorDataset(text(12)), torch.Generator().manual_seed(4)
    loader = DataLoader(rows, 4, sampler=RandomSampler(rows, generator=draw))
    setup = setup_of(Decoder(), batches=loader, loss=lambda model, batch: loss_of(model, batch[0]))
    return setup, lambda: (draw.get_state(), *random_states())


@pytest.mark.parametrize("name", mostly_slow(CASES, quick=["a_prompt_that_has_no_gradient_yet"]))
@each("instrument", INSTRUMENTS)
def test_nothing_of_the_users_changes(name: str, instrument: str) -> None:
    torch.manual_seed(0)
    setup, state = CASES[name]()
    before = state()
    result = INSTRUMENTS[instrument](setup)
    assert same(before, state())
    if instrument == "check":
        assert not [f for f in result.failures if f.property != "repeats"], result.failures


# ------------------------------------------------------------ buffers that a loader fills again


class Filling:
    """Draws batches into the same memory; ``fresh`` copies each."""

    def __init__(self, kind: str, *, fresh: bool) -> None:
        self.kind, self.fresh = kind, fresh

    def __iter__(self) -> Iterator[Any]:
        draw = np.random.default_rng(0)
        ids, weights = np.zeros((4, 9), np.int64), torch.zeros(4)
        while True:
            ids[:] = draw.integers(0, VOCAB, ids.shape)
            weights.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(int(ids[0, 0])))
            batch = Drawn(torch.from_numpy(ids), weights)
            if self.fresh:
                batch = Drawn(batch.ids.clone(), batch.weights.clone())
            yield batch if self.kind == "dataclass" else {"ids": batch.ids, "more": [batch.weights]}


@dataclass
class Drawn:
    ids: Tensor
    weights: Tensor


def weighted(model: nn.Module, batch: Any) -> Tensor:
    ids, weights = (
        (batch.ids, batch.weights) if isinstance(batch, Drawn) else (batch["ids"], batch["more"][0])
    )
    losses = F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")
    return (losses.mean(1) * weights).mean()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dataclass", "dict"])
def test_a_trial_trains_on_what_was_drawn(kind: str) -> None:
    losses = []
    for fresh in (True, False):
        torch.manual_seed(0)
        setup = setup_of(Decoder(), batches=Filling(kind, fresh=fresh), loss=weighted)
        result = INSTRUMENTS["trial"](setup)
        losses.append([trial.losses for trial in result.tried])
    assert losses[0] == losses[1]


# ------------------------------------------------------------ schedules that warm up


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    lr = torch.optim.lr_scheduler
    parts = [lr.LinearLR(optimizer, 0.01, total_iters=50), lr.CosineAnnealingLR(optimizer, 500)]
    return lr.SequentialLR(optimizer, parts, milestones=[50])


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=400)


@each("scheduler", [sequential, one_cycle])
def test_a_diagnosis_knows_the_warm_up_of_a_schedule(scheduler: Any) -> None:
    torch.manual_seed(0)
    diagnosis = normlab.diagnose(setup_of(Decoder(), scheduler=scheduler), preset="cheap")
    (row,) = diagnosis.tables["plan"]
    assert row["warmup_steps"] > 20
