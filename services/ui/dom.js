// Small helpers: elements and numbers. Text of prompts reaches the page as textContent only.

export const $ = (id) => document.getElementById(id);

/** An element; `properties` become attributes, `on…` functions listeners, children nodes or text. */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Set an element's text only where it differs: what did not change is not laid out again. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export const count = (value) => whole.format(value);

export function plural(value, word) {
  const ending = value === 1 ? "" : word.endsWith("ch") ? "es" : "s";
  return `${count(value)} ${word}${ending}`;
}

export function percent(part) {
  if (part === null || !Number.isFinite(part)) return "–";
  const value = part * 100;
  return `${value > 0 && value < 10 ? value.toFixed(1) : value.toFixed(0)}%`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let index = 0;
  while (value >= 1024 && index < units.length - 1) {
    value /= 1024;
    index += 1;
  }
  return `${value >= 100 || index === 0 ? value.toFixed(0) : value.toFixed(1)} ${units[index]}`;
}

/** Seconds in words of two digits: "0.4 s", "12 s", "3 min", "5 h", "2 d". */
export function age(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 90) return `${seconds.toFixed(0)} s`;
  if (seconds < 5400) return `${(seconds / 60).toFixed(0)} min`;
  if (seconds < 129600) return `${(seconds / 3600).toFixed(0)} h`;
  return `${(seconds / 86400).toFixed(0)} d`;
}

/** Rates: one digit after the point while small. */
export function rate(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  return value >= 100 || value === 0 ? count(value) : value.toFixed(1);
}

/** A message of the server as a sentence. */
export function sentence(text) {
  const begun = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?…]$/.test(begun) ? begun : `${begun}.`;
}

/** Text of a prompt, without the characters that would turn the direction of what stands around it. */
export const plain = (text) => text.replace(/[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "\ufffd");

/** The same on one line: line ends and tabs become visible. */
export const oneLine = (text) => plain(text).replace(/\r?\n/g, "⏎").replace(/\t/g, "⇥");

export function isLowSurrogate(text, index) {
  const code = text.charCodeAt(index);
  return code >= 0xdc00 && code < 0xe000;
}

/** How many characters two texts begin with in common; a pair of surrogates is not cut in two. */
export function commonStart(a, b) {
  let index = 0;
  while (index < Math.min(a.length, b.length) && a[index] === b[index]) index += 1;
  return isLowSurrogate(a, index) || isLowSurrogate(b, index) ? index - 1 : index;
}

export const shortId = (id) => (id.length > 22 ? `${id.slice(0, 14)}…${id.slice(-5)}` : id);

/** A CSS custom property of the page, as it is now. */
export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** `work(...)` once, `delay` ms after the last call. */
export function debounced(work, delay) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...given), delay);
  };
}

/** `work()` once at the next frame, however often it is asked for until then. */
export function perFrame(work) {
  let asked = 0;
  return () => {
    if (!asked) {
      asked = requestAnimationFrame((now) => {
        asked = 0;
        work(now);
      });
    }
  };
}
