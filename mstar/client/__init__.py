"""The Python client: a sync `Client` and an `AsyncClient` with the same methods, typed answers, events and errors.

Speaks HTTP only and imports nothing of the server, so it works against a server anywhere. Loads no torch.
"""

from __future__ import annotations

from mstar.client.answers import (
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    Completion,
    CompletionChoice,
    ModelEntry,
    ToolCall,
    Usage,
)
from mstar.client.async_client import AsyncClient
from mstar.client.client import Client
from mstar.client.embeddings import Embeddings
from mstar.client.errors import (
    AuthenticationError,
    BadRequestError,
    ClientError,
    DeadlineError,
    NoAnswerError,
    NotFoundError,
    PermissionDeniedError,
    QueueFullError,
    RequestAbortedError,
    ServerError,
    StatusError,
    StreamError,
    TooLargeError,
    UnavailableError,
    UnreadableAnswerError,
)
from mstar.client.events import (
    Event,
    FinishEvent,
    PreparedEvent,
    ReasoningEvent,
    TensorEvent,
    TextEvent,
    TokenEvent,
    ToolCallEvent,
    UsageEvent,
)
from mstar.client.generation import GeneratedChoice, Generation, Tensor
from mstar.client.parts import image_part, text_part, video_part

__all__ = [
    "AsyncClient",
    "Client",
    "ChatCompletion",
    "ChatChoice",
    "ChatMessage",
    "Completion",
    "CompletionChoice",
    "Embeddings",
    "Generation",
    "GeneratedChoice",
    "Tensor",
    "ModelEntry",
    "ToolCall",
    "Usage",
    "Event",
    "TextEvent",
    "ReasoningEvent",
    "ToolCallEvent",
    "FinishEvent",
    "UsageEvent",
    "PreparedEvent",
    "TokenEvent",
    "TensorEvent",
    "image_part",
    "text_part",
    "video_part",
    "ClientError",
    "NoAnswerError",
    "UnreadableAnswerError",
    "StreamError",
    "StatusError",
    "BadRequestError",
    "AuthenticationError",
    "PermissionDeniedError",
    "NotFoundError",
    "TooLargeError",
    "QueueFullError",
    "RequestAbortedError",
    "ServerError",
    "UnavailableError",
    "DeadlineError",
]
