// The connection to the server: requests with the key, polling with back-off, server-sent events.

const BASE = location.pathname.replace(/\/kv\/ui\/?$/, "");
const KEY = "pagekeeper-key";
const TIMEOUT = 10_000; // ms
const BACK_OFF = [1, 2, 4, 8, 15]; // seconds
const MAX_EVENT = 4 << 20; // characters of one server-sent event

/** An answer other than 200, or none at all (status 0). The message is the server's own where it sent one. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let key = stored();

function stored() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

export const hasKey = () => key !== "";

/** Keep the key for this tab only; "" forgets it. */
export function useKey(value) {
  key = value;
  try {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  } catch {
    // Kept in memory alone.
  }
}

async function send(path, { body, signal, headers = {} } = {}) {
  const options = { headers: { ...headers }, signal, cache: "no-store", credentials: "omit" };
  if (key) options.headers.authorization = `Bearer ${key}`;
  if (body !== undefined) {
    options.method = "POST";
    options.headers["content-type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(BASE + path, options);
  } catch (error) {
    if (signal?.aborted && signal.reason?.name !== "TimeoutError") throw error;
    throw new ApiError(0, "The server does not answer.");
  }
  if (!response.ok) throw new ApiError(response.status, await reason(response));
  return response;
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

function limited(signal) {
  const timeout = AbortSignal.timeout(TIMEOUT);
  return signal ? AbortSignal.any([signal, timeout]) : timeout;
}

/** GET, or POST with a body; the JSON answer. Raises ApiError, or AbortError where `signal` was aborted. */
export async function ask(path, { body, signal } = {}) {
  const bounded = limited(signal);
  const response = await send(path, { body, signal: bounded });
  try {
    return await response.json();
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "The server's answer broke off.");
  }
}

export async function askText(path) {
  return (await send(path, { signal: limited() })).text();
}

/** What the page knows of its server: "connecting", "live", "down" or "locked" (a key is needed). */
export const connection = {
  state: "connecting",
  error: null,
  failures: 0,
  listeners: [],
  change(state, error = null) {
    const before = this.state;
    this.state = state;
    this.error = error;
    for (const listener of this.listeners) listener(state, error, before);
  },
  worked() {
    this.failures = 0;
    if (this.state !== "live") this.change("live");
  },
  failed(error) {
    if (error.status === 401 || error.status === 403) {
      this.change("locked", error);
    } else {
      this.failures += 1;
      this.change("down", error);
    }
  },
  /** Seconds until the next try. */
  pause() {
    return BACK_OFF[Math.min(this.failures, BACK_OFF.length) - 1] ?? 0;
  },
};

/** Work that repeats: one run at a time, none in a hidden tab; without a server only the heartbeat's. */
export class Poll {
  constructor(work, seconds, { heartbeat = false } = {}) {
    this.work = work;
    this.seconds = seconds;
    this.heartbeat = heartbeat;
    this.running = false;
    this.timer = 0;
    document.addEventListener("visibilitychange", () => document.hidden || this.now());
    connection.listeners.push((state, error, before) => {
      if (state === "live" && before !== "live") this.now();
    });
  }

  async now() {
    clearTimeout(this.timer);
    if (this.running) return;
    this.running = true;
    try {
      if (this.due()) await this.run();
    } finally {
      this.running = false;
      clearTimeout(this.timer);
      const pause = this.heartbeat ? connection.pause() : 0;
      this.timer = setTimeout(() => this.now(), 1000 * Math.max(this.seconds, pause));
    }
  }

  due() {
    if (document.hidden || connection.state === "locked") return false;
    return this.heartbeat || connection.state === "live";
  }

  async run() {
    try {
      await this.work();
      if (this.heartbeat) connection.worked();
    } catch (error) {
      if (error instanceof ApiError) {
        if (this.heartbeat) connection.failed(error);
      } else if (error.name !== "AbortError") {
        throw error;
      }
    }
  }
}

/** Server-sent events, for ever: {id, event, data} each; goes on after the last id when a connection ends. */
export async function follow(path, take, { signal, onState }) {
  let last = "";
  while (!signal.aborted) {
    try {
      const response = await send(path, { signal, headers: last ? { "last-event-id": last } : {} });
      onState("live");
      for await (const event of eventsOf(response.body)) {
        if (event.id !== undefined) last = event.id;
        take(event);
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 404 || error.status === 410) return onState("none");
    }
    onState("waiting");
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

/** The events of a stream: lines end with a line feed, events with an empty line. */
export async function* eventsOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = {};
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      if (rest.length > MAX_EVENT) throw new ApiError(0, "The server sent an event that is too long.");
      for (const line of lines) {
        if (line.replace(/\r$/, "") === "") {
          if (event.data !== undefined) yield event;
          event = {};
        } else {
          field(event, line.replace(/\r$/, ""));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}

function field(event, line) {
  const colon = line.indexOf(":");
  if (colon === 0) return; // a comment
  const name = colon < 0 ? line : line.slice(0, colon);
  const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
  if (name === "data") event.data = event.data === undefined ? value : `${event.data}\n${value}`;
  else if (name === "id" || name === "event") event[name] = value;
}
