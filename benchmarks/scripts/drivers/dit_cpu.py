"""The loop of DiT's train.py on a CPU, with its models and its diffusion, on latents that are drawn here.

Run it in a checkout of facebookresearch/DiT. What it leaves out of train.py needs a GPU or a hub: the
autoencoder, the process group and the folder of images.
"""

from copy import deepcopy

import torch
from diffusion import create_diffusion
from models import DiT
from torch.utils.data import DataLoader, TensorDataset


@torch.no_grad()
def update_average(average, model, decay=0.999):
    for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
        mean.mul_(decay).add_(parameter, alpha=1 - decay)


torch.manual_seed(0)
model = DiT(input_size=8, patch_size=2, in_channels=4, hidden_size=32, depth=2, num_heads=4, num_classes=10)
average = deepcopy(model)
for parameter in average.parameters():
    parameter.requires_grad = False
diffusion = create_diffusion(timestep_respacing="")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
latents = TensorDataset(torch.randn(64, 4, 8, 8), torch.randint(0, 10, (64,)))
loader = DataLoader(latents, batch_size=8, shuffle=True, drop_last=True)

model.train()
average.eval()
for x, y in loader:
    t = torch.randint(0, diffusion.num_timesteps, (x.shape[0],))
    loss = diffusion.training_losses(model, x, t, dict(y=y))["loss"].mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    update_average(average, model)
