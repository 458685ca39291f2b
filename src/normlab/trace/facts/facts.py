"""The facts of one step: its tokens, targets, padding, documents, roles.

Each is computed once, when it is asked for. One that cannot be read off the step raises ``Unknown``, with the
reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.base.roles import Role
from normlab.trace.facts import Unknown
from normlab.trace.facts.documents import documents_of, is_offsets
from normlab.trace.facts.padding import Arranged, Frames, Padding, frames_of, padding_of
from normlab.trace.facts.placeholders import placeholders_of
from normlab.trace.facts.readings import Readings
from normlab.trace.facts.stacks import block_of
from normlab.trace.facts.targets import FLAT, FunctionInput, Layout, Logits, Targets
from normlab.trace.facts.tokens import Tokens, looked_up, looked_up_through, with_others
from normlab.trace.tensors import Place, Tap, at, map_tensors, replaced
from normlab.trace.trace import Trace

SHIFTS: Final = (1, 0, 2, -1)
"""How far ahead of the token at their own position targets are looked for, the usual distance first."""


class Facts(Readings):
    """What a step is made of, so far as one pass and some of its variations tell."""

    @cached_property
    def tokens(self) -> Tokens:
        """The ids that the model reads. Of several, those that the targets follow; the usual distance comes
        first, because targets that repeat the source follow it too, at distance 0. Raises Unknown.
        """
        if not self.sources:
            raise Unknown("no tensor of the batch is looked up in an embedding")
        targets = self._shaped[0][1] if self._shaped else None
        if targets is not None and targets.ids.ndim == 2:
            for distance in SHIFTS:
                shares = [targets.share(tokens.entry, distance) for tokens in self.sources]
                if max(shares) > 0.9:
                    return self.sources[shares.index(max(shares))]
        return self.sources[0]

    @cached_property
    def sources(self) -> list[Tokens]:
        """All ids that are looked up, those of the largest vocabulary first."""
        texts = looked_up(self.entries, self.lookups, self.rows)
        texts += looked_up_through(self, texts)
        return sorted(texts, key=lambda tokens: -tokens.vocabulary)

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
        """The places of all logits whose cross-entropies are part of the loss."""
        return tuple(logits.where for logits, _ in self._scored)

    @property
    def unexplained(self) -> float:
        """What is left of the loss after subtracting the cross-entropies that its gradient shows."""
        outputs = [pair for pair in self._scored if pair[0].output] or self._scored[:1]
        return float(self.loss or 0.0) - sum(targets.value(logits.value) for logits, targets in outputs)

    @property
    def targets(self) -> Targets:
        """The targets that the loss asks for, see ``scored``. Raises Unknown."""
        return self.scored[1]

    @property
    def logits(self) -> Logits:
        """The logits that the loss scores against the targets, see ``scored``. Raises Unknown."""
        return self.scored[0]

    @cached_property
    def _shaped(self) -> list[tuple[Logits, Targets]]:
        """All logits and targets, with rows first."""
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
        in_rows, in_columns = (targets.rearranged(partial(layout.of, rows=rows)) for layout in FLAT)
        by_row, by_column = self._share_that_follows(in_rows), self._share_that_follows(in_columns)
        if max(by_row, by_column) > 0.9 and (by_row != by_column or rows == 1):
            layout_by_row, layout_by_column = FLAT
            if by_row < by_column:
                return logits.laid_out(layout_by_column, rows), in_columns
            return logits.laid_out(layout_by_row, rows), in_rows
        return logits, in_rows

    def _share_that_follows(self, targets: Targets) -> float:
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
        return [pair for pair in self._shaped if pair[1].ids.ndim == 2 and len(pair[1].ids) == rows]

    @cached_property
    def shift(self) -> int | None:
        """How far ahead of the token at its own position a target is; None if targets are not inputs.

        Raises Unknown if there are no tokens, or no targets at them.
        """
        return self.shift_of(self.targets)

    def shift_of(self, targets: Targets) -> int | None:
        """Return the same for these targets."""
        rates = self.shift_rates_of(targets)
        best = max(rates, key=lambda distance: (rates[distance], -abs(distance - 1)))
        return best if rates[best] > 0.9 else None

    @cached_property
    def shift_rates(self) -> dict[int, float]:
        """By distance, the share of counted targets that are the token that far ahead."""
        return self.shift_rates_of(self.targets)

    def shift_rates_of(self, targets: Targets) -> dict[int, float]:
        """Return the same for these targets. Several heads may look as far ahead as there are of them."""
        tokens = self.tokens
        if targets.ids.ndim != 2 or targets.ids.shape[0] != tokens.entry.shape[0]:
            raise Unknown("the loss has no target at each token")
        offset = tokens.start - self.before(targets)
        distances = range(-2, 5 + len(self._shaped))
        return {distance: targets.share(tokens.entry, distance + offset) for distance in distances}

    @property
    def offset(self) -> int:
        """How many columns of the tokens' entry come before the token at the first position of the targets;
        negative if positions without a token, such as an image's, come before the text.
        """
        return self.tokens.start - self.before(self.targets)

    def before(self, targets: Targets) -> int:
        """Return how many positions without a token, such as an image's, come before the text."""
        return max(targets.ids.shape[1] - self.tokens.ids.shape[1], 0)

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
        return padding_of(self, self.tokens, self.sources)

    @cached_property
    def frames(self) -> Frames | None:
        """The frames of numbers; None if nothing says that some are padding."""
        return frames_of(self.entries, self.rows)

    @cached_property
    def documents(self) -> Tensor:
        """The numbers `[B, T]` of the documents that are packed into rows. Raises Unknown."""
        return documents_of(self, self.tokens)

    @cached_property
    def roles(self) -> dict[str, Role]:
        """The role of each parameter by path. Any vector but a bias counts as a norm's."""
        tables = {id(call.argument(1, "weight")) for call in self.lookups}
        modules = dict(self.trace.model.named_modules())
        heads = self._heads_by_path()
        roles: dict[str, Role] = {}
        for path, p in self.trace.model.named_parameters():
            owner, _, name = path.rpartition(".")
            module = modules[owner]
            if id(p) in tables or isinstance(module, nn.Embedding):
                roles[path] = "embedding"
            elif path in heads:
                roles[path] = "head"
            elif path in self.joined:
                roles[path] = "token"
            elif p.ndim >= 2:
                roles[path] = "hidden"
            elif p.numel() == 1:
                roles[path] = "scalar"
            else:
                is_added = isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)) and name != "weight"
                roles[path] = "bias" if is_added or "bias" in name else "norm"
        return roles

    def _heads_by_path(self) -> set[str]:
        """Return the parameters, by path, that make logits: the matrices that these are products of.

        If the graph shows none, it is those of the module that puts the logits out, and of the last linear
        map outside of all blocks, with an axis of as many classes.
        """
        parameters = dict(self.trace.model.named_parameters())
        matrices = {id(p) for logits, _ in self._scored for p in logits.matrices}
        if matrices:
            return {path for path, p in parameters.items() if id(p) in matrices}
        where: Tap | FunctionInput | None = None
        classes = 0
        if self._scored:
            logits, _ = self._scored[0]
            where, classes = logits.where, logits.shape[-1]
        modules = dict(self.trace.model.named_modules())
        linear = [path for path in self.order if isinstance(modules[path], nn.Linear)]
        outside = [path for path in linear if block_of(self.stacks, path) is None]
        fitting = [path for path in outside if modules[path].out_features == classes]
        owners = {getattr(where, "module", ""), *fitting[-1:]} - {""}
        heads = set[str]()
        for path, p in parameters.items():
            owner, _, _ = path.rpartition(".")
            if owner in owners and p.ndim > 1 and classes in p.shape:
                heads.add(path)
        return heads

    @property
    def head(self) -> str | None:
        """The matrix that computes the logits: the head, or the embedding table tied to it."""
        classes = self.logits.shape[-1]
        fitting = [path for path, p in self.trace.model.named_parameters() if classes in p.shape]
        for role in ("head", "embedding"):
            for path in fitting:
                if self.roles[path] == role:
                    return path
        return None

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
        nll = targets.nll.reshape(-1)[counted]
        logp = value[counted.to(value.device)].double().log_softmax(-1).cpu()
        ids = targets.ids.reshape(-1)[counted]
        nll_of_shuffled = -logp.gather(-1, ids.roll(1)[:, None])[:, 0]
        gain = nll_of_shuffled - nll
        if len(gain) < 3:
            return False
        error = gain.std() / len(gain) ** 0.5
        return bool(gain.mean() > 5 * error and gain.mean() > 0.1 * nll.mean())

    def padding_of(self, tokens: Tokens) -> Padding:
        """Return the padding of any ids that the model reads. Raises Unknown if nothing tells."""
        return padding_of(self, tokens, self.sources)

    def real(self, tokens: Tokens) -> Tensor:
        """Return where these tokens are real, `[B, T]`; everywhere if nothing tells."""
        with suppress(Unknown):
            return self.padding_of(tokens).real
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
            self._placeholders[tokens.place] = placeholders_of(self, tokens, self.real(tokens))
        return self._placeholders[tokens.place]

    def other_tokens(self, pick: Tensor, tokens: Tokens | None = None) -> Any:
        """Return the batch with another id, one that it uses elsewhere, at the picked positions `[B, T]`, as
        far as these are exchangeable.
        """
        tokens = tokens or self.tokens
        configured = [self.configured(f"{name}_token_id") for name in ("pad", "eos")]
        special = {self.declared.pad_id, self.declared.eos_id, *configured, *self.borders}
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
        entry = self.entries[place]
        tokens = next((text for text in self.sources if text.place == place), None)
        if tokens is not None:
            everywhere = torch.ones_like(tokens.ids, dtype=torch.bool)
            yield at(self.other_tokens(everywhere, tokens), place)
        elif set(torch.unique(entry).tolist()) <= {0, 1}:
            opposite = ~entry if entry.dtype == torch.bool else 1 - entry
            flipped, middle = entry.clone(), entry.shape[-1] // 2
            flipped[..., middle] = opposite[..., middle]
            yield flipped
            yield opposite
        elif entry.is_floating_point():
            yield entry.roll(1, 0) * 1.3 + 0.1
        elif len(torch.unique(entry[entry >= 0])) > 1:
            yield with_others(entry, entry >= 0)
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
