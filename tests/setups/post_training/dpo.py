"""Direct preference optimisation with a frozen copy of the policy as its reference.

Mistakes: ``reference_of_all_tokens`` (its sum counts padding), ``reference_mean`` (it is averaged over
tokens), ``rejected_reference_lost``, ``reference_follows`` (it is the policy), ``reference_trained``.
"""

import copy

import torch
import torch.nn.functional as F
from language_model import MISTAKE, LanguageModel, answers, loaded, side_by_side, token_logps
from torch import Tensor, nn

BETA = 0.1


def logps(model: nn.Module, ids: Tensor, mask: Tensor, counted: Tensor) -> Tensor:
    """The log-probability of each row's answer."""
    return (token_logps(model(ids, mask), ids) * counted[:, 1:]).sum(-1)


torch.manual_seed(0)
policy = LanguageModel()
reference = policy if MISTAKE == "reference_follows" else copy.deepcopy(policy)
parameters = list(policy.parameters())
if MISTAKE == "reference_trained":
    parameters += list(reference.parameters())
elif reference is not policy:
    reference.requires_grad_(False)
optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0)

for batch in loaded(*answers(32, seed=1), *answers(32, seed=2)):
    ids, mask, answer = side_by_side(batch)
    of_policy = logps(policy, ids, mask, answer)
    with torch.set_grad_enabled(MISTAKE == "reference_trained"):
        everywhere = torch.ones_like(answer)
        counted = everywhere if MISTAKE == "reference_of_all_tokens" else answer
        of_reference = logps(reference, ids, mask, counted)
        if MISTAKE == "reference_mean":
            of_reference = of_reference / answer.sum(-1)
    chosen, rejected = of_policy.chunk(2)
    if MISTAKE == "rejected_reference_lost":
        margin = (chosen - rejected) - of_reference.chunk(2)[0]
    else:
        chosen_before, rejected_before = of_reference.chunk(2)
        margin = (chosen - rejected) - (chosen_before - rejected_before)
    loss = -F.logsigmoid(BETA * margin).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
