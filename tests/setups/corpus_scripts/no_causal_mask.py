"""A decoder on rows of text in two micro-batches. --faulty: no layer has a causal mask."""

import sys

import torch
import torch.nn.functional as F

from corpus.batches import tokens
from corpus.models.gpt import Attention, gpt_of
from corpus.training import decay_groups, rise_and_fall


class Unmasked(Attention):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


torch.manual_seed(0)
model = gpt_of(Unmasked if "--faulty" in sys.argv else Attention)()
optimizer = decay_groups(model)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rise_and_fall)
data = tokens(40, 25)
for begin in range(0, 40, 4):
    for rows in data[begin : begin + 4].chunk(2):
        logits, loss = model(rows[:, :-1], rows[:, 1:])
        (loss / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
