"""The ids that a model reads, which of them only fill up rows, and the documents that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.trace.facts import Unknown
from normlab.trace.functions import FunctionCall
from normlab.trace.tensors import Place, map_tensors, replaced

if TYPE_CHECKING:
    from normlab.trace.facts.facts import Facts


class Tokens(NamedTuple):
    """The ids that the model reads, and where they come from in the batch."""

    place: Place
    ids: Tensor
    """`[B, T]` as the model looks them up, or as in the batch if the model reads them in another layout."""
    column: int
    """The column of the batch's tensor where they begin; -1 if the model puts a start before the labels."""
    transposed: bool
    """Whether the batch holds `[T, B]`."""
    vocabulary: int
    entry: Tensor
    """`[B, T']`, the whole entry of the batch; the ids may be a part of it."""

    @property
    def start(self) -> int:
        """The column of an entry of the batch that belongs to the first id."""
        return max(self.column, 0)

    @property
    def columns(self) -> slice:
        """The columns of an entry of the batch that belong to the ids."""
        return slice(self.start, self.start + self.ids.shape[1])


def looked_up(entries: Mapping[Place, Tensor], lookups: Sequence[FunctionCall], rows: int) -> list[Tokens]:
    """Return all entries of a batch of ``rows`` rows that lookups read, the largest vocabulary first."""
    known = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    integers = {p: x for p, x in entries.items() if x.dtype in known and x.ndim == 2}
    found: dict[Place, Tokens] = {}
    for call in sorted(lookups, key=lambda f: -f.argument(1, "weight").shape[0]):
        ids, table = call.argument(0, "input"), call.argument(1, "weight")
        if not isinstance(ids, Tensor) or ids.is_nested or ids.ndim not in (1, 2):
            continue
        # labels may hold the same numbers: the entry that the table reads itself comes first, and alone
        for place, entry in sorted(integers.items(), key=lambda item: not _share(ids, item[1])):
            tokens = _match(ids, place, entry, (rows, len(table)))
            if tokens is None:
                continue
            are_positions = len(tokens.ids) > 1 and bool((tokens.ids == tokens.ids[:1]).all())
            if place not in found and not are_positions:
                found[place] = tokens
            if _share(ids, entry):
                break
    return list(found.values())


def looked_up_through(facts: Facts, known: Sequence[Tokens]) -> list[Tokens]:
    """Return the other entries of the batch that lookups read through a function of each id, such as
    ``ids.clamp(min=0)`` or ``ids % size``, the largest vocabulary first.

    An entry is changed at some places, drawn at random. If it is read so, the ids that are looked up change
    at no other place.
    """
    found: list[Tokens] = []
    draw = torch.Generator().manual_seed(2)
    places = {tokens.place for tokens in known}
    tables = {i: call for i, call in enumerate(facts.lookups) if _may_be_tokens(call, facts, known)}
    for place, entry in facts.entries.items() if tables else ():
        if place in places or not _may_hold_tokens(entry, facts.rows):
            continue
        picked = (torch.rand(entry.shape, generator=draw) < 0.5).to(entry.device)
        changed = with_others(entry, picked)
        again = facts.lookups_of(facts.trace.again(batch=replaced(facts.trace.batch, place, changed)))
        for i, call in tables.items():
            if len(again) != len(facts.lookups):
                break
            moved = again[i].argument(0, "input") != call.argument(0, "input")
            column = _column_of(moved.cpu(), picked.cpu())
            if column is None:
                continue
            ids = entry.cpu().long()
            read = slice(column, column + moved.shape[1])
            part, vocabulary = ids[:, read], len(call.argument(1, "weight"))
            given = torch.stack([part, changed.cpu().long()[:, read]])
            seen = torch.stack([x.argument(0, "input").cpu().long() for x in (call, again[i])])
            if _is_function_of(given, seen):
                found.append(Tokens(place, part, column, False, vocabulary, ids))
                break
    return sorted(found, key=lambda tokens: -tokens.vocabulary)


def hidden_tokens(facts: Facts) -> Iterator[tuple[Place, Tensor]]:
    """Yield entries of the batch that lookups read in part, and the mask over them of what is hidden: at
    these places the same id is looked up whatever stands there, though a later token of the row is read. What
    is hidden at random does not count.
    """
    tables = {i: call for i, call in enumerate(facts.lookups) if _may_be_tokens(call, facts, ())}
    if not tables or not _same_lookups(facts.lookups, facts.lookups_of(facts.trace.again(seed=1))):
        return
    for place, entry in facts.entries.items():
        if not _may_hold_tokens(entry, facts.rows):
            continue
        everywhere = torch.ones_like(entry, dtype=torch.bool)
        changed = replaced(facts.trace.batch, place, with_others(entry, everywhere))
        again = facts.lookups_of(facts.trace.again(batch=changed))
        for i, call in tables.items():
            ids = call.argument(0, "input")
            if len(again) != len(facts.lookups) or entry.shape[1] < ids.shape[1]:
                continue
            read = ids != again[i].argument(0, "input")
            followed = read.flip(1).cumsum(1).flip(1) > 0
            hidden = followed & ~read
            if hidden.any() and len(torch.unique(ids[hidden])) == 1:
                yield place, F.pad(hidden, (0, entry.shape[1] - ids.shape[1]))


def _same_lookups(one: Sequence[FunctionCall], other: Sequence[FunctionCall]) -> bool:
    pairs = zip(one, other, strict=False)
    same = (torch.equal(a.argument(0, "input"), b.argument(0, "input")) for a, b in pairs)
    return len(one) == len(other) and all(same)


def _may_hold_tokens(entry: Tensor, rows: int) -> bool:
    """Return whether an entry of the batch holds a row of whole numbers, of several values, for each row."""
    if entry.ndim != 2 or entry.is_floating_point() or entry.dtype == torch.bool or entry.shape[0] != rows:
        return False
    return len(torch.unique(entry[entry >= 0])) > 1


def with_others(entry: Tensor, picked: Tensor) -> Tensor:
    """Return an entry with another one of its numbers at the picked places."""
    values = torch.unique(entry[entry >= 0])
    index = torch.searchsorted(values, entry.clamp_min(int(values[0])).contiguous())
    return torch.where(picked, values[(index + 1) % len(values)], entry)


def _is_function_of(ids: Tensor, looked_up: Tensor) -> bool:
    """Return whether equal ids are looked up as equal ones wherever they stand; masked words are not."""
    _, number = torch.unique(ids, return_inverse=True)
    first = torch.empty(int(number.max()) + 1, dtype=looked_up.dtype)
    first[number.flatten()] = looked_up.flatten()
    return torch.equal(first[number], looked_up)


def _may_be_tokens(call: FunctionCall, facts: Facts, known: Sequence[Tokens]) -> bool:
    """Return whether a lookup reads ids of its own in each row, other ones than those that are known."""
    ids = call.argument(0, "input")
    if (
        not isinstance(ids, Tensor)
        or ids.is_nested
        or ids.ndim != 2
        or len(ids) != facts.rows
        or facts.rows < 2
    ):
        return False
    ids = ids.cpu().long()
    is_known = any(tokens.ids.shape == ids.shape and tokens.ids.equal(ids) for tokens in known)
    return bool((ids != ids[:1]).any()) and not is_known


def _column_of(moved: Tensor, picked: Tensor) -> int | None:
    """Return the column of the picked places `[B, W]` at which ids `[B, T]` begin of which only picked ones
    moved; None if others did, or none.
    """
    for column in range(min(picked.shape[1] - moved.shape[1], 2) + 1):
        part = picked[:, column : column + moved.shape[1]]
        if part.shape == moved.shape and bool(moved.any()) and not bool((moved & ~part).any()):
            return column
    return None


def _share(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are views of the same numbers in memory."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _match(ids: Tensor, place: Place, entry: Tensor, size: tuple[int, int]) -> Tokens | None:
    """Return the looked-up ids as part of an entry of the batch `[B, T']` or `[T', B]`; None if they are not.

    They begin at one of its first columns, or they are its labels preceded by one start.
    """
    (rows, vocabulary), ids, entry = size, ids.cpu().long(), entry.cpu().long()
    if ids.ndim == 1:
        same = ids.numel() == entry.numel() and torch.equal(ids, entry.reshape(-1))
        return Tokens(place, entry, 0, False, vocabulary, entry) if same else None
    for looked in (ids, ids.T):
        for transposed, own in ((False, entry), (True, entry.T)):
            if looked.shape[0] != own.shape[0] or looked.shape[0] != rows:
                continue
            width, spare = looked.shape[1], own.shape[1] - looked.shape[1]
            for column in range(min(spare, 2) + 1):
                if torch.equal(own[:, column : column + width], looked):
                    return Tokens(place, looked, column, transposed, vocabulary, own)
            shifted = own[:, : width - 1]
            if spare in (0, -1) and width > 2 and bool(((shifted == looked[:, 1:]) | (shifted < 0)).all()):
                return Tokens(place, looked, -1, transposed, vocabulary, looked)
    return None


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
        left, right = _runs(~self.real)
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


def padding_of(facts: Facts, tokens: Tokens) -> Padding:
    """Find the padding of the tokens, or of other ids of the step. Raises Unknown if nothing tells.

    A mask in the batch is a tensor over the tokens with two values, one of which lies at the ends of rows,
    always over the same id. Without a mask, the padding id is the declared one, that of the embedding
    (``padding_idx``), that of the model's configuration, that of tails of several lengths that labels hide,
    or one that fills one end of several rows in runs and occurs nowhere else.
    """
    declared = facts.declared.pad_id
    for place, entry in facts.entries.items():
        if place == tokens.place:
            continue
        real = _as_mask(entry, tokens, declared)
        if real is not None:
            fill = torch.unique(tokens.ids[~real])
            pad = int(fill[0]) if len(fill) == 1 else declared
            return Padding(
                real, str(place[-1]) if place else "mask", place, pad, _ends_in(pad, tokens.ids, real)
            )
    tables = (m.padding_idx for m in facts.trace.model.modules() if isinstance(m, nn.Embedding))
    index = next((i for i in tables if i is not None), None)
    configured, ends = (facts.configured(f"{name}_token_id") for name in ("pad", "eos"))
    for pad, source in ((declared, "pad_id"), (index, "padding_idx"), (configured, "config")):
        if isinstance(pad, int) and (tokens.ids == pad).any():
            is_end = pad in (facts.declared.eos_id, ends) or _ends_are_asked_for(facts, tokens, pad)
            real = real_tokens(tokens.ids, pad, ends=is_end)
            if not real.all():
                return Padding(real, source, None, pad, is_end)
    if (padding := _padding_under_labels(facts, tokens)) is not None:
        return padding
    pad = _run(tokens.ids)
    # two texts over one vocabulary are filled up alike: if not, one of the ids is a word, such as a mask
    others = {_run(other.ids) for other in facts.sources if other.vocabulary == tokens.vocabulary}
    if pad is not None and not others - {None, pad}:
        is_end = _ends_are_asked_for(facts, tokens, pad)
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
        real = ~_runs(~frames.flatten(2).any(-1))[1]
        if real.all() or not real.any(1).all():
            continue
        counts = real.sum(1)
        for other, x in known.items():
            is_mask = x.shape == real.shape and len(torch.unique(x)) == 2
            is_length = x.shape == counts.shape and not x.is_floating_point()
            if (is_mask and (x == x.max()).equal(real)) or (is_length and x.equal(counts.to(x))):
                return Frames(real, place, other)
    return None


def _runs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the rows of a mask `[B, T]` are True from the left end on, and up to the right end."""
    return x.long().cumprod(1).bool(), x.flip(1).long().cumprod(1).flip(1).bool()


def real_tokens(ids: Tensor, pad: int, *, ends: bool = False) -> Tensor:
    """Return `[B, T]`, False in the runs of padding at either end of each row; if the id also ends a text,
    the first of a run on the right is that end.
    """
    filled = ids == pad
    left, right = _runs(filled)
    if ends:
        right = right & F.pad(right[:, :-1], (1, 0))
    if ends or bool(filled[:, 0].all()):  # where every row begins with it, it is a start
        return ~right
    return ~(right | (left & ~filled.all(1, keepdim=True)))


def _ends_in(pad: int | None, ids: Tensor, real: Tensor) -> bool:
    """Return whether each row that is filled up on the right has this id as its last real token."""
    last = real & ~F.pad(real[:, 1:], (0, 1), value=True)
    return pad is not None and bool(last.any()) and bool((ids[last] == pad).all())


def _ends_are_asked_for(facts: Facts, tokens: Tokens, pad: int) -> bool:
    """Return whether an entry of the batch holds targets, the tokens themselves or the next ones and one
    value for what is ignored, that ask for the first of each run of padding and for none after it. That one
    ends a text, which is then padded with its end.
    """
    real = real_tokens(tokens.ids, pad, ends=True)
    first = real & ~real_tokens(tokens.ids, pad)
    for place, entry in facts.entries.items():
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
        (left, right), fill = _runs(hidden), torch.unique(tokens.ids[hidden])
        at_an_end = hidden.equal(left | right) and not hidden.all(1).any()
        if at_an_end and len(fill) == 1 and declared in (None, int(fill[0])):
            return ~hidden
    return None


def _padding_under_labels(facts: Facts, tokens: Tokens) -> Padding | None:
    """Return the padding that labels of the batch hide; None if they hide none, or something else."""
    for place, entry in facts.entries.items():
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
        real = ~F.pad(_runs(~shown)[1], (ahead, 0))
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


def documents_of(facts: Facts) -> Tensor:
    """Return the documents' numbers `[B, T]`. Raises Unknown if nothing says that rows are packed.

    They are declared, or read off positions that restart at 0 within a row, numbers that stay the same in
    runs and (unlike segments) are looked up in no table, or offsets of the documents in a flat row.
    """
    ids = facts.tokens.ids
    if ids.shape[1] < 2:
        raise Unknown("rows hold one token each")
    declared = facts.declared.documents
    if declared is not None:
        return _declared(facts, declared)
    read = [f.argument(0, "input") for f in facts.lookups]
    for place, entry in facts.entries.items():
        if place == facts.tokens.place:
            continue
        tables = (x for x in read if isinstance(x, Tensor) and x.shape == entry.shape)
        segments = any(torch.equal(x, entry) for x in tables)
        if (numbers := _documents_in(entry, facts.tokens, only_positions=segments)) is not None:
            return numbers
    raise Unknown(
        "nothing says that rows hold several documents: positions that restart, document numbers, or "
        "declare documents"
    )


def _documents_in(entry: Tensor, tokens: Tokens, *, only_positions: bool = False) -> Tensor | None:
    """Return the documents' numbers `[B, T]` that an entry of the batch gives, as positions, as numbers
    (unless ``only_positions``) or as offsets; None if it gives none.
    """
    ids = tokens.ids
    if entry.is_floating_point() or entry.dtype == torch.bool:
        return None
    if entry.ndim == 1:
        return _offsets(entry.cpu(), ids)
    if entry.ndim != 2 or entry.shape[0] != ids.shape[0] or entry.shape[1] < ids.shape[1]:
        return None
    own = entry[:, tokens.columns].cpu().long()
    starts = restarts(own)
    if starts is None and not only_positions:
        starts = _changes(own)
    return None if starts is None else starts.long().cumsum(1)


def repeats_documents(entry: Tensor, tokens: Tokens, documents: Tensor) -> bool:
    """Return whether an entry of the batch says the same as these documents `[B, T]`, or hides no token."""
    if entry.shape == tokens.ids.shape and bool((entry == 1).all()):
        return True  # a mask
    numbers = _documents_in(entry, tokens)
    if numbers is None:
        numbers = _from_lengths(entry, tokens)
    return numbers is not None and torch.equal(numbers.diff(dim=1) != 0, documents.diff(dim=1) != 0)


def _from_lengths(lengths: Tensor, tokens: Tokens) -> Tensor | None:
    """Return the documents' numbers `[B, T]` from their lengths `[B, N]`, which add up to the length of a row
    and may be filled up with zeros; None if these are no such lengths.
    """
    if lengths.is_floating_point() or lengths.dtype == torch.bool or tokens.entry.ndim != 2:
        return None
    rows, length = tokens.entry.shape
    if lengths.ndim != 2 or lengths.shape[0] != rows or bool((lengths < 0).any()):
        return None
    if bool((lengths.sum(1) != length).any()):
        return None
    documents = torch.arange(lengths.shape[1])
    numbers = torch.stack([documents.repeat_interleave(row) for row in lengths.cpu().long()])
    return numbers[:, tokens.columns]


def restarts(positions: Tensor) -> Tensor | None:
    """Return `[B, T]`, True where positions that otherwise count up by one restart at 0 within a row."""
    up, anew = positions.diff(dim=1) == 1, positions[:, 1:] == 0
    inside = anew & ~up & ~_runs(anew)[1]  # without zeros under padding
    if not bool((positions[:, 0] == 0).all()) or not bool((up | anew).all()) or not bool(inside.any()):
        return None
    return F.pad(inside, (1, 0))


def _changes(numbers: Tensor) -> Tensor | None:
    """Return `[B, T]`, True where numbers that stay the same in runs change; None if they do not.

    They never return to a number that they left, at most half of the steps in a row are changes, and they
    are more than zeros and ones.
    """
    change = numbers[:, 1:] != numbers[:, :-1]
    if not bool(change.any()) or bool((change.float().mean(1) > 0.5).any()):
        return None
    runs = [row.unique_consecutive() for row in numbers]
    if any(len(own.unique()) < len(own) for own in runs):
        return None
    if set(torch.unique(numbers).tolist()) == {0, 1}:
        return None  # a mask, such as one of prompts, or segments
    return F.pad(change, (1, 0))


def _offsets(offsets: Tensor, ids: Tensor) -> Tensor | None:
    """Return the numbers from cumulative lengths, from 0 to the length of the one flat row."""
    if not is_offsets(offsets, ids.numel()):
        return None
    starts = torch.zeros(ids.numel(), dtype=torch.long)
    starts[offsets[1:-1].long()] = 1
    return starts.cumsum(0).reshape(ids.shape)


def is_offsets(x: Tensor, length: int) -> bool:
    """Return whether a tensor counts up from 0 to this length, as the offsets of several documents do."""
    if x.ndim != 1 or len(x) < 3 or x.is_floating_point() or x.dtype == torch.bool:
        return False
    return (int(x[0]), int(x[-1])) == (0, length) and bool((x.diff() > 0).all())


def _declared(facts: Facts, declared: object) -> Tensor:
    if isinstance(declared, str):
        entry = next((x for p, x in facts.entries.items() if p and p[-1] == declared), None)
        if entry is None:
            raise Unknown(f"the batch has no entry {declared!r}, which is declared to hold the documents")
        declared = entry
    numbers = torch.as_tensor(declared).cpu().long()
    ids = facts.tokens.ids
    if numbers.ndim != 2 or numbers.shape[0] != ids.shape[0] or numbers.shape[1] < ids.shape[1]:
        raise Unknown(f"documents are declared as {list(numbers.shape)}, and tokens are {list(ids.shape)}")
    return numbers[:, : ids.shape[1]]
