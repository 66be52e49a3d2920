// The page of `quire serve`: a chat, and the live map of pages. Nothing is loaded from elsewhere.
//
//   ask()      one question of the chat, streamed from /v1/chat/completions, beside others that run
//   several()  four questions at once, which share their prefix
//   watch()    frames of /live, drawn as squares and as a table of requests

const $ = (id) => document.getElementById(id);
const QUESTIONS = [
  "What is a library?",
  "Why is the sky blue?",
  "How does a bicycle stay upright?",
  "What do bees do in winter?",
];
const SYSTEM = "You are a helpful assistant. Answer in two or three plain sentences. " +
  "Say so if you do not know something. Do not repeat the question.";

let model = null;
let turns = [];
let running = new Set();
let firstTokens = [];
let frame = null;
let marked = null;

// --- asking

function headers() {
  const key = sessionStorage.getItem("key");
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

// What an error says. Fetch has a TypeError, in words of the browser's own, if nobody answers.
function said(error) {
  return error instanceof TypeError ? "The server is gone. If it comes back, this page goes on." : error.message;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function refused(response) {
  if (response.status === 401) {
    if ($("key").hidden) {
      $("key").hidden = false;
      $("secret").focus();
    }
  }
  const body = await response.json().catch(() => ({}));
  return body.error?.message ?? `The server says ${response.status}.`;
}

// Stream an answer into an element. Returns what came of its text, and whether it failed.
async function answer(messages, element, note) {
  const stop = new AbortController();
  running.add(stop);
  buttons();
  const began = performance.now();
  let text = "", tokens = 0;
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), signal: stop.signal,
      body: JSON.stringify({
        model, messages, stream: true, stream_options: { include_usage: true },
        temperature: 0.7, top_p: 0.9, max_tokens: 256,
      }),
    });
    if (!response.ok) throw new Error(await refused(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const piece = event.choices[0]?.delta?.content;
      if (piece) {
        if (!text) first(performance.now() - began);
        text += piece;
        element.textContent = text;
        scroll();
      }
      if (event.usage) {
        tokens = event.usage.completion_tokens;
        const seconds = (performance.now() - began) / 1000;
        const found = event.usage.prompt_tokens_details.cached_tokens;
        note.textContent = `${tokens} tokens in ${seconds.toFixed(1)} s, ` +
          `${found} of ${event.usage.prompt_tokens} prompt tokens from the cache`;
      }
    }
    return { text };
  } catch (error) {
    const failed = error.name !== "AbortError";
    note.textContent = failed ? said(error) : "stopped";
    note.classList.toggle("failed", failed);
    return { text, failed };
  } finally {
    element.textContent = text;
    running.delete(stop);
    buttons();
  }
}

function first(milliseconds) {
  firstTokens = [...firstTokens.slice(-7), milliseconds];
  const sorted = [...firstTokens].sort((a, b) => a - b);
  $("first").textContent = `${Math.round(sorted[sorted.length >> 1])} ms`;
}

function add(role, text = "") {
  $("messages").querySelector(".empty")?.remove();
  const item = document.createElement("li");
  item.className = role;
  const content = document.createElement("span");
  content.textContent = text;
  const note = document.createElement("small");
  item.append(content, note);
  $("messages").append(item);
  scroll(true);
  return [content, note];
}

function scroll(always = false) {
  const list = $("messages");
  const near = list.scrollHeight - list.scrollTop - list.clientHeight < 120;
  if (always || near) list.scrollTop = list.scrollHeight;
}

// A question knows the turns before it that have an answer: not those still written, or without a word.
async function ask() {
  const question = $("question").value.trim();
  if (!question || !model) return;
  $("question").value = "";
  add("user", question);
  const earlier = turns.filter((turn) => turn.text && !turn.failed).flatMap((turn) => [
    { role: "user", content: turn.question }, { role: "assistant", content: turn.text },
  ]);
  const turn = { question };
  turns.push(turn);
  const messages = [{ role: "system", content: SYSTEM }, ...earlier, { role: "user", content: question }];
  Object.assign(turn, await answer(messages, ...add("assistant", "…")));
  if (turn.failed) $("question").value ||= question;
}

async function several() {
  if (!model) return;
  $("messages").querySelector(".empty")?.remove();
  const group = document.createElement("li");
  group.className = "group";
  $("messages").append(group);
  await Promise.all(QUESTIONS.map((question) => {
    const box = document.createElement("div");
    const title = document.createElement("b");
    title.textContent = question;
    const content = document.createElement("span");
    content.textContent = "…";
    const note = document.createElement("small");
    box.append(title, content, note);
    group.append(box);
    scroll(true);
    const messages = [{ role: "system", content: SYSTEM }, { role: "user", content: question }];
    return answer(messages, content, note);
  }));
}

function buttons() {
  const busy = running.size > 0;
  $("send").disabled = $("several").disabled = !model;
  $("stop").disabled = !busy;
}

function stopAll() {
  for (const each of running) each.abort();
}

function clear() {
  stopAll();
  turns = [];
  $("messages").replaceChildren();
  greet();
}

function greet() {
  const empty = document.createElement("li");
  empty.className = "empty";
  empty.textContent = "Ask something, and more while it is answered. Or send four questions at once, " +
    "and watch them share the pages of their prefix.";
  $("messages").append(empty);
}

// --- the map

const FREE = -1, KEPT = -2, SHARED = -3;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const hue = (number) => `hsl(${(number * 137.5 + 205) % 360} 65% ${colour("--light")})`;

function draw() {
  const canvas = $("map");
  if (!frame) return;
  const owners = frame.owners, count = Math.max(owners.length, 1);
  const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
  const cell = count > 1600 ? 8 : count > 500 ? 11 : count > 120 ? 16 : 24;
  const columns = Math.max(1, Math.floor(width / cell));
  const height = Math.ceil(count / columns) * cell;
  canvas.style.height = `${height}px`;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const paint = canvas.getContext("2d");
  paint.scale(ratio, ratio);
  const fixed = { [FREE]: colour("--free"), [KEPT]: colour("--kept"), [SHARED]: colour("--shared") };
  const mine = marked === null ? null : new Set(frame.answers.find((each) => each.number === marked)?.pages);
  owners.forEach((owner, page) => {
    paint.globalAlpha = mine === null || mine.has(page) ? 1 : 0.25;
    paint.fillStyle = fixed[owner] ?? hue(owner);
    paint.fillRect((page % columns) * cell + 1, Math.floor(page / columns) * cell + 1, cell - 2, cell - 2);
  });
  const held = owners.filter((owner) => owner >= 0).length;
  const shared = owners.filter((owner) => owner === SHARED).length;
  const kept = owners.filter((owner) => owner === KEPT).length;
  const text = `${owners.length} so far, ${frame.page_size} tokens each: ${held} held by one request, ` +
    `${shared} shared, ${kept} kept`;
  $("summary").textContent = text;
  canvas.setAttribute("aria-label", `Pages of the cache: ${text}`);
}

// Rows are in the order of their numbers, so that none is ever moved: one that is would lose the focus.
function table(preempted) {
  const body = $("requests").tBodies[0];
  const answers = [...frame.answers].sort((one, other) => one.number - other.number);
  const present = new Set(answers.map((each) => each.number));
  for (const row of [...body.rows]) {
    if (!present.has(Number(row.dataset.number))) row.remove();
  }
  answers.forEach((each, place) => {
    let row = body.rows[place];
    if (Number(row?.dataset.number) !== each.number) {
      row = newRow(each.number);
      body.insertBefore(row, body.rows[place] ?? null);
    }
    const values = [null, each.state, each.num_prompt, each.num_cached, each.num_tokens, each.pages.length];
    values.forEach((value, place) => { if (place) row.cells[place].textContent = value; });
    row.classList.toggle("preempted", each.state === "preempted" || preempted.includes(each.number));
  });
  $("idle").hidden = answers.length > 0;
}

function newRow(number) {
  const row = document.createElement("tr");
  row.dataset.number = number;
  row.tabIndex = 0;
  for (let place = 0; place < 6; place++) row.insertCell();
  const chip = document.createElement("i");
  chip.style.background = hue(number);
  row.cells[0].append(chip, `#${number}`);
  const mark = (value) => () => { marked = value; draw(); };
  row.addEventListener("mouseenter", mark(number));
  row.addEventListener("mouseleave", mark(null));
  row.addEventListener("focus", mark(number));
  row.addEventListener("blur", mark(null));
  return row;
}

let before = null;

function figures() {
  const now = performance.now(), counts = frame.counts;
  if (before && now - before.at > 900) {
    const rate = (counts.output_tokens - before.tokens) / ((now - before.at) / 1000);
    $("rate").textContent = rate.toFixed(rate < 10 ? 1 : 0);
    before = { at: now, tokens: counts.output_tokens };
  }
  before ??= { at: now, tokens: counts.output_tokens };
  const read = counts.prompt_tokens + counts.cached_tokens;
  $("cached").textContent = read ? `${Math.round((100 * counts.cached_tokens) / read)} %` : "–";
  $("preempted").textContent = counts.preempted;
}

let watching = null;

// A server of several processes has a map for each: a list chooses which one is shown.
function replicas(count) {
  const list = $("replica");
  if (list.options.length !== count) {
    list.replaceChildren(...Array.from({ length: count }, (_, place) => new Option(`replica ${place}`, place)));
  }
  list.hidden = count < 2;
}

async function watch() {
  for (;;) {
    try {
      watching = new AbortController();
      const place = $("replica").value || "0";
      const response = await fetch(`/live?replica=${place}`, { headers: headers(), signal: watching.signal });
      if (!response.ok) throw new Error(await refused(response));
      if (!model) await name();
      replicas(Number(response.headers.get("x-replicas") ?? 1));
      for await (const next of events(response)) {
        if (next.error) throw new Error(next.error.message);
        frame = next;
        document.body.classList.remove("stale");
        if (marked !== null && !frame.answers.some((each) => each.number === marked)) marked = null;
        draw();
        table(frame.preempted);
        figures();
      }
    } catch (error) {
      if (error.name === "AbortError") continue;
      lost(error);
    }
    await new Promise((wake) => setTimeout(wake, 1500));
  }
}

// The map is no longer that of now. If the server is gone, nothing can be asked until it is back.
function lost(error) {
  frame = null;
  document.body.classList.add("stale");
  $("summary").textContent = said(error);
  if (error instanceof TypeError) model = null;
  if (!model) $("model").textContent = said(error);
  buttons();
}

async function name() {
  const response = await fetch("/v1/models", { headers: headers() });
  if (!response.ok) return;
  model = (await response.json()).data[0].id;
  $("model").textContent = model;
  buttons();
}

// --- the keyboard and the rest

$("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask();
  }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") stopAll(); });
$("replica").addEventListener("change", () => { before = null; watching?.abort(); });
$("several").addEventListener("click", several);
$("stop").addEventListener("click", stopAll);
$("clear").addEventListener("click", clear);
$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("secret").value);
  $("key").hidden = true;
  name();
});
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
setInterval(() => { if (frame) figures(); }, 1000);

greet();
buttons();
name();
watch();
