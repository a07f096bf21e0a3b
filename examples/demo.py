"""The whole path on this machine: a tiny gpt-oss, two prefill pools, one decode pool, the router; real conversations over gRPC.

Run it with `make demo`. Nothing is mocked: Ray places the groups, KV travels from prefill to decode processes, tokens stream back.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
from rich.console import Console

from cluster.cli.render import route_table
from cluster.cli.serve import startup_progress
from cluster.up import bring_up, take_down
from common.config import load_config
from common.errors import ServingError
from common.proto import router_pb2, router_pb2_grpc, types_pb2
from frontend.chat_format import ChatInput, ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart
from frontend.harmony.format import HarmonyFormat
from frontend.vocab import load_vocabulary
from model.trained_fixture import write_trained_fixture

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples" / "configs" / "laptop.yaml"
NAME = "demo"
MAX_TOKENS = 64
console = Console(highlight=False)

WEATHER = {
    "name": "get_weather",
    "description": "Gets the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
LONG_STORY = " ".join(f"On day {day} the keeper of the lighthouse wrote the number {day * 7 % 97} into her book." for day in range(1, 21))


@dataclass(frozen=True)
class Conversation:
    title: str
    chat: ChatInput


CONVERSATIONS = (
    Conversation("with a tool", ChatInput([{"role": "user", "content": "What is the weather in Paris?"}], tools=(WEATHER,))),
    Conversation(
        "longer than the sliding window",
        ChatInput([{"role": "user", "content": LONG_STORY + " Which number did she write on day 3?"}], reasoning_effort="low"),
    ),
    Conversation(
        "in several languages",
        ChatInput(
            [{"role": "user", "content": "Hello! Bonjour ! Guten Tag! ¡Hola! 你好！ こんにちは！ Здравствуйте!"}], reasoning_effort="low"
        ),
    ),
)


async def run_conversation(stub: router_pb2_grpc.RouterStub, chat_format: HarmonyFormat, conversation: Conversation) -> None:
    """Sends one conversation and prints its reply as it comes, then what the router chose and what it took."""
    prompt = chat_format.render(conversation.chat)
    request = router_pb2.GenerateRequest(request_id=conversation.title)
    request.tokenized.input_ids.extend(prompt.token_ids)
    request.sampling_params.temperature = 0.0
    request.sampling_params.max_tokens = MAX_TOKENS
    console.rule(f"{conversation.title}: {len(prompt.token_ids)} prompt tokens", align="left")
    parser, started, received = chat_format.reply_parser(prompt), time.monotonic(), 0
    complete = None
    async for response in stub.Generate(request, timeout=120):
        if response.HasField("complete"):
            complete = response.complete
            break
        received += len(response.chunk.token_ids)
        for event in parser.feed(response.chunk.token_ids):
            print_event(event)
    if complete is None:
        raise ServingError("the stream ended without an answer")
    is_cut = complete.finish_reason.reason == types_pb2.FINISH_REASON_LENGTH
    for event in parser.finish("length" if is_cut else "stop"):
        print_event(event)
    console.print(f"\n[dim]{received} tokens in {time.monotonic() - started:.2f} s[/dim]")
    console.print(route_table(complete.route.decision, complete.route.actual))


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
