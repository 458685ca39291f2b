"""A generator and a critic that take turns, each with an optimizer of its own."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


def perceptron(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 16), nn.LeakyReLU(0.2), nn.Linear(16, 16), nn.LeakyReLU(0.2), nn.Linear(16, outputs)
    )


generator, discriminator = perceptron(8, 2), perceptron(2, 1)
g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
data = torch.randn(256, 2) * 0.5 + 1

for step in range(20):
    real = data[torch.randperm(len(data))[:16]]
    noise = torch.randn(16, 8)

    fake = generator(noise)
    real_score, fake_score = discriminator(real), discriminator(fake.detach())
    d_loss = F.binary_cross_entropy_with_logits(real_score, torch.ones_like(real_score))
    d_loss = d_loss + F.binary_cross_entropy_with_logits(fake_score, torch.zeros_like(fake_score))
    d_optimizer.zero_grad()
    d_loss.backward()
    d_optimizer.step()

    score = discriminator(generator(noise))
    g_loss = F.binary_cross_entropy_with_logits(score, torch.ones_like(score))
    g_optimizer.zero_grad()
    g_loss.backward()
    g_optimizer.step()
