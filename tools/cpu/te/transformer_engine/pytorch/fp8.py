"""FP8 that is always off."""

import contextlib


class FP8GlobalStateManager:
    """What modules ask for the precision they are to run in."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return False

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return False

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        return False

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        return False

    @classmethod
    def reset(cls) -> None:
        pass


@contextlib.contextmanager
def fp8_autocast(enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None, _graph=False):
    """Nothing, unless it is to be on."""
    if enabled:
        raise NotImplementedError("fp8 needs a GPU; train without --fp8-format")
    yield


@contextlib.contextmanager
def fp8_model_init(enabled=True, recipe=None, preserve_high_precision_init_val=False):
    """Nothing, unless it is to be on."""
    if enabled:
        raise NotImplementedError("parameters in fp8 need a GPU; train without --fp8-param-gather")
    yield
