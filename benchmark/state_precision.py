"""What the dtype of recurrent states costs in accuracy: `python -m benchmark.state_precision`.

A random Qwen3.5 in fp32 throughout draws texts; its logits are the reference. The same weights in other dtypes then
read the same texts, each token a decode step of the real worker loop. Compared at every token: the logits' distance as
a part of the reference's norm, the divergence of the distributions (nats, temperature 1), and whether the largest logit
is that of the same token; over all tokens, and over the first and the last 64 of each text, where an error that grows
would show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from benchmark import forced_texts
from benchmark.local_decode import random_prompts
from benchmark.results import machine, write_result
from mstar import envs
from mstar.communication.messages import SamplingParams
from mstar.config.load import config_from_mapping
from mstar.launch.deployment import resolve_deployment
from mstar.launch.local import LocalInstance
from mstar.launch.machine import torch_device, torch_threads
from mstar.model.base import PreparedPrompt

MODELS = {"qwen3_5-0.8b": "benchmark.forced_texts:CARD", "tiny": "benchmark.forced_texts:TINY"}
DTYPES = (("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"))
"""Of the model and of its states. What the second costs is what the first costs more or less."""
PARTS = {"all": slice(None), "first 64": slice(64), "last 64": slice(-64, None)}
HEAD = "model     states    tokens     distance   divergence   same largest"


class Reader:
    """One deployment, with nothing captured and nothing reused."""

    def __init__(self, model: str, dtype: str, state_dtype: str, num_tokens: int, overrides: Sequence[str]) -> None:
        settings = [
            f"dtype={dtype}",
            f"resources.state.dtype={state_dtype}",
            f"max_seq_len={-(-num_tokens // 64) * 64}",
            "capture.enabled=false",
            "prefix_cache.enabled=false",
            "resources.kv.num_pages=64",
            "resources.state.num_slots=8",
            "scheduler.max_rows=1",
            *overrides,
        ]
        config = config_from_mapping({"model": MODELS[model]}, model, settings)
        torch.set_num_threads(torch_threads(config))
        self.device = torch_device(config)
        self.instance = LocalInstance(resolve_deployment(config, cache_dir=envs.CACHE_DIR.get()), calibrate=False)
        self._forced = forced_texts.built[-1]

    def read(self, prompt: np.ndarray, num_tokens: int, text: Sequence[int] | None = None) -> tuple[list[int], Tensor]:
        """The text drawn, and its logits fp32 [num_tokens, vocab]: `text`, or the model's own."""
        self._forced.begin(text)
        request = self.instance.submit(
            PreparedPrompt(prompt), SamplingParams(temperature=0.0 if text else 1.0, seed=1, max_tokens=num_tokens)
        )
        self.instance.finish([request])
        return list(request.tokens["token"]), torch.stack(self._forced.logits[:num_tokens])


def compare(found: Tensor, expected: Tensor) -> np.ndarray:
    """Of each row: distance, divergence, same largest; fp64 [rows, 3]."""
    distance = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    log_p, log_q = expected.log_softmax(-1), found.log_softmax(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    same = found.argmax(-1) == expected.argmax(-1)
    return torch.stack([distance, divergence, same.float()], dim=-1).double().cpu().numpy()


def summary(texts: Sequence[np.ndarray]) -> Mapping[str, Mapping[str, float]]:
    """Means over the tokens of `PARTS` of each text."""
    names = ("distance", "divergence", "same_largest")
    means = {name: np.concatenate([text[part] for text in texts]).mean(0) for name, part in PARTS.items()}
    return {part: dict(zip(names, np.round(values, 7).tolist(), strict=True)) for part, values in means.items()}


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "qwen3_5-0.8b",
    texts: Annotated[int, typer.Option(min=1)] = 4,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens before each text.")] = 128,
    tokens: Annotated[int, typer.Option(min=64, help="Of each text.")] = 512,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")] = None,
    name: Annotated[str, typer.Option(help="Of the result's file.")] = "state_precision",
) -> None:
    """Print a table, and write it to a file."""
    torch.set_grad_enabled(False)
    length, more = prompt + tokens, overrides or []
    reference = Reader(model, "float32", "float32", length, more)
    prompts = random_prompts(texts, prompt, reference.instance.model.vocab_size(), seed=0)
    expected = [reference.read(each, tokens) for each in prompts]
    reference.instance.close()
    rows: list[dict[str, Any]] = []
    print(HEAD, flush=True)
    for dtype, state_dtype in DTYPES:
        reader = Reader(model, dtype, state_dtype, length, more)
        compared = []
        for each, (text, logits) in zip(prompts, expected, strict=True):
            drawn, found = reader.read(each, tokens, text)
            if drawn != text:
                raise RuntimeError("a text was not read as it is")
            compared.append(compare(found, logits))
        reader.instance.close()
        rows.append({"dtype": dtype, "state_dtype": state_dtype, "tokens": summary(compared)})
        for part, of in rows[-1]["tokens"].items():
            distance, divergence, same = of.values()
            print(f"{dtype:<10}{state_dtype:<10}{part:<9}{distance:>10.5f}{divergence:>13.6f}{same:>14.1%}", flush=True)
    result = {"model": model, "texts": texts, "prompt": prompt, "tokens": tokens, "machine": machine(), "rows": rows}
    if reference.device.type == "cuda":
        result["hardware"] = torch.cuda.get_device_name(reference.device)
    print(write_result(name, result))


if __name__ == "__main__":
    typer.run(main)
