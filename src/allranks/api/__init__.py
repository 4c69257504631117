"""From Python and notebooks: `allranks.diagnose("dumps/")`, `allranks.stacks()`, `allranks.load_checkpoint_index(…)`.

What the commands print, as objects: sentences, JSON, pandas tables, and pages that a notebook shows.
"""
