"""Faults that ``start``, ``seeds`` and ``initial_loss`` name: weights that are drawn wrongly."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import nn

from corpus.batches import text
from corpus.case import DEEP, LATER, PLANTED_1, PLANTED_2, PLANTED_3, UNSEEN, Arguments, fault, twins
from corpus.models.deep import (
    DECLARED,
    DEPTH_SCALED,
    DEVIATION,
    Training,
    deep_bert,
    deep_gpt2,
    deep_llama,
    deep_translation,
    planted,
)
from corpus.models.experts import Mixture, StackedExperts, next_token_and_balance
from corpus.models.gpt import Gpt
from corpus.models.library import language_gpt2, padded_llama
from corpus.models.llama import llama_of
from corpus.places import TRANSLATION_LOSS, within
from corpus.training import adamw, changed, full_setup, loss_setup

# ------------------------------------------------------------------------------------------------- one matrix


def drawn_wider(model: Gpt) -> None:
    nn.init.normal_(model.blocks[3].attn.qkv.weight, 0, 0.025)


@fault("start", place="blocks.3*", origin=PLANTED_1)
def std_one_layer() -> Arguments:
    """One matrix is drawn with a deviation of 0.025, where its siblings have 0.02."""
    return full_setup(changed(drawn_wider, partial(Gpt, layers=6)))


@fault("start", place="blocks.4*", origin=PLANTED_2)
def ratio_1_05() -> Arguments:
    """One matrix is 5% larger than its siblings."""
    wide = partial(Gpt, 128, 6)
    return full_setup(changed(lambda model: model.blocks[4].mlp.up.weight.data.mul_(1.05), wide))


@fault("start", place="blocks.2*", origin=PLANTED_2)
def norm_gain_half() -> Arguments:
    """The gains of one norm are 0.5, where the others' are 1."""
    deeper = partial(Gpt, layers=6)
    return full_setup(changed(lambda model: model.blocks[2].norm_2.weight.data.fill_(0.5), deeper))


@fault("start", place="blocks.1*", origin=PLANTED_3)
def expert_std() -> Arguments:
    """One expert's inner matrix is twice as large as the others'."""
    make = changed(lambda model: model.blocks[1].mlp.up.data[2].mul_(2), llama_of(mlp=StackedExperts))
    return full_setup(make)


@fault("start", place="transformer.h.2*", origin=PLANTED_3)
def hf_bias_nonzero() -> Arguments:
    """One bias is drawn, where GPT-2 starts them at zero."""
    arguments = language_gpt2()
    arguments["model"].transformer.h[2].mlp.c_fc.bias.data.normal_(0, 0.02)
    return arguments | {"optimizer": adamw(arguments["model"])}


@fault("start", place=within("bert.encoder.layer.2.intermediate"), origin=DEEP)
@planted(deep_bert)
def matrix_at_torch_default(training: Training) -> None:
    """One matrix of layer 2 keeps the default initialisation of nn.Linear."""
    training.model.bert.encoder.layer[2].intermediate.dense.reset_parameters()


@fault("start", place=within("model.layers.7"), origin=DEEP)
@planted(deep_llama)
@torch.no_grad()
def layer_times_thirty(training: Training) -> None:
    """All matrices of layer 7, counted from 0, are 30 times too large."""
    for p in training.model.model.layers[7].parameters():
        if p.ndim == 2:
            p.mul_(30)


@fault("start", "gradients", place=within("decoder.sublayers.8"), origin=DEEP)
@planted(deep_translation)
def zeros_where_a_hook_was_skipped(training: Training) -> None:
    """An init hook was skipped: the inner matrix of a feed-forward of the decoder is zero and stays so."""
    nn.init.zeros_(training.model.decoder.sublayers[8].f.inner.weight)


@fault("start", "gradients", place=within("encoder.sublayers.5"), origin=DEEP)
@planted(deep_translation)
def norm_gain_of_zeros(training: Training) -> None:
    """The gain of one norm of the encoder was never filled: it is zero."""
    nn.init.zeros_(training.model.encoder.sublayers[5].place.norm.weight)


# ----------------------------------------------------------------------------------------- matrices of a kind


@fault("start", place="model.layers.*.mlp.down_proj*|model.layers.0*", origin=PLANTED_1)
def hf_reinit() -> Arguments:
    """The output matrices of Llama's feed-forwards keep torch's start."""
    arguments = padded_llama()
    for layer in arguments["model"].model.layers:
        layer.mlp.down_proj = nn.Linear(128, 64, bias=False)
    return arguments | {"optimizer": adamw(arguments["model"])}


@fault("start", place=f"model.layers.0|{within('model.layers.*.self_attn')}", origin=DEEP)
@planted(deep_llama)
@torch.no_grad()
def attention_drawn_by_randn(training: Training) -> None:
    """The matrices of attention are drawn by torch.randn, with a deviation of 1.0 where 0.02 is usual."""
    for layer in training.model.model.layers:
        for p in layer.self_attn.parameters():
            p.normal_(0.0, 1.0)


@fault("start", "norms", place="*LayerNorm*", origin=DEEP)
@planted(deep_bert)
@torch.no_grad()
def norms_drawn_like_matrices(training: Training) -> None:
    """The loop that initialises all parameters draws the norms' gains and biases with deviation 0.02, too."""
    for module in training.model.modules():
        if isinstance(module, nn.LayerNorm):
            module.weight.normal_(0.0, DEVIATION)
            module.bias.normal_(0.0, DEVIATION)


@fault("start", "initial_loss", place=f"loss|{within('bert.embeddings.word_embeddings', 'cls')}", origin=DEEP)
@planted(deep_bert)
@torch.no_grad()
def new_tokens_at_torch_default(training: Training) -> None:
    """The vocabulary was enlarged by hand: its 20 new rows have torch's deviation of 1.0, not 0.02."""
    training.model.bert.embeddings.word_embeddings.weight[-20:].normal_(0.0, 1.0)


@fault("start", place=within("positions"), origin=DEEP, not_right="nothing says how its tables are drawn")
@planted(deep_gpt2)
@torch.no_grad()
def positions_at_torch_default(training: Training) -> None:
    """The position vectors keep torch's deviation of 1.0, and words of deviation 0.02 drown in them."""
    training.model.positions.reset_parameters()


@fault("start", place=within("blocks.*.attn.out", "blocks.*.mlp.down"), origin=DEEP)
@planted(deep_gpt2)
@torch.no_grad()
def depth_scale_never_applied(training: Training) -> None:
    """The output matrices were never scaled by the depth."""
    for block in training.model.blocks:
        block.attn.out.weight.normal_(0.0, DEVIATION)
        block.mlp.down.weight.normal_(0.0, DEVIATION)
    training.declare["init"] = str(DECLARED / "gpt2_start.toml")


@fault("start", place=within("model.layers.*.mlp.up_proj", "model.layers.*.mlp.down_proj"), origin=DEEP)
@planted(deep_llama)
@torch.no_grad()
def depth_scale_on_the_wrong_matrix(training: Training) -> None:
    """The depth scaling of the feed-forward went to its inner matrix up_proj instead of down_proj."""
    for layer in training.model.model.layers:
        layer.self_attn.o_proj.weight.normal_(0.0, DEPTH_SCALED)
        layer.mlp.up_proj.weight.normal_(0.0, DEPTH_SCALED)
    training.declare["init"] = str(DECLARED / "llama_scaled.toml")


@fault("start", place=within("model.layers.*.mlp"), origin=DEEP)
@planted(deep_llama)
@torch.no_grad()
def truncation_at_100_deviations(training: Training) -> None:
    """trunc_normal_ got bounds in deviations, so that the feed-forward is cut at 100 deviations."""
    for path, p in training.model.named_parameters():
        if p.ndim == 2:
            bound = 2.0 if ".mlp." in path else 3 * DEVIATION
            nn.init.trunc_normal_(p, std=DEVIATION, a=-bound, b=bound)
    training.declare["init"] = str(DECLARED / "llama_truncated.toml")


# ----------------------------------------------------------------------------------------------- initial loss


class DefaultDrawn(Gpt):
    """A decoder that leaves its linear layers as torch draws them and ties its head to the embedding."""

    scaled = True

    def __init__(self):
        super().__init__(96, 3)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)) and module is not self.head:
                module.reset_parameters()
        if self.scaled:
            self.tokens.weight.data.mul_(0.02)
            self.positions.weight.data.mul_(0.02)


class UnitEmbedding(DefaultDrawn):
    scaled = False


@twins("start", "initial_loss", place="tokens*|head*|loss", origin=UNSEEN)
def unit_embedding_as_head(*, faulty: bool) -> Arguments:
    """The embedding keeps its unit deviation and is the head too: the first loss is far above chance."""
    make = UnitEmbedding if faulty else DefaultDrawn
    return loss_setup(make, text(seed=14), optimizer=adamw, declare={"tied": True})


@fault("initial_loss", "start", place="tokens*|head*|norm|loss", origin=PLANTED_1)
def emb_std1() -> Arguments:
    """The tied embedding keeps torch's deviation of 1."""
    return full_setup(changed(lambda model: nn.init.normal_(model.tokens.weight)))


@fault("initial_loss", "start", place=f"loss|{within('tokens', 'head', 'norm')}", origin=DEEP)
@planted(deep_gpt2)
def tied_deviation_of_one(training: Training) -> None:
    """The tied embedding has torch's default deviation of 1.0, so that the logits are huge."""
    nn.init.normal_(training.model.tokens.weight)


@fault("initial_loss", "start", place=f"{TRANSLATION_LOSS}|{within('embedding')}", origin=DEEP)
@planted(deep_translation)
@torch.no_grad()
def embedding_deviation_of_one(training: Training) -> None:
    """The shared embedding has a deviation of 1.0, which the model multiplies by the root of the width."""
    training.model.embedding.weight.normal_(0.0, 1.0)


# ------------------------------------------------------------------------------------------------------ seeds


@fault("seeds", "start", place="blocks|blocks.*", origin=PLANTED_1)
def copied_layers() -> Arguments:
    """All layers are copies of the first."""

    def repeat(model: Gpt) -> None:
        model.blocks = nn.ModuleList(copy.deepcopy(model.blocks[0]) for _ in range(4))

    return full_setup(changed(repeat))


@fault("seeds", "start", place=within("bert.encoder.layer"), origin=DEEP)
@planted(deep_bert)
def layers_are_deep_copies(training: Training) -> None:
    """The layers are deep copies of one, as in nn.TransformerEncoder, and start with the same weights."""
    first, *others = training.model.bert.encoder.layer
    for layer in others:
        layer.load_state_dict(first.state_dict())


@twins(
    "seeds",
    "start",
    place="blocks.?|blocks.?.mlp|blocks.?.mlp.experts*",
    origin=LATER,
    not_right="copies within a block are not looked for",
)
def experts_are_clones(*, faulty: bool) -> Arguments:
    """The experts of a layer are copies of one drawn expert."""

    def clone(model: Mixture) -> None:
        for block in model.blocks:
            first, *others = block.mlp.experts
            for expert in others:
                expert.load_state_dict(first.state_dict())

    make = changed(clone, Mixture) if faulty else Mixture
    return loss_setup(make, text(seed=22), next_token_and_balance, seed=22)
