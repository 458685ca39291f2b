"""A warm-up before a cosine, as one schedule of two, brought to where a run is resumed."""

import warnings

import torch
from models import Decoder, next_token_loss, text

torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 90)
schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[10])
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's, of steps before the optimizer's
    for _ in range(5):
        schedule.step()
for step in range(20):
    ids = text(6, seed=step)
    loss = next_token_loss(model(ids[:, :-1]), ids)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
