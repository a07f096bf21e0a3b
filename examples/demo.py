"""The whole path on this machine: a tiny gpt-oss, two prefill pools, one decode pool, the router; real conversations over gRPC.

Run it with `make demo`. Nothing is mocked: Ray places the groups, KV travels from prefill to decode processes, tokens stream back.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
from rich.console import Console

from cluster.cli.render import route_table
from cluster.cli.serve import startup_progress
from cluster.up import bring_up, take_down
from common.config import load_config
from common.errors import ServingError
from common.proto import router_pb2, router_pb2_grpc, types_pb2
from frontend.chat_format import ChatInput, ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallStart
from frontend.harmony.format import HarmonyFormat
from frontend.vocab import load_vocabulary
from model.trained_fixture import write_trained_fixture

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples" / "configs" / "laptop.yaml"
NAME = "demo"
MAX_TOKENS = 128
console = Console(highlight=False)

WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
FILLER = (
    "The kite was over the castle after lunch. A slow writer opened 87 cakes in the winter. Ben bought the drum over the garden. "
    "The candle was near the river every day. A young doctor repaired 48 cakes last week. The basket was along the village in the winter. "
)


@dataclass(frozen=True)
class Conversation:
    """`chat` is sent; if the model calls a tool, it gets `tool_result` and is asked again."""

    title: str
    chat: ChatInput
    tool_result: str | None = None


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


CONVERSATIONS = (
    Conversation(
        "a tool is called, its result used",
        ChatInput([user("What is the weather in Paris?")], tools=(WEATHER,)),
        tool_result='{"weather":"sunny","degrees":21}',
    ),
    Conversation(
        "a fact from far beyond the sliding window",
        ChatInput([user(f"Note this. The door code of Pedro is 576. {FILLER * 5}What is the door code of Pedro?")]),
    ),
    Conversation(
        "in several languages",
        ChatInput(
            [
                user("¡Hola!"),
                assistant("¡Hola! ¿Cómo puedo ayudar?"),
                user("Bonjour!"),
                assistant("Bonjour! Comment puis-je aider?"),
                user("お元気ですか"),
            ],
            reasoning_effort="low",
        ),
    ),
)


async def run_conversation(stub: router_pb2_grpc.RouterStub, chat_format: HarmonyFormat, conversation: Conversation) -> None:
    """One conversation to its end: a tool call is answered and the model asked again."""
    console.rule(conversation.title, align="left")
    events = await ask(stub, chat_format, conversation.chat)
    calls = [event for event in events if isinstance(event, ToolCallStart)]
    if not calls or conversation.tool_result is None:
        return
    console.print(f"[dim]the tool answers {conversation.tool_result}[/dim]")
    arguments = "".join(event.text for event in events if isinstance(event, ToolCallArguments))
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    call = {"id": "call_1", "type": "function", "function": {"name": calls[0].name, "arguments": arguments}}
    messages = [
        *conversation.chat.messages,
        {"role": "assistant", "reasoning_content": reasoning, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": conversation.tool_result},
    ]
    await ask(stub, chat_format, replace(conversation.chat, messages=messages))


async def ask(stub: router_pb2_grpc.RouterStub, chat_format: HarmonyFormat, chat: ChatInput) -> list[Event]:
    """Sends one prompt and prints its reply as it comes, then what the router chose and what it took.

    Raises: ServingError if the stream ends without an answer; grpc.RpcError
    """
    prompt = chat_format.render(chat)
    request = router_pb2.GenerateRequest(request_id="demo", explain=True)
    request.tokenized.input_ids.extend(prompt.token_ids)
    request.sampling_params.temperature = 0.0
    request.sampling_params.max_tokens = MAX_TOKENS
    parser, started, received, events = chat_format.reply_parser(prompt), time.monotonic(), 0, []
    complete = None
    async for response in stub.Generate(request, timeout=120):
        if response.HasField("complete"):
            complete = response.complete
            break
        received += len(response.chunk.token_ids)
        events += show(parser.feed(response.chunk.token_ids))
    if complete is None:
        raise ServingError("the stream ended without an answer")
    is_cut = complete.finish_reason.reason == types_pb2.FINISH_REASON_LENGTH
    events += show(parser.finish("length" if is_cut else "stop"))
    took = complete.route.actual
    console.print(
        f"\n[green]{len(prompt.token_ids)} prompt + {received} output tokens in {time.monotonic() - started:.2f} s[/green], "
        f"TTFT {took.ttft_ms:.0f} ms, ITL {took.itl_ms:.1f} ms, ${took.cost_usd:.1e}"
    )
    console.print(route_table(complete.route.decision, took))
    return events


def show(events: list[Event]) -> list[Event]:
    for event in events:
        print_event(event)
    return events


def print_event(event) -> None:
    if isinstance(event, ContentDelta):
        console.print(event.text, end="", markup=False)
    elif isinstance(event, ReasoningDelta):
        console.print(event.text, end="", markup=False, style="dim")
    elif isinstance(event, ToolCallStart):
        console.print(f"\n-> {event.name} ", end="", markup=False, style="bold")
    elif isinstance(event, ToolCallArguments):
        console.print(event.text, end="", markup=False)


async def converse(address: str) -> None:
    chat_format = HarmonyFormat(load_vocabulary(ROOT / ".cache" / "vocab"))
    async with grpc.aio.insecure_channel(address) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        for number, conversation in enumerate(CONVERSATIONS, 1):
            console.print(f"[bold]request {number} of {len(CONVERSATIONS)}[/bold]")
            await run_conversation(stub, chat_format, conversation)


def prepare() -> None:
    """Checkpoint and vocabulary, made once."""
    checkpoint, vocabulary = ROOT / ".cache" / "tiny-gpt-oss", ROOT / ".cache" / "vocab" / "o200k_base.tiktoken"
    if not vocabulary.exists():
        vocabulary.parent.mkdir(parents=True, exist_ok=True)
        vocabulary.write_bytes(load_vocabulary().path.read_bytes())
    if not (checkpoint / "config.json").exists():
        console.print("writing a tiny trained gpt-oss checkpoint with the full vocabulary ...")
        write_trained_fixture(checkpoint)


def main() -> int:
    prepare()
    config = load_config(CONFIG)
    try:
        with startup_progress() as show:
            state = bring_up(config, NAME, show)
        console.print(f"router at {state.router_address}")
        asyncio.run(converse(str(state.router_address)))
    except (ServingError, grpc.RpcError) as exc:
        console.print(f"demo: {exc}", style="red", markup=False)
        return 1
    finally:
        take_down(NAME)
    console.print("[bold]shut down clean[/bold]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
