// The page: login, and its parts.
//
//   open --gateway needs no key--> chat, picture
//     '--401--> the form for a key --valid key--> chat, picture --"Forget the key"--> the form

import { Refusal, onHeard, useKey } from "./api.js";
import * as chat from "./chat.js";
import * as cluster from "./cluster.js";
import { byId, say } from "./draw.js";
import * as records from "./records.js";

// Max length of a key, which must fit into a header; the gateway's keys are shorter.
const KEY = /^[\x21-\x7e]{1,512}$/;
// Interval of the gateway's health checks while the page is visible, and their timeout.
const WATCH_MS = 5000;
const PATIENCE_MS = 4000;

let connected = false;
let models = 0;

// Shows whether the gateway answers; `problem` is "" after a successful call.
function tell(problem) {
  if (!connected) return;
  const words = models ? "Connected" : "Connected; no model is being served";
  say(byId("connection"), problem ? `Not connected. ${problem}` : words);
  byId("connection").classList.toggle("away", Boolean(problem));
}

async function watch() {
  if (!connected || document.hidden) return;
  const patience = new AbortController();
  const timer = setTimeout(() => patience.abort(), PATIENCE_MS);
  try {
    models = await chat.loadModels(patience.signal);
    tell("");
  } catch (error) {
    // The call itself reports failures.
    if (error.name === "AbortError") tell("The gateway is not responding.");
  } finally {
    clearTimeout(timer);
  }
}

async function connect(key) {
  useKey(key);
  models = await chat.loadModels();
  connected = true;
  byId("key-form").hidden = true;
  byId("parts").hidden = false;
  byId("forget").hidden = !key;
  tell("");
  chat.restore();
  cluster.show();
  records.look();
  byId("prompt").focus();
}

function askForKey(message = "") {
  useKey("");
  connected = false;
  byId("parts").hidden = true;
  byId("forget").hidden = true;
  byId("key-form").hidden = false;
  byId("connection").classList.remove("away");
  say(byId("connection"), "Not connected");
  say(byId("key-error"), message);
  byId("key").focus();
}

byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  say(byId("key-error"), "");
  if (!KEY.test(key)) {
    askForKey("A key consists of letters, digits and symbols, without spaces.");
    return;
  }
  try {
    await connect(key);
    byId("key").value = "";
  } catch (error) {
    askForKey(error.message);
  }
});

byId("forget").addEventListener("click", () => {
  chat.forget();
  cluster.hide();
  records.hide();
  askForKey();
});

onHeard(tell);
setInterval(watch, WATCH_MS);
for (const event of ["visibilitychange", "online", "offline"]) {
  (event === "visibilitychange" ? document : window).addEventListener(event, watch);
}
chat.start();
cluster.start();
records.start();
try {
  await connect("");
} catch (error) {
  askForKey(error instanceof Refusal && error.status === 401 ? "" : error.message);
}
