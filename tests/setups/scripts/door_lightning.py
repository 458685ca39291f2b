"""A Lightning module, whose trainer writes event files and checkpoints."""

import sys

import lightning
import torch
from models import Decoder, next_token_loss, text


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Decoder()

    def training_step(self, batch, index):
        ids = batch[0]
        loss = next_token_loss(self.net(ids[:, :-1]), ids)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make_pair():
    torch.manual_seed(0)
    rows = torch.utils.data.TensorDataset(text(64))
    return Module(), torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)


if __name__ == "__main__":
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        log_every_n_steps=1,
        enable_progress_bar=False,
        default_root_dir=sys.argv[1],
    )
    trainer.fit(*make_pair())
    trainer.save_checkpoint(f"{sys.argv[1]}/end.ckpt")
