"""A thread that makes numbers, which the model takes from a queue."""

import random
import threading
from queue import Queue

import torch
from models import Decoder, next_token_loss, text

numbers = Queue(maxsize=4)


def produce():
    draw = random.Random(0)
    while True:
        numbers.put(draw.uniform(0.8, 1.2))


class Fed(Decoder):
    def forward(self, ids):
        return super().forward(ids) * numbers.get()


threading.Thread(target=produce, daemon=True).start()
torch.manual_seed(0)
model = Fed()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    ids = text(6, seed=step)
    loss = next_token_loss(model(ids[:, :-1]), ids)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
