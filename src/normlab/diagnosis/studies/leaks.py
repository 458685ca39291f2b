"""Find whether later tokens, or padding, change what a model says of tokens that must not see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from normlab.diagnosis.reading.batches import (
    MASKS,
    at,
    decoded,
    integers,
    lengths,
    named,
    others,
    replaced,
    tokens,
)
from normlab.diagnosis.reading.calls import ModuleCall, calls, first_change
from normlab.diagnosis.reading.subject import Subject, undisturbed
from normlab.diagnosis.reading.taps import Place, call_model, leaves
from normlab.diagnosis.rules.finding import Finding, Tables, number
from normlab.diagnosis.study import SMALL_BATCH, Study
from normlab.diagnosis.table import Row, Table

VISIBLE: Final = 100.0
"""Change of an output, in last digits of its largest entry, that rounding does not make."""
CROPPED: Final = 1e4
"""The same, where other shapes add numbers up in another order."""
KEPT: Final = 0.75
"""Share of the positions before the first that is changed."""
MASKED: Final = 0.5
"""Share of the counted positions that read one token, with others behind it, from which this is a mask."""
FEW: Final = 0.5
"""Share of targets that are the token read, or the next one, below which the loss is for neither."""
SHIFTED: Final = 0.9
"""Share of the labels that have to be the next tokens for the model to be one of next tokens."""


def leaks(subject: Subject) -> Table:
    """Change the last quarter of the tokens, and compare what every module puts out at the positions before;
    the same for the tokens behind a padding mask, and for those of another row. Where tokens are padding and
    no mask says so, the shortest row alone is compared with itself without its padding.

    ``kind`` is ``causal``, ``padding`` or ``rows``, or ``random`` for the same tokens twice; ``change`` is
    the largest change of the model's output at positions that may not see those that were changed, in last
    digits of its largest entry; ``module`` is the innermost module whose output changes there while its input
    does not, empty where none does. ``forbidden`` is 1 where the change is an error: always for padding and
    for other rows, and for later tokens where the model predicts them, because a decoder reads them, or
    because the labels are the next tokens. A model that is random in evaluation is not tested further.
    """
    found = tokens(subject.batch)
    if not found:
        return Table("leaks", ())
    first, decoder = next(iter(found)), decoded(subject.batch)
    rows = list(_later(subject, decoder or first, forbidden=decoder is not None or _predicted(subject)))
    if rows and rows[-1]["kind"] != "random":
        rows += _padding(subject, first)
    return Table("leaks", tuple(rows))


def _predicted(subject: Subject) -> bool:
    """Whether labels are the next tokens. They say nothing of tokens that are encoded for a decoder."""
    read, *others = tokens(subject.batch).values()
    crossed = any(view.role == "cross_attention" for _, view in subject.structure.sublayers)
    return not crossed and any(_next(read, labels) for labels in others)


def _later(subject: Subject, place: Place, *, forbidden: bool) -> Iterator[Row]:
    """Change the last tokens, all tokens of the first row, and nothing."""
    batch, read = subject.batch, at(subject.batch, place)
    kept = int(KEPT * read.shape[1])
    changed = others(read, kept)
    if kept < 1 or torch.equal(changed, read):
        return
    before = _outputs(subject, batch, _before(kept))
    if len(read) > 1:
        yield _between_rows(subject, place)
    module, change = first_change(before, _outputs(subject, batch, _before(kept), seed=1), VISIBLE)
    yield _row("random", module, change, forbidden=True, tokens=read, kept=kept)
    if change <= VISIBLE:
        after = _outputs(subject, replaced(batch, place, changed), _before(kept))
        found = first_change(before, after, VISIBLE)
        yield _row("causal", *found, forbidden=forbidden, tokens=read, kept=kept)


def _between_rows(subject: Subject, place: Place) -> Row:
    """Change all tokens of the first row, which a causal mask shows to the others, and compare these."""
    read = at(subject.batch, place)
    changed = torch.cat([others(read, 0)[:1], read[1:]])

    def keep(x: Tensor) -> Tensor | None:
        return x.detach()[1:].clone() if x.ndim > 2 and len(x) == len(read) else None

    before = _outputs(subject, subject.batch, keep)
    after = _outputs(subject, replaced(subject.batch, place, changed), keep)
    module, change = first_change(before, after, VISIBLE)
    return _row("rows", module, change, forbidden=True, tokens=read, kept=0)


def _padding(subject: Subject, place: Place) -> Iterator[Row]:
    """Change what a mask closes or, without a mask, leave out what is padding."""
    batch, read = subject.batch, at(subject.batch, place)
    masks = [p for p, x in integers(batch).items() if named(p, MASKS) and x.shape == read.shape]
    if masks:
        kept, limit = int(KEPT * read.shape[1]), VISIBLE
        batch = _masked(batch, kept)
        other = replaced(batch, place, others(read, kept))
    else:
        padding, sizes = lengths(read)
        kept, row = (int(x) for x in sizes.min(0))
        if padding is None or kept < 1:
            return
        batch, limit = _row_of(batch, row, len(read)), CROPPED
        other = _cropped(batch, kept, read.shape[1])
    module, change = first_change(
        _outputs(subject, batch, _before(kept)), _outputs(subject, other, _before(kept)), limit
    )
    yield _row("padding", module, change, forbidden=change > limit, tokens=read, kept=kept)


def _row(kind: str, module: str, change: float, *, forbidden: bool, tokens: Tensor, kept: int) -> Row:
    return {
        "kind": kind,
        "module": module,
        "change": change,
        "forbidden": int(forbidden),
        "positions": tokens.shape[1],
        "changed_from": kept,
    }


def _next(tokens: Tensor, labels: Tensor) -> bool:
    """Whether the labels are the tokens, which a causal model shifts by itself, or the tokens after them."""
    if tokens.shape != labels.shape or not (labels >= 0).any():
        return False
    counted = labels >= 0
    same = (labels == tokens) & counted
    after = (labels[:, :-1] == tokens[:, 1:]) & counted[:, :-1]
    shares = same.sum() / counted.sum(), after.sum() / counted[:, :-1].sum().clamp(min=1)
    return any(float(share) >= SHIFTED for share in shares) and float(counted.float().mean()) > 0.5


def _masked(batch: Any, kept: int) -> Any:
    """The batch with its mask closed from a position on."""
    for place, x in integers(batch).items():
        if named(place, MASKS):
            mask = x.clone()
            mask[:, kept:] = 0
            batch = replaced(batch, place, mask)
    return batch


def _row_of(batch: Any, row: int, rows: int) -> Any:
    """The batch with one of its rows alone."""
    for place, x in leaves(batch):
        if x.ndim and len(x) == rows:
            batch = replaced(batch, place, x[row : row + 1])
    return batch


def _cropped(batch: Any, kept: int, length: int) -> Any:
    """The batch with its first positions alone, where there are as many as of the tokens."""
    for place, x in integers(batch).items():
        if x.shape[1] == length:
            batch = replaced(batch, place, x[:, :kept])
    return batch


def _before(kept: int) -> Callable[[Tensor], Tensor | None]:
    """Keep the positions before one."""
    return lambda x: x.detach()[:, :kept].clone() if x.ndim > 2 and x.shape[1] >= kept else None


def _outputs(
    subject: Subject, batch: Any, keep: Callable[[Tensor], Tensor | None], *, seed: int = 0
) -> list[ModuleCall]:
    """The calls of every module with the part that is kept of what they read and put out."""
    with torch.no_grad(), undisturbed(subject.model), calls(subject.model, keep) as seen:
        torch.manual_seed(seed)
        call_model(subject.model, batch)
    return seen


SAID: Final[Mapping[str, Callable[[str], tuple[str, str]]]] = {
    "causal": lambda module: (
        f"{module} leaks the future: later tokens change its output for earlier ones",
        "mask the scores of later keys with minus infinity before the softmax, or pass is_causal=True",
    ),
    "random": lambda module: (
        f"{module} gives different outputs for the same input in evaluation mode",
        "pass training=self.training to F.dropout",
    ),
    "rows": lambda module: (
        f"{module} mixes sentences: one sentence changes its output for the others in the batch",
        "look at the order of the axes: attention belongs over the tokens, as with batch_first=True",
    ),
    "padding": lambda module: (
        f"{module} reads padding: tokens behind the padding mask change its output for the others",
        "mask the scores of padding with minus infinity before the softmax",
    ),
}


def leak(tables: Tables) -> Iterator[Finding]:
    """Name the module in which positions see what they must not."""
    asked = any(_asks_for_the_next(row) for row in tables.table("targets"))
    for row in tables.table("leaks"):
        forbidden = row["forbidden"] or (asked and row["kind"] == "causal")
        if forbidden and float(row["change"] or 0) > VISIBLE:
            module, kind = str(row["module"]), str(row["kind"])
            sentence, do = SAID[kind](module or "the model")
            yield Finding(
                "random" if kind == "random" else f"{kind}_leak",
                "problem",
                sentence,
                "leaks",
                {"change": row["change"], "changed_from": row["changed_from"]},
                module=module,
                do=do,
            )


def one_sided(tables: Tables) -> Iterator[Finding]:
    """Say that a model is causal whose loss asks for masked words."""
    asked = any(
        (number(row["masked"]) or 0.0) > MASKED
        and all((number(row[f"offset_{k}"]) or 0.0) < FEW for k in (0, 1))
        for row in tables.table("targets")
    )
    for row in tables.table("leaks").where(kind="causal"):
        if asked and row["change"] == 0.0:  # a mask shuts exactly; what is small is not 0
            yield Finding(
                "one_sided",
                "problem",
                "the loss asks for masked words, and the model is causal: later words change nothing at "
                "earlier positions, so that a masked word is predicted from those before it alone",
                "leaks",
                {"change": row["change"], "changed_from": row["changed_from"]},
                do="let attention see both sides: no causal mask, and is_decoder=False in a configuration of "
                "Hugging Face",
            )


def _asks_for_the_next(row: Row) -> bool:
    """Whether the loss asks most positions for the token after the one that they read."""
    share, counted, all_ = (number(row[name]) or 0.0 for name in ("offset_1", "counted", "positions"))
    return share >= SHIFTED and counted > all_ / 2


LEAKS: Final = Study(
    "leaks",
    lambda c: [leaks(c.small)],
    "preflight",
    rules=(leak, one_sided),
    batch=SMALL_BATCH,
    order=-47,
)
