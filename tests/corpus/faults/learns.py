"""Faults that ``overfit`` and ``repeats`` name: a step that learns nothing, or is another when repeated."""

from __future__ import annotations

from functools import partial

from torch.optim import SGD, AdamW

from corpus.case import DEEP, PLANTED_1, Arguments, fault
from corpus.models.deep import Training, deep_bert, deep_llama, deep_translation, planted
from corpus.training import full_setup
from normlab.nn.kernels.ops import Dropout


@fault("overfit", "update", "schedule", origin=PLANTED_1)
def lr_huge() -> Arguments:
    """AdamW has a rate of 1."""
    return full_setup(lr=1.0)


@fault(
    "overfit",
    "update",
    "groups",
    origin=DEEP,
    not_right="it follows its rule and learns the batch; what rounds away is a note",
)
@planted(deep_bert)
def sgd_at_the_rate_of_adam(training: Training) -> None:
    """SGD took the place of AdamW and kept its rate of 1e-4, so that a step hardly moves a weight."""
    training.optimizer = partial(SGD, lr=training.lr)


@fault("overfit", "update", origin=DEEP, not_right="it learns the batch all the same")
@planted(deep_llama)
def rate_of_sgd_given_to_adamw(training: Training) -> None:
    """AdamW has the rate of 0.1 of a recipe for SGD, so that one step moves a weight by 5 deviations."""
    training.lr = 0.1
    training.optimizer = partial(AdamW, lr=training.lr, betas=(0.9, 0.95), weight_decay=0.1)


@fault(
    "overfit",
    "step",
    place="|loss|optimizer|step|*dropout*",
    origin=DEEP,
    not_right="a rate of 0.9 is allowed, and the batch is learnt",
)
@planted(deep_translation)
def dropout_is_the_keep_probability(training: Training) -> None:
    """Dropout got the share to be kept, the keep_prob of TensorFlow: 90% of every branch is dropped."""
    for module in training.model.modules():
        if isinstance(module, Dropout) and module.p:
            module.p = 0.9
