// A question and its answer, and the sources of its prompt's tokens.

import { Bar, byId, copyButton, count, make, say, some, time } from "./draw.js";
import { MarkdownView } from "./markdown.js";

const CAME_FROM = [
  ["pool", "found in the pool"],
  ["fetched", "fetched from other nodes"],
  ["restored", "restored from lower tiers"],
  ["bucket", "fetched from a bucket"],
  ["prefill", "computed by a prefill worker"],
  ["tail", "computed by the decode worker, alongside other streams"],
];
const ENDED = { stop: "the model ended it", length: "max tokens reached", tool_calls: "with a tool call" };
// Distance from the end in pixels beyond which new text does not scroll the log, since the reader is further up.
const NEAR_END_PX = 80;

// `kept`: an earlier turn's `state`. `edit`, `retry` and `goOn` are called with the turn.
export class Turn {
  constructor(question, model, { edit, retry, goOn, kept = null }) {
    this.question = question;
    this.model = model;
    this.text = "";
    this.thoughts = "";
    this.reason = "";
    this.accounts = null;
    this.words = "";
    this.failed = false;
    this.shown = new MarkdownView();
    this.thought = new MarkdownView();
    this.thinking = make("details", { class: "thinking" }, make("summary", {}, "Reasoning"), this.thought.root);
    this.thinking.hidden = true;
    this.below = make("div", { class: "below" });
    this.more = button("Continue", "Continue this answer", "go-on", () => goOn(this));
    this.more.hidden = true;
    this.actions = make("div", { class: "actions" },
      copyButton("Copy this answer", () => this.text), this.more,
      button("Retry", "Ask this message again", "retry", () => retry(this)));
    this.asked = make("article", { class: "question" },
      make("h3", { class: "who" }, "You"), make("p", { class: "text" }, question),
      make("div", { class: "actions" }, button("Edit", "Edit this message", "edit", () => edit(this))));
    this.root = make("article", { class: "answer busy" },
      make("h3", { class: "who" }, model || "Model"), this.thinking, this.shown.root, this.below, this.actions);
    byId("empty").hidden = true;
    byId("log").append(this.asked, this.root);
    if (kept) this.restore(kept);
    byId("log").scrollTop = byId("log").scrollHeight;
  }

  take(event, began) {
    for (const choice of event.choices ?? []) {
      const thought = choice.delta?.reasoning_content ?? "";
      const text = choice.delta?.content ?? "";
      this.firstMs ??= text || thought ? performance.now() - began : undefined;
      this.thoughts += thought;
      this.text += text;
      this.reason = choice.finish_reason ?? this.reason;
      if (thought) this.showThoughts();
      if (text) this.grow(this.shown, this.text);
    }
    if (event.usage && event.timings) this.account({ usage: event.usage, timings: event.timings, id: event.id });
  }

  showThoughts() {
    this.thinking.hidden = false;
    this.grow(this.thought, this.thoughts);
  }

  // Shows more of the answer, and scrolls to its end unless the reader is further up.
  grow(view, text) {
    const log = byId("log");
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PX;
    view.grow(text, () => { if (follows) log.scrollTop = log.scrollHeight; });
  }

  // Shows the sources of the prompt's tokens, and the times.
  account(accounts) {
    this.accounts = accounts;
    const { usage, timings, id } = accounts;
    const brought = [timings.fetched_tokens, timings.restored_tokens, timings.bucket_tokens];
    const pool = brought.reduce((left, tokens) => left - tokens, timings.cached_tokens);
    const bar = new Bar(CAME_FROM, { always: false });
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
      ["draft tokens", timings.guessed_tokens
        && `${count(timings.accepted_tokens)} of ${count(timings.guessed_tokens)} accepted`],
      ["moved", (timings.replays || timings.preemptions)
        && `${some(timings.replays, "time")} to another worker, ${some(timings.preemptions, "time")} preempted`],
      ["request", id],
    ];
    const list = (pairs, kind) => make("dl", { class: kind },
      ...pairs.filter(([, value]) => value).map(([name, value]) =>
        make("div", {}, make("dt", {}, name), make("dd", {}, value))));
    this.below.replaceChildren(
      make("p", { class: "caption" }, `Where the prompt’s ${some(usage.prompt_tokens, "token")} came from`), bar.root,
      list(figures, "figures"), make("details", {}, make("summary", {}, "More details"), list(more, "more")));
  }

  // Shows why the answer has no figures.
  end(words, failed = false) {
    this.words = words;
    this.failed = failed;
    this.below.replaceChildren(make("p", failed ? { class: "error", role: "alert" } : { class: "muted" }, words));
  }

  // The answer's continuation starts.
  begin() {
    this.words = "";
    this.reason = "";
    this.failed = false;
    this.accounts = null;
    this.below.replaceChildren();
    this.root.classList.add("busy");
  }

  settle() {
    const log = byId("log");
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 4 * NEAR_END_PX;
    this.root.classList.remove("busy");
    this.thought.show(this.thoughts);
    this.shown.show(this.text);
    // Stopped, interrupted, or truncated at the max tokens.
    this.more.hidden = !this.text || !(this.words || this.reason === "length");
    if (!this.text && !this.failed) say(this.shown.root, "(Empty answer)");
    if (follows) log.scrollTop = log.scrollHeight;
  }

  remove() {
    this.asked.remove();
    this.root.remove();
  }

  // State to restore after a reload. A running answer counts as ended by the reload.
  state() {
    const words = this.root.classList.contains("busy") ? "You left the page before the answer ended." : this.words;
    const { question, model, text, thoughts, reason, accounts, failed } = this;
    return { question, model, text, thoughts, reason, accounts, words, failed };
  }

  restore(kept) {
    Object.assign(this, { text: kept.text, thoughts: kept.thoughts, reason: kept.reason });
    this.thinking.hidden = !this.thoughts;
    if (kept.words) this.end(kept.words, kept.failed);
    else if (kept.accounts) this.account(kept.accounts);
    this.settle();
  }
}

function button(text, label, kind, pressed) {
  const made = make("button", { type: "button", class: `small ${kind}`, "aria-label": label }, text);
  made.addEventListener("click", pressed);
  return made;
}
