// What goes on in the server: asked for while somebody looks, twice a second if the panel is open.

import { askForKey, getJson } from "./api.js";
import { byId, el } from "./dom.js";

const PERIOD_MS = 500;
const CLOSED_PERIOD_MS = 3000; // with the panel closed, for the state alone
const NUM_POINTS = 120;
const MEANINGS = {
  "tokens/s": "Tokens received from the workers, a second, all requests together",
  running: "Requests that a worker has let in and that have not ended, those held back included",
  waiting: "Choices that wait for their first output",
  "held back": "Requests that wait for pages: held ones keep theirs, those of preempted ones were taken",
  generated: "Tokens received from the workers since the server started",
  prompt: "Prompt tokens of requests since the server started",
  "from cache": "Prompt tokens that the prefix cache had, so that they were not computed",
};
const STATES = {
  owned: "of requests that run",
  live: "of requests that run",
  cached: "kept for prompts to come, until a request needs the room",
  snapshot: "kept for prompts to come, until a request needs the room",
};

export class Live {
  constructor(graph) {
    this.graph = graph;
    this.last = null;
    this.rates = [];
    this.meters = new Map();
    document.addEventListener("visibilitychange", () => this.look());
  }

  // Where this needs another key than the one that is known, the panel asks for it.
  async start() {
    try {
      const [graph, view] = await Promise.all([getJson("/debug/graph"), getJson("/debug/live")]);
      this.graph.build(graph, view.workers.length);
    } catch (error) {
      if (error.status !== 403) throw error;
      const again = () => askForKey().then(() => this.start());
      byId("meters").replaceChildren(el("p", { class: "note" }, error.message),
        el("button", { type: "button", click: again }, "Use another key"));
      state("ready", "good");
      return;
    }
    byId("meters").replaceChildren();
    this.isOn = true;
    this.look();
  }

  // One look, and the next one later. Two never overlap.
  async look() {
    if (this.isLooking || !this.isOn || document.hidden) return;
    this.isLooking = true;
    try {
      this.show(await getJson("/debug/live"));
    } catch (error) {
      this.last = null;
      state("no connection", "bad");
    } finally {
      this.isLooking = false;
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.look(), byId("live").hidden ? CLOSED_PERIOD_MS : PERIOD_MS);
  }

  show(view) {
    const seconds = this.last ? view.time_s - this.last.time_s : 0;
    const made = this.last ? Math.max(view.generated_tokens - this.last.generated_tokens, 0) : 0;
    const rate = seconds > 0 ? made / seconds : 0;
    this.rates = [...this.rates, rate].slice(-NUM_POINTS);
    this.meter("tokens/s", rate.toFixed(rate < 100 ? 1 : 0));
    this.meter("running", view.running_rows);
    this.meter("waiting", view.waiting_choices);
    this.meter("held back", view.preempted_requests + view.held_requests);
    this.meter("generated", view.generated_tokens.toLocaleString("en"));
    this.meter("prompt", view.prompt_tokens.toLocaleString("en"));
    this.meter("from cache", view.prefix_hit_tokens.toLocaleString("en"));
    this.draw();
    this.showPools(view.pools);
    this.graph.light(view.nodes, seconds);
    const problem = view.workers.find((worker) => worker.problem)?.problem;
    if (view.is_draining) state("draining", "bad");
    else if (problem) state(problem, "bad");
    else state(view.live_requests ? "busy" : "idle", view.live_requests ? "busy" : "good");
    this.last = view;
  }

  meter(name, value) {
    if (!this.meters.has(name)) {
      this.meters.set(name, el("dd"));
      byId("meters").append(el("div", { title: MEANINGS[name] }, el("dt", {}, name), this.meters.get(name)));
    }
    this.meters.get(name).textContent = value;
  }

  draw() {
    const most = Math.max(...this.rates, 1);
    const start = NUM_POINTS - this.rates.length;
    const points = this.rates.map((rate, i) => `${start + i},${(29 - (28 * rate) / most).toFixed(2)}`);
    byId("history").querySelector("polyline").setAttribute("points", points.join(" "));
  }

  showPools(pools) {
    byId("pools").replaceChildren(
      ...pools.map(({ name, kind, states }) => {
        const total = Object.values(states).reduce((sum, count) => sum + count, 0);
        const used = Object.entries(states).filter(([state]) => state !== "free");
        const text = used.map(([state, count]) => `${count} ${state}`).join(", ");
        const title = used.map(([state]) => `${state}: ${STATES[state]}`).join("\n");
        const bar = el("div", { class: "bar", role: "img", "aria-label": `${name}: ${text} of ${total} ${kind}` });
        for (const [state, count] of used) {
          const part = el("i", { class: state });
          part.style.width = `${total ? (100 * count) / total : 0}%`;
          bar.append(part);
        }
        return el("div", { class: "pool", title }, el("span", {}, `${name} ${kind}`),
          el("span", { class: "dim" }, `${text} of ${total}`), bar);
      }),
    );
  }
}

export function state(text, kind) {
  byId("state").textContent = text;
  byId("state").className = `chip ${kind}`;
}
