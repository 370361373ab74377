// One message on the page, and an answer that grows in it: what the model writes is shown as Markdown.

import { copyButton } from "./clipboard.js";
import { el } from "./dom.js";
import { Markdown } from "./markdown.js";

export function showUser(text, media) {
  const pictures = media.map(({ url, kind, name }) =>
    kind === "image" ? el("img", { src: url, alt: name }) : el("video", { src: url, controls: true, "aria-label": name }));
  const body = text ? el("div", { class: "text" }, text) : null;
  return el("article", { class: "message user" }, el("h3", {}, "You"), ...pictures, body);
}

// `onResults`: takes messages of role tool when somebody has written what the called functions return.
export class Answer {
  constructor(onResults) {
    this.onResults = onResults;
    this.content = "";
    this.reasoning = "";
    this.calls = [];
    this.note = el("p", { class: "note" });
    this.element = el("article", { class: "message assistant", "aria-busy": "true" }, el("h3", {}, "Answer"), this.note);
  }

  add(delta) {
    if (delta.reasoning_content) this.think(delta.reasoning_content);
    if (delta.content) this.say(delta.content);
    for (const part of delta.tool_calls ?? []) this.call(part);
  }

  think(text) {
    if (!this.thought) {
      const body = el("div", { class: "text" });
      this.thought = new Markdown(body);
      this.details = el("details", { class: "thought", open: true }, el("summary", {}, "Reasoning"), body);
      this.note.before(this.details);
    }
    this.reasoning += text;
    this.thought.add(text);
  }

  say(text) {
    if (!this.said) {
      this.details?.removeAttribute("open");
      this.thought?.draw(true);
      this.body = el("div", { class: "text" });
      this.said = new Markdown(this.body);
      this.note.before(this.body);
    }
    this.content += text;
    this.said.add(text);
  }

  // Shows what was added: once a frame is enough.
  draw() {
    if (this.element.hasAttribute("aria-busy")) (this.said ?? this.thought)?.draw();
  }

  call({ index, id, function: called }) {
    const call = (this.calls[index] ??= this.openCall(id, called.name));
    call.arguments += called.arguments ?? "";
    call.shown.appendData(called.arguments ?? "");
  }

  openCall(id, name) {
    const shown = document.createTextNode("");
    const result = el("textarea", { rows: 1, placeholder: "What it returns", "aria-label": `What ${name} returns` });
    const box = el("div", { class: "call" }, el("code", {}, `${name}(`, shown, ")"), result);
    this.note.before(box);
    return { id, name, arguments: "", shown, result };
  }

  // As an entry of `messages`.
  message() {
    const message = { role: "assistant", content: this.content };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    if (this.calls.length) {
      message.content = this.content || null;
      message.tool_calls = this.calls.map((call) => ({ id: call.id, type: "function",
        function: { name: call.name, arguments: call.arguments } }));
    }
    return message;
  }

  isEmpty() {
    return !this.content && !this.reasoning && !this.calls.length;
  }

  // `asksForResults`: the answer is whole, and its calls can be answered.
  end(note, asksForResults) {
    this.element.removeAttribute("aria-busy");
    this.thought?.draw(true);
    this.said?.draw(true);
    this.note.textContent = note;
    if (this.content) this.note.append(" ", copyButton("Copy", () => this.content));
    if (!asksForResults || !this.calls.length) return;
    const send = () => {
      button.remove();
      this.onResults(this.calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result.value })));
    };
    const button = el("button", { type: "button", click: send }, "Send the results");
    this.note.before(button);
  }

  fail(message) {
    this.element.removeAttribute("aria-busy");
    this.element.append(el("p", { class: "error", role: "alert" }, message));
  }
}
