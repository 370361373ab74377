"""Makes the files of `tokenizer_files` from a checkpoint. Runs in the launching process or the preprocess pool, once
per start; transformers is loaded only for a directory that has no `tokenizer.json`."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from mstar.model.loader.checkpoint import ResolvedCheckpoint
from mstar.model.loader.directory_files import read_json
from mstar.model.loader.errors import CheckpointError
from mstar.model.loader.gguf_header import read_gguf_header
from mstar.model.loader.gguf_tokenizer import build_gguf_tokenizer, set_surrounding_tokens
from mstar.model.loader.tokenizer_files import TOKENIZER_FILE, TokenizerFiles, load_tokenizer

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")

# Tokens that end a turn in every format that has them. Some checkpoints name only the end of a document as their end.
_CHAT_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def write_tokenizer(checkpoint: ResolvedCheckpoint, out_dir: Path) -> TokenizerFiles:
    """Writes `tokenizer.json` and what belongs to it into `out_dir`, which is made if needed. Encoding and decoding are
    the checkpoint's own; truncation and padding are off. Beside it, as they are, come the files that say how media
    become inputs, for a checkpoint that has them.

    Raises:
        CheckpointError: the checkpoint has no tokenizer, or one that cannot be converted.
    """
    if checkpoint.kind == "gguf":
        tokenizer, template, special_tokens = _from_gguf(checkpoint.path)
    else:
        tokenizer, template, special_tokens = _from_directory(checkpoint.path)
    generation = checkpoint.generation_config()
    out_dir.mkdir(parents=True, exist_ok=True)
    if checkpoint.kind != "gguf":
        for name in PROCESSOR_FILES:
            if (checkpoint.path / name).is_file():
                shutil.copyfile(checkpoint.path / name, out_dir / name)
    partial = out_dir / (TOKENIZER_FILE + ".partial")
    tokenizer.save(str(partial))
    partial.replace(out_dir / TOKENIZER_FILE)
    bos = _id_of(tokenizer, special_tokens.get("bos_token"))
    pad = _id_of(tokenizer, special_tokens.get("pad_token"))
    files = TokenizerFiles(
        directory=out_dir,
        vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
        chat_template=template,
        eos_token_ids=_eos_ids(tokenizer, generation["eos_token_id"], special_tokens.get("eos_token"), template),
        bos_token_id=bos if bos is not None else generation["bos_token_id"],
        pad_token_id=pad if pad is not None else generation["pad_token_id"],
        add_bos=_adds(tokenizer, bos),
        special_tokens=special_tokens,
    )
    files.write_facts()
    return files


def _from_gguf(path: Path) -> tuple[Tokenizer, str | None, dict[str, str]]:
    header = read_gguf_header(path)
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError(f"{path} holds no vocabulary (tokenizer.ggml.tokens)")
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: header.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    special_tokens = {name: tokens[index] for name, index in ids.items() if index is not None}
    return build_gguf_tokenizer(header), header.metadata.get("tokenizer.chat_template"), special_tokens


def _from_directory(directory: Path) -> tuple[Tokenizer, str | None, dict[str, str]]:
    config = read_json(directory / "tokenizer_config.json")
    if (directory / TOKENIZER_FILE).is_file():
        tokenizer = load_tokenizer(directory)
    else:
        tokenizer = _converted_by_transformers(directory)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _add_missing_tokens(tokenizer, config.get("added_tokens_decoder") or {}, directory)
    stated = read_json(directory / "special_tokens_map.json") | config
    texts = {name: _token_text(stated.get(name)) for name in _SPECIAL_NAMES}
    special_tokens = {name: text for name, text in texts.items() if text is not None}
    wants_bos, bos = config.get("add_bos_token"), _id_of(tokenizer, special_tokens.get("bos_token"))
    if wants_bos is not None and bos is not None and wants_bos != _adds(tokenizer, bos):
        eos = _id_of(tokenizer, special_tokens.get("eos_token")) if config.get("add_eos_token") else None
        set_surrounding_tokens(tokenizer, bos if wants_bos else None, eos)
    return tokenizer, _directory_template(directory, config), special_tokens


def _converted_by_transformers(directory: Path) -> Tokenizer:
    # Imported here: transformers loads torch, and almost every checkpoint brings a tokenizer.json.
    from transformers import AutoTokenizer  # noqa: PLC0415

    try:
        converted = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"{directory} has no {TOKENIZER_FILE}, nor files that make one: {error}") from error
    tokenizer = getattr(converted, "backend_tokenizer", None)
    if tokenizer is None:
        raise CheckpointError(
            f"{directory} has no {TOKENIZER_FILE}, and its {type(converted).__name__} cannot make one"
        )
    return tokenizer


def _add_missing_tokens(tokenizer: Tokenizer, decoder: Mapping[str, Any], directory: Path) -> None:
    """Adds tokens that only `tokenizer_config.json` declares. Their ids are given by order, so they must fit."""
    for index, token in sorted((int(index), token) for index, token in decoder.items()):
        if tokenizer.token_to_id(token["content"]) is None:
            flags = {name: bool(token.get(name)) for name in _TOKEN_FLAGS}
            added = AddedToken(token["content"], **flags)
            (tokenizer.add_special_tokens if flags["special"] else tokenizer.add_tokens)([added])
        found = tokenizer.token_to_id(token["content"])
        if found != index:
            raise CheckpointError(
                f"{directory}: {token['content']!r} has id {index} in tokenizer_config.json, {found} in the tokenizer"
            )


def _directory_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The default chat template, from whichever of the places the checkpoint's age put it in."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = read_json(directory / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template


def _eos_ids(
    tokenizer: Tokenizer, declared: Iterable[int], eos_token: str | None, template: str | None
) -> tuple[int, ...]:
    ids = [*declared, _id_of(tokenizer, eos_token)]
    ids += [_id_of(tokenizer, token) for token in _CHAT_ENDS if template and token in template]
    return tuple(dict.fromkeys(index for index in ids if index is not None))


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


def _id_of(tokenizer: Tokenizer, text: str | None) -> int | None:
    return None if text is None else tokenizer.token_to_id(text)


def _adds(tokenizer: Tokenizer, token: int | None) -> bool:
    """Whether `encode` puts `token` first on its own."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    return token is not None and tokenizer.encode("a").ids[: len(plain) + 1] == [token, *plain]
