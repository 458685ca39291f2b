"""Observation under data parallelism of two gloo ranks: no step changes, and each has its own records."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from normlab.diagnosis import Probe, Record, observe

RANKS = 2
SIGNALS = ("input", "output", "grad_output", "weight", "grad")
PROBES = [Probe("*", signal, "l2", every_tensor=True) for signal in SIGNALS]


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.GELU(), nn.Linear(8, 4))


def shard(rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 + rank))


def hooks_of(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output and averaged gradients of one training step."""
    model.zero_grad()
    torch.manual_seed(3)
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


def work(rank: int, folder: str, path: list[str]) -> None:
    """Run one rank, and write what it saw to a file."""
    sys.path[:] = path
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", f"file://{folder}/meeting", timedelta(seconds=60), world_size=RANKS, rank=rank
    )
    inner = model_of()
    model = DistributedDataParallel(inner)
    before = hooks_of(model)
    records: list[Record] = []
    alone = step(model, shard(rank))
    with observe(model, PROBES, records.append) as observer:
        watched = step(model, shard(rank))
        observer.flush(0)
    told = {
        "identical": [torch.equal(a, b) for a, b in zip(alone, watched, strict=True)],
        "hooks": hooks_of(model) - before,
        "records": {f"{r.module}: {r.signal}.{r.statistic}": r.value for r in records},
        "count": len(records),
    }
    Path(folder, f"rank{rank}.json").write_text(json.dumps(told))
    distributed.destroy_process_group()


def expected(rank: int) -> dict[str, float]:
    """The rank's own activations, and the gradients that both share, in one process."""
    model = model_of()
    gradients = []
    for one in range(RANKS):
        gradients.append(step(model, shard(one))[1:])
    torch.manual_seed(3)
    hidden = model[0](shard(rank))
    out = model[3](model[2](model[1](hidden)))
    mean = [torch.stack(both).mean(0) for both in zip(*gradients, strict=True)]
    return {
        "0: input.l2": shard(rank).norm().item(),
        "0: output.l2": hidden.norm().item(),
        "3: output.l2": out.norm().item(),
        "3: grad_output.l2": (2 * out).norm().item(),
        "0: weight.l2": model[0].weight.norm().item(),
        "0: grad.l2": mean[0].norm().item(),
        "3: grad[bias].l2": mean[3].norm().item(),
    }


@pytest.mark.slow
@pytest.mark.usefixtures("loopback")
def test_two_ranks_see_their_own_and_change_nothing(tmp_path):
    torch.multiprocessing.spawn(work, args=(str(tmp_path), sys.path), nprocs=RANKS)
    told = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    for rank, seen in enumerate(told):
        assert seen["identical"] == [True] * 5
        assert seen["hooks"] == 0
        assert seen["count"] == len(seen["records"])
        own = expected(rank)
        close = {k: abs(seen["records"][k] - value) <= 1e-5 * abs(value) for k, value in own.items()}
        assert close == dict.fromkeys(own, True)
    differing = {k for k, value in told[0]["records"].items() if value != told[1]["records"][k]}
    assert {"0: input.l2", "3: output.l2"} <= differing
    assert not {k for k in differing if ": grad." in k or ": grad[" in k or "weight" in k}
