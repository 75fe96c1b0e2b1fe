"""pretrain_any.py, whose ranks write what the ledger finds of each token.

Rank R of the last stage writes LEDGER/R.json: a list of the batches that were measured, each the terms, D and
whether a token is valid, in float64.
"""

import functools
import json
import os
import runpy
from pathlib import Path

from megatron_rl_corr.features.ledger import feature

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


feature.split_log_ratio, feature.ledger_metrics = written(feature.split_log_ratio, feature.ledger_metrics)
folder = Path(__file__).resolve().parents[1] / "matrix"
runpy.run_path(str(folder / "pretrain_any.py"), run_name="__main__")
