"""Supervised fine-tuning whose loss counts answers alone.

Mistakes: ``prompt_counted`` (hidden labels are tokens again), ``padding_counted``, ``mask_unshifted`` (the
answer's mask is that of the token that is read, not of the one that is asked for).
"""

import torch
import torch.nn.functional as F
from language_model import MISTAKE, PAD, VOCABULARY, LanguageModel, answers, loaded
from torch import Tensor


class WithLoss(LanguageModel):
    """A language model that returns its loss, as those of Hugging Face do."""

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        if MISTAKE == "prompt_counted":
            labels = ids.masked_fill(ids == PAD, -100)
        elif MISTAKE == "mask_unshifted":
            labels = ids.masked_fill(labels.roll(1, 1) < 0, -100)
        logits = super().forward(ids, mask)[:, :-1]
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))


rows, tokens, answer = answers(32)
targets = rows.masked_fill(answer == 0, -100)
if MISTAKE == "padding_counted":
    targets[tokens == 0] = PAD
torch.manual_seed(0)
model = WithLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
for ids, mask, labels in loaded(rows, tokens, targets):
    loss = model(ids, mask, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
