"""A tensor parallel plan: heads and hidden units are shared out, the rest is on every rank."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from decoder import Decoder, next_token_loss, text

MAX_NORM = 0.5


def clip(model):
    """Clip by the norm of the whole gradient; what is sharded is added up over ranks."""
    sharded, kept = torch.zeros(()), torch.zeros(())
    for p in model.parameters():
        if isinstance(p.grad, DTensor) and p.grad.placements[0].is_shard():
            sharded += p.grad.to_local().pow(2).sum()
        else:
            kept += (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).pow(2).sum()
    dist.all_reduce(sharded)
    norm = (sharded + kept).sqrt()
    factor = torch.clamp(MAX_NORM / norm, max=1.0)
    for p in model.parameters():
        local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        local.mul_(factor)


def main():
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    torch.manual_seed(7)
    loader = DataLoader(TensorDataset(text()), batch_size=4, shuffle=True)
    model = Decoder()
    for block in model.blocks:
        plan = {
            "attention.query": ColwiseParallel(),
            "attention.key": ColwiseParallel(),
            "attention.value": ColwiseParallel(),
            "attention.out": RowwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for (ids,) in loader:
        loss = next_token_loss(model(ids[:, :-1]), ids[:, 1:])
        loss.backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
