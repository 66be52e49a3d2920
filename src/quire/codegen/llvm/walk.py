"""Runs many kernels one after the other, in one parallel region.

    walk(program)       every thread of the region calls it

All threads run the same kernel, and meet before the next one. Who comes last clears the counters of
the kernel, so that its record can be used again, and lets the others go on. A thread that waits
looks again and again. After a while it lets other threads of the system run in between.
"""

from __future__ import annotations

from quire.codegen.llvm.types import PTR, Layout, typed

WALK = "walk"
ENTRY = Layout("entry", typed("ptr kernel argument counters, i64 num_counters"))
"""A kernel, its record, and the counters in the record, which are zero before it runs."""

PROGRAM = Layout(
    "program",
    {
        **typed("i64 arrived a1 a2 a3 a4 a5 a6 a7"),  # a cache line
        **typed("i64 done d1 d2 d3 d4 d5 d6 d7"),
        **typed("i64 count"),
        "entries": PTR,
        "team_size": PTR,  # a function that returns the number of threads in the region
        "rest": PTR,  # a function that lets others run
    },
)
"""`arrived` and `done` are zero before a walk: how often threads have arrived, kernels done."""

TEXT = f"""
define void @{WALK}(ptr %program) {{
entry:
  %done = getelementptr i64, ptr %program, i64 {PROGRAM.index("done")}
  %count.at = getelementptr i64, ptr %program, i64 {PROGRAM.index("count")}
  %count = load i64, ptr %count.at
  %entries.at = getelementptr i64, ptr %program, i64 {PROGRAM.index("entries")}
  %entries = load ptr, ptr %entries.at
  %team_size.at = getelementptr i64, ptr %program, i64 {PROGRAM.index("team_size")}
  %team_size = load ptr, ptr %team_size.at
  %rest.at = getelementptr i64, ptr %program, i64 {PROGRAM.index("rest")}
  %rest = load ptr, ptr %rest.at
  %team32 = call i32 %team_size()
  %team = zext i32 %team32 to i64
  br label %turn
turn:
  %i = phi i64 [ 0, %entry ], [ %next, %after ]
  %ends = icmp uge i64 %i, %count
  br i1 %ends, label %leave, label %run
run:
  %place = mul i64 %i, {len(ENTRY)}
  %kernel.at = getelementptr i64, ptr %entries, i64 %place
  %kernel = load ptr, ptr %kernel.at
  %argument.at = getelementptr i64, ptr %kernel.at, i64 {ENTRY.index("argument")}
  %argument = load ptr, ptr %argument.at
  %counters.at = getelementptr i64, ptr %kernel.at, i64 {ENTRY.index("counters")}
  %counters = load ptr, ptr %counters.at
  %num.at = getelementptr i64, ptr %kernel.at, i64 {ENTRY.index("num_counters")}
  %num = load i64, ptr %num.at
  call void %kernel(ptr %argument)
  %next = add i64 %i, 1
  %wanted = mul i64 %next, %team
  %before = atomicrmw add ptr %program, i64 1 acq_rel
  %now = add i64 %before, 1
  %last = icmp eq i64 %now, %wanted
  br i1 %last, label %clear, label %wait
clear:
  %c = phi i64 [ 0, %run ], [ %c.next, %clear.one ]
  %cleared = icmp uge i64 %c, %num
  br i1 %cleared, label %open, label %clear.one
clear.one:
  %counter = getelementptr i64, ptr %counters, i64 %c
  store i64 0, ptr %counter
  %c.next = add i64 %c, 1
  br label %clear
open:
  store atomic i64 %next, ptr %done release, align 8
  br label %after
wait:
  %looks = phi i64 [ 0, %run ], [ %looks.next, %again ]
  %seen = load atomic i64, ptr %done acquire, align 8
  %go = icmp uge i64 %seen, %next
  br i1 %go, label %after, label %look
look:
  %looks.next = add i64 %looks, 1
  %tired = icmp ugt i64 %looks, {1 << 14}
  br i1 %tired, label %rests, label %again
rests:
  call void %rest()
  br label %again
again:
  br label %wait
after:
  br label %turn
leave:
  ret void
}}
"""
"""The module."""
