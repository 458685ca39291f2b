"""Direct preference optimization: a policy, and the frozen reference that it began as."""

import argparse
import copy

import torch
import torch.nn.functional as F
from models import Decoder, text

parser = argparse.ArgumentParser()
parser.add_argument("--beta", type=float, default=0.1)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--prompt-length", type=int, default=4)
args = parser.parse_args()


def log_probability(model, ids, prompt_length):
    logits = model(ids[:, :-1])
    of_tokens = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    answered = torch.arange(1, ids.shape[1]) >= prompt_length
    return (of_tokens * answered).sum(-1)


torch.manual_seed(0)
policy = Decoder()
reference = copy.deepcopy(policy).eval().requires_grad_(False)
with torch.no_grad():  # as after some training
    for parameter in policy.parameters():
        parameter.add_(0.01 * torch.randn_like(parameter))
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))

for step in range(args.steps):
    prompt = text(4, args.prompt_length, seed=3 * step)
    chosen = torch.cat([prompt, text(4, 9, seed=3 * step + 1)], dim=1)
    rejected = torch.cat([prompt, text(4, 9, seed=3 * step + 2)], dim=1)
    with torch.no_grad():
        reference_margin = log_probability(reference, chosen, args.prompt_length)
        reference_margin = reference_margin - log_probability(reference, rejected, args.prompt_length)
    margin = log_probability(policy, chosen, args.prompt_length)
    margin = margin - log_probability(policy, rejected, args.prompt_length)
    loss = -F.logsigmoid(args.beta * (margin - reference_margin)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    warm_up.step()
