"""Random conversations over real templates: what is asked of the servers, and every branch, is what a naive
model of the rules has, token by token.
"""

import asyncio
import json
import random
from dataclasses import replace

import pytest
import torch

from megatron_rl_corr.rollout.gateway.answering import answer_rules
from megatron_rl_corr.rollout.gateway.types import ChatRequest, GatewayError
from megatron_rl_corr.rollout.sampling import SamplingParams
from tests.rollout.gateway.agents_model import (
    CONTROL,
    NAMES,
    Servers,
    backend,
    end_of,
    episode,
    ids_of,
    parse,
    routes_of,
    templates,
    text_of,
)
from tests.rollout.gateway.naive_tree import Naive, Refused
from tests.rollout.gateway.published_templates import CALLS, FOLDER, PREFIX, family
from tests.tiers import in_matrix, matrix

pytestmark = matrix
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
            "function": {
                "name": name,
                "description": "d",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "a": {"type": "string", "description": "where"},
                        "n": {"type": "integer", "description": "how often"},
                    },
                },
            },
        }
    ]
    for name in ("look", "find")
]
WITHOUT_TOOLS = ("phi_3", "deepseek_v3")
OTHER_ENDS = {"glm_4_5": ["<|user|>", "<|observation|>"], "gpt_oss": ["<|call|>", "<|return|>"]}
PROVEN = (
    "qwen2_5",
    "qwen3",
    "qwen3_vl",
    "qwen3_5_think",
    "qwen3_8",
    "nemotron_3_nano",
    "nemotron_3_ultra",
    "glm4moe",
    "llama3_1",
    "llama3_2",
    "gptoss",
    "gemma4",
    "gemma4_v5",
    "deepseekv3",
    "lfm2_2_5_v2",
    "muse_glimmer",
)
"""Published templates; most of them know tools."""
PUBLISHED = [PREFIX + name for name in PROVEN]
ALWAYS_ANEW = (f"{PREFIX}deepseekv3",)
"""Its prompts end with the beginning of thoughts that it shows in no history."""
SELDOM = f"{PREFIX}nemotron_3_nano"
"""Of its first 18 conversations the last one alone has turns that two branches share."""


def seeds_of(template):
    """2,000 conversations over published templates in the matrix, and some 200 in all by make test."""
    few, many = (6, 60) if template in NAMES else (18 if template == SELDOM else 8, 125)
    return [*range(few), *in_matrix(*range(few, many))]


def named(template):
    if template.startswith(PREFIX) and FOLDER is None:
        pytest.skip("make setup-agents installs TRL's wheel, which has published chat templates")
    return template


class World:
    """A harness that does whatever harnesses do, servers that answer anything, and the naive model of
    both.
    """

    def __init__(self, template, seed):
        self.random, self.template = random.Random(f"{template} {seed}"), template
        self.servers = Servers(draws=self.draw, routes=seed % 2 == 0, support=seed % 3 == 0)
        self.family = family(template) if template.startswith(PREFIX) else None
        self.separate = self.family is not None and ("gptoss" in template or self.random.random() < 0.6)
        self.made = episode(self.servers, shared(template), **self.reading())
        self.naive = Naive(template)
        self.known = []
        """(messages of a history that ends with an answer, tools, kwargs)."""
        shows_tools = template not in WITHOUT_TOOLS if self.family is None else self.family.calls is not None
        self.with_tools = shows_tools and self.random.random() < 0.7
        self.reads_calls_itself = self.with_tools or "deepseek" in template
        self.refused = self.called = 0

    def reading(self):
        """How answers are read: as a run reads them, or of a stand-in as it has calls."""
        if self.family is None:
            return {"parse": parse}
        rules = answer_rules(
            SHARED[self.template].tokenizer,
            SamplingParams(400),
            max_tokens=1,
            max_turns=1,
            tool_format="auto",
            separate_thoughts=self.separate,
            warn=str,
        )
        return {"parse": rules.parse, "thoughts": rules.thoughts, "separates": rules.separates}

    def words(self, most=4):
        words = [*WORDS, f"x{end_of(self.template)}y"]
        return "".join(self.random.choice(words) for _ in range(self.random.randint(0, most)))

    def said(self, most=4):
        """Words of the policy: what it samples has a control token only where it is meant."""
        return self.words(most).replace("<|im_end|>", "").replace(end_of(self.template) or "<|im_end|>", "")

    # the servers

    def draw(self, prompt_ids, sampling, draw):
        pick = self.random
        calls = self.calls() if self.with_tools and pick.random() < 0.4 else []
        if self.family is not None:
            text = self.as_the_family_says(self.said(), calls)
        else:
            text, escaped = self.said(), pick.random() < 0.5
            for name, value in calls:
                call = json.dumps({"name": name, "arguments": value}, ensure_ascii=escaped)
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
        end = (calls and self.family and self.family.call_end) or end_of(self.template) or "<|user|>"
        if way == "text" and sampling.stop:
            return [*ids, *ids_of(sampling.stop[0])], "stop", wait
        if way == "other":
            others = OTHER_ENDS.get(self.template, ["<|endoftext|>"])
            end = pick.choice(others if self.family is None else [*self.family.others, "<|endoftext|>"])
        if way in ("length", "text"):
            return ids, "length", wait
        return [*ids, *ids_of(end)], "stop", wait

    def calls(self):
        pick = self.random
        made = []
        for _ in range(pick.choice([1, 1, 2])):
            value = {"a": self.said(2), "n": pick.choice([1, -2, None, [1, {}], "é"])}
            made.append(("look", dict(reversed(value.items())) if pick.random() < 0.3 else value))
        return made

    def as_the_family_says(self, content, calls):
        """An answer as models of this template write it, mostly."""
        pick, own = self.random, self.family
        thoughts = ""
        if own.thoughts and pick.random() < (0.8 if own.opens else 0.3):
            begin, end = own.thoughts
            thoughts = ("" if own.opens else begin) + self.said(3) + end
        if own.calls == "harmony":
            if calls:
                return thoughts + CALLS["harmony"](calls, pick)
            return thoughts + "<|channel|>final<|message|>" * (pick.random() < 0.9) + content
        if "deepseek" in self.template and pick.random() < 0.3:  # its harness reads calls itself
            content += CALLS["deepseek"](self.calls(), pick)
        if not calls:
            return thoughts + content
        if pick.random() < 0.5 or own.calls == "llama3":
            content = ""
        written = CALLS[own.calls](calls, pick)
        if pick.random() < 0.1:
            written = written[: pick.randint(1, len(written))]
        return thoughts + content + pick.choice(["", "\n", "\n\n"]) * bool(content) + written

    @staticmethod
    def in_bytes(token):
        piece = backend().id_to_token(token)
        if token < 257 or piece in CONTROL or piece.startswith(("<", "[")):
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
        if pick.random() < 0.1:
            message.pop("reasoning_content", None)
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
        way = pick.choice(["drop", "trim", "more", "call", "own"])
        one = dict(messages[at])
        content = one["content"]
        if way == "drop":
            return messages[:at] + messages[at + 1 :] or messages
        if way == "own" and one["role"] == "assistant" and self.reads_calls_itself:
            one["tool_calls"] = [
                {
                    "id": "own123456",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"a":  "b"}'},
                }
            ]
            result = {"role": "tool", "content": self.words(), "tool_call_id": "own123456"}
            return [*messages[:at], {**one, "content": pick.choice(["", "I look."])}, result]
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
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = answer.tool_calls
            self.called += 1
        last = text_of(record["ids"][-1:])
        stopped = record["part"].finish_reason == "stop" and last in CONTROL
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
        assert forks == self.naive.all_forks()


SHARED = {}
"""A template is shared by all episodes of a run."""


def shared(template):
    if template not in SHARED:
        SHARED[template] = templates(template)
    return SHARED[template]


def played(template, seed, steps=6):
    world = World(template, seed)

    async def all_steps():
        for _ in range(steps):
            await world.step()
        branches.extend(await world.made.finish())  # a result would be formatted by asyncio, with all tensors

    branches = []
    asyncio.run(all_steps())
    return world, branches


@pytest.mark.parametrize("template", [*PUBLISHED, *NAMES])
def test_conversations_when_random_then_each_token_is_what_a_naive_model_of_the_rules_has(template):
    seeds = seeds_of(named(template))
    forks, called, goes_on, shared = {}, 0, 0, 0
    for seed in seeds:
        world, branches = played(template, seed)
        try:
            world.check(branches)
            assert world.made.tree.check(branches) == []
        except AssertionError as error:
            error.add_note(f"{template}, seed {seed}")
            raise
        for reason, count in world.made.tree.forks.items():
            forks[reason] = forks.get(reason, 0) + count
        called += world.called
        goes_on += sum(turn.parent is not None for turn in world.made.tree.turns())
        shared += sum(count > 0 for _, count in world.naive.branches())
    assert forks["first"] == len(seeds) and forks["edited"] > 5
    assert (goes_on > 0 and shared > 0) or template in ALWAYS_ANEW
    assert called > 5 or not template.startswith(PREFIX) or family(template).parser is None


@pytest.mark.parametrize("template", [*in_matrix(*PUBLISHED), *NAMES])
def test_faults_when_planted_in_random_conversations_then_the_proof_and_the_log_find_them(template):
    planted = 0
    for seed in seeds_of(named(template))[:3]:
        world, branches = played(template, seed)
        for at, branch in enumerate(branches):
            for fault in (retokenised, shifted, misjudged):
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


def misjudged(branch):
    """The branch whose last log-prob is another one by 1e-6."""
    logprobs = branch.rollout_logprobs.clone()
    logprobs[branch.sampled.nonzero()[-1]] += 1e-6
    return (
        None
        if torch.equal(logprobs.nan_to_num(), branch.rollout_logprobs.nan_to_num())
        else replace(branch, rollout_logprobs=logprobs)
    )
