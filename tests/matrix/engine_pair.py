"""An SGLang and a vLLM server that share a run, and what every sample of such a run must be."""

import json
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from tests.mcore.launched import REWARD, launch
from tests.preloaded import PreloadedServer, address
from tools.cpu import environment, sglang_arguments, vllm_arguments

SCRIPT = Path(__file__).resolve().parent / "pretrain_any.py"
ARGUMENTS = {"sglang": sglang_arguments, "vllm": vllm_arguments}
GROUPS_OF_STEP, GROUP_SIZE = 4, 4
EXACT = 1e-5  # nats between float32 servers, Megatron and Hugging Face; measured: 1e-6


@contextmanager
def pair(model, folder, dtype="float32"):
    """Engine -> a server of its own, which a test may kill."""
    address("megatron")  # what forks runs must not end with a thread that waits for one
    servers = {
        name: PreloadedServer(
            model,
            engine=name,
            dtype=dtype,
            log_path=folder / f"{name}.log",
            extra_arguments=arguments(),
            environment=environment(name),
        )
        for name, arguments in ARGUMENTS.items()
    }
    try:
        for server in servers.values():
            server.start()
        for server in servers.values():
            server.wait_ready()
        yield servers
    finally:
        for server in servers.values():
            server.stop()


def run(folder, servers, model, *flags, steps, tokens=8, reward=REWARD, script=SCRIPT, **variables):
    """The ended run, which keeps all samples, and the weights after each step. variables: of its
    environment, too.
    """
    (folder / "reward.py").write_text(reward)
    (folder / "prompts.jsonl").write_text("".join(f'{{"input_ids": [3, 1, 4, {n}]}}\n' for n in range(4, 12)))
    return launch(
        folder,
        "run",
        model,
        [server.url for server in servers.values()],
        script,
        "--global-batch-size",
        GROUPS_OF_STEP * GROUP_SIZE,
        "--train-iters",
        steps,
        "--save-interval",
        100,
        "--moe-grouped-gemm",
        "--moe-permute-fusion",
        "--rollout-save-trajectories",
        folder / "run/samples",
        "--rollout-save-hf",
        folder / "run/hf",
        "--rollout-save-hf-interval",
        1,
        *flags,
        processes=2,
        checks="semantic",
        tokens=tokens,
        **variables,
    )


def steps_of(folder):
    """What is written of each step so far."""
    file = folder / "run/log/metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def samples_of(folder):
    """Step -> its samples, as rows of a table."""
    found = {}
    for file in sorted((folder / "run/samples").glob("step_*.parquet")):
        found.setdefault(int(file.name.split("_")[1]), []).extend(pq.read_table(file).to_pylist())
    return found


def check_samples(folder, servers, model, steps, lag=0, exact=EXACT):
    """All rows, once every step is known to have trained whole groups with the log-probs of the
    weights they name.

    servers: engine -> its server, or a list of them.
    exact: largest distance of a log-prob, in nats.
    """
    from transformers import AutoModelForCausalLM

    urls, weights = {}, {}
    for name, own in servers.items():
        urls[name] = [server.url for server in (own if isinstance(own, list) else [own])]
    written, samples = steps_of(folder), samples_of(folder)
    assert [step["step"] for step in written] == sorted(samples) == list(range(1, steps + 1))
    rows = [row for step in samples for row in samples[step]]
    groups = [row["group"] for row in rows]
    assert all(len(samples[step]) == GROUPS_OF_STEP * GROUP_SIZE for step in samples)
    assert all(groups.count(group) == GROUP_SIZE for group in set(groups))  # none is lost, or trained twice
    assert lag or set(groups) == set(range(steps * GROUPS_OF_STEP))
    for step, own in samples.items():
        for row in own:
            # A response that was continued elsewhere names both engines, and the server that ended it.
            assert row["server"] in [url for name in row["engine"].split("+") for url in urls[name]], row
            for span in row["weight_versions"]:
                version = int(span["version"].rpartition("-")[2])
                # With a lag, one that took long may be older still, and is trained too.
                assert version <= step - 1 and (lag or version == step - 1)
                if version not in weights:
                    path = folder / f"run/hf/iter_{version:07d}" if version else model
                    weights[version] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
                assert distance(row, weights[version], span["start"], span["end"]) < exact, row
    for step in written if len(servers) > 1 else ():
        check_by_engine(step, samples[step["step"]])
    return rows


def distance(row, model, start, end):
    """Largest difference of the response's log-probs [start, end) from those of Hugging Face's model."""
    ids, prompt = torch.tensor([row["prompt_ids"] + row["output_ids"]]), len(row["prompt_ids"])
    with torch.no_grad():
        logits = model(ids).logits[0, prompt - 1 : -1]
    truth = logits.log_softmax(-1).gather(1, ids[0, prompt:, None])[:, 0]
    return float((truth - torch.tensor(row["rollout_logprobs"]))[start:end].abs().max())


def check_by_engine(step, rows):
    """The step's mismatch of each engine is that of its rows."""
    for engine in {row["engine"] for row in rows}:
        own = [row for row in rows if row["engine"] == engine]
        both = [
            torch.tensor([x for row in own for x in row[name]])
            for name in ("train_logprobs", "rollout_logprobs")
        ]
        part = f"rollout_corr/by_engine/{engine}/"
        assert step[f"{part}tokens"] == len(both[0])
        assert step[f"{part}log_ratio_abs_max"] == pytest.approx(
            float((both[0] - both[1]).abs().max()), abs=1e-9
        )
