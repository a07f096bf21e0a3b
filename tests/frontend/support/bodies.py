"""Sends generated bodies to a frontend: no answer may be a 5xx, and good streams beside them must be unharmed.

Bodies follow the frontend's own OpenAPI document, have one thing changed in it, or are no JSON at all. A small number runs in the default
tests; for a long run, whose figures go to benchmarks/results/http_bodies.json:
    python -m tests.frontend.support.bodies --bodies 50000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import http.client
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from frontend.harmony.format import HarmonyFormat
from frontend.vocab import load_vocabulary
from tests.frontend.support.fake_router import Script
from tests.frontend.support.stack import running_stack

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "http_bodies.json"
BATCH = 1000  # a new search after that many: one search remembers all it tried, and gets slower with it
TELL_S = 10.0
NUM_GOOD = 4
TEXT = " A good stream, 東京 🍎." * 4
CHAT = "/v1/chat/completions"
ODD = (10**20, -1, 2**31, "\ud800", "<|end|>", "a" * 5000, 1e308, -0.0, "", [[]], {"a": {"b": [None]}})
WELL_KNOWN: Mapping[str, st.SearchStrategy[Any]] = {
    "model": st.just("gpt-oss-20b"),
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]), "content": st.text(max_size=30)},
            optional={"tool_call_id": st.text(max_size=5), "name": st.just("f"), "reasoning_content": st.text(max_size=10)},
        ),
        min_size=1,
        max_size=4,
    ),
    "input": st.text(min_size=1, max_size=30),
    "prompt": st.one_of(st.text(min_size=1, max_size=30), st.lists(st.integers(0, 201_087), min_size=1, max_size=8)),
    "max_tokens": st.integers(1, 20),
    "max_completion_tokens": st.integers(1, 20),
    "max_output_tokens": st.integers(1, 20),
    "n": st.integers(1, 3),
}


def anything() -> st.SearchStrategy[Any]:
    """Any JSON value, odd ones often."""
    leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.sampled_from(ODD))

    def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)

    return st.recursive(leaves, nest, max_leaves=6)


def values_of(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a JSON schema allows, as far as the frontend's document uses it."""
    if "$ref" in schema:
        return values_of(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    if "anyOf" in schema:
        return st.one_of([values_of(branch, schemas) for branch in schema["anyOf"]])
    match schema.get("type"):
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "integer":
            return st.integers(schema.get("minimum", -(2**63)), schema.get("maximum", 2**63 - 1))
        case "number":
            low, high = (schema.get(name, schema.get(f"exclusive{name.title()}")) for name in ("minimum", "maximum"))
            return st.floats(low, high, allow_nan=False, exclude_min="exclusiveMinimum" in schema)
        case "string":
            return st.text(min_size=schema.get("minLength", 0), max_size=min(schema.get("maxLength", 20), 20))
        case "array":
            items = values_of(schema["items"], schemas) if schema.get("items") else anything()
            return st.lists(items, max_size=min(schema.get("maxItems", 3), 3))
        case "object" if "properties" in schema:
            required = schema.get("required", [])
            parts = schema["properties"].items()
            fields = {name: WELL_KNOWN[name] if name in WELL_KNOWN else values_of(part, schemas) for name, part in parts}
            return st.fixed_dictionaries(
                {name: fields[name] for name in required}, optional={name: fields[name] for name in fields if name not in required}
            )
        case "object":
            return st.dictionaries(st.text(max_size=8), anything(), max_size=3)
    return anything()


def requests_of(document: Mapping[str, Any]) -> st.SearchStrategy[tuple[str, bytes]]:
    """(path, body): half of them as the document says, the others changed."""
    schemas, out = document["components"]["schemas"], []
    for path, operations in document["paths"].items():
        if "post" in operations:
            schema = operations["post"]["requestBody"]["content"]["application/json"]["schema"]
            whole = values_of(schema, schemas)
            model = schemas[schema["$ref"].rpartition("/")[2]]
            names = sorted(model["properties"])
            few = st.builds(_keep, whole, st.sets(st.sampled_from(names), max_size=4), st.just(frozenset(model["required"])))
            changed = st.builds(_change, few, st.sampled_from(names) | st.text(max_size=8), anything())
            bodies = st.one_of(few, few, changed, whole).map(lambda body: json.dumps(body).encode())
            broken = st.builds(_break, bodies, st.integers(0, 10_000), st.binary(max_size=4))
            out.append(st.tuples(st.just(path), st.one_of(bodies, bodies, bodies, bodies, broken)))
    return st.one_of(out)


def _keep(body: dict[str, Any], names: set[str], required: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name in names | required}


def _change(body: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    return body | {name: value}


def _break(body: bytes, at: int, raw: bytes) -> bytes:
    at %= len(body) + 1
    return body[:at] + raw + body[at + 1 :]


@dataclass
class Run:
    """What came back. `distinct`: digests of the bodies with their paths; `bad_streams`: of the good ones, how many were not whole."""

    statuses: Counter[int] = field(default_factory=Counter)
    distinct: set[bytes] = field(default_factory=set)
    server_errors: list[str] = field(default_factory=list)
    good_streams: int = 0
    bad_streams: int = 0


class Sender:
    """One keep-alive connection."""

    def __init__(self, port: int):
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def close(self) -> None:
        self._connection.close()

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        try:
            return self._post(path, body)
        except (http.client.RemoteDisconnected, ConnectionError):  # it was idle for long: the server may close it then
            self._connection.close()
            return self._post(path, body)

    def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        self._connection.request("POST", path, body, {"content-type": "application/json"})
        response = self._connection.getresponse()
        return response.status, response.read()

    def get_json(self, path: str) -> Any:
        self._connection.request("GET", path)
        return json.loads(self._connection.getresponse().read())


@contextlib.contextmanager
def frontend_in_thread() -> Iterator[int]:
    """A frontend before a fake router, in a thread with its own loop; gives the port."""
    chat_format = HarmonyFormat(load_vocabulary())
    ids = chat_format.vocabulary.harmony.encode(f"<|channel|>final<|message|>{TEXT}<|return|>", allowed_special="all")
    found: list[int] = []
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        async with running_stack(chat_format, lambda request, index: Script(ids, gap_s=0.0)) as stack:
            found.append(int(stack.url.rpartition(":")[2]))
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(60)
        yield found[0]
    finally:
        stop.set()
        thread.join()


def run(bodies: int, seed_: int = 1, tell: Callable[[Run], None] = lambda so_far: None) -> Run:
    """Sends that many bodies; `tell` hears after each."""
    result, is_over = Run(), threading.Event()
    with frontend_in_thread() as port:
        good = [threading.Thread(target=_stream_until, args=(port, is_over, result)) for _ in range(NUM_GOOD)]
        for thread in good:
            thread.start()
        sender = Sender(port)
        requests = requests_of(sender.get_json("/openapi.json"))

        def send(request: tuple[str, bytes]) -> None:
            path, body = request
            status, answer = sender.post(path, body)
            result.statuses[status] += 1
            result.distinct.add(hashlib.blake2b(path.encode() + body, digest_size=16).digest())
            if status >= 500:
                result.server_errors.append(f"{request}: {answer[:300]!r}")
            tell(result)

        try:
            for number, first in enumerate(range(0, bodies, BATCH)):
                _search(send, requests, min(BATCH, bodies - first), seed_ + number)
        finally:
            sender.close()
            is_over.set()
            for thread in good:
                thread.join()
    return result


def _search(send: Callable[[tuple[str, bytes]], None], requests: st.SearchStrategy[tuple[str, bytes]], count: int, seed_: int) -> None:
    options = settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    seed(seed_)(options(given(requests)(lambda request: send(request))))()


def _stream_until(port: int, is_over: threading.Event, result: Run) -> None:
    body = json.dumps({"model": "gpt-oss-20b", "stream": True, "messages": [{"role": "user", "content": "hi"}]}).encode()
    with contextlib.closing(Sender(port)) as sender:
        while not is_over.is_set():
            status, answer = sender.post(CHAT, body)
            result.good_streams += 1
            result.bad_streams += status != 200 or _content_of(answer) != TEXT
            time.sleep(0.2)


def _content_of(stream: bytes) -> str | None:
    """The joined content of a whole stream, None if it has no end."""
    events = stream.decode().split("\n\n")
    if events[-2:] != ["data: [DONE]", ""]:
        return None
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def _teller(bodies: int) -> Callable[[Run], None]:
    """Says on stderr how far the run is and how long the rest takes at this pace."""
    began = told = time.monotonic()

    def tell(so_far: Run) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= TELL_S:
            told, sent = now, sum(so_far.statuses.values())
            rate = sent / (now - began)
            words = f"{sent} of {bodies} bodies, {len(so_far.distinct)} distinct, {rate:.1f}/s, {(bodies - sent) / rate:.0f} s left"
            sys.stderr.write(f"{words}; {len(so_far.server_errors)} server errors, {so_far.bad_streams} streams harmed\n")

    return tell


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--bodies", type=int, default=50_000)
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    started = time.monotonic()
    result = run(chosen.bodies, chosen.seed, _teller(chosen.bodies))
    record = {
        "bodies": sum(result.statuses.values()),
        "distinct": len(result.distinct),
        "seed": chosen.seed,
        "seconds": round(time.monotonic() - started, 1),
        "statuses": {str(status): count for status, count in sorted(result.statuses.items())},
        "server_errors": len(result.server_errors),
        "good_streams_beside": result.good_streams,
        "good_streams_harmed": result.bad_streams,
    }
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    sys.stdout.write(json.dumps(record, indent=1) + "\n" + "\n".join(result.server_errors[:5]) + "\n")
    return 1 if result.server_errors or result.bad_streams else 0


if __name__ == "__main__":
    sys.exit(main())
