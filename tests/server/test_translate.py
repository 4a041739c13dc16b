from __future__ import annotations

from typing import Any

import pytest

from outrider.backends.scripted import byte_tokenizer
from outrider.core import SamplingParams
from outrider.errors import RequestError
from outrider.server.faults import Fault
from outrider.server.schemas import ChatBody, CompletionBody
from outrider.server.translate import chat_params, checked_ids, completion_params, jobs_of, prompts_of

TOKENIZER = byte_tokenizer()
MESSAGES = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> SamplingParams:
    return completion_params(CompletionBody.model_validate({"prompt": "hi", **fields}))


def chat(**fields: Any) -> SamplingParams:
    return chat_params(ChatBody.model_validate({"messages": MESSAGES, **fields}))


def test_what_is_left_out_is_openais_default() -> None:
    assert completion() == SamplingParams(max_tokens=16, temperature=1.0)
    assert chat() == SamplingParams(max_tokens=None, temperature=1.0)
    nothing = dict.fromkeys(("temperature", "top_p", "seed", "stop", "logit_bias", "n", "logprobs", "min_tokens"))
    assert completion(**nothing) == completion()


def test_every_field_arrives() -> None:
    same = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 3,
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "min_tokens": 4,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "bad_words": ["x"],
        "allowed_token_ids": [1, 2, 3],
    }
    expected = SamplingParams(
        **same,  # type: ignore[arg-type]
        stop_strings=("a", "b"),
        logit_bias={5: -1.0},
        logprobs=2,
        num_speculative_tokens=6,
    )
    drafts = {"enabled": True, "num_speculative_tokens": 6}
    shared = {**same, "stop": ["a", "b"], "logit_bias": {"5": -1}, "speculative": drafts}
    assert completion(**shared, logprobs=2) == expected
    assert chat(**shared, logprobs=True, top_logprobs=2) == expected


def test_names_that_differ() -> None:
    assert completion(stop="x").stop_strings == ("x",)
    assert completion(top_k=-1).top_k == 0
    assert completion(speculative={"enabled": False, "num_speculative_tokens": 3}).num_speculative_tokens == 0
    assert completion(speculative={}).num_speculative_tokens is None
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=False).logprobs is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"logit_bias": {"-1": 0}}, "logit_bias"),
        ({"logit_bias": {"²": 0}}, "logit_bias"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs=21"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens=5"),
    ],
)
def test_values_that_cannot_work_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises((Fault, RequestError)) as refused:
        completion(**fields)
    fault = refused.value
    assert named in (fault.message if isinstance(fault, Fault) else str(fault))


def prompts(prompt: Any) -> list[list[int]]:
    return prompts_of(CompletionBody(prompt=prompt), TOKENIZER)


def test_prompts_are_texts_or_ids_one_or_many() -> None:
    assert prompts("a") == [[256, 97]]
    assert prompts(["a", "b"]) == [[256, 97], [256, 98]]
    assert prompts([97, 98]) == [[97, 98]]
    assert prompts([[97], [98]]) == [[97], [98]]
    for wrong in ([], [[97]] * 65, [-1], [[272]]):
        with pytest.raises(Fault):
            prompts(wrong)
    assert checked_ids([0, 271], TOKENIZER, "tokens") == [0, 271]


def test_choices_of_a_seed_differ_and_are_the_same_each_time() -> None:
    jobs = jobs_of([[1], [2]], SamplingParams(seed=5), 3, boundaries=(1,))
    assert [(job.prompt_token_ids, job.params.seed) for job in jobs] == [
        *(([1], seed) for seed in (5, 6, 7)),
        *(([2], seed) for seed in (5, 6, 7)),
    ]
    assert all(job.boundaries == (1,) for job in jobs)
    assert [job.params.seed for job in jobs_of([[1]], SamplingParams(), 2)] == [None, None]
    with pytest.raises(Fault):
        jobs_of([[1]] * 33, SamplingParams(), 2)
