"""A loop that reads the next batch between its backward pass and its step."""

import torch
from models import WORDS, Decoder, next_token_loss

torch.manual_seed(0)
data = torch.randint(1, WORDS, (2000,))
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def get_batch():
    begins = torch.randint(0, len(data) - 13, (6,))
    ids = torch.stack([data[begin : begin + 13] for begin in begins])
    return ids[:, :-1].contiguous(), ids


inputs, ids = get_batch()
for _ in range(20):
    loss = next_token_loss(model(inputs), ids)
    optimizer.zero_grad()
    loss.backward()
    inputs, ids = get_batch()
    optimizer.step()
