"""A `tokenizers` tokenizer from the vocabulary in GGUF metadata. No torch, no transformers; any process.

GGUF names the rule that cuts text before BPE (`tokenizer.ggml.pre`) instead of storing it, so the rules are here, with
the patterns of the models' published `tokenizer.json`. An unknown rule is an error: a wrong one gives plausible ids
that the model was not trained on.
"""

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from mstar.model.loader.errors import CheckpointError
from mstar.model.loader.gguf_header import GgufHeader

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_SPACE = "\u2581"

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _CutRule:
    """How text is cut before byte-level BPE: by `words` (None: GPT-2's pattern), with each digit on its own first if
    `single_digits`. `whole_words`: a piece that is in the vocabulary is not merged up to it. `add_bos` holds where the
    metadata does not say."""

    words: str | None = None
    single_digits: bool = False
    whole_words: bool = False
    add_bos: bool = False


_GPT2 = _CutRule()
_SMOLLM = _CutRule(single_digits=True)
_LLAMA3 = _CutRule(words=_LLAMA3_WORDS, whole_words=True, add_bos=True)
_CUT_RULES = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "tekken": _CutRule(words=_TEKKEN_WORDS, whole_words=True, add_bos=True),
}


def build_gguf_tokenizer(header: GgufHeader) -> Tokenizer:
    """A tokenizer whose ids are those of the model. Tokens marked as control are special, user-defined ones are added
    tokens, and `encode` puts the bos and eos tokens that the metadata asks for around a text.

    Raises:
        CheckpointError: the vocabulary is of a kind, or needs a cutting rule, that is not known here.
    """
    metadata = header.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(header)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(metadata), True
    else:
        raise CheckpointError(f"{header.path}: vocabularies of kind {kind!r} are not supported; gpt2 and llama are")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or []
    for token, token_type in zip(tokens, types, strict=False):
        if token_type == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif token_type == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    bos = metadata.get("tokenizer.ggml.bos_token_id") if metadata.get("tokenizer.ggml.add_bos_token", add_bos) else None
    eos = metadata.get("tokenizer.ggml.eos_token_id") if metadata.get("tokenizer.ggml.add_eos_token") else None
    set_surrounding_tokens(tokenizer, bos, eos)
    return tokenizer


def set_surrounding_tokens(tokenizer: Tokenizer, bos: int | None, eos: int | None) -> None:
    """Makes `encode` with special tokens put `bos` first and `eos` last (None: nothing), whatever it did before."""
    first = [] if bos is None else [(tokenizer.id_to_token(bos), bos)]
    last = [] if eos is None else [(tokenizer.id_to_token(eos), eos)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*(token for token, _ in first), "$A", *(token for token, _ in last)],
        pair="$A:0 $B:1",  # pairs of texts do not occur in generation
        special_tokens=[*first, *last],
    )


def _byte_level(header: GgufHeader) -> tuple[Tokenizer, bool]:
    metadata = header.metadata
    name = metadata.get("tokenizer.ggml.pre", "")
    rule = _CUT_RULES.get(name)
    if rule is None:
        raise CheckpointError(
            f"{header.path}: tokenizer.ggml.pre is {name!r}; known: {', '.join(sorted(_CUT_RULES))}. A file without it "
            "was made by an old converter: convert the model again"
        )
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(_vocabulary(metadata), merges, ignore_merges=rule.whole_words))
    cuts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if rule.single_digits else []
    if rule.words is not None:
        cuts.append(pre_tokenizers.Split(Regex(rule.words), behavior="isolated"))
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.words is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.add_bos


def _sentencepiece(metadata: dict[str, Any]) -> Tokenizer:
    """SentencePiece BPE as Llama 1 and 2 have it: spaces are written as U+2581, one stands before each text, bytes
    without a piece of their own fall back to <0xXX>."""
    vocabulary = _vocabulary(metadata)
    unknown = metadata["tokenizer.ggml.tokens"][metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    if stored := metadata.get("tokenizer.ggml.merges"):
        merges = [tuple(merge.split(" ")) for merge in stored]
    else:
        merges = _merges_of(vocabulary, metadata["tokenizer.ggml.scores"])
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", _SPACE)
    space_first = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if space_first else replace
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if space_first else back)
    return tokenizer


def _vocabulary(metadata: dict[str, Any]) -> dict[str, int]:
    return {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _merges_of(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that SentencePiece implies: each split of a piece into two pieces, best score of the whole first."""
    merges = []
    for piece, index in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]
