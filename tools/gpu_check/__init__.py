"""`make gpu-check`: everything that only a GPU can show, in at most ten minutes on one GPU; see
docs/get_started.
"""
