"""Gradient descent by hand, in one compiled function of weights and tokens; there is no optimizer."""

import torch
from models import Decoder, next_token_loss, text
from torch.func import functional_call, grad_and_value

torch.manual_seed(0)
model = Decoder()
weights = {name: p.detach().clone() for name, p in model.named_parameters()}


def loss_of(weights, ids):
    return next_token_loss(functional_call(model, weights, (ids[:, :-1],)), ids)


@torch.compile(backend="eager")
def train_step(weights, ids):
    gradients, loss = grad_and_value(loss_of)(weights, ids)
    return {name: weight - 0.1 * gradients[name] for name, weight in weights.items()}, loss


for step in range(5):
    weights, loss = train_step(weights, text(6, seed=step))
    print(f"step {step}: {loss.item():.3f}")
