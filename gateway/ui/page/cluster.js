// The live picture, redrawn every second while visible.

import { Refusal, ask } from "./api.js";
import { Bar, Strip, byId, count, make, percent, rate, say, some, time } from "./draw.js";
import * as kept from "./kept.js";

const EVERY_MS = 1000;
const PATIENCE_MS = 5000;
// Polling interval while the gateway does not answer.
const RETRY_MS = 4000;
// Columns of a strip, one per picture, so a pause stretches it beyond a minute.
const COLUMNS = 60;
// Max cards per kind; failing components come first.
const MAX_CARDS = 48;

const SOURCES = [
  ["pool", "found in the pool"],
  ["fetched", "fetched from other nodes"],
  ["restored", "restored from lower tiers"],
  ["bucket", "fetched from a bucket"],
  ["prefill", "prefill workers"],
  ["tail", "decode workers"],
];
// Uses of a step, by kind of worker.
const USES = {
  prefill: [["prefill", "chunks"], ["idle", "unused"]],
  decode: [["decode", "decodes"], ["tail", "prompt tails"], ["speculative", "draft tokens"], ["idle", "unused"]],
};
const SLOTS = [
  ["pool", "cached"],
  ["pinned", "pinned"],
  ["leased", "leased"],
  ["quarantined", "quarantined"],
  ["idle", "free"],
];
const GROUPS = [
  ["gateway", "Gateways"],
  ["kvnode", "KV nodes"],
  ["prefill", "Prefill workers"],
  ["decode", "Decode workers"],
  ["", "Known only to a KV node"],
];
const TILES = [
  ["generated", "tokens/s generated"],
  ["prompt", "prompt tokens/s"],
  ["found", "of prompt tokens found in caches"],
  ["requests", "active requests"],
  ["first", "time to first token, p50 / p99"],
  ["between", "inter-token latency, p50 / p99"],
];

let paused = false;
let timer = 0;
let generation = 0;
let lastGood = 0;
const tiles = new Map();
const cards = new Map();
const groups = new Map();
const sources = new Bar(SOURCES);

export function start() {
  for (const [name, label] of TILES) {
    const value = make("dd");
    tiles.set(name, value);
    byId("tiles").append(make("div", { class: "tile" }, value, make("dt", {}, label)));
  }
  byId("sources").append(sources.root);
  byId("pause").addEventListener("click", () => {
    pause(!paused);
    if (!paused) poll(generation);
  });
  const fold = byId("cluster-fold");
  fold.open = !kept.folded();
  fold.addEventListener("toggle", () => {
    kept.keepFolded(!fold.open);
    if (lastGood) poll(generation);
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && lastGood) poll(generation);
  });
}

// Starts polling with the current key.
export function show() {
  generation += 1;
  lastGood = performance.now();
  poll(generation);
}

// Stops and clears the picture: another key may see less.
export function hide() {
  generation += 1;
  lastGood = 0;
  clearTimeout(timer);
  pause(false);
  byId("picture").hidden = true;
  byId("pause").hidden = true;
  for (const [, group] of groups) group.root.remove();
  groups.clear();
  cards.clear();
  notice("");
  say(byId("cluster-about"), "");
}

function pause(wanted) {
  paused = wanted;
  byId("pause").setAttribute("aria-pressed", String(paused));
  say(byId("pause"), paused ? "Resume" : "Pause");
}

async function poll(mine) {
  clearTimeout(timer);
  if (mine !== generation || paused || document.hidden || !byId("cluster-fold").open) return;
  let wait = EVERY_MS;
  try {
    const picture = await (await ask("ui/cluster", { signal: AbortSignal.timeout(PATIENCE_MS) })).json();
    if (mine !== generation) return;
    lastGood = performance.now();
    draw(picture);
  } catch (error) {
    if (mine !== generation) return;
    if (error instanceof Refusal && (error.status === 403 || error.status === 401)) {
      notice(error.status === 403
        ? "This key only allows chatting. The view of the cluster is for operators: it shows the work of all tenants."
        : error.message);
      return;
    }
    const silent = Math.round((performance.now() - lastGood) / 1000);
    notice(`No update for ${silent} s. ${error instanceof Refusal ? error.message : ""}`);
    wait = RETRY_MS;
  }
  timer = setTimeout(poll, wait, mine);
}

function notice(text) {
  byId("cluster-notice").hidden = !text;
  say(byId("cluster-notice"), text);
}

function draw(picture) {
  byId("picture").hidden = false;
  byId("pause").hidden = false;
  say(byId("version"), picture.version);
  const over = picture.rates_over_s;
  say(byId("cluster-about"), over === null ? "" : `rates over ${over.toFixed(0)} s`);
  notice(remarks(picture).join(" "));
  drawFlow(picture);
  drawGroups(picture.components);
}

function remarks(picture) {
  const found = [];
  if (!picture.index_available) found.push("Redis is not responding: prompts have no prefix hits.");
  const { gateways } = picture.flow;
  if (gateways > 1 && picture.rates_over_s !== null) {
    found.push(`Rates and latencies cover only 1 of ${gateways} gateways.`);
  }
  return found;
}

function drawFlow(picture) {
  const { flow } = picture;
  const pair = (found) => found === null ? "–" : [found.p50_s, found.p99_s]
    .map((value) => value === null ? `> ${time(found.last_bound_s)}` : time(value)).join(" / ");
  say(tiles.get("generated"), rate(flow.generated));
  say(tiles.get("prompt"), rate(flow.prompt));
  say(tiles.get("found"), flow.prompt ? percent(flow.cached / flow.prompt) : "–");
  const waiting = picture.requests_here.waiting;
  say(tiles.get("requests"), count(picture.active_requests) + (waiting ? `, ${count(waiting)} waiting` : ""));
  say(tiles.get("first"), pair(flow.first_token));
  say(tiles.get("between"), pair(flow.between_tokens));
  const all = flow.sources ? Object.values(flow.sources).reduce((sum, value) => sum + value, 0) : 0;
  sources.update(SOURCES.map(([name]) => all ? flow.sources[name] / all : null), percent);
}

function drawGroups(components) {
  const seen = new Set();
  for (const [role, title] of GROUPS) {
    const trouble = (one) => one.state === "ok" ? 1 : 0;
    const found = components.filter((one) => one.role === role)
      .sort((a, b) => trouble(a) - trouble(b) || a.component_id.localeCompare(b.component_id, "en", { numeric: true }));
    if (!found.length) {
      groups.get(role)?.root.remove();
      groups.delete(role);
      continue;
    }
    const group = groups.get(role) ?? newGroup(role, title);
    const late = found.filter((one) => one.state !== "ok").length;
    group.root.classList.toggle("many", found.length > 1);
    say(group.count, `${found.length}${late ? `, ${late} unhealthy` : ""}`);
    for (const one of found.slice(0, MAX_CARDS)) {
      seen.add(nameOf(one));
      const card = cards.get(nameOf(one)) ?? newCard(one, group.list);
      card.update(one);
    }
    say(group.rest, found.length > MAX_CARDS ? `and ${found.length - MAX_CARDS} more` : "");
  }
  for (const [name, card] of cards) {
    if (!seen.has(name)) {
      card.root.remove();
      cards.delete(name);
    }
  }
}

function newGroup(role, title) {
  const group = {
    root: make("section", { class: "group" }), count: make("span", { class: "muted" }),
    list: make("ul", { class: "cards" }), rest: make("p", { class: "muted" }),
  };
  group.root.append(make("h3", {}, `${title} `, group.count), group.list, group.rest);
  groups.set(role, group);
  const order = GROUPS.map(([name]) => name).filter((name) => groups.has(name));
  byId("groups").append(...order.map((name) => groups.get(name).root));
  return group;
}

// Key of a component's card. It includes the role, which is missing once the record has expired.
const nameOf = (one) => `${one.role} ${one.component_id}`;

function newCard(one, list) {
  const Kind = one.pool ? NodeCard : one.role === "prefill" || one.role === "decode" ? WorkerCard : Card;
  const card = new Kind(one.component_id, one.role);
  cards.set(nameOf(one), card);
  list.append(card.root);
  return card;
}

const STATES = { ok: "live", late: "late", fenced: "fenced" };

// Card of a component: name, state, and a line of figures.
class Card {
  constructor(name) {
    this.state = make("span", { class: "state" });
    this.line = make("p", { class: "line" });
    this.root = make("li", { class: "card" },
      make("p", { class: "name" }, make("b", {}, name), " ", this.state), this.line);
  }

  update(one) {
    this.root.dataset.state = one.state;
    const age = one.role && one.state !== "ok" ? `, last heartbeat ${time(one.heartbeat_age_ms / 1000)} ago` : "";
    say(this.state, `${STATES[one.state]}${age}`);
    say(this.line, this.words(one));
  }

  words(one) {
    // Without a role there is no load.
    return one.role ? some(one.running_requests, "request") : "–";
  }
}

class WorkerCard extends Card {
  constructor(name, role) {
    super(name);
    this.name = name;
    this.uses = USES[role];
    this.bar = new Bar(this.uses);
    this.strip = new Strip(this.uses.map(([kind]) => kind), COLUMNS);
    this.steps = make("p", { class: "line" });
    this.root.append(make("p", { class: "caption" }, "Use of the steps’ token budgets"), this.bar.root,
      make("p", { class: "caption" }, `The last ${COLUMNS} updates`), this.strip.root, this.steps);
  }

  update(one) {
    super.update(one);
    const found = one.steps;
    const ran = found !== null && Object.keys(found.shares).length > 0;
    const shares = this.uses.map(([name]) => ran ? found.shares[name] : null);
    this.bar.update(shares, percent);
    const said = this.uses.map(([, label], n) => `${label} ${ran ? percent(shares[n]) : "–"}`).join(", ");
    this.strip.add(shares.map((share) => share ?? 0), `Step budget of ${this.name}, last ${COLUMNS} updates; now: ${said}`);
    say(this.steps, found === null ? "–" : !ran ? "No steps." : `${rate(found.per_second)} steps/s of ${time(found.mean_s)},`
      + ` ${percent(found.busy)} busy`);
  }

  words(one) {
    const parts = [`${count(one.running_requests)} running`, `${count(one.waiting_requests)} waiting`,
      `${some(one.queued_tokens, "prompt token")} queued`, `${some(one.free_seqs, "slot")} free`];
    if (one.adapters) parts.push(some(one.adapters, "adapter"));
    if (one.ranks > 1) parts.push(`${count(one.ranks)} ranks`);
    return parts.join(" · ");
  }
}

class NodeCard extends Card {
  constructor(name) {
    super(name);
    this.bar = new Bar(SLOTS);
    this.root.append(make("p", { class: "caption" }, "Blocks in the pool"), this.bar.root);
  }

  update(one) {
    super.update(one);
    const { pool } = one;
    this.bar.update([pool.cached, pool.pinned, pool.leased, pool.quarantined, pool.free], count);
  }

  words(one) {
    const used = one.pool.total ? percent(1 - one.pool.free / one.pool.total) : "–";
    const parts = [`${count(one.pool.total)} blocks, ${used} used`, some(one.running_requests, "ticket")];
    if (one.waiting_requests) parts.push(`${count(one.waiting_requests)} waiting for memory`);
    if (one.pool.disk) parts.push(`${count(one.pool.disk)} on disk`);
    return parts.join(" · ");
  }
}
