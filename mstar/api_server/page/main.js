// Starts the page: what the server serves, controls for it, the conversation and the live view.

import { getJson } from "./api.js";
import { Attachments } from "./attachments.js";
import { Chat } from "./chat.js";
import { Controls } from "./controls.js";
import { byId } from "./dom.js";
import { Graph } from "./graph.js";
import { Live, state } from "./live.js";

const THEME = "mstar-theme";

function setUpTheme() {
  const choice = byId("theme");
  choice.value = localStorage.getItem(THEME) ?? "";
  const apply = () => {
    document.documentElement.dataset.theme = choice.value;
    localStorage.setItem(THEME, choice.value);
  };
  choice.addEventListener("change", apply);
  apply();
}

function setUpPanels(live) {
  for (const name of ["settings", "live"]) {
    const button = byId(`show-${name}`);
    const show = (isShown) => {
      byId(name).hidden = !isShown;
      button.setAttribute("aria-expanded", String(isShown));
      if (name === "live") live.look();
    };
    button.addEventListener("click", () => show(byId(name).hidden));
    if (matchMedia("(max-width: 60rem)").matches) show(false);
  }
}

async function start() {
  setUpTheme();
  const controls = new Controls();
  const attachments = new Attachments();
  const chat = new Chat(controls, attachments);
  const graph = new Graph();
  const live = new Live(graph);
  setUpPanels(live);
  byId("reset").addEventListener("click", () => controls.reset());
  try {
    const models = await getJson("/v1/models");
    const document_ = await getJson("/openapi.json");
    const model = models.data[0];
    chat.model = model.id;
    byId("model").textContent = model.id;
    document.title = `M* ${model.id}`;
    attachments.allow(model.modalities.input);
    controls.build(document_.components.schemas.ChatRequest, document_.components.schemas, model.parameters);
    byId("prompt").focus();
    await live.start();
  } catch (error) {
    state(error.message, "bad");
  }
}

start();
