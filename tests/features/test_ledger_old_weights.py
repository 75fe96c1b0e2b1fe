"""Old weights as what the rest looks like: which parts of the model, found by halves, on passes that are made
up.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from megatron_rl_corr.core.ledger_verdict import cause_lines
from megatron_rl_corr.features.ledger.causes import CauseSearch, Rest
from megatron_rl_corr.features.ledger.old_weights import name_of, part_of, parts_of_model
from megatron_rl_corr.features.ledger.suspects import LOGIT_SCALE, SIZED, Suspect
from megatron_rl_corr.models.shards import LocalParameter

LAYERS = 61
PARTS = parts_of_model(LAYERS)
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
        old = SimpleNamespace(changed=lambda parts, chunks: None)
        suspects = [OTHER, LOGIT_SCALE]
        search = CauseSearch(suspects, self.log_probs, noise, 1, parts=self.parts, old=old)
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
    made_up = MadeUp(parts=parts_of_model(8))
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
    assert name_of(("embedding", "3", "4", "9", "output"), PARTS) == "embedding+layers_3-4+layer_9+output"
