"""The rules of an episode's tree once more, slowly and apart from the package: every request is looked up
among all answers, rendered by transformers, and tokenised piece by piece.
"""

import copy
import json
import re

from tests.rollout.gateway.agents_model import CONTROL, backend, end_of, fast, ids_of, text_of
from tests.rollout.gateway.published_templates import PREFIX, Family, family

STAND_INS = {
    "deepseek_v3": Family(arguments_as_text=True, empty_as_null=True, tail="", thoughts_key=None),
    "gpt_oss": Family(call_end="<|call|>", tail="", thoughts_key=None),
    "phi_3": Family(tail="\n", thoughts_key=None),
}


def known_of(template):
    """The Family of a template."""
    if template.startswith(PREFIX):
        return family(template)
    return STAND_INS.get(template, Family(tail="", thoughts_key=None))


_SPELLED = re.compile("|".join(map(re.escape, sorted(CONTROL, key=len, reverse=True))))
_literal = None


def literal_ids(text):
    """Ids of a text without any control token."""
    global _literal
    if _literal is None:
        _literal = copy.deepcopy(backend())
        _literal.encode_special_tokens = True
    return _literal.encode(text, add_special_tokens=False).ids


def content_of(message):
    value = message.get("content") or ""
    return value if isinstance(value, str) else "".join(part["text"] for part in value)


def calls_of(message):
    return [call["function"] for call in message.get("tool_calls") or []]


def same_message(a, b):
    return (
        a["role"] == b["role"]
        and content_of(a) == content_of(b)
        and (a.get("reasoning_content") or "") == (b.get("reasoning_content") or "")
        and [(c["name"], json.loads(c["arguments"])) for c in calls_of(a)]
        == [(c["name"], json.loads(c["arguments"])) for c in calls_of(b)]
    )


def same_to_the_letter(a, b):
    return (
        same_message(a, b)
        and [(c.get("id"), c["function"]["arguments"]) for c in a.get("tool_calls") or []]
        == [(c.get("id"), c["function"]["arguments"]) for c in b.get("tool_calls") or []]
        and a.get("tool_call_id") == b.get("tool_call_id")
    )


def other_ids(history, messages):
    """How many ids of calls differ, where both give one."""
    own, given = map(ids_of_calls, (history, messages[: len(history)]))
    return sum(None not in pair and pair[0] != pair[1] for pair in zip(own, given, strict=True))


def ids_of_calls(messages):
    return [
        label
        for one in messages
        for label in (one.get("tool_call_id"), *(call.get("id") for call in one.get("tool_calls") or []))
    ]


class Refused(Exception):
    """The template does not take the conversation."""


class Rendered:
    """A conversation's text, in which each control token that somebody else than the template and the
    assistant has spelled is a word.
    """

    def __init__(self, template):
        self.template, self.words, self.known = template, {}, known_of(template)

    def hide(self, text):
        def word(found):
            return self.words.setdefault(found[0], f"Qz{len(self.words)}zQ")

        return _SPELLED.sub(word, text)

    def show(self, text):
        for spelled, word in self.words.items():
            text = text.replace(word, spelled)
        return text

    def message(self, one):
        role = one["role"]
        content = content_of(one)
        made = {"role": role, "content": content if role == "assistant" else self.hide(content)}
        if one.get("tool_call_id"):
            made["tool_call_id"] = one["tool_call_id"]
        if one.get("reasoning_content") and self.known.thoughts_key:
            made[self.known.thoughts_key] = one["reasoning_content"]
        if one.get("tool_calls"):
            as_text = self.known.arguments_as_text
            if self.known.empty_as_null and not content.strip():
                made["content"] = None
            made["tool_calls"] = [
                {
                    **({"id": call["id"]} if call.get("id") else {}),
                    "type": "function",
                    "function": {
                        "name": call["function"]["name"],
                        "arguments": call["function"]["arguments"]
                        if as_text
                        else json.loads(call["function"]["arguments"]),
                    },
                }
                for call in one["tool_calls"]
            ]
        return made

    def text(self, messages, tools, kwargs, asks):
        from jinja2 import TemplateError

        try:
            return fast(self.template).apply_chat_template(
                [self.message(one) for one in messages],
                tools=tools,
                tokenize=False,
                add_generation_prompt=asks,
                **kwargs,
            )
        except (TemplateError, TypeError, AttributeError, KeyError, ValueError) as error:
            raise Refused(str(error)) from None

    def ids(self, text):
        made = []
        for piece in re.split(f"({_SPELLED.pattern})", text):
            made += (
                ids_of(piece) if _SPELLED.fullmatch(piece) else literal_ids(self.show(piece)) if piece else []
            )
        return made

    def check(self, messages, text):
        shown = self.show(text)
        for one in messages:
            content = content_of(one)
            forms = [content.strip(), *(json.dumps(content, ensure_ascii=a)[1:-1] for a in (True, False))]
            if one["role"] != "assistant" and not any(form in shown for form in forms):
                raise Refused("left out")


class Naive:
    """What must be asked and given. Turns are dicts, in a list in the order of their numbers."""

    def __init__(self, template):
        self.template, self.turns, self.begun, self.reasons = template, [], False, []
        self.known = known_of(template)

    def expected(self, request):
        """(the ids to be asked, the parent's number, the full text)."""
        messages, tools, kwargs = request.messages, request.tools, request.template_kwargs
        best, other = None, None
        for turn in self.turns:
            if turn["gone"]:
                continue
            history = [*turn["messages"], turn["answer"]]
            if len(history) > len(messages) or not all(map(same_message, history, messages)):
                continue
            if turn["tools"] != tools or turn["kwargs"] != kwargs:
                if other is None or len(history) > other[0]:
                    other = (len(history), "template" if turn["tools"] == tools else "tools")
                elif len(history) == other[0] and turn["tools"] == tools:
                    other = (len(history), "template")
                continue
            known = (len(history), -other_ids(history, messages), not turn["continued"], -turn["number"])
            if best is None or known > best[0]:
                best = (known, turn)
        rendered = Rendered(self.template)
        reason = other[1] if other else "edited" if self.begun else "first"
        if best is not None:
            turn = best[1]
            history = len(turn["messages"]) + 1
            full = rendered.text(messages, tools, kwargs, True)
            glue = self.glue(rendered, turn, messages[:history], full, tools, kwargs)
            if glue is not None:
                rendered.check(messages[history:], glue)
                turn["continued"] = True
                ids = [*turn["prompt"], *turn["ids"], *rendered.ids(glue)]
                return ids, turn, rendered.show(full)
            letters = all(map(same_to_the_letter, turn["messages"], messages))
            reason = "template" if letters else "edited"
        full = rendered.text(messages, tools, kwargs, True)
        rendered.check(messages, full)
        ids = rendered.ids(full)
        self.begun = True
        self.reasons.append((request, reason))
        return ids, None, rendered.show(full)

    def glue(self, rendered, turn, history, full, tools, kwargs):
        """The text behind what was sampled, in which words stand for control tokens; None: it is a new
        conversation.
        """
        shown, end = rendered.show(full), end_of(self.template)
        if not shown.startswith(turn["full"]):
            return None
        last = text_of(turn["ids"][-1:]) if turn["stopped"] else ""
        sampled = text_of(turn["ids"]).removesuffix(last)
        for one in {last: 0, end if turn["stopped"] else last: 0}:
            if (one or not turn["stopped"]) and shown.startswith(turn["full"] + sampled + one):
                rest = shown[len(turn["full"] + sampled + one) :]
                return next(full[at:] for at in range(len(full) + 1) if rendered.show(full[at:]) == rest)
        before = rendered.text(history, tools, kwargs, False)
        before = before.removesuffix(self.known.tail)
        others = [one for one in (self.known.call_end, *self.known.others) if one and end]
        end = next((one for one in (end, *others) if one and before.endswith(one)), "")
        assert end or not end_of(self.template), before[-50:]
        before = before.removesuffix(end) if end else before
        if not full.startswith(before) or len(rendered.show(before)) < len(turn["full"]):
            return None
        rest = full.removeprefix(before)
        end = end_of(self.template) if end in self.known.others and end != self.known.call_end else end
        return rest.removeprefix(end or last) if turn["stopped"] else rest

    def add(self, request, parent, full, record, number, answer, stopped):
        self.turns.append(
            {
                "number": number,
                "request": request,
                "messages": request.messages,
                "tools": request.tools,
                "kwargs": request.template_kwargs,
                "answer": answer,
                "full": full,
                "prompt": record["prompt"],
                "ids": record["ids"],
                "record": record,
                "parent": parent,
                "stopped": stopped,
                "continued": False,
                "gone": False,
            }
        )
        self.turns.sort(key=lambda turn: turn["number"])

    def take_back(self, number):
        for turn in self.turns:
            if turn["number"] == number and not turn["continued"]:
                turn["gone"] = True

    def all_forks(self):
        """Requests with roots by reason, of which one is the first, and how many requests beside the first
        each answer has behind it.
        """
        roots = [turn for turn in self.turns if turn["parent"] is None and not turn["gone"]]
        forks = {}
        for request, reason in self.reasons:
            if any(turn["request"] is request for turn in roots):
                reason = "edited" if reason == "first" else reason
                reason = "first" if request is roots[0]["request"] else reason
                forks[reason] = forks.get(reason, 0) + 1
        behind = {}
        for turn in self.turns:
            if turn["parent"] is not None and not turn["gone"]:
                behind.setdefault(turn["parent"]["number"], set()).add(id(turn["request"]))
        earlier = sum(len(requests) - 1 for requests in behind.values())
        return forks | ({"earlier": earlier} if earlier else {})

    def branches(self):
        """[(turns from the root to the leaf, how many are sampled elsewhere)] in order."""
        kept = [turn for turn in self.turns if not turn["gone"]]
        owner, heads = {}, []

        def behind(turn):
            """What goes on with its branch: the first that does not end cut, else the first."""
            own = [one for one in kept if one["parent"] is turn]
            return next((one for one in own if not ends_cut(one)), own[0] if own else None)

        def ends_cut(turn):
            later = behind(turn)
            return turn["record"]["part"].finish_reason == "length" if later is None else ends_cut(later)

        for turn in kept:
            parent = turn["parent"]
            if parent is not None and behind(parent) is turn:
                owner[turn["number"]] = owner[parent["number"]]
            else:
                owner[turn["number"]] = len(heads)
                heads.append(turn)
        made = []
        for branch in range(len(heads)):
            own = [turn for turn in kept if owner[turn["number"]] == branch]
            path, turn = [], own[-1]
            while turn is not None:
                path.insert(0, turn)
                turn = turn["parent"]
            made.append((path, len(path) - len(own)))
        return made
