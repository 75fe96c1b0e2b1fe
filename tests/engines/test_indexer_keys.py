"""The keys that a server's sparse attention took, from bytes of SGLang's own code to a trajectory."""

import base64
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl_corr.engines.errors import RolloutProtocolError
from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.engines.sample_request import SampleRequest
from megatron_rl_corr.engines.sglang import ENGINE as SGLANG
from megatron_rl_corr.engines.trajectory import SamplingParams, concatenated
from megatron_rl_corr.engines.vllm import ENGINE as VLLM
from megatron_rl_corr.rollout.sample_file import Sample, read_sampling, read_trajectories, write_trajectories
from megatron_rl_corr.rollout.stop_texts import cut_at_stop
from tests.preloaded import run_preloaded

WORKER = Path(__file__).with_name("indexer_keys_worker.py")
NONE = [255, 255]
HAND = [[[0, -1]], [[9, 9]], [[2, 0]], [[1, 3]]]
"""Five tokens, one layer, two keys each: the first two tokens have all keys, whatever the rows say."""
SHAPE = ExpertShape(num_layers=1, layers=(0,), top_k=2, experts=16)


def answer(rows, *, prompt=3, output=2, encoded=None, finish="length", **meta):
    """The body of an answer of so many tokens."""
    ids = list(range(7, 7 + output))
    field = base64.b64encode(np.asarray(rows, "<i4").tobytes()).decode() if encoded is None else encoded
    meta = {
        "finish_reason": {"type": finish},
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "output_token_logprobs": [[-1.0, token, None] for token in ids],
        "weight_version": "0",
        "num_retractions": 0,
        "indexer_topk": field,
    } | meta
    meta = {name: value for name, value in meta.items() if value is not ...}
    return json.dumps({"output_ids": ids, "meta_info": meta}, separators=(",", ":")).encode()


def parse(body, *, prompt=3, keys=SHAPE, **given):
    asked = SampleRequest(
        torch.arange(prompt),
        SamplingParams(16, keys=keys),
        "r1",
        seed=0,
        prompt_index=0,
        sample_index=0,
        vocab_size=None,
        **given,
    )
    return SGLANG.parse(body, asked, server="http://s")


def test_keys_when_parsed_then_only_tokens_with_more_keys_than_are_taken_have_some():
    found = parse(answer(HAND)).indexer_keys
    assert found.dtype == torch.uint8 and found.tolist() == [[NONE], [NONE], [[2, 0]], [[1, 3]]]


def test_keys_when_the_body_has_other_blanks_then_the_same():
    body = json.dumps(json.loads(answer(HAND)), indent=1).encode()
    assert parse(body).indexer_keys.tolist() == parse(answer(HAND)).indexer_keys.tolist()


def test_keys_when_nobody_asked_then_the_trajectory_has_none():
    assert parse(answer(HAND), keys=None).indexer_keys is None


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "made.pt"
    run = run_preloaded([WORKER, path], engine="sglang")
    assert run.returncode == 0, run.stderr[-3000:]
    return torch.load(path, weights_only=True)


def test_field_of_sglangs_capturer_and_detokenizer_when_parsed_then_the_highest_scores_of_each_token(made):
    layers, tokens = made["scores"].shape[1:3]
    shape = ExpertShape(num_layers=layers, layers=tuple(range(layers)), top_k=4, experts=300)
    for scores, field in zip(made["scores"], made["fields"], strict=True):
        part = parse(answer(None, prompt=6, output=6, encoded=field), prompt=6, keys=shape)
        assert part.indexer_keys.dtype == torch.int16 and len(part.indexer_keys) == tokens - 1
        for token, rows in enumerate(part.indexer_keys.tolist()):
            for layer, row in enumerate(rows):
                wanted = scores[layer, token, : token + 1].topk(min(4, token + 1)).indices.tolist()
                assert set(row) == (set(wanted) if token >= 4 else {32767}), (token, layer)


def test_slots_of_the_servers_cache_in_place_of_positions_then_refused_with_the_remedy(made):
    slots = made["slots"][0]
    raw = np.frombuffer(base64.b64decode(made["fields"][0]), "<i4")
    as_slots = [int(slots[key]) if key >= 0 else -1 for key in raw]
    shape = ExpertShape(num_layers=3, layers=(0, 1, 2), top_k=4, experts=300)
    with pytest.raises(
        RolloutProtocolError, match=r"rule range: key \d+ of token 4 .*SGLANG_DSA_FUSE_TOPK=0"
    ):
        parse(answer(as_slots, prompt=6, output=6), prompt=6, keys=shape)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"encoded": ...}, "rule presence: .*--enable-return-indexer-topk"),
        ({"encoded": 7}, "rule base64: indexer_topk must be base64 of int32, got int"),
        ({"encoded": "a?"}, "rule base64: indexer_topk of 2 characters are no base64"),
        ({"encoded": "AAAA"}, "rule int32: indexer_topk of 3 bytes"),
        (
            {"rows": HAND[:3]},
            "rule rows: 6 ids of indexer_topk are 3 rows of 1 layers x 2 keys, where 5 tokens",
        ),
        ({"rows": [*HAND[:3], [[1, 4]]]}, r"rule range: key 4 of token 3 in layer 0 is outside \[0, 3\]"),
        ({"rows": [*HAND[:3], [[1, -1]]]}, r"rule range: key -1 of token 3 in layer 0"),
        ({"rows": [*HAND[:2], [[1, 1]], HAND[3]]}, "rule distinct keys: keys of token 2 in layer 0"),
        ({"num_retractions": ...}, "rule retractions"),
    ],
)
def test_keys_when_they_break_a_rule_then_refused_by_its_name(given, text):
    with pytest.raises(RolloutProtocolError, match=text):
        parse(answer(given.pop("rows", HAND), **given))


def test_keys_when_the_response_was_computed_anew_then_it_has_none():
    assert parse(answer(HAND, num_retractions=1)).indexer_keys.tolist() == [[NONE]] * 4


def test_request_that_was_aborted_while_it_waited_then_its_tokens_have_no_keys():
    body = answer(HAND, output=0, finish="abort", encoded=..., num_retractions=...)
    assert parse(body).indexer_keys.tolist() == [[NONE]] * 2


def test_parts_of_a_response_when_joined_then_each_token_has_the_keys_of_the_first_part_with_them():
    first = parse(answer(HAND, finish="abort"))
    rows = [[[0, 0]], [[0, 0]], [[0, 1]], [[0, 1]], [[4, 2]], [[5, 0]]]
    second = parse(answer(rows, prompt=5, output=2), prompt=5)
    second = replace(second, prompt_ids=torch.cat([first.prompt_ids, first.output_ids]))
    whole = concatenated([first, second])
    assert whole.indexer_keys.tolist() == [[NONE], [NONE], [[2, 0]], [[1, 3]], [[4, 2]], [[5, 0]]]
    with pytest.raises(ValueError, match="only one of .* has indexer_keys"):
        concatenated([first, replace(second, indexer_keys=None)])


def test_response_when_cut_at_a_stop_text_then_its_keys_are():
    cut = cut_at_stop(parse(answer(HAND)), ["a"], lambda ids: "".join("ab"[one > 7] for one in ids))
    assert cut.output_ids.tolist() == [7] and cut.indexer_keys.tolist() == [[NONE], [NONE], [[2, 0]]]


def test_trajectory_when_its_keys_are_of_other_tokens_or_types_then_refused():
    one = parse(answer(HAND))
    with pytest.raises(ValueError, match="5 tokens have indexer_keys of 3, not 4"):
        replace(one, indexer_keys=one.indexer_keys[:3])
    with pytest.raises(ValueError, match="indexer_keys must be 3-d uint8 or int16, got 3-d torch.int32"):
        replace(one, indexer_keys=one.indexer_keys.int())


def test_samples_when_written_then_their_keys_come_back(tmp_path):
    one = parse(answer(HAND))
    sampling = SamplingParams(4, keys=SHAPE)
    path = write_trajectories(
        tmp_path / "one.parquet", [Sample(one), Sample(replace(one, indexer_keys=None))], sampling=sampling
    )
    found = [sample.trajectory.indexer_keys for sample in read_trajectories(path)]
    assert torch.equal(found[0], one.indexer_keys) and found[0].dtype == torch.uint8 and found[1] is None
    assert read_sampling(path) == replace(sampling, keys=None)


def test_request_when_keys_are_wanted_then_it_asks_for_them_and_has_room_for_them():
    plain, asking = (SGLANG.generate([1, 2], SamplingParams(4, keys=keys), seed=0) for keys in (None, SHAPE))
    assert asking.json == plain.json | {"return_indexer_topk": True}
    assert asking.max_bytes - plain.max_bytes == 6 * 1 * 2 * 8


def test_server_when_it_returns_no_keys_then_named_with_the_flag():
    sampling = SamplingParams(4, keys=SHAPE)
    assert "--enable-return-indexer-topk" in SGLANG.sampling_problem({}, sampling)
    given = {"enable_return_indexer_topk": True}
    assert SGLANG.sampling_problem(given, sampling) is None
    assert "EAGLE" in SGLANG.sampling_problem(given | {"speculative_algorithm": "EAGLE"}, sampling)
    assert SGLANG.sampling_problem({}, SamplingParams(4)) is None
    assert "vLLM returns no keys" in VLLM.sampling_problem({}, sampling)
