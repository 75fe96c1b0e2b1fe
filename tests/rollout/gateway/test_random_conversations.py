"""Random conversations over real templates: what is asked of the servers, and every branch, is what a naive
model of the rules has, token by token.
"""

import asyncio
import json
import random
from dataclasses import replace

import pytest
import torch

from megatron_rl_corr.rollout.gateway.types import ChatRequest, GatewayError
from tests.rollout.gateway.agents_model import (
    ENDS,
    NAMES,
    Servers,
    backend,
    episode,
    fast,
    ids_of,
    routes_of,
    templates,
    text_of,
)
from tests.rollout.gateway.naive_tree import Naive, Refused
from tests.tiers import in_matrix

WORDS = [
    "the weather",
    "Oslo",
    " é€",
    "𝄞 ",
    "\n",
    "  ",
    "0.5",
    "wet",
    "</think>",
    "x<|im_end|>y",
    '{"a": "b"}',
    "下雨",
]
TOOLS = [
    [
        {
            "type": "function",
            "function": {"name": name, "description": "d", "parameters": {"properties": {"a": {}}}},
        }
    ]
    for name in ("look", "find")
]
WITHOUT_TOOLS = ("phi_3", "deepseek_v3")
OTHER_ENDS = {"glm_4_5": ["<|user|>", "<|observation|>"], "gpt_oss": ["<|call|>", "<|return|>"]}
SEEDS = [*range(40), *in_matrix(*range(40, 280))]


class World:
    """A harness that does whatever harnesses do, servers that answer anything, and the naive model of
    both.
    """

    def __init__(self, template, seed):
        self.random, self.template = random.Random(f"{template} {seed}"), template
        self.servers = Servers(draws=self.draw, routes=seed % 2 == 0, support=seed % 3 == 0)
        self.made = episode(self.servers, SHARED.setdefault(template, templates(template)))
        self.naive = Naive(template)
        self.known = []
        """(messages of a history that ends with an answer, tools, kwargs)."""
        self.with_tools = template not in WITHOUT_TOOLS and self.random.random() < 0.7
        self.refused = 0

    def words(self, most=4):
        return "".join(self.random.choice(WORDS) for _ in range(self.random.randint(0, most)))

    # the servers

    def draw(self, prompt_ids, sampling, draw):
        pick = self.random
        text = self.words().replace("<|im_end|>", "")
        if self.with_tools and pick.random() < 0.4:
            for _ in range(pick.choice([1, 1, 2])):
                arguments = {
                    "a": self.words(2).replace("<|im_end|>", ""),
                    "n": pick.choice([1, -2, None, [1, {}], "é"]),
                }
                call = json.dumps({"name": "look", "arguments": arguments}, ensure_ascii=pick.random() < 0.5)
                text += f"<tool_call>{call}</tool_call>"
        if pick.random() < 0.1:
            text = "<think>" + text + "</think>a"
        if pick.random() < 0.05:
            text += pick.choice(["<|im_start|>", "<|endoftext|>a"])
        ids = ids_of(text)
        if pick.random() < 0.5:  # as no tokenizer would have it
            ids = [one for token in ids for one in self.in_bytes(token)]
        if pick.random() < 0.1:
            ids = [*ids, *ids_of("é")[:1]]
        if pick.random() < 0.1 or not ids:
            ids.insert(pick.randint(0, len(ids)), backend().token_to_id("Ã"))
        ways = ["stop", "stop", "stop", "other", "length", "text"]
        way, wait = pick.choice(ways), pick.randint(0, 3)
        end = ENDS[self.template] or "<|user|>"
        if way == "text" and sampling.stop:
            return [*ids, *ids_of(sampling.stop[0])], "stop", wait
        if way == "other":
            end = pick.choice(OTHER_ENDS.get(self.template, ["<|endoftext|>"]))
        if way in ("length", "text"):
            return ids, "length", wait
        return [*ids, *ids_of(end)], "stop", wait

    @staticmethod
    def in_bytes(token):
        piece = backend().id_to_token(token)
        if token < 257 or piece.startswith(("<", "[")):
            return [token]
        return [backend().token_to_id(one) for one in piece]

    # the harness

    def request(self):
        pick = self.random
        kwargs = {"enable_thinking": False} if self.template == "qwen3" and pick.random() < 0.1 else {}
        tools = TOOLS[0] if self.with_tools else None
        if self.known and pick.random() < 0.9:
            recent = self.known[-1] if pick.random() < 0.7 else pick.choice(self.known)
            messages, tools, kwargs = recent
            messages = [self.echoed(one) for one in messages]
            if pick.random() < 0.15:
                messages = self.edited(messages)
            if self.with_tools and pick.random() < 0.05:
                tools = pick.choice([None, *TOOLS])
            if self.template == "qwen3" and pick.random() < 0.05:
                kwargs = {} if kwargs else {"enable_thinking": False}
            messages += self.next(messages[-1])
        else:
            messages = [{"role": "user", "content": self.words()}]
            if pick.random() < 0.4:
                messages.insert(0, {"role": "system", "content": self.words(2)})
        stop = pick.choice([(), (), ("!!",)])
        return ChatRequest(messages, tools, kwargs, n=pick.choice([1, 1, 1, 2]), stop=stop)

    def next(self, last):
        pick = self.random
        results = [
            {"role": "tool", "content": self.words(), "tool_call_id": call.get("id", "none")}
            for call in last.get("tool_calls") or []
        ]
        if results and pick.random() < 0.9:
            return results
        if pick.random() < 0.05:
            return []
        return [{"role": "user", "content": self.words()}]

    def echoed(self, message):
        """The message as some harness sends it back, to the same effect."""
        pick = self.random
        if message["role"] != "assistant" or pick.random() < 0.7:
            return message
        message = dict(message)
        if not message["content"]:
            message["content"] = pick.choice([None, "", []])
        elif isinstance(message["content"], str) and pick.random() < 0.3:
            message["content"] = [{"type": "text", "text": message["content"]}]
        if message.get("tool_calls"):
            message["tool_calls"] = [self.echoed_call(call) for call in message["tool_calls"]]
        return {**message, "refusal": None}

    def echoed_call(self, call):
        pick, function = self.random, dict(call["function"])
        value = json.loads(function["arguments"])
        if pick.random() < 0.5:
            function["arguments"] = json.dumps(
                dict(reversed(value.items())), separators=(",", ":"), ensure_ascii=False
            )
        made = {**call, "function": function, "index": 0}
        if pick.random() < 0.2:
            made["id"] = f"n{pick.randint(0, 10**8):08}"
        if pick.random() < 0.05:
            made.pop("id", None)
        return made

    def edited(self, messages):
        pick, at = self.random, self.random.randrange(len(messages))
        way = pick.choice(["drop", "trim", "more", "call"])
        one = dict(messages[at])
        content = one["content"]
        if way == "drop":
            return messages[:at] + messages[at + 1 :] or messages
        if way == "call" and one.get("tool_calls"):
            (first, *rest) = one["tool_calls"]
            one["tool_calls"] = [
                {**first, "function": {**first["function"], "arguments": '{"a":"other"}'}},
                *rest,
            ]
        elif isinstance(content, str):
            one["content"] = content.strip() if way == "trim" else content + "+"
        return [*messages[:at], one, *messages[at + 1 :]]

    async def step(self):
        """One request, or several at once, and what comes of them."""
        requests = [self.request() for _ in range(self.random.choice([1, 1, 1, 1, 2, 3]))]
        expected = []
        for request in requests:
            try:
                expected.append(self.naive.expected(request))
            except Refused:
                expected.append(None)
        begin = len(self.servers.log)
        results = await asyncio.gather(*map(self.made.chat, requests), return_exceptions=True)
        records = {id(one["part"].output_ids): one for one in self.servers.log[begin:]}
        for request, expects, answers in zip(requests, expected, results, strict=True):
            if expects is None:
                assert isinstance(answers, GatewayError) and answers.status == 400, answers
                self.refused += 1
                continue
            if isinstance(answers, BaseException):
                raise answers
            ids, parent, full = expects
            assert len(answers) == request.n
            for answer in answers:
                record = records.pop(id(answer.output_ids))
                assert record["prompt"] == ids
                assert (
                    record["prefer"] is None
                    or parent is None
                    or record["prefer"] == parent["record"]["part"].server
                )
                self.note(request, parent, full, record, answer)
            if self.random.random() < 0.1:
                gone = self.random.choice([answers, answers[:1]])
                self.made.undelivered(gone)
                for answer in gone:
                    self.naive.take_back(int(answer.id))
        assert not records

    def note(self, request, parent, full, record, answer):
        message = {"role": "assistant", "content": answer.text}
        if answer.tool_calls:
            message["tool_calls"] = answer.tool_calls
        last = text_of(record["ids"][-1:])
        stopped = (
            record["part"].finish_reason == "stop"
            and last in fast(self.template).get_added_vocab()
            and last[0] in "<["
        )
        stopped = stopped and last not in ("<tool_call>", "</tool_call>", "<think>", "</think>")
        self.naive.add(request, parent, full, record, int(answer.id), message, stopped)
        self.known.append(([*request.messages, message], request.tools, request.template_kwargs))
        assert "".join(answer.token_texts) == text_of(record["ids"])

    # what came of it

    def check(self, branches):
        """Each branch is what the log has, token by token."""
        expected = self.naive.branches()
        assert len(branches) == len(expected)
        for number, (branch, (path, shared)) in enumerate(zip(branches, expected, strict=True)):
            leaf, first = path[-1], path[shared]
            whole, prompt = [*leaf["prompt"], *leaf["ids"]], len(first["prompt"])
            assert branch.branch == number and branch.sample_index == 3
            assert branch.prompt_ids.tolist() == first["prompt"] == whole[:prompt]
            assert branch.output_ids.tolist() == whole[prompt:]
            turns, logprobs = [-1] * (len(whole) - prompt), [None] * (len(whole) - prompt)
            for depth, turn in enumerate(path[shared:], start=shared):
                at, end = len(turn["prompt"]) - prompt, len(turn["prompt"]) + len(turn["ids"]) - prompt
                turns[at:end] = [depth] * (end - at)
                logprobs[at:end] = turn["record"]["part"].rollout_logprobs.tolist()
                (own,) = turn["record"]["part"].weight_versions
                assert branch.sampled_by(own.version)[at:end].all()
            assert branch.turn_ids.tolist() == turns
            assert [None if one != one else one for one in branch.rollout_logprobs.tolist()] == logprobs
            assert branch.finish_reason == leaf["record"]["part"].finish_reason
            if self.servers.routes:
                assert torch.equal(branch.routed_experts, routes_of(whole))
            if self.servers.support:
                lengths = torch.tensor([1 if one == -1 else 2 for one in turns])
                assert torch.equal(branch.support.lengths, lengths.int())
                assert branch.support.ids.tolist() == [
                    one + more
                    for one, turn in zip(whole[prompt:], turns, strict=True)
                    for more in ([0] if turn == -1 else [0, 1])
                ]
        forks = {reason: count for reason, count in self.made.tree.forks.items() if count}
        assert forks == self.naive.forks


SHARED = {}
"""A template is shared by all episodes of a run."""


def played(template, seed, steps=6):
    world = World(template, seed)

    async def all_steps():
        for _ in range(steps):
            await world.step()
        branches.extend(await world.made.finish())  # a result would be formatted by asyncio, with all tensors

    branches = []
    asyncio.run(all_steps())
    return world, branches


@pytest.mark.parametrize("template", NAMES)
def test_conversations_when_random_then_each_token_is_what_a_naive_model_of_the_rules_has(template):
    forks, rerendered, refused, shared = {}, 0, 0, 0
    for seed in SEEDS:
        world, branches = played(template, seed)
        try:
            world.check(branches)
            assert world.made.tree.check(branches) == []
        except AssertionError as error:
            error.add_note(f"{template}, seed {seed}")
            raise
        for reason, count in world.made.tree.forks.items():
            forks[reason] = forks.get(reason, 0) + count
        rerendered += world.made.counts.rerendered
        refused += world.refused
        shared += sum(count > 0 for _, count in world.naive.branches())
    assert forks["first"] == len(SEEDS) and forks["edited"] > 20 and shared > 1 and rerendered > 1
    assert forks["tools"] > 0 or template in WITHOUT_TOOLS


@pytest.mark.parametrize("template", NAMES)
def test_faults_when_planted_in_random_conversations_then_the_proof_and_the_log_find_them(template):
    planted = 0
    for seed in SEEDS[:12]:
        world, branches = played(template, seed)
        for at, branch in enumerate(branches):
            for fault in (retokenised, shifted):
                wrong = fault(branch)
                if wrong is None:
                    continue
                planted += 1
                told = [*branches[:at], wrong, *branches[at + 1 :]]
                assert world.made.tree.check(told) != []
                with pytest.raises(AssertionError):
                    world.check(told)
    assert planted > 10


def retokenised(branch):
    """The branch whose sampled ids are what the tokenizer makes of their text; None: they are the same."""
    ids, turns = branch.output_ids.tolist(), branch.turn_ids.tolist()
    made, kinds, at = [], [], 0
    while at < len(ids):
        end = at
        while end < len(ids) and turns[end] == turns[at]:
            end += 1
        span = ids[at:end] if turns[at] == -1 else ids_of(text_of(ids[at:end]))
        made, kinds, at = made + span, kinds + [turns[at]] * len(span), end
    if made == ids:
        return None
    count = len(made)
    logprobs = torch.where(torch.tensor(kinds) == -1, torch.nan, -1.0)
    return replace(
        branch,
        output_ids=torch.tensor(made),
        turn_ids=torch.tensor(kinds),
        rollout_logprobs=logprobs,
        weight_versions=(replace(branch.weight_versions[0], start=0, end=count),),
        routed_experts=None,
        support=None,
        top_logprobs=None,
    )


def shifted(branch):
    """The branch whose mask is one token late; None: it is the same."""
    turns = torch.cat([torch.tensor([-1]), branch.turn_ids[:-1]])
    return None if torch.equal(turns, branch.turn_ids) else replace(branch, turn_ids=turns)
