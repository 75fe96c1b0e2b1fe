"""What servers show of their weights, compared with each other and with what was sent."""

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl_corr.rollout import RolloutProtocolError
from megatron_rl_corr.weight_sync.checksums import cpu_checksum, gpu_checksum
from megatron_rl_corr.weight_sync.proof import PushProof, ServerWeights, _read, check_agreement
from megatron_rl_corr.weight_sync.transports.choice import count_elements

A, B = "http://a", "http://b"
LAYOUT = (1, 1, 1, "float32", "cpu", 1)
BF16 = {"layout": (1, 1, 1, "bfloat16", "cpu", 1)}  # a CPU with AMX packs matrices


def server(url=A, device="cpu", tp_size=1, layout=LAYOUT, quantization=None, **checksums):
    return ServerWeights(url, device, tp_size, layout, quantization, ((0, checksums),))


def test_agreement_when_servers_of_one_layout_differ_then_the_second_is_named_with_what_differs():
    check_agreement([server(A, x="1", y="2"), server(B, x="1", y="2")])
    words = "1 of its weights differ from those of http://a .*: y; .* use --rollout-verify-push off"
    with pytest.raises(RolloutProtocolError, match=words) as error:
        check_agreement([server(A, x="1", y="2"), server(B, x="1", y="3")])
    assert error.value.url == B


def test_agreement_when_layouts_differ_then_nothing_is_compared():
    check_agreement([server(A, y="2"), server(B, layout=(2, *LAYOUT[1:]), y="3")])


def kept(*bucket, **options):
    proof = PushProof(1, **options)
    proof.keep(bucket, "1")
    return proof


def test_compare_when_the_server_holds_another_dtype_then_rounded_as_it_does():
    x = torch.tensor([1.001, 2.0])
    assert kept(("x", x)).compare([server(x=cpu_checksum(x.bfloat16()))]) == 1
    with pytest.raises(RolloutProtocolError, match=r"1 of 1 weights .* not those that were sent: x;"):
        kept(("x", x)).compare([server(x=cpu_checksum(x.bfloat16() + 1))])


def test_compare_when_what_was_kept_changes_afterwards_then_it_is_of_when_it_was_sent():
    x = torch.ones(2)
    proof = kept(("x", x))
    before = cpu_checksum(x)
    x += 1
    assert proof.compare([server(x=before)]) == 1


@pytest.mark.parametrize("unknown", [{"device": "cuda"}, {"quantization": "fp8"}, {"layout": (2, 1, 1)}, BF16])
def test_compare_when_the_layout_is_not_known_then_what_never_fitted_proves_nothing_and_that_is_told_once(
    unknown, caplog
):
    proof = PushProof(1)
    for version in "12":
        proof.keep([("x", torch.ones(2)), ("y", torch.ones(3))], version)
        assert proof.compare([server(x="?", y=cpu_checksum(torch.ones(3)), **unknown)]) == ("device" not in unknown)
    [told] = caplog.records
    assert "http://a: nothing proves" in told.getMessage() and "of 2 weights" in told.getMessage()


def test_compare_when_the_server_is_on_a_gpu_then_by_the_hash_that_it_uses_there():
    x = torch.ones(3)
    gpu = {"device": "cuda", "layout": (1, 1, 1, "auto", "cuda", 1)}
    assert kept(("x", x)).compare([server(x=gpu_checksum(x.half()), **gpu)]) == 1
    assert kept(("x", x)).compare([server(x=cpu_checksum(x.half()), **gpu)]) == 0


def test_compare_when_a_parameter_fitted_once_then_it_must_from_then_on():
    proof, x, ranks = PushProof(1), torch.arange(4.0), lambda *sums: tuple((i, {"x": s}) for i, s in enumerate(sums))
    halves = [cpu_checksum(half) for half in x.chunk(2)]
    layout = (2, 1, 1)
    proof.keep([("x", x)], "1")
    assert proof.compare([ServerWeights(A, "cpu", 2, layout, None, ranks(*halves))]) == 1
    proof.keep([("x", x)], "2")
    with pytest.raises(RolloutProtocolError, match="not those that were sent: x"):
        proof.compare([ServerWeights(A, "cpu", 2, layout, None, ranks(halves[0], halves[0]))])


def test_compare_when_it_fitted_at_a_server_of_another_layout_then_that_proves_nothing_of_this_one():
    proof, x = PushProof(1), torch.ones(4)
    for version in "12":
        proof.keep([("x", x)], version)
        assert proof.compare([server(A, x=cpu_checksum(x)), server(B, quantization="fp8", layout=(2,), x="?")]) == 0


def test_compare_when_the_servers_have_no_such_parameter_then_it_is_not_counted():
    assert kept(("x", torch.ones(2)), ("y", torch.ones(2))).compare([server(y=cpu_checksum(torch.ones(2)))]) == 1


def test_keep_when_the_model_is_larger_than_what_is_kept_then_a_share_that_changes_with_the_version():
    proof, seen = PushProof(1000, kept_bytes=250), set()
    names = [f"p{i}" for i in range(200)]
    sizes = []
    for version in range(30):
        proof.clear()
        proof.keep([(name, torch.ones(1, dtype=torch.uint8)) for name in names], str(version))
        sizes.append(len(proof._kept))
        seen |= proof._kept.keys()
    assert 30 < sum(sizes) / 30 < 70 and seen == set(names)  # a quarter of 200


def test_keep_when_the_weights_are_sent_in_a_wider_type_than_the_checkpoints_then_fewer_and_of_all_layers():
    x, seen = torch.ones(10), set()
    for version in range(60):
        proof = PushProof(1000, kept_bytes=2000)  # the checkpoint has these 1000 numbers in 2000 bytes
        for i in range(100):
            proof.keep([(f"p{i}", x)], str(version))
        seen |= {int(name[1:]) for name in proof._kept}
        assert len(proof._kept) < 75
    assert max(seen) >= 98


def test_proof_when_it_is_made_then_it_counts_the_checkpoints_numbers_not_their_bytes(tmp_path):
    save_file({"a": torch.ones(3, 5).half(), "b": torch.tensor(1.0)}, tmp_path / "model-1.safetensors")
    save_file({"c": torch.ones(4)}, tmp_path / "model-2.safetensors")
    assert count_elements(tmp_path) == 20


def test_layout_when_servers_hold_their_experts_otherwise_then_it_is_another_and_older_ones_have_no_such_key():
    info = dict(zip(("tp_size", "pp_size", "ep_size", "dtype", "device"), LAYOUT, strict=False), quantization=None)
    answer = {"ranks": [{"parallelism_info": [{"tp_rank": 0, "role": "target"}], "checksums": {"x": "1"}}]}
    old, same = (_read(url, info, answer) for url in (A, B))
    assert old.layout == same.layout and old.layout_is_known
    for other in ("moe_runner_backend", "enable_eplb", "enable_fp32_lm_head", "disable_shared_experts_fusion"):
        assert _read(B, info | {other: "x"}, answer).layout != old.layout


def test_keep_when_a_stack_outgrows_the_limit_then_it_is_dropped_whole_and_smaller_ones_stay():
    proof = PushProof(1, kept_bytes=100)
    expert = torch.ones(10)  # 40 bytes
    proof.keep([("norm", torch.ones(2))], "1")
    proof.keep([(f"m.experts.{e}.down_proj.weight", expert) for e in range(4)], "1")
    proof.keep([("head", torch.ones(3))], "1")
    assert proof._kept.keys() == {"norm", "head"} and proof._bytes == 20
