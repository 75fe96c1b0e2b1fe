"""A grammar of what may be wrong with a JSON answer: a field dropped, doubled, retyped, out of
range, and so on.

Then also its bytes: cut, inserted, taken out, changed, swapped.
"""

import copy
import json
import math

from hypothesis import strategies as st

JUNK = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    6,
    7,
    2.5,
    7.0,
    0.5,
    -0.5,
    1e-4,
    1e30,
    -1e30,
    math.nan,
    math.inf,
    -math.inf,
    2**63,
    10**30,
    -(10**400),
    "",
    "x",
    "\ud800x",
    "-1.0",
    "5",
    "stop",
    "length",
    "abort",
    [],
    [1],
    [[]],
    ["x"],
    [None],
    {},
    {"a": 1},
    {"type": "abort", "status_code": 401},
    {"type": "abort"},
    {"version": "a", "start": 0, "end": 6},
)
BYTES = tuple(b'[]{},:"ntful0159-.eE \\') + (0, 255)
TWICE = "\0"
"""The end of a key that is written without it: JSON text may have a key twice, a dict may not."""


def places(tree, path=()):
    """The paths of all nodes, the tree's own first."""
    yield path
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


def written(tree) -> bytes:
    """Compact JSON, as a server writes it."""
    return json.dumps(tree, separators=(",", ":")).encode().replace(b'\\u0000"', b'"')


def _changed(node, step, junk):
    """The node with something done to it that stays within it."""
    if isinstance(node, list) and node:
        at = step % len(node)
        return (
            node[:at],
            node[:at] + node[at + 1 :],
            [*node, node[at]],
            node[::-1],
            node[:at] + [junk] + node[at:],
            node[at:] + node[:at],
            [node],
        )[step // 7 % 7]
    if isinstance(node, dict) and node:
        key = sorted(node)[step % len(node)]
        rest = {name: value for name, value in node.items() if name != key}
        return (
            rest,
            rest | {f"{key}s": node[key]},
            node | {key + TWICE: junk},
            {key + TWICE: junk} | node,
            [node],
        )[step // 7 % 5]
    if isinstance(node, str):
        return (node.upper(), node + "=", node[: step % (len(node) + 1)], node * 2, [node])[step // 7 % 5]
    if isinstance(node, (int, float)):
        return (node + 1, node - 1, -node, node * 1.0, str(node), node * 1e6, bool(node), [node])[
            step // 7 % 8
        ]
    return junk


def mutated_tree(tree, paths, place, step, junk):
    """A copy of the tree with one node changed, or put in its place: junk. Paths that are gone
    leave it as it is.
    """
    tree = copy.deepcopy(tree)
    *way, last = paths[place % len(paths)] or (None,)
    if last is None:
        return _changed(tree, step, junk)
    node = tree
    try:
        for key in way:
            node = node[key]
        node[last] = junk if step % 3 == 0 else _changed(node[last], step, junk)
    except (LookupError, TypeError, OverflowError):
        pass
    return tree


def mutated_bytes(body, place, step, byte):
    """The body with one edit."""
    at = place % (len(body) + 1)
    end, one = at + step // 6 % 9, bytes([byte])
    return (
        body[:at],
        body[:at] + one + body[at:],
        body[:at] + body[end:],
        body[:at] + one + body[at + 1 :],
        body[:at] + body[at + 1 : at + 2] + body[at : at + 1] + body[at + 2 :],
        body[:end] + body[at:],
    )[step % 6]


def mutated(body: bytes) -> st.SearchStrategy[bytes]:
    """Answers that were once this one, one to three changes ago."""
    tree = json.loads(body)
    paths = list(places(tree))
    numbers = st.integers(0, 2**16 - 1)
    change = st.tuples(numbers, numbers, st.sampled_from(JUNK))
    edit = st.tuples(numbers, numbers, st.sampled_from(BYTES))

    def of_tree(changes):
        changed = tree
        for place, step, junk in changes:
            changed = mutated_tree(changed, paths, place, step, junk)
        return written(changed)

    def of_bytes(edits):
        changed = body
        for place, step, byte in edits:
            changed = mutated_bytes(changed, place, step, byte)
        return changed

    return st.one_of(
        st.lists(change, min_size=1, max_size=2).map(of_tree),
        st.lists(edit, min_size=1, max_size=2).map(of_bytes),
    )
