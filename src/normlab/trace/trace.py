"""One instrumented step, computed when asked for, and its passive half, which sees somebody else's step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from normlab.errors import UserError
from normlab.trace.functions import OWN, FunctionCall, Functions, Preserve, own_functions
from normlab.trace.setup import Loss
from normlab.trace.tensors import Place, Side, Tap, activations, call_model, forward_hooks, tensors_in, unwrap
from normlab.trace.untouched import undisturbed, without_gradients

Signal = Literal["value", "grad"]
Weights = Mapping[str, Tensor]
"""Parameters, or what belongs to each, by path."""


class Want(NamedTuple):
    """What to record: a tensor that enters or leaves the modules whose path matches a glob, or its gradient.

    ``keep`` runs inside the hook: it returns a statistic, a sample of rows, or the tensor itself.
    """

    module: str
    side: Side = "output"
    signal: Signal = "value"
    keep: Callable[[Tensor], Any] = Tensor.detach


class Seen(NamedTuple):
    """One recorded value."""

    tap: Tap
    want: Want
    value: Any


@contextmanager
def record(model: nn.Module, wants: Iterable[Want]) -> Iterator[list[Seen]]:
    """Fill the list, in order, with what somebody else's step shows. Nothing waits for the device.

    Raises UserError for a want that matches no module.
    """
    modules, wants = dict(unwrap(model).named_modules()), list(wants)
    here = {path: [w for w in wants if path == w.module or fnmatchcase(path, w.module)] for path in modules}
    unmatched = {w.module for w in wants} - {w.module for some in here.values() for w in some}
    if unmatched:
        some = ", ".join([path for path in modules if path][:8])
        raise UserError(f"no module matches {min(unmatched)!r}; the paths begin {some}, …")
    calls, seen, handles = Counter[tuple[str, Side]](), list[Seen](), list[Any]()

    def see(path: str, side: Side, values: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpointed layer runs again in backward
        calls[path, side] += 1
        for place, x in activations(values):
            tap = Tap(path, side, place, calls[path, side] - 1)
            for want in (w for w in here[path] if w.side == side):

                def add(value: Tensor, tap: Tap = tap, want: Want = want) -> None:
                    seen.append(Seen(tap, want, want.keep(value)))

                if want.signal == "value":
                    add(x)
                elif x.requires_grad:
                    handles.append(x.register_hook(add))

    try:
        with forward_hooks({path: modules[path] for path, some in here.items() if some}, see):
            yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def at_weights(model: nn.Module, weights: Weights) -> Iterator[None]:
    """Give these parameters other values inside this block; their own storage is never written to."""
    parameters = dict(model.named_parameters())
    own = {path: parameters[path].data for path in weights}
    try:
        for path, weight in weights.items():
            parameters[path].data = weight.detach()
        yield
    finally:
        for path, data in own.items():
            parameters[path].data = data


class Event(NamedTuple):
    """One call of a module: the tensors that entered and left it, as they were then."""

    module: str
    call: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    places: tuple[Place, ...]
    """Of the outputs."""


class Pass(NamedTuple):
    """What one forward pass gave: the loss, the model's outputs, and what was recorded on the way."""

    loss: Tensor | None
    outputs: tuple[Tensor, ...]
    events: tuple[Event, ...]
    functions: tuple[FunctionCall, ...]
    taps: Mapping[Tap, Tensor]


def output_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss in the model's own output, as Hugging Face's models have it for batches with labels; of
    a tuple or a dict, the only number in it.

    Raises UserError with what to pass where there is none.
    """
    output = call_model(model, batch)
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    numbers = [x for _, x in tensors_in(output) if x.numel() == 1 and x.is_floating_point()]
    if loss is None and len(numbers) == 1:
        loss = numbers[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UserError(
            f"{type(model).__name__} puts out no loss: give a batch with labels, or a function "
            "loss=lambda model, batch: … that returns a differentiable scalar"
        )
    return loss.reshape(())


@dataclass(frozen=True, eq=False)
class Trace:
    """One step of a model on a batch, computed when asked for; the model is left as it was.

    ``exact`` says that the model is a copy in float64, so that its functions run in float64, too. Without
    ``dropout`` every dropout of torch passes its input on. ``weights`` stand in the place of the model's own
    parameters of these names. ``changed`` maps a module's path to a function of its first input.
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

    def again(self, **changes: Any) -> Trace:
        """Return the same step with one thing changed: batch=, training=, seed=, weights=, taps=, …."""
        return replace(self, **changes)

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(undisturbed(self.model, training=self.training, seed=self.seed))
            stack.enter_context(at_weights(self.model, self.weights))
            if self.exact:
                torch.set_default_dtype(torch.float64)
            for path, change in self.changed.items():
                handle = self.model.get_submodule(path).register_forward_pre_hook(_entering(change), with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def run(
        self,
        *,
        graph: bool = False,
        events: bool = False,
        functions: Callable[[str], bool] | None = None,
    ) -> Pass:
        """Run one forward pass, within ``surroundings`` where a backward pass is to follow."""
        watch = _Watch(self.model, self.taps, graph=graph, events=events)
        mode = Functions(
            exact=self.exact, dropout=self.dropout, wanted=functions, see=watch.call if functions else None
        )
        watched = watch.modules(events=events or functions is not None)
        own = own_functions(watch.call) if functions and functions(OWN) else _nothing()
        with torch.set_grad_enabled(graph), forward_hooks(watched, watch.see), mode, own:
            preserve = Preserve(watch.held) if self.taps else None
            with preserve if preserve is not None else _nothing():
                loss = self.loss_of(self.model, self.batch)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            loss = loss.reshape(())
        return Pass(
            loss if isinstance(loss, Tensor) else None,
            tuple(watch.outputs),
            tuple(watch.events),
            tuple(watch.functions),
            watch.held,
        )

    @contextmanager
    def with_graph(self, **recorded: Any) -> Iterator[Pass]:
        """Run a pass whose graph may be used inside this block."""
        with self._surroundings():
            yield self.run(graph=True, **recorded)

    @cached_property
    def _plain(self) -> Pass:
        with self._surroundings():
            return self.run()

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Every call of a module, inner ones before outer ones."""
        with self._surroundings():
            return self.run(events=True).events

    def functions(self, *names: str) -> tuple[FunctionCall, ...]:
        """Return the calls of functions of torch by these names, in order."""
        with self._surroundings():
            return self.run(functions=lambda name: name in names).functions

    @property
    def loss(self) -> Tensor:
        """The scalar loss, without its graph."""
        loss = self._plain.loss
        if loss is None:
            raise UserError("the loss is not a tensor; return loss=lambda model, batch: … as a scalar tensor")
        return loss

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """Every tensor of the model's output."""
        return self._plain.outputs

    def __getitem__(self, tap: Tap) -> Tensor:
        return self._plain.taps[tap]

    @cached_property
    def gradients(self) -> dict[str, Tensor | None]:
        """The gradient of the loss in every trainable parameter by path, by ``loss.backward()``; None where
        it does not reach.
        """
        with without_gradients(self.model):
            with self.with_graph() as passed:
                if passed.loss is None or not passed.loss.requires_grad:
                    raise UserError("the loss has no gradient: it is detached or made under torch.no_grad()")
                with recomputing(self.model, Functions(exact=self.exact, dropout=self.dropout)):
                    passed.loss.backward()
            return {n: p.grad for n, p in self.model.named_parameters() if p.requires_grad}


class _Watch:
    """Collects what hooks and functions show in one pass."""

    def __init__(self, model: nn.Module, taps: Sequence[Tap], *, graph: bool, events: bool) -> None:
        self._model, self._graph, self._events = model, graph, events
        self._taps: dict[tuple[str, Side, int], list[Tap]] = defaultdict(list)
        for tap in taps:
            self._taps[tap.module, tap.side, tap.call].append(tap)
        self._calls: Counter[tuple[str, Side]] = Counter()
        self._entered: list[tuple[str, tuple[Tensor, ...]]] = []
        self.outputs: list[Tensor] = []
        self.events: list[Event] = []
        self.functions: list[FunctionCall] = []
        self.held: dict[Tap, Tensor] = {}

    def modules(self, *, events: bool) -> dict[str, nn.Module]:
        modules = dict(self._model.named_modules())
        wanted = {path for path, _, _ in self._taps} | {""}
        return modules if events else {path: modules[path] for path in wanted if path in modules}

    def see(self, path: str, side: Side, values: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        call = self._calls[path, side]
        self._calls[path, side] += 1
        for tap in self._taps.get((path, side, call), ()):
            self._hold(tap, values)
        if side == "input":
            self._entered.append((path, self._kept(values)))
            return
        while self._entered:
            entered, inputs = self._entered.pop()
            if entered == path:
                break
        else:
            inputs = ()
        outputs = self._kept(values)
        if path == "":
            self.outputs.extend(x if self._graph else x.detach() for _, x in tensors_in(values))
        if self._events:
            places = tuple(place for place, _ in tensors_in(values))
            self.events.append(Event(path, call, inputs, outputs, places))

    def _hold(self, tap: Tap, values: Any) -> None:
        for place, x in tensors_in(values):
            if place == tap.place:
                self.held[tap] = x if self._graph else x.detach()

    def _kept(self, values: Any) -> tuple[Tensor, ...]:
        if not self._events:
            return ()
        keep = (lambda x: x) if self._graph else (lambda x: x.detach().clone())
        return tuple(keep(x) for _, x in tensors_in(values))

    def call(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        module = self._entered[-1][0] if self._entered else ""
        self.functions.append(FunctionCall(name, module, args, kwargs, result))


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def recomputing(model: nn.Module, mode: Functions) -> Iterator[None]:
    """Run the modules that a backward pass inside this block runs again, as checkpoints do, in this mode;
    autograd would leave it behind.
    """
    inside: list[nn.Module] = []

    def enter(module: nn.Module, _: Any) -> None:
        if not inside:
            mode.__enter__()
        inside.append(module)

    def leave(*_: Any) -> None:
        inside.pop()
        if not inside:
            mode.__exit__(None, None, None)

    handles: list[Any] = []
    try:
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True))  # it may be stopped early
        yield
    finally:
        for handle in handles:
            handle.remove()


def _entering(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], Tensor):
            return (change(args[0]), *args[1:]), kwargs
        first = next((k for k, x in kwargs.items() if isinstance(x, Tensor) and x.is_floating_point()), None)
        return None if first is None else (args, {**kwargs, first: change(kwargs[first])})

    return hook
