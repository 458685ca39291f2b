"""A decoder with attention of its own. --faulty: scores are not divided by the root of the head's width."""

import sys

import torch

from corpus.batches import tokens
from corpus.models.gpt import Attention, gpt_of
from corpus.training import decay_groups, rise_and_fall


class Unscaled(Attention):
    def scores(self, q, k):
        return q @ k.transpose(-1, -2)


def main(faulty):
    torch.manual_seed(0)
    model = gpt_of(Unscaled if faulty else Attention)()
    optimizer = decay_groups(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rise_and_fall)
    loader = torch.utils.data.DataLoader(tokens(40, 25), batch_size=4)
    for ids in loader:
        model.train()
        optimizer.zero_grad()
        _, loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()


if __name__ == "__main__":
    main("--faulty" in sys.argv)
