// The model's walks as nested boxes: in order from left to right, side by side from top to bottom, loops with a frame.

import { byId, el } from "./dom.js";

export class Graph {
  constructor() {
    this.nodes = new Map(); // "node walk" → its counts and its boxes
    this.hasSeen = false; // counts that are there at the first look are no news
  }

  // `numWorkers`: where there are several, each node says which one it runs on.
  build(graph, numWorkers) {
    this.numWorkers = numWorkers;
    this.nodes.clear();
    this.hasSeen = false;
    const partitions = graph.partitions.map((partition) =>
      el("section", { "aria-label": `Partition ${partition.name}` },
        graph.partitions.length > 1 ? el("h3", {}, partition.name) : null,
        ...partition.walks.map((walk) =>
          el("div", { class: "walk" }, el("h4", {}, walk.name), this.section(walk.section, walk.name)))));
    const streams = graph.streams.map((stream) =>
      el("p", { class: "note" }, `${stream.signal}: ${stream.producer} ⇢ ${stream.node} of ${stream.consumer}`));
    byId("graph").replaceChildren(...partitions, ...streams);
  }

  section(section, walk) {
    if (section.kind === "node") return this.node(section, walk);
    if (section.kind === "loop") {
      return el("div", { class: "loop", title: section.outputs.map(edge).join("\n") },
        el("span", { class: "times" }, `↻ ${section.name}, up to ${section.limit}`), this.section(section.section, walk));
    }
    return el("div", { class: section.kind }, ...section.parts.map((part) => this.section(part, walk)));
  }

  node(node, walk) {
    const count = el("span", { class: "count" });
    const tells = [`worker ${node.rank}`, node.inputs.length ? `takes ${node.inputs.join(", ")}` : null,
      ...node.outputs.map(edge)].filter(Boolean).join("\n");
    const box = el("div", { class: "node", tabindex: "0", title: tells, "aria-label": `${node.name} in ${walk}: ${tells}` },
      el("strong", {}, node.name), this.numWorkers > 1 ? el("span", { class: "rank" }, `worker ${node.rank}`) : null, count);
    const key = `${node.name} ${walk}`;
    if (!this.nodes.has(key)) this.nodes.set(key, { steps: 0, rows: 0, boxes: [] });
    this.nodes.get(key).boxes.push({ box, count });
    return box;
  }

  // `activity`: counts by node and walk; lights up what has run since the last call, `seconds` ago.
  light(activity, seconds) {
    for (const { node, walk, steps, rows } of activity) {
      const entry = this.nodes.get(`${node} ${walk}`);
      if (!entry) continue;
      const ran = this.hasSeen && steps >= entry.steps ? steps - entry.steps : 0;
      const rate = seconds > 0 ? ran / seconds : 0;
      const text = ran ? `${rate.toFixed(rate < 10 ? 1 : 0)} steps/s × ${((rows - entry.rows) / ran).toFixed(1)} rows` : `${steps} ${steps === 1 ? "step" : "steps"}`;
      for (const { box, count } of entry.boxes) {
        box.classList.toggle("lit", ran > 0);
        count.textContent = text;
      }
      Object.assign(entry, { steps, rows });
    }
    this.hasSeen = true;
  }
}

function edge({ signal, kind, to, is_kept }) {
  const where = { client: `client as ${to}`, nowhere: "nowhere", stream: `stream to ${to}` }[kind] ?? to;
  return `${signal} → ${where}${is_kept ? ", kept for later walks" : ""}`;
}
