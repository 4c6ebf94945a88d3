// Paste a prompt: how much of it would hit, and side by side where it leaves what is cached.

import { ApiError, ask } from "./api.js";
import { age, commonStart, count, el, percent, plain, plural, say, sentence, shortId } from "./dom.js";

const BEFORE = 100; // characters that are shown before the difference
const MOST_CELLS = 1024; // of the strip
const FIELDS = [
  "model",
  "cache_salt",
  "add_special_tokens",
  "add_generation_prompt",
  "continue_final_message",
  "chat_template_kwargs",
];
const REASONS = {
  hit: "full hit",
  never_seen: "never seen",
  evicted: "evicted",
  partial: "partial block",
  being_computed: "being computed",
  other_layout: "other layout",
};

export class Explain {
  constructor(root, { goTo }) {
    this.form = root.querySelector("form");
    this.input = root.querySelector("textarea");
    this.kind = root.querySelector("select");
    this.salt = root.querySelector("input");
    this.detected = root.querySelector(".detected");
    this.button = root.querySelector("button");
    this.result = root.querySelector(".result");
    this.goTo = goTo;
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.run();
    });
    for (const node of [this.input, this.kind]) node.addEventListener("input", () => this.detect());
    this.detect();
  }

  detect() {
    say(
      this.detected,
      this.input.value.trim() ? bodyOf(this.input.value, this.kind.value).name : "Ctrl+Enter",
    );
  }

  async run() {
    if (!this.input.value) {
      this.input.focus();
      return;
    }
    const { body } = bodyOf(this.input.value, this.kind.value);
    if (this.salt.value) body.cache_salt = this.salt.value;
    this.button.disabled = true;
    try {
      const [explanation, plan] = await Promise.all([ask("/kv/explain", { body }), this.plan(body)]);
      this.show(explanation, plan);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.result.replaceChildren(el("p", { class: "failed", role: "alert" }, error.message));
    } finally {
      this.button.disabled = false;
    }
  }

  /** What admission would do; the explanation stands without it. */
  async plan(body) {
    try {
      return await ask("/kv/plan", { body: { ...body, max_tokens: 16 } });
    } catch (error) {
      if (error instanceof ApiError) return null;
      throw error;
    }
  }

  show(answer, plan) {
    const share = answer.num_tokens ? answer.cached_tokens / answer.num_tokens : 0;
    const head = el(
      "div",
      { class: "verdict" },
      el("strong", { class: "verdict-share" }, percent(share)),
      el("span", {}, `${count(answer.cached_tokens)} of ${plural(answer.num_tokens, "token")} cached`),
      el("span", { class: `pill reason ${answer.reason}` }, REASONS[answer.reason] ?? answer.reason),
    );
    const { difference, eviction } = answer;
    const asides = [
      evicted(eviction),
      answer.computed_by ? `Request ${shortId(answer.computed_by)} computes the next block now.` : "",
      plan?.message ? sentence(`sent now: ${plan.message}`) : "",
    ];
    const parts = [head, this.strip(answer)];
    if (answer.advice) parts.push(el("p", { class: "advice" }, answer.advice));
    if (difference) parts.push(sides(difference));
    for (const text of asides) if (text) parts.push(el("p", { class: "aside" }, text));
    this.result.replaceChildren(...parts);
    this.result.dataset.reason = answer.reason;
    this.result.dataset.cached = answer.cached_tokens;
  }

  /** One cell per block of the prompt. */
  strip(answer) {
    const size = answer.block_size;
    const total = Math.ceil(answer.num_tokens / size);
    const cells = [];
    const used = new Map();
    for (let index = 0; index < Math.min(total, MOST_CELLS); index += 1) {
      const tokens = Math.min(size, answer.num_tokens - index * size);
      const kind = kindOf(answer, index, size);
      used.set(kind, (used.get(kind) ?? 0) + 1);
      const held = answer.blocks[index];
      const span = `Tokens ${index * size} to ${index * size + tokens - 1}`;
      const title = `${span}: ${NAMES[kind]}${Number.isInteger(held?.block) ? `, block ${held.block}` : ""}`;
      if (Number.isInteger(held?.block)) {
        cells.push(
          el("button", {
            type: "button",
            class: `cell ${kind}`,
            title,
            "aria-label": title,
            onclick: () => this.goTo(held.block),
          }),
        );
      } else cells.push(el("span", { class: `cell ${kind}`, title }));
    }
    if (total > MOST_CELLS)
      cells.push(el("span", { class: "aside" }, `and ${plural(total - MOST_CELLS, "block")} more`));
    const legend = [...used].map(([kind, number]) =>
      el("span", {}, el("i", { class: `cell ${kind}` }), `${count(number)} ${NAMES[kind]}`),
    );
    return el(
      "div",
      { class: "strip-box" },
      el("div", { class: "strip" }, ...cells),
      el("div", { class: "strip-legend" }, ...legend),
    );
  }
}

const NAMES = { hit: "hit", tier: "from the disk tier", copied: "partly copied", missing: "to compute" };

function kindOf(answer, index, size) {
  const covered = answer.cached_tokens - index * size;
  const whole = Math.min(size, answer.num_tokens - index * size);
  const held = answer.blocks[index];
  if (held && (held.tier ?? "pool") !== "pool") return "tier";
  if (covered >= whole || (held && covered >= whole - 1)) return "hit";
  return covered > 0 ? "copied" : "missing";
}

function evicted(eviction) {
  if (!eviction) return "";
  const causes = {
    capacity: "to make room",
    evict: "by a request to evict it",
    clear: "when the cache was cleared",
    other_layout: "with another model's cache",
  };
  const whom = eviction.request_id ? ` for ${shortId(eviction.request_id)}` : "";
  return `Evicted ${age(eviction.seconds_ago)} ago ${causes[eviction.cause] ?? eviction.cause}${whom}.`;
}

/** The two texts beside each other, with what they share faint and what differs marked. */
function sides({ before, yours, cached, token, block_index: index }) {
  const shared = commonStart(yours.text, cached.text);
  const shown = before.length > BEFORE ? `…${before.slice(-BEFORE)}` : before;
  return el(
    "div",
    { class: "sides" },
    side(`Yours, from token ${count(token)} in its block ${index}`, shown, yours.text, shared, "yours"),
    side(`Cached, in block ${cached.block} of the pool`, shown, cached.text, shared, "theirs"),
  );
}

function side(title, before, text, shared, name) {
  const same = el("span", { class: "same" });
  same.textContent = plain(before + text.slice(0, shared));
  const differs = el("mark", { class: "differs" });
  differs.textContent = plain(text.slice(shared)) || "∅";
  return el(
    "figure",
    { class: `side ${name}` },
    el("figcaption", {}, title),
    el("pre", { tabindex: 0 }, same, differs),
  );
}

/** What was pasted as a request's body: text, messages, token ids or a whole request of the OpenAI API. */
export function bodyOf(text, kind) {
  if (kind === "chat")
    return { name: "one user message", body: { messages: [{ role: "user", content: text }] } };
  const value = kind === "text" ? undefined : parsed(text);
  if (Array.isArray(value) && value.length && value.every((item) => Number.isInteger(item))) {
    return { name: plural(value.length, "token id"), body: { prompt: value } };
  }
  if (Array.isArray(value) && value.length && value.every((item) => item?.role)) {
    return { name: plural(value.length, "chat message"), body: { messages: value } };
  }
  if (value && (Array.isArray(value.messages) || value.prompt !== undefined)) {
    const body = Array.isArray(value.messages) ? { messages: value.messages } : { prompt: value.prompt };
    for (const field of FIELDS) if (value[field] !== undefined) body[field] = value[field];
    return {
      name: body.messages
        ? `a request with ${plural(body.messages.length, "message")}`
        : "a request with a prompt",
      body,
    };
  }
  return { name: `text, ${plural(text.length, "character")}`, body: { prompt: text } };
}

function parsed(text) {
  if (!/^\s*[[{]/.test(text)) return undefined;
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}
