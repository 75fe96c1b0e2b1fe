"""Two policies: the current one is corrected against pi_rollout in the loss, one microbatch at a time."""

import math
from pathlib import Path

import pytest
import torch

from tests.megatron_forks import run_megatron

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict:
    """What bypass_worker.py saved: it imports Megatron, which this process must not."""
    path = tmp_path_factory.mktemp("bypass") / "bypass.pt"
    done = run_megatron(HERE / "bypass_worker.py", path)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(path)


def naive(made: dict, loss: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Loss, gradient and kept fraction, token by token in float64."""
    logits = made["logits"].double().requires_grad_()
    logprobs = torch.log_softmax(logits, -1)
    total, valid, kept = torch.zeros((), dtype=torch.float64), 0, 0
    for row, label_row in enumerate(made["labels"].tolist()):
        tokens = [
            t for t in range(len(label_row)) if made["mask"][row, t] and made["rollout"][row, t].isfinite()
        ]
        valid += len(tokens)
        now = [logprobs[row, t, label_row[t]] for t in tokens]
        d = [float(p.detach()) - float(made["rollout"][row, t]) for p, t in zip(now, tokens, strict=True)]
        mean, advantage = sum(d) / len(d), float(made["rewards"][row])
        if not 0.5 <= math.exp(mean) <= 2.0 or (loss == "reinforce" and -mean > 0.1 and advantage < 0):
            continue
        kept += len(tokens)
        for p, t, log_ratio in zip(now, tokens, d, strict=True):
            if loss == "reinforce":
                total = total - min(math.exp(log_ratio), 1.5) * advantage * p
                continue
            ratio = (p - made["rollout"][row, t].double()).exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            total = total - (
                surrogate if advantage > 0 else torch.maximum(surrogate, torch.tensor(3.0 * advantage))
            )
    (total / valid).backward()
    return total.detach() / valid, logits.grad, kept / int(made["mask"].sum())


def naive_by_turns(made: dict) -> tuple[torch.Tensor, torch.Tensor, float]:
    """As `naive`, with one decision and one weight a turn."""
    logits = made["logits"].double().requires_grad_()
    now = torch.log_softmax(logits, -1).gather(2, made["labels"][..., None])[..., 0]
    usable = made["mask"] & made["rollout"].isfinite()
    total, kept = torch.zeros((), dtype=torch.float64), 0
    for row in range(len(now)):
        for turn in range(3):
            tokens = [t for t in range(now.shape[1]) if usable[row, t] and made["turn_ids"][row, t] == turn]
            d = [float(now[row, t].detach()) - float(made["rollout"][row, t]) for t in tokens]
            if not tokens or not 0.8 <= math.exp(sum(d) / len(d)) <= 1.25:
                continue
            kept += len(tokens)
            weight = min(math.exp(sum(d)), 1.2)
            total = total - sum(weight * float(made["rewards"][row]) * now[row, t] for t in tokens)
    (total / usable.sum()).backward()
    return total.detach() / usable.sum(), logits.grad, kept / int(made["mask"].sum())


def test_bypass_when_turns_decide_then_the_naive_loss_and_gradient_by_turns(made):
    total, gradient, kept_fraction = naive_by_turns(made)
    result = made["turns"]
    assert 0.2 < kept_fraction < 0.8
    assert result["loss"].item() == pytest.approx(total.item(), rel=1e-5)
    torch.testing.assert_close(result["grad"].double(), gradient, rtol=1e-4, atol=1e-7)
    assert result["kept_fraction"] == pytest.approx(kept_fraction)


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce", "turns"])
def test_bypass_when_the_server_gave_no_log_prob_then_the_token_is_counted_and_is_no_padding(made, loss):
    mask, result = made["mask"], made[loss]
    assert mask[0, 0] and made["rollout"][mask].isnan().sum() == 1
    assert result["nonfinite_tokens"] == 1 and result["valid_tokens"] == mask.sum() - 1
    assert result["padded_tokens"] == (~mask).sum()


@pytest.mark.parametrize(("loss", "rejected_rows"), [("ppo_clip", [1]), ("reinforce", [1, 2])])
def test_bypass_when_rows_are_rejected_in_the_loss_then_the_naive_loss_and_gradient(
    made, loss, rejected_rows
):
    total, gradient, kept_fraction = naive(made, loss)
    result = made[loss]
    assert result["loss"].item() == pytest.approx(total.item(), rel=1e-5)
    torch.testing.assert_close(result["grad"].double(), gradient, rtol=1e-4, atol=1e-7)
    assert [row for row in range(4) if not result["grad"][row].any()] == rejected_rows
    assert result["kept_fraction"] == pytest.approx(kept_fraction)
    assert math.isfinite(result["entropy"])


@pytest.mark.parametrize(("loss", "kept_rows"), [("ppo_clip", [0, 2, 3]), ("reinforce", [0, 3])])
def test_step_scale_when_rows_are_rejected_in_the_loss_then_that_of_the_rows_that_are_left(
    made, loss, kept_rows
):
    now = torch.log_softmax(made["logits"].double(), -1).gather(2, made["labels"][..., None])[..., 0]
    d = torch.where(made["mask"], now - made["rollout"], 0.0).nan_to_num(0.0)
    products = d.sum(1).exp()

    def ess(of):
        return (of.sum().square() / of.square().sum() / len(of)).item()

    assert made[loss]["decision/ess"] == pytest.approx(ess(products[kept_rows]), rel=1e-5)
    assert made[loss]["ess_sequences"] == pytest.approx(ess(products), rel=1e-5)
    assert made[loss]["ess_sequences"] < 0.5 < made[loss]["decision/ess"]  # row 1 outweighs the others
    assert "decision/ess" not in made["vespo"]  # nothing rejects there: the ESS of all is that of the loss


def naive_without_rejected_rows(made: dict, name: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """As `naive`, for vespo, vaco and dro: loss, gradient and kept fraction."""
    logits = made["logits"].double().requires_grad_()
    now = torch.log_softmax(logits, -1).gather(2, made["labels"][..., None])[..., 0]
    usable = made["mask"] & made["rollout"].isfinite()
    total, kept = torch.zeros((), dtype=torch.float64), 0
    for row in range(len(now)):
        tokens, advantage = [t for t in range(now.shape[1]) if usable[row, t]], float(made["rewards"][row])
        d = {t: float(now[row, t].detach()) - float(made["rollout"][row, t]) for t in tokens}
        product = math.exp(sum(d.values()))
        k, rate = (2, 3) if advantage >= 0 else (3, 2)
        far = sum(abs(math.exp(x) - 1) for x in d.values()) / len(d) > 0.3
        for t in tokens:
            if name == "vaco" and far and advantage * d[t] > 0:
                continue
            kept += 1
            weight = product**k * math.exp(rate * (1 - product)) if name == "vespo" else 1.0
            total = total - weight * advantage * now[row, t]
            if name == "dro":
                total = total + 0.1 * (now[row, t] - made["rollout"][row, t].double()) ** 2
    (total / usable.sum()).backward()
    return total.detach() / usable.sum(), logits.grad, kept / int(made["mask"].sum())


@pytest.mark.parametrize("name", ["vespo", "vaco", "dro"])
def test_bypass_when_gamma_weighs_or_tokens_are_dropped_or_pulled_then_the_naive_loss_and_gradient(
    made, name
):
    total, gradient, kept_fraction = naive_without_rejected_rows(made, name)
    result = made[name]
    assert result["loss"].item() == pytest.approx(total.item(), rel=1e-5)
    torch.testing.assert_close(result["grad"].double(), gradient, rtol=1e-4, atol=1e-7)
    assert result["kept_fraction"] == pytest.approx(kept_fraction) and result["kept_sequence_fraction"] == 1
    tokens = int(made["mask"].sum())  # one of them has no finite log-prob
    assert kept_fraction < (tokens - 1) / tokens if name == "vaco" else kept_fraction == (tokens - 1) / tokens


def test_update_when_every_advantage_is_0_then_dro_makes_one_as_it_pulls_to_the_servers_policy(made):
    result = made["dro without rewards"]
    assert result["decision/kept"] == result["decision/pulling"] == made["mask"].sum() - 1
    assert result["grad"].any()


@pytest.mark.parametrize("loss, pulls", [("own", True), ("gate", False)])
def test_update_when_every_advantage_is_0_then_a_loss_of_the_users_makes_one_only_if_it_has_a_gradient(
    made, loss, pulls
):
    assert made[loss]["decision/kept"] == made["mask"].sum() - 1  # a token without a log-prob of the server
    assert made[loss]["decision/pulling"] == (made[loss]["decision/kept"] if pulls else 0)
    assert bool(made[loss]["grad"].any()) == pulls


def test_update_when_every_weight_is_0_then_score_centering_makes_one_as_it_acts_on_these_tokens_too(made):
    result, mask = made["centered"], made["mask"].clone()
    mask[0, 0] = False  # a token without a log-prob of the server
    assert result["loss/policy"] == 0
    assert result["decision/kept"] == result["decision/pulling"] == mask.sum()
    leaf = made["logits"].double().requires_grad_()
    log_p = leaf.log_softmax(-1)[..., :2]
    # m = p of both ids, and alpha 0: the sum of p log p, p constant.
    term = (log_p.detach().exp() * log_p).sum(-1) * made["rewards"].double()[:, None]
    (expected,) = torch.autograd.grad(term[mask].sum() / mask.sum(), leaf)
    torch.testing.assert_close(result["grad"].double(), expected, rtol=1e-4, atol=1e-7)
