"""Text that a decoder continues: caches change nothing, within a window and beyond it."""

from functools import partial

import pytest
import torch

from normlab.base.model_config import ModelConfig
from normlab.lab.tasks.task import build_model
from normlab.nn import Decoder
from normlab.nn.decode import generate, truncated

COUNT, PROMPT, SEEDS = 12, [3, 7, 1, 5], [11, 12]


def plainly(model, seed, choose, window):
    """The same without a cache: each token from all that its window shows."""
    ids, draw = list(PROMPT), torch.Generator().manual_seed(seed)
    for _ in range(COUNT):
        with torch.no_grad():
            logits = model(torch.tensor([ids[-window:]]))[0, -1]
        logits[0] = -torch.inf
        ids.append(int(torch.multinomial(choose(logits.log_softmax(-1)).softmax(-1), 1, generator=draw)))
    return ids[len(PROMPT) :]


@pytest.mark.parametrize("window", [3, 9, 16])
@pytest.mark.parametrize(("placement", "position_encoding"), [("pre", "rope"), ("post", "learned")])
def test_tokens_are_those_without_a_cache(placement, position_encoding, window):
    config = ModelConfig(
        dim=16,
        ffn_dim=32,
        heads=2,
        encoder_layers=0,
        decoder_layers=2,
        max_positions=16,
        decoder_placement=placement,
        position_encoding=position_encoding,
    )
    model = build_model(Decoder, config, 23, 1).double().eval()
    choose = partial(truncated, temperature=0.8, top_k=10, top_p=0.9)
    drawn = generate(model, PROMPT, SEEDS, choose, count=COUNT, window=window).tolist()
    assert drawn == [plainly(model, seed, choose, window) for seed in SEEDS]
    assert drawn[0] != drawn[1]
