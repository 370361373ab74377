"""The media of a conversation, loaded for as long as its client waits. Front loop only."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import Request

from mstar.api_server.client_watch import unless_client_leaves
from mstar.api_server.front_state import front_of
from mstar.api_server.openai.chat_messages import chat_media
from mstar.api_server.openai.chat_schema import ChatMessageFields


async def media_of(request: Request, messages: Sequence[ChatMessageFields]) -> Sequence[bytes]:
    """The files of all media in `messages`, in written order.

    Raises:
        RefusedError: the model takes no such input, or one of them cannot be had (400); the client has left.
    """
    front = front_of(request)
    sources = chat_media(messages, front.handle.facts.input_modalities)
    return await unless_client_leaves(request.receive, front.media.load(sources)) if sources else ()
