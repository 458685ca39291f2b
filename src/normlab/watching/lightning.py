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


class Probes(WatchingCallback, Callback):
    """``Trainer(..., callbacks=[Probes("standard")])``: one step in ``every_steps`` is observed, and becomes
    rows of step, stack, index, role, layer, module, signal, statistic and value. At the end the folder
    ``out`` has them as ``watch.jsonl``, a JSON line each, and a page, ``watch.html``. The class ``Watch``
    says what is recorded and reported, and ``docs/integrations.md`` shows its options.

    ``probes`` is a preset (``cheap``, ``standard``, ``full``: see ``normlab.diagnosis.probing.presets``) or a
    list of ``normlab.diagnosis.Probe``, whose globs are of paths in the LightningModule. For a model whose
    blocks are not found, give the ``structure`` that ``read_structure(module, batch, blocks=…)`` finds.
    Losses and weights are bit-identical with and without.

    Steps are ``trainer.global_step`` before they are done. Weights and gradients are those of the first
    optimizer that steps, gradients before clipping; each micro-batch of an accumulated step gives rows of its
    own, and validation gives none. A training that goes on from a checkpoint replaces the rows from there on,
    and one that begins anew sets aside the files of the one before.

    Where a model cannot be read, a warning says so and weights, gradients and updates are recorded. Raises
    UserError, before the training, for a preset or a sink that does not exist.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.watch.start(trainer.global_step)
        compiled = getattr(pl_module, "_compiler_ctx", None) is not None
        self.watch.attach(pl_module, trainer.optimizers, compiled=compiled)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # under data parallelism the trainer sends training_step through a call of the module
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
