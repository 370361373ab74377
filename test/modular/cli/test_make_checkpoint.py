"""`mstar make-checkpoint`, and `mstar check` with what it made and with what cannot be had."""

import json
from pathlib import Path

import pytest
from support.command_line import command, deployment_file

from mstar.config.load import shipped_configs


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("made") / "tiny"
    result = command("make-checkpoint", "qwen3_5", "--size", "tiny", "--seed", 7, directory)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0].startswith(f"{directory}: qwen3_5 tiny of seed 7, 1.6 MB")
    assert result.stdout.splitlines()[1] == f"mstar serve {directory}"
    return str(directory)


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """A hub that cannot be reached, and nothing that was fetched from it before."""

    def refuse(*_, **__):
        raise AssertionError("a look asks no hub")

    monkeypatch.setattr("httpx.Client.send", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.parametrize("target", ["checkpoint alone", "qwen3_5", "qwen3_5_4b", "qwen3_5_9b_tp2"])
def test_what_was_made_passes_the_check(tiny, tmp_path, target: str):
    arguments = [tiny] if target == "checkpoint alone" else [target, "--set", f"checkpoint={tiny}"]
    result = command("check", *arguments)
    assert result.exit_code == 0, result.output
    assert "qwen3_5 on " in result.stdout
    assert "up to 32,768 tokens" in result.stdout


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_4b", "qwen3_5_9b_tp2"])
def test_shipped_files_are_checked_without_the_hub(no_hub, name: str):
    result = command("check", shipped_configs()[name])
    assert result.exit_code == 0, result.output
    said = "is not on this machine: this is its published shape, as this version knows it"
    assert said in " ".join(result.stdout.split())


def test_shares_of_a_node_are_shown_and_not_served(no_hub, tiny):
    shown = command("check", "qwen3_5_9b_tp2", "--set", f"checkpoint={tiny}").stdout
    assert "  worker 0: a share of LLM (one of 2), Vision\n  worker 1: a share of LLM (one of 2)\n" in shown
    warning = "warning: this version cannot serve it: node_groups: LLM has tp_size 2, and this version runs tp_size 1"
    assert shown.splitlines()[-1].startswith(warning)
    walks = command("graph", "qwen3_5_9b_tp2", "--set", f"checkpoint={tiny}").stdout
    assert "workers\n  worker 0: a share of LLM (one of 2), Vision\n  worker 1: a share of LLM (one of 2)\n" in walks
    assert "of a node in shares, the walks name the worker of the first" in walks
    assert "in shares" not in command("graph", tiny).stdout
    for arguments in (["serve", "qwen3_5_9b_tp2", "--port", "0"], ["run", "hi", "-c", "qwen3_5_9b_tp2"]):
        result = command(*arguments)
        assert result.exit_code in (1, 2)
        assert "LLM has tp_size 2, and this version runs tp_size 1" in result.stderr


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ({"ranks": [0, 1]}, "tp_size 1 takes as many different ranks (found [0, 1])"),
        ({"ranks": [0], "tp_size": 2}, "tp_size 2 takes as many different ranks (found [0])"),
        ({"ranks": [0, 0], "tp_size": 2}, "tp_size 2 takes as many different ranks (found [0, 0])"),
        ({"ranks": [0, 1, 2], "tp_size": 3}, "tp_size 3 does not divide the 2 heads of LLM's kv"),
    ],
)
def test_shares_that_cannot_be(tiny, tmp_path, group: dict, said: str):
    groups = [{"node_names": ["LLM"], **group}]
    result = command("check", deployment_file(tmp_path, model="qwen3_5", checkpoint=tiny, node_groups=groups))
    assert result.exit_code == 1
    assert said in result.stderr + result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["qwen3_5", "--size", "huge"], "qwen3_5 has no size 'huge'; there are tiny, "),
        (["llama"], "model 'llama' makes no random checkpoints; models that do: qwen3_5"),
        (["qwen35"], "there is no model 'qwen35'; did you mean 'qwen3_5'?"),
    ],
)
def test_mistakes(tmp_path, arguments: list[str], said: str):
    result = command("make-checkpoint", *arguments, tmp_path / "out")
    assert result.exit_code == 1
    assert said in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_is_not_written_over(tiny):
    result = command("make-checkpoint", "qwen3_5", tiny)
    assert result.exit_code == 1
    assert "is not empty" in result.stderr
    assert json.loads(Path(tiny, "config.json").read_text())["model_type"] == "qwen3_5"
