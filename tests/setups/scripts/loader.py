"""Sentences of different lengths, padded in the two worker processes of a DataLoader."""

import torch
import torch.nn.functional as F
from models import WORDS, Decoder
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

PAD = 0


class Sentences(Dataset):
    def __init__(self, count):
        draw = torch.Generator().manual_seed(0)
        lengths = torch.randint(6, 14, (count,), generator=draw).tolist()
        self.rows = [torch.randint(1, WORDS, (length,), generator=draw) for length in lengths]
        self.rows[0] = torch.randint(1, WORDS, (13,), generator=draw)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def collate(rows):
    ids = pad_sequence(rows, batch_first=True, padding_value=PAD)
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(ids[:, 1:] == PAD, -100)}


def main():
    torch.manual_seed(0)
    loader = DataLoader(
        Sentences(36), batch_size=6, collate_fn=collate, num_workers=2, prefetch_factor=2, pin_memory=False
    )
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        for batch in loader:
            logits = model(batch["input_ids"])
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.3f}")


if __name__ == "__main__":
    main()
