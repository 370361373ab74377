"""`POST /v1/embeddings`: vectors of texts. Front loop only."""

from __future__ import annotations

from base64 import b64encode

import msgspec
import numpy as np
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from mstar.api_server.answer_schemas import EmbeddingAnswer
from mstar.api_server.client_watch import unless_client_leaves
from mstar.api_server.errors import bad_request
from mstar.api_server.front_state import front_of, only_if_answered, request_id_of
from mstar.api_server.json_body import read_json
from mstar.api_server.openai.embedding_schema import EmbeddingRequest
from mstar.api_server.openai.prompts import prompt_inputs
from mstar.api_server.openapi import describe
from mstar.communication.host_tensors import to_numpy
from mstar.communication.messages import HostTensor
from mstar.conductor.events import Failure, PreparedEvent, RefusedError, RequestStream, TensorEvent
from mstar.conductor.model_facts import ModelFacts
from mstar.conductor.request import GenerateRequest

router = APIRouter(dependencies=[Depends(only_if_answered)])
NOT_FINITE = Failure(500, "internal_error", "The model's embedding has numbers that are not finite.")


@router.post("/v1/embeddings", **describe(EmbeddingRequest, "Embed texts", answer=EmbeddingAnswer))
async def embeddings(request: Request) -> Response:
    front = front_of(request)
    body = await read_json(request, EmbeddingRequest)
    front.check_model(body.model)
    stream = front.handle.submit(from_embedding(body, front.handle.facts, request_id_of(request)))
    front.live.track((request_id_of(request),), stream)
    try:
        collecting = _collect(stream, as_base64=body.encoding_format == "base64")
        entries, num_tokens = await unless_client_leaves(request.receive, collecting)
    finally:
        front.handle.abort(stream)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    answer = {"object": "list", "data": entries, "model": body.model, "usage": usage}
    return Response(msgspec.json.encode(answer), media_type="application/json")


def from_embedding(body: EmbeddingRequest, facts: ModelFacts, request_id: str) -> GenerateRequest:
    """Raises `RefusedError` (400), naming the field."""
    if body.dimensions not in (None, facts.embedding_size):
        message = f"dimensions: embeddings of this model have {facts.embedding_size} numbers, and cannot be shortened."
        raise bad_request(message, "dimensions")
    return GenerateRequest(
        request_id=request_id,
        prompts=prompt_inputs(body.input, "embedding", facts),
        max_tokens=1,
        clamps_max_tokens=True,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        timeout_s=body.timeout,
    )


async def _collect(stream: RequestStream, *, as_base64: bool) -> tuple[list[msgspec.Raw], int]:
    """The entries of `data`, each written when its vector comes, and how many tokens the inputs have.

    Raises:
        RefusedError: the request failed.
    """
    entries = [msgspec.Raw()] * stream.request.num_results
    num_tokens = 0
    async for event in stream:
        match event:
            case PreparedEvent(num_tokens=added):
                num_tokens += added
            case TensorEvent(choice=index, tensor=tensor):
                entry = {"object": "embedding", "index": index, "embedding": _vector(tensor, as_base64=as_base64)}
                entries[index] = msgspec.Raw(msgspec.json.encode(entry))
            case Failure():
                raise RefusedError(event)
            case _:
                pass
    return entries, num_tokens


def _vector(tensor: HostTensor, *, as_base64: bool) -> str | list[float]:
    """Base64 is of little-endian fp32."""
    values = to_numpy(tensor)
    if not np.isfinite(values).all():
        raise RefusedError(NOT_FINITE)
    return b64encode(tensor.data).decode() if as_base64 else values.tolist()
