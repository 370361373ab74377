"""The documentation builds offline without a warning, and what it names exists."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.doc_names import documents, exists, kind_of, literals, missing
from support.instance import Tuning
from support.repository import ROOT, relative
from support.tiny_serving import TinyLlama

ROADMAP = ROOT / "docs" / "roadmap.rst"
PAGES = ("architecture", "adding_models", "models", "installation", "quickstart", "serving", "clients",
         "environment_variables", "glossary", "roadmap", "index")  # fmt: skip


def _build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(source), str(target)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_pages_build_with_warnings_as_errors(tmp_path: Path):
    run = _build(ROOT / "docs", tmp_path / "html")
    assert run.returncode == 0, run.stderr
    assert [page for page in PAGES if not (tmp_path / "html" / f"{page}.html").is_file()] == []


def test_a_broken_reference_fails_the_build(tmp_path: Path):
    (tmp_path / "conf.py").write_text("nitpicky = True\n")
    (tmp_path / "index.rst").write_text("Page\n====\n\n:doc:`nowhere`\n")
    assert _build(tmp_path, tmp_path / "html").returncode != 0


@pytest.mark.parametrize("path", [p for p in documents() if p != ROADMAP], ids=relative)
def test_names_that_a_page_mentions_exist(path: Path):
    assert list(missing(path)) == []


def test_names_on_the_roadmap_do_not_exist_yet():
    promises = {name for name in literals(ROADMAP) if kind_of(name) in ("class", "environment variable", "command")}
    assert promises, "the roadmap names nothing"
    assert sorted(name for name in promises if exists(name)) == [], "it is here: take it off the roadmap"


# Names that contributors know from elsewhere and look for; each is here or promised.
AGREED = [
    "mstar/graph/base.py",
    "mstar/engine/cuda_graph_config.py",
    "mstar/engine/cuda_graph_runner.py",
    "mstar/engine/resources/base.py",
    "mstar/worker/rid_table.py",
    "mstar/worker/micro_scheduler.py",
    "mstar/distributed/communication.py",
    "mstar/platforms/__init__.py",
    "test/modular/",
    "test/integration/",
    "test/rust/",
    "test/cpu-core.txt",
    "benchmark/worker_phases/",
    "benchmark/runner.py",
    "benchmark/run_benchmark.sh",
    "perf_testing/offline_homogenous.sh",
    "Resource",
    "NodeSubmodule",
    "NodeResourceSpec",
    "PageArena",
    "PageAllocator",
    "SamplerStep",
    "ChunkingPolicy",
    "CPUPagePool",
    "WorkspacePool",
    "RecurrentStatePool",
    "BatchedCudaGraphConfig",
    "PackedCudaGraphConfig",
    "PiecewiseBatchedConfig",
    "PiecewisePackedConfig",
    "RaggedCrossAttentionSpec",
    "RaggedCrossPrefillWrapper",
    "enable_async_scheduling",
    "force_double_buffer",
    "current_platform",
    "process_prompt",
    "step_metadata",
    "get_node_resources",
    "prepare_inputs",
    "declare_step",
    "can_batch",
    "forward_batched",
    "check_stop",
    "get_chunking_policy",
    "keep_final_chunk_samples",
    "cg_key_info",
    "additional_key_info",
    "disable_spec_node_walks",
    "speculate_node",
    "consumer_walk",
    "MSTAR_RUST_GRAPH",
    "MSTAR_RUST_ZMQ",
    "MSTAR_WIRE_CODEC",
    "MSTAR_TP_ASYNC_SCHED",
]


@pytest.mark.parametrize("name", AGREED)
def test_agreed_names_are_here_or_on_the_roadmap(name: str):
    assert exists(name) != (name in literals(ROADMAP))


@pytest.mark.parametrize(
    "name",
    [
        "MSTAR_NO_SUCH_SWITCH",
        "mstar_no_such_gauge{pool}",
        "mstar/no_such_package",
        "docs/no_such_page.rst",
        "mstar.graph.base.NoSuchNode",
        "mstar.no_such_package",
        "mstar no-such-command",
        "mstar serve --no-such-option",
        "mstar bench --no-such-option",
        "make no-such-target",
        "GET /no-such-route",
        "NoSuchClass",
        "GraphNode.no_such_field",
        "no_such_identifier",
        "server.no_such_key",
    ],
)
def test_a_wrong_name_is_noticed(name: str):
    assert not exists(name)


@pytest.mark.parametrize("name", ["mstar.graph.base.GraphNode", "GraphNode.input_names", "make check", "mstar version"])
def test_a_right_name_is_found(name: str):
    assert kind_of(name)
    assert exists(name)


def _python_blocks(path: Path) -> list[tuple[str, str]]:
    """(caption or "", code) of each Python block of a page."""
    pattern = r"^\.\. code-block:: python\n(?:   :caption: (\S+)\n)?\n((?:   .*\n|\n)+)"
    return [(name, textwrap.dedent(code)) for name, code in re.findall(pattern, path.read_text(), re.MULTILINE)]


def test_python_examples_of_the_package_run():
    blocks = [block for path in documents() for block in _python_blocks(path)]
    examples = [code for _, code in blocks if "from mstar" in code]
    assert len(examples) >= 3
    for example in examples:
        exec(compile(example, "example", "exec"), {"__name__": "example"})


def test_the_model_of_the_guide_computes_what_transformers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, code in _python_blocks(ROOT / "docs" / "adding_models.rst"):
        if name:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    llama = TinyLlama(tmp_path / "checkpoint", "no_grouping_untied", card="my_model.model:CARD")
    instance = llama.instance(Tuning())
    prompts = [llama.prompt(length) for length in (1, 7, 20)]
    results = [llama.submit(instance, str(rid), prompt, max_tokens=9) for rid, prompt in enumerate(prompts)]
    instance.run()
    assert [result.tokens for result in results] == [llama.greedy(prompt, 9) for prompt in prompts]


def test_the_checkpoint_of_the_guide_is_served_by_its_model(tmp_path: Path):
    blocks = {name: code for name, code in _python_blocks(ROOT / "docs" / "adding_models.rst") if name}
    for name, code in blocks.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    (tmp_path / "my.yaml").write_text("model: my_model.model:CARD\ncheckpoint: ./my_checkpoint\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    for command in (
        [sys.executable, "make_my_checkpoint.py"],
        [sys.executable, "-m", "mstar.cli", "run", "-c", "my.yaml", "--max-tokens", "4", "Hello"],
    ):
        run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
