"""Corrected steps on real ranks over gloo, in the groups that Megatron makes; saves what each rank exchanged.

collectives_worker.py OUT.json needs `tools.cpu.environment("megatron")`.

Collector, CorrectedStep, loss and groups are those of a training; the model gives random logits, and the
schedule runs each stage by itself, without exchanging activations. So all that is seen is the
correction's own.
"""

import json
import math
import os
import sys
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron.training  # noqa: F401
import torch
import torch._dynamo
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn
from torch.multiprocessing import start_processes

from benchmarks.exchanges import ExchangeCount
from benchmarks.metric_exchanges import WAYS, check_equal
from megatron_rl_corr.config.correction import PRESETS, RejectionRule
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.data.prompt import Prompt
from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.trajectory import Trajectory, VersionSpan
from megatron_rl_corr.mcore import compat, forward_only, step
from megatron_rl_corr.mcore.batch.deal import Rewarded
from megatron_rl_corr.mcore.batch.rollout_batch import BatchShape
from megatron_rl_corr.mcore.batch.server_collector import COUNTED, Collector, SampleSource
from megatron_rl_corr.mcore.forward import LogprobSettings
from megatron_rl_corr.reduce.layout import Layout
from tools.local_server import free_port

LAYOUTS = {
    "tp 2": {"tp": 2},
    "dp 2": {"dp": 2},
    "pp 2": {"pp": 2},
    "tp 2, cp 2": {"tp": 2, "cp": 2},
    "cp 2, dp 2": {"cp": 2, "dp": 2},
    "pp 2, cp 2": {"pp": 2, "cp": 2},
    "dp 4": {"dp": 4},
}
MEAN_RULE = RejectionRule("seq_mean", "ratio", 0.2, 5.0)
"""Wide, as are the others: where all is rejected no loss is computed."""
RULES = (
    MEAN_RULE,
    RejectionRule("token", "ratio", 0.1, 10.0),
    RejectionRule("seq_mean", "k3", upper=10.0),
    RejectionRule("seq_max", "k2", upper=50.0),
)
WEIGHTS = PRESETS["decoupled_token_is"]
CONFIGS = {
    "token weights": WEIGHTS,
    "token weights, 1 rule": replace(WEIGHTS, rollout_rs=RULES[:1]),
    "token weights, 4 rules": replace(WEIGHTS, rollout_rs=RULES),
    "M2PO": PRESETS["m2po"],
    "GSPO, means over sequences": replace(WEIGHTS, loss="gspo", loss_aggregation="seq-mean-token-mean"),
    "two policies, 1 rule": replace(PRESETS["bypass_ppo_clip"], rollout_rs=RULES[:1]),
}
VOCAB, GROUP_SIZE = 32, 2


@dataclass(frozen=True)
class Case:
    """What a replica has in one step."""

    config: str
    sequences: int = 4
    length: int = 16
    microbatches: int = 1


WAYS_CASE = Case("token weights, 4 rules")
"""The step whose metrics are brought together in every way."""


def cases() -> Iterator[Case]:
    for config in CONFIGS:
        base = Case(config)
        yield from (base, replace(base, microbatches=4), replace(base, length=64))
        yield from (replace(base, sequences=16), replace(base, sequences=16, length=64, microbatches=4))


class SyntheticCollector(Collector):
    """Invents what the servers would answer; the exchange is the collector's."""

    def _numbered(self, taken: None, first: int) -> list[Rewarded]:
        generator = torch.Generator().manual_seed(first)
        return [
            Rewarded(self._sample(first + number // GROUP_SIZE, generator), float(reward))
            for number, reward in enumerate(torch.rand(self._num_samples, generator=generator))
        ]

    def _sample(self, prompt: int, generator: torch.Generator) -> Trajectory:
        """A prompt of one token, and a response that fills its row."""
        ids = torch.randint(0, VOCAB, (self._shape.seq_length + 1,), generator=generator)
        return Trajectory(
            prompt_index=prompt,
            sample_index=0,
            prompt_ids=ids[:1],
            output_ids=ids[1:],
            rollout_logprobs=-3.0 - torch.rand(self._shape.seq_length, generator=generator),
            finish_reason="stop",
            weight_versions=(VersionSpan("0", 0, self._shape.seq_length),),
            cached_tokens=0,
            server="",
        )

    def _count(self, taken: None, version: int) -> list[float]:
        return [1.0] * len(COUNTED)


def answered(asking: Coroutine) -> Future:
    """Stands for a loop's `submit`: there is nothing to wait for."""
    asking.close()
    future = Future()
    future.set_result(SimpleNamespace(groups=[], aside=[]))
    return future


class RandomLogits(nn.Module):
    ddp_config = SimpleNamespace(overlap_param_gather=False)
    config = SimpleNamespace(num_moe_experts=None, mtp_num_layers=None)

    def __init__(self, columns: int):
        super().__init__()
        self.columns = columns

    def forward(self, tokens, position_ids, attention_mask):
        return torch.randn(*tokens.shape, self.columns, requires_grad=torch.is_grad_enabled())


class NoOptimizer:
    def step(self) -> tuple:
        return True, None, None


def schedule(*, forward_step_func, data_iterator, model, num_microbatches, forward_only, **_) -> list:
    """Megatron's schedule of a stage that has its inputs already."""
    results = []
    for _ in range(num_microbatches):
        logits, loss_func = forward_step_func(data_iterator, model[0])
        if not parallel_state.is_pipeline_last_stage():
            continue
        results.append(loss_func(logits, non_loss_data=forward_only))
        if not forward_only:
            results[-1][0].backward()
    return results


def run(case: Case, layout: Layout, names: dict[str, str]) -> dict:
    """One step: its exchanges, and those of each other way to bring its metrics together."""
    model, optimizer = [RandomLogits(VOCAB // layout.tp_group.size())], NoOptimizer()
    shape = BatchShape(
        global_batch_size=case.sequences * layout.dp_size,
        group_size=GROUP_SIZE,
        micro_batch_size=case.sequences // case.microbatches,
        seq_length=case.length,
    )
    collector = SyntheticCollector(
        RunConfig(
            urls=("http://server:1",),
            hf_checkpoint="model",
            prompts=("p.jsonl",),
            reward_function=("length",),
            group_size=GROUP_SIZE,
            max_new_tokens=1,
        ),
        layout,
        shape,
        SampleSource(
            client=SimpleNamespace(
                counts=lambda: {"tokens": 0},
                vocab_size=VOCAB,
                check_sampling=print,
                fleet=SimpleNamespace(engines={"sglang": None}),
            ),
            loop=SimpleNamespace(submit=answered),
            rewards=SimpleNamespace(check_labels=print),
            prompts=PromptDataset([Prompt(0, [0])]),
        ),
        batches=(0, 1),
    )
    corrected = step.CorrectedStep(
        config=CONFIGS[case.config],
        layout=layout,
        collector=collector,
        push=lambda version: {},
        logprob_settings=LogprobSettings(layout.tp_group, 1.0, VOCAB),
        report=lambda numbers: None,
        shape=shape,
    )
    metrics = {}

    def gather_and_keep(given: dict, group: dist.ProcessGroup) -> dict[str, float]:
        metrics.update(given)
        return gather(given, group)

    def train_step(forward_step, iterator, microbatches: int) -> tuple:
        schedule(
            forward_step_func=forward_step,
            data_iterator=iterator,
            model=model,
            num_microbatches=microbatches,
            forward_only=False,
        )
        return {}, int(not optimizer.step()[0]), False, False, 0, None, None, 0

    gather, step.all_reduce_metrics = step.all_reduce_metrics, gather_and_keep
    with ExchangeCount(names) as count:
        result = corrected.run(train_step, 0, model, optimizer, per_token=False)
    step.all_reduce_metrics = gather
    if compat.was_skipped(result):
        raise SystemExit(f"{case}: everything was rejected, so no loss was seen")
    found = {"case": asdict(case), "exchanges": [asdict(one) for one in count.seen], "ways": {}}
    if metrics and case == WAYS_CASE:
        expected = gather(metrics, layout.dp_cp_group)
        for name, way in WAYS.items():
            with ExchangeCount(names) as count:
                numbers = way(metrics, layout.dp_cp_group)
            check_equal(name, numbers, expected)
            found["ways"][name] = [asdict(one) for one in count.seen]
    return found | {"metrics": len(metrics), "values": sum(one.values.numel() for one in metrics.values())}


def rank_main(rank: int, size: int, port: int, sizes: dict[str, int], out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.get("tp", 1),
        pipeline_model_parallel_size=sizes.get("pp", 1),
        context_parallel_size=sizes.get("cp", 1),
    )
    forward_only.get_forward_backward_func = lambda: schedule
    layout = compat.layout()
    groups = {
        "tp": layout.tp_group,
        "cp": layout.cp_group,
        "dp_cp": layout.dp_cp_group,
        "tp_cp": layout.tp_cp_group,
        "pp": layout.pp_group,
        "world": dist.group.WORLD,
    }
    names = {group.group_name: name for name, group in groups.items()}
    assert len(names) == len(groups), "two groups of one name could not be told apart"
    Path(f"{out}.{rank}").write_text(json.dumps([run(case, layout, names) for case in cases()]))
    dist.barrier()
    os._exit(0)  # gloo's threads may wait for each other at interpreter exit


def main() -> None:
    out, results = sys.argv[1], {}
    load_engine("sglang")  # once, before the forks; so are megatron.training and torch._dynamo
    for name, sizes in LAYOUTS.items():
        size = math.prod(sizes.values())
        # A fork a layout: the threads of its gloo groups go with it.
        start_processes(rank_main, (size, free_port(), sizes, out), size, start_method="fork")
        results[name] = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(size)]
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
