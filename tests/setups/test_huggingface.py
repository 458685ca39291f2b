"""Configurations of Hugging Face as setups: the model, a batch that fits, and no code of the folder."""

import json

import pytest
import torch
import transformers as tf

import normlab
from cases import each, few
from normlab.cli.main import main
from normlab.errors import UserError
from normlab.setups.huggingface import setup_from_configuration

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 32,
}
T5 = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 61}
VIT = {"image_size": 16, "patch_size": 8}
BART = {
    "d_model": 16,
    "vocab_size": 61,
    "max_position_embeddings": 32,
    **{f"{stack}_layers": 2 for stack in ("encoder", "decoder")},
    **{f"{stack}_attention_heads": 2 for stack in ("encoder", "decoder")},
    **{f"{stack}_ffn_dim": 32 for stack in ("encoder", "decoder")},
}
MARIAN = {"pad_token_id": 60, "eos_token_id": 0, "decoder_start_token_id": 60}
HEADS = {
    "LlamaForCausalLM": tf.LlamaConfig(**SIZES, num_key_value_heads=1, pad_token_id=0),
    "GPT2LMHeadModel": tf.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=61, n_positions=32),
    "BertForMaskedLM": tf.BertConfig(**SIZES),
    "BertForSequenceClassification": tf.BertConfig(**SIZES),
    "BertForTokenClassification": tf.BertConfig(**SIZES),
    "BertForQuestionAnswering": tf.BertConfig(**SIZES),
    "T5ForConditionalGeneration": tf.T5Config(**T5, decoder_start_token_id=0),
    "MarianMTModel": tf.MarianConfig(**BART, **MARIAN),
    "Gemma3ForConditionalGeneration": tf.Gemma3Config(
        text_config={**SIZES, "head_dim": 8, "num_key_value_heads": 1, "pad_token_id": 0},
        vision_config={k: SIZES[k] for k in list(SIZES)[:4]} | VIT,
        mm_tokens_per_image=4,
    ),
    "ViTForImageClassification": tf.ViTConfig(**{k: SIZES[k] for k in list(SIZES)[:4]}, **VIT),
}


def folder(tmp_path, config, architecture=None, **more):
    config.architectures = [architecture] if architecture else None
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    return tmp_path


@pytest.mark.parametrize("architecture", HEADS)
def test_the_batch_fits_the_head_and_the_weights_follow_the_seed(tmp_path, architecture):
    where = folder(tmp_path, HEADS[architecture], architecture)
    setups = [setup_from_configuration(where, seed=seed).setup for seed in (1, 1, 2)]
    losses = [float(s.model.eval()(**s.batch).loss.detach()) for s in setups]
    assert type(setups[0].model).__name__ == architecture
    assert losses[0] == losses[1] != losses[2]
    first, other = (next(setups[0].make().parameters()) for _ in range(2))
    assert not torch.equal(first, other)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", few(HEADS, 4))
def test_a_sound_model_fails_nothing(tmp_path, architecture):
    where = folder(tmp_path, HEADS[architecture], architecture)
    report = normlab.check(setup_from_configuration(where, seed=1).setup, budget_s=60)
    assert report.failures == ()
    assert {"gradients", "derivative", "rows", "start"} <= {*report.holds}


def test_a_class_whose_name_tells_no_head_has_that_of_its_automatic_class(tmp_path):
    batch = setup_from_configuration(
        folder(tmp_path, HEADS["MarianMTModel"], "MarianMTModel"), seed=1
    ).setup.batch
    assert batch["labels"].shape[1] < batch["input_ids"].shape[1]  # of other texts than the source


@each(
    ("config", "expected"),
    [
        (tf.BertConfig(**SIZES), "BertForMaskedLM"),
        (tf.BertConfig(**SIZES, is_decoder=True), "BertLMHeadModel"),
        (tf.BartConfig(**BART), "BartForConditionalGeneration"),
        (HEADS["GPT2LMHeadModel"], "GPT2LMHeadModel"),
    ],
)
def test_a_type_without_an_architecture_has_its_usual_head(tmp_path, config, expected):
    setup = setup_from_configuration(folder(tmp_path, config), seed=0).setup
    assert type(setup.model).__name__ == expected


def test_without_an_encoder_the_text_itself_is_predicted(tmp_path):
    name = "Gemma3ForConditionalGeneration"
    batch = setup_from_configuration(folder(tmp_path, HEADS[name], name), seed=1).setup.batch
    real = batch["attention_mask"].bool()
    assert torch.equal(batch["labels"][real], batch["input_ids"][real])


def test_a_class_that_does_not_shift_labels_is_given_those_that_follow(tmp_path):
    config = tf.BartConfig(**BART)
    batch = setup_from_configuration(folder(tmp_path, config, "BartForCausalLM"), seed=1).setup.batch
    ids, real = batch["input_ids"], batch["attention_mask"].bool()
    assert torch.equal(batch["labels"][:, :-1][real[:, 1:]], ids[:, 1:][real[:, 1:]])
    assert (batch["labels"][:, -1] < 0).all()


def test_a_decoder_without_a_word_to_start_with_reads_its_labels_shifted(tmp_path):
    where = folder(tmp_path, tf.T5Config(**T5), "T5ForConditionalGeneration")
    setup = setup_from_configuration(where, seed=1).setup
    read, labels = setup.batch["decoder_input_ids"], setup.batch["labels"]
    real = labels[:, :-1] >= 0
    assert torch.equal(read[:, 1:][real], labels[:, :-1][real])
    assert setup.model(**setup.batch).loss.isfinite()


def test_an_encoder_that_reads_no_text_is_refused(tmp_path):
    sizes = {**BART, "max_source_positions": 16, "max_target_positions": 16, "pad_token_id": 0}
    where = folder(tmp_path, tf.WhisperConfig(**sizes), "WhisperForConditionalGeneration")
    with pytest.raises(UserError, match="reads input_features"):
        setup_from_configuration(where, seed=1)


def test_a_model_that_raises_on_its_batch_is_refused_with_a_command(tmp_path, capsys):
    where = folder(tmp_path, tf.XmodConfig(**SIZES), "XmodForMaskedLM")
    assert main(["check", f"hf:{where}", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error.startswith("XmodForMaskedLM raised ValueError")
    assert error.endswith("normlab check my_setup.py:setup")
    assert "lambda" not in error


@pytest.mark.slow
def test_a_check_of_it_has_the_same_report_each_time(tmp_path):
    where = folder(tmp_path, HEADS["LlamaForCausalLM"])
    reports = [
        normlab.check(setup_from_configuration(where, seed=3).setup, budget_s=20).lines() for _ in range(2)
    ]
    assert [*reports[0]] == [*reports[1]]


def test_code_of_the_folder_is_never_run(tmp_path):
    (tmp_path / "modeling_x.py").write_text("raise SystemExit('it ran')")
    mapped = {"AutoModelForCausalLM": "modeling_x.X", "AutoConfig": "modeling_x.X"}
    for more in ({"auto_map": mapped}, {"text_config": {"auto_map": mapped}}):
        where = folder(tmp_path, HEADS["LlamaForCausalLM"], **more)
        with pytest.raises(UserError, match=r"auto_map.*--trust-remote-code"):
            setup_from_configuration(where, seed=1)


@pytest.mark.slow
@each(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[]", "must hold an object"),
        ("{}", "transformers cannot read"),
        ('{"model_type": "llamma"}', "transformers cannot read"),
        ('{"model_type": "bert", "architectures": ["BertModel"]}', "no head for which a batch can be made"),
        # it predicts the next words or hidden ones, as its configuration says
        ('{"model_type": "xlm", "architectures": ["XLMWithLMHeadModel"]}', "no head for which a batch"),
        ('{"model_type": "llama", "intermediate_size": 11007}', "intermediate_size 11007 stands in the way"),
    ],
)
def test_a_folder_that_holds_something_else_is_refused(tmp_path, content, words):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=words):
        setup_from_configuration(tmp_path, seed=1)
