"""`tandem chat`: a conversation in the terminal. Harmony is the frontend's; this only reads lines and prints events."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cluster.cli.app import NameOption, RouterOption, app, err, out
from common.proto import router_pb2, types_pb2


@app.command()
def chat(
    system: Annotated[str | None, typer.Option(help="Instructions for the model.")] = None,
    effort: Annotated[Literal["low", "medium", "high"], typer.Option(help="How long it may reason.")] = "medium",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens per reply.")] = None,
    vocab: Annotated[
        Path | None, typer.Option(help="Folder with o200k_base.tiktoken; unset = the environment's or an installed one.")
    ] = None,
    name: NameOption = "default",
    router: RouterOption = None,
) -> None:
    """Talk to the model. Reasoning is dimmed, calls are shown; each line of a pipe is one message. Ctrl-D ends."""
    from cluster.client import router_address
    from cluster.credentials import client_wire
    from frontend.harmony.format import HarmonyFormat
    from frontend.vocab import load_vocabulary

    params = types_pb2.SamplingParams(temperature=temperature)
    if max_tokens is not None:
        params.max_tokens = max_tokens
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    params.stop_token_ids.extend(HarmonyFormat.stop_token_ids)
    chat_format = HarmonyFormat(load_vocabulary(vocab))
    asyncio.run(_converse(router_address(name, router), client_wire(name), chat_format, messages, effort, params))


async def _converse(address: str, wire, chat_format, messages: list[dict[str, Any]], effort, params: types_pb2.SamplingParams) -> None:
    from frontend.router_client import RouterClient

    client = RouterClient(address, wire)
    try:
        while line := await asyncio.to_thread(_read_line):
            if line.strip():
                messages.append({"role": "user", "content": line.strip()})
                messages.append({"role": "assistant", "content": await _reply(client, chat_format, messages, effort, params)})
    finally:
        await client.close()


def _read_line() -> str:
    """Empty at the end of input."""
    if sys.stdin.isatty():
        err.print("[bold]>[/bold] ", end="")
    return sys.stdin.readline()


async def _reply(client, chat_format, messages: list[dict[str, Any]], effort, params: types_pb2.SamplingParams) -> str:
    """Prints the reply as it comes. Returns: its visible text"""
    from frontend.chat_format import ChatInput, ContentDelta

    prompt = chat_format.render(ChatInput(messages, reasoning_effort=effort))
    request = router_pb2.GenerateRequest(request_id="chat", sampling_params=params)
    request.tokenized.input_ids.extend(prompt.token_ids)
    parser, complete, events = chat_format.reply_parser(prompt), None, []
    stream = client.generate(request, timeout_s=600)
    while responses := await stream.take():
        for response in responses:
            if response.HasField("complete"):
                complete = response.complete
            else:
                events += _show(parser.feed(response.chunk.token_ids))
    is_cut = complete is not None and complete.finish_reason.reason == types_pb2.FINISH_REASON_LENGTH
    events += _show(parser.finish("length" if is_cut else "stop"))
    out.print()
    if complete is not None:
        took = complete.route.actual
        speed = 1000 / took.itl_ms if took.itl_ms else 0.0
        err.print(f"TTFT {took.ttft_ms:.0f} ms, {speed:.0f} tokens/s, ${took.cost_usd:.1e}", style="dim")
    return "".join(event.text for event in events if isinstance(event, ContentDelta))


def _show(events: list) -> list:
    from frontend.chat_format import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart

    for event in events:
        if isinstance(event, ContentDelta):
            out.print(event.text, end="", markup=False)
        elif isinstance(event, ReasoningDelta):
            err.print(event.text, end="", markup=False, style="dim")
        elif isinstance(event, ToolCallStart):
            err.print(f"\n-> {event.name} ", end="", markup=False, style="bold")
        elif isinstance(event, ToolCallArguments):
            err.print(event.text, end="", markup=False)
    sys.stdout.flush()
    return events
