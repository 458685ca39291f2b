"""``normlab run export``: the same logits, and the same greedy text, in Hugging Face's classes."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cases import each
from lab.data.libraries import DOCUMENTS, KINDS, library
from lab.training.tiny import tiny_language_model, write_plain
from normlab.cli.main import main
from normlab.errors import UserError
from normlab.lab.config import Config, DataConfig, DecodeConfig, ModelConfig
from normlab.lab.data.tokenizer import EOS, UNK
from normlab.lab.data.vocabulary import load, parse
from normlab.lab.recipes.grammar import resolve
from normlab.lab.runs import RunFolder
from normlab.lab.tasks.task import build_model
from normlab.lab.training.export import difference, entries_of, family_of, hugging_face, write_tokenizer
from normlab.lab.training.families import FAMILIES
from normlab.lab.training.train import train
from normlab.lab.training.translate import model_of, prompt_of, sample, text_of
from normlab.nn import Decoder
from normlab.nn.decode import generate, likeliest

pytest.importorskip("transformers")
BASE = Config(
    task="language_model",
    model=ModelConfig(dim=32, ffn_dim=48, heads=4, encoder_layers=0, decoder_layers=2, kv_heads=2),
)
FITS = [
    ("pre+learned+bias", {"activation": "gelu", "kv_heads": 0}, "gpt2"),
    ("pre+untied+sinusoidal+nobias", {"kv_heads": 0}, "gpt2"),
    ("pre+rmsnorm+nobias+swiglu+rope+untied", {}, "llama"),
    ("pre+rmsnorm+bias+swiglu+rope+fixnorm", {"kv_heads": 0}, "llama"),
    ("pre+rmsnorm1p+nobias+geglu+rope+headnormed", {"head_dim": 16}, "qwen3"),
    ("like:gemma3", {"head_dim": 16, "sliding_window": 9, "layer_pattern": "SF"}, "gemma3_text"),
    ("like:gpt2", {"kv_heads": 0}, "gpt2"),
    ("like:llama", {"rope_theta": 5e5}, "llama"),
    ("like:olmo2", {}, "olmo2"),
]


def drawn(recipe, changes, entries=61):
    """A recipe's configuration and its model, with every parameter moved off its start."""
    config = resolve(recipe, BASE)
    config = replace(config, model=replace(config.model, **changes))
    model = build_model(Decoder, config.model, entries, 1).eval()
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=draw))
    return config, model


@pytest.mark.parametrize(("recipe", "changes", "kind"), FITS)
def test_logits_are_the_same(recipe, changes, kind):
    config, model = drawn(recipe, changes)
    family = family_of(config)
    assert family.kind == kind
    rows = torch.arange(61)
    apart, largest = difference(model, hugging_face(family, config, model, rows), config, rows)
    assert apart < 1e-5 * max(largest, 1.0)


UNKNOWN = {"WordPiece": 1, "Llama 2": 0}
"""Their own number of the entry for unknown characters, by kind."""


@each(
    ("kind", "recipe"),
    [("GPT-4", "like:gpt2"), ("WordPiece", "like:llama"), ("Llama 2", "like:llama"), ("Gemma", "like:olmo2")],
)
def test_a_tokenizer_of_others_keeps_its_numbers(tmp_path, kind, recipe):
    import transformers

    theirs = KINDS.get(kind, library)()
    ours, text = parse(theirs.to_str().encode()), "one two"
    config, model = drawn(recipe, {"kv_heads": 0}, ours.vocab_size)
    backend, rows = entries_of(ours)  # row i is our number for the exported number i
    out = tmp_path / kind
    hugging_face(family_of(config), config, model, rows).save_pretrained(out)
    write_tokenizer(backend, rows, out)
    other = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert ids[0, 1:].tolist() == theirs.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == text
    assert rows[ids[0]].tolist() == prompt_of(ours, text)
    # The end of a text is their own separator in GPT-4's kind, and the others get one after their last entry.
    end = 0 if kind == "GPT-4" else theirs.get_vocab_size()
    assert ids[0, 0] == end
    assert other.config.eos_token_id == end
    # Ours are theirs plus four, as ours begin with four special ones. Two of these four are what they use for
    # the end of a text and for unknown characters.
    our_numbers = [number + 4 for number in range(len(tokenizer))]
    our_numbers[end] = EOS
    if kind in UNKNOWN:
        our_numbers[UNKNOWN[kind]] = UNK
    with torch.no_grad():
        expected = model(torch.tensor([prompt_of(ours, text)]))[..., our_numbers]
        apart = (other(ids).logits - expected).abs().max()
    assert apart < 1e-5 * max(float(expected.abs().max()), 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["like:gpt2", "like:llama", "like:olmo2"])
def test_a_trained_run_goes_on_in_the_other_library(recipe, tmp_path):
    import transformers

    config = tiny_language_model(write_plain(tmp_path / "text"), recipe, steps=20, lr=0.02)
    trained, out = train(config, tmp_path / "runs"), tmp_path / "exported"
    assert main(["run", "export", str(trained.path), "--to", "huggingface", "--out", str(out)]) == 0
    other = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokens = transformers.AutoTokenizer.from_pretrained(out)("twenty one", return_tensors="pt")
    model, tokenizer, _ = model_of(Decoder, trained)
    prompt, rows = prompt_of(tokenizer, "twenty one"), entries_of(tokenizer)[1]
    assert tokens["input_ids"][0].tolist() == prompt
    apart, largest = difference(model, other, config, rows)
    assert apart < 1e-5 * max(largest, 1.0)
    window = len(prompt) + 500
    ours = generate(model.double(), prompt, [0], lambda p: likeliest(p, 1), count=500, window=window)[0]
    how = {"do_sample": False, "max_new_tokens": 500, "suppress_tokens": [0], "eos_token_id": None}
    theirs = other.double().generate(**tokens, **how)[0, len(prompt) :]
    changed = (ours != theirs).nonzero()
    if len(changed):
        before = torch.tensor([[*prompt, *ours[: int(changed[0])].tolist()]])
        top = model(before)[0, -1].topk(2).values
        assert float(top[0] - top[1]) < 1e-5
    assert len(ours) == 500


def test_recipes_that_fit_nowhere_are_refused_part_by_part():
    config = resolve("post+rmsnorm+nobias+swiglu+rope", BASE)
    with pytest.raises(UserError, match=r"\bllama, .*decoder_placement is post") as no:
        family_of(config)
    others = [line.strip().partition(":")[0] for line in str(no.value).splitlines()[1:-1]]
    assert others == [family.kind for family in FAMILIES if family.kind != "llama"]
    assert re.search(r"rmsnorm, .*gpt2 .*layernorm", str(no.value))
    with pytest.raises(UserError, match="translation"):
        family_of(Config())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a Llama that was trained for a few steps."""
    root = tmp_path_factory.mktemp("exported")
    data = write_plain(root / "text")
    return train(tiny_language_model(data, "pre+rmsnorm+nobias+swiglu+rope", steps=4), root / "runs")


@pytest.mark.slow
def test_a_run_is_exported_with_its_tokenizer(run, tmp_path, capsys):
    import transformers

    out = tmp_path / "llama"
    assert main(["run", "export", str(run.path), "--out", str(out)]) == 0
    assert "llama (the " in capsys.readouterr().out
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    text = "twenty four"
    ids = tokenizer(text)["input_ids"]
    assert ids == prompt_of(load(run.tokenizer), text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert main(["run", "sample", str(run.path), text, "--top-k", "1", "--tokens", "9"]) == 0
    theirs = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=9, eos_token_id=None)
    assert capsys.readouterr().out.rstrip("\n") == text + text_of(
        load(run.tokenizer), theirs[0, len(ids) :].tolist()
    )
    assert main(["run", "export", str(run.path), "--out", str(out)]) == 2
    assert str(out) in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_with_a_tokenizer_of_others_is_exported_with_it(tmp_path, capsys):
    import transformers

    library().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").write_bytes("".join(DOCUMENTS).encode())
    paths = {f"{name}_text": str(tmp_path / "text") for name in ("train", "dev")}
    data = DataConfig(**paths, tokenizer=str(tmp_path / "tokenizer.json"), block_len=16)
    run = train(tiny_language_model(data, "pre+rmsnorm+nobias+swiglu+rope", steps=2), tmp_path / "runs")
    assert main(["run", "export", str(run.path), "--out", str(tmp_path / "out")]) == 0
    assert re.search(r"^tokenizer: 329 .*<\|endoftext\|>", capsys.readouterr().out, re.MULTILINE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in DOCUMENTS[:3]:
        ids = tokenizer(text)["input_ids"]
        assert ids == [0, *library().encode(text).ids]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.slow
def test_samples_differ_by_seed_and_not_by_call(run, capsys):
    said = []
    for seed in ("1", "1", "2"):
        assert main(["run", "sample", str(run.path), "one", "--seed", seed, "--samples", "2"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]
    first, second = said[0].split("\n---\n")
    assert first.startswith("one")
    assert second.startswith("one")
    assert first != second.rstrip("\n")


def test_a_temperature_of_0_takes_the_likeliest_and_no_number_is_negative(run, capsys):
    said = []
    for how in (["--top-k", "1"], ["--temperature", "0"], ["--temperature", "0", "--top-k", "5"]):
        assert main(["run", "sample", str(run.path), "one", "--tokens", "9", *how]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2]
    for name in ("tokens", "samples"):
        assert main(["run", "sample", str(run.path), "one", f"--{name}", "-3"]) == 2
        assert re.search(rf"\b{name} .*\b1, got -3", capsys.readouterr().err)


def test_a_translation_continues_nothing(run):
    folder = RunFolder.create(run.path.parent / "translation", Config())
    with pytest.raises(UserError, match="language model"):
        sample(folder, "one", DecodeConfig(sample=True))


def test_the_documentation_has_the_parts_of_every_family():
    text = (Path(__file__).parents[3] / "docs" / "export.md").read_text(encoding="utf-8")
    table = text.partition("<!-- families -->")[2].partition("<!-- end -->")[0].strip().splitlines()[2:]
    documented = {}
    for row in table:
        kind, *cells = [cell.strip() for cell in row.split("|")[1:-1]]
        documented[kind] = cells[:6]
    parts = ("decoder_placement", "norm", "position_encoding", "activation", "qk_norm", "bias")
    assert documented.keys() == {family.kind for family in FAMILIES}
    for family in FAMILIES:
        assert documented[family.kind] == [", ".join(family.parts[part]) for part in parts]
