"""Models of images, of transformers and written by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.batches import ROWS, VOCAB, generator, image_batch, tokens
from corpus.case import LIBRARY_1, LIBRARY_2, OWN_1, OWN_3, Arguments, sound
from corpus.models.images import DiT, PatchClassifier, flow_loss
from corpus.models.library import IMAGES, Row, add_in_bfloat16, add_sound, library
from corpus.training import adamw, loss_setup

CLASSIFIERS_1: dict[str, Row] = {
    "vit": ("ViTForImageClassification", {**IMAGES, "num_labels": 10}),
    "dinov2": ("Dinov2ForImageClassification", {**IMAGES, "num_labels": 10}),
    "beit": ("BeitForImageClassification", {**IMAGES, "num_labels": 10}),
    "deit": ("DeiTForImageClassification", {**IMAGES, "num_labels": 10}),
    "swin": (
        "SwinForImageClassification",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 24,
            "depths": [2, 4],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": 10,
        },
    ),
}


PYRAMID = {
    "num_encoder_blocks": 2,
    "sr_ratios": [2, 1],
    "hidden_sizes": [16, 32],
    "num_attention_heads": [1, 2],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "mlp_ratios": [4, 4],
    "num_labels": 10,
}


CLASSIFIERS_2: dict[str, Row] = {
    "convnext": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [16, 32], "depths": [2, 3], "num_stages": 2, "num_labels": 10},
    ),
    "swinv2": (
        "Swinv2ForImageClassification",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 24,
            "depths": [2, 4],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": 10,
        },
    ),
    "segformer": ("SegformerForImageClassification", {**PYRAMID, "depths": [2, 3]}),
    "pvtv2": ("PvtV2ForImageClassification", {**PYRAMID, "depths": [2, 2], "image_size": 32}),
    "siglip": ("SiglipForImageClassification", {"vision_config": IMAGES, "num_labels": 10}),
}


add_sound(LIBRARY_1, CLASSIFIERS_1, image_batch)
add_sound(LIBRARY_2, CLASSIFIERS_2, image_batch)
add_in_bfloat16(LIBRARY_1, {"vit_bf16": "vit"})


@sound(origin=LIBRARY_1)
def clip() -> Arguments:
    """A contrastive model: the loss compares each row with all others."""
    texts = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "bos_token_id": 1,
        "eos_token_id": VOCAB - 1,
    }
    ends = torch.full((ROWS, 1), VOCAB - 1)
    batch = {
        "input_ids": torch.cat([tokens(vocab=VOCAB - 1), ends], 1),
        "pixel_values": image_batch()["pixel_values"],
        "return_loss": True,
    }
    options = {"text_config": texts, "vision_config": IMAGES, "projection_dim": 32}
    return library("CLIPModel", options, batch)


@sound(origin=LIBRARY_1)
def vitmae() -> Arguments:
    """A masked autoencoder, which draws the patches that it hides."""
    decoder = {
        "decoder_hidden_size": 48,
        "decoder_num_hidden_layers": 3,
        "decoder_num_attention_heads": 4,
        "decoder_intermediate_size": 96,
    }
    batch = {"pixel_values": image_batch()["pixel_values"]}
    return library("ViTMAEForPreTraining", {**IMAGES, **decoder}, batch)


@sound(origin=OWN_1)
def dit() -> Arguments:
    """A diffusion Transformer, whose loss draws noise and times."""
    images = torch.randn(ROWS, 4, 8, 8, generator=generator(0))
    return loss_setup(DiT, (images, torch.tensor([1, 3, 5, 7])), flow_loss, adamw)


@sound(origin=OWN_3)
def patch_own() -> Arguments:
    """A classifier of images whose head is zero at the start."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    batch = image_batch()
    return loss_setup(PatchClassifier, (batch["pixel_values"], batch["labels"]), loss, adamw)
