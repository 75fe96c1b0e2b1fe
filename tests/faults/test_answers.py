"""Answers of real servers, mutated: used only if an oracle says so too, refused by server,
endpoint and field else.
"""

import functools
import json
import math
from collections import Counter
from pathlib import Path

import orjson
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.errors import RolloutError, RolloutProtocolError, RolloutServerError
from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.engines.sample_request import SampleRequest
from megatron_rl_corr.engines.sglang import answer_fields as sglang_fields
from megatron_rl_corr.engines.vllm import answer_fields as vllm_fields
from megatron_rl_corr.rollout import SamplingParams
from megatron_rl_corr.rollout.trace import GroupTrace, RequestTrace
from megatron_rl_corr.rollout.trace_file import write_trace
from tests.faults import oracle
from tests.faults.drills import drill, long
from tests.faults.mutations import mutated
from tests.tiers import IN_MATRIX

URL = "http://rollout-3:30000"
PROMPT, TOKENS, VOCAB_SIZE = [3, 1, 4, 1, 5], 6, 83
FIELDS = (
    "output_ids",
    "token_ids",
    "token id",
    "meta_info",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "logprobs",
    "weight_version",
    "cached_tokens",
    "sampling_mask",
    "sampling_logprobs",
    "routed_experts",
    "choices",
    "usage",
    "num_retractions",
    "not JSON",
    "JSON object",
    "log-prob",
    "rule ",
)
FOLDER = Path(__file__).parent / "answers"


@functools.cache
def recorded(engine):
    return json.loads((FOLDER / f"{engine}.json").read_text())


def experts_of(engine):
    """(layers, experts a token, experts) of the tiny model."""
    return ExpertShape(num_layers=4, layers=(0, 1, 2, 3), top_k=2, experts=8)


def verdict(engine, name, body):
    """What becomes of an answer, and whether the oracle agrees: "used", "refused" or "failed"."""
    shape = experts_of(engine) if name == "routes" else None
    truncated = name == "mask" or (engine, name) == ("vllm", "routes")
    routes = shape and (shape.num_layers, shape.top_k, shape.experts)
    asked = oracle.Asked(len(PROMPT), TOKENS, VOCAB_SIZE, truncated, routes)
    try:
        right = getattr(oracle, engine)(body, asked)
    except (oracle.Refused, oracle.Failed) as error:
        right = error
    request = SampleRequest(
        torch.tensor(PROMPT),
        SamplingParams(TOKENS, top_p=0.9 if truncated else 1.0),
        "r1",
        seed=0,
        prompt_index=0,
        sample_index=0,
        vocab_size=VOCAB_SIZE,
        experts=shape,
    )
    try:
        sample = load_engine(engine).parse(body, request, server=URL)
    except RolloutError as error:
        kind = oracle.Failed if isinstance(error, RolloutServerError) else oracle.Refused
        assert isinstance(right, kind), (body, error, right)
        assert error.url == URL and error.endpoint == load_engine(engine).generate_endpoint
        if isinstance(error, RolloutProtocolError):
            assert any(field in error.detail for field in FIELDS), error.detail
        assert len(str(error)) < 3000 and str(error).encode()
        return "failed" if kind is oracle.Failed else "refused"
    assert isinstance(right, oracle.Reading), (body, right)
    logprobs = [None if math.isnan(value) else value for value in sample.rollout_logprobs.tolist()]
    assert (sample.output_ids.tolist(), logprobs) == (right.ids, right.logprobs), body
    assert (sample.finish_reason, sample.cached_tokens) == (right.reason, right.cached), body
    assert [(span.version, span.start, span.end) for span in sample.weight_versions] == right.spans, body
    if right.kept is not None:
        kept = [part.tolist() for part in sample.support.ids.split(sample.support.lengths.tolist())]
        assert kept == right.kept, body
    return "used"


CASES = [("sglang", "plain"), ("sglang", "mask"), ("sglang", "routes"), ("vllm", "plain"), ("vllm", "routes")]


def checked(engine, name, count, folder):
    """The verdicts of so many mutated answers. The times of those that are used go into a
    trace, in this folder.
    """
    body = recorded(engine)[name]["body"].encode()
    assert verdict(engine, name, body) == "used"
    answer = orjson.loads(body)
    if engine == "sglang":  # as with --enable-metrics
        answer["meta_info"] |= {"queue_time": 0.01, "first_token_latency": 0.02}
    compact = orjson.dumps(answer)
    assert verdict(engine, name, compact) == "used"
    seen, requests = Counter(), []

    @settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(mutated(compact))
    def judged(changed):
        found = verdict(engine, name, changed)
        seen[found] += 1
        if found == "used":
            times = load_engine(engine).server_times(changed)
            assert all(0 <= seconds < math.inf for seconds in times.values()), (changed, times)
            requests.append(RequestTrace(0, 0.0, 0.0, 1.0, URL, TOKENS, None, times))

    judged()
    write_trace(folder / "trace.json", [GroupTrace(0, 0.0, requests)], {}, taken=1.0, base=0.0, facts={})
    assert sum(seen.values()) >= count  # or so many were not tried
    return seen


PROMISED = (
    "used if every field is within what was asked and JSON allows, else refused by server, endpoint and field"
)


@pytest.mark.parametrize("engine, name", CASES)
@drill("5,000 mutated answers of real servers", promised=PROMISED)
def test_answer_when_mutated_then_used_only_if_the_oracle_says_so(engine, name, seen, tmp_path):
    count = 1000 if IN_MATRIX else 300
    found = checked(engine, name, count, tmp_path)
    assert found["refused"] > 0.3 * count and found["used"] > 0.02 * count, found
    seen(f"{engine} {name}: {dict(found)}")


@long
@pytest.mark.parametrize("engine, name", CASES)
@drill("100,000 mutated answers of real servers", promised=PROMISED)
def test_answer_when_mutated_often_then_used_only_if_the_oracle_says_so(engine, name, seen, tmp_path):
    seen(f"{engine} {name}: {dict(checked(engine, name, 20_000, tmp_path))}")


def control_readers(engine):
    """Name of a recorded control answer -> everything that reads it."""
    made = load_engine(engine)
    info = orjson.loads(recorded(engine)["server_info"]["body"])
    sampling = SamplingParams(8, min_p=0.1, top_k=4, stop=("x",))

    def of_server_info(answer):
        made.ranks(URL, answer)
        for read in (
            made.is_quantized,
            made.dtype,
            made.has_tokenizer,
            made.has_float32_head,
            made.cache_block,
            made.version_support,
        ):
            read(answer)
        if made.sequence_limit().endpoint == made.server_info().endpoint:
            made.longest_sequence(URL, answer)
        made.sampling_problem(answer, sampling)
        made.pause_problem(answer, "in_place", keyed_cache=False, samples_ahead=True)
        made.pause_problem(answer, "retract", keyed_cache=True, samples_ahead=True)

    def of_checksums(answer):
        made.all_checksums(URL, answer)
        found = made.checksums(URL, info, answer)
        found.fingerprint()
        hash(found.layout)

    return {
        "server_info": of_server_info,
        "model_info": lambda answer: (made.weight_version(answer), made.served_model(answer, info)),
        "weights_checker": of_checksums,
        "list_models": lambda answer: made.context_length(URL, answer),
        "score": lambda answer: made.parse_scores(
            answer, server=URL, output_ids=[7, 9], vocab_size=VOCAB_SIZE
        ),
        "detailed_sample": lambda answer: made.parse_detailed_sample(
            answer, server=URL, prompt_ids=PROMPT, tokens=TOKENS
        ),
    }


def read_part(answer, fields):
    """The fields of an answer that a table has."""
    return {
        name: value if not isinstance(fields[name], dict) else read_part(value, fields[name])
        for name, value in answer.items()
        if name in fields
    }


FIELDS_READ = {"sglang": sglang_fields.FIELDS, "vllm": vllm_fields.FIELDS}
CONTROL = [
    (engine, name)
    for engine in ("sglang", "vllm")
    for name in ("server_info", "model_info", "weights_checker", "list_models", "score", "detailed_sample")
]


@pytest.mark.parametrize("engine, name", CONTROL)
@drill(
    "mutated answers of control endpoints, and of those that the doctor asks",
    promised="no error without a server",
)
def test_control_answer_when_mutated_then_read_or_refused_by_server_and_endpoint(engine, name, seen):
    made, found = load_engine(engine), recorded(engine)[name]
    endpoint, answer = found["endpoint"], orjson.loads(found["body"])
    if name == "server_info":  # without what nobody reads, or no change would be met
        answer = read_part(answer, FIELDS_READ[engine]["/server_info"])
    body = orjson.dumps(answer)
    read, counts = control_readers(engine)[name], Counter()

    def judge(changed):
        try:
            read(made.parse_control(changed, server=URL, endpoint=endpoint, status=200))
            counts["read"] += 1
        except RolloutError as error:
            assert error.url == URL and error.endpoint and len(str(error)) < 3000 and str(error).encode()
            counts["refused"] += 1

    judge(body)
    assert counts["read"] == 1, name

    @settings(
        max_examples=100,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(mutated(body))
    def judged(changed):
        judge(changed)

    judged()
    seen(f"{engine} {name}: {dict(counts)}")
