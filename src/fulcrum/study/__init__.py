"""Studies: grids of runs that can be interrupted, spread over machines, merged, and turned into tables.

    job.py         one run of a study as a value; its id is a hash of the settings that matter
    store.py       finished runs as lines of JSON; a run is never done twice
    backends.py    how jobs are run: one after the other, in processes, or stacked on a GPU
    worker.py      `python -m fulcrum.study.worker`: runs prepared jobs with torch, numpy and safetensors only
    calibrate.py   sigma for every job, computed once for jobs that share it
    experiment.py  the files of experiments/ -> jobs
    search.py      lists of trials, and the choice of settings on held-out data
    selection.py   the privacy cost of choosing settings on private data
    stats.py       means, intervals, paired differences
    table_cells.py finished runs -> cells of a table
    tables.py      cells -> Markdown, LaTeX, JSON
    robustness.py  the grid over C0 and learning rates, and its summary
    figures.py     line plots and heat maps as SVG
    provenance.py  where, when and how an output was made

The first four need what the core needs and safetensors; nothing they import needs pydantic or an accountant.
"""
