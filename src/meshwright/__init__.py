"""meshwright plans, runs and proves distributed training in PyTorch: change the hardware, not the training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.version import __version__

if TYPE_CHECKING:
    from meshwright.api import launch, setup

__all__ = ["__version__", "launch", "setup"]


def __getattr__(name: str) -> Any:
    # Lazy, so that `import meshwright` costs nothing and the command line stays free of torch until it trains.
    if name in ("launch", "setup"):
        from meshwright import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
