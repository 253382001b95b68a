// Calls to the gateway that served this page. The key is in this module's memory only: a reload drops it.

import { tagOf } from "./kept.js";

let key = "";
let heard = () => {};

export const useKey = (text) => { key = text; };
export const keyTag = () => tagOf(key);

// Sets the callback for the state of the connection, called after each call with the problem as text, or "".
export const onHeard = (told) => { heard = told; };

// An error response, as text for people. `status` is 0 if the gateway is unreachable.
export class Refusal extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const AWAY = "The gateway cannot be reached.";
const SAID = {
  401: "This gateway does not know this API key. Check it and enter it again.",
  403: "This key does not permit that.",
  429: "The gateway is overloaded, or a quota of this key is exhausted.",
  503: "No worker is serving this model.",
};

async function refusalOf(answer) {
  let message = "";
  try {
    message = String((await answer.json()).error.message);
  } catch {
    // A proxy's page is not shown to people.
  }
  if (answer.status === 401) message = "";
  const after = answer.headers.get("retry-after");
  const again = after && answer.status !== 401 ? ` Try again in ${after} s.` : "";
  const begin = SAID[answer.status] ?? (message ? "" : `The gateway responded with status ${answer.status}.`);
  return new Refusal([begin, message].filter(Boolean).join(" ") + again, answer.status);
}

// Returns the response of a page of this gateway. Throws Refusal, and AbortError if `options.signal` was aborted.
export async function ask(path, options = {}) {
  const headers = new Headers(options.headers);
  if (key) headers.set("authorization", `Bearer ${key}`);
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, redirect: "error", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    heard(AWAY);
    throw new Refusal(AWAY, 0);
  }
  heard(answer.status === 401 ? SAID[401] : "");
  if (!answer.ok) throw await refusalOf(answer);
  return answer;
}

// Yields the objects of a stream of server-sent events. Throws as `ask` does.
export async function* stream(path, body, signal) {
  const headers = { "content-type": "application/json" };
  const answer = await ask(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      heard(AWAY);
      throw new Refusal("The connection to the gateway was lost.", 0);
    }
    if (part.done) throw new Refusal("The answer ended prematurely.", 0);
    const events = (rest + part.value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      // A comment (keep-alive) has no data.
      const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (!data) continue;
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found.error) throw new Refusal(String(found.error.message), 500);
      yield found;
    }
  }
}
