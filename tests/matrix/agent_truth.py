"""A run on episodes of agent_harness.py, and what its sample files must be by what the harness noted.

R response tokens of a sequence.
"""

import functools
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch

from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.observability.metrics_file import read_metrics
from megatron_rl_corr.rollout import versions
from megatron_rl_corr.rollout.sample_file import read_trajectories
from tests.hf_truth import over_changes
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


def answers_of(trajectory):
    """[(place in the response, log-probs [R], versions of its tokens)] of the answers that are sampled in a
    branch.
    """
    found, by_token = [], [None] * trajectory.output_ids.numel()
    for span in trajectory.weight_versions:
        by_token[span.start : span.end] = [versions.number(span.version)] * (span.end - span.start)
    for turn in sorted(set(trajectory.turn_ids[trajectory.sampled].tolist())):
        at = torch.nonzero(trajectory.sampled & (trajectory.turn_ids == turn))[:, 0].tolist()
        assert at == list(range(at[0], at[-1] + 1))
        place = slice(at[0], at[-1] + 1)
        found.append((place, trajectory.rollout_logprobs[place], by_token[place]))
    return found


def check_episodes(folder, model, *, steps, lag=0, name="run", in_place=False):
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
        turns = [(one, *turn) for one in branches for turn in answers_of(one)]
        said = [tokenizer.decode_all(one.output_ids[place].tolist()) for one, place, _, _ in turns]
        given = ["".join(text for text, _ in answer) for answer in note.answers]
        assert sorted(said) == sorted(given), (said, given)  # all of the episode, and nothing else
        assert len(branches) == 1 or not given.count("")
        by_text = dict(zip(given, note.answers, strict=True))
        for text, (_, _, logprobs, _) in zip(said, turns, strict=True):
            if given.count(text) == 1:
                told = [logprob for _, logprob in by_text[text]]
                far = [abs(one - other) for one, other in zip(logprobs.tolist(), told, strict=True)]
                assert max(far) < 1e-6
        for one in branches:
            of_branch = [version for _, _, own in answers_of(one) for version in own]
            assert of_branch == sorted(of_branch) and of_branch[-1] <= step - 1
            assert lag or set(of_branch) == {step - 1}
        changed += sum(len(set(own)) > 1 for *_, own in turns)
    assert set(seen.values()) == {1}  # no episode is trained twice
    every = [one for samples in trained.values() for one in samples]
    check_logprobs(folder, name, model, every, in_place=in_place)
    return trained, changed


def check_logprobs(folder, name, model, samples, *, in_place):
    """Each token's log-prob is that of the weights that it names, in one pass of Hugging Face over all
    before; in_place: the keys and values that its answer had by then are kept.
    """
    from transformers import AutoModelForCausalLM

    @functools.cache
    def weights(version):
        path = folder / name / f"hf/iter_{version:07d}" if version else model
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    compared = total = late = 0
    for trajectory in (one.trajectory for one in samples):
        answers, passes = answers_of(trajectory), {}
        ids, prompt = torch.cat([trajectory.prompt_ids, trajectory.output_ids]), trajectory.prompt_ids.numel()
        for version in () if in_place else {version for *_, own in answers for version in own}:
            passes[version] = over_changes({0: weights(version)}, trajectory, [(0, 0)], in_place=False)
        for place, logprobs, own in answers:
            starts = [(at, now) for at, now in enumerate(own) if at == 0 or own[at - 1] != now]
            if in_place:
                begin, end = prompt + place.start, prompt + place.stop
                part = SimpleNamespace(prompt_ids=ids[:begin], output_ids=ids[begin:end])
                models = {version: weights(version) for version in own}
                truth, settled = over_changes(models, part, starts, in_place=True)
            else:
                at = list(zip(own, range(place.start, place.stop), strict=True))
                truth, settled = (torch.stack([passes[now][n][i] for now, i in at]) for n in (0, 1))
            far = (truth - logprobs)[settled].abs()
            if in_place and len(starts) == 1 and not bool((far < EXACT).all()):
                assert began_on_older_keys(weights, part, logprobs, own[0]), (starts, float(far.max()))
                late, far = late + 1, far[:0]
            assert bool((far < EXACT).all()), (starts, float(far.max()))
            compared, total = compared + far.numel(), total + len(own)
    assert compared > 0.7 * total > 0
    assert late < 0.1 * len(samples)


def began_on_older_keys(weights, part, logprobs, version):
    """True for the answer to a request that was sent before a push and waited at its server until behind it:
    what older weights had cached of its prompt stays. An SGLang server computes the prompt's last token in
    any case, but later tokens find its keys as those of an equal prompt, where they are cached.
    """
    prompt, answer = part.prompt_ids.numel(), logprobs.numel()
    ids = torch.cat([part.prompt_ids, part.output_ids])

    def fits(older, cached):
        behind = SimpleNamespace(prompt_ids=ids[:cached], output_ids=ids[cached:])
        models = {older: weights(older), version: weights(version)}
        truth, settled = over_changes(models, behind, [(0, older), (1, version)], in_place=True)
        return ((truth[-answer:] - logprobs).abs() < EXACT) | ~settled[-answer:]

    return any(
        (fits(older, prompt - 1)[0] and fits(older, prompt)[1:].all())
        or any(fits(older, cached).all() for cached in range(1, prompt))
        for older in range(version)
    )
