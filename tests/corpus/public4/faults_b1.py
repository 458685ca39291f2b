"""Reports of answers, preferences, policies, labels, adapters, speech and recurrences."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.batches import BOS, EOS, PAD, VOCAB, generator, inside, padded_text, text
from corpus.public2.blocks import remade, setup

from .case import report
from .parts_b import (
    Batch,
    Llama,
    decayed_adamw,
    draw_weights,
    logps_of_next,
    masked_mean,
    next_token_loss,
    trained_adamw,
)

if TYPE_CHECKING:
    from corpus.case import Arguments

# ------------------------------------------------------------------------------------------------- answers


def conversations(seed: int, rows: int = 4, turn: int = 7) -> Batch:
    """Return three turns of a user and an assistant in each row, and which tokens the assistant says."""
    ids = text(rows, 6 * turn, seed=seed)
    ids[:, 0] = BOS
    said = torch.zeros_like(ids)
    for answer in range(3):
        begin = (2 * answer + 1) * turn
        said[:, begin + 1 : begin + turn] = 1  # behind the header of the turn
        ids[:, begin + turn - 1] = EOS
    return {"input_ids": ids, "loss_mask": said}


def turns_loss(model: nn.Module, batch: Batch, *, mask_of_inputs: bool) -> Tensor:
    """Return the mean loss of what the assistant says."""
    losses = -logps_of_next(model(batch["input_ids"]), batch["input_ids"])
    mask = batch["loss_mask"][:, :-1] if mask_of_inputs else batch["loss_mask"][:, 1:]
    return masked_mean(losses, mask)


@report("verl-project/verl#3287", "post-training", "counted")
def answer_mask_one_token_late(*, faulty: bool) -> Arguments:
    """The mask of answers is cut like the inputs, not like the labels: no first token of one is asked for."""
    loss = partial(turns_loss, mask_of_inputs=faulty)
    return setup(Llama, conversations(401), loss, decayed_adamw, declare={"eos_id": EOS})


# --------------------------------------------------------------------------------------------- preferences


def chosen_and_rejected(seed: int) -> Batch:
    """Return answers to four prompts of several lengths, padded on the right."""
    lengths_of_prompts = torch.tensor([5, 8, 4, 10])
    prompts = text(4, 24, seed=seed + 7)
    batch = {"prompt_id_lens": lengths_of_prompts}
    lengths_of_sides = {"chosen": (18, 24, 13, 21), "reject": (15, 19, 22, 16)}
    for number, (side, lengths) in enumerate(lengths_of_sides.items()):
        ids, real = padded_text(lengths, seed=seed + number)
        for row, length in enumerate(lengths_of_prompts.tolist()):
            ids[row, :length] = prompts[row, :length]
        batch[f"{side}_ids"] = F.pad(ids, (0, 24 - ids.shape[1]), value=PAD)
        batch[f"{side}_mask"] = F.pad(real, (0, 24 - real.shape[1]))
    return batch


def summed_logps(model: nn.Module, batch: Batch, prompt_id_lens: list[int]) -> Tensor:
    """Return the log-probability of each answer, the chosen ones first; prompts as long as told are out."""
    ids = torch.cat((batch["chosen_ids"], batch["reject_ids"]))
    masks = torch.cat((batch["chosen_mask"], batch["reject_mask"])).bool()
    for mask, length in zip(masks, prompt_id_lens, strict=False):
        mask[:length] = False
    return (logps_of_next(model(ids), ids) * masks[:, 1:]).sum(-1)


def dpo_loss(
    model: nn.Module, batch: Batch, *, reference: nn.Module, lengths_of_both: bool, beta: float = 0.1
) -> Tensor:
    """Return DPO's loss; lengths of prompts are those of the pairs, or of all rows."""
    lengths = batch["prompt_id_lens"].tolist()
    if lengths_of_both:
        lengths = lengths * 2
    chosen, rejected = summed_logps(model, batch, lengths).chunk(2)
    with torch.no_grad():
        chosen_before, rejected_before = summed_logps(reference, batch, lengths).chunk(2)
    margin = (chosen - rejected) - (chosen_before - rejected_before)
    return -F.logsigmoid(beta * margin).mean()


@report("OpenRLHF/OpenRLHF#294", "preference training")
def prompts_of_rejected_counted(*, faulty: bool) -> Arguments:
    """Lengths of prompts are those of the first half of the batch: prompts of rejected answers are scored."""
    torch.manual_seed(0)
    policy = Llama()
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    return {
        "model": policy,
        "batch": chosen_and_rejected(402),
        "loss": partial(dpo_loss, reference=reference, lengths_of_both=not faulty),
        "optimizer": trained_adamw(policy, lr=5e-4),
        "declare": {"pad_id": PAD},
    }


# ---------------------------------------------------------------------------------------- policy gradients


def sampled(policy: nn.Module, seed: int, rows: int = 8, prompt: int = 6) -> Batch:
    """Return completions of two prompts by turns, with rewards, and what earlier policies said of them."""
    lengths = (24, 17, 20, 13, 22, 18, 12, 15)[:rows]
    ids, real = padded_text(lengths, seed=seed)
    prompts = text(2, prompt, seed=seed + 1)
    ids[:, :prompt] = prompts.repeat(rows // 2, 1)
    answered = real[:, 1:].clone().float()
    answered[:, : prompt - 1] = 0
    noise = generator(seed + 2)
    earlier = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in earlier.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=0.02)
        old, reference = logps_of_next(earlier(ids), ids), logps_of_next(policy(ids), ids)
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.2, 1.0, 0.4, 0.0, 0.1])[:rows]
    return {
        "input_ids": ids,
        "response_mask": answered,
        "rewards": rewards,
        "old_logps": old,
        "ref_logps": reference,
    }


def centred(rewards: Tensor, size: int, *, by_turns: bool) -> Tensor:
    """Return rewards less the mean of their group, over its deviation; groups may come by turns."""
    groups = rewards.view(size, -1).T if by_turns else rewards.view(-1, size)
    normed = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    return normed.T.flatten() if by_turns else normed.flatten()


def grouped_loss(model: nn.Module, batch: Batch, *, by_turns: bool) -> Tensor:
    """Return the clipped loss of completions, four to a prompt, averaged over all tokens."""
    advantages = centred(batch["rewards"], 4, by_turns=by_turns)[:, None]
    ratio = (logps_of_next(model(batch["input_ids"]), batch["input_ids"]) - batch["old_logps"]).exp()
    losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return masked_mean(losses, batch["response_mask"])


def policy_setup(loss: Any, seed: int, lr: float = 5e-4) -> Arguments:
    torch.manual_seed(0)
    policy = Llama()
    return {
        "model": policy,
        "batch": sampled(policy, seed),
        "loss": loss,
        "optimizer": trained_adamw(policy, lr=lr),
        "declare": {"pad_id": PAD},
    }


@report("PrimeIntellect-ai/prime-rl#600", "policy gradients")
def groups_of_unlike_prompts(*, faulty: bool) -> Arguments:
    """Prompts come by turns, but advantages take neighbouring rows for a group: prompts are mixed in it."""
    return policy_setup(partial(grouped_loss, by_turns=not faulty), 403)


def raised_clip_loss(
    model: nn.Module, batch: Batch, *, average_unclipped: bool, low: float = 0.2, high: float = 0.28
) -> Tensor:
    """Return the loss of tokens, whose ratios may rise further than they may fall."""
    advantages = centred(batch["rewards"], 4, by_turns=True)[:, None]
    ratio = (logps_of_next(model(batch["input_ids"]), batch["input_ids"]) - batch["old_logps"]).exp()
    pg_losses = -advantages * ratio
    clipped_losses = -advantages * ratio.clamp(1 - low, 1 + high)
    pg_loss = pg_losses if average_unclipped else torch.maximum(pg_losses, clipped_losses)
    return masked_mean(pg_loss, batch["response_mask"])


@report("rllm-org/rllm#81", "policy gradients")
def clipped_term_not_averaged(*, faulty: bool) -> Arguments:
    """The loss of tokens averages what was not clipped, instead of the greater one of both terms."""
    return policy_setup(partial(raised_clip_loss, average_unclipped=faulty), 404)


def penalised_loss(model: nn.Module, batch: Batch, *, score_term: bool, beta: float = 0.1) -> Tensor:
    """Return the loss of the policy and the divergence from the reference in what the policy drew."""
    logps = logps_of_next(model(batch["input_ids"]), batch["input_ids"])
    advantages = centred(batch["rewards"], 4, by_turns=True)[:, None]
    ratio = (logps - batch["old_logps"]).exp()
    losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    behind = batch["ref_logps"] - logps
    divergence = behind.exp() - behind - 1
    if score_term:  # of value 1, but its derivative is that of the probability of having drawn the token
        divergence = divergence * (logps - logps.detach()).exp()
    return masked_mean(losses + beta * divergence, batch["response_mask"])


@report("NVIDIA-NeMo/RL#2506", "policy gradients")
def divergence_without_its_score_term(*, faulty: bool) -> Arguments:
    """The divergence of drawn tokens is derived as if the policy had not drawn them itself."""
    return policy_setup(partial(penalised_loss, score_term=not faulty), 405)


# ------------------------------------------------------------------------------------------------- adapters


class DoRALinear(nn.Module):
    """A frozen map whose direction is corrected in low rank, and whose rows' lengths are learned."""

    def __init__(self, in_dim: int, out_dim: int, *, bias: bool = False, rank: int = 4, alpha: float = 8):
        super().__init__()
        self.linear = nn.Linear(in_dim, out_dim, bias=bias)
        self.lora_a = nn.Parameter(torch.empty(rank, in_dim))
        self.lora_b = nn.Parameter(torch.zeros(out_dim, rank))
        self.magnitude = nn.Parameter(torch.empty(out_dim))
        self.scaling = alpha / rank
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def lengths(self) -> Tensor:
        return (self.linear.weight + self.scaling * self.lora_b @ self.lora_a).norm(dim=1)

    @torch.no_grad()
    def initialize_dora_magnitude(self, *, replace: bool) -> None:
        """Start with the lengths of the base's rows."""
        if replace:
            lengths = self.lengths()
            self.magnitude = nn.Parameter(lengths, requires_grad=lengths.requires_grad)
        else:
            self.magnitude.copy_(self.lengths())

    def forward(self, x: Tensor) -> Tensor:
        scale = self.magnitude / self.lengths().detach()
        update = x @ self.lora_a.T @ self.lora_b.T
        return scale * (self.linear(x) + self.scaling * update)


def dora_decoder(*, replace: bool) -> nn.Module:
    """Return a decoder in which only what belongs to adapters is trained."""
    model = Llama(make_linear=DoRALinear)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or name.endswith("magnitude"))
    for module in model.modules():
        if isinstance(module, DoRALinear):
            module.initialize_dora_magnitude(replace=replace)
    return model


BASE_OF_ADAPTERS = ("embed_tokens.*", "model.*layernorm.*", "model.*.linear.*", "model.norm.*", "lm_head.*")


@report("meta-pytorch/torchtune#2250", "adapters", "frozen")
def magnitudes_not_trained(*, faulty: bool) -> Arguments:
    """Setting the start of DoRA's magnitudes makes them anew without gradients: DoRA trains as LoRA does."""
    make = partial(dora_decoder, replace=faulty)
    declare = {"frozen": BASE_OF_ADAPTERS}
    optimizer = partial(trained_adamw, lr=3e-3)
    return setup(make, text(4, 26, seed=407), next_token_loss, optimizer, declare=declare)


# --------------------------------------------------------------------------------------------------- speech


class Subsampling(nn.Module):
    """Two convolutions that halve the time each, with the mask of what is left of each row."""

    def __init__(self, features: int, dim: int, *, slice_the_mask: bool):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(features, dim, 3, 2), nn.Conv1d(dim, dim, 3, 2)
        self.out = nn.Linear(dim, dim)
        self.slice_the_mask = slice_the_mask

    def forward(self, frames: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.arange(frames.shape[1], device=frames.device) < lengths[:, None]
        x = (frames * mask[..., None]).transpose(1, 2)
        for conv in (self.conv1, self.conv2):
            x = F.relu(conv(x))
            lengths = (lengths - 3) // 2 + 1
        x = x.transpose(1, 2)
        if self.slice_the_mask:
            mask = mask[:, :-2:2][:, :-2:2]
        else:
            mask = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        return self.out(x), mask


class SpeechEncoder(nn.Module):
    """Torch's own layers over subsampled frames, trained by CTC."""

    place: Tensor

    def __init__(self, features: int = 20, dim: int = 48, tokens: int = 24, *, slice_the_mask: bool):
        super().__init__()
        self.embed = Subsampling(features, dim, slice_the_mask=slice_the_mask)
        angles = torch.arange(64)[:, None] * torch.exp(torch.arange(0, dim, 2) * (-math.log(1e4) / dim))
        self.register_buffer("place", torch.cat((angles.sin(), angles.cos()), dim=1), persistent=False)
        make_layer = partial(
            nn.TransformerEncoderLayer, dim, 4, 2 * dim, 0.0, batch_first=True, norm_first=True
        )
        self.encoders = nn.ModuleList(make_layer() for _ in range(2))
        self.after_norm, self.ctc_lo = nn.LayerNorm(dim), nn.Linear(dim, tokens)

    def forward(self, frames: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities `[B, T, V]` and how many of them each row has."""
        x, mask = self.embed(frames, lengths)
        x = x + self.place[: x.shape[1]]
        for encoder in self.encoders:
            x = encoder(x, src_key_padding_mask=~mask)
        return self.ctc_lo(self.after_norm(x)).log_softmax(-1), mask.sum(1)


def aligned_loss(model: nn.Module, batch: Batch) -> Tensor:
    logps, lengths = model(batch["speech"], batch["speech_lengths"])
    losses = F.ctc_loss(
        logps.transpose(0, 1), batch["text"], lengths, batch["text_lengths"], blank=0, reduction="none"
    )
    return (losses / batch["text_lengths"]).mean()


def utterances(seed: int) -> Batch:
    """Return frames of four utterances and their tokens."""
    draw = generator(seed)
    lengths, text_lengths = torch.tensor([83, 62, 45, 70]), torch.tensor([8, 5, 4, 7])
    speech = torch.randn(4, 83, 20, generator=draw).cumsum(1) / 4
    speech = speech.masked_fill(~inside(lengths.tolist(), 83)[..., None], 0.0)
    tokens = torch.randint(1, 24, (4, 8), generator=draw).masked_fill(~inside(text_lengths.tolist(), 8), 0)
    return {"speech": speech, "speech_lengths": lengths, "text": tokens, "text_lengths": text_lengths}


@report("espnet/espnet#6633", "speech", "rows", "padding")
def lengths_by_the_longest_row(*, faulty: bool) -> Arguments:
    """Masks of subsampled frames are cut from the end of the padded batch: rows keep frames of padding."""
    make = partial(SpeechEncoder, slice_the_mask=faulty)
    return setup(make, utterances(408), aligned_loss, decayed_adamw)


# ---------------------------------------------------------------------------------------------- recurrences


class TimeMix(nn.Module):
    """The time mixing of RWKV-7: a state that forgets, takes out what a key holds, and writes anew."""

    def __init__(self, dim: int, heads: int, *, only_decay: bool):
        super().__init__()
        self.heads, self.only_decay = heads, only_decay
        self.mix = nn.Parameter(torch.rand(6, dim))
        self.r_proj, self.k_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.v_proj, self.o_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.decay, self.rate = nn.Linear(dim, dim), nn.Linear(dim, dim)
        narrow, wide = nn.Linear(dim, 16, bias=False), nn.Linear(16, dim, bias=False)
        self.g_proj = nn.Sequential(narrow, nn.Sigmoid(), wide)
        self.k_k, self.k_a = nn.Parameter(torch.full((dim,), 0.85)), nn.Parameter(torch.ones(dim))
        self.ln_x = nn.GroupNorm(heads, dim, eps=64e-5)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))

    def parts(self, x: Tensor) -> list[Tensor]:
        """Return receptance, key, value, decay, rate and gate, each of a mixture with the last token."""
        shifted = F.pad(x, (0, 0, 1, 0))[:, :-1] - x
        inputs = [x + shifted * share for share in self.mix]
        maps = (self.r_proj, self.k_proj, self.v_proj, self.decay, self.rate, self.g_proj)
        return [project(each) for project, each in zip(maps, inputs, strict=True)]

    def delta_rule(self, r: Tensor, k: Tensor, v: Tensor, d: Tensor, a: Tensor) -> Tensor:
        """Run the state `[B, H, V, K]` over the tokens."""
        decay = torch.exp(-math.exp(-0.5) * d.sigmoid())
        a = a.sigmoid()
        removal = F.normalize(self.split(k * self.k_k), dim=-1)
        k = self.split(k * (1 + (a - 1) * self.k_a))
        r, v, decay, a = (self.split(each) for each in (r, v, decay, a))
        state = v.new_zeros(len(v), self.heads, v.shape[-1], v.shape[-1])
        outputs = []
        for t in range(v.shape[1]):
            held = (state @ removal[:, t, :, :, None]).squeeze(-1)
            state = state * decay[:, t, :, None] - held[..., None] * (a * removal)[:, t, :, None]
            state = state + v[:, t, :, :, None] * k[:, t, :, None]
            outputs.append((state @ r[:, t, :, :, None]).squeeze(-1))
        return torch.stack(outputs, dim=1).flatten(2)

    def decay_alone(self, r: Tensor, k: Tensor, v: Tensor, d: Tensor, a: Tensor) -> Tensor:
        """Run a state that only decays and adds, is read by the key, and gated by the receptance."""
        r, k, v, decay, a = (self.split(each) for each in (r, k * self.k_k, v, d.sigmoid(), a.sigmoid()))
        state = v.new_zeros(len(v), self.heads, v.shape[-1], v.shape[-1])
        outputs = []
        for t in range(v.shape[1]):
            added = (a * k)[:, t, :, :, None] * v[:, t, :, None]
            state = state * decay[:, t, :, :, None] + added
            read = (state * k[:, t, :, :, None]).sum(-2)
            outputs.append(r[:, t].sigmoid() * read)
        return torch.stack(outputs, dim=1).flatten(2) * self.k_a

    def forward(self, x: Tensor) -> Tensor:
        *parts, gate = self.parts(x)
        y = self.decay_alone(*parts) if self.only_decay else self.delta_rule(*parts)
        y = self.ln_x(y.flatten(0, 1)).view_as(x)
        return self.o_proj(y * gate)


class ChannelMix(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.x_k = nn.Parameter(torch.rand(dim))
        self.key, self.value = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        shifted = F.pad(x, (0, 0, 1, 0))[:, :-1] - x
        return self.value(F.relu(self.key(x + shifted * self.x_k)).square())


class Goose(nn.Module):
    def __init__(self, dim: int = 32, layers: int = 2, *, only_decay: bool):
        super().__init__()
        self.emb, self.ln0 = nn.Embedding(VOCAB, dim), nn.LayerNorm(dim)
        self.att = nn.ModuleList(TimeMix(dim, 4, only_decay=only_decay) for _ in range(layers))
        self.ffn = nn.ModuleList(ChannelMix(dim) for _ in range(layers))
        self.ln1 = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.ln2 = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.ln_out, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        self.apply(partial(draw_weights, std=0.1))
        for mixer in self.att:
            nn.init.uniform_(mixer.decay.bias, -3.0, 3.0)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.ln0(self.emb(ids))
        for ln1, att, ln2, ffn in zip(self.ln1, self.att, self.ln2, self.ffn, strict=True):
            x = x + att(ln1(x))
            x = x + ffn(ln2(x))
        return self.head(self.ln_out(x))


@report("ooples/AiDotNet.Tensors#895", "recurrences")
def state_only_decays(*, faulty: bool) -> Arguments:
    """RWKV-7's state takes out nothing before it writes, forgets more than it may, and is read by the key."""
    make = partial(Goose, only_decay=faulty)
    return remade(make, text(3, 16, seed=409), next_token_loss, decayed_adamw)
