"""Places that several cases share."""


def within(*paths: str) -> str:
    """Return globs of these modules and of all that is inside them."""
    return "|".join(f"{path}|{path}.*" for path in paths)


TARGETS = "loss|head|lm_head|labels|targets|target|ids|input_ids|[01]|batch*"
"""Where targets go wrong: in the loss, at the logits or in the batch, whose entries may be numbered."""
OPTIMIZER = "optimizer|step"
SCHEDULER = "scheduler|optimizer"
STEP = "step|optimizer"
FIRST_ATTENTION = f"blocks.0|{within('blocks.0.attn')}"
"""The first attention of this corpus's own decoders."""
LLAMA_ATTENTION = f"model.layers.0|{within('model.layers.0.self_attn')}"
LLAMA_POSITIONS = f"model|{within('model.rotary_emb')}|{LLAMA_ATTENTION}"
LLAMA_LABELS = "loss|labels|input_ids|lm_head"
LLAMA_NORMS = "optimizer|model.norm*|model.layers.*norm*"
"""Of Hugging Face's Llama."""
BERT_MASKS = f"|bert|bert.encoder|{within('bert.encoder.layer.0')}|attention_mask"
"""Where a mask of all layers of Hugging Face's BERT goes wrong."""
BERT_LABELS = f"loss|labels|input_ids|{within('cls')}"
SELF_ATTENTIONS = [f"decoder.sublayers.{i}" for i in range(0, 18, 3)]
CROSS_ATTENTIONS = [f"decoder.sublayers.{i}" for i in range(1, 18, 3)]
"""Of the decoder of ``models.deep.deep_translation``."""
FIRST_CROSS = f"source|decoder|{within(CROSS_ATTENTIONS[0])}"
TRANSLATION_LOSS = "|loss|embedding|target_in"
