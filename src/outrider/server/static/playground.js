"use strict";

const byId = (id) => document.getElementById(id);
const PERIOD_MS = 250; // of the speed chart
let stopper = null;

function headers() {
  const key = byId("key").value.trim();
  const base = { "Content-Type": "application/json" };
  return key ? { ...base, Authorization: `Bearer ${key}` } : base;
}

// What the server says of its drafter, in one line.
async function showStatus() {
  try {
    const answer = await fetch("/v1/speculation", { headers: headers() });
    const now = await answer.json();
    if (!answer.ok) throw new Error(now.error.message);
    const drafting = now.active ? `drafting with ${now.drafter}, ${now.num_speculative_tokens} tokens a cycle` : `not drafting: ${now.reason ?? now.status}`;
    const mean = now.acceptance ? `; ${now.acceptance.mean_acceptance_length.toFixed(2)} tokens a cycle so far` : "";
    byId("status").textContent = `${now.status}, ${drafting}${mean}`;
  } catch (error) {
    byId("status").textContent = String(error.message ?? error);
  }
}

function requestBody(isChat) {
  const prompt = byId("prompt").value;
  return {
    ...(isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    temperature: Number(byId("temperature").value),
    max_tokens: Number(byId("max-tokens").value),
    stream: true,
    stream_options: { include_usage: true, include_draft_marks: true },
    speculative: { enabled: byId("draft").checked },
  };
}

// Adds text to the answer, accepted drafts marked wherever the tokens spell the text that was sent.
function show(text, marks, kind) {
  if (!text) return;
  const tokens = marks ? marks.tokens : [];
  const spelled = tokens.join("") === text;
  const parts = spelled ? tokens : [text];
  const numDrafted = spelled ? marks.accepted : marks && marks.accepted === tokens.length ? 1 : 0;
  parts.forEach((part, index) => {
    const span = document.createElement("span");
    span.textContent = part;
    span.className = [kind, index < numDrafted ? "drafted" : ""].join(" ").trim();
    byId("answer").append(span);
  });
}

// What one run has brought; drawn after every event.
class Run {
  constructor() {
    this.startMs = performance.now();
    this.firstMs = null;
    this.numTokens = 0;
    this.cycles = []; // {accepted, own} of each chunk
    this.arrivals = []; // [ms since start, tokens]
  }

  note(marks) {
    const nowMs = performance.now() - this.startMs;
    this.firstMs ??= nowMs;
    this.numTokens += marks.tokens.length;
    this.arrivals.push([nowMs, marks.tokens.length]);
    this.cycles.push({ accepted: marks.accepted, own: marks.tokens.length - marks.accepted });
    this.draw();
  }

  // Tokens per second in each period since the start.
  speeds() {
    const periods = Array(Math.floor(this.arrivals.at(-1)[0] / PERIOD_MS) + 1).fill(0);
    for (const [ms, count] of this.arrivals) periods[Math.floor(ms / PERIOD_MS)] += count;
    return periods.map((count) => (count * 1000) / PERIOD_MS);
  }

  draw() {
    drawBars(byId("speed"), this.speeds().map((speed) => [[speed, "--bar"]]));
    drawBars(byId("acceptance"), this.cycles.slice(-120).map((cycle) => [[cycle.accepted, "--bar"], [cycle.own, "--own"]]));
    byId("figures").textContent = this.figures();
  }

  figures() {
    const seconds = (this.arrivals.at(-1)[0] - this.firstMs) / 1000;
    const speed = seconds > 0 ? ((this.numTokens - 1) / seconds).toFixed(1) : "–";
    const mean = (this.numTokens / this.cycles.length).toFixed(2);
    return `${this.numTokens} tokens, ${speed} tokens/s, first after ${(this.firstMs / 1000).toFixed(2)} s, ${mean} tokens a cycle`;
  }
}

// Stacked bars, one column for each list of [value, colour]; the largest column fills the height.
function drawBars(canvas, columns) {
  const context = canvas.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const top = Math.max(1, ...columns.map((column) => column.reduce((sum, [value]) => sum + value, 0)));
  const width = Math.min(24, canvas.width / columns.length);
  context.clearRect(0, 0, canvas.width, canvas.height);
  columns.forEach((column, index) => {
    let base = canvas.height;
    for (const [value, colour] of column) {
      const height = (value / top) * (canvas.height - 18);
      context.fillStyle = style.getPropertyValue(colour);
      context.fillRect(index * width, base - height, Math.max(1, width - 1), height);
      base -= height;
    }
  });
  context.fillStyle = style.getPropertyValue("--ink");
  context.font = "12px system-ui, sans-serif";
  context.fillText(top.toFixed(top < 10 ? 1 : 0), 4, 12);
}

function take(event, run) {
  if (event.error) throw new Error(event.error.message);
  const choice = event.choices[0];
  if (event.outrider) run.note(event.outrider);
  if (!choice) return;
  show(choice.delta?.reasoning, event.outrider, "thought");
  show(choice.delta?.content ?? choice.text, event.outrider, "");
}

async function generate() {
  const isChat = new FormData(byId("form")).get("kind") === "chat";
  const path = isChat ? "/v1/chat/completions" : "/v1/completions";
  const run = new Run();
  const reader = new EventReader();
  const options = { method: "POST", headers: headers(), body: JSON.stringify(requestBody(isChat)), signal: stopper.signal };
  const answer = await fetch(path, options);
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const bytes = answer.body.getReader();
  for (let isDone = false; !isDone; ) {
    const { value, done } = await bytes.read();
    isDone = done;
    for (const data of done ? reader.finish() : reader.push(value)) {
      if (data !== "[DONE]") take(JSON.parse(data), run);
    }
  }
}

async function submit(submission) {
  submission?.preventDefault();
  stopper = new AbortController();
  byId("answer").replaceChildren();
  byId("run").disabled = true;
  byId("stop").disabled = false;
  try {
    await generate();
  } catch (error) {
    if (error.name !== "AbortError") show(`\n${error.message}`, null, "error");
  }
  byId("run").disabled = false;
  byId("stop").disabled = true;

  await showStatus();
}

byId("form").addEventListener("submit", submit);
byId("stop").addEventListener("click", () => stopper?.abort());
byId("key").addEventListener("change", showStatus);
showStatus();
