"""Measurements: one file a question, one command each. Results are committed under `benchmarks/results/`.

A file `benchmarks/results/HARDWARE/QUESTION.json` has the question as a sentence, the kind, the command, the settings,
versions, hardware, rows and notes; the form is `record.py`. Units are in the keys. The report knows nothing that is not
in these files: `python -m benchmarks.report --check` fails, and so does a test, when RESULTS.md or the table in
docs/benchmarks.md are not what the files say.

To add a method to compare with: one entry in `methods.py` says how it is put on a model, how it is taken off, which
package it needs and whether it promises equal bits. It then takes part in `time_against_memory` and `largest`.
To add a question: one file with `main(argv)`. It makes a `Record` without rows, a list of pieces (small mappings that
name them) and a function from a piece to its rows, and calls `rows.run`. Add its name to the questions of `report.py`
and of the Makefile. Its rows are shown as they are; a plot is a function in `plots.py`.
A machine needs only a run: results have a folder for each hardware.
"""
