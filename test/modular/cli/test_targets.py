"""What a command is given to work on, and `--set`: a mistake ends it with a message and an exit code."""

import socket

import pytest
from support.checkpoints import write_directory
from support.command_line import SERVER_TARGET, WITH_A_TARGET, command
from support.composite.deployment import write_checkpoint

from mstar.cli.targets import config_for

CODES = {"serve": 2, "check": 1, "graph": 1, "run": 1}
every_command = pytest.mark.parametrize("arguments", WITH_A_TARGET, ids=lambda arguments: arguments[0])


@every_command
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("port", "--set 'port': expected KEY=VALUE, for example --set server.port=8080"),
        ("port=1", "port: unknown key; did you mean 'server.port'?"),
        ("server.prot=1", "server.prot: unknown key; did you mean 'port'?"),
        ("server.port=[/b]", "server.port: must be a whole number (found ['/b'])"),
        ("server.port=[b, 1", "--set 'server.port=[b, 1': the value is not valid YAML"),
        ("model.name=x", "--set 'model.name=x': 'model' has no keys"),
    ],
)
def test_an_override_that_cannot_be_applied(arguments: list[str], override: str, said: str):
    result = command(*arguments, "smollm2", "--set", override)
    assert result.exit_code == CODES[arguments[0]]
    assert said in result.output


@every_command
@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("smolm2", "there is no 'smolm2'; did you mean 'smollm2'?"),
        ("qwen35", "there is no 'qwen35'; did you mean 'qwen3_5'?"),
        ("nowhere", "a model family (llama, qwen3_5), a YAML file, a checkpoint's folder or .gguf file"),
        ("nowhere[b].gguf", "there is no file nowhere[b].gguf"),
        (".", "has no safetensors files"),
    ],
)
def test_a_target_that_is_not_there(arguments: list[str], target: str, said: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    free_port = ["--port", "0"] if arguments == SERVER_TARGET else []
    result = command(*arguments, target, *free_port)
    assert result.exit_code == CODES[arguments[0]]
    assert said in result.output


def test_a_checkpoint_without_a_tokenizer_is_not_served(weights, tmp_path):
    write_directory(tmp_path, weights, with_tokenizer=False)
    result = command("serve", tmp_path, "--port", 0)
    assert result.exit_code == 2
    assert "tokenizer" in result.stderr


def test_a_checkpoint_that_no_model_serves(tmp_path):
    write_checkpoint(tmp_path)
    result = command("serve", tmp_path, "--port", 0)
    assert result.exit_code == 2
    assert "['TinyComposite'] are not served" in result.stderr


@pytest.mark.parametrize("target", ["smollm2", "org/not-here", "pypi:not-here==1.0/a/b.gguf"])
def test_the_port_is_looked_at_before_any_checkpoint(target: str):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = command("serve", target, "--port", port)
    assert result.exit_code == 2
    assert f"cannot listen at 127.0.0.1:{port}: Address already in use; end the process" in result.stderr


def test_an_address_that_is_not_there():
    result = command("serve", "--host", "name.invalid")
    assert result.exit_code == 2
    assert "cannot listen at name.invalid:8000" in result.stderr
    assert "this machine has no such address; --host 127.0.0.1" in result.stderr


def test_a_published_checkpoint_is_checked_without_a_download(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = command("check", "Qwen/Qwen3.5-2B")
    assert "Qwen/Qwen3.5-2B: qwen3_5 on 1 worker" in result.output


def test_a_broken_file_is_named_where_it_is_broken(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("model: [llama\nother: 1\n")
    result = command("check", file)
    assert result.exit_code == 1
    assert f"in {file}, line 2" in result.output


def test_a_configuration_in_the_place_of_the_prompt():
    result = command("run", "my.yaml", "What is it?")
    assert result.exit_code == 2
    assert "with -c:" in result.output


def test_a_model_outside_the_package_is_a_target():
    config = config_for("support.slow_llama:CARD", ["checkpoint=/nowhere"])
    assert (config.model, config.checkpoint) == ("support.slow_llama:CARD", "/nowhere")


def test_a_shipped_configuration_is_meant_before_a_model_of_the_same_name():
    config = config_for("qwen3_5", [])
    assert (config.model, config.checkpoint, config.max_seq_len) == ("qwen3_5", "Qwen/Qwen3.5-0.8B", 32768)
    assert config_for("llama", []).checkpoint is None
