"""Advice on a training that is planned: forecasts for it, and for what may be changed about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Unpack

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from normlab.diagnosis import Diagnosis
from normlab.diagnosis.diagnose import STEP_LR, Options
from normlab.diagnosis.forecasting import NEEDED, WARMUP
from normlab.errors import UserError
from normlab.examine.advice import PLAN, Advice, Alternative
from normlab.examine.subjects import Case, of_config
from normlab.init import SCHEMES
from normlab.recipes.grammar import resolve
from normlab.spec.arguments import validate_arguments
from normlab.spec.config import Config
from normlab.spec.units import rate
from normlab.trace.setup import Loss
from normlab.trace.step import OptimizerFactory

FACTORS: Final = (1 / 16, 1 / 4, 4.0)
"""Learning rates beside the planned one, over it."""
PLACEMENTS: Final = ("pre", "admin", "deepnorm", "post")
SCHEME: Final = "smallinit"
WRITING: Final = ("output", "ffn_out")
"""Matrices that write to the residual stream."""
WRITTEN: Final = "output matrices divided by √(sublayers)"
BEGUN: Final = "its training has begun, and a forecast is for a first step"

Done = Callable[[Alternative], None]


@dataclass(frozen=True)
class Change:
    """A change of the plan, and what is examined for it."""

    name: str
    do: str
    case: Callable[[], Case]


@dataclass(frozen=True)
class Advisor:
    """Makes forecasts for a case and for changes of it, one after the other."""

    on_done: Done = lambda alternative: None
    """Is called with every alternative, the plan first."""
    blocks: Sequence[str] = ()
    branches: Sequence[str] = ()
    factors: Sequence[float] = FACTORS

    def advice(self, plan: Case, changes: Callable[[Diagnosis], Iterable[Change]]) -> Advice:
        """Forecast for the plan, and for the changes that are made from what was measured of it.

        Raises UserError for a plan that cannot be examined.
        """
        found = self._diagnosed(plan)
        alternatives = [self._done(PLAN, "", found)]
        if found.forecast is not None:
            alternatives += [self._changed(change) for change in changes(found)]
        lr = found.forecast.tried[0].lr if found.forecast else plan.lr or STEP_LR
        return Advice(plan.title, lr, tuple(alternatives))

    def _changed(self, change: Change) -> Alternative:
        try:
            return self._done(change.name, change.do, self._diagnosed(change.case()))
        except UserError as error:
            failed = Alternative(change.name, change.do, None, str(error))
            self.on_done(failed)
            return failed

    def _diagnosed(self, case: Case) -> Diagnosis:
        options: Options = {**case.plan, "studies": NEEDED, "factors": self.factors}
        case = replace(case, plan=options)
        return case.diagnosed("standard", blocks=self.blocks, branches=self.branches)

    def _done(self, name: str, do: str, found: Diagnosis) -> Alternative:
        made = Alternative(name, do, found.forecast, "" if found.forecast else _why(found))
        self.on_done(made)
        return made


def advise_recipe(
    config: Config, root: Path, *, tokens: int, others: Sequence[str] = (), advisor: Advisor | None = None
) -> Advice:
    """Forecast for a configuration, and for other recipes with the rest of it: ``others``, or some that often
    help.

    The text is prepared under ``root``; all are examined on the same ``tokens`` positions of it. Raises
    UserError for a configuration that cannot be trained, and for a recipe that is not defined.
    """
    wanted = [(name, _resolved(name, config)) for name in others] or [*usual(config)]
    changes = [
        Change(name, do_of(other, config), partial(of_config, other, root, tokens=tokens))
        for name, other in wanted
    ]
    return (advisor or Advisor()).advice(of_config(config, root, tokens=tokens), lambda found: changes)


def do_of(other: Config, config: Config) -> str:
    """Return the flags that make the one configuration of the other."""
    steps = other.optim.warmup_steps
    longer = f" --warmup-steps {steps}" if steps and steps != config.optim.warmup_steps else ""
    return f"--recipe {other.recipe}{longer}"


def usual(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield a warm-up, or none where there is one, other placements and another initialisation."""
    head, *named = config.recipe.split("+")
    if config.optim.warmup_steps:
        yield "no warm-up", _resolved("+".join([head, *(n for n in named if n != "warmup")]), config)
    else:
        warm = replace(config, optim=replace(config.optim, warmup_steps=WARMUP))
        yield f"a warm-up of {WARMUP} steps", _resolved(f"{config.recipe}+warmup", warm)
    names = ["+".join([placement, *named]) for placement in PLACEMENTS if placement != head]
    if not any(name in SCHEMES for name in named):
        names.append(f"{config.recipe}+{SCHEME}")
    for name in names:
        with suppress(UserError):  # not defined with the rest of the recipe
            yield name, _resolved(name, config)


def _resolved(name: str, config: Config) -> Config:
    return resolve(name, config, force=bool(config.forced))


@validate_arguments
def advise(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    lr: float | None = None,
    optimiser: Optimizer | OptimizerFactory | None = None,
    **options: Unpack[Options],
) -> Advice:
    """Forecast whether a training gets going as it is planned, and what would change that.

    Arguments as of ``normlab.diagnose``. Forecasts are for the plan and for what needs no rewrite of the
    model: a warm-up, RAdam in the place of Adam, and output matrices that are divided by the square root of
    the number of sublayers of their stack, each at four learning rates. The model does not change.

    Raises UserError as ``normlab.diagnose`` does.
    """
    case = Case(type(model).__name__, model, batch, loss, lr, optimiser, plan=options)
    return advise_case(case)


def advise_case(case: Case, advisor: Advisor | None = None) -> Advice:
    """Forecast for any model, as ``advise``."""
    return (advisor or Advisor()).advice(case, partial(_without_rewrite, case))


def _without_rewrite(case: Case, found: Diagnosis) -> Iterator[Change]:
    """Yield changes that need no other code of the model."""
    if not case.plan.get("warmup_steps"):
        warm: Options = {**case.plan, "warmup_steps": WARMUP}
        name = f"a warm-up of {WARMUP} steps"
        yield Change(
            name, f"let the learning rate rise over {WARMUP} steps", lambda: replace(case, plan=warm)
        )
    made = _made(case)
    if type(made) in (torch.optim.Adam, torch.optim.AdamW):
        kept = {name: made.defaults[name] for name in ("betas", "eps", "weight_decay")}
        decoupled = isinstance(made, torch.optim.AdamW)
        lr = max(float(group["lr"]) for group in made.param_groups)
        radam = partial(torch.optim.RAdam, lr=lr, decoupled_weight_decay=decoupled, **kept)
        do = f"torch.optim.RAdam(model.parameters(), lr={rate(lr)}, …)"
        yield Change("RAdam", do, lambda: replace(case, lr=None, optimiser=radam))
    if factors := writing(found):
        do = "divide the initial weights of " + ", ".join(dict.fromkeys(map(_kind, factors)))
        yield Change(WRITTEN, do, lambda: replace(case, model=scaled(case.model, factors)))


def _kind(path: str) -> str:
    """Return the path with a star for the number of the layer."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def writing(found: Diagnosis) -> dict[str, float]:
    r"""Return :math:`1 / \sqrt{S}` for each matrix that writes to the residual stream, S being the number of
    sublayers of its stack.

    Radford et al. 2019, Section 2.3 (GPT-2), who scale residual layers by the number of them.
    """
    stacks = [row["stack"] for row in found.tables["structure"]]
    return {
        str(row["parameter"]): stacks.count(row["stack"]) ** -0.5
        for row in found.tables.get("updates", ())
        if row["kind"] in WRITING and row["stack"] in stacks and not str(row["parameter"]).endswith("bias")
    }


@torch.no_grad()
def scaled(model: nn.Module, factors: Mapping[str, float]) -> nn.Module:
    """Return a copy of the model with these parameters multiplied."""
    copy = deepcopy(model)
    for path, factor in factors.items():
        copy.get_parameter(path).mul_(factor)
    return copy


def _made(case: Case) -> Optimizer:
    """The optimiser of a case, or one like it."""
    make = case.optimiser or partial(torch.optim.Adam, lr=case.lr or STEP_LR)
    return make if isinstance(make, Optimizer) else make([Parameter(torch.zeros(1, 1))])


def _why(found: Diagnosis) -> str:
    """Say why there is no forecast."""
    if "during its training" in found.facts.get("optimiser", ""):
        return BEGUN
    undone = [f.sentence for f in found.findings if f.name == "not_done" and "rehearsal" in f.sentence]
    if undone:
        return undone[0]
    return found.verdict
