"""The papers' experiments as recipes: `polyfed reproduce fpfc/table1`. One folder per paper, one file per experiment.

A package beside polyfed, which finds it by an entry point as it finds anybody's (see pyproject.toml).
"""
