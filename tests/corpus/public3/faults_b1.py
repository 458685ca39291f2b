"""Reports of post-training, adapters, recurrences, experts, further heads, and pairs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.batches import EOS, PAD, VOCAB, generator, inside, padded_text, text
from corpus.case import Arguments
from corpus.public2.blocks import Decoder, remade, setup

from .blocks_b import GPT, Block, configure_adamw, gathered_logps, gpt2_init, plain_adamw
from .case import report

# ------------------------------------------------------------------------------------------- reward models


class RewardModel(nn.Module):
    """A GPT whose head gives each token a reward, of which that of the end of the text counts."""

    def __init__(self, *, behind: int):
        super().__init__()
        self.transformer = GPT(layers=2)
        self.transformer.lm_head = nn.Identity()
        self.reward_head = nn.Linear(48, 1, bias=False)
        nn.init.normal_(self.reward_head.weight, std=1 / math.sqrt(48 + 1))
        self.behind = behind

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        rewards = self.reward_head(self.transformer.states(input_ids)).squeeze(-1)
        end = attention_mask.sum(-1) - 1 + self.behind
        end = end.clamp(max=input_ids.shape[1] - 1)
        return rewards.gather(1, end[:, None]).squeeze(1)


def bradley_terry_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    chosen = model(batch["input_ids_chosen"], batch["attention_mask_chosen"])
    rejected = model(batch["input_ids_rejected"], batch["attention_mask_rejected"])
    return -F.logsigmoid(chosen - rejected).mean()


def compared(seed: int) -> dict[str, Tensor]:
    """Return pairs of answers to one prompt each, padded on the right."""
    batch = {}
    for number, side in enumerate(("chosen", "rejected")):
        ids, real = padded_text((20, 13, 17, 24, 15, 11), seed=seed + number)
        ids[:, :6] = text(6, 6, seed=seed + 2)
        batch[f"input_ids_{side}"], batch[f"attention_mask_{side}"] = ids, real
    return batch


@report("EleutherAI/gpt-neox#1285", "reward models", "padding")
def reward_behind_the_end(*, faulty: bool) -> Arguments:
    """The reward of an answer is read one token behind the one that ends it, where padding begins."""
    make = partial(RewardModel, behind=1 if faulty else 0)
    return setup(make, compared(101), bradley_terry_loss, configure_adamw, declare={"pad_id": PAD})


# -------------------------------------------------------------------------------------------- distillation


class Student(nn.Module):
    """A decoder of one block whose logits are as wide as those of a trained one."""

    def __init__(self, layers: int = 1, std: float = 0.3):
        super().__init__()
        self.model = GPT(layers=layers)
        nn.init.normal_(self.model.wte.weight, std=std)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)


def frozen_teacher(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Student(layers=2).eval().requires_grad_(False)


def answered(seed: int) -> dict[str, Tensor]:
    """Return padded rows with labels of their answers alone."""
    ids, real = padded_text((24, 18, 21, 14), seed=seed)
    labels = ids.masked_fill(real == 0, -100)
    labels[:, :5] = -100
    return {"input_ids": ids, "labels": labels}


def divergence_term(student: Tensor, teacher: Tensor, kind: str, *, in_log_space: bool) -> Tensor:
    """Return the divergence `[N]` of tokens; "reverse" weighs by the student's probabilities."""
    student_log, teacher_log = student.log_softmax(-1), teacher.log_softmax(-1)
    if kind == "forward":
        return F.kl_div(student_log, teacher_log.exp(), reduction="none").sum(-1)
    if in_log_space:
        return (student_log.exp() * (student_log - teacher_log)).sum(-1)
    return F.kl_div(teacher_log, student.softmax(-1), reduction="none").sum(-1)


def distilled_loss(
    model: nn.Module, batch: dict[str, Tensor], *, teacher: nn.Module, temperature: float, in_log_space: bool
) -> Tensor:
    ids, labels = batch["input_ids"], batch["labels"][:, 1:]
    logits = model(ids)[:, :-1]
    with torch.no_grad():
        wanted = teacher(ids)[:, :-1]
    counted = labels != -100
    terms = divergence_term(
        logits[counted] / temperature, wanted[counted] / temperature, "reverse", in_log_space=in_log_space
    )
    hard = F.cross_entropy(logits[counted], labels[counted])
    return 0.5 * hard + 0.5 * temperature**2 * terms.mean()


@report("MakazhanAlpamys/Soup#736", "distillation", "finite")
def probabilities_underflow(*, faulty: bool) -> Arguments:
    """At a low temperature, the student's probabilities reach 0 where their logarithm is derived: NaN."""
    loss = partial(distilled_loss, teacher=frozen_teacher(1), temperature=0.05, in_log_space=not faulty)
    return setup(Student, answered(102), loss, configure_adamw, declare={"pad_id": PAD, "trained": True})


def kd_loss(
    model: nn.Module,
    batch: dict[str, Tensor],
    *,
    teacher: nn.Module,
    weigh_by_student: bool,
    temperature: float = 2.0,
    alpha: float = 0.3,
) -> Tensor:
    """Return a share of the cross-entropy and the rest of the divergence from softened probabilities."""
    ids, labels = batch["input_ids"], batch["labels"][:, 1:].flatten()
    logits = model(ids)[:, :-1].flatten(0, 1)
    with torch.no_grad():
        wanted = teacher(ids)[:, :-1].flatten(0, 1)
    p, q = (wanted / temperature).log_softmax(-1), (logits / temperature).log_softmax(-1)
    if weigh_by_student:
        p, q = q, p
    soft = (p.exp() * (p - q)).sum(-1)
    counted = (labels != -100).float()
    soft = (soft * counted).sum() / counted.sum()
    return alpha * F.cross_entropy(logits, labels, ignore_index=-100) + (1 - alpha) * temperature**2 * soft


@report("paiml/aprender#2153", "distillation")
def divergence_the_other_way(*, faulty: bool) -> Arguments:
    """The divergence of distillation is weighed by the student's probabilities instead of the teacher's."""
    loss = partial(kd_loss, teacher=frozen_teacher(2), weigh_by_student=faulty)
    return setup(Student, answered(103), loss, configure_adamw, declare={"pad_id": PAD, "trained": True})


# ---------------------------------------------------------------------------------------- policy gradients


def rollout(policy: nn.Module, seed: int, groups: int = 2, size: int = 4) -> dict[str, Tensor]:
    """Return groups of completions, their advantages, and what the policies said when they were drawn."""
    lengths = (24, 16, 20, 13, 22, 18, 12, 24)
    ids, real = padded_text(lengths, seed=seed)
    for number, group in enumerate(ids.view(groups, size, -1)):
        group[:, :6] = text(1, 6, seed=seed + number + 1)
    completion = real.bool()
    completion[:, :6] = False
    rewards = torch.rand(groups, size, generator=generator(seed)).round(decimals=1)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    noise = generator(seed + 9)
    behind = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in behind.parameters():  # the sampler lags some steps behind
            parameter += 0.01 * torch.randn(parameter.shape, generator=noise)
        old, reference = gathered_logps(behind(ids), ids), gathered_logps(policy(ids), ids)
    return {
        "completion_ids": ids,
        "completion_mask": completion[:, 1:].float(),
        "advantages": advantages.flatten(),
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
    }


def grpo_loss(
    model: nn.Module, batch: dict[str, Tensor], *, sum_first: bool, epsilon: float = 0.2, beta: float = 0.04
) -> Tensor:
    """Return the clipped loss and the penalty of each token, averaged over a completion, then over all."""
    mask = batch["completion_mask"]
    logps = gathered_logps(model(batch["completion_ids"]), batch["completion_ids"])
    old, reference = batch["old_per_token_logps"], batch["ref_per_token_logps"]
    if sum_first:
        logps, old, reference = ((part * mask).sum(1, keepdim=True) for part in (logps, old, reference))
        mask = torch.ones_like(logps)
    ratio = torch.exp(logps - old)
    advantages = batch["advantages"].unsqueeze(1)
    clipped = torch.clamp(ratio, 1 - epsilon, 1 + epsilon)
    policy = -torch.minimum(ratio * advantages, clipped * advantages)
    penalty = torch.exp(reference - logps) - (reference - logps) - 1
    return (((policy + beta * penalty) * mask).sum(1) / mask.sum(1)).mean()


@report("walkinglabs/hands-on-modern-rl#75", "policy gradients")
def one_ratio_for_a_completion(*, faulty: bool) -> Arguments:
    """GRPO sums the log-probabilities of a completion first: one ratio, one clip, one penalty for all."""
    torch.manual_seed(0)
    policy = GPT()
    return {
        "model": policy,
        "batch": rollout(policy, 104),
        "loss": partial(grpo_loss, sum_first=faulty),
        "optimizer": plain_adamw(policy, 5e-4),
        "declare": {"pad_id": PAD},
    }


class Controller(nn.Module):
    """A causal Transformer over observations of an episode that gives the logits of actions and values."""

    def __init__(self, features: int = 12, actions: int = 5, dim: int = 48, steps: int = 16):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(features, dim), nn.LayerNorm(dim))
        self.pos = nn.Parameter(0.02 * torch.randn(1, steps, dim))
        self.blocks = nn.ModuleList(Block(dim, 4, causal=True) for _ in range(2))
        self.ln_f = nn.LayerNorm(dim)
        self.actor = nn.Linear(dim, actions)
        self.critic = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, 1))
        nn.init.orthogonal_(self.actor.weight, gain=0.01)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(observations) + self.pos
        for block in self.blocks:
            x = block(x)
        x = self.ln_f(x)
        return self.actor(x), self.critic(x).squeeze(-1)


def generalized_advantages(
    batch: dict[str, Tensor], *, bootstrap: str, gamma: float = 0.99, lam: float = 0.95
) -> Tensor:
    """Return advantages `[B, T]`; at the end of an episode, the value of what comes next may be added."""
    ends = batch["terminated"] | batch["truncated"]
    adds = ends if bootstrap == "always" else batch["truncated"]
    rewards = batch["rewards"] + gamma * batch["next_values"] * adds
    running = torch.zeros(len(rewards))
    advantages = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        goes_on = (~ends[:, t]).float()
        delta = rewards[:, t] + gamma * batch["next_values"][:, t] * goes_on - batch["values"][:, t]
        running = delta + gamma * lam * goes_on * running
        advantages[:, t] = running
    return advantages


def ppo_loss(model: nn.Module, batch: dict[str, Tensor], *, bootstrap: str) -> Tensor:
    advantages = generalized_advantages(batch, bootstrap=bootstrap)
    returns = advantages + batch["values"]
    valid = batch["valid"].float()
    mean = (advantages * valid).sum() / valid.sum()
    spread = ((advantages - mean).square() * valid).sum() / valid.sum()
    normed = (advantages - mean) / (spread.sqrt() + 1e-8)
    logits, values = model(batch["observations"])
    logps = logits.log_softmax(-1)
    chosen = logps.gather(-1, batch["actions"].unsqueeze(-1)).squeeze(-1)
    ratio = (chosen - batch["old_logps"]).exp()
    policy = -torch.min(ratio * normed, ratio.clamp(0.8, 1.2) * normed)
    critic = 0.5 * (values - returns).square()
    entropy = -(logps.exp() * logps).sum(-1)
    return ((policy + 0.5 * critic - 0.01 * entropy) * valid).sum() / valid.sum()


def episodes(seed: int, rows: int = 8, steps: int = 16) -> dict[str, Tensor]:
    """Return episodes that succeed early or run out of time, with the values of what follows each step."""
    draw = generator(seed)
    lengths = torch.tensor([9, 16, 12, 16, 7, 14, 16, 11][:rows])
    last = torch.arange(steps) == lengths[:, None] - 1
    in_time = (lengths < steps)[:, None]
    values = 0.5 + 0.3 * torch.randn(rows, steps + 1, generator=draw)
    return {
        "observations": torch.randn(rows, steps, 12, generator=draw),
        "actions": torch.randint(0, 5, (rows, steps), generator=draw),
        "old_logps": -1.6 + 0.1 * torch.randn(rows, steps, generator=draw),
        "values": values[:, :-1],
        "next_values": values[:, 1:],
        "rewards": (last & in_time).float(),
        "terminated": last & in_time,
        "truncated": last & ~in_time,
        "valid": inside(lengths.tolist(), steps),
    }


@report("RLinf/RLinf#661", "policy gradients")
def value_added_after_success(*, faulty: bool) -> Arguments:
    """PPO adds the value of a next state to the last reward of episodes that ended by themselves, too."""
    loss = partial(ppo_loss, bootstrap="always" if faulty else "truncation")
    return remade(Controller, episodes(105), loss, plain_adamw)


# ------------------------------------------------------------------------------------- preference training


def simpo_loss(
    model: nn.Module,
    batch: dict[str, Tensor],
    *,
    count_the_end: bool,
    beta: float = 2.5,
    gamma: float = 1.4,
    ignore_eos_token: bool = True,
) -> Tensor:
    """Return the loss of mean log-probabilities, which leave out the token that ends an answer."""
    means = []
    for side in ("chosen", "rejected"):
        ids, response = batch[side], batch[f"{side}_response"]
        lengths = response.sum(-1)
        scored = response
        if ignore_eos_token:
            scored = response & (ids[:, 1:] != EOS)
            lengths = lengths if count_the_end else scored.sum(-1)
        means.append((gathered_logps(model(ids), ids) * scored).sum(-1) / lengths)
    return -F.logsigmoid(beta * (means[0] - means[1]) - gamma).mean()


def preferred(seed: int) -> dict[str, Tensor]:
    """Return short and long answers to the same prompts; each ends with EOS."""
    batch: dict[str, Tensor] = {}
    lengths = {"chosen": (12, 20, 9, 16), "rejected": (18, 10, 15, 8)}
    for number, (side, long) in enumerate(lengths.items()):
        ids, real = padded_text(long, seed=seed + number)
        ids[:, :5] = text(4, 5, seed=seed + 5)
        response = real.bool()
        response[:, :5] = False
        batch[side], batch[f"{side}_response"] = ids, response[:, 1:]
    return batch


@report("PaddlePaddle/PaddleFormers#4909", "preference training")
def end_counted_in_lengths(*, faulty: bool) -> Arguments:
    """Sums leave out the end token as asked for, but are divided by lengths that include it."""
    loss = partial(simpo_loss, count_the_end=faulty)
    return setup(GPT, preferred(106), loss, plain_adamw, declare={"pad_id": PAD})


# ------------------------------------------------------------------------------------------------ adapters


class LoRALinear(nn.Module):
    """A frozen map with a low-rank correction of its dropped-out inputs."""

    def __init__(self, width: int, out: int, *, rank: int, alpha: float, dropout: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, width), requires_grad=False)
        self.dropout = nn.Dropout(dropout)
        self.lora_a = nn.Linear(width, rank, bias=False)
        self.lora_b = nn.Linear(rank, out, bias=False)
        self.scaling = alpha / rank
        nn.init.normal_(self.weight, std=width**-0.5)
        nn.init.kaiming_uniform_(self.lora_a.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + self.scaling * self.lora_b(self.lora_a(self.dropout(x)))


class LoRABlock(nn.Module):
    """A Llama block whose query, value and output maps have adapters."""

    def __init__(self, dim: int, heads: int, make_map: Callable[[int, int], nn.Module]):
        super().__init__()
        self.heads = heads
        self.sa_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q_proj, self.v_proj, self.output_proj = (make_map(dim, dim) for _ in range(3))
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.w1, self.w3 = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.w2 = nn.Linear(2 * dim, dim, bias=False)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.sa_norm(x)
        q, k, v = self.split(self.q_proj(h)), self.split(self.k_proj(h)), self.split(self.v_proj(h))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output_proj(y.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class LoRADecoder(nn.Module):
    def __init__(self, make_map: Callable[[int, int], nn.Module], dim: int = 48, layers: int = 2):
        super().__init__()
        self.tok_embeddings, self.positions = nn.Embedding(VOCAB, dim), nn.Embedding(48, dim)
        self.layers = nn.ModuleList(LoRABlock(dim, 4, make_map) for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("lora_" in name)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def causal_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def lora_decoder(*, rank: int = 8, alpha: float = 16, lora_dropout: float, forget_dropout: bool) -> nn.Module:
    """Build a decoder with adapters, as a recipe asks for them."""
    options: dict[str, Any] = {"rank": rank, "alpha": alpha}
    if not forget_dropout:
        options["dropout"] = lora_dropout
    return LoRADecoder(partial(LoRALinear, **options))


FROZEN_BASE = ("tok_embeddings.*", "positions.*", "layers.*_norm.*", "layers.*_proj.weight", "layers.*.w?.*")
FROZEN_DECODER = (*FROZEN_BASE, "norm.*", "output.*")


@report("meta-pytorch/torchtune#996", "adapters")
def dropout_of_adapters_lost(*, faulty: bool) -> Arguments:
    """The builder takes the dropout of adapters, but does not pass it on: none is applied."""
    make = partial(lora_decoder, lora_dropout=0.1, forget_dropout=faulty)
    ids = text(4, 28, seed=107)
    return setup(make, ids, causal_loss, partial(plain_adamw, lr=3e-3), declare={"frozen": FROZEN_DECODER})


class WrappedLinear(nn.Module):
    """A frozen base layer with adapters beside it, which may be merged for sampling."""

    def __init__(self, base_layer: nn.Linear, rank: int, alpha: int, *, draw_both: bool):
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.empty(rank, base_layer.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base_layer.out_features, rank))
        self.scale = alpha / rank
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        if draw_both:
            nn.init.kaiming_uniform_(self.lora_B, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.scale * (x @ self.lora_A.T @ self.lora_B.T)


class FrameGenerator(nn.Module):
    """A velocity field over the latent frames of a video, conditioned on a caption's embedding."""

    def __init__(self, channels: int = 8, dim: int = 48):
        super().__init__()
        self.patch_embed, self.condition = nn.Linear(channels, dim), nn.Linear(16, dim)
        self.time = nn.Sequential(nn.Linear(1, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.pos = nn.Parameter(0.02 * torch.randn(24, dim))
        self.blocks = nn.ModuleList(Block(dim, 4, causal=False) for _ in range(2))
        self.norm_out, self.proj_out = nn.LayerNorm(dim), nn.Linear(dim, channels)

    def forward(self, latents: Tensor, t: Tensor, caption: Tensor) -> Tensor:
        x = self.patch_embed(latents) + self.pos
        x = x + (self.condition(caption) + self.time(t[:, None]))[:, None]
        for block in self.blocks:
            x = block(x)
        return self.proj_out(self.norm_out(x))


def with_adapters(*, draw_both: bool, targets: tuple[str, ...] = ("c_attn", "c_proj")) -> nn.Module:
    """Return a frozen generator in which the named maps have adapters."""
    model = FrameGenerator().requires_grad_(False)
    for block in model.blocks:
        for name in targets:
            setattr(block, name, WrappedLinear(getattr(block, name), 8, 16, draw_both=draw_both))
    return model


def velocity_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    latents, caption = batch
    noise, t = torch.randn_like(latents), torch.rand(len(latents), device=latents.device)
    noised = (1 - t[:, None, None]) * latents + t[:, None, None] * noise
    return F.mse_loss(model(noised, t, caption), noise - latents)


@report("hao-ai-lab/FastVideo#781", "adapters", "adapters", "start")
def both_factors_drawn(*, faulty: bool) -> Arguments:
    """Both factors of an adapter are drawn at random, so that training starts from another model."""
    draw = generator(108)
    batch = (torch.randn(6, 24, 8, generator=draw), torch.randn(6, 16, generator=draw))
    make = partial(with_adapters, draw_both=faulty)
    others = (
        "patch_embed.*",
        "condition.*",
        "time.*",
        "pos",
        "norm_out.*",
        "proj_out.*",
        "blocks.*.base_layer.*",
    )
    frozen = (*others, "blocks.*.ln_?.*", "blocks.*.c_fc.*", "blocks.*.mlp_proj.*")
    return setup(make, batch, velocity_loss, partial(plain_adamw, lr=2e-3), declare={"frozen": frozen})


# ----------------------------------------------------------------------------- recurrences and state spaces


class Mamba2(nn.Module):
    """A Mamba 2 mixer in its quadratic form, with one group of input and output maps."""

    def __init__(self, dim: int, *, same_for_all: bool, heads: int = 8, state: int = 8, kernel: int = 4):
        super().__init__()
        self.inner, self.heads, self.state = 2 * dim, heads, state
        self.in_proj = nn.Linear(dim, 2 * self.inner + 2 * state + heads, bias=False)
        width = self.inner + 2 * state
        self.conv1d = nn.Conv1d(width, width, kernel, groups=width, padding=kernel - 1)
        if same_for_all:
            self.dt_bias = nn.Parameter(torch.ones(heads))
            rates = torch.arange(1, heads + 1).float()
        else:
            dt = torch.exp(torch.rand(heads) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
            dt = dt.clamp(min=1e-4)
            self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
            rates = torch.empty(heads).uniform_(0, 16)
        self.A_log = nn.Parameter(torch.log(rates))
        self.D = nn.Parameter(torch.ones(heads))
        self.norm, self.out_proj = nn.RMSNorm(self.inner), nn.Linear(self.inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        sizes = (self.inner, self.inner + 2 * self.state, self.heads)
        z, mixed, dt = self.in_proj(x).split(sizes, dim=-1)
        mixed = F.silu(self.conv1d(mixed.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        values, b, c = mixed.split((self.inner, self.state, self.state), dim=-1)
        values = values.unflatten(-1, (self.heads, -1))
        dt = F.softplus(dt + self.dt_bias)
        decay = (-dt * self.A_log.exp()).transpose(1, 2).cumsum(-1)  # [B, H, T]
        gaps = decay[..., :, None] - decay[..., None, :]
        past = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        kept = gaps.masked_fill(~past, -torch.inf).exp()
        scores = torch.einsum("btn,bsn->bts", c, b)[:, None] * kept * dt.transpose(1, 2)[:, :, None]
        y = torch.einsum("bhts,bshp->bthp", scores, values) + self.D[:, None] * values
        return self.out_proj(self.norm(y.flatten(2) * F.silu(z)))


class MambaLM(nn.Module):
    def __init__(self, dim: int = 32, layers: int = 3, *, same_for_all: bool):
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB, dim)
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(layers))
        self.mixers = nn.ModuleList(Mamba2(dim, same_for_all=same_for_all) for _ in range(layers))
        self.norm_f, self.lm_head = nn.RMSNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        nn.init.normal_(self.embeddings.weight, std=0.02)
        nn.init.normal_(self.lm_head.weight, std=0.02)
        for mixer in self.mixers:
            nn.init.normal_(mixer.in_proj.weight, std=0.02)
            nn.init.normal_(mixer.out_proj.weight, std=0.02 / math.sqrt(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embeddings(ids)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return self.lm_head(self.norm_f(x))


@report("fla-org/flash-linear-attention#739", "recurrences")
def heads_start_with_long_steps(*, faulty: bool) -> Arguments:
    """Mamba 2 starts with steps of 1.3 in all heads and rates 1, 2, 3 and so on, instead of drawn ones."""
    return setup(partial(MambaLM, same_for_all=faulty), text(4, 32, seed=109), causal_loss, configure_adamw)


# ----------------------------------------------------------------------------------- multi-token prediction


class FurtherHeads(nn.Module):
    """A decoder with two further depths, each of which reads the states before it and the next token."""

    def __init__(self, dim: int = 48, depths: int = 2):
        super().__init__()
        self.trunk = GPT(dim, layers=2)
        self.enorm = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depths))
        self.hnorm = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depths))
        self.eh_proj = nn.ModuleList(nn.Linear(2 * dim, dim, bias=False) for _ in range(depths))
        self.blocks = nn.ModuleList(Block(dim, 4, causal=True) for _ in range(depths))
        self.ln_out = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depths))
        for block in self.blocks:
            gpt2_init(block, depths)

    def forward(self, ids: Tensor) -> list[Tensor]:
        """Return the logits of each depth."""
        states = self.trunk.states(ids)
        logits = [self.trunk.lm_head(states)]
        for depth in range(len(self.blocks)):
            ahead = self.trunk.wte(ids.roll(-depth - 1, 1))
            joined = torch.cat((self.enorm[depth](ahead), self.hnorm[depth](states)), dim=-1)
            states = self.blocks[depth](self.eh_proj[depth](joined))
            logits.append(self.trunk.lm_head(self.ln_out[depth](states)))
        return logits


def rolled(x: Tensor) -> Tensor:
    """Move a row to the left and fill its end with zeros."""
    return F.pad(x[:, 1:], (0, 1))


def per_token_loss(
    model: nn.Module, batch: dict[str, Tensor], *, divide_by_main: bool, weight: float = 0.3
) -> Tensor:
    """Return the sum of token losses over the number of tokens, and a share of that of further depths."""
    labels, mask = rolled(batch["tokens"]), rolled(batch["loss_mask"])
    main_count = mask.sum()
    total: Tensor | float = 0.0
    logits = model(batch["tokens"])
    for depth, each in enumerate(logits):
        losses = F.cross_entropy(each.transpose(1, 2), labels, reduction="none") * mask
        count = main_count if divide_by_main else mask.sum()
        total = total + losses.sum() / count * (1.0 if depth == 0 else weight / (len(logits) - 1))
        labels, mask = rolled(labels), rolled(mask)
    return total


@report("NVIDIA/Megatron-LM#3159", "multi-token prediction", "reduction")
def ahead_divided_by_the_main_count(*, faulty: bool) -> Arguments:
    """Sums of the further depths, whose masks hide more tokens, are divided by the main head's count."""
    ids, real = padded_text((32, 12, 21, 9), seed=110)
    batch = {"tokens": ids, "loss_mask": real.float()}
    loss = partial(per_token_loss, divide_by_main=faulty)
    return setup(FurtherHeads, batch, loss, configure_adamw, declare={"pad_id": PAD})


# ------------------------------------------------------------------------------------------------- pairs


class TextEmbedder(nn.Module):
    """A decoder whose last state, projected and of length one, stands for a text padded on the left."""

    def __init__(self, dim: int = 48, width: int = 32):
        super().__init__()
        self.model = Decoder(dim, layers=2)
        self.model.lm_head = nn.Linear(dim, width, bias=False)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        past = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        itself = torch.eye(ids.shape[1], dtype=torch.bool, device=ids.device)
        seen = (mask.bool()[:, None, None] & past) | itself
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return F.normalize(self.model(ids, seen, positions)[:, -1], dim=-1)


def groups_of(embeddings: Tensor, sizes: list[int], hard_negatives: int, *, skip: int) -> list[Tensor]:
    """Return anchor, positive and negatives of each sample, with as many negatives as are asked for."""
    groups = []
    for group in embeddings.split(sizes):
        missing = hard_negatives - (len(group) - 2)
        if missing > 0:
            drawn = torch.randint(0, len(group) - 2, (missing,)) + skip
            group = torch.cat((group, group[drawn]))
        groups.append(group)
    return groups


def info_nce(model: nn.Module, batch: dict[str, Any], *, skip: int, temperature: float = 0.1) -> Tensor:
    """Return the loss of finding each anchor's positive among its negatives and all other documents."""
    embeddings = model(batch["input_ids"], batch["attention_mask"])
    groups = torch.stack(groups_of(embeddings, batch["sizes"], 3, skip=skip))
    anchors, documents = groups[:, 0], groups[:, 1:]
    scores = anchors @ documents.flatten(0, 1).T / temperature
    wanted = torch.arange(len(groups), device=scores.device) * documents.shape[1]
    return F.cross_entropy(scores, wanted)


@report("modelscope/ms-swift#10068", "pairs")
def positives_among_the_negatives(*, faulty: bool) -> Arguments:
    """Negatives that are missing are drawn from the positive on and without the last, by one too early."""
    sizes = [3, 4, 3, 5, 3]
    lengths = torch.randint(6, 15, (sum(sizes),), generator=generator(111))
    lengths[0] = 14
    real = inside(lengths.tolist(), 14).flip(1)
    ids = text(sum(sizes), 14, seed=111).masked_fill(~real, PAD)
    batch = {"input_ids": ids, "attention_mask": real.long(), "sizes": sizes}
    loss = partial(info_nce, skip=1 if faulty else 2)
    return setup(TextEmbedder, batch, loss, partial(plain_adamw, lr=5e-4), declare={"pad_id": PAD})


# ----------------------------------------------------------------------------------- mixtures of experts


class TopKExperts(nn.Module):
    """Feed-forwards of which each token takes the best few, by weights that are normalised."""

    def __init__(self, dim: int, experts: int, top_k: int, *, normalize_single: bool):
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim)) for _ in range(experts)
        )
        self.top_k, self.normalize_single = top_k, normalize_single

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the experts give, and how unevenly they are used."""
        flat = x.flatten(0, 1)
        scores = self.gate(flat).softmax(-1)
        weights, chosen = scores.topk(self.top_k, dim=-1)
        if self.top_k > 1 or self.normalize_single:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(flat[token]) * weights[token, place, None])
        share = F.one_hot(chosen, scores.shape[-1]).float().mean((0, 1))
        return out.view_as(x), scores.shape[-1] * (share * scores.mean(0)).sum()


class SparseGPT(nn.Module):
    """A GPT with experts between its blocks."""

    def __init__(self, dim: int = 48, *, normalize_single: bool):
        super().__init__()
        self.gpt = GPT(dim, layers=2)
        self.ln_moe = nn.LayerNorm(dim)
        self.moe = TopKExperts(dim, 4, 1, normalize_single=normalize_single)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        gpt = self.gpt
        x = gpt.wte(ids) + gpt.wpe.weight[: ids.shape[1]]
        x = gpt.h[0](x)
        y, balance = self.moe(self.ln_moe(x))
        x = gpt.h[1](x + y)
        return gpt.lm_head(gpt.ln_f(x)), balance


def balanced_loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits, balance = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + 0.01 * balance


@report("jingyaogong/minimind#859", "mixtures of experts", since=("gradients",))
def single_weight_normalised(*, faulty: bool) -> Arguments:
    """Weights are normalised though a token has one expert: each is 1, and only balance trains the router."""
    make = partial(SparseGPT, normalize_single=faulty)
    return setup(make, text(4, 24, seed=112), balanced_loss, partial(configure_adamw, lr=2e-3))
