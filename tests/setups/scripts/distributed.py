"""What torchrun starts: one process of a group, a distributed sampler and a wrapped model."""

import os

import torch
import torch.distributed as dist
from models import WORDS, Decoder, next_token_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    try:
        torch.manual_seed(0)
        data = TensorDataset(torch.randint(1, WORDS, (48, 13)))
        sampler = DistributedSampler(data, shuffle=True, seed=0)
        loader = DataLoader(data, batch_size=6 // world_size, sampler=sampler)
        model = DistributedDataParallel(Decoder())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for (ids,) in loader:
                optimizer.zero_grad()
                loss = next_token_loss(model(ids[:, :-1]), ids)
                loss.backward()
                optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"epoch {epoch}: {mean.item() / world_size:.3f}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
