"""A critic with a gradient penalty: gradients by the inputs are differentiated again."""

import torch
from torch import nn

torch.manual_seed(0)
critic = nn.Sequential(
    nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1, bias=False)
)
optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
data = torch.randn(200, 6) + 1


def gradient_penalty(real, fake):
    share = torch.rand(len(real), 1)
    between = (share * real + (1 - share) * fake).requires_grad_(True)
    scores = critic(between)
    (gradient,) = torch.autograd.grad(
        outputs=scores, inputs=between, grad_outputs=torch.ones_like(scores), create_graph=True
    )
    return ((gradient.norm(2, dim=1) - 1) ** 2).mean()


for step in range(20):
    real = data[torch.randint(0, len(data), (16,))]
    fake = torch.randn_like(real)
    loss = critic(fake).mean() - critic(real).mean() + 10 * gradient_penalty(real, fake)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
