"""What the prefix cache saves and what it costs: `python -m benchmark.prefix_reuse`.

Parts, each with its goals (`--parts` chooses):

- `chats`: conversations with one system prompt, one request after another, through a real server. A token of a prompt
  is *reusable* when its page is full and an earlier prompt had the same tokens up to the end of that page; reported is
  the share of reusable tokens that the server says came from its cache. With each request, prompt tokens less cached
  ones are compared with the growth of `mstar_prefill_tokens_computed_total`.
- `repeated`, `shared`: what the same server finds of a prompt that comes again, and of a beginning that several share.
- `ttft`: time to the first token, at the client of the same server, of a prompt that was never there and of the same
  prompt again. Wall clock; nearly all of it is waiting for the forward.
- `overhead`: tokens per second of prompts that have nothing in common, cache on against cache off. Two engines in this
  process, without HTTP, that alternate. The ratio of wall times carries what else the machine does; the CPU time of the
  loop thread, where all of the cache's work is done, does not, and is given as a share of the wall time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer

from benchmark.local_decode import open_target, random_prompts
from benchmark.local_server import LocalServer, serving
from benchmark.prefix_probes import (
    REPEATED_LENGTHS,
    ask_repeated,
    ask_shared,
    summarize_repeated,
    summarize_shared,
)
from benchmark.results import load_average, machine, spread, write_result
from mstar import envs
from mstar.bench.prompts import of_words
from mstar.cli.targets import config_for
from mstar.communication.messages import SamplingParams
from mstar.launch.deployment import resolve_deployment
from mstar.launch.local import LocalInstance
from mstar.model.base import ChatMessage, Model, PreparedPrompt, PromptRequest

LEAST_SHARE = 0.97
MOST_TTFT = 0.5
MOST_COST = 0.02
PAGE = 64
SETTLE_S = 0.35
"""After this a worker's gauges are newer than the answer: a heartbeat is due every 0.25 s."""
COMPUTED = "mstar_prefill_tokens_computed_total"
STEP_TOKENS = 1024
SERVED_PARTS = ("chats", "repeated", "shared", "ttft")
PARTS = (*SERVED_PARTS, "overhead")


@dataclass(frozen=True, slots=True)
class Chats:
    """Sizes in tokens, as near as words come to them."""

    conversations: int = 10
    turns: int = 6
    system_tokens: int = 600
    turn_tokens: int = 60
    reply_tokens: int = 80


class Exchange(NamedTuple):
    """One request: its prompt int32 [tokens], what the server counted, and the growth of its counter."""

    prompt_ids: np.ndarray
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: float


class Prompter:
    """Text of about so many tokens, and the tokens of a chat, by the model's own tokenizer."""

    def __init__(self, model: Model, variables: Mapping[str, Any] | None = None) -> None:
        """`variables`: of the chat template, as the server is asked with."""
        self._model = model
        self.variables = variables or {}
        sample = of_words(400, seed=0)(0).text()
        self._tokens_per_word = self._count([{"role": "user", "content": sample}]) / 400

    @property
    def fields(self) -> dict[str, Any]:
        """Of a request to the server, beside messages."""
        return {"chat_template_kwargs": dict(self.variables)} if self.variables else {}

    def text(self, num_tokens: int, seed: int) -> str:
        return of_words(max(1, round(num_tokens / self._tokens_per_word)), seed)(0).text()

    def ids(self, messages: Sequence[Mapping[str, str]]) -> np.ndarray:
        """int32 [tokens]"""
        turns = tuple(ChatMessage(turn["role"], turn["content"]) for turn in messages)
        ids = self._model.process_prompt(PromptRequest("chat", turns, template_variables=self.variables)).token_ids
        assert ids is not None
        return ids

    def _count(self, messages: Sequence[Mapping[str, str]]) -> int:
        return len(self.ids(messages))


def reusable_tokens(prompt: np.ndarray, earlier: Sequence[np.ndarray], page: int) -> int:
    """Tokens of `prompt` in full pages that an earlier prompt shares from the start. The last token is never reusable:
    its logits are needed."""
    longest = 0
    for other in earlier:
        size = min(len(prompt) - 1, len(other))
        differs = np.flatnonzero(prompt[:size] != other[:size])
        longest = max(longest, int(differs[0]) if differs.size else size)
    return longest // page * page


def run_chats(server: LocalServer, prompter: Prompter, chats: Chats) -> list[Exchange]:
    """Every turn of every conversation, round by round: the first turn of each, then the second of each, ... Where a
    reply shows nothing, as one of random weights may, as many words stand for it."""
    system = {"role": "system", "content": prompter.text(chats.system_tokens, seed=1)}
    histories = [[system] for _ in range(chats.conversations)]
    exchanges: list[Exchange] = []
    time.sleep(SETTLE_S)
    computed = server.metrics().get(COMPUTED, 0.0)
    for turn in range(chats.turns):
        for index, history in enumerate(histories):
            seed = 1000 + turn * chats.conversations + index
            history.append({"role": "user", "content": prompter.text(chats.turn_tokens, seed)})
            answer = server.chat(history, chats.reply_tokens, **prompter.fields)
            time.sleep(SETTLE_S)
            before, computed = computed, server.metrics()[COMPUTED]
            exchanges.append(
                Exchange(prompter.ids(history), answer.prompt_tokens, answer.cached_tokens, computed - before)
            )
            reply = answer.text if answer.text.strip() else prompter.text(chats.reply_tokens, seed + 500)
            history.append({"role": "assistant", "content": reply})
    return exchanges


def summarize_chats(exchanges: Sequence[Exchange], page: int) -> dict[str, Any]:
    reusable = [
        reusable_tokens(one.prompt_ids, [other.prompt_ids for other in exchanges[:index]], page)
        for index, one in enumerate(exchanges)
    ]
    differing = [abs(one.prompt_tokens - one.cached_tokens - one.computed_tokens) for one in exchanges]
    share = sum(one.cached_tokens for one in exchanges) / max(1, sum(reusable))
    return {
        "requests": len(exchanges),
        "prompt_tokens": sum(one.prompt_tokens for one in exchanges),
        "reusable_tokens": sum(reusable),
        "cached_tokens": sum(one.cached_tokens for one in exchanges),
        "computed_tokens": sum(one.computed_tokens for one in exchanges),
        "share_of_reusable": round(share, 4),
        "most_computed_off_by": max(differing),
        "same_tokenization": all(len(one.prompt_ids) == one.prompt_tokens for one in exchanges),
        "goals": {
            f"share of reusable tokens from the cache >= {LEAST_SHARE}": share >= LEAST_SHARE,
            "prompt less cached tokens = tokens computed, within a page a request": max(differing) <= page,
        },
    }


def run_ttft(server: LocalServer, prompter: Prompter, num_tokens: int, repeats: int) -> dict[str, Any]:
    cold: list[float] = []
    warm: list[float] = []
    for repeat in range(repeats):
        messages = [{"role": "user", "content": prompter.text(num_tokens, seed=5000 + repeat)}]
        cold.append(server.chat(messages, 2, **prompter.fields).ttft_s)
        warm.append(server.chat(messages, 2, **prompter.fields).ttft_s)
    ratio = spread([again / first for again, first in zip(warm, cold, strict=True)])
    return {
        "prompt_tokens": num_tokens,
        "cold_ms": spread([value * 1e3 for value in cold]),
        "repeated_ms": spread([value * 1e3 for value in warm]),
        "repeated_to_cold": ratio,
        "goals": {f"repeated prompt's first token in < {MOST_TTFT} of the time": ratio["median"] < MOST_TTFT},
    }


class Pass(NamedTuple):
    """One pass of all prompts. `loop_s`: CPU time of the loop thread."""

    wall_s: float
    loop_s: float
    num_tokens: int


def run_pass(instance: LocalInstance, prompts: np.ndarray, output_tokens: int) -> Pass:
    sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens)
    wall, cpu = time.perf_counter(), time.thread_time()
    requests = [instance.submit(PreparedPrompt(prompt), sampling) for prompt in prompts]
    instance.finish(requests)
    wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    return Pass(wall, cpu, prompts.size + sum(len(request.tokens["token"]) for request in requests))


def run_overhead(
    on: LocalInstance, off: LocalInstance, shape: tuple[int, int, int], repeats: int
) -> list[tuple[Pass, Pass]]:
    """Pairs (on, off) over prompts that nobody has seen. `shape`: requests, prompt tokens, output tokens."""
    num_prompts, input_tokens, output_tokens = shape
    pairs: list[tuple[Pass, Pass]] = []
    for repeat in range(-1, repeats):
        prompts = random_prompts(num_prompts, input_tokens, on.model.vocab_size(), seed=repeat + 1)
        sides = (on, off) if repeat % 2 == 0 else (off, on)
        passes = {id(side): run_pass(side, prompts, output_tokens) for side in sides}
        if repeat >= 0:
            pairs.append((passes[id(on)], passes[id(off)]))
    return pairs


def summarize_overhead(pairs: Sequence[tuple[Pass, Pass]]) -> dict[str, Any]:
    wall = spread([on.wall_s / off.wall_s - 1 for on, off in pairs])
    loop = spread([(on.loop_s - off.loop_s) / off.wall_s for on, off in pairs])
    return {
        "tok_s_on": spread([on.num_tokens / on.wall_s for on, _ in pairs]),
        "tok_s_off": spread([off.num_tokens / off.wall_s for _, off in pairs]),
        "cost_of_wall_time": wall,
        "more_loop_cpu_of_wall_time": loop,
        "goals": {
            f"loop's CPU time for the cache < {MOST_COST} of the wall time": loop["median"] < MOST_COST,
            f"wall time with the cache < {1 + MOST_COST} of that without": wall["median"] < MOST_COST,
        },
    }


def report_text(report: Mapping[str, Any]) -> str:
    lines: list[str] = []
    for part in PARTS:
        if part not in report:
            continue
        lines.append(f"{part}:")
        for name, value in report[part].items():
            if name == "goals":
                lines.extend(f"  {'met   ' if met else 'MISSED'} {goal}" for goal, met in value.items())
            elif isinstance(value, dict):
                lines.append(f"  {name:<28}{value['median']:>12.4f}   ({value['min']:.4f} to {value['max']:.4f})")
            else:
                lines.append(f"  {name:<28}{value:>12}")
    return "\n".join(lines)


def measure_served(
    target: str,
    overrides: Sequence[str],
    chats: Chats,
    repeats: int,
    parts: Sequence[str],
    variables: Mapping[str, Any],
) -> dict[str, Any]:
    """The parts that need a server, on one."""
    model = resolve_deployment(config_for(target, overrides), cache_dir=envs.CACHE_DIR.get()).model()
    prompter = Prompter(model, variables)
    found: dict[str, Any] = {}
    with serving(target, overrides) as server:
        if "ttft" in parts:
            found["ttft"] = run_ttft(server, prompter, chats.system_tokens, repeats)
        if "chats" in parts:
            found["chats"] = summarize_chats(run_chats(server, prompter, chats), PAGE)
        if "repeated" in parts:
            asked = ask_repeated(server, model.vocab_size(), PAGE, REPEATED_LENGTHS)
            found["repeated"] = summarize_repeated(asked, PAGE)
        if "shared" in parts:
            found["shared"] = summarize_shared(ask_shared(server, model.vocab_size(), PAGE))
    return found


def measure_overhead(target: str, threads: int, repeats: int) -> dict[str, Any]:
    """Sixteen requests at once, 256 tokens in, 32 out: prompts weigh much, so keys, look-ups and sealing do."""
    requests, input_tokens, output_tokens = 16, 256, 32
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    # A budget in tokens, not in time: what each engine measured at its start would cut its prompts its own way.
    equal = f"scheduler.max_step_tokens={STEP_TOKENS}"
    on, off = (
        LocalInstance(
            open_target(
                target, threads, requests, input_tokens + output_tokens, [equal, f"prefix_cache.enabled={word}"]
            )
        )
        for word in ("true", "false")
    )
    try:
        return summarize_overhead(run_overhead(on, off, (requests, input_tokens, output_tokens), repeats))
    finally:
        on.close()
        off.close()


def main(
    target: Annotated[str, typer.Argument(help="As for mstar serve.")] = "smollm2",
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")] = None,
    parts: Annotated[str, typer.Option(help="Which of the parts.")] = ",".join(PARTS),
    repeats: Annotated[int, typer.Option(min=1, help="Of ttft and overhead.")] = 5,
    conversations: Annotated[int, typer.Option(min=1)] = 10,
    turns: Annotated[int, typer.Option(min=1)] = 6,
    reply_tokens: Annotated[int, typer.Option(min=1)] = 80,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a forward, for overhead.")] = 2,
    variables: Annotated[
        str,
        typer.Option("--template", metavar="JSON", help='Variables of the chat template: {"enable_thinking": false}.'),
    ] = "{}",
    name: Annotated[str, typer.Option(help="Of the file of results.")] = "prefix_reuse",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Exit code 1 if a goal is missed."""
    chosen = parts.split(",")
    if unknown := sorted(set(chosen) - set(PARTS)):
        raise typer.BadParameter(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    chats = Chats(conversations=conversations, turns=turns, reply_tokens=reply_tokens)
    report: dict[str, Any] = {"machine": machine(), "load_before": load_average(), "target": target}
    if set(SERVED_PARTS).intersection(chosen):
        report |= measure_served(target, overrides or [], chats, repeats, chosen, json.loads(variables))
    if "overhead" in chosen:
        report["overhead"] = measure_overhead(target, threads, repeats)
    write_result(name, report)
    print(json.dumps(report) if as_json else report_text(report))
    met = all(met for part in PARTS if part in report for met in report[part]["goals"].values())
    raise typer.Exit(0 if met else 1)


if __name__ == "__main__":
    typer.run(main)
