"""Old weights and other experts as what the rest looks like: which parts of the model, found by halves, on
passes that are made up.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from megatron_rl_corr.core.ledger_verdict import cause_lines
from megatron_rl_corr.features.ledger.causes import CauseSearch, Divided, Rest
from megatron_rl_corr.features.ledger.parts import (
    ABOUT_ALL,
    experts_of_model,
    layers_of_model,
    name_of_experts,
    name_of_layers,
    part_of,
)
from megatron_rl_corr.features.ledger.suspects import (
    LEAST_FIT_OF_PART,
    LOGIT_SCALE,
    SIZED,
    Suspect,
    without_experts,
)
from megatron_rl_corr.models.shards import LocalParameter

LAYERS = 61
PARTS = layers_of_model(LAYERS)
OTHER = Suspect("norm_epsilon/1e-05", lambda chunks: None, SIZED)


class MadeUp:
    """A trainer whose last step moves log-probs by an effect of each part, and by one that all have."""

    def __init__(self, seed=0, *, tokens=1000, common=0.0, noise=0.0, parts=PARTS):
        self.random = torch.Generator().manual_seed(seed)
        self.tokens, self.noise, self.parts = tokens, noise, parts
        together = self.draw(common)
        self.effect = {part: self.draw(0.01) + together for part in parts}
        self.effect[OTHER.name] = self.draw(0.03)
        self.passes, self.known = [], {}

    def draw(self, size):
        return size * torch.randn(self.tokens, generator=self.random, dtype=torch.float64)

    def moved(self, names):
        return sum((self.effect[name] for name in names), torch.zeros(self.tokens, dtype=torch.float64))

    def log_probs(self, suspects, rounds_otherwise=False):
        """Each pass has its own rounding."""
        names = [part for one in suspects for part in ([one.name] if one is OTHER else one.changed.args[0])]
        self.passes.append([one.name for one in suspects])
        return -1 + self.moved(names) + self.draw(self.noise)

    def causes(self, e, noise=1e-5):
        suspects = [OTHER, LOGIT_SCALE]
        old = Divided(
            self.parts,
            lambda parts, chunks: None,
            lambda some: f"weights/{name_of_layers(some, self.parts, 'previous')}",
        )
        search = CauseSearch(suspects, self.log_probs, noise, 1, [old])
        entropy = torch.rand(self.tokens, generator=self.random, dtype=torch.float64)
        rest = Rest(e, torch.ones(self.tokens, dtype=torch.bool), entropy - 0.5)
        return list(search.causes(rest)) if search.needs_causes(rest) else []

    def of_old(self, *parts):
        """e of a server that has these parts of the version before."""
        return -self.moved(parts) + self.draw(self.noise)


@pytest.mark.parametrize("layer", [0, 3, 17, 60])
@pytest.mark.parametrize("common", [0.0, 0.01])
def test_one_stale_layer_of_61_then_it_is_named_after_2_log2_passes(one_rank, layer, common):
    made_up = MadeUp(common=common)
    [cause] = made_up.causes(made_up.of_old(str(layer)))
    assert (cause.name, cause.share) == (f"weights/layer_{layer}", pytest.approx(1))
    assert cause.times == pytest.approx(1)
    # The base, the other suspect, all parts, three, two halves of each level, and once two more by chance.
    assert len(made_up.passes) <= 8 + 2 * math.ceil(math.log2(LAYERS))


def test_all_of_the_version_before_then_one_pass_more(one_rank):
    made_up = MadeUp()
    [cause] = made_up.causes(made_up.of_old(*PARTS))
    assert (cause.name, cause.share, cause.times) == ("weights/previous", pytest.approx(1), pytest.approx(1))
    assert len(made_up.passes) == 3


def test_weights_three_versions_old_then_all_of_them_and_three_times_as_much(one_rank):
    made_up = MadeUp(parts=layers_of_model(8))
    [cause] = made_up.causes(3 * made_up.of_old(*made_up.parts) + made_up.draw(0.005))
    assert cause.name == "weights/previous" and cause.times == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize(
    ("stale", "name"),
    [
        (["embedding"], "embedding"),
        (["output"], "output"),
        ([*map(str, range(31))], "layers_0-30"),
        ([*map(str, range(10, 21))], "layers_10-20"),
        (["5", "44"], "layer_5+layer_44"),
        (["embedding", "7"], "embedding+layer_7"),
    ],
)
def test_several_stale_parts_then_all_of_them(one_rank, stale, name):
    made_up = MadeUp(tokens=4000)
    [cause] = made_up.causes(made_up.of_old(*stale))
    assert (cause.name, cause.share) == (f"weights/{name}", pytest.approx(1))
    assert len(made_up.passes) < 40


def test_stale_layer_of_a_server_that_computes_otherwise_too_then_both(one_rank):
    made_up = MadeUp()
    e = made_up.of_old("17") - made_up.effect[OTHER.name]
    found = {one.name: one.share for one in made_up.causes(e)}
    assert set(found) == {OTHER.name, "weights/layer_17"} and sum(found.values()) == pytest.approx(1)


def test_other_cause_that_explains_all_then_no_old_weights_are_tried(one_rank):
    made_up = MadeUp()
    [cause] = made_up.causes(-made_up.effect[OTHER.name])
    assert cause.name == OTHER.name and len(made_up.passes) == 2


@pytest.mark.parametrize("seed", range(10))
def test_stale_layer_in_16_bits_then_it_is_named(one_rank, seed):
    """Rounding of each pass is half as large as the layer's effect."""
    made_up = MadeUp(seed, noise=0.005)
    [cause] = made_up.causes(made_up.of_old("17"), noise=0.004)
    assert cause.name == "weights/layer_17" and cause.share > 0.3


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("heavy", [False, True])
def test_rest_that_no_weights_make_then_none_is_blamed(one_rank, seed, heavy):
    """Each pass has its own rounding; e is as large as it, or has a few large tokens."""
    made_up = MadeUp(seed, noise=0.01, tokens=300)
    e = made_up.draw(0.03)
    assert made_up.causes(e * e.abs() * 1e3 if heavy else e, noise=1e-3) == []


@pytest.mark.parametrize("seed", range(20))
def test_weights_that_have_not_changed_then_none_is_blamed(one_rank, seed):
    made_up = MadeUp(seed, noise=0.01)
    made_up.effect |= {part: 0 * made_up.effect[part] for part in PARTS}
    assert made_up.causes(made_up.draw(0.02), noise=1e-3) == []


@pytest.mark.parametrize("seed", range(10))
def test_opposite_of_the_last_step_then_none_is_blamed(one_rank, seed):
    made_up = MadeUp(seed)
    assert made_up.causes(-made_up.of_old("17")) == []


def experts_search(made_up, ranks):
    parts = experts_of_model(128)
    divided = Divided(
        parts,
        lambda parts, chunks: None,
        lambda some: name_of_experts(some, parts, ranks),
        ABOUT_ALL,
        LEAST_FIT_OF_PART,
    )
    return CauseSearch([OTHER, LOGIT_SCALE], made_up.log_probs, 1e-5, 1, [divided])


@pytest.mark.parametrize("seed", range(10))
def test_very_change_that_leaves_most_then_it_is_not_named(one_rank, seed):
    """e has 0.4 of its square along another epsilon, and the rest is not known."""
    made_up = MadeUp(seed)
    other = -made_up.effect[OTHER.name]
    assert made_up.causes(other + made_up.draw(1.22 * other.std().item())) == []
    [cause] = made_up.causes(other + made_up.draw(0.5 * other.std().item()))
    assert cause.name == OTHER.name


@pytest.mark.parametrize(
    ("exchanged", "ranks", "name"),
    [
        (range(16, 32), 8, "experts/rank_1"),
        (range(16, 32), 1, "experts/experts_16-31"),
        ([77], 8, "experts/rank_4/expert_77"),
        ([20, 21, 26], 8, "experts/rank_1/experts_20-21+expert_26"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_experts_in_each_others_places_then_these_are_named(one_rank, exchanged, ranks, name, seed):
    """e is what they lack, and as much of something unrelated."""
    made_up = MadeUp(seed, tokens=6000, parts=experts_of_model(128))
    lacks = made_up.of_old(*map(str, exchanged))
    rest = Rest(
        lacks + made_up.draw(lacks.std().item()), torch.ones(made_up.tokens, dtype=torch.bool), lacks * 0
    )
    [cause] = experts_search(made_up, ranks).causes(rest)
    assert cause.name == name and cause.share == pytest.approx(0.5, abs=0.05)
    assert len(made_up.passes) < 50


@pytest.mark.parametrize("seed", range(20))
def test_rest_of_all_experts_or_of_none_then_none_is_named(one_rank, seed):
    made_up = MadeUp(seed, tokens=500, parts=experts_of_model(128))
    e = made_up.draw(0.1) if seed % 2 else made_up.of_old(*made_up.parts) + made_up.draw(0.1)
    rest = Rest(e, torch.ones(made_up.tokens, dtype=torch.bool), 0 * e)
    assert experts_search(made_up, 8).causes(rest) == ()


def test_experts_left_out_then_their_weights_are_0_and_the_others_stay():
    class TopKRouter(torch.nn.Module):
        gating = None

        def forward(self, hidden):
            return hidden.clone(), hidden > 0

    router, probs = TopKRouter(), torch.rand(5, 8)
    with without_experts(("1", "6"), [torch.nn.Sequential(router)]):
        made, routes = router(probs)
    assert torch.equal(made[:, [1, 6]], torch.zeros(5, 2)) and torch.equal(routes, probs > 0)
    assert torch.equal(made[:, [0, 2, 3, 4, 5, 7]], probs[:, [0, 2, 3, 4, 5, 7]])
    assert torch.equal(router(probs)[0], probs)


@pytest.mark.parametrize(
    ("name", "offset", "hybrid", "part"),
    [
        ("embedding.word_embeddings.weight", 0, False, "embedding"),
        ("decoder.layers.1.mlp.router.weight", 30, False, "31"),
        ("decoder.layers.3.mlp.experts.linear_fc1.weight2", 4, True, "3"),
        ("decoder.final_layernorm.weight", 30, False, "output"),
        ("mtp.layers.0.eh_proj.weight", 0, False, None),
    ],
)
def test_part_of_a_parameter_then_its_number_in_the_whole_model(name, offset, hybrid, part):
    rules = SimpleNamespace(find=lambda name: SimpleNamespace())
    parameter = LocalParameter(torch.zeros(1), name, offset, 4, rules, hybrid)
    object.__setattr__(parameter, "rule", lambda rank: SimpleNamespace(is_copy=False))
    assert part_of(parameter) == part


def test_words_then_the_parts_by_their_names():
    def line(name):
        found = {f"ledger/as/weights/{name}/share": 1.0, f"ledger/as/weights/{name}/times": 1.0}
        return cause_lines(found)[0].removeprefix("100 % of the rest is as if servers had the ")

    assert line("previous") == "weights of the version before"
    assert line("layer_3") == "weights of the version before in layer 3"
    assert line("embedding+layers_3-7") == "weights of the version before in the embedding and layers 3 to 7"
    assert (
        name_of_layers(("embedding", "3", "4", "9", "output"), PARTS, "all")
        == "embedding+layers_3-4+layer_9+output"
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rank_1", "the experts of expert-parallel rank 1"),
        ("rank_12/expert_77", "expert 77 of expert-parallel rank 12"),
        ("experts_4-6+expert_9", "experts 4 to 6 and expert 9"),
    ],
)
def test_words_of_experts_then_with_their_rank(name, words):
    found = {f"ledger/as/experts/{name}/share": 0.5, f"ledger/as/experts/{name}/times": 1.3}
    assert cause_lines(found) == [f"50 % of the rest is as if servers had others in the places of {words}"]


def test_logits_of_samples_that_no_server_can_score_then_a_temperature_may_be_it_too():
    found = {"ledger/as/logit_scale/share": 0.9, "ledger/as/logit_scale/times": 0.8}
    line = "90 % of the rest is as if servers had logits times 0.8"
    assert cause_lines(found | {"ledger/decode/known": 0.9}) == [line]
    other = ", or sampled at a temperature of 1.2: their weights have moved on"
    assert cause_lines(found | {"ledger/decode/known": 0.2}) == [line + other]
    assert cause_lines(found) == [line + other.removesuffix(": their weights have moved on")]
