"""From OpenAI's request schemas to the conductor's `GenerateRequest`. Pure; raises `RefusedError` naming the field.

What a schema cannot say is checked here: ids against the vocabulary, fields against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import BaseModel, ValidationError

from mstar.api_server.answer.reader import AnswerFormat
from mstar.api_server.errors import bad_request, failure_of_validation
from mstar.api_server.grammar.call_formats import CallableTool
from mstar.api_server.grammar.formats import json_text
from mstar.api_server.openai.chat_messages import chat_messages, tool_mappings
from mstar.api_server.openai.chat_schema import ChatRequest, JsonObjectFormat, JsonSchemaFormat, NamedTool, ToolFields
from mstar.api_server.openai.completion_schema import MAX_PROMPTS, CompletionRequest
from mstar.api_server.openai.fields import GenerationFields
from mstar.api_server.openai.prompts import prompt_inputs, vocabulary_id
from mstar.api_server.openai.text_grammar import JSON_OBJECT, CallRules, FormWish, request_grammar
from mstar.api_server.stop_strings import StopAutomaton
from mstar.communication.messages import SamplingParams
from mstar.conductor.events import RefusedError
from mstar.conductor.model_facts import ModelFacts
from mstar.conductor.request import GenerateRequest, PromptInput

DEFAULT_COMPLETION_TOKENS = 16
GREEDY_BELOW = 1e-5
"""A lower temperature could only choose between tokens whose logits differ by less than fp32 can tell; it is greedy."""
GREEDY_TOP_P = 1e-30
"""Below it only the likeliest token can be meant, and fp32 might have no number for it."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request for text: what the conductor gets, and what the front itself does with the tokens. `num_logprobs`:
    most likely tokens to show beside each (None: no logprobs). `answer`: how the text is taken apart (None: not).
    `echoes`: each text begins with its prompt's."""

    generate: GenerateRequest
    model: str
    end_tokens: frozenset[int]
    stops: StopAutomaton | None
    is_streamed: bool
    includes_usage: bool
    num_logprobs: int | None
    answer: AnswerFormat | None
    echoes: bool = False

    @property
    def tells_reasoning(self) -> bool:
        return self.answer is not None and self.answer.reasoning is not None


def from_chat(body: ChatRequest, facts: ModelFacts, request_id: str, media: Sequence[bytes] = ()) -> TextRequest:
    """A chat completion. `media`: the files of `chat_media(body.messages)`."""
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true.", "top_logprobs")
    tools = _tools(body, facts)
    max_tokens, field = body.max_completion_tokens, "max_completion_tokens"
    if max_tokens is None:
        max_tokens, field = body.max_tokens, "max_tokens"
    elif body.max_tokens not in (None, max_tokens):
        raise bad_request("max_tokens and max_completion_tokens differ; give one of them.", "max_tokens")
    continues = bool(body.continue_final_message)
    if continues and body.messages[-1].role != "assistant":
        raise bad_request("The last message must be the assistant's to be continued.", "continue_final_message")
    messages = chat_messages(body.messages, media)
    if continues and not (isinstance(messages[-1].content, str) and messages[-1].content.strip()):
        raise bad_request("The last message has no text to continue.", "continue_final_message")
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    prompt = PromptInput(
        kind="chat",
        messages=messages,
        continue_final_message=continues,
        tools=tool_mappings(tools),
        template_variables=body.chat_template_kwargs or {},
    )
    return text_request(
        body,
        facts,
        request_id,
        (prompt,),
        max_tokens,
        field,
        num_logprobs,
        _answer_format(tools, facts),
        clamps=False,
        wishes=_response_format(body),
        calls=_call_rules(body, tools),
    )


def from_completion(body: CompletionRequest, facts: ModelFacts, request_id: str) -> TextRequest:
    """A text completion."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request("best_of is only supported when it equals n.", "best_of")
    if body.echo and body.logprobs is not None:
        raise bad_request("echo with logprobs is not supported: prompt tokens have no logprobs here.", "echo")
    clamps = body.max_tokens is None
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    prompts = prompt_inputs(body.prompt, "completion", facts)
    asked = text_request(body, facts, request_id, prompts, max_tokens, "max_tokens", body.logprobs, None, clamps=clamps)
    return replace(asked, echoes=bool(body.echo))


def _tools(body: ChatRequest, facts: ModelFacts) -> Sequence[ToolFields]:
    """What the model may call."""
    if not body.tools:
        if body.tool_choice not in (None, "none"):
            raise bad_request("tool_choice needs tools.", "tool_choice")
        return ()
    if body.tool_choice == "none":
        return ()
    if facts.output_format.tool_calls is None:
        raise bad_request("This model does not call tools; with tool_choice 'none' they are left out.", "tools")
    return body.tools


def _call_rules(body: ChatRequest, tools: Sequence[ToolFields]) -> CallRules | None:
    """What the tools ask of the text."""
    if not tools:
        return None
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not tools:
            raise bad_request(f"tool_choice names {choice.function.name!r}, which is none of tools.", "tool_choice")
    callable_tools = tuple(
        CallableTool(tool.function.name, tool.function.parameters or {}, bool(tool.function.strict)) for tool in tools
    )
    is_named = isinstance(choice, NamedTool)
    only_one = is_named or body.parallel_tool_calls is False
    return CallRules(callable_tools, is_named or choice == "required", only_one)


def _response_format(body: ChatRequest) -> list[FormWish]:
    match body.response_format:
        case JsonObjectFormat():
            return [FormWish("response_format", lambda: json_text(JSON_OBJECT))]
        case JsonSchemaFormat(json_schema=wanted):
            return [FormWish("response_format", lambda: json_text(wanted.schema_))]
        case _:
            return []


def _answer_format(tools: Sequence[ToolFields], facts: ModelFacts) -> AnswerFormat | None:
    reasoning = facts.output_format.reasoning
    if reasoning is None and not tools:
        return None
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
    return AnswerFormat(reasoning, schemas or None)


def model_parameters(values: dict[str, object] | None, facts: ModelFacts) -> BaseModel:
    """The model's own parameters, validated."""
    try:
        return facts.parameters.model_validate(values or {})
    except ValidationError as error:
        failure = failure_of_validation(error)
        param = f"parameters.{failure.param}" if failure.param else "parameters"
        raise RefusedError(failure._replace(param=param)) from None


def text_request(
    body: GenerationFields,
    facts: ModelFacts,
    request_id: str,
    prompts: tuple[PromptInput, ...],
    max_tokens: int | None,
    max_tokens_field: str,
    num_logprobs: int | None,
    answer: AnswerFormat | None,
    *,
    clamps: bool,
    wishes: Sequence[FormWish] = (),
    calls: CallRules | None = None,
) -> TextRequest:
    """What all requests for text have in common. `max_tokens_field`: the field that `max_tokens` came in. `clamps`: the
    client did not ask for `max_tokens`. `wishes`, `calls`: what else than the guided fields says what the text is."""
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is only allowed when stream is true.", "stream_options")
    num_choices = body.n or 1
    if len(prompts) * num_choices > MAX_PROMPTS:
        raise bad_request(f"{len(prompts)} prompts with n={num_choices} are more than {MAX_PROMPTS} choices.", "n")
    min_tokens = body.min_tokens or 0
    if min_tokens > (facts.max_seq_len if max_tokens is None else max_tokens):
        raise bad_request(f"min_tokens is larger than {max_tokens_field}.", "min_tokens")
    extra_ends = tuple(vocabulary_id(token, facts, "stop_token_ids") for token in body.stop_token_ids or ())
    ends = dict.fromkeys((*(() if body.ignore_eos else facts.stop_token_ids), *extra_ends))
    biases = {_bias_id(key, facts): value for key, value in (body.logit_bias or {}).items()}
    temperature = 1.0 if body.temperature is None else body.temperature
    top_p = 1.0 if body.top_p is None else body.top_p
    sampling = SamplingParams(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=1 if top_p < GREEDY_TOP_P else max(0, body.top_k or 0),
        top_p=1.0 if top_p < GREEDY_TOP_P else top_p,
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        bias_ids=tuple(biases),
        bias_values=tuple(map(float, biases.values())),
        num_logprobs=-1 if num_logprobs is None else num_logprobs,
        min_tokens=min_tokens,
        stop_token_ids=tuple(ends),
        grammar=request_grammar(body, wishes, calls, facts.output_format.reasoning),
    )
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return TextRequest(
        generate=GenerateRequest(
            request_id=request_id,
            prompts=prompts,
            sampling=sampling,
            num_choices=num_choices,
            seed=body.seed,
            max_tokens=max_tokens,
            clamps_max_tokens=clamps,
            max_tokens_name=max_tokens_field,
            parameters=model_parameters(body.parameters, facts),
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            timeout_s=body.timeout,
        ),
        model=body.model,
        end_tokens=frozenset(ends),
        stops=StopAutomaton(stops) if stops else None,
        is_streamed=bool(body.stream),
        includes_usage=bool(body.stream_options and body.stream_options.include_usage),
        num_logprobs=num_logprobs,
        answer=answer,
    )


def _bias_id(key: str, facts: ModelFacts) -> int:
    digits = key.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 20 or str(int(key)) != key:
        raise bad_request(f"logit_bias: {key[:40]!r} is not a token id in plain digits.", "logit_bias")
    return vocabulary_id(int(key), facts, "logit_bias")
