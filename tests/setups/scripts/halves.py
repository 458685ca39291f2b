"""Blocks in bfloat16 between an embedding and a head in float32, with master weights of the script's own."""

import torch
from models import Decoder, next_token_loss, text


class MixedDecoder(Decoder):
    def forward(self, ids):
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        x = self.blocks(x.to(torch.bfloat16))
        return self.head(self.norm(x.float()))


torch.manual_seed(0)
model = MixedDecoder()
model.blocks.to(torch.bfloat16)
working = list(model.parameters())
masters = [p.detach().clone().float().requires_grad_() for p in working]
optimizer = torch.optim.AdamW(masters, lr=1e-3)
for step in range(20):
    ids = text(6, seed=step)
    loss = next_token_loss(model(ids[:, :-1]), ids)
    loss.backward()
    for master, p in zip(masters, working, strict=True):
        master.grad = p.grad.float()
        p.grad = None
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, working, strict=True):
            p.copy_(master)
