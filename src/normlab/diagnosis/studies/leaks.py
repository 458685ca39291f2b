"""Find whether later tokens, or padding, change what a model says of tokens that must not see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from normlab.diagnosis.reading.calls import ModuleCall, calls
from normlab.diagnosis.reading.subject import Subject, undisturbed
from normlab.diagnosis.reading.taps import Place, call_model, leaves
from normlab.diagnosis.rules.finding import Finding, Tables
from normlab.diagnosis.study import Study
from normlab.diagnosis.table import Row, Table

VISIBLE: Final = 100.0
"""Change of an output, in last digits of its largest entry, that rounding does not make."""
KEPT: Final = 0.75
"""Share of the positions before the first that is changed."""
SHIFTED: Final = 0.9
"""Share of the labels that have to be the next tokens for the model to be one of next tokens."""
DECODER_INPUTS: Final = ("decoder_input_ids", "target_in", "tgt")
"""Names of the tokens that a decoder reads, which it predicts one after the other."""
MASKS: Final = ("attention_mask", "source_mask", "src_mask")
"""Names of masks that are 1 where there is a token, and 0 where there is padding."""


def leaks(subject: Subject) -> Table:
    """Change the last quarter of the tokens, and compare what every module puts out at the positions before;
    the same for the tokens behind a padding mask, and for those of another row.

    ``kind`` is ``causal``, ``padding`` or ``rows``, or ``random`` for the same tokens twice; ``change`` is
    the largest change of the model's output at positions that may not see those that were changed, in last
    digits of its largest entry; ``module`` is the innermost module whose output changes there while its input
    does not, empty where none does. ``forbidden`` is 1 where the change is an error: always for padding and
    for other rows, and for later tokens where the model predicts them, because a decoder reads them, or
    because the labels are the next tokens. A model that is random in evaluation is not tested further.
    """
    rows: list[Row] = []
    crossed = any(view.role == "cross_attention" for _, view in subject.structure.sublayers)
    for kind, place, forbidden in _tests(subject.batch, encoded=crossed):
        tokens = _at(subject.batch, place)
        kept = int(KEPT * tokens.shape[1])
        changed = _changed(tokens, kept)
        if kept < 1 or torch.equal(changed, tokens):
            continue
        batch = subject.batch
        if kind == "padding":
            batch = _masked(batch, kept)
        given, other = _with(batch, place, tokens), _with(batch, place, changed)
        before, after = _outputs(subject, given, _before(kept)), _outputs(subject, other, _before(kept))
        if kind == "causal" and len(tokens) > 1:
            rows.append(_between_rows(subject, given, place))
        module, change = _first(before, after)
        if kind == "causal":  # the same tokens twice
            twice = _first(before, _outputs(subject, given, _before(kept), seed=1))
            rows.append(_row("random", *twice, forbidden=True, tokens=tokens, kept=kept))
            if twice[1] > VISIBLE:
                break
        rows.append(_row(kind, module, change, forbidden=forbidden, tokens=tokens, kept=kept))
    return Table("leaks", tuple(rows))


def _between_rows(subject: Subject, batch: Any, place: Place) -> Row:
    """Change all tokens of the first row, which a causal mask shows to the others, and compare these."""
    tokens = _at(batch, place)
    changed = torch.cat([_changed(tokens, 0)[:1], tokens[1:]])

    def keep(x: Tensor) -> Tensor | None:
        return x.detach()[1:].clone() if x.ndim > 2 and len(x) == len(tokens) else None

    seen = (_outputs(subject, one, keep) for one in (batch, _with(batch, place, changed)))
    module, change = _first(*seen)
    return _row("rows", module, change, forbidden=True, tokens=tokens, kept=0)


def _row(kind: str, module: str, change: float, *, forbidden: bool, tokens: Tensor, kept: int) -> Row:
    return {
        "kind": kind,
        "module": module,
        "change": change,
        "forbidden": int(forbidden),
        "positions": tokens.shape[1],
        "changed_from": kept,
    }


def _tests(batch: Any, *, encoded: bool) -> Iterator[tuple[str, Place, bool]]:
    """Yield what can be tested on a batch: the kind, the place of the tokens, and whether a change is an
    error. Labels say nothing of tokens that are ``encoded`` for a decoder.
    """
    found = {place: x for place, x in leaves(batch) if not x.is_floating_point() and x.dtype != torch.bool}
    tokens = {p: x for p, x in found.items() if x.ndim == 2 and x.shape[1] >= 4 and not _is(p, MASKS)}
    if not tokens:
        return
    decoder = next((p for p in tokens if _is(p, DECODER_INPUTS)), None)
    first = next((p for p in tokens if _is(p, ("input_ids",))), next(iter(tokens)))
    place = decoder or first
    labels = [x for p, x in tokens.items() if p != place]
    predicted = not encoded and any(_next(tokens[place], x) for x in labels)
    yield "causal", place, bool(decoder) or predicted
    if any(_is(p, MASKS) and x.shape == tokens[first].shape for p, x in found.items()):
        yield "padding", first, True


def _is(place: Place, names: tuple[str, ...]) -> bool:
    return bool(place) and place[-1] in names


def _next(tokens: Tensor, labels: Tensor) -> bool:
    """Whether the labels are the tokens, which a causal model shifts by itself, or the tokens after them."""
    if tokens.shape != labels.shape or not (labels >= 0).any():
        return False
    counted = labels >= 0
    same = (labels == tokens) & counted
    after = (labels[:, :-1] == tokens[:, 1:]) & counted[:, :-1]
    shares = same.sum() / counted.sum(), after.sum() / counted[:, :-1].sum().clamp(min=1)
    return any(float(share) >= SHIFTED for share in shares) and float(counted.float().mean()) > 0.5


def _changed(tokens: Tensor, kept: int) -> Tensor:
    """The tokens with others from the batch, in reverse, from a position on."""
    changed = tokens.clone()
    pool = tokens[tokens >= 0].unique()
    if len(pool) > 1:
        index = torch.searchsorted(pool, tokens[:, kept:].clamp(min=int(pool[0])))
        changed[:, kept:] = pool[(index + 1) % len(pool)]
    return changed


def _masked(batch: Any, kept: int) -> Any:
    """The batch with its mask closed from a position on."""
    for place, x in leaves(batch):
        if _is(place, MASKS):
            mask = x.clone()
            mask[:, kept:] = 0
            batch = _with(batch, place, mask)
    return batch


def _at(values: Any, place: Place) -> Any:
    for key in place:
        values = values[key]
    return values


def _with(values: Any, place: Place, tensor: Tensor) -> Any:
    """Nested tuples, lists and mappings with another tensor at a place."""
    if not place:
        return tensor
    key, *rest = place
    inner = _with(values[key], tuple(rest), tensor)
    if isinstance(values, Mapping):
        return {**values, key: inner}
    items = [inner if i == key else item for i, item in enumerate(values)]
    return items if isinstance(values, list) else tuple(items)


def _before(kept: int) -> Callable[[Tensor], Tensor | None]:
    """Keep the positions before one."""
    return lambda x: x.detach()[:, :kept].clone() if x.ndim > 2 and x.shape[1] > kept else None


def _outputs(
    subject: Subject, batch: Any, keep: Callable[[Tensor], Tensor | None], *, seed: int = 0
) -> list[ModuleCall]:
    """The calls of every module with the part that is kept of what they read and put out."""
    with torch.no_grad(), undisturbed(subject.model), calls(subject.model, keep) as seen:
        torch.manual_seed(seed)
        call_model(subject.model, batch)
    return seen


def _first(before: list[ModuleCall], after: list[ModuleCall]) -> tuple[str, float]:
    """The innermost module whose output changes while its input does not, and the last output's change."""
    place, last = "", 0.0
    for one, other in zip(before, after, strict=True):
        read, written = _most(one.given, other.given), _most(one.output, other.output)
        if written > VISIBLE >= read and not place:
            place = one.path
        last = written
    return place, last


def _most(one: tuple[Any, ...], other: tuple[Any, ...]) -> float:
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return max((_change(a, b) for a, b in pairs if a.shape == b.shape), default=0.0)


def _change(a: Tensor, b: Tensor) -> float:
    """The largest change, in last digits of the largest entry."""
    digit = a.abs().max().item() * torch.finfo(a.dtype).eps
    return (a - b).abs().max().item() / digit if digit else 0.0


SAID: Final[Mapping[str, Callable[[str], tuple[str, str]]]] = {
    "causal": lambda module: (
        f"later tokens change what {module} says of earlier ones, and the model is to predict them",
        "mask the scores of later keys with minus infinity before the softmax, or pass is_causal=True",
    ),
    "random": lambda module: (
        f"{module} puts out other numbers each time, in evaluation and for the same input",
        "dropout as a function is to get training=self.training",
    ),
    "rows": lambda module: (
        f"a sentence changes what {module} says of the other sentences in the batch",
        "look at the order of the axes: attention belongs over the tokens, as with batch_first=True",
    ),
    "padding": lambda module: (
        f"tokens behind the padding mask change what {module} says of the others",
        "mask the scores of padding with minus infinity before the softmax",
    ),
}


def leak(tables: Tables) -> Iterator[Finding]:
    """Name the module in which positions see what they must not."""
    for row in tables.table("leaks"):
        if row["forbidden"] and float(row["change"] or 0) > VISIBLE:
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


LEAKS: Final = Study(
    "leaks",
    lambda c: [leaks(c.small)],
    "preflight",
    rules=(leak,),
    batch="the first mini-batch, or about 256 tokens of the batch",
    order=-47,
)
