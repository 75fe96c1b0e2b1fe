"""`megatron-rl-corr plan` as a user meets it: tables, JSON, flags, and options that can't be."""

import json

import pytest

from megatron_rl_corr import cli
from tests.commands.planner.published import QWEN3_4B, QWEN3_30B_A3B, QWEN3_235B_A22B


@pytest.fixture
def plan(tmp_path, capsys):
    """plan(config, *words): (status, standard output, standard error)."""

    def run(config, *words):
        (tmp_path / "config.json").write_text(json.dumps(config))
        status = cli.main(["plan", "--hf-checkpoint", str(tmp_path), *map(str, words)])
        return status, *capsys.readouterr()

    return run


def test_plan_of_30b_on_8_gpus_then_tables_flags_and_servers(plan):
    status, text, _ = plan(QWEN3_30B_A3B, "--gpus", 8)
    assert status == 0
    for words in (
        "30.53 billion parameters, 3.35 of them for a token",
        "Training on 4 GPUs of 80 GiB, 6 of them reserved",
        "The best layout that fits: TP 2, EP 4, DP 2, nothing recomputed, Adam on the host",
        "Adam's state takes 455 GiB of the hosts' memory",
        "a copy of the gradients: 455 GiB a node",
        "--optimizer-cpu-offload --use-precision-aware-optimizer",
        "--router-replay R3",
        "Serving on 4 GPUs, requests of 5120 tokens",
        "--tp-size 2",
        "--enable-return-routed-experts",
        "--no-gradient-accumulation-fusion",
    ):
        assert words in text


def test_plan_as_json_then_bytes_of_each_stage_and_the_flags(plan):
    status, text, _ = plan(
        QWEN3_4B,
        "--gpus",
        8,
        "--serve-gpus",
        4,
        "--tensor-model-parallel-size",
        2,
        "--pipeline-model-parallel-size",
        2,
        "--json",
    )
    found = json.loads(text)
    assert status == 0 and found["fits"] and found["parameters"]["total"] == 4022468096
    assert [stage["stage"] for stage in found["training"]["stages"]] == [0, 1]
    first = found["training"]["stages"][0]
    parts = ("weights", "gradients", "optimizer", "activations", "logits")
    assert first["total"] == pytest.approx(sum(first[part] for part in parts), abs=5)
    flags = found["training"]["flags"]
    assert flags[flags.index("--pipeline-model-parallel-size") + 1] == "2" and "--sequence-parallel" in flags
    assert found["serving"]["tensor"] == 1 and found["serving"]["flags"][:2] == ["--dtype", "bfloat16"]


def test_plan_when_nothing_fits_then_status_1_and_what_is_missing(plan):
    status, text, _ = plan(QWEN3_30B_A3B, "--gpus", 2, "--gpu-memory-gib", 40)
    assert status == 1
    assert "NOTHING FITS; the nearest layout" in text and "It lacks" in text and "does not fit" in text
    assert "NO SERVER FITS; the nearest has 1 GPU and lacks" in text


def test_plan_when_colocated_training_does_not_fit_then_that_is_said_and_no_share_of_servers_is_asked_for(
    plan,
):
    status, text, error = plan(QWEN3_235B_A22B, "--gpus", 4, "--colocate")
    assert status == 1 and "NOTHING FITS; the nearest layout" in text, text + error
    assert "--mem-fraction-static at most 0.00" in text and "NO SERVER FITS" in text


def test_plan_without_servers_then_all_gpus_train(plan):
    status, text, _ = plan(
        QWEN3_4B, "--gpus", 8, "--serve-gpus", 0, "--linear-logprobs", "--recompute", "full"
    )
    assert status == 0 and "Training on 8 GPUs" in text and "Serving" not in text
    assert "--rollout-linear-logprobs" in text and "--recompute-granularity full" in text


def test_plan_when_colocated_then_all_gpus_train_and_serve_beside_the_trainers_weights(plan):
    layout = [
        "--tensor-model-parallel-size",
        2,
        "--pipeline-model-parallel-size",
        1,
        "--mem-fraction-static",
        0.75,
    ]
    status, text, _ = plan(QWEN3_4B, "--gpus", 8, "--colocate", "--serve-tensor-parallel-size", 1, *layout)
    assert status == 0
    for words in (
        # 80 GiB less 6, 4 and 4.02e9 x 2 / 2 bytes of weights, 3.75 GiB: 66.25 of 80.
        "--mem-fraction-static at most 0.83",
        "80 GiB, 10 of them reserved",
        "Training on 8 GPUs",
        "Serving on 8 GPUs",
        "Flags of 8 servers",
        "--rollout-colocate --rollout-weight-transport tensor",
        "--mem-fraction-static 0.75 --enable-memory-saver",
    ):
        assert words in text
    status, text, _ = plan(QWEN3_4B, "--gpus", 8, "--colocate", *layout, "--server-reserve-gib", 8)
    assert "--mem-fraction-static at most 0.78" in text  # 62.25 of 80
    status, text, _ = plan(QWEN3_4B, "--gpus", 8, "--colocate", *layout, "--json")
    assert "--enable-memory-saver" in json.loads(text)["serving"]["flags"]


def test_plan_when_colocated_then_the_hosts_memory_that_the_optimizer_moves_to(plan):
    """4022468096 parameters of 12 bytes are 45.0 GiB over all ranks; gradients are freed, and lie nowhere."""
    layout = ["--gpus", 8, "--tensor-model-parallel-size", 1, "--pipeline-model-parallel-size", 1]
    colocated = ["--colocate", "--mem-fraction-static", 0.6]
    _, text, _ = plan(QWEN3_4B, *layout, *colocated)
    assert (
        "sample Adam's state takes 45 GiB of the hosts' memory, of all ranks together, and gradients are"
        in text
    )
    assert "freed: 45 GiB a node" in text
    # Without the distributed optimizer each of 8 replicas moves all of it.
    _, text, _ = plan(QWEN3_4B, *layout, *colocated, "--no-distributed-optimizer", "--json")
    found = json.loads(text)["training"]
    assert found["host"] == found["host_per_node"] == pytest.approx(8 * 12 * 4022468096, rel=1e-3)
    _, text, _ = plan(QWEN3_4B, *layout, *colocated, "--optimizer-cpu-offload", "--json")
    assert json.loads(text)["training"]["host"] == 16 * 4022468096
    _, text, _ = plan(QWEN3_4B, *layout, "--serve-gpus", 0, "--no-optimizer-cpu-offload")
    assert "hosts' memory" not in text


def test_plan_when_several_nodes_train_then_each_has_its_part_of_the_hosts_memory(plan):
    words = ["--gpus", 32, "--serve-gpus", 8, "--optimizer-cpu-offload", "--global-batch-size", 192, "--json"]
    _, text, _ = plan(QWEN3_30B_A3B, *words)
    found = json.loads(text)["training"]
    assert found["host_per_node"] == pytest.approx(found["host"] / 3, abs=1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--gpus", 8, "--colocate", "--serve-gpus", 4],
            "--serve-gpus 4 with --colocate: all GPUs serve; leave it",
        ),
        (
            ["--gpus", 16, "--colocate"],
            "--gpus 16 with --colocate must be at most --gpus-per-node 8: weights are handed over on one "
            "host; plan for",
        ),
        (
            ["--gpus", 8, "--colocate", "--gpus-per-node", 4],
            "--gpus 8 with --colocate must be at most --gpus-per-nod",
        ),
        (["--gpus", 8, "--server-reserve-gib", 2], "--server-reserve-gib 2 has no effect without --colocate"),
        (
            ["--gpus", 8, "--colocate", "--server-reserve-gib", -1],
            "--server-reserve-gib -1 must be at least 0",
        ),
        (
            ["--gpus", 8, "--colocate", "--mem-fraction-static", 0.95],
            "--mem-fraction-static 0.95 with --colocate: th",
        ),
        (["--gpus", 4, "--serve-gpus", 4], "--serve-gpus 4 must leave at least one of --gpus 4 to train"),
        (
            ["--gpus", 8, "--max-tokens-per-microbatch", 100],
            "--max-tokens-per-microbatch 100 must be at least 5120",
        ),
        (["--gpus", 8, "--mem-fraction-static", 1.5], "--mem-fraction-static 1.5 must be between 0 and 1"),
        (
            ["--gpus", 8, "--serve-tensor-parallel-size", 3],
            "--serve-tensor-parallel-size 3 must divide the 4 GPUs",
        ),
        (
            ["--gpus", 32, "--serve-tensor-parallel-size", 16],
            "--serve-tensor-parallel-size 16 must be at most --gpus-per-node 8",
        ),
        (["--gpus", 8, "--context-parallel-size", 0], "--context-parallel-size 0 must be positive"),
        (["--gpus", 8, "--group-size", 0], "--group-size must be positive, got 0"),
        (["--gpus", 8, "--expert-imbalance", 0.5], "--expert-imbalance 0.5 must be at least 1"),
        (["--gpus", 8, "--tensor-model-parallel-size", 3], "--tensor-model-parallel-size 3 x pipeline 1"),
    ],
)
def test_plan_when_options_can_not_be_then_status_2_and_the_option(plan, words, message):
    status, text, error = plan(QWEN3_4B, *words)
    assert status == 2 and text == "" and message in error


def test_plan_when_the_model_is_not_known_then_the_supported_ones(plan):
    status, _, error = plan({"model_type": "gpt2"}, "--gpus", 8)
    assert status == 2 and "model_type 'gpt2' is not supported (supported: deepseek_v3" in error


def test_plan_when_config_lacks_a_size_then_as_with_the_default_of_transformers(plan):
    config = {name: value for name, value in QWEN3_4B.items() if name != "intermediate_size"}
    assert plan(config, "--gpus", 8) == plan(config | {"intermediate_size": 22016}, "--gpus", 8)


@pytest.mark.parametrize(
    ("kind", "words"), [("qwen3_next", "are gated delta nets"), ("deepseek_v32", "that an indexer chooses")]
)
def test_plan_when_a_model_has_attention_that_is_not_counted_then_status_2_and_why(plan, kind, words):
    status, text, said = plan({"model_type": kind}, "--gpus", 8)
    assert (status, text) == (2, "") and words in said and "not counted here; plan for another model" in said
