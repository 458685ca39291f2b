"""What a loss compares of a model and its twin, followed through the functions of torch.

A quantity of the model and one of its twin are the same if they come from the same outputs for the same
inputs, and if what is made of the twin's uses no data that is not used for the model's, such as rewards.
With equal weights in both they are equal: log-ratios and divergences are 0, and ratios are 1. Rows may change
places in between, as where a batch is shuffled after its reference was run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from normlab.private_torch import without_function_modes
from normlab.trace.compare import distance
from normlab.trace.facts.twins import ModuleCall, OutermostCalls, Twin, Twins, are_equal
from normlab.trace.functions import FunctionMode, writes
from normlab.trace.tensors import Place, tensors_in
from normlab.trace.trace import Trace, at_weights

DIFFERENCES: Final = frozenset("sub sub_ subtract rsub __sub__ __rsub__ __isub__".split())
"""Functions that subtract one tensor from another."""
DISTANCES: Final = frozenset("mse_loss l1_loss smooth_l1_loss huber_loss".split())
"""Functions that are 0 where two tensors are equal."""
RANKS: Final = frozenset("logsigmoid log_sigmoid softplus".split())
"""Functions by which a loss prefers one of two."""
MADE_OF_A_SIZE: Final = frozenset("arange empty eye full linspace ones tril_indices zeros".split())
"""Functions that make a tensor of its size alone, of no data."""

Output = tuple[int, Place]
"""The number of an input, which equal ones share, and the place of an output in what a call returned."""


class Provenance(NamedTuple):
    """What a tensor was computed from. Tensors that are equal up to the order of rows have one number."""

    of_model: frozenset[Output] = frozenset()
    of_twin: frozenset[Output] = frozenset()
    data: frozenset[int] = frozenset()
    """Other tensors of more than one number, without those that only say in which order rows lie."""
    parameters: frozenset[int] = frozenset()

    def joined(self, other: Provenance) -> Provenance:
        """Return the provenance of what is computed from both."""
        return Provenance(
            self.of_model | other.of_model,
            self.of_twin | other.of_twin,
            self.data | other.data,
            self.parameters | other.parameters,
        )


class Comparison(NamedTuple):
    """A function of a quantity of the model and of the same one of its twin."""

    function: str
    outputs: frozenset[Output]
    """The outputs that both come from."""
    size: int
    """How many numbers are compared."""
    off: float
    """By how much the two differ, as a share of the largest number."""
    is_even: bool
    """Whether one is a multiple of the other, or the other plus a number, as a temperature or a margin of its
    own makes it.
    """


class Compared(NamedTuple):
    """What a loss compares in a pass in which the model and its twin have equal weights."""

    comparisons: list[Comparison]
    off: dict[Output, float]
    """By output that both gave for an equal input: by how much the two differ, as a share of the largest."""
    of_same_inputs: set[Output]
    """Those of calls whose other inputs are equal, too."""
    ranked: set[Output]
    """The outputs whose comparison says how much one of two answers is preferred."""

    def judged(self, rounding: float) -> list[Comparison]:
        """Return the comparisons of outputs that are equal: what makes others differ, such as a mode or an
        input of its own, may be meant.
        """
        return [c for c in self.comparisons if all(self.off[output] <= rounding for output in c.outputs)]


def compared(trace: Trace, twins: Twins) -> Compared:
    """Return what the loss of a step compares, with equal weights in the model and its twins."""
    values = trace.parameters
    again = trace.again(weights={name: value.to(values[name]) for name, value in twins.weights.items()})
    followed = _Followed(trace.model, twins)
    with ExitStack() as stack:
        for twin in twins.twins:
            # one that the model holds is in float64 with it
            if trace.exact and twin.path is None:
                tensors = {**dict(twin.module.named_parameters()), **dict(twin.module.named_buffers())}
                in_double = {n: x.detach().double() for n, x in tensors.items() if x.is_floating_point()}
                stack.enter_context(at_weights(twin.module, in_double))
        loss_of = again.loss_of

        def followed_loss(model: nn.Module, batch: Any) -> Tensor:
            with followed.calls.seen(), followed:
                return loss_of(model, batch)

        again.again(loss_of=followed_loss).once(graph=True)
    return Compared(followed.comparisons, followed.off(), followed.of_same_inputs(), followed.ranked)


class _Followed(FunctionMode):
    """Follows what a loss makes of the outputs of a model and of its twins."""

    def __init__(self, model: nn.Module, twins: Twins) -> None:
        super().__init__()
        self.calls = OutermostCalls(model, twins.apart, self._see)
        self.comparisons: list[Comparison] = []
        self.ranked: set[Output] = set()
        self._of_model = {id(m) for m in model.modules()}
        self._twins: Mapping[int, Twin] = {id(twin.module): twin for twin in twins.twins}
        self._known: dict[int, tuple[Tensor, Provenance]] = {}
        """By ``id`` of a tensor that is followed: itself, and where it comes from."""
        self._values: list[Tensor] = []
        """Tensors by their numbers, see ``_number``."""
        self._outputs: dict[bool, dict[Output, Tensor]] = {True: {}, False: {}}
        """What the model gave (True), and its twins (False)."""
        self._inputs: dict[bool, dict[Output, list[int]]] = {True: {}, False: {}}
        """The numbers of all that was given to the calls of the model (True), and of its twins (False)."""

    def off(self) -> dict[Output, float]:
        """Return how far the outputs of both differ where both were given the same."""
        model, twin = self._outputs[True], self._outputs[False]
        return {output: distance(model[output], twin[output]) for output in model.keys() & twin.keys()}

    def of_same_inputs(self) -> set[Output]:
        """Return the outputs of calls whose inputs are all equal."""
        model, twin = self._inputs[True], self._inputs[False]
        return {output for output in model.keys() & twin.keys() if model[output] == twin[output]}

    def _see(self, call: ModuleCall) -> None:
        """Begin to follow what a call of a module returned."""
        with without_function_modes():  # or the mode would follow what is done here
            self._begin(call)

    def _begin(self, call: ModuleCall) -> None:
        twin = self._twins.get(id(call.module))
        is_twin = twin is not None and not (twin.is_self and call.has_gradients)
        is_model = id(call.module) in self._of_model and not is_twin
        first_input = self._number(call.given[0]) if call.given else -1
        order = _order_of_rows(call.given[0]) if call.given else torch.empty(0)
        for place, x in tensors_in(call.output):
            provenance = Provenance()
            if (is_model or is_twin) and x.is_floating_point():
                output = first_input, place
                has_rows = x.ndim > 0 and len(x) == len(order)
                self._outputs[is_model][output] = x.detach()[order] if has_rows else x.detach()
                self._inputs[is_model][output] = [self._number(y) for y in call.given]
                outputs = frozenset({output})
                provenance = Provenance(of_model=outputs) if is_model else Provenance(of_twin=outputs)
            self._follow(x, provenance)

    def _follow(self, x: Tensor, provenance: Provenance) -> None:
        if not x.is_floating_point():  # ids and masks are data, whatever chose them
            provenance = Provenance(data=provenance.data)
        self._known[id(x)] = x, provenance  # with the tensor, whose id another one would get

    def _provenance(self, x: Tensor) -> Provenance:
        known = self._known.get(id(x))
        if known is not None:
            return known[1]
        if isinstance(x, nn.Parameter):
            return Provenance(parameters=frozenset({self._number(x)}))
        return Provenance() if _says_nothing(x) else Provenance(data=frozenset({self._number(x)}))

    def _number(self, x: Tensor) -> int:
        """Return the number of a tensor, which those share that are equal up to the order of their rows."""
        if x.ndim and not isinstance(x, nn.Parameter):
            x = x[_order_of_rows(x)]
        for number, known in enumerate(self._values):
            if are_equal(known, x):
                return number
        self._values.append(x.detach().clone())
        return len(self._values) - 1

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.calls.are_running:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        arguments = [x for _, x in tensors_in((args, kwargs))]
        provenance = Provenance()
        for x in arguments:
            provenance = provenance.joined(self._provenance(x))
        self._compare(name, args, kwargs)
        result = func(*args, **kwargs)
        if name in RANKS:
            self.ranked |= provenance.of_model & provenance.of_twin
        results = [x for _, x in tensors_in(result)]
        if writes(func, kwargs) and args and isinstance(args[0], Tensor):
            results.append(args[0])
        # any other tensor that is made of none is data, which ``_provenance`` sees when it is used
        if arguments or name in MADE_OF_A_SIZE:
            for x in results:
                self._follow(x, provenance)
        return result

    def _compare(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note a function of a quantity of the model and the same one of its twin."""
        pair = _operands(name, args, kwargs)
        if pair is None:
            return
        a, b = map(self._provenance, pair)
        # both must come from the same outputs, each of which the model gave and its twin as well
        outputs = a.of_model | a.of_twin
        of_both = (a.of_model | b.of_model) & (a.of_twin | b.of_twin)
        if not outputs or outputs != b.of_model | b.of_twin or outputs != of_both:
            return
        if name in DIFFERENCES and ((a.of_model and a.of_twin) or (b.of_model and b.of_twin)):
            return  # what is left of a difference is no quantity of one of them
        of_twin, of_model = (a, b) if a.of_twin else (b, a)
        is_mixture = bool(of_twin.of_model or of_model.of_twin)
        is_alike = of_twin.data == of_model.data if is_mixture else of_twin.data <= of_model.data
        if not is_alike or of_twin.parameters != of_model.parameters:
            return
        x, y = (z.detach() for z in pair)
        if name == "kl_div":
            x, y = x.exp(), y.exp() if kwargs.get("log_target") else y
        elif name == "cross_entropy":
            x = x.softmax(1 if x.ndim > 1 else 0)
        is_even = _is_even(_scores(x), _scores(y)) if name == "kl_div" else _is_even(x, y)
        self.comparisons.append(Comparison(name, frozenset(outputs), x.numel(), distance(x, y), is_even))


def _order_of_rows(x: Tensor) -> Tensor:
    """Return an order of a tensor's rows that does not depend on where they lie."""
    if not x.ndim:
        return torch.empty(0)
    _, ranks = torch.unique(x.detach(), dim=0, return_inverse=True)
    return ranks.argsort(stable=True)


def _says_nothing(x: Tensor) -> bool:
    """Return whether a tensor is one number, or an order of rows."""
    if x.numel() == 1:
        return True
    is_whole = x.ndim == 1 and not x.is_floating_point() and x.dtype != torch.bool
    return is_whole and torch.equal(x.sort().values.cpu(), torch.arange(len(x)).to(x.dtype))


def _operands(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return the two tensors that a function compares; None for any other function."""
    if name not in DIFFERENCES | DISTANCES | {"kl_div", "cross_entropy"} or kwargs.get("alpha", 1) != 1:
        return None
    operands: Sequence[Any] = [*args[:2], *(kwargs.get(n) for n in ("input", "other", "target"))]
    tensors = [x for x in operands if isinstance(x, Tensor) and x.is_floating_point()]
    return (tensors[0], tensors[1]) if len(tensors) == 2 and tensors[0].shape == tensors[1].shape else None


def _scores(p: Tensor) -> Tensor:
    """Return logarithms of probabilities `[..., V]`, less their mean: what a temperature multiplies."""
    logp = p.log()
    return logp - logp.mean(-1, keepdim=True)


def _is_even(x: Tensor, y: Tensor) -> bool:
    """Return whether one tensor is a multiple of the other, or the other plus a number."""
    x, y = x.double().flatten(), y.double().flatten()
    both = torch.isfinite(x) & torch.isfinite(y)
    x, y = x[both], y[both]
    if len(x) < 2:
        return True
    multiple = y * ((x * y).sum() / (y * y).sum().clamp_min(1e-300))
    shifted = y + (x - y).mean()
    return min(distance(x, multiple), distance(x, shifted)) < 1e-6
