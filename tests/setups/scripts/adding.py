"""The losses of two passes of one model, on new rows and on old ones, are added before one backward pass.

Mistakes, each in the second loss alone: ``--unshifted`` (it asks for the tokens themselves), ``--counting``
(it counts padding), ``--detached`` (what its head reads has no gradient). ``--weighed``: it counts half.
"""

import sys

import torch
import torch.nn.functional as F
from models import Decoder, text

torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
PAD = 0


def padded(width, seed):
    ids = text(4, width, seed)
    ids[::2, -4:] = PAD
    return ids


def next_token_loss(ids, shift=1, ignored=PAD, *, detached=False):
    hidden = model.words(ids[:, :-1]) + model.places.weight[: ids.shape[1] - 1]
    hidden = model.norm(model.blocks(hidden))
    logits = model.head(hidden.detach() if detached else hidden)
    targets = ids[:, shift : ids.shape[1] - 1 + shift]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=ignored)


for step in range(20):
    new, old = padded(13, seed=step), padded(11, seed=100 + step)
    shift, ignored = int("--unshifted" not in sys.argv), -100 if "--counting" in sys.argv else PAD
    first = next_token_loss(new)
    second = next_token_loss(old, shift, ignored, detached="--detached" in sys.argv)
    loss = first + (0.5 * second if "--weighed" in sys.argv else second)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
