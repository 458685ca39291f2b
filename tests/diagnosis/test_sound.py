"""Sound models of other kinds than the benchmark's, in which a preflight must find nothing."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from normlab.diagnosis import diagnose

tf = pytest.importorskip("transformers", reason="the extra normlab[hf] is not installed")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def words(rows=4, length=16, lowest=5):
    return torch.randint(lowest, 100, (rows, length), generator=torch.Generator().manual_seed(0))


def images(model, **sizes):
    config = getattr(tf, f"{model}Config")(**SIZES, image_size=16, patch_size=4, **sizes)
    labels = torch.tensor([0, 1, 1, 0])
    return getattr(tf, f"{model}ForImageClassification")(config), {
        "pixel_values": torch.randn(4, 3, 16, 16),
        "labels": labels,
    }


def speech():
    config = tf.Wav2Vec2Config(**SIZES, vocab_size=20, conv_dim=(16, 16), conv_kernel=(10, 3),
                               conv_stride=(5, 2), num_feat_extract_layers=2,
                               num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
                               ctc_loss_reduction="mean")  # fmt: skip
    labels = torch.randint(1, 20, (4, 6), generator=torch.Generator().manual_seed(0))
    return tf.Wav2Vec2ForCTC(config), {"input_values": torch.randn(4, 800), "labels": labels}


class Adapted(nn.Module):
    """A map with a low-rank one beside it, which starts at zero and has a dropout of its own.

    Hu et al. 2021, Section 4.1 (arXiv 2106.09685).
    """

    def __init__(self, plain):
        super().__init__()
        self.plain, self.dropout = plain.requires_grad_(False), nn.Dropout(0.1)
        self.down = nn.Linear(plain.in_features, 2, bias=False)
        self.up = nn.Linear(2, plain.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.plain(x) + self.up(self.down(self.dropout(x)))


def adapted():
    model = tf.BertForSequenceClassification(tf.BertConfig(vocab_size=100, **SIZES, num_labels=2))
    model.bert.requires_grad_(False)
    for one in model.bert.encoder.layer:
        one.attention.self.query = Adapted(one.attention.self.query)
        one.attention.self.value = Adapted(one.attention.self.value)
    return model, {"input_ids": words(), "labels": torch.tensor([0, 1, 1, 0])}


def llama(zero=""):
    model = tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=100, **SIZES))
    for path, p in model.named_parameters():
        if zero and zero in path:
            nn.init.zeros_(p)
    return model, {"input_ids": words(), "labels": words()}


def padded_on_the_left():
    ids = words(lowest=5)
    ids[0, :13] = ids[1, :12] = 99
    mask = torch.ones_like(ids)
    mask[0, :13] = mask[1, :12] = 0
    config = tf.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=99,
                           bos_token_id=99, pad_token_id=99)  # fmt: skip
    labels = ids.masked_fill(mask == 0, -100)
    return tf.GPT2LMHeadModel(config), {"input_ids": ids, "attention_mask": mask, "labels": labels}


def positions_and_types():
    ids = words()
    batch = {
        "input_ids": ids,
        "token_type_ids": torch.zeros_like(ids),
        "position_ids": torch.arange(16)[None].repeat(4, 1),
        "labels": torch.where(torch.arange(16) % 7 == 3, ids, -100),
    }
    batch["input_ids"] = torch.where(torch.arange(16) % 7 == 3, 3, ids)
    return tf.BertForMaskedLM(tf.BertConfig(vocab_size=100, **SIZES)), batch


@pytest.mark.parametrize(
    "build",
    [
        partial(images, "ViT"),
        partial(images, "Dinov2"),
        speech,
        adapted,
        llama,
        partial(llama, "o_proj"),
        partial(llama, "q_proj"),
        padded_on_the_left,
        positions_and_types,
    ],
    ids=lambda b: " ".join([b.func.__name__, *b.args]) if isinstance(b, partial) else b.__name__,
)
def test_nothing_is_found(build):
    torch.manual_seed(0)
    model, batch = build()
    found = diagnose(model, batch, lr=1e-4, preset="preflight")
    assert [str(f) for f in found.at_least("warning")] == []
    assert [f.sentence for f in found.findings if f.name == "not_done"] == []


def test_an_encoder_of_torch_with_a_padding_mask_is_read():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(100, 32), nn.Linear(32, 100)
            one = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
            self.encoder = nn.TransformerEncoder(one, 2)
            for p in self.encoder.parameters():
                if p.ndim > 1:
                    nn.init.xavier_uniform_(p)

        def forward(self, ids, labels):
            x = self.encoder(self.table(ids), src_key_padding_mask=ids == 0)
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=0)

    torch.manual_seed(0)
    ids = words()
    ids[0, 12:] = ids[1, 10:] = 0
    labels = ids.roll(1, 1).masked_fill(ids == 0, 0)
    found = diagnose(Encoder(), {"ids": ids, "labels": labels}, lr=1e-4, preset="preflight")
    assert [view.role for _, view in found.structure.sublayers] == ["self_attention", "ffn"] * 2
