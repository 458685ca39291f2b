"""A recorded dataflow as a loss function of a model and a batch, which can be run with either changed."""

from __future__ import annotations

import gc
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor, nn

from normlab.errors import UserError
from normlab.setups.recording import MicroBatch, Number, RecordedCall, Reference
from normlab.trace.restore import same, same_random_state
from normlab.trace.tensors import eager, tensors_in, unwrap

READING: Final = ("__getitem__", "index_select", "gather", "take", "take_along_dim", "embedding")
"""Functions that read entries of their first tensor. Where that is a store of data, a batch begins with what
they return, and not with the store or with the places in it.
"""


SCALING: Final = ("mul", "multiply", "__mul__", "__rmul__", "div", "true_divide", "__truediv__")
"""Functions by which a script scales a loss before its backward pass."""
ROUNDINGS: Final = 64
"""How many roundings of its type a loss or a gradient may differ by when it is computed once more."""


class NotRepeatableError(UserError):
    """A recorded step cannot be computed again; the sentence says which call is the first, and why."""


@dataclass(frozen=True, eq=False)
class Flow:
    """What leads from a batch to a loss: calls in order, where the batch enters, and what stays constant.

    Modules and parameters are named by their paths in the model, so a copy of the model runs its own.
    """

    model: nn.Module
    """The smallest module that holds all that the flow calls and reads."""
    calls: tuple[RecordedCall, ...]
    loss: Number
    modules: Mapping[int, str]
    """By ``id``, the path of each module that is called."""
    parameters: Mapping[Number, str]
    """The parameters and buffers that are read outside of modules, by path."""
    leaves: Mapping[Number, str]
    """The tensors of the batch, each with its name."""
    tensors: Mapping[Number, Tensor]
    """The leaves, and all other tensors that nothing here computes, as they were."""
    factor: float = 1.0
    """What the script multiplied the loss by before its backward pass: 1/4 where it accumulates over four."""
    scale: float = 1.0
    """What a ``GradScaler`` multiplied it by on top."""

    @cached_property
    def batch(self) -> dict[str, Tensor]:
        """The batch that was recorded."""
        return {name: self.tensors[number] for number, name in self.leaves.items()}

    def loss_of(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of a model on a batch, computed as the script computed it."""
        return self.values(model, batch)[self.loss]

    def values(
        self, model: nn.Module, batch: Mapping[str, Tensor], *, as_drawn: bool = False
    ) -> dict[Number, Any]:
        """Run the flow and return all its values. With ``as_drawn``, each call draws the random numbers that
        it drew when it was recorded.
        """
        inner, wanted = unwrap(model), torch.is_grad_enabled()
        values: dict[Number, Any] = dict(self.tensors)
        values |= {number: batch[name] for number, name in self.leaves.items()}
        values |= {number: _tensor_at(inner, path) for number, path in self.parameters.items()}
        for number in self._overwritten:
            values[number] = values[number].clone()  # so that neither the batch nor a constant is written to
        for call in self.calls:
            args, kwargs = call.with_values(values)
            if as_drawn and call.random_state is not None:
                torch.set_rng_state(call.random_state)
            run = call.function if call.module is None else self._own(call.module, model)
            with call.surroundings.entered(gradients=wanted):
                result = run(*args, **kwargs)  # type: ignore[misc]
            outcome = [args[0]] if call.changes is not None else [x for _, x in tensors_in(result)]
            values.update(zip(call.results, outcome, strict=True))
        return values

    def holding(self, fixed: Iterable[Number]) -> Flow:
        """Return the flow with these tensors of the batch as constants."""
        kept = set(fixed)
        return replace(self, leaves={n: name for n, name in self.leaves.items() if n not in kept})

    @property
    def entering_modules(self) -> set[Number]:
        """The tensors of the batch that a module takes as they are."""
        taken = {n for call in self.calls if call.module is not None for n in call.reads}
        return taken & self.leaves.keys()

    def prove(self, micro_batch: MicroBatch) -> None:
        """Compute the recorded loss and gradients once more, from the same weights and random numbers.

        Raises NotRepeatableError, which names the first call that gives something else, if they differ by
        more than rounding.
        """
        named = {path: p for path, p in self.model.named_parameters() if p.requires_grad}
        with (
            same(self.model, self.batch, parameters=False),
            same_random_state(),
            eager(),
            torch.enable_grad(),
        ):
            values = self.values(self.model, self.batch, as_drawn=True)
            for call in self.calls:
                for number in call.results:
                    recorded = micro_batch.tensors.get(number)
                    if recorded is not None and _apart(values[number], recorded):
                        raise NotRepeatableError(
                            f"{call.name} in {call.line} gives another result when it is called again with "
                            "the same arguments and random numbers"
                        )
            loss = values[self.loss] * (self.factor * self.scale)
            found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        for (path, p), gradient in zip(named.items(), found, strict=True):
            recorded = micro_batch.gradients.get(id(p))
            if recorded is None or gradient is None:
                if recorded is not None and bool(recorded.any()):
                    raise NotRepeatableError(f"the gradient of {path} comes from something that was not seen")
                continue
            if _apart(gradient, recorded):
                raise NotRepeatableError(
                    f"the gradient of {path} differs when the step is computed again: something in it, such "
                    "as a torch.autograd.Function outside of modules, was not seen"
                )

    def _own(self, module: nn.Module, model: nn.Module) -> nn.Module:
        """Return the model's own module at the place of a recorded one. The model itself is called through
        its wrappers, if it has any.
        """
        path = self.modules[id(module)]
        return unwrap(model).get_submodule(path) if path else model

    @cached_property
    def _overwritten(self) -> list[Number]:
        return [n for call in self.calls if (n := call.changes) in self.tensors and n is not None]


def _apart(a: Any, b: Tensor) -> bool:
    """Return whether two tensors differ by more than rounding."""
    if not isinstance(a, Tensor) or a.shape != b.shape:
        return True
    if not b.is_floating_point():
        return not torch.equal(a.detach(), b.detach())
    size = float(b.detach().abs().max()) if b.numel() else 0.0
    apart = float((a.detach().double() - b.detach().double()).abs().max()) if b.numel() else 0.0
    return apart > ROUNDINGS * torch.finfo(b.dtype).eps * max(size, 1e-30)


def _tensor_at(model: nn.Module, path: str) -> Tensor:
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)


# ------------------------------------------------------------------------------------- from a recording


def flow_of(micro_batch: MicroBatch) -> Flow:
    """Return the flow that leads to the loss of a micro-batch, before the script scaled it for its backward
    pass.

    Raises NotRepeatableError if no module with parameters takes part in it.
    """
    calls = ancestors(micro_batch.calls, micro_batch.loss)
    loss, factor = _unscaled(calls, micro_batch)
    calls = ancestors(calls, loss)
    modules = [call.module for call in calls if call.module is not None]
    computed = {number for call in calls for number in call.results}
    read = {number for call in calls for number in call.reads} - computed
    if not modules:
        raise NotRepeatableError(
            "no call of a module with parameters leads to the loss that the script differentiates; call the "
            "model, as in model(x)"
        )
    objects = {n: micro_batch.tensors[n] for n in read}
    read_directly = [x for x in objects.values() if isinstance(x, nn.Parameter)]
    model = common_module(modules, read_directly, micro_batch.module_names)
    paths = {id(module): path for path, module in reversed([*model.named_modules()])}
    named = {id(x): path for path, x in [*model.named_buffers(), *model.named_parameters()]}
    parameters = {n: named[id(x)] for n, x in objects.items() if id(x) in named}
    cut = _Cut(calls, parameters, micro_batch)
    calls = cut.kept
    computed = {number for call in calls for number in call.results}
    read = {number for call in calls for number in call.reads} - computed - parameters.keys()
    return Flow(
        model=model,
        calls=tuple(calls),
        loss=loss,
        modules={id(m): paths[id(unwrap(m))] for m in modules},
        parameters={n: path for n, path in parameters.items() if any(n in call.reads for call in calls)},
        leaves=_named([n for n in cut.begins if n in read], calls, micro_batch.names),
        tensors={n: micro_batch.before.get(n, micro_batch.tensors[n]) for n in read},
        factor=factor,
        scale=micro_batch.scale,
    )


def _unscaled(calls: Sequence[RecordedCall], micro_batch: MicroBatch) -> tuple[Number, float]:
    """Return the loss before the last calls that only multiply or divide it by a number, and their factor."""
    loss, factor = micro_batch.loss, 1.0
    for call in reversed(calls):
        if loss not in call.results or call.name not in SCALING or len(call.reads) != 1:
            break
        args, _ = call.with_values({n: Reference(n) for n in call.reads})
        numbers = [x for x in args if isinstance(x, (int, float))]
        if len(args) != 2 or len(numbers) != 1:
            break
        if call.name in ("div", "true_divide", "__truediv__") and isinstance(args[0], Reference):
            factor /= numbers[0]
        elif call.name in ("mul", "multiply", "__mul__", "__rmul__"):
            factor *= numbers[0]
        else:
            break
        loss = call.reads[0]
    return loss, factor


def ancestors(calls: Sequence[RecordedCall], number: Number) -> list[RecordedCall]:
    """Return the calls on which a value depends, in their order."""
    needed, used = {number}, list[RecordedCall]()
    for call in reversed(calls):
        if needed.intersection(call.results):
            used.append(call)
            needed.update(call.reads)
            if call.changes is not None:
                needed.add(call.changes)
    return used[::-1]


def common_module(
    modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter], names: Mapping[int, str]
) -> nn.Module:
    """Return the smallest module alive that holds these modules and parameters; one that is made for them if
    there is none, as where an encoder and a decoder are called in turn.
    """
    wanted = {id(unwrap(m)) for m in modules}
    tensors = {id(p) for p in parameters}
    candidates = [unwrap(module) for module in modules]
    # by their type: asking an object for its class may run code of its own
    candidates += [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
    best: tuple[int, nn.Module] | None = None
    for candidate in candidates:
        inside = {id(m) for m in candidate.modules()}
        holds_all = wanted <= inside and tensors <= {id(p) for p in candidate.parameters()}
        if holds_all and (best is None or len(inside) < best[0]):
            best = len(inside), candidate
    return best[1] if best is not None else _joined(modules, parameters, names)


class Together(nn.Module):
    """Modules that one step calls, and that no module holds."""


def _joined(
    modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter], names: Mapping[int, str]
) -> nn.Module:
    """Return a module that holds these, under the names that the script or their classes give them."""
    together, used = Together(), Counter[str]()
    # a name may be that of one of Module's own attributes, as "train" is
    names = {key: name for key, name in names.items() if not hasattr(together, name)}
    outermost = [m for m in dict.fromkeys(modules) if not any(m is not o and _holds(o, m) for o in modules)]
    for module in outermost:
        name = names.get(id(module)) or names.get(id(unwrap(module))) or type(module).__name__.lower()
        used[name] += 1
        together.add_module(name if used[name] == 1 else f"{name}_{used[name]}", unwrap(module))
    known = {id(p) for p in together.parameters()}
    for i, parameter in enumerate(p for p in dict.fromkeys(parameters) if id(p) not in known):
        together.register_parameter(f"parameter_{i}", parameter)
    return together


def _holds(outer: nn.Module, inner: nn.Module) -> bool:
    return any(module is inner for module in outer.modules())


# ------------------------------------------------------------------------------- where the batch begins


class _Cut:
    """Where a batch begins among the calls that lead to a loss.

    A tensor belongs to the batch if its first axis is as long as that of the first tensor that a module
    takes. What is computed of the batch alone, such as slices and masks, is computed again; what was read out
    of a store of data, or stacked from single rows, is where the batch begins.
    """

    def __init__(
        self, calls: Sequence[RecordedCall], parameters: Iterable[Number], micro_batch: MicroBatch
    ) -> None:
        self._tensors = micro_batch.tensors
        self._rows = _rows(calls, micro_batch)
        self._made = {number for call in calls for number in call.results}
        self._parameters = set(parameters)
        self._of_model = set(self._parameters)
        """Values that depend on parameters."""
        self._of_batch: set[Number] = set()
        """The batch's tensors, and what is computed of them alone."""
        self.begins: dict[Number, None] = {}
        """The batch's tensors, in order."""
        self.kept = [call for call in calls if self._is_kept(call)]

    def _is_kept(self, call: RecordedCall) -> bool:
        """Return whether a call belongs to what makes a loss of a batch, and not to what made the batch."""
        of_model = call.module is not None or not self._of_model.isdisjoint(call.reads)
        if of_model:
            self._of_model.update(call.results)
        for number in call.reads:
            if number not in self._made and number not in self._parameters:
                self._enter(number)
        if of_model:
            return True
        if self._is_about_the_batch(call):
            self._of_batch.update(call.results)
            return True
        for number in call.results:
            self._enter(number)
        return False

    def _enter(self, number: Number) -> None:
        """Let the batch begin with a tensor, if it looks like one of a batch."""
        x = self._tensors[number]
        if x.ndim >= 2 and x.shape[0] == self._rows:
            self.begins[number] = None
            self._of_batch.add(number)

    def _is_about_the_batch(self, call: RecordedCall) -> bool:
        reads = call.reads
        if self._of_batch.isdisjoint(reads):
            return False
        if call.name in READING and reads[0] not in self._of_batch:
            return False
        # other tensors are constants that broadcast, such as positions; a larger one is a store of data
        largest = max(self._tensors[n].numel() for n in call.results)
        return all(n in self._of_batch or self._tensors[n].numel() <= largest for n in reads)


def _rows(calls: Iterable[RecordedCall], micro_batch: MicroBatch) -> int:
    for call in calls:
        if call.module is not None:
            for number in call.reads:
                if (x := micro_batch.tensors[number]).ndim:
                    return x.shape[0]
    return 0


def _named(
    numbers: Sequence[Number], calls: Sequence[RecordedCall], names: Mapping[Number, str]
) -> dict[Number, str]:
    """Return a name for each tensor of the batch: the argument of a module that takes it, or the script's."""
    chosen: dict[Number, str] = {}
    for number in numbers:
        name = names.get(number) or next(_arguments_called(number, calls), "") or "tensor"
        used, unique, i = set(chosen.values()), name, 2
        while unique in used:
            unique, i = f"{name}_{i}", i + 1
        chosen[number] = unique
    return chosen


def _arguments_called(number: Number, calls: Iterable[RecordedCall]) -> Iterator[str]:
    for call in calls:
        if call.module is None or number not in call.reads:
            continue
        args, kwargs = call.with_values({n: Reference(n) for n in call.reads})
        bound = inspect.signature(call.module.forward).bind_partial(*args, **kwargs).arguments
        for name, value in bound.items():
            if isinstance(value, Reference) and value.number == number:
                yield name
