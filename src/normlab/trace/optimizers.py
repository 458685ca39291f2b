"""What optimizers hold, and copies of them that are bound to a copy of their model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from normlab.errors import UserError
from normlab.private_torch import TABLES_OF_MODULES
from normlab.setups.setup import Setup, shown
from normlab.trace.autograd import copied_optimizer
from normlab.trace.copies import copied_model
from normlab.trace.dry_run import parameters_of
from normlab.trace.facts import Unknown
from normlab.trace.reach import deep_copy
from normlab.trace.rebinding import lead_to_copies
from normlab.trace.tensors import tensors_in, unwrap


@dataclass(frozen=True)
class Held:
    """A parameter of a model in a group of an optimizer."""

    name: str
    parameter: Tensor
    group: Mapping[str, Any]
    optimizer: Optimizer

    @property
    def decay(self) -> float:
        return float(self.group.get("weight_decay") or 0)

    @property
    def rate(self) -> float:
        """The rate that a schedule multiplies."""
        return float(self.group.get("initial_lr", self.group["lr"]))

    @property
    def orthogonal(self) -> bool:
        """Whether Muon steps it, by its group or by the class of an optimizer that has no other rule.

        ``depends_on_others`` measures it.
        """
        options = {str(value).lower() for name, value in self.group.items() if name != "params"}
        has_other_rule = "betas" in self.group or any("adam" in option for option in options)
        is_of_muon = "muon" in type(self.optimizer).__name__.lower()
        return bool(self.group.get("use_muon", is_of_muon and not has_other_rule))

    @property
    def may_be_orthogonal(self) -> bool:
        """Whether the optimizer's class or the group speaks of Muon, whatever else it steps."""
        options = {name: value for name, value in self.group.items() if name != "params"}
        words = (type(self.optimizer).__name__, *options, *options.values())
        return any("muon" in word.lower() for word in words if isinstance(word, str))


def held(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[Held]:
    """Return a model's parameters that optimizers hold, in their order, without empty ones, of which nothing
    can be trained. Raises Unknown if there are none.
    """
    names = {id(p): n for n, p in model.named_parameters() if p.numel()}
    of_model = list[Held]()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters = [p for p in group["params"] if id(p) in names]
            of_model += [Held(names[id(p)], p, group, optimizer) for p in parameters]
    if not of_model:
        raise Unknown("the optimizer holds no parameter of the model, to which the loss gives its gradients")
    return of_model


def copied(
    setup: Setup, *, hollow: bool = False, memo: dict[int, Any] | None = None
) -> tuple[nn.Module, list[Optimizer], Any]:
    """Copy a model, its optimizers and its scheduler, bound to each other; ``memo`` is that of ``deepcopy``.

    If ``hollow``, the optimizers hold the user's own parameters and states: they must never be stepped.
    Raises Unknown without an optimizer, and if something cannot be copied.
    """
    model, ready, scheduler = unwrap(setup.model), setup.optimizers, setup.scheduler
    if setup.optimizer is None:
        raise Unknown("no optimizer was handed over: pass optimizer=")
    memo = {} if memo is None else memo
    are_made = all(isinstance(optimizer, Optimizer) for optimizer in ready)
    if are_made and hollow:  # what is in the memo already is shared
        states = (
            x for optimizer in ready for state in optimizer.state.values() for _, x in tensors_in(state)
        )
        memo |= {id(x): x for x in [model, *parameters_of(ready), *states]}
    optimizers = list[Optimizer]()
    with _refused_by(model):
        model_copy = copied_model(model, memo)
        if are_made:
            optimizers = [copy.deepcopy(o, memo) if hollow else copied_optimizer(o, memo) for o in ready]
        # one that is handed over as a function is made below, of the copies
        bound = deep_copy(scheduler, memo) if hasattr(scheduler, "step") else None
    if not are_made:
        optimizers = made_optimizers(setup.optimizer, model_copy)
    if scheduler is not None and bound is None:
        of = optimizers if len(optimizers) > 1 else optimizers[0]
        bound = made_by("scheduler(optimizer)", scheduler, of, "step")
    lead_to_copies(memo)  # functions may hold what only an optimizer lists, such as an adapter's weights
    if not hollow:
        nn.Module.zero_grad(model_copy)
    return model_copy, optimizers, bound


def made_optimizers(make: Any, model: nn.Module) -> list[Optimizer]:
    """Return the optimizers that a user's function makes of a model: one, or a list."""
    made = made_by("optimizer(model)", make, model, "param_groups")
    return list(made) if isinstance(made, (list, tuple)) else [made]


@contextmanager
def _refused_by(model: nn.Module) -> Iterator[None]:
    """Raise Unknown for what is raised in this block, which copies a model, with what of it is to blame."""
    try:
        yield
    except Exception as error:
        name, held = type(model).__name__, uncopyable(model)
        where = f"{name} holds {held}, which cannot be copied" if held else f"{name} cannot be copied"
        advice = "keep it outside of the model, or give its class a __deepcopy__"
        raise Unknown(f"{where}: {type(error).__name__}: {error}; {advice}") from error


def uncopyable(model: nn.Module) -> str:
    """Return the path of the first plain attribute of a module that cannot be copied; empty if all can be."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in TABLES_OF_MODULES:
                continue
            try:
                deep_copy(value)
            except Exception:
                return f"{path}.{name}".strip(".")
    return ""


def made_by(who: str, function: Callable[[Any], Any], of: Any, has: str) -> Any:
    """Return what a user's function returns: an object with this attribute, or a list of such objects.

    Raises UserError if the function raises or returns anything else.
    """
    try:
        made = function(of)
    except Exception as error:
        raise UserError(f"{who} raised {type(error).__name__}: {error}") from error
    objects = made if isinstance(made, (list, tuple)) and made else [made]
    if not all(hasattr(each, has) for each in objects):
        raise UserError(f"{who} returned {shown(made)}, which has no {has}")
    return made


def steps_taken(optimizers: Iterable[Any]) -> int:
    """Return how many steps the optimizers' states have counted; 0 if they count none."""
    states = (state for o in optimizers if isinstance(o, Optimizer) for state in o.state.values())
    return max((int(state["step"]) for state in states if "step" in state), default=0)
