"""pretrain_any.py, which says when a model is made: what starts wrongly must end before that."""

import runpy
from pathlib import Path

from megatron.core.models.gpt import GPTModel

make = GPTModel.__init__


def made(self, *arguments, **named):
    print("A MODEL IS MADE", flush=True)
    make(self, *arguments, **named)


GPTModel.__init__ = made
runpy.run_path(str(Path(__file__).parents[1] / "matrix/pretrain_any.py"), run_name="__main__")
