"""A reward model on pairs of answers, whose score is that of the last token.

Mistakes: ``last_column`` (the score is read in the last column, which may be padding), ``mean`` (it is
averaged over all columns).
"""

import torch
import torch.nn.functional as F
from language_model import MISTAKE, LanguageModel, answers, loaded, side_by_side

torch.manual_seed(0)
model = LanguageModel(outputs=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
for batch in loaded(*answers(32, seed=1)[:2], *answers(32, seed=2)[:2]):
    ids, mask = side_by_side(batch)
    scores = model(ids, mask)[..., 0]
    if MISTAKE == "last_column":
        score = scores[:, -1]
    elif MISTAKE == "mean":
        score = scores.mean(1)
    else:
        score = scores.gather(1, mask.sum(1, keepdim=True) - 1)[:, 0]
    chosen, rejected = score.chunk(2)
    loss = -F.logsigmoid(chosen - rejected).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
