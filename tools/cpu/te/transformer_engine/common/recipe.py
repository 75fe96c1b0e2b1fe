"""Recipes of lower precision: names to derive from and to ask isinstance of."""


class Recipe:
    """Of none is there an object: each needs a GPU."""

    def __init__(self, *args, **kwargs):
        raise NotImplementedError(
            f"{type(self).__name__} needs a GPU; train without --fp8-format and --fp4-format"
        )


class Format:
    """Forms of 8 bits."""

    E4M3, E5M2, HYBRID = "E4M3", "E5M2", "HYBRID"


class DelayedScaling(Recipe): ...


class Float8CurrentScaling(Recipe): ...


class Float8BlockScaling(Recipe): ...


class MXFP8BlockScaling(Recipe): ...


class NVFP4BlockScaling(Recipe): ...


class CustomRecipe(Recipe): ...
