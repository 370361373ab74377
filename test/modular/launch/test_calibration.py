"""What a worker's log says about its steps: whoever reads it can work the numbers out again."""

from dataclasses import replace

from mstar.engine.step_cost import StepCost
from mstar.launch.calibration import describe_cost

COST = StepCost(base_s=0.0051, token_s=0.00025, context_s=0.0, pair_s=0.0, decode_base_s=0.010, decode_row_s=0.001)


def test_the_numbers_of_a_steps_cost_follow_from_each_other():
    """(100 - 5.1) / 0.25 = 379.6 alone; beside 8 streams (2.5 · 18 - 5.1 - 8 · 0.25) / 0.25 = 151.6."""
    assert describe_cost("LLM", COST, 2048) == (
        "LLM: 8 streams decode in 18 ms; a step with prompts takes 5.1 ms and 0.25 ms for each token; "
        "it computes 379 prompt tokens, 151 beside 8 streams"
    )


def test_what_earlier_tokens_add_is_said_where_it_was_measured():
    said = describe_cost("LLM", replace(COST, pair_s=1e-6), 2048)
    assert "0.25 ms for each token, 1.02 ms more for each 1,024 before it; it" in said
    said = describe_cost("LLM", replace(COST, pair_s=1e-6, context_s=2e-6), 2048)
    assert "1.02 ms more for each 1,024 before it, and 2.05 ms for each 1,024 before a chunk; it" in said
