"""A loop that saves after each step in many ways, and keeps the newest two checkpoints of its folder."""

import io
import os
import shutil
import sys
from pathlib import Path

import torch
from models import Decoder, next_token_loss, text
from safetensors.torch import save_file, save_model

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def save(step):
    torch.save(model.state_dict(), folder / "latest.pt")
    with open(folder / "opened.pt", "wb") as file:
        torch.save(model.state_dict(), file)
    torch.save(model.state_dict(), f"{folder}/new.tmp")
    os.replace(f"{folder}/new.tmp", f"{folder}/best.pt")  # noqa: PTH105 (as scripts do)
    save_file(model.state_dict(), folder / f"step-{step}.safetensors")
    save_model(model, str(folder / "model.safetensors"))
    with open(folder / "log.txt", "a") as file:
        file.write(f"{step}\n")
    for old in sorted(folder.glob("step-*"))[:-2]:
        old.unlink()
    shutil.rmtree(folder / "older", ignore_errors=True)


for step in range(steps):
    ids = text(6, seed=step)
    loss = next_token_loss(model(ids[:, :-1]), ids)
    optimizer.zero_grad()
    loss.backward()
    save(step)
    optimizer.step()

in_memory = io.BytesIO()
torch.save(model.state_dict(), in_memory)
assert in_memory.tell() > 0
assert (folder / "log.txt").read_text().endswith(f"{steps - 1}\n")
