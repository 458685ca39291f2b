"""Small models that are not normlab's, what its reader sees of them, and a plain training loop.

Nothing here is imported from normlab: the driver passes in what it has found there.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS = 50, 32, 4
ROWS, LENGTH = 6, 11
IGNORED: Final = -100
"""The label of a position whose prediction does not count."""


class Foreign(NamedTuple):
    """A model, a batch for it, and its loss where its output holds none."""

    model: nn.Module
    batch: Any
    loss: Callable[[nn.Module, Any], Tensor] | None = None


def torch_encoder() -> Foreign:
    """``torch.nn.TransformerEncoder``, Post-LN with dropout, between an embedding and a linear map."""
    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), encoder, nn.Linear(WIDTH, VOCABULARY))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flip(1).flatten())

    return Foreign(model, torch.randint(VOCABULARY, (ROWS, LENGTH)), loss)


def llama() -> Foreign:
    """A Llama whose heads share keys, on rows that are padded on the right."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
    )
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    mask = torch.ones_like(ids)
    mask[0, 7:] = mask[3, 9:] = 0
    labels = ids.masked_fill(mask == 0, IGNORED)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return Foreign(transformers.LlamaForCausalLM(config), batch)


def gpt2() -> Foreign:
    """A GPT-2 with its dropouts, whose output matrix is its embedding."""
    import torch
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=WIDTH,
        n_layer=3,
        n_head=HEADS,
        bos_token_id=1,
        eos_token_id=2,
    )
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    return Foreign(transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids})


MODELS: Final[dict[str, Callable[[], Foreign]]] = {"torch": torch_encoder, "llama": llama, "gpt2": gpt2}


def made(name: str) -> Foreign:
    """The model of that name, drawn with a fixed seed, on one thread."""
    import torch

    torch.manual_seed(1)
    torch.set_num_threads(1)
    return MODELS[name]()


def structure_rows(structure: Any) -> Iterator[tuple[str, Any]]:
    """Table and content of what was read of a residual stream: every field of each stack and sublayer."""
    for stack in structure.stacks:
        content = json.loads(json.dumps(dataclasses.asdict(stack)))
        sublayers = content.pop("sublayers")
        yield "read.stacks", content
        yield from (("read.sublayers", {"stack": content["name"], **one}) for one in sublayers)
    yield "read.unread", {"containers": len(structure.unread)}


def train_watched(
    one: Foreign, watch: Callable[..., Any], lrs: Sequence[float], **options: Any
) -> list[float]:
    """Train a model in place in a plain loop under watch, a step for each learning rate; return the losses.

    Each step takes half of the rows of the model's batch, drawn at random.
    """
    import torch

    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(one.model.train().parameters(), lrs[0])
    losses = []
    with watch(one.model, optimizer, **options):
        for lr in lrs:
            for group in optimizer.param_groups:
                group["lr"] = lr
            order = torch.randperm(ROWS)[: ROWS // 2]
            optimizer.zero_grad()
            loss = one.model(**{name: x[order] for name, x in one.batch.items()}).loss
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


def save_weights(model: nn.Module, path: Path) -> None:
    """Write every parameter; one that is shared once, under its first name."""
    from safetensors.torch import save_file

    save_file({name: p.detach().contiguous() for name, p in model.named_parameters()}, path)
