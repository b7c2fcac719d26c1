"""numba as its first compilation or first kept kernel leaves it: with all of its functions known.

For the process that others are forked from; it takes each half a second.
"""

from numba.core.registry import cpu_target

cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
