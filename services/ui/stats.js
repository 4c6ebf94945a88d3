// The figures at the top: /kv/stats (and /metrics for throughput) once a second, as numbers and as charts.

import { ApiError, ask, askText, Poll } from "./api.js";
import { Chart, History } from "./charts.js";
import { $, bytes, count, el, percent, plural, rate, say } from "./dom.js";

const WINDOW = 10; // seconds over which rates are taken
const NOTHING = { queries: 0, hits: 0, evictions: 0 };
const COUNTERS = ["queries", "hits", "output", "prompt", "evictions"];

export class Stats {
  constructor() {
    this.history = new History(["used", "cached", "quarantined", "hitRate", "waste", "output", "prompt"]);
    this.samples = []; // [time, counters] of the last WINDOW seconds
    this.boot = "";
    const shared = [this.history];
    this.charts = [
      new Chart($("pool-chart"), ...shared, {
        stacked: true,
        top: 1,
        format: percent,
        series: [
          series("used", "in use", "--sealed"),
          series("cached", "cached", "--cached"),
          series("quarantined", "quarantined", "--quarantined"),
        ],
      }),
      new Chart($("hits-chart"), ...shared, {
        top: 1,
        format: percent,
        series: [series("hitRate", "hit rate, last 10 s", "--cached")],
      }),
      new Chart($("speed-chart"), ...shared, {
        format: rate,
        series: [series("prompt", "prompt", "--reserved"), series("output", "output", "--sealed")],
      }),
      new Chart($("waste-chart"), ...shared, {
        format: percent,
        series: [series("waste", "unused slots", "--pinned")],
      }),
    ];
    this.poll = new Poll(() => this.load(), 1, { heartbeat: true });
  }

  async load() {
    const stats = await ask("/kv/stats");
    const tokens = stats.cache ? await metrics() : null; // a tenant may not ask for what all do
    const now = Date.now() / 1000;
    if (stats.boot_id !== this.boot) {
      this.boot = stats.boot_id;
      this.samples = [];
    }
    this.latest = stats;
    const { queries, hits, evictions } = stats.cache ?? NOTHING; // a tenant is told less
    const prompt = tokens && stats.cache ? tokens.prompt - hits : null;
    this.samples.push([now, { queries, hits, evictions, output: tokens?.output ?? null, prompt }]);
    while (this.samples.length > 2 && this.samples[1][0] < now - WINDOW) this.samples.shift();
    const rates = this.rates();
    const { pool } = stats;
    const size = Math.max(1, pool.num_blocks);
    const quarantined = pool.quarantined / size;
    const used = (pool.reserved + pool.sealed) / size;
    this.history.add(now, {
      used,
      cached: pool.cached / size,
      quarantined,
      hitRate: rates.queries > 0 ? rates.hits / rates.queries : null,
      waste: pool.reserved + pool.sealed > 0 ? pool.waste : null,
      output: rates.output,
      prompt: rates.prompt,
    });
    this.show(stats, rates, used);
    for (const chart of this.charts) chart.update(now);
  }

  /** Counters per second over the window; null until there are two samples. */
  rates() {
    const [first, last] = [this.samples[0], this.samples.at(-1)];
    const seconds = last[0] - first[0];
    const rates = {};
    for (const name of COUNTERS) {
      const [before, after] = [first[1][name], last[1][name]];
      rates[name] =
        seconds > 0 && before !== null && after !== null ? Math.max(0, after - before) / seconds : null;
    }
    return rates;
  }

  show({ pool, cache, requests, runners, tier }, rates, used) {
    say($("pool-value"), percent(used));
    const inUse = pool.reserved + pool.sealed;
    say($("pool-note"), `${count(inUse)} of ${count(pool.num_blocks)} · ${count(pool.cached)} cached`);
    say($("hits-value"), percent(cache?.queries > 0 ? cache.hits / cache.queries : null));
    say(
      $("hits-note"),
      cache ? `${count(cache.hits)} of ${plural(cache.queries, "token")}` : "for admin keys",
    );
    say($("speed-value"), rate(rates.output));
    say($("speed-note"), cache ? "tokens/s" : "for admin keys");
    say($("waste-value"), percent(inUse ? pool.waste : null));
    const evictions = cache
      ? `${plural(cache.evictions, "eviction")} · ${plural(requests.preemptions ?? 0, "preemption")}`
      : "for admin keys";
    say($("waste-note"), evictions);
    say($("requests-note"), `${count(requests.running)} running · ${count(requests.waiting)} waiting`);
    const memory = bytes(pool.num_blocks * (pool.block_bytes ?? 0));
    const size = `${count(pool.num_blocks)} × ${plural(pool.block_size, "token")} · ${memory}`;
    say(
      $("map-note"),
      pool.num_blocks ? `${size}${tier?.num_slots ? ` · ${count(tier.blocks)} blocks on disk` : ""}` : "",
    );
    $("runners").hidden = !runners; // a tenant is not told
    if (runners) this.showRunners(runners);
  }

  showRunners(runners) {
    const written = JSON.stringify(
      runners.map((runner) => [runner.name, lampOf(runner), runner.running, runner.credits]),
    );
    if (written === this.written) return;
    this.written = written;
    const chips = runners.map((runner) =>
      el(
        "span",
        {
          class: `runner ${lampOf(runner)}`,
          title: `${runner.name}: ${lampOf(runner)}, ${plural(runner.credits ?? 0, "block")} in credit`,
        },
        el("i", { class: "lamp" }),
        `${runner.name} `,
        el("b", {}, String(runner.running)),
      ),
    );
    $("runners").replaceChildren(
      ...(chips.length
        ? chips
        : [el("span", { class: "runner starting" }, el("i", { class: "lamp" }), "no runner")]),
    );
  }
}

const series = (name, label, colour) => ({ name, label, colour });

function lampOf(runner) {
  if (runner.stuck) return "stuck";
  if (runner.draining) return "draining";
  return runner.ready ? "ready" : "starting";
}

/** Tokens so far, of /metrics; null where that is not served. */
async function metrics() {
  try {
    const text = await askText("/metrics");
    return {
      output: total(text, "vllm:generation_tokens_total"),
      prompt: total(text, "vllm:prompt_tokens_total"),
    };
  } catch (error) {
    if (error instanceof ApiError) return null;
    throw error;
  }
}

function total(text, name) {
  let sum = 0;
  for (const line of text.split("\n")) {
    if (line.startsWith(name) && " {".includes(line[name.length]))
      sum += Number(line.slice(line.lastIndexOf(" ") + 1));
  }
  return sum;
}
