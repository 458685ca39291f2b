"""Faults of streams, norms, gradients and starts, first list."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .case import Arguments, Case, collect
from .gpt import GPT, Block, LoRA, made_of, small, with_one
from .library import GROUPED, PADDED, library
from .other_models import DiT
from .rotary import RMS, RotaryBlock, RotaryGPT
from .rotary import made_of as rotary_of
from .setups import ROWS, adamw, adamw_of_trained, own, padded_batch, with_loss

FAULTS: dict[str, Case] = {}
fault = collect(FAULTS)


def changed(change: Callable[[GPT], Any], layers: int = 4) -> Callable[[], GPT]:
    """Return a maker of the small model with a change."""

    def make() -> GPT:
        model = GPT(64, layers)
        change(model)
        return model

    return make


# ------------------------------------------------------------------------------------------------- streams


class NoStream(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(self.n1(x))
        return x + self.m(self.n2(x))


@fault("residual", place="h.0*")
def no_residual_all() -> Arguments:
    """No attention has a residual."""
    return own(made_of(NoStream))


class NoSecondSum(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.n1(x))
        return self.m(self.n2(x))


@fault("residual", place="h.3*")
def no_residual_mlp3() -> Arguments:
    """The feed-forward of one layer has no residual."""
    return own(with_one(NoSecondSum, 3))


class DetachedNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.n1(x))
        return x + self.m(self.n2(x).detach())


@fault("gradients", "derivative", place="h.1*")
def detach_branch() -> Arguments:
    """The feed-forward of one layer reads its norm without the graph."""
    return own(with_one(DetachedNorm, 1))


class DetachedStream(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach() + self.attention(self.n1(x.detach()))
        return x + self.m(self.n2(x))


@fault("gradients", "derivative", "residual", place="h.[012]*|pe*|te*")
def detach_stream() -> Arguments:
    """One layer reads the stream without its graph, so that nothing below it learns."""
    return own(with_one(DetachedStream, 2))


class SkipsTheLast(GPT):
    def blocks(self, x: Tensor) -> Tensor:
        for block in self.h[:-1]:
            x = block(x)
        return x


@fault("gradients", "residual", place="h.3*")
def skips_last() -> Arguments:
    """The loop over the layers stops before the last."""
    return own(lambda: SkipsTheLast(64, 4))


class EachReadsTheInput(GPT):
    def blocks(self, x: Tensor) -> Tensor:
        y = x
        for block in self.h:
            y = block(x)
        return y


@fault("gradients", "residual", place="h|h.*")
def same_input() -> Arguments:
    """Each layer reads the embeddings, so that only the last one counts."""
    return own(lambda: EachReadsTheInput(64, 4))


@fault()
def shared_list() -> Arguments:
    """One layer stands four times in the list.

    Sound: nothing but a declaration tells this from ALBERT, which repeats its layer on purpose.
    """
    return own(changed(lambda model: setattr(model, "h", nn.ModuleList([model.h[0]] * 4))))


# --------------------------------------------------------------------------------------------------- norms


class RMSWithoutRoot(RMS):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps) * self.g


class RMSOverTime(RMS):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.eps) * self.g


@fault("norms", "siblings", place="layers.2*")
def rms_no_root() -> Arguments:
    """One norm divides by the mean square, not by its root."""

    def make() -> RotaryGPT:
        model = RotaryGPT()
        model.layers[2].norm1.__class__ = RMSWithoutRoot
        return model

    return own(make)


@fault("causality", "norms", "siblings", place="layers.1*")
def norm_over_time() -> Arguments:
    """One norm takes its mean square over the tokens, not over the features."""

    def make() -> RotaryGPT:
        model = RotaryGPT()
        model.layers[1].norm2.__class__ = RMSOverTime
        return model

    return own(make)


@fault("siblings", place="h.2*")
def eps_one() -> Arguments:
    """One norm has an epsilon of 1e-2, where the others have 1e-5."""
    return own(changed(lambda model: setattr(model.h[2].n1, "eps", 1e-2)))


# ----------------------------------------------------------------------------------------------- gradients


class Reentrant(GPT):
    """Embeddings without a graph in training, before re-entrant checkpoints."""

    def embed(self, ids: Tensor) -> Tensor:
        with torch.no_grad() if self.training else torch.enable_grad():
            return super().embed(ids)

    def blocks(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=True) if self.training else block(x)
        return x


@fault("gradients", "derivative", place="h|h.*|te*|pe*")
def reentrant() -> Arguments:
    """Re-entrant checkpoints give no gradient, since their input has none."""
    return own(lambda: Reentrant(64, 4), step=None)


class DetachedRouter(RotaryBlock):
    def shares(self, x: Tensor) -> Tensor:
        return super().shares(x).detach()


@fault("gradients", "derivative", place="layers.0*")
def router_detached() -> Arguments:
    """The router's shares are detached, so that it never learns."""
    return own(rotary_of(DetachedRouter, mixed=True))


@fault("frozen", "siblings", place="h.2*")
def frozen_mid() -> Arguments:
    """One layer between trained ones is frozen."""
    return own(changed(lambda model: model.h[2].requires_grad_(False)), optimizer=adamw_of_trained)


@fault("siblings", "step", place="h.1*")
def eval_mid() -> Arguments:
    """One layer is in evaluation mode in training."""
    arguments = own(small, step=None)
    arguments["model"].train()
    arguments["model"].h[1].eval()
    return arguments


class DeadLoRA(LoRA):
    def __init__(self, frozen: nn.Linear):
        super().__init__(frozen)
        nn.init.zeros_(self.down)


@fault("gradients", "start", place="h.*.qkv*")
def lora_zero() -> Arguments:
    """Both factors of each adapter are zero, so that neither gets a gradient."""

    def adapt(model: GPT) -> None:
        model.requires_grad_(False)
        for block in model.h:
            block.qkv = DeadLoRA(block.qkv)

    return own(changed(adapt), optimizer=adamw_of_trained)


class IgnoresTime(DiT):
    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, t * 0, y)


@fault("inputs", "gradients", place="t|t.*")
def ignores_t() -> Arguments:
    """A diffusion model does not read its time."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(**batch) - 1).pow(2).mean()

    draw = torch.Generator().manual_seed(0)
    images = torch.randn(ROWS, 4, 8, 8, generator=draw)
    times = torch.rand(ROWS, generator=draw) * 1000
    return with_loss(IgnoresTime, {"x": images, "t": times, "y": torch.tensor([1, 3, 5, 7])}, loss)


# --------------------------------------------------------------------------------------- starts, ties, state


@fault("start", place="h.3*")
def std_one_layer() -> Arguments:
    """One matrix is drawn with a deviation of 0.025, where its siblings have 0.02."""
    return own(changed(lambda model: nn.init.normal_(model.h[3].qkv.weight, 0, 0.025), layers=6))


@fault("seeds", "start", place="h|h.*")
def copied_layers() -> Arguments:
    """All layers are copies of the first."""

    def repeat(model: GPT) -> None:
        model.h = nn.ModuleList(copy.deepcopy(model.h[0]) for _ in range(4))

    return own(changed(repeat))


@fault("initial_loss", "start", place="te*|head*|nf|loss")
def emb_std1() -> Arguments:
    """The tied embedding keeps torch's deviation of 1."""
    return own(changed(lambda model: nn.init.normal_(model.te.weight)))


@fault("ties", "seeds", place="head*|te*")
def tie_lost() -> Arguments:
    """The head is a copy of the embedding, with which it was tied."""
    return own(
        changed(lambda model: setattr(model.head, "weight", nn.Parameter(model.te.weight.detach().clone())))
    )


class HiddenTable(GPT):
    def __init__(self):
        super().__init__(64, 4)
        self.tab = torch.randn(64, 64) * 0.3

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) + self.tab[: ids.shape[1]]


@fault("state_dict", "buffers", "meta", place="|tab*")
def hidden_table() -> Arguments:
    """A random table is a plain attribute, which no state dict holds."""
    return own(HiddenTable)


@fault("start", place="model.layers.*.mlp.down_proj*|model.layers.0*")
def hf_reinit() -> Arguments:
    """The output matrices of Llama's feed-forwards keep torch's start."""
    arguments = library("LlamaForCausalLM", GROUPED, padded_batch(), PADDED)
    for layer in arguments["model"].model.layers:
        layer.mlp.down_proj = nn.Linear(128, 64, bias=False)
    return arguments | {"optimizer": adamw(arguments["model"])}
