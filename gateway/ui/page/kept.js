// Chats in the browser's local store, one item each, and which one is open, with its settings, in the tab's store, so
// that a reload shows it again. A chat that was had with a key is shown for the same key alone, and goes when another key
// comes. The key itself is not kept, nor anything that would prove a guess of it.

const PREFIX = "pillion-chat-";
const OPEN = "pillion-open-chat";
const FOLDED = "pillion-cluster-folded";
// Chats that are kept; the least recently used ones go first.
const MOST_CHATS = 100;
// Characters of one chat, whose oldest turns go first, and of all chats. A character takes two bytes; browsers allow
// 10 MB.
const MOST_CHAT_CHARACTERS = 1_000_000;
const MOST_CHARACTERS = 3_000_000;
const TAG_VALUES = 65_536;

// Tells a key from another one, for 65,535 in 65,536 of them; 0 without a key.
export function tagOf(key) {
  let tag = 0;
  for (const sign of key) tag = (tag * 31 + sign.codePointAt(0)) % (TAG_VALUES - 1);
  return key ? tag + 1 : 0;
}

// Keeps the open chat for the key of this tag, as the most recently used one.
export function keep(tag, id, settings, turns) {
  attempt(() => sessionStorage.setItem(OPEN, JSON.stringify({ tag, id, settings })));
  if (!turns.length) {
    drop(id);
    return;
  }
  let from = 0;
  let text = "";
  do {
    text = JSON.stringify({ tag, used: Date.now(), settings, turns: turns.slice(from) });
    from += 1;
  } while (text.length > MOST_CHAT_CHARACTERS && from <= turns.length);
  const others = all().filter((one) => one.id !== id).sort((a, b) => a.used - b.used);
  let characters = others.reduce((sum, one) => sum + one.characters, text.length);
  while (others.length && (others.length >= MOST_CHATS || characters > MOST_CHARACTERS)) {
    characters -= others[0].characters;
    drop(others.shift().id);
  }
  // The browser may have less room than that, or keep nothing at all.
  while (!attempt(() => localStorage.setItem(PREFIX + id, text))) {
    drop(id);
    if (!others.length) return;
    drop(others.shift().id);
  }
}

// The chats of this tag's key, [{ id, settings, turns }], the most recently used one first.
export function chats(tag) {
  return all().filter((one) => one.tag === tag).sort((a, b) => b.used - a.used);
}

// The chat that this tab had open with the key of this tag; null where it had none. Chats of other keys go.
export function openChat(tag) {
  for (const one of all()) if (one.tag !== tag) drop(one.id);
  let open = null;
  attempt(() => { open = JSON.parse(sessionStorage.getItem(OPEN)); });
  if (open?.tag !== tag) return null;
  return { turns: [], ...chats(tag).find((one) => one.id === open.id), ...open };
}

export function drop(id) {
  attempt(() => localStorage.removeItem(PREFIX + id));
}

export function dropAll() {
  for (const one of all()) drop(one.id);
  attempt(() => sessionStorage.removeItem(OPEN));
}

// Whether the cluster's panel is folded.
export function folded() {
  let said = null;
  attempt(() => { said = localStorage.getItem(FOLDED); });
  return said !== null;
}

export function keepFolded(wanted) {
  attempt(() => (wanted ? localStorage.setItem(FOLDED, "1") : localStorage.removeItem(FOLDED)));
}

function all() {
  const found = [];
  attempt(() => {
    for (const name of Object.keys(localStorage).filter((one) => one.startsWith(PREFIX))) {
      const id = name.slice(PREFIX.length);
      const text = localStorage.getItem(name) ?? "";
      let chat = null;
      attempt(() => { chat = JSON.parse(text); });
      if (Array.isArray(chat?.turns)) found.push({ ...chat, id, characters: text.length });
      else drop(id);
    }
  });
  return found;
}

// Returns whether it worked: a browser may keep nothing, or have no room.
function attempt(work) {
  try {
    work();
    return true;
  } catch {
    return false;
  }
}
