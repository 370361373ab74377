"""A deployment file against the model that it names: what does not fit is refused with its key before a start."""

import pytest
from support.checkpoints import write_directory
from support.command_line import command, deployment_file

from mstar.config.load import ConfigError, config_from_mapping
from mstar.engine.resources import attention_choice, linear_attention_choice
from mstar.engine.spec import ATTENTION_BACKENDS, LINEAR_ATTENTION_BACKENDS
from mstar.launch.deployment import open_deployment, resolve_deployment
from mstar.model.qwen3_5.random_checkpoint import write_random_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("llama")
    write_directory(directory)
    return str(directory)


def compiled(checkpoint: str, tmp_path, **values):
    config = config_from_mapping({"model": "llama", "checkpoint": checkpoint, **values}, "f.yaml")
    deployment = resolve_deployment(config, cache_dir=tmp_path)
    return deployment.compile(deployment.model())


REFUSED = [
    ({"device": "cuda"}, "device: cuda, and this machine has no accelerator"),
    ({"max_seq_len": 257}, "max_seq_len: 257 is more than the model's 256 positions"),
    ({"node_groups": [{"node_names": ["LM"]}]}, "the model has no node LM; its nodes are LLM"),
    ({"node_groups": [{"node_names": ["LLM"]}, {"node_names": ["LLM"]}]}, "LLM is placed twice"),
    ({"resources": {"cache": {"num_pages": 8}}}, "the model has no resource cache; it has attn, kv, rope, sampler"),
    ({"resources": {"rope": {"num_pages": 8}}}, "resources.rope.num_pages: rope is no cache"),
    ({"resources": {"sampler": {"memory_fraction": 0.1}}}, "resources.sampler.memory_fraction"),
    ({"resources": {"attn": {"host_bytes": 1}}}, "resources.attn.host_bytes: attn is no cache"),
    ({"resources": {"kv": {"dtype": "bfloat16"}}}, "resources.kv.dtype: kv holds no recurrent states"),
    ({"resources": {"kv": {"backend": "cpu"}}}, "resources.kv.backend: kv has no backends"),
    (
        {"resources": {"attn": {"backend": "fast"}}},
        "resources.attn.backend: 'fast' is unknown (known: cpu, flashinfer, torch_ref, triton)",
    ),
]


@pytest.mark.parametrize(("values", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_what_does_not_fit_the_model_is_refused_by_key(checkpoint, tmp_path, values, said):
    with pytest.raises(ConfigError) as caught:
        compiled(checkpoint, tmp_path, **values)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"device": "cpu"},
        {"device": "auto"},
        {"max_seq_len": 256},
        {"node_groups": [{"node_names": ["LLM"], "ranks": [0]}]},
        {"resources": {"kv": {"num_pages": 8}, "attn": {"backend": "torch_ref"}}},
        {"resources": {"kv": {"host_bytes": 0}, "attn": {"host_bytes": 0}}},
        {"resources": {"kv": {"host_bytes": 1 << 40}}, "prefix_cache": {"enabled": False, "reuse_generated": True}},
    ],
)
def test_the_legal_neighbours_are_taken(checkpoint, tmp_path, values):
    assert compiled(checkpoint, tmp_path, **values).nodes_on(0) == ("LLM",)


@pytest.mark.parametrize(
    ("on_host", "said"),
    [
        ({"kv"}, "resources.kv.host_bytes: a preempted request moves its pages and its state, so give resources.state"),
        (
            {"state"},
            "resources.state.host_bytes: a preempted request moves its pages and its state, so give resources.kv",
        ),
        ({"kv", "state"}, None),
        (set(), None),
    ],
)
def test_pages_and_states_move_to_the_host_together(tmp_path, on_host: set[str], said: str | None):
    write_random_checkpoint("tiny", tmp_path / "checkpoint", seed=0)
    resources = {key: {"host_bytes": 1 << 20 if key in on_host else 0} for key in ("kv", "state")}
    path = deployment_file(tmp_path, model="qwen3_5", checkpoint=str(tmp_path / "checkpoint"), resources=resources)
    checked = command("check", path)
    assert checked.exit_code == (0 if said is None else 1), checked.output
    if said is not None:
        served = command("serve", path, "--port", "0")
        assert served.exit_code == 2
        for result in (checked, served):
            assert said in " ".join(result.output.split()) and "Traceback" not in result.output


def test_backends_that_may_be_chosen_are_those_that_exist():
    assert set(ATTENTION_BACKENDS) == set(attention_choice.BACKENDS)
    assert set(LINEAR_ATTENTION_BACKENDS) == set(linear_attention_choice.BACKENDS)


def test_a_deployment_survives_the_way_to_another_process(checkpoint, tmp_path):
    limits = {"max_seq_len": 99, "server": {"media": {"max_pixels": 77}}}
    config = config_from_mapping({"model": "llama", "checkpoint": checkpoint, **limits}, "f.yaml")
    deployment = resolve_deployment(config, cache_dir=tmp_path)
    opened = open_deployment(deployment.facts)
    assert opened == deployment
    assert (opened.setup.max_seq_len, opened.setup.max_media_pixels) == (99, 77)
    assert opened.checkpoint() == deployment.checkpoint()
