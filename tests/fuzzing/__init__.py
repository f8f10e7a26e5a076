"""T17: whatever a shard, a document, a journal or a whole dataset holds, only declared errors come of it, and soon.

`targets.py` says what is tried; each target draws its input with Hypothesis. `test_fuzzing.py` calls them as Hypothesis
has it, `python -m tests.fuzzing` with inputs that atheris finds by what they reach in the package (`guided.py`).
"""
