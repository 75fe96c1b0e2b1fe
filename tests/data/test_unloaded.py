"""What can be seen of a user's function without running its file, and what is left to the loading."""

import pytest

from megatron_rl_corr.data.loading import load
from megatron_rl_corr.data.reward_input import form_of
from megatron_rl_corr.data.unloaded import check_unloaded, check_unloaded_reward


def said(check, *given):
    try:
        check(*given)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "text, name",
    [
        ("def other(): pass\nclass Also: pass\ndef _own(): pass\n", "reward"),
        ("VALUE = 3\n", "reward"),
        ("", "reward"),
        ("def outer():\n    def reward(sample): return 1\n", "reward"),
        ("class A:\n    reward = 1\n", "reward"),
        ("import os\n", "path"),
    ],
)
def test_name_when_a_file_lacks_it_then_refused_in_the_words_of_the_loading(tmp_path, text, name):
    path = tmp_path / "own.py"
    path.write_text(text)
    found = said(check_unloaded, f"{path}:{name}", "`loss`")
    assert found == said(load, f"{path}:{name}", "`loss`") and f"has no {name!r}; it has" in found


@pytest.mark.parametrize(
    "text",
    [
        "def reward(sample): return 1",
        "async def reward(sample): return 1",
        "class reward: pass",
        "reward = print",
        "from os.path import join as reward",
        "import os as reward",
        "if 1 > 0:\n    def reward(sample): return 1",
        "try:\n    import gone\nexcept ImportError:\n    def reward(sample): return 1",
        "for reward in [print]: pass",
        "with open(__file__) as reward: pass",
        "(reward := print)",
        "reward: object = print",
        "a, (reward, *b) = 1, (print, 2)",
        "from os.path import *",
        "globals()['reward'] = print",
        "def __getattr__(name): return print",
        "exec('reward = print')",
        "import sys\nsys.modules[__name__].reward = print",
        "def f():\n    global reward\n    reward = print\nf()",
        "import sys\nsys.exit(3)",
        "raise RuntimeError('no GPU')",
        "match [print]:\n    case [reward]: pass",
    ],
)
def test_name_when_a_file_has_it_or_may_then_left_to_the_loading(tmp_path, text):
    path = tmp_path / "own.py"
    path.write_text(text + "\n")
    assert said(check_unloaded, f"{path}:reward", "`loss`") is None


def test_file_when_it_is_looked_at_then_it_does_not_run(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef reward(sample): return 1\n")
    assert said(check_unloaded_reward, f"{path}:reward", "`reward_function`") is None
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content, told",
    [
        (b"def reward(sample:\n    return 1\n", "is not Python in line 1: "),
        (b"x = 1\n\x00", "is not Python"),
        (b"\xff\xfe\x00", "is not Python"),
        (b"x = 1\n  y = 2\n", "is not Python in line 2: unexpected indent"),
    ],
)
def test_file_when_it_is_no_python_then_its_line_is_named(tmp_path, content, told):
    path = tmp_path / "own.py"
    path.write_bytes(content)
    found = said(check_unloaded, f"{path}:reward", "`reward_function`")
    assert found.startswith(f"`reward_function` {path}:reward could not be loaded: {path} {told}")


@pytest.mark.parametrize(
    "spec", ["nowhere.py:reward", "no_such_package.module:reward", "reward.py", ":reward", "a:"]
)
def test_spec_when_nothing_is_there_then_refused_in_the_words_of_the_loading(spec):
    assert said(check_unloaded, spec, "`environment`") == said(load, spec, "`environment`") is not None


def test_module_when_it_is_beside_the_script_then_it_is_found_and_the_path_is_as_before(tmp_path):
    import sys

    (tmp_path / "beside_the_script.py").write_text("def reward(sample): return 1\n")
    before = list(sys.path)
    assert said(check_unloaded, "beside_the_script:reward", "`loss`", str(tmp_path)) is None
    assert "beside_the_script" in said(check_unloaded, "beside_the_script:reward", "`loss`")
    assert sys.path == before and "beside_the_script" not in sys.modules
    assert said(check_unloaded, "math:sqrt", "`loss`") is None


SIGNATURES = {
    "(sample)": True,
    "(prompt, output_ids, finish_reason)": True,
    "(samples, *, strict=False)": True,
    "()": False,
    "(a, b)": False,
    "(a, b, c, d)": False,
    "(*samples)": False,
    "(a, b=1, c=2)": False,
    "(a, *, b)": False,
    "(a, b, c=3)": True,
    "(a, b, c, d=4, /)": True,
    "(a, /, **more)": True,
    "(a, b, *more)": True,
    "(a=1, b=2)": True,
}


@pytest.mark.parametrize("signature", SIGNATURES)
def test_reward_when_its_signature_is_in_the_file_then_judged_as_the_loaded_function_is(tmp_path, signature):
    path = tmp_path / "own.py"
    path.write_text(f"def reward{signature}: return 1\n")
    found = said(check_unloaded_reward, f"{path}:reward", "`reward_function`")
    loaded = said(form_of, load(f"{path}:reward", "`reward_function`"), f"`reward_function` {path}:reward")
    assert (found is None) == (loaded is None) == SIGNATURES[signature]
    assert found is None or found.split(", which takes")[1] == loaded.split(", which takes")[1]


@pytest.mark.parametrize(
    "text",
    [
        "import functools\n@functools.cache\ndef reward(a, b): return 1",
        "def reward(a, b): return 1\nreward = print",
        "def reward(a, b): return 1\ndef reward(sample): return 1",
        "class reward:\n    def __call__(self, a, b): return 1",
    ],
)
def test_reward_when_what_is_called_is_not_in_the_text_then_left_to_the_loading(tmp_path, text):
    path = tmp_path / "own.py"
    path.write_text(text + "\n")
    assert said(check_unloaded_reward, f"{path}:reward", "`reward_function`") is None
