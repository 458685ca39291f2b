"""What a diagnosis examines: a model on a batch, its residual stream, and the passes that studies share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normlab.diagnosis.parameters import Owner, ParameterPart, Width, kinds, measuring, owners
from normlab.diagnosis.recording import awake
from normlab.diagnosis.structure import StackView, Structure, SublayerView
from normlab.errors import UserError
from normlab.setups.setup import Loss
from normlab.trace.autograd import FROZEN, Gradients, OptimizerFactory, gradients_in, trainable
from normlab.trace.restore import undisturbed
from normlab.trace.tensors import Call, Tap, call_model, map_tensors, tensors_in
from normlab.trace.trace import Trace

AnyOptimizer: TypeAlias = Optimizer | OptimizerFactory
STEP_LR: Final = 1e-3
"""Learning rate of the step that studies try if none was given; then no finding judges the rate."""
SMALL_TOKENS: Final = 256
"""Size of the batch for studies that make many passes or need second derivatives."""
MASK_IN_BATCH: Final = "a batch of keywords whose {} is nonzero where there is a token"
"""What to give where padding cannot be recognised by gradients."""


class _ForwardPass(NamedTuple):
    """The activations of a forward pass without dropout, and what they show about parameters."""

    tensors: Mapping[Tap, Tensor]
    """The tensors at every tap of every sublayer, without graphs."""
    owned: Mapping[str, Owner]
    """The owners of parameters, by path."""
    widths: Mapping[str, Width]
    """Input and output widths of the modules that hold parameters, by path."""


class BackwardPass(NamedTuple):
    """A forward and backward pass without dropout."""

    forward: _ForwardPass
    slope: Gradients
    stream: Mapping[Tap, Tensor]
    """Gradients of the loss where each stack begins and after each sublayer, unless all before is frozen."""


@dataclass(frozen=True)
class Subject:
    """A model in evaluation mode on one batch. Passes are made when a study first asks for them, and kept: a
    model that changes in between needs a new subject, which ``on`` makes.
    """

    model: nn.Module
    batch: Any
    loss_of: Loss
    structure: Structure
    padding_masks: Mapping[str, Tensor] | None = None
    """By stack, a mask over the positions of its stream that is True where there is a token, if known."""
    optimizer: AnyOptimizer = partial(torch.optim.Adam, lr=STEP_LR)
    """As for ``Trace.update``."""
    batches: Sequence[Any] = ()
    """Mini-batches; without any, studies that need several split the batch."""
    warmup_steps: int = 0
    """Steps over which the learning rate will rise to its peak."""
    begins_at: float | None = None
    """The share of the peak at the first of these steps; without it, one over their number."""
    call: Call = call_model
    """How the model is called if no loss is needed."""

    @property
    def first_share(self) -> float:
        """The share of the peak of the learning rate at the first step."""
        return 1 / max(self.warmup_steps, 1) if self.begins_at is None else self.begins_at

    def on(self, batch: Any) -> Subject:
        return replace(self, batch=batch, padding_masks=None)

    @cached_property
    def small(self) -> Subject:
        """The subject on a mini-batch, or on some rows of the batch if its loss can be taken on them."""
        if self.batches:
            return self.on(self.batches[0])
        try:
            return self.cropped(SMALL_TOKENS)[0] if self.structure.stacks else self
        except UserError:
            return self

    def cropped(self, tokens: int) -> tuple[Subject, int]:
        """Return the subject on the first rows of its batch, and its number of tokens.

        It has as many rows as keep its longest stream within ``tokens`` tokens, but at least one.

        Raises UserError if the loss fails on fewer rows, as one that holds its own targets does.
        """
        count, all_tokens = _count(self.batch) or 1, _tokens(self)
        rows = max(1, count * tokens // all_tokens)
        if rows >= count:
            return self, all_tokens
        first_part = split(self.batch, math.ceil(count / rows))[0]
        small = self.on(first_part)
        try:
            return small, _tokens(small)
        except Exception as error:
            raise UserError(
                f"on the first {rows} of the {count} rows of the batch the loss fails with "
                f"{type(error).__name__}: {error}; give a batch of at most {tokens} tokens, or "
                f"tokens={all_tokens} to use all of it"
            ) from error

    def trace(self, taps: Iterable[Tap] = (), **changes: Any) -> Trace:
        """Return the step that computes the loss, without dropout; it shows the tensors at these taps."""
        return Trace(self.model, self.batch, self.loss_of, taps=tuple(dict.fromkeys(taps))).again(**changes)

    def calls(self, taps: Iterable[Tap] = ()) -> Trace:
        return self.trace(taps, loss_of=self.call)

    def loss(self) -> Tensor:
        """Return the scalar loss with its graph, without dropout."""
        with undisturbed(self.model, self.batch):
            return self.loss_of(self.model, self.batch)

    @cached_property
    def forward(self) -> _ForwardPass:
        """A forward pass: that of ``backward`` if there was one."""
        if "backward" in vars(self):  # where a cached property keeps its value
            return self.backward.forward
        with measuring(self.model) as widths:
            passed = self.calls(self._taps).once(graph=True)
        return self._forward(passed.taps, widths)

    @cached_property
    @torch.enable_grad()
    def backward(self) -> BackwardPass:
        """A forward pass and a backward pass to the streams and to every trainable parameter.

        Raises UserError if every parameter is frozen.
        """
        weights = trainable(self.model)
        with measuring(self.model) as widths, self.trace(self._taps).with_graph() as passed:
            if passed.loss is None or not passed.loss.requires_grad:
                raise UserError(FROZEN)
            forward = self._forward(passed.taps, widths)
            stream = {tap: passed.taps[tap] for tap in self._stream_taps if passed.taps[tap].requires_grad}
            tensors = [*stream.values(), *weights.values()]
            gradients = _zeros_for_none(gradients_in(passed.loss, tensors, self.model), tensors)
            loss = passed.loss.item()
        of_stream, of_weights = gradients[: len(stream)], gradients[len(stream) :]
        slope = Gradients(loss, dict(zip(weights, of_weights, strict=True)))
        return BackwardPass(forward, slope, dict(zip(stream, of_stream, strict=True)))

    @property
    def _stream_taps(self) -> dict[Tap, None]:
        """Where each stack begins and after each sublayer, in order, each once."""
        taps: dict[Tap, None] = {}
        for stack in self.structure.stacks:
            taps[stack.sublayers[0].before] = None
            taps |= dict.fromkeys(view.after for view in stack.sublayers)
        return taps

    @property
    def _taps(self) -> list[Tap]:
        return [tap for _, view in self.structure.sublayers for tap in view.taps]

    def _forward(self, seen: Mapping[Tap, Tensor], widths: Mapping[str, Width]) -> _ForwardPass:
        owned = owners(self.model, self.structure, seen)
        return _ForwardPass({tap: x.detach() for tap, x in seen.items()}, owned, dict(widths))

    @cached_property
    def dims(self) -> dict[str | None, int]:
        tensors = self.forward.tensors
        return {s.name: tensors[s.sublayers[0].before].shape[-1] for s in self.structure.stacks}

    @cached_property
    def parts(self) -> Mapping[str, tuple[ParameterPart, ...]]:
        """The parts of every parameter by path; a packed matrix of queries, keys and values has three."""
        return kinds(self.model, self.forward.owned, self.forward.widths, self.dims)

    @cached_property
    def masks(self) -> Mapping[str, Tensor]:
        """The padding mask `[...]` of each stack, whose stream is `[..., D]`.

        ``padding_masks`` decide, else a mask in the batch: the keyword ``attention_mask``, or
        ``decoder_attention_mask`` for a stack with cross-attention, `[B, T]`, nonzero where there is a token.
        Without one, a position holds a token if the loss has a nonzero gradient there where the stream
        begins: the content of padding does not change the loss. A token without a label that no other token
        reads therefore counts as padding.

        Raises UserError if there is neither a mask nor a gradient.
        """
        masks = self._masks_in_batch() | dict(self.padding_masks or {})
        without = [stack for stack in self.structure.stacks if stack.name not in masks]
        gradients = self._gradients_at_start(without)
        for stack in without:
            mask = (gradients[stack.name] != 0).any(-1)
            if not mask.any():
                in_batch = MASK_IN_BATCH.format(_mask_keyword(stack))
                raise UserError(
                    f"the loss does not change with any token of {stack.name}, so padding cannot be "
                    f"recognised; give a loss that uses the model's output, or {in_batch}"
                )
            masks[stack.name] = mask
        return masks

    def _masks_in_batch(self) -> dict[str, Tensor]:
        masks = dict[str, Tensor]()
        batch = self.batch if isinstance(self.batch, Mapping) else {}
        for stack in self.structure.stacks:
            mask = batch.get(_mask_keyword(stack))
            if isinstance(mask, Tensor) and mask.ndim == 2:
                masks[stack.name] = mask != 0
        return masks

    def _gradients_at_start(self, stacks: Sequence[StackView]) -> dict[str, Tensor]:
        r"""Return the gradient of the loss where each stack begins, by the stack's name.

        Where it is 0, a position counts as padding. A branch that adds nothing yet would make padding of
        tokens: with ReZero, a decoder adds :math:`\alpha f(x, m)` with :math:`\alpha = 0` to x, so at the
        start nothing of the encoder's output m reaches the loss, and every source token has the gradient 0.
        The parameters of f show that, since :math:`\alpha = 0` leaves them without a gradient, too. If any
        parameter has none, the gradients are therefore taken at weights that hide no branch.
        """
        if not stacks:
            return {}
        try:
            _, slope, stream = self.backward
            starts = {stack.name: stack.sublayers[0].before for stack in stacks}
            known = {name: stream[tap] for name, tap in starts.items() if tap in stream}
            no_branch_is_hidden = all(bool(g.to_dense().any()) for g in slope.gradients.values())
            if len(known) == len(stacks) and no_branch_is_hidden:
                return known
            return self._gradients_awake(stacks)
        except UserError as error:
            keywords = " and ".join(dict.fromkeys(_mask_keyword(stack) for stack in stacks))
            raise UserError(f"{error}, or {MASK_IN_BATCH.format(keywords)}") from error

    @torch.enable_grad()
    def _gradients_awake(self, stacks: Sequence[StackView]) -> dict[str, Tensor]:
        """Return the gradient of the loss where each stack begins, by the stack's name, at weights of which
        none is 0: random ones stand for those that are.

        If everything before a stack is frozen, its beginning has no gradient; the first tensor along it that
        has one stands for it, since positions are the same.
        """
        places = {s.name: [*(v.before for v in s.sublayers), s.sublayers[-1].after] for s in stacks}
        taps = [tap for along in places.values() for tap in along]
        with self.trace(taps, weights=awake(self.model)).with_graph() as passed:
            if passed.loss is None or not passed.loss.requires_grad:
                raise UserError(FROZEN)
            first = dict[str, Tensor]()
            for name, along in places.items():
                live = [passed.taps[tap] for tap in along if passed.taps[tap].requires_grad]
                if not live:
                    raise UserError(FROZEN)
                first[name] = live[0]
            tensors = list(first.values())
            gradients = _zeros_for_none(gradients_in(passed.loss, tensors, self.model), tensors)
        return dict(zip(first, gradients, strict=True))

    def tokens(self, stack: str, x: Tensor) -> Tensor:
        """Return the tokens `[N, D]` of a stack's tensor `[..., D]` without padding or graph, in float32 or
        wider. Raises UserError if its mask is over a different number of tokens.
        """
        flat, mask = x.detach().reshape(-1, x.shape[-1]), self.masks[stack]
        if len(flat) != mask.numel():
            raise UserError(
                f"a mask of shape {tuple(mask.shape)} does not fit a stream of shape {tuple(x.shape)}; give "
                f"one of shape {tuple(x.shape[:-1])}, or none: then padding is where the loss has no gradient"
            )
        return flat[mask.reshape(-1)].to(torch.promote_types(x.dtype, torch.float32))


def _mask_keyword(stack: StackView) -> str:
    """Return the keyword under which a batch has the padding mask of a stack, as in transformers."""
    reads_memory = any(view.role == "cross_attention" for view in stack.sublayers)
    return "decoder_attention_mask" if reads_memory else "attention_mask"


def _zeros_for_none(gradients: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients, with zeros if the loss does not reach a tensor."""
    pairs = zip(gradients, tensors, strict=True)
    return [torch.zeros_like(x, requires_grad=False) if g is None else g for g, x in pairs]


def sublayer_columns(stack: str, view: SublayerView) -> dict[str, str | int]:
    """Return the columns that say which sublayer a row is about."""
    return {"stack": stack, "index": view.index, "layer": view.layer, "role": view.role}


def _tokens(subject: Subject) -> int:
    """Return the number of tokens, padding included, of the longest stream; it takes a pass."""
    taps = [stack.sublayers[0].before for stack in subject.structure.stacks]
    return max(x.numel() // x.shape[-1] for x in subject.trace(taps).once().taps.values())


def _count(batch: Any) -> int:
    """Return the number of rows of a batch, or 0 if it has none."""
    return next((len(x) for _, x in tensors_in(batch) if x.ndim), 0)


def split(batch: Any, parts: int) -> list[Any]:
    """Split a batch into at most ``parts`` mini-batches of consecutive rows.

    Every tensor with the first dimension of the first one is split; anything else goes to all parts.

    Raises UserError for a batch without a tensor.
    """
    count = _count(batch)
    if not count:
        raise UserError(f"a batch of type {type(batch).__name__} has no rows to split; pass batches=[…]")
    parts = min(parts, count)
    bounds = [round(i * count / parts) for i in range(parts + 1)]

    def rows(start: int, stop: int) -> Any:
        return map_tensors(batch, lambda _, x: x[start:stop] if x.ndim and len(x) == count else x)

    return [rows(start, stop) for start, stop in pairwise(bounds)]
