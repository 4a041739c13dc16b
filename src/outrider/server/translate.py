"""From what clients send to what backends take: prompt ids and sampling parameters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from outrider.core import MAX_LOGPROBS, SamplingParams
from outrider.errors import RequestError
from outrider.server.answers import Job
from outrider.server.faults import Fault
from outrider.server.schemas import ChatBody, CompletionBody, GenerationBody
from outrider.tokenizer import Tokenizer

DEFAULT_TEMPERATURE = 1.0  # OpenAI's and vLLM's; the library's own is 0
DEFAULT_COMPLETION_TOKENS = 16  # likewise; a chat goes on to the end of its context
MAX_PROMPTS = 64
_SAME_NAME = (
    "top_p",
    "min_p",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "bad_words",
    "allowed_token_ids",
)
_TOKEN_ID = re.compile(r"[0-9]{1,9}")


def completion_params(body: CompletionBody) -> SamplingParams:
    """Of POST /v1/completions; RequestError names a field whose value cannot work."""
    for name, harmless in (("echo", (False,)), ("suffix", ("",)), ("best_of", (1, body.n or 1))):
        if (value := getattr(body, name)) is not None and value not in harmless:
            raise Fault(400, f"{name}={value!r} is not supported; leave it out.", param=name)
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    return _params(body, max_tokens=max_tokens, logprobs=body.logprobs)


def chat_params(body: ChatBody) -> SamplingParams:
    """Of POST /v1/chat/completions; max_completion_tokens goes before max_tokens."""
    if body.top_logprobs is not None and not body.logprobs:
        raise Fault(400, "top_logprobs needs logprobs=true; add it, or leave both out.", param="top_logprobs")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return _params(body, max_tokens=max_tokens, logprobs=(body.top_logprobs or 0) if body.logprobs else None)


def _params(body: GenerationBody, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
        raise RequestError(f"logprobs={logprobs} is not a whole number from 0 to {MAX_LOGPROBS}.")
    given = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
        top_k=0 if body.top_k in (None, -1) else body.top_k,  # vLLM writes -1 for all
        stop_strings=tuple(stop),
        logit_bias=_logit_bias(body),
        logprobs=logprobs,
        num_speculative_tokens=_draft_length(body),
        **given,
    )


def _logit_bias(body: GenerationBody) -> dict[int, float]:
    for key in body.logit_bias or {}:
        if not _TOKEN_ID.fullmatch(key):
            raise Fault(400, f"logit_bias has the key {key[:40]!r}, which is no token id.", param="logit_bias")
    return {int(key): bias for key, bias in (body.logit_bias or {}).items()}


def _draft_length(body: GenerationBody) -> int | None:
    if body.speculative is None:
        return None
    return 0 if body.speculative.enabled is False else body.speculative.num_speculative_tokens


def prompts_of(body: CompletionBody, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of each prompt. A text gets its begin token; ids are taken as they are."""
    prompt = body.prompt
    given: Sequence[str | list[int] | int] = [prompt] if isinstance(prompt, str) else prompt
    if given and all(isinstance(each, int) for each in given):
        given = [[each for each in given if isinstance(each, int)]]
    if not 0 < len(given) <= MAX_PROMPTS:
        raise Fault(400, f"prompt holds {len(given)} prompts; give 1 to {MAX_PROMPTS}.", param="prompt")
    prompts = [tokenizer.encode(each) if isinstance(each, str) else each for each in given]
    return [checked_ids(each, tokenizer, "prompt") for each in prompts if not isinstance(each, int)]


def checked_ids(token_ids: list[int], tokenizer: Tokenizer, param: str) -> list[int]:
    """The ids, all inside the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < tokenizer.vocab_size:
            raise Fault(
                400, f"{param} holds {token_id}, outside the vocabulary of {tokenizer.vocab_size}.", param=param
            )
    return token_ids


def jobs_of(
    prompts: Sequence[Sequence[int]], params: SamplingParams, num_choices: int, *, boundaries: Sequence[int] = ()
) -> list[Job]:
    """Every prompt so many times, one after the other; choice i of a seeded request has seed + i."""
    if num_choices * len(prompts) > MAX_PROMPTS:
        raise Fault(400, f"n × prompts is {num_choices * len(prompts)}; the most is {MAX_PROMPTS}.", param="n")
    return [
        Job(prompt, _choice_params(params, choice), boundaries) for prompt in prompts for choice in range(num_choices)
    ]


def _choice_params(params: SamplingParams, choice: int) -> SamplingParams:
    return params if params.seed is None or choice == 0 else replace(params, seed=params.seed + choice)
