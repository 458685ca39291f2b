"""A policy gradient of groups of answers, clipped around the old policy, with a KL to a frozen reference.

Mistakes: ``old_of_other_tokens`` (the old policy's log-probabilities are those of one token earlier),
``old_is_colder`` (they are those at the temperature of sampling), ``reference_without_mask`` (its
log-probabilities count padding).
"""

import copy

import torch
from language_model import END, MISTAKE, PAD, VOCABULARY, LanguageModel, loaded, token_logps
from torch import Tensor

GROUP, LENGTH, TEMPERATURE, CLIP, KL = 4, 8, 0.7, 0.2, 0.04

torch.manual_seed(0)
policy = LanguageModel()
reference = copy.deepcopy(policy).requires_grad_(False).eval()
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)


@torch.no_grad()
def sampled(ids: Tensor) -> Tensor:
    """Prompts with an answer each."""
    ended = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(LENGTH):
        drawn = torch.multinomial((policy(ids)[:, -1] / TEMPERATURE).softmax(-1), 1)
        drawn = drawn.masked_fill(ended[:, None], PAD)
        ended = ended | (drawn[:, 0] == END)
        ids = torch.cat([ids, drawn], 1)
    return ids


prompts = torch.randint(2, VOCABULARY, (32, 5))
for (prompt,) in loaded(prompts, rows=2):
    ids = sampled(prompt.repeat_interleave(GROUP, 0))
    mask = (ids != PAD).long()
    reward = (ids[:, 5:] % 2).float().mean(1).view(-1, GROUP)
    advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
    advantage = advantage.view(-1, 1)
    counted = mask[:, 5:]
    with torch.no_grad():
        logits = policy(ids, mask)
        if MISTAKE == "old_of_other_tokens":
            logits = logits.roll(1, 1)
        elif MISTAKE == "old_is_colder":
            logits = logits / TEMPERATURE
        old = token_logps(logits, ids)[:, 4:]
        before = token_logps(reference(ids, mask), ids)[:, 4:]
    if MISTAKE != "reference_without_mask":
        before = before * counted
    logp = token_logps(policy(ids, mask), ids)[:, 4:] * counted
    ratio = torch.exp(logp - old * counted)
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    kl = torch.exp(before - logp) - (before - logp) - 1
    loss = -((gain - KL * kl) * counted).sum() / counted.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
