// Code in colours, by the looks of its pieces: comments, texts, numbers, and words that languages keep for themselves.
//
// The nodes stay as they are: the browser is told of ranges in their text, where it knows how to (`CSS.highlights`).

const MAX_LENGTH = 20_000; // characters of a code that is coloured

const HASH = /#.*/;
const SLASHES = /\/\/.*|\/\*[^]*?(?:\*\/|$)/;
const DASHES = /--.*/;
const TEXT = /"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:\\.|[^"\\\n]){0,999}"|'(?:\\.|[^'\\\n]){0,999}'|`[^`]*`/;
const NUMBER = /\b\d[\w.]*/;
const WORD = /[A-Za-z_]\w*/;
const KEPT = new Set(
  `and as assert async await break case catch class const continue def default del do done elif else enum esac except
  export extends False false fi finally fn for from func function if impl import in interface is lambda let match mut
  new nil None not null or package pass private pub public raise return self static struct super switch then this throw
  trait True true try type use var void while with yield`.split(/\s+/),
);
const KEPT_IN_SQL = new Set(
  `and as by create delete distinct from group having in inner insert into is join left like limit not null on or order
  outer right select set table union update values where with`.split(/\s+/),
);
const COMMENTS = {
  "bash console dockerfile makefile perl py python r rb ruby sh shell toml yaml yml zsh": HASH,
  "c c++ cpp cs csharp css dart go h java javascript js jsx kotlin php rs rust scala swift ts tsx typescript": SLASHES,
  "haskell hs lua sql": DASHES,
  "json": null,
};
const PATTERNS = new Map(
  Object.entries(COMMENTS).flatMap(([languages, comment]) => {
    const kinds = { text: TEXT, number: NUMBER, word: WORD };
    const pieces = Object.entries(comment ? { comment, ...kinds } : kinds);
    const pattern = new RegExp(pieces.map(([kind, { source }]) => `(?<${kind}>${source})`).join("|"), "g");
    return languages.split(" ").map((language) => [language, pattern]);
  }),
);

// `code`: an element whose text does not change any more. A language that is not known here stays plain.
export function colour(code, language) {
  const name = language.toLowerCase();
  const pattern = PATTERNS.get(name);
  if (!pattern || !globalThis.CSS?.highlights || code.textContent.length > MAX_LENGTH) return;
  const text = code.textContent;
  const nodes = [...code.childNodes];
  let [index, start] = [0, 0]; // the node that a piece begins in, and where its own text begins
  const place = (at) => {
    while (at > start + nodes[index].length) start += nodes[index++].length;
    return [nodes[index], at - start];
  };
  for (const { 0: piece, index: at, groups } of text.matchAll(pattern)) {
    const kind = Object.keys(groups).find((each) => groups[each] !== undefined);
    if (kind === "word" && !(name === "sql" ? KEPT_IN_SQL.has(piece.toLowerCase()) : KEPT.has(piece))) continue;
    const [startContainer, startOffset] = place(at);
    const [endContainer, endOffset] = place(at + piece.length);
    if (!CSS.highlights.has(`code-${kind}`)) CSS.highlights.set(`code-${kind}`, new Highlight());
    CSS.highlights.get(`code-${kind}`).add(new StaticRange({ startContainer, startOffset, endContainer, endOffset }));
  }
}

// Lets go of all code that was coloured.
export function forgetColours() {
  globalThis.CSS?.highlights?.clear();
}
