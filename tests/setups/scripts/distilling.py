"""A student learns a teacher's distributions beside the text."""

import torch
import torch.nn.functional as F
from models import Decoder, next_token_loss, text

TEMPERATURE, ALPHA = 2.0, 0.5

torch.manual_seed(0)
teacher = Decoder(dim=24)
student = Decoder(dim=16)
teacher.eval()
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)


@torch.no_grad()
def teach(ids):
    return F.softmax(teacher(ids[:, :-1]) / TEMPERATURE, dim=-1)


for step in range(20):
    ids = text(6, seed=step)
    wanted = teach(ids)
    logits = student(ids[:, :-1])
    soft = F.kl_div(
        F.log_softmax(logits / TEMPERATURE, dim=-1).flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean"
    )
    loss = ALPHA * TEMPERATURE**2 * soft + (1 - ALPHA) * next_token_loss(logits, ids)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
