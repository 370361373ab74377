"""How the built-in page shows Markdown: the DOM that its module makes, in Chromium and under the page's own policy.

Needs no server: the browser is given the page's files with their headers. Skipped without Chromium.
"""

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from support.browser import browser, playwright
from support.repository import PACKAGE

from mstar.api_server.page.routes import HEADERS

FOLDER = PACKAGE / "api_server" / "page"
ORIGIN = "http://localhost:1"
TYPES = {".css": "text/css", ".js": "text/javascript"}
BLANK = (
    '<!doctype html><link rel="stylesheet" href="/page/style.css"><body><div id="messages">'
    '<article class="message assistant"><div class="text"></div></article></div>'
)
SHOW = """async ([pieces, isWhole]) => {
  const { Markdown } = await import("/page/markdown.js");
  const root = document.querySelector(".text");
  root.replaceChildren();
  const shown = new Markdown(root);
  for (const piece of pieces) { shown.add(piece); shown.draw(); }
  if (isWhole) shown.draw(true);
  return root.innerHTML;
}"""


def link(address: str, text: str | None = None) -> str:
    return f'<a href="{address}" target="_blank" rel="noopener noreferrer">{text or address}</a>'


def code_block(language: str, text: str) -> str:
    button = '<button type="button" class="copy">Copy</button>'
    return (
        f'<figure class="code"><figcaption><span>{language}</span>{button}</figcaption>'
        f"<pre><code>{text}</code></pre></figure>"
    )


def table(head: str, *rows: str) -> str:
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


BLOCKS = {
    "": "",
    "one\n\ntwo\n\n\n": "<p>one</p><p>two</p>",
    "roses\nviolets": "<p>roses<br>violets</p>",
    "roses<br>violets<BR/>lilies\\\ntulips": "<p>roses<br>violets<br>lilies<br>tulips</p>",
    "# A\n## B ##\n### C\n#### D\n####### no": "<h4>A</h4><h5>B</h5><h6>C</h6><h6>D</h6><p>####### no</p>",
    "#hashtag\n#": "<p>#hashtag</p><h4></h4>",
    "text\n# A #b\ntext": "<p>text</p><h4>A #b</h4><p>text</p>",
    "A *b*\n===\nC\n---\nD\n\n---": "<h4>A <em>b</em></h4><h5>C</h5><p>D</p><hr>",
    "a\n***\n- - -\n_ _ _\n--": "<p>a</p><hr><hr><hr><p>--</p>",
    "- a\n- b\n\n- c": "<ul><li><p>a</p></li><li><p>b</p></li><li><p>c</p></li></ul>",
    "* a\n+ b": "<ul><li><p>a</p></li></ul><ul><li><p>b</p></li></ul>",
    "3. a\n4. b\n\nc": '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol><p>c</p>',
    "1) a\n   - b\n     more\n\n     and\n2) c": "<ol><li><p>a</p><ul><li><p>b<br>more</p><p>and</p></li></ul></li>"
    "<li><p>c</p></li></ol>",
    "10. a\n  - b\n11. c": '<ol start="10"><li><p>a</p><ul><li><p>b</p></li></ul></li><li><p>c</p></li></ol>',
    "- a\n\t- b\n\t\t- c": "<ul><li><p>a</p><ul><li><p>b</p><ul><li><p>c</p></li></ul></li></ul></li></ul>",
    "It was\n1986. Then\n- came": "<p>It was<br>1986. Then</p><ul><li><p>came</p></li></ul>",
    "-\n  a\n- - b": "<ul><li><p>a</p></li><li><ul><li><p>b</p></li></ul></li></ul>",
    "- a\nlazy\n\nout": "<ul><li><p>a<br>lazy</p></li></ul><p>out</p>",
    "> a\n> b\nc\n\nd": "<blockquote><p>a<br>b<br>c</p></blockquote><p>d</p>",
    "> - a\n>\n> > b\n> # c": "<blockquote><ul><li><p>a</p></li></ul><blockquote><p>b</p></blockquote>"
    "<h4>c</h4></blockquote>",
    "```python\nif a < b:\n\n\t*x* = `y`\n```\nafter": code_block("python", "if a &lt; b:\n\n\t*x* = `y`")
    + "<p>after</p>",
    "~~~~ c extra\n~~~\n```\n~~~~~": code_block("c", "~~~\n```"),
    "```\nnot closed\n": code_block("", "not closed"),
    "``` not `code`": "<p>``` not <code>code</code></p>",
    "1. a\n   ```sh\n   ls\n     -l\ncd\n   ```\n2. b": "<ol><li><p>a</p>"
    + code_block("sh", "ls\n  -l\ncd")
    + "</li><li><p>b</p></li></ol>",
    "> ```\n> a\nb": f"<blockquote>{code_block('', 'a')}</blockquote><p>b</p>",
    "Look:\n| a | b |\n|:-:|--:|\n| *1* | `2` | 3 |\n| x\\|y |\nend": "<p>Look:</p>"
    + table(
        '<th class="center">a</th><th class="right">b</th>',
        '<td class="center"><em>1</em></td><td class="right"><code>2</code></td>',
        '<td class="center">x|y</td>',
    )
    + "<p>end</p>",
    "a | b\n--- | ---\n1 | 2": table("<th>a</th><th>b</th>", "<td>1</td><td>2</td>"),
    "a | b\n--- |": "<p>a | b<br>--- |</p>",
    "    indented": "<p>indented</p>",
    "a\r\nb": "<p>a<br>b</p>",
}
LINES = {
    "*a* _b_ **c** __d__ ***e*** ~~f~~": "<em>a</em> <em>b</em> <strong>c</strong> <strong>d</strong> "
    "<em><strong>e</strong></em> <del>f</del>",
    "**a *b* c** *a **b***": "<strong>a <em>b</em> c</strong> <em>a <strong>b</strong></em>",
    "snake_case_name 2*3*4 ~5 to ~10": "snake_case_name 2<em>3</em>4 ~5 to ~10",
    "a * b * c ** d **": "a * b * c ** d **",
    "**open *and* _open": "**open <em>and</em> _open",
    "*a **b* c**": "<em>a <em><em>b</em> c</em></em>",
    "**重点：**然后，这是**「引用」**文字": "<strong>重点：</strong>然后，这是<strong>「引用」</strong>文字",
    r"\*a\* \\ \a \[b](http://c)": r"*a* \ \a [b]" + f"({link('http://c')})",
    "`a*b*` `` c ` d `` ` e": "<code>a*b*</code> <code>c ` d</code> ` e",
    "*a `b*`": "*a <code>b*</code>",
    '[a **b**](https://c.d/e_f_(g)?h=1&i "title")': f"{link('https://c.d/e_f_(g)?h=1&amp;i', 'a <strong>b</strong>')}",
    "*[a*](http://b)": f"*{link('http://b', 'a*')}",
    "**https://a.b/c**. (http://d.e/f_(g)), <http://h.i>": f"<strong>{link('https://a.b/c')}</strong>"
    f". ({link('http://d.e/f_(g)')}), {link('http://h.i')}",
    "https://a.b/c。文": f"{link('https://a.b/c')}。文",
    "[https://a.b](https://c.d) [](http://e)": f"{link('https://c.d', 'https://a.b')} {link('http://e')}",
    "![a *b*](http://c/d.png) [![e](http://f)](http://g)": f"{link('http://c/d.png', 'a b')} {link('http://g', 'e')}",
    "[a [b](http://c)](http://d)": f"[a {link('http://c', 'b')}]({link('http://d')})",
    "[1] and [x](relative) [y]( http://z": f"[1] and [x](relative) [y]( {link('http://z')}",
}
HARMFUL = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    "<a href='javascript:alert(1)'>x</a>",
    "&lt;script&gt; &amp;",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](<java&#10;script:alert(1)>)",
    "[x](data:text/html;base64,PHNjcmlwdD4=)",
    "![x](data:image/svg+xml,<svg/onload=alert(1)>)",
    "[x](vbscript:msgbox) [x](file:///etc/passwd) [x](blob:http:x) [x](//evil) [x](/page/main.js)",
    "<javascript:alert(1)>",
    "`<img src=x onerror=alert(1)>",
)
"""Each is shown as it was written."""
SAMPLE = """# Title *one*

Some **bold _and_ italic** text with `code`, a [link](https://a.b/c "t") and https://d.e/f.
Next line ~~gone~~ \\*kept\\*

1. first
   - nested **item**

     more
   - another
2. second
   ```py
   x = "`*`"

   ---
   ```
> quote
> - list
lazy

Head
---
| a | b |
|---|:-:|
| 1 | **2** |
| `x` | y |
after the table
***
```
open < code
"""


@pytest.fixture(scope="module")
def page() -> Iterator["playwright.Page"]:
    """A page with nothing on it but a message, held to the policy of the real one."""
    with browser() as chromium:
        context = chromium.new_context(viewport={"width": 900, "height": 1500})
        page = context.new_page()
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))

        def answer(route: "playwright.Route") -> None:
            path = urlsplit(route.request.url).path
            if path == "/":
                route.fulfill(body=BLANK, headers=HEADERS | {"content-type": "text/html; charset=utf-8"})
                return
            file = FOLDER / path.removeprefix("/page/")
            route.fulfill(body=file.read_text(), headers=HEADERS | {"content-type": TYPES[file.suffix]})

        page.route("**/*", answer)
        page.goto(ORIGIN)
        yield page
        assert complaints == []


def show(page: "playwright.Page", *pieces: str, is_whole: bool = True) -> str:
    return page.evaluate(SHOW, [pieces, is_whole])


@pytest.mark.parametrize("source", BLOCKS)
def test_blocks(page: "playwright.Page", source: str):
    assert show(page, source) == BLOCKS[source]


@pytest.mark.parametrize("source", LINES)
def test_text_in_a_line(page: "playwright.Page", source: str):
    assert show(page, source) == f"<p>{LINES[source]}</p>"


@pytest.mark.parametrize("source", HARMFUL)
def test_what_could_harm_stays_text(page: "playwright.Page", source: str):
    show(page, source)
    assert page.locator(".text").text_content() == source
    assert page.locator(".text *").evaluate_all("all => all.map(one => one.tagName)") == ["P"]


def test_a_text_is_the_same_however_it_comes(page: "playwright.Page"):
    cuts = """async (source) => {
      const { Markdown } = await import("/page/markdown.js");
      const show = (pieces, isWhole) => {
        const root = document.createElement("div");
        const shown = new Markdown(root);
        for (const piece of pieces) { shown.add(piece); shown.draw(); }
        if (isWhole) shown.draw(true);
        return root.innerHTML;
      };
      const whole = show([source], true);
      const root = document.createElement("div");
      const growing = new Markdown(root);
      const wrong = [];
      for (let cut = 0; cut < source.length; cut++) {
        growing.add(source[cut]);
        growing.draw();
        if (root.innerHTML !== show([source.slice(0, cut + 1)], false)) wrong.push(["prefix", cut]);
        if (show([source.slice(0, cut), source.slice(cut)], true) !== whole) wrong.push(["cut", cut]);
      }
      growing.draw(true);
      return [wrong, root.innerHTML === whole, whole];
    }"""
    wrong, is_same, whole = page.evaluate(cuts, SAMPLE)
    assert wrong == [] and is_same
    assert whole == show(page, SAMPLE)
    assert whole.count("<table>") == whole.count("<blockquote>") == whole.count("<h5>") == 1
    long = "a *b* " * 5000 + "\n" + "`x" * 9000 + "😀" * 9000 + "\n```\n" + "y\n" * 9000
    assert show(page, long) == show(page, *(long[i : i + 997] for i in range(0, len(long), 997)))
    assert page.locator(".text").text_content().count("😀") == 9000


COLOURED = """() => Object.fromEntries([...CSS.highlights].map(([kind, ranges]) => [kind, [...ranges].map((part) => {
  const range = document.createRange();
  range.setStart(part.startContainer, part.startOffset);
  range.setEnd(part.endContainer, part.endOffset);
  return range.toString();
})]))"""
FORGET = """async () => (await import("/page/colours.js")).forgetColours()"""
PYTHON = """```python
class A:  # 'not' a text
    x1 = \"\"\"two
lines\"\"\" + 'it\\'s' + 0x1F
```"""


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_code_has_colours(page: "playwright.Page", size: int):
    page.evaluate(FORGET)
    show(page, *(PYTHON[i : i + size] for i in range(0, len(PYTHON), size)))
    assert page.evaluate(COLOURED) == {
        "code-word": ["class"],
        "code-comment": ["# 'not' a text"],
        "code-text": ['"""two\nlines"""', r"'it\'s'"],
        "code-number": ["0x1F"],
    }
    show(
        page,
        "```js\nlet a = `b\nc`; // d\n```\n```SQL\nselect 1 -- x\n```\n```\nif 1\n```\n```text\nif 1\n```\n"
        + "```c\nint 5",
    )
    added = page.evaluate(COLOURED)
    assert added["code-word"][1:] == ["let", "select"] and added["code-number"][1:] == ["1", "5"]
    assert added["code-comment"][1:] == ["// d", "-- x"] and added["code-text"][2:] == ["`b\nc`"]


def test_long_code_and_old_browsers_have_none(page: "playwright.Page"):
    page.evaluate(FORGET)
    show(page, "```py\n" + "def f(): pass\n" * 2000 + "```\n")
    assert page.evaluate(COLOURED) == {}
    page.evaluate("delete CSS.highlights")
    page.evaluate("Object.defineProperty(CSS, 'highlights', {value: undefined, configurable: true})")
    assert show(page, "```py\nif 1\n```\n") == code_block("py", "if 1")
    page.evaluate("delete CSS.highlights")
    page.evaluate(FORGET)


def test_what_is_done_stays_in_place(page: "playwright.Page"):
    """Only what is open is drawn again: the nodes before stay those that they were, for whoever selects in them."""
    kept = page.evaluate(
        """async ([done, more]) => {
          const { Markdown } = await import("/page/markdown.js");
          const root = document.createElement("div");
          const shown = new Markdown(root);
          shown.add(done);
          shown.draw();
          const before = [...root.querySelectorAll("h4, li, figure, tr")];
          for (const letter of more) { shown.add(letter); shown.draw(); }
          return [before.length, before.every((node) => root.contains(node)), root.textContent];
        }""",
        ["# A\n\n| a |\n|--|\n| 1 |\n\n- one\n- two\n  ```\n  x\n", "  y\n  ```\n- three *and*"],
    )
    assert kept == [6, True, "Aa1onetwoCopyx\nythree and"]


def test_what_may_become_something_else_is_not_shown_yet(page: "playwright.Page"):
    for start, more in {"a\n-": " b", "a\n---": "", "``": "`", "**": "b**", "| a |\n|--": "|"}.items():
        before = start.partition("\n")[0] if "\n" in start else ""
        assert show(page, start, is_whole=False) == (f"<p>{before}</p>" if before else "")
        assert show(page, start, more) == show(page, start + more) != (f"<p>{before}</p>" if before else "")


HOSTILE = {
    "asterisks": "*" * 100_000,
    "openers": "*a " * 30_000,
    "closers": "a* " * 30_000,
    "mixed": "*a _b **c __d ~~e " * 6_000 + "a* b_ c** d__ e~~ " * 6_000,
    "nested": "**a *b " * 10_000 + "c* d** " * 10_000,
    "brackets": "[" * 100_000,
    "links": "[a](" * 25_000,
    "closed": "[a](b " * 15_000 + ")" * 50_000,
    "pictures": "![a" * 25_000 + "](http://b)" * 5_000,
    "backticks": "".join("`" * (i % 300) + " " for i in range(1_000)),
    "parentheses": "](" + "(x)" * 30_000,
    "addresses": "http://a" * 12_000,
    "dots": "http://a" + "." * 100_000 + "a",
    "escapes": "\\" * 100_001,
    "a line": "word " * 200_000,
    "an unbroken line": "x" * 1_000_000,
    "spaces": " " * 300_000 + "x",
    "spaces after a link": "[a](" + " " * 300_000,
    "hashes": "# a" + " #" * 100_000 + "b",
    "tildes": "~" * 300_000 + "`",
    "quotes": ">" * 300_000,
    "quotes in lines": (">" * 40 + "\n") * 5_000,
    "lists": "- " * 100_000,
    "deeper and deeper": "".join(" " * 2 * i + "- a\n" for i in range(400)),
    "short lines": "a\n" * 20_000,
    "empty lines": "\n" * 300_000,
    "code": "```\n" + "a\n" * 50_000,
    "columns": "|a" * 4_000 + "\n" + "|-" * 4_000 + "\n" + "|\n" * 20_000,
    "delimiters": "a\n" * 2_000 + "|-|\n" * 20_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_takes_long(page: "playwright.Page", name: str):
    """At once and in frames, within what anything but linear time would exceed many times over."""
    seconds, depth = page.evaluate(
        """async (source) => {
          const { Markdown } = await import("/page/markdown.js");
          const began = performance.now();
          let root;
          for (const size of [source.length, Math.ceil(source.length / 30)]) {
            root = document.createElement("div");
            const shown = new Markdown(root);
            for (let i = 0; i < source.length; i += size) { shown.add(source.slice(i, i + size)); shown.draw(); }
            shown.draw(true);
          }
          let depth = 0;
          const deepest = document.createTreeWalker(root);
          while (deepest.nextNode()) {
            let own = 0;
            for (let node = deepest.currentNode; node !== root; node = node.parentNode) own += 1;
            depth = Math.max(depth, own);
          }
          return [(performance.now() - began) / 1000, depth];
        }""",
        HOSTILE[name],
    )
    assert seconds < 10 and depth < 64
