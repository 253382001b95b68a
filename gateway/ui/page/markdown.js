// Markdown of an answer, as elements. Of the library only the tokens are used, not its HTML: each element is created
// here, with the tags and attributes below and text nodes, so an answer cannot become anything else. HTML stays text,
// links lead only to web pages and mail addresses, and an image becomes a link, which loads nothing.

import MarkdownIt from "./markdown-it.js";
import { copyButton, make } from "./draw.js";

// Longer answers are shown as plain text. Parsing takes at worst about 20 µs per character.
const MOST_CHARACTERS = 50_000;
// Min interval of redraws of a growing answer, and its ratio to the duration of the last redraw.
const EVERY_MS = 100;
const REST = 5;

const TAGS = new Set([
  "p", "em", "strong", "s", "a", "blockquote", "ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td",
]);
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const reader = new MarkdownIt({ html: false, breaks: true, linkify: true });
reader.linkify.set({ fuzzyLink: false, fuzzyEmail: false });

// Yields the top-level blocks of a text: tokens, and their source lines.
function* blocksOf(text) {
  const lines = text.split("\n");
  let tokens = [];
  for (const token of reader.parse(text, {})) {
    tokens.push(token);
    if (token.level > 0 || token.nesting > 0) continue;
    yield { tokens, source: lines.slice(...(tokens[0].map ?? [0])).join("\n") };
    tokens = [];
  }
}

// Returns the URL of an allowed link, else null.
function addressOf(text) {
  try {
    const address = new URL(text);
    return SCHEMES.has(address.protocol) ? address.href : null;
  } catch {
    return null;
  }
}

function link(address, ...content) {
  const found = addressOf(address);
  return found === null
    ? make("span", {}, ...content)
    : make("a", { href: found, target: "_blank", rel: "noopener noreferrer" }, ...content);
}

function code(text, language) {
  const name = language.trim().split(/\s/)[0].slice(0, 40);
  return make("div", { class: "code" },
    make("div", { class: "code-head" }, make("span", {}, name || "code"), copyButton("Copy this code", () => text)),
    make("pre", { tabindex: "0", role: "group", "aria-label": `Code ${name}`.trim() }, make("code", {}, text)));
}

function opened(token) {
  if (token.tag === "a") return link(token.attrGet("href") ?? "");
  // The page's own headings go down to h3.
  if (/^h[1-6]$/.test(token.tag)) return make("h4", { class: token.tag });
  if (!TAGS.has(token.tag)) return make("span");
  const side = /^text-align:(left|center|right)$/.exec(token.attrGet("style") ?? "");
  const start = /^\d{1,9}$/.exec(token.attrGet("start") ?? "");
  return make(token.tag, { ...(side && { class: `to-${side[1]}` }), ...(start && { start: start[0] }) });
}

function leaf(token) {
  switch (token.type) {
    case "softbreak":
    case "hardbreak": return make("br");
    case "hr": return make("hr");
    case "code_inline": return make("code", {}, token.content);
    case "code_block":
    case "fence": return code(token.content.replace(/\n$/, ""), token.info);
    case "image": return link(token.attrGet("src") ?? "", `image: ${token.content || token.attrGet("src")}`);
    default: return token.content;
  }
}

function draw(tokens, parent) {
  const open = [parent];
  for (const token of tokens) {
    const top = open.at(-1);
    if (token.type === "inline") {
      draw(token.children, top);
    } else if (token.nesting < 0) {
      open.pop();
    } else if (token.nesting === 0) {
      top.append(leaf(token));
    } else if (token.hidden) {
      // Paragraphs of a tight list.
      open.push(top);
    } else {
      const element = opened(token);
      // A wide table has its own scrollbar.
      const wide = token.tag === "table";
      top.append(wide ? make("div", { class: "wide-table", tabindex: "0", role: "group", "aria-label": "Table" }, element) : element);
      open.push(element);
    }
  }
}

// Element that shows a growing text as Markdown.
export class MarkdownView {
  constructor() {
    this.root = make("div", { class: "text markdown" });
    this.text = "";
    this.sources = [];
    this.timer = 0;
    this.tookMs = 0;
  }

  // Schedules a redraw; `drawn` is called after it.
  grow(text, drawn) {
    this.text = text;
    this.timer ||= setTimeout(() => {
      this.timer = 0;
      this.draw();
      drawn();
    }, Math.max(EVERY_MS, REST * this.tookMs));
  }

  // Draws the whole text immediately.
  show(text) {
    clearTimeout(this.timer);
    this.timer = 0;
    this.text = text;
    // A late link definition changes earlier blocks.
    this.sources = [];
    this.draw();
  }

  draw() {
    const began = performance.now();
    this.root.classList.toggle("plain", this.text.length > MOST_CHARACTERS);
    if (this.text.length > MOST_CHARACTERS) {
      this.root.textContent = this.text;
      return;
    }
    const blocks = [...blocksOf(this.text)];
    // Unchanged blocks stay, to preserve the reader's selection and scroll position.
    let same = 0;
    while (same < blocks.length && blocks[same].source === this.sources[same]) same += 1;
    while (this.root.childNodes.length > same) this.root.lastChild.remove();
    for (const { tokens } of blocks.slice(same)) draw(tokens, this.root);
    this.sources = blocks.map((block) => block.source);
    this.tookMs = performance.now() - began;
  }
}
