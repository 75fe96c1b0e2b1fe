"""Rewards that see text: the three forms of a function, several with weights, dicts of parts, and
how each may fail.
"""

import asyncio

import pytest
import torch

from megatron_rl_corr.config.reward_specs import parse_rewards
from megatron_rl_corr.data.prompt import Prompt
from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.data.reward_input import RewardInput, form_of
from megatron_rl_corr.data.rewards import Rewards, Score
from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.engines.errors import SampleFailure
from megatron_rl_corr.engines.trajectory import Trajectory, VersionSpan


class Letters:
    """Decodes 1 to a, 2 to b and so on; 0 is a special token."""

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        return "".join(chr(96 + one) if one else "<eos>" * (not skip_special_tokens) for one in ids)


TOKENIZER = Tokenizer(Letters(), "letters")
OF_IDS = Prompt(11, [8, 9, 0], {"kind": "x"}, label="cab")
OF_TEXT = Prompt(12, [8, 9], {"messages": [{"role": "user", "content": "hi"}]}, "<user>hi", ["cab", 3])

FILE = """
import os, asyncio, json


def reward(sample):
    assert sample.row in (11, 12) and sample.finish_reason == "length"
    told = [
        sample.prompt,
        sample.response,
        sample.label,
        sample.metadata,
        sample.prompt_ids,
        sample.output_ids,
    ]
    open(os.environ["TOLD"], "a").write(json.dumps(told) + "\\n")
    sample.metadata["changed"] = 1
    return len(sample.response)


async def waits(sample):
    await asyncio.sleep(0.01)
    return {"score": len(sample.prompt), "vowels": sample.response.count("a"), "ok": True}


def rewards(samples):
    best = max(len(sample.response) for sample in samples)
    return [len(sample.response) == best for sample in samples]


async def best_of(samples):
    return [{"score": len(samples), "place": place} for place, _ in enumerate(samples)]


def with_ids(prompt, output_ids, finish_reason):
    return prompt.metadata["kind"] == "x" and len(output_ids)
"""


def sample(ids, prompt=OF_IDS, index=0):
    return Trajectory(
        0,
        index,
        torch.tensor(prompt.input_ids),
        torch.tensor(ids),
        torch.zeros(len(ids)),
        "length",
        (VersionSpan("v", 0, len(ids)),),
        0,
        "http://a:1",
    )


def run(specs, scenario, weights=(), **options):
    """await scenario(rewards) with what is started and ended around it."""

    async def inner():
        own = parse_rewards(specs, [], weights, max_new_tokens=8) if isinstance(specs, list) else specs
        rewards = Rewards(own, **({"limit_s": 20.0, "tokenizer": TOKENIZER, "workers": 1} | options))
        try:
            await rewards.start()
            return await asyncio.wait_for(scenario(rewards), 60)
        finally:
            await rewards.close()

    return asyncio.run(inner())


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    return path


@pytest.mark.parametrize("workers", [1, 0])
def test_rewards_when_of_all_forms_then_weighted_sums_of_text_ids_and_groups(file, tmp_path, workers, capsys):
    specs = [
        f"long={file}:reward",
        f"{file}:waits",
        f"{file}:rewards",
        f"{file}:best_of",
        f"{file}:with_ids",
        "exact",
        "overlong:cache=4",
    ]
    weights = [0.5, 2, 10, 0, 1, 100, 4]

    async def scenario(rewards):
        assert rewards.compares
        group = [sample([3, 1, 2, 0]), sample([1, 1, 1, 1, 1, 1], index=1)]
        alone = [await rewards.of_sample(OF_IDS, one) for one in group]
        # "cab": 0.5 x 3 + 2 x 2 ("hi") + 4 ids + 100 (it is the label); "aaaaaa": 0.5 x 6 + 4 + 6 +
        # 4 x -(6 - 4) / 4
        assert [one.reward for one in alone] == [109.5, 11.0]
        assert alone[1].parts == {
            "long": 6,
            "waits": 2,
            "waits/vowels": 6,
            "waits/ok": 1,
            "with_ids": 6,
            "exact": 0,
            "overlong": -0.5,
        }
        whole = await rewards.of_group(OF_IDS, group, alone)
        assert [one.reward for one in whole] == [109.5, 21.0]  # the longest gets 10, best_of counts 0
        assert whole[0].parts.keys() - alone[0].parts.keys() == {"rewards", "best_of", "best_of/place"}
        assert [one.parts["best_of/place"] for one in whole] == [0, 1]
        assert await rewards.score(OF_IDS, group[0]) == 109.5  # alone
        rewards.check_alone("--rollout-eval-prompts")
        assert f"its rewards are without those of {file}:rewards {file}:best_of" in capsys.readouterr().err

    run(specs, scenario, weights, workers=workers)
    assert (tmp_path / "told").read_text().splitlines()[:2] == [
        '["hi", "cab", "cab", {"kind": "x"}, [8, 9, 0], [3, 1, 2, 0]]',
        '["hi", "aaaaaa", "cab", {"kind": "x"}, [8, 9, 0], [1, 1, 1, 1, 1, 1]]',
    ]


def test_evaluation_when_all_rewards_compare_then_refused(file):
    async def scenario(rewards):
        with pytest.raises(
            ValueError, match="compares the samples of a group, and an evaluation has none; add a rewa"
        ):
            rewards.check_alone("--rollout-eval-prompts")

    run(f"{file}:rewards", scenario, workers=0)


def test_prompt_when_the_row_has_text_then_that_and_no_decoded_ids(file, tmp_path):
    async def scenario(rewards):
        assert await rewards.score(OF_TEXT, sample([1, 2], OF_TEXT)) == 2.0

    run(f"{file}:reward", scenario)
    assert (tmp_path / "told").read_text() == (
        '["<user>hi", "ab", ["cab", 3], {"messages": [{"role": "user", "content": "hi"}]}, [8, 9], [1, 2]]\n'
    )


def test_sum_when_in_float32_then_each_product_and_sum_is_rounded_to_it(tmp_path):
    path = tmp_path / "r.py"
    path.write_text("def a(sample): return 16777216\ndef b(sample): return 1\ndef c(sample): return 3e38\n")

    async def scenario(rewards):
        score = await rewards.of_sample(OF_IDS, sample([1]))
        assert score == Score(16777216.0, {"a": 16777216.0, "b": 1.0})  # 2^24 + 1 has no place in float32

    async def overflows(rewards):
        with pytest.raises(
            SampleFailure, match=r"the weighted sum of the rewards is inf in float32"
        ) as error:
            await rewards.of_sample(OF_IDS, sample([1]))
        assert error.value.cause == "reward_error"

    run([f"{path}:a", f"{path}:b"], scenario, workers=0)
    run([f"{path}:c"], overflows, [2.0], workers=0)


FAILING = {
    "raises": ("def reward(sample): return sample.metadata['answer']", "reward_error", "KeyError: 'answer'"),
    "none": ("def reward(sample): pass", "reward_error", "{path}:reward must return a number, got None"),
    "nan": (
        "def reward(sample): return float('nan')",
        "reward_error",
        "{path}:reward must return a number that is finite in float32, got nan",
    ),
    "length": (
        "def reward(samples): return [1.0]",
        "reward_error",
        "{path}:reward must return a list of 2 rewards, one for each sample, got 1 values",
    ),
    "sorts": (
        "def reward(samples): samples.sort(key=len); return [1.0] * 2",
        "reward_error",
        "AttributeError: 'tuple' object has no attribute 'sort'",
    ),
    "hangs": (
        "import time\ndef reward(sample): time.sleep(60)",
        "reward_timeout",
        "{path}:reward: it took longer than 0.7 s; make it faster, or raise `reward_timeout_s`",
    ),
    "dies": (
        "import os\ndef reward(sample): os._exit(7)",
        "reward_error",
        "{path}:reward: its process ended with exit status 7; a reward function must return or raise",
    ),
    "no json": (
        "def reward(sample): return 1.0",
        "reward_error",
        "{path}:reward: the row's metadata holds what no worker can be given (Type is not JSON serializable: "
        "set); leave it out of the row, or use `reward_workers` 0",
    ),
    "keys": (
        "def reward(sample): return {'acc': 1.0}",
        "reward_error",
        "{path}:reward must return a number or a dict with \"score\", the reward, got a dict with ['acc']",
    ),
    "text": (
        "def reward(sample): return {'score': 1.0, 'pred': '42'}",
        "reward_error",
        "{path}:reward: \"pred\" must return a number, got '42' (str)",
    ),
    "label": (
        "",
        "reward_error",
        "row 11 of the data set has the label None; it must be text, a number, or a list",
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_reward_when_it_fails_then_the_failure_names_flag_file_rule_and_remedy(tmp_path, name):
    text, cause, expected = FAILING[name]
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    prompt = Prompt(11, [1], {"set": {1, 2}} if name == "no json" else {})
    spec, expected = (f"{path}:reward", expected.format(path=path)) if text else ("f1", expected)

    async def scenario(rewards):
        group = [sample([1, 2]), sample([3], index=1)]
        with pytest.raises(SampleFailure) as error:
            scores = [await rewards.of_sample(prompt, one) for one in group]
            await rewards.of_group(prompt, group, scores)
        assert error.value.cause == cause
        assert str(error.value).startswith("`reward_function`") and expected in str(error.value)

    run(spec, scenario, limit_s=0.7 if name == "hangs" else 20.0)


@pytest.mark.parametrize(
    ("signature", "form"),
    [
        ("sample", "sample"),
        ("anything", "sample"),
        ("samples", "group"),
        ("a, b, c", "ids"),
        ("prompt, output_ids, finish_reason", "ids"),
        ("sample, *, k=1", "sample"),
        ("sample, k=1", "sample"),
        ("samples, /", "group"),
        ("*given", "both one argument and three"),
        ("sample, k=1, m=2", "both one argument and three"),
        ("prompt, response", "neither one argument nor three"),
        ("", "neither one argument nor three"),
        ("sample, *, k", "neither one argument nor three"),
    ],
)
def test_form_when_read_from_the_signature_then_one_of_three_or_an_error_that_shows_them(signature, form):
    function = eval(f"lambda {signature}: 0")
    if form in ("sample", "group", "ids"):
        assert form_of(function, "f") == form
    else:
        with pytest.raises(
            ValueError, match=f"takes {form}; write .*reward.sample.*rewards.samples.*output_ids"
        ):
            form_of(function, "f")


def test_text_when_there_is_no_tokenizer_then_no_empty_text_but_an_error(file, tmp_path):
    async def scenario(rewards):
        with pytest.raises(SampleFailure, match="the sample has no prompt: `hf_checkpoint` has no tokenizer"):
            await rewards.score(OF_IDS, sample([1]))

    run(f"{file}:reward", scenario, tokenizer=None)
    with pytest.raises(
        ValueError, match="^`reward_function` exact needs the responses' text, and `hf_checkpoint` has"
    ):
        run("exact", scenario, tokenizer=None)
    with pytest.raises(
        AttributeError, match="a sample has no 'answer'; it has prompt, response, label, metadata"
    ):
        _ = RewardInput("p", "r").answer


def test_labels_when_the_first_rows_have_none_then_the_start_ends_with_the_row_and_the_remedy():
    prompts = PromptDataset([Prompt(row, [1], label=None if row == 2 else "x") for row in range(4)])
    found = (
        "^`reward_function` exact compares with a label, and row 2 of prompts.jsonl has none; name the key"
    )
    with pytest.raises(ValueError, match=found):
        Rewards("exact", limit_s=1.0).check_labels(prompts, "prompts.jsonl")
    Rewards("length", limit_s=1.0).check_labels(prompts, "prompts.jsonl")


def test_group_when_given_up_then_a_sample_with_two_running_calls_is_counted_once(tmp_path):
    path, late = tmp_path / "slow.py", []
    path.write_text(
        "import time\ndef a(sample): time.sleep(0.4); return 1\ndef b(sample): time.sleep(0.2); return "
        "{}[1]\n"
    )

    async def scenario(rewards):
        rewards.late = late.append
        call = asyncio.create_task(rewards.of_sample(OF_IDS, sample([1])))
        await asyncio.sleep(0.1)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        async with asyncio.timeout(20):
            while not late:
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.1)
        assert len(late) == 1 and "KeyError" in str(late[0])

    run([f"{path}:a", f"{path}:b"], scenario, workers=2)
