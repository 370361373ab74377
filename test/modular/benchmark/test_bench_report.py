"""Arithmetic of the load generator's report, against values computed by hand or by numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar.bench.arrivals import poisson_offsets
from mstar.bench.prompts import ChatTurn, Prompt, from_file, of_words, read_prompts, words_for
from mstar.bench.records import RequestRecord
from mstar.bench.report import distribution, measure, peak_in_flight, percentile


def a_record(scheduled, first, gaps, *, tokens=None, end=None, **fields):
    chunks = [scheduled + first]
    for gap in gaps:
        chunks.append(chunks[-1] + gap)
    return RequestRecord(
        "text_to_text",
        scheduled,
        sent_s=scheduled,
        end_s=chunks[-1] if end is None else end,
        chunk_s=chunks,
        output_tokens=tokens,
        **fields,
    )


def test_percentiles_by_hand():
    ten = [float(value) for value in range(1, 11)]
    assert percentile(ten, 50) == 5.5
    assert percentile(ten, 90) == pytest.approx(9.1)
    assert percentile(ten, 95) == pytest.approx(9.55)
    assert percentile(ten, 99) == pytest.approx(9.91)
    assert percentile([7.0], 99) == 7.0


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50), st.integers(0, 100))
def test_percentiles_are_those_of_numpy(values, percent):
    assert percentile(sorted(values), percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-9)


def test_latencies_by_hand():
    records = [
        a_record(100.0, 0.1, [0.02, 0.04], tokens=3, prompt_tokens=5, finish_reason="length"),
        a_record(101.0, 0.3, [0.06], tokens=2, prompt_tokens=9, end=101.5, finish_reason="stop"),
        RequestRecord("text_to_text", 101.0, sent_s=101.0, end_s=102.0, error="HTTP 429: queue full"),
    ]
    measured = measure(records)
    assert (measured.requests, measured.succeeded, measured.failed) == (3, 2, 1)
    assert measured.failures == {"HTTP 429: queue full": 1}
    assert measured.duration_s == 2.0
    assert measured.ttft_ms.p50 == pytest.approx(200)
    assert measured.ttft_ms.p90 == pytest.approx(280)
    assert measured.itl_ms.count == 3
    assert measured.itl_ms.p50 == pytest.approx(40)
    assert measured.itl_ms.p99 == pytest.approx(59.6)
    assert measured.tpot_ms.mean == pytest.approx((30 + 60) / 2)
    assert measured.e2e_ms.max == pytest.approx(500)
    assert measured.e2e_ms.p50 == pytest.approx((160 + 500) / 2)
    assert (measured.output_tokens.total, measured.output_tok_s) == (5, 2.5)
    assert (measured.prompt_tokens.min, measured.prompt_tokens.mean) == (5, 7.0)
    assert measured.token_source == "usage"
    assert measured.finish_reasons == {"length": 1, "stop": 1}


def test_one_request_without_usage_makes_all_counts_chunks():
    measured = measure([a_record(0.0, 0.1, [0.1], tokens=2), a_record(0.0, 0.1, [0.1, 0.1])])
    assert measured.token_source == "chunks"
    assert measured.output_tokens.total == 5


def test_joined_tokens_leave_time_per_token_as_it_was():
    measured = measure([a_record(0.0, 0.1, [0.4, 0.4], tokens=9)])  # chunks of 1, 4 and 4 tokens
    assert measured.itl_ms.p50 == pytest.approx(400)
    assert measured.tpot_ms.p50 == pytest.approx(100)


def test_nothing_measured_is_no_distribution():
    assert distribution([]) is None
    measured = measure([RequestRecord("text_to_text", 0.0, end_s=1.0, error="refused")])
    assert measured.ttft_ms is None
    assert measured.output_tok_s == 0.0


def test_peak_in_flight():
    spans = [(0, 4), (1, 3), (2, 5), (5, 6)]  # at 5 one ends and one starts
    records = [RequestRecord("k", begin, sent_s=begin, end_s=end) for begin, end in spans]
    assert peak_in_flight(records) == 3


def test_poisson_gaps_have_the_rate_and_repeat():
    offsets = poisson_offsets(4000, 8.0, seed=3)
    gaps = np.diff(offsets)
    assert offsets[0] == 0.0
    assert offsets == poisson_offsets(4000, 8.0, seed=3)
    assert offsets != poisson_offsets(4000, 8.0, seed=4)
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.06)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.1)  # exponential: deviation equals mean


def test_words_for_a_number_of_tokens():
    assert words_for(100, [(8, 8 + 20), (100, 100 + 20)]) == 80
    assert words_for(100, [(8, 16 + 20), (100, 200 + 20)]) == 40
    assert words_for(5, [(8, 28), (100, 120)]) == 1


def test_made_prompts_differ_from_their_first_word_on_and_repeat():
    make = of_words(40, seed=1)
    texts = [make(index).prompt for index in range(50)]
    assert texts == [of_words(40, seed=1)(index).prompt for index in range(50)]
    assert all(len(text.split()) == 40 for text in texts)
    assert len({tuple(text.split()[:4]) for text in texts}) == 50


def test_prompt_file(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "one"}\n\n{"messages": [{"role": "system", "content": "Be brief."}, '
        '{"role": "user", "content": "two"}], "max_tokens": 3}\n'
    )
    prompts = read_prompts(file)
    assert [prompt.max_tokens for prompt in prompts] == [None, 3]
    assert prompts[0].turns() == (ChatTurn("user", "one"),)
    assert prompts[1].text() == "Be brief.\ntwo"
    make = from_file(prompts, seed=0)
    assert sorted(make(index).text() for index in range(4)) == sorted([prompt.text() for prompt in prompts] * 2)


@pytest.mark.parametrize("line", ['{"prompt": 3}', '{"text": "x"}', "not json"])
def test_prompt_file_names_the_bad_line(tmp_path, line):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2"):
        read_prompts(file)


def test_empty_prompt_file(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(file)


def test_prompt_of_both_shapes():
    assert Prompt(prompt="x").text() == "x"
