"""The prefix cache's harness over a tiny checkpoint: what it calls reusable, and what it reads off a real server."""

import numpy as np
import pytest
import torch
from support.checkpoints import tiny_llama, write_directory

from benchmark.local_server import serving
from benchmark.prefix_probes import (
    Asked,
    ask_repeated,
    ask_shared,
    before_last,
    summarize_repeated,
    summarize_shared,
)
from benchmark.prefix_reuse import (
    PAGE,
    Chats,
    Exchange,
    Pass,
    Prompter,
    report_text,
    reusable_tokens,
    run_chats,
    run_overhead,
    run_ttft,
    summarize_chats,
    summarize_overhead,
)
from mstar.cli.targets import config_for
from mstar.launch.deployment import resolve_deployment
from mstar.launch.local import LocalInstance
from mstar.model.registry import find_card, write_random_checkpoint

SMALL = ["dtype=float32", "max_seq_len=1024", "scheduler.max_rows=4", "resources.kv.num_pages=80", "num_threads=1"]
MESSAGES = [{"role": "user", "content": "a b c"}]
CHATS = Chats(conversations=2, turns=2, system_tokens=200, turn_tokens=40, reply_tokens=4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_directory(path, tiny_llama(max_position_embeddings=1024))
    return str(path)


@pytest.fixture
def grad_stays_as_it_was():
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    yield
    torch.set_grad_enabled(before)


def deployment(checkpoint, tmp_path, *more):
    return resolve_deployment(config_for(checkpoint, [*SMALL, *more]), cache_dir=tmp_path)


def test_reusable_tokens_by_hand():
    first = np.arange(100, dtype=np.int32)
    longer = np.concatenate((first, np.zeros(60, np.int32)))
    other = first.copy()
    other[40] = 7
    assert reusable_tokens(longer, [], 16) == 0
    assert reusable_tokens(longer, [first], 16) == 96
    assert reusable_tokens(longer, [other], 16) == 32
    assert reusable_tokens(longer, [other, first], 16) == 96
    assert reusable_tokens(first[:64], [first], 16) == 48, "the last token is computed always"


def test_chats_summary_by_hand():
    ids = np.arange(300, dtype=np.int32)
    exchanges = [
        Exchange(ids[:200], 200, 0, 200.0),
        Exchange(ids, 300, 128, 172.0),
        Exchange(ids[:250], 250, 128, 90.0),
    ]
    found = summarize_chats(exchanges, page=64)
    assert found["reusable_tokens"] == 192 + 192
    assert found["share_of_reusable"] == round(256 / 384, 4)
    assert found["most_computed_off_by"] == 32
    assert list(found["goals"].values()) == [False, True]
    worse = summarize_chats([*exchanges, Exchange(ids, 300, 256, 109.0)], page=64)
    assert list(worse["goals"].values()) == [False, False], "65 tokens more were computed than the client was told"


def test_a_server_is_asked_what_the_harness_says(checkpoint, tmp_path):
    prompter = Prompter(deployment(checkpoint, tmp_path).model())
    with serving(checkpoint, SMALL) as server:
        exchanges = run_chats(server, prompter, CHATS)
        times = run_ttft(server, prompter, 200, repeats=1)
    assert [len(one.prompt_ids) for one in exchanges] == [one.prompt_tokens for one in exchanges]
    assert abs(exchanges[0].prompt_tokens - 240) < 80
    found = summarize_chats(exchanges, PAGE)
    assert found["requests"] == 4
    assert found["reusable_tokens"] > 0
    assert found["share_of_reusable"] >= 0.95
    assert list(found["goals"].values()) == [True, True]
    assert times["cold_ms"]["median"] > 0
    assert "chats" in report_text({"chats": found, "ttft": times})


def test_a_server_that_does_not_start_says_why():
    with pytest.raises(RuntimeError, match="no_such_key"), serving("smollm2", ["no_such_key=1"]):
        pass


@pytest.mark.usefixtures("grad_stays_as_it_was")
def test_overhead_computes_all_of_every_prompt_on_both_sides(checkpoint, tmp_path):
    on, off = (
        LocalInstance(deployment(checkpoint, tmp_path, f"prefix_cache.enabled={word}")) for word in ("true", "false")
    )
    pairs = run_overhead(on, off, (3, 150, 4), repeats=2)
    computed = [instance.workers[0][1].counters.num_prefill_tokens for instance in (on, off)]
    on.close()
    off.close()
    assert len(pairs) == 2
    assert {side.num_tokens for pair in pairs for side in pair} == {3 * 154}
    assert computed == [3 * 3 * 150] * 2, "three passes, and no token of a prompt came from anywhere else"


def test_overhead_by_hand():
    pairs = [(Pass(1.05, 0.20, 100), Pass(1.0, 0.19, 100)), (Pass(1.01, 0.20, 100), Pass(1.0, 0.199, 100))]
    found = summarize_overhead(pairs)
    assert found["cost_of_wall_time"]["median"] == pytest.approx(0.03)
    assert found["more_loop_cpu_of_wall_time"]["median"] == pytest.approx(0.0055)
    assert list(found["goals"].values()) == [True, False]


# a model with recurrent states


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    path = tmp_path_factory.mktemp("hybrid") / "model"
    write_random_checkpoint(find_card("qwen3_5"), "tiny", path, seed=5)
    return str(path)


def test_a_hybrid_model_with_random_weights_is_measured_as_any(hybrid, tmp_path):
    settings = ["dtype=float32", "max_seq_len=1024", "scheduler.max_rows=4", "num_threads=1"]
    model = resolve_deployment(config_for(hybrid, settings), cache_dir=tmp_path).model()
    prompter = Prompter(model, {"enable_thinking": False})
    assert len(Prompter(model).ids(MESSAGES)) < len(prompter.ids(MESSAGES)), "thinking is closed in the prompt"
    with serving(hybrid, settings) as server:
        repeated = ask_repeated(server, model.vocab_size(), PAGE, (300, 64))
        shared = ask_shared(server, model.vocab_size(), PAGE)
        exchanges = run_chats(server, prompter, CHATS)
        times = run_ttft(server, Prompter(model), 100, repeats=1)
    assert repeated == [Asked(300, 256, 256), Asked(64, 0, 0)]
    assert [one.cached for one in shared] == [0, 0, 576, 576, 576]
    assert [len(one.prompt_ids) for one in exchanges] == [one.prompt_tokens for one in exchanges]
    assert list(summarize_chats(exchanges, PAGE)["goals"].values())[1]
    assert times["cold_ms"]["median"] > 0, "what is thought counts as the first piece"
    found = {"repeated": summarize_repeated(repeated, PAGE), "shared": summarize_shared(shared)}
    assert all(met for part in found.values() for met in part["goals"].values())
    assert "cached of 300" in report_text(found)


def test_probes_by_hand():
    assert [before_last(count, 64) for count in (1, 64, 65, 300)] == [0, 0, 64, 256]
    found = summarize_repeated([Asked(300, 192, 256), Asked(65, 64, 64)], 64)
    assert (found["most computed again"], list(found["goals"].values())) == (108, [False, False])
    third = [Asked(700, 0, 0), Asked(700, 0, 576), Asked(700, 576, 576)]
    assert list(summarize_shared(third)["goals"].values()) == [True]
    assert list(summarize_shared([*third, Asked(700, 512, 576)])["goals"].values()) == [False]
