"""Nested configurations with overrides on the command line: ``model.dim=24 optim.lr=3e-4``."""

import sys
from dataclasses import dataclass, field, fields, is_dataclass

import torch
from models import Decoder, next_token_loss, text


@dataclass
class ModelConfig:
    dim: int = 16
    layers: int = 2


@dataclass
class OptimConfig:
    lr: float = 1e-3
    weight_decay: float = 0.1
    warmup_steps: int = 5
    max_norm: float = 1.0


@dataclass
class Config:
    seed: int = 0
    steps: int = 20
    batch_size: int = 6
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)


def override(config, argument):
    path, value = argument.split("=", 1)
    *parents, name = path.split(".")
    for parent in parents:
        config = getattr(config, parent)
    if not is_dataclass(config) or name not in {f.name for f in fields(config)}:
        raise SystemExit(f"there is no {path}")
    setattr(config, name, type(getattr(config, name))(value))


def main(config):
    torch.manual_seed(config.seed)
    model = Decoder(config.model.dim, config.model.layers)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": config.optim.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.optim.lr, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / config.optim.warmup_steps)
    )
    for step in range(config.steps):
        ids = text(config.batch_size, seed=step)
        optimizer.zero_grad()
        loss = next_token_loss(model(ids[:, :-1]), ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_norm)
        optimizer.step()
        scheduler.step()


if __name__ == "__main__":
    config = Config()
    for argument in sys.argv[1:]:
        override(config, argument)
    main(config)
