"""`outrider serve`: the OpenAI-compatible server over an engine in this process."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import options
from outrider.cli.output import progress_line
from outrider.errors import DrafterMismatchError, LocateError, UnsupportedModelError, WeightsError

if TYPE_CHECKING:
    from outrider.backends.local import LLM
    from outrider.backends.memory_plan import MemoryPlan
    from outrider.engine.engine import EngineConfig
    from outrider.server.readiness import Readiness

EMBEDDED_MODEL = "gemma-3-270m"


def serve(
    target: options.Target = None,
    drafter: options.Drafter = "auto",
    drafter_quantization: options.DrafterQuantization = None,
    no_drafter: options.NoDrafter = False,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="OUTRIDER_API_KEY", help="Asked of clients as Authorization: Bearer KEY.")
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; may be given several times.")
    ] = None,
    max_seats: Annotated[int, typer.Option(help="Requests decoded at the same time.")] = 4,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; more are told to try again (429).")] = 256,
    context_length: options.ContextLength = 2048,
    cache_bytes: Annotated[
        int | None, typer.Option(help="Most bytes of keys and values; what all seats need if left out.")
    ] = None,
    num_speculative_tokens: options.DraftLength = None,
    synthetic_acceptance_length: options.SyntheticLength = None,
    synthetic_acceptance_rates: options.SyntheticRates = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse to serve with a drafter that drafts poorly.")
    ] = False,
    allow_no_drafter: Annotated[
        bool, typer.Option("--allow-no-drafter", help="Serve plainly where the drafter cannot be loaded.")
    ] = False,
    metrics_prefix: Annotated[str, typer.Option(help="Of names in /metrics; 'vllm' for dashboards that exist.")] = (
        "outrider"
    ),
    drain_s: Annotated[float, typer.Option(help="Seconds that answers may go on after SIGTERM.")] = 30.0,
    kernels: options.Kernels = "auto",
    device: options.Device = "auto",
) -> None:
    """Serve a target to OpenAI clients; a playground is at /. Ready once a short self-test has drafted."""
    try:
        import outrider
        from outrider.server.app import ServerConfig, create_app
        from outrider.server.process import run_server
    except ImportError as error:
        raise LocateError(f"{error.name} is not installed. Install outrider[server].") from error

    names = tuple(served_model_name or ()) or (_model_name(target),)
    settings = ServerConfig(served_model_names=names, api_key=api_key, metrics_prefix=metrics_prefix, drain_s=drain_s)
    engine_config = outrider.EngineConfig(
        max_seats=max_seats,
        max_waiting=max_waiting,
        context_length=context_length,
        cache_bytes=cache_bytes,
        num_speculative_tokens=num_speculative_tokens,
        synthetic_acceptance_length=synthetic_acceptance_length,
        synthetic_acceptance_rates=options.parsed_rates(synthetic_acceptance_rates),
    )

    def boot(readiness: Readiness) -> None:
        wanted = None if no_drafter else drafter
        llm = _load(
            target,
            wanted,
            allow_no_drafter,
            engine_config,
            kernels=kernels,
            device=device,
            drafter_quantization=drafter_quantization,
        )
        _begin(readiness, llm, target, model=names[0], strict=strict, plain=allow_no_drafter or no_drafter)

    def announce(address: str, port: int) -> None:
        sys.stderr.write(f"outrider: http://{address}:{port} answers once the self-test has passed\n")

    app = create_app(None, settings)
    run_server(app, boot, host=host, port=port, drain_s=drain_s, on_listening=announce)


def _load(
    target: str | None,
    drafter: str | None,
    allow_no_drafter: bool,
    config: EngineConfig,
    *,
    kernels: str,
    device: str,
    drafter_quantization: str | None = None,
) -> LLM:
    """The engine; without its drafter where that cannot be loaded and need not be."""
    import outrider

    def load(which: str | None, quantization: str | None) -> LLM:
        return outrider.load(
            target,
            drafter=which,
            drafter_quantization=quantization,
            config=config,
            kernels=kernels,
            device=device,
            progress=progress_line,
            on_plan=_print_plan,
        )

    try:
        return load(drafter, drafter_quantization)
    except (DrafterMismatchError, LocateError, UnsupportedModelError, WeightsError) as error:
        if drafter is None or not allow_no_drafter:
            raise
        warnings.warn(f"serving plainly, since the drafter cannot be loaded: {error}", stacklevel=2)
        return load(None, None)


def _begin(readiness: Readiness, llm: LLM, target: str | None, *, model: str, strict: bool, plain: bool) -> None:
    """Start the engine's thread, test it, and open the doors."""
    from outrider.backends.readiness import self_test
    from outrider.backends.serving import LocalServing
    from outrider.server.chat import find_template
    from outrider.weights.locate import locate_target

    directory = locate_target(target)
    template = find_template(directory if directory.is_dir() else None, llm.tokenizer)
    backend = LocalServing(llm, model=model)
    backend.start()
    try:
        found = self_test(backend, strict=strict, allow_no_drafter=plain)
    except BaseException:
        backend.stop()
        raise
    for cause in found.causes:
        warnings.warn(f"acceptance is low; perhaps {cause}.", stacklevel=2)
    readiness.serve(backend, template, low_acceptance=found.causes)
    sys.stderr.write(f"outrider: ready ({found.state}), model {model}, chat template {template.name}\n")


def _print_plan(plan: MemoryPlan) -> None:
    sys.stderr.write("".join(f"outrider: {line}\n" for line in plan.lines()))


def _model_name(target: str | None) -> str:
    """What clients call a target that was given no name: its file, directory or place on the hub."""
    from outrider.weights.hub import is_hub_name
    from outrider.weights.locate import EMBEDDED_NAME

    if target is None or target == EMBEDDED_NAME:
        return EMBEDDED_MODEL
    return target if is_hub_name(target) and not Path(target).exists() else Path(target).stem
