"""Log-probs of texts, a server's and Megatron's in several layouts: probe_worker.py N MODEL_DIR
ENGINE=URL OUT SPECS.

OUT: of each layout every rank's (what the probe found, or its error; what it left changed; log-probs of
the texts, and what simulated rounding moves them by).
"""

import asyncio
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from forked_layouts import save_results
from layout_cases import LENGTH
from layout_worker import limits_of, set_up
from megatron.core import parallel_state as ps
from safetensors.torch import load_file
from server_weights import load

from megatron_rl_corr.data.prompt import Prompt
from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.engines.errors import RolloutError
from megatron_rl_corr.features.push_probe.judge import Asked
from megatron_rl_corr.features.push_probe.probe import make_probe
from megatron_rl_corr.features.push_probe.texts import round_texts
from megatron_rl_corr.mcore.batch.rollout_batch import BatchShape
from megatron_rl_corr.mcore.feature import RunParts, RunSettings
from megatron_rl_corr.models.quantization import BlockFP8
from megatron_rl_corr.reduce.failure import PeerFailure
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.client import RolloutClient

PROMPTS = [
    [3, 1, 4, 1, 5, 9, 2, 6],
    [53, 58, 9, 79, 32, 38, 46, 26],
    [43, 38, 32, 79, 50, 28, 8, 41],
    [97 % 83],
]


def state(model):
    """Everything that a pass might move."""
    found = {
        f"{i}.{n}": t.detach().clone()
        for i, chunk in enumerate(model)
        for n, t in chunk.state_dict().items()
        if torch.is_tensor(t)
    }
    gradients = {
        f"{i}.{n}.grad": p.main_grad.clone() for i, c in enumerate(model) for n, p in c.named_parameters()
    }
    return found | gradients


def probed(model_dir, arguments, spec):
    (engine, url), samples = arguments
    length = spec.get("length", LENGTH)
    model, _, layout, _, _, _, settings = set_up(model_dir, samples, spec)
    with LoopThread() as loop:
        client = RolloutClient([url], vocab_size=settings.vocab_size, engine=engine, timeout_s=60)
        [version] = set(filter(None, loop.call(client.reported_versions())))
        loop.call(client.expect_version(version))
        source = SimpleNamespace(
            client=client, loop=loop, prompts=PromptDataset([Prompt(i, ids) for i, ids in enumerate(PROMPTS)])
        )
        options = SimpleNamespace(
            probe_push="on", max_probe_log_ratio=spec.get("bound"), push_rounding=spec.get("rounding", "none")
        )
        arguments = SimpleNamespace(
            seq_length=length,
            params_dtype=torch.bfloat16 if spec.get("half") else torch.float32,
            virtual_pipeline_model_parallel_size=spec.get("vpp"),
            pipeline_model_parallel_size=spec.get("pp", 1),
            microbatch_group_size_per_vp_stage=None,
            iteration=0,
        )
        shape = BatchShape(8, 4, 2, length, packing=limits_of(spec))
        # Another temperature, as of a run: a text is scored at 1.
        settings = type(settings)(**(vars(settings) | {"temperature": 0.7}))
        before = state(model)
        collector = SimpleNamespace(trajectories=[])
        run = RunSettings(options, arguments, layout, settings.vocab_size)
        parts = RunParts(
            settings=run,
            model=model,
            optimizer=None,
            source=source,
            exporter=None,
            collector=collector,
            shape=shape,
            logprob_settings=settings,
            reports=None,
        )
        probe = make_probe(parts)
        texts = tuple(round_texts(source.prompts, 0, (), length - 1))
        own, rounded = probe._simulate_rounding(Asked(texts, 2e-3))
        probe.before_push()
        if "sent" in spec:  # what the first push brings
            if dist.get_rank() == 0:
                asyncio.run(load(engine, url, load_file(spec["sent"])))
            dist.barrier()
        try:
            quantization = BlockFP8("float32") if spec.get("fp8") else None
            servers = SimpleNamespace(urls=client.base_urls, loaded={}, quantization=quantization)
            found = probe.compare_servers(servers, version)
        except (RolloutError, PeerFailure) as error:
            found = f"{type(error).__name__}: {error}"
        after = state(model)
        moved = [name for name in before if not torch.equal(before[name], after[name])]
        moved += [] if all(chunk.training for chunk in model) else ["evaluation mode"]
        loop.call(client.close())
    ps.destroy_model_parallel()
    return found, moved, list(map(torch.from_numpy, own)), list(map(torch.from_numpy, rounded))


def main(processes, model_dir, url, out, *specs):
    generator = torch.Generator().manual_seed(0)
    samples = [
        {
            "group": i // 4,
            "prompt": torch.randint(83, (4,), generator=generator),
            "reward": 0.0,
            "output": torch.randint(83, (5,), generator=generator),
            "rollout": torch.zeros(5),
            "old_shift": torch.zeros(5),
        }
        for i in range(8)
    ]
    save_results(probed, processes, model_dir, (url.split("=", 1), samples), out, specs)


if __name__ == "__main__":
    main(*sys.argv[1:])
