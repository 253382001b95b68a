// Elements, bars and numbers. Text is only inserted as text nodes, so a model's answer cannot become markup.

export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) element.setAttribute(attribute, value);
  element.append(...children);
  return element;
}

export const byId = (id) => document.getElementById(id);

// Sets an element's text only if it differs, to preserve the reader's selection and scroll position.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Copies a text. Falls back where there is no clipboard API: plain HTTP from another machine.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = make("textarea", { class: "unseen", "aria-hidden": "true" });
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    if (!done) throw new Error("The browser does not permit this page to copy.");
  }
}

const COPIED_MS = 1500;

// Button that copies the result of `text`, and confirms it.
export function copyButton(label, text) {
  const button = make("button", { type: "button", class: "small", "aria-label": label }, "Copy");
  button.addEventListener("click", async () => {
    let said = "Copied";
    try {
      await copy(text());
    } catch {
      said = "Not copied";
    }
    say(button, said);
    say(byId("spoken"), `${said}.`);
    button.focus();
    setTimeout(() => say(button, "Copy"), COPIED_MS);
  });
  return button;
}

// Bar of segments with a legend.
// `kinds`: class and label per segment. `update` takes a value per segment, and its format.
export class Bar {
  constructor(kinds, { always = true } = {}) {
    this.always = always;
    this.segments = kinds.map(([kind]) => make("span", { class: `segment ${kind}` }));
    this.values = kinds.map(() => make("b"));
    this.entries = kinds.map(([kind, label], n) =>
      make("li", {}, make("span", { class: `swatch ${kind}` }), this.values[n], ` ${label}`));
    this.root = make("div", { class: "bar" },
      make("div", { class: "track", "aria-hidden": "true" }, ...this.segments),
      make("ul", { class: "legend" }, ...this.entries));
  }

  update(values, write) {
    values.forEach((value, n) => {
      const shown = value ?? 0;
      this.segments[n].hidden = !(shown > 0);
      this.segments[n].style.flexGrow = String(shown);
      this.entries[n].hidden = !this.always && !(shown > 0);
      say(this.values[n], value === null || value === undefined ? "–" : write(value));
    });
  }
}

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 40;

function shape(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [attribute, value] of Object.entries(attributes)) element.setAttribute(attribute, value);
  return element;
}

// Strip of stacked columns, newest at the right. A column is a list of shares whose sum is at most 1.
export class Strip {
  constructor(kinds, columns) {
    this.kinds = kinds;
    this.columns = columns;
    this.kept = [];
    this.root = shape("svg", {
      class: "strip", role: "img", viewBox: `0 0 ${columns} ${HEIGHT}`, preserveAspectRatio: "none",
    });
  }

  add(shares, label) {
    this.kept = [...this.kept, shares].slice(-this.columns);
    const drawn = [];
    this.kept.forEach((column, n) => {
      let top = HEIGHT;
      column.forEach((share, kind) => {
        const height = share * HEIGHT;
        top -= height;
        const x = this.columns - this.kept.length + n;
        if (height > 0) drawn.push(shape("rect", { class: this.kinds[kind], x, y: top, width: 0.82, height }));
      });
    });
    this.root.replaceChildren(...drawn);
    this.root.setAttribute("aria-label", label);
  }
}

export const count = (value) => Math.round(value).toLocaleString("en");
export const some = (value, thing) => `${count(value)} ${thing}${Math.round(value) === 1 ? "" : "s"}`;
export const percent = (share) => `${Math.round(share * 100)} %`;

export function rate(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10 || value === 0) return count(value);
  return value.toFixed(value >= 0.1 ? 1 : 2);
}

export function time(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds >= 1) return `${seconds.toFixed(1)} s`;
  return `${(seconds * 1000).toFixed(seconds >= 0.01 ? 0 : 1)} ms`;
}
