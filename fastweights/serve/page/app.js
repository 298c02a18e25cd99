// The page of `fastweights serve`: chat over /v1/responses.
//
// A conversation is a tree of turns. A turn is one message and its answer; `parent` is the turn that it continues. The
// server keeps the state after each answer under `responseId`, so a fork only names the id of another turn. Trees are
// kept in localStorage, one item a conversation.

const $ = (id) => document.getElementById(id);

// ---------------------------------------------------------------------------------------------------- Formats

const number = new Intl.NumberFormat("en-US");

function bytes(count) {
  if (count < 1000) return `${count} B`;
  const units = ["kB", "MB", "GB", "TB"];
  const power = Math.min(Math.floor(Math.log10(count) / 3), units.length);
  return `${(count / 1000 ** power).toPrecision(3)} ${units[power - 1]}`;
}

function duration(ms) {
  if (ms >= 1000) return `${(ms / 1000).toPrecision(3)} s`;
  return `${ms >= 100 ? Math.round(ms) : ms.toPrecision(2)} ms`;
}

const times = (ratio) => number.format(ratio < 10 ? Number(ratio.toPrecision(2)) : Math.round(ratio));
const plural = (count, word) => `${number.format(count)} ${word}${count === 1 ? "" : "s"}`;

function snippet(text, length = 60) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > length ? `${line.slice(0, length - 1)}…` : line;
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

// ------------------------------------------------------------------------------------------- Kept in this browser

const PREFIX = "fastweights:";
const CONVERSATION = `${PREFIX}conversation:`;
const DEFAULTS = { temperature: 0.7, topP: 0.95, maxTokens: 256, system: "" };

function stored(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + key)) ?? otherwise;
  } catch {
    return otherwise; // not written by this page
  }
}

function store(key, value) {
  try {
    localStorage.setItem(PREFIX + key, JSON.stringify(value));
  } catch {
    notify("This browser’s storage is full: delete old conversations, or new messages are lost with the page.");
  }
}

const settings = { ...DEFAULTS, ...stored("settings", {}) };
const conversations = new Map();
let conversation = null; // the one shown; not stored before its first message

const newId = () => `${Date.now()}-${Math.random().toString(36).slice(2, 10)}`;

function newConversation() {
  return { id: newId(), system: settings.system, leaf: null, turns: {} };
}

function saveConversation(saved) {
  saved.changed = Date.now();
  conversations.set(saved.id, saved);
  store(`conversation:${saved.id}`, saved);
}

function readConversations() {
  for (const key of Object.keys(localStorage).filter((name) => name.startsWith(CONVERSATION))) {
    const found = stored(key.slice(PREFIX.length), null);
    if (!found?.turns) continue;
    for (const turn of Object.values(found.turns)) {
      if (turn.status === "writing") turn.status = "stopped"; // the page was closed meanwhile
    }
    conversations.set(found.id, found);
  }
}

/** Takes over what another tab has written into a conversation. */
function followOtherTab({ key, newValue }) {
  if (!key?.startsWith(CONVERSATION)) return;
  const id = key.slice(CONVERSATION.length);
  const known = conversations.get(id);
  if (newValue === null) conversations.delete(id);
  else if (!known) conversations.set(id, JSON.parse(newValue));
  else {
    for (const turn of Object.values(JSON.parse(newValue).turns)) {
      if (!writing.has(turn.id)) known.turns[turn.id] = turn;
    }
  }
  if (newValue === null && id === conversation.id) open(newConversation());
  else show();
}

// --------------------------------------------------------------------------------------------------- The server

const BROKEN_OFF = "The connection ended before the answer was complete.";
let info = null; // of /v1/info

/** An error in words for the user. `lost`: the server does not hold the state that the request continues. */
class Failure extends Error {
  constructor(message, { lost = false } = {}) {
    super(message);
    this.lost = lost;
  }
}

const apiKey = {
  get: () => sessionStorage.getItem(`${PREFIX}key`) ?? "",
  set: (key) => (key ? sessionStorage.setItem(`${PREFIX}key`, key) : sessionStorage.removeItem(`${PREFIX}key`)),
};

async function request(path, options = {}) {
  for (;;) {
    const key = apiKey.get();
    const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure("The server cannot be reached. Check that it still runs and that you are connected.");
    }
    if (response.ok) return response;
    if (response.status !== 401) throw await failure(response);
    if (apiKey.get() === key && !(await askForKey(key))) throw new Failure("This server needs an API key.");
  }
}

async function failure(response) {
  const { error = {} } = await response.json().catch(() => ({}));
  const wait = Number(response.headers.get("Retry-After"));
  switch (true) {
    case response.status === 429:
      return new Failure(`The server is busy. Try again in ${plural(wait || 1, "second")}.`);
    case response.status === 404 || error.param === "previous_response_id":
      return new Failure("The server no longer has this part of the conversation: it was deleted or has expired.", {
        lost: true,
      });
    case response.status === 413:
      return new Failure("This is more than the server accepts at once.");
    case response.status === 503:
      return new Failure("The server is shutting down. Try again when it is back.");
    default:
      return new Failure(error.message || `The server answered with error ${response.status}.`);
  }
}

let askingForKey = null; // requests that fail together ask once

function askForKey(refused) {
  $("ask-key-text").textContent = refused ? "The server refused the key that you gave." : "";
  askingForKey ??= askDialog($("ask-key")).then((given) => {
    askingForKey = null;
    if (given) apiKey.set($("asked-key").value);
    $("asked-key").value = "";
    return given;
  });
  return askingForKey;
}

/** The events of a stream, in lists: all that arrived at once. */
async function* eventLists(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split(/\r?\n\r?\n/);
    rest = blocks.pop();
    yield blocks.map(eventData).filter(Boolean);
  }
}

function eventData(block) {
  const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  const data = lines.map((line) => line.slice(5).trimStart()).join("\n");
  return data && data !== "[DONE]" ? JSON.parse(data) : null;
}

async function loadInfo() {
  info = await (await request("/v1/info")).json();
  $("model").textContent = info.model;
  $("empty-text").textContent = `However long it gets, its memory stays at ${bytes(info.state_bytes)}.`;
  $("plain-text").hidden = info.chat_template;
  drawMeter();
}

// -------------------------------------------------------------------------------------------------- Conversations

const writing = new Map(); // id of a turn that this tab has written → { owner: its conversation, controller }

/** The turns from the first one to `id`. */
function pathTo(id, turns = conversation.turns) {
  const path = [];
  for (let turn = turns[id]; turn; turn = turns[turn.parent]) path.unshift(turn);
  return path;
}

function childrenOf(id) {
  return Object.values(conversation.turns).filter((turn) => turn.parent === id).sort((a, b) => a.at - b.at);
}

/** The turn that a new message continues: one without an answer cannot be continued. */
function continuable(id) {
  let turn = conversation.turns[id];
  while (turn && !turn.responseId && !turn.answer) turn = conversation.turns[turn.parent];
  return turn?.id ?? null;
}

/** What the server must read for a turn, after the last state that it holds. */
function requestBody(turn, turns, system) {
  const before = pathTo(turn.parent, turns);
  const held = before.findLastIndex((earlier) => earlier.responseId);
  const messages = before.slice(held + 1).flatMap((earlier) => [
    { role: "user", content: earlier.user },
    { role: "assistant", content: earlier.answer },
  ]);
  messages.push({ role: "user", content: turn.user });
  return {
    model: info.model,
    input: messages,
    ...(held >= 0 ? { previous_response_id: before[held].responseId } : system && { instructions: system }),
    stream: true,
    store: true,
    temperature: settings.temperature,
    top_p: settings.topP,
    max_output_tokens: settings.maxTokens,
  };
}

async function addTurn(user, parent) {
  const turn = { id: newId(), parent, user, at: Date.now() };
  conversation.turns[turn.id] = turn;
  conversation.leaf = turn.id;
  await answer(turn);
}

/** Has the server write the answer of a turn, which is then stored, whole or not. */
async function answer(turn) {
  const owner = conversation;
  const controller = new AbortController();
  Object.assign(turn, { answer: "", status: "writing", problem: "", lost: false, times: [] });
  turn.tokens = pathTo(turn.parent).at(-1)?.tokens ?? 0;
  writing.set(turn.id, { owner, controller });
  saveConversation(owner);
  show();
  scrollToEnd();
  try {
    if (!info) await loadInfo();
    await readAnswer(turn, requestBody(turn, owner.turns, owner.system), controller.signal);
  } catch (error) {
    turn.status = "stopped";
    if (error.name !== "AbortError") {
      turn.problem = error instanceof Failure ? error.message : BROKEN_OFF;
      turn.lost = Boolean(error.lost);
    }
    if (!turn.answer) turn.status = "failed";
  } finally {
    writing.delete(turn.id);
    if (turn.id === conversation.leaf) speech.end(turn.problem || STATUS[turn.status]);
    if (conversations.has(owner.id)) saveConversation(owner); // else it was deleted meanwhile
    show();
  }
}

async function readAnswer(turn, body, signal) {
  const started = performance.now();
  const headers = { "Content-Type": "application/json" };
  const response = await request("/v1/responses", { method: "POST", headers, body: JSON.stringify(body), signal });
  let last = null;
  for await (const events of eventLists(response.body)) {
    const deltas = events.filter((event) => event.type === "response.output_text.delta");
    if (deltas.length) {
      const now = performance.now();
      if (last === null) turn.firstTime = now - started;
      // Tokens that arrive together share the time since the last ones. The first were read with the prompt.
      else addTime(turn.times, deltas.length, (now - last) / deltas.length);
      last = now;
      turn.tokens += deltas.length;
      write(turn, deltas.map((event) => event.delta).join(""));
    }
    for (const event of events) finishTurn(turn, event);
  }
  if (turn.status === "writing") throw new Failure(BROKEN_OFF);
}

function finishTurn(turn, event) {
  if (event.type === "response.completed" || event.type === "response.incomplete") {
    const { id, usage, incomplete_details: cut } = event.response;
    turn.status = cut?.reason === "max_output_tokens" ? "length" : "done";
    turn.responseId = id;
    turn.tokens = usage?.total_tokens ?? turn.tokens;
  } else if (event.type === "response.failed" || event.type === "error" || event.error) {
    const error = event.response?.error ?? event.error ?? event;
    throw new Failure(error.message || "The server could not finish the answer.");
  }
}

/** Keeps [tokens, ms for each] in at most 64 entries a turn; neighbors are merged. */
function addTime(times, count, ms) {
  times.push([count, ms]);
  if (times.length <= 64) return;
  for (let i = 0; i < times.length - 1; i++) {
    const [[firstCount, first], [secondCount, second]] = times.splice(i, 2);
    const both = firstCount + secondCount;
    times.splice(i, 0, [both, (firstCount * first + secondCount * second) / both]);
  }
}

function stop() {
  writing.get(conversation.leaf)?.controller.abort();
}

/** Sends the turns whose states are gone as text again. */
function readAgain(turn) {
  const path = pathTo(turn.parent);
  if (path[0]?.state) return notify("The text before this is only in the state file. Load that file again to go on.");
  for (const earlier of path) delete earlier.responseId;
  return answer(turn);
}

async function saveState(turn) {
  try {
    const blob = await (await request(`/v1/states/${encodeURIComponent(turn.responseId)}`)).blob();
    const name = titleOf(conversation).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 40);
    const link = element("a", { href: URL.createObjectURL(blob), download: `${name || "state"}.safetensors` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  } catch (error) {
    notify(error.message);
  }
}

async function loadState(file) {
  try {
    const headers = { "Content-Type": "application/octet-stream" };
    const made = await (await request("/v1/states", { method: "POST", headers, body: file })).json();
    const turn = { id: made.id, parent: null, state: file.name, responseId: made.id, tokens: made.tokens };
    open(newConversation());
    conversation.turns[turn.id] = { ...turn, status: "done", user: "", answer: "", times: [], at: Date.now() };
    conversation.leaf = turn.id;
    saveConversation(conversation);
    show();
    $("message").focus();
  } catch (error) {
    notify(`${file.name} was not loaded. ${error.message}`);
  }
}

async function deleteConversation(deleted) {
  $("ask-delete-text").textContent = titleOf(deleted);
  if (!(await askDialog($("ask-delete")))) return;
  const turns = Object.values(deleted.turns);
  for (const turn of turns) writing.get(turn.id)?.controller.abort();
  conversations.delete(deleted.id);
  localStorage.removeItem(CONVERSATION + deleted.id);
  if (conversation === deleted) open(newConversation());
  else show();
  for (const { responseId } of turns.filter((turn) => turn.responseId)) {
    await request(`/v1/responses/${encodeURIComponent(responseId)}`, { method: "DELETE" }).catch(() => {});
  }
}

function titleOf(titled) {
  const first = Object.values(titled.turns).sort((a, b) => a.at - b.at)[0];
  return first ? snippet(first.state ?? first.user) : "New conversation";
}

// ------------------------------------------------------------------------------------------------------- Messages

const shown = new Map(); // id of a turn → its element

function open(opened) {
  conversation = opened;
  shown.clear();
  store("current", opened.id);
  show();
  scrollToEnd();
}

function goTo(id) {
  conversation.leaf = id;
  if (conversations.has(conversation.id)) saveConversation(conversation);
  show();
}

/** Draws everything but the words of a stream, which `write` appends. */
function show() {
  const path = pathTo(conversation.leaf);
  const elements = path.map(turnElement);
  const old = [...$("messages").children];
  const same = old.length === elements.length && old.every((one, i) => one === elements[i]);
  if (!same) $("messages").replaceChildren(...elements); // would take the focus from a button
  const leaf = path.at(-1);
  const active = writing.has(leaf?.id);
  $("empty").hidden = path.length > 0;
  $("send").hidden = active;
  $("stop").hidden = !active;
  $("branch-hint").hidden = !childrenOf(conversation.leaf).length;
  document.title = path.length ? `${titleOf(conversation)} – fastweights` : "fastweights";
  drawSidebar();
  drawMeter();
}

const STATUS = {
  writing: "",
  done: "",
  length: "Reached the longest answer of the settings.",
  stopped: "Stopped.",
  failed: "Stopped before the first word.",
};

function turnElement(turn) {
  let item = shown.get(turn.id);
  if (!item) {
    item = $("turn-template").content.firstElementChild.cloneNode(true);
    item.dataset.turn = turn.id;
    shown.set(turn.id, item);
  }
  const [user, model] = item.querySelectorAll(".message");
  user.hidden = Boolean(turn.state);
  user.querySelector(".text").textContent = turn.user;
  model.querySelector(".who").textContent = turn.state ? "State file" : (info?.model ?? "Model");
  const text = turn.state
    ? `${turn.state}: ${plural(turn.tokens, "token")} that the model remembers. Their text is not in the file.`
    : turn.answer;
  if (model.querySelector(".text").textContent !== text) model.querySelector(".text").textContent = text;
  item.classList.toggle("writing", turn.status === "writing");
  item.classList.toggle("failed", turn.status === "failed");
  item.classList.toggle("loaded", Boolean(turn.state));
  const status = model.querySelector(".status");
  status.textContent = turn.problem || STATUS[turn.status];
  status.hidden = !status.textContent;
  drawActions(model, turn);
  return item;
}

function drawActions(model, turn) {
  const button = (name) => model.querySelector(`[data-do=${name}]`);
  const idle = turn.status !== "writing";
  button("retry").hidden = !idle || Boolean(turn.state);
  button("retry").querySelector("span").textContent = turn.lost
    ? "Read the text again"
    : turn.status === "failed" ? "Try again" : "Retry";
  button("fork").hidden = !idle || turn.status === "failed" || turn.id === conversation.leaf;
  button("save").hidden = !turn.responseId;
  button("copy").hidden = !idle || !turn.answer || !navigator.clipboard; // absent without HTTPS
}

function write(turn, text) {
  const follow = isAtEnd();
  turn.answer += text;
  const item = shown.get(turn.id);
  if (item) item.querySelector(".answer .text").append(text);
  if (turn.id !== conversation.leaf) return;
  speech.add(text);
  if (follow) scrollToEnd();
  drawMeterSoon();
}

const isAtEnd = () => $("scroller").scrollHeight - $("scroller").scrollTop - $("scroller").clientHeight < 48;
const scrollToEnd = () => { $("scroller").scrollTop = $("scroller").scrollHeight; };

/** Screen readers hear whole sentences of a stream, not single tokens. */
const speech = {
  waiting: "",
  add(text) {
    this.waiting += text;
    const end = this.waiting.search(/[.!?:\n][^.!?:\n]*$/);
    if (end < 0) return;
    this.say(this.waiting.slice(0, end + 1));
    this.waiting = this.waiting.slice(end + 1);
  },
  end(text) {
    this.say(`${this.waiting} ${text}`);
    this.waiting = "";
  },
  say(text) {
    if (!text.trim()) return;
    $("live").append(element("p", { textContent: text }));
    while ($("live").children.length > 20) $("live").firstChild.remove();
  },
};

const TURN_ACTIONS = {
  edit(turn) {
    goTo(turn.parent);
    $("message").select();
    document.execCommand("insertText", false, turn.user); // unlike an assignment, can be undone: a draft is not lost
  },
  retry(turn) {
    if (turn.lost) return readAgain(turn);
    return turn.status === "failed" ? answer(turn) : addTurn(turn.user, turn.parent);
  },
  fork(turn) {
    goTo(turn.id);
    scrollToEnd();
    $("message").focus();
  },
  save: saveState,
  async copy(turn) {
    await navigator.clipboard.writeText(turn.answer);
    speech.say("Copied.");
  },
};

// -------------------------------------------------------------------------------------------------------- Sidebar

function drawSidebar() {
  const roots = childrenOf(null).map(branchFrom);
  $("branches-section").hidden = roots.length < 2 && !roots[0]?.branches.length;
  const path = new Set(pathTo(conversation.leaf).map((turn) => turn.id));
  $("branches").replaceChildren(...roots.map((branch) => branchElement(branch, path)));

  const listed = [...conversations.values()].sort((a, b) => b.changed - a.changed);
  $("conversations-section").hidden = !listed.length;
  $("conversations").replaceChildren(...listed.map(conversationElement));
}

/** Turns without a fork between them are one branch. */
function branchFrom(turn) {
  const turns = [turn];
  let next = childrenOf(turn.id);
  while (next.length === 1) {
    turns.push(next[0]);
    next = childrenOf(next[0].id);
  }
  return { turns, branches: next.map(branchFrom) };
}

function branchElement({ turns, branches }, path) {
  const [first, last] = [turns[0], turns.at(-1)];
  const button = element("button", { onclick: () => { goTo(last.id); scrollToEnd(); closeSidebar(); } });
  button.append(
    element("span", { className: "title", textContent: snippet(first.state ?? first.user) }),
    element("span", { className: "detail", textContent: branchDetail(first, turns.length) }),
  );
  button.classList.toggle("active", path.has(first.id));
  if (turns.some((turn) => turn.id === conversation.leaf)) button.setAttribute("aria-current", "true");
  const item = element("li", {}, button);
  if (branches.length) item.append(element("ul", {}, ...branches.map((branch) => branchElement(branch, path))));
  return item;
}

function branchDetail(first, turns) {
  const none = first.state ? "State file" : first.status === "writing" ? "Writing…" : "No answer";
  const start = first.status === "writing" ? none : snippet(first.answer, 40) || none;
  return turns > 1 ? `${plural(turns, "turn")} · ${start}` : start;
}

function conversationElement(listed) {
  const title = titleOf(listed);
  const link = element("button", { className: "title", textContent: title });
  link.onclick = () => { open(listed); closeSidebar(); };
  if (listed === conversation) link.setAttribute("aria-current", "true");
  const remove = element("button", { className: "icon", title: "Delete" }, icon("trash"));
  remove.onclick = () => deleteConversation(listed);
  remove.setAttribute("aria-label", `Delete ${title}`);
  return element("li", {}, link, remove);
}

function openSidebar() {
  document.body.classList.add("sidebar-open");
  $("shade").hidden = false;
  $("open-sidebar").setAttribute("aria-expanded", "true");
  $("new").focus();
}

function closeSidebar() {
  if (!document.body.classList.contains("sidebar-open")) return;
  document.body.classList.remove("sidebar-open");
  $("shade").hidden = true;
  $("open-sidebar").setAttribute("aria-expanded", "false");
  $("open-sidebar").focus();
}

// ---------------------------------------------------------------------------------------------------------- Meter

let meterFrame = 0;

function drawMeterSoon() {
  meterFrame ||= requestAnimationFrame(() => {
    meterFrame = 0;
    drawMeter();
  });
}

function drawMeter() {
  const path = pathTo(conversation.leaf);
  const tokens = path.at(-1)?.tokens ?? 0;
  const limit = info?.max_length ? ` of ${number.format(info.max_length)}` : "";
  $("token-count").textContent = number.format(tokens) + limit;
  drawTimes(path);
  if (!info) return;
  const state = info.state_bytes;
  const cache = tokens * info.base_kv_bytes_per_token;
  const most = Math.max(state, cache);
  $("state-bytes").textContent = bytes(state);
  $("cache-bytes").textContent = bytes(cache);
  $("strip-state").textContent = `State ${bytes(state)}`;
  $("strip-cache").textContent = `KV cache ${bytes(cache)}`;
  $("state-bar").style.width = `${(100 * state) / most}%`;
  $("cache-bar").style.width = `${(100 * cache) / most}%`;
  $("memory-note").textContent = memoryNote(state, cache);
}

function memoryNote(state, cache) {
  if (cache > state) return `The KV cache would take ${times(cache / state)} times as much. The state does not grow.`;
  const even = Math.ceil(state / info.base_kv_bytes_per_token);
  return `The state does not grow. A KV cache grows with every token: after ${number.format(even)} it takes more.`;
}

const PLOT = { width: 260, height: 132, left: 34, right: 6, top: 8, bottom: 20 };

function svg(tag, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

const plotText = (text, x, y, anchor) => svg("text", { x, y, "text-anchor": anchor }, text);

/** The smallest of 1, 2, 5, 10, 20, … that is not below a value. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => step * power >= value * 0.999);
}

/** [token, ms] of generated tokens over a path: means of neighbors, as tokens that are late come with the next ones. */
function timePoints(path, most = 48) {
  const spans = path.flatMap((turn) => {
    let token = turn.tokens - turn.times.reduce((total, [count]) => total + count, 0);
    return turn.times.map(([count, ms]) => ({ token: (token += count), count, ms: count * ms }));
  });
  const wanted = Math.max(8, spans.reduce((total, span) => total + span.count, 0) / most);
  const points = [];
  let [count, ms] = [0, 0];
  for (const span of spans) {
    [count, ms] = [count + span.count, ms + span.ms];
    if (count < wanted && span !== spans.at(-1)) continue;
    points.push([span.token, ms / count]);
    [count, ms] = [0, 0];
  }
  return points;
}

function drawTimes(path) {
  const measured = path.flatMap((turn) => turn.times.map(([, ms]) => ms));
  const first = path.findLast((turn) => turn.firstTime)?.firstTime;
  $("median-time").textContent = measured.length ? duration(median(measured)) : "–";
  $("first-time").textContent = first ? duration(first) : "–";

  const points = timePoints(path);
  const label = points.length ? `Median ${duration(median(measured))} a token` : "No tokens yet";
  $("plot").setAttribute("aria-label", label);
  if (!points.length) return $("plot").replaceChildren(plotText(label, PLOT.width / 2, PLOT.height / 2, "middle"));
  const lastToken = Math.max(path.at(-1).tokens, 10);
  const slowest = roundUp(Math.max(...points.map(([, ms]) => ms), 0.1));
  const x = (token) => PLOT.left + ((PLOT.width - PLOT.left - PLOT.right) * token) / lastToken;
  const y = (ms) => PLOT.height - PLOT.bottom - ((PLOT.height - PLOT.top - PLOT.bottom) * ms) / slowest;
  const drawn = [];
  for (const share of [0, 0.5, 1]) {
    const level = y(share * slowest);
    drawn.push(svg("line", { class: "grid", x1: PLOT.left, x2: PLOT.width - PLOT.right, y1: level, y2: level }));
    drawn.push(plotText(share ? duration(share * slowest) : "0", PLOT.left - 5, level + 3, "end"));
  }
  drawn.push(plotText("0", PLOT.left, PLOT.height - 5, "start"));
  drawn.push(plotText(plural(lastToken, "token"), PLOT.width - PLOT.right, PLOT.height - 5, "end"));
  const at = points.map(([token, ms]) => `${x(token).toFixed(1)},${y(ms).toFixed(1)}`);
  drawn.push(svg("polyline", { class: "times", points: at.join(" ") }));
  return $("plot").replaceChildren(...drawn);
}

// ----------------------------------------------------------------------------------------------- Notices, dialogs

function notify(text) {
  $("notice-text").textContent = text;
  $("notice").hidden = false;
}

/** Shows a dialog; true if it was confirmed. */
function askDialog(dialog) {
  dialog.showModal();
  return new Promise((resolve) => {
    // A dialog's close event comes some time after the dialog has closed. A message that is sent before it would not
    // follow new settings, so a confirmation is taken from the form's submit event, which comes before.
    dialog.addEventListener("submit", () => resolve(true), { once: true });
    dialog.addEventListener("close", () => resolve(false), { once: true });
  });
}

async function editSettings() {
  const fields = { temperature: "temperature", topP: "top-p", maxTokens: "max-tokens", system: "system" };
  for (const [name, id] of Object.entries(fields)) $(id).value = settings[name];
  $("key").value = apiKey.get();
  if (!(await askDialog($("settings")))) return;
  for (const [name, id] of Object.entries(fields)) {
    settings[name] = name === "system" ? $(id).value : Number($(id).value);
  }
  apiKey.set($("key").value);
  store("settings", settings);
  if (!conversation.leaf) conversation.system = settings.system;
  if (!info) loadInfo().catch((error) => notify(error.message));
}

// ---------------------------------------------------------------------------------------------------------- Input

function setDraft(text) {
  $("message").value = text;
  store("draft", text);
  $("message").style.height = "auto";
  $("message").style.height = `${$("message").scrollHeight}px`;
}

function send() {
  const text = $("message").value.trim();
  if (!text || writing.has(conversation.leaf)) return;
  setDraft("");
  $("notice").hidden = true;
  addTurn(text, continuable(conversation.leaf));
}

function listen() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("message").addEventListener("input", () => setDraft($("message").value));
  $("message").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  $("stop").addEventListener("click", () => {
    stop();
    $("message").focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    if (document.body.classList.contains("sidebar-open")) closeSidebar();
    else stop();
  });
  $("messages").addEventListener("click", (event) => {
    const button = event.target.closest("[data-do]");
    if (button) TURN_ACTIONS[button.dataset.do](conversation.turns[button.closest(".turn").dataset.turn]);
  });
  $("leave-fork").addEventListener("click", () => {
    let id = conversation.leaf;
    for (let next = childrenOf(id); next.length; next = childrenOf(id)) id = next.at(-1).id;
    goTo(id);
    scrollToEnd();
    $("message").focus();
  });
  $("new").addEventListener("click", () => {
    open(newConversation());
    closeSidebar();
    $("message").focus();
  });
  $("load").addEventListener("click", () => $("state-file").click());
  $("state-file").addEventListener("change", async () => {
    const [file] = $("state-file").files;
    closeSidebar();
    if (file) await loadState(file);
    $("state-file").value = "";
  });
  $("open-settings").addEventListener("click", editSettings);
  $("open-sidebar").addEventListener("click", openSidebar);
  $("shade").addEventListener("click", closeSidebar);
  $("notice-close").addEventListener("click", () => { $("notice").hidden = true; });
  $("meter-toggle").addEventListener("click", () => {
    const opened = $("meter").classList.toggle("open");
    $("meter-toggle").setAttribute("aria-expanded", String(opened));
  });
  for (const button of document.querySelectorAll("[data-close]")) {
    button.addEventListener("click", () => button.closest("dialog").close());
  }
  addEventListener("pagehide", () => {
    for (const { owner } of writing.values()) saveConversation(owner);
  });
  addEventListener("storage", followOtherTab);
}

// ---------------------------------------------------------------------------------------------------------- Start

readConversations();
listen();
open(conversations.get(stored("current", "")) ?? newConversation());
setDraft(stored("draft", ""));
$("message").focus();
loadInfo().then(show, (error) => notify(error.message));
