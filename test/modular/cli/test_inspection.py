"""`mstar check`, `mstar models`, `mstar graph`, `mstar version`: what they show and what they refuse."""

import pytest
from support.command_line import command, deployment_file
from support.composite.deployment import CARD as COMPOSITE
from support.composite.deployment import PLACEMENTS, node_groups, write_checkpoint

import mstar
from mstar.model.registry import CARDS


@pytest.fixture(scope="module")
def composite(tmp_path_factory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("composite")))


def groups(placement: str) -> list[dict]:
    return [group.model_dump() for group in node_groups(placement)]


def test_version_and_help():
    assert command("version").stdout == command("--version").stdout == f"{mstar.__version__}\n"
    assert "Start the server" in command("--help").stdout
    assert "Usage: mstar bench [OPTIONS]" in command("bench", "--help").stdout


def test_models_lists_every_card_with_its_whole_checkpoint():
    result = command("models")
    assert result.exit_code == 0
    cells = [line.split("│")[1:-1] for line in result.stdout.splitlines() if "│" in line]
    names, _, checkpoints = ("".join(cell.strip() for cell in column) for column in zip(*cells, strict=True))
    assert names == "".join(card.name for card in CARDS)
    assert checkpoints == "".join(card.default_checkpoint or "" for card in CARDS)
    assert "shipped configurations: qwen3_5, qwen3_5_4b, qwen3_5_9b_tp2, smollm2" in result.stdout


@pytest.mark.parametrize("placement", ["one_worker", "three_workers"])
def test_graph_shows_walks_edges_streams_and_where_nodes_run(composite, tmp_path, placement: str):
    path = deployment_file(tmp_path, model=COMPOSITE, checkpoint=composite, node_groups=groups(placement))
    result = command("graph", path)
    assert result.exit_code == 0, result.output
    lines = [line.strip() for line in result.stdout.splitlines()]
    for node, rank in PLACEMENTS[placement].items():
        ranks = {line.partition(" on worker ")[2].split(",")[0] for line in lines if line.startswith(f"{node}(")}
        assert ranks == {str(rank)}, node
    for part in ("partition ", "  walk ", "loop ", "\nstreams\n", " -> client as "):
        assert part in result.stdout
    assert "credit  " in result.stdout.partition("\nsigns\n")[2]


def test_graph_of_a_checkpoint(checkpoint):
    shown = command("graph", checkpoint).stdout
    assert "walk prefill\n    LLM() on worker 0" in shown
    assert "loop decode, at most the request's decode_steps times" in shown


def test_check_of_a_good_file(checkpoint, tmp_path):
    path = deployment_file(tmp_path, model="llama", checkpoint=str(checkpoint), max_seq_len=99)
    result = command("check", path)
    assert result.exit_code == 0, result.output
    assert f"{path}: llama on 1 worker, up to 99 tokens\n  worker 0: LLM\n" in result.stdout
    for fact in ("python", "torch", "cores", "free memory", "C++ compiler"):
        assert f" {fact}  " in result.stdout


def test_check_of_values_without_a_file_is_of_the_default_with_them(checkpoint):
    result = command("check", "--set", f"checkpoint={checkpoint}", "--set", "max_seq_len=99")
    assert result.exit_code == 0, result.output
    assert "smollm2: llama on 1 worker, up to 99 tokens\n" in result.stdout
    result = command("check", "--set", "server.prot=1")
    assert result.exit_code == 1
    assert "server.prot: unknown key" in result.stdout


def test_check_lists_workers_and_their_nodes(composite, tmp_path):
    path = deployment_file(tmp_path, model=COMPOSITE, checkpoint=composite, node_groups=groups("codec_apart"))
    shown = command("check", path).stdout
    first, second = (line.partition(": ")[2].split(", ") for line in shown.splitlines() if line.startswith("  worker "))
    assert set(first) == {node for node, rank in PLACEMENTS["codec_apart"].items() if rank == 0}
    assert second == [node for node, rank in PLACEMENTS["codec_apart"].items() if rank == 1]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "  prefix cache: prompts\n"),
        ({"prefix_cache": {"enabled": False, "reuse_generated": True}}, "  prefix cache: off\n"),
        ({"prefix_cache": {"reuse_generated": True}}, "  prefix cache: prompts and generated tokens\n"),
        ({"resources": {"kv": {"host_bytes": 3 << 29}}}, "  kv: up to 1.50 GiB of host memory"),
    ],
)
def test_check_shows_what_is_kept_and_moved(checkpoint, tmp_path, values: dict, said: str):
    path = deployment_file(tmp_path, model="llama", checkpoint=str(checkpoint), **values)
    result = command("check", path)
    assert result.exit_code == 0, result.output
    assert said in result.stdout
    assert ("host memory" in result.stdout) == ("resources" in values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"schedular": {"max_rows": 3}}, "schedular: unknown key; did you mean 'scheduler'?"),
        ({"server": {"port": 70000}}, "server.port: must be at most 65535 (found 70000)"),
        ({"server": {"served_names": "[/x]"}}, "server.served_names: must be a list (found '[/x]')"),
        ({"node_groups": [{"node_names": ["LM"]}]}, "node_groups: the model has no node LM; its nodes are LLM"),
        ({"resources": {"cache": {"num_pages": 8}}}, "resources: the model has no resource cache; it has attn, kv"),
        ({"model": "lama"}, "there is no model 'lama'; did you mean 'llama'?"),
        ({"model": "nowhere.at_all:CARD"}, "cannot import 'nowhere.at_all:CARD'"),
        ({"model": COMPOSITE}, "which is for model 'llama'"),
        ({"checkpoint": "/nowhere/at[/all].gguf"}, "there is no file /nowhere/at[/all].gguf"),
        ({"max_seq_len": 257}, "max_seq_len: 257 is more than the model's 256 positions"),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_check_names_what_is_wrong(checkpoint, tmp_path, values: dict, said: str):
    path = deployment_file(tmp_path, **{"model": "llama", "checkpoint": str(checkpoint), **values})
    result = command("check", path)
    assert result.exit_code == 1
    assert said in result.stdout
    assert "worker 0" not in result.stdout


@pytest.mark.parametrize(("max_seq_len", "is_short"), [(128, False), (129, True)])
def test_check_announces_a_cache_that_is_smaller_than_the_context(checkpoint, max_seq_len: int, is_short: bool):
    """Two pages of 64 tokens."""
    values = (f"checkpoint={checkpoint}", f"max_seq_len={max_seq_len}", "resources.kv.num_pages=2")
    result = command("check", *(word for value in values for word in ("--set", value)))
    assert result.exit_code == 0, result.output
    said = "  kv holds 128 tokens, fewer than max_seq_len (129): no request can be longer\n"
    assert (said in result.stdout) == ("fewer than" in result.stdout) == is_short


def test_check_of_a_file_that_is_no_deployment(tmp_path):
    path = tmp_path / "[red]list.yaml"
    path.write_text("- a\n- b\n")
    result = command("check", path)
    assert result.exit_code == 1
    assert f"{path}: expected keys and values, found list" in result.stdout


def test_check_names_a_variable_of_another_version(monkeypatch):
    assert command("check").exit_code == 0
    monkeypatch.setenv("MSTAR_CPU_KERNEL", "native")
    result = command("check")
    assert result.exit_code == 1
    assert "MSTAR_CPU_KERNEL  is not a variable of this version" in result.stdout
