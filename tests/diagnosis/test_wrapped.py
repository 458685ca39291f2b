"""Models as trainings have them: in half precision, compiled, wrapped, checkpointed, built twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from normlab.diagnosis import Diagnosis, diagnose

VOCAB = 97
HANGS = 600
"""Seconds after which a diagnosis is taken to hang."""
IDS = torch.randint(5, VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": IDS, "labels": IDS}


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = tf.GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=VOCAB, n_positions=16, use_cache=False,
                           bos_token_id=1, eos_token_id=2)  # fmt: skip
    return tf.GPT2LMHeadModel(config)


class LowRank(nn.Module):
    """A frozen map with a trained one of low rank beside it.

    Hu et al. 2021, Section 4.1 (arXiv 2106.09685).
    """

    def __init__(self, base: nn.Module, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        wide, out = base.weight.shape
        self.lora_a, self.lora_b = nn.Linear(wide, rank, bias=False), nn.Linear(rank, out, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


def adapted() -> nn.Module:
    model = gpt2().requires_grad_(requires_grad=False)
    for block in model.transformer.h:
        block.attn.c_attn, block.mlp.c_fc = LowRank(block.attn.c_attn), LowRank(block.mlp.c_fc)
    return model


def compiled(backend: str) -> nn.Module:
    return torch.compile(gpt2(), backend=backend)


def checkpointed() -> nn.Module:
    """Computes the activations of each block again in its backward pass."""
    model = gpt2()
    for block in model.transformer.h:
        block.forward = partial(_again, block.forward)
    return model


def _again(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)


def built_twice() -> nn.Module:
    """The second of two models of one process, with hooks on the first and blocks that were copied."""
    first, second = gpt2(), gpt2()
    first.transformer.h[0].register_forward_hook(lambda *_: None)
    second.transformer.h[1] = copy.deepcopy(first.transformer.h[0])
    return second


def shared() -> nn.Module:
    """One block in two places."""
    model = gpt2()
    model.transformer.h[2] = model.transformer.h[0]
    return model


MODELS = {
    "float16": lambda: gpt2().half(),
    "bfloat16": lambda: gpt2().bfloat16(),
    "compiled": lambda: compiled("eager"),
    "compiled with gradients": lambda: compiled("aot_eager"),
    "low rank": adapted,
    "checkpointed": checkpointed,
    "built twice": built_twice,
    "shared": shared,
}


def ended(model: nn.Module, **options: Any) -> Diagnosis:
    """Return a diagnosis, made in a thread that does not hold up the tests where it hangs."""
    made: list[Diagnosis | BaseException] = []

    def run() -> None:
        try:
            made.append(diagnose(model, BATCH, lr=1e-3, preset="standard", **options))
        except BaseException as error:
            made.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANGS)
    assert made, f"a diagnosis takes more than {HANGS} seconds"
    (found,) = made
    if isinstance(found, BaseException):
        raise found
    return found


def done(found: Diagnosis) -> None:
    """Assert that studies were made, and that those that were not have refused in words."""
    failed = [str(f) for f in found.findings if f.name == "not_done" and f.severity != "note"]
    assert failed == []
    assert found.tables.keys() >= {"scales", "structure"}
    assert found.seconds.keys() == {study.name for study in found.studies}


@pytest.mark.parametrize("kind", MODELS)
def test_no_study_fails_or_hangs(kind):
    done(ended(MODELS[kind]()))


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_a_model_under_data_parallelism_is_diagnosed_as_the_one_inside():
    wrapped = ended(DistributedDataParallel(gpt2()))
    done(wrapped)
    plain = ended(gpt2())
    assert wrapped.tables == plain.tables
    assert wrapped.findings == plain.findings


@pytest.mark.slow
def test_only_what_is_trained_has_updates():
    found = ended(adapted())
    paths = found.tables["updates"].column("parameter")
    assert paths
    assert all(".lora_" in str(path) for path in paths)
