"""Compare the loss at the start with that of guessing, and find settings that no training survives."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from normlab.diagnosis.reading.subject import Subject, undisturbed
from normlab.diagnosis.reading.taps import activations, call_model, watching
from normlab.diagnosis.rules.finding import Finding, Tables, number, percent, said
from normlab.diagnosis.study import Study
from normlab.diagnosis.table import Row, Table

ABOVE: Final = 1.5
"""Nats above guessing that no usual initialisation costs: logits of deviation σ cost about σ²/2."""
FAR_ABOVE: Final = 4.0
"""Nats above guessing that cost a training its beginning."""
LEAST_CLASSES: Final = 8
"""Width of the output below which it need not be one of classes."""
LARGE_STREAM: Final = 3.0
"""Root mean square of what the last map reads, above which its input is large, and not its weights."""
CUT: Final = 0.1
"""Share of logits that are exactly 0, where none is negative, which no linear map puts out."""
HIGH_DROPOUT: Final = 0.6
DROPOUT: Final = re.compile(
    r"_?((attn|attention|resid|residual|hidden|embd|embedding|activation|ffn)_?)?"
    r"(dropout|drop_path|drop|p_drop|p_dropout)(_p|_prob|_rate)?"
)
"""Names of attributes that are the probability of a dropout."""


def start(subject: Subject) -> tuple[Table, Table]:
    r"""Measure the loss before any step: as it is in evaluation (``loss``) and with dropout (``loss_train``),
    :math:`\ln V` for the width V of the output (``guessing``), the deviation of the logits and their range,
    the share of them that are 0 where none is negative (``cut``), the root mean square of what the last map
    reads (``input_rms``) and the map's path (``head``); and tabulate as ``dropouts`` every probability of
    dropout, with the module and the name of the attribute.
    """
    seen: list[tuple[str, float, int]] = []

    def see(path: str, side: str, values: Any) -> None:
        for _, x in activations(values):
            if side == "input":
                entered[path] = x.detach().float().square().mean().sqrt().item()
            elif path in entered:
                seen.append((path, entered[path], x.shape[-1]))
            return

    entered: dict[str, float] = {}
    model = subject.model
    holders = {p: m for p, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None}
    with torch.no_grad(), undisturbed(model), watching(holders, see):
        output = next((x for _, x in activations(call_model(model, subject.batch)) if x.ndim > 1), None)
        loss = float(subject.loss_of(model, subject.batch))
    statistics = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.no_grad(), undisturbed(model):
        model.train()
        torch.manual_seed(0)  # dropout draws the same in every diagnosis
        dropped = float(subject.loss_of(model, subject.batch))
        for buffer, before in statistics:
            buffer.copy_(before)  # a batch norm in training counts batches
    width = output.shape[-1] if output is not None else 0
    head = next(((p, rms) for p, rms, w in reversed(seen) if w == width), (_table(model, width), None))
    row: Row = {
        "loss": loss,
        "loss_train": dropped,
        "guessing": math.log(width) if width >= LEAST_CLASSES else None,
        "probabilities": int(output is not None and width >= LEAST_CLASSES and _sums_to_one(output)),
        "logits_std": None if output is None else output.float().std().item(),
        "logits_range": None if output is None else (output.max() - output.min()).item(),
        "cut": 0.0 if output is None or bool((output < 0).any()) else (output == 0).float().mean().item(),
        "head": head[0],
        "input_rms": head[1],
        "width": width,
    }
    return Table("start", (row,)), Table("dropouts", tuple(_dropouts(model)))


def _sums_to_one(output: Tensor) -> bool:
    x = output.detach().float()
    return bool((x >= 0).all()) and bool(((x.sum(-1) - 1).abs() < 1e-3).all())


def probabilities(tables: Tables) -> Iterator[Finding]:
    """Name the map whose probabilities a loss takes for logits."""
    for row in tables.table("start"):
        loss, guessing = number(row["loss"]), number(row["guessing"])
        if row["probabilities"] and loss and guessing and abs(loss - guessing) < ABOVE:
            yield Finding(
                "probabilities",
                "problem",
                f"the model puts out probabilities, which sum to 1 and come from {row['head']}, and the loss "
                f"begins at that of guessing, {said(guessing)}: a softmax of a softmax hardly moves",
                "start",
                {"loss": loss, "guessing": guessing},
                module=str(row["head"]),
                do="let the model put out logits: cross_entropy takes the softmax itself",
            )


def _table(model: nn.Module, width: int) -> str:
    """The module that holds a matrix with a row for each class, which a function multiplies by."""
    wide = (path for path, p in model.named_parameters() if p.ndim == 2 and p.shape[0] == width)
    return next(wide, "").rpartition(".")[0]


def _dropouts(model: nn.Module) -> Iterator[Row]:
    """Yield the probabilities of dropout modules, and of modules that call dropout as a function."""
    for path, module in model.named_modules():
        named = {k: v for k, v in vars(module).items() if DROPOUT.fullmatch(k) and type(v) in (int, float)}
        if isinstance(p := getattr(module, "p", None), float) and "drop" in type(module).__name__.lower():
            named = {"p": p}
        for name, p in named.items():
            if 0 <= p <= 1:
                yield {"module": path, "attribute": name, "probability": float(p)}


def cut_logits(tables: Tables) -> Iterator[Finding]:
    """Name the map whose logits are cut off at 0 before a cross-entropy takes them."""
    asked = any(row["confidence"] is not None for row in tables.table("targets"))
    for row in tables.table("start") if asked else ():
        cut = number(row["cut"]) or 0.0
        if CUT < cut < 1 and row["guessing"] is not None:
            yield Finding(
                "cut_logits",
                "problem",
                f"{percent(cut)} of the logits of {row['head'] or 'the model'} are exactly 0 and none is "
                "negative, as behind a ReLU: those at 0 get no gradient",
                "start",
                {"cut": cut},
                module=str(row["head"]),
                do="take the activation behind the last map away",
            )


def initial_loss(tables: Tables) -> Iterator[Finding]:
    """Compare the loss at the start with that of guessing, and name what makes the logits large."""
    for row in tables.table("start"):
        loss, guessing = number(row["loss"]), number(row["guessing"])
        if loss is None or guessing is None or loss < guessing + ABOVE:
            continue
        if loss > guessing + (number(row["logits_range"]) or 0.0):
            continue  # ln V + max z - min z bounds a cross-entropy of these logits, so that this is none
        head, rms = str(row["head"]), number(row["input_rms"]) or 0.0
        large = rms > LARGE_STREAM
        yield Finding(
            "initial_loss",
            "problem" if loss > guessing + FAR_ABOVE else "warning",
            f"the initial loss is {said(loss)}, where a uniform guess over {row['width']:,} classes would "
            f"give {said(guessing)}: "
            + (
                f"{head} reads a stream of root mean square {said(rms)}"
                if large
                else f"the weights of {head} make logits of deviation {said(row['logits_std'])}"
            ),
            "start",
            {"loss": loss, "guessing": guessing, "logits_std": row["logits_std"], "input_rms": rms},
            module=head,
            do="end the stack with a norm, and look at the scale of the stream"
            if large
            else f"initialise {head} with a deviation of 1/√d or less, also where it is the embedding",
            explains=("large_update",),
        )


def dropout(tables: Tables) -> Iterator[Finding]:
    """Name modules that drop everything, or most."""
    for row in tables.table("dropouts"):
        p = number(row["probability"]) or 0.0
        if p >= HIGH_DROPOUT:
            rest = "nothing is left" if p >= 1 else f"{1 - p:.0%} are left"
            yield Finding(
                "dropout",
                "problem" if p >= 1 else "warning",
                f"{row['module']} drops {p:.0%} of its input in training: {rest}",
                "dropouts",
                {"attribute": row["attribute"], "probability": p},
                module=str(row["module"]),
                do="dropouts of 0 to 0.3 are usual",
            )


START: Final = Study(
    "start",
    lambda c: start(c.subject),
    "preflight",
    rules=(dropout, probabilities, cut_logits, initial_loss),
    order=-46,
)
