"""States of the random generator, activation recomputation's flags, and the exchanges of linear layers."""

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor


class CudaRNGStatesTracker:
    """Named states of the random generator, each used and kept by `fork`."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.states_, self.seeds_ = {}, set()

    def get_states(self):
        return dict(self.states_)

    def set_states(self, states):
        self.states_ = states

    def add(self, name, seed):
        if name in self.states_ or seed in self.seeds_:
            raise RuntimeError(f"the state {name} or the seed {seed} exists already")
        self.seeds_.add(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.states_[name] = torch.get_rng_state()

    @contextlib.contextmanager
    def fork(self, name="model-parallel-rng"):
        if name not in self.states_:
            raise KeyError(f"there is no state {name}")
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()


class activation_recompute_forward(contextlib.ContextDecorator):
    """Marks a phase of recomputation, which matters to fp8 alone."""

    def __init__(self, activation_recompute=False, recompute_phase=False): ...

    def __enter__(self): ...

    def __exit__(self, *exception): ...


def is_fp8_activation_recompute_enabled() -> bool:
    return False


def in_fp8_activation_recompute_phase() -> bool:
    return False


def checkpoint(*args, **kwargs):
    """Recomputation that keeps the state of fp8; without fp8 Megatron takes its own."""
    raise NotImplementedError("Transformer Engine's checkpoint is for fp8, which needs a GPU")


def size_of(group) -> int:
    """Ranks of a group; 1 for None."""
    return 1 if group is None else group.size()


def gather_along_first_dim(x: Tensor, group, async_op=False, quantizer=None):
    """[t, ...] -> [size * t, ...], rank after rank; and no handle."""
    if size_of(group) == 1:
        return x, None
    whole = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole, None


def reduce_scatter_along_first_dim(x: Tensor, group, async_op=False):
    """[size * t, ...] -> [t, ...], this rank's part of the sum over ranks; and no handle."""
    if size_of(group) == 1:
        return x, None
    part = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(part, x.contiguous(), group=group)
    return part, None


def allreduce(x: Tensor, group, async_op=False):
    """The sum over ranks; and no handle."""
    if size_of(group) == 1:
        return x, None
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total, None


def _same(x: Tensor, group):
    return x, None


class Exchange(torch.autograd.Function):
    """One of these exchanges; backward makes its counterpart. `Exchange.apply(x, group, EXCHANGE)`."""

    @staticmethod
    def forward(ctx, x, group, exchange):
        ctx.group, ctx.exchange = group, exchange
        return exchange(x, group)[0]

    @staticmethod
    def backward(ctx, gradient):
        return COUNTERPART[ctx.exchange](gradient, ctx.group)[0], None, None


copy_to_ranks = _same
"""Its backward sums over ranks."""
COUNTERPART = {
    gather_along_first_dim: reduce_scatter_along_first_dim,
    reduce_scatter_along_first_dim: gather_along_first_dim,
    copy_to_ranks: allreduce,
    allreduce: copy_to_ranks,
}
