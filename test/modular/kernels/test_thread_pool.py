"""The pool behind the compiled kernels: callers from several threads, and children of a fork."""

import os
import shutil
import subprocess
import sys
import threading

import pytest
import torch

from mstar import envs
from mstar.kernels import ops

FORKING = """
import os, signal, sys, torch
from mstar.kernels import ops
ops.select_kernels("native")
torch.set_num_threads(3)
packed, x = ops.pack_linear(torch.randn(512, 512)), torch.randn(64, 512)
expected = ops.linear(x, packed)
child = os.fork()
if child == 0:
    signal.alarm(30)
    right = all(torch.equal(ops.linear(x, packed), expected) for _ in range(50))
    num_threads = len(os.listdir("/proc/self/task"))  # 1 after the fork, and the pool's again when it is used
    os._exit(0 if right and num_threads == 3 else 1)
sys.exit(os.waitpid(child, 0)[1])
"""


def test_callers_of_several_threads_get_their_own_results(compiled: str) -> None:
    packed = [ops.pack_linear(torch.randn(300, 200)) for _ in range(4)]
    inputs = [torch.randn(40, 200) for _ in range(4)]
    expected = [ops.linear(x, w) for x, w in zip(inputs, packed, strict=True)]
    wrong: list[int] = []

    def call(i: int) -> None:
        torch.set_num_threads(2 + i % 2)
        results = [ops.linear(inputs[i], packed[i]) for _ in range(200)]
        wrong.extend(i for result in results if not torch.equal(result, expected[i]))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_many_short_loops_with_more_threads_than_cores(compiled: str) -> None:
    threads = torch.get_num_threads()
    packed, x = ops.pack_linear(torch.randn(256, 256)), torch.randn(16, 256)
    expected = ops.linear(x, packed)
    try:
        for count in (1, 16, 3, 8):
            torch.set_num_threads(count)
            assert all(torch.equal(ops.linear(x, packed), expected) for _ in range(300))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="no C++ compiler on this machine")
def test_a_forked_child_computes() -> None:
    environment = envs.child_environment({"PYTHONPATH": os.pathsep.join(sys.path)})
    done = subprocess.run(
        [sys.executable, "-c", FORKING], env=environment, timeout=60, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
