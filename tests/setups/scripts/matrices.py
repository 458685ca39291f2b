"""One optimizer for the matrices of the blocks, which makes updates of unit norm, and AdamW for the rest."""

import torch
from models import Decoder, next_token_loss, text


class NormedMomentum(torch.optim.Optimizer):
    def __init__(self, parameters, lr=0.02, momentum=0.9):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                p.add_(state["momentum"] / (state["momentum"].norm() + 1e-8), alpha=-group["lr"])


torch.manual_seed(0)
model = Decoder()
matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
optimizers = [NormedMomentum(matrices), torch.optim.AdamW(others, lr=1e-3)]
schedulers = [torch.optim.lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=10) for o in optimizers]

for step in range(20):
    ids = text(6, seed=step)
    loss = next_token_loss(model(ids[:, :-1]), ids)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    for scheduler in schedulers:
        scheduler.step()
    model.zero_grad(set_to_none=True)
