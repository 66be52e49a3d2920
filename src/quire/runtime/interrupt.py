"""Ctrl-C stops a long launch.

Python runs signal handlers in the main thread, between two instructions of Python code: never while
the main thread is in a kernel. But its C handler at once writes the number of the signal to a
wakeup file descriptor. So a second thread reads from that, and sets the counter that threads take
items off to `STOPPED`. The threads then return, and Python raises KeyboardInterrupt.
"""

from __future__ import annotations

import ctypes
import signal
import socket
import threading
from collections.abc import Callable

from quire.codegen.convention import STOPPED

LONG_WORK = 2**31
"""Multiplications that take about a tenth of a second. Shorter launches are not stoppable."""


def launch_stoppable(run: Callable[[], None], counter: ctypes.c_int64) -> None:
    """Run a kernel; Ctrl-C sets its `counter` to `STOPPED` and raises KeyboardInterrupt.

    Results are then incomplete. Ctrl-C does nothing outside the main thread, and if the program has
    its own handler.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        run()
        return
    receiver, sender = socket.socketpair()
    with receiver, sender:
        sender.setblocking(False)
        before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        if before != -1:  # something else waits for signals, such as an event loop
            signal.set_wakeup_fd(before)
            run()
            return
        watcher = threading.Thread(target=_watch, args=(receiver, counter), daemon=True)
        try:
            watcher.start()
            run()
        finally:
            signal.set_wakeup_fd(-1)
            sender.shutdown(socket.SHUT_WR)
            if watcher.ident is not None:
                watcher.join()
    if counter.value >= STOPPED:  # usually, Python has raised it before this line
        raise KeyboardInterrupt


def _watch(receiver: socket.socket, counter: ctypes.c_int64) -> None:
    while signals := receiver.recv(64):
        if signal.SIGINT in signals:
            counter.value = STOPPED
