"""Samples as people read them: text of tokens, why they were dropped, the command, the page."""

import math
import re
from dataclasses import replace

import pytest
import torch

from megatron_rl_corr import cli
from megatron_rl_corr.commands.report.page import write_page
from megatron_rl_corr.commands.report.page_samples import STEPS, TOKENS, page_samples
from megatron_rl_corr.commands.samples.rejected import find_rejections
from megatron_rl_corr.commands.samples.sample_text import lines_of
from megatron_rl_corr.commands.samples.sample_view import ViewSettings, views_of
from megatron_rl_corr.commands.samples.token_text import TextSpan, text_spans
from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.engines.trajectory import MessageSpan, VersionSpan
from megatron_rl_corr.tables import visible
from tests.commands.report.test_page import read
from tests.observability.samples import END, sample, save_tokenizer, write_run

pytestmark = pytest.mark.usefixtures("figures_drawn_once")

NAN = math.nan
RULES = RolloutCorrectionConfig.from_dict(
    {"rollout_rs": ["token_ratio", "seq_mean_ratio"], "rollout_rs_threshold": ["0.25_4.0", "0.5_2.0"]}
)
"""A token is kept for |D| <= ln 4 = 1.386, a sequence where the mean of D is at most ln 2 = 0.693."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(model):
    return Tokenizer.from_folder(model)


def test_spans_when_a_character_takes_several_tokens_then_one_span_has_them_all(tokenizer):
    ids = tokenizer.encode("a 你é🙂") + [END]
    assert text_spans(tokenizer, ids) == [
        TextSpan("a", 0, 1),
        TextSpan(" ", 1, 2),
        TextSpan("你", 2, 5),
        TextSpan("é", 5, 7),
        TextSpan("🙂", 7, 11),
        TextSpan("<|im_end|>", 11, 12),
    ]


def test_spans_when_bytes_are_no_character_then_their_ids_stand_for_them(tokenizer):
    [first, *rest], [letter] = tokenizer.encode("你"), tokenizer.encode("x")
    assert text_spans(tokenizer, [first, letter, rest[0], first]) == [
        TextSpan(f"⟨{first}⟩", 0, 1),
        TextSpan("x", 1, 2),
        TextSpan(f"⟨{rest[0]}⟩", 2, 3),
        TextSpan(f"⟨{first}⟩", 3, 4),
    ]
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        ids = torch.randint(0, END + 1, (12,), generator=generator).tolist()
        spans = text_spans(tokenizer, ids)
        assert [place for span in spans for place in range(span.first, span.last)] == list(range(12)), ids
        assert "\ufffd" not in "".join(span.text for span in spans), ids


def test_spans_when_there_is_no_tokenizer_then_ids():
    assert text_spans(None, [3, 17]) == [TextSpan("3 ", 0, 1), TextSpan("17 ", 1, 2)]


def test_visible_when_characters_act_on_a_terminal_then_they_are_escaped():
    assert visible("a\x1b[31m\r\u202ebé\n\tc\x00") == "a\\x1b[31m\\r\\u202ebé\n\tc\\x00"


def test_rejections_when_computed_again_then_each_rule_names_its_own_tokens():
    far = sample([1, 2, 3], [0.0, 1.5, NAN], index=0)  # mean of the first two: 0.75, outside
    near = sample([1, 2, 3], [0.1, -1.5, 0.2], index=1)
    first, second = find_rejections([far, near], RULES)
    assert {name: own.tolist() for name, own in first.items()} == {
        "token_ratio in [0.25, 4]": [False, True, False],
        "seq_mean_ratio in [0.5, 2]": [True, True, False],
        "no finite log-prob": [False, False, True],
    }
    assert {name: own.tolist() for name, own in second.items()} == {
        "token_ratio in [0.25, 4]": [False, True, False]
    }
    assert find_rejections(
        [far], RolloutCorrectionConfig.from_dict({"preset": "decoupled_geo_rs", "diagnostics_only": True})
    ) == [{}]
    masked = RolloutCorrectionConfig.from_preset("decoupled_token_icepop")  # 0 outside [0.5, 5]
    assert find_rejections([near], masked)[0]["token weight in [0.5, 5]"].tolist() == [False, True, False]


@pytest.mark.parametrize(("name", "bound"), [("seq_mean_opsm", "0.1"), ("seq_mean_vaco", "0.1")])
def test_rejections_when_a_rule_looks_at_advantages_then_it_is_left_out(name, bound):
    """A file's advantages are those of after rejection, so -0.05 of before may be +0.3 in it."""
    config = RolloutCorrectionConfig.from_dict({"rollout_rs": name, "rollout_rs_threshold": bound})
    bad = sample([1, 2], [-1.5, -1.5], advantages=torch.full((2,), -0.5))
    assert find_rejections([bad], config) == [{}]


def test_view_when_tokens_share_a_character_then_the_largest_ratio_and_what_an_environment_said_is_marked(
    tokenizer,
):
    ids = tokenizer.encode("你ok")
    turns = torch.tensor([0, 0, 0, -1, 1])
    made = sample(ids, [0.1, -0.8, 0.2, 9.0, 0.0], kept=[1, 0, 1, 0, 1], turn_ids=turns)
    (view,) = views_of([made], [None], ViewSettings(tokenizer))
    _, turn, reply, later = view.conversation
    [first], [said], [last] = turn.spans, reply.spans, later.spans
    assert (first.text, first.rejected, first.shade) == ("你", True, "n3")
    assert first.log_ratio == pytest.approx(-0.8) and said.environment and said.log_ratio is None
    assert (last.shade, last.rejected) == ("", False)
    assert view.notes[1] == "3 of 4 tokens enter the loss; why is not known without the run's run.json"
    assert [(one.role, one.words, one.is_policy) for one in view.conversation] == [
        ("prompt", "1 tokens", False),
        ("policy", "turn 0 | 3 tokens | mean |D| 0.3667, largest -0.8 | 1 not in the loss", True),
        ("environment", "1 tokens", False),
        ("policy", "turn 1 | 1 tokens | mean |D| 0, largest +0", True),
    ]


EVIL = "<script>alert(1)</script>\x1b[2J\n[assistant] turn 9"
"""What a hostile agent, tool or policy may write: markup, an escape, a line that looks like a head."""


def branch_of(tokenizer, pieces, *, shared=0, ratio=0.3, **known):
    """A branch of (role, text, turn or None) messages. Its prompt ends where the first turn behind the first
    `shared` of them begins.
    """
    ids, messages, turns, prompt = [], [], [], None
    for place, (role, text, turn) in enumerate(pieces):
        own = tokenizer.encode(text)
        messages.append(MessageSpan(role, len(ids), "" if turn is None else known.get("ended", "stop")))
        if turn is not None and place >= shared and prompt is None:
            prompt = len(ids)
        ids += own
        turns += [-1 if turn is None else turn] * len(own)
    behind = torch.tensor(turns[prompt:])
    row = sample(ids[prompt:], [ratio] * len(behind), prompt=ids[:prompt], turn_ids=behind)
    trajectory = replace(
        row.trajectory,
        messages=tuple(messages),
        branch=known.get("branch", 0),
        began=known.get("began", "first"),
        weight_versions=known.get("versions", row.trajectory.weight_versions),
    )
    return replace(row, trajectory=trajectory, loss_mask=behind != -1)


def episode_of(tokenizer):
    """Three branches: a conversation, a second answer behind its first turn, and an edited history."""
    ask, call = ("user", "What?", None), ("assistant", "look it up", 0)
    result = ("tool", EVIL, None)
    versions = (VersionSpan("v-1", 0, 3), VersionSpan("v-2", 3, 10 + len(tokenizer.encode(EVIL)) + 5))
    first = branch_of(tokenizer, [ask, call, result, ("assistant", "<b>4\x07", 1)], versions=versions)
    again = branch_of(
        tokenizer,
        [ask, call, ("user\n[x]", "no", None), ("assistant", "5", 1)],
        shared=2,
        branch=1,
        began="earlier",
        ended="length",
    )
    edited = branch_of(tokenizer, [("user", "Who?", None), ("assistant", "me", 0)], branch=2, began="edited")
    return [first, again, edited]


def test_view_when_an_episode_forks_then_what_is_shared_is_shown_once(tokenizer):
    views = views_of(episode_of(tokenizer), [None] * 3, ViewSettings(tokenizer))
    assert [view.head.split(" | ")[0] for view in views] == [
        "group 7, sample 0",
        "branch 1 leaves branch 0 before its turn 1, behind 15 tokens, 2 messages: the agent goes on from "
        "there once more",
        "branch 2 begins anew: the agent's history is another one",
    ]
    assert "3 branches" in views[0].head
    assert [[one.role for one in view.conversation] for view in views] == [
        ["user", "assistant", "tool", "assistant"],
        ["user\\n[x]", "assistant"],
        ["user", "assistant"],
    ]
    turn = views[0].conversation[1]
    assert turn.words == "turn 0 | 10 tokens | mean |D| 0.3, largest +0.3 | weights v-1"
    assert "".join(one.text for one in turn.spans) == "loo[weights v-2]k it up"
    assert views[1].conversation[1].words.endswith("| cut (length)")


def test_view_when_an_answer_calls_tools_then_they_are_named(tokenizer, model, tmp_path):
    call = '<tool_call>{"name": "look", "arguments": {"q": 1}}</tool_call><|im_end|>'
    made = branch_of(tokenizer, [("user", "What?", None), ("assistant", call, 0)])
    for form, words in (("hermes", "turn 0 | calls look | "), ("auto", "turn 0 | ")):
        (view,) = views_of([made], [None], ViewSettings(tokenizer, tool_format=form))
        assert view.conversation[1].words.startswith(words) and ("calls" in words) == (form == "hermes")
    thought = [("user", "What?", None), ("assistant", f"<think>{call[:-10]}</think>No.<|im_end|>", 0)]
    made = branch_of(tokenizer, thought)
    (view,) = views_of([made], [None], ViewSettings(tokenizer, tool_format="hermes"))
    assert "calls" not in view.conversation[1].words


def test_view_when_a_conversation_is_long_then_its_middle_is_left_out(tokenizer):
    pieces = [("user", "x" * 50, None)]
    for turn in range(20):
        pieces += [("assistant", f"{turn}", turn), ("tool", "y", None)]
    pieces.append(("assistant", "end", 20))
    (view,) = views_of([branch_of(tokenizer, pieces)], [None], ViewSettings(tokenizer, 10, 6))
    assert [(one.role, one.words.split(" | ")[0]) for one in view.conversation] == [
        ("user", "50 tokens"),
        ("assistant", "turn 0"),
        ("tool", "1 tokens"),
        ("assistant", "turn 1"),
        ("...", "36 messages"),
        ("tool", "1 tokens"),
        ("assistant", "turn 20"),
    ]
    text = "".join(one.text for one in view.conversation[0].spans)
    assert text == "x" * 6 + " [... 40 tokens ...] " + "x" * 4


@pytest.mark.parametrize("coloured", [False, True])
def test_command_when_an_agent_is_hostile_then_nothing_of_it_acts_or_looks_like_ours(tokenizer, coloured):
    views = views_of(episode_of(tokenizer), [None] * 3, ViewSettings(tokenizer))
    lines = "\n".join(line for view in views for line in lines_of(view, coloured=coloured)).split("\n")
    shown = [re.sub(r"\033\[[0-9;]*m", "", line) for line in lines]
    assert all(one.isprintable() for one in shown) and coloured == (lines != shown)
    # A text's lines are further to the right than any head.
    assert "      [assistant] turn 9" in shown and "      <script>alert(1)</script>\\x1b[2J" in shown
    heads = [line for line in shown if line.startswith("  ") and not line.startswith("   ")]
    assert [head.split(" | ")[0].strip() for head in heads] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user\\n[x]",
        "assistant",
        "user",
        "assistant",
    ]


def test_page_when_an_episode_is_hostile_then_its_messages_are_text(tmp_path, model, tokenizer):
    path = write_page(write_run(tmp_path / "run", {1: episode_of(tokenizer)}, model, RULES))
    document, source = read(path), path.read_text()
    assert not {"script", "b"} & set(document.tags) and "<script" not in source and "\x1b" not in source
    shown = document.text.replace("\n", "")
    assert "<script>alert(1)</script>\\x1b[2J" in shown and "<b>4\\x07" in shown
    assert 'class="p2" title="D = +0.300"' in source and "branch 2 begins anew" in shown
    assert "Step 1: 1 of 1 samples" in shown


def test_command_when_samples_have_branches_then_an_episode_is_one(tmp_path, model, tokenizer, capsys):
    other = [
        replace(one, trajectory=replace(one.trajectory, sample_index=1), reward=1.0)
        for one in episode_of(tokenizer)
    ]
    run = write_run(tmp_path / "run", {1: [*episode_of(tokenizer), *other]}, model, RULES)
    assert cli.main(["samples", str(run), "--best", "--limit", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("step 1: 1 of 2 samples; steps") and "sample 1 | 3 branches" in shown
    assert shown.count("branch 1 leaves") == shown.count("branch 2 begins") == 1


def run_of(tmp_path, model, tokenizer, texts, steps=1):
    """A run whose samples have these texts; the last one's D rejects it."""
    samples = []
    for place, text in enumerate(texts):
        ids, last = tokenizer.encode(text), place == len(texts) - 1
        samples.append(
            sample(
                ids,
                [0.9 if last else 0.01] * len(ids),
                index=place,
                group=7 + place // 2,
                reward=place % 2,
                kept=[not last] * len(ids),
                reward_parts={"math": place % 2, "format": 0.5},
                prompt=tokenizer.encode("What?"),
            )
        )
    return write_run(tmp_path / "run", dict.fromkeys(range(1, steps + 1), samples), model, RULES)


def test_command_when_asked_then_samples_with_reward_reason_and_text(tmp_path, model, tokenizer, capsys):
    run = run_of(tmp_path, model, tokenizer, ["one", "two", "three", "你\x1b[0m"], steps=2)
    assert cli.main(["samples", str(run), "--dropped"]) == 0
    assert capsys.readouterr().out == (
        "step 2: 1 of 1 samples (of 4 in all); steps with files: 2, 1 to 2\n\n"
        "group 8, sample 3 | row 40 | reward 1 (math 1, format 0.5) | advantage 0.5 | 7 tokens | stop | "
        "weights 5f2c91ab-4\nlabel: 42\ndropped: seq_mean_ratio in [0.5, 2] rejects 7\n"
        "largest |D|: '你' +0.9, '\\\\x1b' +0.9, '[' +0.9\nprompt: What?\nresponse: 你\\x1b[0m\n"
    )
    for arguments, texts in (
        (["--worst", "--step", "1"], ["one", "three", "two", "你\\x1b[0m"]),
        (["--best", "--limit", "1"], ["two"]),
        (["--group", "7"], ["one", "two"]),
        ([], ["one", "two", "three", "你\\x1b[0m"]),
    ):
        assert cli.main(["samples", str(run), *arguments]) == 0
        assert re.findall("response: (.*)", capsys.readouterr().out) == texts
    files = [str(path) for path in sorted((run / "samples").iterdir())]
    assert cli.main(["samples", *files, "--step", "1", "--ids", "--group", "7", "--limit", "1"]) == 0
    assert f"response: {' '.join(map(str, tokenizer.encode('one')))} \n" in capsys.readouterr().out


def test_command_when_coloured_then_ratio_and_rejection_show_and_escapes_are_only_ours(
    tmp_path, model, tokenizer, capsys
):
    run = run_of(tmp_path, model, tokenizer, ["a", "b\nc", "你\x1b[0m"])
    assert cli.main(["samples", str(run), "--color", "always", "--dropped"]) == 0
    response = capsys.readouterr().out.split("response:")[1]
    # p3, struck through: 5 spans
    assert response.count("\033[30;48;5;111m\033[9m") == 5 and "\\x1b" in response
    assert re.sub(r"\033\[[0-9;]*m", "", response).strip() == "你\\x1b[0m"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["RUN", "--step", "9"], "no samples of step 9: there are files of 1 steps, 1 to 1"),
        (["RUN", "--group", "3"], "no sample of group 3; the step has 7"),
        (["RUN", "--limit", "0"], "--limit must be at least 1, got 0"),
        (["RUN", "--tokenizer", "RUN"], "there is no file of a tokenizer in it"),
        (["RUN", "--tokenizer", "nowhere"], "the model's folder nowhere is not there"),
        (["nowhere"], "no such file or folder: nowhere"),
        (["RUN", "RUN"], "give one folder, or files"),
    ],
)
def test_command_when_something_is_missing_then_it_is_named(
    tmp_path, model, tokenizer, capsys, arguments, said
):
    run = run_of(tmp_path, model, tokenizer, ["one"])
    assert cli.main(["samples", *[str(run) if one == "RUN" else one for one in arguments]]) == 2
    assert said in capsys.readouterr().err


def test_page_when_samples_hold_markup_then_they_are_text(tmp_path, model, tokenizer):
    text = '<script>alert("1")</script><b title=x>&amp;\n</pre>'
    path = write_page(run_of(tmp_path, model, tokenizer, [text, "<i>two</i>"]))
    document = read(path)
    assert not {"script", "b", "i"} & set(document.tags) and "<script" not in path.read_text()
    shown = re.sub(r"\n", "", document.text)
    assert re.sub(r"\n", "", text) in shown and "<i>two</i>" in shown
    assert "seq_mean_ratio in [0.5, 2] rejects 10" in shown


def test_page_when_a_run_is_long_then_few_samples_and_tokens_of_few_steps(tmp_path, model, tokenizer):
    run = run_of(tmp_path, model, tokenizer, ["x" * 5000, "y", *(str(n) for n in range(30))], steps=9)
    shown = page_samples(run)
    assert [step["step"] for step in shown["steps"]] == [1, 5, 9] and shown["all_steps"] == 9
    assert all(len(step["samples"]) <= 4 and step["of"] == 32 for step in shown["steps"])
    views = [view for step in shown["steps"] for one in step["samples"] for view in one["branches"]]
    assert max(len(view.response) for view in views) == TOKENS + 1 and {view.left_out for view in views} == {
        0,
        4600,
    }
    assert write_page(run).stat().st_size < 400_000 and len(views) <= STEPS * 4


def test_page_when_the_samples_or_the_tokenizer_are_gone_then_it_says_so(tmp_path, model, tokenizer):
    run = run_of(tmp_path, model, tokenizer, ["one"])
    (run / "samples").rename(tmp_path / "elsewhere")
    assert "samples, which is not there; give the folder" in read(write_page(run)).text
