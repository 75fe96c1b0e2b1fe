"""A run on episodes of agent_harness.py, and what its sample files must be by what the harness noted.

R response tokens of a sequence.
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.observability.metrics_file import read_metrics
from megatron_rl_corr.rollout import versions
from megatron_rl_corr.rollout.sample_file import read_trajectories
from tests.hf_truth import response
from tests.mcore.launched import launch
from tests.rollout.agents.model_folder import TEMPLATE, folder_with_template

HARNESS = Path(__file__).with_name("agent_harness.py")
SCRIPT = HARNESS.with_name("pretrain_any.py")
GROUP, BATCH = 4, 16
EXACT = 2e-5
"""Nats between a float32 server and Hugging Face, where routers do not nearly tie."""


@dataclass
class Noted:
    """What one episode's harness has written."""

    row: int
    pid: int
    url: str
    answers: list = field(default_factory=list)
    calls: int = 0
    refused: list = field(default_factory=list)
    reward: float | None = None
    """None: it has not ended."""


def noted(folder):
    """Episode -> its notes, so far."""
    path, found = folder / "notes.jsonl", {}
    for line in path.read_text().splitlines() if path.exists() else ():
        one = json.loads(line)
        name, row = one.pop("episode"), one.pop("row")
        if "pid" in one:
            found[name] = Noted(row, **one)
        elif "answer" in one:
            found[name].answers.append([tuple(token) for token in one["answer"]])
            found[name].calls += one["calls"]
        elif "refused" in one:
            found[name].refused.append(one["refused"])
        else:
            found[name].reward = one["reward"]
    return found


def write_agent_rows(folder, count, *, turns=3, pause_s=0.05, question="is it wet {}?"):
    """The data; every third row's harness compacts its history, and some groups take longer than others."""
    rows = [
        {
            "messages": [{"role": "user", "content": question.format(n)}],
            "question": question.format(n),
            "notes": str(folder / "notes.jsonl"),
            "turns": turns,
            "compacts": n % 3 == 0,
            "pause_s": pause_s * (1 + n % 5),
        }
        for n in range(count)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def model_with_template(model, folder):
    """A model without one gets that of tests/rollout/agents, which shows tools."""
    tools = "{% for tool in tools or [] %}<pad>tool:{{ tool.function.name }}<eos>{% endfor %}"
    return folder_with_template(model, folder / "model", tools + TEMPLATE)


def run_agents(folder, urls, model, *flags, steps, script=SCRIPT, tokens=40, name="run", **variables):
    """The ended run of two ranks; `folder` has what `write_agent_rows` writes."""
    return launch(
        folder,
        name,
        model,
        urls,
        script,
        *["--global-batch-size", BATCH, "--seq-length", 384, "--train-iters", steps, "--save-interval", 100],
        *["--moe-grouped-gemm", "--moe-permute-fusion"],
        *["--rollout-agent", f"{HARNESS}:run", "--rollout-agent-timeout-s", 120],
        *["--rollout-input-key", "messages", "--rollout-probe-push", "off"],
        *["--rollout-save-trajectories", folder / name / "samples"],
        *["--rollout-save-hf", folder / name / "hf", "--rollout-save-hf-interval", 1],
        *flags,
        processes=2,
        tokens=tokens,
        rewarded=False,
        **variables,
    )


def steps_of(folder, name="run"):
    """The metrics of each step so far."""
    path = folder / name / "log/metrics.jsonl"
    return read_metrics(path) if path.exists() else []


def trained_of(folder, name="run"):
    """(step, group, sample) -> the branches of an episode, as `Sample`s. Each is in one file."""
    found = {}
    for path in sorted((folder / name / "samples").glob("step_*.parquet")):
        step = int(path.name.split("_")[1])
        of_file = {}
        for sample in read_trajectories(path):
            place = step, sample.origin.group, sample.trajectory.sample_index
            of_file.setdefault(place, []).append(sample)
        assert not of_file.keys() & found.keys(), path
        found |= of_file
    return found


def turns_of(trajectory):
    """[(ids, log-probs, versions)] of the answers that are sampled in a branch, each a list of its tokens."""
    found, by_token = [], [None] * trajectory.output_ids.numel()
    for span in trajectory.weight_versions:
        by_token[span.start : span.end] = [versions.number(span.version)] * (span.end - span.start)
    for turn in sorted(set(trajectory.turn_ids[trajectory.sampled].tolist())):
        at = torch.nonzero(trajectory.sampled & (trajectory.turn_ids == turn))[:, 0].tolist()
        ids, logprobs = trajectory.output_ids[at].tolist(), trajectory.rollout_logprobs[at].tolist()
        found.append((ids, logprobs, [by_token[one] for one in at]))
    return found


def check_episodes(folder, model, *, steps, lag=0, name="run"):
    """Each step trained whole groups of whole episodes, each once, as the harness was answered, and every
    token has the version that sampled it. Returns (what `trained_of` gives, how many answers saw a change).
    """
    tokenizer, notes = Tokenizer.from_folder(model), noted(folder)
    by_reward = {one.reward: one for one in notes.values() if one.reward is not None}
    trained, changed, seen = trained_of(folder, name), 0, Counter()
    numbers = [step["step"] for step in steps_of(folder, name)]
    assert numbers == list(range(1, steps + 1)) == sorted({step for step, _, _ in trained})
    assert Counter(step for step, _, _ in trained) == dict.fromkeys(numbers, BATCH)
    groups = Counter(group for _, group, _ in trained)
    rows = Counter(samples[0].origin.row for samples in trained.values())
    assert set(groups.values()) == set(rows.values()) == {GROUP}  # each is trained once, and whole
    for (step, _, _), samples in trained.items():
        branches = [one.trajectory for one in samples]
        assert [one.branch for one in branches] == list(range(len(branches)))
        [reward] = {one.environment_reward for one in branches}
        seen[reward] += 1
        note = by_reward[reward]
        assert samples[0].origin.row == note.row
        turns = [turn for one in branches for turn in turns_of(one)]
        said = [tokenizer.decode_all(ids) for ids, _, _ in turns]
        given = ["".join(text for text, _ in answer) for answer in note.answers]
        assert sorted(said) == sorted(given), (said, given)  # all of the episode, and nothing else
        assert len(branches) == 1 or not given.count("")
        by_text = dict(zip(given, note.answers, strict=True))
        for text, (_, logprobs, _) in zip(said, turns, strict=True):
            if given.count(text) == 1:
                far = [abs(one - told) for one, (_, told) in zip(logprobs, by_text[text], strict=True)]
                assert max(far) < 1e-6
        for one in branches:
            of_branch = [version for _, _, own in turns_of(one) for version in own]
            assert of_branch == sorted(of_branch) and of_branch[-1] <= step - 1
            assert lag or set(of_branch) == {step - 1}
        changed += sum(len(set(own)) > 1 for _, _, own in turns)
    assert set(seen.values()) == {1}  # no episode is trained twice
    check_logprobs(folder, name, model, [one for samples in trained.values() for one in samples])
    return trained, changed


def check_logprobs(folder, name, model, samples):
    """Each token's log-prob is that of the weights that it names, in one pass of Hugging Face over all
    before.
    """
    from transformers import AutoModelForCausalLM

    models, compared, total = {}, 0, 0
    for trajectory in (one.trajectory for one in samples):
        for span in trajectory.weight_versions:
            version = versions.number(span.version)
            if version not in models:
                path = folder / name / f"hf/iter_{version:07d}" if version else model
                models[version] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            own = torch.zeros_like(trajectory.sampled)
            own[span.start : span.end] = trajectory.sampled[span.start : span.end]
            logits, settled = response(models[version], trajectory)
            truth = logits.log_softmax(-1).gather(1, trajectory.output_ids[:, None])[:, 0]
            far = (truth - trajectory.rollout_logprobs)[own & settled].abs()
            assert far.numel() == 0 or float(far.max()) < EXACT, (version, float(far.max()))
            compared, total = compared + far.numel(), total + int(own.sum())
    assert compared > 0.7 * total > 0
