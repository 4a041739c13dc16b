"""A prompt whose beginning is in the caches, and the same prompt with nothing there: text and acceptance side by side.

    make prefix

Four situations, greedy, on the embedded default. Chats are rendered by the server's Gemma 4 template and bring the
boundaries that the server names. The model was taught neither chats nor thoughts: where a situation needs a thought,
the first half of an answer stands for one. The table goes to stderr, JSON to stdout with --json; the exit code is 1
where a hit changed anything, or where there was none.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import outrider
from outrider import metrics
from outrider.core import AcceptanceStats, SamplingParams
from outrider.engine.cache_space import PagedSpace
from outrider.engine.engine import Engine
from outrider.engine.kv_cache import KvCache
from outrider.server.chat import GEMMA4
from outrider.server.chat_request import prepare_chat
from outrider.server.schemas import ChatBody
from outrider.tokenizer import Tokenizer

NUM_REPEATS = 3  # the quickest prefill counts
SYSTEM = (
    "You help at the desk of a small railway station. Answer in one or two plain sentences. Look trains up before you "
    "speak of them, never guess a platform, and say so when a train is late."
)
NUMBERS = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12."


def tool(name: str, description: str, /, **properties: str) -> dict[str, Any]:
    """A function in OpenAI's form whose arguments are all texts."""
    fields = {key: {"type": "string", "description": text} for key, text in properties.items()}
    parameters = {"type": "object", "properties": fields, "required": list(fields)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = (
    tool("next_trains", "The next trains from here to a town.", town="Where the traveller wants to go", hour="From"),
    tool("platform", "The platform of a train.", train="Number of the train, as on the ticket"),
    tool("buy_ticket", "Sell a ticket.", town="Where to", seat="window or aisle", name="Name of the traveller"),
    tool("lost_property", "Search what was found.", thing="What was lost", day="When", train="Where, if it is known"),
)


@dataclass(frozen=True)
class Prompt:
    """What an engine is given."""

    token_ids: tuple[int, ...]
    boundaries: tuple[int, ...] = ()


@dataclass(frozen=True)
class Situation:
    """A first request, and a second one that begins like it; `second` gets the first one's answer."""

    name: str
    first: Prompt
    second: Callable[[Sequence[int]], Prompt]


@dataclass(frozen=True)
class Comparison:
    """The second request of a situation, cold and after the first."""

    name: str
    num_prompt_tokens: int
    num_cached_tokens: int
    is_text_equal: bool
    is_acceptance_equal: bool
    acceptance_length_cold: float | None
    acceptance_length_hit: float | None
    prefill_cold_s: float
    prefill_hit_s: float
    text: str

    @property
    def holds(self) -> bool:
        """True if there was a hit, and nothing but time shows it."""
        return self.num_cached_tokens > 0 and self.is_text_equal and self.is_acceptance_equal


@dataclass(frozen=True)
class Run:
    """One answer."""

    num_cached_tokens: int
    token_ids: tuple[int, ...]
    accepted: tuple[int, ...]  # drafts accepted in each cycle
    acceptance: AcceptanceStats
    prefill_s: float


def chat(tokenizer: Tokenizer, messages: Sequence[dict[str, str]], *, thinks: bool, has_tools: bool = True) -> Prompt:
    """A chat as the server would submit it."""
    body = {"model": "", "messages": [{"role": "system", "content": SYSTEM}, *messages]}
    body |= {"reasoning_effort": "high" if thinks else "none"} | ({"tools": list(TOOLS)} if has_tools else {})
    prepared = prepare_chat(ChatBody.model_validate(body), GEMMA4, tokenizer)
    return Prompt(tuple(prepared.prompt_token_ids), prepared.boundaries)


def make_situations(tokenizer: Tokenizer) -> list[Situation]:
    """The four that the server must be good at."""
    asked = [{"role": "user", "content": f"Count for me, please: {NUMBERS} And on?"}]
    other = [{"role": "user", "content": "Monday, Tuesday, Wednesday, Thursday, Friday. Which days come next?"}]
    again = [{"role": "user", "content": "Go on counting from there."}]
    plain, thinking = (chat(tokenizer, asked, thinks=thinks) for thinks in (False, True))

    def next_turn(answer: Sequence[int], *, thinks: bool) -> Prompt:
        middle = len(answer) // 2 if thinks else 0
        thought, content = tokenizer.decode(answer[:middle]), tokenizer.decode(answer[middle:])
        said = {"role": "assistant", "content": content} | ({"reasoning": thought} if thinks else {})
        return chat(tokenizer, [*asked, said, *again], thinks=thinks)

    def branch(answer: Sequence[int]) -> Prompt:
        return Prompt((*plain.token_ids, *answer[: len(answer) // 2], *tokenizer.encode(" Or rather: 1, 2, 3")[1:]))

    return [
        Situation("same system prompt and tools", plain, lambda _: chat(tokenizer, other, thinks=False)),
        Situation("second turn, thinking on", thinking, lambda answer: next_turn(answer, thinks=True)),
        Situation("second turn, thinking off", plain, lambda answer: next_turn(answer, thinks=False)),
        Situation("branch inside an answer", plain, branch),
    ]


def kv_cache_of(engine: Engine) -> KvCache:
    """Where its prefixes are."""
    space = engine.scheduler.space
    assert isinstance(space, PagedSpace)
    return space.kv_cache


def run(engine: Engine, prompt: Prompt, *, num_tokens: int) -> Run:
    """One greedy answer of just so many tokens, alone."""
    began, accepted, prefill_s = time.perf_counter(), list[int](), 0.0
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    request = engine.add(prompt.token_ids, params, boundaries=prompt.boundaries)
    while engine.has_work:
        for chunk in engine.step():
            if not prefill_s:
                prefill_s = time.perf_counter() - began
            else:
                accepted.append(chunk.num_accepted_draft_tokens)
    answer = tuple(request.output_token_ids)
    return Run(request.num_cached_tokens, answer, tuple(accepted), request.acceptance, prefill_s)


def compare(engine: Engine, tokenizer: Tokenizer, situation: Situation, *, num_tokens: int) -> Comparison:
    """Run the second request cold and after the first, in turn."""
    forget, pairs = kv_cache_of(engine).forget_prefixes, list[tuple[Run, Run]]()
    for _ in range(NUM_REPEATS):
        forget()
        second = situation.second(run(engine, situation.first, num_tokens=num_tokens).token_ids)
        hit = run(engine, second, num_tokens=num_tokens)
        forget()
        pairs.append((run(engine, second, num_tokens=num_tokens), hit))
    cold, hit = pairs[0]
    return Comparison(
        name=situation.name,
        num_prompt_tokens=len(second.token_ids),
        num_cached_tokens=min(hit.num_cached_tokens for _, hit in pairs),
        is_text_equal=all(one.token_ids == cold.token_ids for pair in pairs for one in pair),
        is_acceptance_equal=all(
            (one.accepted, one.acceptance) == (cold.accepted, cold.acceptance) for pair in pairs for one in pair
        ),
        acceptance_length_cold=metrics.mean_acceptance_length(cold.acceptance),
        acceptance_length_hit=metrics.mean_acceptance_length(hit.acceptance),
        prefill_cold_s=min(cold.prefill_s for cold, _ in pairs),
        prefill_hit_s=min(hit.prefill_s for _, hit in pairs),
        text=tokenizer.decode(cold.token_ids),
    )


def table(comparisons: Sequence[Comparison]) -> str:
    """A line a situation."""
    titles = ("second request", "prompt", "cached", "same text", "acceptance cold", "hit", "prefill cold", "hit")
    rows = [titles]
    for each in comparisons:
        lengths = (each.acceptance_length_cold, each.acceptance_length_hit)
        cold, hit = ("none" if length is None else f"{length:.3f}" for length in lengths)
        same = "yes" if each.is_text_equal else "NO"
        seconds = f"{each.prefill_cold_s:.2f} s", f"{each.prefill_hit_s:.2f} s"
        rows.append((each.name, str(each.num_prompt_tokens), str(each.num_cached_tokens), same, cold, hit, *seconds))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def main() -> int:
    """Compare, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=48, help="tokens of every answer")
    parser.add_argument("--json", action="store_true", help="results as JSON on stdout")
    arguments = parser.parse_args()
    llm = outrider.load(config=outrider.EngineConfig(max_seats=1, context_length=2048), device="cpu")
    situations = make_situations(llm.tokenizer)
    found = [compare(llm.engine, llm.tokenizer, each, num_tokens=arguments.tokens) for each in situations]
    print(table(found), file=sys.stderr)
    if arguments.json:
        print(json.dumps([asdict(each) for each in found]))
    return int(not all(each.holds for each in found))


if __name__ == "__main__":
    sys.exit(main())
