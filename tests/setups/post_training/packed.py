"""Two documents in each row, without padding, that neither see each other nor share positions.

Mistakes: ``one_document`` (attention crosses their border), ``one_count`` (positions do not restart),
``border_counted`` (the first token of a document is a target of the one before it).
"""

import torch
import torch.nn.functional as F
from language_model import MISTAKE, VOCABULARY, LanguageModel, loaded

draw = torch.Generator().manual_seed(0)
rows = torch.randint(2, VOCABULARY, (32, 16), generator=draw)
borders = torch.randint(6, 11, (32, 1), generator=draw)
place = torch.arange(16)
numbers = (place >= borders).long()
restarting = torch.where(numbers == 1, place - borders, place)
torch.manual_seed(0)
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
for ids, documents, positions in loaded(rows, numbers, restarting):
    seen = torch.zeros_like(documents) if MISTAKE == "one_document" else documents
    counted_up = torch.arange(ids.shape[1]).expand_as(ids) if MISTAKE == "one_count" else positions
    logits = model(ids, documents=seen, positions=counted_up)
    targets = ids.clone()
    if MISTAKE != "border_counted":
        targets[positions == 0] = -100
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), targets[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
