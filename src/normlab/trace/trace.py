"""One instrumented step of a model on a batch, computed when asked for."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from normlab.errors import UserError
from normlab.private_torch import is_in_backward
from normlab.setups.setup import Loss, output_loss
from normlab.trace.autograd import (
    Gradients,
    OptimizerFactory,
    Weights,
    copied_optimizer,
    gradients_in,
    trainable,
)
from normlab.trace.budget import begin_pass
from normlab.trace.functions import OWN, Detachments, FunctionCall, Functions, Preserve, own_functions
from normlab.trace.lookups import lookups_in_range
from normlab.trace.restore import undisturbed
from normlab.trace.tensors import Place, Side, Tap, forward_hooks, tensors_in
from normlab.trace.trail import noted_pass

NO_LOSS: Final = (
    "the loss is not a tensor; loss(model, batch) must return a scalar tensor, as a cross-entropy is"
)


@contextmanager
def at_weights(model: nn.Module, weights: Weights) -> Iterator[None]:
    """Give these parameters and buffers other values inside this block, without writing to their own storage.

    A backward pass at these values must be inside too: a graph holds parameters by reference. A parameter
    with several paths may be named by any of them.
    """
    if not weights:
        yield
        return
    with ExitStack() as stack:
        stack.callback(torch.clear_autocast_cache)  # it keeps copies of cast weights
        for path, weight in weights.items():
            p = attrgetter(path)(model)
            stack.callback(setattr, p, "data", p.data)
            # a pass may write to a buffer, as running statistics do, and the next pass must not see that
            p.data = weight.detach() if isinstance(p, Parameter) else weight.detach().clone()
        torch.clear_autocast_cache()
        yield


class Event(NamedTuple):
    """One call of a module: the tensors that entered and left it, as they were then."""

    module: str
    call: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    places: tuple[Place, ...]
    """Where the outputs are."""
    outermost: bool = False
    """Whether no other module of the model called it: the loss did, or the step."""


class Pass:
    """What one forward pass gave: the loss, the model's outputs, and what hooks and functions showed."""

    def __init__(self, taps: Iterable[Tap], *, graph: bool, events: bool, hooks_all: bool) -> None:
        self._taps, self._graph, self._events, self._hooks_all = frozenset(taps), graph, events, hooks_all
        self._calls: Counter[tuple[str, Side]] = Counter()
        self._entered: list[tuple[str, tuple[Tensor, ...]]] = []
        self.loss: Tensor | None = None
        self.outputs: list[Tensor] = []
        """What leaves the outermost calls; without hooks on all modules, only what leaves the whole model."""
        self.runs_whole = False
        """Whether the model was called as a whole, and not only parts of it."""
        self.events: list[Event] = []
        self.functions: list[FunctionCall] = []
        self.taps: dict[Tap, Tensor] = {}
        self.cuts: Mapping[tuple[str, str], list[Tensor]] = {}
        """Module and file of each place where a cut in the graph was undone, and the tensors that have a
        graph for it.
        """

    @property
    def running(self) -> str:
        """The module that is running."""
        return self._entered[-1][0] if self._entered else ""

    def see(self, path: str, side: Side, values: Any) -> None:
        """Take note of what enters or leaves a module."""
        if is_in_backward():  # a checkpoint runs it again
            return
        call = self._calls[path, side]
        self._calls[path, side] += 1
        tensors = {place: x if self._graph else x.detach() for place, x in tensors_in(values)}
        for place, x in tensors.items():
            tap = Tap(path, side, place, call)
            if tap in self._taps:
                self.taps[tap] = x
        if side == "input":
            self._entered.append((path, self._as_they_are(tensors.values())))
        else:
            self._leave(path, call, tensors)

    def _as_they_are(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Return tensors as an event shows them: what is written to them later must not change it."""
        if not self._events:
            return ()
        return tuple(x if self._graph else x.clone() for x in tensors)

    def _leave(self, path: str, call: int, tensors: Mapping[Place, Tensor]) -> None:
        entered, inputs = self._entered.pop()
        while entered != path:  # the model caught what a module inside raised
            entered, inputs = self._entered.pop()
        self.runs_whole |= path == ""
        outermost = not self._entered
        if path == "" or (outermost and self._hooks_all):
            self.outputs.extend(tensors.values())
        if self._events:
            outputs = self._as_they_are(tensors.values())
            self.events.append(Event(path, call, inputs, outputs, tuple(tensors), outermost))

    def call(self, call: FunctionCall) -> None:
        self.functions.append(call._replace(module=self.running))


class _Backward(NamedTuple):
    """What a backward pass gave."""

    loss: float
    gradients: dict[str, Tensor | None]
    runs_again: bool
    """Whether it ran modules again, as checkpoints do."""


class _Shown:
    """What passes of a trace showed: each is found when it is asked for, and kept until it is let go.

    A cached property could only be let go by taking it out of the object's ``__dict__``.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def get(self, name: str, find: Callable[[], Any]) -> Any:
        if name not in self._values:
            self._values[name] = find()
        return self._values[name]

    def if_known(self, name: str) -> Any:
        return self._values.get(name)

    def let_go(self, *names: str) -> None:
        for name in names or tuple(self._values):
            self._values.pop(name, None)


@dataclass(frozen=True, eq=False)
class Trace:
    """One step of a model on a batch, computed when asked for; the model is left as it was.

    ``exact`` says that the model's weights are in float64, so its functions run in float64 too. Without
    ``dropout``, every dropout of torch passes its input on. ``weights`` replace the model's own parameters
    and buffers of the same names. ``changed`` maps a module's path to a function of its first input.
    ``rewritten`` names parameters to which the model writes as it runs: each pass begins at the same values
    of them. ``undone`` says which of the places that cut the graph are to leave it whole, see
    ``Detachments``.

    >>> from normlab.trace.tensors import Tap
    >>> tap = Tap("decoder.end", "output")
    >>> trace = normlab.Trace(model, batch, loss, taps=(tap,))
    >>> trace[tap].shape, trace.again(seed=1).loss == trace.loss
    (torch.Size([4, 16, 16]), tensor(True))
    """

    model: nn.Module
    batch: Any
    loss_of: Loss = output_loss
    training: bool = False
    dropout: bool = True
    exact: bool = False
    seed: int = 0
    taps: tuple[Tap, ...] = ()
    weights: Weights = field(default_factory=dict)
    changed: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    rewritten: frozenset[str] = frozenset()
    undone: Callable[[str, str], bool] | None = None
    _shown: _Shown = field(default_factory=_Shown, init=False, repr=False)

    def again(self, **changes: Any) -> Trace:
        """Return the same step with one thing changed: batch=, training=, seed=, weights=, taps=, ….

        Weights that are not named stay as they are in this step.
        """
        if "weights" in changes:
            changes["weights"] = {**self.weights, **changes["weights"]}
        return replace(self, **changes)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The values of the parameters in a pass, by path: the model's own, or those in ``weights``."""
        return {n: self.weights.get(n, p).detach() for n, p in self.model.named_parameters()}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The values of the buffers before a pass, by path: the model's own, or those in ``weights``."""
        return {n: self.weights.get(n, b).detach() for n, b in self.model.named_buffers()}

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        begin_pass()
        with ExitStack() as stack:
            stack.enter_context(undisturbed(self.model, self.batch, training=self.training, seed=self.seed))
            stack.enter_context(at_weights(self.model, self.weights))
            if self.rewritten:
                parameters = self.model.named_parameters()
                copies = {n: p.detach().clone() for n, p in parameters if n in self.rewritten}
                stack.enter_context(at_weights(self.model, copies))
            if self.exact:
                torch.set_default_dtype(torch.float64)
            for path, change in self.changed.items():
                handle = self.model.get_submodule(path).register_forward_pre_hook(
                    _entering(change), with_kwargs=True
                )
                stack.callback(handle.remove)
            yield

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside this block, call modules of the model as a pass runs them, without dropout or a graph."""
        functions = Functions(exact=self.exact, dropout=False)
        with self._surroundings(), torch.no_grad(), functions, lookups_in_range(self.model):
            yield

    @contextmanager
    def with_graph(
        self,
        *,
        graph: bool = True,
        events: bool = False,
        functions: Collection[str] = (),
        outputs: bool = False,
    ) -> Iterator[Pass]:
        """Run a pass whose graph may be used inside this block.

        With ``outputs``, those of outermost calls are seen, also if the loss calls only parts of the model.
        """
        hooks_all = events or bool(functions) or outputs
        passed = Pass(self.taps, graph=graph, events=events, hooks_all=hooks_all)
        modules = dict(self.model.named_modules())
        if unknown := [tap.module for tap in self.taps if tap.module not in modules]:
            raise UserError(f"the model has no module {unknown[0]!r}; read_structure gives taps that it has")
        if not hooks_all and self.undone is None:
            modules = {path: modules[path] for path in ("", *(tap.module for tap in self.taps))}
        noted = noted_pass(self, passed)  # compares weights, so before the pass puts its own into the model
        with self._surroundings():
            with noted:
                loss = self._loss_of_pass(passed, modules, functions, graph=graph)
                if isinstance(loss, Tensor):
                    passed.loss = loss.reshape(()) if loss.numel() == 1 else loss
            yield passed

    def _loss_of_pass(
        self, passed: Pass, modules: Mapping[str, nn.Module], functions: Collection[str], *, graph: bool
    ) -> Any:
        """Return what the loss function returns, while hooks on these modules show the pass what flows."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(graph))
            stack.enter_context(forward_hooks(modules, passed.see))
            stack.enter_context(lookups_in_range(self.model))
            if self.exact or not self.dropout or functions:
                see = passed.call if functions else None
                mode = Functions(exact=self.exact, dropout=self.dropout, wanted=functions, see=see)
                stack.enter_context(mode)
            if self.taps:
                stack.enter_context(Preserve(passed.taps))
            if OWN in functions:
                stack.enter_context(own_functions(passed.call))
            if self.undone is not None:
                cuts = stack.enter_context(Detachments(lambda: passed.running, self.undone))
                passed.cuts = cuts.seen
            return self.loss_of(self.model, self.batch)

    def once(self, *, graph: bool = False, **recorded: Any) -> Pass:
        """Run a pass; its results may have a graph, but no backward pass may go through it any more."""
        with self.with_graph(graph=graph, **recorded) as passed:
            return passed

    @property
    def _plain(self) -> Pass:
        return self._shown.get("plain", self.once)

    @property
    def events(self) -> tuple[Event, ...]:
        """Every call of a module, inner ones before outer ones."""
        return self._shown.get("events", lambda: tuple(self.once(events=True).events))

    @property
    def recorded_bytes(self) -> int:
        """How many bytes the tensors of ``events`` take; 0 if they have not been asked for."""
        events: tuple[Event, ...] = self._shown.if_known("events") or ()
        return sum(x.nbytes for event in events for x in (*event.inputs, *event.outputs))

    def forget_events(self) -> None:
        """Free the record of calls, which is made again when it is asked for."""
        self._shown.let_go("events")

    def forget(self) -> None:
        """Free all that passes showed; they are run again when it is asked for."""
        self._shown.let_go()

    def functions(self, *names: str) -> tuple[FunctionCall, ...]:
        """Return the calls of torch functions with these names, in order."""
        return tuple(self.once(functions=names).functions)

    @property
    def loss(self) -> Tensor:
        """The scalar loss, without its graph."""
        loss = self._plain.loss
        if loss is None:
            raise UserError(NO_LOSS)
        return loss

    @property
    def _with_outputs(self) -> Pass:
        # a loss that calls the model as a whole needs no hooks but the model's own, which saves time
        if self._plain.runs_whole:
            return self._plain
        return self._shown.get("outputs", lambda: self.once(outputs=True))

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """Every tensor that the loss gets from the model: its output or, if the loss calls parts of it, as a
        ``training_step`` does, theirs.
        """
        return tuple(self._with_outputs.outputs)

    @property
    def tapped(self) -> Mapping[Tap, Tensor]:
        """The tensors at the taps, as far as the pass has shown them."""
        return self._plain.taps

    def __getitem__(self, tap: Tap) -> Tensor:
        return self.tapped[tap]

    @property
    def _backward(self) -> _Backward:
        return self._shown.get("backward", self._run_backward)

    def _run_backward(self) -> _Backward:
        parameters = self.model.named_parameters()
        trained = {path: p for path, p in parameters if p.requires_grad and p.numel()}
        with self.with_graph() as passed:
            if passed.loss is None:
                raise UserError(NO_LOSS)
            mode = Functions(exact=self.exact, dropout=self.dropout)
            with recomputing(self.model, mode) as again:
                gradients = gradients_in(passed.loss, list(trained.values()), self.model)
            by_path = dict(zip(trained, gradients, strict=True))
            return _Backward(passed.loss.item(), by_path, runs_again=bool(again))

    @property
    def moving(self) -> list[str]:
        """Buffers that a pass changes, such as running statistics and counters."""
        return self._shown.get("moving", self._find_moving)

    def _find_moving(self) -> list[str]:
        before = self.buffers
        with self.with_graph() if before else nullcontext():
            after = {n: b.clone() for n, b in self.model.named_buffers()}
        return [n for n, b in before.items() if n in after and not b.equal(after[n])]

    @property
    def run_again(self) -> bool:
        """Whether the backward pass runs modules again, as checkpoints do."""
        return self._backward.runs_again

    @property
    def gradients(self) -> dict[str, Tensor | None]:
        """The gradient of the loss in every parameter that needs one, without empty ones; None where it does
        not reach.
        """
        return self._backward.gradients

    @property
    def slope(self) -> Gradients:
        """The loss and its gradients in the trainable parameters, zeros where it does not reach."""
        values, backward = self.parameters, self._backward
        gradients = dict[str, Tensor]()
        for name in trainable(self.model):
            gradient = backward.gradients[name]
            gradients[name] = torch.zeros_like(values[name]) if gradient is None else gradient
        return Gradients(backward.loss, gradients)

    def update(
        self, optimizer: Optimizer | OptimizerFactory, known: Gradients | None = None, *, factor: float = 1.0
    ) -> dict[str, Tensor]:
        """Return the model's trainable parameters after one update on the loss, by path.

        An optimizer in the middle of its training goes on from a copy of its state, without its hooks and
        without what a schedule does after a step; a function makes a new one from the parameters that need a
        gradient. Optimizers that evaluate the loss several times, such as LBFGS, do so; ``known`` is what the
        first evaluation gives, if already known. Rates are ``factor`` times the groups'; None stays None. The
        model's weights and gradients and the optimizer's state and groups are never written to.

        Raises UserError for a frozen model, another model's optimizer, and a loss that is not finite.
        """
        values = self.parameters
        twins = {path: Parameter(values[path].clone()) for path in trainable(self.model)}
        used = self._optimizer_of(optimizer, twins)
        for group in used.param_groups:
            if factor != 1 and group.get("lr") is not None:
                group["lr"] = group["lr"] * factor

        def weights() -> dict[str, Tensor]:
            return {path: twin.detach() for path, twin in twins.items()}

        # found before the step begins: an optimizer may turn off gradients
        of_first_evaluation = [known or self.again(weights=weights()).slope]

        def evaluate() -> float:
            slope = of_first_evaluation.pop() if of_first_evaluation else self.again(weights=weights()).slope
            if not math.isfinite(slope.loss):
                raise UserError(f"the loss is {slope.loss}, and no update follows; check weights and batch")
            for path, twin in twins.items():
                twin.grad = slope.gradients[path].clone()  # an optimizer may write to it
            return slope.loss

        step: Callable[..., Any] = type(used).step  # a schedule may have bound the object's own
        with undisturbed(self.model):
            if "closure" in inspect.signature(step).parameters:
                step(used, evaluate)
            else:
                evaluate()
                step(used)
        return weights()

    def _optimizer_of(
        self, optimizer: Optimizer | OptimizerFactory, twins: Mapping[str, Parameter]
    ) -> Optimizer:
        """Return an optimizer of these copies of the trainable parameters: a copy of the one that is given,
        or a new one.
        """
        if not isinstance(optimizer, Optimizer):
            return optimizer(list(twins.values()))
        trained = trainable(self.model)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if held.isdisjoint(map(id, trained.values())):
            raise UserError(
                "the optimizer holds no parameter of the model; pass the one that trains it, or a "
                "function that makes one, as in partial(torch.optim.AdamW, lr=5e-4)"
            )
        return copied_optimizer(optimizer, {id(p): twins[path] for path, p in trained.items()})


@contextmanager
def recomputing(model: nn.Module, mode: Functions) -> Iterator[list[str]]:
    """Use this mode for modules that a backward pass inside this block runs again, as checkpoints do;
    autograd would drop it. Yields the outermost of them.
    """
    inside, again = list[str](), list[str]()

    def see(path: str, side: Side, _: Any) -> None:
        if side == "output":
            inside.pop()
            if not inside:
                mode.__exit__(None, None, None)
            return
        if not inside:
            mode.__enter__()
            again.append(path)
        inside.append(path)

    with forward_hooks(dict(model.named_modules()), see, even_if_stopped=True):
        yield again


def _entering(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], Tensor):
            return (change(args[0]), *args[1:]), kwargs
        first = next((k for k, x in kwargs.items() if isinstance(x, Tensor) and x.is_floating_point()), None)
        return None if first is None else (args, {**kwargs, first: change(kwargs[first])})

    return hook
