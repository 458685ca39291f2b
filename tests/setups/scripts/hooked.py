"""An optimizer for each parameter, which steps in the backward pass as soon as its gradient is there."""

import torch
from models import Decoder, next_token_loss, text

torch.manual_seed(0)
model = Decoder()
optimizers = {p: torch.optim.AdamW([p], lr=1e-3, foreach=False) for p in model.parameters()}


def step_and_free(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for p in model.parameters():
    p.register_post_accumulate_grad_hook(step_and_free)

for step in range(20):
    ids = text(6, seed=step)
    loss = next_token_loss(model(ids[:, :-1]), ids)
    loss.backward()
