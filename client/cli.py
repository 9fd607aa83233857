"""`python -m client`: generate text from a served model."""

from __future__ import annotations

import asyncio
import json
import sys
from enum import Enum
from typing import Annotated, Any

import typer

from client.bench_cli import bench_command
from client.calibrate_cli import calibrate_command
from client.diagnose_cli import diagnose_command
from client.errors import CancelledError, ClientError
from client.slo import statistic
from client.stream import Generation, run
from client.transport import open_transport
from client.wire import Chunk, GenerateRequest

app = typer.Typer(help="Talk to a model served by Triton.", no_args_is_help=True, add_completion=False)


class Protocol(str, Enum):
    grpc = "grpc"
    http = "http"


app.command("diagnose")(diagnose_command)
app.command("bench")(bench_command)
app.command("calibrate")(calibrate_command)


@app.command(
    epilog="Exit codes: 0 done, 1 the server failed, 2 wrong usage, 3 server unreachable, 4 request refused (also: no such "
    "model, or not ready), 5 server overloaded or the wait timed out, 6 cancelled by the server, 130 interrupted (Ctrl-C "
    "cancels the request). Errors are one line on standard error."
)
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    protocol: Annotated[Protocol, typer.Option(help="How to reach the server.")] = Protocol.grpc,
    url: Annotated[str, typer.Option(help="host:port for grpc (8001), http://host:port for http (8000).")] = "",
    model: Annotated[str, typer.Option(help="Name of the model.")] = "llm",
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy, the default.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Choose among the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Choose among the likeliest tokens that together have this probability.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end of sequence.")] = False,
    cache_salt: Annotated[str, typer.Option(help="Share cached prefixes only within this salt.")] = "",
    priority: Annotated[int, typer.Option(help="1 is first; 0: the model's default.", min=0)] = 0,
    timeout_ms: Annotated[int, typer.Option(help="Longest wait in the server's queue; 0: the model's default.", min=0)] = 0,
    deadline_ms: Annotated[int, typer.Option(help="End the generation with what it has after this time; 0: none.", min=0)] = 0,
    stream: Annotated[bool, typer.Option(help="Show text as it comes.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, for scripts.")] = False,
) -> None:
    """Continue a prompt: text as it comes, then TTFT, ITL and tokens/s."""
    optional = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "ignore_eos": ignore_eos or None}
    try:
        request = GenerateRequest(
            prompt=sys.stdin.read() if prompt == "-" else prompt,
            max_tokens=max_tokens,
            stream=stream,
            stop=tuple(stop or ()),
            cache_salt=cache_salt,
            sampling={name: value for name, value in optional.items() if value is not None},
            priority=priority,
            timeout_ms=timeout_ms,
            deadline_ms=deadline_ms,
        )
        generation = asyncio.run(_generate(protocol.value, url, model, request, show=not as_json))
    except KeyboardInterrupt:
        typer.secho("interrupted: the request was cancelled", fg="red", err=True)
        raise typer.Exit(130) from None
    except ClientError as error:
        name = "cancelled" if isinstance(error, CancelledError) else "error"
        typer.secho(f"{name}: {error}", fg="red", err=True)
        raise typer.Exit(error.exit_code) from None
    typer.echo(json.dumps(summary(generation), ensure_ascii=False) if as_json else f"\n\n{summary_line(generation)}")


async def _generate(protocol: str, url: str, model: str, request: GenerateRequest, *, show: bool) -> Generation:
    transport = open_transport(protocol, url, model)
    try:
        return await run(transport, request, _show if show else lambda chunk: None)
    finally:
        await transport.close()


def _show(chunk: Chunk) -> None:
    sys.stdout.write(chunk.text)
    sys.stdout.flush()


def summary(generation: Generation) -> dict[str, Any]:
    """Everything a script may want; milliseconds, None where undefined."""
    timing = generation.timing
    return {
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "num_input_tokens": generation.num_input_tokens,
        "num_cached_tokens": generation.num_cached_tokens,
        "num_draft_tokens": generation.num_draft_tokens,
        "num_accepted_tokens": generation.num_accepted_tokens,
        "num_output_tokens": timing.num_tokens,
        "ttft_ms": _ms(timing.ttft),
        "itl_mean_ms": _ms(timing.mean_itl),
        "itl_p50_ms": _ms(statistic(timing.itls, "p50")),
        "itl_p99_ms": _ms(statistic(timing.itls, "p99")),
        "end_to_end_ms": _ms(timing.end_to_end),
        "tokens_per_second": timing.tokens_per_second,
    }


def summary_line(generation: Generation) -> str:
    """The same in one line for people."""
    values = summary(generation)
    counts = {name: "?" if values[name] is None else values[name] for name in ("num_input_tokens", "num_cached_tokens")}
    parts = [
        f"{counts['num_input_tokens']} tokens in ({counts['num_cached_tokens']} cached), {values['num_output_tokens']} out",
        f"TTFT {_shown(values['ttft_ms'])}",
        f"ITL mean {_shown(values['itl_mean_ms'])}, p99 {_shown(values['itl_p99_ms'])}",
        _shown(values["tokens_per_second"], "tokens/s"),
        f"finished: {values['finish_reason']}",
    ]
    if values["num_draft_tokens"]:
        parts.insert(1, f"{values['num_accepted_tokens']} of {values['num_draft_tokens']} guesses right")
    return " | ".join(parts)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _shown(value: float | None, unit: str = "ms") -> str:
    return "-" if value is None else f"{value:.1f} {unit}"
