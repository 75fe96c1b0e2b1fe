"""The turns of one episode: each is an answer, behind the ids that it was sampled from.

A request continues a turn if its messages begin with that turn's conversation, answer included, with the same
tools and variables of the template; the longest such conversation counts. Then its ids are those of the turn,
the sampled ones verbatim, and what the template writes behind them. Otherwise, and where the template writes
the conversation another way now, it begins anew from text: a root. Nothing sampled is ever tokenised again
for a request that continues it.

P prompt tokens, R sampled tokens, T tokens of a branch.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl_corr.engines.trajectory import ENVIRONMENT, Support, Trajectory, VersionSpan, concatenated
from megatron_rl_corr.rollout.gateway.again import Again
from megatron_rl_corr.rollout.gateway.proof import problems_of_episode
from megatron_rl_corr.rollout.gateway.templates import Message, Templates, digest, ids_of
from megatron_rl_corr.rollout.gateway.turn import AskedTurn, Line, Turn, follows, seal, shown_of

REASONS = ("first", "edited", "tools", "template")
"""Why a request is a root. first: no other root stands before it. edited: it continues no answer, as the
history is another one, or there is none. tools: only the tools are others. template: the template writes the
history another way now (it leaves out thoughts, moves or merges messages), or got other variables.
"""
EARLIER = "earlier"
"""Why a branch begins without a root: its request goes on from a turn that another one has gone on from, as
its history leaves out the answers since.
"""


class TurnTree:
    """The turns of an episode.

    Args:
        templates: of the checkpoint.
    """

    def __init__(self, templates: Templates):
        self._templates = templates
        self._roots: list[Turn] = []
        self._by_key: dict[bytes, list[Turn]] = {}
        self._messages: dict[bytes, Message] = {}
        """Each message once, though each request brings all of its conversation again."""
        self._again = Again(operator.is_)
        """Those of the last request, which are known without a look into them."""
        self._tools: dict[str, list[dict[str, Any]]] = {}
        """The lists of tools that differ, likewise, by their JSON text: Python takes 1 and true for equal."""
        self.next_number = 0
        """The number of the next answer."""
        self._has_begun = False
        self.last_server: str | None = None
        """Where the last answer came from."""

    # requests

    async def ask(
        self,
        given: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> AskedTurn:
        """The request of a conversation; its answers go to `add`.

        Args:
            given: messages, which nobody changes later: the same object is not read again.
            tools: that the template shows; None: none.
            variables: of the template.

        Raises:
            ValueError: the template can't render it.
        """
        if not given:
            raise ValueError("`messages` must not be empty")
        variables, tools = dict(variables or {}), self._tools_once(tools)
        messages = self._again.made(given, lambda one, _: self._message(one))
        chain = _chain(messages)
        parent, history, reason = self._longest(messages, chain, tools, variables)
        if parent is not None:
            asked = await self._continued(parent, history, messages, tools, variables, chain[-1])
            if asked is not None:
                return asked
            as_answered = parent.asked.messages[: history - 1]
            same = [one.plain for one in messages[: history - 1]] == [one.plain for one in as_answered]
            reason = "template" if same else "edited"
        text, ids = await self._templates.first(messages, tools, variables)
        return self._root(
            ids,
            text,
            reason,
            messages=messages,
            tools=tools,
            variables=variables,
            chain=chain[-1],
            shown=shown_of(text),
        )

    async def ask_raw(self, prompt: str | Sequence[int]) -> AskedTurn:
        """The request of a raw text, or of ids. One that begins with all of a turn, from its first token to
        its last, the control token at its end included, continues it.

        Raises:
            ValueError: the tokenizer can't encode it.
        """
        is_text = isinstance(prompt, str)
        rest = prompt if is_text else torch.tensor(list(prompt), dtype=torch.int64)
        parent = None
        found = list(self._begun_by(rest))
        if found:  # as in `_longest`
            parent, rest = max(
                found, key=lambda one: (one[0].line.ids.numel(), not one[0].continued, -one[0].number)
            )
        if parent is None:
            ids = await ids_of(self._templates.encode_raw, rest) if is_text else rest
            if not ids.numel():
                raise ValueError("`prompt` must not be empty")
            return self._root(ids, rest if is_text else "", self._reason())
        parent.continued = True
        added = rest
        if is_text:
            added = await ids_of(self._templates.encode_behind, rest, parent.ended)
        return AskedTurn(parent, None, parent.line.plus(added), added, rest if is_text else "")

    def add(
        self,
        asked: AskedTurn,
        part: Trajectory,
        *,
        ended: str | None,
        text: str,
        answer: Mapping[str, Any] | None = None,
    ) -> Turn:
        """An answer to the request, as another turn.

        Args:
            asked: the request.
            part: R of at least 1.
            ended: the spelling of the control token that it ended with; None: it did not.
            text: of the ids without that token.
            answer: the assistant's message, as the harness gets it; None: of a raw request.

        Raises:
            ValueError: it is no answer to these ids.
        """
        if not torch.equal(part.prompt_ids, asked.line.ids):
            raise ValueError(
                f"an answer to {part.prompt_ids.numel()} ids, not to the {asked.line.ids.numel()} asked for"
            )
        if not part.output_ids.numel():
            raise ValueError("an answer without a token is no turn")
        parent = asked.parent
        asked.first = self.next_number if asked.first is None else asked.first
        turn = Turn(
            self.next_number,
            asked,
            replace(part, prompt_ids=asked.line.ids),
            asked.line.plus(part.output_ids),
            ended,
            text,
            text + (ended or ""),
            seal(parent and parent.seal, asked.added, part.output_ids, part.rollout_logprobs),
            0 if parent is None else parent.depth + 1,
        )
        if answer is not None:
            turn.answer = self._message(answer)
            turn.key = _link(asked.chain, turn.answer.key)
            self._by_key.setdefault(turn.key, []).append(turn)
        (self._roots if parent is None else parent.children).append(turn)
        self.next_number += 1
        self.last_server = part.server
        return turn

    def take_back(self, turn: Turn) -> bool:
        """The harness did not get the answer, so that it is no turn; True. One that a request has had in its
        history stays, even where that request has failed: the harness has sent it back word for word, so it
        had it.
        """
        siblings = self._roots if turn.parent is None else turn.parent.children
        if turn.continued or turn not in siblings:
            return False
        siblings.remove(turn)
        if turn.key is not None:
            self._by_key[turn.key].remove(turn)
        return True

    # what came of it

    def turns(self) -> Iterator[Turn]:
        """All turns, in the order of their answers."""
        found, waiting = [], list(self._roots)
        while waiting:
            found.append(waiting.pop())
            waiting += found[-1].children
        return iter(sorted(found, key=lambda turn: turn.number))

    @property
    def forks(self) -> dict[str, int]:
        """Requests whose answers are roots, by reason, and turns that several requests have gone on from,
        each but the first of them. The answers of one request are none, nor is a request without an answer
        that the harness got.
        """
        roots = {id(root.asked): self._began(root) for root in self._roots}
        behind = [{id(child.asked) for child in turn.children} for turn in self.turns()]
        earlier = sum(len(requests) - 1 for requests in behind if requests)
        reasons = list(roots.values())
        return {reason: reasons.count(reason) for reason in REASONS} | {EARLIER: earlier}

    @property
    def rerendered(self) -> int:
        """Turns that the template writes in another way than they were sampled; only those that were
        continued are known.
        """
        return sum(turn.rerendered for turn in self.turns())

    def leaves(self) -> list[tuple[Turn, int]]:
        """(the last turn, how many turns before are in an earlier branch) of each branch, in the order in
        which the branches began.

        A turn goes on with the branch of the one before it if it is the first behind that; others begin one.
        The first is passed over whose branch ends with a cut answer, where another one's does not: cut
        sequences may be kept out of the loss, and what others continue must not go with them.
        """
        found: list[tuple[int, Turn, int]] = []
        waiting = [(root, root, 0) for root in self._roots]
        goes_on = self._goes_on()
        while waiting:
            turn, first, shared = waiting.pop()
            while turn.children:
                own = goes_on[turn]
                waiting += [(child, child, child.depth) for child in turn.children if child is not own]
                turn = own
            found.append((first.number, turn, shared))
        return [(turn, shared) for _, turn, shared in sorted(found, key=lambda one: one[0])]

    def branches(self) -> list[Trajectory]:
        """A trajectory for each turn that no other continues, numbered by `branch`.

        A turn that several share is sampled in the first of them and in the others' prompts; turn_ids count
        from the conversation's first turn in all of them.
        """
        made = []
        for number, (leaf, shared) in enumerate(self.leaves()):
            path = leaf.path()
            began = EARLIER if shared else self._began(path[0])
            made.append(replace(_branch(path, shared), branch=number, began=began))
        return made

    def check(self, branches: Sequence[Trajectory] | None = None, *, renders: bool = True) -> list[str]:
        """What is wrong with the episode, as `proof` says; nothing if it is exact.

        Args:
            branches: of the episode; None: those of `branches`.
            renders: False: nothing is rendered and tokenised, which takes as long as all requests did.
        """
        branches = self.branches() if branches is None else branches
        leaves = [turn for turn, _ in self.leaves()]
        return problems_of_episode(list(self.turns()), leaves, branches, self._templates if renders else None)

    # internals

    def _goes_on(self) -> dict[Turn, Turn]:
        """The one behind each turn that goes on with its branch, as `leaves` says."""
        found: dict[Turn, Turn] = {}
        ends_cut: dict[Turn, bool] = {}
        for turn in reversed(list(self.turns())):  # those behind it come first
            ends_cut[turn] = turn.part.finish_reason == "length"
            if turn.children:
                whole = (child for child in turn.children if not ends_cut[child])
                found[turn] = next(whole, turn.children[0])
                ends_cut[turn] = ends_cut[found[turn]]
        return found

    def _message(self, given: Mapping[str, Any]) -> Message:
        whole = digest(given)
        if whole not in self._messages:
            self._messages[whole] = self._templates.message(given)
        return self._messages[whole]

    def _tools_once(self, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        if not tools:
            return None
        return self._tools.setdefault(json.dumps(tools, sort_keys=True), tools)

    def _began(self, root: Turn) -> str:
        """The reason of a root among those that stand: others before it may have failed, or were not got."""
        if root.asked is min(self._roots, key=lambda one: one.number).asked:
            return "first"
        return "edited" if root.asked.reason == "first" else root.asked.reason

    def _reason(self) -> str:
        return "edited" if self._has_begun else "first"

    def _root(self, ids: Tensor, text: str, reason: str, **what: Any) -> AskedTurn:
        if reason == "first" and self._has_begun:  # another one meanwhile, while its text was tokenised
            reason = "edited"
        self._has_begun = True
        return AskedTurn(None, reason, Line(ids), ids, text, **what)

    def _longest(
        self, messages: Sequence[Message], chain: Sequence[bytes], tools: Any, variables: Mapping[str, Any]
    ) -> tuple[Turn | None, int, str]:
        """(the turn whose conversation is the longest of those that the messages begin with, its messages,
        the reason to begin anew if there is none).

        Of several turns with one conversation it is one whose ids of calls are those of the messages, then
        one that nothing continues yet, the first of these: so of equal answers to several agents each gets
        its own continuation.
        """
        reason = self._reason()
        for history in range(len(chain), 0, -1):
            found = self._by_key.get(chain[history - 1], ())
            same = [one for one in found if one.asked.tools is tools and one.asked.variables == variables]
            if len(same) == 1:
                return same[0], history, ""
            if same:
                given = messages[:history]
                rank = {one: (_other_ids(one, given), one.continued, one.number) for one in same}
                return min(same, key=rank.__getitem__), history, ""
            if found and reason in ("first", "edited"):
                reason = "template" if any(one.asked.tools is tools for one in found) else "tools"
        return None, 0, reason

    async def _continued(
        self,
        parent: Turn,
        history: int,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        variables: Mapping[str, Any],
        chain: bytes,
    ) -> AskedTurn | None:
        found = self._templates.continuation(
            messages,
            history,
            tools,
            variables,
            follows=lambda text: follows(text, parent.asked.shown),
            text=parent.text,
            ended=parent.ended,
        )
        if found is None:
            return None
        parent.continued = True
        parent.rerendered = parent.rerendered or found.answer != parent.text
        added = await ids_of(self._templates.encode_behind, found.glue, parent.ended)
        return AskedTurn(
            parent,
            None,
            parent.line.plus(added),
            added,
            found.glue,
            messages=messages,
            tools=tools,
            variables=variables,
            chain=chain,
            shown=shown_of(found.full),
        )

    def _begun_by(self, given: str | Tensor) -> Iterator[tuple[Turn, Any]]:
        """(turn, what is behind it) of each turn that the text or the ids begin with."""
        waiting = [(root, given) for root in self._roots]
        while waiting:
            turn, rest = waiting.pop()
            for piece in self._pieces(turn, rest):
                rest = _behind(rest, piece)
                if rest is None:
                    break
            else:
                yield turn, rest
                waiting += [(child, rest) for child in turn.children]

    def _pieces(self, turn: Turn, like: str | Tensor) -> list[Any]:
        if not isinstance(like, str):
            return [turn.asked.added, turn.part.output_ids]
        asked = self._templates.spelled_out(turn.asked.added_text)
        if turn.asked.messages is None and not asked and turn.asked.added.numel():
            asked = self._templates.decode(turn.asked.added.tolist())
        return [asked, turn.whole_text]


def _other_ids(turn: Turn, given: Sequence[Message]) -> int:
    """How many ids of calls differ between the turn's conversation and these messages, equal but for them."""
    own = [*turn.asked.messages, turn.answer]
    return sum(
        left is not None and right is not None and left != right
        for one, other in zip(own, given, strict=True)
        for left, right in zip(_call_ids(one), _call_ids(other), strict=True)
    )


def _call_ids(message: Message) -> list[str | None]:
    calls = message.plain.get("tool_calls", ())
    return [message.plain.get("tool_call_id"), *(call.get("id") for call in calls)]


def _chain(messages: Sequence[Message]) -> list[bytes]:
    links, last = [], b""
    for one in messages:
        last = _link(last, one.key)
        links.append(last)
    return links


def _link(chain: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(chain + key, digest_size=16).digest()


def _behind(given: Any, piece: Any) -> Any:
    """What a text or ids have behind a piece; None: they do not begin with it."""
    if isinstance(given, str):
        return given[len(piece) :] if given.startswith(piece) else None
    return given[piece.numel() :] if torch.equal(given[: piece.numel()], piece) else None


def _branch(path: Sequence[Turn], shared: int) -> Trajectory:
    """The trajectory of the turns from a root to a leaf, of which the first `shared` are sampled in another
    one.
    """
    kinds = [torch.zeros_like(path[0].part.output_ids)]
    for turn in path[1:]:
        kinds += [
            torch.full_like(turn.asked.added, ENVIRONMENT),
            torch.full_like(turn.part.output_ids, turn.depth),
        ]
    whole = concatenated([turn.part for turn in path], [turn.asked.added for turn in path[1:]])
    whole = replace(whole, turn_ids=torch.cat(kinds))
    first = path[shared].part
    return _cut(whole, first.prompt_ids, cached_tokens=first.cached_tokens) if shared else whole


def _cut(whole: Trajectory, prompt_ids: Tensor, *, cached_tokens: int) -> Trajectory:
    """The trajectory with a longer prompt, [P] int64, which its ids begin with."""
    count = prompt_ids.numel() - whole.prompt_ids.numel()
    spans = [
        VersionSpan(span.version, max(span.start - count, 0), span.end - count)
        for span in whole.weight_versions
        if span.end > count
    ]
    support = whole.support
    if support is not None:
        before = int(support.lengths[:count].sum())
        support = Support(support.ids[before:], support.lengths[count:])
    return replace(
        whole,
        prompt_ids=prompt_ids,
        output_ids=whole.output_ids[count:],
        rollout_logprobs=whole.rollout_logprobs[count:],
        turn_ids=whole.turn_ids[count:],
        weight_versions=tuple(spans),
        support=support,
        top_logprobs=None if whole.top_logprobs is None else whole.top_logprobs[count:],
        cached_tokens=cached_tokens,
    )
