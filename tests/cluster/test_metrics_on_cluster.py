"""Every process of a real cluster exports its part of the catalog, is found through the controller, and counts what happened."""

from __future__ import annotations

import json
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from common.metric_catalog import BY_PROCESS
from common.proto import router_pb2_grpc
from kv_transfer.transports.choose import ON_HOST
from tests.support.local_cluster import LocalCluster, ask, channel_of, request, wait_idle


def get(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=20) as answer:
        return answer.read().decode()


def scrape(cluster: LocalCluster) -> dict[str, list[dict[str, dict[tuple, float]]]]:
    """By process: for each of its targets, family name -> labels -> value."""
    found: dict[str, list] = {}
    for target in json.loads(get(cluster.metrics, "/targets")):
        families = text_string_to_metric_families(get(target["targets"][0], "/metrics"))
        own = {f.name: {(s.name, frozenset(s.labels.values())): s.value for s in f.samples} for f in families}
        found.setdefault(target["labels"]["process"], []).append(own)
    return found


def total(targets: list[dict], family: str, *labels: str) -> float:
    return sum(v for own in targets for key, v in own[family].items() if key[1] == set(labels))


async def test_each_process_exports_exactly_its_catalog_and_requests_move_it(local_cluster: LocalCluster):
    async with channel_of(local_cluster) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        before = scrape(local_cluster)
        answer = await ask(stub, request(list(range(1, 41)), max_tokens=12))
        await wait_idle(stub, 20)
    after = scrape(local_cluster)
    assert {process: len(targets) for process, targets in after.items()} == {"controller": 1, "router": 1, "prefill": 2, "decode": 1}
    for process, targets in after.items():
        for own in targets:
            exported = {name for name in own if name.startswith("tandem_")}
            assert exported == {d.name.removesuffix("_total") for d in BY_PROCESS[process]}

    def grew(process: str, family: str, *labels: str) -> float:
        return total(after[process], family, *labels) - total(before[process], family, *labels)

    assert len(answer.tokens) == 12
    assert grew("router", "tandem_output_tokens") == 12
    assert grew("router", "tandem_requests", "ok", "length") == 1
    assert sum(grew("router", "tandem_prompt_tokens", pool) for pool in ("prefill-tp1", "prefill-tp2")) == 40
    assert grew("decode", "tandem_decode_tokens", "decode-ep4") == 11, "the first token is the prefill group's"
    assert grew("decode", "tandem_reservations", "decode-ep4", "committed") == 1
    pool = next(p for p in ("prefill-tp1", "prefill-tp2") if grew("prefill", "tandem_transfers", p, "committed"))
    assert grew("prefill", "tandem_prefill_tokens", pool) == 40
    assert sum(grew("prefill", "tandem_transfer_bytes", pool, transport) for transport in ON_HOST) > 0, "over what was measured fastest"
    assert grew("router", "tandem_cost_usd", pool, "prefill") > 0
    assert grew("router", "tandem_cost_usd", "decode-ep4", "decode") > 0
    assert total(after["decode"], "tandem_leases", "decode-ep4") == 0
    assert total(after["controller"], "tandem_groups", "decode-ep4", "decode", "ready") == 1
    assert total(after["controller"], "tandem_pool_usd_per_hour", "decode-ep4", "decode") == 4 * 3.0
