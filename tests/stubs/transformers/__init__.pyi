# The package itself imports some 400 families of models for a type checker, a quarter of pyright's time.
from typing import Any

def __getattr__(name: str) -> Any: ...
