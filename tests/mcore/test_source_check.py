"""Servers whose tokenizer is not the one that makes the prompts: a real server, and answers of others."""

import asyncio
from types import SimpleNamespace

import pytest

from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.errors import RolloutServerError
from megatron_rl_corr.mcore.checks.source_check import (
    _difference_between_replicas,
    difference_of_ids,
    fingerprint,
    texts_of,
)
from megatron_rl_corr.rollout import Prompt, PromptDataset, RolloutClient

PROMPTS = PromptDataset([Prompt(0, [1, 67, 1]), Prompt(1, [], text="2+2=")])


def test_server_when_its_tokenizer_is_the_checkpoints_then_nothing_is_said(
    engine_server, tiny_moe_dir, capsys
):
    engine, server = engine_server

    async def checked(texts):
        async with RolloutClient([server.url], vocab_size=83, engine=engine) as client:
            return await difference_of_ids(client, texts)

    texts = texts_of(Tokenizer.from_folder(tiny_moe_dir), PROMPTS)
    assert texts == {"1+1": [1, 67, 1], "2+2=": [2, 67, 2, 71]}  # it has no ids for all of TEXT
    assert asyncio.run(checked(texts)) is None and capsys.readouterr().err == ""
    error = asyncio.run(checked({"1+1": [1, 68, 1]}))
    assert str(error).startswith(
        f"{server.url} has another tokenizer than --rollout-hf-checkpoint: of '1+1' it makes [1, 67, 1] "
        "(3 ids), the checkpoint's [1, 68, 1] (3 ids); start the server with this checkpoint as its model or "
        "tokenizer"
    )
    # What its tokenizer has no id for, and the checkpoint's has, is a difference too.
    assert "it makes an error (" in str(asyncio.run(checked({"\u00e4": [5]})))


class Servers:
    """Two servers, the second of which answers with `answer` or raises it."""

    base_urls = ("http://a:1", "http://b:2")
    engine = load_engine("sglang")

    def engine_of(self, url):
        return self.engine

    def __init__(self, answer, **info):
        self.answer, self.info, self.asked = answer, info, []

    async def server_info(self):
        return [{}, self.info]

    async def ask(self, url, request):
        self.asked.append(url)
        if url == "http://b:2":
            if isinstance(self.answer, Exception):
                raise self.answer
            return {"tokens": self.answer}
        return {"tokens": [7]}


def failure(status):
    return RolloutServerError("http://b:2", "/v1/tokenize", status, "why")


@pytest.mark.parametrize(
    "servers, error, line",
    [
        (Servers([7]), None, ""),
        (Servers([7, 8]), "http://b:2 has another tokenizer than", ""),
        (Servers(None), "http://b:2 has another tokenizer .* it makes None", ""),
        (Servers(failure(500)), "http://b:2 has another tokenizer .* it makes an error", ""),
        (
            Servers(failure(404)),
            None,
            "[rollout] http://b:2 can't be asked for ids: its tokenizer is not compared",
        ),
        (
            Servers(failure(500), skip_tokenizer_init=True),
            None,
            "[rollout] http://b:2 has no tokenizer: that its ids",
        ),
    ],
)
def test_servers_when_one_has_another_tokenizer_or_none_then_it_is_named(servers, error, line, capsys):
    found = asyncio.run(difference_of_ids(servers, {"x": [7]}))
    if error is None:
        assert found is None
    else:
        with pytest.raises(type(found), match=error):
            raise found
    assert capsys.readouterr().err.startswith(line) and servers.asked[0] == "http://a:1"


def test_server_when_it_does_not_answer_then_raised():
    with pytest.raises(RolloutServerError):
        asyncio.run(difference_of_ids(Servers(failure(None)), {"x": [7]}))


def test_texts_when_the_tokenizer_can_encode_any_then_one_of_many_signs_is_among_them():
    anything = SimpleNamespace(encode=lambda text: list(text.encode()), decode=lambda ids: str(ids))
    texts = texts_of(anything, PROMPTS)
    assert len(texts) == 3 and all(ids == list(text.encode()) for text, ids in texts.items())
    assert any("\u4f60" in text for text in texts)


def test_fingerprint_when_rows_or_their_order_differ_then_it_does():
    rows = [Prompt(i, [i]) for i in range(20)]
    same = fingerprint(PromptDataset(rows, seed=1))
    assert same == fingerprint(PromptDataset(list(rows), seed=1))
    others = [
        fingerprint(PromptDataset(*other, seed=seed))
        for *other, seed in (
            (rows, 2),
            (rows[:19], 1),
            ([Prompt(i, [i + 1]) for i in range(20)], 1),
        )
    ]
    assert all(other != same for other in others) and others[1]["rows"] == "19 (one source)"


def test_replicas_when_a_host_has_other_data_then_the_run_is_refused(monkeypatch):
    mine = PromptDataset([Prompt(i, [i]) for i in range(20)])

    def difference(*others):
        def gather(gathered, own, group):
            gathered[:] = [None, *((n, fingerprint(data)) for n, data in enumerate(others, 1)), own]

        monkeypatch.setattr("torch.distributed.all_gather_object", gather)
        group = SimpleNamespace(size=lambda: 2 + len(others))
        error = _difference_between_replicas(mine, SimpleNamespace(dp_rank=0, dp_cp_group=group))
        return None if error is None else str(error)

    assert difference() is None and difference(mine, mine) is None
    assert difference(mine, PromptDataset([Prompt(0, [1])])) == (
        "--rollout-prompts: rows 20 (one source) for the first data-parallel replica, 1 (one source) for "
        "replica 2; give every host the same files, checkpoint and flags"
    )
    others = PromptDataset([Prompt(i, [i + 1]) for i in range(20)])
    assert "first prompts [[10]," in difference(others) and "for replica 1; give every host" in difference(
        others
    )
    others = PromptDataset([Prompt(i, [i], label=str(i + 1)) for i in range(20)])
    assert "first labels [None, None," in difference(
        others
    ) and "for replica 1; give every host" in difference(others)
