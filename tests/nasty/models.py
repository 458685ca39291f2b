"""Models whose state, draws or parameters are unusual."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nasty.base import Case, Tiny, case, doing

# --------------------------------------------------------------------------------------- state and attributes


@case
def shared_blocks() -> Case:
    model = Tiny()
    model.blocks = nn.ModuleList([model.blocks[0]] * 4)
    return Case(model)


@case
def tied_weights() -> Case:
    model = Tiny()
    model.head.weight = model.embedding.weight
    return Case(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@case
def buffers_that_count() -> Case:
    def before(self: Any, ids: Tensor) -> None:
        self.calls += 1
        self.tokens = self.tokens + ids.numel()
        self.mean.lerp_(self.embedding.weight.detach().mean(0), 0.1)

    model = doing(before=before)
    model.register_buffer("calls", torch.zeros((), dtype=torch.long))
    model.register_buffer("tokens", torch.zeros(1))
    model.register_buffer("mean", torch.full((8,), float("nan")), persistent=False)
    return Case(model)


@case
def attributes_that_change() -> Case:
    def before(self: Any, ids: Tensor) -> None:
        self.calls += 1
        self.history.append(ids.sum())
        self.stats["last"] = self.stats.get("last", 0) + 1
        self.seen.add(self.calls)
        self.recent.append(self.calls)
        self.array += 1
        self.plain.add_(1)
        self.nested[0]["deep"].append(1)
        self.last = self.embedding(ids)
        if hasattr(self, "first"):
            del self.first

    model = doing(before=before)
    model.calls, model.history, model.stats, model.seen = 0, [torch.ones(1)], {"a": 1}, {0}
    model.recent, model.array, model.plain = deque([0], maxlen=3), np.zeros(3), torch.zeros(2)
    model.nested, model.first = ({"deep": [0]},), 1
    return Case(model)


@case
def caches_that_are_made_lazily() -> Case:
    def middle(self: Any, x: Tensor) -> Tensor:
        if self.cos is None or self.cos.shape[0] < x.shape[1]:
            angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / 10.0
            self.cos = torch.cos(angle)
            self.register_buffer("sin", torch.sin(angle), persistent=False)
        return x * self.cos[: x.shape[1]] + self.sin[: x.shape[1]]

    model = doing(middle=middle)
    model.cos = None
    return Case(model)


@case
def parameters_that_it_changes() -> Case:
    def before(self: Any, ids: Tensor) -> None:
        with torch.no_grad():
            self.head.weight.mul_(0.9)
            self.head.bias.data = self.head.bias.data + 1
            self.norm.weight = nn.Parameter(self.norm.weight * 2)

    return Case(doing(before=before))


@case
def modules_that_it_replaces() -> Case:
    def before(self: Any, ids: Tensor) -> None:
        self.extra = nn.Linear(2, 2)
        self.dropout = nn.Identity()
        self.blocks[0].f[1] = nn.ReLU()

    return Case(doing(before=before))


@case
def modes_that_it_changes() -> Case:
    def before(self: Any, ids: Tensor) -> None:
        self.blocks[0].train()
        self.blocks[1].eval()
        self.head.bias.requires_grad_(requires_grad=False)

    return Case(doing(before=before))


@case
def hooks_that_it_makes() -> Case:
    def before(self: Any, ids: Tensor) -> None:
        self.norm.register_forward_hook(lambda *_: None)
        self.head.weight.register_hook(lambda g: g)
        self.head.bias.register_post_accumulate_grad_hook(lambda p: None)

    return Case(doing(before=before))


# --------------------------------------------------------------------------------------------- random numbers


@case
def noise_of_every_kind() -> Case:
    def middle(self: Any, x: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.randn(8)).to(x) + random.random() + torch.randn(8).to(x)  # noqa: NPY002
        own = self.own.normal() + self.python.random() + self.old.randn()
        return x + 0.01 * (noise + own + torch.randn(8, generator=self.torch).to(x))

    model = doing(middle=middle)
    model.own, model.python, model.old = np.random.default_rng(0), random.Random(0), np.random.RandomState(0)
    model.torch = torch.Generator().manual_seed(0)
    return Case(model)


@case
def seeds_that_it_sets() -> Case:
    def before(self: Any, ids: Tensor) -> None:
        print("called", end="\r")  # noqa: T201
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002

    return Case(doing(before=before))


@case
def switches_that_it_leaves() -> Case:
    def before(self: Any, ids: Tensor) -> None:
        torch.set_default_dtype(torch.float64)

    return Case(doing(before=before))


# ---------------------------------------------------------------------------------------- kinds of parameters


@case
def float8_and_integer_parameters() -> Case:
    def middle(self: Any, x: Tensor) -> Tensor:
        return x + 0.01 * self.small.to(x.dtype) + 0.01 * self.whole.to(x.dtype)

    model = doing(middle=middle)
    model.small = nn.Parameter(torch.ones(8).to(torch.float8_e4m3fn), requires_grad=False)
    model.whole = nn.Parameter(torch.arange(8), requires_grad=False)
    return Case(model)


@case
def complex_parameters() -> Case:
    def middle(self: Any, x: Tensor) -> Tensor:
        return x + 0.1 * (self.filter * x.to(self.filter.dtype)).real.to(x.dtype)

    model = doing(middle=middle)
    model.filter = nn.Parameter(torch.ones(8, dtype=torch.complex64))
    return Case(model)


@case
def parameters_that_are_views() -> Case:
    model, flat = Tiny(), torch.randn(2 * 8 * 16)
    model.flat = nn.Parameter(flat, requires_grad=False)
    for i, block in enumerate(model.blocks):
        block.f[0].weight = nn.Parameter(flat[i * 128 : (i + 1) * 128].view(16, 8))
    model.head.weight = nn.Parameter(torch.randn(8, 11).t())
    return Case(model)


@case
def low_precision() -> Case:
    return Case(Tiny().bfloat16())


@case
def nested_tensors() -> Case:
    def middle(self: Any, x: Tensor) -> Tensor:
        self.last = torch.nested.nested_tensor([x.detach()[0], x.detach()[1, :2]], layout=torch.jagged)
        return x

    model = doing(middle=middle)
    model.kept = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    model.old = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    return Case(model)


@case
def sparse_gradients() -> Case:
    model = Tiny()
    model.embedding = nn.Embedding(11, 8, sparse=True)
    return Case(model)


@case
def meta_parameters() -> Case:
    with torch.device("meta"):
        return Case(Tiny())


@case
def lazy_modules() -> Case:
    model = Tiny()
    model.blocks[0].f[0] = nn.LazyLinear(16)
    return Case(model)


@case
def no_requires_grad_here_and_there() -> Case:
    model = Tiny()
    model.embedding.requires_grad_(requires_grad=False)
    model.blocks[1].norm.requires_grad_(requires_grad=False)
    return Case(model)
