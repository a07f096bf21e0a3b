"""OpenAI's Python client against a Tandem frontend: a stream, a tool call with its result, and what the router chose.

python examples/chat_openai.py [http://127.0.0.1:8000] [API_KEY]
"""

from __future__ import annotations

import json
import sys

import openai

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    key = sys.argv[2] if len(sys.argv) > 2 else "unused"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
    model = client.models.list().data[0].id

    print("--- a stream, with what matters to this request in headers")
    wishes = {"x-tandem-ttft-ms": "500", "x-tandem-latency-weight": "0.8"}
    stream = client.chat.completions.with_raw_response.create(
        model=model, messages=[{"role": "user", "content": "Hello!"}], max_completion_tokens=64, stream=True, extra_headers=wishes
    )
    print("route:", stream.headers.get("x-tandem-route"))
    for chunk in stream.parse():
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)

    print("\n--- a tool call and its result")
    messages: list = [{"role": "user", "content": "What is the weather in Paris?"}]
    fields = {"model": model, "tools": [WEATHER], "max_completion_tokens": 96, "temperature": 0}
    message = client.chat.completions.create(messages=messages, **fields).choices[0].message
    messages.append(message.model_dump(exclude_none=True))  # with the chain of thought: the model goes on from it
    for call in message.tool_calls or []:
        print(f"{call.function.name}({call.function.arguments})")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps({"temperature": 21, "sky": "sunny"})})
    if message.tool_calls:
        message = client.chat.completions.create(messages=messages, **fields).choices[0].message
    print(message.content)


if __name__ == "__main__":
    main()
