"""A batch of prompts in this process, without a server: python examples/offline.py [TARGET], as for mstar serve"""

import sys

from mstar import envs
from mstar.cli.targets import config_for
from mstar.communication.messages import SamplingParams
from mstar.launch.deployment import resolve_deployment
from mstar.launch.local import LocalInstance
from mstar.model.base import ChatMessage, PromptRequest
from mstar.model.loader.tokenizer_files import load_tokenizer

QUESTIONS = ("What is the capital of France?", "What is 2 + 2?", "Name a colour.")
MAX_TOKENS = 48


def main(target: str = "smollm2") -> None:
    deployment = resolve_deployment(config_for(target, []), cache_dir=envs.CACHE_DIR.get())
    instance = LocalInstance(deployment, calibrate=False)
    model = instance.model
    assert deployment.setup.tokenizer_dir is not None, "this model has no tokenizer"
    tokenizer = load_tokenizer(deployment.setup.tokenizer_dir)
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, stop_token_ids=tuple(model.stop_token_ids()))
    requests = []
    for question in QUESTIONS:
        chat = PromptRequest(kind="chat", messages=(ChatMessage("user", question),), max_tokens=MAX_TOKENS)
        requests.append(instance.submit(model.process_prompt(chat), sampling))
    instance.finish(requests)  # all of them run together
    for question, request in zip(QUESTIONS, requests, strict=True):
        print(f"{question} {tokenizer.decode(request.tokens['token'])}")
    instance.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
