// The newest recorded requests: where their time went, as explained by `pillion explain`. For operators only.

import { ask } from "./api.js";
import { byId, make, say, some, time } from "./draw.js";

let generation = 0;

export function start() {
  byId("look").addEventListener("click", look);
}

// Stops and clears the list: another key may see less.
export function hide() {
  generation += 1;
  byId("records").hidden = true;
  byId("stories").replaceChildren();
}

// Loads the stories with the current key. There are none without a recorder, and for tenants.
export async function look() {
  generation += 1;
  const mine = generation;
  let stories;
  try {
    ({ stories } = await (await ask("ui/records")).json());
  } catch (error) {
    if (mine === generation) say(byId("records-about"), error.message);
    return;
  }
  if (mine !== generation) return;
  byId("records").hidden = false;
  say(byId("records-about"), stories.length ? `${some(stories.length, "bundle")}, newest first`
    : "Nothing recorded yet.");
  byId("stories").replaceChildren(...stories.map(drawn));
}

function drawn(story) {
  const when = story.created_unix_ms ? `${new Date(story.created_unix_ms).toLocaleTimeString()} ` : "";
  const end = Math.max(...story.phases.map((phase) => phase.end_ms), 0.001);
  return make("details", { class: "story" },
    make("summary", {}, when, story.title),
    ...story.phases.map((phase) => bar(phase, end)),
    ...story.sentences.map((sentence) => make("p", {}, sentence)));
}

// Bar of a request's waits over its whole time.
function bar(phase, end) {
  const track = make("div", { class: "track", "aria-hidden": "true" });
  for (const [kind, from, to] of [["", 0, phase.start_ms], ["pool", phase.start_ms, phase.end_ms], ["", phase.end_ms, end]]) {
    const segment = make("span", { class: `segment ${kind}` });
    segment.hidden = !(to > from);
    segment.style.flexGrow = String((to - from) / end);
    track.append(segment);
  }
  const took = time((phase.end_ms - phase.start_ms) / 1000);
  return make("div", {}, make("p", { class: "line" }, `${took} ${phase.words}`), track);
}
