from .arguments import NeoXArgs

__all__ = ["NeoXArgs"]
