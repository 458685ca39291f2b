"""A plain loop under watch on two gloo ranks, replicated or sharded, gives the numbers of one process."""

from __future__ import annotations

import json
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import normlab
from watching.test_loop import Small, batches, loss_of
from watching.watching import hooks_of, rows_of

RANKS = 2
STEPS = 3


def sharded(model: Small) -> nn.Module:
    """Shard every layer, then what is left."""
    for block in model.layers:
        fully_shard(block)
    return fully_shard(model)


def alone(model: Small) -> nn.Module:
    return model


WRAPPED = {"alone": alone, "ddp": DistributedDataParallel, "fsdp": sharded}


def trained(kind: str, folder: Path | None) -> tuple[list[float], list[torch.Tensor], list[str]]:
    """Losses, weights and warnings of a loop in which every rank has the same batches."""
    torch.manual_seed(0)
    model = WRAPPED[kind](Small(dropout=0.0))
    hooks = hooks_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        watching = folder and normlab.watch(model, optimizer, out=folder, every_steps=2)
        for ids in batches(STEPS):
            loss = loss_of(model, ids)
            if watching:
                watching.loss(loss)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if watching:
            watching.close()
    assert hooks_of(model) == hooks
    weights = [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
    return losses, weights, [str(w.message) for w in said if "normlab" in str(w.message)]


def work(rank: int, kind: str, folder: str, path: list[str]) -> None:
    """Train on one rank with a watch and without, and write what differs to a file."""
    sys.path[:] = path
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", f"file://{folder}/meeting", timedelta(seconds=60), world_size=RANKS, rank=rank
    )
    losses, weights, _ = trained(kind, None)
    watched_losses, same, said = trained(kind, Path(folder, kind))
    told = {
        "losses": watched_losses == losses,
        "weights": all(torch.equal(a, b) for a, b in zip(same, weights, strict=True)),
        "said": said,
    }
    Path(folder, f"rank{rank}.json").write_text(json.dumps(told))
    distributed.destroy_process_group()


def measured(path: Path) -> dict[tuple, float]:
    return {
        (r["step"], r["module"], r["signal"], r["statistic"], r["stack"], r["index"]): r["value"]
        for r in rows_of(path)
    }


@pytest.mark.slow
@pytest.mark.usefixtures("loopback")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_train_on_and_measure_what_one_process_measures(tmp_path, kind):
    torch.multiprocessing.spawn(work, args=(kind, str(tmp_path), sys.path), nprocs=RANKS)
    told = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    assert told == [{"losses": True, "weights": True, "said": []}] * RANKS
    trained("alone", tmp_path / "alone")
    single = measured(tmp_path / "alone" / "watch.jsonl")
    for name in ("watch.jsonl", "watch.rank1.jsonl"):
        ours = measured(tmp_path / kind / name)
        assert ours.keys() == single.keys()
        assert ours == pytest.approx(single, rel=1e-4, abs=1e-7)
    assert (tmp_path / kind / "watch.html").exists()
    assert not (tmp_path / kind / "watch.rank1.html").exists()
