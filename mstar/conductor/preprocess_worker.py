"""Entry of a preprocess process: builds the model's declaring half and runs `process_prompt` for one job at a time.

Started as `python -m mstar.conductor.preprocess_worker FD PARENT_PID LOG_FORMAT`. Owns nothing that outlives a job,
ends when its socket closes or its parent dies, and is killed by the front when a job takes too long.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
from pathlib import Path

import msgspec

from mstar import envs
from mstar.communication.host_tensors import from_numpy, to_numpy
from mstar.conductor.preprocess_messages import (
    LENGTH,
    MessageContent,
    ModelToLoad,
    PromptDone,
    PromptFailed,
    PromptJob,
    PromptRefused,
    Reply,
    Started,
    decode_order,
    framed,
)
from mstar.model.base import (
    ChatMessage,
    MediaPart,
    Model,
    ModelCard,
    ModelSetup,
    PromptFieldError,
    PromptRequest,
    PromptTooLongError,
)
from mstar.model.registry import build_model
from mstar.platforms.parent_death import die_with_parent
from mstar.process_log import configure_log

logger = logging.getLogger(__name__)


def main(fd: int, parent_pid: int) -> None:
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's interrupt reaches the supervisor, which decides
    with socket.socket(fileno=fd) as channel:
        model = _load(channel)
        channel.sendall(framed(Started()))
        while (body := _read_frame(channel)) is not None:
            order = decode_order(body)
            if isinstance(order, PromptJob):
                channel.sendall(framed(run_job(model, order)))


def run_job(model: Model, job: PromptJob) -> Reply:
    """The reply to one job, whatever the model's code does with it."""
    try:
        prompt = model.process_prompt(
            PromptRequest(
                kind=job.kind,  # type: ignore[arg-type]
                messages=tuple(_message(message) for message in job.messages),
                text=job.text,
                token_ids=job.token_ids,
                inputs={name: to_numpy(tensor) for name, tensor in job.inputs.items()},
                parameters=model.parameter_schema().model_validate_json(job.parameters),
                max_tokens=job.max_tokens,
                continue_final_message=job.continue_final_message,
                tools=tuple(msgspec.json.decode(job.tools)),
                template_variables=msgspec.json.decode(job.template_variables),
            )
        )
        return PromptDone(
            token_ids=None if prompt.token_ids is None else from_numpy(prompt.token_ids),
            inputs={name: from_numpy(array) for name, array in prompt.inputs.items()},
            step_metadata=dict(prompt.step_metadata),
            media=tuple(prompt.media),
            opens_reasoning=prompt.opens_reasoning,
        )
    except PromptFieldError as error:
        return PromptRefused(str(error), error.field)
    except PromptTooLongError as error:
        return PromptRefused(str(error), code="context_length_exceeded")
    except ValueError as error:
        return PromptRefused(str(error))
    except Exception as error:
        logger.exception("process_prompt failed")
        return PromptFailed(f"the model's code raised {type(error).__name__}")


def _message(message: MessageContent) -> ChatMessage:
    content = message.content
    if not isinstance(content, str):
        content = tuple(part if isinstance(part, str) else MediaPart(part.kind, part.data) for part in content)
    return ChatMessage(message.role, content, msgspec.json.decode(message.extra))


def _load(channel: socket.socket) -> Model:
    body = _read_frame(channel)
    order = None if body is None else decode_order(body)
    if not isinstance(order, ModelToLoad):
        raise SystemExit("the first message has to name the model")
    setup = ModelSetup(
        config=msgspec.json.decode(order.config),
        tokenizer_dir=None if order.tokenizer_dir is None else Path(order.tokenizer_dir),
        max_seq_len=order.max_seq_len,
        max_step_patches=order.max_step_patches,
        max_media_pixels=order.max_media_pixels,
    )
    return build_model(ModelCard(name="", model=order.model, submodules=""), setup)


def _read_frame(channel: socket.socket) -> bytes | None:
    head = _read_exactly(channel, LENGTH.size)
    return None if head is None else _read_exactly(channel, LENGTH.unpack(head)[0])


def _read_exactly(channel: socket.socket, num_bytes: int) -> bytes | None:
    """None when the other side has closed."""
    parts = bytearray()
    while len(parts) < num_bytes:
        part = channel.recv(num_bytes - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


if __name__ == "__main__":
    configure_log("preprocess", envs.LOG_LEVEL.get(), "json" if sys.argv[3] == "json" else "text")
    main(int(sys.argv[1]), int(sys.argv[2]))
