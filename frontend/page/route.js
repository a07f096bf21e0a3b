// What is known of the request being served: candidates and scores, timeline, tokens per second, cost so far.

const $ = (id) => document.getElementById(id);
const PHASES = ["queue", "prefill", "transfer", "decode"];

export const ms = (value) => (value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${value.toFixed(value < 10 ? 1 : 0)} ms`);
export const usd = (value) => (value ? `$${value < 1e-3 ? value.toExponential(2) : value.toFixed(4)}` : "$0");

function phasesOf(prediction, decodeMs) {
  return {
    queue: prediction.queue_ms ?? 0,
    prefill: prediction.prefill_ms ?? 0,
    transfer: prediction.transfer_ms ?? 0,
    decode: decodeMs,
  };
}

function bar(title, phases, scaleMs) {
  const row = document.createElement("div");
  row.className = "dim";
  row.append(`${title}: ${ms(PHASES.reduce((sum, name) => sum + phases[name], 0))}`);
  const line = document.createElement("div");
  line.className = "bar";
  for (const name of PHASES) {
    const part = document.createElement("span");
    part.className = name;
    part.style.width = `${(100 * phases[name]) / scaleMs}%`;
    part.title = `${name} ${ms(phases[name])}`;
    line.append(part);
  }
  row.append(line);
  return row;
}

function legend(phases) {
  const list = document.createElement("div");
  list.className = "legend";
  for (const name of PHASES) {
    const entry = document.createElement("span");
    const colour = document.createElement("i");
    colour.className = name;
    entry.append(colour, `${name} ${ms(phases[name])}`);
    list.append(entry);
  }
  return list;
}

export class Live {
  constructor(prices) {
    this.prices = prices;
    this.startedMs = performance.now();
    this.firstMs = null;
    this.lastMs = null;
    this.tokens = 0; // chunks until usage tells the number of tokens
    this.isExact = false;
    this.chosen = null;
    this.expected = 0;
    this.actual = null;
    $("route").tBodies[0].replaceChildren();
    $("timeline").replaceChildren();
    this.timer = setInterval(() => this.draw(), 200);
    this.draw();
  }

  onChunk(delta) {
    if (!delta.content && !delta.reasoning_content && !delta.tool_calls) return;
    this.firstMs ??= performance.now();
    this.lastMs = performance.now();
    this.tokens += 1;
  }

  onUsage(usage) {
    this.tokens = usage.completion_tokens;
    this.isExact = true;
  }

  onRoute(route) {
    this.actual = route.actual ?? null;
    const candidates = route.decision?.candidates ?? [];
    this.expected = route.decision?.expected_output_tokens ?? 0;
    this.chosen = candidates.find((candidate) => candidate.chosen) ?? null;
    $("route").tBodies[0].replaceChildren(...candidates.flatMap(rows));
    this.draw();
  }

  end() {
    clearInterval(this.timer);
    this.draw();
  }

  costSoFar() {
    if (this.actual) return this.actual.cost_usd ?? 0;
    const prediction = this.chosen?.prediction;
    if (!prediction) return null;
    const total = prediction.cost_usd ?? 0;
    const perMs = (this.prices.get(this.chosen.prefill_pool) ?? 0) / 3.6e6;
    const prefill = Math.min(total, perMs * (prediction.prefill_ms ?? 0));
    return prefill + ((total - prefill) * this.tokens) / Math.max(this.expected, 1);
  }

  draw() {
    const waitedMs = (this.firstMs ?? performance.now()) - this.startedMs;
    const spanMs = this.firstMs ? this.lastMs - this.firstMs : 0;
    $("ttft").textContent = this.firstMs ? ms(this.actual?.ttft_ms ?? waitedMs) : `${ms(waitedMs)} \u2026`;
    $("tokens").textContent = `${this.isExact || !this.tokens ? "" : "~"}${this.tokens}`;
    $("speed").textContent = spanMs > 0 ? ((1000 * (this.tokens - 1)) / spanMs).toFixed(1) : "-";
    const cost = this.costSoFar();
    $("cost").textContent = cost === null ? "-" : usd(cost);
    this.drawTimeline(spanMs);
  }

  drawTimeline(spanMs) {
    const prediction = this.chosen?.prediction;
    if (!prediction) return;
    const rows = [["predicted", phasesOf(prediction, (prediction.itl_ms ?? 0) * this.expected)]];
    if (this.actual) rows.push(["took", phasesOf(this.actual, (this.actual.itl_ms ?? 0) * Math.max(this.tokens - 1, 0))]);
    else rows.push(["so far", phasesOf(prediction, spanMs)]);
    const total = (phases) => PHASES.reduce((sum, name) => sum + phases[name], 0);
    const scaleMs = Math.max(1e-6, ...rows.map(([, phases]) => total(phases)));
    $("timeline").replaceChildren(...rows.map(([title, phases]) => bar(title, phases, scaleMs)), legend(rows[1][1]));
  }
}

/** Figures of a candidate, and below them why it won, lost or was out. */
function rows(candidate) {
  const prediction = candidate.prediction;
  const line = document.createElement("tr");
  if (candidate.chosen) line.className = "chosen";
  const cells = [
    candidate.prefill_pool ?? "-",
    candidate.decode_pool || "same",
    prediction ? (prediction.score ?? 0).toExponential(2) : "-",
    prediction ? ms(prediction.ttft_ms ?? 0) : "-",
    prediction ? ms(prediction.itl_ms ?? 0) : "-",
    prediction ? usd(prediction.cost_usd) : "-",
  ];
  for (const text of cells) line.insertCell().append(text);
  if (!candidate.reason) return [line];
  const why = document.createElement("tr");
  why.className = "why";
  const cell = why.insertCell();
  cell.colSpan = cells.length;
  cell.append(candidate.reason);
  return [line, why];
}
