"""`outrider generate`: continue one prompt."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from outrider.cli import options
from outrider.cli.output import emit_json, progress_line
from outrider.core import SamplingParams
from outrider.errors import RequestError


def generate(
    prompt: Annotated[
        str, typer.Argument(help="Text to continue. The embedded default is a pretrained model: no chat.")
    ],
    max_tokens: Annotated[int, typer.Option(help="Most tokens to write.")] = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: Annotated[int | None, typer.Option(help="Same text with and without drafting, at temperature > 0.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End where this text appears; may be given several times.")
    ] = None,
    min_tokens: Annotated[int, typer.Option(help="Do not end before so many tokens.")] = 0,
    presence_penalty: Annotated[float, typer.Option(help="Against tokens written before, -2 to 2.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same for each time one was written, -2 to 2.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: against tokens of prompt and answer.")] = 1.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(help="ID=BIAS: added to a token's logit; may be given several times."),
    ] = None,
    bad_word: Annotated[list[str] | None, typer.Option(help="Never written; may be given several times.")] = None,
    num_speculative_tokens: options.DraftLength = None,
    no_drafter: options.NoDrafter = False,
    drafter: options.Drafter = "auto",
    drafter_quantization: options.DrafterQuantization = None,
    target: options.Target = None,
    context_length: options.ContextLength = 2048,
    synthetic_acceptance_length: options.SyntheticLength = None,
    synthetic_acceptance_rates: options.SyntheticRates = None,
    kernels: options.Kernels = "auto",
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Continue a prompt and print the text as it is written."""
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop_strings=tuple(stop or ()),
        min_tokens=min_tokens,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=dict(_bias(text) for text in logit_bias or ()),
        bad_words=tuple(bad_word or ()),
        num_speculative_tokens=num_speculative_tokens,
    )
    import outrider

    llm = outrider.load(
        target,
        drafter=None if no_drafter else drafter,
        drafter_quantization=drafter_quantization,
        config=outrider.EngineConfig(
            context_length=context_length,
            max_seats=1,
            num_speculative_tokens=num_speculative_tokens,
            synthetic_acceptance_length=synthetic_acceptance_length,
            synthetic_acceptance_rates=options.parsed_rates(synthetic_acceptance_rates),
        ),
        kernels=kernels,
        device=device,
        progress=progress_line,
    )
    if as_json:
        emit_json(_as_json(llm, prompt, params))
        return
    for chunk in llm.stream(prompt, params):
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise RequestError(f"--logit-bias {text!r} is not ID=BIAS, for example 506=-100.") from None


def _as_json(llm: Any, prompt: str, params: SamplingParams) -> dict[str, Any]:
    result = llm.generate([prompt], params)[0]
    return {
        **asdict(result),
        "target_kernels": llm.kernels_name,
        "drafter": llm.drafter_name,
        "sampling": asdict(params),
    }
