"""What the drivers share: a tiny Llama, rows of tokens, and a tokenizer of whole words, all made here."""

import random

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, START, END = 0, 1, 2
VOCABULARY = 64


def rows_of_tokens(count: int, shortest: int, longest: int) -> list[list[int]]:
    """Rows of random tokens, each closed by the token that ends a text."""
    draw = random.Random(0)
    rows = []
    for _ in range(count):
        length = draw.randint(shortest, longest)
        rows.append([draw.randrange(3, VOCABULARY) for _ in range(length - 1)] + [END])
    return rows


def llama(**settings) -> LlamaForCausalLM:
    """A freshly drawn Llama of two layers."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=END,
        **settings,
    )
    return LlamaForCausalLM(config)


def words() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the words w3, w4 and so on."""
    vocabulary = {"<pad>": PAD, "<s>": START, "</s>": END}
    for index in range(3, VOCABULARY):
        vocabulary[f"w{index}"] = index
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def sentence(draw: random.Random, shortest: int, longest: int) -> str:
    """A few random words."""
    return " ".join(f"w{draw.randrange(3, VOCABULARY)}" for _ in range(draw.randint(shortest, longest)))
