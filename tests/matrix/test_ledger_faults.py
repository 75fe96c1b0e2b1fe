"""Faults that are planted alone and in pairs between real servers and Megatron: the ledger names what is
wrong, and nothing else; in runs without one it blames nothing.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from aiohttp import web

from megatron_rl_corr.core.ledger_verdict import blamed_terms
from megatron_rl_corr.weight_sync.rounding import is_rounded, round_fp8_blockwise, round_int4_group
from tests.faults.door import Door
from tests.features.test_ledger_causes_runs import EPSILON, FLAT, positions, server_of, stretched
from tests.features.test_ledger_places_runs import RUN, Spoiled, causes_of, exchanged, stale
from tests.mcore.launched import launch, write_data
from tests.tiers import long

SCRIPT = Path(__file__).resolve().parents[1] / "features/ledger_pretrain.py"
EP2 = ["--expert-model-parallel-size", 2, "--expert-tensor-parallel-size", 1, "--router-replay", "compare"]


@dataclass(frozen=True)
class Fault:
    """What is planted, and what a verdict may say of it."""

    terms: tuple = ("rest",)
    causes: tuple = ()
    words: tuple = ()
    """Said in every verdict, if it is alone."""
    config: dict = field(default_factory=dict)
    """Of the server's model, otherwise than in the trainer's."""
    tensors: tuple = ()
    """changed(tensors of a push, those of the push before), one after the other."""
    sampling: dict = field(default_factory=dict)
    """Of the requests for samples, otherwise than the run asks."""
    flags: tuple = ()
    processes: int = 1
    variables: dict = field(default_factory=dict)
    in_how_many: Callable = all
    """all or any of the ledgers whose rest is blamed name a cause."""

    def and_also(self, other):
        terms, causes = self.terms + other.terms, self.causes + other.causes
        if {"staleness", "decode"} <= set(terms):
            # No server can score samples of weights that it had before: what it drew at is in the rest.
            terms, causes = (*terms, "rest"), (*causes, "logit_scale")
        return Fault(
            terms,
            causes,
            (),
            self.config | other.config,
            self.tensors + other.tensors,
            self.sampling | other.sampling,
            self.flags + other.flags,
            max(self.processes, other.processes),
            self.variables | other.variables,
        )


def configured(cause, config):
    return Fault(causes=(cause,), config=config)


def old(part, *prefixes):
    words = ("is as if servers had the weights of the version before",)
    return Fault(causes=(f"weights/{part}",), words=words, tensors=(stale(*prefixes),))


def louder(factor):
    """The logits of a server times a factor."""

    def changed(now, before):
        return now | {"lm_head.weight": now["lm_head.weight"] * factor}

    return Fault(causes=("logit_scale",), tensors=(changed,))


def rounded(kind, round_weight, *prefixes):
    """A server that rounds weights of these prefixes."""

    def changed(now, before):
        return {
            name: round_weight(one) if name.startswith(prefixes) and is_rounded(name, one) else one
            for name, one in now.items()
        }

    return Fault(causes=(kind,), tensors=(changed,))


def sampled(words, terms=(), **sampling):
    return Fault(terms=terms, words=(words,), sampling=sampling)


MORE_PROBABLE = "sampled tokens are more probable than their log-probs have it"
ALONE = {
    "epsilon": configured("norm_epsilon/1e-05", EPSILON),
    "not_normalised": configured("expert_weights/not_normalised", FLAT),
    "base": configured("rotary_base/1e+06", positions(1e6)),
    "small_base": configured("rotary_base/500000", positions(5e5)),
    "large_base": configured("rotary_base/1e+07", positions(1e7)),
    "stretched": configured("rotary_stretch/2", stretched(2.0)),
    "stretched_by_four": configured("rotary_stretch/4", stretched(4.0)),
    "all_old": old("previous", ""),
    "first_layer_old": old("layer_0", "model.layers.0."),
    "layer_old": old("layer_2", "model.layers.2."),
    "embedding_old": old("embedding", "model.embed_tokens."),
    "head_old": old("output", "model.norm.", "lm_head."),
    "loud": louder(1.15),
    "quiet": louder(0.87),
    "fp8_layer": rounded("fp8_weights/layer_1", round_fp8_blockwise, "model.layers.1."),
    "fp8_unasked": rounded("fp8_weights/all", round_fp8_blockwise, ""),
    "int4_layers": rounded("int4_weights/layers_2-3", round_int4_group, "model.layers.2.", "model.layers.3."),
    "shifted_routes": Fault(
        causes=("routes/own",),
        words=("had chosen the trainer's own experts, not those that they report",),
        flags=(
            *("--router-replay", "R3", "--router-replay-min-agreement", -1),
            *("--rollout-ingest-process", "off"),
        ),
        variables={"SHIFTED_ROUTES": "3"},
    ),
    "experts": Fault(
        terms=("routing", "rest"),
        causes=("experts/rank_1",),
        in_how_many=any,  # what is in their places is not known: of 250 tokens one ledger of eight names none
        tensors=(exchanged,),
        flags=tuple(EP2),
        processes=2,
    ),
    "cold": sampled("a sampling temperature of about 0.8", ("decode",), temperature=0.8),
    "hot": sampled("a sampling temperature of about 1.2", ("decode",), temperature=1.25),
    "top_p": sampled(MORE_PROBABLE, top_p=0.5),
    "top_k": sampled(MORE_PROBABLE, top_k=8),
    "min_p": sampled(MORE_PROBABLE, min_p=0.6),
    "lag": Fault(terms=("staleness",), flags=("--rollout-max-lag", 1, "--train-iters", 4)),
    "long_lag": Fault(terms=("staleness",), flags=("--rollout-max-lag", 3, "--train-iters", 6)),
    "int4": Fault(terms=("rounding",), flags=("--rollout-push-rounding", "int4_group")),
    "fp8": Fault(terms=("rounding",), flags=("--rollout-push-rounding", "fp8_blockwise")),
    "own_experts": Fault(
        terms=("routing",), flags=("--router-replay", "compare"), variables={"OTHER_EXPERTS": "0.5"}
    ),
}
PAIRS = (
    ("base", "epsilon"),
    ("epsilon", "not_normalised"),
    ("epsilon", "layer_old"),
    ("epsilon", "head_old"),
    ("epsilon", "loud"),
    ("epsilon", "int4"),
    ("epsilon", "lag"),
    ("epsilon", "cold"),
    ("epsilon", "top_p"),
    ("base", "layer_old"),
    ("base", "not_normalised"),
    ("base", "fp8"),
    ("stretched", "epsilon"),
    ("layer_old", "cold"),
    ("layer_old", "int4"),
    ("layer_old", "top_p"),
    ("loud", "lag"),
    ("lag", "hot"),
    ("int4", "hot"),
    ("int4", "lag"),
    ("own_experts", "epsilon"),
    ("own_experts", "cold"),
)
ALL = ALONE | {f"{one}+{other}": ALONE[one].and_also(ALONE[other]) for one, other in PAIRS}
BY_SERVER = sorted(ALL, key=lambda name: json.dumps(ALL[name].config))
CLEAN = {
    "plain": Fault(),
    "compared": Fault(flags=("--router-replay", "compare")),
    "replayed": Fault(flags=("--router-replay", "R3")),
    "half": Fault(flags=("--bf16",)),
    "stages": Fault(flags=("--pipeline-model-parallel-size", 2), processes=2),
}
SEEDS = range(10)


@pytest.fixture(scope="module")
def server(tiny_moe_dir, tmp_path_factory):
    """server(config): the address of a real server of the model; one runs at a time."""
    numbers = count()
    with ExitStack() as opened:
        kept = {}

        def of(config):
            if config not in kept.values():
                opened.close()
                folder = tmp_path_factory.mktemp(f"server{next(numbers)}")
                kept.clear()
                kept[opened.enter_context(server_of(tiny_moe_dir, folder, config))] = config
            [url] = kept
            return url

        yield of


@pytest.fixture
def verdicts(server, tiny_moe_dir, tmp_path):
    """verdicts(fault, *flags): [(line, numbers)] of each ledger that a fault can be in."""
    write_data(tmp_path)

    def made(fault, *flags, door=None):
        def tensors(now, before):
            for changed in fault.tensors:
                now = changed(now, before)
            return now

        spoiled = Spoiled(tmp_path / "spoiled", tensors)

        def passed_on(path, body):
            if path == "/generate" and fault.sampling:
                asked = json.loads(body)
                if asked["sampling_params"]["max_new_tokens"] > 1:  # not to score
                    asked["sampling_params"] |= fault.sampling
                return json.dumps(asked).encode()
            return spoiled(path, body)

        with closing(door or Door(server(fault.config), passed_on)) as door:
            given = [*RUN, "--rollout-weight-dir", tmp_path / "weights", *fault.flags, *flags]
            (tmp_path / "run").mkdir()
            done = launch(
                tmp_path,
                "run",
                tiny_moe_dir,
                door.url,
                SCRIPT,
                *given,
                processes=fault.processes,
                LEDGER=str(tmp_path / "run"),
                **fault.variables,
            )
        assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
        lines = [line for line in done.stdout.splitlines() if "[rollout] ledger of step" in line]
        print(*lines, sep="\n")
        rows = (tmp_path / "run/log/metrics.jsonl").read_text().splitlines()
        steps = [json.loads(row) for row in rows]
        assert len(lines) == len(steps)
        # The first batch has no version before; with a lag, the first two have none that is older.
        late = 2 if "--rollout-max-lag" in fault.flags else 1 if fault.tensors else 0
        return list(zip(lines, steps, strict=True))[late:]

    return made


@long
@pytest.mark.parametrize("name", BY_SERVER)
def test_fault_when_planted_then_it_is_named_and_no_other(name, verdicts):
    fault = ALL[name]
    found, named = verdicts(fault), []
    for line, step in found:
        terms = [term for term, _ in blamed_terms(step)]
        assert bool(terms) == bool(fault.terms) and set(terms) <= set(fault.terms), line
        # Some of the rank's experts, or all, are what it holds.
        causes = {"experts/rank_1" if one.startswith("experts/rank_1") else one for one in causes_of(step)}
        assert causes <= set(fault.causes), line
        if "rest" in terms and fault.causes:
            named.append(causes)
        assert all(words in line for words in fault.words), line
    assert fault.in_how_many(named), [line for line, _ in found]
    assert found and (named or "+" in name or not fault.causes)


class StaleDecoder(Door):
    """A server whose decoding has the weights of the version before: another one, behind the same door."""

    def __init__(self, target, decoder, folder):
        self._main, self._decoder = target, decoder
        self._before = Spoiled(folder, lambda now, before: before)
        super().__init__(target, self._passed_on)

    def _passed_on(self, path, body):
        if path in ("/update_weights_from_disk", "/update_weight_version", "/flush_cache"):
            given = self._before(path, body) if path == "/update_weights_from_disk" else body
            headers = {"Content-Type": "application/json"}
            with urlopen(Request(self._decoder + path, given, headers, method="POST"), timeout=60) as answer:
                answer.read()
        decodes = path == "/generate" and json.loads(body)["sampling_params"]["max_new_tokens"] > 1
        self.target = self._decoder if decodes else self._main
        return body


class KeepsPrefixes(Door):
    """A server that says that it has forgotten its prefixes, and has not."""

    async def _answer(self, request):
        if request.path == "/flush_cache":
            return web.Response(text="Cache flushed.")
        return await super()._answer(request)


def blamed_of(verdicts):
    """[The terms of each verdict] from the second step on, and the lines."""
    late = verdicts[1:]
    return [[term for term, _ in blamed_terms(step)] for _, step in late], [line for line, _ in late]


@long
def test_decoding_when_its_weights_are_old_then_decode_is_blamed(server, verdicts, tiny_moe_dir, tmp_path):
    main = server({})
    with server_of(tiny_moe_dir, tmp_path, {}) as decoder:
        terms, lines = blamed_of(verdicts(Fault(), door=StaleDecoder(main, decoder, tmp_path / "before")))
    assert terms == [["decode"]] * len(lines), lines


@long
def test_prefixes_when_they_are_of_old_weights_then_decode_is_blamed(server, verdicts):
    terms, lines = blamed_of(verdicts(Fault(), door=KeepsPrefixes(server({}))))
    assert terms == [["decode"]] * len(lines), lines


@long
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CLEAN)
def test_run_when_nothing_is_planted_then_nothing_is_blamed(name, seed, verdicts):
    for line, step in verdicts(CLEAN[name], "--seed", 100 + seed):
        assert "nothing is blamed" in line and blamed_terms(step) == [], line
        assert not causes_of(step) and "sampled tokens are" not in line, line
