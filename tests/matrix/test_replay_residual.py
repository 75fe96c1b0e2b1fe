"""What is left of the mismatch once experts are replayed, by how their outputs are weighed and summed; the
numbers stay in runs/replay_residual, of which scripts/replay_residual.py makes a table.
"""

import importlib.metadata
import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.mcore.launched import launch, replayed
from tests.mcore.tiny_models import VOCAB, make_model
from tests.preloaded import PreloadedServer
from tests.tiers import long
from tools.cpu import environment, gpu_available, sglang_arguments

pytestmark = [long, pytest.mark.skipif(gpu_available(), reason="without a GPU only")]
ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "runs/replay_residual"
SCRIPT = Path(__file__).with_name("moe_sums_pretrain.py")
FAMILIES = {
    # four experts a token: the sum of two has no order
    "qwen3_moe": {"num_experts_per_tok": 4, "moe_intermediate_size": 32},
    "gpt_oss": {"num_experts_per_tok": 4},
}
SUMS = ("", "rolled", "slots", "weights", "behind", "behind+slots", "behind+slots+weights")
SERVER = ["--enable-deterministic-inference", "--enable-return-routed-experts", "--random-seed", "0"]
SERVERS = {"qwen3_moe": [], "gpt_oss": ["--disable-hybrid-swa-memory"]}
RUN = [
    *["--global-batch-size", 32, "--train-iters", 1, "--save-interval", 100, "--rollout-probe-push", "off"],
    *["--tokenizer-type", "NullTokenizer", "--vocab-size", VOCAB, "--router-replay", "R3"],
    *["--rollout-batch-invariant", "--rollout-expect-exact", 1e9],
    *["--rollout-ledger-interval", 1, "--rollout-ledger-share", 1],
]


@pytest.mark.parametrize("family", FAMILIES)
def test_residual_of_replay_then_by_weights_and_order(tiny_moe_dir, tmp_path, family):
    from transformers import AutoTokenizer

    model = tmp_path / "model"
    model.mkdir()
    make_model(family, model, spread=0.15, **FAMILIES[family])
    for file in tiny_moe_dir.glob("*token*"):
        shutil.copy(file, model)
    AutoTokenizer.from_pretrained(model).save_pretrained(model)
    found = {}
    with (
        PreloadedServer(
            model,
            dtype="float32",
            log_path=tmp_path / "server.log",
            extra_arguments=[*sglang_arguments(), *SERVER, *SERVERS[family]],
            environment=environment("sglang"),
        ) as server,
        replayed(server, model, tmp_path) as door,
    ):
        for sums in SUMS:
            door.replay()
            name = f"sums-{sums}"
            done = launch(tmp_path, name, model, door.url, SCRIPT, *RUN, processes=1, SUMS=sums)
            assert done.returncode == 0, done.stderr[-4000:]
            step = json.loads((tmp_path / name / "log/metrics.jsonl").read_text())
            found[sums] = {
                key: step[key]
                for key in (
                    "exact/tokens",
                    "exact/ulps_max",
                    "exact/log_ratio_max",
                    "rollout_corr/exact_fraction",
                    "rollout_corr/log_ratio_abs_mean",
                    "ledger/rest/share",
                    "ledger/decode/share",
                )
            }
            print(family, sums, found[sums])
    # Megatron makes a map of experts of the ids, and rows by the experts' numbers: slots have no order in it.
    assert found["rolled"] == found[""]
    assert found["slots"]["rollout_corr/log_ratio_abs_mean"] != found[""]["rollout_corr/log_ratio_abs_mean"]
    if family == "qwen3_moe":  # the three are all of it
        assert found["behind+slots+weights"]["exact/ulps_max"] == 0 < found[""]["exact/ulps_max"]
    names = ("sglang", "megatron-core", "torch")
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in names},
        "sums": found,
    }
    RECORDS.mkdir(parents=True, exist_ok=True)
    (RECORDS / f"{family}.json").write_text(json.dumps(record, indent=1))
