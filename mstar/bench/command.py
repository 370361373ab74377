"""The load generator's command line: `mstar bench` and `python -m benchmark.runner`.

One process and one event loop. `main` takes the arguments after the command's name.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer
import uvloop
from typer.core import TyperCommand

from mstar.bench.composition import Composition, MakePrompts, WorkloadName
from mstar.bench.connection import ConnectionPool
from mstar.bench.images import parse_sizes
from mstar.bench.load import Load, LoadKind, perform
from mstar.bench.preflight import PreflightError, first_model, require_images, with_usage, words_of
from mstar.bench.prompts import from_file, of_words, read_prompts
from mstar.bench.report import Report, build_report, report_text
from mstar.bench.workloads import Api, TextToText

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class PlainErrors(TyperCommand):
    """Without the words that the validation behind typer puts before a refused choice."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A run, parsed."""

    url: str
    model: str | None
    api: Api
    load: LoadKind
    concurrency: int
    rate: float
    workload: Composition
    requests: int
    input_tokens: int
    output_tokens: int
    prompts: Path | None
    ignore_eos: bool
    temperature: float
    seed: int
    warmup: int
    timeout_s: float
    extra: dict[str, Any]
    api_key: str | None


async def run_plan(plan: Plan) -> Report:
    """Preflight, warm-up, load.

    Raises:
        PreflightError: the server cannot be measured.
        ValueError: a prompt file or an address of no use.
    """
    pool = ConnectionPool(plan.url, plan.api_key)
    try:
        text = TextToText(
            model=plan.model or await first_model(pool),
            api=plan.api,
            prompts=of_words(8, plan.seed),
            max_tokens=plan.output_tokens,
            ignore_eos=plan.ignore_eos,
            include_usage=True,
            temperature=plan.temperature,
            seed=plan.seed,
            extra=plan.extra,
        )
        text = await with_usage(pool, text, plan.timeout_s)
        if plan.workload.name is not WorkloadName.TEXT:
            await require_images(pool, text, plan.timeout_s)
        workload = plan.workload.build(text, await _prompts(plan, pool, text), plan.requests, plan.seed)
        load = Load(plan.load, plan.requests, plan.concurrency, plan.rate, plan.seed)
        if plan.warmup:
            first = Load(LoadKind.CLOSED, plan.warmup, plan.concurrency, plan.rate, plan.seed)
            await perform(pool, workload, first, timeout_s=plan.timeout_s, first_index=plan.requests)
        cpu_s = time.process_time()
        records = await perform(pool, workload, load, timeout_s=plan.timeout_s)
        cpu_s = time.process_time() - cpu_s
    finally:
        pool.close()
    return build_report(
        records, url=plan.url, model=text.model, api=plan.api, load=load, workload=plan.workload, cpu_s=cpu_s
    )


async def _prompts(plan: Plan, pool: ConnectionPool, text: TextToText) -> MakePrompts:
    """Those of the file, or made ones, different for each kind."""
    if plan.prompts is not None:
        given = from_file(read_prompts(plan.prompts), plan.seed)
        return lambda _: given
    num_words = await words_of(pool, text, plan.input_tokens, plan.seed, plan.timeout_s)
    return lambda kind: of_words(num_words, plan.seed, kind)


@app.command(cls=PlainErrors)
def bench(
    url: Annotated[str, typer.Option(help="Root of an OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model to ask for; the first that the server lists.")] = None,
    api: Annotated[Api, typer.Option(help="Which endpoint.")] = Api.CHAT,
    workload: Annotated[
        WorkloadName, typer.Option(help="What the requests ask: text, images and text, or some of each at once.")
    ] = WorkloadName.TEXT,
    image_share: Annotated[float, typer.Option(help="Of a mix: share of the requests that have images.")] = 0.5,
    image_sizes: Annotated[
        str, typer.Option(metavar="WxH,...", help="Of made images, in pixels; each is of one of these sizes.")
    ] = "448x448",
    images: Annotated[int, typer.Option(min=1, help="Of each request with images.")] = 1,
    image_repeats: Annotated[
        float, typer.Option(help="Share of the requests with images that have those of an earlier request.")
    ] = 0.0,
    load: Annotated[
        LoadKind,
        typer.Option(help="closed: N at all times; wave: N at once, then the next N; poisson: random arrivals."),
    ] = LoadKind.CLOSED,
    concurrency: Annotated[int, typer.Option(min=1, help="Of closed loops and waves.")] = 8,
    rate: Annotated[float, typer.Option(help="Requests per second of Poisson arrivals.")] = 1.0,
    requests: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 64,
    input_tokens: Annotated[
        int, typer.Option(min=1, help="Of a made prompt, its template included, images not counted.")
    ] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Asked of each request.")] = 128,
    prompts: Annotated[
        Path | None, typer.Option(help='JSON lines, {"prompt": "..."} or {"messages": [...]}, instead of made prompts.')
    ] = None,
    ignore_eos: Annotated[
        bool | None,
        typer.Option("--ignore-eos/--respect-eos", help="Full-length outputs or not; full for made prompts."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Of prompts, their order, arrivals and sampling.")] = 0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the measured ones.")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds for one request.")] = 600.0,
    extra: Annotated[str, typer.Option(metavar="JSON", help="Fields to add to every request.")] = "{}",
    api_key: Annotated[str | None, typer.Option(help="Key, if the server asks for one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Measure a running server: time to first token, between tokens, to the end; tokens per second; failures.

    Exit code: 0 for a report, 1 if no request succeeded, 2 for a server or an option of no use.
    """
    try:
        plan = Plan(
            url=url,
            model=model,
            api=api,
            load=load,
            concurrency=concurrency,
            rate=rate,
            workload=Composition(workload, image_share, parse_sizes(image_sizes), images, image_repeats),
            requests=requests,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            prompts=prompts,
            ignore_eos=prompts is None if ignore_eos is None else ignore_eos,
            temperature=temperature,
            seed=seed,
            warmup=warmup,
            timeout_s=timeout,
            extra=msgspec.json.decode(extra, type=dict[str, Any]),
            api_key=api_key,
        )
        if plan.rate <= 0:
            raise ValueError(f"--rate {plan.rate:g}: requests per second are more than 0")
        plan.workload.check(plan.api)
        report = uvloop.run(run_plan(plan))
    except (PreflightError, OSError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    typer.echo(msgspec.json.encode(report).decode() if as_json else report_text(report))
    raise typer.Exit(0 if report.succeeded else 1)


def main(arguments: Sequence[str] | None = None, *, called: str) -> NoReturn:
    """Run with `arguments` (None: those of the process) and exit. `called`: the command as its user typed it, for the
    help."""
    app(arguments, prog_name=called)
    raise SystemExit(0)
