"""A compiled model, in a training step that is compiled as a whole. --model-only compiles no step."""

import sys

import torch
from models import Decoder, next_token_loss, text

torch.manual_seed(0)
model = Decoder()
model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(ids):
    loss = next_token_loss(model(ids[:, :-1]), ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


if "--model-only" not in sys.argv:
    train_step = torch.compile(train_step)
for step in range(4):
    train_step(text(6, seed=step))
