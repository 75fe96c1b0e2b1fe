"""Checks at a run's start that its servers make the same ids of a text as the tokenizer that makes the prompts."""

from __future__ import annotations

import torch.distributed as dist

from megatron_rl_corr.config.flags import warn
from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.data.rows import BadRow
from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.engines.errors import RolloutError, RolloutServerError
from megatron_rl_corr.engines.types import UnsupportedByEngine
from megatron_rl_corr.parallel.failure import StartupError, all_reduce_failure
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.client import RolloutClient

TEXT = "The 1st test, 12 + 345 = 357?\n\tna\u00efve \u4f60\u597d \U0001f642  <|end|>"
"""Beside texts of the data: letters, digits, white space and signs that vocabularies split differently."""
PROMPTS = 8
_NOT_FOUND = 404


def check_tokenizers(
    kind: str, tokenizer: Tokenizer | None, prompts: PromptDataset | None, client: RolloutClient, loop: LoopThread
) -> None:
    """Ask every server from rank 0 for the ids of a few texts; every rank calls it.

    A server that has no tokenizer, or cannot be asked for ids, is named in one line.

    Args:
        kind: --rollout-server-check; off asks nothing.
        tokenizer: of --rollout-hf-checkpoint; None: nothing is tokenised in this run, and nothing is asked.
        prompts: of the run, on the ranks that draw them.
        client: of the servers.
        loop: the event loop of the client.

    Raises:
        StartupError: a server makes other ids, or none.
        RolloutError: a server does not answer.
    """
    error = None
    if kind != "off" and tokenizer is not None and dist.get_rank() == 0:
        try:
            error = loop.call(_difference(client, texts_of(tokenizer, prompts)))
        except RolloutError as failure:
            error = failure
    all_reduce_failure(error)


def texts_of(tokenizer: Tokenizer, prompts: PromptDataset) -> dict[str, list[int]]:
    """TEXT and the first prompts that the run draws, with the ids that the tokenizer makes of each."""
    texts = [TEXT]
    for number in range(PROMPTS):
        try:
            prompt = prompts.at(number)
        except BadRow:
            continue
        texts.append(tokenizer.decode(prompt.input_ids) if prompt.text is None else prompt.text)
    found = {}
    for text in texts:
        try:
            found[text] = tokenizer.encode(text)
        except ValueError:  # it has no id for a character of TEXT
            continue
    return found


async def _difference(client: RolloutClient, texts: dict[str, list[int]]) -> StartupError | None:
    infos = await client.server_info()
    for url, info in zip(client.base_urls, infos, strict=True):
        if not client.engine.has_tokenizer(info):
            warn(f"{url} has no tokenizer: that its ids are those of --rollout-hf-checkpoint is not checked")
            continue
        for text, own in texts.items():
            try:
                answer = await client.ask(url, client.engine.tokenize(text))
                theirs: object = client.engine.tokenized(answer)
            except (UnsupportedByEngine, RolloutServerError) as error:
                if isinstance(error, UnsupportedByEngine) or error.status == _NOT_FOUND:
                    warn(f"{url} can't be asked for ids: its tokenizer is not compared with --rollout-hf-checkpoint's")
                    break
                if error.status is None:
                    raise
                theirs = f"an error ({error})"
            if theirs != own:
                return StartupError(
                    f"{url} has another tokenizer than --rollout-hf-checkpoint: of {text[:200]!r} it makes "
                    f"{_start(theirs)}, the checkpoint's {_start(own)}; start the server with this checkpoint as its "
                    "model or tokenizer path, or train nevertheless with --rollout-server-check off"
                )
    return None


def _start(ids: object) -> str:
    return f"{ids[:20]}{'...' if len(ids) > 20 else ''} ({len(ids)} ids)" if isinstance(ids, list) else str(ids)
