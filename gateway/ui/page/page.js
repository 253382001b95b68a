// The page: who may see it, and its two parts.
//
//   open --gateway takes calls without a key--> chat, picture
//     '--401--> the form for a key --good key--> chat, picture --"Forget the key"--> the form

import { Refusal, useKey } from "./api.js";
import * as chat from "./chat.js";
import * as cluster from "./cluster.js";
import { byId, say } from "./draw.js";

// What fits into a header; the gateway's own keys are shorter.
const KEY = /^[\x21-\x7e]{1,512}$/;

async function connect(key) {
  useKey(key);
  const models = await chat.loadModels();
  byId("key-form").hidden = true;
  byId("parts").hidden = false;
  byId("forget").hidden = !key;
  say(byId("connection"), models ? "Connected" : "Connected; no model is served now");
  cluster.show();
  byId("prompt").focus();
}

function askForKey(message = "") {
  useKey("");
  byId("parts").hidden = true;
  byId("forget").hidden = true;
  byId("key-form").hidden = false;
  say(byId("connection"), "Not connected");
  say(byId("key-error"), message);
  byId("key").focus();
}

byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  say(byId("key-error"), "");
  if (!KEY.test(key)) {
    askForKey("A key has letters, digits and signs alone, and no spaces.");
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
  askForKey();
});

chat.start();
cluster.start();
try {
  await connect("");
} catch (error) {
  askForKey(error instanceof Refusal && error.status === 401 ? "" : error.message);
}
