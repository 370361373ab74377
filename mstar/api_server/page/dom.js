// Elements out of names, attributes and text. Text stays text: nothing here parses markup.

export const byId = (id) => document.getElementById(id);

// el("p", {class: "dim"}, "text", child): attributes that are null or false are left out, functions listen to events.
export function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(key, value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}
