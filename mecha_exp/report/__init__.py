"""The report of a sweep: a table, data files, figures, and a page with all of them.

settings.py       replicates of one setting, and estimates of their metrics
results.py        the points of a sweep, grouped by setting, ranked and judged
sweep_results.py  those of a sweep's records
intervals.py      the numbers of settings and inputs with their intervals
join.py           several sweeps as one
table.py          the table on the terminal
verdict.py        the verdict on the settings, verdict.json, footnotes
conclusion.py     the results of a sweep with its verdict
pareto.py         the front of several metrics
why/              what moved the metric
paper/            a paper's table of several sweeps
files.py          all files of a sweep
export.py         sweep.csv, sweep.parquet
figures/          PNG files, and vectors for a paper
page/             report.html

The names stand in `__init__.pyi` and are loaded when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
