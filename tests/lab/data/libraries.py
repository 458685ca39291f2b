"""Tokenizers as others make them with the library, small ones of every kind."""

from __future__ import annotations

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from normlab.lab.data.foreign import GPT4

DOCUMENTS = [f"  One day, {i} nights.\r\n\n\tand 12345 days 👩\u200d👧 {'x' * i}\n" for i in range(24)]


def library(words=GPT4, **more):
    """A tokenizer as others make it: GPT-4's words, 329 entries, the separator first."""
    one = Library(models.BPE(**more))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    one.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), "isolated"), level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    one.train_from_iterator(DOCUMENTS, trainer)
    return one


LETTERS = "onetwcaf!"
SPACE = "\u2581"


def word_pieces():
    """As BERT's: lower case, special tokens around a text, unknown characters."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, *(f"##{c}" for c in LETTERS), "one"]
    made = Library(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(names[:4])
    return made


def unigram():
    """As T5's: compatibility forms, a blank before a text."""
    names = ["<pad>", "</s>", "<unk>", SPACE, *LETTERS, f"{SPACE}one", "\t", "é"]
    made = Library(models.Unigram([(name, -float(i)) for i, name in enumerate(names)], 2, False))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(names[:3])
    return made


def fallback(*, first):
    """As Gemma's, or, with a blank before a text, Llama 2's: what has no entry is written in bytes."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), SPACE, *LETTERS, "on", "one"]
    vocab = {name: i for i, name in enumerate(names)}
    model = models.BPE(vocab, [("o", "n"), ("on", "e")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    made = Library(model)
    parts = [normalizers.Prepend(SPACE)] if first else []
    made.normalizer = normalizers.Sequence([*parts, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if first else []
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    made.add_special_tokens(names[:3])
    return made


KINDS = {
    "WordPiece": word_pieces,
    "Unigram": unigram,
    "Llama 2": lambda: fallback(first=True),
    "Gemma": lambda: fallback(first=False),
}
