// Files that go with the next message: chosen, dropped or pasted, kept as data URLs.

import { byId, el } from "./dom.js";

export class Attachments {
  constructor() {
    this.files = [];
    this.modalities = [];
    byId("attach").addEventListener("click", () => byId("files").click());
    byId("files").addEventListener("change", (event) => this.add(event.target.files));
    byId("prompt").addEventListener("paste", (event) => this.add(event.clipboardData.files));
    const talk = byId("talk");
    talk.addEventListener("dragover", (event) => event.preventDefault());
    talk.addEventListener("drop", (event) => {
      event.preventDefault();
      this.add(event.dataTransfer.files);
    });
  }

  // `modalities`: what the model takes.
  allow(modalities) {
    this.modalities = modalities;
    byId("attach").hidden = !modalities.includes("image") && !modalities.includes("video");
    byId("files").accept = ["image", "video"].filter((kind) => modalities.includes(kind)).map((kind) => `${kind}/*`).join();
  }

  async add(files) {
    for (const file of files) {
      const kind = file.type.split("/")[0];
      if (!this.modalities.includes(kind)) {
        byId("hint").textContent = `The model takes no ${kind || "such file"}.`;
        continue;
      }
      this.files.push({ kind, name: file.name, url: await dataUrl(file) });
    }
    byId("files").value = "";
    this.show();
  }

  take() {
    const taken = this.files;
    this.files = [];
    this.show();
    return taken;
  }

  show() {
    byId("attachments").replaceChildren(
      ...this.files.map((file) => {
        const remove = () => {
          this.files = this.files.filter((other) => other !== file);
          this.show();
        };
        const preview = file.kind === "image" ? el("img", { src: file.url, alt: "" }) : "🎞";
        return el("button", { type: "button", title: `Remove ${file.name}`, click: remove }, preview, ` ${file.name} ×`);
      }),
    );
  }
}

export const asPart = ({ kind, url }) => ({ type: `${kind}_url`, [`${kind}_url`]: { url } });

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
