"""The built-in page in a real browser, against a real front whose worker is scripted. Needs Chromium; skipped without.

Nothing may be written to the browser's console and nothing may be fetched from elsewhere, whatever a test does.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.browser import SCREENSHOTS, browser, picture, playwright
from support.composite.deployment import PLACEMENTS, Composite
from support.qwen3_5_front import build_qwen_spec, image_bytes, running_qwen
from support.running_front import RunningFront

from mstar.communication.host_tensors import to_numpy
from mstar.config.schema import ServerConfig
from mstar.graph.picture import picture as picture_of

KEY, GUEST = "sesame", "guest"
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
READING = (650, 300)
"""A place over the messages."""
IS_AT_END = "messages.scrollTop + messages.clientHeight > messages.scrollHeight - 5"
UNWELL = {"error": {"message": "a worker is starting", "type": "server_error", "param": None, "code": "not_ready"}}
MARKUP = "<img src=x onerror=alert(1)><script>alert(2)</script> **bold** &amp;"

ANSWER = """# Sorting

Use `sorted` with a **key**, *not* a comparison; ~~cmp~~ is gone. See
[the manual](https://docs.python.org/3/howto/sorting.html) or https://docs.python.org/3/.

## Steps

1. Write a key:
   ```python
   def by_age(people):
       return sorted(people, key=lambda p: p.age)  # <stable>
   ```
2. Think of ties
   - the order *before* is kept
   - so sort twice:
     1. by the lesser key
     2. by the greater one
3. Measure

> Timsort is stable.
>
> > It is also **fast**.

## Costs

| case | comparisons | notes |
|:-----|:-----------:|------:|
| sorted already | `n - 1` | 1 |
| random | n log n | 23 |

That is all.

***

Anything else?"""


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFront]:
    spec = build_qwen_spec(
        tmp_path_factory.mktemp("qwen"), server=ServerConfig(api_keys=(KEY, GUEST), admin_keys=(KEY,))
    )
    with running_qwen(spec) as front:
        front.http.headers["authorization"] = f"Bearer {KEY}"
        yield front


@pytest.fixture(scope="module")
def chromium() -> Iterator["playwright.Browser"]:
    with browser() as launched:
        yield launched


@pytest.fixture
def page(front: RunningFront, chromium: "playwright.Browser") -> Iterator["playwright.Page"]:
    """Open, with the key given."""
    context = chromium.new_context(viewport={"width": 1360, "height": 820})
    page = context.new_page()
    page.set_default_timeout(20_000)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request",
        lambda request: None if request.url.startswith((front.base_url, "data:")) else complaints.append(request.url),
    )
    front.call(lambda: setattr(front.worker, "step_s", 0.0))
    page.goto(front.base_url)
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#controls input")
    yield page
    context.close()
    front.wait_until(lambda: front.worker.num_open == 0)
    assert [text for text in complaints if not re.search(r"status of (400|401|500|503)", text)] == []


def until(page: "playwright.Page", expression: str) -> None:
    """Waits here: the page's policy lets nobody evaluate code in it on a timer."""
    for _ in range(400):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never true: {expression}")


def endless(front: RunningFront) -> None:
    """From now on requests sample tokens for ever, a hundred a second."""
    token = front.tokenizer.encode("hi").ids[0]
    front.worker.script = lambda _: iter(lambda: token, None)
    front.call(lambda: setattr(front.worker, "step_s", 0.01))


def ask(page: "playwright.Page", text: str) -> None:
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def last_answer(page: "playwright.Page") -> "playwright.Locator":
    """Of the message at the end, when it is whole."""
    page.wait_for_selector(".message.assistant:last-child:not([aria-busy])")
    return page.locator(".message.assistant").last


def test_a_conversation(page: "playwright.Page", front: RunningFront):
    front.reply("to think\n</think>\n\nThe capital of France is Paris.")
    ask(page, "What is the capital of France?")
    answer = last_answer(page)
    assert answer.locator("> .text").inner_text() == "The capital of France is Paris."
    assert answer.locator(".thought .text").text_content() == "to think"
    assert "stop" in answer.locator(".note").inner_text() and "tokens" in answer.locator(".note").inner_text()
    picture(page, "conversation")
    length = len(front.openings())
    ask(page, "And of Italy?")
    until(page, "document.querySelectorAll('.message.assistant:not([aria-busy])').length == 2")
    first, second = front.openings()[length - 1], front.openings()[length]
    assert first.prompt_ids is not None and second.prompt_ids is not None
    assert second.prompt_ids.shape[0] > first.prompt_ids.shape[0], "what was said before goes along"
    page.click("#clear")
    assert page.locator(".message").count() == 0


def test_a_long_answer_is_followed_to_its_end(page: "playwright.Page", front: RunningFront):
    front.reply("</think>\n\n" + "a line\n" * 100 + "the end")
    front.call(lambda: setattr(front.worker, "step_s", 0.002))
    ask(page, "Go on.")
    last_answer(page)
    until(page, f"messages.scrollHeight > 2000 && {IS_AT_END}")
    page.mouse.move(*READING)
    page.mouse.wheel(0, -600)
    until(page, f"!({IS_AT_END})")
    endless(front)
    page.fill("#prompt", "More.")
    page.keyboard.press("Enter")
    until(page, f"messages.childElementCount == 4 && {IS_AT_END}")
    page.mouse.wheel(0, -600)
    until(page, f"!({IS_AT_END})")
    until(page, "document.querySelector('.message:last-child .text').textContent.length > 400")
    assert not page.evaluate(IS_AT_END), "who reads further up is left there"
    page.keyboard.press("Escape")


def test_who_asks_right_after_scrolling_sees_the_answer(page: "playwright.Page", front: RunningFront):
    """The browser tells of a scroll a frame later than it happened, and by then the question has been sent."""
    front.reply("</think>\n\n" + "a line\n" * 100)
    ask(page, "Go on.")
    last_answer(page)
    until(page, f"messages.scrollHeight > 2000 && {IS_AT_END}")
    page.fill("#prompt", "More.")
    page.evaluate("messages.scrollTop -= 600; composer.requestSubmit()")
    last_answer(page)
    until(page, f"messages.childElementCount == 4 && {IS_AT_END}")


def test_an_answer_is_followed_when_its_reasoning_folds(page: "playwright.Page", front: RunningFront):
    front.reply("a thought\n\n" * 60 + "</think>\n\n" + "a line\n" * 100)
    front.call(lambda: setattr(front.worker, "step_s", 0.002))
    ask(page, "Go on.")
    last_answer(page)
    until(page, f"messages.scrollHeight > 2000 && {IS_AT_END}")


def test_what_a_model_writes_stays_text(page: "playwright.Page", front: RunningFront):
    front.reply(f"{MARKUP}\n</think>\n\n{MARKUP}")
    ask(page, MARKUP)
    answer = last_answer(page)
    shown = MARKUP.replace("*", "")
    assert answer.locator("> .text").inner_text() == answer.locator(".thought .text").text_content() == shown
    assert answer.locator("strong").all_text_contents() == ["bold", "bold"]
    assert page.locator(".message.user .text").inner_text() == MARKUP, "what somebody asks is shown as it was written"
    assert page.locator("#messages img, #messages script, #messages b").count() == 0


def test_markdown_is_shown_and_copied_as_it_was_written(page: "playwright.Page", front: RunningFront):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    front.reply(f"I *think*.\n</think>\n\n{ANSWER}")
    ask(page, "How do I **sort**?")
    answer = last_answer(page)
    assert answer.locator(".thought em").text_content() == "think"
    assert answer.locator("> .text > *").evaluate_all("all => all.map(one => one.localName)") == [
        *("h4", "p", "h5", "ol", "blockquote", "h5", "div", "p", "hr", "p")
    ]
    page.set_viewport_size({"width": 1360, "height": 1250})
    for theme in ("light", "dark"):
        page.select_option("#theme", theme)
        page.wait_for_timeout(600 if SCREENSHOTS else 0)
        picture(page, f"markdown_{theme}")
    page.set_viewport_size({"width": 390, "height": 780})
    page.click("#show-live")
    page.click("#show-settings")
    assert page.evaluate("messages.scrollWidth <= messages.clientWidth"), "what is wide scrolls in itself"
    assert answer.locator("pre").evaluate("code => code.scrollWidth > code.clientWidth")
    picture(page, "markdown_small")
    pasted = "navigator.clipboard.readText()"
    answer.locator("figure .copy").first.click()
    until(page, "document.querySelector('figure .copy').textContent == 'Copied'")
    assert page.evaluate(pasted) == "def by_age(people):\n    return sorted(people, key=lambda p: p.age)  # <stable>"
    answer.locator("> .note .copy").click()
    until(page, "document.querySelector('.note .copy').textContent == 'Copied'")
    assert page.evaluate(pasted) == ANSWER
    # Over plain http a browser has no clipboard for pages.
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    until(page, "document.querySelector('.note .copy').textContent == 'Copy'")
    page.evaluate("addEventListener('copy', () => (window.copied = String(document.activeElement.value)))")
    answer.locator("> .note .copy").click()
    assert page.evaluate("window.copied") == ANSWER
    length = len(front.openings())
    front.reply("</think>\n\nYes.")
    ask(page, "Sure?")
    front.wait_until(lambda: len(front.openings()) > length)
    ids = front.openings()[-1].prompt_ids
    assert ids is not None and ANSWER in front.tokenizer.decode(to_numpy(ids).tolist()), (
        "the model is given what it wrote"
    )


def test_settings_are_made_from_the_schema_and_sent(page: "playwright.Page", front: RunningFront):
    front.reply("</think>\n\nYes.")
    names = page.locator("#controls label").all_inner_texts()
    assert {"temperature", "top_p", "seed", "stop"} <= set(names)
    assert not {"user", "audio", "messages", "stream"} & set(page.locator("#controls label").all_text_contents())
    assert page.get_attribute("#field-temperature", "max") == "2"
    page.fill("#field-temperature", "0.3")
    page.fill("#field-seed", "11")
    page.fill("#system", "Be brief.")
    ask(page, "Well?")
    last_answer(page)
    sampling = front.openings()[-1].sampling
    assert sampling.temperature == pytest.approx(0.3)
    page.fill("#field-temperature", "3")
    ask(page, "Again?")
    page.wait_for_selector("#field-temperature[aria-invalid=true]")
    assert "less than or equal to 2" in page.inner_text("#field-temperature-note")
    assert page.input_value("#prompt") == "Again?", "what was refused can be sent again"
    picture(page, "refused")
    page.click("#reset")
    page.focus("#prompt")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('.message.assistant > .text').length == 2")


def test_parameters_of_the_model_have_controls(page: "playwright.Page", front: RunningFront):
    models = front.http.get("/v1/models").json()
    models["data"][0]["parameters"] = {
        "properties": {
            "strength": {"type": "number", "minimum": 0, "maximum": 1, "description": "How much."},
            "mode": {"anyOf": [{"$ref": "#/$defs/Mode"}, {"type": "null"}]},
            "steps": {"type": "integer"},
        },
        "$defs": {"Mode": {"type": "string", "enum": ["fast", "fine"]}},
    }
    sent: list[dict[str, Any]] = []

    def answer(route: "playwright.Route") -> None:
        sent.append(route.request.post_data_json)
        route.fulfill(body="data: [DONE]\n\n", content_type="text/event-stream")

    page.route("**/v1/models", lambda route: route.fulfill(json=models))
    page.route("**/v1/chat/completions", answer)
    page.reload()
    page.wait_for_selector("#parameter-strength")
    assert page.get_attribute("#parameter-strength", "max") == "1"
    assert page.inner_text("#parameter-strength-note") == "How much."
    page.fill("#parameter-strength", "0.25")
    page.select_option("#parameter-mode", "fine")
    ask(page, "hi")
    until(page, "document.querySelector('#stop').hidden")
    assert sent[0]["parameters"] == {"strength": 0.25, "mode": "fine"}
    assert sent[0].keys() == {"parameters", "model", "messages", "stream", "stream_options"}


def test_fields_of_several_kinds(page: "playwright.Page", front: RunningFront):
    """As the schema has them: a word or JSON, texts one a line, a long text, JSON alone."""
    sent: list[dict[str, Any]] = []

    def answer(route: "playwright.Route") -> None:
        sent.append(route.request.post_data_json)
        route.fulfill(body="data: [DONE]\n\n", content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer)
    page.click("#controls summary")
    page.fill("#field-tool_choice", "required")
    page.fill("#field-guided_choice", "yes\nno")
    page.fill("#field-guided_grammar", 'root ::= "a"\n')
    page.fill("#field-response_format", '{"type": "json_object"}')
    page.fill("#field-stop", "x")
    page.select_option("#field-ignore_eos", "true")
    ask(page, "hi")
    until(page, "document.querySelector('#stop').hidden")
    fields = {name: sent[0][name] for name in sent[0].keys() - {"model", "messages", "stream", "stream_options"}}
    assert fields == {
        "tool_choice": "required",
        "guided_choice": ["yes", "no"],
        "guided_grammar": 'root ::= "a"\n',
        "response_format": {"type": "json_object"},
        "stop": ["x"],
        "ignore_eos": True,
    }
    page.fill("#field-tool_choice", "sometimes")
    ask(page, "hi")
    page.wait_for_selector("#field-tool_choice[aria-invalid=true]")
    assert len(sent) == 1


def test_stop_and_escape_end_the_request(page: "playwright.Page", front: RunningFront):
    endless(front)
    ask(page, "Talk.")
    page.wait_for_selector(".message.assistant .text")
    page.click("#stop")
    front.wait_until(lambda: front.worker.num_open == 0)
    assert "stopped" in last_answer(page).locator("> .note").inner_text()
    ask(page, "Talk on.")
    until(page, "document.querySelectorAll('.message.assistant .text').length == 2")
    page.keyboard.press("Escape")
    front.wait_until(lambda: front.worker.num_open == 0)


def test_what_goes_wrong_is_said(page: "playwright.Page", front: RunningFront):
    endless(front)
    ask(page, "Talk.")
    page.wait_for_selector(".message.assistant .text")
    rid = next(iter(front.worker.rows))
    front.call(lambda: front.worker.fail(rid, "logits are not finite"))
    answer = last_answer(page)
    assert "logits are not finite" in answer.locator(".error").inner_text()
    assert answer.locator(".thought .text").inner_text().startswith("h"), "what came before stays"
    front.reply("</think>\n\nYes.")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, json=UNWELL))
    ask(page, "Again?")
    page.wait_for_selector(".error >> text=a worker is starting")
    assert page.input_value("#prompt") == "Again?"
    page.unroute("**/v1/chat/completions")
    page.keyboard.press("Enter")
    page.wait_for_selector(".message.assistant > .text >> text=Yes.")
    page.route("**/debug/live", lambda route: route.fulfill(status=500, json={}))
    until(page, "document.querySelector('#state').textContent == 'no connection'")
    page.unroute("**/debug/live")
    until(page, "document.querySelector('#state').textContent == 'idle'")


def test_pictures_go_along(page: "playwright.Page", front: RunningFront, tmp_path: Path):
    file = tmp_path / "gradient.png"
    file.write_bytes(image_bytes(size=(320, 200)))
    front.reply("</think>\n\nA gradient.")
    page.set_input_files("#files", file)
    page.wait_for_selector("#attachments button")
    ask(page, "What is this?")
    last_answer(page)
    assert front.openings()[-1].media
    assert page.locator(".message.user img").evaluate("image => image.naturalWidth") == 320
    picture(page, "picture")


def test_calls_are_shown_and_answered(page: "playwright.Page", front: RunningFront):
    front.reply(f"</think>\n\n{CALL}")
    page.click("#controls summary")
    page.fill("#field-tools", json.dumps(TOOLS))
    ask(page, "The weather in Paris?")
    answer = last_answer(page)
    assert answer.locator(".call code").inner_text() == 'weather({"city":"Paris"})'
    front.reply("</think>\n\nIt is sunny.")
    answer.locator(".call textarea").fill("sunny")
    picture(page, "call")
    answer.get_by_role("button", name="Send the results").click()
    page.wait_for_selector(".message.assistant > .text")
    assert last_answer(page).locator("> .text").inner_text() == "It is sunny."
    ids = front.openings()[-1].prompt_ids
    assert ids is not None
    page.fill("#field-tools", "[")
    ask(page, "again")
    page.wait_for_selector("#field-tools[aria-invalid=true]")


def test_the_live_view_lights_up_what_runs(page: "playwright.Page", front: RunningFront):
    walks = page.locator("#graph .walk").evaluate_all(
        "all => all.map(walk => [walk.querySelector('h4').textContent, walk.querySelector('strong').textContent])"
    )
    assert {("encode", "Vision"), ("prefill", "LLM"), ("decode", "LLM")} <= set(map(tuple, walks))
    until(page, "document.querySelector('#state').textContent == 'idle'")
    until(page, "document.querySelector('#pools .pool')")
    steps = 'mstar_node_steps_total{node="LLM",walk="decode"}'
    rows = 'mstar_node_rows_total{node="LLM",walk="decode"}'
    until(page, "document.querySelectorAll('#graph .lit').length == 0")
    endless(front)
    ask(page, "Talk.")
    count = 0

    def is_lit() -> bool:
        nonlocal count
        count += 40
        front.call(lambda: front.worker.more_gauges.update({steps: float(count), rows: 3.0 * count}))
        page.wait_for_timeout(200)
        return page.locator("#graph .lit").count() == 1 and page.locator("#state").inner_text() == "busy"

    assert any(is_lit() for _ in range(40))
    lit = page.locator("#graph .loop .node.lit")
    assert "× 3.0 rows" in lit.inner_text() and "LLM" in lit.inner_text()
    until(page, "parseFloat(document.querySelector('#meters dd').textContent) > 5")
    assert page.get_attribute("#history polyline", "points")
    assert page.locator("#meters > div").count() == page.locator("#meters > div[title]").count() == 7
    assert page.locator(".pool").first.get_attribute("title") == "owned: of requests that run"
    picture(page, "live")
    page.keyboard.press("Escape")
    until(page, "document.querySelectorAll('#graph .lit').length == 0")


def test_a_graph_of_several_partitions(page: "playwright.Page", front: RunningFront, tmp_path: Path):
    model = Composite(tmp_path).model
    graph = picture_of(model.walks(), model.partitions(), PLACEMENTS["three_workers"])
    body = msgspec.json.encode(graph).decode()
    live = front.http.get("/debug/live").json()
    live["workers"] = [{"rank": rank, "problem": None, "step_age_s": 0} for rank in range(3)]
    page.route("**/debug/live", lambda route: route.fulfill(body=json.dumps(live), content_type="application/json"))
    page.route("**/debug/graph", lambda route: route.fulfill(body=body, content_type="application/json"))
    page.reload()
    page.wait_for_selector("#graph .node")
    assert page.locator("#graph section").count() == 2
    assert page.locator("#graph .loop .sequential > .loop .node").count() == 1, "a loop in a loop"
    assert len(page.locator("#graph .node").all()) == 8
    assert page.locator("#graph .rank").all_inner_texts().count("worker 1") == 4
    assert "of audio" in page.inner_text("#graph > .note")
    assert page.evaluate("document.querySelector('#graph').scrollWidth <= document.querySelector('#graph').clientWidth")
    picture(page, "composite")


def test_with_the_keyboard_alone(page: "playwright.Page", front: RunningFront):
    front.reply("</think>\n\nYes.")
    until(page, "document.activeElement.id == 'prompt'")
    page.wait_for_selector("#graph .node")
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {"show-settings", "show-live", "theme", "field-temperature", "prompt", "send", "messages", "node"} <= reached
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, textarea, select, button')].filter(e => !e.hidden && e.type != 'file' &&"
        " !e.labels?.length && !e.ariaLabel && !e.textContent.trim()).map(e => e.id)"
    )
    assert unnamed == []


def test_colours_and_small_windows(page: "playwright.Page", front: RunningFront):
    back = "getComputedStyle(document.body).backgroundColor"
    page.select_option("#theme", "light")
    light = page.evaluate(back)
    page.select_option("#theme", "dark")
    assert page.evaluate(back) != light
    page.wait_for_timeout(600)  # colours change over half a second
    picture(page, "dark")
    page.reload()
    page.wait_for_selector("#controls input", state="attached")
    assert page.locator("#key-dialog").is_hidden(), "the key is kept for the tab"
    assert page.evaluate(back) != light, "and the colours are kept"
    page.set_viewport_size({"width": 390, "height": 780})
    page.reload()
    page.wait_for_selector("#controls input", state="attached")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    until(page, "document.querySelector('#state').textContent == 'idle'")
    assert page.locator("header").evaluate("header => header.clientHeight") < 60, "one row"
    front.reply("</think>\n\n" + "hi\n\n" * 60)
    ask(page, "Talk.")
    last_answer(page)
    assert page.locator("#send").evaluate("send => send.getBoundingClientRect().bottom <= innerHeight")
    picture(page, "small")


def test_a_wrong_key_is_asked_for_again(front: RunningFront, chromium: "playwright.Browser"):
    page = chromium.new_page()
    page.goto(front.base_url)
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('#key-dialog').open && !document.querySelector('#key').value")
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#controls input")
    assert page.evaluate("Object.values(localStorage).join()") == "", "no key is left behind"
    page.close()


def test_the_live_view_asks_for_the_key_of_an_admin(front: RunningFront, chromium: "playwright.Browser"):
    page = chromium.new_page()
    front.reply("</think>\n\nYes.")
    page.goto(front.base_url)
    page.fill("#key", GUEST)
    page.keyboard.press("Enter")
    page.wait_for_selector("#meters button")
    assert page.locator("#graph .node").count() == 0
    ask(page, "Well?")
    assert last_answer(page).locator("> .text").inner_text() == "Yes.", "the conversation needs none"
    page.click("#meters button")
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#graph .node")
    page.wait_for_selector("#meters dd")
    page.close()
