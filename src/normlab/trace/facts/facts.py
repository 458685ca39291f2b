"""The facts of one step, each computed once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.setups.setup import Declaration
from normlab.trace.autograd import gradients_in, nodes_behind
from normlab.trace.facts import Unknown
from normlab.trace.facts.joined import JOINING, joined
from normlab.trace.facts.placeholders import placeholders_of
from normlab.trace.facts.stacks import Block, block_of, find_listed_layers, find_stacks, stream_of
from normlab.trace.facts.targets import (
    FLAT,
    LOOKED_UP,
    RECORDED,
    FunctionInput,
    Layout,
    Logits,
    Targets,
    read_logits,
)
from normlab.trace.facts.tokens import (
    Arranged,
    Frames,
    Padding,
    Tokens,
    documents_of,
    frames_of,
    is_offsets,
    looked_up,
    looked_up_through,
    padding_of,
)
from normlab.trace.facts.wiring import passed_by, passes_on
from normlab.trace.functions import FunctionCall
from normlab.trace.tensors import Place, Tap, at, map_tensors, replaced, rows_of, tensors_in
from normlab.trace.trace import Event, Pass, Trace

SHIFTS: Final = (1, 0, 2, -1)
"""How far ahead of the token at their own position targets are looked for, the usual distance first."""


class BlockCall(NamedTuple):
    """One call of a block: which call of it, and the stream that it reads and writes."""

    path: str
    number: int
    read: Tensor | None
    written: Tensor | None


class Facts:
    """What a step is made of, read off one pass."""

    def __init__(self, trace: Trace, declared: Declaration) -> None:
        self.trace, self.declared = trace, declared
        with trace.with_graph(events=True, functions=(*RECORDED, *JOINING)) as passed:
            self.loss = None if passed.loss is None else passed.loss.detach()
            self.lookups = [f._replace(result=None) for f in self._own_lookups(trace, passed)]
            self.order = [e.module for e in passed.events]
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
            blocks = {b.path for b in self.blocks}
            self.calls = [_block_call(event) for event in passed.events if event.module in blocks]
            self.streams = {c.path: (c.read, c.written) for c in self.calls if not c.number}
            widths = {x.shape[-1] for x in self.entering.values()}
            parameters = dict(trace.model.named_parameters())
            self.joined = joined(passed.functions, parameters, self.rows, widths)
            """The parameters that join the stream of the stacks as they are, by path."""
            self._scored = read_logits(self.trace, passed)
            self._placeholders: dict[Place, tuple[int, ...]] = {}
            self.output = None if passed.runs_whole or self._scored else _last_read(trace, passed)
            """Where the loss reads a part of the model last, if it calls parts and has no known logits."""

    def lookups_of(self, trace: Trace) -> list[FunctionCall]:
        """Return the lookups of another step of the same model; none if it does not run."""
        with suppress(Exception):
            return self._own_lookups(trace, trace.once(functions=(LOOKED_UP,)))
        return []

    @staticmethod
    def _own_lookups(trace: Trace, passed: Pass) -> list[FunctionCall]:
        """Return the lookups of the model itself: a teacher or a reference, which the loss calls too, looks
        ids up in tables of its own.
        """
        own = {id(p) for p in trace.model.parameters()} | set(map(id, trace.weights.values()))
        lookups = [call for call in passed.functions if call.name == LOOKED_UP]
        return [call for call in lookups if call.module or id(call.argument(1, "weight")) in own]

    @property
    def joined_together(self) -> list[list[str]]:
        """The parameters that become tokens of their own, by the module in which they do; without those of a
        numbered list, each of which may join the stream before a layer of its own.
        """
        places: dict[str, list[str]] = defaultdict(list)
        for name, how in self.joined.items():
            is_numbered = any(part.isdigit() for part in name.split("."))
            if how.is_appended and not is_numbered:
                places[how.module].append(name)
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

    @cached_property
    def tokens(self) -> Tokens:
        """The ids that the model reads; of several, the ones that the targets follow, at the usual distance
        if any do: a decoder that is to repeat its source goes on with a text of its own. Raises Unknown.
        """
        if not self.sources:
            raise Unknown("no tensor of the batch is looked up in an embedding")
        if self._shaped and (targets := self._shaped[0][1]).ids.ndim == 2:
            for distance in SHIFTS:
                shares = [targets.share(tokens.entry, distance) for tokens in self.sources]
                if max(shares) > 0.9:
                    return self.sources[shares.index(max(shares))]
        return self.sources[0]

    @cached_property
    def sources(self) -> list[Tokens]:
        """All ids that are looked up, those of the largest vocabulary first."""
        found = looked_up(self.entries, self.lookups, self.rows)
        found += looked_up_through(self, found)
        return sorted(found, key=lambda tokens: -tokens.vocabulary)

    @cached_property
    def scored(self) -> tuple[Logits, Targets]:
        """The logits and their targets, `[B, T]` or `[B]`. Raises Unknown.

        If several outputs are scored, as in multi-token prediction, those with targets one ahead count.
        """
        if not self._scored:
            raise Unknown(
                "the loss is not a tensor"
                if self.loss is None
                else "no output has the gradient softmax minus one-hot, so the loss is not a cross-entropy"
            )
        for logits, targets in self._shaped if self.sources else ():
            if targets.ids.ndim == 2 and targets.share(self.tokens.entry, 1) > 0.9:
                return logits, targets
        return self._shaped[0]

    @cached_property
    def tapped(self) -> Trace:
        """The same step, which keeps the tensor that the loss is computed from, if a module puts it out."""
        where: Tap | FunctionInput | None = self.output
        with suppress(Unknown):
            where = self.logits.where
        return self.trace.again(taps=(where,)) if isinstance(where, Tap) else self.trace

    @property
    def is_scored(self) -> bool:
        """Whether the loss is known to hold the cross-entropy of some logits."""
        return bool(self._scored)

    @property
    def scored_places(self) -> tuple[Tap | FunctionInput, ...]:
        """Where all logits are whose cross-entropies the loss holds."""
        return tuple(logits.where for logits, _ in self._scored)

    @property
    def unexplained(self) -> float:
        """What is left of the loss after subtracting the cross-entropies that its gradient shows."""
        outputs = [pair for pair in self._scored if pair[0].output] or self._scored[:1]
        return float(self.loss or 0.0) - sum(asked.value(logits.value) for logits, asked in outputs)

    @property
    def targets(self) -> Targets:
        return self.scored[1]

    @property
    def logits(self) -> Logits:
        return self.scored[0]

    @cached_property
    def _shaped(self) -> list[tuple[Logits, Targets]]:
        return [self._laid_out(logits, targets) for logits, targets in self._scored]

    def _laid_out(self, logits: Logits, targets: Targets) -> tuple[Logits, Targets]:
        """Return logits and targets with rows first: those of `[T, B, V]`, and flattened ones.

        Whether flat positions lie row by row is seen by the targets, which follow an entry of the batch in
        one of the two orders. Where they do not, logits stay flat, since nothing says which are a row's.
        """
        shape, rows = targets.ids.shape, self.rows
        if len(shape) == 2 and shape[0] != rows and shape[1] == rows:
            layout = Layout(flat=False, by_columns=True)
            return logits.laid_out(layout, rows), targets.rearranged(partial(layout.of, rows=rows))
        if len(shape) != 1 or shape[0] == rows or shape[0] % rows:
            return logits, targets
        tried = [(layout, targets.rearranged(partial(layout.of, rows=rows))) for layout in FLAT]
        by_row, by_column = (self._follows(rearranged) for _, rearranged in tried)
        if max(by_row, by_column) > 0.9 and (by_row != by_column or rows == 1):
            layout, rearranged = tried[by_row < by_column]
            return logits.laid_out(layout, rows), rearranged
        return logits, tried[0][1]

    def _follows(self, targets: Targets) -> float:
        """Return the share of targets `[B, T]` that are those of an entry of the batch at some distance."""
        shares = [0.0]
        for x in self.entries.values():
            if x.ndim == 2 and not x.is_floating_point():
                entry = (x if x.shape[0] == self.rows else x.T).cpu()
                shares += [targets.share(entry, ahead) for ahead in SHIFTS]
        return max(shares)

    @property
    def heads(self) -> list[tuple[Logits, Targets]]:
        """All logits `[B, T, V]` that the loss scores at positions of the tokens, with their targets. Raises
        Unknown if there are no tokens.
        """
        rows = len(self.tokens.entry)
        return [(z, asked) for z, asked in self._shaped if asked.ids.ndim == 2 and len(asked.ids) == rows]

    @cached_property
    def shift(self) -> int | None:
        """How far ahead of the token at its own position a target is; None if targets are not inputs.

        Raises Unknown if there are no tokens, or no targets at them.
        """
        return self.shift_of(self.targets)

    def shift_of(self, asked: Targets) -> int | None:
        """Return the same for these targets."""
        rates = self.shift_rates_of(asked)
        best = max(rates, key=lambda k: (rates[k], -abs(k - 1)))
        return best if rates[best] > 0.9 else None

    @cached_property
    def shift_rates(self) -> dict[int, float]:
        """By distance, the share of counted targets that are the token that far ahead."""
        return self.shift_rates_of(self.targets)

    def shift_rates_of(self, asked: Targets) -> dict[int, float]:
        """Return the same for these targets. Several heads may look as far ahead as there are of them."""
        tokens = self.tokens
        if asked.ids.ndim != 2 or asked.ids.shape[0] != tokens.entry.shape[0]:
            raise Unknown("the loss has no target at each token")
        offset = tokens.start - self.before(asked)
        return {k: asked.share(tokens.entry, k + offset) for k in range(-2, 5 + len(self._shaped))}

    @property
    def offset(self) -> int:
        """How many columns of the tokens' entry come before the token at the first position of the targets;
        negative if positions without a token, such as an image's, come before the text.
        """
        return self.tokens.start - self.before(self.targets)

    def before(self, asked: Targets) -> int:
        """Return how many positions without a token, such as an image's, come before the text."""
        return max(asked.ids.shape[1] - self.tokens.ids.shape[1], 0)

    @cached_property
    def causal(self) -> bool:
        """Whether predictions must not see later tokens: declared, or the targets are the tokens ahead.

        Raises Unknown.
        """
        if self.declared.causal is not None:
            return self.declared.causal
        return (self.shift or 0) >= 1

    @cached_property
    def padding(self) -> Padding:
        """Which positions hold a token. Raises Unknown if nothing tells."""
        return padding_of(self, self.tokens)

    @cached_property
    def frames(self) -> Frames | None:
        """The frames of numbers; None if nothing says that some are padding."""
        return frames_of(self.entries, self.rows)

    @cached_property
    def documents(self) -> Tensor:
        """The numbers `[B, T]` of the documents that are packed into rows. Raises Unknown."""
        return documents_of(self)

    @cached_property
    def roles(self) -> dict[str, str]:
        """The role of each parameter by path, in the words of ``nn.roles``: embedding, head, hidden, norm,
        bias or scalar; and token, for what joins the stream as it is. Any vector but a bias counts as a
        norm's.
        """
        tables = {id(f.argument(1, "weight")) for f in self.lookups}
        modules = dict(self.trace.model.named_modules())
        where, (*_, classes) = self._scored[0][0][:2] if self._scored else (None, (0,))
        linear = [path for path in self.order if isinstance(modules[path], nn.Linear)]
        outside = [path for path in linear if block_of(self.stacks, path) is None]
        fits = [path for path in outside if modules[path].out_features == classes]
        ends = {getattr(where, "module", ""), *fits[-1:]} - {""}
        known = {id(p) for one, _ in self._scored for p in one.matrices}
        roles: dict[str, str] = {}
        for path, p in self.trace.model.named_parameters():
            owner, _, name = path.rpartition(".")
            module = modules[owner]
            if id(p) in tables or isinstance(module, nn.Embedding):
                roles[path] = "embedding"
            elif id(p) in known or (not known and owner in ends and p.ndim > 1 and classes in p.shape):
                roles[path] = "head"
            elif path in self.joined:
                roles[path] = "token"
            elif p.ndim >= 2:
                roles[path] = "hidden"
            elif p.numel() == 1:
                roles[path] = "scalar"
            else:
                adds = isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)) and name != "weight"
                roles[path] = "bias" if adds or "bias" in name else "norm"
        return roles

    @property
    def head(self) -> str | None:
        """The matrix that computes the logits: the head, or the embedding table tied to it."""
        own, classes = self.trace.model.named_parameters(), self.logits.shape[-1]
        fits = [n for n, p in own if classes in p.shape]
        return next((n for role in ("head", "embedding") for n in fits if self.roles[n] == role), None)

    @cached_property
    def trained(self) -> bool:
        """Whether the weights know something: declared, or the loss prefers the targets to shuffled ones.

        The shuffled targets are those of the same positions in another order, so a model that only knows how
        often each class occurs prefers neither.
        """
        if self.declared.trained is not None:
            return self.declared.trained
        targets = self.targets
        counted, value = targets.counted.reshape(-1), self.logits.value.reshape(-1, targets.classes)
        own = targets.nll.reshape(-1)[counted]
        logp = value[counted.to(value.device)].double().log_softmax(-1).cpu()
        ids = targets.ids.reshape(-1)[counted]
        other = -logp.gather(-1, ids.roll(1)[:, None])[:, 0]
        gain = other - own
        if len(gain) < 3:
            return False
        error = gain.std() / len(gain) ** 0.5
        return bool(gain.mean() > 5 * error and gain.mean() > 0.1 * own.mean())

    def real(self, tokens: Tokens) -> Tensor:
        """Return where these tokens are real, `[B, T]`; everywhere if nothing tells."""
        with suppress(Unknown):
            return padding_of(self, tokens).real
        return torch.ones_like(tokens.ids, dtype=torch.bool)

    @cached_property
    def counted(self) -> Tensor:
        """The positions `[B, T]` at which the loss has a target; everywhere if that is not known."""
        everywhere = torch.ones_like(self.tokens.ids, dtype=torch.bool)
        with suppress(Unknown):
            counted = self.targets.counted
            if counted.ndim == 2 and len(counted) == len(everywhere):
                return F.pad(counted, (0, everywhere.shape[1] - counted.shape[1]))
        return everywhere

    def by_position(self, logits: Tensor) -> bool:
        """Return whether logits `[B, T, …]` have an axis for the tokens' positions, perhaps one shorter."""
        (count, width), lengths = self.tokens.ids.shape, logits.shape[:2]
        return logits.ndim >= 3 and count in lengths and min(abs(n - width) for n in lengths) <= 1

    def with_tokens(self, ids: Tensor, tokens: Tokens | None = None) -> Any:
        """Return the batch with other ids `[B, T]` where the model reads them."""
        tokens = tokens or self.tokens
        original = self.entries[tokens.place]
        entry = (original.T if tokens.transposed else original).clone()
        if tokens.column < 0:  # the model puts a start before them
            labels = entry[:, : ids.shape[1] - 1]
            ids = torch.where(labels < 0, labels, ids[:, 1:].to(entry))
        entry[:, tokens.start : tokens.start + ids.shape[1]] = ids.to(entry)
        return replaced(self.trace.batch, tokens.place, entry.T if tokens.transposed else entry)

    def exchangeable(self, tokens: Tokens | None = None) -> Tensor:
        """Return where ids `[B, T]` may be exchanged, because they keep no place for anything else."""
        tokens = tokens or self.tokens
        return ~torch.isin(tokens.ids, torch.tensor(self.placeholders(tokens), dtype=tokens.ids.dtype))

    def placeholders(self, tokens: Tokens) -> tuple[int, ...]:
        """Return the ids that only keep places for what comes from elsewhere in the batch."""
        if tokens.place not in self._placeholders:
            self._placeholders[tokens.place] = placeholders_of(self, tokens)
        return self._placeholders[tokens.place]

    def other_tokens(self, pick: Tensor, tokens: Tokens | None = None) -> Any:
        """Return the batch with another id, one that it uses elsewhere, at the picked positions `[B, T]`, as
        far as these are exchangeable.
        """
        tokens = tokens or self.tokens
        own = (self.configured(f"{name}_token_id") for name in ("pad", "eos"))
        special = {self.declared.pad_id, self.declared.eos_id, *own, *self.borders}
        special.update(self.placeholders(tokens))
        pool = torch.tensor([i for i in torch.unique(tokens.ids).tolist() if i >= 0 and i not in special])
        if len(pool) < 2:
            pool = torch.arange(min(tokens.vocabulary, 8))
        ids = tokens.ids
        index = torch.searchsorted(pool, ids.contiguous()).clamp(max=len(pool) - 1)
        shift = torch.randint(1, len(pool), ids.shape, generator=torch.Generator().manual_seed(1))
        pick = pick & self.exchangeable(tokens)
        return self.with_tokens(torch.where(pick, pool[(index + shift) % len(pool)], ids), tokens)

    def other_values(self, place: Place) -> Iterator[Tensor]:
        """Yield other values of the same kind for an entry of the batch."""
        entry, tokens = self.entries[place], next((t for t in self.sources if t.place == place), None)
        if tokens is not None:
            yield at(self.other_tokens(torch.ones_like(tokens.ids, dtype=torch.bool), tokens), place)
        elif set(torch.unique(entry).tolist()) <= {0, 1}:
            flipped, middle = entry.clone(), entry.shape[-1] // 2
            opposite = ~entry if entry.dtype == torch.bool else 1 - entry
            flipped[..., middle] = opposite[..., middle]
            yield from (flipped, opposite)
        elif entry.is_floating_point():
            yield entry.roll(1, 0) * 1.3 + 0.1
        elif len(own := torch.unique(entry[entry >= 0])) > 1:
            index = torch.searchsorted(own, entry.clamp_min(int(own[0])).contiguous())
            yield torch.where(entry >= 0, own[(index + 1) % len(own)], entry)
            yield entry.flip(-1)

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """The id that ends every document of packed rows, if one does."""
        try:
            numbers, ids = self.documents, self.tokens.ids
        except Unknown:
            return ()
        last = torch.unique(ids[:, :-1][numbers[:, 1:] != numbers[:, :-1]])
        return (int(last[0]),) if len(last) == 1 else ()

    def configured(self, name: str) -> Any:
        """Return an entry of the model's own configuration, as in Hugging Face's models."""
        for owner in (self.trace.model, *self.trace.model.children()):
            value = getattr(getattr(owner, "config", None), name, None)
            if value is not None:
                return value[0] if isinstance(value, (list, tuple)) and value else value
        return None

    def with_rows(self, order: Tensor) -> Any:
        """Return the batch with its rows, or some of them, in this order. Raises Unknown for nested ones, for
        what is one row of documents, one after another, and for images that are not held row by row.
        """
        if self.has_nested:
            raise Unknown("the batch holds a nested tensor, whose rows torch does not exchange")
        if any(is_offsets(x, self.rows) and len(x) != self.rows for x in self.entries.values()):
            raise Unknown("the batch is one row of documents, one after another, as their offsets say")
        loose = [x for x in self.entries.values() if x.is_floating_point() and x.ndim > 1]
        if any(len(x) != self.rows for x in loose) and any(map(self.placeholders, self.sources)):
            raise Unknown("what lies in places of the rows is not held row by row: rows cannot be exchanged")
        return map_tensors(
            self.trace.batch, lambda _, x: x[order.to(x.device)] if x.ndim and x.shape[0] == self.rows else x
        )

    def rearranged(self, arranged: Arranged, tokens: Tokens, only: Collection[Place] = ()) -> Any:
        """Return rows of a batch, with the columns that ``arranged`` gives for the width of each entry that
        runs along the tokens, or of those at the places ``only``.
        """
        rows, columns, batch = arranged

        def change(place: Place, x: Tensor) -> Tensor:
            if not x.ndim or x.shape[0] != self.rows:
                return x
            x = x[rows.to(x.device)]
            if columns is None or (only and place not in only):
                return x
            for axis in range(1, x.ndim):
                if x.shape[axis] - tokens.ids.shape[1] in (0, 1, tokens.start):
                    shape = [len(rows), *(-1 if a == axis else 1 for a in range(1, x.ndim))]
                    x = x.take_along_dim(columns(x.shape[axis]).view(shape).to(x.device), axis)
            return x

        return map_tensors(self.trace.batch if batch is None else batch, change)


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
