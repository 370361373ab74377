// Markdown that grows: blocks as DOM nodes, drawn once a frame while a model writes.
//
// A whole line is parsed once and stays. What is open, the end of a paragraph and the line that is not whole, is drawn
// anew each time, and is never longer than a few pieces: so all of it takes time linear in the text, and the nodes are
// the same however the text was cut. HTML, pictures and code that is only indented stay text.

import { copyButton } from "./clipboard.js";
import { colour } from "./colours.js";
import { el } from "./dom.js";
import { inline } from "./inline.js";

const PIECE = 4096; // characters of a paragraph or a line that are parsed together; no emphasis goes beyond
const MAX_DEPTH = 24; // of lists, items and quotes in each other; marks of deeper ones are text
const MARKS_ALONE = /^[\s>*_=`~#|+:-]{1,100}$/; // a line that begins so may become many things: it is not shown yet

const FENCE = /^( *)(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ *(#{1,6})(?: (.*))?$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const QUOTE = /^ *> ?/;
const RULE = /^(?:-{3,}|\*{3,}|_{3,})$/;
const UNDERLINE = /^(?:={3,}|-{3,})$/;
const DELIMITER = /^:?-+:?$/;

export class Markdown {
  constructor(root) {
    this.rest = ""; // what is not parsed yet: the end of a line
    this.isLineBegun = false; // and the line's beginning is
    this.containers = [{ kind: "root", element: root }];
    this.leaf = null; // the open paragraph, code or table
    this.sketched = null; // nodes that go when the text goes on
  }

  add(text) {
    this.rest += text.replaceAll("\r", "");
  }

  // Shows what was added. `isWhole`: it has come to its end.
  draw(isWhole = false) {
    for (const node of this.sketched ?? []) node.remove();
    this.sketched = null;
    this.isWhole = isWhole;
    const lines = this.rest.split("\n");
    this.rest = "";
    const last = lines.pop();
    for (const line of lines) {
      this.parse(this.cut(line));
      this.isLineBegun = false;
    }
    this.rest = this.cut(last);
    this.sketch();
  }

  // Draws what is open, as if it ended here, and forgets that.
  sketch() {
    const { containers, leaf, isLineBegun } = this;
    this.sketched = [];
    this.containers = [...containers];
    this.leaf = leaf && { ...leaf };
    if (this.rest && (this.isWhole || !MARKS_ALONE.test(this.rest))) this.parse(this.rest);
    this.close(this.containers.length);
    Object.assign(this, { containers, leaf, isLineBegun });
  }

  // Parses whole pieces of a line and returns what is left.
  cut(line) {
    while (line.length > PIECE) {
      let end = line.lastIndexOf(" ", PIECE - 1) + 1 || PIECE;
      if (/[\uD800-\uDBFF]/.test(line[end - 1])) end -= 1;
      this.parse(line.slice(0, end));
      line = line.slice(end);
    }
    return line;
  }

  parse(piece) {
    if (!this.isLineBegun) this.line(piece);
    else if (this.leaf && this.leaf.kind !== "table") this.extend(piece, "");
    else if (piece) this.openLeaf("paragraph", null).text = piece;
    this.isLineBegun = true;
  }

  line(text) {
    const isInCode = this.leaf?.kind === "code";
    let [depth, rest] = this.enter(isInCode ? text : untabbed(text), isInCode);
    const goesOn = depth === this.containers.length;
    if (isInCode && goesOn) return this.codeLine(rest);
    if (!rest.trim()) return this.close(depth);
    if (goesOn && this.leaf?.kind === "paragraph" && this.turn(rest, depth)) return;

    let isNew = false;
    for (;;) {
      if (RULE.test(rest.replaceAll(" ", ""))) {
        this.leave(depth);
        this.append(el("hr"));
        return;
      }
      const mayInterrupt = isNew || !goesOn || this.leaf?.kind !== "paragraph";
      const opened = this.open(rest, depth, mayInterrupt);
      if (!opened) break;
      rest = rest.slice(opened);
      depth = this.containers.length;
      isNew = true;
    }
    const fence = FENCE.exec(rest);
    const heading = HEADING.exec(rest);
    if (fence) {
      this.leave(depth);
      this.openCode(...fence.slice(1));
    } else if (heading) {
      this.leave(depth);
      this.heading(heading[1].length, withoutClosing(heading[2] ?? ""));
    } else if (!isNew && this.leaf?.kind === "paragraph") {
      this.extend(rest.trimStart()); // of a list or a quote too, whose marks may be left out
    } else if (!isNew && goesOn && this.leaf?.kind === "table" && rest.includes("|")) {
      this.row(this.leaf.element, "td", rest, this.leaf.sides);
    } else {
      this.leave(depth);
      if (rest.trim()) this.extendNew(rest.trimStart());
    }
  }

  // How many containers a line goes on with, and what it says in them.
  enter(rest, isInCode) {
    for (let depth = 1; depth < this.containers.length; depth++) {
      const { kind, least, width } = this.containers[depth];
      if (kind === "quote") {
        const mark = QUOTE.exec(rest);
        if (!mark) return [depth, rest];
        rest = rest.slice(mark[0].length);
      } else if (kind === "item") {
        const indent = rest.search(/[^ ]|$/);
        const isOut = indent < least && indent < rest.length;
        if (isOut && !isInCode) return [depth, rest]; // code ends with its fence, not with its list
        rest = rest.slice(Math.min(indent, width));
      }
    }
    return [this.containers.length, rest];
  }

  // Opens the quote or the item that a line begins with; returns the length of its mark, 0 where there is none.
  open(rest, depth, mayInterrupt) {
    if (this.containers.length >= MAX_DEPTH) return 0;
    const quote = QUOTE.exec(rest);
    if (quote) {
      this.leave(depth);
      this.containers.push({ kind: "quote", element: this.append(el("blockquote")) });
      return quote[0].length;
    }
    const item = ITEM.exec(rest);
    if (!item) return 0;
    const [{ length }, indent, mark] = item;
    const number = parseInt(mark, 10);
    if (!mayInterrupt && (length === rest.length || number > 1 || number === 0)) return 0;
    this.close(depth);
    const type = mark.at(-1);
    if (this.top.type !== type) {
      this.leave(depth);
      const list = mark.length > 1 ? el("ol", { start: number === 1 ? null : number }) : el("ul");
      this.containers.push({ kind: "list", type, element: this.append(list) });
    }
    this.containers.push({ kind: "item", least: indent.length + 2, width: length, element: this.append(el("li")) });
    return length;
  }

  // A line under a paragraph that makes a heading of it, or a table of its last line.
  turn(rest, depth) {
    const { text, element } = this.leaf;
    if (UNDERLINE.test(rest.trim()) && !element) {
      this.leaf = null;
      this.heading(rest.includes("=") ? 1 : 2, text);
      return true;
    }
    if (!/^[-|: ]*\|[-|: ]*$/.test(rest)) return false;
    const start = text.lastIndexOf("\n");
    const marks = cells(rest);
    const header = text.slice(start + 1);
    const isTable = marks.every((mark) => DELIMITER.test(mark)) && marks.length === cells(header).length;
    if (!isTable || (start < 0 && element)) return false;
    this.leaf.text = text.slice(0, Math.max(start, 0));
    this.close(depth);
    const sides = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : null));
    const [head, body] = [el("thead"), el("tbody")];
    this.append(el("div", { class: "wide" }, el("table", {}, head, body)));
    this.row(head, "th", header, sides);
    this.openLeaf("table", body).sides = sides;
    return true;
  }

  row(parent, tag, line, sides) {
    const row = el("tr");
    for (const [i, text] of cells(line).slice(0, sides.length).entries()) {
      row.append(el(tag, { class: sides[i] }, inline(text)));
    }
    this.append(row, parent);
  }

  heading(level, text) {
    this.append(el(`h${Math.min(level + 3, 6)}`, {}, inline(text.trim()))); // the message has an h3
  }

  openCode(indent, fence, info) {
    const code = el("code");
    const [language] = info.trim().split(/\s/);
    const bar = el("figcaption", {}, el("span", {}, language), copyButton("Copy", () => code.textContent));
    this.append(el("figure", { class: "code" }, bar, el("pre", {}, code)));
    Object.assign(this.openLeaf("code", code), { fence, indent: indent.length, language });
  }

  codeLine(text) {
    const { fence, indent } = this.leaf;
    const bare = text.trim();
    if (bare.startsWith(fence) && bare === fence[0].repeat(bare.length)) this.close(this.containers.length);
    else this.extend(text.slice(Math.min(indent, text.search(/[^ ]|$/))));
  }

  // `element`: where its nodes go; a paragraph has none before it has nodes.
  openLeaf(kind, element) {
    return (this.leaf = { kind, element, parent: this.top.element, text: "", isBegun: false });
  }

  extendNew(text) {
    this.openLeaf("paragraph", null);
    this.extend(text);
  }

  extend(text, between = "\n") {
    const { leaf } = this;
    leaf.text += leaf.isBegun ? between + text : text;
    leaf.isBegun = true;
    if (leaf.text.length >= PIECE) this.flush();
  }

  // Makes nodes of the text that the open leaf has.
  flush() {
    const { leaf } = this;
    if (!leaf?.text) return;
    leaf.element ??= this.append(el("p"), leaf.parent);
    const nodes = leaf.kind === "code" ? [document.createTextNode(leaf.text)] : [...inline(leaf.text).childNodes];
    for (const node of nodes) this.append(node, leaf.element);
    leaf.text = "";
  }

  close(depth) {
    this.flush();
    const { leaf } = this;
    if (leaf?.kind === "code" && (this.isWhole || !this.sketched)) colour(leaf.element, leaf.language);
    this.leaf = null;
    this.containers.length = depth;
  }

  // Closes also the list whose next item does not come.
  leave(depth) {
    this.close(depth);
    if (this.top.kind === "list") this.containers.pop();
  }

  get top() {
    return this.containers.at(-1);
  }

  append(node, parent = this.top.element) {
    parent.append(node);
    this.sketched?.push(node);
    return node;
  }
}

const untabbed = (line) => line.replace(/^[ \t]+/, (indent) => indent.replaceAll("\t", "    "));

// "# Heading ##"
function withoutClosing(text) {
  const heading = text.trimEnd();
  let end = heading.length;
  while (heading[end - 1] === "#") end--;
  return end === 0 || heading[end - 1] === " " ? heading.slice(0, end) : heading;
}

function cells(line) {
  const row = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return row.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}
