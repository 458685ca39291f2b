"""Probes for a training by Hugging Face's ``Trainer``."""

from __future__ import annotations

from typing import Any

from normlab.integrations.watch import WatchingCallback

try:
    from transformers import TrainerCallback, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        "normlab.integrations.huggingface needs transformers and accelerate; type: pip install 'normlab[hf]'"
    ) from error


class Probes(WatchingCallback, TrainerCallback):
    """``Trainer(..., callbacks=[Probes("standard")])``: one step in ``every_steps`` is observed, and becomes
    rows of step, stack, index, module, signal, statistic and value, a JSON line each in ``out``, or calls of
    ``emit``. ``normlab report probes.jsonl`` draws them.

    ``probes`` is a preset (``cheap``, ``standard``, ``full``: see ``normlab.diagnosis.probing.presets``) or a
    list of ``normlab.diagnosis.Probe``. For a model whose blocks are not found, give the ``structure`` that
    ``read_structure(model, batch, blocks=…)`` finds. Losses and weights are bit-identical with and without.

    Steps count from 0, as those that are done before. Weights and gradients are those that the optimiser is
    given, gradients after clipping; each micro-batch of an accumulated step gives rows of its own. A training
    that goes on from a checkpoint replaces the rows from there on. Where a step raises, ``close()`` takes the
    hooks off; so does the next ``train()``.

    Raises UserError for a preset that there is not, and at the first step for a model that cannot be read.
    """

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        self.watch.start(state.global_step)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **shown: Any) -> None:
        # the trainer runs a compiled wrapper and shows callbacks what is inside
        self.watch.begin(shown["model"], state.global_step, compiled=bool(args.torch_compile))

    on_pre_optimizer_step = on_train_end = WatchingCallback.close
