// The open chat, and the list of all. A chat's turns are in turn.js; kept.js keeps them in the browser.

import { ask, keyTag, stream } from "./api.js";
import { byId, make, say } from "./draw.js";
import * as kept from "./kept.js";
import { Turn } from "./turn.js";

// Time after which a leave is considered cancelled.
const LEAVING_MS = 2000;
const SETTINGS = ["model", "temperature", "max-tokens", "system"];

// Max length of a chat's title in the list, which is the start of its first question.
const TITLE_CHARACTERS = 80;

// Id of the open chat. An answer for a chat that was left must not appear in the next, possibly another person's.
let chat = newId();
let turns = [];
let running = null;
// Turn whose question is being edited. Sending replaces it and all later turns.
let editing = null;
// False until the stored chat was restored, so that nothing overwrites it.
let restored = false;
// The browser aborts answers when the page is left; such a failure is not stored.
let leaving = false;

export async function start() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("composer").requestSubmit();
  });
  byId("chat").addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    if (running) stop();
    else if (editing) edit(null);
  });
  byId("stop").addEventListener("click", stop);
  byId("leave-edit").addEventListener("click", () => edit(null));
  byId("new-chat").addEventListener("click", begin);
  byId("settings").addEventListener("input", () => {
    summarize();
    keep();
  });
  window.addEventListener("beforeunload", () => {
    keep();
    leaving = true;
    setTimeout(() => { leaving = false; }, LEAVING_MS);
  });
  // The only event that fires on phones.
  window.addEventListener("pagehide", keep);
  // Another tab has stored a chat.
  window.addEventListener("storage", list);
}

// Fills the list of models and selects the gateway's first one. Throws Refusal.
export async function loadModels(signal) {
  const found = (await (await ask("v1/models", { signal })).json()).data.map((one) => one.id);
  const shown = [...byId("model").options].map((one) => one.value);
  if (found.join("\n") !== shown.join("\n")) {
    const chosen = byId("model").value;
    byId("model").replaceChildren(...found.map((id) => make("option", { value: id }, id)));
    if (found.includes(chosen)) byId("model").value = chosen;
  }
  summarize();
  return found.length;
}

function newId() {
  return crypto.getRandomValues(new Uint32Array(2)).join("-");
}

// Restores this tab's chat after a reload with the same key.
export function restore() {
  restored = true;
  const found = kept.openChat(keyTag());
  if (found && !turns.length) show(found);
  list();
}

function show(found) {
  chat = found.id;
  for (const id of SETTINGS) {
    const value = found.settings?.[id] ?? "";
    if (id !== "model" || [...byId(id).options].some((one) => one.value === value)) byId(id).value = value;
  }
  turns = found.turns.map((one) => new Turn(one.question, one.model, { edit, retry, goOn, kept: one }));
  summarize();
}

// Lists the stored chats, most recently used first.
function list() {
  if (!restored) return;
  const found = kept.chats(keyTag());
  const focused = document.activeElement?.id;
  say(byId("chats-now"), found.length ? `${found.length} stored in this browser` : "none yet");
  byId("chat-list").replaceChildren(...found.map((one) => {
    const { question } = one.turns[0];
    const title = question.length > TITLE_CHARACTERS ? `${question.slice(0, TITLE_CHARACTERS)}…` : question;
    const open = make("button", { type: "button", class: "small open", id: `open-${one.id}` }, title);
    const remove = make("button", { type: "button", class: "small", id: `delete-${one.id}`,
      "aria-label": `Delete the chat “${title}”` }, "Delete");
    if (one.id === chat) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => {
      leave();
      show(kept.chats(keyTag()).find((other) => other.id === one.id) ?? one);
      keep();
      byId("prompt").focus();
    });
    remove.addEventListener("click", () => {
      if (!confirm(`Delete the chat “${title}”?`)) return;
      if (one.id === chat) clear();
      kept.drop(one.id);
      list();
      byId("chats").querySelector("summary").focus();
    });
    return make("li", {}, open, remove);
  }));
  if (focused !== document.activeElement?.id) byId(focused)?.focus();
}

// Stores and closes the open chat.
function leave() {
  keep();
  clear();
}

function begin() {
  leave();
  keep();
  byId("prompt").focus();
}

// Ends the chat and clears all input: the next key may be another person's.
export function forget() {
  clear();
  byId("system").value = "";
  byId("prompt").value = "";
  kept.dropAll();
  byId("chat-list").replaceChildren();
  restored = false;
}

function keep() {
  if (!restored || leaving) return;
  const settings = Object.fromEntries(SETTINGS.map((id) => [id, byId(id).value]));
  kept.keep(keyTag(), chat, settings, turns.map((turn) => turn.state()));
  list();
}

function clear() {
  stop();
  edit(null);
  chat = newId();
  turns = [];
  byId("log").replaceChildren(byId("empty"));
  byId("empty").hidden = false;
  say(byId("spoken"), "");
}

function summarize() {
  const temperature = byId("temperature").value;
  const most = byId("max-tokens").value;
  const model = byId("model").value || "no model";
  const words = [model, temperature && `temperature ${temperature}`, most && `up to ${most} tokens per answer`];
  say(byId("settings-now"), words.filter(Boolean).join(", "));
}

function stop() {
  running?.abort();
}

// Starts editing a turn's question; null cancels.
function edit(turn) {
  if (turn && running) return;
  if (turn || editing) byId("prompt").value = turn?.question ?? "";
  editing = turn;
  byId("editing").hidden = !turn;
  if (turn) byId("prompt").focus();
}

function retry(turn) {
  if (running || !settingsHold()) return;
  if (byId("prompt").value.trim() === turn.question) byId("prompt").value = "";
  byId("log").focus();
  answerTo(turn.question, turn);
}

// Requests the rest of a truncated answer.
async function goOn(turn) {
  if (running || !settingsHold()) return;
  byId("log").focus();
  turn.begin();
  await answered(turn, "Continuing the answer.");
}

// Removes a turn and all later ones.
function cut(turn) {
  const at = turns.indexOf(turn);
  for (const one of turns.splice(at < 0 ? turns.length : at)) one.remove();
}

async function send() {
  const text = byId("prompt").value.trim();
  if (running || !text || !settingsHold()) return;
  byId("prompt").value = "";
  await answerTo(text, editing);
}

function settingsHold() {
  for (const id of ["temperature", "max-tokens"]) {
    if (byId(id).checkValidity()) continue;
    byId("settings").open = true;
    byId(id).reportValidity();
    return false;
  }
  return true;
}

// Sends a question, replacing the turn `from` and all later ones if given.
async function answerTo(text, from) {
  edit(null);
  cut(from);
  const turn = new Turn(text, byId("model").value, { edit, retry, goOn });
  turns.push(turn);
  await answered(turn, "The message was sent.");
}

// Requests the last turn's answer, or its continuation, and shows the result.
async function answered(turn, words) {
  running = new AbortController();
  rest(false);
  say(byId("spoken"), words);
  try {
    await answer(turn, running.signal);
  } finally {
    running = null;
    rest(true);
  }
}

// Enables and disables buttons by whether an answer is running.
function rest(still) {
  byId("stop").disabled = still;
  byId("send").disabled = !still;
  byId("log").classList.toggle("answering", !still);
}

async function answer(turn, signal) {
  const mine = chat;
  const began = performance.now();
  let failure = null;
  try {
    for await (const event of stream("v1/chat/completions", bodyOf(turn), signal)) turn.take(event, began);
  } catch (error) {
    failure = error;
  }
  if (mine !== chat) return;
  if (!failure) {
    say(byId("spoken"), `Answer: ${turn.text}`);
  } else if (failure.name === "AbortError") {
    turn.end("Stopped. An answer’s figures are sent only at its end.");
    say(byId("spoken"), "The answer was stopped.");
  } else {
    turn.end(failure.message, true);
    // Nothing was answered: put the message back, to be sent again.
    if (!turn.text && !byId("prompt").value) byId("prompt").value = turn.question;
  }
  turn.settle();
  keep();
}

// Messages of a request: answered turns, the last question, and its answer so far.
function bodyOf(turn) {
  const earlier = turns.filter((one) => one !== turn && one.text).flatMap((one) =>
    [{ role: "user", content: one.question }, { role: "assistant", content: one.text }]);
  const system = byId("system").value.trim();
  const most = byId("max-tokens").valueAsNumber;
  const temperature = byId("temperature").valueAsNumber;
  return {
    model: byId("model").value,
    messages: [
      ...(system ? [{ role: "system", content: system }] : []),
      ...earlier,
      { role: "user", content: turn.question },
      ...(turn.text ? [{ role: "assistant", content: turn.text }] : []),
    ],
    ...(turn.text ? { add_generation_prompt: false, continue_final_message: true } : {}),
    stream: true,
    stream_options: { include_usage: true },
    timings: true,
    ...(Number.isNaN(most) ? {} : { max_completion_tokens: most }),
    ...(Number.isNaN(temperature) ? {} : { temperature }),
  };
}
