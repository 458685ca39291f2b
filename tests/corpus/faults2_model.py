"""Faults of streams, starts, losses, precision and steps, second list."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from .case import Arguments, Case, collect
from .faults_model import changed
from .gpt import GPT, Block, made_of, small, untied, with_one
from .library import GPT2, GROUPED, PADDED, library
from .places import OPTIMIZER, SCHEDULER, STEP
from .rotary import RotaryGPT
from .setups import (
    LENGTH,
    accumulate,
    adamw,
    adamw_of_trained,
    advance,
    decay_groups,
    halves,
    language_batch,
    own,
    padded_batch,
    shifted_tokens,
    tokens,
    with_loss,
)

FAULTS2: dict[str, Case] = {}
fault = collect(FAULTS2)
Batch = tuple[Tensor, ...]


def llama() -> Arguments:
    """Return the step of a sound Llama on padded rows."""
    return library("LlamaForCausalLM", GROUPED, padded_batch(), PADDED)


def gpt2() -> Arguments:
    """Return the step of a sound GPT-2."""
    return library("GPT2LMHeadModel", GPT2, language_batch())


# ------------------------------------------------------------------------------------------------- streams


@fault("residual", "siblings", place="h.2*")
def one_postnorm() -> Arguments:
    """One layer is Post-LN among Pre-LN."""
    return own(changed(lambda model: setattr(model.h[2], "post", True)))


class Doubled(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


@fault("residual", place="h.0*")
def double_stream() -> Arguments:
    """Each layer adds its input to an output that holds it already."""
    return own(made_of(Doubled))


class Halved(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = 0.5 * x + self.attention(self.n1(x))
        return x + self.m(self.n2(x))


@fault("residual", place="h.1*")
def half_stream_one() -> Arguments:
    """One layer halves the stream."""
    return own(with_one(Halved, 1))


class OutOfOrder(GPT):
    def blocks(self, x: Tensor) -> Tensor:
        for i in (0, 2, 1, 3):
            x = self.h[i](x)
        return x


@fault("residual", place="h|h.1|h.2")
def reversed_blocks() -> Arguments:
    """The second and the third layer run in the wrong order."""
    return own(lambda: OutOfOrder(64, 4))


class DetachedEnd(GPT):
    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.nf(x).detach())


@fault("gradients", "derivative", place="|nf*|te*|pe*|h|h.*")
def detached_hidden() -> Arguments:
    """The head reads the final norm without its graph, so that only the head learns."""
    return own(lambda: DetachedEnd(64, 4, tied=False))


@fault("frozen", place="te*")
def frozen_emb() -> Arguments:
    """The embedding is frozen while all else is trained."""

    def make() -> GPT:
        model = untied()
        model.te.requires_grad_(False)
        return model

    return own(make, optimizer=adamw_of_trained)


@fault("nonlinear", place="h.0*")
def no_act() -> Arguments:
    """No feed-forward has an activation."""

    def remove(model: GPT) -> None:
        for block in model.h:
            block.m[1] = nn.Identity()

    return own(changed(remove))


@fault("norms", place="|nf|head*|h.3")
def no_final_norm() -> Arguments:
    """The head reads the stream without a norm."""
    return own(changed(lambda model: setattr(model, "nf", nn.Identity())))


# ------------------------------------------------------------------------------------------ starts, buffers


@fault("start", place="h.4*")
def ratio_1_05() -> Arguments:
    """One matrix is 5% larger than its siblings."""

    def make() -> GPT:
        model = GPT(128, 6)
        model.h[4].m[0].weight.data.mul_(1.05)
        return model

    return own(make)


@fault("start", place="h.2*")
def norm_gain_half() -> Arguments:
    """The gains of one norm are 0.5, where the others' are 1."""
    return own(changed(lambda model: model.h[2].n2.weight.data.fill_(0.5), layers=6))


@fault("buffers", place="model.rotary_emb*")
def hf_inv_freq() -> Arguments:
    """The frequencies of the rotary embedding are half of what the class computes."""
    arguments = llama()
    arguments["model"].model.rotary_emb.inv_freq.mul_(0.5)
    return arguments


@fault("finite", "buffers", place="model.rotary_emb*")
def nan_buffer() -> Arguments:
    """One frequency of the rotary embedding is not a number."""
    arguments = llama()
    arguments["model"].model.rotary_emb.inv_freq[3] = float("nan")
    return arguments


@fault("ties", place="lm_head*|transformer.wte*")
def untied_head() -> Arguments:
    """The config says tied, and the head has a matrix of its own."""
    arguments = gpt2()
    head = arguments["model"].lm_head
    head.weight = nn.Parameter(torch.randn_like(head.weight) * 0.02)
    return arguments | {"optimizer": adamw(arguments["model"])}


class InBfloat16(nn.Module):
    """A part of the model in lower precision."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.l = inner.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x.bfloat16()).float()


@fault("siblings", "precision", place="transformer.h.2*")
def one_half() -> Arguments:
    """The feed-forward of one layer is in bfloat16, all else in float32."""
    arguments = gpt2()
    layer = arguments["model"].transformer.h[2]
    layer.mlp = InBfloat16(layer.mlp)
    return arguments | {"optimizer": adamw(arguments["model"])}


# -------------------------------------------------------------------------------------------------- losses


@fault("reduction", place="loss")
def loss_sum() -> Arguments:
    """The loss is a sum over tokens."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        logits = model(ids[:, :-1])[0].transpose(1, 2)
        return F.cross_entropy(logits, ids[:, 1:], reduction="sum")

    return with_loss(small, tokens(length=LENGTH + 1), loss, decay_groups)


@fault("reduction", "counted", place="loss|labels|targets|1")
def loss_div_all() -> Arguments:
    """The loss is divided by all labels, ignored ones among them."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0])[0].transpose(1, 2), batch[1], reduction="none").mean()

    ids, labels = shifted_tokens()
    labels = labels.clone()
    labels[1, 10:] = -100
    labels[2, 5:] = -100
    return with_loss(small, (ids, labels), loss, decay_groups)


class Probabilities(nn.Module):
    """A model that returns probabilities."""

    def __init__(self):
        super().__init__()
        self.g = small()

    def forward(self, ids: Tensor) -> Tensor:
        return self.g(ids)[0].softmax(-1)


@fault("explained", place="|loss|g|g.head")
def double_softmax() -> Arguments:
    """The loss takes the model's probabilities for logits."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1])

    return with_loss(Probabilities, shifted_tokens(), loss, decay_groups)


# --------------------------------------------------------------------------------------- optimizer, schedule


@fault("schedule", place=SCHEDULER)
def sched_peak() -> Arguments:
    """The schedule returns the rate, with which torch multiplies the rate."""
    arguments = own(small, scheduled=False)
    scheduler = LambdaLR(arguments["optimizer"], lambda i: 1e-3 * min(1, i / 100))
    return arguments | {"scheduler": scheduler}


@fault("schedule", place=SCHEDULER)
def sched_other() -> Arguments:
    """The scheduler steers another optimizer."""
    arguments = own(small, scheduled=False)
    other = decay_groups(arguments["model"])
    return arguments | {"scheduler": LambdaLR(other, lambda i: min(1, (i + 1) / 100))}


def climbing(model: nn.Module, lr: float) -> AdamW:
    return AdamW(model.parameters(), lr=lr, maximize=True)


@fault("update", "overfit", place=OPTIMIZER)
def maximize() -> Arguments:
    """The optimizer climbs the loss."""
    return own(small, optimizer=climbing)


class Muon(SGD):
    """Steps matrices by their gradient's nearest orthogonal matrix, and vectors by their gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if p.ndim == 2:
                left, _, right = torch.linalg.svd(p.grad, full_matrices=False)
                p.grad.copy_(left @ right)
        super().step()


@fault("groups", place="optimizer|te*|pe*|head*|nf*|h.0*")
def muon_all() -> Arguments:
    """Muon holds embeddings, head and vectors, too."""
    return own(small, optimizer=lambda model, lr: Muon(model.parameters(), lr=lr))


@fault("update", place="")
def bf16_tiny_lr() -> Arguments:
    """A rate of 1e-6 is too small for weights in bfloat16: most updates are rounded away."""
    arguments = own(lambda: RotaryGPT().to(torch.bfloat16), step=None, scheduled=False)
    optimizer = AdamW(arguments["model"].parameters(), lr=1e-6)
    return arguments | {"optimizer": optimizer, "lr": None}


# ---------------------------------------------------------------------------------------------------- step


@fault("step", place=STEP)
def step_each() -> Arguments:
    """The optimizer steps after each micro-batch."""

    def step(model: GPT, batch: Batch, optimizer: Optimizer, scheduler: LRScheduler | None) -> Tensor:
        model.train()
        total = torch.zeros(())
        for half in halves(batch):
            optimizer.zero_grad()
            loss = model(*half)[1]
            loss.backward()
            total += loss.detach() / 2
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
        return total

    return own(small, step=step)


@fault("step", place=STEP)
def step_eval() -> Arguments:
    """The model is in evaluation mode in the training step."""

    def step(model: GPT, batch: Batch, optimizer: Optimizer, scheduler: LRScheduler | None) -> Tensor:
        model.eval()
        optimizer.zero_grad()
        loss = accumulate(model, batch)
        advance(optimizer, scheduler)
        return loss

    return own(small, step=step)
