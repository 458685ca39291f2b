"""Watch the first step of an optimizer in one process, and make it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from normlab.parallel.job import Named, Step
from normlab.setups.flow import Flow, NotRepeatableError
from normlab.setups.micro_batch_flow import flow_of
from normlab.setups.optimizers import parameters_of
from normlab.setups.recorder import Recorder
from normlab.setups.recording import Event, MicroBatch
from normlab.setups.together import common_module


class NotWatched:
    """Stands in for ``GradientWatch``: gradients that are spread over ranks cannot be compared by one."""

    def __init__(self) -> None:
        self.parameters: dict[int, Tensor] = {}
        self.seen: dict[int, Tensor | None] = {}
        self.has_some = False

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Look at nothing."""

    def add_as_they_are(self, parameters: Iterable[Tensor]) -> None:
        """Look at nothing."""

    def look(self) -> None:
        """Look at nothing."""

    def added(self, before: Mapping[int, Tensor | None]) -> dict[int, Tensor]:
        """Return nothing."""
        return {}

    def changes(self, events: Iterable[Event]) -> list[Event]:
        """See no change."""
        return []


class StepObserver(Recorder):
    """Records the data of a script as a ``Recorder`` does, but makes its first step, and then ends it.

    Args:
        after_pass: Called after each backward pass, with the observer and the number of passes so far.
    """

    def __init__(
        self, after_pass: Callable[[StepObserver, int], None] = lambda observer, passes: None
    ) -> None:
        super().__init__(steps=1)
        self._gradients = NotWatched()  # type: ignore[assignment]
        self._after_pass = after_pass
        self._stepped: list[Optimizer] = []
        self._at_backward: dict[int, Tensor] = {}
        """By ``id`` of the parameter, its gradient when the latest backward pass ended, as it is held."""
        self.norms: list[float] = []
        """What ``clip_grad_norm_`` took for the norm of all gradients, in each of its calls."""
        self.step: Step | None = None
        """The step, once it is made."""

    def backward(self, original: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass; after a step, end the script in place of it."""
        is_outer = not self.is_paused
        if is_outer and self._stepped:
            self._end()
        result = super().backward(original, loss, *args, **kwargs)
        if is_outer:
            with self.paused():
                self._after_pass(self, sum(e.kind == "backward" for e in self.recording.events))
                self._keep_gradients()
        return result

    def _keep_gradients(self) -> None:
        held = [p for optimizer in self.recording.optimizers for p in parameters_of(optimizer)]
        self._at_backward = {id(p): p.grad.detach().clone() for p in held if p.grad is not None}

    def _step_or_end(self, optimizer: Optimizer) -> None:
        """Make a step; end the script when each of its optimizers has made one."""
        if not self._active:
            self._ending.raise_in_script()
        if not self.recording.micro_batches:
            return  # before any backward pass, as some wrappers step once to set up their state
        if any(optimizer is known for known in self._stepped):
            self._end()
        with self.paused(), torch.no_grad():
            if self.step is None:
                self._look_before()
            self._stepped.append(optimizer)
            with self.stepping_freely(optimizer):
                optimizer.step()
            self._look_after()
        if len(self._stepped) == len(self.recording.optimizers):
            self._end()

    def _end(self) -> None:
        self._active = False
        self._ending.raise_in_script()

    # -------------------------------------------------------------------------------- what is looked at

    @property
    def held(self) -> dict[int, Tensor]:
        """By ``id``, the parameters that optimizers hold."""
        return {id(p): p for optimizer in self.recording.optimizers for p in parameters_of(optimizer)}

    @property
    def window(self) -> list[MicroBatch]:
        """All micro-batches before the first step: whether gradients were zeroed in between is not seen."""
        return self.recording.micro_batches

    def flow(self, micro_batch: MicroBatch) -> Flow:
        """Return the flow of a micro-batch. Raises NotRepeatableError if no batch leads to its loss."""
        return flow_of(micro_batch, self.held, model=self.model)

    @property
    def model(self) -> nn.Module:
        """The smallest module that holds what the first micro-batch calls and what optimizers hold.

        Raises NotRepeatableError if the script calls no module before its first backward pass.
        """
        calls = self.window[0].calls
        modules = [call.module for call in calls if call.module is not None]
        trained = [m for m in modules if any(id(p) in self.held for p in m.parameters())]
        if not trained:
            raise NotRepeatableError(
                "the script calls no module that an optimizer trains; call it as model(x)"
            )
        return common_module(trained, [], self.window[0].module_names)

    def parameters(self) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
        """Return the parameters that optimizers hold by name, and their ties, as ``names_and_ties`` does."""
        return names_and_ties(self.model, self.held)

    def rates(self) -> dict[str, float]:
        """Return the learning rate of each parameter by name."""
        rate_of: dict[int, float] = {}
        for optimizer in self.recording.optimizers:
            for group in optimizer.param_groups:
                rate_of |= {id(p): float(group["lr"]) for p in group["params"]}
        named, _ = self.parameters()
        return {name: rate_of[id(p)] for name, p in named.items()}

    def _look_before(self) -> None:
        named, ties = self.parameters()
        self._named = named
        backward = {n: self._at_backward[id(p)] for n, p in named.items() if id(p) in self._at_backward}
        self.step = Step(
            before=gathered(named),
            backward=gathered(backward),
            at_step=gathered({n: p.grad for n, p in named.items() if p.grad is not None}),
            after={},
            ties=ties,
            norms=tuple(self.norms),
            rates=self.rates(),
        )

    def _look_after(self) -> None:
        assert self.step is not None
        self.step.after.update(gathered(self._named))


def names_and_ties(model: nn.Module, held: Collection[int]) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """Return the parameters of a model that are ``held``, by ``id``, under their first names, and the ties
    between names: each further name of one that has several, with its first.
    """
    first: dict[int, str] = {}
    named: dict[str, nn.Parameter] = {}
    ties: dict[str, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) not in held:
            continue
        if id(p) in first:
            ties[name] = first[id(p)]
        else:
            first[id(p)] = name
            named[name] = p
    return named, ties


def gathered(tensors: Mapping[str, Tensor]) -> Named:
    """Return copies of whole tensors, of which this process may hold a part. All ranks must call this."""
    return {name: gathered_tensor(x) for name, x in tensors.items()}


def gathered_tensor(x: Tensor) -> Tensor:
    """Return a copy of a whole tensor, of which this process may hold a part. All ranks must call this."""
    x = x.detach()
    if isinstance(x, DTensor):
        x = x.full_tensor()
    return x.clone().cpu()
