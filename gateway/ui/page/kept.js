// What a reload keeps: the chat, in this tab's store of the browser, until the tab is closed. A chat that was had with a
// key is given back for the same key alone. The key itself is not kept, nor anything that would prove a guess of it.

const NAME = "pillion-chat";
// Of a longer chat the oldest turns are not kept.
const MOST_CHARACTERS = 1_000_000;
const TAG_VALUES = 65_536;

// Tells a key from another one, for 65,535 in 65,536 of them; 0 without a key.
export function tagOf(key) {
  let tag = 0;
  for (const sign of key) tag = (tag * 31 + sign.codePointAt(0)) % (TAG_VALUES - 1);
  return key ? tag + 1 : 0;
}

// Keeps `turns`, a list, and `settings` for the key of this tag.
export function keep(tag, turns, settings) {
  let from = 0;
  let text = "";
  do {
    text = JSON.stringify({ tag, settings, turns: turns.slice(from) });
    from += 1;
  } while (text.length > MOST_CHARACTERS && from <= turns.length);
  try {
    sessionStorage.setItem(NAME, text);
  } catch {
    // The browser keeps nothing, or has no room for it.
    drop();
  }
}

export function drop() {
  try {
    sessionStorage.removeItem(NAME);
  } catch {
    // Nothing is kept.
  }
}

// What was kept for the key of this tag; null where there is nothing. What belongs to another key is dropped.
export function kept(tag) {
  try {
    const found = JSON.parse(sessionStorage.getItem(NAME));
    if (found?.tag === tag && Array.isArray(found.turns)) return found;
  } catch {
    // What cannot be read is not kept either.
  }
  drop();
  return null;
}
