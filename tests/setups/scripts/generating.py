"""Batches from a generator, blocks computed again in the backward pass, outputs in a dataclass."""

from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F
from models import WORDS, Decoder
from torch.utils.checkpoint import checkpoint


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Checkpointed(Decoder):
    def forward(self, ids, labels=None, *, saves_memory=False):
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if saves_memory else block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return Output(logits)
        return Output(logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def stream(length, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(1, WORDS, (length,), generator=generator)


def batches(rows, size):
    while True:
        ids = torch.stack(list(islice(rows, size)))
        yield ids[:, :-1], ids[:, 1:]


torch.manual_seed(0)
model = Checkpointed()
forward = partial(model, saves_memory=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
for inputs, labels in islice(batches(stream(13, 0), 6), 20):
    output = forward(inputs, labels)
    output.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    warm_up.step()
    optimizer.zero_grad()
