"""Read from the gradient of a loss which token each position is to predict, and with which weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from normlab.diagnosis.reading.batches import at, decoded, lengths, tokens
from normlab.diagnosis.reading.lookups import attended
from normlab.diagnosis.reading.subject import Subject, undisturbed
from normlab.diagnosis.reading.taps import Side, activations, watching
from normlab.diagnosis.rules.finding import Finding, Tables, number, percent, said
from normlab.diagnosis.study import SMALL_BATCH, Study
from normlab.diagnosis.table import Row, Table

LEAST_CLASSES: Final = 8
"""Width of the output below which it need not be one of tokens."""
OFFSETS: Final = range(-1, 4)
"""Distances from the token that a position reads to the one that it predicts; 1 is the next token."""
NEARLY_ALL: Final = 0.9
"""Share of the counted positions whose targets must be at a distance for it to be the one that is meant."""
ASKED: Final = {
    -1: "the token before the one that they read",
    0: "the very token that they read",
    2: "the token after the next one",
    3: "the third token from them",
}
COPIED: Final = 0.5
"""Share of the targets that are the token that is read from which a loss is for copying, also where words are
masked.
"""
LEAST_COUNTED: Final = 16
"""Number of counted positions below which such a share may be chance."""
BALANCED: Final = 1e-3
"""Sum of the gradients at the logits of a token, relative to that of their magnitudes, below which a loss may
be a cross-entropy, whose gradients sum to 0.
"""
SOME: Final = 256
"""Number of positions that are enough to read the weight of their targets."""
FEW: Final = 0.5
"""Share at the distance 1 above which the next token is predicted all the same."""
HEAVY: Final = 1.5
"""Sum of the weights of all positions, which is 1 for a mean, above which the loss is not a mean."""
LEAST_CONFIDENCE: Final = 0.5
"""Probability that a loss asks for its target, below which the other entries together count for more."""
LINEAR: Final = 0.999
"""Share of the variance of the gradients that probabilities explain where the loss is a cross-entropy."""


def targets(subject: Subject) -> Table:
    r"""Take the gradient of the loss at the logits z `[B, T, V]`. That of a cross-entropy with the weight w
    and the target y is :math:`w(\mathrm{softmax}(z) - e_y)`: negative at y alone.

    ``counted`` is the number of positions with a gradient, of ``positions``; ``offset_k`` the share of these
    whose target is the token at k positions after the one that is read; ``padding`` the share whose own token
    and whose target are both padding; ``weight`` the sum of w, which is 1 for a mean.

    With label smoothing the target is a distribution q `[V]` (Szegedy et al. 2016, Section 7, arXiv
    1512.00567), the gradient :math:`w(\mathrm{softmax}(z) - q)`, and q is the same for all entries but y, so
    that w is the slope of their gradients by their probabilities: ``confidence`` is the mean of :math:`q_y`,
    None where the gradients are not linear in them. ``alone`` is the share of the counted positions whose
    gradient is negative at one logit and 0 at all others, as where a loss takes logits for log-probabilities.

    ``masked`` is the share of the counted positions that read the most common token of these and have another
    one behind them; ``ends`` how often the ``eos_token_id`` of the model's configuration is a target, None
    where none stands behind the first counted position of its row, padding left out.
    """
    read = at(subject.batch, place) if (place := _place(subject)) is not None else None
    found = None if read is None else _gradient(subject, read)
    if read is None or found is None or found[0].shape[:2] != read.shape:
        return Table("targets", ())
    logits, gradient = found
    target, counted = gradient.argmin(-1), (gradient != 0).any(-1)
    if not counted.any():
        return Table("targets", ())
    likely = logits.softmax(-1).gather(-1, target[..., None])[..., 0]
    weight = -gradient.gather(-1, target[..., None])[..., 0] / (1 - likely).clamp(min=1e-6)
    row: Row = {
        "positions": read.numel(),
        "counted": int(counted.sum()),
        **{f"offset_{k}": _share(read, target, counted, k) for k in OFFSETS},
        "padding": _padded(read, target, counted),
        "weight": weight[counted].sum().item(),
        "confidence": _confidence(logits[counted], gradient[counted]),
        "alone": _alone(gradient[counted]),
        "masked": _masked(read, counted),
        "ends": _ends(subject, read, target, counted),
    }
    return Table("targets", (row,))


def _alone(gradient: Tensor) -> float:
    """The share of the positions with a gradient at one logit alone, and that a negative one."""
    single = ((gradient != 0).sum(-1) == 1) & (gradient.amin(-1) < 0)
    return single.double().mean().item()


def _confidence(logits: Tensor, gradient: Tensor) -> float | None:
    """The mean probability that a cross-entropy asks for its target, by logits and gradients `[N, V]`."""
    logits, gradient = logits[:SOME], gradient[:SOME]
    if bool(gradient.sum(-1).abs().sum() > BALANCED * gradient.abs().sum()):
        return None
    target = gradient.argmin(-1, keepdim=True)
    p = logits.softmax(-1)
    others = torch.ones_like(p).scatter_(-1, target, 0.0)
    x, g = ((v - (v * others).sum(-1, keepdim=True) / (p.shape[-1] - 1)) * others for v in (p, gradient))
    xx, xg, gg = ((a * b).sum(-1) for a, b in ((x, x), (x, g), (g, g)))
    known = (xx > 0) & (gg > 0) & (xg.square() > LINEAR * xx * gg) & (xg > 0)
    if not bool(known.all()):
        return None
    asked = p - gradient / (xg / xx)[:, None]
    return asked.gather(-1, target).mean().item()


def _masked(read: Tensor, counted: Tensor) -> float:
    """The share of the counted positions that read the most common token of these, with others behind it."""
    ids, counts = read[counted].unique(return_counts=True)
    mask = read == ids[counts.argmax()]
    behind = (~mask).flip(1).cummax(1).values.flip(1)
    return ((mask & behind & counted).sum() / counted.sum()).item()


def _ends(subject: Subject, read: Tensor, target: Tensor, counted: Tensor) -> int | None:
    end = getattr(getattr(subject.model, "config", None), "eos_token_id", None)
    if not isinstance(end, int) or (mask := attended(subject.batch, read)) is None:
        return None
    begun = counted.cummax(1).values
    if not bool(((read == end) & mask & begun).any()):
        return None
    return int(((target == end) & counted).sum())


def _place(subject: Subject) -> tuple[int | str, ...] | None:
    """The place of the tokens that the positions of the output read; None where a decoder may read others."""
    crossed = any(view.role == "cross_attention" for _, view in subject.structure.sublayers)
    return decoded(subject.batch) or (None if crossed else next(iter(tokens(subject.batch)), None))


def _gradient(subject: Subject, read: Tensor) -> tuple[Tensor, Tensor] | None:
    """The logits `[B, T, V]` that the model puts out, and the gradient of the loss at them; those of the last
    module that puts out some for the tokens read, where the model itself puts out its loss alone.
    """
    seen: list[Tensor] = []
    inside: list[Tensor] = []
    most = int(read.max())

    def see(path: str, side: Side, values: object) -> None:
        for _, x in activations(values) if side == "output" else ():
            if x.ndim == 3 and x.shape[-1] >= LEAST_CLASSES:
                if not path:
                    seen.append(x)
                elif x.shape[:2] == read.shape and x.shape[-1] > most:
                    inside[:] = [x]

    modules = dict(subject.model.named_modules())
    with torch.enable_grad(), undisturbed(subject.model), watching(modules, see):
        loss = subject.loss_of(subject.model, subject.batch)
    seen = seen or inside
    if len(seen) != 1 or not loss.requires_grad or not seen[0].requires_grad:
        return None
    (gradient,) = torch.autograd.grad(loss, seen, allow_unused=True)
    if gradient is None or gradient.dtype == torch.float16:  # in which softmax(z)/N is 0
        return None
    return seen[0].detach().double(), gradient.double()


def _share(read: Tensor, target: Tensor, counted: Tensor, offset: int) -> float | None:
    """The share of the counted positions whose target is the token at a distance, of those that have one."""
    length = read.shape[1]
    here = slice(max(0, -offset), min(length, length - offset))
    there = slice(max(0, offset), min(length, length + offset))
    known = counted[:, here]
    same = (target[:, here] == read[:, there]) & known
    return (same.sum() / known.sum()).item() if known.any() else None


def _padded(read: Tensor, target: Tensor, counted: Tensor) -> float:
    padding, _ = lengths(read)
    inside = (read == padding) & (target == padding) if padding is not None else torch.zeros_like(counted)
    return ((inside & counted).sum() / counted.sum()).item()


def shifted(tables: Tables) -> Iterator[Finding]:
    """Say that the loss asks for another token than the next one."""
    for row in tables.table("targets"):
        shares = {k: number(row[f"offset_{k}"]) or 0.0 for k in OFFSETS}
        offset, share = max(shares.items(), key=lambda one: one[1])
        copied = offset == 0 and share >= COPIED and (number(row["counted"]) or 0) >= LEAST_COUNTED
        if (share < NEARLY_ALL and not copied) or shares[1] > FEW:
            continue
        more = ", which it needs only to copy" if offset == 0 else ", and not for the next token"
        yield Finding(
            "shifted_labels",
            "problem" if share >= NEARLY_ALL else "warning",
            f"the loss asks {percent(share)} of the {row['counted']:,} positions that it counts for "
            f"{ASKED[offset]}{more}",
            "targets",
            {"offset": offset, "share": share, "counted": row["counted"]},
            do="shift the labels by one position, once: in the batch, in the model or in the loss"
            + "; with masked words, let the loss ignore those that are not masked" * (offset == 0),
        )


def padding_counted(tables: Tables) -> Iterator[Finding]:
    """Say that the loss counts padding."""
    for row in tables.table("targets"):
        if share := number(row["padding"]):
            yield Finding(
                "padding_in_the_loss",
                "warning",
                f"{percent(share)} of the {row['counted']:,} positions that the loss counts are padding, "
                "whose target is padding again",
                "targets",
                {"padding": share, "counted": row["counted"]},
                do="give these positions the label that the loss ignores, as in cross_entropy(…, "
                "ignore_index=padding)",
            )


def summed(tables: Tables) -> Iterator[Finding]:
    """Say that the loss is a sum over positions, or several times their mean."""
    for row in tables.table("targets"):
        weight = number(row["weight"]) or 0.0
        if weight > HEAVY:
            yield Finding(
                "summed_loss",
                "warning",
                f"the loss is {said(weight)} times the mean over the {row['counted']:,} positions that it "
                "counts, so that gradients and clipping depend on the size of the batch",
                "targets",
                {"weight": weight, "counted": row["counted"]},
                do="take the mean over the predicted tokens",
                explains=("initial_loss", "clipped_step"),
            )


def unnormalised(tables: Tables) -> Iterator[Finding]:
    """Say that the loss takes logits for log-probabilities."""
    for row in tables.table("targets"):
        if (alone := number(row["alone"]) or 0.0) > NEARLY_ALL:
            yield Finding(
                "unnormalised_loss",
                "problem",
                "the loss takes logits for log-probabilities: it raises the logit of the target and, unlike "
                "that of a softmax, lowers no other, so that it falls without end while logits grow",
                "targets",
                {"alone": alone},
                do="use cross_entropy, or give nll_loss log_softmax of the logits",
                explains=("initial_loss", "smoothed_targets", "summed_loss"),
            )


def smoothed(tables: Tables) -> Iterator[Finding]:
    """Say that the loss gives its targets less weight than all other entries together."""
    for row in tables.table("targets"):
        confidence = number(row["confidence"])
        if confidence is not None and confidence < LEAST_CONFIDENCE:
            yield Finding(
                "smoothed_targets",
                "problem",
                f"the loss asks for its target with a probability of {percent(confidence)}, and spreads the "
                f"rest over the other entries: a label smoothing of about {1 - confidence:.1f}",
                "targets",
                {"confidence": confidence},
                "Szegedy et al. 2016, Section 7 (arXiv 1512.00567)",
                do="a label smoothing of 0.1 is usual",
                explains=("initial_loss",),
            )


def no_end(tables: Tables) -> Iterator[Finding]:
    """Say that a model of next tokens is never asked for the end of a text."""
    for row in tables.table("targets"):
        if row["ends"] == 0 and (number(row["offset_1"]) or 0.0) >= NEARLY_ALL:
            yield Finding(
                "no_end",
                "warning",
                "the mask keeps the token that ends a text, eos_token_id, and the loss asks no position for "
                "it: the model never learns to end",
                "targets",
                {"ends": 0, "counted": row["counted"]},
                do="where padding is the same token, as with pad_token = eos_token, ignore padding by the "
                "mask, and not by the token",
            )


TARGETS: Final = Study(
    "targets",
    lambda c: [targets(c.small)],
    "preflight",
    rules=(unnormalised, smoothed, shifted, summed, padding_counted, no_end),
    batch=SMALL_BATCH,
    order=-48,
)
