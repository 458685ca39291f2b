"""A recorded dataflow as a loss function of a model and a batch, which can be run with either changed.

``micro_batch_flow`` makes a ``Flow`` of a recorded micro-batch, and ``proof`` shows that it gives what the
script computed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor, nn

from normlab.errors import UserError, in_one_line
from normlab.setups.arguments import Number
from normlab.setups.gradients import ROUNDINGS
from normlab.setups.outlines import Outline
from normlab.setups.recording import Escape, MicroBatch, RecordedCall, ancestors, model_calls, sources
from normlab.setups.setup import Setup
from normlab.trace.kept import set_state
from normlab.trace.restore import restored
from normlab.trace.tensors import eager, unwrap

MOST_APART: Final = 0.01
"""How much a tensor may differ at most when it is computed again, relative to its norm, in any precision."""


class NotRepeatableError(UserError):
    """A recorded step cannot be computed again; the sentence says which call is the first, and why."""

    def __init__(self, sentence: str, call: RecordedCall | None = None) -> None:
        super().__init__(sentence)
        self.call = call
        """The first call that cannot be repeated; None if no single call is to blame, as for a gradient."""


class OtherWayError(UserError):
    """A value that a script read out of its batch is another one in a changed batch, so the recorded step is
    not what the script would do with that batch.
    """


Draws = Sequence[Sequence[tuple[Any, Any]]]
"""For each call of a flow, the generators of random numbers that it drew from, each with its state before."""


@dataclass(frozen=True, eq=False)
class Flow:
    """What leads from a batch to a loss: calls in order, where the batch enters, and what stays constant.

    Modules and parameters are named by their paths in the model, so a copy of the model runs its own.
    """

    model: nn.Module
    """The smallest module that holds the modules that the flow trains and the parameters that it reads."""
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
    in_double: dict[int, nn.Module] = field(default_factory=dict, repr=False)
    """By ``id``, modules that are no part of the model, copied into float64."""
    written: frozenset[Number] = frozenset()
    """Those of ``tensors`` that a function writes to, directly or through a view of them."""
    escapes: tuple[Escape, ...] = ()
    """Where values of the batch left torch before the loss was there. What the script did with them is a
    constant here, so they must be the same in any batch that the flow is run on.
    """

    @cached_property
    def batch(self) -> dict[str, Tensor]:
        """The batch that was recorded."""
        return {name: self.tensors[number] for number, name in self.leaves.items()}

    def loss_of(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of a model on a batch, computed as the script computed it."""
        loss = self.values(model, batch)[self.loss]
        return loss if torch.is_grad_enabled() else loss.detach()

    def values(
        self,
        model: nn.Module,
        batch: Mapping[str, Tensor],
        *,
        draws: Draws | None = None,
        escaped: list[Escape] | None = None,
    ) -> dict[Number, Any]:
        """Run the flow and return all its values, by number.

        Args:
            model: What is run; its modules and parameters are found by their paths.
            batch: What it is run on.
            draws: If given, each call draws the random numbers that it drew when these were its generators'
                states, as a proof needs. A call that raises then cannot be repeated.
            escaped: If given, this list gets the escapes that read something else than in the recorded step.

        Raises:
            OtherWayError: If an escape reads something else, and no list is given for it.
            NotRepeatableError: If a call raises while ``draws`` are given.
        """
        wants_gradients = torch.is_grad_enabled() or self._differentiates
        values = self._values_at_begin(unwrap(model), batch)
        to_come = list(self.escapes)
        for i, call in enumerate(self.calls):
            if not values.keys() >= {*call.reads}:
                raise UserError(f"{call.name} in {call.line} reads what this model does not return")
            while to_come and to_come[0].number < call.results[0]:
                self._compare_escape(to_come.pop(0), values, escaped)
            for generator, state in [] if draws is None else draws[i]:
                set_state(generator, state)
            args, kwargs = call.arguments.with_values(values)
            run = call.function if call.module is None else self._module_for(call.module, model)
            with call.surroundings.entered(gradients=wants_gradients):
                try:
                    result = run(*args, **kwargs)  # type: ignore[misc]
                except Exception as error:
                    if draws is None:
                        raise
                    why = f"raises {in_one_line(error)} when it is called again"
                    raise NotRepeatableError(f"{call.name} in {call.line} {why}", call) from error
            values.update(call.outcome(values, result, run))
        for escape in to_come:
            self._compare_escape(escape, values, escaped)
        return values

    def _values_at_begin(self, inner: nn.Module, batch: Mapping[str, Tensor]) -> dict[Number, Any]:
        """Return the values that no call of the flow computes: constants, the batch, and the parameters of a
        model without wrappers.
        """
        values: dict[Number, Any] = {number: _as_all_else(x) for number, x in self.tensors.items()}
        values |= {number: batch[name] for number, name in self.leaves.items()}
        values |= {number: _tensor_at(inner, path) for number, path in self.parameters.items()}
        for number in self.written:  # so that neither the batch nor a constant is written to
            if isinstance(values[number], Tensor):
                values[number] = values[number].clone()
        return values

    def _compare_escape(
        self, escape: Escape, values: Mapping[Number, Any], escaped: list[Escape] | None
    ) -> None:
        """Compare what leaves torch with what left it when the script ran. An array is not compared.

        If it is another value, the escape is added to ``escaped``, or without such a list raises
        OtherWayError.
        """
        if escape.read is None:
            return
        args, kwargs = escape.arguments.with_values(values)
        with torch.no_grad():
            read = escape.function(*args, **kwargs)
        if not apart(read, escape.read):
            return
        if escaped is None:
            raise OtherWayError(
                f"{escape.name} in {escape.line} was {escape.read} in the recorded step, and is {read} with "
                "another batch; what the script does then was not seen"
            )
        escaped.append(escape)

    def holding(self, fixed: Collection[Number]) -> Flow:
        """Return the flow with these tensors of the batch as constants, and all that is computed with them
        before the model has a part in it, even if it is computed with the rest of the batch as well.
        """
        constants, newly_constant = set(fixed), list[Number]()
        calls = list[RecordedCall]()
        for call in self.calls:
            is_constant = not constants.isdisjoint(call.reads) and not self.depends_on_model(call)
            if is_constant and not call.random_states and not call.writes:
                constants.update(call.results)
                newly_constant += call.results
            else:
                calls.append(call)
        return replace(
            self,
            calls=tuple(calls),
            leaves={n: name for n, name in self.leaves.items() if n not in constants},
            tensors={**self.tensors, **self._values_of(newly_constant)},
        )

    def _values_of(self, numbers: Sequence[Number]) -> dict[Number, Any]:
        """Compute these values for the recorded batch, and no more than they need."""
        if not numbers:
            return {}
        leading = sources(self.calls, numbers)
        calls = tuple(call for call in self.calls if not leading.isdisjoint(call.results))
        with torch.no_grad():
            values = replace(self, calls=calls, escapes=()).values(self.model, self.batch)
        return {number: values[number] for number in numbers}

    def depends_on_model(self, call: RecordedCall) -> bool:
        """Return whether a call is one of the model, or reads what the model or its parameters gave."""
        for each in [*ancestors(self.calls, call.results[0]), call]:
            if id(each.module) in self.modules or not self.parameters.keys().isdisjoint(each.reads):
                return True
        return False

    def own_leaves(self, micro_batch: MicroBatch) -> set[Number]:
        """Return the tensors of the batch that the model takes, or that meet what it gave, as they are or
        after some changes, but not those that are only counted.
        """
        read = {n for call in model_calls(self.calls) for n in call.reads}
        # a number, such as a count of targets, says nothing of single rows
        with_axes = [n for n in read if getattr(micro_batch.tensors[n], "ndim", 0)]
        return sources(self.calls, with_axes) & self.leaves.keys()

    # ------------------------------------------------------------------------------------------ its proof

    def prove(self, micro_batch: MicroBatch, unrepeated: list[Escape]) -> dict[str, Tensor]:
        """Compute the recorded loss and gradients again, from the same weights and random numbers.

        Args:
            micro_batch: Where the flow comes from, with all that was recorded of it.
            unrepeated: This list gets the escapes that read something else now.

        Returns:
            The gradients, by the paths of their parameters.

        Raises:
            NotRepeatableError: If something differs by more than rounding; it names the first such call.
        """
        parameters = {path: p for path, p in self.model.named_parameters() if p.requires_grad}
        setup = Setup(self.model, self.batch, loss=self.loss_of)
        with restored(setup), micro_batch.module_state.in_place(), eager():
            draws = [call.random_states for call in self.calls]
            values = self.values(self.model, self.batch, draws=draws, escaped=unrepeated)
            self._refuse_other_results(values, micro_batch)
            self._refuse_another_graph(values, micro_batch)
            loss = values[self.loss] * (self.factor * self.scale)
            try:
                gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            except RuntimeError as error:
                raise NotRepeatableError(f"the backward pass raises {in_one_line(error)}") from error
        self._refuse_other_gradients(parameters, gradients, micro_batch)
        by_path = zip(parameters, gradients, strict=True)
        return {path: gradient.detach() for path, gradient in by_path if gradient is not None}

    def _refuse_other_results(self, values: Mapping[Number, Any], micro_batch: MicroBatch) -> None:
        """Raise NotRepeatableError for the first call that gives something else than it gave then."""
        overwritten = {number for call in self.calls for number in call.overwritten}
        for call in ancestors(self.calls, self.loss):
            for number in call.results:
                if number in overwritten:
                    continue  # the entries are gone; the last state of the tensor is compared
                recorded = micro_batch.value(number)
                if recorded is not None and apart(values.get(number), recorded):
                    raise NotRepeatableError(
                        f"{call.name} in {call.line} gives another result when it is called again with "
                        "the same arguments and random numbers",
                        call,
                    )

    @staticmethod
    def _refuse_other_gradients(
        parameters: Mapping[str, nn.Parameter], gradients: Sequence[Tensor | None], micro_batch: MicroBatch
    ) -> None:
        """Raise NotRepeatableError for the first parameter whose gradient is not the recorded one."""
        for (path, p), gradient in zip(parameters.items(), gradients, strict=True):
            recorded = micro_batch.gradients.get(id(p))
            if gradient is None:
                if recorded is not None and bool(recorded.any()):
                    raise NotRepeatableError(f"the gradient of {path} comes from something that was not seen")
                continue
            if recorded is None and id(p) not in micro_batch.watched:
                continue  # nobody looked
            if apart(gradient, torch.zeros_like(gradient) if recorded is None else recorded):
                raise NotRepeatableError(
                    f"the gradient of {path} differs when the step is computed again: something in it, such "
                    "as a torch.autograd.Function outside of modules, was not seen"
                )

    def _refuse_another_graph(self, values: Mapping[Number, Any], micro_batch: MicroBatch) -> None:
        """Raise NotRepeatableError for the first call whose results have lost or gained a gradient."""
        for call in ancestors(self.calls, self.loss):
            for number in call.results:
                recorded, value = micro_batch.tensors.get(number), values.get(number)
                if not isinstance(recorded, (Tensor, Outline)) or not isinstance(value, Tensor):
                    continue
                if recorded.requires_grad == value.requires_grad:
                    continue
                what = "no gradient" if recorded.requires_grad else "a gradient"
                raise NotRepeatableError(
                    f"{call.name} in {call.line} has {what} when it is called again", call
                )

    def _module_for(self, module: nn.Module, model: nn.Module) -> Callable[..., Any]:
        """Return what is called in place of a recorded module: the one at the same path of this model.

        The model itself is called through its wrappers, if it has any. A module that is no part of the model,
        such as a teacher, is called as it is.
        """
        path = self.modules.get(id(module))
        if path is None:
            return self._untrained(module)
        return unwrap(model).get_submodule(path) if path else model

    def _untrained(self, module: nn.Module) -> nn.Module:
        """Return a module that is no part of the model, in float64 where all else is computed in that."""
        if not _is_in_double():
            return module
        if id(module) not in self.in_double:
            self.in_double[id(module)] = copy.deepcopy(module).double()
        return self.in_double[id(module)]

    @cached_property
    def _differentiates(self) -> bool:
        """Whether a gradient is a part of the loss, which needs the graph whoever asks for the loss."""
        return any(call.name == "grad" for call in self.calls)


def _is_in_double() -> bool:
    """Return whether all is computed in float64."""
    return torch.get_default_dtype() is torch.float64


def _as_all_else(x: Tensor) -> Tensor:
    """Return a tensor that a script made, such as a first state of zeros, in float64 where all else is."""
    return x.double() if _is_in_double() and isinstance(x, Tensor) and x.is_floating_point() else x


def apart(a: Any, b: Any) -> bool:
    """Return whether two tensors or numbers differ; floating-point ones, by more than rounding. ``b`` may be
    the outline of a tensor, and its type decides what is compared.
    """
    if isinstance(b, int):
        return a != b
    if isinstance(b, float):
        rounding = ROUNDINGS * torch.finfo(torch.float32).eps
        return not isinstance(a, (int, float)) or not math.isclose(a, b, rel_tol=rounding)
    if not isinstance(a, Tensor) or a.shape != b.shape:
        return True
    if not b.dtype.is_floating_point:
        return not torch.equal(a.detach(), b.detach())
    # in a low precision, so many roundings would be half of the number
    tolerance = min(ROUNDINGS * torch.finfo(b.dtype).eps, MOST_APART)
    return b.is_apart(a, tolerance) if isinstance(b, Outline) else _tensors_apart(a, b, tolerance)


def _tensors_apart(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Return whether two floating-point tensors differ by more than this share of the second one's norm."""
    wide_a, wide_b = a.detach().double(), b.detach().double()
    if torch.equal(wide_a, wide_b):
        return False
    return float((wide_a - wide_b).norm()) > tolerance * float(wide_b.norm())


def _tensor_at(model: nn.Module, path: str) -> Tensor:
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)
