"""The version, where every room can read it: importing the package's front door would be importing its API."""

from typing import Final

__version__: Final = "0.1.0"
