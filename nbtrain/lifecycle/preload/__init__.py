"""Imports in the kernel, once, what every rank of every run would import by itself.

The first optimizer step of torch 2.13 imports 800 modules, about two seconds of CPU in each rank of
each run; a forked rank inherits what its kernel has imported. `worker.telemetry.import_report` says
what a rank had to import, `trial` finds out in a process of its own which of these modules leave a
process as it was, `known_imports` remembers that, and `importer` imports them right before ranks
are forked.
"""
