"""A trainer class that holds the model, under bf16 autocast, with a one-cycle schedule."""

from contextlib import nullcontext

import torch
from models import Decoder, next_token_loss, text


class Trainer:
    def __init__(self, model, batches, *, max_lr=1e-3, mixed=True):
        self.model = model
        self.batches = batches
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=max_lr)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=max_lr, total_steps=len(batches), pct_start=0.2
        )
        self.context = torch.autocast("cpu", dtype=torch.bfloat16) if mixed else nullcontext()
        self.global_step = 0
        self.losses = []

    def compute_loss(self, batch):
        with self.context:
            logits = self.model(batch[:, :-1])
        return next_token_loss(logits.float(), batch)

    def training_step(self, batch):
        self.model.train()
        self.optimizer.zero_grad()
        loss = self.compute_loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()

    def fit(self):
        for batch in self.batches:
            self.losses.append(self.training_step(batch).item())
            self.global_step += 1


if __name__ == "__main__":
    torch.manual_seed(0)
    Trainer(Decoder(), [text(6, seed=n) for n in range(20)]).fit()
