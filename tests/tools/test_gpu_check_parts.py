"""The parts of `make gpu-check`: each is right where all is, and notices what it is there for when
that is planted.
"""

import os
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl_corr.engines.errors import RolloutError
from megatron_rl_corr.logprobs import torch_backend
from megatron_rl_corr.models.hf_folder import copy_model_files
from megatron_rl_corr.weight_sync import rounding
from megatron_rl_corr.weight_sync.transports.ipc import TensorTransport
from megatron_rl_corr.weight_sync.update import release_servers
from tests.matrix.patched import unchanged
from tests.preloaded import PreloadedServer, run_preloaded
from tests.tiers import long, matrix
from tools.cpu import environment, sglang_arguments
from tools.gpu_check import (
    benchmark_runs,
    colocation,
    fp8_rounding,
    fp8_server,
    host_sync,
    one_part,
    pushes,
    router_replay,
    te_logprobs,
    triton_kernels,
)
from tools.gpu_check.outcome import DoesNotHold, Finding, NotRun, Outcome, at_most

pytestmark = matrix


def torch_kernels(**planted):
    """torch_backend as if it were Triton's, some functions replaced."""
    functions = ("label_stats", "combine_stats", "logits_gradient")
    return SimpleNamespace(**{name: getattr(torch_backend, name) for name in functions} | planted)


def shifted(row, by):
    """combine_stats whose row (0: log-probs, 1: entropies) is off."""

    def combine_stats(*args):
        combined = torch_backend.combine_stats(*args)
        combined[row] += by
        return combined

    return combine_stats


def scaled_gradient(*args, out, **kwargs):
    torch_backend.logits_gradient(*args, out=out, **kwargs)
    out.mul_(1.05)


def all_rows(logits, labels, columns, sampled=None):
    """The statistics of other rows than those that were sampled."""
    stats = torch_backend.label_stats(logits.nan_to_num(), labels, columns)
    return stats if sampled is None else stats[:, : len(sampled)]


def one_shard(stats, *rest):
    return torch_backend.combine_stats(stats[:1], *rest)


@pytest.mark.parametrize("case", triton_kernels.SMALL, ids=lambda case: case.name)
def test_kernels_when_they_are_right_then_no_case_finds_fault(case):
    findings = triton_kernels.compare(torch_kernels(), case, "cpu")
    assert [finding.what.split(" against ")[1] for finding in findings] == ["float64", "torch"]


@pytest.mark.parametrize(
    ("case", "planted", "words"),
    [
        ("float32", {"combine_stats": shifted(0, 1e-4)}, "log-prob against float64 is 0.0001"),
        ("float32", {"combine_stats": shifted(0, torch.nan)}, "log-prob against float64 is nan"),
        ("float32", {"combine_stats": shifted(1, 1e-4)}, "entropy against float64"),
        ("bfloat16, in place", {"logits_gradient": scaled_gradient}, "gradient against float64 is 0.05"),
        ("float32, sampled rows", {"label_stats": all_rows}, "sampled rows: log-prob"),
        ("float32, 4 shards, padding", {"combine_stats": one_shard}, "4 shards, padding: log-prob"),
    ],
)
def test_kernels_when_one_is_wrong_then_the_case_and_what_is_wrong_are_named(case, planted, words):
    [found] = [one for one in triton_kernels.SMALL if one.name == case]
    with pytest.raises(DoesNotHold, match=words):
        triton_kernels.compare(torch_kernels(**planted), found, "cpu")


def test_host_sync_when_a_loss_reads_a_value_then_the_operator_and_the_configuration_are_named(monkeypatch):
    right = host_sync.policy_loss

    def reading(name, *args, **kwargs):
        losses = right(name, *args, **kwargs)
        return losses * (losses.sum().item() < 1e9) if name == "gspo" else losses

    monkeypatch.setattr(
        host_sync, "CONFIGS", {n: host_sync.CONFIGS[n] for n in ("loss gspo", "diagnostics only")}
    )
    host_sync.check("cpu")
    monkeypatch.setattr(host_sync, "policy_loss", reading)
    with pytest.raises(AssertionError, match="_local_scalar_dense reads the device") as error:
        host_sync.check("cpu")
    assert error.value.__notes__ == ["in the step of 'loss gspo'"]


def test_host_sync_when_all_configurations_are_shared_out_then_each_is_of_one_part():
    of_tokens = [name for name, config in host_sync.CONFIGS.items() if config.advantage_by_token]
    assert of_tokens == ["otb"]
    [finding] = host_sync.check_token_baseline("cpu").findings
    assert finding.found == "1"


def test_host_sync_when_a_gradient_is_not_finite_then_the_configuration_is_named(monkeypatch):
    monkeypatch.setattr(host_sync, "CONFIGS", {"diagnostics only": host_sync.CONFIGS["diagnostics only"]})
    monkeypatch.setattr(host_sync, "policy_loss", lambda name, now, *args, **kwargs: now * torch.inf)
    with pytest.raises(DoesNotHold, match="'diagnostics only' is not finite"):
        host_sync.check("cpu")


def truncated(weight):
    """Toward zero in place of to the nearest."""
    scale = fp8_rounding.scales("int4_group", weight).float()
    return ((weight.float() / scale).trunc() * scale).to(weight.dtype)


@pytest.mark.parametrize("name", rounding.ROUNDINGS)
def test_rounding_when_it_is_right_then_it_holds_and_of_half_the_size_or_truncated_it_does_not(
    name, monkeypatch
):
    weight = fp8_rounding.weights()
    fp8_rounding.compare(name, weight, "cpu")
    right = rounding.ROUNDINGS[name]
    monkeypatch.setitem(
        rounding.ROUNDINGS, name, lambda weight: right(weight[..., :64, :]).repeat(1, 5, 1)[:, :300]
    )
    with pytest.raises(DoesNotHold, match=f"{name} of float32: further off"):
        fp8_rounding.compare(name, weight, "cpu")
    monkeypatch.setitem(rounding.ROUNDINGS, "int4_group", truncated)
    with pytest.raises(DoesNotHold, match="int4_group of float32: further off"):
        fp8_rounding.compare("int4_group", weight, "cpu")


def test_rounding_when_the_device_rounds_another_way_than_the_cpu_then_so_many_numbers_are_named(monkeypatch):
    right, calls = rounding.ROUNDINGS["fp8_blockwise"], []

    def unlike(weight):  # the first call is the device's
        calls.append(weight)
        return right(weight) * (1 + 2.0**-20 * (len(calls) == 1))

    monkeypatch.setitem(rounding.ROUNDINGS, "fp8_blockwise", unlike)
    with pytest.raises(DoesNotHold, match="numbers unlike the CPU's, of 252000 is"):
        fp8_rounding.compare("fp8_blockwise", fp8_rounding.weights(), "cpu")


def transformer_engine(folder, *planted):
    """The outcome's file and the process of the part, with what a line of Python plants in it."""
    program = folder / "planted.py"
    program.write_text(
        "from tools.gpu_check import one_part, te_logprobs\n"
        + "\n".join(planted)
        + f"\none_part.main('transformer-engine', 'cpu', {str(folder / 'out.json')!r})\n"
    )
    return folder / "out.json", run_preloaded([program])


def test_transformer_engine_when_as_recorded_then_both_types_hold(tmp_path):
    found, done = transformer_engine(tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    findings = Outcome.load(found).findings
    assert len(findings) == 4 and all(float(one.found) <= float(one.bound) for one in findings)
    assert findings[0].what.startswith("the stand-in, float32")


@pytest.mark.parametrize(
    "planted",
    [
        "te_logprobs.TOP_K = 3",
        "right = te_logprobs.weight\n"
        "te_logprobs.weight = lambda name, shape, seed: right(name, shape, seed) * (1 + 0.5 * ('q_layernorm' "
        "in name))",
    ],
    ids=["three experts a token", "a norm's weight"],
)
def test_transformer_engine_when_it_computes_another_model_then_it_does_not_hold(planted, tmp_path):
    found, done = transformer_engine(tmp_path, planted)
    assert done.returncode == 1 and not found.exists()
    assert "DoesNotHold: the stand-in, float32: largest error of a log-prob is" in done.stderr


def test_transformer_engine_when_bounds_of_a_gpu_are_those_then_a_wrong_model_is_beyond_them(tmp_path):
    # TF32's and bfloat16's bounds must still tell a norm's weight that is half as large again.
    _, done = transformer_engine(
        tmp_path,
        "te_logprobs.SAME_DEVICE = te_logprobs.BOUNDS['bfloat16']",
        "right = te_logprobs.weight",
        "te_logprobs.weight = lambda name, shape, seed: right(name, shape, seed) * (1 + 0.5 * ('q_layernorm' "
        "in name))",
    )
    assert done.returncode == 1 and "DoesNotHold" in done.stderr


def test_log_probs_when_compared_then_their_largest_and_mean_error_have_a_bound_each():
    expected = torch.zeros(2, 4, dtype=torch.float64)
    found = expected.clone()
    found[0, 0] = 0.4  # mean 0.05
    assert [one.found for one in te_logprobs.compare("x", found, expected, (0.4, 0.05))] == ["0.4", "0.05"]
    with pytest.raises(DoesNotHold, match="largest error of a log-prob is 0.4"):
        te_logprobs.compare("x", found, expected, (0.3, 0.05))
    with pytest.raises(DoesNotHold, match="mean error of a log-prob is 0.05"):
        te_logprobs.compare("x", found, expected, (0.4, 0.04))
    with pytest.raises(DoesNotHold, match="shape"):
        te_logprobs.compare("x", found[:1], expected, (1.0, 1.0))


@pytest.fixture
def pushed_to(sglang_server_fp32, tiny_moe_dir):
    """(url, model): the shared server gets its weights back, and their name."""
    with unchanged(sglang_server_fp32, tiny_moe_dir):
        yield sglang_server_fp32.url, tiny_moe_dir


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
def test_push_when_all_weights_changed_then_all_checksums_and_log_probs_hold(pushed_to, transport):
    url, model = pushed_to
    verified, largest = pushes.prove(url, transport, model, pushes.changed(model, "float32"), "cpu").findings
    count = verified.found.split(" of ")
    assert count[0] == count[1] and int(count[0]) > 20
    assert 0 < float(largest.found) <= float(largest.bound)


def test_push_when_a_tensor_is_lost_on_its_way_then_it_is_named(pushed_to, monkeypatch):
    url, model = pushed_to
    send, lost = TensorTransport.send, "model.layers.1.self_attn.k_proj.weight"
    monkeypatch.setattr(
        TensorTransport, "send", lambda self, bucket: send(self, [b for b in bucket if b[0] != lost])
    )
    with pytest.raises(
        RolloutError, match=r"1 of .* not those that were sent: model.layers.1.self_attn.qkv_proj"
    ):
        pushes.prove(url, "tensor", model, pushes.changed(model, "float32"), "cpu")
    monkeypatch.undo()


def test_push_when_two_experts_are_exchanged_then_the_log_probs_tell(pushed_to):
    url, model = pushed_to
    weights = pushes.changed(model, "float32")
    sent = dict(weights)
    first, second = (f"model.layers.2.mlp.experts.{n}.down_proj.weight" for n in (0, 1))
    sent[first], sent[second] = weights[second], weights[first]
    with pytest.raises(DoesNotHold, match="largest log-ratio of the probe's text"):
        pushes.prove(url, "tensor", model, sent, "cpu", trained=weights)


def test_push_when_in_bfloat16_then_tokens_near_a_tie_may_be_far_off_and_a_quarter_may_not():
    distance = torch.full((100,), 0.004, dtype=torch.float64)
    distance[:20] = 0.7
    assert pushes.held_to_bound(distance, "bfloat16").found == "0.004"
    distance[:30] = 0.03
    assert pushes.held_to_bound(distance, "fp8").found == "0.03"
    with pytest.raises(DoesNotHold, match="third quartile of the log-ratios of the probe's text is 0.03"):
        pushes.held_to_bound(distance, "bfloat16")


def test_push_when_to_an_fp8_server_then_it_holds_and_not_to_the_weights_before_they_were_quantised(tmp_path):
    plain, folder = tmp_path / "plain", tmp_path / "fp8"
    fp8_server.make_model(plain)
    quantization = fp8_server.make_checkpoint(plain, folder)
    weights = pushes.changed(plain, "float32")
    with PreloadedServer(
        folder,
        dtype="float32",
        log_path=tmp_path / "server.log",
        environment=environment("sglang"),
        extra_arguments=[*sglang_arguments(), "--random-seed", "0", "--skip-tokenizer-init"],
    ) as server:
        trained = fp8_server.meant(weights, quantization)
        verified, largest = pushes.prove(
            server.url, "tensor", plain, weights, "cpu", trained=trained
        ).findings
        assert verified.found == "21 of 21" and float(largest.found) <= float(largest.bound)
        with pytest.raises(DoesNotHold, match="largest log-ratio of the probe's text"):
            pushes.prove(server.url, "tensor", plain, weights, "cpu")


@long
def test_colocation_when_a_server_releases_its_memory_then_the_push_gives_it_back_and_the_log_probs_hold():
    verified, largest = colocation.check("cpu").findings
    assert int(verified.found.split(" of ")[0]) > 20 and float(largest.found) <= float(largest.bound)


def test_colocation_when_the_server_can_release_nothing_then_named(pushed_to):
    url, model = pushed_to
    with pytest.raises(RolloutError, match="--enable-memory-saver"):
        pushes.prove(
            url,
            "tensor",
            model,
            pushes.changed(model, "float32"),
            "cpu",
            before=lambda servers: release_servers(SimpleNamespace(leads=True), servers),
        )


def test_colocation_when_memory_stays_or_is_not_given_back_then_it_does_not_hold():
    cache = 2 * 2**30
    left, back = colocation.judge([10 * 2**30, 10 * 2**30 + cache, 10 * 2**30 + 10**8], cache)
    assert (float(left.found), left.bound, back.bound) == (0, "0.1", "0.1") and 0 < float(back.found) < 0.1
    with pytest.raises(DoesNotHold, match="share of the cache's memory that a release left is 1,"):
        colocation.judge([10 * 2**30] * 3, cache)
    with pytest.raises(DoesNotHold, match="share of it that the push did not give back is 1,"):
        colocation.judge([10 * 2**30, 10 * 2**30 + cache, 10 * 2**30 + cache], cache)


def test_push_when_no_checksum_is_compared_then_it_does_not_hold(monkeypatch):
    monkeypatch.setattr(pushes, "_push", lambda *args: (None, 0, 40))
    with pytest.raises(DoesNotHold, match="checksums of 0 of 40 parameters"):
        pushes.prove("http://127.0.0.1:1", "tensor", None, {}, "cpu")


def test_distributed_when_nccl_refuses_two_ranks_on_a_gpu_then_not_run_and_else_a_failure(monkeypatch):
    monkeypatch.setenv(pushes.MULTI_RANK, "0")

    def refused(transport, device):
        raise OSError("no broadcast group was made") from RuntimeError(
            "Duplicate GPU detected : rank 0 and rank 1"
        )

    monkeypatch.setattr(pushes, "check", refused)
    with pytest.raises(NotRun, match="refuses two ranks on one GPU"):
        pushes.check_distributed("cuda")
    assert os.environ[pushes.MULTI_RANK] == "1"
    with pytest.raises(OSError):
        pushes.check_distributed("cpu")


SGLANG_PARSER = """
import argparse, sys
from sglang.srt.server_args import ServerArgs

parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
parser.parse_args()
"""
MEGATRON_PARSER = """
from megatron.training import arguments
from megatron_rl_corr.config.flags import add_flags
from megatron_rl_corr.models.megatron_flags import add_missing_flags
from megatron_rl_corr.mcore.checks.run_flags import check_megatron_arguments

check_megatron_arguments(arguments.parse_args(lambda parser: add_flags(add_missing_flags(parser))))
"""


def test_flags_of_a_gpu_when_sglang_and_megatron_parse_them_then_both_take_them(tiny_moe_dir, tmp_path):
    (tmp_path / "sglang_parser.py").write_text(SGLANG_PARSER)
    words = [*pushes.GPU_ARGUMENTS, "--model-path", tiny_moe_dir, "--enable-return-routed-experts"]
    done = run_preloaded([tmp_path / "sglang_parser.py", *words], engine="sglang")
    assert done.returncode == 0, done.stderr[-2000:]
    command = router_replay.command(tmp_path, tiny_moe_dir, "http://127.0.0.1:1", "cuda")
    assert {"--bf16", "--moe-grouped-gemm", "--optimizer-cpu-offload"} < set(
        command
    ) and "gloo" not in command
    (tmp_path / "megatron_parser.py").write_text(MEGATRON_PARSER)
    script = next(place for place, word in enumerate(command) if word.endswith("pretrain_moe.py"))
    done = run_preloaded([tmp_path / "megatron_parser.py", *command[script + 1 :]])
    assert done.returncode == 0, done.stderr[-2000:]


def test_server_of_a_gpu_then_no_request_waits_until_all_kernels_of_deepgemm_are_compiled(
    tiny_moe_dir, tmp_path
):
    found = pushes.server(tiny_moe_dir, "bfloat16", "cuda").environment
    assert set(found) - set(pushes.server(tiny_moe_dir, "float32", "cpu").environment) == set(
        pushes.GPU_VARIABLES
    )
    program = tmp_path / "sglang_variables.py"  # whether SGLang reads them, and as they are meant
    program.write_text(
        "from sglang.srt.environ import envs\nassert not envs.SGLANG_JIT_DEEPGEMM_PRECOMPILE.get()\n"
    )
    for variables, status in ((pushes.GPU_VARIABLES, 0), ({}, 1)):
        done = run_preloaded([program], engine="sglang", env=environment("sglang") | variables)
        assert done.returncode == status, done.stderr[-2000:]


STEP = {
    "step": 1,
    "router_replay/disagreement": 0.01,
    "router_replay/tokens_without_routes": 0,
    "grad_norm": 0.5,
    "rollout_corr/k3_kl": 1e-4,
    "router_replay/overlap": 0.995,
}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"router_replay/disagreement": 0.5}, "disagreement, largest of 4 steps is 0.5"),
        ({"rollout_corr/k3_kl": 0.02}, "k3_kl, largest of 4 steps is 0.02"),
        ({"rollout_corr/k3_kl": float("nan")}, "k3_kl, largest of 4 steps is nan"),
        ({"router_replay/tokens_without_routes": 3}, "had tokens without routes"),
        ({"grad_norm": 0.0}, "had no gradient"),
        (None, "replayed no routes"),
    ],
)
def test_replay_when_a_step_is_wrong_then_it_is_named(wrong, words):
    assert len(router_replay.judge([STEP] * 4).findings) == 3
    one = {"step": 1} if wrong is None else STEP | wrong
    with pytest.raises(DoesNotHold, match=words):
        router_replay.judge([one, STEP, STEP, STEP])


def test_replay_when_the_step_from_the_checkpoint_moves_a_weight_then_it_is_named(tiny_moe_dir, tmp_path):
    copy_model_files(tiny_moe_dir, tmp_path)
    weights = load_file(tiny_moe_dir / "model.safetensors")
    weights["model.norm.weight"][3] *= 1 + 2**-20
    save_file(weights, tmp_path / "model.safetensors")
    router_replay.require_kept(tiny_moe_dir, tiny_moe_dir)
    with pytest.raises(
        DoesNotHold, match="a step of learning rate 0 from the checkpoint changed model.norm.weight"
    ):
        router_replay.require_kept(tiny_moe_dir, tmp_path)


def test_replay_when_training_fails_or_ends_early_then_it_does_not_hold():
    with pytest.raises(DoesNotHold, match="training ended with status 7"):
        router_replay.train([sys.executable, "-c", "raise SystemExit(7)"])
    with pytest.raises(DoesNotHold, match="2 of 4 steps"):
        router_replay.judge([STEP] * 2)


@pytest.mark.parametrize(
    ("program", "words"),
    [("raise SystemExit('wrong')", "with status 1"), ("print('nothing')", "printed no table")],
)
def test_benchmark_when_its_results_are_wrong_or_it_prints_none_then_it_is_named(program, words, tmp_path):
    path = tmp_path / "made_up.py"
    path.write_text(program)
    with pytest.raises(DoesNotHold, match=f"made_up.py .*{words}|made_up.py {words}"):
        benchmark_runs.run_file(path)
    path.write_text("print('| a |\\n|---|\\n| 1 |')")
    tables = benchmark_runs.run_file(path, "--tiny").tables
    assert tables == "`python benchmarks/made_up.py --tiny`\n\n| a |\n|---|\n| 1 |"


def test_bound_when_a_number_is_beyond_it_or_none_then_it_does_not_hold():
    assert at_most("x", 1.0, 1.0) == Finding("x", "1", "1")
    for wrong in (1.1, float("nan")):
        with pytest.raises(DoesNotHold, match="x is"):
            at_most("x", wrong, 1.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_part_when_there_is_a_gpu_that_torch_does_not_find_then_it_does_not_hold(tmp_path):
    with pytest.raises(DoesNotHold, match="finds no GPU, and there is one"):
        one_part.main("fp8-rounding", "cuda", str(tmp_path / "out.json"))
