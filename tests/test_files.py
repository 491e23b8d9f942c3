"""Files appear whole or not at all, whoever writes and whatever goes wrong."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from consilience.core import files
from consilience.core.files import append, whole, write


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("shared", [False, True])
def test_a_file_is_replaced_in_one_step(tmp_path, shared):
    path = tmp_path / "new" / "a.txt"
    write(path, b"first", shared=shared)
    with whole(path, shared=shared) as unfinished:
        unfinished.write_bytes(b"second")
        assert path.read_bytes() == b"first"
        assert unfinished.parent == path.parent and unfinished.name.endswith(".part")
    assert path.read_bytes() == b"second" and names(path.parent) == {"a.txt"}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
def test_after_an_error_the_file_is_as_it_was(tmp_path, shared, error):
    path = tmp_path / "a.txt"
    write(path, b"first")
    with pytest.raises(type(error)), whole(path, shared=shared) as unfinished:
        unfinished.write_bytes(b"sec")
        raise error
    assert path.read_bytes() == b"first" and names(tmp_path) == {"a.txt"}


def test_content_and_name_are_on_the_disk_before_the_call_returns(tmp_path, monkeypatch):
    steps, sync, replace = [], os.fsync, os.replace

    def noted_sync(handle):
        steps.append("folder" if os.path.isdir(f"/dev/fd/{handle}") else "content")
        sync(handle)

    def noted_replace(*paths):
        steps.append("replace")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "replace", noted_replace)
    write(tmp_path / "a.txt", b"first")
    assert steps == ["content", "replace", "folder"]


def test_shared_writers_do_not_meet(tmp_path):
    path, contents = tmp_path / "a.txt", [bytes([65 + i]) * 200_000 for i in range(8)]
    threads = [
        threading.Thread(target=write, args=(path, content), kwargs={"shared": True})
        for content in contents
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in contents and names(tmp_path) == {"a.txt"}


KILLED = """
import os, signal, sys
from pathlib import Path
from consilience.core.files import whole
with whole(Path(sys.argv[1]), shared=True) as unfinished:
    unfinished.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_by_a_later_write(tmp_path):
    path = tmp_path / "fit[1].safetensors"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    write(path, b"first", shared=True)
    # It is young: its writer may be alive.
    assert names(tmp_path) == {path.name, left.name}
    old = time.time() - files.STALE - 1
    others = [tmp_path / f"{path.name}.original.part", tmp_path / f"other.{left.name}"]
    others.append(tmp_path / f"{path.name}.deadbeef.part.txt")
    for file in (left, *others):
        file.touch()
        os.utime(file, (old, old))
    write(path, b"second", shared=True)
    assert names(tmp_path) == {path.name, *(file.name for file in others)}
    assert path.read_bytes() == b"second"


def test_a_line_is_added_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "lines"
    append(path, b"one\n")

    def full(handle):
        raise OSError("full")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="full"):
        patched.setattr(os, "fsync", full)
        append(path, b"two\n")
    assert path.read_bytes() == b"one\n"
    append(path, b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"


def test_saved_results_are_written_by_the_same_function(tmp_path):
    from consilience.experiments.cells import write_arrays

    path = tmp_path / "cell.npz"
    write_arrays(path, {"a": np.arange(3)})
    left = tmp_path / "cell.npz.0123abcd.part"
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    write_arrays(path, {"a": np.arange(4)})
    assert names(tmp_path) == {"cell.npz"}
    np.testing.assert_array_equal(np.load(path)["a"], np.arange(4))
