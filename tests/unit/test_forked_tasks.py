"""Tasks in copies of the test's own process."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pico_vllm.kernels import forked_tasks
from pico_vllm.kernels.forked_tasks import run_in_copies


def test_every_task_is_done_once_and_not_in_this_process(tmp_path):
    def task(index):
        with open(tmp_path / str(index), "x") as file:  # twice would raise
            file.write(str(os.getpid()))

    done = list(run_in_copies([lambda index=index: task(index) for index in range(300)], 3))
    assert sorted(done) == list(range(300))
    pids = {int((tmp_path / str(index)).read_text()) for index in range(300)}
    assert len(pids) <= 3 and os.getpid() not in pids


def test_any_thread_may_ask():
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(lambda: list(run_in_copies([lambda: None], 2))).result() == [0]


def test_what_raised_or_died_is_not_among_the_results(capfd):
    def fail():
        print("nobody hears this", flush=True)
        os.write(2, b"nor this")
        raise ValueError

    tasks = [fail, lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: None, lambda: None]
    assert sorted(run_in_copies(tasks, 2)) == [2, 3]
    assert capfd.readouterr() == ("", "")


def test_when_all_copies_die_the_results_end():
    assert list(run_in_copies([lambda: os._exit(1)] * 3 + [lambda: None], 2)) == []


def test_a_copy_that_hangs_is_ended(tmp_path):
    def hang():
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(600)

    assert list(run_in_copies([lambda: None, hang], 1, patience_s=1.0)) == [0]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_no_copy_is_left_when_the_caller_stops_early(tmp_path):
    def hang():
        (tmp_path / str(os.getpid())).touch()
        time.sleep(600)

    results = run_in_copies([lambda: None, hang, hang], 3)
    assert next(results) == 0
    results.close()
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name), 0)


def test_a_copy_keeps_no_socket_or_pipe_of_this_process_open(tmp_path):
    """Who listens to this process hears of its death though copies live on."""
    reader, writer = os.pipe()

    def task():
        print("into nothing", flush=True)
        os.set_blocking(reader, False)

    def hang():
        (tmp_path / "here").touch()
        time.sleep(600)

    results = run_in_copies([lambda: None, task, hang], 1)
    assert next(results) == 0
    while not (tmp_path / "here").exists():
        time.sleep(0.01)
    os.close(writer)
    assert os.read(reader, 1) == b""  # all others that could write are gone
    results.close()
    os.close(reader)


def test_a_copy_ends_when_nobody_is_left_to_tell(tmp_path):
    """The caller, killed between two tasks, leaves copies that end with the task they are at."""
    pid = os.fork()
    if pid == 0:
        try:
            for _ in run_in_copies([lambda: None, lambda: time.sleep(0.3), lambda: (tmp_path / "third").touch()], 1):
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    os.waitpid(pid, 0)
    time.sleep(1.0)
    assert not (tmp_path / "third").exists()


def test_where_no_process_can_be_made_nothing_is_done(monkeypatch):
    def refuse():
        raise BlockingIOError("fork")

    monkeypatch.setattr(forked_tasks.os, "fork", refuse)
    files = len(os.listdir("/proc/self/fd"))
    assert list(run_in_copies([lambda: None], 2)) == []
    assert len(os.listdir("/proc/self/fd")) == files
