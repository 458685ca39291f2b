"""Which tokens, and which frames, only fill up rows, and the same rows under other padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.trace.facts import Unknown
from normlab.trace.facts.masks import runs_at_ends
from normlab.trace.facts.readings import Readings
from normlab.trace.facts.tokens import Tokens
from normlab.trace.tensors import Place, map_tensors

Columns = Callable[[int], Tensor]
"""Maps the width of a tensor to the columns `[B, W]` that are taken from each of its rows."""


class Arranged(NamedTuple):
    """Some rows of a batch, perhaps with their columns in another order, or other columns."""

    rows: Tensor
    columns: Columns | None = None
    batch: Any = None
    """The batch, if it is not the step's own."""

    def in_place(self, count: int) -> Arranged:
        """Return the same of all ``count`` rows, each in its place: the others take the columns of the first
        of these.
        """
        columns = self.columns

        def of_all(width: int) -> Tensor:
            picked = columns(width) if columns else torch.arange(width).expand(len(self.rows), -1)
            every = picked[:1].repeat(count, 1)
            every[self.rows] = picked
            return every

        return self._replace(rows=torch.arange(count), columns=of_all)


class Padding(NamedTuple):
    """Where the tokens `[B, T]` are real, and who says so."""

    real: Tensor
    """`[B, T]`, True at tokens."""
    source: str
    """A batch entry's name, "pad_id", "padding_idx", "config" or "runs"."""
    mask: Place | None
    """The place of the mask in the batch, if it holds one."""
    pad_id: int | None
    """The id that fills up rows, if there is one."""
    ends_texts: bool = False
    """Whether the last real token of a row has that id, too: it ends texts and fills up rows."""

    @property
    def side(self) -> str:
        """The end at which rows are filled up, "left", "right" or "both"; "none" without padding."""
        left, right = bool((~self.real[:, 0]).any()), bool((~self.real[:, -1]).any())
        names = {(True, False): "left", (False, True): "right", (True, True): "both"}
        return names.get((left, right), "none")

    def arranged(self) -> dict[str, Arranged]:
        """Return the same tokens under other padding, by name, without what this batch does not allow.

        "cut" is one row without its padding; "more" has one more column of it, in the rows that end in
        padding, else in those that begin with it; "moved" has all of it at the other end, "moved on" one more
        column there.
        """
        left, right = runs_at_ends(~self.real)
        lead, trail, width = left.sum(1), right.sum(1), self.real.shape[1]
        whole = (self.real == ~(left | right)).all(1) & self.real.any(1)
        some = (whole & ~self.real.all(1)).nonzero()[:1, 0]
        ends = bool((whole & (trail > 0)).any())
        rows = (whole & ((trail if ends else lead) > 0)).nonzero()[:, 0]
        plain = (whole & ((lead > 0) != (trail > 0))).nonzero()[:, 0]
        first, length, shift = lead[some], int(self.real[some].sum()), (trail - lead)[plain, None]

        def beside(columns: Tensor, *, last: bool) -> Tensor:
            return torch.cat([columns, columns[:, -1:]] if last else [columns[:, :1], columns], 1)

        def moved(wide: int) -> Tensor:
            return (torch.arange(wide) - shift) % wide

        arranged = {
            "cut": Arranged(some, lambda wide: first[:, None] + torch.arange(length + wide - width)),
            "more": Arranged(rows, lambda wide: beside(torch.arange(wide).expand(len(rows), -1), last=ends)),
            "moved": Arranged(plain, moved),
            "moved on": Arranged(plain, lambda wide: beside(moved(wide), last=not ends)),
        }
        return {name: own for name, own in arranged.items() if len(own.rows)}


def padding_of(readings: Readings, tokens: Tokens, texts: Sequence[Tokens]) -> Padding:
    """Find the padding of the tokens, which are one of the texts that the model reads. Raises Unknown if
    nothing tells.

    A mask in the batch is a tensor over the tokens with two values, one of which lies at the ends of rows,
    always over the same id. Without a mask, the padding id is the declared one, that of the embedding
    (``padding_idx``), that of the model's configuration, that of tails of several lengths that labels hide,
    or one that fills one end of several rows in runs and occurs nowhere else.
    """
    declared = readings.declared.pad_id
    for place, entry in readings.entries.items():
        if place == tokens.place:
            continue
        real = _as_mask(entry, tokens, declared)
        if real is not None:
            fill = torch.unique(tokens.ids[~real])
            pad = int(fill[0]) if len(fill) == 1 else declared
            return Padding(
                real, str(place[-1]) if place else "mask", place, pad, _ends_in(pad, tokens.ids, real)
            )
    tables = (m.padding_idx for m in readings.trace.model.modules() if isinstance(m, nn.Embedding))
    index = next((i for i in tables if i is not None), None)
    configured, ends = (readings.configured(f"{name}_token_id") for name in ("pad", "eos"))
    for pad, source in ((declared, "pad_id"), (index, "padding_idx"), (configured, "config")):
        if isinstance(pad, int) and (tokens.ids == pad).any():
            is_end = pad in (readings.declared.eos_id, ends) or _ends_are_asked_for(readings, tokens, pad)
            real = real_tokens(tokens.ids, pad, ends=is_end)
            if not real.all():
                return Padding(real, source, None, pad, is_end)
    if (padding := _padding_under_labels(readings, tokens)) is not None:
        return padding
    pad = _run(tokens.ids)
    # two texts over one vocabulary are filled up alike: if not, one of the ids is a word, such as a mask
    others = {_run(other.ids) for other in texts if other.vocabulary == tokens.vocabulary}
    if pad is not None and not others - {None, pad}:
        is_end = _ends_are_asked_for(readings, tokens, pad)
        return Padding(real_tokens(tokens.ids, pad, ends=is_end), "runs", None, pad, is_end)
    if declared is not None:
        raise Unknown(f"no token of the batch is padding (pad_id {declared})")
    raise Unknown(
        "nothing says that the batch has padding: declare pad_id, or hand a mask over with the batch"
    )


class Frames(NamedTuple):
    """Rows of frames `[B, T, …]` that are filled up with zeros."""

    real: Tensor
    """`[B, T]`, True at frames that are no padding."""
    place: Place
    told_by: Place
    """The place of the mask, or of the rows' lengths, that says so."""

    def with_one_more(self, entries: Mapping[Place, Tensor], batch: Any) -> Any:
        """Return the batch with one more frame of padding in each row; None if other entries are as long,
        which may or may not belong to the frames.
        """
        longer = {self.place, self.told_by}
        length = self.real.shape[1]
        as_long = {place for place, x in entries.items() if length in x.shape[1:]}
        if not as_long <= longer:
            return None
        row = int((~self.real[:, -1]).nonzero()[0, 0])  # a row whose last frame is padding

        def change(place: Place, x: Tensor) -> Tensor:
            if place not in as_long:
                return x
            return torch.cat([x, x[row, -1:].expand(len(x), 1, *x.shape[2:])], 1)

        return map_tensors(batch, change)


def frames_of(entries: Mapping[Place, Tensor], rows: int) -> Frames | None:
    """Return the frames of a batch of which some are padding: rows of frames `[B, T, …]` end in zeros, and
    another entry, a mask or the rows' lengths, says so at each of them. None if there are no such entries.
    """
    known = {place: x.cpu() for place, x in entries.items() if x.ndim and x.shape[0] == rows}
    for place, frames in known.items():
        if frames.ndim < 3 or not frames.is_floating_point():
            continue
        real = ~runs_at_ends(~frames.flatten(2).any(-1))[1]
        if real.all() or not real.any(1).all():
            continue
        counts = real.sum(1)
        for other, x in known.items():
            is_mask = x.shape == real.shape and len(torch.unique(x)) == 2
            is_length = x.shape == counts.shape and not x.is_floating_point()
            if (is_mask and (x == x.max()).equal(real)) or (is_length and x.equal(counts.to(x))):
                return Frames(real, place, other)
    return None


def real_tokens(ids: Tensor, pad: int, *, ends: bool = False) -> Tensor:
    """Return `[B, T]`, False in the runs of padding at either end of each row; if the id also ends a text,
    the first of a run on the right is that end.
    """
    filled = ids == pad
    left, right = runs_at_ends(filled)
    if ends:
        right = right & F.pad(right[:, :-1], (1, 0))
    if ends or bool(filled[:, 0].all()):  # where every row begins with it, it is a start
        return ~right
    return ~(right | (left & ~filled.all(1, keepdim=True)))


def _ends_in(pad: int | None, ids: Tensor, real: Tensor) -> bool:
    """Return whether each row that is filled up on the right has this id as its last real token."""
    last = real & ~F.pad(real[:, 1:], (0, 1), value=True)
    return pad is not None and bool(last.any()) and bool((ids[last] == pad).all())


def _ends_are_asked_for(readings: Readings, tokens: Tokens, pad: int) -> bool:
    """Return whether an entry of the batch holds targets, the tokens themselves or the next ones and one
    value for what is ignored, that ask for the first of each run of padding and for none after it. That one
    ends a text, which is then padded with its end.
    """
    real = real_tokens(tokens.ids, pad, ends=True)
    first = real & ~real_tokens(tokens.ids, pad)
    for place, entry in readings.entries.items():
        targets = None if place == tokens.place else _flattened(entry.cpu(), tokens)
        if targets is None or targets.is_floating_point():
            continue
        for ahead in (0, 1):
            given, wanted = targets[:, : targets.shape[1] - ahead], tokens.ids[:, ahead:]
            asked = F.pad(given == wanted, (ahead, 0))
            ignored = torch.unique(given[given != wanted])
            if len(ignored) == 1 and bool(asked[first].all()) and not asked[~real].any():
                return bool(first.any())
    return False


def _as_mask(entry: Tensor, tokens: Tokens, declared: int | None) -> Tensor | None:
    """Return `[B, T]`, True at tokens, if this entry of the batch is such a mask and hides something."""
    flat = _flattened(entry.cpu(), tokens)
    if flat is None:
        return None
    values = torch.unique(flat)
    if len(values) != 2:
        return None
    for shut in values:
        hidden = flat == shut
        (left, right), fill = runs_at_ends(hidden), torch.unique(tokens.ids[hidden])
        at_an_end = hidden.equal(left | right) and not hidden.all(1).any()
        if at_an_end and len(fill) == 1 and declared in (None, int(fill[0])):
            return ~hidden
    return None


def _padding_under_labels(readings: Readings, tokens: Tokens) -> Padding | None:
    """Return the padding that labels of the batch hide; None if they hide none, or something else."""
    for place, entry in readings.entries.items():
        real = None if place == tokens.place else _shown_by_labels(entry, tokens)
        if real is not None:
            pad = int(tokens.ids[~real][0])
            source = str(place[-1]) if place else "labels"
            return Padding(real, source, None, pad, _ends_in(pad, tokens.ids, real))
    return None


def _shown_by_labels(entry: Tensor, tokens: Tokens) -> Tensor | None:
    """Return `[B, T]`, False at the ends of rows, of several lengths, that labels hide and that one id fills,
    which is no other token but perhaps the end of a text; None if this entry of the batch holds no such
    labels. These are the tokens, or the next ones, and negative where they hide something.
    """
    labels = _flattened(entry.cpu(), tokens)
    if labels is None or labels.is_floating_point():
        return None
    for ahead in (0, 1):
        given, asked = labels[:, : labels.shape[1] - ahead], tokens.ids[:, ahead:]
        shown = given >= 0
        if not shown.any() or not bool((given == asked)[shown].all()):
            continue
        real = ~F.pad(runs_at_ends(~shown)[1], (ahead, 0))
        lengths, fill = (~real).sum(1), torch.unique(tokens.ids[~real])
        if len(fill) != 1 or int(lengths.max()) < 2 or len(torch.unique(lengths)) < 2:
            continue
        last = real & ~F.pad(real[:, 1:], (0, 1))
        is_inside = bool((tokens.ids[real & ~last] == fill).any())
        ends = tokens.ids[last] == fill
        if real.any(1).all() and not is_inside and (ends.all() or not ends.any()):
            return real
    return None


def _flattened(entry: Tensor, tokens: Tokens) -> Tensor | None:
    """Return an entry `[B, T]`, `[B, 1, 1, T]` or `[B, 1, T]` as `[B, T]`, in the columns of the ids; None if
    it runs along something else, such as the frames beside a text.
    """
    rows, width = tokens.ids.shape
    if entry.ndim > 2 and entry.shape[0] == rows and entry.numel() == rows * entry.shape[-1]:
        entry = entry.reshape(rows, entry.shape[-1])
    if entry.ndim == 2 and tokens.transposed and entry.shape[1] == rows:
        entry = entry.T
    if entry.ndim != 2 or entry.shape[0] != rows or entry.shape[1] not in (width, tokens.entry.shape[1]):
        return None
    return entry[:, tokens.columns]


def _run(ids: Tensor) -> int | None:
    """Return the id that fills several rows at one end, in runs of two or more, and occurs nowhere else."""
    for end, other_end in ((-1, 0), (0, -1)):
        for pad in torch.unique(ids[:, end]).tolist():
            real = real_tokens(ids, pad)
            lengths = (~real).sum(1)
            # a token that rows both begin and end with is one that the text repeats
            elsewhere = (ids[real] == pad).any() or not real[:, other_end].all()
            if (lengths >= 2).sum() >= 2 and not elsewhere:
                return int(pad)
    return None
