"""Reward functions: how they are found, what they are given, and which rewards are refused."""

import numpy as np
import pytest
import torch

from megatron_rl_corr.rollout import Prompt, Trajectory, VersionSpan, load_function, score


def trajectory(prompt_index, prompt_ids, output_ids, sample_index=0, finish_reason="stop"):
    return Trajectory(
        prompt_index=prompt_index,
        sample_index=sample_index,
        prompt_ids=torch.tensor(prompt_ids),
        output_ids=torch.tensor(output_ids, dtype=torch.int64),
        rollout_logprobs=torch.zeros(len(output_ids)),
        finish_reason=finish_reason,
        weight_versions=(VersionSpan("v", 0, len(output_ids)),),
        cached_tokens=0,
        server="http://a:1",
    )


PROMPTS = [Prompt(11, [1, 2], {"answer": 7}), Prompt(5, [3], {"answer": 8})]
TRAJECTORIES = [
    trajectory(0, [1, 2], [7, 9]),
    trajectory(0, [1, 2], [], sample_index=1, finish_reason="abort"),
    trajectory(1, [3], [7], finish_reason="length"),
]


def test_score_when_called_then_the_function_gets_prompt_ids_and_finish_reason():
    seen = []

    def reward(prompt, output_ids, finish_reason):
        seen.append((prompt.index, output_ids, finish_reason))
        return float(prompt.metadata["answer"] in output_ids)

    rewards = score(TRAJECTORIES, PROMPTS, reward)
    assert rewards.dtype == torch.float32 and rewards.tolist() == [1.0, 0.0, 0.0]
    assert seen == [(11, [7, 9], "stop"), (11, [], "abort"), (5, [7], "length")]


@pytest.mark.parametrize("value, expected", [(True, 1.0), (2, 2.0), (np.float32(0.5), 0.5)])
def test_score_when_the_reward_is_any_real_number_then_taken(value, expected):
    assert score(TRAJECTORIES[:1], PROMPTS, lambda *_: value).tolist() == [expected]


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("inf"), 1e39, [1.0]])
def test_score_when_the_reward_is_not_a_finite_number_then_error_names_flag_value_and_trajectory(value):
    with pytest.raises(ValueError) as error:
        score(TRAJECTORIES, PROMPTS, lambda _, ids, __: 0.0 if ids else value)
    assert "--rollout-reward-function" in str(error.value)
    assert repr(value) in str(error.value) and "prompt 0 sample 1" in str(error.value)


def test_score_when_the_function_raises_then_its_error_with_a_note():
    def reward(prompt, output_ids, finish_reason):
        return output_ids[0]

    with pytest.raises(IndexError) as error:
        score(TRAJECTORIES, PROMPTS, reward)
    assert error.value.__notes__ == [
        "--rollout-reward-function was scoring prompt 0 sample 1 (row 11 of the data set)"
    ]


def test_score_when_prompts_are_in_another_order_then_refused():
    with pytest.raises(ValueError, match="prompt 0 sample 0: the trajectory's prompt_ids"):
        score(TRAJECTORIES, PROMPTS[::-1], lambda *_: 0.0)


def test_load_function_when_given_a_file_or_a_module_then_found(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def by_length(p, ids, why):\n    return len(ids)\n")
    assert load_function(f"{tmp_path}/my_rewards.py:by_length")(None, [1, 2], "stop") == 2
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_function("my_rewards:by_length")(None, [1], "stop") == 1


@pytest.mark.parametrize(
    "spec, named",
    [
        ("by_length", "give path/to/file.py:name or package.module:name, got 'by_length'"),
        ("r.py:", "give path"),
        (":f", "give path"),
        ("nowhere.py:f", "there is no file nowhere.py"),
        ("no_such_package.rewards:f", "there is no module 'no_such_package'"),
        ("megatron_rl_corr.no_such_module:f", "there is no module 'megatron_rl_corr.no_such_module'"),
        ("math:nosuch", "math has no 'nosuch'; it has .*sqrt"),
        ("math:pi", "'pi' in math is a float, not a function"),
    ],
)
def test_load_function_when_not_found_then_error_names_the_flag_and_the_remedy(spec, named):
    with pytest.raises(ValueError, match="--rollout-reward-function: .*" + named):
        load_function(spec)


def test_load_function_when_the_users_module_fails_then_its_own_error(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import no_such_library\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        load_function(f"{path}:f")
