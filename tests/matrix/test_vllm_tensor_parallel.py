"""A vLLM server of two tensor-parallel ranks in processes of their own: what arrives, and what
a refusal costs.
"""

import pytest
from safetensors.torch import load_file

from megatron_rl_corr.rollout import RolloutServerError
from tests.hf_truth import assert_is_truth
from tests.tiers import long
from tests.weight_sync.test_changes_real_server import Trainer
from tests.weight_sync.test_push_real_servers import TRANSPORTS, Pushing, model_of, noisy
from tools.cpu import environment, vllm_arguments
from tools.local_server import LocalServer

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    long,
]
WHOLE = 37
"""Parameters of 39 that are compared: the vocabulary of 83 is padded before it is cut."""


@pytest.fixture(scope="module")
def server(tiny_moe_dir, tmp_path_factory):
    flags = [*vllm_arguments(), "--distributed-executor-backend", "mp", "--tensor-parallel-size", "2"]
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with LocalServer(
        tiny_moe_dir,
        engine="vllm",
        dtype="float32",
        log_path=tmp_path_factory.mktemp("tp") / "server.log",
        extra_arguments=flags,
        environment=environment("vllm") | variables,
    ) as server:
        yield server


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_push_to_two_ranks_when_one_was_refused_before_then_samples_are_of_the_pushed_weights(
    server, tiny_moe_dir, tmp_path, kind
):
    weights = load_file(tiny_moe_dir / "model.safetensors")
    trainer, new = (
        Pushing([server.url], kind, tiny_moe_dir, tmp_path / "weights", "vllm"),
        noisy(weights, seed=1),
    )
    try:
        part = {name: tensor for name, tensor in new.items() if "layers.0.self_attn.q_proj" not in name}
        # The trainer's own count finds it first where the folder is complete before servers are asked.
        with pytest.raises(Exception, match="q_proj.weight") as refusal:
            trainer.push(part, "part")
        if kind != "disk":
            assert isinstance(refusal.value, RolloutServerError) and not getattr(
                refusal.value, "__notes__", []
            )
        trainer.push(new, kind)
        assert trainer.compared == WHOLE
        sample = trainer.sample()
        assert sample.oldest_version == kind
        assert_is_truth(sample, model_of(tiny_moe_dir, new, tmp_path / "hf"), atol=1e-5)
    finally:
        trainer.close()


def test_push_of_changes_to_two_ranks_then_each_has_its_part_of_them(server, tiny_moe_dir, tmp_path):
    trainer = Trainer(server, tiny_moe_dir)
    try:
        for version in ("0", "proof", "1", "2"):
            trainer.train(seed=len(version))
            trainer.push_changes(version)
            assert trainer.compared == WHOLE
        assert 0 < trainer.deltas.share < 0.1
        sample, found = trainer.sample(), trainer.all_checksums()
        assert sample.oldest_version == "2" and len(found) == 2
        assert_is_truth(sample, model_of(tiny_moe_dir, trainer.weights, tmp_path / "hf"), atol=1e-5)
        trainer.checksums_of_everything("whole")
        assert trainer.all_checksums() == found
    finally:
        trainer.close()
