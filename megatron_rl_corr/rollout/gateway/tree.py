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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl_corr.engines.trajectory import ENVIRONMENT, Support, Trajectory, VersionSpan, concatenated
from megatron_rl_corr.rollout.gateway.templates import Message, Templates, digest, ids_of

REASONS = ("first", "edited", "tools", "template")
"""Why a request is a root. first: it is the episode's first. edited: it continues no answer, as the history
is another one, or there is none. tools: only the tools are others. template: the template writes the history
another way now (it leaves out thoughts, moves or merges messages), or got other variables.
"""


class Line:
    """Ids that grow at their end. Lines share memory with those that they begin with, so that an episode of
    many turns has its ids once, and each fork a copy.
    """

    def __init__(self, ids: Tensor, grown: _Memory | None = None):
        self.ids, self._memory = ids, grown or _Memory(ids, ids.numel())

    def plus(self, ids: Tensor) -> Line:
        """The line with these behind; this one stays as it is."""
        begin, end, memory = self.ids.numel(), self.ids.numel() + ids.numel(), self._memory
        if memory.used != begin or memory.ids.numel() < end:
            memory = _Memory(self.ids.new_empty(2 * end), end)
            memory.ids[:begin] = self.ids
        memory.ids[begin:end], memory.used = ids, end
        return Line(memory.ids[:end], memory)


@dataclass
class _Memory:
    ids: Tensor
    used: int


@dataclass(eq=False)
class AskedTurn:
    """A request: what is sampled from, and how it came about."""

    parent: Turn | None
    """The turn that it continues; None: a root."""
    reason: str | None
    """One of REASONS, of a root."""
    line: Line
    """All ids, [P]."""
    added: Tensor
    """[B] int64: those behind the parent's; of a root all."""
    added_text: str
    """As the template wrote it, shielded; of a raw request its text behind the parent's, or "" for ids."""
    messages: list[Message] | None = None
    """The conversation; None: it is a raw text or ids."""
    tools: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    chain: bytes = b""
    """The digest of the messages."""
    shown: tuple[int, bytes] | None = None
    """Length and digest of the conversation's text, as the template writes it."""

    @property
    def server(self) -> str | None:
        """Where the parent's tokens are in the cache."""
        return None if self.parent is None else self.parent.part.server

    @property
    def routes_known(self) -> int:
        """Tokens whose routed experts have come."""
        part = None if self.parent is None else self.parent.part
        return (
            0 if part is None or part.routed_experts is None else part.routes_from + len(part.routed_experts)
        )


@dataclass(eq=False)
class Turn:
    """One answer."""

    number: int
    asked: AskedTurn
    part: Trajectory
    """As the servers gave it; its prompt_ids are the request's."""
    line: Line
    """All ids, the answer's too."""
    ended: str | None
    """The text of the control token at its end; None: it was cut, or stopped by a text."""
    text: str
    """What was sampled, without that token."""
    whole_text: str
    """What was sampled, that token too."""
    seal: bytes
    """Digest of the ids and log-probs that the servers gave, and of all before."""
    depth: int
    key: bytes | None = None
    """Digest of the conversation with the answer; None: it is a raw text."""
    children: list[Turn] = field(default_factory=list)
    continued: bool = False
    """A request has had it in its history: the harness has the answer."""
    rerendered: bool = False
    """The template writes the answer in another way than it was sampled; the ids are as sampled."""

    @property
    def parent(self) -> Turn | None:
        """The turn that it continues."""
        return self.asked.parent

    def path(self) -> list[Turn]:
        """The turns from the root to this one."""
        turns = [self]
        while turns[-1].parent is not None:
            turns.append(turns[-1].parent)
        return turns[::-1]


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
        self._tools: list[list[dict[str, Any]]] = []
        """The lists of tools that differ, likewise."""
        self.next_number = 0
        """The number of the next answer."""
        self._has_begun = False
        self.forks = dict.fromkeys(REASONS, 0)
        """Roots that were asked for, by reason."""
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

        Raises:
            ValueError: the template can't render it.
        """
        if not given:
            raise ValueError("`messages` must not be empty")
        variables, tools = dict(variables or {}), self._tools_once(tools)
        messages = [self._message(one) for one in given]
        chain = _chain(messages)
        parent, history, reason = self._longest(chain, tools, variables)
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
            shown=(len(text), _digest(text)),
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
        turn = Turn(
            self.next_number,
            asked,
            replace(part, prompt_ids=asked.line.ids),
            asked.line.plus(part.output_ids),
            ended,
            text,
            text + (ended or ""),
            _seal(parent and parent.seal, asked.added, part.output_ids, part.rollout_logprobs),
            0 if parent is None else parent.depth + 1,
        )
        if answer is not None:
            turn.key = _link(asked.chain, self._message(answer).key)
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
        return [_branch(leaf.path(), shared, number) for number, (leaf, shared) in enumerate(self.leaves())]

    def check(self, branches: Sequence[Trajectory] | None = None, *, renders: bool = True) -> list[str]:
        """The proof of the episode: what is wrong with it, nothing if it is exact.

        Each conversation is rendered once more from its messages, and what is not sampled must be the
        template's text and its ids. What is sampled must be what the servers gave, at that place behind those
        tokens, in one branch each, with its log-probs.

        Args:
            branches: of the episode; None: those of `branches`.
            renders: False: nothing is rendered and tokenised, which takes as long as all requests did.
        """
        problems = [text for turn in self.turns() for text in self._problems_of(turn, renders)]
        branches = self.branches() if branches is None else branches
        leaves = self.leaves()
        if len(branches) != len(leaves):
            return [*problems, f"{len(leaves)} branches are {len(branches)}"]
        seen: set[int] = set()
        for branch, (leaf, _) in zip(branches, leaves, strict=True):
            problems += _problems_of_branch(branch, leaf.path(), seen)
        problems += [
            f"turn {turn.number} is sampled in no branch" for turn in self.turns() if turn.number not in seen
        ]
        return problems

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
        if tools not in self._tools:
            self._tools.append(tools)
        return self._tools[self._tools.index(tools)]

    def _reason(self) -> str:
        return "edited" if self._has_begun else "first"

    def _root(self, ids: Tensor, text: str, reason: str, **what: Any) -> AskedTurn:
        if reason == "first" and self._has_begun:  # another one meanwhile, while its text was tokenised
            reason = "edited"
        self._has_begun = True
        self.forks[reason] += 1
        return AskedTurn(None, reason, Line(ids), ids, text, **what)

    def _longest(
        self, chain: Sequence[bytes], tools: Any, variables: Mapping[str, Any]
    ) -> tuple[Turn | None, int, str]:
        """(the turn whose conversation is the longest of those that the messages begin with, its messages,
        the reason to begin anew if there is none).

        Of several turns with one conversation it is one that nothing continues yet, the first of these: so of
        equal answers to several agents each gets its own continuation.
        """
        reason = self._reason()
        for history in range(len(chain), 0, -1):
            found = self._by_key.get(chain[history - 1], ())
            same = [one for one in found if one.asked.tools == tools and one.asked.variables == variables]
            if same:
                return min(same, key=lambda one: (one.continued, one.number)), history, ""
            if found and reason in ("first", "edited"):
                reason = "template" if any(one.asked.tools == tools for one in found) else "tools"
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
            follows=lambda text: _follows(text, parent.asked.shown),
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
            shown=(len(found.full), _digest(found.full)),
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

    def _problems_of(self, turn: Turn, renders: bool) -> list[str]:
        asked, parent, where = turn.asked, turn.parent, f"turn {turn.number}"
        problems = []
        part, sealed = turn.part, parent and parent.seal
        if turn.seal != _seal(sealed, asked.added, part.output_ids, part.rollout_logprobs):
            problems.append(f"{where}: its ids or log-probs are not those that a server gave")
        before = torch.empty(0, dtype=torch.int64) if parent is None else parent.line.ids
        if not torch.equal(torch.cat([before, asked.added]), turn.part.prompt_ids):
            problems.append(f"{where}: it was not sampled behind the tokens before it")
        if not renders:
            return problems
        if asked.messages is None:
            return problems + self._problems_of_raw(asked, where)
        text = self._templates.render(asked.messages, asked.tools, asked.variables, asks=True)
        if asked.shown != (len(text), _digest(text)):
            problems.append(f"{where}: the template writes its conversation another way now")
        if parent is not None:
            found = self._templates.continuation(
                asked.messages,
                self._history(asked),
                asked.tools,
                asked.variables,
                follows=lambda text: _follows(text, parent.asked.shown),
                text=parent.text,
                ended=parent.ended,
            )
            text = None if found is None else found.glue
        if text != asked.added_text:
            return [*problems, f"{where}: the template's text behind what was sampled is another one"]
        made = self._templates
        ids = made.encode(text) if parent is None else made.encode_behind(text, parent.ended)
        if ids != asked.added.tolist():
            problems.append(f"{where}: the ids that were not sampled are not those of the template's text")
        return problems

    def _problems_of_raw(self, asked: AskedTurn, where: str) -> list[str]:
        text, made = asked.added_text, self._templates
        ids = made.encode_raw(text) if asked.parent is None else made.encode_behind(text, asked.parent.ended)
        if not text or ids == asked.added.tolist():
            return []
        return [f"{where}: the ids that were not sampled are not those of the request's text"]

    def _history(self, asked: AskedTurn) -> int:
        return len(asked.parent.asked.messages) + 1


def _chain(messages: Sequence[Message]) -> list[bytes]:
    links, last = [], b""
    for one in messages:
        last = _link(last, one.key)
        links.append(last)
    return links


def _link(chain: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(chain + key, digest_size=16).digest()


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _follows(text: str, shown: tuple[int, bytes]) -> int | None:
    """The length of the text that an answer was sampled behind; None: this one does not begin with it."""
    length, digest = shown
    return length if len(text) >= length and _digest(text[:length]) == digest else None


def _behind(given: Any, piece: Any) -> Any:
    """What a text or ids have behind a piece; None: they do not begin with it."""
    if isinstance(given, str):
        return given[len(piece) :] if given.startswith(piece) else None
    return given[piece.numel() :] if torch.equal(given[: piece.numel()], piece) else None


def _seal(before: bytes | None, added: Tensor, ids: Tensor, logprobs: Tensor) -> bytes:
    seal = hashlib.blake2b(before or b"", digest_size=16)
    for tensor in (added, ids, logprobs):
        seal.update(tensor.numel().to_bytes(8, "little") + tensor.contiguous().numpy().tobytes())
    return seal.digest()


def _branch(path: Sequence[Turn], shared: int, number: int) -> Trajectory:
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
    whole = replace(whole, turn_ids=torch.cat(kinds), branch=number)
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
        cached_tokens=cached_tokens,
    )


def _problems_of_branch(branch: Trajectory, path: Sequence[Turn], seen: set[int]) -> list[str]:
    """What is wrong with one branch; adds the numbers of the turns that it samples to `seen`."""
    where, prompt = f"branch {branch.branch}", branch.prompt_ids.numel()
    ids = torch.cat([branch.prompt_ids, branch.output_ids])
    if ids.numel() != path[-1].line.ids.numel():
        return [f"{where}: {ids.numel()} tokens, its turns have {path[-1].line.ids.numel()}"]
    problems, end, seal = [], 0, None
    kinds = torch.full_like(branch.output_ids, ENVIRONMENT)
    for turn in path:
        begin = end + turn.asked.added.numel()
        added, end, place = (
            ids[end:begin],
            begin + turn.part.output_ids.numel(),
            f"{where}, turn {turn.number}",
        )
        if begin < prompt:
            logprobs = turn.part.rollout_logprobs
            if turn.number not in seen:
                problems.append(f"{place}: it is in the prompt, and sampled in no branch before")
        else:
            logprobs = branch.rollout_logprobs[begin - prompt : end - prompt]
            kinds[begin - prompt : end - prompt] = turn.depth
            if turn.number in seen:
                problems.append(f"{place}: it is sampled in another branch too")
            seen.add(turn.number)
        seal = _seal(seal, added, ids[begin:end], logprobs)
        if seal != turn.seal:
            return [*problems, f"{place}: ids or log-probs are not those that a server gave there"]
    if not torch.equal(kinds, branch.turn_ids):
        problems.append(f"{where}: its mask is not that of the sampled tokens")
    if not branch.rollout_logprobs[kinds == ENVIRONMENT].isnan().all():
        problems.append(f"{where}: a token that was not sampled has a log-prob")
    bounds = [0, *(span.end for span in branch.weight_versions)]
    if (
        bounds[:-1] != [span.start for span in branch.weight_versions]
        or bounds[-1] != branch.output_ids.numel()
    ):
        problems.append(f"{where}: its weight versions do not cover it once")
    return problems
