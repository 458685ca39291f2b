"""Joint byte-pair encoding of both sides, with the four special tokens the models know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

PAD, UNK, BOS, EOS = range(4)

# A space inside the name: no merge of the text's own pieces can ever spell it.
SPECIALS = ("[ pad ]", "[ unk ]", "[ bos ]", "[ eos ]")


class Tokenizer:
    """Byte-pair encoding (Sennrich et al. 2016, Section 3.2, arXiv 1508.07909) after NFC normalisation.

    White space of any kind and length becomes one space, written U+2581 at the start of a word, so that
    decoding restores it. PAD = 0, UNK = 1, BOS = 2, EOS = 3.
    """

    def __init__(self, backend: Backend) -> None:
        # Text that happens to spell a special token is text.
        backend.encode_special_tokens = True
        self._backend = backend

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int) -> Tokenizer:
        """Learns merges until there are ``vocab_size`` types, special tokens and single characters included.

        There are fewer when the text has no more pairs to merge. Raises ``ValueError`` if the characters
        alone are more.
        """
        backend = Backend(models.BPE(unk_token=SPECIALS[UNK]))
        backend.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
        )
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
        trainer = trainers.BpeTrainer(
            vocab_size=max(vocab_size, 0), special_tokens=list(SPECIALS), show_progress=False
        )
        backend.train_from_iterator(lines, trainer)
        least = backend.get_vocab_size()
        if least > vocab_size:
            raise ValueError(
                f"vocab_size is {vocab_size}, but the text's different characters and the {len(SPECIALS)} "
                f"special tokens are {least} already; pass at least {least}"
            )
        return cls(backend)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no tokenizer file {path}; prepare the data again")
        try:
            return cls(Backend.from_str(Path(path).read_text(encoding="utf-8")))
        except Exception as error:  # the library raises no narrower one
            if isinstance(error, OSError):
                raise
            raise ValueError(
                f"{path} is no tokenizer ({error}); bring back the file that the model was trained with"
            ) from error

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self._backend.to_str(pretty=True), encoding="utf-8", newline="\n")

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size()

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Ids without special tokens; a character never seen in training becomes UNK."""
        return [line.ids for line in self._backend.encode_batch_fast(list(lines), add_special_tokens=False)]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Text without special tokens: the inverse of ``encode`` up to NFC, white space, unseen characters.

        U+2581 in the text itself reads as a space.
        """
        return self._backend.decode_batch([list(line) for line in ids], skip_special_tokens=True)
