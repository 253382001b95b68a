// Chats in the browser's local storage, one item each; the open one's id and settings in the tab's session storage, so
// that a reload restores it. A chat with a key is shown for the same key only, and deleted when another key is used.
// Neither the key nor anything that would verify a guess of it is stored.

const PREFIX = "pillion-chat-";
const OPEN = "pillion-open-chat";
const FOLDED = "pillion-cluster-folded";
// Max stored chats; the least recently used one is deleted first.
const MOST_CHATS = 100;
// Max characters per chat (its oldest turns are dropped first) and of all chats. A character takes two bytes; browsers
// allow 10 MB.
const MOST_CHAT_CHARACTERS = 1_000_000;
const MOST_CHARACTERS = 3_000_000;
const TAG_VALUES = 65_536;

// 16-bit tag of a key; 0 without a key.
export function tagOf(key) {
  let tag = 0;
  for (const sign of key) tag = (tag * 31 + sign.codePointAt(0)) % (TAG_VALUES - 1);
  return key ? tag + 1 : 0;
}

// Stores the open chat for the key with this tag, as the most recently used one.
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
  // The browser may have less room, or storage may be disabled.
  while (!attempt(() => localStorage.setItem(PREFIX + id, text))) {
    drop(id);
    if (!others.length) return;
    drop(others.shift().id);
  }
}

// Returns the chats of this tag's key, [{ id, settings, turns }], most recently used first.
export function chats(tag) {
  return all().filter((one) => one.tag === tag).sort((a, b) => b.used - a.used);
}

// Returns this tab's open chat if it has this key's tag, else null. Deletes chats of other keys.
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

// Whether the cluster's panel is collapsed.
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

// Returns false if the storage is full or disabled.
function attempt(work) {
  try {
    work();
    return true;
  } catch {
    return false;
  }
}
