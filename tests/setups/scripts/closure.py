"""L-BFGS, whose step takes a function that computes the loss and its gradients."""

import torch
from models import Decoder, next_token_loss, text

torch.manual_seed(0)
model = Decoder()
ids = text(8)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=5)


def closure():
    optimizer.zero_grad()
    loss = next_token_loss(model(ids[:, :-1]), ids)
    loss.backward()
    return loss


for step in range(10):
    loss = optimizer.step(closure)
    print(f"step {step}: {loss.item():.3f}")
