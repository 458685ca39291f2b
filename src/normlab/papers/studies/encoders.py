"""Gradients through a Post-LN encoder, in a model and alone (Liu et al. 2020, Theorem 1)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import cast

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.diagnosis.reading.structure import read_structure
from normlab.diagnosis.studies.gradients import sublayer_gradients
from normlab.diagnosis.subject import Subject
from normlab.diagnosis.tables import Table
from normlab.nn import PAD, Context, Seq2Seq
from normlab.papers.artefact import Measurement
from normlab.papers.claim import Measure
from normlab.papers.intervals import exponential, simultaneous
from normlab.papers.lab import READING_TOKENS, Lab, Row, apart, curves, size, train_only
from normlab.training.subjects import TaskInputs


class Alone(nn.Module):
    """The encoder of an encoder-decoder by itself, with logits of every token's own type."""

    def __init__(self, model: Seq2Seq) -> None:
        super().__init__()
        self.embedding, self.encoder = model.embedding, model.encoder
        self.position_encoding = model.position_encoding

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        x = self.position_encoding(self.embedding(source), None)
        return self.embedding.logits(self.encoder(x, Context(padding_mask=source != PAD)))


def _token_loss(model: nn.Module, inputs: TaskInputs) -> Tensor:
    """The mean over tokens of the negative log-likelihood of the next token."""
    labels = inputs["source"].roll(-1, 1)
    return F.cross_entropy(model(**inputs).flatten(0, 1), labels.flatten(), ignore_index=PAD)


def _pooled_loss(model: nn.Module, inputs: TaskInputs) -> Tensor:
    """The cross-entropy of one label a sentence, its first token, under the mean of its logits."""
    is_real = (inputs["source"] != PAD)[..., None]
    pooled = (model(**inputs) * is_real).sum(1) / is_real.sum(1)
    return F.cross_entropy(pooled, inputs["source"][:, 0])


def encoder_gradients(
    lab: Lab, *, text: str, model: str, layers: int, tokens: int, seeds: int
) -> Measurement:
    """Var[Δx_{i−1}] / Var[Δx_i] through a Post-LN encoder: its geometric means over the sublayers of a role
    and over all, in an encoder-decoder, and alone under a loss of every token or of the tokens' mean.
    """
    rows: list[Row] = []
    for seed in range(seeds):
        for where, table in _tables(lab, text=text, model=model, layers=layers, tokens=tokens, seed=seed):
            steps = pairwise(table)
            rows += [
                {"where": where, "seed": seed, "index": now["index"], "role": now["role"],
                 "variance": now["variance"],
                 "step": float(before["variance"] or 0) / float(now["variance"] or 0)}
                for before, now in steps
            ]  # fmt: skip
    measures: dict[str, Measure] = {}
    tables: dict[str, list[Row]] = {"gradients": rows, "steps": []}
    for where, own in apart(rows, "where").items():
        indices = sorted({r["index"] for r in own})
        roles = [next(r["role"] for r in own if r["index"] == i) for i in indices]
        logs = np.log(curves(own, "step", "index", indices, seeds))
        masks = {role: np.array([r == role for r in roles]) for role in dict.fromkeys(roles)}
        means = [logs[:, mask].mean(1) for mask in masks.values()] + [logs.mean(1)]
        found = simultaneous(np.stack(means, 1))
        names = (*masks, "all")
        measures |= {f"{where}_{name}": exponential(m) for name, m in zip(names, found, strict=True)}
        first_over_last = simultaneous(logs.sum(1)[:, None])[0]
        measures[f"{where}_first_over_last"] = exponential(first_over_last)
        for i, role, m in zip(indices, roles, simultaneous(logs), strict=True):
            ratio = exponential(m)
            shown = {"ratio": ratio.value, "low": ratio.low, "high": ratio.high}
            tables["steps"].append({"where": where, "index": i, "role": role, **shown})
    return Measurement(measures, tables, lab.facts(text, tokens, seeds))


def _tables(
    lab: Lab, *, text: str, model: str, layers: int, tokens: int, seed: int
) -> Iterator[tuple[str, Table]]:
    """The gradients of the encoder's sublayers, in each of the three places."""
    whole = lab.subject(size(model, "post", layers), text, seed=seed, tokens=tokens)
    encoder = whole.structure.stacks[0].name
    train_only(whole.model)
    yield "in_model", sublayer_gradients(whole).where(stack=encoder)
    alone = Alone(cast("Seq2Seq", whole.model))
    (stack,) = (structure := read_structure(alone, lab.batches(text, READING_TOKENS, 1)[0])).stacks
    mask = {stack.name: whole.batch["source"] != PAD}
    for where, loss in (("alone_token_loss", _token_loss), ("alone_pooled_loss", _pooled_loss)):
        yield where, sublayer_gradients(Subject(alone, whole.batch, loss, structure, mask))
