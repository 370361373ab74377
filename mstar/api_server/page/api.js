// Requests to the server that the page came from: the key, errors in OpenAI's shape, event streams.

import { byId } from "./dom.js";

const KEY = "mstar-api-key";

export class ApiError extends Error {
  constructor(status, error) {
    super(error.message ?? `the server answered with status ${status}`);
    this.status = status;
    this.param = error.param ?? null;
    this.code = error.code ?? null;
  }
}

let asking = null;

// Asks for the key once, however many requests need it.
export function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    byId("key").value = "";
    dialog.addEventListener("cancel", (event) => event.preventDefault(), { once: true });
    dialog.addEventListener(
      "close",
      () => {
        sessionStorage.setItem(KEY, byId("key").value.trim());
        asking = null;
        resolve();
      },
      { once: true },
    );
    dialog.showModal();
  });
  return asking;
}

// An answer with a good status. `asks`: where the key is missing or wrong, ask for it and try again.
export async function request(path, { body, signal, asks = true } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    if (body !== undefined) headers["content-type"] = "application/json";
    const method = body === undefined ? "GET" : "POST";
    const response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
    if (response.ok) return response;
    if (response.status === 401 && asks) {
      await askForKey();
      continue;
    }
    const answer = await response.json().catch(() => ({}));
    throw new ApiError(response.status, answer.error ?? {});
  }
}

export const getJson = async (path, options) => (await request(path, options)).json();

// Chunks of a stream, parsed. Throws an ApiError for an error event and for a stream that breaks off.
export async function* stream(path, body, signal) {
  const response = await request(path, { body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError(0, { message: "the stream broke off" });
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.slice(event.indexOf("data: ") + 6);
      if (event.startsWith("event: error")) throw new ApiError(0, JSON.parse(data).error);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
