"""Ctrl-C ends a long launch.

Python runs its signal handlers in the main thread, between two steps of Python code, so none runs
while the main thread is in a kernel. What Python's own handler in C does at once is to write the
signal's number to a file of our choice: somebody who waits for that tells the threads, by the
counter that they take their items from, that the results are no longer wanted. They return, and
Python raises KeyboardInterrupt.
"""

from __future__ import annotations

import ctypes
import signal
import socket
import threading

from quire.codegen.convention import STOPPED
from quire.runtime.launch import launch

LONG_WORK = 2**31
"""Multiplications that take a tenth of a second or so; a launch of less is not worth a thread."""


def launch_stoppable(kernel: int, argument: int, threads: int, counter: ctypes.c_int64) -> None:
    """As `launch`; an interrupt ends it soon and raises KeyboardInterrupt.

    Results are then what happened to be written. Where Ctrl-C means something else to the program,
    or this is not its main thread, nothing is watched.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        launch(kernel, argument, threads)
        return
    receiver, sender = socket.socketpair()
    with receiver, sender:
        sender.setblocking(False)
        before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        if before != -1:  # signals wake somebody else, such as an event loop
            signal.set_wakeup_fd(before)
            launch(kernel, argument, threads)
            return
        watcher = threading.Thread(target=_watch, args=(receiver, counter), daemon=True)
        try:
            watcher.start()
            launch(kernel, argument, threads)
        finally:
            signal.set_wakeup_fd(-1)
            sender.shutdown(socket.SHUT_WR)
            if watcher.ident is not None:
                watcher.join()
    if counter.value >= STOPPED:  # Python has raised it before it came to this line
        raise KeyboardInterrupt


def _watch(receiver: socket.socket, counter: ctypes.c_int64) -> None:
    while signals := receiver.recv(64):
        if signal.SIGINT in signals:
            counter.value = STOPPED
