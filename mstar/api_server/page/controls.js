// Controls made from the server's own schema of a chat request, and of the model's parameters. A field that the server
// learns later appears by itself.

import { byId, el } from "./dom.js";

const OWN = new Set(["model", "messages", "stream", "stream_options", "parameters", "n", "logprobs", "top_logprobs",
  "max_completion_tokens", "continue_final_message", "service_tier"]);
const FIRST = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop"];
const STEPS = { temperature: 0.1, top_p: 0.05, min_p: 0.01, presence_penalty: 0.1, frequency_penalty: 0.1,
  repetition_penalty: 0.05 };
const LONG_TEXT = 1000; // characters that a field may have before it gets more than a line
const WIDEST = 1e6; // limits beyond are none that somebody would want to read

class FieldError extends Error {
  constructor(param, message) {
    super(`${param}: ${message}`);
    this.param = param;
  }
}

export class Controls {
  constructor() {
    this.fields = new Map(); // name → {input, read, isParameter}
  }

  // `schema`: of the request, `definitions`: what its references name, `parameters`: the model's own.
  build(schema, definitions, parameters) {
    const form = byId("controls");
    form.replaceChildren();
    this.fields.clear();
    const names = Object.keys(schema.properties).filter((name) => !OWN.has(name));
    const shown = names.map((name) => [name, resolve(schema.properties[name], definitions)]).filter(([, kind]) => kind);
    const first = FIRST.map((name) => shown.find(([own]) => own === name)).filter(Boolean);
    form.append(el("h2", {}, "Sampling"), ...first.map(([name, kind]) => this.control(name, kind)));
    const own = Object.entries(parameters.properties ?? {}).map(([name, part]) => {
      const kind = resolve(part, { ...definitions, ...parameters.$defs });
      return kind && this.control(name, kind, true);
    });
    if (own.length) form.append(el("h2", {}, "Parameters of the model"), ...own.filter(Boolean));
    const more = shown.filter(([name]) => !FIRST.includes(name));
    form.append(el("details", {}, el("summary", {}, "More"), ...more.map(([name, kind]) => this.control(name, kind))));
  }

  control(name, kind, isParameter = false) {
    const id = `${isParameter ? "parameter" : "field"}-${name}`;
    const { input, read } = widget(name, kind, id);
    const note = el("p", { class: "note", id: `${id}-note` }, kind.description ?? "");
    input.setAttribute("aria-describedby", note.id);
    input.addEventListener("input", () => this.mark(name, ""));
    this.fields.set(name, { input, read, isParameter, note, text: kind.description ?? "" });
    return el("div", { class: "field" }, el("label", { for: id }, name), input, note);
  }

  // What the fields say, without those that were left as they are. Throws a FieldError.
  values() {
    const body = {};
    const parameters = {};
    for (const [name, { input, read, isParameter }] of this.fields) {
      if (input.value === "") {
        if (input.validity.badInput) throw this.complain(name, "this is no number");
        continue;
      }
      try {
        (isParameter ? parameters : body)[name] = read(input.value);
      } catch {
        throw this.complain(name, "this is no JSON");
      }
    }
    if (Object.keys(parameters).length) body.parameters = parameters;
    return body;
  }

  complain(name, message) {
    this.mark(name, message);
    return new FieldError(name, message);
  }

  // Shows what is wrong with a field, by the name that the server gives it; false: there is no such field here.
  mark(param, message) {
    const name = (param ?? "").replace(/^parameters\./, "").split(/[.[]/)[0];
    const field = this.fields.get(name);
    if (!field) return false;
    field.input.toggleAttribute("aria-invalid", false);
    if (message) {
      field.input.setAttribute("aria-invalid", "true");
      field.input.closest("details")?.setAttribute("open", "");
    }
    field.note.textContent = message || field.text;
    return true;
  }

  reset() {
    for (const [name, { input }] of this.fields) {
      input.value = "";
      this.mark(name, "");
    }
  }
}

// The kind of value that a field takes beside null; null where it takes nothing else, or nothing that has an effect.
function resolve(part, definitions) {
  const kinds = flatten(part, definitions);
  const description = part.description ?? kinds.find((kind) => kind.type !== "object")?.description;
  if (!kinds.length || /^Accepted, without effect|^Not supported/.test(description ?? "")) return null;
  const isText = (kind) => kind.type === "string" && !kind.enum;
  const isTexts = (kind) => kind.type === "array" && kind.items?.type === "string" && !isFixed(kind.items);
  if (kinds.some(isTexts) && kinds.every((kind) => isText(kind) || isTexts(kind))) return { type: "texts", description };
  if (kinds.length > 1) {
    return { type: "json", description, words: kinds.flatMap((kind) => kind.enum ?? []), takesText: kinds.some(isText) };
  }
  const [kind] = kinds;
  if (isFixed(kind) || isFixed(kind.items)) return null; // there is nothing to choose
  return { ...kind, description };
}

const isFixed = ({ enum: values, const: value } = {}) => value !== undefined || values?.length < 2;

// All that a field may be but null, without unions and references.
function flatten(part, definitions) {
  if (part.$ref) return flatten(definitions[part.$ref.split("/").pop()], definitions);
  const branches = part.anyOf ?? part.oneOf;
  if (branches) return branches.flatMap((branch) => flatten(branch, definitions));
  return part.type === "null" ? [] : [part];
}

// An input for a kind of value, and how to read the text in it.
function widget(name, kind, id) {
  if (kind.type === "number" || kind.type === "integer") {
    const limit = (value) => (value !== undefined && Math.abs(value) <= WIDEST ? value : null);
    const input = el("input", { id, type: "number", inputmode: "decimal", placeholder: kind.default ?? "default",
      min: limit(kind.minimum), max: limit(kind.maximum), step: kind.type === "integer" ? 1 : (STEPS[name] ?? "any") });
    return { input, read: Number };
  }
  if (kind.type === "boolean" || kind.enum) {
    const choices = kind.enum ?? [true, false];
    const options = choices.map((value) => el("option", { value: JSON.stringify(value) }, String(value)));
    return { input: el("select", { id }, el("option", { value: "" }, "default"), ...options), read: JSON.parse };
  }
  if (kind.type === "texts") {
    const input = el("textarea", { id, rows: 1, placeholder: "one a line" });
    return { input, read: (text) => text.split("\n").filter(Boolean) };
  }
  if (kind.type === "string") {
    const isLong = kind.maxLength > LONG_TEXT;
    const input = isLong ? el("textarea", { id, rows: 2 }) : el("input", { id, type: "text", placeholder: "default" });
    return { input, read: (text) => text };
  }
  const words = kind.words ?? [];
  const placeholder = ["JSON", ...words].join(", ");
  const read = (text) => (words.includes(text.trim()) ? text.trim() : kind.takesText ? jsonOrText(text) : JSON.parse(text));
  return { input: el("textarea", { id, rows: 2, placeholder, spellcheck: "false" }), read };
}

function jsonOrText(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}
