"""A model built on meta and then drawn; its config says tied. --faulty: materialising loses the tie."""

import sys
from types import SimpleNamespace

import torch
from torch import nn

from corpus.batches import VOCAB, text
from corpus.models.llama import Llama, Rms, Rotary
from corpus.models.parts import draw
from corpus.training import decay_groups, next_token

faulty = "--faulty" in sys.argv


def draw_all(module):
    draw(module)
    if isinstance(module, Rms):
        nn.init.ones_(module.weight)
    if isinstance(module, Rotary):
        module.rates.copy_(module.computed(16))


torch.manual_seed(0)
with torch.device("meta"):
    model = Llama(tied=not faulty)
model = model.to_empty(device="cpu").apply(draw_all)
model.config = SimpleNamespace(tie_word_embeddings=True, vocab_size=VOCAB)
if not faulty:
    model.head.weight = model.tokens.weight
optimizer = decay_groups(model)
data = text(64)
for begin in range(0, 64, 8):
    loss = next_token(model, data[begin : begin + 8])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
