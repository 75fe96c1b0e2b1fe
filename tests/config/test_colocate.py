"""`colocate`: which other options leave servers and trainer no turns."""

import pytest

from megatron_rl_corr.config.run import RunConfig

GIVEN = {
    "urls": ("http://127.0.0.1:1",),
    "prompts": ("prompts.jsonl",),
    "hf_checkpoint": "model",
    "reward_function": ("math",),
    "colocate": True,
    "weight_transport": "tensor",
}


def test_colocate_with_what_it_needs_then_accepted():
    assert RunConfig(**GIVEN).colocate


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"weight_transport": "distributed"},
            "`weight_transport` distributed: .* give `weight_transport` tensor",
        ),
        (
            {"weight_transport": "disk", "weight_dir": "/shared"},
            "`weight_transport` disk: .* give `weight_tra",
        ),
        ({"max_lag": 1}, "`colocate` with `max_lag` 1: .* can't sample ahead; drop one"),
        ({"engine": "vllm"}, "`colocate` with `engine` vllm: .* use SGLang, or drop `colocate`"),
    ],
)
def test_colocate_when_an_option_leaves_no_turns_then_refused_with_both_names(changed, said):
    with pytest.raises(ValueError, match=said):
        RunConfig(**GIVEN | changed)


def test_colocate_when_replayed_then_it_has_no_effect_and_is_refused():
    with pytest.raises(ValueError, match="`(colocate|weight_transport)` has no effect with `replay`"):
        RunConfig(replay="samples", hf_checkpoint="model", colocate=True, weight_transport="tensor")
