"""A model's text side as files: `tokenizer.json`, the chat template and the special ids, and how to use them. Imports
neither torch nor transformers, so the front process may detokenize with it; the preprocess pool encodes and renders.

A chat template is code from a checkpoint. It runs in jinja2's sandbox, with the functions that templates on the hub
expect and nothing else.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from mstar.model.loader.errors import CheckpointError

TOKENIZER_FILE = "tokenizer.json"
FACTS_FILE = "tokenizer_facts.json"


class ChatTemplateError(ValueError):
    """The template refuses these messages, or cannot be rendered with them. The message is meant for the client."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What `write_tokenizer` left in `directory`.

    `eos_token_ids` end a generation (the model's own, the tokenizer's, and chat-end tokens of the template).
    `special_tokens` maps `bos_token`, `eos_token`, ... to their text, for the template. With `add_bos`,
    `encode(text)` puts `bos_token_id` first; a rendered chat is encoded with `add_special_tokens=False`, because the
    template writes such tokens itself. `vocab_size` counts added tokens and may be below the embedding's rows.
    """

    directory: Path
    vocab_size: int
    chat_template: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    add_bos: bool = False
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def tokenizer_path(self) -> Path:
        return self.directory / TOKENIZER_FILE

    def write_facts(self) -> None:
        """Writes everything but the tokenizer itself beside it, in one rename."""
        facts = asdict(self)
        del facts["directory"]
        partial = self.directory / (FACTS_FILE + ".partial")
        partial.write_text(json.dumps(facts, ensure_ascii=False, indent=1), encoding="utf-8")
        partial.replace(self.directory / FACTS_FILE)

    @classmethod
    def read(cls, directory: Path) -> "TokenizerFiles":
        """The files that `write_tokenizer` left in `directory`.

        Raises:
            CheckpointError: it left none there.
        """
        path = directory / FACTS_FILE
        if not path.is_file() or not (directory / TOKENIZER_FILE).is_file():
            raise CheckpointError(f"{directory} has no {TOKENIZER_FILE} with {FACTS_FILE}; write_tokenizer makes them")
        facts = json.loads(path.read_text(encoding="utf-8"))
        facts["eos_token_ids"] = tuple(facts["eos_token_ids"])
        return cls(directory=directory, **facts)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in `path`, a `tokenizer.json` or the directory that holds one.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(f"there is no {file}")
    text = file.read_text(encoding="utf-8")
    try:
        complete = "model" in json.loads(text)  # what is cut off would be a bare Exception of the library
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    if not complete:
        raise CheckpointError(f"{file} is not a tokenizer: it has no model")
    return Tokenizer.from_str(text)


def render_chat_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    special_tokens: Mapping[str, str] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """The prompt text of a conversation. `variables` are further names that the template may read. With
    `continue_final_message` the text ends with the last message's content, open for the model to go on;
    `add_generation_prompt` must then be False.

    Raises:
        ChatTemplateError: the template refuses the messages (`raise_exception`), does something that the sandbox
            forbids, or fails on them.
    """
    if continue_final_message and (add_generation_prompt or not messages):
        raise ValueError("continue_final_message needs a message to continue, and add_generation_prompt=False")
    names: dict[str, Any] = {**(special_tokens or {}), **(variables or {})}
    names.update(messages=list(messages), tools=tools, documents=None, add_generation_prompt=add_generation_prompt)
    try:
        text = _compiled(template).render(names)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, ArithmeticError, LookupError) as error:
        raise ChatTemplateError(f"the model's chat template cannot be used with these messages: {error}") from error
    return _cut_after_final(text, messages[-1]) if continue_final_message else text


def _cut_after_final(text: str, message: Mapping[str, Any]) -> str:
    content = str(message.get("content") or "").lstrip()
    bare = content.rstrip()
    at = text.rfind(bare) if bare else -1
    if at < 0:
        raise ChatTemplateError(
            "the final message cannot be continued: the chat template does not repeat its content as it is"
        )
    kept = content if text.startswith(content, at) else bare  # a template may trim what it repeats
    return text[: at + len(kept)]


class _GenerationBlock(Extension):
    """`{% generation %}` marks an assistant's text for training; here the block is just its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class's spelling

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def template_names(template: str) -> frozenset[str]:
    """Names that a chat template reads from outside: what a variable must be called to have an effect.

    Raises:
        ChatTemplateError: it is no template.
    """
    try:
        environment = _environment()
        return frozenset(meta.find_undeclared_variables(environment.parse(template)) - environment.globals.keys())
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"the model's chat template cannot be used: {error}") from error


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes for HTML, which would change a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
