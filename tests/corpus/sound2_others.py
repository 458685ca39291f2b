"""Sound encoders, encoder-decoders and models of speech, images and series of transformers, second list."""

from __future__ import annotations

import torch

from .case import Case
from .gpt import VOCAB
from .library import BART, ENCODER, GPT2, IMAGES, PADDED, T5, Row, sound_cases
from .setups import (
    LENGTH,
    ROWS,
    classified_batch,
    image_batch,
    language_batch,
    masked_batch,
    tokens,
    translation_batch,
)

ENCODERS: dict[str, Row] = {
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
ENCODER_DECODERS: dict[str, Row] = {
    "pegasus": ("PegasusForConditionalGeneration", BART),
    "mbart": ("MBartForConditionalGeneration", BART),
    "marian": ("MarianMTModel", BART),
    "t5v11": (
        "T5ForConditionalGeneration",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
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
CLASSIFIERS_OF_IMAGES: dict[str, Row] = {
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
WHISPER: Row = (
    "WhisperForConditionalGeneration",
    {
        "vocab_size": VOCAB,
        "num_mel_bins": 16,
        "d_model": 64,
        "encoder_layers": 3,
        "decoder_layers": 3,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "max_source_positions": 30,
        "max_target_positions": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 3,
    },
)
WAV2VEC: Row = (
    "Wav2Vec2ForCTC",
    {
        "vocab_size": 32,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "conv_dim": (32, 32),
        "conv_stride": (4, 4),
        "conv_kernel": (8, 8),
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 4,
        "mask_time_prob": 0.0,
    },
)
PATCHTST: Row = (
    "PatchTSTForPrediction",
    {
        "num_input_channels": 3,
        "context_length": 32,
        "patch_length": 8,
        "patch_stride": 8,
        "d_model": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "ffn_dim": 128,
        "prediction_length": 8,
    },
)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def speech_batch() -> dict[str, torch.Tensor]:
    """Return spectrograms and the tokens of what is spoken."""
    features = torch.randn(ROWS, 16, 60, generator=generator())
    return {"input_features": features, "labels": tokens(length=14)}


def waveform_batch() -> dict[str, torch.Tensor]:
    """Return waveforms and the letters of what is spoken."""
    draw = generator()
    waves = torch.randn(ROWS, 800, generator=draw)
    return {"input_values": waves, "labels": torch.randint(1, 32, (ROWS, 5), generator=draw)}


def tagged_batch() -> dict[str, torch.Tensor]:
    """Return token ids with one of five tags each."""
    return {"input_ids": tokens(), "labels": torch.randint(0, 5, (ROWS, LENGTH), generator=generator())}


def series_batch() -> dict[str, torch.Tensor]:
    """Return three series and their next eight values."""
    draw = generator()
    past = torch.randn(ROWS, 32, 3, generator=draw)
    return {"past_values": past, "future_values": torch.randn(ROWS, 8, 3, generator=draw)}


GPT2_OF_CLASSES = {**GPT2, "num_labels": 3, "pad_token_id": 0}
XLNET = {"vocab_size": VOCAB, "d_model": 64, "n_layer": 4, "n_head": 4, "d_inner": 128}
SOUND2: dict[str, Case] = {
    **sound_cases(ENCODERS, masked_batch, PADDED),
    **sound_cases(ENCODER_DECODERS, translation_batch, PADDED),
    **sound_cases(CLASSIFIERS_OF_IMAGES, image_batch),
    **sound_cases({"whisper": WHISPER}, speech_batch),
    **sound_cases({"wav2vec": WAV2VEC}, waveform_batch),
    **sound_cases({"patchtst": PATCHTST}, series_batch),
    **sound_cases({"bert_tok": ("BertForTokenClassification", {**ENCODER, "num_labels": 5})}, tagged_batch),
    **sound_cases({"gpt2_cls": ("GPT2ForSequenceClassification", GPT2_OF_CLASSES)}, classified_batch, PADDED),
    **sound_cases({"xlnet": ("XLNetLMHeadModel", XLNET)}, language_batch),
}
