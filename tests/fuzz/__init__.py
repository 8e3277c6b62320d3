"""Fuzzers of the boundaries where input enters that others wrote.

A boundary is a function that reads such input: a lease row, an announcement, a record. It promises
one of two results for *every* input: a value within its limits, or its one documented error. A
fuzzer draws structure-aware inputs from a seed and checks the promise under a time and a memory
limit per input.

* `boundary.Boundary` describes one boundary. A module in `boundaries/` names its boundaries in
  `BOUNDARIES`; `runner.boundaries()` collects them.
* `corpus/<boundary>/` has the inputs that broke a promise once. `tests/fuzz/test_boundaries.py`
  replays them, then draws a few hundred inputs of a fixed seed.
* `make fuzz` runs every boundary for `FUZZ_SECONDS` (60) with a fresh seed, each in a process of
  its own. It prints how to repeat a finding and adds the input to the corpus.

`values` has the generators that several boundaries share.
"""
