"""Encoder-decoders of text and of speech, of transformers and written by hand."""

from __future__ import annotations

import torch

from corpus.batches import ROWS, VOCAB, generator, tokens, translation_batch
from corpus.case import LIBRARY_1, LIBRARY_2, OWN_1, Arguments, sound
from corpus.models.library import BART, PADDED, T5, Row, add_in_bfloat16, add_sound
from corpus.models.translators import TorchTranslator, next_target_loss
from corpus.training import adamw, loss_setup

ENCODER_DECODERS_1: dict[str, Row] = {
    "t5": ("T5ForConditionalGeneration", T5),
    "bart": ("BartForConditionalGeneration", BART),
}


ENCODER_DECODERS_2: dict[str, Row] = {
    "pegasus": ("PegasusForConditionalGeneration", BART),
    "mbart": ("MBartForConditionalGeneration", BART),
    "marian": ("MarianMTModel", BART),
    "t5v11": (
        "T5ForConditionalGeneration",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
}


SPEECH: dict[str, Row] = {
    "whisper": (
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
}


WAVES: dict[str, Row] = {
    "wav2vec": (
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
}


SERIES: dict[str, Row] = {
    "patchtst": (
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
}


def speech_batch() -> dict[str, torch.Tensor]:
    """Return spectrograms and the tokens of what is spoken."""
    features = torch.randn(ROWS, 16, 60, generator=generator(1))
    return {"input_features": features, "labels": tokens(length=14)}


def waveform_batch() -> dict[str, torch.Tensor]:
    """Return waveforms and the letters of what is spoken."""
    draw = generator(1)
    waves = torch.randn(ROWS, 800, generator=draw)
    return {"input_values": waves, "labels": torch.randint(1, 32, (ROWS, 5), generator=draw)}


def series_batch() -> dict[str, torch.Tensor]:
    """Return three series and their next eight values."""
    draw = generator(1)
    past = torch.randn(ROWS, 32, 3, generator=draw)
    return {"past_values": past, "future_values": torch.randn(ROWS, 8, 3, generator=draw)}


add_sound(LIBRARY_1, ENCODER_DECODERS_1, translation_batch, PADDED)
add_sound(LIBRARY_2, ENCODER_DECODERS_2, translation_batch, PADDED)
add_sound(LIBRARY_2, SPEECH, speech_batch)
add_sound(LIBRARY_2, WAVES, waveform_batch)
add_sound(LIBRARY_2, SERIES, series_batch)
add_in_bfloat16(LIBRARY_1, {"t5_bf16": "t5"})


@sound(origin=OWN_1)
def nn_transformer() -> Arguments:
    """nn.Transformer with time first inside."""
    batch = (tokens(), tokens(length=14, seed=4))
    return loss_setup(TorchTranslator, batch, next_target_loss, adamw, remade=False)
