"""`mstar run`: one prompt, answered in this process."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from rich.console import Console

from mstar import envs
from mstar.api_server.text import ChoiceText
from mstar.cli.errors import UNUSABLE, show_error
from mstar.cli.progress import ProgressBars
from mstar.cli.targets import config_for
from mstar.communication.messages import SamplingParams
from mstar.config.load import ConfigError
from mstar.launch.deployment import resolve_deployment
from mstar.launch.local import LocalFailure, LocalInstance
from mstar.launch.machine import torch_threads
from mstar.model.base import ChatMessage, PromptRequest
from mstar.model.loader.tokenizer_files import load_tokenizer

NO_ANSWER = (*UNUSABLE, LocalFailure)


def run_command(
    text: str, target: str, overrides: Sequence[str], max_tokens: int, temperature: float, seed: int, *, raw: bool
) -> int:
    """Prints the answer as it comes. Exit code 1 with a message when it cannot be given."""
    console = Console(stderr=True)
    try:
        with ProgressBars(console) as bars:
            config = config_for(target, overrides, progress=bars.report)
            torch.set_num_threads(torch_threads(config))
            torch.set_grad_enabled(False)
            deployment = resolve_deployment(config, cache_dir=envs.CACHE_DIR.get(), progress=bars.report)
            instance = LocalInstance(deployment, progress=bars.report, calibrate=False)
        prompt = instance.model.process_prompt(
            PromptRequest(kind="completion", text=text, max_tokens=max_tokens)
            if raw
            else PromptRequest(kind="chat", messages=(ChatMessage("user", text),), max_tokens=max_tokens)
        )
        stops = tuple(instance.model.stop_token_ids())
        sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, stop_token_ids=stops)
        request = instance.submit(prompt, sampling)
        if deployment.setup.tokenizer_dir is None:
            raise ConfigError("mstar run prints text, and this model has no tokenizer")
        answer: ChoiceText[None] = ChoiceText(
            load_tokenizer(deployment.setup.tokenizer_dir), end_tokens=frozenset(stops)
        )
        for token in instance.stream(request, "token"):
            sys.stdout.write(answer.push(token))
            sys.stdout.flush()
        print(answer.finish().text)
        instance.close()
    except NO_ANSWER as error:
        show_error(console, error)
        return 1
    return 0
