"""Small subjects, and what no study may do to them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contracts.variants import CONFIG, build, uniform
from normlab.diagnosis.reading import read_structure
from normlab.diagnosis.subject import Subject
from normlab.diagnosis.tables import Table
from normlab.lab.config import ModelConfig
from normlab.nn import ENCODER_LAYER, PAD, Context, build_stack
from normlab.setups.setup import Loss
from normlab.trace.trace import output_loss

SOURCE = torch.tensor([[4, 8, 11, 6, 8, 10], [12, 9, 8, 12, 0, 0], [12, 10, 7, 0, 0, 0], [5, 3, 9, 9, 4, 0]])
TARGET = torch.tensor([[2, 10, 7, 8, 9], [2, 11, 6, 0, 0], [2, 9, 4, 5, 0], [2, 6, 5, 11, 8]])
LABELS = torch.tensor([[10, 7, 8, 9, 3], [11, 6, 3, 0, 0], [9, 4, 5, 3, 0], [6, 5, 11, 8, 3]])
BATCH = (SOURCE, TARGET, LABELS)
PADDING_MASKS = {"encoder.sublayers": SOURCE != PAD, "decoder.sublayers": TARGET != PAD}


def subject_read(model: nn.Module, batch: Any, loss: Loss = output_loss, **named: Any) -> Subject:
    """A subject whose structure is read; ``named`` are the options of ``read_structure``."""
    return Subject(model, batch, loss, read_structure(model, batch, **named))


def translating(placement: str = "post", **choices: Any) -> Subject:
    """An encoder-decoder of ours on padded rows, its loss that of real tokens."""
    return subject_read(build(uniform(placement, **choices)), BATCH[:2], loss=labelled)


def labelled(model: nn.Module, batch: Any) -> Tensor:
    """The mean cross-entropy of the labels that belong to these rows."""
    kept = [next(i for i in range(len(SOURCE)) if SOURCE[i].equal(row)) for row in batch[0]]
    logits = model(*batch)
    return F.cross_entropy(logits.flatten(0, 1), LABELS[kept].flatten(), ignore_index=PAD)


class TheorySetting(nn.Module):
    """Xiong et al. 2020, Section 3.3: Xavier's normal start, one head, attention uniform."""

    def __init__(self, placement: str, size: ModelConfig, seed: int) -> None:
        super().__init__()
        self.stack = build_stack("encoder", ENCODER_LAYER, replace(size, encoder_placement=placement))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for sublayer in self.stack:
                for name, weight in sublayer.f.matrices().items():
                    weight.normal_(std=(2 / sum(weight.shape)) ** 0.5, generator=generator)
                    weight.mul_(name not in ("query", "key"))
                for parameter in sublayer.f.parameters():
                    parameter.mul_(parameter.ndim > 1)  # no biases

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x, Context(padding_mask=torch.ones(x.shape[:-1], dtype=torch.bool)))


def theory_setting(placement: str, *, layers: int, dim: int, ffn_dim: int, seeds: int) -> list[Subject]:
    """A subject for each seed, Gaussian tokens going in."""
    sizes = {"dim": dim, "ffn_dim": ffn_dim, "heads": 1, "encoder_layers": layers, "decoder_layers": 0}
    size = replace(CONFIG, **sizes)
    found: list[Subject] = []
    for seed in range(seeds):
        x = torch.randn(2, 12, dim, generator=torch.Generator().manual_seed(1000 + seed))
        weights = torch.randn(dim, generator=torch.Generator().manual_seed(seed))
        model = TheorySetting(placement, size, seed)

        def loss(model: nn.Module, batch: Tensor, weights: Tensor = weights) -> Tensor:
            return (model(batch) @ weights).square().mean()

        structure = found[0].structure if found else subject_read(model, x, loss).structure
        found.append(Subject(model, x, loss, structure))
    return found


def untouched(placement: str, study: Callable[[Subject], Table]) -> None:
    """Assert that a study leaves weights, gradients, modes, random state and hooks as they were."""
    subject = translating(placement, dropout=0.1)
    model = subject.model.train()
    model.decoder.eval()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    before = copy.deepcopy({name: (p.detach(), p.grad) for name, p in model.named_parameters()})
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    first = study(subject)
    assert len(first)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name][0])
        assert torch.equal(p.grad, before[name][1])
        assert p.requires_grad
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(state, torch.get_rng_state())
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    assert not any(getattr(module, kind) for module in model.modules() for kind in hooks)
    assert study(subject) == first, "dropout is on, or the study draws from the global generator"
