"""Pipeline schedules: who computes what in which order, proven before it runs, and played on a clock.

Start at `schedule.py`, the data; `generators.py` writes schedules, `verify.py` proves one, `clock.py` plays one.
May import: everything below it. The files that are here today are plain Python and import only `errors`.
Must not: start a process, a collective or a device before `verify` has passed the schedule.
"""
