"""Whether parameters start as they should: as declared, as their class draws them, as their siblings do.

Draws are compared by the logarithm of their deviation, whose error is known from their kurtosis. All limits
together raise a false alarm once in a million models (``LEVEL``).
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from normlab.base.libraries import is_installed
from normlab.setups.setup import Setup, shown
from normlab.trace.autograd import Weights
from normlab.trace.awake import awake_step
from normlab.trace.budget import require_time
from normlab.trace.compare import distance
from normlab.trace.copies import copied_model, proof_of
from normlab.trace.facts import Unknown
from normlab.trace.facts.stacks import odd_one, settings, shared
from normlab.trace.functions import Write, Writes
from normlab.trace.restore import same_globals, same_random_state
from normlab.trace.tensors import unwrap
from normlab.trace.trace import Trace

LEVEL: Final = 1e-6
"""Probability of a false alarm over all parameters that are compared."""
LEAST: Final = 64
"""Number of entries below which the size of a draw is chance."""
MOST: Final = 2**16
"""How many entries are looked at."""
NOT_MADE: Final = "nothing makes the model anew, as a function make in a Setup does"
"""Why new models cannot be looked at."""
SEEDS: Final = (101, 202)


class ParameterPart(NamedTuple):
    """The function of a slice of a parameter along one axis, or of all of it."""

    kind: str
    """Which matrix of its layer it is (query, ffn_in, …), or embedding, head, norm; "other" or "all" if
    nothing tells. What optimizers sort by is coarser, and called a role: ``base.roles``.
    """
    axis: int = 0
    start: int | None = None
    stop: int | None = None

    def of(self, x: Tensor) -> Tensor:
        return x[(*(slice(None),) * self.axis, slice(self.start, self.stop))] if x.ndim else x


@dataclass(frozen=True)
class Start:
    """The declared start of a parameter, or of a part of it."""

    path: str
    std: float | None = None
    """Standard deviation of draws around 0."""
    value: float | None = None
    """The value of every entry."""
    truncated_at: float | None = None
    """Largest magnitude of a draw, in deviations; ``std`` is then either the argument of ``trunc_normal_`` or
    what truncation leaves of it.
    """
    entries: int | None = None
    """How many entries ``std`` was measured on; None if it is exact."""
    part: ParameterPart = ParameterPart("all")

    def difference(self, parameter: Tensor, compared: int = 1) -> str:
        r"""Say how a parameter differs from what is declared; empty if chance explains it.

        The logarithm of the root mean square of n draws with kurtosis k has the error
        :math:`\sqrt{(k - 1) / 4n}`; the level is divided by ``compared``, the number of comparisons.
        """
        x = self.part.of(parameter.detach()).double()
        if self.value is not None:
            declared = torch.tensor(self.value, dtype=parameter.dtype).double().to(x.device)
            others = int((x != declared).sum())
            words = f"{others:,} of {x.numel():,} entries are not {self.value:g}, as is declared"
            return words if others else ""
        if self.std is None or x.numel() < LEAST:
            return ""
        square = float(x.square().mean())
        words = f"its root mean square is {square**0.5:.4g}, and {self.std:.4g} is declared"
        if not square or not self.std:
            return "" if square == self.std else words
        kurtosis = float(x.pow(4).mean()) / square**2
        variance = (kurtosis - 1) / 4 * (1 / x.numel() + (1 / self.entries if self.entries else 0))
        left_by_truncation = _truncated(self.truncated_at) if self.truncated_at else 1.0
        # ``std`` may be meant before or after truncation
        meant = {self.std, self.std * left_by_truncation}
        off = min(abs(math.log(square**0.5 / std)) for std in meant)
        if off > _limit_of(compared) * variance**0.5:
            return words
        most, largest = self._most(left_by_truncation), float(x.abs().max())
        if largest > most * (1 + 1e-6):
            return f"its largest entry is {largest:.4g}, and truncation at {most:.4g} is declared"
        return ""

    def _most(self, left_by_truncation: float) -> float:
        """Return the largest magnitude of a truncated draw, if ``std`` is what truncation leaves."""
        if self.std is None or not self.truncated_at:
            return math.inf
        return self.truncated_at * self.std / left_by_truncation


def _limit_of(compared: int) -> float:
    """Return how many standard errors the worst of so many normal draws may be off by chance (``LEVEL``)."""
    return NormalDist().inv_cdf(1 - LEVEL / 2 / max(compared, 1))


def _truncated(at: float) -> float:
    r"""Return the deviation of a standard normal that is cut off at ``at`` deviations on both sides:
    :math:`\sqrt{1 - 2 t \varphi(t) / (2 \Phi(t) - 1)}`, 0.88 for t = 2.
    """
    density = math.exp(-at * at / 2) / math.sqrt(2 * math.pi)
    return math.sqrt(1 - 2 * at * density / math.erf(at / math.sqrt(2)))


def differences(model: nn.Module, starts: Iterable[Start]) -> Iterator[tuple[str, str]]:
    """Yield the path of each parameter that does not start as declared, and how it differs."""
    declared, parameters = list(starts), dict(model.named_parameters())
    for start in declared:
        if start.path in parameters and (how := start.difference(parameters[start.path], len(declared))):
            yield start.path, how


class _Unlike(NamedTuple):
    """A parameter that starts unlike others, and how; ``z`` counts standard errors of a draw."""

    z: float
    path: str
    how: str


class Replaced(NamedTuple):
    """A parameter whose start was replaced, with the function that gave it and the one that replaced it."""

    path: str
    by: str
    instead_of: str


def _replaced(path: str, p: Tensor, writes: Sequence[Write]) -> Replaced | None:
    """Return by what a start of a parameter's own was replaced, or None.

    Such a start is computed, or it is a constant of a matrix, which its class draws otherwise. Another
    function of the user's draws the parameter anew, or makes it a constant, as it does with every other.
    """
    last = writes[-1] if writes else None
    if last is None or not last.is_plain or is_installed(last.by.co_filename):
        return None
    for write in writes[:-1]:
        computed = not write.is_plain
        kept_constant = write.is_constant and p.ndim > 1 and not last.is_constant
        if (computed or kept_constant) and write.by is not last.by:
            return Replaced(path, last.by.co_qualname, write.by.co_qualname)
    return None


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that hold numbers."""
    return {n: p.detach() for n, p in model.named_parameters() if p.is_floating_point() and not p.is_meta}


def constant(p: Tensor) -> bool:
    """Return whether all entries are the same number."""
    flat = p.reshape(-1)
    return p.numel() > 0 and bool((flat[:64] == flat[0]).all()) and bool((flat == flat[0]).all())


def _looks_drawn(p: Tensor) -> bool:
    """Return whether a matrix has more distinct entries than diagonals; an identity or a table has not."""
    part = p.detach().flatten(1)[:64, :64]
    return p.numel() > 1 and len(part.unique()) >= sum(part.shape)


def are_independent_draws(matrices: Iterable[Tensor]) -> bool:
    """Return whether the entries of matrices of low rank look drawn independently of each other.

    The cosine of two vectors of n independent entries has a mean square of 1 / n, within the error of
    sampling. What training made of vectors is correlated, and a decomposition makes them orthogonal. Of so
    few vectors that orthogonal ones would not stand out, nothing is said.
    """
    squares = list[Tensor]()
    for matrix in matrices:
        vectors = matrix.double() if matrix.shape[0] < matrix.shape[1] else matrix.double().T
        vectors = vectors / vectors.norm(dim=1, keepdim=True).clamp_min(1e-300)
        cosines = vectors @ vectors.T
        above = torch.ones_like(cosines, dtype=torch.bool).triu(1)
        squares.append(vectors.shape[1] * cosines[above].square())
    pairs = torch.cat(squares) if squares else torch.zeros(0)
    if not pairs.numel():
        return False
    error = _limit_of(1) * (2 / pairs.numel()) ** 0.5  # of a mean of squares of normal numbers
    return error < 1 and abs(float(pairs.mean()) - 1) <= error


def equal_draws(parameters: Weights, drawn: Callable[[str, Tensor], bool]) -> Iterator[tuple[str, str]]:
    """Yield pairs of drawn matrices that are different tensors but equal in every entry."""
    seen: dict[tuple[torch.Size, float], str] = {}
    for name, p in parameters.items():
        matrix = p.ndim >= 2 and p.is_floating_point() and p.numel() > 1
        if matrix and bool(p.isfinite().all()):
            first = seen.setdefault((p.shape, float(p.detach().double().sum())), name)
            if first != name and torch.equal(parameters[first], p) and drawn(name, p):
                yield first, name


def unlike_class(live: Weights, one: Weights, other: Weights) -> list[_Unlike]:
    """Compare parameters with two draws of their class: constants exactly, draws by their deviation."""
    shared = [n for n, p in live.items() if n in one and n in other and p.shape == one[n].shape]
    # a class that sets its own seed draws the same twice: then equal draws are no constants
    sets_its_seed = all(torch.equal(one[n], other[n]) for n in shared)
    limit = _limit_of(len(shared))
    odd = list[_Unlike]()
    for name in shared:
        is_constant = torch.equal(one[name], other[name]) and (constant(one[name]) or not sets_its_seed)
        if is_constant:
            unlike = _unlike_constants(name, live[name], one[name])
        else:
            unlike = _unlike_draws(name, live[name], [one[name], other[name]], limit)
        odd += [unlike] if unlike is not None else []
    return odd


def _unlike_constants(name: str, p: Tensor, constants: Tensor) -> _Unlike | None:
    """Compare a parameter with the constants that its class gives it."""
    gap = distance(p, constants.to(p))
    if gap <= 2 * torch.finfo(p.dtype).eps:
        return None
    return _Unlike(math.inf, name, f"differs by {gap:.1g} from the constants that it starts with")


def _unlike_draws(name: str, p: Tensor, draws: Sequence[Tensor], limit: float) -> _Unlike | None:
    """Compare a parameter with two draws of its class."""
    if p.numel() < LEAST:
        return None
    if constant(p):
        how = f"is {float(p.flatten()[0]):g} everywhere, and is drawn at random"
        return _Unlike(math.inf, name, how)
    (of_parameter, *of_draws), (error, *_) = _log_std([p, *draws])
    # the mean of two draws adds half a variance to that of the parameter
    z = abs(of_parameter - sum(of_draws) / 2) / (error * 1.5**0.5)
    how = f"has deviation {math.exp(of_parameter):.4g}, and is drawn with {math.exp(of_draws[0]):.4g}"
    return _Unlike(z, name, how) if z > limit else None


def unlike_siblings(groups: Sequence[Weights]) -> _Unlike | None:
    """Return the parameter most unlike the others in its group, if those agree."""
    groups = [g for g in groups if len(g) > 2 and len({p.shape for p in g.values()}) == 1]
    limit = _limit_of(sum(map(len, groups)))
    odd = list[_Unlike]()
    for group in groups:
        holds_constants = any(map(constant, group.values()))
        unlike = _odd_constant(group) if holds_constants else _odd_draw(group, limit)
        odd += [unlike] if unlike is not None else []
    return max(odd, default=None)


def _odd_constant(group: Weights) -> _Unlike | None:
    """Return the one that has another constant than the others, or is drawn where they are constants."""
    kinds = {n: f"is {float(p.flatten()[0]):.9g}" if constant(p) else "is drawn" for n, p in group.items()}
    if (odd := odd_one(kinds)) is None:
        return None
    how = f"{odd.value}, and in the {len(group) - 1} other blocks it {odd.rest}"
    return _Unlike(math.inf, odd.key, how)


def _odd_draw(group: Weights, limit: float) -> _Unlike | None:
    """Return the one whose deviation is furthest from the median, if most others agree with each other."""
    if next(iter(group.values())).numel() < LEAST:
        return None
    logs, errors = (torch.tensor(x, dtype=torch.float64) for x in _log_std(list(group.values())))
    middle = logs.median()
    z = (logs - middle).abs() / errors / (1 + 1 / (len(group) - 1)) ** 0.5
    is_off = z > limit
    if not is_off.any() or int(is_off.sum()) > (len(group) - 1) // 2:
        return None
    others = logs[~is_off]
    others_differ = float(((others - others.mean()).abs() / errors[~is_off]).max()) > limit
    if others_differ:
        return None
    i = int(z.argmax())
    how = f"has deviation {math.exp(logs[i]):.4g}, its siblings {math.exp(middle):.4g}"
    return _Unlike(float(z[i]), list(group)[i], how)


def _log_std(draws: list[Tensor]) -> tuple[list[float], list[float]]:
    """Return the logarithm of each deviation, and its error from the kurtosis that they share."""
    samples = [x.flatten()[:: x.numel() // MOST + 1].double() for x in draws]
    stds = [max(float(x.std()), 1e-300) for x in samples]
    fourth_powers = 0.0
    for x, std in zip(samples, stds, strict=True):
        fourth_powers += float(((x - x.mean()) / std).pow(4).sum())
    kurtosis = fourth_powers / sum(x.numel() for x in samples)
    # of one entry; two values in equal shares have a kurtosis of 1, and would have no error
    variance = max(kurtosis - 1, 0.05) / 4
    return [math.log(std) for std in stds], [(variance / x.numel()) ** 0.5 for x in samples]


def from_library(instance: object) -> bool:
    """Return whether the class of an object came with an installed package, so it is not the user's own."""
    source = getattr(sys.modules.get(type(instance).__module__), "__file__", None)
    return source is not None and is_installed(source)


def is_of_library(model: nn.Module, path: str) -> bool:
    """Return whether the class of a module, torch's aside, is an installed library's and unchanged, as are
    all around it up to the user's own classes, and no library's class is around those.
    """
    parts = path.split(".") if path else []
    around = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1)]
    not_torchs = [m for m in around if type(m).__module__.split(".")[0] != "torch"]
    are_built = [from_library(m) and "forward" not in vars(m) for m in not_torchs]
    # from the module outwards: some of the library's, then none any more
    return bool(are_built) and are_built[0] and are_built == sorted(are_built, reverse=True)


class Fresh:
    """The model of a setup, drawn afresh."""

    def __init__(self, setup: Setup) -> None:
        self._model, self._make = unwrap(setup.model), setup.make
        self.by_class = from_library(self._model) and getattr(self._model, "config", None) is not None
        """Whether a library's own class draws it."""

    @cached_property
    def one(self) -> nn.Module:
        """The model of one seed. Raises Unknown if nothing says how it is drawn."""
        return self._draw(SEEDS[0])

    @cached_property
    def pair(self) -> tuple[nn.Module, nn.Module]:
        """The models of two seeds. Raises Unknown if nothing says how they are drawn."""
        return self.one, self._draw(SEEDS[1])

    @property
    def of_class(self) -> nn.Module | None:
        """The model as its library's class draws it; None if it has no such class."""
        with suppress(Unknown):
            return self.one if self.by_class else None
        return None

    def exact(self, like: Trace) -> Trace | None:
        """Return the same step in float64, on the model as its class draws it; None if it does not run there,
        or if no copy of that model is proven to run by itself.
        """
        if self.of_class is None:
            return None
        with suppress(Exception):
            if proof_of(self.of_class, like.batch, like.loss_of).refusal:
                return None
            step = awake_step(like, lambda: copied_model(self.of_class))
            return step if step.exact else None
        return None

    @cached_property
    def replaced(self) -> list[Replaced]:
        """The parameters that ``make()`` gives a start of their own and then draws like any other; none
        without it.
        """
        if self._make is None:
            return []
        with same_random_state(SEEDS[0]), same_globals(), Writes() as writes:
            made = self._made()
        replaced = [_replaced(name, p, writes.seen.get(id(p), [])) for name, p in made.named_parameters()]
        return [parameter for parameter in replaced if parameter is not None]

    def has_setting(self, path: str, name: str, value: Any) -> bool | None:
        """Return whether a newly made model gives this setting to one of its modules; None if unknown."""
        with suppress(Unknown, KeyError):
            return settings(dict(self.one.named_modules())[path]).get(name) == value
        return None

    def draws(self, name: str, p: Tensor) -> bool:
        """Return whether a parameter is drawn: two seeds differ in it or, if that is unknown, it looks so."""
        with suppress(Unknown):
            one, other = (dict(m.named_parameters()) for m in self.pair)
            drawn = {n for n, x in one.items() if n in other and not torch.equal(x, other[n])}
            if drawn and name in one:  # if nothing differs, the class may set its own seed
                return name in drawn
        return _looks_drawn(p)

    def copies(self, first: str, name: str) -> bool:
        """Return whether the model's class or a library's container (nn.TransformerEncoder) copies blocks."""
        if self.of_class is not None:
            drawn = dict(self.of_class.named_parameters())
            return first in drawn and name in drawn and torch.equal(drawn[first], drawn[name])
        return from_library(self._model.get_submodule(".".join(shared((first, name))[:-1])))

    def built(self) -> nn.Module | None:
        """Build a model by ``make``, else by Hugging Face's class, cast and placed as the model is; None
        without either.

        Raises Unknown if the class makes a model with other tensors.
        """
        library, model = sys.modules.get("transformers"), self._model
        if self._make is None and (library is None or not isinstance(model, library.PreTrainedModel)):
            return None
        with same_random_state(SEEDS[0]):
            made = self._made() if self._make is not None else self._configured()
        if self._make is None and made.state_dict().keys() != model.state_dict().keys():
            raise Unknown(f"the model was changed after its class had made it, and {NOT_MADE}")
        place_alike(made, model)
        cast_alike(made, model)
        return made

    def on_meta(self) -> nn.Module | None:
        """Return what ``built`` makes on the meta device. Raises Unknown if the user's code cannot do it."""
        try:
            with torch.device("meta"):
                return self.built()
        except Unknown:
            raise
        except Exception as error:
            why = f"make() raises {type(error).__name__} on the meta device: {error}"
            raise Unknown(why) from error

    def _draw(self, seed: int) -> nn.Module:
        with same_random_state(seed), same_globals():
            made = self._drawn()
        place_alike(made, self._model)
        return made

    def _drawn(self) -> nn.Module:
        if self.by_class:
            with suppress(Exception):
                return self._configured()
        return self._made()

    def _configured(self) -> nn.Module:
        require_time()
        return type(self._model)(copy.deepcopy(self._model.config))

    def _made(self) -> nn.Module:
        if self._make is None:
            raise Unknown(NOT_MADE)
        require_time()
        if not isinstance(made := self._make(), nn.Module):
            raise Unknown(f"make() returned {shown(made)}, and must return a model")
        return unwrap(made)  # as the model under test: names count without those of wrappers


def cast_alike(made: nn.Module, model: nn.Module) -> None:
    """Cast each parameter and buffer to the type of the model's own of that name, and leave all others.

    What the model keeps in another type than most, as a float32 table of frequencies beside bfloat16 weights,
    is kept in that type; nothing is cast between numbers of different kinds, such as complex and real ones.
    """
    types = {name: x.dtype for name, x in _tensors_by_name(model)}
    for name, x in _tensors_by_name(made):
        wanted = types.get(name, x.dtype)
        if x.dtype != wanted and _kind(x.dtype) == _kind(wanted):
            x.data = x.data.to(wanted)


def place_alike(made: nn.Module, model: nn.Module) -> None:
    """Move a model to the device of another one, which a script may have moved after it was drawn.

    Nothing is moved if the other one is on several devices, or if this one holds no numbers.
    """
    devices, before = ({p.device for p in one.parameters()} for one in (model, made))
    if len(devices) == 1 and before != devices and not any(device.type == "meta" for device in before):
        made.to(devices.pop())


def _tensors_by_name(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return parameters and buffers by each of their names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return [*parameters, *model.named_buffers(remove_duplicate=False)]


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex
