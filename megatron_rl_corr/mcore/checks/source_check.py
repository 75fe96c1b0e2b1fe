"""Checks at a run's start that its prompts are the same for all replicas, and tokenised as its servers do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch.distributed as dist

from megatron_rl_corr.config.flags import warn
from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.data.rows import BadRow
from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.engines.errors import RolloutError, RolloutServerError
from megatron_rl_corr.engines.types import UnsupportedByEngine
from megatron_rl_corr.mcore.batch.server_collector import SampleSource
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import StartupError, all_reduce_failure
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.rollout.client import RolloutClient

TEXT = "The 1st test, 12 + 345 = 357?\n\tna\u00efve \u4f60\u597d \U0001f642  <|end|>"
"""Beside texts of the data: letters, digits, white space and signs that vocabularies split differently."""
PROMPTS = 8
_NOT_FOUND = 404


@collective
def check_source(kind: str, source: SampleSource, layout: Layout) -> None:
    """That all replicas draw from the same data, and that servers and prompts have one tokenizer;
    every rank calls it.

    Every server is asked from rank 0 for the ids of a few texts; one that has no tokenizer, or cannot be
    asked for ids, is named in one line.

    Args:
        kind: --rollout-server-check; off asks no server.
        source: of the samples. Without a tokenizer nothing is tokenised in this run, and no server is asked.
        layout: of the ranks.

    Raises:
        StartupError: replicas have other data, or a server makes other ids.
        RolloutError: a server does not answer.
    """
    tokenizer, error = source.tokenizer, _difference_between_replicas(source.prompts, layout)
    if error is None and kind != "off" and tokenizer is not None and dist.get_rank() == 0:
        try:
            error = source.loop.call(difference_of_ids(source.client, texts_of(tokenizer, source.prompts)))
        except RolloutError as failure:
            error = failure
    all_reduce_failure(error)


@collective
def _difference_between_replicas(prompts: PromptDataset | None, layout: Layout) -> StartupError | None:
    """What tells another replica's data from those of the first: hosts may have different
    files at one path.
    """
    own = None if prompts is None else (layout.dp_rank, fingerprint(prompts))
    group = layout.dp_cp_group
    gathered: list[tuple[int, dict[str, str]] | None] = [None] * group.size()
    dist.all_gather_object(gathered, own, group=group)
    (_, first), *others = sorted(one for one in gathered if one is not None) or [(0, {})]
    for rank, other in others:
        for name in first:
            if other[name] != first[name]:
                return StartupError(
                    f"--rollout-prompts: {name} {first[name][:200]} for the first data-parallel replica, "
                    f"{other[name][:200]} for replica {rank}; give every host the same files, checkpoint and "
                    "flags"
                )
    return None


def fingerprint(prompts: PromptDataset) -> dict[str, str]:
    """What replicas must agree on: how many rows there are of each source, the first prompts that are
    drawn, and their labels.
    """
    drawn, labels = [], []
    for number in range(PROMPTS):
        try:
            prompt = prompts.at(number)
        except BadRow:
            drawn.append(None)
            continue
        drawn.append(prompt.input_ids)
        labels.append(prompt.label)
    rows = f"{len(prompts)} ({prompts.identity or 'one source'})"
    return {"rows": rows, "first prompts": str(drawn), "first labels": str(labels)}


def texts_of(tokenizer: Tokenizer, prompts: PromptDataset) -> dict[str, list[int]]:
    """TEXT and the first prompts that the run draws, with the ids that the tokenizer makes of each."""
    texts = [TEXT]
    for number in range(PROMPTS):
        try:
            prompt = prompts.at(number)
        except BadRow:
            continue
        texts.append(tokenizer.decode(prompt.input_ids) if prompt.text is None else prompt.text)
    return encoded(tokenizer, texts)


def encoded(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, list[int]]:
    """Text -> the ids that the tokenizer makes of it, where it has some for all characters."""
    found = {}
    for text in texts:
        try:
            found[text] = tokenizer.encode(text)
        except ValueError:  # it has no id for a character of TEXT
            continue
    return found


async def difference_of_ids(client: RolloutClient, texts: Mapping[str, list[int]]) -> StartupError | None:
    """What tells the tokenizer of one of the servers from the checkpoint's; None: nothing, or not known.

    Args:
        client: of the servers.
        texts: text -> the checkpoint's ids.

    Raises:
        RolloutError: a server does not answer.
    """
    remedy = (
        "start the server with this checkpoint as its model or tokenizer path, or train nevertheless with "
        "--rollout-server-check off"
    )
    infos = await client.server_info()
    for url, info in zip(client.base_urls, infos, strict=True):
        if not client.engine_of(url).has_tokenizer(info):
            warn(f"{url} has no tokenizer: that its ids are those of --rollout-hf-checkpoint is not checked")
        elif (error := await difference_of_tokenizers(client, url, texts, remedy)) is not None:
            return error
    return None


async def difference_of_tokenizers(
    client: RolloutClient | ServerControl, url: str, texts: Mapping[str, list[int]], remedy: str
) -> StartupError | None:
    """What tells a server's tokenizer from the checkpoint's; None: nothing, or that is not known, and said.

    Args:
        client: asks the server.
        url: its address; it has a tokenizer.
        texts: text -> the checkpoint's ids.
        remedy: ends the error.

    Raises:
        RolloutServerError: the server does not answer.
    """
    engine = client.engine_of(url)
    for text, own in texts.items():
        try:
            answer = await client.ask(url, engine.tokenize(text))
            theirs: object = engine.tokenized(answer)
        except (UnsupportedByEngine, RolloutServerError) as error:
            if isinstance(error, UnsupportedByEngine) or error.status == _NOT_FOUND:
                warn(
                    f"{url} can't be asked for ids: its tokenizer is not compared with "
                    "--rollout-hf-checkpoint's"
                )
                return None
            if error.status is None:
                raise
            theirs = f"an error ({error})"
        if theirs != own:
            return StartupError(
                f"{url} has another tokenizer than --rollout-hf-checkpoint: of {text[:200]!r} it makes "
                f"{_start(theirs)}, the checkpoint's {_start(own)}; {remedy}"
            )
    return None


def _start(ids: object) -> str:
    return (
        f"{ids[:20]}{'...' if len(ids) > 20 else ''} ({len(ids)} ids)" if isinstance(ids, list) else str(ids)
    )
