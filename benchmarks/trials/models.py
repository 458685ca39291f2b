"""The models that trials are judged by, each as a setup at the rate that a user of its family starts from.

The ten of ``TESTED`` were written down before any of them was trained: no family that the procedure was
designed on is among them. ``TRIED`` are three of the latter, on which variants of the procedure are tried.
Each trains on bytes, 16 windows of 48 a step, for 800 steps: warm-up over 40, if it has one, then a cosine to
a tenth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from families import FAMILIES, Recipe, recipe
from text import Batches, Draw, causal, masked, translated
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from normlab import Setup
from normlab.optim import build_optimizer
from normlab.setups.setup import Declaration

STEPS: Final = 800
WARMUP: Final = 40
LAST: Final = 0.1
Optimizers = Callable[[nn.Module, float], Any]


def adamw(model: nn.Module, rate: float) -> Optimizer:
    """As most language models are trained."""
    return AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def adam(model: nn.Module, rate: float) -> Optimizer:
    """As the first of them were."""
    return Adam(model.parameters(), rate, fused=True)


def sgd(model: nn.Module, rate: float) -> Optimizer:
    """With momentum."""
    return SGD(model.parameters(), rate, momentum=0.9)


def muon(model: nn.Module, rate: float) -> list[Optimizer]:
    """Muon on the matrices of the layers, and AdamW at 0.15 of its rate on the rest."""
    hidden = {n: p for n, p in model.named_parameters() if p.dim() == 2 and ".layers." in n}
    rest = [p for n, p in model.named_parameters() if n not in hidden]
    return [Muon(hidden.values(), rate, weight_decay=0.0), AdamW(rest, 0.15 * rate, weight_decay=0.0)]


@dataclass(frozen=True)
class Plan:
    """How a model is trained."""

    rate: float
    """That of a user who begins; with several optimizers, of the first."""
    optimizers: Optimizers = adamw
    draw: Draw = causal
    warmup: int = WARMUP
    clip: float | None = 1.0
    last: float = LAST
    """The last rate as a share of the largest; 1 without a decay."""


@dataclass
class Together:
    """Schedulers as one."""

    parts: Sequence[LambdaLR]

    def step(self) -> None:
        """Step each."""
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """That of each, by number."""
        return {str(i): part.state_dict() for i, part in enumerate(self.parts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up each."""
        for i, part in enumerate(self.parts):
            part.load_state_dict(state[str(i)])


def share(step: int, warmup: int, steps: int, last: float = LAST) -> float:
    """The rate at a step, counted from 0, as a share of the largest."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return last + (1 - last) * (1 + math.cos(math.pi * done)) / 2


def scheduled(optimizer: Any, warmup: int, steps: int, last: float = LAST) -> Any:
    """A scheduler of one optimizer or of a list."""
    factor = partial(share, warmup=warmup, steps=steps, last=last)
    if isinstance(optimizer, Optimizer):
        return LambdaLR(optimizer, factor)
    return Together([LambdaLR(o, factor) for o in optimizer])


def whole_step(model: nn.Module, batch: Any, optimizer: Any, scheduler: Any, *, clip: float | None) -> Tensor:
    """One step of training."""
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    model.train()
    for one in optimizers:
        one.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    for one in optimizers:
        one.step()
    if scheduler is not None:
        scheduler.step()
    return loss


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """The loss that the model puts out."""
    return model(**batch)[0]


RECIPE: Final = "pre+fixnorm+scalenorm+smallinit"
_OPTIM: Final = replace(recipe(RECIPE).optim, max_grad_norm=0.0)


def of_recipe(model: nn.Module, rate: float) -> Optimizer:
    """The recipe's own optimizer."""
    built = build_optimizer(model, _OPTIM)
    for group in built.param_groups:
        group["lr"] = rate
    return built


TESTED: Final[Mapping[str, Plan]] = {
    "GPT-2": Plan(6e-4),
    "GPT": Plan(2.5e-4, adam),  # Post-LN
    "BERT": Plan(1e-4, draw=masked),  # Post-LN
    "T5": Plan(1e-3, draw=translated),
    "Phi": Plan(0.02, muon),
    "GPT-J": Plan(0.05, sgd),
    "Gemma 2": Plan(1e-3),
    "Mixtral": Plan(3e-4),
    "BLOOM": Plan(1e-3),
    RECIPE: Plan(5e-4, of_recipe, warmup=0, clip=None),
}
TRIED: Final[Mapping[str, Plan]] = {"Llama": Plan(1e-3), "OPT": Plan(1e-3), "OPT, Post-LN": Plan(1e-3)}
PLANS: Final = {**TESTED, **TRIED}


def model_of(name: str, seed: int) -> nn.Module:
    """A model as it starts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Recipe(recipe(name), seed) if name == RECIPE else FAMILIES[name]()


def setup(
    seed: int, *, name: str, plan: Plan | None = None, rate: float | None = None, steps: int = STEPS
) -> Setup:
    """The setup of a model at a rate, that of its user if none is given."""
    plan = plan or PLANS[name]
    rate = rate or plan.rate
    return Setup(
        model_of(name, seed),
        Batches(plan.draw, seed),
        loss=loss_of,
        optimizer=partial(_optimizer, plan=plan, rate=rate),
        scheduler=partial(scheduled, warmup=plan.warmup, steps=steps, last=plan.last),
        step=partial(whole_step, clip=plan.clip),
        lr=rate,
        declare=Declaration(steps=steps, peak_lr=rate),
    )


def _optimizer(model: nn.Module, *, plan: Plan, rate: float) -> Any:
    return plan.optimizers(model, rate)


MODELS: Final[Mapping[str, Callable[[int], Setup]]] = {name: partial(setup, name=name) for name in PLANS}
"""Each as a function of the seed alone."""
