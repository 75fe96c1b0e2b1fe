"""A copy of a release's wheel that may be patched, and what a run of a script in it needs."""

import asyncio
import contextlib
import json
import shutil
from importlib.util import find_spec
from pathlib import Path

from megatron_rl_corr.models.megatron_flags import model_flags
from megatron_rl_corr.rollout import RolloutClient
from tests.matrix.releases import OVERLAID, release_environment, release_folder
from tools.cpu import megatron_arguments


def copied_tree(folder, release=OVERLAID[-1]):
    """`folder`, with a copy of the release's megatron/ in it."""
    installed = release_folder(release) or Path(find_spec("torch").origin).parents[1]
    shutil.copytree(installed / "megatron", folder / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def process_environment(*paths):
    """Variables of a process without a GPU, with `paths` before everything that is installed."""
    return release_environment(OVERLAID[-1], *paths) | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def cpu_flags(model, words=None):
    """What a user's script is started with today, on a machine without a GPU: two steps of eight samples.

    words: the model's flags; by default those of the table.
    """
    flags = [
        *(words or model_flags(json.loads((Path(model) / "config.json").read_text()))),
        *megatron_arguments(),
        "--seq-length",
        32,
        "--micro-batch-size",
        4,
        "--global-batch-size",
        8,
        "--train-iters",
        2,
        "--lr",
        1e-3,
        "--lr-decay-style",
        "constant",
        "--weight-decay",
        0,
        "--clip-grad",
        1.0,
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        model,
        "--mock-data",
        "--split",
        "100,0,0",
        "--num-workers",
        0,
        "--no-create-attention-mask-in-dataloader",
        "--eval-iters",
        0,
        "--eval-interval",
        1000,
    ]
    return [str(flag) for flag in flags]


@contextlib.contextmanager
def unchanged(server, model):
    """Puts a shared server's weights and their name back; what it has cached of others goes."""
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]

    async def state(client):
        [url], [answer] = client.base_urls, await client.weights_checker()
        [checksums] = client.engine_of(url).all_checksums(url, answer)
        return checksums, (await client.reported_versions())[0]

    async def seen():
        async with RolloutClient([server.url], vocab_size=vocab_size, engine=server.engine) as client:
            return await state(client)

    async def put_back():
        async with RolloutClient([server.url], vocab_size=vocab_size, engine=server.engine) as client:
            await client.update_weights_from_disk(str(model))
            await client.update_weight_version(before[1])
            await client.flush_cache()
            checksums, version = await state(client)
            assert version == before[1]
            # on a CPU vLLM's are of what an update brought, and there may have been none
            if server.engine == "sglang":
                assert checksums == before[0]

    before = asyncio.run(seen())
    yield server
    asyncio.run(put_back())
