"""From a request's words to token ids, for every model that reads text. Runs in the preprocess pool; no torch.

Whatever is wrong with the words is a `ValueError` with a message for the client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from mstar.model.base import ChatMessage, Content, Markers, PreparedPrompt, PromptFieldError, PromptRequest
from mstar.model.loader.tokenizer_files import TokenizerFiles, load_tokenizer, render_chat_template, template_names

MAX_SHOWN = 100
"""Characters of a client's own words that an error repeats."""
EMBEDS = "embeds"
"""In `step_metadata` of a prompt whose embedding is wanted."""


class TextPrompts:
    """Encodes prompts with the tokenizer files in `tokenizer_dir` (None: only token ids are accepted). `reasoning`: the
    markers of the model's output format.

    The tokenizer is loaded at the first use: the processes that only ask a model for its declarations never need it.
    """

    def __init__(self, tokenizer_dir: Path | None, vocab_size: int, reasoning: Markers | None = None) -> None:
        self.files = None if tokenizer_dir is None else TokenizerFiles.read(tokenizer_dir)
        self.vocab_size = vocab_size
        self.reasoning = reasoning
        self._tokenizer: Tokenizer | None = None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return () if self.files is None else self.files.eos_token_ids

    def prepare(self, request: PromptRequest) -> PreparedPrompt:
        """A prompt without media, as it goes to the model."""
        facts = {EMBEDS: True} if request.kind == "embedding" else {}
        if request.token_ids is not None:
            return PreparedPrompt(self._checked(request.token_ids), step_metadata=facts)
        text = self.text(request)
        opens_reasoning = self.opens_reasoning(request, text)
        return PreparedPrompt(self.token_ids(request, text), step_metadata=facts, opens_reasoning=opens_reasoning)

    def encode(self, request: PromptRequest) -> np.ndarray:
        """int32 [n], n > 0: the token ids of `prepare`."""
        ids = self.prepare(request).token_ids
        assert ids is not None
        return ids

    def text(self, request: PromptRequest) -> str:
        """The prompt's text: a completion's own, or the conversation as the chat template writes it."""
        if request.text is not None:
            return request.text
        return self.render(
            request.messages,
            continue_final_message=request.continue_final_message,
            tools=request.tools,
            variables=request.template_variables,
        )

    def token_ids(self, request: PromptRequest, text: str) -> np.ndarray:
        """int32 [n], n > 0, of `text`, which is what `text(request)` gave, media placeholders expanded or not. A
        template writes special tokens itself; a completion gets those that the tokenizer adds."""
        return self._checked(self._encode(text, add_special_tokens=request.text is not None))

    def opens_reasoning(self, request: PromptRequest, text: str) -> bool:
        """Whether the prompt `text` ends inside the reasoning: the template opened it for the answer, or a message that
        is to be continued did. What is written in other messages does not count."""
        if self.reasoning is None or request.text is not None or not request.messages:
            return False
        if not request.continue_final_message:
            return text.rstrip().endswith(self.reasoning.opening)
        content = request.messages[-1].content
        if not isinstance(content, str):
            return False
        return content.rfind(self.reasoning.opening) > content.rfind(self.reasoning.closing)

    def render(
        self,
        messages: tuple[ChatMessage, ...],
        *,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the model's chat template writes it, open for the assistant's turn. Media are
        `{"type": kind}` among the parts of a content, for which templates write a placeholder."""
        if not messages:
            raise ValueError("messages is empty: a chat needs at least one message")
        files = self._text_side()
        if files.chat_template is None:
            raise ValueError("this model has no chat template; use text completions")
        read = template_names(files.chat_template)
        if tools and "tools" not in read:
            raise PromptFieldError("tools", "this model's chat template has no place for tools")
        if unread := sorted(set(variables or ()) - read):
            raise PromptFieldError(
                "chat_template_kwargs",
                f"this model's chat template does not read {', '.join(repr(name[:MAX_SHOWN]) for name in unread[:4])}",
            )
        return render_chat_template(
            files.chat_template,
            [{**m.extra, "role": m.role, "content": _template_content(m.content)} for m in messages],
            special_tokens=files.special_tokens,
            tools=list(tools) or None,
            variables=variables,
            add_generation_prompt=not continue_final_message,
            continue_final_message=continue_final_message,
        )

    def _checked(self, ids: Sequence[int]) -> np.ndarray:
        array = np.asarray(ids, dtype=np.int64)
        if array.size == 0:
            raise ValueError("the prompt is empty: it has no tokens")
        if array.min() < 0 or array.max() >= self.vocab_size:
            wrong = int(array[(array < 0) | (array >= self.vocab_size)][0])
            raise ValueError(f"prompt token id {wrong} is outside the vocabulary of {self.vocab_size}")
        return array.astype(np.int32)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._text_side().directory)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def _text_side(self) -> TokenizerFiles:
        if self.files is None:
            raise ValueError("this deployment has no tokenizer; send token ids")
        return self.files


def _template_content(content: Content) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind} for part in content]
