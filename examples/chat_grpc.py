"""Chat over gRPC: the same conversation format, typed events instead of server-sent ones.

python examples/chat_grpc.py HOST:PORT [API_KEY]        # where frontend.grpc_listen says
"""

from __future__ import annotations

import sys

import grpc

from common.proto import chat_pb2, chat_pb2_grpc, types_pb2


def main() -> None:
    address = sys.argv[1]
    metadata = (("authorization", f"Bearer {sys.argv[2]}"),) if len(sys.argv) > 2 else ()
    request = chat_pb2.CompleteRequest(
        messages=[chat_pb2.Message(role="user", content="Hello!")],
        sampling_params=types_pb2.SamplingParams(temperature=0, max_tokens=64),
        latency_weight=0.8,
    )
    with grpc.insecure_channel(address) as channel:
        for response in chat_pb2_grpc.ChatStub(channel).Complete(request, timeout=60, metadata=metadata):
            show(response)


def show(response: chat_pb2.CompleteResponse) -> None:
    kind = response.WhichOneof("event")
    if kind == "route":
        chosen = next(candidate for candidate in response.route.candidates if candidate.chosen)
        print(f"[{chosen.prefill_pool} -> {chosen.decode_pool}, predicted TTFT {chosen.prediction.ttft_ms:.1f} ms]")
    elif kind == "reasoning":
        print(response.reasoning, end="", flush=True, file=sys.stderr)
    elif kind == "content":
        print(response.content, end="", flush=True)
    elif kind == "tool_call_start":
        print(f"\n-> {response.tool_call_start.name} ", end="")
    elif kind == "tool_call_arguments":
        print(response.tool_call_arguments.text, end="")
    elif kind == "summary":
        usage, took = response.summary.usage, response.summary.route.actual
        print(f"\n[{usage.prompt_tokens} + {usage.completion_tokens} tokens, TTFT {took.ttft_ms:.1f} ms, ${took.cost_usd:.2e}]")


if __name__ == "__main__":
    main()
