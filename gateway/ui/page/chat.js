// The chat: one conversation, and below each answer where its prompt's tokens went.

import { ask, stream } from "./api.js";
import { Bar, byId, count, make, say, some, time } from "./draw.js";

const WENT = [
  ["pool", "found in the pool"],
  ["fetched", "fetched from other nodes"],
  ["restored", "restored from lower tiers"],
  ["bucket", "brought from a bucket"],
  ["prefill", "computed by a prefill worker"],
  ["tail", "computed by the decode worker, beside other streams"],
];
const ENDED = { stop: "the model ended it", length: "at the most tokens", tool_calls: "with a call of a tool" };
// Further down than this many pixels from the end, the reader reads, and the log does not scroll by itself.
const NEAR_END_PX = 80;

// Counts chats: what was asked in one that was left must not come into the next, which may be another person's.
let chat = 0;
let messages = [];
let running = null;

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
    if (event.key === "Escape" && running) stop();
  });
  byId("stop").addEventListener("click", stop);
  byId("new-chat").addEventListener("click", () => {
    clear();
    byId("prompt").focus();
  });
  byId("settings").addEventListener("input", summarize);
}

// Fills the list of models; throws Refusal. The first one of the gateway is chosen.
export async function loadModels() {
  const found = (await (await ask("v1/models")).json()).data;
  const chosen = byId("model").value;
  byId("model").replaceChildren(...found.map((one) => make("option", { value: one.id }, one.id)));
  if (found.some((one) => one.id === chosen)) byId("model").value = chosen;
  summarize();
  return found.length;
}

// Ends the chat and all that its person has written, as somebody else's key may come.
export function forget() {
  clear();
  byId("system").value = "";
  byId("prompt").value = "";
}

function clear() {
  stop();
  chat += 1;
  messages = [];
  byId("log").replaceChildren(byId("empty"));
  byId("empty").hidden = false;
  say(byId("spoken"), "");
}

function summarize() {
  const temperature = byId("temperature").value;
  const model = byId("model").value || "no model";
  say(byId("settings-now"), [model, temperature && `temperature ${temperature}`].filter(Boolean).join(", "));
}

function stop() {
  running?.abort();
}

async function send() {
  const text = byId("prompt").value.trim();
  if (running || !text) return;
  for (const id of ["temperature", "max-tokens"]) {
    if (!byId(id).checkValidity()) {
      byId("settings").open = true;
      byId(id).reportValidity();
      return;
    }
  }
  running = new AbortController();
  byId("prompt").value = "";
  byId("stop").disabled = false;
  byId("send").disabled = true;
  const turn = new Turn(text);
  try {
    await answer(turn, text, running.signal);
  } finally {
    running = null;
    byId("stop").disabled = true;
    byId("send").disabled = false;
  }
}

async function answer(turn, text, signal) {
  const asked = [...messages, { role: "user", content: text }];
  const mine = chat;
  const began = performance.now();
  let failure = null;
  try {
    for await (const event of stream("v1/chat/completions", bodyOf(asked), signal)) turn.take(event, began);
  } catch (error) {
    failure = error;
  }
  if (mine !== chat) return;
  if (!failure) {
    say(byId("spoken"), `Answer: ${turn.text}`);
  } else if (failure.name === "AbortError") {
    turn.end("Stopped. What a prompt has cost is told at the end of an answer.");
    say(byId("spoken"), "The answer was stopped.");
  } else {
    turn.fail(failure.message);
    // Nothing was answered, so nothing is lost: the message can be sent again.
    if (!turn.text && !byId("prompt").value) byId("prompt").value = text;
  }
  turn.settle();
  if (turn.text) messages = [...asked, { role: "assistant", content: turn.text }];
}

function bodyOf(asked) {
  const system = byId("system").value.trim();
  const most = byId("max-tokens").valueAsNumber;
  const temperature = byId("temperature").valueAsNumber;
  return {
    model: byId("model").value,
    messages: system ? [{ role: "system", content: system }, ...asked] : asked,
    stream: true,
    stream_options: { include_usage: true },
    timings: true,
    ...(Number.isNaN(most) ? {} : { max_completion_tokens: most }),
    ...(Number.isNaN(temperature) ? {} : { temperature }),
  };
}

// A question and its answer on the page.
class Turn {
  constructor(question) {
    this.text = "";
    this.reason = "";
    this.shown = make("p", { class: "text" });
    this.thought = make("p", { class: "text" });
    this.thinking = make("details", { class: "thinking" }, make("summary", {}, "Reasoning"), this.thought);
    this.thinking.hidden = true;
    this.below = make("div", { class: "below" });
    this.root = make("article", { class: "answer busy" },
      make("h3", { class: "who" }, byId("model").value || "Model"), this.thinking, this.shown, this.below);
    byId("empty").hidden = true;
    byId("log").append(
      make("article", { class: "question" }, make("h3", { class: "who" }, "You"), make("p", { class: "text" }, question)),
      this.root);
    byId("log").scrollTop = byId("log").scrollHeight;
    say(byId("spoken"), "The message was sent.");
  }

  take(event, began) {
    const log = byId("log");
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PX;
    for (const choice of event.choices ?? []) {
      const thought = choice.delta?.reasoning_content ?? "";
      const text = choice.delta?.content ?? "";
      this.firstMs ??= text || thought ? performance.now() - began : undefined;
      if (thought) {
        this.thinking.hidden = false;
        this.thought.append(thought);
      }
      if (text) {
        this.text += text;
        this.shown.append(text);
      }
      this.reason = choice.finish_reason ?? this.reason;
    }
    if (event.usage && event.timings) this.account(event.usage, event.timings, event.id);
    if (follows) log.scrollTop = log.scrollHeight;
  }

  // Shows where the prompt's tokens and the time went.
  account(usage, timings, id) {
    const brought = [timings.fetched_tokens, timings.restored_tokens, timings.bucket_tokens];
    const pool = brought.reduce((left, tokens) => left - tokens, timings.cached_tokens);
    const bar = new Bar(WENT, { always: false });
    bar.update([pool, ...brought, timings.prefilled_tokens, timings.tail_tokens], count);
    const afterMs = timings.total_ms - timings.time_to_first_token_ms;
    const speed = usage.completion_tokens > 1 && afterMs > 0 ? (usage.completion_tokens - 1) * 1000 / afterMs : null;
    const ms = (value) => time(value / 1000);
    const figures = [
      ["first token", ms(timings.time_to_first_token_ms)],
      ["speed", speed === null ? "–" : `${speed.toFixed(1)} tokens/s`],
      ["answer", some(usage.completion_tokens, "token")],
      ["ended", ENDED[this.reason] ?? this.reason],
    ];
    const more = [
      ["plan", timings.plan_reason],
      ["prefill worker", timings.prefill_worker
        && `${timings.prefill_worker}, ${some(timings.prefill_chunks, "chunk")} in ${ms(timings.prefill_ms)}`],
      ["decode worker", `${timings.decode_worker}, prompt tail in ${some(timings.tail_steps, "step")}`],
      ["waited", `${ms(timings.admission_ms)} until admitted, ${ms(timings.decode_queue_ms)} at the decode worker`],
      ["guessed tokens", timings.guessed_tokens
        && `${count(timings.accepted_tokens)} of ${count(timings.guessed_tokens)} were right`],
      ["moved", (timings.replays || timings.preemptions)
        && `${some(timings.replays, "time")} to another worker, ${some(timings.preemptions, "time")} preempted`],
      ["request", id],
    ];
    const list = (pairs, kind) => make("dl", { class: kind },
      ...pairs.filter(([, value]) => value).map(([name, value]) =>
        make("div", {}, make("dt", {}, name), make("dd", {}, value))));
    this.below.replaceChildren(
      make("p", { class: "caption" }, `Where the ${some(usage.prompt_tokens, "token")} of the prompt went`), bar.root,
      list(figures, "figures"), make("details", {}, make("summary", {}, "More of this request"), list(more, "more")));
  }

  end(words) {
    this.below.replaceChildren(make("p", { class: "muted" }, words));
  }

  fail(message) {
    this.below.replaceChildren(make("p", { class: "error", role: "alert" }, message));
  }

  settle() {
    this.root.classList.remove("busy");
    if (!this.text && !this.below.querySelector(".error")) say(this.shown, "(The answer is empty.)");
    const log = byId("log");
    if (log.scrollHeight - log.scrollTop - log.clientHeight < 4 * NEAR_END_PX) log.scrollTop = log.scrollHeight;
  }
}
