// Buttons that copy a text.

import { el } from "./dom.js";

const SHOWN_MS = 1500;

// `text`: a function that says what to copy when the button is pressed.
export function copyButton(label, text) {
  const press = async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = label), SHOWN_MS);
  };
  const button = el("button", { type: "button", class: "copy", click: press }, label);
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text); // a browser has no clipboard for pages that come over plain http
  }
}

function copySelected(text) {
  const focused = document.activeElement;
  const area = el("textarea", { class: "hidden", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return isCopied;
}
