"""Files are replaced in one move, or stay as they were."""

import os
import stat

import pytest

from megatron_rl_corr.files import atomic_writer, write_atomically


def test_write_when_the_file_exists_then_it_is_replaced_and_nothing_else_stays(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    assert write_atomically(path, b"new", mode=0o600) == path
    assert path.read_bytes() == b"new" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["a.json"]


def test_write_when_no_mode_is_given_then_everybody_can_read_the_file(tmp_path):
    assert stat.S_IMODE(write_atomically(tmp_path / "a", b"").stat().st_mode) == 0o644


def test_writer_when_the_block_raises_then_the_old_file_stays_and_a_reader_never_saw_the_new_one(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(OSError, match="disk full"), atomic_writer(path) as file:
        file.write(b"half of")
        file.flush()
        assert path.read_text() == "old"
        raise OSError("disk full")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a"]
