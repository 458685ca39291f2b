"""The watch of a training by Lightning's ``Trainer``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from normlab.watching.trainers import WatchingCallback

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError(
        "normlab.watching.lightning needs lightning; type: pip install 'normlab[lightning]'"
    ) from error


class LightningProbes(WatchingCallback, Callback):
    """``Trainer(..., callbacks=[LightningProbes("standard")])``, with the options of the callback for Hugging
    Face; globs of probes match paths in the LightningModule.

    A step's number is ``trainer.global_step`` before it. Weights and gradients are those of the first
    optimizer that steps, with unclipped gradients; each micro-batch of an accumulated step has its own rows,
    and validation has none.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.watch.start(trainer.global_step)
        compiled = getattr(pl_module, "_compiler_ctx", None) is not None
        self.watch.attach(pl_module, trainer.optimizers, compiled=compiled)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # under data parallelism the trainer routes training_step through a call of the module
        wrapped = trainer.strategy.model is not pl_module
        compiled = getattr(pl_module, "_compiler_ctx", None) is not None
        self.watch.begin(pl_module, trainer.global_step, compiled=compiled, own_calls=int(wrapped))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):  # the trainer has divided it
            self.watch.loss(loss * trainer.accumulate_grad_batches)

    on_before_optimizer_step = WatchingCallback.stepping
    on_validation_start = WatchingCallback.end
    on_train_end = on_exception = WatchingCallback.close
