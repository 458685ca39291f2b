"""An encoder, a decoder and a head that no module holds."""

import torch
from models import WORDS, Encoder, Generator, next_token_loss, text
from torch import nn

torch.manual_seed(0)
encoder, decoder, head = Encoder(), Generator(), nn.Linear(16, WORDS)
optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters(), *head.parameters()], lr=1e-3)
sources, targets = text(60, 11), text(60, 9, seed=1)
for begin in range(0, 60, 6):
    source, target = sources[begin : begin + 6], targets[begin : begin + 6]
    logits = head(decoder(target[:, :-1], encoder(source)))
    loss = next_token_loss(logits, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
