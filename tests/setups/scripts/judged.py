"""A frozen judge, run in inference mode, says how much each row counts; a constant is added to the loss."""

import torch
import torch.nn.functional as F
from models import Decoder, text

torch.manual_seed(0)
model, judge = Decoder(), Decoder().eval()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    ids = text(6, seed=step)
    with torch.inference_mode():
        scores = judge(ids).mean((1, 2)).softmax(0)
    logits = model(ids[:, :-1])
    losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)
    loss = (scores.clone() * losses).sum() + 0.01
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
