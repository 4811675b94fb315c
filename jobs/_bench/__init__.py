"""The cases of jobs/bench.py, and the plain programs they are measured against."""
