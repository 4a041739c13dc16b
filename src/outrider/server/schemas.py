"""What clients may send, field by field. Answers are plain dicts, written in `replies.py`.

A field that is not named here is accepted and ignored, as vLLM does: clients send many that mean nothing to a local
server. A field that is named must have its type (no string for a number), or the request is refused by name.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Body(BaseModel):
    """Base of all request bodies: strict types, other fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(Body):
    """What a stream carries beside its deltas."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Usage in every chunk, not only in the last."""
    include_draft_marks: bool | None = None
    """In every chunk `outrider: {accepted, drafted, tokens}`: which of its tokens were drafted and accepted."""


class Speculative(Body):
    """The request switch: whether, and how far, this request is drafted. Never changes a greedy or seeded text."""

    enabled: bool | None = None
    num_speculative_tokens: int | None = Field(None, ge=0)


class GenerationBody(Body):
    """What both kinds of generation share. Left out or null, a field takes OpenAI's default."""

    model: str | None = None
    n: int | None = Field(None, ge=1, le=16)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    return_tokens_as_token_ids: bool | None = None
    """Log-probabilities spell tokens `token_id:123`, as vLLM does: no two tokens look the same."""
    speculative: Speculative | None = None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class JsonSchema(Body):
    """The `json_schema` of a response format."""

    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True)

    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What form the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's field for grammars beyond JSON; give one of them."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    grammar: str | None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions. Messages and tools are checked where they are rendered."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    reasoning_effort: str | None = None
    """Whether to think: not with "none", otherwise yes."""
    chat_template_kwargs: dict[str, Any] | None = None
    """`enable_thinking`, as vLLM takes it; goes before reasoning_effort."""


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or messages as the chat template writes them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
