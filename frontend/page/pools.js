// The second tab: every pool with its groups, load, KV use, queue, replicas and price, asked anew every two seconds.

const $ = (id) => document.getElementById(id);
const PERIOD_MS = 2000;

function meter(kind, share, text) {
  const box = document.createElement("div");
  const line = document.createElement("div");
  const filled = document.createElement("span");
  line.className = `meter ${kind}`;
  filled.style.width = `${Math.round(100 * Math.min(1, share))}%`;
  line.append(filled);
  box.append(text, line);
  return box;
}

function groupRow(group) {
  const box = document.createElement("div");
  box.className = "group";
  const load = group.load;
  const state = !group.healthy ? "unreachable" : load.draining ? "draining" : "ready";
  const title = document.createElement("div");
  title.className = group.healthy ? "dim" : "unhealthy";
  title.append(`${group.name} \u00b7 ${state}`);
  box.append(title, meter("load", load.running / Math.max(1, group.max_batch), `${load.running} running, ${load.waiting} waiting`));
  const used = load.total_blocks ? 1 - load.free_blocks / load.total_blocks : 0;
  box.append(meter("kv", used, `KV ${(100 * used).toFixed(0)} % of ${load.total_blocks} blocks`));
  return box;
}

function card(pool) {
  const box = document.createElement("div");
  box.className = "card";
  const title = document.createElement("h3");
  const about = document.createElement("span");
  about.className = "dim";
  about.append(`${pool.role} \u00b7 ${pool.layout} \u00b7 ${pool.weights}${pool.draining ? " \u00b7 draining" : ""}`);
  title.append(pool.name, about);
  const facts = document.createElement("div");
  facts.className = "dim";
  const price = (pool.usd_per_gpu_hour * pool.gpus_per_group * pool.groups.length).toFixed(2);
  facts.append(`${pool.groups.length} replica${pool.groups.length === 1 ? "" : "s"} of ${pool.gpus_per_group} GPU \u00b7 $${price}/h`);
  box.append(title, facts);
  if (pool.queue) {
    const queue = document.createElement("div");
    queue.className = "queue-state";
    queue.append(`queue: ${pool.queue.requests} requests, ${pool.queue.prompt_tokens} tokens, ${pool.queue.predicted_wait_s.toFixed(2)} s`);
    box.append(queue);
  }
  box.append(...pool.groups.map(groupRow));
  return box;
}

export class Pools {
  constructor(headers) {
    this.headers = headers;
    this.isShown = false;
    this.found = [];
    this.ask();
  }

  /** Asked at once when the tab opens, then every period while it is open. */
  show(isShown) {
    this.isShown = isShown;
    if (isShown) this.tryRefresh();
  }

  /** Price of one replica [USD per hour] by pool. */
  prices() {
    return new Map(this.found.map((pool) => [pool.name, pool.usd_per_gpu_hour * pool.gpus_per_group]));
  }

  async ask() {
    if (this.isShown || !this.found.length) await this.tryRefresh();
    setTimeout(() => this.ask(), PERIOD_MS);
  }

  async tryRefresh() {
    try {
      await this.refresh();
    } catch (error) {
      $("pools-state").textContent = `no answer: ${error.message}`;
    }
  }

  async refresh() {
    const response = await fetch("/page/loads", { headers: this.headers() });
    const body = await response.json();
    if (!response.ok) throw new Error(body.error.message);
    this.found = body.pools;
    $("pools-state").textContent = `${body.running_requests} requests running`;
    $("pools").replaceChildren(...body.pools.map(card));
  }
}
