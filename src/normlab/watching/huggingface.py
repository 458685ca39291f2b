"""The watch of a training by Hugging Face's ``Trainer``."""

from __future__ import annotations

from typing import Any

from normlab.watching.trainers import WatchingCallback

try:
    from transformers import TrainerCallback, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        "normlab.watching.huggingface needs transformers and accelerate; type: pip install 'normlab[hf]'"
    ) from error


class HuggingFaceProbes(WatchingCallback, TrainerCallback):
    """``Trainer(..., callbacks=[HuggingFaceProbes("standard")])``: ``Watch`` says what is recorded and
    reported, and ``docs/integrations.md`` shows its options.

    ``probes`` is a preset (``cheap``, ``standard``, ``full``: see ``normlab.diagnosis.presets``) or a
    list of ``normlab.diagnosis.Probe``. For a model whose blocks are not found, give the ``structure`` that
    ``read_structure(model, batch, blocks=…)`` finds. Losses and weights are bit-identical with and without.

    Steps count from 0: a step's number is that of the steps done before it. Weights and gradients are those
    that the optimizer gets, with clipped gradients; each micro-batch of an accumulated step has its own rows.
    """

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **objects: Any) -> None:
        self.watch.start(state.global_step)
        optimizers = [objects["optimizer"]] if objects.get("optimizer") is not None else []
        self.watch.attach(objects["model"], optimizers, compiled=bool(args.torch_compile))

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **objects: Any) -> None:
        # the trainer runs a compiled wrapper but shows callbacks the model inside
        self.watch.begin(objects["model"], state.global_step, compiled=bool(args.torch_compile))

    def on_log(self, args: TrainingArguments, state: TrainerState, *_: Any, **objects: Any) -> None:
        if "loss" in objects["logs"]:  # the only loss that is seen if the model runs compiled
            self.watch.logged_loss(float(objects["logs"]["loss"]))

    on_pre_optimizer_step = WatchingCallback.stepping
    on_train_end = WatchingCallback.close
