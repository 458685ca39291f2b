"""The facts of a step: each is read rightly, or said to be unknown."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normlab.trace.facts import Unknown
from normlab.trace.trace import output_loss

from .reader import Reader, facts, ids, next_token


def test_without_a_lookup_tokens_are_unknown():
    model = nn.Linear(4, 3)
    read = facts(torch.randn(5, 4), model=model, loss=lambda m, x: m(x).square().mean())
    for fact in ("tokens", "targets", "causal", "padding", "documents"):
        with pytest.raises(Unknown):
            getattr(read, fact)


def test_stacks_and_roles():
    read = facts(ids())
    assert {name: len(blocks) for name, blocks in read.stacks.items()} == {"layers": 3}
    assert read.roles["embed.weight"] == "embedding"
    assert (read.roles["head.weight"], read.roles["head.bias"]) == ("head", "bias")
    assert read.roles["layers.1.weight"] == "hidden"


def test_a_trained_model_prefers_its_targets():
    model, batch = Reader(), ids(rows=8, width=16)
    assert not facts(batch, model=model).trained
    optimizer = torch.optim.Adam(model.parameters(), 3e-2)
    for _ in range(60):
        optimizer.zero_grad()
        next_token(model, batch).backward()
        optimizer.step()
    assert facts(batch, model=model).trained
    assert not facts(batch, model=model, trained=False).trained


def test_the_loss_may_be_the_models_own():
    class Own(Reader):
        def forward(self, ids, labels):
            logits = super().forward(ids)
            return {"loss": F.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}

    read = facts({"ids": ids(), "labels": ids(seed=5)}, model=Own(), loss=output_loss)
    assert torch.equal(read.targets.ids, ids(seed=5))
    assert read.shift is None
