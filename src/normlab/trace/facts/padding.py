"""Find which tokens, and which frames, only fill up rows; and give the same rows under other padding.

A model must compute the same for any padding. ``Padding.arranged`` has what a check compares to see that.
"""

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

        def columns_of_all(width: int) -> Tensor:
            picked = columns(width) if columns else torch.arange(width).expand(len(self.rows), -1)
            of_all = picked[:1].repeat(count, 1)
            of_all[self.rows] = picked
            return of_all

        return self._replace(rows=torch.arange(count), columns=columns_of_all)


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
        # rows that hold a token, and have no padding between tokens
        filled_at_ends = (self.real == ~(left | right)).all(1) & self.real.any(1)
        cut = (filled_at_ends & ~self.real.all(1)).nonzero()[:1, 0]
        is_on_right = bool((filled_at_ends & (trail > 0)).any())
        with_more = (filled_at_ends & ((trail if is_on_right else lead) > 0)).nonzero()[:, 0]
        moved = (filled_at_ends & ((lead > 0) != (trail > 0))).nonzero()[:, 0]
        begin, length, shift = lead[cut], int(self.real[cut].sum()), (trail - lead)[moved, None]

        # entries of the batch may be wider than the tokens, so columns are given for any width
        def columns_of_cut(width_of_entry: int) -> Tensor:
            return begin[:, None] + torch.arange(length + width_of_entry - width)

        def columns_of_more(width_of_entry: int) -> Tensor:
            every = torch.arange(width_of_entry).expand(len(with_more), -1)
            return _with_one_more(every, last=is_on_right)

        def columns_of_moved(width_of_entry: int) -> Tensor:
            return (torch.arange(width_of_entry) - shift) % width_of_entry

        def columns_of_moved_on(width_of_entry: int) -> Tensor:
            return _with_one_more(columns_of_moved(width_of_entry), last=not is_on_right)

        arranged = {
            "cut": Arranged(cut, columns_of_cut),
            "more": Arranged(with_more, columns_of_more),
            "moved": Arranged(moved, columns_of_moved),
            "moved on": Arranged(moved, columns_of_moved_on),
        }
        return {name: of_rows for name, of_rows in arranged.items() if len(of_rows.rows)}


def _with_one_more(columns: Tensor, *, last: bool) -> Tensor:
    """Return columns `[B, W]` with the last one, or the first one, once more beside it."""
    return torch.cat([columns, columns[:, -1:]] if last else [columns[:, :1], columns], 1)


def padding_of(readings: Readings, tokens: Tokens, texts: Sequence[Tokens]) -> Padding:
    """Find the padding of the tokens, which are one of the texts that the model reads.

    A mask in the batch is a tensor over the tokens with two values, one of which lies at the ends of rows,
    always over the same id. Without a mask, the padding id is the declared one, that of the embedding
    (``padding_idx``), that of the model's configuration, that of tails of several lengths that labels hide,
    or one that fills one end of several rows in runs and occurs nowhere else.

    Raises Unknown if nothing tells.
    """
    padding = (
        _padding_of_mask(readings, tokens)
        or _padding_of_known_id(readings, tokens)
        or _padding_under_labels(readings, tokens)
        or _padding_in_runs(readings, tokens, texts)
    )
    if padding is not None:
        return padding
    declared = readings.declared.pad_id
    if declared is not None:
        raise Unknown(f"no token of the batch is padding (pad_id {declared})")
    raise Unknown(
        "nothing says that the batch has padding: declare pad_id, or hand a mask over with the batch"
    )


def _padding_of_mask(readings: Readings, tokens: Tokens) -> Padding | None:
    """Return the padding that a mask in the batch shows."""
    declared = readings.declared.pad_id
    for place, entry in readings.entries.items():
        real = None if place == tokens.place else _as_mask(entry, tokens, declared)
        if real is not None:
            hidden = torch.unique(tokens.ids[~real])
            pad = int(hidden[0]) if len(hidden) == 1 else declared
            source = str(place[-1]) if place else "mask"
            return Padding(real, source, place, pad, _ends_in(pad, tokens.ids, real))
    return None


def _padding_of_known_id(readings: Readings, tokens: Tokens) -> Padding | None:
    """Return the padding with the id that is declared, or that the model names."""
    of_tables = [m.padding_idx for m in readings.trace.model.modules() if isinstance(m, nn.Embedding)]
    of_table = next((index for index in of_tables if index is not None), None)
    configured, end = (readings.configured(f"{name}_token_id") for name in ("pad", "eos"))
    ids = ((readings.declared.pad_id, "pad_id"), (of_table, "padding_idx"), (configured, "config"))
    for pad, source in ids:
        if isinstance(pad, int) and (tokens.ids == pad).any():
            is_end = pad in (readings.declared.eos_id, end) or _ends_are_asked_for(readings, tokens, pad)
            real = real_tokens(tokens.ids, pad, ends=is_end)
            if not real.all():
                return Padding(real, source, None, pad, is_end)
    return None


def _padding_in_runs(readings: Readings, tokens: Tokens, texts: Sequence[Tokens]) -> Padding | None:
    """Return the padding with an id that fills one end of several rows in runs and occurs nowhere else."""
    pad = _run(tokens.ids)
    # two texts over one vocabulary are filled up alike: if not, one of the ids is a word, such as a mask
    of_texts = {_run(text.ids) for text in texts if text.vocabulary == tokens.vocabulary}
    if pad is None or of_texts - {None, pad}:
        return None
    is_end = _ends_are_asked_for(readings, tokens, pad)
    return Padding(real_tokens(tokens.ids, pad, ends=is_end), "runs", None, pad, is_end)


class Frames(NamedTuple):
    """Rows of frames `[B, T, …]` that are filled up with zeros."""

    real: Tensor
    """`[B, T]`, True at frames that are no padding."""
    place: Place
    """Where the frames are in the batch."""
    mask: Place
    """Where the mask is, or the rows' lengths, that says so."""

    def with_one_more(self, entries: Mapping[Place, Tensor], batch: Any) -> Any:
        """Return the batch with one more frame of padding in each row; None if other entries are as long,
        which may or may not belong to the frames.
        """
        length = self.real.shape[1]
        as_long = {place for place, x in entries.items() if length in x.shape[1:]}
        if not as_long <= {self.place, self.mask}:
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
        labels = None if place == tokens.place else _flattened(entry.cpu(), tokens)
        if labels is None or labels.is_floating_point():
            continue
        for ahead in (0, 1):
            targets, ids = labels[:, : labels.shape[1] - ahead], tokens.ids[:, ahead:]
            is_asked_for = F.pad(targets == ids, (ahead, 0))
            ignored = torch.unique(targets[targets != ids])
            if len(ignored) == 1 and bool(is_asked_for[first].all()) and not is_asked_for[~real].any():
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
    for value in values:  # which may hide tokens, or show them
        hidden = flat == value
        left, right = runs_at_ends(hidden)
        ids = torch.unique(tokens.ids[hidden])
        is_at_ends = hidden.equal(left | right) and not hidden.all(1).any()
        if is_at_ends and len(ids) == 1 and declared in (None, int(ids[0])):
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
        targets, ids = labels[:, : labels.shape[1] - ahead], tokens.ids[:, ahead:]
        shown = targets >= 0
        if not shown.any() or not bool((targets == ids)[shown].all()):
            continue
        _, hidden_tails = runs_at_ends(~shown)
        real = ~F.pad(hidden_tails, (ahead, 0))
        lengths, hidden_ids = (~real).sum(1), torch.unique(tokens.ids[~real])
        if len(hidden_ids) != 1 or int(lengths.max()) < 2 or len(torch.unique(lengths)) < 2:
            continue
        last = real & ~F.pad(real[:, 1:], (0, 1))
        is_inside = bool((tokens.ids[real & ~last] == hidden_ids).any())
        ends = tokens.ids[last] == hidden_ids
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
