"""The made runs that these tests share."""

from tests.made_runs import figures_drawn_once, healthy, make_steps, write_run  # noqa: F401
