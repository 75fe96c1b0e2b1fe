"""What servers show of their weights, compared with each other and with what was sent."""

import asyncio

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.checksums import cpu_checksum, gpu_checksum
from megatron_rl_corr.engines.types import ServerChecksums
from megatron_rl_corr.rollout import RolloutProtocolError, RolloutServerError
from megatron_rl_corr.weight_sync.verify import PushVerifier, check_agreement, count_elements

A, B = "http://a", "http://b"
LAYOUT = (1, 1, 1, "float32", "cpu", 1)
BF16 = {"layout": (1, 1, 1, "bfloat16", "cpu", 1)}  # a CPU with AMX packs matrices


ENGINE, CHECKER = load_engine("sglang"), "/weights_checker"


def server(url=A, device="cpu", tp_size=1, layout=LAYOUT, quantization=None, **checksums):
    known = device == "cpu" and layout[:4] == LAYOUT[:4] and quantization is None
    return ServerChecksums(
        url, device, tp_size, layout, quantization, ((0, checksums),), layout_is_known=known
    )


def test_agreement_when_servers_of_one_layout_differ_then_the_second_is_named_with_what_differs():
    check_agreement([server(A, x="1", y="2"), server(B, x="1", y="2")], CHECKER)
    words = "1 of its weights differ from those of http://a .*: y; .* use `verify_push` off"
    with pytest.raises(RolloutProtocolError, match=words) as error:
        check_agreement([server(A, x="1", y="2"), server(B, x="1", y="3")], CHECKER)
    assert error.value.url == B


def test_agreement_when_layouts_differ_then_nothing_is_compared():
    check_agreement([server(A, y="2"), server(B, layout=(2, *LAYOUT[1:]), y="3")], CHECKER)


def kept(*bucket, **options):
    verifier = PushVerifier(ENGINE, 1, **options)
    verifier.keep(bucket, "1")
    return verifier


def test_compare_when_the_server_holds_another_dtype_then_rounded_as_it_does():
    x = torch.tensor([1.001, 2.0])
    assert kept(("x", x)).compare([server(x=cpu_checksum(x.bfloat16()))]) == 1
    with pytest.raises(RolloutProtocolError, match=r"1 of 1 weights .* not those that were sent: x;"):
        kept(("x", x)).compare([server(x=cpu_checksum(x.bfloat16() + 1))])


def test_compare_when_what_was_kept_changes_afterwards_then_it_is_of_when_it_was_sent():
    x = torch.ones(2)
    verifier = kept(("x", x))
    before = cpu_checksum(x)
    x += 1
    assert verifier.compare([server(x=before)]) == 1


@pytest.mark.parametrize(
    "unknown", [{"device": "cuda"}, {"quantization": "fp8"}, {"layout": (2, 1, 1)}, BF16]
)
def test_compare_when_the_layout_is_not_known_then_what_never_fitted_verifies_nothing_and_that_is_told_once(
    unknown, caplog
):
    verifier = PushVerifier(ENGINE, 1)
    for version in "12":
        verifier.keep([("x", torch.ones(2)), ("y", torch.ones(3))], version)
        assert verifier.compare([server(x="?", y=cpu_checksum(torch.ones(3)), **unknown)]) == (
            "device" not in unknown
        )
    [record] = caplog.records
    assert (
        record.getMessage().startswith("http://a: ")
        and "of 2 weights are not verified" in record.getMessage()
    )


def test_read_when_a_server_that_had_checksums_answers_404_then_it_is_no_older_server():
    class Servers:
        base_urls, status = (A,), 404

        async def weights_checker(self):
            raise RolloutServerError(A, "/weights_checker", self.status, "not found")

    verifier = PushVerifier(ENGINE, 1)
    assert asyncio.run(verifier.read(Servers())) == []  # it never had any
    verifier._have_checksums.add(A)
    with pytest.raises(RolloutServerError, match="HTTP 404"):
        asyncio.run(verifier.read(Servers()))


def test_compare_when_the_server_is_on_a_gpu_then_by_the_hash_that_it_uses_there():
    x = torch.ones(3)
    gpu = {"device": "cuda", "layout": (1, 1, 1, "auto", "cuda", 1)}
    assert kept(("x", x)).compare([server(x=gpu_checksum(x.half()), **gpu)]) == 1
    assert kept(("x", x)).compare([server(x=cpu_checksum(x.half()), **gpu)]) == 0


def test_compare_when_a_parameter_fitted_once_then_it_must_from_then_on():
    verifier, x = PushVerifier(ENGINE, 1), torch.arange(4.0)

    def ranks(*sums):
        return tuple((i, {"x": s}) for i, s in enumerate(sums))

    halves = [cpu_checksum(half) for half in x.chunk(2)]
    layout = (2, 1, 1)
    verifier.keep([("x", x)], "1")
    assert verifier.compare([ServerChecksums(A, "cpu", 2, layout, None, ranks(*halves))]) == 1
    verifier.keep([("x", x)], "2")
    with pytest.raises(RolloutProtocolError, match="not those that were sent: x"):
        verifier.compare([ServerChecksums(A, "cpu", 2, layout, None, ranks(halves[0], halves[0]))])


def test_compare_when_it_fitted_at_a_server_of_another_layout_then_that_verifies_nothing_of_this_one():
    verifier, x = PushVerifier(ENGINE, 1), torch.ones(4)
    for version in "12":
        verifier.keep([("x", x)], version)
        assert (
            verifier.compare(
                [server(A, x=cpu_checksum(x)), server(B, quantization="fp8", layout=(2,), x="?")]
            )
            == 0
        )


def test_compare_when_the_servers_have_no_such_parameter_then_it_is_not_counted():
    assert (
        kept(("x", torch.ones(2)), ("y", torch.ones(2))).compare([server(y=cpu_checksum(torch.ones(2)))]) == 1
    )


def test_keep_when_the_model_is_larger_than_what_is_kept_then_a_share_that_changes_with_the_version():
    verifier, seen = PushVerifier(ENGINE, 1000, kept_bytes=250), set()
    names = [f"p{i}" for i in range(200)]
    sizes = []
    for version in range(30):
        verifier.clear()
        verifier.keep([(name, torch.ones(1, dtype=torch.uint8)) for name in names], str(version))
        sizes.append(len(verifier._kept))
        seen |= verifier._kept.keys()
    assert 30 < sum(sizes) / 30 < 70 and seen == set(names)  # a quarter of 200


def test_keep_when_the_weights_are_sent_in_a_wider_type_than_the_checkpoints_then_fewer_and_of_all_layers():
    x, seen = torch.ones(10), set()
    for version in range(60):
        # the checkpoint has these 1000 numbers in 2000 bytes
        verifier = PushVerifier(ENGINE, 1000, kept_bytes=2000)
        for i in range(100):
            verifier.keep([(f"p{i}", x)], str(version))
        seen |= {int(name[1:]) for name in verifier._kept}
        assert len(verifier._kept) < 75
    assert max(seen) >= 98


def test_elements_when_counted_then_it_counts_the_checkpoints_numbers_not_their_bytes(tmp_path):
    save_file({"a": torch.ones(3, 5).half(), "b": torch.tensor(1.0)}, tmp_path / "model-1.safetensors")
    save_file({"c": torch.ones(4)}, tmp_path / "model-2.safetensors")
    assert count_elements(tmp_path) == 20


def test_layout_when_servers_hold_their_experts_otherwise_then_it_is_another():
    info = dict(
        zip(("tp_size", "pp_size", "ep_size", "dtype", "device"), LAYOUT, strict=False), quantization=None
    )
    answer = {"ranks": [{"parallelism_info": [{"tp_rank": 0, "role": "target"}], "checksums": {"x": "1"}}]}
    old, same = (ENGINE.checksums(url, info, answer) for url in (A, B))
    assert old.layout == same.layout and old.layout_is_known
    for other in (
        "moe_runner_backend",
        "enable_eplb",
        "enable_fp32_lm_head",
        "disable_shared_experts_fusion",
    ):
        assert ENGINE.checksums(B, info | {other: "x"}, answer).layout != old.layout


def drafting(model, own, shared="9"):
    """A server's checksums after a push; its draft model has the embedding of the model and a
    layer of its own.
    """
    info = dict(
        zip(("tp_size", "pp_size", "ep_size", "dtype", "device"), LAYOUT, strict=False), quantization=None
    )
    roles = [{"tp_rank": 0, "role": "target"}, {"tp_rank": 0, "role": "draft"}]
    sums = {"norm": model, "embed": shared, "draft.embed": shared, "draft.enorm": own}
    return ENGINE.checksums(A, info, {"ranks": [{"parallelism_info": roles, "checksums": sums}]})


def pushed(verifier, layer, shown):
    verifier.clear()
    verifier.note_drafts([("model.layers.61.enorm.weight", torch.tensor([layer]))])
    verifier.compare([shown])


def test_drafts_when_other_layers_are_sent_and_the_server_keeps_the_old_ones_then_its_draft_model_is_named():
    shown = drafting("1", "5")
    assert shown.drafts == ({"draft.enorm": "5"},) and shown.ranks[0][1].keys() == {"norm", "embed"}
    for then in ("6", "5"):
        verifier = PushVerifier(ENGINE, 1)
        pushed(verifier, 1.0, drafting("1", "5", shared="7"))
        if then == "6":
            pushed(verifier, 2.0, drafting("2", then))
            continue
        with pytest.raises(RolloutProtocolError, match="its draft model has the weights of the push before"):
            # though the embedding, which is the model's, has changed
            pushed(verifier, 2.0, drafting("2", then))


def test_drafts_when_nothing_changed_or_nothing_is_known_then_no_draft_model_is_accused():
    verifier = PushVerifier(ENGINE, 1)
    pushed(verifier, 1.0, drafting("1", "5"))
    pushed(verifier, 1.0, drafting("1", "5"))  # the same layers, as with a learning rate of 0
    pushed(verifier, 2.0, drafting("2", "6"))
    verifier.compare([drafting("2", "6")])  # a rank that sends no such layer
    pushed(verifier, 3.0, drafting("2", "6"))  # nothing was sent before
    pushed(verifier, 4.0, server(A, norm="1"))
    pushed(verifier, 5.0, drafting("2", "6"))  # nothing was known of it


def test_keep_when_a_stack_outgrows_the_limit_then_it_is_dropped_whole_and_smaller_ones_stay():
    verifier = PushVerifier(ENGINE, 1, kept_bytes=100)
    expert = torch.ones(10)  # 40 bytes
    verifier.keep([("norm", torch.ones(2))], "1")
    verifier.keep([(f"m.experts.{e}.down_proj.weight", expert) for e in range(4)], "1")
    verifier.keep([("head", torch.ones(3))], "1")
    assert verifier._kept.keys() == {"norm", "head"} and verifier._bytes == 20
