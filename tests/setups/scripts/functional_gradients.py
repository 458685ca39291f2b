"""Gradients of two halves by torch.func, as functions of the weights, handed to the optimizer by hand.

Mistakes: ``--undivided`` (the halves' gradients are added), ``--gains-forgotten`` (those of the norms are not
handed over), ``--unshifted`` (the loss asks for the tokens themselves). ``--detached``: the weights that the
function gets are cut off from the model's. ``--by-row``: each row has a gradient, by vmap.
"""

import sys

import torch
import torch.nn.functional as F
from models import Decoder, text
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.manual_seed(0)
model = Decoder()
parameters = dict(model.named_parameters())
optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3)


def loss_of(weights, ids):
    logits = functional_call(model, weights, (ids[:, :-1],))
    targets = ids[:, :-1] if "--unshifted" in sys.argv else ids[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def with_count(weights, ids):
    return loss_of(weights, ids), ids.numel()


for step in range(20):
    ids = text(8, seed=step)
    weights = {name: p.detach() for name, p in parameters.items()} if "--detached" in sys.argv else parameters
    if "--by-row" in sys.argv:
        of_row = vmap(grad(lambda weights, row: loss_of(weights, row[None])), in_dims=(None, 0))
        with sdpa_kernel(SDPBackend.MATH):  # the others cannot be vectorized
            rows = of_row(weights, ids)
        total = {name: of_rows.mean(0) for name, of_rows in rows.items()}
    else:
        first, second = ids.chunk(2)
        of_first, (loss, count) = grad_and_value(with_count, has_aux=True)(weights, first)
        (of_second,) = grad(loss_of, argnums=(0,))(weights, second)
        share = 1 if "--undivided" in sys.argv else 0.5
        total = {name: share * (of_first[name] + of_second[name]).detach() for name in weights}
    for name, p in parameters.items():
        if "norm" not in name or "--gains-forgotten" not in sys.argv:
            p.grad = total[name]
    optimizer.step()
    optimizer.zero_grad()
