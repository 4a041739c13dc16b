"""`outrider bench compare`: is one arm faster than another, by how much, and does the sample carry the claim?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from outrider.cli import options
from outrider.cli.bench_options import WorkloadText
from outrider.cli.output import Found, emit_json, new_file, progress_bar, progress_line, show, stoppable
from outrider.errors import ConfigError, LocateError

if TYPE_CHECKING:
    from outrider.backends.local import LLM
    from outrider.benchmarking.arms import ArmSpec, Asking, Rendering
    from outrider.benchmarking.compare import Arm
    from outrider.benchmarking.request_sets import Item, RequestSet

DEFAULT_ARMS = ("plain=local:plain", "drafter=local:drafter")
METHODS = ("t", "bca")
MIN_PROMPTS = 2  # an interval takes two pairs
MIN_BCA_PROMPTS = 20  # of fewer, a bootstrap's 95 % are under 90


def compare(
    arm: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=URL[,field=value…] or NAME=local:plain or NAME=local:drafter, several times; the first is the "
            "baseline. Fields go into the body: speculative.enabled=false."
        ),
    ] = None,
    aa: Annotated[
        bool, typer.Option("--aa", help="Run the first arm against itself as well: that is the noise floor.")
    ] = False,
    workload: WorkloadText = "demo",
    prompts: Annotated[int | None, typer.Option(help="How many of them; all if left out.")] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Cut or lengthen prompts to exactly so many tokens, as the first arm counts them."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Answers of each arm to each prompt; an even number cancels drift.")] = 6,
    warm_up_rounds: Annotated[int, typer.Option(help="Rounds before those, discarded.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    temperature: options.Temperature = 0.0,
    seed: Annotated[int, typer.Option(help="Of the order, and of sampled answers.")] = 0,
    claim: Annotated[float, typer.Option(help="The smallest difference that matters, in percent.")] = 3.0,
    confidence: Annotated[float, typer.Option(help="Of the interval, between 0.5 and 1.")] = 0.95,
    method: Annotated[
        str, typer.Option(help="Of the interval: t, or bca, a bootstrap that takes some 50 prompts.")
    ] = "t",
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="Let answers end where they end, instead of at --max-tokens.")
    ] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Send each prompt as a user's message.")] = False,
    model: Annotated[str | None, typer.Option(help="What servers call it; the first they name if left out.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OUTRIDER_API_KEY", help="Sent to servers.")] = None,
    timeout_s: Annotated[float, typer.Option(help="Seconds that an answer of a server may keep silent.")] = 600.0,
    target: options.Target = None,
    drafter: options.Drafter = "auto",
    num_speculative_tokens: options.DraftLength = None,
    context_length: options.ContextLength = 1024,
    kernels: options.Kernels = "auto",
    device: options.Device = "auto",
    record: Annotated[Path | None, typer.Option(help="Also write a record with raw rows to this new file.")] = None,
    as_json: options.Json = False,
) -> None:
    """Compare arms on the same prompts, in mirrored orders. Without arms: the target plainly and with its drafter.

    Reports the speedup of decoding with its interval, and refuses claims that so few prompts cannot carry.

    Exit code 1 where an arm was broken or did not do what it was asked.
    """
    chosen = _chosen(workload, prompts)
    counts = {"rounds": rounds, "warm_up_rounds": warm_up_rounds, "max_tokens": max_tokens}
    _check(**counts, claim=claim, confidence=confidence, temperature=temperature)
    if method not in METHODS:
        raise ConfigError(f"--method {method!r} is not known; choose one of {', '.join(METHODS)}.")
    if method == "bca" and len(chosen.items) < MIN_BCA_PROMPTS:
        raise ConfigError(
            f"--method bca resamples prompts, and {len(chosen.items)} are too few: use t, or more prompts."
        )
    new_file("--record", record)
    try:
        from outrider.benchmarking import arms as kinds
        from outrider.benchmarking import compare as measurement
        from outrider.benchmarking.comparison import Judging, best_arm, compare_arms, compare_whole_rounds
        from outrider.benchmarking.record import RecordFile, make_record
    except ImportError as error:
        raise LocateError(f"{error.name} is not installed. Install outrider[bench].") from error

    specs = _specs([kinds.parse_arm(text) for text in arm or DEFAULT_ARMS], aa=aa)
    asking = kinds.Asking(
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed if temperature > 0 else None,
        ignore_eos=not stop_at_eos,
        is_chat=chat,
    )
    local = {"num_speculative_tokens": num_speculative_tokens, "context_length": context_length}
    backends = _load_local(specs, target, drafter, local, kernels=kernels, device=device)
    servers = {"model": model, "api_key": api_key, "timeout_s": timeout_s}
    sizes = {"num_rounds": rounds, "num_warmup_rounds": warm_up_rounds}
    judging = Judging(claim=claim / 100, confidence=confidence, method="bca" if method == "bca" else "t")
    with ExitStack() as stack:
        arms = [_make_arm(spec, asking, backends, servers, stack, target=target or "embedded") for spec in specs]
        described = [each.describe() for each in arms]  # a server that does not answer is found before time is spent
        if prompt_tokens is not None:
            chosen = _sized(chosen, arms[0], prompt_tokens, max_tokens, context_length if backends else None)
        num_turns = measurement.num_turns(num_arms=len(arms), num_prompts=len(chosen.items), **sizes)
        file, rows = RecordFile(record), list[measurement.Row]()

        how: dict[str, Any] = {"is_greedy": temperature == 0, "judging": judging}

        def made(found: list[dict[str, Any]]) -> dict[str, Any]:
            summaries = [{**each, "num_warmup_rounds": warm_up_rounds} for each in found]
            raw, summary = [row.as_dict() for row in rows], summaries[0] if len(summaries) == 1 else summaries
            return make_record("compare", workload=chosen.workload, arms=described, rows=raw, summary=summary)

        def so_far() -> Found | None:
            num_prompts = len(chosen.items)
            found = compare_whole_rounds(rows, arms, num_prompts=num_prompts, **how)
            missing = measurement.missing_rows(rows, arms, num_each=rounds * num_prompts)
            return (made(found), missing) if rows else None

        with progress_bar(num_turns) as report, stoppable(file, so_far):
            measurement.run_arms(arms, chosen.items, **sizes, seed=seed, on_turn=report, keep=rows.append)
            written = made(compare_arms(rows, arms, **how))
    file.write(written)
    summary = written["summary"]
    summaries = summary if isinstance(summary, list) else [summary]
    best = best_arm(summaries)
    emit_json({"arms": described, "summary": summary, "best_arm": best}) if as_json else _show(summaries, best)
    if any(each["faults"] for each in summaries):
        raise typer.Exit(1)


def _chosen(name: str, num_prompts: int | None) -> RequestSet:
    """The request set, or as many of its items as were asked for."""
    from outrider.benchmarking.request_sets import RequestSet, load_request_set

    found = load_request_set(name)
    most = len(found.items)
    if num_prompts is None and most >= MIN_PROMPTS:
        return found
    if num_prompts is None or not MIN_PROMPTS <= num_prompts <= most:
        given = "" if num_prompts is None else f"--prompts {num_prompts}, but "
        raise ConfigError(
            f"{given}{name} has {most} and an interval takes {MIN_PROMPTS}. Give from {MIN_PROMPTS} to {most}, or "
            "another --workload."
        )
    return RequestSet(found.name, found.items[:num_prompts])


def _sized(chosen: RequestSet, arm: Arm, num_tokens: int, max_tokens: int, context_length: int | None) -> RequestSet:
    from outrider.benchmarking.prompt_length import sized_items
    from outrider.benchmarking.request_sets import RequestSet

    items = sized_items(
        chosen.items,
        num_tokens=num_tokens,
        max_tokens=max_tokens,
        count=arm.count_prompt_tokens,
        context_length=context_length,
    )
    return RequestSet(f"{chosen.name}, {num_tokens} tokens", items)


def _check(
    *, rounds: int, warm_up_rounds: int, max_tokens: int, claim: float, confidence: float, temperature: float
) -> None:
    """ConfigError naming the option whose number cannot be."""
    bounds = (
        ("--rounds", rounds, rounds >= 1, "at least 1"),
        ("--warm-up-rounds", warm_up_rounds, warm_up_rounds >= 0, "at least 0"),
        ("--max-tokens", max_tokens, max_tokens >= 2, "at least 2, since decoding is timed after the first"),
        ("--temperature", temperature, 0 <= temperature < float("inf"), "0 for greedy or a number above"),
        ("--claim", claim, 0 < claim < float("inf"), "a percentage above 0"),
        ("--confidence", confidence, 0.5 < confidence < 1, "between 0.5 and 1"),
    )
    for option, value, is_right, wanted in bounds:
        if not is_right:
            raise ConfigError(f"{option} {value} cannot be. Give {wanted}.")


def _specs(given: Sequence[ArmSpec], *, aa: bool) -> list[ArmSpec]:
    """The arms, the first one a second time if its noise is to be measured."""
    from outrider.benchmarking.compare import again_name

    specs = [*given, replace(given[0], name=again_name(given[0].name))] if aa else list(given)
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise ConfigError(f"--arm: two arms have one name in {', '.join(names)}. Give each its own.")
    if len(specs) < 2:
        raise ConfigError(f"--arm {names[0]} is alone. Give a second one, or --aa for its noise floor.")
    return specs


def _load_local(
    specs: Sequence[ArmSpec],
    target: str | None,
    drafter: str,
    config: dict[str, Any],
    *,
    kernels: str,
    device: str,
) -> dict[str, LLM]:
    """Engines of this process by kind, on one copy of the weights; none where no arm is local."""
    wanted = {spec.local_kind for spec in specs} - {None}
    if not wanted:
        return {}
    import outrider

    engine = outrider.EngineConfig(max_seats=1, **config)
    which = drafter if "drafter" in wanted else None
    llm = outrider.load(target, drafter=which, config=engine, kernels=kernels, device=device, progress=progress_line)
    if which is not None and llm.drafter_name is None:
        raise ConfigError("local:drafter has no drafter for this target; give one with --drafter.")
    backends = {"drafter": llm} if which is not None else {}
    if "plain" in wanted:
        backends["plain"] = llm if which is None else llm.without_drafter()
    return backends


def _make_arm(
    spec: ArmSpec, asking: Asking, backends: dict[str, LLM], servers: dict[str, Any], stack: ExitStack, *, target: str
) -> Arm:
    from outrider.benchmarking.arms import LocalArm, ServerArm
    from outrider.benchmarking.client import ServerClient

    if spec.local_kind is None:
        client = ServerClient(spec.place, **servers)
        stack.callback(client.close)
        return ServerArm(spec, client, asking)
    llm = backends[spec.local_kind]
    return LocalArm(
        spec,
        llm,
        asking,
        target=target,
        drafter=llm.drafter_name,
        kernels=llm.kernels_name,
        render=chat_renderer(llm, target),
    )


def chat_renderer(llm: LLM, target: str) -> Callable[[Item], Rendering]:
    """Chats to text as `serve` would write them, without thoughts."""
    from outrider.benchmarking.arms import Rendering
    from outrider.server.chat import find_template
    from outrider.weights.locate import locate_target

    directory = locate_target(target)
    template = find_template(directory if directory.is_dir() else None, llm.tokenizer)

    def render(item: Item) -> Rendering:
        return Rendering(
            text=template.render_chat(item.messages, item.tools or None, enable_thinking=False).text,
            stop_strings=template.stop_strings,
            stop_token_ids=template.stop_token_ids(llm.tokenizer),
        )

    return render


def _show(summaries: Sequence[dict[str, Any]], best: str | None) -> None:
    show(_table(summaries))
    for each in summaries:
        show(f"{each['arm']}: {each['verdict_text']}.")
        for line in _remarks(each):
            show(f"  {line}")
    if len(summaries) > 1:
        show(f"Fastest: {best or 'none is shown to be faster than ' + summaries[0]['baseline']}.")


def _table(summaries: Sequence[dict[str, Any]]) -> Table:
    first = summaries[0]
    title = f"Decode speed against {first['baseline']}: {first['num_prompts']} prompts × {first['num_rounds']} rounds"
    table = Table(title=title)
    columns = ("arm", "tokens/s", "speedup", f"{100 * first['confidence']:g} % interval", "p", "accepted", "same text")
    for column in columns:
        table.add_column(column, justify="left" if column == "arm" else "right")
    table.add_row(first["baseline"], _number(first["baseline_tokens_per_s"], 1), "1", "", "", "–", "")
    for each in summaries:
        low, high = each["speedup_interval"]
        same = {True: "yes", False: f"no: {each['num_different_prompts']} differ", None: "–"}[each["identical"]]
        table.add_row(
            each["arm"],
            _number(each["tokens_per_s"], 1),
            f"{each['speedup']:.3f}×",
            f"{low:.3f} … {high:.3f}",
            f"{each['p_value']:.4f}",
            _number(each["mean_acceptance_length"]),
            same,
        )
    return table


def _remarks(summary: dict[str, Any]) -> list[str]:
    """What a reader of the speedup must know beside it."""
    floor, least = summary["noise_floor"], summary["minimum_detectable_effect"]
    lines = ["noise floor: not measured; --aa does" if floor is None else f"noise floor: {100 * floor:.1f} %"]
    if least is not None:
        lines.append(f"the smallest difference that this run finds nine times in ten: {100 * least:.1f} %")
    if summary["num_left_out_prompts"]:
        lines.append(f"left out: {summary['num_left_out_prompts']} prompts that not both answered soundly")
    if summary["num_looping_prompts"] and summary["speedup_outside_loops"]:
        loops, outside = summary["num_looping_prompts"], summary["speedup_outside_loops"]
        lines.append(f"{loops} answers repeat themselves on both arms; without them the speedup is {outside:.3f}×")
    if summary["num_unsteady_prompts"]:
        lines.append(f"{summary['num_unsteady_prompts']} prompts got another answer from the same arm in another round")
    return lines


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
