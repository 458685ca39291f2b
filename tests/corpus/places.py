"""Places that several cases share."""

TARGETS = "loss|head|lm_head|labels|targets|target|ids|input_ids|[01]|batch*"
"""Where targets go wrong: in the loss, at the logits or in the batch, whose entries may be numbered."""
OPTIMIZER = "optimizer|step"
SCHEDULER = "scheduler|optimizer"
STEP = "step|optimizer"


def within(*paths: str) -> str:
    """Return globs of these modules and of all that is inside them."""
    return "|".join(f"{path}|{path}.*" for path in paths)
