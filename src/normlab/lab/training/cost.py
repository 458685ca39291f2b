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
    """Count the parameters of a model, and the FLOPs of one forward and backward pass of ``loss``, in which
    ``tokens`` are predicted.

    ``torch.utils.flop_counter`` counts only matrix products and convolutions, and attention in full, as if
    nothing were masked. The pass runs on a copy of the model without fused kernels, which torch does not
    count.
    """
    model = copy.deepcopy(unwrap(model))
    sizes = {id(p): p.numel() for p in model.parameters()}
    looked_up: set[int] = set()
    for module in model.modules():
        if isinstance(module, (nn.Embedding, Embedding)):
            looked_up.update(id(p) for p in module.parameters(recurse=False))
    counter = FlopCounterMode(display=False)
    with undisturbed(model, training=True), reference(), sdpa_kernel(SDPBackend.MATH), counter:
        loss(model).backward()
    without_tables = sum(size for parameter, size in sizes.items() if parameter not in looked_up)
    return Cost(sum(sizes.values()), without_tables, counter.get_total_flops(), tokens)
