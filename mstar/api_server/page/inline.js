// Markdown within a line of text, as DOM nodes: emphasis, code, links, line breaks. Nothing here parses markup of HTML.
//
// Emphasis pairs as CommonMark says, in time linear in the text; a web address opens in a tab of its own.

import { el } from "./dom.js";

const TOKEN = new RegExp(
  [
    /\\[!-/:-@[-`{-~\n]/, // an escaped character
    /`+|\*+|_+|~+/,
    /!?\[|\]/,
    /<br *\/?>/,
    /<https?:\/\/[^\s<>]+>/,
    /\bhttps?:\/\/[\da-z][!#-;=?-Z\\^_a-~]*/,
    /\n/,
  ].map((part) => part.source).join("|"),
  "gi",
);
const BACKTICKS = /`+/g;
const ADDRESS = /^https?:\/\/[^\s]+$/i;
// What follows the text of a link: an address, bare or in < >, and a title that is not shown.
const TARGET = /\(\s*(?:<([^<>\n]+)>|([^\s()<>]+(?:\([^\s()<>]*\)[^\s()<>]*)*))(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/y;
const SPACE = /^\s?$/;
const PUNCTUATION = /^[\p{P}\p{S}]$/u;
const UNSPACED = /^[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}]$/u; // scripts without spaces
const MAX_DEPTH = 16; // of emphasis in emphasis; what is deeper stays as it was written

const TAGS = { "*": ["em", "strong"], _: ["em", "strong"], "~": [null, "del"] };

// The nodes of a text, as a DocumentFragment.
export function inline(source) {
  return new Inline(source).parse();
}

export const link = (address, ...children) =>
  el("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, ...children);

class Inline {
  constructor(source) {
    this.source = source;
    this.out = document.createDocumentFragment();
    this.runs = []; // of *, _ and ~, which may begin or end an emphasis
    this.brackets = []; // [ and ![, which may begin a link
    this.unclosed = new Set(); // lengths of runs of backticks that no later run closes
  }

  parse() {
    let at = 0;
    for (;;) {
      TOKEN.lastIndex = at;
      const match = TOKEN.exec(this.source);
      this.text(this.source.slice(at, match?.index));
      if (!match) break;
      at = this.token(match[0], match.index);
    }
    this.emphasize(0);
    return this.out;
  }

  // Where the text goes on.
  token(token, at) {
    const end = at + token.length;
    if (token === "\n" || token === "\\\n" || /^<br/i.test(token)) this.out.append(el("br"));
    else if (token[0] === "\\") this.text(token[1]);
    else if (token[0] === "`") return this.code(token, end);
    else if (token[0] in TAGS) this.run(token, at);
    else if (token === "]") return this.closeLink(end);
    else if (token.endsWith("[")) this.brackets.push({ node: this.text(token), numRuns: this.runs.length });
    else if (token[0] === "<") this.out.append(link(token.slice(1, -1), token.slice(1, -1)));
    else return this.address(token, at);
    return end;
  }

  text(text) {
    const node = document.createTextNode(text);
    if (text) this.out.append(node);
    return node;
  }

  code(ticks, start) {
    BACKTICKS.lastIndex = start;
    for (let match; !this.unclosed.has(ticks.length) && (match = BACKTICKS.exec(this.source)); ) {
      if (match[0].length !== ticks.length) continue;
      const code = this.source.slice(start, match.index).replaceAll("\n", " ");
      const isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
      this.out.append(el("code", {}, isPadded ? code.slice(1, -1) : code));
      return match.index + ticks.length;
    }
    this.unclosed.add(ticks.length);
    this.text(ticks);
    return start;
  }

  // An address without marks around it; what ends the sentence is not of it.
  address(token, at) {
    let end = token.length;
    let surplus = token.split(")").length - token.split("(").length;
    for (; ; end--) {
      const last = token[end - 1];
      if (last === ")" && surplus > 0) surplus--;
      else if (!"?!.,:;*_~'".includes(last)) break;
    }
    const address = token.slice(0, end);
    this.out.append(link(address, address));
    return at + end;
  }

  closeLink(end) {
    const bracket = this.brackets.pop();
    TARGET.lastIndex = end;
    const match = bracket && TARGET.exec(this.source);
    const address = match?.[1] ?? match?.[2] ?? "";
    if (!ADDRESS.test(address)) {
      this.text("]");
      return end;
    }
    this.emphasize(bracket.numRuns);
    const element = link(address);
    moveBetween(bracket.node, null, element);
    bracket.node.replaceWith(element);
    if (bracket.node.data === "[") {
      for (const inner of element.querySelectorAll("a")) inner.replaceWith(...inner.childNodes);
      this.brackets.length = 0; // no link is within a link
    }
    // A picture is shown as a link with its text: the page loads nothing from elsewhere.
    if (bracket.node.data === "![" || !element.textContent) element.textContent = element.textContent || address;
    return TARGET.lastIndex;
  }

  run(marks, at) {
    const node = this.text(marks);
    const before = [...this.source.slice(Math.max(at - 2, 0), at)].at(-1) ?? "";
    const after = String.fromCodePoint(this.source.codePointAt(at + marks.length) ?? 32);
    if (marks[0] === "~" && marks.length !== 2) return;
    const [opens, closes] = [flanks(before, after), flanks(after, before)];
    const isWithinWord = marks[0] === "_" && opens && closes;
    this.runs.push({
      node,
      mark: marks[0],
      place: this.runs.length,
      total: marks.length,
      length: marks.length, // not paired yet
      depth: 0, // of what it holds so far
      opens: opens && (!isWithinWord || PUNCTUATION.test(before)),
      closes: closes && (!isWithinWord || PUNCTUATION.test(after)),
    });
  }

  // Pairs the runs from number `from` on. Where a closer has found no partner, none like it searches again.
  emphasize(from) {
    const openers = [];
    const floors = new Map();
    for (const closer of this.runs.slice(from)) {
      while (closer.closes && closer.length) {
        const kind = `${closer.mark}${closer.opens}${closer.total % 3}`;
        const floor = floors.get(kind) ?? -1;
        let i = openers.length - 1;
        while (i >= 0 && openers[i].place > floor && !pair(openers[i], closer)) i--;
        if (i < 0 || openers[i].place <= floor) {
          floors.set(kind, openers.at(-1)?.place ?? -1);
          break;
        }
        while (openers.length > i + 1) drop(openers);
        if (openers[i].depth === MAX_DEPTH) break;
        wrap(openers[i], closer);
        if (!openers[i].length) drop(openers);
      }
      if (closer.opens && closer.length) openers.push(closer);
    }
    for (const { node, mark, length } of this.runs.splice(from)) {
      if (length) node.data = mark.repeat(length);
      else node.remove();
    }
  }
}

// Whether a run with these characters around can begin an emphasis; with the two swapped, whether it can end one.
const flanks = (before, after) =>
  !SPACE.test(after) &&
  (!PUNCTUATION.test(after) || SPACE.test(before) || PUNCTUATION.test(before) || UNSPACED.test(before));

function pair(opener, closer) {
  if (opener.mark !== closer.mark) return false;
  const isEither = opener.closes || closer.opens;
  return !isEither || (opener.total + closer.total) % 3 !== 0 || opener.total % 3 === 0;
}

function wrap(opener, closer) {
  const length = opener.length > 1 && closer.length > 1 ? 2 : 1;
  const element = el(TAGS[opener.mark][length - 1]);
  moveBetween(opener.node, closer.node, element);
  opener.node.after(element);
  opener.length -= length;
  closer.length -= length;
  opener.depth += 1;
}

// Takes the last one off; what it holds is then of the one before.
function drop(openers) {
  const { depth } = openers.pop();
  const last = openers.at(-1);
  if (last) last.depth = Math.max(last.depth, depth);
}

function moveBetween(first, last, parent) {
  while (first.nextSibling !== last) parent.append(first.nextSibling);
}
