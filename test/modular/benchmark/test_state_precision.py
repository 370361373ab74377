"""`benchmark.state_precision` on a tiny model: it reads the texts that it is given, and finds what it is shown."""

import math

import numpy as np
import torch

from benchmark import state_precision


def test_a_text_is_read_as_it_is_and_logits_do_not_depend_on_who_chose_it():
    reader = state_precision.Reader("tiny", "float32", "float32", 90, ())
    prompt = np.arange(5, 21, dtype=np.int32)
    text, logits = reader.read(prompt, 70)
    again, forced = reader.read(prompt, 70, text)
    assert again == text and torch.equal(forced, logits)
    other = [*text[:40], (text[40] + 1) % logits.shape[1], *text[41:]]
    read, changed = reader.read(prompt, 70, other)
    assert read == other and torch.equal(changed[:41], logits[:41]) and not torch.equal(changed[41:], logits[41:])
    reader.instance.close()


def test_what_is_compared():
    expected = torch.tensor([[0.0, 0.0], [3.0, 4.0], [1.0, 0.0]]) + 1e-9
    found = torch.tensor([[0.0, math.log(3)], [3.0, 4.0], [0.0, 1.0]])
    distance, divergence, same = state_precision.compare(found, expected).T
    # Halves of the logarithms of (1/2)/(1/4) and (1/2)/(3/4); then (e - 1) / (e + 1) for logits that change places.
    np.testing.assert_allclose(divergence, [math.log(4 / 3) / 2, 0.0, (math.e - 1) / (math.e + 1)], atol=1e-6)
    np.testing.assert_allclose(distance[1:], [0.0, math.sqrt(2)], atol=1e-6)
    assert same[1:].tolist() == [1, 0]


def test_means_over_the_ends_of_texts():
    rows = np.zeros((200, 3))
    rows[:64, 0], rows[-64:, 0] = 1.0, 2.0
    means = state_precision.summary([rows, rows])
    assert [means[part]["distance"] for part in ("first 64", "last 64")] == [1, 2]
    assert abs(means["all"]["distance"] - 192 / 200) < 1e-6
