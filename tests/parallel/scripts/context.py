"""Context parallel: each rank has a part of every sequence, and gradients are averaged by hand."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.utils.data import DataLoader, TensorDataset

from decoder import Decoder, next_token_loss, text

MAX_NORM = 0.5


def main():
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cuda", (world_size,), mesh_dim_names=("context",))
    torch.manual_seed(7)
    loader = DataLoader(TensorDataset(text()), batch_size=4, shuffle=True)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for (ids,) in loader:
        inputs, targets = ids[:, :-1].clone(), ids[:, 1:].clone()
        places = torch.arange(inputs.shape[1])
        buffers = [inputs, targets, places]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0]):
            loss = next_token_loss(model(inputs, places), targets)
            loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world_size
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
