"""DistributedDataParallel, with accumulation over two micro-batches, clipping and a schedule."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from decoder import Decoder, next_token_loss, text

ACCUMULATE = 2


def main():
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    torch.manual_seed(1337 + rank)
    data = TensorDataset(text())
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    decoder = Decoder().to(f"cuda:{rank}")
    model = DistributedDataParallel(decoder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (ids,) in enumerate(loader):
            model.require_backward_grad_sync = i % ACCUMULATE == ACCUMULATE - 1
            loss = next_token_loss(model(ids[:, :-1]), ids[:, 1:]) / ACCUMULATE
            loss.backward()
            if i % ACCUMULATE < ACCUMULATE - 1:
                continue
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if rank == 0:
                print(f"loss {loss.item():.3f}", int(os.environ["LOCAL_RANK"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
