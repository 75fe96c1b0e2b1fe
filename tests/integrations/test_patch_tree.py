"""The patch command on trees: stock ones from the installed wheel, changed ones, and ones with
links out of them.
"""

import difflib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl_corr.cli import main
from megatron_rl_corr.integrations import patch_tree as patching

ROOT = Path(__file__).resolve().parents[2]
DIFF = ROOT / "patches/load_plugin.diff"


def installed():
    """site-packages with megatron/training; nothing of it is imported."""
    spec = importlib.util.find_spec("megatron")
    if spec is None:
        pytest.skip("megatron-core is not installed; make setup installs it")
    return Path(next(iter(spec.submodule_search_locations))).parent


@pytest.fixture
def tree(tmp_path):
    """A tree with the two files that the command reads, as the wheel has them."""
    for name in (patching.FILE, patching.VERSION_FILE):
        (tmp_path / "fork" / name).parent.mkdir(parents=True)
        shutil.copy(installed() / name, tmp_path / "fork" / name)
    return tmp_path / "fork"


def patch(tree, what, capsys):
    """The command's exit status, output and complaint."""
    status = main(["patch", "--megatron-root", str(tree), f"--{what}"])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def files(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_check_when_stock_then_the_version_is_told_and_nothing_is_written(tree, capsys):
    before = files(tree)
    status, out, _ = patch(tree, "check", capsys)
    version = importlib.metadata.version("megatron-core")
    assert status == 0 and f"megatron-core {version} in {tree}" in out and "can take the lines" in out
    assert files(tree) == before
    assert main(["patch", "--megatron-root", str(tree)]) == 0, "--check is the default"
    assert files(tree) == before


def test_apply_when_stock_then_the_lines_stand_behind_the_imports_and_a_copy_is_kept(tree, capsys):
    before = files(tree)
    (tree / patching.FILE).chmod(0o640)
    status, out, _ = patch(tree, "apply", capsys)
    after = files(tree)
    backup = patching.FILE + patching.BACKUP_SUFFIX
    assert status == 0 and "8 lines added" in out
    assert after[backup] == before[patching.FILE]
    assert after[patching.FILE] == before[patching.FILE] + patching.HUNK.encode()
    assert (tree / patching.FILE).stat().st_mode & 0o777 == 0o640
    assert after.keys() - before.keys() == {backup}, "no temporary file stays"


def test_apply_when_done_twice_then_the_second_changes_nothing(tree, capsys):
    patch(tree, "apply", capsys)
    once = files(tree)
    status, out, _ = patch(tree, "apply", capsys)
    assert status == 0 and "nothing to do" in out and files(tree) == once
    assert "has the lines" in patch(tree, "check", capsys)[1]
    assert patch(tree, "diff", capsys) == (0, "", "")


def test_revert_when_applied_then_every_byte_is_as_before(tree, capsys):
    before = files(tree)
    patch(tree, "apply", capsys)
    assert patch(tree, "revert", capsys)[0] == 0
    assert files(tree) == before
    status, out, _ = patch(tree, "revert", capsys)
    assert status == 0 and "nothing to do" in out and files(tree) == before


@pytest.mark.parametrize(
    "change", [lambda t: t.replace(b"\n", b"\r\n"), bytes.rstrip], ids=["CRLF", "unfinished line"]
)
def test_revert_when_lines_end_otherwise_then_every_byte_is_as_before(tree, capsys, change):
    path = tree / patching.FILE
    path.write_bytes(change(path.read_bytes()))
    before = files(tree)
    assert patch(tree, "apply", capsys)[0] == 0
    assert (b"\r\n" in path.read_bytes()) == (
        path.read_bytes().count(b"\n") == path.read_bytes().count(b"\r\n")
    )
    assert patch(tree, "revert", capsys)[0] == 0
    assert files(tree) == before


def test_revert_when_edited_since_then_the_edit_stays_and_so_does_the_copy(tree, capsys):
    patch(tree, "apply", capsys)
    path = tree / patching.FILE
    path.write_text("# the fork's own line\n" + path.read_text())
    status, out, _ = patch(tree, "revert", capsys)
    assert status == 0 and "other changes since stay" in out
    assert path.read_bytes() == b"# the fork's own line\n" + (installed() / patching.FILE).read_bytes()
    assert (tree / (patching.FILE + patching.BACKUP_SUFFIX)).is_file()


def test_diff_then_it_is_the_shipped_patch_and_git_makes_of_it_what_apply_makes(tree, capsys):
    assert patch(tree, "diff", capsys)[1] == DIFF.read_text()
    by_git = tree.parent / "by_git"
    shutil.copytree(tree, by_git)
    # Other line numbers than the shipped diff has, and a repository of its own: git would leave out
    # paths of another.
    path = by_git / patching.FILE
    path.write_text("# one\n# two\n" + path.read_text())
    subprocess.run(["git", "init", "-q", "."], cwd=by_git, check=True)
    subprocess.run(["git", "apply", DIFF], cwd=by_git, check=True)
    patch(tree, "apply", capsys)
    assert path.read_text() == "# one\n# two\n" + (tree / patching.FILE).read_text()


def test_shipped_patch_then_one_line_of_context_and_none_behind():
    lines = DIFF.read_text().splitlines()[3:]
    assert [line for line in lines if not line.startswith("+")] == [" " * 21 + patching.ANCHOR]
    assert lines[0].endswith(patching.ANCHOR)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text.replace(patching.ANCHOR, "print_rank_first)"), "0 times"),
        (lambda text: text + "\nfrom .utils import (\n    print_rank_last)\n", "2 times"),
        (lambda text: text + "\nimport megatron_rl_corr\n", "not as this version writes it"),
        (lambda text: text + patching.HUNK.replace("load()", "load(1)"), "not as this version writes it"),
        (lambda text: text + patching.HUNK * 2, "not as this version writes it"),
        (lambda text: text + "def broken(\n", "would not compile"),
    ],
)
def test_apply_when_the_file_is_not_as_known_then_it_refuses_and_writes_nothing(tree, capsys, change, told):
    path = tree / patching.FILE
    path.write_text(change(path.read_text()))
    before = files(tree)
    status, out, error = patch(tree, "apply", capsys)
    assert status == 2 and out == "" and told in error and str(path) in error
    assert files(tree) == before


def test_apply_when_not_utf8_then_it_refuses(tree, capsys):
    (tree / patching.FILE).write_bytes(b"# \xff\nprint_rank_last)\n")
    status, _, error = patch(tree, "apply", capsys)
    assert status == 2 and "not UTF-8" in error


@pytest.mark.parametrize("linked", ["megatron", "megatron/training", patching.FILE])
def test_apply_when_a_link_leads_out_of_the_tree_then_it_refuses_and_nothing_out_there_changes(
    tree, capsys, linked
):
    outside = tree.parent / "outside"
    (tree / linked).rename(outside)
    (tree / linked).symlink_to(outside)
    before = files(tree.parent)
    status, _, error = patch(tree, "apply", capsys)
    assert status == 2 and "outside --megatron-root" in error
    assert files(tree.parent) == before


def test_apply_when_links_stay_within_the_tree_then_their_target_is_written(tree, capsys):
    (tree / "src").mkdir()
    (tree / "megatron").rename(tree / "src/megatron")
    (tree / "megatron").symlink_to("src/megatron")
    assert patch(tree, "apply", capsys)[0] == 0
    assert patching.HUNK in (tree / "src" / patching.FILE).read_text() and (tree / "megatron").is_symlink()


def test_apply_when_the_file_is_shared_by_a_hard_link_then_the_other_name_keeps_its_content(tree, capsys):
    shared = tree.parent / "cache"
    os.link(tree / patching.FILE, shared)
    before = shared.read_bytes()
    patch(tree, "apply", capsys)
    assert shared.read_bytes() == before != (tree / patching.FILE).read_bytes()


def test_apply_when_the_copys_name_is_a_link_then_what_it_leads_to_stays(tree, capsys):
    outside = tree.parent / "outside"
    outside.write_text("mine")
    (tree / (patching.FILE + patching.BACKUP_SUFFIX)).symlink_to(outside)
    assert patch(tree, "apply", capsys)[0] == 0
    assert outside.read_text() == "mine"


def test_apply_when_the_write_fails_then_the_file_is_whole_and_no_other_is_left(tree, capsys, monkeypatch):
    before = files(tree)

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    status, _, error = patch(tree, "apply", capsys)
    assert status == 2 and "no space left" in error and files(tree) == before


@pytest.mark.parametrize("made", ["", "megatron/core", "megatron/training"])
def test_check_when_there_is_no_such_file_then_it_says_what_the_root_is(tmp_path, capsys, made):
    (tmp_path / made).mkdir(parents=True, exist_ok=True)
    status, _, error = patch(tmp_path, "check", capsys)
    assert status == 2 and f"there is no {patching.FILE}" in error and "holds megatron/" in error


def test_check_when_the_version_is_not_told_then_the_tree_is_taken_all_the_same(tree, capsys):
    (tree / patching.VERSION_FILE).write_text("from somewhere import MAJOR\n")
    status, out, _ = patch(tree, "check", capsys)
    assert status == 0 and "megatron-core of unknown version" in out


def test_command_when_run_on_a_tree_then_nothing_of_megatron_or_torch_is_imported(tree):
    code = (
        "import sys; from megatron_rl_corr.cli import main; status = main(sys.argv[1:]); "
        "print(sorted({'torch', 'megatron'} & set(sys.modules)), file=sys.stderr); sys.exit(status)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, "patch", "--megatron-root", tree, "--apply"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stderr) == (0, "[]\n")


def test_lines_when_nothing_asks_for_the_plugin_then_it_is_not_imported():
    for value in (None, "", "0"):
        environment = {**os.environ, "MEGATRON_RL_CORR": value} if value is not None else dict(os.environ)
        code = (
            patching.HUNK
            + "\nimport sys\nprint([name for name in sys.modules if name.startswith('megatron')])"
        )
        run = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True
        )
        assert run.stdout == "[]\n", run.stderr


def test_lines_of_patches_folder_then_the_same_as_the_commands():
    added = [
        line[1:]
        for line in DIFF.read_text().splitlines()
        if line.startswith("+") and not line.startswith("+++")
    ]
    assert list(difflib.ndiff(added, patching.HUNK.splitlines())) == ["  " + line for line in added]
