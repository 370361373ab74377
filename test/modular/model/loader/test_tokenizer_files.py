import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import CHATML, TEXTS, byte_level_bpe
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from mstar.model.loader.errors import CheckpointError
from mstar.model.loader.tokenizer_files import (
    ChatTemplateError,
    TokenizerFiles,
    load_tokenizer,
    render_chat_template,
)

MESSAGES = [
    {"role": "system", "content": "Be brief. <b>&"},
    {"role": "user", "content": "  日本 'quoted'\n"},
    {"role": "assistant", "content": "  open end "},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": "é"}}}]
TEMPLATES = {
    "chatml": CHATML,
    "bos and tools": "{{ bos_token }}{% for t in tools or [] %}{{ t | tojson }}\n{{ t | tojson(indent=2) }}{% endfor %}"
    "{{ messages | tojson }}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}",
    "blocks": "\n    {% for m in messages %}\n    {% if m.role == 'system' %}\n{% continue %}\n{% endif %}\n"
    "{%- if loop.index0 == 2 %}{% break %}{% endif %}\n  {{ m.content | trim }}\n{% endfor %}\n",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}",
    "date": "{{ strftime_now('%Y-%m-%d') }}{{ eos_token }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content|length %}"
    "{% endfor %}{{ ns.n }}",
}


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(), bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False], ids=["open", "closed"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_rendering_equals_transformers(reference: PreTrainedTokenizerFast, template: str, prompt: bool, tools):
    expected = reference.apply_chat_template(
        MESSAGES,
        chat_template=template,
        tools=tools,
        tokenize=False,
        add_generation_prompt=prompt,
        enable_thinking=False,
    )
    rendered = render_chat_template(
        template,
        MESSAGES,
        special_tokens={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        tools=tools,
        variables={"enable_thinking": False},
        add_generation_prompt=prompt,
    )
    assert rendered == expected


@pytest.mark.parametrize("content", ["  open end ", "open", " two\nlines\n\n"])
@pytest.mark.parametrize("trims", [True, False])
def test_continuing_the_final_message_equals_transformers(reference, content: str, trims: bool):
    messages = [*MESSAGES[:2], {"role": "assistant", "content": content}]
    template = CHATML.replace("message['content']", "message['content'] | trim") if trims else CHATML
    expected = reference.apply_chat_template(
        messages, chat_template=template, tokenize=False, continue_final_message=True
    )
    arguments = {"add_generation_prompt": False, "continue_final_message": True}
    assert render_chat_template(template, messages, **arguments) == expected
    with pytest.raises(ChatTemplateError, match="cannot be continued"):
        render_chat_template("{{ messages[0].content }}", messages, **arguments)
    with pytest.raises(ValueError, match="continue_final_message"):
        render_chat_template(template, messages, continue_final_message=True)


def test_the_date_is_the_local_one():
    assert render_chat_template("{{ strftime_now('%d %Y') }}", []) == datetime.now().astimezone().strftime("%d %Y")


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 'a' + messages[0].missing }}", "missing"),
        ("{{ 'a' + messages }}", "concatenate"),
        ("{% for %}", "template"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ strftime_now.__globals__ }}{{ strftime_now.__globals__.x }}", "unsafe"),
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        ("{{ 1 // 0 }}", "division"),
    ],
)
def test_what_a_template_may_not_do_is_one_kind_of_error(template: str, part: str):
    with pytest.raises(ChatTemplateError, match=part):
        render_chat_template(template, MESSAGES)


def test_a_template_cannot_change_the_messages():
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(ChatTemplateError):
        render_chat_template("{% set x = messages[0].update({'content': 'b'}) %}", messages)
    assert messages == [{"role": "user", "content": "a"}]


def test_missing_files_are_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"tokenizer.json"):
        load_tokenizer(tmp_path)
    byte_level_bpe().save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("a").ids == load_tokenizer(tmp_path / "tokenizer.json").encode("a").ids
    with pytest.raises(CheckpointError, match=r"tokenizer_facts.json"):
        TokenizerFiles.read(tmp_path)
    TokenizerFiles(tmp_path, 5, None, (1, 2), special_tokens={"bos_token": "é"}).write_facts()
    assert TokenizerFiles.read(tmp_path) == TokenizerFiles(tmp_path, 5, None, (1, 2), special_tokens={"bos_token": "é"})


@given(st.lists(st.sampled_from(TEXTS), max_size=3).map("".join) | st.text(max_size=20))
def test_incremental_decoding_gives_the_whole_text(text: str):
    tokenizer = byte_level_bpe()
    stream = DecodeStream(skip_special_tokens=False)
    pieces = [stream.step(tokenizer, index) for index in tokenizer.encode(text).ids]
    assert "".join(piece for piece in pieces if piece is not None) == text


def test_the_text_side_runs_without_torch_and_transformers():
    code = (
        "import sys; import mstar.model.loader.tokenizer_files, mstar.model.loader.tokenizer_writing;"
        "import mstar.model.loader.checkpoint;"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "[]", run.stderr
