"""pretrain_any.py, whose ranks write what the ledger finds of each token, and may choose experts wrongly.

Rank R of the last stage writes LEDGER/R.json: of each batch that was measured the terms, D, and whether a
token is valid, in float64. With OTHER_EXPERTS=x Megatron's routers choose by their scores, plus x for the
first expert. With SHIFTED_ROUTES=n each token has the servers' experts of the n-th before.
"""

import functools
import json
import os
import runpy
from pathlib import Path

from megatron_rl_corr.engines.sglang import responses
from megatron_rl_corr.features.ledger import feature
from megatron_rl_corr.moe.replay import ReplayedRouter

found = []


def written(split, metrics):
    def split_log_ratio(trained, passes, prefill, sampled):
        terms = split(trained, passes, prefill, sampled)
        difference = trained.double() - sampled.double()
        found.append({"d": difference.tolist(), **{name: term.tolist() for name, term in terms.items()}})
        return terms

    @functools.wraps(metrics)
    def ledger_metrics(terms, valid, *others):
        found[-1]["valid"] = valid.tolist()
        Path(os.environ["LEDGER"], f"{os.environ['RANK']}.json").write_text(json.dumps(found))
        return metrics(terms, valid, *others)

    return split_log_ratio, ledger_metrics


def choosing_otherwise(get_replay_topk, shift):
    def replaced(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        def compute_topk(scores, topk, **groups):
            shifted = scores.detach().clone()
            shifted[:, 0] += shift
            _, ids = default_compute_topk(shifted, topk, **groups)
            return scores.gather(1, ids), ids

        return get_replay_topk(self, scores, topk, num_groups, group_topk, compute_topk)

    return replaced


def shifted(decode):
    def decoded(*given, **named):
        return decode(*given, **named).roll(int(os.environ["SHIFTED_ROUTES"]), 0)

    return decoded


feature.split_log_ratio, feature.ledger_metrics = written(feature.split_log_ratio, feature.ledger_metrics)
if "OTHER_EXPERTS" in os.environ:
    ReplayedRouter.get_replay_topk = choosing_otherwise(
        ReplayedRouter.get_replay_topk, float(os.environ["OTHER_EXPERTS"])
    )
if "SHIFTED_ROUTES" in os.environ:
    responses.decode = shifted(responses.decode)
folder = Path(__file__).resolve().parents[1] / "matrix"
runpy.run_path(str(folder / "pretrain_any.py"), run_name="__main__")
