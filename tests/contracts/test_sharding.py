"""``fully_shard`` of every sublayer and of the model, on two gloo ranks, against one process."""

from __future__ import annotations

import faulthandler
import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from contracts.variants import (
    VARIANTS,
    assert_close,
    backward,
    build,
    grads,
    inputs,
    label,
    perturbed,
    uniform,
)
from normlab.nn import Sublayer, TokenModel, shards

RANKS = 2


def sharded(model: TokenModel) -> TokenModel:
    """Every sublayer (or those that share a parameter together), then what is left."""
    for unit in shards(model):
        fully_shard(unit)
    fully_shard(model)
    return model


def difference(config) -> str:
    """What a sharded model does differently, or "". Each rank has every row: gradients are averaged."""
    single, model = perturbed(config), sharded(perturbed(config))
    ids = inputs(single)
    loss, expected = backward(single, *ids), grads(single)
    sharded_loss, found = backward(model, *ids), {n: whole(g) for n, g in grads(model).items()}
    if not all(isinstance(p, DTensor) for p in model.parameters()):
        return "a parameter is not sharded"
    try:
        assert_close(sharded_loss, loss)
        assert_close(found, expected)
    except AssertionError as error:
        return str(error)
    return ""


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def work(rank: int, folder: str, path: list[str]) -> None:
    """Write what differs in each variant on one rank, with all of them in one process group.

    The process skips Python's own shutdown: threads of gloo may still hold tensors of Python then, and
    freeing these crashes now and then (github.com/pytorch/pytorch/pull/179291).
    """
    faulthandler.enable()
    sys.path[:] = path
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    lines = []
    for config in VARIANTS:
        try:
            why = difference(config)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        lines.append(f"{label(config)}: {why[:500]!r}" if why else "same")
        distributed.barrier()
    Path(folder, f"rank{rank}").write_text("\n".join(lines))
    distributed.destroy_process_group()
    os._exit(0)


@pytest.mark.slow
@pytest.mark.usefixtures("loopback")
def test_fully_sharded_equals_one_process(tmp_path):
    torch.multiprocessing.spawn(work, args=(str(tmp_path), sys.path), nprocs=RANKS)
    for rank in range(RANKS):
        told = (tmp_path / f"rank{rank}").read_text().splitlines()
        assert len(told) == len(VARIANTS)
        assert [line for line in told if line != "same"] == []


def test_units_are_sublayers_and_those_that_share_go_together():
    apart, together = (shards(build(uniform(name))) for name in ("skipinit", "rezero"))
    assert [len(unit) for unit in apart] == [1] * 10
    assert [len(unit) for unit in together] == [2, 2, 3, 3]
    assert all(isinstance(m, Sublayer) for unit in apart + together for m in unit)
