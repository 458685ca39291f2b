"""A student that learns the labels and a teacher's probabilities.

Mistakes: ``no_logarithm`` (the divergence is given the student's probabilities), ``over_positions`` (the
teacher's softmax runs over positions), ``teacher_rolled`` (its logits are those of another row).
"""

import torch
import torch.nn.functional as F
from language_model import MISTAKE, VOCABULARY, LanguageModel, answers, loaded

TEMPERATURE = 2.0

torch.manual_seed(0)
teacher = LanguageModel().requires_grad_(False).eval()
student = LanguageModel()
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, weight_decay=0.0)
for ids, mask in loaded(*answers(32)[:2]):
    logits = student(ids, mask)
    with torch.no_grad():
        known = teacher(ids, mask) / TEMPERATURE
        if MISTAKE == "teacher_rolled":
            known = known.roll(1, 0)
        wanted = known.log_softmax(1 if MISTAKE == "over_positions" else -1)
    given = (logits / TEMPERATURE).log_softmax(-1)
    if MISTAKE == "no_logarithm":
        given = given.exp()
    divergence = F.kl_div(given, wanted, log_target=True, reduction="none")
    counted = mask[:, 1:]
    soft = (divergence.sum(-1)[:, :-1] * counted).sum() / counted.sum() * TEMPERATURE**2
    targets = ids.masked_fill(mask == 0, -100)[:, 1:]
    hard = F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), targets.reshape(-1))
    loss = 0.5 * hard + 0.5 * soft
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
