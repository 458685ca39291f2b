"""What one pass of a step shows: lookups, stacks of blocks and their streams, what the loss scores.

The pass is made once, with its graph. What is kept of it holds no graph, which would keep all activations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, NamedTuple

from torch import Tensor

from normlab.setups.setup import Declaration
from normlab.trace.autograd import gradients_in, nodes_behind
from normlab.trace.facts.joined import JOINING, joined
from normlab.trace.facts.stacks import Block, find_listed_layers, find_stacks, stream_of
from normlab.trace.facts.targets import LOOKED_UP, RECORDED, read_logits
from normlab.trace.facts.wiring import passed_by, passes_on
from normlab.trace.functions import FunctionCall
from normlab.trace.tensors import Place, Tap, rows_of, tensors_in
from normlab.trace.trace import Event, Pass, Trace


class BlockCall(NamedTuple):
    """One call of a block: which call of it, and the stream that it reads and writes."""

    path: str
    number: int
    read: Tensor | None
    written: Tensor | None


class Readings:
    """What one pass of a step showed.

    Args:
        trace: The step.
        declared: What its author declares.
    """

    def __init__(self, trace: Trace, declared: Declaration) -> None:
        self.trace, self.declared = trace, declared
        with trace.with_graph(events=True, functions=(*RECORDED, *JOINING)) as passed:
            self.loss = None if passed.loss is None else passed.loss.detach()
            self.lookups = [call._replace(result=None) for call in self._lookups_of_model(trace, passed)]
            """The calls by which the model looks ids up, in order."""
            self.order = [event.module for event in passed.events]
            """The module of each call, in the order in which they end."""
            listed = find_listed_layers(trace.model, passed.events)
            self.listed = {name: passed_by(layers) for name, layers in listed.items()}
            """For each layer that is a list, by its stack, whether it passes its stream on."""
            self.stacks: dict[str, list[Block]] = find_stacks(
                trace.model,
                passed.events,
                passes_on,
                partial(_is_behind, passed.loss),
                [path for layers in self.listed.values() for path in layers],
            )
            blocks = {block.path for block in self.blocks}
            self.calls = [_block_call(event) for event in passed.events if event.module in blocks]
            """Every call of a block, in the order in which they end."""
            self.streams = {call.path: (call.read, call.written) for call in self.calls if not call.number}
            """By block, the stream that it reads and writes at its first call."""
            widths = {x.shape[-1] for x in self.entering.values()}
            parameters = dict(trace.model.named_parameters())
            self.joined = joined(passed.functions, parameters, self.rows, widths)
            """The parameters that join the stream of the stacks as they are, by path."""
            self._scored = read_logits(self.trace, passed)
            """All logits whose cross-entropies are part of the loss, with their targets, in any layout."""
            self._placeholders: dict[Place, tuple[int, ...]] = {}
            self.output = None if passed.runs_whole or self._scored else _last_read(trace, passed)
            """Where the loss reads a part of the model last, if it calls parts and has no known logits."""

    def lookups_of(self, trace: Trace) -> list[FunctionCall]:
        """Return the lookups of another step of the same model; none if it does not run."""
        with suppress(Exception):
            return self._lookups_of_model(trace, trace.once(functions=(LOOKED_UP,)))
        return []

    @staticmethod
    def _lookups_of_model(trace: Trace, passed: Pass) -> list[FunctionCall]:
        """Return the lookups of the model itself: a teacher or a reference, which the loss calls too, looks
        ids up in tables of its own.
        """
        of_model = {id(p) for p in trace.model.parameters()} | set(map(id, trace.weights.values()))
        lookups = [call for call in passed.functions if call.name == LOOKED_UP]
        return [call for call in lookups if call.module or id(call.argument(1, "weight")) in of_model]

    @property
    def joined_together(self) -> list[list[str]]:
        """The parameters that become tokens of their own, by the module in which they do; without those of a
        numbered list, each of which may join the stream before a layer of its own.
        """
        places: dict[str, list[str]] = defaultdict(list)
        for name, joined_ in self.joined.items():
            is_numbered = any(part.isdigit() for part in name.split("."))
            if joined_.is_appended and not is_numbered:
                places[joined_.module].append(name)
        return list(places.values())

    @property
    def entering(self) -> dict[str, Tensor]:
        """What each block reads at its first call."""
        return {path: x for path, (x, _) in self.streams.items() if x is not None}

    @property
    def blocks(self) -> list[Block]:
        return [b for blocks in self.stacks.values() for b in blocks]

    @cached_property
    def entries(self) -> dict[Place, Tensor]:
        """Every tensor of the batch by its place, but for nested ones: their rows share no columns."""
        return {place: x for place, x in tensors_in(self.trace.batch) if not x.is_nested}

    @cached_property
    def has_nested(self) -> bool:
        """Whether the batch holds a nested tensor, in which rows have lengths of their own."""
        return any(x.is_nested for _, x in tensors_in(self.trace.batch))

    @cached_property
    def rows(self) -> int:
        """B, the length that most tensors of the batch begin with."""
        return rows_of(self.trace.batch)

    def configured(self, name: str) -> Any:
        """Return an entry of the model's own configuration, as in Hugging Face's models."""
        for owner in (self.trace.model, *self.trace.model.children()):
            value = getattr(getattr(owner, "config", None), name, None)
            if value is not None:
                return value[0] if isinstance(value, (list, tuple)) and value else value
        return None


def _last_read(trace: Trace, passed: Pass) -> Tap | None:
    """Return the last output of an outermost call that the loss depends on."""
    if passed.loss is None or not passed.loss.requires_grad:
        return None
    for event in reversed([event for event in passed.events if event.outermost]):
        for place, x in zip(event.places, event.outputs, strict=True):
            if x.requires_grad and x.numel() > 1:
                (gradient,) = gradients_in(passed.loss, [x], trace.model, retain_graph=True)
                if gradient is not None:
                    return Tap(event.module, "output", place, event.call)
    return None


def _is_behind(loss: Tensor | None, x: Tensor) -> bool:
    """Return whether the graph of a loss holds what made a tensor."""
    made_by = x.grad_fn
    return loss is not None and made_by is not None and any(n is made_by for n in nodes_behind(loss.grad_fn))


def _block_call(event: Event) -> BlockCall:
    return BlockCall(event.module, event.call, _stream(event.inputs), _stream(event.outputs))


def _stream(tensors: Iterable[Tensor]) -> Tensor | None:
    return None if (x := stream_of(tensors)) is None else x.detach()
