"""Steps with wrappers, odd losses and batches, hooks and optimizers, and what raises."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from nasty.base import CASES, IDS, Batch, Case, Tiny, case, cross_entropy, doing
from zoo import PreNorm

# --------------------------------------------------------------------------------------------------- wrappers


@case
def data_parallel() -> Case:
    return Case(nn.parallel.DistributedDataParallel(Tiny()))


@case
def compiled() -> Case:
    return Case(torch.compile(Tiny(), backend="eager"))


@case
def compiled_inside() -> Case:
    model = Tiny()
    model.blocks[0].compile(backend="eager")
    return Case(model)


def checkpointed(*, reentrant: bool) -> Case:
    class Checkpointed(Tiny):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(self.dropout(x))

    return Case(Checkpointed())


CASES |= {
    "checkpoints": partial(checkpointed, reentrant=False),
    "reentrant_checkpoints": partial(checkpointed, reentrant=True),
}


@case
def adapters() -> Case:
    class Adapted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 16)
            self.requires_grad_(requires_grad=False)
            self.a, self.b = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.zeros(16, 2))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x @ self.a.T @ self.b.T

    model = Tiny().requires_grad_(requires_grad=False)
    for block in model.blocks:
        block.f[0] = Adapted()
    return Case(model)


@case
def quantised() -> Case:
    model = Tiny()
    linear = torch.ao.nn.quantized.dynamic.Linear(16, 8)
    model.blocks[1].f[2] = linear
    model.blocks[1].requires_grad_(requires_grad=False)
    model.embedding.requires_grad_(requires_grad=False)
    model.blocks[0].requires_grad_(requires_grad=False)
    return Case(model)


@case
def old_weight_norm() -> Case:
    model = Tiny()
    model.head = weight_norm(model.head)
    return Case(model)


@case
def old_spectral_norm() -> Case:
    model = Tiny()
    model.head = spectral_norm(model.head)
    return Case(model)


@case
def parametrized() -> Case:
    model = Tiny()
    parametrizations.weight_norm(model.blocks[0].f[0])
    parametrizations.spectral_norm(model.head)
    parametrizations.orthogonal(model.blocks[1].f[0])
    return Case(model)


@case
def batch_norm() -> Case:
    model = Tiny()
    model.blocks[0].norm = nn.BatchNorm1d(6)
    return Case(model)


# -------------------------------------------------------------------------------------- odd models and losses


@case
def modules_that_hold_themselves() -> Case:
    model = Tiny()
    model.blocks[0].parent = model
    model.blocks[1].friends = [model]
    return Case(model)


@case
def copies_that_raise() -> Case:
    def refuse(self: Any, memo: Any) -> Any:
        raise RuntimeError("no copies")

    return Case(doing(__deepcopy__=refuse))


class _Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.earlier = model.forward


@case
def a_forward_that_leads_through_a_trainer() -> Case:
    model = Tiny()
    model.blocks[0].norm = nn.BatchNorm1d(6)
    trainer = _Trainer(model)
    model.forward = lambda ids: trainer.earlier(ids)
    return Case(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@case
def a_part_that_copies_share() -> Case:
    class Shared(PreNorm):
        def __deepcopy__(self, memo: Any) -> Any:
            return self

    model = Tiny()
    model.blocks = nn.ModuleList(Shared(8) for _ in range(2))
    model.register_buffer("passes", torch.zeros((), dtype=torch.long))
    model.register_forward_pre_hook(lambda module, _: module.passes.add_(1) and None)
    return Case(model)


@case
def generators_as_outputs() -> Case:
    class Yielding(Tiny):
        def forward(self, ids: Tensor) -> Any:
            yield super().forward(ids)

    return Case(Yielding(), loss=lambda model, ids: cross_entropy(lambda x: next(model(x)), ids))


@case
def a_loss_of_its_own_model() -> Case:
    model = Tiny()
    return Case(model, loss=lambda _, ids: cross_entropy(model, ids))


@case
def a_loss_with_a_teacher() -> Case:
    teacher = Tiny()
    teacher.blocks[0].norm = nn.BatchNorm1d(6)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.mse_loss(model(ids), teacher(ids).detach())

    return Case(Tiny(), loss=loss, others=(teacher,))


@case
def inputs_that_it_writes_to() -> Case:
    class Two(Tiny):
        def forward(self, ids: Tensor, factor: Tensor) -> Tensor:
            factor.mul_(1.5)
            ids.clamp_(max=5)
            return super().forward(ids) * factor

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        labels = batch.pop("labels")
        return F.cross_entropy(model(**batch).flatten(0, 1), labels.flatten())

    batch = {"ids": IDS.clone(), "factor": torch.ones(1), "labels": IDS.clone()}
    return Case(Two(), batch=batch, loss=loss, call=loss)


@case
def batches_of_a_class() -> Case:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        batch.seen += 1
        return cross_entropy(model, batch.ids)

    return Case(Tiny(), batch=Batch(IDS.clone()), loss=loss, call=loss)


# ------------------------------------------------------------------------------- hooks, gradients, optimizers


@case
def hooks_of_every_kind() -> Case:
    model = Tiny()
    block = model.blocks[0]
    block.register_forward_pre_hook(lambda m, args: None)
    block.register_forward_hook(lambda m, args, out: out * 1.0)
    block.norm.register_full_backward_hook(lambda m, gi, go: None)
    block.norm.register_full_backward_pre_hook(lambda m, go: None)
    model.head.weight.register_hook(lambda g: g * 1.0)
    model.head.bias.register_post_accumulate_grad_hook(lambda p: [p.detach().add_(1.0)].clear())
    model.register_state_dict_pre_hook(lambda *_: None)
    return Case(model)


@case
def an_optimizer_in_backward() -> Case:
    model = Tiny()
    for p in model.parameters():
        one = torch.optim.SGD([p], lr=0.1, momentum=0.9)
        p.register_post_accumulate_grad_hook(lambda p, one=one: one.step())
    return Case(model, loss=lambda _, ids: cross_entropy(model, ids))


@case
def gradients_and_an_optimizer_with_state() -> Case:
    model = Tiny().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 2)],
        [1],
    )
    for _ in range(2):
        cross_entropy(model, IDS).backward()
        optimizer.step()
        scheduler.step()
    return Case(model, optimizer=optimizer, scheduler=scheduler)


@case
def some_in_training_some_not() -> Case:
    model = Tiny().train()
    model.blocks[0].eval()
    model.blocks[1].norm.eval()
    model.eval_only = nn.BatchNorm1d(6).eval()
    return Case(model)


# ----------------------------------------------------------------------------------------------------- raises


def raising(error: type[BaseException], after: int) -> Case:
    calls = Counter[str]()

    def before(self: Any, ids: Tensor) -> None:
        calls["model"] += 1
        self.state += 1
        with torch.no_grad():
            self.head.weight.add_(1.0)
        if calls["model"] > after:
            raise error("enough")

    model = doing(before=before)
    model.register_buffer("state", torch.zeros(1))
    return Case(model)


CASES |= {
    "a_call_that_raises": partial(raising, RuntimeError, 0),
    "a_second_call_that_raises": partial(raising, RuntimeError, 1),
    "a_late_call_that_raises": partial(raising, ValueError, 4),
    "an_interrupt": partial(raising, KeyboardInterrupt, 1),
    "a_late_interrupt": partial(raising, KeyboardInterrupt, 5),
}


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise RuntimeError("no way back")


@case
def a_backward_pass_that_raises() -> Case:
    return Case(doing(middle=lambda self, x: Failing.apply(x)))
