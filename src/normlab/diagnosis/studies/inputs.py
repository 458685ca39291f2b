"""Look at the words that a model reads, and at the embeddings that look them up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from normlab.diagnosis.reading.batches import at, lengths
from normlab.diagnosis.reading.lookups import Lookup, attended, lookups, word_places
from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.rules.finding import Finding, Tables, number, percent
from normlab.diagnosis.study import Study
from normlab.diagnosis.table import Row, Table
from normlab.spec.units import count

COMMON: Final = 0.5
"""Share of the words that are read above which one of them is most that a model sees."""
NEARLY_ALL: Final = 0.8
"""The share from which little is left to learn from, whatever is masked on purpose."""


def inputs(subject: Subject) -> tuple[Table, Table]:
    """Tabulate as ``inputs`` the words that the model reads: their number without padding (``tokens``), and
    the share of the most common one (``common``, ``common_id``).

    Tabulate as ``embeddings`` each embedding that looks up ids `[B, T]`: its ``rows``; whether these ids are
    the ``words`` of the batch and whether it is ``trainable``, 1 or 0; and of one with a row for padding,
    which gets no gradient (``padding_idx``), how many words inside sentences look that row up (``read``),
    whether any do (``present``), the token that pads sentences (``padding``), None without one, and whether
    the model's configuration has the same ``pad_token_id`` (``configured``).
    """
    looked_up = lookups(subject)
    places = word_places(subject, looked_up)
    rows = [] if not places else [_commonest(subject.batch, at(subject.batch, places[0]))]
    return Table("inputs", tuple(rows)), Table("embeddings", tuple(_embeddings(subject, looked_up)))


def _commonest(batch: Any, read: Tensor) -> Row:
    mask = attended(batch, read)
    if mask is None:
        mask = torch.arange(read.shape[1], device=read.device) < lengths(read)[1][:, None]
    ids, counts = read[mask].unique(return_counts=True)
    if not len(ids):
        return {"tokens": 0, "common": 0.0, "common_id": None}
    most = counts.argmax()
    total = int(counts.sum())
    return {"tokens": total, "common": int(counts[most]) / total, "common_id": int(ids[most])}


def _embeddings(subject: Subject, looked_up: Mapping[str, Lookup]) -> Iterator[Row]:
    configured = getattr(getattr(subject.model, "config", None), "pad_token_id", None)
    for path, lookup in looked_up.items():
        table = cast("nn.Embedding", subject.model.get_submodule(path))
        held = table.padding_idx
        padding, sizes = lengths(lookup.ids)
        yield {
            "module": path,
            "rows": table.num_embeddings,
            "words": int(lookup.words is not None),
            "trainable": int(table.weight.requires_grad),
            "padding_idx": held,
            "read": 0 if held is None else _between(lookup.ids.eq(held)),
            "present": 0 if held is None else int(bool(lookup.ids.eq(held).any())),
            "padding": padding if len(sizes.unique()) > 1 else None,
            "configured": int(held is not None and configured == held),
        }


def _between(held: Tensor) -> int:
    """How many tokens of a mask `[B, T]` have others, which are not in it, before and behind them."""
    others = (~held).int()
    begun, ends = others.cummax(1).values, others.flip(1).cummax(1).values.flip(1)
    return int((held & (begun > 0) & (ends > 0)).sum())


def one_token(tables: Tables) -> Iterator[Finding]:
    """Say that most of what the model reads is one token, such as a mask."""
    for row in tables.table("inputs"):
        share = number(row["common"]) or 0.0
        if share > COMMON:
            yield Finding(
                "one_token",
                "warning" if share > NEARLY_ALL else "note",
                f"{percent(share)} of the {row['tokens']:,} tokens that the model reads are the same one, id "
                f"{row['common_id']}",
                "inputs",
                {"common": share, "common_id": row["common_id"]},
                do="if it is the mask, 15% of the tokens are usual (Devlin et al. 2019, Section 3.1, arXiv "
                "1810.04805); if not, look at how the batch is made",
            )


def padding_row(tables: Tables) -> Iterator[Finding]:
    """Name an embedding whose row for padding is that of a token which is no padding."""
    for row in tables.table("embeddings"):
        held, padding, read = row["padding_idx"], row["padding"], int(number(row["read"]) or 0)
        severity = "warning"
        if held is None:
            continue
        if read:
            verb = "looks" if read == 1 else "look"
            why = f"{count(read, 'word')} inside the sentences of the batch {verb} it up"
        elif padding is not None and padding != held:
            why = f"the sentences of the batch are padded with {padding}"
        elif not row["present"] and held == (number(row["rows"]) or 0) - 1 and not row["configured"]:
            severity, why = "note", "it is the last row, which a padding_idx of -1 stands for"
        else:
            continue
        yield Finding(
            "padding_row",
            severity,
            f"row {held} of {row['module']} is its padding_idx and is never trained, but {why}",
            "embeddings",
            {"padding_idx": held, "read": read, "padding": padding},
            module=str(row["module"]),
            do="let padding_idx be the token that pads sentences, or None",
        )


def frozen_embedding(tables: Tables) -> Iterator[Finding]:
    """Name an embedding of words that is frozen where nearly all other parameters are trained."""
    table = tables.table("weights")
    frozen = [row for row in table if not row["trainable"]]
    if len(frozen) > FROZEN * len(table.rows):
        return
    for row in tables.table("embeddings").where(words=1, trainable=0):
        path = f"{row['module']}.weight"
        tied = [str(one["module"]) for one in table if one["tied"] == path or one["parameter"] == path]
        heads = [module for module in tied if module != row["module"]]
        yield Finding(
            "frozen_embedding",
            "warning" if heads else "note",
            f"{path} is frozen, and nearly all other parameters are trained"
            + (f": {heads[0]}, which is tied to it, is frozen with it" if heads else ""),
            "embeddings",
            {"frozen": len(frozen), "parameters": len(table.rows)},
            module=str(row["module"]),
            do="nn.Embedding.from_pretrained freezes it unless freeze=False is passed; requires_grad_() "
            "trains it",
        )


FROZEN: Final = 0.1
"""Share of the parameters up to which those that are frozen are exceptions."""

INPUTS: Final = Study(
    "inputs",
    lambda c: inputs(c.subject),
    "preflight",
    rules=(one_token, padding_row, frozen_embedding),
    order=-59,
)
