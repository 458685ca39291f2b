"""Look at the tokens that a model reads, and at the row of an embedding that is kept for padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, cast

import torch
from torch import Tensor, nn

from normlab.diagnosis.reading.batches import integers, lengths, tokens
from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.reading.taps import call_model, evaluating, watching
from normlab.diagnosis.rules.finding import Finding, Tables, number, percent
from normlab.diagnosis.study import Study
from normlab.diagnosis.table import Row, Table
from normlab.spec.units import count

COMMON: Final = 0.5
"""Share of the tokens that are read above which one of them is nearly all that a model sees."""


def inputs(subject: Subject) -> tuple[Table, Table]:
    """Tabulate as ``inputs`` the tokens that the model reads: their number without padding (``tokens``), and
    the share of the most common one (``common``, ``common_id``).

    Tabulate as ``embeddings`` each embedding with a row for padding, which gets no gradient
    (``padding_idx``): its ``rows``, how many of the tokens inside sentences read that row (``read``), and the
    token that pads sentences in its input (``padding``), None without one.
    """
    found = next(iter(tokens(subject.batch).values()), None)
    rows = () if found is None else (_commonest(found),)
    return Table("inputs", rows), Table("embeddings", tuple(_padded(subject)))


def _commonest(read: Tensor) -> Row:
    ids, counts = (inside := _inside(read)).unique(return_counts=True)
    most = counts.argmax()
    return {
        "tokens": len(inside),
        "common": (counts[most] / len(inside)).item(),
        "common_id": int(ids[most]),
    }


def _inside(read: Tensor) -> Tensor:
    """The tokens of rows `[B, T]` that are not padding at their ends."""
    _, sizes = lengths(read)
    return read[torch.arange(read.shape[1], device=read.device) < sizes[:, None]]


def _between(held: Tensor) -> int:
    """How many tokens of a mask `[B, T]` have others, which are not in it, before and behind them."""
    others = (~held).int()
    begun, ends = others.cummax(1).values, others.flip(1).cummax(1).values.flip(1)
    return int((held & (begun > 0) & (ends > 0)).sum())


def _padded(subject: Subject) -> Iterator[Row]:
    model = subject.model
    tables = {
        path: m
        for path, m in model.named_modules()
        if isinstance(m, nn.Embedding) and m.padding_idx is not None
    }
    read: dict[str, Tensor] = {}

    def see(path: str, side: str, values: object) -> None:
        for ids in integers(values).values() if side == "input" else ():
            read.setdefault(path, ids)

    if tables:
        with torch.no_grad(), evaluating(model), watching(tables, see):
            call_model(model, subject.batch)
    for path, ids in read.items():
        held = cast("int", tables[path].padding_idx)
        yield {
            "module": path,
            "rows": tables[path].num_embeddings,
            "padding_idx": held,
            "read": _between(ids.eq(held)),
            "padding": lengths(ids)[0],
            "configured": int(getattr(getattr(model, "config", None), "pad_token_id", None) == held),
        }


def one_token(tables: Tables) -> Iterator[Finding]:
    """Say that most of what the model reads is one token, such as a mask."""
    for row in tables.table("inputs"):
        share = number(row["common"]) or 0.0
        if share > COMMON:
            yield Finding(
                "one_token",
                "warning",
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
        held, padding, read = row["padding_idx"], row["padding"], number(row["read"]) or 0
        if read:
            why = f"{count(int(read), 'token')} of the batch inside sentences read it"
        elif padding is not None and padding != held:
            why = f"sentences are padded with {padding}"
        elif padding is None and held == (number(row["rows"]) or 0) - 1 and not row["configured"]:
            why = "it is the last row, which a padding_idx of -1 stands for"
        else:
            continue
        yield Finding(
            "padding_row",
            "warning",
            f"row {held} of {row['module']} is its padding_idx and is never trained, but {why}",
            "embeddings",
            {"padding_idx": held, "read": read, "padding": padding},
            module=str(row["module"]),
            do="let padding_idx be the token that pads sentences, or None",
        )


INPUTS: Final = Study(
    "inputs",
    lambda c: inputs(c.subject),
    "preflight",
    rules=(one_token, padding_row),
    order=-59,
)
