"""Where a bench sends its requests: a Tandem router over gRPC, or an OpenAI-style `/v1/completions` over HTTP."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Protocol

import grpc
import httpx

from cluster.bench.measure import Sample
from common.errors import ConfigError
from common.proto import router_pb2, router_pb2_grpc
from common.wire import PLAIN, Wire

FIRST_ID = 100  # below are tokens that tests and special vocabularies use


class Target(Protocol):
    async def send(self, prompt_tokens: int, output_tokens: int) -> Sample: ...
    async def close(self) -> None: ...


class RouterTarget:
    """Random token ids to a router, exactly `output_tokens` back."""

    def __init__(self, channel: grpc.aio.Channel, vocab_size: int, timeout_s: float, seed: int, wire: Wire = PLAIN):
        self._channel = channel
        self._stub = wire.stub(router_pb2_grpc.RouterStub(channel))
        self._random = random.Random(seed)
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s

    async def send(self, prompt_tokens: int, output_tokens: int) -> Sample:
        loop = asyncio.get_running_loop()
        request = router_pb2.GenerateRequest(request_id="bench")
        low = min(FIRST_ID, self._vocab_size - 1)
        request.tokenized.input_ids.extend(self._random.randrange(low, self._vocab_size) for _ in range(prompt_tokens))
        request.sampling_params.max_tokens = output_tokens
        request.sampling_params.temperature = 0.0
        request.sampling_params.ignore_eos = True
        sample = Sample(loop.time(), prompt_tokens)
        try:
            async for response in self._stub.Generate(request, timeout=self._timeout_s):
                if response.HasField("chunk"):
                    sample.arrivals.append((loop.time(), len(response.chunk.token_ids)))
                else:
                    sample.usd = response.complete.route.actual.cost_usd
        except grpc.aio.AioRpcError as exc:
            sample.error = exc.code().name
        sample.ended_s = loop.time()
        return sample

    async def close(self) -> None:
        await self._channel.close()


class OpenAITarget:
    """Text of about so many tokens (one common word each) to an OpenAI-style server; each streamed event counts as one token unless the
    final usage says how many there were."""

    def __init__(self, base_url: str, model: str, api_key: str | None, timeout_s: float, seed: int):
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url {base_url!r}: expected http://HOST:PORT")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(base_url=base_url, timeout=timeout_s, headers=headers, limits=httpx.Limits(max_connections=None))
        self._model = model
        self._random = random.Random(seed)

    async def send(self, prompt_tokens: int, output_tokens: int) -> Sample:
        loop = asyncio.get_running_loop()
        words = " ".join(self._random.choice(WORDS) for _ in range(prompt_tokens))
        body = {"model": self._model, "prompt": words, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
                "stream_options": {"include_usage": True}}  # fmt: skip
        sample = Sample(loop.time(), prompt_tokens)
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    sample.error = f"HTTP {response.status_code}"
                else:
                    await self._read(response, sample)
        except (httpx.HTTPError, ValueError) as exc:
            sample.error = type(exc).__name__
        sample.ended_s = loop.time()
        return sample

    async def _read(self, response: httpx.Response, sample: Sample) -> None:
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or data == "[DONE]":
                continue
            event = json.loads(data)
            if event.get("choices") and event["choices"][0].get("text"):
                sample.arrivals.append((asyncio.get_running_loop().time(), 1))
            if usage := event.get("usage"):
                sample.prompt_tokens = usage.get("prompt_tokens", sample.prompt_tokens)

    async def close(self) -> None:
        await self._client.aclose()


WORDS = ("time", "year", "people", "way", "day", "man", "thing", "life", "child", "world", "school", "state", "family", "group", "part")
