"""Deployment files: layers of values, and errors that name the key and what was meant."""

import pytest

from mstar.config.load import ConfigError, config_from_mapping, config_from_text, load_config, shipped_configs


def test_file_values_win_over_defaults_and_overrides_win_over_the_file(tmp_path):
    path = tmp_path / "deployment.yaml"
    path.write_text("model: llama\nscheduler: {max_rows: 8}\nserver: {port: 9000}\n")
    config = load_config(path, ["server.port=9001", "scheduler.async_scheduling=false", "server.api_keys=[a, b]"])
    assert (config.scheduler.max_rows, config.scheduler.max_queue) == (8, 1024)
    assert (config.server.port, config.server.host) == (9001, "127.0.0.1")
    assert config.scheduler.async_scheduling is False
    assert config.server.api_keys == ("a", "b")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model": "m", "schedular": {}}, "schedular: unknown key; did you mean 'scheduler'?"),
        ({"model": "m", "server": {"prot": 1}}, "server.prot: unknown key; did you mean 'port'?"),
        (
            {"model": "m", "resources": {"kv": {"num_page": 1}}},
            "resources.kv.num_page: unknown key; did you mean 'num_pages'?",
        ),
        (
            {"model": "m", "server": {"port": 70000}},
            "server.port: must be at most 65535 (found 70000)",
        ),
        ({"model": "m", "resources": {"kv": {"num_pages": 9, "memory_fraction": 0.5}}}, "not both"),
        (
            {"model": "m", "resources": {"kv": {"host_bytes": -1}}},
            "resources.kv.host_bytes: must be at least 0 (found -1)",
        ),
        (
            {"model": "m", "prefix_cache": {"reuse_generate": True}},
            "prefix_cache.reuse_generate: unknown key; did you mean 'reuse_generated'?",
        ),
        ({"checkpoint": "x"}, "model: is missing"),
        ({"model": "m", "node_groups": [{"node_names": ["A"], "ranks": [1]}]}, "must count from 0 without a gap"),
    ],
)
def test_errors_name_the_key(values, said):
    with pytest.raises(ConfigError) as caught:
        config_from_mapping(values, "f.yaml")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        (
            {"scheduler": {"max_step_tokens": 0, "max_rows": "many"}},
            [
                "scheduler.max_rows: must be a whole number (found 'many')",
                "scheduler.max_step_tokens: must be at least 1 or 'auto' (found 0)",
            ],
        ),
        ({"num_threads": "all"}, ["num_threads: must be a whole number or 'auto' (found 'all')"]),
        ({"capture": {"batch_sizes": [4, 0]}}, ["capture.batch_sizes.1: must be at least 1 (found 0)"]),
        ({"capture": {"batch_sizes": 4}}, ["capture.batch_sizes: must be a list or 'auto' (found 4)"]),
        ({"dtype": "fp8"}, ["dtype: must be 'auto', 'float32' or 'bfloat16' (found 'fp8')"]),
        (
            {"resources": {"my-kv.1": {"num_pages": 9, "memory_fraction": 0.5}, "b": 3}},
            [
                "resources.my-kv.1: give num_pages or memory_fraction, not both",
                "resources.b: must be keys and values (found 3)",
            ],
        ),
        (
            {"resources": {"kv": {"memory_fraction": 0}}},
            ["resources.kv.memory_fraction: must be more than 0 (found 0)"],
        ),
        ({"node_groups": [{"node_names": []}]}, ["node_groups.0.node_names: must have 1 or more entries (found [])"]),
        (
            {"node_groups": [{"node_names": ["A"], "ranks": [1]}]},
            ["node_groups: ranks [1] must count from 0 without a gap"],
        ),
    ],
)
def test_a_mistake_is_one_line_in_the_projects_words(values, lines):
    with pytest.raises(ConfigError) as caught:
        config_from_mapping({"model": "m", **values}, "f.yaml")
    assert str(caught.value).splitlines() == ["f.yaml:", *(f"  {line}" for line in lines)]


def test_placement_of_nodes():
    config = config_from_mapping(
        {"model": "m", "node_groups": [{"node_names": ["A", "B"], "ranks": [0]}, {"node_names": ["C"], "ranks": [1]}]},
        "f",
    )
    assert [config.rank_of(node) for node in "ABCD"] == [0, 0, 1, 0]
    assert config.num_workers == 2


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text", "a: [1"])
def test_what_is_not_a_mapping_is_refused(text):
    with pytest.raises(ConfigError):
        config_from_text(text, "f.yaml")


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"model: llama  # caf\xe9\n")
    with pytest.raises(ConfigError, match=rf"^cannot read {path}: it is no text in UTF-8$"):
        load_config(path)


@pytest.mark.parametrize("override", ["port", "=3", "model.x=1"])
def test_overrides_that_cannot_be_applied(override):
    with pytest.raises(ConfigError, match="--set"):
        config_from_mapping({"model": "m"}, "f", [override])


def test_shipped_configurations_load_by_name_and_by_path():
    assert "smollm2" in shipped_configs()
    assert load_config("smollm2") == load_config("configs/smollm2.yaml")
    with pytest.raises(ConfigError, match="did you mean 'smollm2'"):
        load_config("smolm2")
