"""Field types and groups that OpenAI's request schemas share. Pure pydantic declarations.

Strict: a string is no number, an unknown field is an error. `None` is the default everywhere, as in OpenAI's schema. A
field of type `Unsupported` belongs to OpenAI's API but not to this server: only null is accepted.

Validation costs about what parsing the body did, whatever is in it: lists stop at their first wrong element (`FIRST`)
and are measured before their elements are looked at (`at_most`), maps stop at their first wrong entry, and of fields
that a schema does not know one is looked at. Otherwise each wrong element would become an error of its own.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 128
MAX_LOGPROBS = 20
MAX_INT = 2**31 - 1
MAX_SALT_CHARS = 256
MAX_BIAS = 100
MAX_BIASES = 1024
"""Each row that wants any has room for as many as the longest list."""
MAX_PATTERN_CHARS = 4096
MAX_TEXT_CHOICES = 1024
MAX_GRAMMAR_CHARS = 65536
LEAST_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-9, 1e9
"""It scales logits by up to this much, and a temperature by 1e5 more: fp32, which ends at 3e38, holds that."""
MAX_PAIRS = 64
"""Of a map whose values the server does not look at."""
FIRST = Field(fail_fast=True)


def default(value: float) -> dict[str, JsonValue]:
    """What a field that is null means, for readers of the schema: the page shows it."""
    return {"default": value}


def at_most(limit: int, what: str) -> BeforeValidator:
    """Refuses a longer list or map before any of its elements is validated."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > limit:
            raise ValueError(f"it has {len(value)} {what}, but at most {limit} are allowed")
        return value

    return BeforeValidator(check)


def _check_biases(value: Any) -> Any:
    """Ends at the first wrong entry."""
    if isinstance(value, dict):
        for key, bias in value.items():
            if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
                raise ValueError(f"the value of {key[:20]!r} must be a number from -{MAX_BIAS} to {MAX_BIAS}")
    return value


Unsupported = Annotated[None, Field(description="Not supported: only null is accepted.")]
Ignored = Annotated[str | None, Field(description="Accepted, without effect.")]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Repetition = Annotated[Finite, Field(ge=LEAST_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class Schema(BaseModel):
    """Base of every request schema."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, value: Any) -> Any:
        known = {field.alias or name for name, field in cls.model_fields.items()}
        if not isinstance(value, dict) or len(value) <= len(known):
            return value
        kept = {name: value[name] for name in known if name in value}
        unknown = next(name for name in value if name not in known)
        return {unknown: value[unknown], **kept}


class StreamOptions(Schema):
    """`include_usage`: one more chunk before the end, with the usage and no choices."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[Literal[False] | None, Field(description="Not supported.")] = None


class RequestFields(Schema):
    """What everything has that a model answers: its name, and how the request is to be treated."""

    model: str
    user: Ignored = None

    priority: Annotated[
        int | None, Field(ge=-(2**31), le=MAX_INT, description="Lower is served sooner; 0 where none is given.")
    ] = None
    cache_salt: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=MAX_SALT_CHARS,
            description="Prompts with another salt, or none, share no cached prefix with this one.",
        ),
    ] = None
    timeout: Annotated[
        Finite | None,
        Field(
            gt=0,
            description="Seconds from submission after which the request ends with 504; the server's own limit holds "
            "where it is smaller.",
        ),
    ] = None


JsonSchema = Annotated[
    dict[str, Any] | bool | str | None,
    Field(description="The text is JSON that is valid by this schema, given as an object or as JSON text of it."),
]
Pattern = Annotated[
    Annotated[str, Field(min_length=1, max_length=MAX_PATTERN_CHARS)] | None,
    Field(description="The whole text matches this regular expression."),
]
Choices = Annotated[
    Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_TEXT_CHOICES), FIRST]
    | None,
    at_most(MAX_TEXT_CHOICES, "texts"),
    Field(description="The text is one of these."),
]
GrammarText = Annotated[
    Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)] | None,
    Field(description="The text follows this grammar in EBNF; its first rule is `root ::= ...`."),
]


class StructuredOutputs(Schema):
    """The guided fields under one name; one of them is set."""

    json_: Annotated[JsonSchema, Field(alias="json")] = None
    regex: Pattern = None
    choice: Choices = None
    grammar: GrammarText = None
    json_object: bool | None = None


class GenerationFields(RequestFields):
    """What chat and text completions have in common: sampling, lengths, stopping, streaming."""

    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2, json_schema_extra=default(0))] | None = None
    logit_bias: Annotated[
        dict[str, Annotated[Finite, Field(ge=-MAX_BIAS, le=MAX_BIAS)]] | None,
        BeforeValidator(_check_biases),
        at_most(MAX_BIASES, "entries"),
        Field(description=f"Token id (as a string) → value added to its logit; up to {MAX_BIASES}."),
    ] = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2, json_schema_extra=default(0))] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[
        StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS), FIRST] | None,
        at_most(MAX_STOPS, "strings"),
        Field(description=f"Up to {MAX_STOPS} strings of up to {MAX_STOP_CHARS} characters that end the text."),
    ] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2, json_schema_extra=default(1.0))] | None = None
    top_p: Annotated[Finite, Field(ge=0, le=1, json_schema_extra=default(1.0))] | None = None

    top_k: Annotated[int, Field(ge=-1, le=MAX_INT, description="0 or -1: no limit.")] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1, json_schema_extra=default(0))] | None = None
    repetition_penalty: Annotated[Repetition, Field(json_schema_extra=default(1.0))] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT, json_schema_extra=default(0))] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[
        Annotated[list[int], Field(max_length=MAX_STOP_TOKENS), FIRST] | None, at_most(MAX_STOP_TOKENS, "ids")
    ] = None
    parameters: Annotated[
        dict[str, Any] | None,
        at_most(MAX_PAIRS, "entries"),
        Field(description="The model's own parameters; their schema is in /v1/models."),
    ] = None

    guided_json: JsonSchema = None
    guided_regex: Pattern = None
    guided_choice: Choices = None
    guided_grammar: GrammarText = None
    structured_outputs: StructuredOutputs | None = None
