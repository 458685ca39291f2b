"""Gradients are clipped to the norm of the first argument, by a norm that the script has computed before.

``--by-part`` clips the head apart from the others, by the norm of all. With ``--by-entries`` the norm is the
largest entry. Mistake: ``--early`` clips before the second of two backward passes.
"""

import sys

import torch
from models import Decoder, next_token_loss, text
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
bound = float(sys.argv[1])
head = list(model.head.parameters())
others = [p for p in model.parameters() if all(p is not q for q in head)]


def clip():
    kind = float("inf") if "--by-entries" in sys.argv else 2.0
    norm = get_total_norm([p.grad for p in model.parameters()], kind)
    for part in (others, head) if "--by-part" in sys.argv else (others + head,):
        clip_grads_with_norm_(part, bound, norm)


for step in range(20):
    for part in range(2):
        ids = text(3, seed=2 * step + part)
        (next_token_loss(model(ids[:, :-1]), ids) / 2).backward()
        if part == int("--early" not in sys.argv):
            clip()
    optimizer.step()
    optimizer.zero_grad()
