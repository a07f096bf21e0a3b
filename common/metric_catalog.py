"""Every metric that Tandem exports, by the process that exports it. Names are the contract with dashboards, alerts and `docs/metrics.md`.

Base units (seconds, bytes, dollars); labels name pools, outcomes and other small sets, never requests or clients. Groups are told apart by
the scrape target, so that a replaced group leaves no series behind.
"""

from __future__ import annotations

from common.metrics import Definition


def _log(first: float, last: float, per_decade: tuple[float, ...] = (1, 2, 5)) -> tuple[float, ...]:
    """Bucket bounds from `first` to `last`, evenly spread over each decade."""
    bounds: list[float] = []
    power = -6
    while 10.0**power <= last:
        bounds += [float(f"{step * 10.0**power:.6g}") for step in per_decade]
        power += 1
    return tuple(b for b in bounds if first <= b <= last)


_LATENCY_S = _log(0.005, 100, (1, 1.5, 2, 3, 5, 7))
_SHORT_S = _log(0.0002, 5, (1, 1.5, 2, 3, 5, 7))
_RATIOS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
_BYTES_PER_S = _log(1e6, 1e12)


# -- router --------------------------------------------------------------------------------------------------------------------------------

REQUESTS = Definition(
    "tandem_requests_total", "counter", "Generate calls that ended, by outcome (ok, refused, cancelled, failed) and reason "
    "(stop or length, else the gRPC status in lower case)", ("outcome", "reason"),
)  # fmt: skip
RUNNING = Definition("tandem_running_requests", "gauge", "Generate calls in progress")
TTFT = Definition("tandem_ttft_seconds", "histogram", "from arrival at the router to the first token", ("prefill_pool",), _LATENCY_S)
TPOT = Definition(
    "tandem_tpot_seconds", "histogram", "mean time per output token after the first, hand-over left out", ("decode_pool",), _SHORT_S
)
E2E = Definition(
    "tandem_e2e_seconds", "histogram", "from arrival at the router to the last token", ("prefill_pool", "decode_pool"), _LATENCY_S
)
QUEUE_WAIT = Definition(
    "tandem_queue_wait_seconds", "histogram", "from arrival until a prefill group started", ("prefill_pool",), _LATENCY_S
)
PROMPT_TOKENS = Definition("tandem_prompt_tokens_total", "counter", "prompt tokens of finished choices", ("prefill_pool",))
OUTPUT_TOKENS = Definition("tandem_output_tokens_total", "counter", "tokens handed to clients, as they come")
ATTEMPTS = Definition("tandem_attempts_total", "counter", "attempts of finished choices; above tandem_choices_total: retries")
CHOICES = Definition("tandem_choices_total", "counter", "choices that finished", ("prefill_pool", "decode_pool"))
PREDICTION_RATIO = Definition(
    "tandem_prediction_ratio", "histogram", "what a finished choice took over what was predicted when its pools were chosen (1 = exact)",
    ("pool", "quantity"), _RATIOS,
)  # fmt: skip
COST = Definition("tandem_cost_usd_total", "counter", "cost of finished choices, by the pool that earned it [dollars]", ("pool", "role"))
QUEUED = Definition("tandem_queue_requests", "gauge", "requests that wait for a prefill group", ("pool",))
QUEUED_TOKENS = Definition("tandem_queue_prompt_tokens", "gauge", "prompt tokens that wait for a prefill group", ("pool",))
PREDICTED_WAIT = Definition("tandem_queue_predicted_wait_seconds", "gauge", "predicted wait of the next request", ("pool",))
ROUTER_GROUPS = Definition(
    "tandem_router_groups", "gauge", "groups as this router sees them (ready, draining, unreachable)", ("pool", "role", "state")
)
POOL_OPEN = Definition("tandem_pool_open", "gauge", "1 while an operator lets the pool take new requests", ("pool",))

ROUTER = (
    REQUESTS, RUNNING, TTFT, TPOT, E2E, QUEUE_WAIT, PROMPT_TOKENS, OUTPUT_TOKENS, ATTEMPTS, CHOICES, PREDICTION_RATIO, COST, QUEUED,
    QUEUED_TOKENS, PREDICTED_WAIT, ROUTER_GROUPS, POOL_OPEN,
)  # fmt: skip

# -- leaders of groups ---------------------------------------------------------------------------------------------------------------------

GROUP_RUNNING = Definition("tandem_group_running_requests", "gauge", "requests that the group computes now", ("pool", "role"))
GROUP_WAITING = Definition(
    "tandem_group_waiting_requests", "gauge", "requests that the group holds and does not compute yet", ("pool", "role")
)
KV_BLOCKS = Definition(
    "tandem_kv_blocks", "gauge", "KV blocks, by layer kind (full, sliding) and state (free, used)", ("pool", "role", "kind", "state")
)
CONTEXT_TOKENS = Definition("tandem_context_tokens", "gauge", "tokens of context that the group's requests hold", ("pool", "role"))
DRAINING = Definition("tandem_group_draining", "gauge", "1 while the group takes no new work", ("pool", "role"))
_GROUP = (GROUP_RUNNING, GROUP_WAITING, KV_BLOCKS, CONTEXT_TOKENS, DRAINING)

PREFILL_SECONDS = Definition(
    "tandem_prefill_seconds", "histogram", "compute of one prompt, first chunk to sampled token", ("pool",), _LATENCY_S
)
PREFILL_TOKENS = Definition("tandem_prefill_tokens_total", "counter", "tokens prefilled, tokens of resumed outputs included", ("pool",))
TRANSFERS = Definition(
    "tandem_transfers_total", "counter", "hand-overs that ended, by outcome (committed, abandoned, failed)", ("pool", "outcome")
)
HANDOVER_SECONDS = Definition(
    "tandem_handover_seconds", "histogram", "from the first token to the acknowledged commit", ("pool",), _SHORT_S
)
TRANSFER_BYTES = Definition("tandem_transfer_bytes_total", "counter", "KV bytes written by the ranks of this group", ("pool", "transport"))
TRANSFER_SECONDS = Definition(
    "tandem_transfer_write_seconds_total", "counter", "time that the ranks' transfer threads spent writing", ("pool", "transport")
)
TRANSFER_RATE = Definition(
    "tandem_transfer_bytes_per_second", "histogram", "bytes over writing time, per rank and transfer", ("pool", "transport"), _BYTES_PER_S
)

PREFILL = (
    *_GROUP, PREFILL_SECONDS, PREFILL_TOKENS, TRANSFERS, HANDOVER_SECONDS, TRANSFER_BYTES, TRANSFER_SECONDS, TRANSFER_RATE,
)  # fmt: skip

STEP_SECONDS = Definition("tandem_step_seconds", "histogram", "one decode step, plan to sampled tokens", ("pool",), _SHORT_S)
OPERATIONS_SECONDS = Definition(
    "tandem_operations_seconds", "histogram", "grants, checks and revocations of one turn while sequences run: the most that an admission "
    "can have held their next step up", ("pool",), _log(0.00005, 1),
)  # fmt: skip
ITL = Definition("tandem_itl_seconds", "histogram", "gap between two tokens of a sequence, at the decode group", ("pool",), _SHORT_S)
DECODE_TOKENS = Definition("tandem_decode_tokens_total", "counter", "tokens sampled by decode steps", ("pool",))
LEASES = Definition("tandem_leases", "gauge", "reservations that are neither committed nor freed", ("pool",))
RESERVATIONS = Definition(
    "tandem_reservations_total", "counter", "reservations by what became of them (granted, refused, committed, failed, released, fenced)",
    ("pool", "outcome"),
)  # fmt: skip
ABORTS = Definition(
    "tandem_aborts_total", "counter", "requests ended before their last token, by gRPC status in lower case", ("pool", "reason")
)
TRANSFER_MESSAGES = Definition(
    "tandem_transfer_messages_total", "counter", "tcp transfer messages that this leader's rank received, by verdict", ("pool", "verdict")
)

DECODE = (*_GROUP, STEP_SECONDS, OPERATIONS_SECONDS, ITL, DECODE_TOKENS, LEASES, RESERVATIONS, ABORTS, TRANSFER_MESSAGES)

# -- controller ----------------------------------------------------------------------------------------------------------------------------

GROUPS = Definition("tandem_groups", "gauge", "groups by state (placing, loading, ready, stopping)", ("pool", "role", "state"))
WANTED_GROUPS = Definition("tandem_groups_wanted", "gauge", "groups that the controller keeps running", ("pool",))
GROUP_STARTS = Definition("tandem_group_starts_total", "counter", "groups launched", ("pool",))
GROUP_FAILURES = Definition(
    "tandem_group_failures_total", "counter", "groups that ended without being asked to, by the state they were in", ("pool", "state")
)
POOL_GPUS = Definition("tandem_pool_gpus", "gauge", "GPUs (ranks) that the pool's groups hold", ("pool", "role"))
POOL_PRICE = Definition("tandem_pool_usd_per_hour", "gauge", "what the pool's groups cost now [dollars per hour]", ("pool", "role"))
SCALING = Definition(
    "tandem_autoscaler_decisions_total", "counter", "changes of a pool's wanted groups, by direction (up, down) and reason",
    ("pool", "direction", "reason"),
)  # fmt: skip

CONTROLLER = (GROUPS, WANTED_GROUPS, GROUP_STARTS, GROUP_FAILURES, POOL_GPUS, POOL_PRICE, SCALING)

# -- frontend ------------------------------------------------------------------------------------------------------------------------------

HTTP_REQUESTS = Definition("tandem_frontend_requests_total", "counter", "HTTP requests by path and status", ("path", "status"))
HTTP_RUNNING = Definition("tandem_frontend_running_requests", "gauge", "requests being generated")
HTTP_TTFT = Definition("tandem_frontend_ttft_seconds", "histogram", "accepted to first token", (), _LATENCY_S)
HTTP_RENDER = Definition("tandem_frontend_render_seconds", "histogram", "rendering one prompt to ids", (), _SHORT_S)
HTTP_PROMPT_TOKENS = Definition("tandem_frontend_prompt_tokens_total", "counter", "rendered prompt tokens")
HTTP_OUTPUT_TOKENS = Definition("tandem_frontend_output_tokens_total", "counter", "tokens received from the router")
HARMONY_REPAIRS = Definition("tandem_frontend_harmony_repairs_total", "counter", "malformed output that was mended", ("kind",))
CONTENT_MISSING = Definition("tandem_frontend_content_missing_total", "counter", "replies with tokens but neither content nor a call")
DISCONNECTS = Definition("tandem_frontend_client_disconnects_total", "counter", "clients gone before the end")

FRONTEND = (
    HTTP_REQUESTS, HTTP_RUNNING, HTTP_TTFT, HTTP_RENDER, HTTP_PROMPT_TOKENS, HTTP_OUTPUT_TOKENS, HARMONY_REPAIRS, CONTENT_MISSING,
    DISCONNECTS,
)  # fmt: skip

BY_PROCESS: dict[str, tuple[Definition, ...]] = {
    "router": ROUTER,
    "prefill": PREFILL,
    "decode": DECODE,
    "controller": CONTROLLER,
    "frontend": FRONTEND,
}
