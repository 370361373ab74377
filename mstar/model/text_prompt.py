"""From a request's words to token ids, for every model that reads text. Runs in the preprocess pool; no torch.

Whatever is wrong with the words is a `ValueError` with a message for the client.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from mstar.model.base import ChatMessage, PromptRequest
from mstar.model.loader.tokenizer_files import TokenizerFiles, load_tokenizer, render_chat_template


class TextPrompts:
    """Encodes prompts with the tokenizer files in `tokenizer_dir` (None: only token ids are accepted).

    The tokenizer is loaded at the first use: the processes that only ask a model for its declarations never need it.
    """

    def __init__(self, tokenizer_dir: Path | None, vocab_size: int) -> None:
        self.files = None if tokenizer_dir is None else TokenizerFiles.read(tokenizer_dir)
        self.vocab_size = vocab_size
        self._tokenizer: Tokenizer | None = None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return () if self.files is None else self.files.eos_token_ids

    def encode(self, request: PromptRequest) -> np.ndarray:
        """int32 [n], n > 0."""
        if request.token_ids is not None:
            ids = np.asarray(request.token_ids, dtype=np.int64)
        elif request.text is not None:
            ids = np.asarray(self._encode(request.text, add_special_tokens=True), dtype=np.int64)
        else:
            text = self.render(request.messages, continue_final_message=request.continue_final_message)
            ids = np.asarray(self._encode(text, add_special_tokens=False), dtype=np.int64)
        if ids.size == 0:
            raise ValueError("the prompt is empty: it has no tokens")
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            wrong = int(ids[(ids < 0) | (ids >= self.vocab_size)][0])
            raise ValueError(f"prompt token id {wrong} is outside the vocabulary of {self.vocab_size}")
        return ids.astype(np.int32)

    def render(self, messages: tuple[ChatMessage, ...], *, continue_final_message: bool = False) -> str:
        """The conversation as the model's chat template writes it, open for the assistant's turn."""
        if not messages:
            raise ValueError("messages is empty: a chat needs at least one message")
        files = self._text_side()
        if files.chat_template is None:
            raise ValueError("this model has no chat template; use text completions")
        as_dicts: list[dict[str, Any]] = [{**m.extra, "role": m.role, "content": m.content} for m in messages]
        return render_chat_template(
            files.chat_template,
            as_dicts,
            special_tokens=files.special_tokens,
            add_generation_prompt=not continue_final_message,
            continue_final_message=continue_final_message,
        )

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._text_side().directory)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def _text_side(self) -> TokenizerFiles:
        if self.files is None:
            raise ValueError("this deployment has no tokenizer; send token ids")
        return self.files
