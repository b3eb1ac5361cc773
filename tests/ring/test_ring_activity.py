"""A rank says what its thread does, whatever else the process is at: that must not let it hang."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from cyxtrain.ring.monitoring.activity import CurrentActivity

_WHILE_GARBAGE_IS_COLLECTED = """
import gc, threading, time, weakref
from cyxtrain.ring.monitoring.activity import CurrentActivity

class Node:
    pass

def make_garbage():
    node = Node()
    node.itself = node
    kept.append(weakref.ref(node, lambda _: time.sleep(0)))  # collecting it lets other threads run
    del kept[:-100]

def begin_and_end():
    while True:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

kept, doing = [], CurrentActivity()
threading.Thread(target=begin_and_end, daemon=True).start()
gc.set_threshold(1, 1, 1)
for _ in range(3000):
    make_garbage()
    doing.describe()
assert gc.isenabled()
"""


@pytest.mark.nightly
def test_a_rank_is_asked_while_garbage_is_collected_and_threads_end():
    """Once this hung for ever: CPython makes frames under a lock that a thread needs to end."""
    subprocess.run([sys.executable, "-c", _WHILE_GARBAGE_IS_COLLECTED], check=True, timeout=60)


def test_a_thread_that_has_ended_is_said_to_have():
    found: list[CurrentActivity] = []
    thread = threading.Thread(target=lambda: found.append(CurrentActivity()))
    thread.start()
    thread.join()
    assert found[0].describe() == "the thread that used the group has ended; it has called no collective yet"
