"""Runs a kernel on the threads of LLVM's or Intel's OpenMP.

    run(thread_number, push_num_threads, fork_call, threads, kernel, argument)

The first three arguments are addresses of LIBRARY_FUNCTIONS. `fork_call` takes a variable number of
arguments. Each system passes these in its own way, which LLVM knows and ctypes does not.
"""

from __future__ import annotations

RUN = "run"
LIBRARY_FUNCTIONS = ("__kmpc_global_thread_num", "__kmpc_push_num_threads", "__kmpc_fork_call")

TEXT = r"""
@place = internal constant [23 x i8] c";unknown;unknown;0;0;;\00"
@ident = internal constant { i32, i32, i32, i32, ptr } { i32 0, i32 2, i32 0, i32 0, ptr @place }

define internal void @task(ptr %thread, ptr %in_team, ptr %kernel, ptr %argument) {
  call void %kernel(ptr %argument)
  ret void
}

define void @run(ptr %number, ptr %push, ptr %fork, i32 %threads, ptr %kernel, ptr %argument) {
  %thread = call i32 %number(ptr @ident)
  call void %push(ptr @ident, i32 %thread, i32 %threads)
  call void (ptr, i32, ptr, ...) %fork(ptr @ident, i32 2, ptr @task, ptr %kernel, ptr %argument)
  ret void
}
"""
"""The module. OpenMP wants to know from which line of source a region comes: `ident`."""
