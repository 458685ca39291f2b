"""Encoders of transformers, and classifiers on them."""

from __future__ import annotations

import torch

from corpus.batches import LENGTH, ROWS, VOCAB, classified_batch, generator, masked_batch, tokens
from corpus.case import LIBRARY_1, LIBRARY_2
from corpus.models.library import ENCODER, PADDED, Row, add_in_bfloat16, add_sound

ENDS = {"bos_token_id": 1, "eos_token_id": 2}


ENCODERS_1: dict[str, Row] = {
    "bert": ("BertForMaskedLM", ENCODER),
    "roberta": ("RobertaForMaskedLM", ENCODER),
    "modernbert": (
        "ModernBertForMaskedLM",
        {
            **ENCODER,
            "num_hidden_layers": 6,
            **ENDS,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "local_attention": 8,
            "reference_compile": False,
        },
    ),
    "deberta": (
        "DebertaV2ForMaskedLM",
        {
            **ENCODER,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_biased_input": False,
        },
    ),
    "albert": ("AlbertForMaskedLM", {**ENCODER, "embedding_size": 32}),
}


ENCODERS_2: dict[str, Row] = {
    "electra": ("ElectraForMaskedLM", {**ENCODER, "embedding_size": 32}),
    "distilbert": (
        "DistilBertForMaskedLM",
        {
            "vocab_size": VOCAB,
            "dim": 64,
            "hidden_dim": 128,
            "n_layers": 4,
            "n_heads": 4,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
        },
    ),
    "mpnet": ("MPNetForMaskedLM", {**ENCODER, "pad_token_id": 1}),
    "fnet": ("FNetForMaskedLM", {k: v for k, v in ENCODER.items() if k != "num_attention_heads"}),
    "esm": ("EsmForMaskedLM", {**ENCODER, "mask_token_id": 4, "position_embedding_type": "rotary"}),
    "roformer": ("RoFormerForMaskedLM", ENCODER),
    "xlmr": ("XLMRobertaForMaskedLM", ENCODER),
    "longformer": (
        "LongformerForMaskedLM",
        {**ENCODER, "attention_window": 8, "bos_token_id": 1, "eos_token_id": 2},
    ),
}


CLASSIFIER: dict[str, Row] = {"bert_cls": ("BertForSequenceClassification", {**ENCODER, "num_labels": 3})}
TAGGER: dict[str, Row] = {"bert_tok": ("BertForTokenClassification", {**ENCODER, "num_labels": 5})}


def tagged_batch() -> dict[str, torch.Tensor]:
    """Return token ids with one of five tags each."""
    return {"input_ids": tokens(), "labels": torch.randint(0, 5, (ROWS, LENGTH), generator=generator(1))}


add_sound(LIBRARY_1, ENCODERS_1, masked_batch, PADDED)
add_sound(LIBRARY_1, CLASSIFIER, classified_batch, PADDED)
add_sound(
    LIBRARY_2, ENCODERS_2, masked_batch, PADDED, not_right={"fnet": "it has no mask, and says so nowhere"}
)
add_sound(LIBRARY_2, TAGGER, tagged_batch)
add_in_bfloat16(LIBRARY_1, {"bert_bf16": "bert"})
