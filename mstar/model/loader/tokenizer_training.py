"""Makes a byte-level BPE tokenizer without any download: trained on a short text in this package, and filled up to the
size that is asked for with made-up words. No torch; runs in the process that makes a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from itertools import count

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

MAX_TRAINED = 4096
_SYLLABLES = tuple(consonant + vowel for consonant in "bcdfghjklmnprstvwyzx" for vowel in "aeiou")


def build_tokenizer(num_tokens: int, added: Mapping[str, bool], *, split: str) -> Tokenizer:
    """A tokenizer with `num_tokens` ordinary tokens, among them all 256 bytes, so that it encodes any text. After them,
    in order, come those of `added` (text -> is it special). `split` is the regular expression whose matches are words:
    no token crosses their borders. Equal arguments give equal tokenizers.

    The text gives some thousand tokens. More are words of three syllables that no merge leads to: the model may say
    them, the tokenizer never reads them.
    """
    if num_tokens < 256:
        raise ValueError(f"a byte-level tokenizer has at least 256 tokens, not {num_tokens}")
    pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.NFC()
    trained.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=min(num_tokens, MAX_TRAINED),
        min_frequency=1,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    corpus = files("mstar.model.loader").joinpath("tokenizer_corpus.txt").read_text(encoding="utf-8")
    trained.train_from_iterator([corpus], trainer)
    model = json.loads(trained.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    words = _made_up_words()
    while len(vocab) < num_tokens:
        vocab.setdefault(next(words), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge) for merge in model["merges"]]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in added.items()])
    return tokenizer


def _made_up_words() -> Iterator[str]:
    base = len(_SYLLABLES)
    for number in count():
        first, second, third = number // base**2 % base, number // base % base, number % base
        yield "Ġ" + _SYLLABLES[third] + _SYLLABLES[second] + _SYLLABLES[first]  # Ġ stands for a space
