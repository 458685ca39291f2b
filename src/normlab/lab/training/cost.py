"""Count the parameters of a model and the FLOPs of its training."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from normlab.base.metric import Cost
from normlab.nn import reference
from normlab.nn.embedding import Embedding
from normlab.trace.restore import undisturbed
from normlab.trace.tensors import unwrap


def cost_of(model: nn.Module, loss: Callable[[nn.Module], Tensor], tokens: int = 0) -> Cost:
    """Count a model, and one forward and backward pass of ``loss``, in which ``tokens`` are predicted.

    ``torch.utils.flop_counter`` counts only matrix products and convolutions, and attention in full, as if
    nothing were masked. The pass runs on a copy of the model without fused kernels, which torch does not
    count.
    """
    model = copy.deepcopy(unwrap(model))
    held = {id(p): p.numel() for p in model.parameters()}
    tables = (m for m in model.modules() if isinstance(m, (nn.Embedding, Embedding)))
    looked_up = {id(p) for table in tables for p in table.parameters(recurse=False)}
    with undisturbed(model, training=True), reference(), sdpa_kernel(SDPBackend.MATH):
        counter = FlopCounterMode(display=False)
        with counter:
            loss(model).backward()
    rest = sum(number for own, number in held.items() if own not in looked_up)
    return Cost(sum(held.values()), rest, counter.get_total_flops(), tokens)
