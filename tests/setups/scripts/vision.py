"""A small vision Transformer on images that are mirrored and jittered by a generator of the script's own."""

import torch
from models import Block
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES, SIDE, PATCH = 5, 12, 4


class VisionTransformer(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.patches = nn.Conv2d(3, dim, kernel_size=PATCH, stride=PATCH)
        self.first = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.places = nn.Parameter(0.02 * torch.randn(1, 1 + (SIDE // PATCH) ** 2, dim))
        self.blocks = nn.Sequential(*(Block(dim, causal=False) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, CLASSES)

    def forward(self, pixels):
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


generator = torch.Generator().manual_seed(7)


def augment(images):
    mirrored = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    images = torch.where(mirrored, images.flip(-1), images)
    return images + 0.05 * torch.randn(images.shape, generator=generator)


torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 3, SIDE, SIDE), torch.randint(0, CLASSES, (64,)))
loader = DataLoader(data, batch_size=8, shuffle=True, drop_last=True)
model = VisionTransformer()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, epochs=2, steps_per_epoch=len(loader))
for _ in range(2):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(augment(images)), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
