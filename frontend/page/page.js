// The page's conversation and its tabs. What is shown of the running request is route.js's, the pools are pools.js's.
import { Live } from "./route.js";
import { Pools } from "./pools.js";

const $ = (id) => document.getElementById(id);
const conversation = [];
let running = null;

export function headers() {
  const key = $("key").value.trim();
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

function add(kind) {
  const box = document.createElement("div");
  box.className = `message ${kind}`;
  $("messages").append(box);
  return box;
}

class Reply {
  constructor() {
    this.message = { role: "assistant", content: "" };
    this.box = add("assistant");
  }

  part(name, tag = "div") {
    this[name] ??= (() => {
      const part = document.createElement(tag);
      part.className = name;
      this.box.append(part);
      return part;
    })();
    return this[name];
  }

  onDelta(delta) {
    const log = $("messages");
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40; // whoever has scrolled back reads there
    if (delta.reasoning_content) {
      this.message.reasoning_content = (this.message.reasoning_content ?? "") + delta.reasoning_content;
      this.part("reasoning").append(delta.reasoning_content);
    }
    if (delta.content) {
      this.message.content += delta.content;
      this.part("content").append(delta.content);
    }
    for (const call of delta.tool_calls ?? []) {
      if (call.function.name) this.part("call").append(`${call.index ? "\n" : ""}\u2192 ${call.function.name} `);
      this.part("call").append(call.function.arguments);
    }
    if (follows) log.scrollTop = log.scrollHeight;
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function ask(text) {
  conversation.push({ role: "user", content: text });
  const said = add("user");
  said.append(text);
  said.scrollIntoView({ block: "nearest" });
  const live = new Live(pools.prices());
  const reply = new Reply();
  running = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  try {
    const body = {
      model: $("model").textContent,
      messages: conversation,
      stream: true,
      stream_options: { include_usage: true },
      reasoning_effort: $("effort").value,
    };
    const wishes = { "x-tandem-include-route": "true", "x-tandem-latency-weight": $("weight").value };
    const response = await fetch("/v1/chat/completions", {
      method: "POST", body: JSON.stringify(body), headers: { ...headers(), ...wishes }, signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.tandem?.route) live.onRoute(event.tandem.route);
      if (event.usage) live.onUsage(event.usage);
      for (const choice of event.choices) {
        live.onChunk(choice.delta);
        reply.onDelta(choice.delta);
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") add("error").append(error.message);
  } finally {
    live.end();
    running = null;
    $("send").hidden = false;
    $("stop").hidden = true;
    if (reply.box.childElementCount) conversation.push(reply.message);
    else reply.box.remove();
  }
}

function show(name) {
  for (const tab of ["chat", "pools"]) {
    $(`view-${tab}`).hidden = tab !== name;
    $(`tab-${tab}`).setAttribute("aria-selected", String(tab === name));
  }
  pools.show(name === "pools");
}

async function start() {
  const response = await fetch("/v1/models", { headers: headers() });
  if (response.status === 401) {
    $("key").hidden = false;
    $("key").onchange = start;
    return;
  }
  if (response.ok) $("model").textContent = (await response.json()).data[0].id;
  else setTimeout(start, 2000);
}

const pools = new Pools(headers);
$("tab-chat").onclick = () => show("chat");
$("tab-pools").onclick = () => show("pools");
$("stop").onclick = () => running?.abort();
$("text").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
};
$("form").onsubmit = (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running || !$("model").textContent) return;
  $("text").value = "";
  ask(text);
};
start();
