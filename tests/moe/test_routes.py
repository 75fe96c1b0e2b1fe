"""Routed experts in a step that asks nothing of them, and what is counted of each expert's tokens."""

import json

import pytest
import torch

from megatron_rl_corr.moe.routes import Routes, make_routes
from megatron_rl_corr.moe.statistics import COLUMNS, FILE_NAME, ExpertLog, means, summary, token_values


def test_routes_when_nothing_is_asked_of_the_routers_then_every_call_of_a_step_does_nothing():
    routes = make_routes("off", [], None, num_layers=4)
    assert type(routes) is Routes and routes.server_shape is None and routes.needs_scoring == ()
    nothing = torch.zeros(0, dtype=torch.int64)
    routes.scatter(None, [0])
    routes.begin_batch(nothing, nothing, samples=0, compare_in_training=True)
    with routes.scoring(), routes.training():
        routes.before_forward(torch.nn.Linear(1, 1), nothing[:, None])
    routes.share_recorded()
    assert routes.measure_agreement(1, str) == {} and routes.measure_disagreement() is None
    assert routes.write_statistics(1, None) == {}


def test_token_values_when_a_token_is_not_valid_then_all_are_0_whatever_its_log_ratio_is():
    valid, mask = torch.tensor([True, True, False]), torch.tensor([True, False, True])
    values = token_values(valid, torch.tensor([-0.5, 0.25, torch.nan]), torch.tensor([2.0, 1.0, 9.0]), mask)
    assert values.tolist() == [[1.0, 0.5, 2.0, 0.0], [1.0, 0.25, 1.0, 1.0], [0.0] * 4]


def test_tables_when_one_expert_has_no_token_then_its_means_are_null_in_the_file_and_it_is_counted(tmp_path):
    # Of three layers the second alone has two experts: 4 tokens with |D| 0.5 in all, and none.
    table = torch.zeros(3, 2, 4, dtype=torch.float64)
    table[1, 0] = torch.tensor([4.0, 0.5, 6.0, 1.0])
    ExpertLog(str(tmp_path), lambda: None).write(7, (1,), means(table))
    written = json.loads((tmp_path / FILE_NAME).read_text())
    assert written == {
        "step": 7,
        "layers": [1],
        "tokens": [[4.0, 0.0]],
        "log_ratio_abs_mean": [[0.125, None]],
        "weight_mean": [[1.5, None]],
        "rejected_fraction": [[0.25, None]],
    }
    assert list(written)[2:] == list(COLUMNS)
    curves = {name: metric.value() for name, metric in summary(table, (1,)).items()}
    assert curves == pytest.approx(
        {  # a load of 4 tokens, where the mean is 2
            "experts/load_max": 2.0,
            "experts/log_ratio_abs_mean_max": 0.125,
            "experts/without_tokens": 1.0,
        }
    )
