from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from mu_grpo_trl.rewards.pool import Crashed, ProcessPool, Raised, TimedOut


def square(x):
    print("printing does not disturb the protocol")
    return x * x


def nap(seconds, value):
    time.sleep(seconds)
    return value


def hold_the_gil(seconds):
    ctypes.PyDLL(None).sleep(seconds)


_loaded = []


def load_slowly_once(value):
    if not _loaded:
        time.sleep(1.5)
        _loaded.append(value)
    return [value, *_loaded]


def die(how):
    if how == "segfault":
        ctypes.string_at(0)
    if how == "exit":
        os._exit(3)
    if how == "system_exit":
        raise SystemExit(3)
    return os.getpid()


def eat(gigabytes):
    return len(bytearray(gigabytes * 2**30))


def die_the_first_time(path):
    if not os.path.exists(path):
        open(path, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def unserializable():
    return {1, 2}


def fork_and_hang(path):
    child = subprocess.Popen(["sleep", "1000"])
    with open(path, "w") as file:
        file.write(str(child.pid))
    child.wait()


def pid_after(seconds):
    time.sleep(seconds)
    return os.getpid()


async def double_later(x):
    await asyncio.sleep(0.01)
    return 2 * x


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"


def wait_until(condition, limit_s=10.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_results_keep_the_order_of_the_calls():
    with ProcessPool(nap, workers=2, timeout_s=10) as pool:
        assert pool.map([(0.3, "a"), (0.0, "b"), (0.1, "c"), (0.0, None)]) == ["a", "b", "c", None]


def test_function_may_print_and_be_used_from_threads():
    with ProcessPool(square, workers=2, timeout_s=10) as pool:
        results = {}
        threads = [threading.Thread(target=lambda i=i: results.update({i: pool.map([(i,)] * 5)})) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {i: [i * i] * 5 for i in range(8)}


def test_coroutines_can_wait_for_results():
    async def main(pool):
        return await asyncio.gather(*(asyncio.wrap_future(pool.submit(i)) for i in range(4)))

    with ProcessPool(double_later, workers=1, timeout_s=10) as pool:
        assert asyncio.run(main(pool)) == [0, 2, 4, 6]


def test_b03_task_over_its_limit_is_killed_and_others_are_not():
    with ProcessPool(nap, workers=1, timeout_s=0.5) as pool:
        assert pool.map([(0, 1), (60, 2), (0, 3)]) == [1, TimedOut(0.5), 3]


def test_b03_c_code_that_holds_the_gil_is_killed():
    with ProcessPool(hold_the_gil, workers=1, timeout_s=0.5) as pool:
        started = time.monotonic()
        assert pool.map([(60,), (0,)]) == [TimedOut(0.5), None]
        assert time.monotonic() - started < 15


def test_b03_memory_is_bounded():
    with ProcessPool(eat, workers=1, timeout_s=20, memory_limit_bytes=2**30) as pool:
        huge, small = pool.map([(4,), (0,)])
        assert isinstance(huge, Raised) and "MemoryError" in huge.error
        assert small == 0


@pytest.mark.parametrize("how", ["segfault", "exit", "system_exit"])
def test_dead_worker_is_replaced(how):
    with ProcessPool(die, workers=1, timeout_s=20) as pool:
        first, crashed, second = pool.map([("",), (how,), ("",)])
        assert isinstance(crashed, Crashed) and "exit code" in crashed.reason
        assert first != second and isinstance(second, int)


def test_exception_is_a_result_with_its_traceback():
    with ProcessPool("json:loads", workers=1, timeout_s=20) as pool:
        broken, fine = pool.map([("{",), ("[1]",)])
        assert isinstance(broken, Raised) and "JSONDecodeError" in broken.error
        assert fine == [1]
    with ProcessPool(unserializable, workers=1, timeout_s=20) as pool:
        assert isinstance(pool.submit().result(), Raised)


def test_limit_counts_neither_queueing_nor_start_up():
    with ProcessPool(nap, workers=1, timeout_s=0.6) as pool:
        assert pool.map([(0.3, i) for i in range(5)]) == list(range(5))


def test_limit_does_not_count_what_the_first_call_loads():
    with ProcessPool(load_slowly_once, workers=1, timeout_s=0.6) as pool:
        assert pool.map([(1,)]) == [TimedOut(0.6)]
    with ProcessPool(load_slowly_once, workers=2, timeout_s=0.6, warm_up=[0]) as pool:
        assert pool.map([(1,), (2,), (3,)]) == [[1, 0], [2, 0], [3, 0]]
    with ProcessPool(int, workers=1, timeout_s=0.6, warm_up=["no number"]) as pool:
        assert pool.map([("7",)]) == [7]


def test_worker_frozen_while_idle_is_replaced_without_blaming_the_task(monkeypatch):
    monkeypatch.setattr("mu_grpo_trl.rewards.pool._ACCEPT_LIMIT_S", 1.0)
    with ProcessPool(pid_after, workers=1, timeout_s=20) as pool:
        frozen = pool.submit(0).result()
        os.kill(frozen, signal.SIGSTOP)
        assert pool.submit(0).result() not in (frozen, None)
        assert not is_alive(frozen)


def test_worker_frozen_during_a_task_is_a_timeout():
    with ProcessPool(pid_after, workers=1, timeout_s=1.5) as pool:
        pid = pool.submit(0).result()
        future = pool.submit(1)
        time.sleep(0.2)
        os.kill(pid, signal.SIGSTOP)
        assert future.result() == TimedOut(1.5)


def test_worker_killed_while_idle_is_replaced():
    with ProcessPool(pid_after, workers=1, timeout_s=20) as pool:
        pid = pool.submit(0).result()
        os.kill(pid, signal.SIGKILL)
        assert isinstance(pool.submit(0).result(), int)


def test_a_task_whose_worker_was_killed_is_tried_once_more(tmp_path):
    with ProcessPool(die_the_first_time, workers=1, timeout_s=20) as pool:
        assert pool.submit(str(tmp_path / "died")).result() == "alive"


def test_children_of_a_killed_task_die_with_it(tmp_path):
    path = tmp_path / "pid"
    with ProcessPool(fork_and_hang, workers=1, timeout_s=1) as pool:
        assert pool.submit(str(path)).result() == TimedOut(1)
    wait_until(lambda: not is_alive(int(path.read_text())))


def test_close_ends_workers_and_running_tasks():
    pool = ProcessPool(pid_after, workers=1, timeout_s=100)
    pid = pool.submit(0).result()
    running, queued = pool.submit(50), pool.submit(0)
    time.sleep(0.3)
    pool.close()
    assert isinstance(running.result(), Crashed)
    assert queued.cancelled() and not is_alive(pid)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(0)


def test_workers_die_with_a_killed_parent_and_never_run_its_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys, time
        from mu_grpo_trl.rewards.pool import ProcessPool
        print("script runs", flush=True)
        pool = ProcessPool("os:getpid", 1, 10)
        hung = ProcessPool("time:sleep", 1, 1000)
        print(pool.submit().result(), flush=True)
        hung.submit(1000)
        time.sleep(1)
        worker, = hung._running
        print(worker._process.pid, flush=True)
        time.sleep(1000)
        """)
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "script runs\n"
    idle, busy = int(parent.stdout.readline()), int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_alive(idle) and not is_alive(busy))


def test_function_that_a_worker_cannot_import_is_refused():
    with pytest.raises(ValueError, match="top level of a module"):
        ProcessPool(lambda x: x, 1, 1)
    with pytest.raises(ValueError, match="__main__"):
        ProcessPool("__main__:f", 1, 1)
    with ProcessPool("no_such_module:f", 1, 1) as pool:
        result = pool.submit().result()
        assert isinstance(result, Crashed) and "No module named 'no_such_module'" in result.reason


def test_large_arguments_and_results_pass():
    with ProcessPool("json:loads", workers=1, timeout_s=20) as pool:
        assert pool.submit('"' + "x" * 3_000_000 + '"').result() == "x" * 3_000_000
