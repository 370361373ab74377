"""A tiny byte-level tokenizer with a ChatML template, written to disk as a deployment has it. No torch."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mstar.model.loader.tokenizer_files import TOKENIZER_FILE, TokenizerFiles

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CORPUS = (
    "The quick brown fox jumps over the lazy dog. The capital of France is Paris.",
    "def indented(code):\n    if code:\n        return code\n\n\nprint('hello world', 1234567890)\n",
    "naïve café 你好世界 日本語 emoji 😀 🇫🇷 👩‍👩‍👧‍👦 e\u0301 a\u0308",
)
VOCAB_SIZE = 400


def build_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        show_progress=False,
        special_tokens=[AddedToken(text, special=True) for text in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


def write_tokenizer(directory: Path, chat_template: str = CHATML) -> Tokenizer:
    """`tokenizer.json` and its facts; EOS is `<|im_end|>`."""
    tokenizer = build_tokenizer()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / TOKENIZER_FILE))
    TokenizerFiles(
        directory=directory,
        vocab_size=tokenizer.get_vocab_size(),
        chat_template=chat_template,
        eos_token_ids=(tokenizer.token_to_id("<|im_end|>"),),
        special_tokens={"eos_token": "<|im_end|>"},
    ).write_facts()
    return tokenizer


def llama_config(tokenizer: Tokenizer) -> dict[str, object]:
    """The declaring half of a Llama needs no weights."""
    return {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }
