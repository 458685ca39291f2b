"""What optimizers hold, what their first step does by published rules, and the rates of a schedule."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import isclose
from types import CellType, FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR

from normlab.errors import UserError
from normlab.setups.setup import Setup, shown
from normlab.trace.autograd import twin_of
from normlab.trace.copies import copied_model, lead_to_copies
from normlab.trace.dry_run import groups_of, parameters_of, sample
from normlab.trace.facts import Unknown
from normlab.trace.facts.facts import Facts
from normlab.trace.reach import deep_copy
from normlab.trace.tensors import Place, map_tensors, rows_of, tensors_in, unwrap

if TYPE_CHECKING:
    from normlab.trace.step_under_test import StepUnderTest

SIMULATED: Final = 8_000
"""How many rates of single groups are computed step by step, in about a tenth of a second."""
STEPS: Final = 8
"""How many whole steps are taken where one is not enough."""
FOLLOWED: Final = 4
"""After how many steps rates are looked at, to see whether each step multiplies them."""
HORIZON: Final = 100_000
"""How many steps of a schedule are followed if its author does not declare their number."""


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
        rules = {str(v).lower() for k, v in self.group.items() if k != "params"}
        mixed = "betas" in self.group or any("adam" in rule for rule in rules)
        return bool(self.group.get("use_muon", "muon" in type(self.optimizer).__name__.lower() and not mixed))

    @property
    def may_be_orthogonal(self) -> bool:
        """Whether the optimizer's class or the group speaks of Muon, whatever else it steps."""
        words = [type(self.optimizer).__name__]
        words += [
            word for k, v in self.group.items() if k != "params" for word in (k, v) if isinstance(word, str)
        ]
        return any("muon" in word.lower() for word in words)


@dataclass(frozen=True)
class Moved(Held):
    """What the first step does to a parameter, in a sample of its entries."""

    before: Tensor
    gradient: Tensor
    change: Tensor
    state: Mapping[str, Any]
    """The optimizer's, before the step."""

    def lost(self, wide: Moved | None = None) -> tuple[int, int]:
        """Return how many entries have a gradient but do not move, and how many have one.

        None is lost if the rate is 0 or the optimizer keeps the weights in a wider type. Nor is an entry lost
        if a state keeps what it did not move: then both differ alike from the same step in a wider type.
        """
        p, live, kept = self.parameter, self.gradient != 0, self._kept
        wider = [x for x in kept.values() if x.dtype.itemsize > p.dtype.itemsize]
        if not self.group["lr"] or any(torch.equal(x.to(p), p) for x in wider):
            return 0, 0
        stuck = live & (self.change == 0)
        other = wide or self
        for name in kept.keys() & other._kept.keys() if wide else ():
            apart, left = sample(kept[name]) - sample(other._kept[name]), other.change - self.change
            stuck &= (apart - left).abs() >= torch.minimum(apart.abs(), left.abs())  # no nearer than nothing
        return int(stuck.sum()), int(live.sum())

    def moves_expected(self, wide: Moved) -> float:
        """Return how many entries would move in a step if each update were rounded up or down at random,
        without bias. ``wide`` is the same step without rounding.
        """
        spacing = torch.finfo(self.parameter.dtype).eps * self.before.abs().clamp_min(1e-300)
        return float((wide.change.abs() / spacing).clamp_max(1).sum())

    @property
    def _kept(self) -> dict[str, Tensor]:
        """Tensors of the parameter's shape in the optimizer's state, after the step."""
        state, shape = self.optimizer.state.get(self.parameter, {}), self.parameter.shape
        return {str(n): x for n, x in state.items() if isinstance(x, Tensor) and x.shape == shape}

    @property
    def off(self) -> float:
        """How far the step is from the rule of its optimizer's class, as a share of it; 0 up to rounding."""
        if (rule := RULES.get(type(self.optimizer).__name__)) is None:
            return 0.0
        want = rule(self.before, self.gradient, self.group, self.state)
        apart, size = float((self.change - want).norm()), float(want.norm())
        rounding = 8 * torch.finfo(self.parameter.dtype).eps * (float(self.before.norm()) + size)
        return apart / max(size, 1e-300) if apart > rounding else 0.0

    @property
    def damped(self) -> bool:
        """Whether eps exceeds most entries of the first gradient that Adam sees."""
        first = type(self.optimizer).__name__ in RULES and "eps" in self.group and not self.state
        return first and float(self.gradient[self.gradient != 0].abs().median()) < float(self.group["eps"])


def held(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[Held]:
    """Return a model's parameters that optimizers hold, in their order, without empty ones, of which nothing
    can be trained. Raises Unknown if there are none.
    """
    names = {id(p): n for n, p in model.named_parameters() if p.numel()}
    groups = ((g, o) for o in optimizers for g in o.param_groups)
    every = [Held(names[id(p)], p, g, o) for g, o in groups for p in g["params"] if id(p) in names]
    if not every:
        raise Unknown("the optimizer holds no parameter of the model, to which the loss gives its gradients")
    return every


def depends_on_others(step: StepUnderTest) -> dict[str, bool]:
    """Return, by parameter, whether the step of an entry depends on the gradients of other entries, by more
    than one factor on them all.

    That of a rule for each entry, such as Adam's, does not, nor does that of one that clips; an
    orthogonalised one does. Copies of the optimizers are stepped with random gradients, twice; those of the
    first half of each parameter are larger the second time, and the steps of the second halves are compared.
    What an optimizer that raises holds is left out.
    """
    steps: list[dict[str, Tensor]] = []
    for factor in (1.0, 3.0):
        model, optimizers, _ = copied(step.setup)
        draw = torch.Generator().manual_seed(0)
        for p in model.parameters():
            gradient = torch.randn(p.shape, generator=draw)
            gradient.view(-1)[: p.numel() // 2] *= factor
            p.grad = gradient.to(p)
            p.data = torch.zeros_like(p)  # so that the parameter afterwards is its step, unrounded
        for group in groups_of(optimizers):
            group["lr"] = 1.0  # a warm-up may begin at 0
        held_by = [h for h in held(model, optimizers) if h.parameter.requires_grad]
        failed = [optimizer for optimizer in optimizers if not _steps(optimizer)]
        moved = [h for h in held_by if all(h.optimizer is not o for o in failed)]
        steps.append({h.name: _second_half(h.parameter) for h in moved})
    first, second = steps
    return {name: _differ(x, second[name]) for name, x in first.items() if name in second}


def _steps(optimizer: Optimizer) -> bool:
    """Step an optimizer; return whether it does not raise."""
    with suppress(Exception):  # anybody's rule, which may refuse vectors
        optimizer.step()
        return True
    return False


def _second_half(p: Tensor) -> Tensor:
    return p.detach().reshape(-1)[p.numel() // 2 :].clone()


def _differ(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors differ by more than one factor and by more than rounding."""
    wide, other = a.double(), b.double()
    factor = float(wide @ other) / max(float(other @ other), 1e-300)
    return float((wide - factor * other).norm()) > 8 * torch.finfo(a.dtype).eps * float(wide.norm())


def masters_of(step: StepUnderTest) -> dict[int, str]:
    """Return the parameters that are rounded copies of masters, which optimizers hold in a wider type, and
    that the user's step changes when those change; by the place of their masters.
    """
    run, pairs = step.rehearsal(), dict[int, tuple[str, Tensor]]()
    every = parameters_of(run.optimizers)
    left = {n: p for n, p in run.model.named_parameters() if all(p is not q for q in every)}
    for i, q in enumerate(every):
        same = (n for n, p in left.items() if p.shape == q.shape and torch.equal(q.to(p), p))
        if id(q) not in run.names and (name := next(same, None)) is not None:
            pairs[i] = name, left.pop(name)
    before = {i: p.detach().clone() for i, (_, p) in pairs.items()}
    for i in pairs:
        every[i].data = every[i].data * 2 + 1
    with suppress(Exception):  # none where it cannot be run
        run.run(step.stepped, rates=step.rates.peaks)
    return {i: n for i, (n, p) in pairs.items() if not p.equal(before[i])}


def factors(step: StepUnderTest) -> tuple[float, ...]:
    """Return what a step may multiply its loss by: 1, and what turns a sum over targets into a mean."""
    with suppress(Unknown):
        asked, part = step.facts.targets, step.half or step.facts.targets
        less = float(part.weight.sum() / asked.weight.sum())
        fewer = int(part.counted.sum()) / int(asked.counted.sum())
        rounding = max(asked.rounding, part.rounding)
        if isclose(less, fewer, rel_tol=rounding) and not isclose(less, 1, rel_tol=rounding):
            batch = step.batch if step.steps_another_batch else step.stepped
            wide = map_tensors(batch, lambda _, x: x.double() if x.is_floating_point() else x)
            whole = step.exact.again(batch=wide if step.is_exact else batch)
            return 1.0, 1 / float(Facts(whole, step.declare).targets.weight.sum())
    return (1.0,)


def first_step(step: StepUnderTest, *, exact: bool = False) -> list[Moved]:
    """Let the optimizers act once, at the schedule's peak, and return what happens to each parameter."""
    run, rates = step.rehearsal(exact=exact, plain=True), step.rates.peaks
    every = held(run.model, run.optimizers)
    before = [sample(h.parameter) for h in every]
    states = [map_tensors(h.optimizer.state.get(h.parameter, {}), lambda _, x: sample(x)) for h in every]
    seen, moved = run.run(step.stepped, rates=rates), list[Moved]()
    for h, given, state in zip(every, before, states, strict=True):
        x = seen.weights.get(h.name, given)  # what the forward pass changed is not the optimizer's doing
        g, y = seen.gradients.get(h.name, torch.zeros_like(x)), sample(h.parameter)
        change = (y - x).masked_fill(y == x, 0)  # infinity may stay unmoved, as in a mask
        moved.append(Moved(**vars(h), before=x, gradient=g, change=change, state=state))
    return moved


def unmoved(step: StepUnderTest) -> set[str]:
    """Return the parameters that several steps at the schedule's peak leave as they were, bit for bit.

    The steps are taken in turn on the batch and on each half of its rows, if the model runs on those, so that
    no gradient is small by chance in all of them.
    """
    run, rates = step.rehearsal(plain=True), step.rates.peaks
    every = held(run.model, run.optimizers)
    before = [h.parameter.detach().clone() for h in every]
    batches = [step.stepped, *_halves(step.stepped)]
    for i in range(STEPS):
        try:
            run.run(batches[i % len(batches)], rates=rates)
        except Exception:  # a model may accept one number of rows alone
            batches = [step.stepped]
            run.run(step.stepped, rates=rates)
    return {h.name for h, x in zip(every, before, strict=True) if torch.equal(h.parameter, x)}


def _halves(batch: Any) -> list[Any]:
    rows = rows_of(batch)
    if rows < 2:
        return []
    halves: list[Any] = []
    for part in (slice(None, rows // 2), slice(rows // 2, None)):
        halves.append(map_tensors(batch, partial(_rows_in, rows=rows, part=part)))
    return halves


def _rows_in(_: Place, x: Tensor, rows: int, part: slice) -> Tensor:
    return x[part] if x.ndim and len(x) == rows else x


def rates_by_themselves(step: StepUnderTest) -> Iterator[list[float]]:
    """Yield each group's rate, as a share of the scheduled one, at first and after each of a few steps of
    optimizers and scheduler alone, with random gradients.
    """
    model, optimizers, scheduler = copied(step.setup)
    groups, course = groups_of(optimizers), step.rates.rates
    draw = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=draw).to(p)
    yield [1.0 for _ in groups]
    for planned in course[:FOLLOWED] if scheduler is not None else course * FOLLOWED:
        if not all(map(_steps, optimizers)):
            return
        yield _shares(groups, planned)
        if scheduler is not None:
            scheduler.step()


def rates_in_own_step(step: StepUnderTest) -> Iterator[list[float]]:
    """Yield the same for whole steps of the user's own, without a scheduler."""
    run, (planned,) = step.rehearsal(), step.rates.rates
    yield [1.0 for _ in planned]
    for _ in range(FOLLOWED):
        run.run(step.stepped, rates=())
        yield _shares(groups_of(run.optimizers), planned)


def _shares(groups: Iterable[Mapping[str, Any]], planned: Sequence[float]) -> list[float]:
    return [float(group["lr"]) / rate if rate else 1.0 for group, rate in zip(groups, planned, strict=True)]


def factor_of_each(shares: Sequence[float]) -> float:
    """Return the factor by which each of these numbers differs from the one before; 1 if there is no such."""
    if min(shares) <= 0:
        return 1.0
    each = [after / before for before, after in pairwise(shares)]
    return each[0] if each and isclose(min(each), max(each), rel_tol=1e-6) else 1.0


def _sgd(p: Tensor, g: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    """SGD with momentum, as in torch: the first step has no dampening."""
    g = g + float(group.get("weight_decay") or 0) * p
    momentum, buffer = float(group.get("momentum") or 0), state.get("momentum_buffer")
    if momentum:
        b = g if buffer is None else momentum * buffer.double() + (1 - float(group.get("dampening") or 0)) * g
        g = g + momentum * b if group.get("nesterov") else b
    return -float(group["lr"]) * g


def _adam(
    p: Tensor, g: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], *, decoupled: bool = False
) -> Tensor:
    """Adam, Kingma and Ba 2015, algorithm 1 (1412.6980), with AMSGrad's maximum if asked for; ``decoupled``
    is AdamW, Loshchilov and Hutter 2019, algorithm 2 (1711.05101).
    """
    decay, rate = float(group.get("weight_decay") or 0), float(group["lr"])
    decoupled |= bool(group.get("decoupled_weight_decay"))
    g = g if decoupled else g + decay * p
    (b1, b2), t = map(float, group["betas"]), float(state.get("step", 0)) + 1
    m = b1 * _old(state, "exp_avg", g) + (1 - b1) * g
    v = b2 * _old(state, "exp_avg_sq", g) + (1 - b2) * g * g
    if group.get("amsgrad"):
        v = torch.maximum(v, _old(state, "max_exp_avg_sq", g))
    step = rate * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + float(group["eps"]))
    return -step - (rate * decay * p if decoupled else 0)


def _old(state: Mapping[str, Any], key: str, g: Tensor) -> Tensor:
    return state[key].double() if isinstance(state.get(key), Tensor) else torch.zeros_like(g)


RULES: Final = {"SGD": _sgd, "Adam": _adam, "AdamW": partial(_adam, decoupled=True)}
"""The first step of a parameter, by the name that an optimizer's class declares."""


class FirstRise(NamedTuple):
    """How the rates of a schedule rise before they first fall."""

    peaks: list[float]
    """The largest rate of each group."""
    steps: int
    """The number of steps up to the peak; 0 if the rates begin there."""
    first_share: float
    """The first rate above 0, as a share of the peak."""


class Rates(NamedTuple):
    """The rates of a schedule by group, at some of its steps."""

    steps: list[int]
    rates: list[list[float]]
    ended: Exception | None
    """What the scheduler raised after the last of them."""
    scheduler: Any = None
    """A copy of the scheduler that gave them."""
    taken: int = 0
    """How many steps the schedule has taken before the first of these, as one that is resumed has."""
    past: Mapping[int, list[float]] = MappingProxyType({})
    """The rates of these steps by number; empty if the schedule has no closed form, which tells them."""

    @property
    def from_the_first(self) -> Rates:
        """The same with the rates of the past, as far as they are known, and steps counted from the first."""
        steps = [*self.past, *(self.taken + i for i in self.steps)]
        return Rates(steps, [*self.past.values(), *self.rates], self.ended, self.scheduler)

    @property
    def top(self) -> list[float]:
        """The largest rate at each step of any group that the schedule moves, or of any if it moves none."""
        columns = [*zip(*self.rates, strict=True)]
        moved = [column for column in columns if min(column) < max(column)]
        return [max(row) for row in zip(*(moved or columns), strict=True)]

    @property
    def peaks(self) -> list[float]:
        """The largest rate of each group."""
        return [max(column) for column in zip(*self.rates, strict=True)]

    @property
    def first_rise(self) -> FirstRise:
        """How the rates rise before they first fall."""
        top = self.top
        fallen = next((i for i in range(1, len(top)) if top[i] < top[i - 1]), len(top))
        rows, top = self.rates[:fallen], top[:fallen]
        peak = max(top)
        at = next(i for i, rate in enumerate(top) if rate >= peak * (1 - 1e-6))
        begun = next((rate for rate in top if rate > 0), peak)
        peaks = [max(column) for column in zip(*rows, strict=True)]
        return FirstRise(peaks, 1 + self.steps[at] if at else 0, begun / peak if peak > 0 else 1.0)

    def reaches(self, asked: float) -> bool:
        """Return whether a group peaks at the rate asked, up to a step of warm-up and the decay so far."""
        return any(self._reaches(group, asked) for group in zip(*self.rates, strict=True))

    def _reaches(self, top: Sequence[float], asked: float) -> bool:
        at = top.index(peak := max(top))
        rise = max((b - a for a, b in pairwise(top[: at + 1])), default=0.0)
        after = min(at + 1, len(top) - 1)
        fall = (peak - top[after]) / max(self.steps[after] - self.steps[at], 1) * (self.steps[at] + 1)
        return asked - rise - fall <= peak * (1 + 1e-6) and peak <= asked * (1 + 1e-6) + rise

    @property
    def rises_again(self) -> bool:
        """Whether the rate falls after its peak and then rises gradually; a restart is a single jump."""
        tail = self.top[self.top.index(max(self.top)) :]
        low = tail.index(min(tail))
        rise = max(tail[low:]) - tail[low]
        return low > 0 and rise > 1e-6 * tail[0] and max(b - a for a, b in pairwise(tail[low:])) < rise / 2

    @property
    def rises_to_the_end(self) -> bool:
        """Whether the last rate is above all others."""
        return len(self.top) > 1 and self.top[-1] > max(self.top[:-1]) * (1 + 1e-9)

    @property
    def periodic(self) -> bool:
        """Whether its class is cyclic, or it declares no end and climbs back to half its peak twice."""
        parts = getattr(self.scheduler, "_schedulers", [self.scheduler])
        tail, half = self.top[self.top.index(max(self.top)) :], max(self.top) / 2
        back = sum(a < half <= b for a, b in pairwise(tail))
        return any(isinstance(s, CyclicLR) for s in parts) or (
            back > 1 and not any(hasattr(s, "T_max") for s in parts)
        )


def _closed_form(scheduler: Any) -> Callable[[], Sequence[Any]] | None:
    """Return a function that gives a scheduler's rates from ``last_epoch``, whatever they were before."""
    if type(scheduler) in (LambdaLR, OneCycleLR):
        return scheduler.get_lr
    return getattr(scheduler, "_get_closed_form_lr", None)


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
    bound = scheduler if hasattr(scheduler, "step") else None
    memo = {} if memo is None else memo
    if all(isinstance(o, Optimizer) for o in ready):
        if hollow:
            states = (t for o in ready for s in o.state.values() for _, t in tensors_in(s))
            memo |= {id(x): x for x in [model, *parameters_of(ready), *states]}
        with _refused_by(model):
            model = copied_model(model, memo)
            optimizers = [copy.deepcopy(o, memo) if hollow else twin_of(o, memo) for o in ready]
            bound = deep_copy(bound, memo)
    else:
        with _refused_by(model):
            model, bound = copied_model(model, memo), deep_copy(bound, memo)
        made = made_by("optimizer(model)", setup.optimizer, model, "param_groups")
        optimizers = list(made) if isinstance(made, (list, tuple)) else [made]
    if scheduler is not None and bound is None:
        several = optimizers if len(optimizers) > 1 else optimizers[0]
        bound = made_by("scheduler(optimizer)", scheduler, several, "step")
    lead_to_copies(memo)  # functions may hold what only an optimizer lists, such as an adapter's weights
    if not hollow:
        nn.Module.zero_grad(model)
    return model, optimizers, bound


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
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            try:
                deep_copy(value)
            except Exception:
                return f"{path}.{name}".strip(".")
    return ""


def rebound(function: Any, memo: dict[int, Any]) -> Any:
    """Return a function that reaches the copies wherever its closure or module reached what was copied."""
    if not isinstance(function, FunctionType) or id(function) in memo:
        return memo.get(id(function), function)

    def own(value: Any) -> Any:
        if isinstance(value, FunctionType):
            return rebound(value, memo)
        known = id(value) in memo or any(id(x) in memo for _, x in tensors_in(value))
        return copy.deepcopy(value, memo) if known else value

    cells = tuple(CellType() for _ in function.__closure__ or ())
    module = dict(function.__globals__)
    new = FunctionType(function.__code__, module, function.__name__, function.__defaults__, cells)
    new.__kwdefaults__, memo[id(function)] = function.__kwdefaults__, new
    for cell, twin in zip(function.__closure__ or (), cells, strict=True):
        with suppress(ValueError):  # nothing is in it yet
            twin.cell_contents = own(cell.cell_contents)
    named = {n: module[n] for n in function.__code__.co_names if n in module}
    module |= {n: own(x) for n, x in named.items() if not isinstance(x, FunctionType)}
    return new


def made_by(who: str, function: Callable[[Any], Any], of: Any, has: str) -> Any:
    """Return what a user's function returns: an object with this attribute, or a list of such objects.

    Raises UserError if the function raises or returns anything else.
    """
    try:
        made = function(of)
    except Exception as error:
        raise UserError(f"{who} raised {type(error).__name__}: {error}") from error
    if not all(hasattr(one, has) for one in (made if isinstance(made, (list, tuple)) and made else [made])):
        raise UserError(f"{who} returned {shown(made)}, which has no {has}")
    return made


def rates_of(setup: Setup) -> Rates:
    """Return the rates that the optimizers will have, or those that they have if there is no scheduler.

    The schedule is followed without stepping an optimizer: in every step if they are few, otherwise in the
    first ones, and in some of the others if it has a closed form. Of the steps that are planned, those that
    it has taken already are past.
    """
    _, optimizers, scheduler = copied(setup, hollow=True)
    groups = groups_of(optimizers)
    numbers, rates, ended = [0], [[float(g["lr"]) for g in groups]], None
    if scheduler is None:
        return Rates(numbers, rates, ended)
    start = getattr(scheduler, "last_epoch", 0)
    taken = max(start, 0) if isinstance(start, int) else 0
    limit, count = max(SIMULATED // max(len(groups), 1), 100), (setup.declare.steps or HORIZON) - taken
    closed = _closed_form(scheduler)
    form = closed if count > limit else None
    past = {} if closed is None else _rates_before(taken, limit, scheduler, closed)
    for i in range(1, min(count, limit // 2 if form else limit)):
        try:
            scheduler.step()
        except Exception as error:
            ended = error
            break
        numbers.append(i)
        rates.append([float(g["lr"]) for g in groups])
    if form is not None and ended is None:
        for i in range(limit // 2, count, max((count - limit // 2) // (limit // 2), 1)):
            scheduler.last_epoch = start + i
            numbers.append(i)
            rates.append([float(rate) for rate in form()])
    return Rates(numbers, rates, ended, scheduler, taken, past)


def _rates_before(
    taken: int, limit: int, scheduler: Any, closed: Callable[[], Sequence[Any]]
) -> dict[int, list[float]]:
    """Return the rates of the steps that a schedule has taken, of ``limit`` or so of them if they are many,
    by its closed form. The schedule is left where it stands.
    """
    here, rates = scheduler.last_epoch, dict[int, list[float]]()
    for i in range(0, taken, taken // limit + 1):
        scheduler.last_epoch = i
        rates[i] = [float(rate) for rate in closed()]
    scheduler.last_epoch = here
    return rates


def steps_taken(optimizers: Iterable[Any]) -> int:
    """Return how many steps the optimizers' states have counted; 0 if they count none."""
    states = (state for o in optimizers if isinstance(o, Optimizer) for state in o.state.values())
    return max((int(state["step"]) for state in states if "step" in state), default=0)


def resumed(setup: Setup) -> tuple[list[float], list[float]]:
    """Return the rates of steps 4 to 6 of a schedule, and of a new one that loads its state after step 3."""
    (_, optimizers, scheduler), (_, others, loaded) = (copied(setup, hollow=True) for _ in range(2))
    rates = list[float](), list[float]()
    with suppress(Exception):
        for _ in range(3):
            scheduler.step()
        for a, b in zip(optimizers, others, strict=True):
            b.load_state_dict(a.state_dict())
        loaded.load_state_dict(copy.deepcopy(scheduler.state_dict()))
        for _ in range(3):
            for row, s, held in zip(rates, (scheduler, loaded), (optimizers, others), strict=True):
                s.step()
                row += [float(g["lr"]) for g in groups_of(held)]
    return rates
