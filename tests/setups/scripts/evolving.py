"""Evolution strategies: gradients are guessed from losses of moved weights, without a backward pass."""

import torch
from models import Decoder, next_token_loss, text

torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)


@torch.no_grad()
def moved_loss(ids, directions, size):
    for p, direction in zip(model.parameters(), directions, strict=True):
        p.add_(direction, alpha=size)
    loss = next_token_loss(model(ids[:, :-1]), ids)
    for p, direction in zip(model.parameters(), directions, strict=True):
        p.sub_(direction, alpha=size)
    return loss


for step in range(20):
    ids = text(6, seed=step)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(4):
        directions = [torch.randn_like(p) for p in model.parameters()]
        slope = (moved_loss(ids, directions, 0.01) - moved_loss(ids, directions, -0.01)) / 0.02
        for p, direction in zip(model.parameters(), directions, strict=True):
            p.grad += slope * direction / 4
    optimizer.step()
