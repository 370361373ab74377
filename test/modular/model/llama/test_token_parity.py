"""The comparer of token sequences: what it lets pass and what not."""

import pytest
import torch
from support.token_parity import TokenCase, assert_equal_tokens, first_divergence


def _logits(gap: float):
    """After [1, 5]: tokens 7 and 8 lie `gap` apart, everything else far below."""

    def last_logits(ids):
        logits = torch.full((10,), -9.0)
        if list(ids) == [1, 5]:
            logits[7], logits[8] = 2.0, 2.0 - gap
        return logits

    return last_logits


EQUAL = TokenCase([1], [5, 7, 3], [5, 7, 3])
PARTED = TokenCase([1], [5, 8, 4], [5, 7, 3])


def test_equal_sequences_pass_without_asking_the_reference():
    def never(ids):
        raise AssertionError("asked")

    assert assert_equal_tokens([EQUAL, TokenCase([], [], [])], never) == 0


def test_a_close_call_passes_and_is_printed(capsys):
    assert assert_equal_tokens([EQUAL, PARTED], _logits(5e-4)) == 1
    assert "case 1 (prompt of 1) at token 1: 8 instead of 7" in capsys.readouterr().out


def test_a_wrong_token_fails():
    with pytest.raises(AssertionError, match="8 instead of 7"):
        assert_equal_tokens([PARTED], _logits(2e-3))


@pytest.mark.parametrize("ours", [[5, 7], [5, 7, 3, 1], []])
def test_another_length_fails(ours):
    with pytest.raises(AssertionError, match="the reference has 3"):
        assert_equal_tokens([TokenCase([1], ours, [5, 7, 3])], _logits(0.0))


def test_many_close_calls_fail():
    cases = [PARTED] * 2 + [EQUAL] * 60
    with pytest.raises(AssertionError, match="2 of 62"):
        assert_equal_tokens(cases, _logits(5e-4))
    assert assert_equal_tokens([PARTED] * 2 + [EQUAL] * 98, _logits(5e-4)) == 2


def test_first_divergence():
    assert first_divergence(EQUAL) is None
    assert first_divergence(PARTED) == 1
    assert first_divergence(TokenCase([], [1, 2], [1])) == 1
