"""`megatron-rl-corr diagnose`: the ledgers of a run, pooled by tokens."""

import math

import pytest

from megatron_rl_corr import cli
from megatron_rl_corr.core.ledger_places import DISAGREEMENT, pooled_chance
from megatron_rl_corr.observability.metrics_file import MetricsFile


def ledger(step, tokens, mean_abs, **shares):
    found = {"step": step, "ledger/tokens": tokens, "ledger/mean_abs": mean_abs, "ledger/noise": 0.015}
    found["ledger/mean_square"] = mean_abs**2
    for name, share in shares.items():
        found |= {f"ledger/{name}/share": share, f"ledger/{name}/mean_abs": share * mean_abs}
    return found


def test_diagnose_when_ledgers_differ_then_shares_are_weighed_by_their_squares(tmp_path, capsys):
    # Sums of D^2: 100 * 0.0001 = 0.01 and 300 * 0.0081 = 2.43. Staleness 0.8 * 2.43 / 2.44 = 0.797; mean |D|
    # (0.01 * 100 + 0.09 * 300) / 400 = 0.07, of staleness 0.8 * 0.09 * 300 / 400 = 0.054.
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(ledger(1, 100, 0.01, staleness=0.0, rest=1.0))
    file.write({"step": 2})
    file.write(ledger(3, 300, 0.09, staleness=0.8, rest=0.2))
    assert cli.main(["diagnose", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 ledgers, of steps 1 to 3"
    assert [line.split()[:7] for line in lines[1:4] if "staleness" in line] == [
        ["staleness", "79.7", "%", "0.0", "%", "80.0", "%"]
    ]
    assert "without a part here, or in the rest: routing, head, rounding, decode" in lines
    assert lines[-2].startswith("all: mismatch: 80 % staleness (mean size 0.054)")
    assert lines[-1].startswith("step 3: mismatch: 80 % staleness")


def test_diagnose_when_the_rest_has_causes_then_they_are_weighed_by_its_square(tmp_path, capsys):
    # Sums of e^2: 100 * 0.01 = 1 and 300 * 0.01 = 3. The base has 1 * 1 of 4; the scale 0.5 * 3 of 4.
    file = MetricsFile(tmp_path / "metrics.jsonl")
    base, scale = "ledger/as/rotary_base/1e+06", "ledger/as/logit_scale"
    first = ledger(1, 100, 0.1, rest=1.0) | {f"{base}/share": 1.0, f"{base}/times": 1.0}
    last = ledger(2, 300, 0.1, rest=1.0) | {f"{scale}/share": 0.5, f"{scale}/times": 0.9}
    for row in (first, last, ledger(3, 0, 0.1, rest=1.0)):
        file.write(row | {"ledger/as_square": 0.01, "ledger/decode/known": 1.0})
    assert cli.main(["diagnose", str(tmp_path)]) == 0
    whole, step = capsys.readouterr().out.splitlines()[-2:]
    assert "38 % of the rest is as if servers had logits times 0.9; 25 % of the rest" in whole
    assert "25 % of the rest is as if servers had a rotary base of 1e+06" in whole
    assert "50 % of the rest is as if servers had logits times 0.9" in step and "rotary" not in step


def test_diagnose_when_a_server_is_named_then_its_share_is_weighed_by_the_square_of_the_rest(
    tmp_path, capsys
):
    # Sums of e^2: 1 and 3. The server has 1 * 0.8 + 3 * 1 = 3.8 of 4.
    file = MetricsFile(tmp_path / "metrics.jsonl")
    at, as_ = "ledger/at/server", "ledger/as/weights/layer_3"
    for step, (tokens, share, chance) in enumerate([(100, 0.8, 1e-6), (300, 1.0, 1e-5)], start=1):
        place = {f"{at}/2/share": share, f"{at}/2/excess": 9.0, f"{at}/2/chance": chance}
        place |= {f"{at}/1/share": 1 - share, f"{at}/1/excess": 0.1, f"{at}/1/chance": 1.0}
        cause = {
            f"{as_}/share": share,
            f"{as_}/times": 1.0,
            "ledger/as_servers": 1.0,
            "ledger/as_square": 0.01,
        }
        file.write(ledger(step, tokens, 0.1, rest=1.0) | place | cause | {DISAGREEMENT + "003": 0.3})
    assert cli.main(["diagnose", str(tmp_path)]) == 0
    whole, step = capsys.readouterr().out.splitlines()[-2:]
    assert "95 % of the rest is of samples of server 2 of 2;" in whole and "100 % of the rest" in step
    old = "95 % of the rest is as if that server had the weights of the version before in layer 3"
    assert (
        old in whole and "servers choose other experts from layer 3 on (0 % of tokens before, 30 %" in whole
    )


def test_diagnose_when_a_server_was_named_in_one_ledger_alone_then_causes_are_of_servers(tmp_path, capsys):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    cause = {"ledger/as/weights/previous/share": 1.0, "ledger/as/weights/previous/times": 1.0}
    cause["ledger/as_square"] = 0.01
    file.write(ledger(1, 100, 0.1, rest=1.0) | cause | {"ledger/as_servers": 1.0})
    file.write(ledger(2, 100, 0.1, rest=1.0) | cause)
    assert cli.main(["diagnose", str(tmp_path)]) == 0
    whole, _ = capsys.readouterr().out.splitlines()[-2:]
    assert "100 % of the rest is as if servers had the weights of the version before" in whole


def test_diagnose_when_no_step_has_a_ledger_then_the_flag_is_named(tmp_path, capsys):
    MetricsFile(tmp_path / "metrics.jsonl").write({"step": 1})
    assert cli.main(["diagnose", str(tmp_path)]) == 2
    assert "--rollout-ledger-interval" in capsys.readouterr().err


def test_diagnose_when_servers_scored_some_ledgers_alone_then_what_these_say_is_not_diluted(tmp_path, capsys):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    hot = {"ledger/decode/as_temperature": 1.3, "ledger/decode/as_temperature_share": 0.95}
    far = {"ledger/dist/tv_least": 5e-2, "ledger/dist/label_mean_abs": 0.01, "ledger/dist/by_id/17": 5e-2}
    cold = dict.fromkeys((*hot, *far), float("nan"))
    for step in range(1, 5):
        scored = step == 2
        row = ledger(step, 100, 0.1, decode=1.0 if scored else 0.0, rest=0.0 if scored else 1.0)
        file.write(row | (hot | far if scored else cold) | {"ledger/decode/known": float(scored)})
    assert cli.main(["diagnose", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "the decoding looks like a sampling temperature of about 1.3, not 1" in lines[-2]
    assert lines[-1].endswith("rest 100 %, decode -")


def test_diagnose_when_a_term_is_in_some_ledgers_then_in_how_many_is_told(tmp_path, capsys):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(ledger(1, 100, 0.1, routing=0.9, rest=0.1))
    file.write(ledger(2, 100, 0.1, rest=1.0))
    file.write(ledger(3, 100, 0.1, routing=0.9, rest=0.1))
    assert cli.main(["diagnose", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    # Of three, the middle one is in neither half.
    [row] = [line.split() for line in lines if line.startswith("routing")]
    assert row[:11] == ["routing", "(in", "2", "of", "3", "ledgers)", "60.0", "%", "90.0", "%", "90.0"]


def test_diagnose_when_one_ledger_is_of_coarser_numbers_then_the_others_still_speak(tmp_path, capsys):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step, noise in enumerate((0.015, 0.015, 0.15), start=1):
        file.write(ledger(step, 100, 0.1, staleness=1.0) | {"ledger/noise": noise})
    assert cli.main(["diagnose", str(tmp_path)]) == 0
    assert "all: mismatch: 100 % staleness" in capsys.readouterr().out  # 0.1 is above the mean, 0.06


def test_diagnose_when_each_ledger_shows_a_server_a_little_then_all_of_them_name_it(tmp_path, capsys):
    file, at = MetricsFile(tmp_path / "metrics.jsonl"), "ledger/at/server"
    for step in (1, 2, 3):
        place = {f"{at}/2/share": 0.9, f"{at}/2/excess": 9.0, f"{at}/2/chance": 4e-4}
        place |= {f"{at}/1/share": 0.1, f"{at}/1/excess": 0.1, f"{at}/1/chance": 1.0}
        file.write(ledger(step, 100, 0.1, rest=1.0) | place | {"ledger/as_square": 0.01})
    assert cli.main(["diagnose", str(tmp_path)]) == 0
    assert "90 % of the rest is of samples of server 2 of 2" in capsys.readouterr().out.splitlines()[-2]


def test_chance_of_a_place_when_pooled_then_by_hand():
    # Fisher's of 0.01 and 0.02: h = -log(2e-4), P = e^-h (1 + h) = 2e-4 * 9.517; the least is 0.02.
    assert pooled_chance([0.01, 0.02]) == pytest.approx(2 * 2e-4 * (1 - math.log(2e-4)))
    assert pooled_chance([1e-6, 1.0, 1.0, 1.0]) == pytest.approx(2 * 4e-6)
    assert (
        pooled_chance([0.3]) == 0.3 and pooled_chance([1.0] * 5) == 1.0 and pooled_chance([0.0] * 400) == 0.0
    )


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ([], "has no metrics.jsonl: give the folder of --rollout-log-dir"),
        ([{"step": 1, "ledger/tokens": 9, "ledger/mean_square": 1.0}], "no step has a ledger"),
    ],
)
def test_diagnose_when_the_folder_or_its_numbers_are_no_runs_then_told(made, words, tmp_path, capsys):
    for row in made:
        MetricsFile(tmp_path / "metrics.jsonl").write(row)
    assert cli.main(["diagnose", str(tmp_path)]) == 2 and words in capsys.readouterr().err
