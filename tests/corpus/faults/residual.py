"""Faults that ``residual`` names: a stream that does not pass through every layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertOutput

from corpus.batches import text
from corpus.case import DEEP, PLANTED_1, PLANTED_2, UNSEEN, Arguments, fault, twins
from corpus.models.deep import Training, deep_bert, deep_gpt2, deep_translation, planted
from corpus.models.gpt import Block, Gpt, PostBlock, gpt_of
from corpus.models.parts import becomes
from corpus.places import within
from corpus.training import changed, full_setup, loss_setup
from normlab.nn import Sublayer

# ---------------------------------------------------------------------------------------------- a sum is lost


class NoFirstSum(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


@fault("residual", place="blocks.0*", origin=PLANTED_1)
def no_residual_all() -> Arguments:
    """No attention has a residual."""
    return full_setup(gpt_of(NoFirstSum))


class NoSecondSum(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x))
        return self.mlp(self.norm_2(x))


@fault("residual", place="blocks.3*", origin=PLANTED_1)
def no_residual_mlp3() -> Arguments:
    """The feed-forward of one layer has no residual."""
    return full_setup(changed(lambda model: becomes(model.blocks[3], NoSecondSum)))


@fault("residual", place=within("blocks.5"), origin=DEEP)
@planted(deep_gpt2)
def missing_residual(training: Training) -> None:
    """The feed-forward of layer 5, counted from 0, has no residual."""
    becomes(training.model.blocks[5], NoSecondSum)


class WithoutStream(Sublayer):
    """A sublayer that returns its branch alone."""

    def forward(self, stream: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.f(self.place.read(stream), *args, **kwargs)


@fault("residual", place=within("decoder.sublayers.10"), origin=DEEP)
@planted(deep_translation)
def sublayer_without_residual(training: Training) -> None:
    """A cross-attention of the decoder has no residual."""
    becomes(training.model.decoder.sublayers[10], WithoutStream)


# ------------------------------------------------------------------------------------------- a sum is another


@fault("residual", "siblings", place="blocks.2*", origin=PLANTED_2)
def one_postnorm() -> Arguments:
    """One layer is Post-LN among Pre-LN."""
    return full_setup(changed(lambda model: becomes(model.blocks[2], PostBlock)))


class SumBehindNorm(BertOutput):
    """The end of a layer with the sum on the wrong side of the norm."""

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(hidden_states))) + input_tensor


@fault("residual", "siblings", place=within("bert.encoder.layer.8"), origin=DEEP)
@planted(deep_bert)
def residual_behind_the_norm(training: Training) -> None:
    """In layer 8, counted from 0, the residual is added behind the norm, unlike in all others."""
    becomes(training.model.bert.encoder.layer[8].output, SumBehindNorm)


class NormedStream(Block):
    """A block that adds to the normed stream: ``x = norm(x); x = x + f(x)``."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_1(x)
        x = x + self.attn(x)
        x = self.norm_2(x)
        return x + self.mlp(x)


@twins("residual", "norms", place="blocks*", origin=UNSEEN, not_right="a valid architecture")
def residual_from_the_norm(*, faulty: bool) -> Arguments:
    """The residual branch is added to the normed stream and not to the stream."""
    make = gpt_of(NormedStream) if faulty else Gpt
    return loss_setup(make, text(seed=13), declare={"tied": True, "causal": True})


class Doubled(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


@fault("residual", place="blocks.0*", origin=PLANTED_2)
def double_stream() -> Arguments:
    """Each layer adds its input to an output that holds it already."""
    return full_setup(gpt_of(Doubled))


class Halved(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = 0.5 * x + self.attn(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


@fault("residual", place="blocks.1*", origin=PLANTED_2)
def half_stream_one() -> Arguments:
    """One layer halves the stream."""
    return full_setup(changed(lambda model: becomes(model.blocks[1], Halved)))


class DropsTheStream(Block):
    """A layer whose dropout stands behind the sums."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(x + self.attn(self.norm_1(x)))
        return self.drop(x + self.mlp(self.norm_2(x)))


@fault("residual", place=within("blocks.0"), origin=DEEP)
@planted(deep_gpt2)
def dropout_of_the_stream(training: Training) -> None:
    """Dropout acts on the sum of stream and branch, so that 24 times a tenth of the whole stream is lost."""
    for block in training.model.blocks:
        becomes(block, DropsTheStream)
        block.attn.dropout, block.mlp.drop = 0.0, nn.Identity()
        block.drop = nn.Dropout(0.1)


class OutOfOrder(Gpt):
    def run(self, x: Tensor) -> Tensor:
        for i in (0, 2, 1, 3):
            x = self.blocks[i](x)
        return x


@fault("residual", place="blocks|blocks.1|blocks.2", origin=PLANTED_2)
def reversed_blocks() -> Arguments:
    """The second and the third layer run in the wrong order."""
    return full_setup(OutOfOrder)
