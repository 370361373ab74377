// The conversation: what was said, sending, streaming, stopping.

import { ApiError, stream } from "./api.js";
import { asPart } from "./attachments.js";
import { forgetColours } from "./colours.js";
import { byId } from "./dom.js";
import { Answer, showUser } from "./message.js";

export class Chat {
  constructor(controls, attachments) {
    this.controls = controls;
    this.attachments = attachments;
    this.model = "";
    this.messages = [];
    this.running = null;
    this.growing = null; // the answer that is streamed
    this.frame = null;
    this.isAtEnd = true;
    this.top = 0; // where the messages are scrolled to, as far as that is known here
    // Only somebody who reads scrolls up; who comes back to the end wants to see what is added. The browser tells of a
    // scroll a frame later, so what happened before a place was chosen here is no news.
    byId("messages").addEventListener("scroll", ({ target }) => {
      if (target.scrollTop < this.top) this.isAtEnd = false;
      else if (target.scrollHeight - target.scrollTop - target.clientHeight < 40) this.isAtEnd = true;
      this.top = target.scrollTop;
    });
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.ask();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
  }

  ask() {
    const text = byId("prompt").value.trim();
    if (this.running || (!text && !this.attachments.files.length)) return;
    const media = this.attachments.take();
    const content = media.length ? [...media.map(asPart), ...(text ? [{ type: "text", text }] : [])] : text;
    byId("prompt").value = "";
    const shown = showUser(text, media);
    byId("messages").append(shown);
    this.answer([{ role: "user", content }], () => {
      shown.remove();
      byId("prompt").value ||= text;
      this.attachments.files.push(...media);
      this.attachments.show();
    });
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    forgetColours();
    byId("messages").replaceChildren();
    byId("prompt").focus();
  }

  // Sends the conversation with `further` messages. `takeBack`: the server refused it, nothing was said.
  async answer(further, takeBack) {
    byId("hint").textContent = "";
    let settings;
    try {
      settings = this.controls.values();
    } catch (error) {
      byId("hint").textContent = error.message;
      takeBack();
      return;
    }
    const answer = new Answer((results) => this.answer(results, () => {}));
    const before = this.messages;
    const messages = [...before, ...further];
    this.growing = answer;
    this.show(answer.element);
    this.working(new AbortController());
    const { signal } = this.running;
    const times = { began: performance.now(), first: 0 };
    let reason = "stopped";
    let usage = null;
    try {
      const body = { ...settings, model: this.model, messages: this.withSystem(messages), stream: true,
        stream_options: { include_usage: true } };
      for await (const chunk of stream("/v1/chat/completions", body, signal)) {
        times.first ||= chunk.choices[0]?.delta.role ? 0 : performance.now();
        for (const choice of chunk.choices) {
          answer.add(choice.delta);
          reason = choice.finish_reason ?? reason;
        }
        usage = chunk.usage ?? usage;
        this.follow();
      }
    } catch (error) {
      if (!signal.aborted) this.failed(error, answer, takeBack);
    } finally {
      this.working(null);
    }
    if (this.messages !== before) return; // a new conversation has begun
    if (answer.isEmpty() && !usage) {
      if (!signal.aborted) return;
      answer.element.remove();
      takeBack();
      return;
    }
    this.messages = [...messages, answer.message()];
    answer.end(summary(reason, usage, times), reason === "tool_calls");
    byId("spoken").textContent = answer.body?.innerText || "The model has thought, or calls a function.";
    this.follow();
  }

  withSystem(messages) {
    const system = byId("system").value.trim();
    return system ? [{ role: "system", content: system }, ...messages] : messages;
  }

  failed(error, answer, takeBack) {
    const said = error instanceof ApiError ? error.message : `The server cannot be reached: ${error.message}`;
    answer.fail(said);
    this.follow();
    this.controls.mark(error.param, said);
    if (!answer.isEmpty()) return;
    takeBack();
  }

  working(controller) {
    this.running = controller;
    byId("stop").hidden = !controller;
    byId("send").disabled = Boolean(controller);
    if (!controller) byId("prompt").focus();
  }

  show(element) {
    byId("messages").append(element);
    this.isAtEnd = true;
    this.top = byId("messages").scrollTop;
    this.follow();
  }

  // Shows what came and scrolls along, unless somebody reads further up: once a frame, however many chunks it has.
  follow() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.growing?.draw();
      const messages = byId("messages");
      if (this.isAtEnd) messages.scrollTop = messages.scrollHeight;
      this.top = messages.scrollTop;
    });
  }
}

function summary(reason, usage, { began, first }) {
  const parts = [reason];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
    if (cached) parts.push(`${cached} cached`);
    const seconds = (performance.now() - first) / 1000;
    if (first && usage.completion_tokens > 1) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
  }
  if (first) parts.push(`first after ${Math.round(first - began)} ms`);
  return parts.join(" · ");
}
