"""Parameters and FLOPs, against a count by hand."""

import torch
import torch.nn.functional as F

from normlab.base.metric import Cost, amount, ratio
from normlab.lab.config import ModelConfig
from normlab.lab.tasks.task import build_model
from normlab.lab.training.cost import cost_of
from normlab.nn import Decoder

V, D, D_FF, LAYERS, B, T = 23, 16, 40, 2, 3, 8


def test_a_decoder_is_counted_as_by_hand():
    config = ModelConfig(
        dim=D,
        ffn_dim=D_FF,
        heads=2,
        encoder_layers=0,
        decoder_layers=LAYERS,
        decoder_placement="pre",
        bias="nobias",
        norm="rmsnorm",
    )
    model, ids = build_model(Decoder, config, V, 1), torch.ones(B, T, dtype=torch.long)
    cost = cost_of(model, lambda m: F.cross_entropy(m(ids).flatten(0, 1), ids.flatten()), B * T)
    matrices = LAYERS * (4 * D * D + 2 * D * D_FF)
    assert cost.parameters == matrices + V * D + (2 * LAYERS + 1) * D
    assert cost.without_embeddings == matrices + (2 * LAYERS + 1) * D
    attention = LAYERS * 2 * B * T * T * D
    assert cost.flops == 3 * (2 * B * T * (matrices + V * D) + 2 * attention)
    assert cost.flops_per_token == cost.flops / (B * T)
    assert all(p.grad is None for p in model.parameters())


def test_amounts_and_ratios_are_said_in_three_digits():
    assert [amount(n) for n in (12, 1500, 28_800, 124e6, 1.04e15)] == [
        "12",
        "1.5k",
        "28.8k",
        "124M",
        "1.04e+15",
    ]
    assert [ratio(a, b) for a, b in ((5, 5), (103, 100), (50, 100), (1, 0))] == [
        "equal",
        "+3%",
        "-50%",
        "more than none",
    ]
    assert Cost(1, 1, 1).flops_per_token is None
