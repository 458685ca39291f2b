"""A mean over targets whose count leaves torch in the way that --by says; --same has one batch for all steps.

With --log, numbers of the batch are printed, and the count is a tensor.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from models import Decoder, text

parser = argparse.ArgumentParser()
parser.add_argument("--by", default="")
parser.add_argument("--log", action="store_true")
parser.add_argument("--same", action="store_true")
asked = parser.parse_args()

COUNTS = {
    "": lambda counted: counted.sum(),
    "item": lambda counted: counted.sum().item(),
    "round": lambda counted: round(counted.float().sum().item()),
    "int": lambda counted: int(counted.sum()),
    "inverse": lambda counted: 1 / (1 / int(counted.sum())),
    "math": lambda counted: math.sqrt(counted.sum().item()) ** 2,
    "numpy": lambda counted: float(counted.numpy().sum()),
    "list": lambda counted: sum(map(sum, counted.tolist())),
}


def log(ids, counted, loss):
    print(int(counted.sum()), ids.tolist(), ids.numpy(), loss.item(), float(loss.detach()))
    if int(ids.max()) > 20:
        print("a large number")


torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    seed = 0 if asked.same else step
    ids = text(6, seed=seed)
    ids[: 1 + seed % 3, -3:] = 0
    targets = ids[:, 1:]
    counted = targets != 0
    losses = F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), targets, reduction="none") * counted
    if asked.by == "branch":
        loss = losses.mean() if counted.all() else losses.sum() / counted.sum()
    elif asked.by == "unseen":
        loss = losses.sum() / (72 - 3 * (1 + seed % 3))  # as a loader counts them
    else:
        loss = losses.sum() / COUNTS[asked.by](counted)
    if asked.log:
        log(ids, counted, losses.sum())
        loss = loss + 0 * losses.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
