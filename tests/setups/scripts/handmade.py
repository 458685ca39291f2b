"""Gradients of two halves by torch.autograd.grad, averaged, clipped and handed over by hand."""

import torch
from models import Decoder, next_token_loss, text

torch.manual_seed(0)
model = Decoder()
parameters = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(parameters, lr=1e-3)
for step in range(20):
    ids = text(8, seed=step)
    gradients = [torch.zeros_like(p) for p in parameters]
    for half in ids.chunk(2):
        loss = next_token_loss(model(half[:, :-1]), half)
        for total, gradient in zip(gradients, torch.autograd.grad(loss, parameters), strict=True):
            total.add_(gradient, alpha=0.5)
    norm = torch.sqrt(sum(gradient.pow(2).sum() for gradient in gradients))
    factor = (1.0 / (norm + 1e-6)).clamp(max=1.0)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient * factor
    optimizer.step()
